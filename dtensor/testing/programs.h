// The same program, as a user of LibTorch would write it, on one rank and on DTensors.
//
//   check_program([](Trial& run) {
//     nn::Linear layer(6, 4);
//     run.distribute(*layer);                       // parameters lie in all sorts of ways,
//     const at::Tensor x = run.leaf(values({5, 6}));  // and so does data
//     layer(x).square().sum().backward();
//     run.result("x.grad", x.grad());
//     run.gradients(*layer);
//   });
//
// It runs once on plain tensors, and then on the meshes (2), (3) and (2, 2) with parameters that are
// replicated, cut by their first or their last dimension, or one so and the next otherwise (if it has
// any), and with data that is replicated or cut by its first or second dimension (if it has any).
// Every result has to be that of the first run. No operator may lack a rule. A failure names mesh, layouts and result.
//
// Linked with :programs_on_gpus in the place of :programs, ranks have a GPU of the fake each, where
// parameters and data lie.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "torch/nn/module.h"

namespace shardweave::testing {

// Doubles that differ from element to element and from seed to seed, between -1 and 1.
at::Tensor values(at::IntArrayRef sizes, int seed = 0);

// Along one mesh dimension. kMixed: one parameter kWhole, the next kFirst, the next kLast, ...
enum class WhereCut { kWhole, kFirst, kLast, kMixed };

class Trial {
 public:
  using Results = std::vector<std::pair<std::string, at::Tensor>>;
  // Without a mesh: on plain tensors. Without `wanted`: results are kept, not compared.
  Trial(MeshPtr mesh, std::vector<WhereCut> parameters, std::vector<WhereCut> data,
        const Results* wanted, double tolerance, at::DeviceType device = at::kCPU);

  // Null on plain tensors.
  const MeshPtr& mesh() const { return mesh_; }

  // Gives the parameters the numbers of values(), in double precision unless said otherwise, and
  // distributes the module.
  void distribute(torch::nn::Module& module, at::ScalarType dtype = at::kDouble);

  // An input as the data lies; a leaf that requires grad.
  at::Tensor data(const at::Tensor& plain);
  at::Tensor leaf(const at::Tensor& plain) { return data(plain).requires_grad_(); }
  // The n-th tensor of an own set of parameters.
  at::Tensor parameter(const at::Tensor& plain, int n);
  at::Tensor replicated(const at::Tensor& plain) const;

  // To be the same in every run.
  void result(const std::string& name, const at::Tensor& tensor);
  // finish_grad_sync(); then the gradient of each parameter, in its parameter's layout.
  void gradients(torch::nn::Module& module);
  void parameters(const torch::nn::Module& module);
  void buffers(const torch::nn::Module& module);

  // After the program: every wanted result has come.
  void finish() const;
  bool has_parameters() const { return has_parameters_; }
  bool has_data() const { return has_data_; }
  const Results& results() const { return results_; }

 private:
  Placements placements(const std::vector<WhereCut>& cuts, at::IntArrayRef sizes, int n,
                        int last) const;

  MeshPtr mesh_;
  std::vector<WhereCut> parameter_cuts_, data_cuts_;
  const Results* wanted_;
  double tolerance_;
  at::DeviceType device_;
  Results results_;
  bool has_parameters_ = false, has_data_ = false;
};

struct ProgramOptions {
  double tolerance = 1e-9;  // relative and absolute
  // Draws random numbers, which are those of a mesh: the first run is on a mesh of one rank.
  bool random = false;
  // Operators without a rule may be called.
  bool gathers = false;
};

void check_program(const std::function<void(Trial&)>& program, const ProgramOptions& options = {});

// Where the ranks of check_program() are: what one of two libraries says.
struct ProgramRanks {
  at::DeviceType device;
  void (*on_mesh)(const std::vector<MeshDim>& dims,
                  const std::function<void(const MeshPtr&)>& body);
};
ProgramRanks program_ranks();

}  // namespace shardweave::testing
