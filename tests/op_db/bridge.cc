// What Python needs of Shardweave to run operators on DTensors: torch.ops.shardweave_test, for a
// process that is one rank. An at::Tensor from here is an ordinary tensor there.
//
//   torch.ops.load_library("bridge.so")
//   torch.ops.shardweave_test.join("/tmp/store", 0, 2, [2], 30.0)
//   x = torch.ops.shardweave_test.distribute(torch.randn(5, 3), "[S(0)]")
//   torch.ops.shardweave_test.full_tensor(torch.exp(x))
#include <memory>
#include <string>
#include <vector>

#include "ATen/TensorOperators.h"
#include "ATen/ops/full_like.h"
#include "ATen/ops/isfinite.h"
#include "ATen/ops/view_as_complex.h"
#include "ATen/ops/view_as_real.h"
#include "ATen/ops/where.h"
#include "absl/strings/str_cat.h"
#include "shardweave/comm/environment/join_world.h"
#include "shardweave/comm/store/file_store.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/random.h"
#include "torch/library.h"

namespace {

using namespace shardweave;

struct Rank {
  std::unique_ptr<World> world;
  MeshPtr mesh;
};
// The process is the rank.
Rank& self() {
  static Rank& rank = *new Rank;
  return rank;
}

void join(const std::string& store_path, int64_t rank, int64_t world_size, at::IntArrayRef mesh,
          double timeout) {
  RendezvousInfo info;
  info.rank = static_cast<int>(rank);
  info.world_size = static_cast<int>(world_size);
  info.meeting_point.file = store_path;
  std::vector<MeshDim> dims;
  for (size_t m = 0; m < mesh.size(); ++m) dims.push_back({absl::StrCat("m", m), mesh[m]});
  WorldOptions options;
  options.interface = "lo";
  options.timeout = absl::Seconds(timeout);
  self().world =
      value_or_throw(join_world(value_or_throw(open_file_store(store_path)), info, options));
  self().mesh = value_or_throw(init_device_mesh(*self().world, std::move(dims)));
  throw_if_error(self().mesh->connect());
}

// Summand `index` of `count` that add up to exactly `whole`, in any order that does not overflow:
// 2, -2, 2, ... times it, and what is missing. Zeros (which have a sign) and what is not finite or
// large are in the first summand.
at::Tensor summand(const at::Tensor& whole, int64_t index, int64_t count) {
  if (whole.is_complex()) {
    return at::view_as_complex(summand(at::view_as_real(whole.resolve_conj()), index, count));
  }
  const bool last = index + 1 == count;
  const double weight = last ? (count % 2 == 0 ? -1 : 1) : (index % 2 == 0 ? 2 : -2);
  const at::Tensor whole_in_first = at::isfinite(whole * 4).logical_not_().logical_or_(whole == 0);
  return at::where(whole_in_first, index == 0 ? whole : at::full_like(whole, -0.0), whole * weight);
}

at::Tensor distribute(const at::Tensor& whole, const std::string& layout) {
  const MeshPtr& mesh = self().mesh;
  const Placements placements = value_or_throw(parse_placements(layout));
  Placements cuts = placements;
  int64_t index = 0, count = 1;
  for (size_t m = 0; m < placements.size(); ++m) {
    if (!placements[m].is_partial()) continue;
    cuts[m] = Replicate();
    index = index * mesh->mesh().size(static_cast<int>(m)) + mesh->coordinate()[m];
    count *= mesh->mesh().size(static_cast<int>(m));
  }
  const at::Tensor cut =
      distribute_tensor(count == 1 ? whole.detach() : summand(whole.detach(), index, count), mesh,
                        cuts, {.source = std::nullopt});
  if (count == 1) return cut;
  return from_local(to_local(cut), mesh, placements, whole.sizes().vec()).detach();
}

// All ranks' numbers, in rank order. Throws if a rank calls something else, or does not come.
std::vector<int64_t> gather_numbers(at::IntArrayRef mine) {
  std::vector<int64_t> all(mine.size() * self().world->size());
  throw_if_error(self()
                     .world->comm()
                     ->all_gather(ConstBuffer(Buffer::of(const_cast<int64_t*>(mine.data()),
                                                         static_cast<int64_t>(mine.size()))),
                                  Buffer::of(all.data(), static_cast<int64_t>(all.size())))
                     .wait());
  return all;
}

bool is_sharded(const at::Tensor& tensor) {
  return is_dtensor(tensor);
}
at::Tensor gathered(const at::Tensor& tensor) {
  return full_tensor(tensor);
}
std::string description(const at::Tensor& tensor) {
  return describe(tensor);
}
// Calls of operators without a rule so far.
int64_t gathered_operators() {
  return dispatch_counters(self().mesh).gathered_operators;
}
void seed(int64_t value) {
  manual_seed(self().mesh, static_cast<uint64_t>(value));
}

}  // namespace

TORCH_LIBRARY(shardweave_test, m) {
  m.def("join(str store, int rank, int world_size, int[] mesh, float timeout) -> ()", &join);
  m.def("distribute(Tensor whole, str layout) -> Tensor", &distribute);
  m.def("full_tensor(Tensor t) -> Tensor", &gathered);
  m.def("is_dtensor(Tensor t) -> bool", &is_sharded);
  m.def("describe(Tensor t) -> str", &description);
  m.def("gather_numbers(int[] mine) -> int[]", &gather_numbers);
  m.def("gathered_operators() -> int", &gathered_operators);
  m.def("manual_seed(int value) -> ()", &seed);
}
