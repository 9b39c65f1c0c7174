// Timing of what cost_model.h describes.
#include <algorithm>
#include <chrono>
#include <functional>
#include <numeric>
#include <vector>

#include "ATen/ATen.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/cost_model.h"
#include "shardweave/dtensor/engine/mesh_context.h"

namespace shardweave {

using namespace dtensor_internal;

namespace {

constexpr int64_t kFew = 64;  // floats that a collective has on each rank
constexpr int64_t kMany = int64_t{1} << 20;
constexpr int64_t kMatrix = 768;               // rows and columns
constexpr int64_t kCopied = int64_t{1} << 24;  // floats, more than caches hold

class Stopwatch {
 public:
  explicit Stopwatch(MeshContext& context) {
    std::vector<int> all(context.mesh().ndim());
    std::iota(all.begin(), all.end(), 0);
    if (context.mesh().size() > 1) everyone_ = &context.communicator(all);
  }

  // The median of `times` calls, of the slowest rank.
  double seconds(int times, const std::function<void()>& call) const {
    std::vector<double> all;
    for (int i = -2; i < times; ++i) {  // the first are for memory, threads and connections
      if (everyone_ != nullptr) throw_if_error(everyone_->barrier().wait());
      const auto start = std::chrono::steady_clock::now();
      call();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (i >= 0) all.push_back(took.count());
    }
    std::nth_element(all.begin(), all.begin() + times / 2, all.end());
    double median = std::max(all[times / 2], 1e-9);
    if (everyone_ != nullptr) {
      const Buffer buffer = Buffer::of(&median, 1);
      throw_if_error(everyone_->all_reduce(buffer, buffer, ReduceOp::kMax).wait());
    }
    return median;
  }

 private:
  Communicator* everyone_ = nullptr;
};

// latency + bytes / bandwidth, from few bytes and many.
CostModel::Link line_through(double few_bytes, double few_seconds, double many_bytes,
                             double many_seconds) {
  const double more = many_seconds - few_seconds;
  // Where more takes no longer, all of it is bandwidth.
  const double bandwidth = more > 0 ? (many_bytes - few_bytes) / more : many_bytes / many_seconds;
  return {std::max(few_seconds - few_bytes / bandwidth, 0.0), bandwidth};
}

// Bytes that a rank sends as plans count them (StepKind in placement/redistribute_plan.h).
CostModel::Link measure_link(const Stopwatch& stopwatch, Communicator& comm) {
  const int64_t k = comm.size();
  std::vector<float> in(kMany, 1), out(kMany);
  const auto reduce = [&](int64_t count) {
    return stopwatch.seconds(count == kFew ? 51 : 11, [&] {
      throw_if_error(comm.all_reduce(Buffer::of(in.data(), count), Buffer::of(out.data(), count),
                                     ReduceOp::kSum)
                         .wait());
    });
  };
  const auto gather = [&](int64_t count) {
    return stopwatch.seconds(count == kFew ? 51 : 11, [&] {
      throw_if_error(
          comm.all_gather(Buffer::of(in.data(), count / k), Buffer::of(out.data(), count / k * k))
              .wait());
    });
  };
  const auto reduced = [&](int64_t count) { return 8.0 * static_cast<double>(count - count / k); };
  const auto gathered = [&](int64_t count) {
    return 4.0 * static_cast<double>((k - 1) * (count / k));
  };
  const int64_t few = std::max(kFew, k);
  const CostModel::Link a = line_through(reduced(few), reduce(few), reduced(kMany), reduce(kMany));
  const CostModel::Link b =
      line_through(gathered(few), gather(few), gathered(kMany), gather(kMany));
  return {(a.latency + b.latency) / 2, 2 / (1 / a.bandwidth + 1 / b.bandwidth)};
}

}  // namespace

CostModel measure_cost_model(const MeshPtr& mesh) {
  const auto context = MeshContext::of(mesh);
  const c10::AutoGradMode no_grad(false);
  const Stopwatch stopwatch(*context);
  CostModel model;
  for (int m = 0; m < context->mesh().ndim(); ++m) {
    model.links.push_back(context->mesh().size(m) == 1
                              ? CostModel::Link()
                              : measure_link(stopwatch, context->communicator(m)));
  }
  const at::Tensor a = at::ones({kMatrix, kMatrix});
  at::Tensor product = at::empty_like(a);
  const double multiplied = stopwatch.seconds(5, [&] { at::mm_out(product, a, a); });
  model.device.flops = 2.0 * kMatrix * kMatrix * kMatrix / multiplied;
  const at::Tensor from = at::ones({kCopied});
  at::Tensor to = at::empty_like(from);
  const double copied = stopwatch.seconds(5, [&] { to.copy_(from); });
  model.device.bandwidth = 2.0 * static_cast<double>(from.nbytes()) / copied;
  return model;
}

}  // namespace shardweave
