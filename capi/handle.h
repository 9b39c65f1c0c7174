// What every handle of the C interface begins with, and the checked mode that catches misuse.
//
//   struct swv_work : shardweave::capi::Handle<shardweave::capi::Kind::kWork> { Work work; };
//   swv_work* work = make<swv_work>(std::move(value));     // swv_..._create
//   const Work& w = in(handle, "work").work;               // throws Failure for a bad handle
//   release(handle, "swv_work_free");                      // swv_work_free
//
// A handle starts with its kind, which is looked at on every use. While there are checks, every
// handle is also in a table, with its state: then handles that were freed, and pointers that never
// were handles, are found without touching their memory. The memory of the last freed ones is kept,
// so that their addresses are not given out again at once. The table has no lock: one that every
// call takes would order the calls of all threads, and hide their races from ThreadSanitizer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <string_view>
#include <utility>

namespace shardweave::capi {

enum class Kind : uint32_t {
  kNone = 0,
  kStatus = 0x53575601,
  kString,
  kWorld,
  kComm,
  kWork,
  kCoalescing,
  kMesh,
  kScope,
  kLayout,
  kTensor,
  kOp,
  kFunctionContext,
  kModule,
  kPlan,
  kOptimizer,
  kTrace,
  kForward,
  kGradSync,
  kGradScaler,
  kTokenFile,
  kLoader,
  kState,
  kCheckpointer,
  kSafetensors,
  kMetricsWriter,
  kCapturedStep,
};
std::string_view name_of(Kind kind);  // "swv_status", ...; "no handle" for anything else

struct HandleBase {
  explicit HandleBase(Kind k) : kind(k) {}
  Kind kind;
  bool is_entered = false;  // into the table, while there were checks
};

template <Kind K>
struct Handle : HandleBase {
  static constexpr Kind kKind = K;
  Handle() : HandleBase(K) {}
};

// Whether there are checks: SWV_CHECK_HANDLES, then swv_set_handle_checks. Until the first handle is made
// it counts as if there were, so that nothing else has to ask whether there are handles without.
extern std::atomic<bool> handles_are_checked;
inline bool check_handles() {
  return handles_are_checked.load(std::memory_order_relaxed);
}

// Of the checked mode.
void enter(HandleBase* handle);
void enter_uncounted(HandleBase* handle);  // of what is never freed
enum class Leave {
  kDone,
  kUnknown,  // it was made without checks
  kMisuse,   // was reported
};
Leave leave(const HandleBase* handle, Kind kind, const char* function);
void keep_memory(void* memory);
int64_t live_handles();
void set_checks(int32_t checks);  // a swv_checks

// Throw Failure (guard.h).
[[noreturn]] void fail_null(const char* argument);
void check_handle(const HandleBase* handle, Kind wanted, const char* argument);
// For _free, which cannot fail: says so (log.h).
void report_misuse(const char* function, std::string_view what);

template <typename H, typename... Args>
H* make(Args&&... args) {
  if (!check_handles()) return new H{{}, std::forward<Args>(args)...};
  std::unique_ptr<H> handle(new H{{}, std::forward<Args>(args)...});
  enter(handle.get());  // for which there may be no memory
  return handle.release();
}

// The handle behind a pointer that a caller has given. Without checks it costs three comparisons where
// it is used, and no call.
template <typename H>
[[gnu::always_inline]] inline H& in(H* handle, const char* argument) {
  constexpr Kind kWanted = std::remove_const_t<H>::kKind;
  if (handle == nullptr || check_handles() || handle->kind != kWanted) [[unlikely]]
    check_handle(handle, kWanted, argument);
  return *handle;
}

template <typename H>
[[gnu::hot]] void release(H* handle, const char* function) noexcept {
  if (handle == nullptr) return;
  if (!check_handles()) {
    if (handle->kind != H::kKind)
      return report_misuse(function, "the argument is no handle of this kind");
    if (!handle->is_entered) {
      delete handle;
      return;
    }
  }
  switch (leave(handle, H::kKind, function)) {
    case Leave::kMisuse:
      return;
    case Leave::kUnknown:
      delete handle;
      return;
    case Leave::kDone:
      handle->~H();
      keep_memory(handle);
  }
}

// A handle that is not given out yet.
template <typename H>
struct Release {
  void operator()(H* handle) const { release(handle, "a handle of the library's was freed"); }
};
template <typename H>
using Owned = std::unique_ptr<H, Release<H>>;

}  // namespace shardweave::capi
