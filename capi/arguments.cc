#include "shardweave/capi/arguments.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <utility>

#include "absl/strings/str_join.h"

namespace shardweave::capi {
namespace {

constexpr size_t kMaxText = size_t{1} << 28;

// Length of the UTF-8 sequence at the front, 0 if it is none (RFC 3629).
size_t utf8_sequence(std::string_view s) {
  const auto byte = [&](size_t i) { return i < s.size() ? static_cast<unsigned char>(s[i]) : 0u; };
  const auto continues = [&](size_t i, unsigned low = 0x80, unsigned high = 0xbf) {
    return byte(i) >= low && byte(i) <= high;
  };
  const unsigned b = byte(0);
  if (b < 0x80) return 1;
  if (b >= 0xc2 && b <= 0xdf) return continues(1) ? 2 : 0;
  if (b >= 0xe0 && b <= 0xef) {
    const bool second = b == 0xe0   ? continues(1, 0xa0)
                        : b == 0xed ? continues(1, 0x80, 0x9f)
                                    : continues(1);
    return second && continues(2) ? 3 : 0;
  }
  if (b >= 0xf0 && b <= 0xf4) {
    const bool second = b == 0xf0   ? continues(1, 0x90)
                        : b == 0xf4 ? continues(1, 0x80, 0x8f)
                                    : continues(1);
    return second && continues(2) && continues(3) ? 4 : 0;
  }
  return 0;
}

// Levenshtein's distance, or limit + 1 if it is more.
size_t distance(std::string_view a, std::string_view b, size_t limit) {
  if (a.size() > b.size()) std::swap(a, b);
  if (b.size() - a.size() > limit) return limit + 1;
  std::vector<size_t> row(a.size() + 1);
  for (size_t i = 0; i <= a.size(); ++i) row[i] = i;
  for (size_t j = 1; j <= b.size(); ++j) {
    size_t diagonal = row[0];
    row[0] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[i];
      row[i] = std::min({replaced, row[i] + 1, row[i - 1] + 1});
    }
  }
  return row[a.size()];
}

}  // namespace

std::string_view text(const char* pointer, const char* argument) {
  if (pointer == nullptr) fail_null(argument);
  const std::string_view result(pointer, strnlen(pointer, kMaxText + 1));
  if (result.size() > kMaxText) {
    fail_argument(argument, str_cat("is longer than ", kMaxText, " bytes"));
  }
  check_utf8(result, argument);
  return result;
}

std::string_view text_or(const char* pointer, std::string_view otherwise, const char* argument) {
  return pointer == nullptr ? otherwise : text(pointer, argument);
}

void check_utf8(std::string_view bytes, const char* argument) {
  for (size_t i = 0; i < bytes.size();) {
    const size_t length = utf8_sequence(bytes.substr(i));
    if (length == 0) fail_argument(argument, str_cat("is not UTF-8 at byte ", i));
    i += length;
  }
}

std::string as_utf8(std::string_view bytes) {
  std::string result;
  while (!bytes.empty()) {
    const size_t length = utf8_sequence(bytes);
    if (length == 0) {
      constexpr char kDigits[] = "0123456789abcdef";
      const auto byte = static_cast<unsigned char>(bytes[0]);
      str_append(&result, "\\x", std::string_view(&kDigits[byte >> 4], 1),
                 std::string_view(&kDigits[byte & 15], 1));
    } else {
      result += bytes.substr(0, length);
    }
    bytes.remove_prefix(std::max<size_t>(1, length));
  }
  return result;
}

bool flag(swv_bool value, const char* argument) {
  if (value != 0 && value != 1) fail_argument(argument, str_cat("is ", value, "; wanted 0 or 1"));
  return value == 1;
}

void check_reserved(int64_t value, const char* argument) {
  if (value != 0) fail_argument(argument, str_cat("is ", value, "; it is reserved: wanted 0"));
}

ReduceOp reduce_op(swv_reduce_op op, const char* argument) {
  static constexpr std::array kOps = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin,
                                      ReduceOp::kMax, ReduceOp::kProduct};
  if (op < 0 || op >= static_cast<int>(kOps.size())) {
    fail_argument(argument, str_cat("is ", op, "; wanted a swv_reduce_op, 0 to ", kOps.size() - 1));
  }
  return kOps[op];
}

absl::Duration timeout(int64_t milliseconds, const char* argument, absl::Duration otherwise) {
  if (milliseconds < 0) {
    fail_argument(argument,
                  str_cat("is ", milliseconds, "; wanted milliseconds, or 0 for the default"));
  }
  // A century: more overflows clocks.
  constexpr int64_t kMost = int64_t{100} * 365 * 24 * 3600 * 1000;
  return milliseconds == 0 ? otherwise : absl::Milliseconds(std::min(milliseconds, kMost));
}

size_t common_size(size_t theirs, size_t first, size_t ours, const char* argument) {
  constexpr size_t kMost = 4096;  // what is larger is no size
  if (theirs < first || theirs > kMost) {
    fail_argument(argument, str_cat("has struct_size ", theirs, "; wanted ", first, " to ", kMost,
                                    " (use the initializer)"));
  }
  return std::min(theirs, ours);
}

void check_unknown(const void* given, size_t theirs, size_t ours, const char* argument) {
  const char* const bytes = static_cast<const char*>(given);
  for (size_t i = ours; i < theirs; ++i) {
    if (bytes[i] == 0) continue;
    fail(absl::StatusCode::kUnimplemented,
         str_cat("argument '", argument,
                 "' sets members that this version of the library does not know"));
  }
}

void check_same_size(size_t theirs, size_t first, const char* argument) {
  if (theirs != first) {
    fail_argument(argument, str_cat("has struct_size ", theirs, "; that of the first is ", first));
  }
}

void check_room(const void* to, size_t capacity, size_t element, const char* argument) {
  if (to == nullptr && capacity != 0) fail_null(argument);
  if (capacity > static_cast<size_t>(std::numeric_limits<ptrdiff_t>::max()) / element) {
    fail_argument(argument, str_cat("has room for ", capacity, " elements, which no array has"));
  }
}

swv_string* new_string(std::string text) {
  return make<swv_string>(std::move(text));
}

std::string suggestion(std::string_view wanted, const std::vector<std::string>& names) {
  constexpr size_t kShown = 3;
  const size_t limit = std::max<size_t>(2, wanted.size() / 4);
  std::vector<std::pair<size_t, std::string>> near;
  for (const std::string& name : names) {
    const size_t far = distance(wanted, name, limit);
    if (far <= limit) near.emplace_back(far, name);
  }
  std::sort(near.begin(), near.end());
  near.erase(std::unique(near.begin(), near.end()), near.end());
  if (near.empty()) return "";
  near.resize(std::min(near.size(), kShown));
  return str_cat("; did you mean ",
                 absl::StrJoin(near, ", ",
                               [](std::string* to, const auto& entry) {
                                 str_append(to, "'", entry.second, "'");
                               }),
                 "?");
}

}  // namespace shardweave::capi
