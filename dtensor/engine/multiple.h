// Multiples of a sum that are sums themselves, and what they have in common with it.
//
//   n = -g      [P] ─ a Partial goes through as it is
//   n * a       needs it in parts: g is reduced, for all of its multiples, and remembered with g
//               (remembered.h); n is remembered as the negative of that
//   g / b       finds it
//
// That is the gradient of q / q.norm(), and of whatever else is divided. In half precision only -g is
// one: g / 2 may be there so that the sum does not overflow.
//
// A multiple holds the part of the sum that it is of, counted as what is remembered is, and what its
// sum is remembered as, until it has been brought somewhere itself, or is gone (a gradient that
// autograd keeps is a copy). What is written, the sum or the multiple, ends it. Ranks
// decide by specs, places, writes and versions, as for what is remembered: if one reduced the sum
// where another reduces the multiple, nobody would notice.
//
// Internal to dtensor/.
#pragma once

#include <memory>
#include <optional>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/ivalue.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "shardweave/dtensor/engine/cache.h"
#include "shardweave/dtensor/engine/tensor_impl.h"

namespace shardweave::dtensor_internal {

// A part of a tensor, as it is as long as nobody has written it: neither the tensor, its views and
// their copies, nor the part itself.
struct UnwrittenPart {
  Place place;
  at::Tensor local;
  int64_t writes;  // to the family
  uint32_t version;

  explicit UnwrittenPart(const DTensorMeta& meta)
      : place(meta.place),
        local(meta.local()),
        writes(meta.family->writes),
        version(local._version()) {}
  bool is_current(const ViewFamily& family) const {
    return family.writes == writes && local._version() == version;
  }
};

struct Multiple {
  // x -> op(x), or op(x, number).
  struct Factor {
    c10::OperatorHandle op;
    c10::IValue number;
  };
  // Of a multiple of a multiple those of both: it is one of the first sum.
  using Factors = absl::InlinedVector<Factor, 1>;

  std::shared_ptr<ViewFamily> family;  // of the sum
  SpecRef spec;                        // of both
  UnwrittenPart sum, own;
  Factors factors;
  uint64_t generation;  // of the mesh (mesh_context.h)
  CountedBytes counted;

  at::Tensor of(at::Tensor of_sum) const;
};

// Whether the operator's result is a multiple of its first argument, with one layout.
bool makes_multiple(const OpCall& call, const CacheEntry& entry);

// `result` is op(sum), or op(sum, number).
void note_multiple(const DTensorMeta& sum, DTensorMeta& result, Multiple::Factor factor);

// Of a tensor that lies as the multiple did when it was made; null: it is none any more.
std::shared_ptr<const Multiple> multiple_of(const DTensorMeta& meta);

// The part of a multiple in `target`: the sum's is brought there by `bring`, for all of its multiples,
// and both are remembered. The tensor stops being one of its sum's.
at::Tensor bring_by_sum(const DTensorMeta& meta, std::shared_ptr<const Multiple> multiple,
                        const SpecRef& target,
                        absl::FunctionRef<at::Tensor(const at::Tensor&)> bring);

// Where the sum has been brought, the latest, as a tensor may be remembered itself (remembered.h);
// null: nowhere, or it is no multiple. And its part there, if that is one.
const SpecRef* spec_of_sum(const DTensorMeta& meta, bool for_view);
std::optional<at::Tensor> part_of_sum(const DTensorMeta& meta, const Layout& layout);

}  // namespace shardweave::dtensor_internal
