// Muon (Jordan et al., 2024; torch.optim.Muon's formulas) on parts of matrices.
//
// Momentum is each rank's own affair. Its iteration needs the whole matrix: of all matrices that
// are cut over the same ranks the parts go to the matrices' owners in one all-to-all, and those of
// the results come back in another. A matrix that is whole on a rank stays there.
#include "shardweave/modules/optim/muon.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "ATen/ops/addmm.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/mm.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/observe/observer.h"
#include "shardweave/modules/optim/update.h"

namespace shardweave::optim_internal {
namespace {

using namespace dtensor_internal;

const MuonOptions& options_of(const Update& update) {
  return std::get<MuonOptions>(*update.options);
}

// What is to be made orthogonal: the momentum with this gradient in it, or what Nesterov takes for it.
at::Tensor direction(const Update& update) {
  const MuonOptions& o = options_of(update);
  update.first->lerp_(update.grad, 1 - o.momentum);
  return o.nesterov ? update.grad.lerp(*update.first, o.momentum) : *update.first;
}

void apply(const Update& update, const at::Tensor& orthogonal) {
  const MuonOptions& o = options_of(update);
  const auto rows = static_cast<double>(update.sizes()[0]);
  const auto columns = static_cast<double>(update.sizes()[1]);
  const double scale = o.lr_scale == MuonLrScale::kOriginal
                           ? std::sqrt(std::max(1.0, rows / columns))
                           : 0.2 * std::sqrt(std::max(rows, columns));
  update.part.mul_(1 - o.lr * o.weight_decay);
  update.part.add_(orthogonal, -o.lr * scale);
}

// Matrices that are cut over the same ranks, on their way to their owners and back.
class Exchange {
 public:
  explicit Exchange(const Update& first)
      : context_(first.context()),
        mesh_dims_(first.cutting),
        dtype_(options_of(first).ns_dtype),
        device_(first.part.device()) {}

  bool takes(const Update& update) const {
    return update.context() == context_ && update.cutting == mesh_dims_ &&
           options_of(update).ns_dtype == dtype_ && update.part.device() == device_;
  }
  void add(Update& update) { updates_.push_back(&update); }

  void run(const Cause& cause) {
    plan();
    const at::TensorOptions options = at::TensorOptions(dtype_).device(device_);
    const std::vector<int64_t> mine = counts(Side::kMine), owned = counts(Side::kOwned);
    const auto sum = [](const std::vector<int64_t>& n) {
      return std::accumulate(n.begin(), n.end(), int64_t{0});
    };
    at::Tensor parts = at::empty({sum(mine)}, options);
    at::Tensor whole = at::empty({sum(owned)}, options);
    int64_t at = 0;
    each_of_mine([&](Update& update, int64_t numel) {
      const at::Tensor place = parts.narrow(0, at, numel).view(update.part.sizes());
      place.copy_(direction(update));
      at += numel;
    });
    exchange(parts, mine, whole, owned, cause);
    make_orthogonal(whole, owned);
    exchange(whole, owned, parts, mine, cause);
    at = 0;
    each_of_mine([&](Update& update, int64_t numel) {
      apply(update, parts.narrow(0, at, numel).view(update.part.sizes()));
      at += numel;
    });
  }

 private:
  enum class Side : uint8_t { kMine, kOwned };

  void plan() {
    ranks_ = 1;
    rank_ = 0;
    for (const int m : mesh_dims_) {  // row-major, as the communicator's
      ranks_ *= static_cast<int>(context_->mesh().size(m));
      rank_ = rank_ * static_cast<int>(context_->mesh().size(m)) +
              static_cast<int>(context_->coordinate()[static_cast<size_t>(m)]);
    }
    std::vector<std::array<int64_t, 2>> sizes;
    for (const Update* update : updates_) sizes.push_back({update->sizes()[0], update->sizes()[1]});
    owners_ = muon_owners(sizes, ranks_);
  }
  Coordinate coordinate_of(int rank) const {
    Coordinate coordinate = context_->coordinate();
    for (size_t i = mesh_dims_.size(); i-- > 0;) {
      const auto m = static_cast<size_t>(mesh_dims_[i]);
      const auto size = static_cast<int>(context_->mesh().size(mesh_dims_[i]));
      coordinate[m] = rank % size;
      rank /= size;
    }
    return coordinate;
  }
  Intervals held(const Update& update, int rank, int dim) const {
    return local_intervals(update.spec->layout, context_->mesh().shape(), coordinate_of(rank),
                           update.spec->sizes, dim);
  }
  int64_t numel_at(const Update& update, int rank) const {
    const Dims shape = local_shape(update.spec->layout, context_->mesh().shape(),
                                   coordinate_of(rank), update.spec->sizes);
    return shape[0] * shape[1];
  }
  // For each rank: of this rank's parts those that it owns, or of the matrices that this rank owns its
  // parts.
  std::vector<int64_t> counts(Side side) const {
    std::vector<int64_t> counts(static_cast<size_t>(ranks_), 0);
    for (size_t i = 0; i < updates_.size(); ++i) {
      if (side == Side::kMine) {
        counts[static_cast<size_t>(owners_[i])] += updates_[i]->part.numel();
      } else if (owners_[i] == rank_) {
        for (int r = 0; r < ranks_; ++r) {
          counts[static_cast<size_t>(r)] += numel_at(*updates_[i], r);
        }
      }
    }
    return counts;
  }
  // As the parts lie one after the other: by owners, then as given.
  template <typename F>
  void each_of_mine(F f) const {
    for (int owner = 0; owner < ranks_; ++owner) {
      for (size_t i = 0; i < updates_.size(); ++i) {
        if (owners_[i] == owner) f(*updates_[i], updates_[i]->part.numel());
      }
    }
  }

