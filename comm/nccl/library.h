// NCCL and CUDA as they are found when the program runs: a table of their functions.
//
//   auto library = Library::load({});
//   if (!library.ok()) return library.status();       // "backend nccl: no NVIDIA driver: ..."
//   const CurrentDevice on(**library, 1);
//   absl::Status s = (*library)->check_cuda("cudaStreamQuery", (*library)->cudaStreamQuery(stream));
//
// Nothing is linked. What is loaded stays: NCCL's threads, those that wait for other ranks among them,
// run its code for longer than anybody here uses it. Any thread may use it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "shardweave/comm/buffer.h"
#include "shardweave/comm/nccl/abi.h"
#include "shardweave/comm/nccl/nccl_options.h"

namespace shardweave::nccl_internal {

class Library {
 public:
  enum class Parts : uint8_t { kCuda, kCudaAndNccl };
  // FailedPrecondition says what is missing or too old, which was looked for and which is there.
  static absl::StatusOr<std::shared_ptr<const Library>> load(const NcclLibraries& names,
                                                             Parts parts = Parts::kCudaAndNccl);
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

// NOLINTNEXTLINE(bugprone-macro-parentheses): they are a declaration.
#define SHARDWEAVE_MEMBER(result, name, parameters) result(*name) parameters = nullptr;
  SHARDWEAVE_CUDA_DRIVER_FUNCTIONS(SHARDWEAVE_MEMBER)
  SHARDWEAVE_CUDA_RUNTIME_FUNCTIONS(SHARDWEAVE_MEMBER)
  SHARDWEAVE_NCCL_FUNCTIONS(SHARDWEAVE_MEMBER)  // null without that part
#undef SHARDWEAVE_MEMBER

  // OK, or what the call has answered: ResourceExhausted for memory, else Internal.
  absl::Status check_cuda(const char* call, int error) const;
  // The same of NCCL: Unavailable if it is another rank's error. `comm` may be null.
  absl::Status check_nccl(const char* call, int error, NcclComm comm) const;

  // Between the host's memory and a device's, in the order of `stream`; waits for that. Afterwards
  // nothing is written any more, also after an error, if the device comes to an end within seconds.
  absl::Status copy(int device, void* to, const void* from, int64_t bytes, int kind,
                    DeviceStream stream) const;

  // "NCCL 2.28.9 (libnccl.so.2), CUDA 13.0 (libcudart.so.13), driver for CUDA 13.0".
  const std::string& versions() const { return versions_; }

 private:
  explicit Library(Parts parts) : parts_(parts) {}
  absl::Status unusable(const std::string& why) const;
  absl::Status open(const std::vector<std::string>& names, const char* what, const char* advice,
                    void** handle, std::string* name);
  absl::Status find_all(const NcclLibraries& names);
  absl::Status check_versions(const std::string& nccl, const std::string& runtime);

  const Parts parts_;
  std::string versions_;
};

// "backend nccl: ", as messages begin.
std::string_view name_of(Library::Parts parts);

// Makes a device the calling thread's for as long as it lives: CUDA's calls depend on it. Afterwards
// the one before is again, unless there is nothing on it yet: to choose a device makes a context there,
// some hundred megabytes. And a CUDA graph that this thread or another one captures is no reason for
// calls of this one to fail.
class CurrentDevice {
 public:
  CurrentDevice(const Library& library, int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  // Whether it is.
  const absl::Status& status() const { return status_; }

 private:
  const Library& library_;
  int mode_;  // to capture in, before
  int before_ = 0;
  bool restores_ = false;
  absl::Status status_;
};

}  // namespace shardweave::nccl_internal
