#include "shardweave/capi/handle.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "shardweave/capi/guard.h"
#include "shardweave/comm/log.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::capi {
namespace {

// Freed handles whose addresses are not used again yet.
constexpr size_t kKept = 1 << 16;

swv_checks checks_of_environment() {
  const char* value = std::getenv("SWV_CHECK_HANDLES");
  if (value == nullptr || *value == '\0' || std::strcmp(value, "0") == 0) return SWV_CHECKS_OFF;
  return std::strcmp(value, "abort") == 0 ? SWV_CHECKS_ABORT : SWV_CHECKS_REPORT;
}
std::atomic<swv_checks> checks{checks_of_environment()};
// Whether every handle that there is was entered. Where there were no checks for a while, what the
// table does not know may be one of then.
std::atomic<bool> all_are_entered{true};
// These and handles_are_checked change together: by one thread, while another one makes the first handle.
std::mutex switching;

bool abort_on_misuse() {
  return checks.load(std::memory_order_relaxed) == SWV_CHECKS_ABORT;
}

constexpr auto kFirst = static_cast<uint32_t>(Kind::kStatus);

// A kind in seven bits: kNone is 0.
constexpr uint8_t code_of(Kind kind) {
  return static_cast<uint8_t>(static_cast<uint32_t>(kind) - kFirst + 1);
}
constexpr Kind kind_of(uint8_t known) {
  return static_cast<Kind>((known & 0x7f) - 1u + kFirst);
}

// What is known of each address: nothing, or a kind and whether it lives. A tree over the bits of an
// address, whose leaves stand for a megabyte each and come with the first handle there. Reading and
// writing entries orders nothing: who hands a handle to another thread has to do that.
class Table {
 public:
  static constexpr uint8_t kAlive = 0x80;

  // The entry of `address`; null if there is none, and `make` does not ask for it.
  std::atomic<uint8_t>* find(const void* address, bool make) {
    const auto bits = reinterpret_cast<uintptr_t>(address);
    if (bits % kGrain != 0 || bits >> kAddressBits != 0) return nullptr;
    Branch* const branch = child(root_[bits >> (kAddressBits - kRootBits)], make);
    if (branch == nullptr) return nullptr;
    Leaf* const leaf = child((*branch)[bits >> kLeafShift & (branch->size() - 1)], make);
    return leaf == nullptr ? nullptr : &(*leaf)[bits / kGrain & (leaf->size() - 1)];
  }

 private:
  static constexpr uintptr_t kGrain = 16;  // what operator new aligns to
  static constexpr int kAddressBits = 48, kRootBits = 14, kLeafShift = 20;
  using Leaf = std::array<std::atomic<uint8_t>, (1 << kLeafShift) / kGrain>;
  using Branch = std::array<std::atomic<Leaf*>, 1 << (kAddressBits - kRootBits - kLeafShift)>;

  template <typename T>
  static T* child(std::atomic<T*>& slot, bool make) {
    T* there = slot.load(std::memory_order_acquire);
    if (there != nullptr || !make) return there;
    auto made = std::make_unique<T>();
    if (slot.compare_exchange_strong(there, made.get(), std::memory_order_acq_rel)) {
      return made.release();
    }
    return there;
  }

  std::array<std::atomic<Branch*>, 1 << kRootBits> root_ = {};
};
static_assert(__STDCPP_DEFAULT_NEW_ALIGNMENT__ >= 16);

// Never destroyed: handles may be freed while the process ends.
Table& table() {
  static Table* const instance = new Table;
  return *instance;
}

std::atomic<int64_t> alive{0};

// The memory of freed handles whose addresses are not used again yet: a ring.
std::array<std::atomic<void*>, kKept> kept_memory;
std::atomic<size_t> next_kept{0};

constexpr uint8_t living(Kind kind) {
  return Table::kAlive | code_of(kind);
}

// What is wrong with a handle of which this is known.
std::string misuse_of(uint8_t known, Kind wanted) {
  if (known == 0) return "is no handle";
  const std::string_view name = name_of(kind_of(known));
  if ((known & Table::kAlive) == 0) return str_cat("is a ", name, " that was freed");
  return str_cat("is a ", name, "; wanted a ", name_of(wanted));
}

uint8_t known_of(const void* handle) {
  const std::atomic<uint8_t>* const entry = table().find(handle, false);
  return entry == nullptr ? 0 : entry->load(std::memory_order_relaxed);
}

// Of a handle that the table does not know. It is only looked at where there may be such.
bool was_made_without_checks(const HandleBase* handle, Kind kind) {
  return !all_are_entered.load(std::memory_order_relaxed) && handle->kind == kind &&
         !handle->is_entered;
}

// From Kind::kStatus on.
constexpr std::string_view kKindNames[] = {
    "swv_status",         "swv_string",       "swv_world",        "swv_comm",
    "swv_work",           "swv_coalescing",   "swv_mesh",         "swv_scope",
    "swv_layout",         "swv_tensor",       "swv_op",           "swv_function_context",
    "swv_module",         "swv_plan",         "swv_optimizer",    "swv_trace",
    "swv_forward",        "swv_grad_sync",    "swv_grad_scaler",  "swv_token_file",
    "swv_loader",         "swv_state",        "swv_checkpointer", "swv_safetensors",
    "swv_metrics_writer", "swv_captured_step"};
constexpr std::string_view kNoHandle = "no handle";
static_assert(kFirst + std::size(kKindNames) == static_cast<uint32_t>(Kind::kCapturedStep) + 1);
static_assert(std::size(kKindNames) < Table::kAlive);

}  // namespace

