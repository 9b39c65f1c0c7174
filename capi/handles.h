// What is behind the handles of worlds, communicators, meshes, layouts and tensors.
#pragma once

#include <memory>
#include <optional>
#include <source_location>
#include <utility>
#include <variant>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "c10/util/Exception.h"
#include "shardweave/capi/arguments.h"
#include "shardweave/capi/guard.h"
#include "shardweave/capi/threads.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/autocast.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/no_source.h"
#include "shardweave/mesh/connected_mesh.h"
#include "shardweave/placement/layout.h"

struct swv_world : shardweave::capi::Handle<shardweave::capi::Kind::kWorld> {
  std::shared_ptr<shardweave::World> world;
};
struct swv_comm : shardweave::capi::Handle<shardweave::capi::Kind::kComm> {
  std::shared_ptr<shardweave::Communicator> comm;
};
struct swv_work : shardweave::capi::Handle<shardweave::capi::Kind::kWork> {
  shardweave::Work work;
};
struct swv_mesh : shardweave::capi::Handle<shardweave::capi::Kind::kMesh> {
  shardweave::MeshPtr mesh;
};
struct swv_layout : shardweave::capi::Handle<shardweave::capi::Kind::kLayout> {
  shardweave::Layout layout;
};
struct swv_tensor : shardweave::capi::Handle<shardweave::capi::Kind::kTensor> {
  at::Tensor tensor;
};

namespace shardweave::capi {

// --- element types -------------------------------------------------------------------------------

at::ScalarType scalar_type(swv_dtype dtype, const char* argument,
                           at::ScalarType otherwise = at::kFloat);
// Nothing for SWV_DTYPE_DEFAULT.
std::optional<at::ScalarType> optional_scalar_type(swv_dtype dtype, const char* argument);
swv_dtype dtype_of(at::ScalarType type);
c10::Device device(const swv_device& device, const char* argument);
// The same, and that there is one: LibTorch's CUDA is loaded for it.
c10::Device present_device(const swv_device& device, const char* argument);
swv_device device_of(c10::Device device);
DType comm_dtype(swv_dtype dtype, const char* argument);
swv_dtype dtype_of(DType dtype);
Device comm_device(const swv_device& device, const char* argument);
// Of a GPU's memory only. Tensors are used on the default one alone.
void check_stream(const void* stream, const swv_device& device, const char* argument);

// --- tensors -------------------------------------------------------------------------------------

inline const at::Tensor& tensor(const swv_tensor* handle, const char* argument) {
  return in(handle, argument).tensor;
}
// An undefined tensor is no tensor to C.
swv_tensor* new_tensor(at::Tensor tensor, const char* what);
// NULL for an undefined one.
swv_tensor* new_tensor_or_null(at::Tensor tensor);
at::IntArrayRef sizes(const int64_t* sizes, size_t ndim, const char* argument);
std::vector<at::Tensor> tensors(const swv_tensor* const* handles, size_t count,
                                const char* argument);
// NULL elements are undefined tensors.
std::vector<at::Tensor> tensors_or_undefined(const swv_tensor* const* handles, size_t count,
                                             const char* argument);
// Gives all of them out, or, if there is no memory, none.
void write_tensors(std::vector<at::Tensor> tensors, swv_tensor** out_tensors);

// SWV_MODE_AUTOCAST_F16 and SWV_MODE_AUTOCAST_BF16.
constexpr swv_grad_mode kAutocast = SWV_MODE_AUTOCAST_F16 | SWV_MODE_AUTOCAST_BF16;
// A mode without what says what is cast.
constexpr swv_grad_mode recording_of(swv_grad_mode mode) {
  return mode & ~kAutocast;
}
// The thread's, for a callback.
swv_grad_mode current_mode();

// The grad mode and the autocast of one call, whatever the thread's are; what else a thread may differ
// in (threads.h); and LibTorch's warnings go where swv_set_log wants them.
class CallMode {
 public:
  CallMode(swv_grad_mode mode, const char* argument);
  [[gnu::hot]] ~CallMode() = default;
  CallMode(const CallMode&) = delete;
  CallMode& operator=(const CallMode&) = delete;

 private:
  RecordedInOrder in_order_;
  std::optional<AutocastScope> autocast_;  // in front of what restores all of the thread's keys
  std::variant<std::monostate, c10::AutoGradMode, c10::InferenceMode> guard_;
  std::optional<c10::WarningUtils::WarningHandlerGuard> warnings_;
};

// Where the host's code called from is not known here (swv_mesh_enter_source says it).
constexpr std::source_location kHost = dtensor_internal::kNoSource;

// --- calls of all ranks ---------------------------------------------------------------------------

// Tells the other ranks, which are in `call` or will be, that this one makes it not. Waits for them.
// Without a mesh, or where the handle is of none, there are no others.
void refuse_together(const MeshPtr& mesh, const char* call);
void refuse_together(const swv_mesh* mesh, const char* call);
// What read() makes of the arguments of `call`, the C++ function that all ranks of the mesh enter
// together: what this rank refuses there ends the call on all of them.
template <typename Mesh, typename Read>
auto read_together(const Mesh& mesh, const char* call, const Read& read) {
  try {
    return read();
  } catch (...) {
    refuse_together(mesh, call);
    throw;
  }
}
// The same where `call` does something else before its ranks agree, so that they agree here first.
void agree_to_call(const MeshPtr& mesh, const char* call);
template <typename Read>
auto read_before(const MeshPtr& mesh, const char* call, const Read& read) {
  auto result = read_together(mesh, call, read);
  agree_to_call(mesh, call);
  return result;
}
// Of the first of these that lies on one; null: none does.
MeshPtr first_mesh(const std::vector<at::Tensor>& tensors);

// --- layouts -------------------------------------------------------------------------------------

// One placement per mesh dimension; in the order of the mesh. NULL is all replicated, where
// allowed.
NamedPlacements named_placements(const swv_named_placement* placements, size_t count,
                                 const char* argument);
DistributeOptions distribute_options(const swv_distribute_options* options);

}  // namespace shardweave::capi
