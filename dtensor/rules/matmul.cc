// Products of matrices and vectors. matmul, linear, outer, einsum, tensordot and their like are
// made of these by LibTorch before they get here.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

enum class Addend { kLinear, kInsideActivation };

// Without rows, or without columns, LibTorch's kernel forgets to broadcast an addend of one element.
void addmv_of_part(const c10::OperatorHandle& op, c10::Stack& stack, const LocalCall& call) {
  BoxedCall boxed(op, stack);
  const Dims& sizes = call.outputs[0]->local_sizes;
  const c10::IntArrayRef result(sizes.data(), sizes.size());
  const at::Tensor self = boxed.tensor("self");
  if (self.sizes() != result) boxed["self"] = self.expand(result);
  boxed.run();
}

// beta * self + alpha * einsum(others), where self is broadcast to the result. Where the product is
// a Partial sum, self has to be one, so that it is added once.
ShardedRule add_einsum(std::string_view equation, Addend kind = Addend::kLinear) {
  const std::vector<std::string> sides = absl::StrSplit(std::string(equation), "->");
  const std::vector<std::string> operands = absl::StrSplit(sides[0], ',');
  const std::string result = sides[1];
  std::string letters;
  for (char c : sides[0]) {
    if (c != ',' && letters.find(c) == std::string::npos) letters += c;
  }
  return sharded([=](const OpCall& call, Strategies& out) {
           const auto cut = [](const std::string& operand, char letter) {
             const size_t dim = operand.find(letter);
             return dim == std::string::npos ? Replicate() : Shard(static_cast<int>(dim));
           };
           for (char letter : letters) {
             const Placement of_result = cut(result, letter);
             const bool summed = of_result.is_replicate();
             if (summed && kind == Addend::kInsideActivation) continue;
             const Placement output = summed ? Partial() : of_result;
             std::vector<Placement> inputs = {
                 summed ? Partial()
                        : broadcast_cut(call.input("self"), call.output().sizes, output.dim())};
             for (const std::string& operand : operands) inputs.push_back(cut(operand, letter));
             out.add(std::move(inputs), {output});
           }
           if (kind == Addend::kInsideActivation) return;
           for (ReduceOp op : kLinearOps) {
             for (size_t i = 0; i < operands.size(); ++i) {
               std::vector<Placement> inputs(1 + operands.size(), Replicate());
               inputs[0] = Partial(op);
               inputs[1 + i] = Partial(op);
               out.add(std::move(inputs), {Partial(op)});
             }
           }
         })
      .flops([operands](const OpCall& call) { return einsum_flops(call, operands, 1); });
}

// _trilinear, which bilinear layers are made of: the product of three tensors that get new
// dimensions (expand1, ...) until they broadcast, summed over some (sumdim).
void trilinear(const OpCall& call, Strategies& out) {
  const std::vector<int64_t> summed = call.arg("sumdim").toIntVector();
  const std::vector<int64_t> expanded[] = {call.arg("expand1").toIntVector(),
                                           call.arg("expand2").toIntVector(),
                                           call.arg("expand3").toIntVector()};
  const auto contains = [](const std::vector<int64_t>& dims, int64_t d) {
    return std::find(dims.begin(), dims.end(), d) != dims.end();
  };
  const auto before = [](const std::vector<int64_t>& dims, int64_t d) {
    return static_cast<int>(std::count_if(dims.begin(), dims.end(), [&](auto e) { return e < d; }));
  };
  const int ndim = call.input(0).ndim() + static_cast<int>(expanded[0].size());
  for (int d = 0; d < ndim; ++d) {
    int64_t whole = 1;
    for (int i = 0; i < 3; ++i) {
      if (contains(expanded[i], d)) continue;
      whole = std::max(whole, call.input(i).sizes[d - before(expanded[i], d)]);
    }
    std::vector<Placement> inputs;
    for (int i = 0; i < 3; ++i) {
      const int own = d - before(expanded[i], d);
      const bool broadcast = contains(expanded[i], d) || call.input(i).sizes[own] != whole;
      inputs.push_back(broadcast ? Replicate() : Shard(own));
    }
    out.add(std::move(inputs), {contains(summed, d) ? Partial() : Shard(d - before(summed, d))},
            zeros_if_empty);
  }
  out.add_linear({{"i1"}, {"i2"}, {"i3"}});
}

void scalar_shape(OpCall& call) {
  call.outputs.push_back(contiguous_info({}, call.input("self").dtype));
}

// addbmm has no kernel for meta tensors.
void addbmm_shape(OpCall& call) {
  const TensorInfo& a = call.input("batch1");
  const TensorInfo& b = call.input("batch2");
  const bool fits =
      a.ndim() == 3 && b.ndim() == 3 && a.sizes[0] == b.sizes[0] && a.sizes[2] == b.sizes[1];
  if (!fits) {
    throw Error(absl::InvalidArgumentError(absl::StrCat(
        "addbmm: batch1 [", absl::StrJoin(a.sizes, ", "), "] and batch2 [",
        absl::StrJoin(b.sizes, ", "), "] are not two batches of matrices that multiply")));
  }
  call.outputs.push_back(contiguous_info({a.sizes[1], b.sizes[2]}, call.input("self").dtype));
}

bool dtypes_differ(const Arguments& args) {
  std::optional<at::ScalarType> dtype;
  for (const c10::IValue& arg : args.values()) {
    if (!arg.isTensor()) continue;
    if (dtype.value_or(arg.toTensor().scalar_type()) != arg.toTensor().scalar_type()) return true;
    dtype = arg.toTensor().scalar_type();
  }
  return false;
}

}  // namespace

void add_matmul_rules(RuleTable& table) {
  const auto add = [&](std::string_view name, ShardedRule rule) {
    table.add(name, std::move(rule).refuses(dtypes_differ));
  };
  add("aten::mm", einsum("mk,kn->mn"));
  add("aten::bmm", einsum("bmk,bkn->bmn"));
  add("aten::mv", einsum("mk,k->m"));
  add("aten::dot", einsum("k,k->").shapes(scalar_shape));
  add("aten::vdot", einsum("k,k->").shapes(scalar_shape));
  add("aten::addmm", add_einsum("mk,kn->mn"));
  add("aten::_addmm_activation", add_einsum("mk,kn->mn", Addend::kInsideActivation));
  add("aten::addbmm", add_einsum("bmk,bkn->mn").shapes(addbmm_shape));
  add("aten::baddbmm", add_einsum("bmk,bkn->bmn"));
  add("aten::addmv", add_einsum("mk,k->m").runs(addmv_of_part));
  table.add("aten::addr", add_einsum("m,n->mn"));  // promotes
  table.add("aten::_trilinear", sharded(trilinear));
}

}  // namespace shardweave::dtensor_internal