std::atomic<bool> handles_are_checked{true};

swv_status* out_of_memory() {
  // Never freed.
  static swv_status* const status = [] {
    auto* made = new swv_status{{}, SWV_CODE_RESOURCE_EXHAUSTED, "out of memory"};
    // Also without checks: they may come.
    enter_uncounted(made);
    return made;
  }();
  return status;
}
// Made while there is memory.
[[maybe_unused]] static const swv_status* const made_early = out_of_memory();

std::string_view name_of(Kind kind) {
  const uint32_t i = static_cast<uint32_t>(kind) - kFirst;  // large for what is below
  return i < std::size(kKindNames) ? kKindNames[i] : kNoHandle;
}

void enter_uncounted(HandleBase* handle) {
  handle->is_entered = true;
  table().find(handle, true)->store(living(handle->kind), std::memory_order_relaxed);
}

void enter(HandleBase* handle) {
  if (checks.load(std::memory_order_relaxed) == SWV_CHECKS_OFF) {  // it is the first one
    const std::lock_guard lock(switching);
    if (checks == SWV_CHECKS_OFF) {
      all_are_entered = false;
      handles_are_checked = false;
      return;
    }
  }
  enter_uncounted(handle);
  alive.fetch_add(1, std::memory_order_relaxed);
}

Leave leave(const HandleBase* handle, Kind kind, const char* function) {
  std::atomic<uint8_t>* const entry = table().find(handle, false);
  uint8_t known = living(kind);
  // Of two threads that free it one is told.
  if (entry != nullptr &&
      entry->compare_exchange_strong(known, code_of(kind), std::memory_order_relaxed)) {
    alive.fetch_sub(1, std::memory_order_relaxed);
    return Leave::kDone;
  }
  if ((entry == nullptr || known == 0) && was_made_without_checks(handle, kind)) {
    return Leave::kUnknown;
  }
  report_misuse(function, str_cat("the argument ", misuse_of(entry == nullptr ? 0 : known, kind)));
  return Leave::kMisuse;
}

void keep_memory(void* memory) {
  const size_t place = next_kept.fetch_add(1, std::memory_order_relaxed) % kept_memory.size();
  void* const oldest = kept_memory[place].exchange(memory, std::memory_order_acq_rel);
  if (oldest == nullptr) return;
  table().find(oldest, true)->store(0, std::memory_order_relaxed);
  ::operator delete(oldest);
}

int64_t live_handles() {
  const bool are_checked = checks.load(std::memory_order_relaxed) != SWV_CHECKS_OFF;
  return are_checked ? alive.load(std::memory_order_relaxed) : -1;
}

void set_checks(swv_checks wanted) {
  const std::lock_guard lock(switching);
  if (wanted == SWV_CHECKS_OFF) all_are_entered = false;
  checks = wanted;
  handles_are_checked = wanted != SWV_CHECKS_OFF;
}

void fail_null(const char* argument) {
  fail_argument(argument, "is NULL");
}

// While there are checks.
static void check_entered(const HandleBase* handle, Kind wanted, const char* argument) {
  const uint8_t known = known_of(handle);
  if (known == living(wanted)) [[likely]]
    return;
  if (known == 0 && was_made_without_checks(handle, wanted)) return;
  const std::string misuse = misuse_of(known, wanted);
  if (abort_on_misuse()) report_misuse("a call", str_cat("argument '", argument, "' ", misuse));
  fail_argument(argument, misuse);
}

void check_handle(const HandleBase* handle, Kind wanted, const char* argument) {
  if (handle == nullptr) fail_null(argument);
  if (check_handles()) return check_entered(handle, wanted, argument);
  if (handle->kind == wanted) return;
  const std::string_view name = name_of(handle->kind);
  fail_argument(argument,
                str_cat(name == kNoHandle ? "is " : "is a ", name, "; wanted a ", name_of(wanted)));
}

void report_misuse(const char* function, std::string_view what) {
  try {
    say(str_cat(function, ": ", what));
  } catch (...) {  // there is no memory for it
    std::fprintf(stderr, "shardweave: %s: a misuse\n", function);
  }
  if (abort_on_misuse()) std::abort();
}

}  // namespace shardweave::capi

swv_status* swv_set_handle_checks(swv_checks checks) {
  using namespace shardweave::capi;
  return guarded(__func__, [&] {
    if (checks < SWV_CHECKS_OFF || checks > SWV_CHECKS_ABORT) {
      fail_argument("checks", shardweave::str_cat("is ", checks, "; wanted a swv_checks, 0 to ",
                                                  int{SWV_CHECKS_ABORT}));
    }
    set_checks(checks);
  });
}

swv_status* swv_set_log(swv_log_fn to, void* user_data, void (*drop)(void*)) {
  using namespace shardweave::capi;
  return guarded(__func__, [&] {
    // Whatever happens from here on, it is dropped.
    const std::shared_ptr<void> owned(user_data, [drop](void* data) {
      if (drop != nullptr) drop(data);
    });
    if (to == nullptr) return shardweave::set_log(nullptr);
    shardweave::set_log(
        [to, owned](std::string_view line) { to(owned.get(), std::string(line).c_str()); });
  });
}
