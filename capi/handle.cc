#include "shardweave/capi/handle.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <mutex>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "shardweave/capi/guard.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::capi {
namespace {

// Freed handles whose addresses are not used again yet.
constexpr size_t kKept = 1 << 16;

enum class Mode { kOff, kReport, kAbort };

Mode mode_of_environment() {
  const char* value = std::getenv("SWV_CHECK_HANDLES");
  if (value == nullptr || *value == '\0' || std::strcmp(value, "0") == 0) return Mode::kOff;
  return std::strcmp(value, "abort") == 0 ? Mode::kAbort : Mode::kReport;
}
const Mode mode = mode_of_environment();

struct Entry {
  Kind kind;
  bool alive;
};

// Never destroyed: handles may be freed while the process ends.
struct Table {
  std::mutex mutex;
  absl::flat_hash_map<const void*, Entry> entries;  // guarded by mutex, as are
  std::deque<void*> kept;                           // oldest first
  int64_t alive = 0;
};
Table& table() {
  static Table* const instance = new Table;
  return *instance;
}

// What is wrong with a handle; empty: nothing. The caller holds the mutex.
std::string misuse_of(const void* handle, Kind wanted) {
  const auto found = table().entries.find(handle);
  if (found == table().entries.end()) return "is no handle";
  if (!found->second.alive) {
    return str_cat("is a ", name_of(found->second.kind), " that was freed");
  }
  if (found->second.kind != wanted) {
    return str_cat("is a ", name_of(found->second.kind), "; wanted a ", name_of(wanted));
  }
  return "";
}

// From Kind::kStatus on.
constexpr std::string_view kNames[] = {"swv_status", "swv_string",       "swv_world",
                                       "swv_comm",   "swv_work",         "swv_coalescing",
                                       "swv_mesh",   "swv_strict_scope", "swv_layout",
                                       "swv_tensor", "swv_op",           "swv_function_context",
                                       "swv_module", "swv_plan",         "swv_optimizer",
                                       "swv_trace",  "swv_module_scope", "swv_random_scope"};
constexpr auto kFirst = static_cast<uint32_t>(Kind::kStatus);
static_assert(kFirst + std::size(kNames) == static_cast<uint32_t>(Kind::kRandomScope) + 1);

}  // namespace

const bool check_handles = mode != Mode::kOff;

std::string_view name_of(Kind kind) {
  const uint32_t i = static_cast<uint32_t>(kind) - kFirst;  // large for what is below
  return i < std::size(kNames) ? kNames[i] : "no handle";
}

void enter(const HandleBase* handle) {
  std::lock_guard lock(table().mutex);
  table().entries[handle] = {handle->kind, true};
  ++table().alive;
}

bool leave(const void* handle, Kind kind, const char* function) {
  std::string misuse;
  {
    std::lock_guard lock(table().mutex);
    misuse = misuse_of(handle, kind);
    if (misuse.empty()) {
      table().entries[handle].alive = false;
      --table().alive;
      return true;
    }
  }
  report_misuse(function, str_cat("the argument ", misuse));
  return false;
}

void keep_memory(void* memory) {
  std::lock_guard lock(table().mutex);
  table().kept.push_back(memory);
  if (table().kept.size() <= kKept) return;
  table().entries.erase(table().kept.front());
  ::operator delete(table().kept.front());
  table().kept.pop_front();
}

int64_t live_handles() {
  if (!check_handles) return -1;
  std::lock_guard lock(table().mutex);
  return table().alive;
}

void fail_null(const char* argument) {
  fail_argument(argument, "is NULL");
}

void check_handle(const void* handle, Kind wanted, const char* argument) {
  std::string misuse;
  {
    std::lock_guard lock(table().mutex);
    misuse = misuse_of(handle, wanted);
  }
  if (misuse.empty()) return;
  if (mode == Mode::kAbort) report_misuse(argument, misuse);
  fail_argument(argument, misuse);
}

void fail_kind(Kind is, Kind wanted, const char* argument) {
  fail_argument(argument, str_cat("is a ", name_of(is), "; wanted a ", name_of(wanted)));
}

void report_misuse(const char* function, std::string_view what) {
  std::fprintf(stderr, "shardweave: %s: %.*s\n", function, static_cast<int>(what.size()),
               what.data());
  if (mode == Mode::kAbort) std::abort();
}

}  // namespace shardweave::capi
