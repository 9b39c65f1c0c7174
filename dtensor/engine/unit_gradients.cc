#include "shardweave/dtensor/engine/unit_gradients.h"

#include <utility>

#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "shardweave/dtensor/engine/local_part.h"
#include "shardweave/dtensor/engine/tensor_impl.h"

namespace shardweave::dtensor_internal {

// The part of one of them.
class UnitGradients::Arriving final : public LocalPart::Source {
 public:
  Arriving(std::shared_ptr<UnitGradients> gradients, size_t index)
      : gradients_(std::move(gradients)), index_(index) {}
  LocalPart::State state() const override {
    const bool is_ready = gradients_ == nullptr || gradients_->has_arrived();
    return is_ready ? LocalPart::State::kReady : LocalPart::State::kUnderWay;
  }
  const at::Tensor& bring() override {
    if (gradients_ != nullptr) {
      gradients_->arrive();
      part_ = gradients_->parts_[index_];
      gradients_.reset();
    }
    return part_;
  }

 private:
  std::shared_ptr<UnitGradients> gradients_;  // null: it is there
  const size_t index_;
  at::Tensor part_;
};

UnitGradients::UnitGradients(const FlatRow& row, std::vector<at::Tensor>& grads,
                             at::ScalarType dtype, GradientScatter::MakeBuffer buffer,
                             std::optional<c10::Stream> lane, const Cause& cause,
                             FlatRow::Names names)
    : context_(row.context()),
      subject_(cause.subject),
      cause_(cause),
      resting_(row.size()),
      scatter_(row, grads, dtype, buffer, cause, names),
      lane_(lane),
      parts_(row.size()) {
  cause_.subject = subject_;
  for (const size_t i : taken()) {
    const Spec& kept = *row[i].kept;
    resting_[i] = context_->intern(kept.layout, kept.sizes, kept.strides, kept.dtype, kept.device);
  }
}

UnitGradients::~UnitGradients() {
  try {
    wait();
  } catch (const Error&) {  // nobody wants them
  }
}

at::Tensor UnitGradients::arriving(size_t i) {
  at::Tensor gradient =
      wrap(LocalPart(std::make_shared<Arriving>(shared_from_this(), i)), resting_[i], context_);
  meta_of(gradient).came_from(scatter_.provenance(i));
  return gradient;
}

// Also if it has failed nobody reads what was sent any more.
void UnitGradients::wait() {
  const auto give_up_memory = [&] {
    if (sent_ != nullptr) std::exchange(sent_, nullptr)();
  };
  try {
    scatter_.finish();
  } catch (...) {
    give_up_memory();
    throw;
  }
  give_up_memory();
}

void UnitGradients::finish() {
  if (has_arrived_) return;
  wait();
  const c10::InferenceMode normal(false);  // whoever asks
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> arrived;
  std::vector<Layout> layouts;
  for (const size_t i : taken()) {
    arrived.push_back(wrap(scatter_.part(i), scatter_.spec(i), context_));
    meta_of(arrived.back()).came_from(scatter_.provenance(i));
    layouts.push_back(resting_[i]->layout);
  }
  bring_to(arrived, layouts, cause_);
  std::vector<at::Tensor> parts;
  for (size_t k = 0; k < arrived.size(); ++k) {
    parts.push_back(meta_of(with_dtype(arrived[k], resting_[taken()[k]]->dtype)).local());
  }
  if (lane_.has_value()) copies_ = std::make_unique<HostCopies>(*lane_, parts);
  for (size_t k = 0; k < parts.size(); ++k) {
    parts_[taken()[k]] = copies_ == nullptr ? parts[k] : (*copies_)[k];
  }
  scatter_.release();
  has_arrived_ = true;
}

void UnitGradients::arrive() {
  finish();
  if (copies_ == nullptr || copies_->done()) return;
  context_->before_host_reads();  // or they may be what an error has left
  copies_->wait();
}

}  // namespace shardweave::dtensor_internal
