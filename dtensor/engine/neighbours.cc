// Units that stay divided among a few neighbours between forward and backward.

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/dtensor/engine/capture.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/tensor_work.h"

namespace shardweave::dtensor_internal {
namespace {

// Any element may be the first of a part: nobody but the gather looks at it.
int64_t begin_of_part(int64_t numel, int64_t place, int64_t ranks) {
  return numel / ranks * place + numel % ranks * place / ranks;
}

}  // namespace

Communicator& FsdpState::neighbours(int mesh_dim, int64_t ranks) {
  std::shared_ptr<Communicator>& its = neighbours_[{mesh_dim, ranks}];
  if (its == nullptr) {
    Communicator& all = context_.communicator(mesh_dim);
    std::vector<int64_t> members(static_cast<size_t>(ranks));
    std::iota(members.begin(), members.end(), all.rank() / ranks * ranks);
    its = value_or_throw(all.subgroup(members, absl::StrCat(all.name(), " in groups of ", ranks)));
  }
  if (context_.captures.under_way != nullptr) context_.captures.under_way->uses(*its);
  return *its;
}

void FsdpUnit::keep_part() {
  const c10::InferenceMode normal(false);
  const c10::AutoGradMode no_grad(false);
  drop_part();
  const Communicator& group = state_->neighbours(mesh_dim(), options_.reshard_ranks);
  const int64_t begin = begin_of_part(flat_.numel(), group.rank(), group.size());
  const int64_t end = begin_of_part(flat_.numel(), group.rank() + 1, group.size());
  part_ = flat_.narrow(0, begin, end - begin).clone();
  part_version_ = gathered_version_;
  FsdpCounters& counters = state_->counters;
  counters.gathered_bytes += static_cast<int64_t>(part_.nbytes());
  counters.peak_gathered_bytes = std::max(counters.peak_gathered_bytes, counters.gathered_bytes);
}

void FsdpUnit::drop_part() {
  if (!part_.defined()) return;
  state_->counters.gathered_bytes -= static_cast<int64_t>(part_.nbytes());
  part_.reset();
}

CollectiveUnderWay FsdpUnit::gather_from_neighbours() {
  Communicator& group = state_->neighbours(mesh_dim(), options_.reshard_ranks);
  const int64_t width = flat_.is_complex() ? 2 : 1, numel = flat_.numel();
  std::vector<int64_t> counts;
  for (int r = 0; r < group.size(); ++r) {
    counts.push_back(width * (begin_of_part(numel, r + 1, group.size()) -
                              begin_of_part(numel, r, group.size())));
  }
  const int dim = mesh_dim();
  CollectiveSpan span(*context_, cause(), [&]() -> Sending {
    std::vector<std::string> names;
    for (size_t i = 0; i < parameters_.size(); ++i) names.push_back(parameter_name(i));
    return {"all_gather",
            absl::MakeConstSpan(&dim, 1),
            (numel - numel / group.size()) * static_cast<int64_t>(flat_.element_size()),
            flat_.scalar_type(),
            absl::MakeConstSpan(&numel, 1),
            Layout(),
            Layout(),
            std::move(names)};
  });
  const About about(*context_, provenance());
  keep_for_stream(part_);
  Work work = group.all_gather_v(comm_buffer(part_), comm_buffer(flat_), counts,
                                 collective_options(*context_, flat_.device(), cause().tag()));
  return {TensorWork(*context_, std::move(work), flat_.device()), std::move(span)};
}

}  // namespace shardweave::dtensor_internal
