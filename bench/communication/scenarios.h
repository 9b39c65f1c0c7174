// A scenario is a model on a mesh with its parameters and its batch laid out by a plan, and what a
// training step of it has to communicate: the theory, written as formulas of the model's sizes.
//
//   for (const Scenario& s : scenarios(Sizes())) {
//     s.name;                              // "llama, tensor parallel, vocabulary sharded"
//     s.theory.forward;                    // {.kinds = {{"all_reduce", 8}}, .bytes = 789488}
//   }
//
// Pure functions of values; nothing here has seen a measurement. Of the library they use what a plan
// means for each parameter, which is an input, and nothing that the library computes or assumes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "models.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"

namespace communication_bench {

// What a rank sends, as CommEvent::bytes counts it.
struct Traffic {
  std::map<std::string, int64_t> kinds;  // how many collectives: {"all_reduce", 8}
  int64_t bytes = 0;

  int64_t collectives() const;
  std::string to_string() const;  // "8 all_reduce, 789488 bytes"

  Traffic& operator+=(const Traffic& other);
  friend Traffic operator+(Traffic a, const Traffic& b) { return a += b; }
  friend Traffic operator*(int64_t times, const Traffic& t);
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

// Of one collective among `k` ranks for a float tensor of `elements`, global along these ranks.
Traffic all_reduce(int64_t k, int64_t elements);      // 2 (k - 1) / k of the tensor
Traffic all_gather(int64_t k, int64_t elements);      // (k - 1) / k of the whole
Traffic reduce_scatter(int64_t k, int64_t elements);  // likewise
Traffic all_to_all(int64_t k, int64_t elements);      // (k - 1) / k of a rank's 1 / k of the whole

// Of the phases of a training step.
struct Phases {
  Traffic forward;        // with loss.item()
  Traffic backward;       //
  Traffic gradient_sync;  // finish_grad_sync()

  Traffic step() const { return forward + backward + gradient_sync; }
  friend bool operator==(const Phases&, const Phases&) = default;
};

struct Scenario {
  std::string name;
  ModelKind model = ModelKind::kGpt;
  Sizes sizes;
  std::vector<shardweave::MeshDim> mesh;
  shardweave::ParameterPlan plan;
  shardweave::NamedPlacements input, target;
  Phases theory;
  // What backward may send beyond the theory, all of it or nothing: that of log_softmax, a function of
  // its own in LibTorch, does not know that each row of its gradient comes from one target, and sums
  // it over the vocabulary (dtensor/rules/softmax.cc).
  Traffic row_sums;
};

// "(4)", "(2, 2)"
std::string mesh_name(const Scenario& scenario);

std::vector<Scenario> scenarios(const Sizes& sizes);

// Combinations of models, plans and meshes that are not among them.
struct Skipped {
  std::string name;
  std::string why;
};
std::vector<Skipped> skipped();

}  // namespace communication_bench
