// Why an operator on DTensors moves what it moves: the strategies that its sharding rule offers
// along each mesh dimension, what each would cost, which was taken, and the collectives that
// follow.
//
//   std::cout << explain("aten::mm", {x, w}).to_string();  // nothing runs, nothing is sent
//   for (const Explanation& e : explain(mesh, [&] { at::linear(x, w, b); })) {
//     std::cout << e.to_string();                          // of each operator that has run
//   }
//
//   aten::mm on DeviceMesh(tp=4)
//   along tp (4 ranks):
//         seconds      move   compute      owed  bytes  self    mat2    result  gives up
//     *  4.11e-06         0  9.93e-07  3.11e-06      0  S(1)    S(0)    P(sum)
//        1.42e-05  1.08e-05   8.4e-07  2.53e-06   3072  S(0)    R       S(0)    data's place
//        1.45e-05  1.17e-05  2.74e-06         0   7680  R       R       R       data
//        ...
//   tensor  type           layout
//   self    Float[64, 32]  [S(1)]
//   mat2    Float[32, 16]  [S(0)]
//   result  Float[64, 16]  [P(sum)]
//
// Seconds are by the mesh's cost model (cost_model.h). The option that is taken comes first, then
// those that would have been taken without it: what an option gives up weighs more than its seconds.
// A column more, "not possible because", where an option is not possible; and one for each further
// argument and result.
//
// Large tensors need not exist: shardweave::empty(sizes, mesh, placements, at::kMeta) makes
// DTensors without memory. Plain tensors count as replicated. Errors: as the operator itself would
// give them, thrown before anything is sent. Threads: as DTensors.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/ivalue.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/placement/layout.h"
#include "shardweave/placement/redistribute_plan.h"

namespace shardweave {

struct Explanation {
  struct Tensor {
    std::string name;  // of the argument: "self", "tensors[1]"; "result", "result[1]"
    at::ScalarType dtype = at::kFloat;
    std::vector<int64_t> shape;
    // An input as it is given, and as the operator needs it; a result as the operator leaves it,
    // and as it has to be (they differ only for a result that is written into a tensor that lies
    // differently).
    Layout before, after;
    RedistributePlan plan;  // from before to after
    friend bool operator==(const Tensor&, const Tensor&) = default;
  };
  // Placements along one mesh dimension that go together.
  struct Option {
    Placements inputs;   // one per input
    Placements outputs;  // one per result
    // By the cost model: to bring the inputs (and a written result) where they have to be, small
    // sums for local work included; for the operator itself on a rank's part; and for the reduction
    // that Partial results still need.
    double move = 0, compute = 0, owed = 0;
    double seconds() const { return move + compute + owed; }
    // Options that move or make whole what is cut come after all others: "data" (a batch becomes
    // whole), "data's place" (it is cut in another way), "weight" (a parameter); ", " between them.
    std::string gives_up;
    int64_t bytes = 0;     // that a rank sends to bring the inputs there, at most
    std::string obstacle;  // why it was not possible; "": it was
    friend bool operator==(const Option&, const Option&) = default;
  };
  // Mesh dimensions are decided one after the other, the outermost cut first.
  struct Dim {
    std::string name;
    int64_t num_ranks = 1;
    std::vector<Option> options;  // as the rule gives them, after Replicate for all
    size_t chosen = 0;            // what gives up least, then the cheapest; among equals the first
    // All options, the chosen one first, then as they would be chosen without those before them;
    // those that are not possible come last.
    std::vector<size_t> order;
    // Inputs whose cut no option takes as it is: "input S(0): ..., dimension 0 has 3 elements for 4
    // ranks, and some parts are empty".
    std::vector<std::string> not_offered;
    friend bool operator==(const Dim&, const Dim&) = default;
  };

  std::string op;               // "aten::add.Tensor"
  std::string mesh;             // "DeviceMesh(dp=2, tp=2)"
  bool has_rule = true;         // false: every input is gathered, and `dims` is empty
  bool gathered = false;        // so it is too where a rule says so (nonzero, unique, ...)
  std::vector<Dim> dims;        // empty too for what decides each element of lists (_foreach_add)
  std::vector<Tensor> inputs;   // None and plain scalars left out
  std::vector<Tensor> outputs;  // empty without a rule

  int64_t bytes() const;  // of all plans
  std::string to_string() const;
  // {"op", "mesh", "has_rule", "gathered", "bytes",
  //  "dims": [{"name", "ranks", "chosen", "not_offered",
  //            "options": [{"inputs", "outputs", "seconds", "move", "compute", "owed", "gives_up",
  //                         "bytes", "obstacle"}]}],
  //  "inputs": [{"name", "dtype", "shape", "before", "after",
  //              "steps": [{"kind", "mesh_dims", "before", "after", "bytes", "seconds"}]}],
  //  "outputs": [like inputs]}
  // "seconds" of an option is the sum of "move", "compute" and "owed".
  std::string to_json() const;
  friend bool operator==(const Explanation&, const Explanation&) = default;
};

// `op`: "aten::mm", or with an overload, "aten::add.Tensor". `args`: as in the operator's schema;
// those that are left out at the end take their defaults. At least one is a DTensor. An operator
// that is made of others (aten::linear) is FailedPrecondition: the other form explains those.
Explanation explain(std::string_view op, std::vector<c10::IValue> args);

// Runs `call`, and explains every operator on DTensors of `mesh` that runs in it, in order.
// Collective, if those operators are.
std::vector<Explanation> explain(const MeshPtr& mesh, const std::function<void()>& call);

}  // namespace shardweave
