// Tensors that lie one after the other in flat memory, of which each rank along one mesh dimension
// keeps a stretch: what fully_shard() (fsdp_unit.h) and ZeRO (modules/zero.h) have in common.
//
//   flat    w w w w w w b b v v v v        whole along the mesh dimension
//   rank 0  w w w w                        A stretch begins and ends between rows, so that a tensor's
//   rank 1          w w b b                part of it is a ragged shard, and stretches lie one after
//   rank 2                  v v v v        the other: nothing is copied around a collective.
//
// Internal to dtensor/ and modules/.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_work.h"
#include "shardweave/dtensor/observe/observer.h"
#include "shardweave/dtensor/spec.h"

namespace shardweave::dtensor_internal {

// How tensors with these specs, one after the other, are kept along `mesh_dim`: each rank keeps about
// as much, and cuts are between rows. A pure function, and so the same on all ranks. A tensor that
// other mesh dimensions cut into uneven rows is kept whole by one rank.
std::vector<Layout> flat_row_layouts(const std::vector<SpecRef>& whole, const DeviceMesh& mesh,
                                     int mesh_dim);

// The same where each rank is to keep as much as any other, for backends whose collectives want that
// (NCCL): tensors lie one after the other, with gaps in front of some, so that all cuts are between rows
// and a rank's stretch has `segment` elements: as few as that order of tensors allows.
struct EqualSegments {
  std::vector<Layout> layouts;
  std::vector<int64_t> begins;  // of tensors, in the flat memory
  int64_t segment = 0;
  int64_t padding = 0;  // of all ranks
  // Empty: it can be; else why not, and which tensor it is.
  std::string refusal;
  size_t refused = 0;
  friend bool operator==(const EqualSegments&, const EqualSegments&) = default;
};
EqualSegments equal_segments(const std::vector<SpecRef>& whole, const DeviceMesh& mesh,
                             int mesh_dim);

// Why a tensor cannot be kept so, or "": another mesh dimension has a ragged cut of its rows, which one
// rank that keeps them all would have to leave to the others.
std::string why_not_kept(const Spec& whole, const Layout& layout, const DeviceMesh& mesh);

// A collective that was issued. Dropped, it waits: the network uses the memory.
class CollectiveUnderWay {
 public:
  CollectiveUnderWay(TensorWork work, CollectiveSpan span)
      : work_(std::move(work)), span_(std::move(span)) {}
  ~CollectiveUnderWay() { (void)wait(); }
  CollectiveUnderWay(CollectiveUnderWay&&) = default;
  CollectiveUnderWay& operator=(CollectiveUnderWay&&) = delete;

  absl::Status wait() {
    absl::Status status = work_.wait();
    span_.reset();
    return status;
  }
  bool done() const { return work_.done(); }

 private:
  TensorWork work_;
  std::optional<CollectiveSpan> span_;
};

// Immutable.
class FlatRow {
 public:
  // FQNs of some of the tensors.
  using Names = absl::FunctionRef<std::string(size_t tensor)>;
  struct Place {
    SpecRef whole;                // along the mesh dimension
    SpecRef kept;                 // by this rank
    std::vector<int64_t> counts;  // elements that each rank keeps
    int64_t begin = 0;            // in the flat memory,
    int64_t kept_begin = 0;       // and in this rank's stretch
  };

  // Of tensors of one dtype and device, which are kept as `kept_dtype` on `kept_device`; `layouts`:
  // flat_row_layouts(), or those of equal_segments() with what that says.
  FlatRow(std::shared_ptr<MeshContext> context, int mesh_dim, const std::vector<SpecRef>& whole,
          const std::vector<Layout>& layouts, at::ScalarType kept_dtype, c10::Device kept_device,
          const std::vector<int64_t>& begins = {}, int64_t segment = 0);

