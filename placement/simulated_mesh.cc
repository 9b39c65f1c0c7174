#include "shardweave/placement/simulated_mesh.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace shardweave {
namespace {

std::vector<Dims> all_coordinates(const Dims& radices) {
  std::vector<Dims> result = {{}};
  for (int64_t radix : radices) {
    std::vector<Dims> longer;
    for (const Dims& prefix : result) {
      for (int64_t i = 0; i < radix; ++i) {
        longer.push_back(prefix);
        longer.back().push_back(i);
      }
    }
    result = std::move(longer);
  }
  return result;
}

int64_t linear(const Dims& shape, const Dims& index) {
  int64_t result = 0;
  for (size_t d = 0; d < shape.size(); ++d) result = result * shape[d] + index[d];
  return result;
}

Indices all_indices(int64_t n) {
  Indices result(n);
  std::iota(result.begin(), result.end(), 0);
  return result;
}

// torch.chunk, with empty chunks for the ranks that get none.
std::vector<Indices> naive_chunks(const Indices& indices, int64_t n) {
  std::vector<Indices> result(n);
  const auto step = static_cast<size_t>(std::ceil(static_cast<double>(indices.size()) / n));
  for (size_t i = 0; i < indices.size(); ++i) result[i / step].push_back(indices[i]);
  return result;
}

double combine(ReduceOp op, double a, double b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return a + b;
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kProduct:
      return a * b;
  }
  return NAN;
}

// `n` random numbers that `op` reduces to `value`, exactly.
std::vector<double> split(double value, ReduceOp op, int64_t n, std::mt19937_64& random) {
  std::uniform_int_distribution<int> small(0, 9);
  std::vector<double> parts(n);
  for (double& part : parts) {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        part = small(random) - 5;
        break;
      case ReduceOp::kMin:
        part = value + small(random);
        break;
      case ReduceOp::kMax:
        part = value - small(random);
        break;
      case ReduceOp::kProduct:
        part = small(random) < 5 ? -2 : 0.5;
        break;
    }
  }
  double& last = parts[small(random) % n];
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      last +=
          (op == ReduceOp::kAvg ? n : 1) * value - std::accumulate(parts.begin(), parts.end(), 0.0);
      break;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      last = value;
      break;
    case ReduceOp::kProduct:
      last = 1;
      last = value / std::accumulate(parts.begin(), parts.end(), 1.0, std::multiplies<>());
      break;
  }
  return parts;
}

std::string show(const Dims& dims) {
  return absl::StrCat("[", absl::StrJoin(dims, ", "), "]");
}

}  // namespace

Indices naive_cut(const Indices& indices, const Placement& placement, int64_t num_ranks,
                  int64_t index) {
  switch (placement.kind()) {
    case PlacementKind::kReplicate:
    case PlacementKind::kPartial:
      return indices;
    case PlacementKind::kShard:
      return naive_chunks(indices, num_ranks)[index];
    case PlacementKind::kStridedShard: {
      Indices result;
      for (const Indices& chunk : naive_chunks(indices, placement.split_factor())) {
        const Indices piece = naive_chunks(chunk, num_ranks)[index];
        result.insert(result.end(), piece.begin(), piece.end());
      }
      return result;
    }
    case PlacementKind::kRaggedShard: {
      int64_t begin = 0;
      for (int64_t i = 0; i < index; ++i) begin += placement.sizes()[i];
      return Indices(indices.begin() + begin, indices.begin() + begin + placement.sizes()[index]);
    }
  }
  return {};
}

std::vector<Indices> naive_indices(const Layout& layout, const Dims& mesh_shape,
                                   const Dims& coordinate, const Dims& shape) {
  std::vector<Indices> result;
  for (int64_t size : shape) result.push_back(all_indices(size));
  for (int m : layout.order()) {
    if (!layout[m].is_shard()) continue;
    Indices& held = result[layout[m].dim()];
    held = naive_cut(held, layout[m], mesh_shape[m], coordinate[m]);
  }
  return result;
}

SimulatedMesh::SimulatedMesh(Dims mesh_shape, Dims shape)
    : mesh_shape_(std::move(mesh_shape)),
      shape_(std::move(shape)),
      coordinates_(all_coordinates(mesh_shape_)) {}

