#include "shardweave/dtensor/engine/distribute.h"

#include <algorithm>
#include <vector>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "c10/util/accumulate.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_work.h"
#include "shardweave/dtensor/observe/observer.h"

namespace shardweave::dtensor_internal {
namespace {

// What the rank at `coordinate` gets of `whole`.
at::Tensor part_at(const MeshContext& context, const Spec& spec, const at::Tensor& whole,
                   const Coordinate& coordinate) {
  at::Tensor part = whole;
  for (int d = 0; d < spec.ndim(); ++d) {
    part = select(part, d,
                  local_intervals(spec.layout, context.mesh().shape(), coordinate, spec.sizes, d));
  }
  return part;
}

// How one rank's tensor comes to the ranks of a mesh.
class FromSource {
 public:
  FromSource(MeshContext& context, const Spec& spec, int64_t source, const Cause& cause,
             uint64_t fingerprint)
      : context_(context), spec_(spec), cause_(cause), fingerprint_(fingerprint) {
    const DeviceMesh& mesh = context.mesh();
    source_.resize(mesh.ndim());
    for (int m = mesh.ndim() - 1; m >= 0; --m) {
      source_[m] = source % mesh.size(m);
      source /= mesh.size(m);
      if (mesh.size(m) == 1) continue;
      all_.insert(all_.begin(), m);
      auto& dims = spec.layout[m].is_shard() ? cutting_ : alike_;
      dims.insert(dims.begin(), m);
    }
  }

  at::Tensor part(const at::Tensor& whole) const {
    if (cutting_.empty()) return broadcast(whole, all_);
    // Ranks that are in none of the groups that a failure breaks hear of it, too.
    if (!alike_.empty()) meet();
    at::Tensor mine;
    if (has(alike_)) {
      mine = scatter(whole);
    } else {
      const Dims& sizes = spec_.local_sizes;
      mine = at::empty(c10::IntArrayRef(sizes.data(), sizes.size()), whole.options());
    }
    return alike_.empty() ? mine : broadcast(mine, alike_);
  }

 private:
  // This rank is where the source is along `dims`.
  bool has(const std::vector<int>& dims) const {
    for (int m : dims) {
      if (context_.coordinate()[m] != source_[m]) return false;
    }
    return true;
  }

  // The source's rank in the group along `dims`.
  int root(const std::vector<int>& dims) const {
    int64_t rank = 0;
    for (int m : dims) rank = rank * context_.mesh().size(m) + source_[m];
    return static_cast<int>(rank);
  }

  CallOptions options(c10::Device device = at::kCPU) const {
    return {.timeout = absl::ZeroDuration(),
            .tag = cause_.tag(),
            .fingerprint = fingerprint_,
            .stream = current_stream(device)};
  }

  void meet() const {
    const CollectiveSpan span(context_, cause_, [&] { return sending("barrier", all_, 0); });
    throw_if_error(context_.communicator(all_).barrier(options()).wait());
  }

  at::Tensor broadcast(const at::Tensor& part, const std::vector<int>& dims) const {
    if (dims.empty()) return part;
    Communicator& comm = context_.communicator(dims);
    const at::Tensor data = has(dims) ? part : at::empty(part.sizes(), part.options());
    const CollectiveSpan span(context_, cause_, [&]() -> Sending {
      return sending("broadcast", dims, static_cast<int64_t>(data.nbytes()));
    });
    const c10::Device device = data.device();
    throw_if_error(
        TensorWork(context_, comm.broadcast(comm_buffer(data), root(dims), options(device)), device)
            .wait());
    return data;
  }

  // From the source to the ranks that differ from it only along what cuts.
  at::Tensor scatter(const at::Tensor& whole) const {
    Communicator& comm = context_.communicator(cutting_);
    const bool is_source = comm.rank() == root(cutting_);
    std::vector<at::Tensor> pieces;
    at::Tensor parts = at::empty({0}, whole.options());
    if (is_source) {
      for (int r = 0; r < comm.size(); ++r) {
        pieces.push_back(part_at(context_, spec_, whole, coordinate_of(r)).reshape({-1}));
      }
      parts = at::cat(pieces);
    }
    const Dims& sizes = spec_.local_sizes;
    at::Tensor mine = at::empty(c10::IntArrayRef(sizes.data(), sizes.size()), whole.options());
    const CollectiveSpan span(context_, cause_, [&]() -> Sending {
      return sending(
          "scatter", cutting_,
          c10::multiply_integers(spec_.sizes) * static_cast<int64_t>(whole.element_size()));
    });
    const c10::Device device = mine.device();
    if (are_equal()) {  // only the source has a list of ranks
      throw_if_error(TensorWork(context_,
                                comm.scatter(comm_buffer(parts), comm_buffer(mine), root(cutting_),
                                             options(device)),
                                device)
                         .wait());
      return mine;
    }
    const int64_t numbers = whole.is_complex() ? 2 : 1;  // of an element, as they are sent
    std::vector<int64_t> to(comm.size()), from(comm.size());
    for (size_t r = 0; r < pieces.size(); ++r) to[r] = pieces[r].numel() * numbers;
    from[root(cutting_)] = mine.numel() * numbers;
    throw_if_error(TensorWork(context_,
                              comm.all_to_all_v(comm_buffer(parts), to, comm_buffer(mine), from,
                                                options(device)),
                              device)
                       .wait());
    return mine;
  }

  // All ranks get as much.
  bool are_equal() const {
    Dims sizes = spec_.sizes;
    return std::all_of(spec_.layout.order().begin(), spec_.layout.order().end(), [&](int m) {
      const Placement& p = spec_.layout[m];
      if (!p.is_shard()) return true;
      int64_t& size = sizes[p.dim()];
      const Dims parts = cut_sizes(p, size, context_.mesh().size(m));
      size = parts[0];
      return parts.size() == 1;
    });
  }

  // Of a rank in the group along what cuts.
  Coordinate coordinate_of(int64_t rank) const {
    Coordinate coordinate = source_;
    for (auto m = cutting_.rbegin(); m != cutting_.rend(); ++m) {
      coordinate[*m] = rank % context_.mesh().size(*m);
      rank /= context_.mesh().size(*m);
    }
    return coordinate;
  }

  Sending sending(std::string_view collective, absl::Span<const int> dims, int64_t bytes) const {
    const Layout whole{Placements(spec_.layout.mesh_ndim())};
    return {collective, dims, bytes, spec_.dtype, spec_.sizes, whole, spec_.layout};
  }

  MeshContext& context_;
  const Spec& spec_;
  const Cause& cause_;
  const uint64_t fingerprint_;
  Coordinate source_;
  std::vector<int> all_, cutting_, alike_;  // of more than one rank
};

}  // namespace

at::Tensor part_of_source(MeshContext& context, const Spec& spec, const at::Tensor& whole,
                          int64_t source, uint64_t fingerprint, const Cause& cause) {
  return FromSource(context, spec, source, cause, fingerprint).part(whole);
}

}  // namespace shardweave::dtensor_internal