  const std::shared_ptr<MeshContext>& context() const { return context_; }
  int mesh_dim() const { return mesh_dim_; }
  size_t size() const { return places_.size(); }
  const Place& operator[](size_t i) const { return places_[i]; }
  int64_t num_ranks() const { return static_cast<int64_t>(counts_.size()); }
  int64_t numel() const { return numel_; }  // of the flat memory
  int64_t kept() const { return counts_[rank_]; }
  const std::vector<int64_t>& counts() const { return counts_; }  // that each rank keeps
  bool is_equal() const { return is_equal_; }                     // every rank keeps as much
  int64_t kept_begin() const { return kept_begin_; }              // in the flat memory

  // Of memory of numel() or kept() elements that which is tensor i's, as it lies.
  at::Tensor whole_of(const at::Tensor& flat, size_t i) const;
  at::Tensor kept_of(const at::Tensor& stretch, size_t i) const;

  // Fills `flat` with all ranks' stretches. `stretch` may be its place in `flat`. `names`: of the
  // tensors, for those who look.
  CollectiveUnderWay all_gather(const at::Tensor& stretch, const at::Tensor& flat,
                                uint64_t provenance, const Cause& cause, Names names) const;

 private:
  friend class GradientScatter;

  const std::shared_ptr<MeshContext> context_;
  const int mesh_dim_;
  std::vector<Place> places_;
  std::vector<int64_t> counts_;
  size_t rank_ = 0;
  int64_t numel_ = 0;
  int64_t kept_begin_ = 0;
  bool is_equal_ = false;
};

// Gradients of a row's tensors, on their way to the ranks that keep the tensors: one reduce-scatter of
// all that are to be summed along the mesh dimension and otherwise lie as the tensors do.
class GradientScatter {
 public:
  using MakeBuffer = absl::FunctionRef<at::Tensor(int64_t numel, const at::TensorOptions& options)>;

  // Whether it would take this gradient, a DTensor, of tensor i.
  static bool takes(const FlatRow& row, size_t i, const at::Tensor& grad);

  // Of `grads`, DTensors or undefined, one for each tensor, those that it takes become undefined.
  // They are summed as `dtype`, for which `buffer` gives contiguous memory.
  GradientScatter(const FlatRow& row, std::vector<at::Tensor>& grads, at::ScalarType dtype,
                  MakeBuffer buffer, const Cause& cause, FlatRow::Names names);

  // Which it took; none: nothing was sent.
  absl::Span<const size_t> taken() const { return taken_; }
  // How the gradient of tensor i lies, of `dtype`: as the row keeps it, or still to be summed along other mesh dimensions.
  const SpecRef& spec(size_t i) const { return specs_[i]; }
  uint64_t provenance(size_t i) const { return provenances_[i]; }
  // Waits, and gives up the memory that was sent from; throws Error.
  void finish();
  bool is_under_way() const { return under_way_.has_value(); }
  bool done() const { return !under_way_.has_value() || under_way_->done(); }
  // This rank's part. Finishes.
  const at::Tensor& part(size_t i);
  // Nobody asks for parts any more.
  void release();

 private:
  std::vector<size_t> taken_;
  std::vector<SpecRef> specs_;  // by tensor, as the next ones
  std::vector<uint64_t> provenances_;
  std::vector<at::Tensor> parts_;
  at::Tensor in_, out_;
  std::optional<CollectiveUnderWay> under_way_;  // ended before what it uses
};

// Each rank's part as another dtype, summands too: without communication and autograd. Shares no
// memory with `tensor` unless it is of that dtype.
at::Tensor with_dtype(const at::Tensor& tensor, at::ScalarType dtype);

// Brings DTensors to other layouts, as redistribute_all() without autograd. What had to move shares
// no memory with what it was, as long as anybody has that.
void bring_to(std::vector<at::Tensor>& tensors, const std::vector<Layout>& layouts,
              const Cause& cause);

}  // namespace shardweave::dtensor_internal