  void exchange(const at::Tensor& in, const std::vector<int64_t>& in_counts, const at::Tensor& out,
                const std::vector<int64_t>& out_counts, const Cause& cause) {
    CollectiveTransfer transfer;
    transfer.op = OpKind::kAllToAllV;
    transfer.mesh_dims = mesh_dims_;
    transfer.input = in;
    transfer.output = out;
    transfer.in_counts = in_counts;
    transfer.out_counts = out_counts;
    uint64_t provenance = 0;
    for (const Update* update : updates_) provenance = mix(provenance, update->provenance);
    const About about(*context_, provenance);
    const int64_t numel = in.numel();
    const CollectiveSpan span(*context_, cause, [&]() -> Sending {
      const int64_t sent = numel - in_counts[static_cast<size_t>(rank_)];
      std::vector<std::string> parameters;
      for (const Update* update : updates_) parameters.emplace_back(update->name);
      return {"all_to_all",
              mesh_dims_,
              sent * static_cast<int64_t>(in.element_size()),
              dtype_,
              absl::MakeConstSpan(&numel, 1),
              Layout(),
              Layout(),
              std::move(parameters)};
    });
    throw_if_error(send(*context_, transfer, cause.name).wait());
  }

  // f(part of the matrix, part of the memory) for each run of rows and columns that a rank has of it.
  template <typename F>
  void each_run(const Update& update, int rank, const at::Tensor& matrix, const at::Tensor& part,
                F f) const {
    const Intervals rows = held(update, rank, 0), columns = held(update, rank, 1);
    int64_t row = 0;
    for (const Interval& r : rows) {
      int64_t column = 0;
      for (const Interval& c : columns) {
        f(matrix.narrow(0, r.begin, r.size()).narrow(1, c.begin, c.size()),
          part.narrow(0, row, r.size()).narrow(1, column, c.size()));
        column += c.size();
      }
      row += r.size();
    }
  }

  // Of the matrices that this rank owns, whose parts lie in `memory` rank by rank.
  void make_orthogonal(const at::Tensor& memory, const std::vector<int64_t>& owned) const {
    std::vector<int64_t> at(static_cast<size_t>(ranks_), 0);  // where the ranks' next parts are
    for (size_t r = 1; r < at.size(); ++r) at[r] = at[r - 1] + owned[r - 1];
    for (size_t i = 0; i < updates_.size(); ++i) {
      if (owners_[i] != rank_) continue;
      const Update& update = *updates_[i];
      at::Tensor matrix = at::empty(update.sizes(), memory.options());
      std::vector<at::Tensor> parts;
      for (int r = 0; r < ranks_; ++r) {
        const Dims shape = local_shape(update.spec->layout, context_->mesh().shape(),
                                       coordinate_of(r), update.spec->sizes);
        int64_t& begin = at[static_cast<size_t>(r)];
        const int64_t numel = shape[0] * shape[1];
        parts.push_back(memory.narrow(0, begin, numel).view(array(shape)));
        begin += numel;
        each_run(update, r, matrix, parts.back(),
                 [](const at::Tensor& to, const at::Tensor& from) { to.copy_(from); });
      }
      matrix = newton_schulz(std::move(matrix), options_of(update));
      for (int r = 0; r < ranks_; ++r) {
        each_run(update, r, matrix, parts[static_cast<size_t>(r)],
                 [](const at::Tensor& from, const at::Tensor& to) { to.copy_(from); });
      }
    }
  }

  MeshContext* context_;
  std::vector<int> mesh_dims_;
  at::ScalarType dtype_;
  at::Device device_;
  std::vector<Update*> updates_;
  int ranks_ = 1, rank_ = 0;
  std::vector<int> owners_;
};

}  // namespace

std::vector<int> muon_owners(absl::Span<const std::array<int64_t, 2>> sizes, int num_ranks) {
  // Multiplications of the iteration, but for a factor: of three products of s x s with s x l.
  const auto cost = [&](size_t i) {
    const auto small = static_cast<double>(std::min(sizes[i][0], sizes[i][1]));
    const auto large = static_cast<double>(std::max(sizes[i][0], sizes[i][1]));
    return small * small * (2 * large + small);
  };
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return cost(a) > cost(b); });
  std::vector<double> load(static_cast<size_t>(num_ranks), 0);
  std::vector<int> owners(sizes.size());
  for (const size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    owners[i] = static_cast<int>(least - load.begin());
    *least += cost(i);
  }
  return owners;
}

at::Tensor newton_schulz(at::Tensor matrix, const MuonOptions& options) {
  const bool is_tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = is_tall ? matrix.t() : matrix;
  x = x.div(x.norm().clamp_min(options.eps));
  for (int i = 0; i < options.ns_steps; ++i) {
    const at::Tensor gram = at::mm(x, x.t());
    const at::Tensor polynomial = at::addmm(gram, gram, gram, options.ns_b, options.ns_c);
    x = at::addmm(x, polynomial, x, options.ns_a);
  }
  return is_tall ? x.t() : x;
}

void muon_step(const Updates& updates, const Cause& cause) {
  std::vector<Exchange> exchanges;
  for (Update* update : updates) {
    if (update->cutting.empty()) {
      const MuonOptions& o = options_of(*update);
      at::Tensor matrix = direction(*update).to(o.ns_dtype, false, /*copy=*/true);
      apply(*update, newton_schulz(std::move(matrix), o));
      continue;
    }
    auto it = std::find_if(exchanges.begin(), exchanges.end(),
                           [&](const Exchange& e) { return e.takes(*update); });
    if (it == exchanges.end()) it = exchanges.emplace(it, *update);
    it->add(*update);
  }
  for (Exchange& exchange : exchanges) exchange.run(cause);
}

}  // namespace shardweave::optim_internal