SimulatedMesh::Tensor SimulatedMesh::part_of_global(const Layout& layout, int rank) const {
  Tensor result = global_;
  const auto indices = naive_indices(layout, mesh_shape_, coordinates_[rank], shape_);
  for (size_t d = 0; d < shape_.size(); ++d) {
    result = select(result, static_cast<int>(d), indices[d]);
  }
  return result;
}

void SimulatedMesh::distribute(const Layout& layout, uint64_t seed) {
  global_.shape = shape_;
  global_.data.resize(
      std::accumulate(shape_.begin(), shape_.end(), int64_t{1}, std::multiplies<>()));
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<int> value(-99, 99);
  for (double& x : global_.data) x = value(random);

  // parts[rank]: the whole tensor, as that rank contributes to it. Outer mesh dimensions split
  // first, for the last one is reduced first; ranks that differ in nothing Partial get the same
  // parts.
  Tensors parts(num_ranks(), global_);
  for (int m = 0; m < layout.mesh_ndim(); ++m) {
    if (!layout[m].is_partial()) continue;
    for (size_t i = 0; i < global_.data.size(); ++i) {
      const Tensors whole = parts;
      for (int rank = 0; rank < num_ranks(); ++rank) {
        uint64_t family = seed * 1000003 + i * 31 + m;  // of the ranks that split one number
        for (int outer = 0; outer < m; ++outer) {
          if (layout[outer].is_partial()) family = family * 7 + coordinates_[rank][outer];
        }
        std::mt19937_64 own(family);
        parts[rank].data[i] = split(whole[rank].data[i], layout[m].reduce_op(), mesh_shape_[m],
                                    own)[coordinates_[rank][m]];
      }
    }
  }
  local_.clear();
  for (int rank = 0; rank < num_ranks(); ++rank) {
    Tensor local = parts[rank];
    const auto indices = naive_indices(layout, mesh_shape_, coordinates_[rank], shape_);
    for (size_t d = 0; d < shape_.size(); ++d) {
      local = select(local, static_cast<int>(d), indices[d]);
    }
    local_.push_back(std::move(local));
  }
}

bool SimulatedMesh::same_elements(const SimulatedMesh& other) const {
  return std::equal(local_.begin(), local_.end(), other.local_.begin(), other.local_.end(),
                    [](const Tensor& a, const Tensor& b) { return a.data == b.data; });
}

std::string SimulatedMesh::first_difference(const Layout& layout) const {
  SimulatedMesh reduced = *this;
  Placements placements = layout.placements();
  for (int m = layout.mesh_ndim() - 1; m >= 0; --m) {
    if (!layout[m].is_partial()) continue;
    RedistributeStep step;
    step.kind = StepKind::kAllReduce;
    step.mesh_dims = {m};
    step.before = *Layout::create(placements, layout.order());
    reduced.run(step);
    placements[m] = Replicate();
  }
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const Tensor want = part_of_global(layout, rank);
    const Tensor& have = reduced.local_[rank];
    if (have.shape != want.shape) {
      return absl::StrCat("rank ", rank, " has shape ", show(have.shape), ", wanted ",
                          show(want.shape));
    }
    for (size_t i = 0; i < want.data.size(); ++i) {
      if (!(std::abs(have.data[i] - want.data[i]) < 1e-6)) {
        return absl::StrCat("rank ", rank, " has ", have.data[i], " as element ", i, ", wanted ",
                            want.data[i]);
      }
    }
  }
  return "";
}

// The ranks that differ from `rank` on `mesh_dims` only, in the order of their coordinates there.
std::vector<int> SimulatedMesh::group(int rank, const std::vector<int>& mesh_dims) const {
  std::vector<int> result;
  for (int other = 0; other < num_ranks(); ++other) {
    bool same = true;
    for (int m = 0; m < static_cast<int>(mesh_shape_.size()); ++m) {
      if (std::find(mesh_dims.begin(), mesh_dims.end(), m) != mesh_dims.end()) continue;
      if (coordinates_[other][m] != coordinates_[rank][m]) same = false;
    }
    if (same) result.push_back(other);
  }
  return result;
}

SimulatedMesh::Tensor SimulatedMesh::select(const Tensor& tensor, int dim, const Indices& indices) {
  Tensor result;
  result.shape = tensor.shape;
  result.shape[dim] = static_cast<int64_t>(indices.size());
  for (Dims at : all_coordinates(result.shape)) {
    at[dim] = indices[at[dim]];
    result.data.push_back(tensor.data[linear(tensor.shape, at)]);
  }
  return result;
}

