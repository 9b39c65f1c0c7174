#include "shardweave/comm/nccl/lane.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>

namespace shardweave::nccl_internal {
namespace {

// Of a call that goes on in NCCL's threads.
constexpr auto kLookEvery = std::chrono::microseconds(50);

}  // namespace

Lane::~Lane() {
  abort();
  for (CudaEvent mark : all_marks_) library_->cudaEventDestroy(mark);
  if (stream_ != nullptr) library_->cudaStreamDestroy(stream_);
}

absl::Status Lane::open() {
  return library_->check_cuda("cudaStreamCreateWithFlags", library_->cudaStreamCreateWithFlags(
                                                               &stream_, kCudaStreamNonBlocking));
}

absl::Status Lane::begin_to_connect(const NcclUniqueId& id, int ranks, int rank) {
  NcclConfig config;
  config.blocking = 0;
  const int result = library_->ncclCommInitRankConfig(&comm_, ranks, id, rank, &config);
  return result == kNcclInProgress ? absl::OkStatus()
                                   : library_->check_nccl("ncclCommInitRankConfig", result, comm_);
}

absl::StatusOr<bool> Lane::has_settled(const char* call) {
  int state = kNcclSuccess;
  int error = library_->ncclCommGetAsyncError(comm_, &state);
  if (error == kNcclSuccess && state == kNcclInProgress) return false;
  if (error == kNcclSuccess) error = state;
  if (absl::Status status = library_->check_nccl(call, error, comm_); !status.ok()) return status;
  return true;
}

absl::Status Lane::connect(const NcclUniqueId& id, int ranks, int rank, Deadline deadline) {
  if (absl::Status status = begin_to_connect(id, ranks, rank); !status.ok()) return status;
  return settle("ncclCommInitRankConfig", deadline);
}

absl::StatusOr<CudaEvent> Lane::mark(DeviceStream stream) {
  CudaEvent mark = nullptr;
  absl::Status status;
  if (!marks_.empty()) {
    mark = marks_.back();
    marks_.pop_back();
  } else {
    status = library_->check_cuda("cudaEventCreateWithFlags", library_->cudaEventCreateWithFlags(
                                                                  &mark, kCudaEventDisableTiming));
    if (!status.ok()) return status;
    all_marks_.push_back(mark);
  }
  status = library_->check_cuda(
      "cudaEventRecord", library_->cudaEventRecord(mark, static_cast<CudaStream>(stream.handle)));
  if (!status.ok()) return status;
  return mark;
}

absl::Status Lane::follow(CudaEvent mark) {
  marks_.push_back(mark);
  return library_->check_cuda("cudaStreamWaitEvent",
                              library_->cudaStreamWaitEvent(stream_, mark, 0));
}

absl::Status Lane::settle(const char* call, Deadline deadline) {
  for (;;) {
    const absl::StatusOr<bool> settled = has_settled(call);
    if (!settled.ok() || *settled) return settled.status();
    if (absl::Status why = give_up_(); !why.ok()) return why;
    if (std::chrono::steady_clock::now() >= deadline) {
      return absl::DeadlineExceededError(std::string(call) +
                                         " still waits for other ranks at the deadline");
    }
    std::this_thread::sleep_for(kLookEvery);
  }
}

absl::Status Lane::asynchronous_error() {
  return comm_ == nullptr ? absl::OkStatus() : has_settled("a collective of NCCL").status();
}

void Lane::close(Deadline deadline) {
  if (comm_ == nullptr) return;
  const int result = library_->ncclCommFinalize(comm_);
  if ((result == kNcclSuccess || result == kNcclInProgress) &&
      settle("ncclCommFinalize", deadline).ok()) {
    library_->ncclCommDestroy(std::exchange(comm_, nullptr));
  } else {
    abort();
  }
}

void Lane::abort() {
  if (comm_ != nullptr) library_->ncclCommAbort(take());
}

bool Lane::is_idle() const {
  return stream_ == nullptr || library_->cudaStreamQuery(stream_) != kCudaErrorNotReady;
}

}  // namespace shardweave::nccl_internal
