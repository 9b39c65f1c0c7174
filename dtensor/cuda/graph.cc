#include "shardweave/dtensor/cuda/graph.h"

#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace shardweave::dtensor_internal {

// The members of at::cuda::CUDAGraph by their names in the library, as functions of the object.
struct CudaGraph::Members {
  using Pool = std::pair<unsigned long long, unsigned long long>;  // c10::MempoolId_t

  void (*construct)(void* graph, bool keep_graph) = nullptr;
  void (*destroy)(void* graph) = nullptr;
  void (*capture_begin)(void* graph, Pool pool, int mode) = nullptr;
  void (*capture_end)(void* graph) = nullptr;
  void (*replay)(void* graph) = nullptr;
  const char* missing = nullptr;

  Members() {
    find("_ZN2at4cuda9CUDAGraphC1Eb", construct);
    find("_ZN2at4cuda9CUDAGraphD1Ev", destroy);
    find("_ZN2at4cuda9CUDAGraph13capture_beginESt4pairIyyE21cudaStreamCaptureMode", capture_begin);
    find("_ZN2at4cuda9CUDAGraph11capture_endEv", capture_end);
    find("_ZN2at4cuda9CUDAGraph6replayEv", replay);
  }

 private:
  template <typename Function>
  void find(const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, name));
    if (function == nullptr && missing == nullptr) missing = name;
  }
};

absl::StatusOr<std::unique_ptr<CudaGraph>> CudaGraph::create() {
  auto members = std::make_unique<const Members>();
  if (members->missing != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("LibTorch has no CUDA graphs here (", members->missing,
                     "): load_cuda() loads its CUDA, if it has one"));
  }
  return std::unique_ptr<CudaGraph>(new CudaGraph(std::move(members)));
}

CudaGraph::CudaGraph(std::unique_ptr<const Members> members) : members_(std::move(members)) {
  members_->construct(graph_, /*keep_graph=*/false);
}

CudaGraph::~CudaGraph() {
  members_->destroy(graph_);
}

void CudaGraph::begin() {
  members_->capture_begin(graph_, {0, 0}, kThreadLocal);
}

void CudaGraph::end() {
  members_->capture_end(graph_);
}

void CudaGraph::abandon(std::unique_ptr<CudaGraph> graph) {
  static std::mutex mutex;
  static auto& abandoned = *new std::vector<std::unique_ptr<CudaGraph>>;
  const std::lock_guard lock(mutex);
  abandoned.push_back(std::move(graph));
}

void CudaGraph::replay() {
  members_->replay(graph_);
}

}  // namespace shardweave::dtensor_internal