void SimulatedMesh::place(Tensor& tensor, int dim, const Indices& indices, const Tensor& piece) {
  size_t i = 0;
  for (Dims at : all_coordinates(piece.shape)) {
    at[dim] = indices[at[dim]];
    tensor.data[linear(tensor.shape, at)] = piece.data[i++];
  }
}

SimulatedMesh::Tensor SimulatedMesh::reduce(ReduceOp op, const std::vector<int>& ranks) const {
  Tensor result = local_[ranks[0]];
  for (size_t i = 0; i < result.data.size(); ++i) {
    for (size_t r = 1; r < ranks.size(); ++r) {
      result.data[i] = combine(op, result.data[i], local_[ranks[r]].data[i]);
    }
    if (op == ReduceOp::kAvg) result.data[i] /= static_cast<double>(ranks.size());
  }
  return result;
}

int64_t SimulatedMesh::run(const RedistributeStep& step) {
  Tensors out(num_ranks());
  int64_t sent = 0;
  switch (step.kind) {
    case StepKind::kAllGather:
      sent = all_gather(step, out);
      break;
    case StepKind::kSlice:
      sent = slice(step, out);
      break;
    case StepKind::kAllReduce:
      sent = all_reduce(step, out);
      break;
    case StepKind::kReduceScatter:
      sent = reduce_scatter(step, out);
      break;
    case StepKind::kAllToAll:
      sent = all_to_all(step, out);
      break;
    case StepKind::kToPartial:
      sent = to_partial(step, out);
      break;
    case StepKind::kExchange:
      sent = exchange(step, out);
      break;
  }
  local_ = std::move(out);
  return sent;
}

int64_t SimulatedMesh::all_gather(const RedistributeStep& step, Tensors& out) const {
  const Placement& p = step.before[step.mesh_dims[0]];
  int64_t most = 0;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const std::vector<int> peers = group(rank, step.mesh_dims);
    int64_t total = 0;
    int64_t least = local_[rank].size();
    Tensor& result = out[rank];
    result.shape = local_[rank].shape;
    result.shape[p.dim()] = 0;
    for (int peer : peers) {
      total += local_[peer].size();
      least = std::min(least, local_[peer].size());
      result.shape[p.dim()] += local_[peer].shape[p.dim()];
    }
    result.data.resize(total, NAN);
    const Indices whole = all_indices(result.shape[p.dim()]);
    for (size_t c = 0; c < peers.size(); ++c) {
      place(result, p.dim(), naive_cut(whole, p, peers.size(), c), local_[peers[c]]);
    }
    most = std::max(most, total - least);
  }
  return most;
}

int64_t SimulatedMesh::slice(const RedistributeStep& step, Tensors& out) const {
  const int m = step.mesh_dims[0];
  const Placement& p = step.after[m];
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const Indices whole = all_indices(local_[rank].shape[p.dim()]);
    out[rank] =
        select(local_[rank], p.dim(), naive_cut(whole, p, mesh_shape_[m], coordinates_[rank][m]));
  }
  return 0;
}

int64_t SimulatedMesh::all_reduce(const RedistributeStep& step, Tensors& out) const {
  int64_t most = 0;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const std::vector<int> peers = group(rank, step.mesh_dims);
    out[rank] = reduce(step.before[step.mesh_dims[0]].reduce_op(), peers);
    const int64_t part = out[rank].size() / static_cast<int64_t>(peers.size());
    most = std::max(most, 2 * (out[rank].size() - part));
  }
  return most;
}

int64_t SimulatedMesh::reduce_scatter(const RedistributeStep& step, Tensors& out) const {
  int64_t most = 0;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    out[rank] = reduce(step.before[step.mesh_dims[0]].reduce_op(), group(rank, step.mesh_dims));
    const int64_t has = out[rank].size();
    for (int m : step.after.order()) {
      if (std::find(step.mesh_dims.begin(), step.mesh_dims.end(), m) == step.mesh_dims.end()) {
        continue;
      }
      const Placement& p = step.after[m];
      const Indices indices = all_indices(out[rank].shape[p.dim()]);
      out[rank] =
          select(out[rank], p.dim(), naive_cut(indices, p, mesh_shape_[m], coordinates_[rank][m]));
    }
    most = std::max(most, has - out[rank].size());
  }
  return most;
}

int64_t SimulatedMesh::all_to_all(const RedistributeStep& step, Tensors& out) const {
  const int m = step.mesh_dims[0];
  const Placement& from = step.before[m];
  const Placement& to = step.after[m];
  std::vector<int64_t> sent(num_ranks(), 0);
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const std::vector<int> peers = group(rank, step.mesh_dims);
    const Indices to_whole = all_indices(local_[rank].shape[to.dim()]);
    const Indices mine = naive_cut(to_whole, to, mesh_shape_[m], coordinates_[rank][m]);
    Tensor& result = out[rank];
    result.shape = local_[rank].shape;
    result.shape[to.dim()] = static_cast<int64_t>(mine.size());
    result.shape[from.dim()] = 0;
    for (int peer : peers) result.shape[from.dim()] += local_[peer].shape[from.dim()];
    result.data.resize(all_coordinates(result.shape).size(), NAN);
    const Indices from_whole = all_indices(result.shape[from.dim()]);
    for (size_t c = 0; c < peers.size(); ++c) {
      const Tensor piece = select(local_[peers[c]], to.dim(), mine);
      place(result, from.dim(), naive_cut(from_whole, from, mesh_shape_[m], c), piece);
      if (peers[c] != rank) sent[peers[c]] += piece.size();
    }
  }
  return *std::max_element(sent.begin(), sent.end());
}

int64_t SimulatedMesh::to_partial(const RedistributeStep& step, Tensors& out) const {
  const int m = step.mesh_dims[0];
  out = local_;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    if (coordinates_[rank][m] == 0) continue;
    const ReduceOp op = step.after[m].reduce_op();
    if (op == ReduceOp::kSum) std::fill(out[rank].data.begin(), out[rank].data.end(), 0);
    if (op == ReduceOp::kProduct) std::fill(out[rank].data.begin(), out[rank].data.end(), 1);
  }
  return 0;
}

// Through messages, so that sender and receiver must agree on their order.
int64_t SimulatedMesh::exchange(const RedistributeStep& step, Tensors& out) const {
  const int n = num_ranks();
  std::vector<std::vector<std::vector<double>>> messages(n, std::vector<std::vector<double>>(n));
  auto part = [&](int rank) {
    return exchange_part(step.before, step.after, step.mesh_dims, mesh_shape_, coordinates_[rank],
                         shape_);
  };
  auto shift = [](const ExchangeBlock& block, Dims at) {
    for (size_t d = 0; d < at.size(); ++d) at[d] += block.offset[d];
    return at;
  };
  int64_t most = 0;
  for (int rank = 0; rank < n; ++rank) {
    const std::vector<int> peers = group(rank, step.mesh_dims);
    const ExchangePart mine = part(rank);
    int64_t sent = 0;
    for (size_t c = 0; c < peers.size(); ++c) {
      std::vector<double>& message = messages[rank][peers[c]];
      for (const ExchangeBlock& block : mine.send[c]) {
        for (const Dims& at : all_coordinates(block.shape)) {
          message.push_back(local_[rank].data.at(linear(local_[rank].shape, shift(block, at))));
        }
      }
      if (peers[c] != rank) sent += static_cast<int64_t>(message.size());
    }
    most = std::max(most, sent);
  }
  for (int rank = 0; rank < n; ++rank) {
    const std::vector<int> peers = group(rank, step.mesh_dims);
    const ExchangePart mine = part(rank);
    Tensor& result = out[rank];
    for (const Indices& held : naive_indices(step.after, mesh_shape_, coordinates_[rank], shape_)) {
      result.shape.push_back(static_cast<int64_t>(held.size()));
    }
    result.data.resize(all_coordinates(result.shape).size(), NAN);
    for (size_t c = 0; c < peers.size(); ++c) {
      const std::vector<double>& message = messages[peers[c]][rank];
      size_t next = 0;
      for (const ExchangeBlock& block : mine.recv[c]) {
        for (const Dims& at : all_coordinates(block.shape)) {
          result.data.at(linear(result.shape, shift(block, at))) = message.at(next++);
        }
      }
      if (next != message.size()) result.data.assign(result.data.size(), NAN);
    }
  }
  return most;
}

}  // namespace shardweave
