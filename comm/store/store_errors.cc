#include "shardweave/comm/store/store_errors.h"

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace shardweave::store_errors {
namespace {

constexpr size_t kMaxShown = 8;  // of the keys that a message lists

std::string quoted(std::string_view bytes) {
  const std::string start(bytes.substr(0, 100));
  return absl::StrCat("\"", absl::CHexEscape(start), bytes.size() > 100 ? "...\"" : "\"");
}

}  // namespace

absl::Status missing_keys(const Store& store, const std::vector<std::string>& keys,
                          absl::Duration timeout) {
  std::vector<std::string> shown;
  for (size_t i = 0; i < keys.size() && i < kMaxShown; ++i) shown.push_back(quoted(keys[i]));
  if (keys.size() > kMaxShown) shown.push_back(absl::StrCat(keys.size() - kMaxShown, " more"));
  return absl::DeadlineExceededError(absl::StrCat(store.describe(), ": after ",
                                                  absl::FormatDuration(timeout), " nobody had set ",
                                                  absl::StrJoin(shown, ", ")));
}

absl::StatusOr<int64_t> add_to_counter(const Store& store, std::string_view key,
                                       std::string_view value, int64_t delta) {
  int64_t number = 0;
  if (!absl::SimpleAtoi(std::string(value), &number)) {
    return absl::InvalidArgumentError(absl::StrCat(store.describe(), ": cannot add to ",
                                                   quoted(key), ": its value ", quoted(value),
                                                   " is not a decimal number"));
  }
  int64_t sum = 0;
  if (__builtin_add_overflow(number, delta, &sum)) {
    return absl::OutOfRangeError(absl::StrCat(store.describe(), ": ", quoted(key), ": ", number,
                                              " + ", delta, " overflows"));
  }
  return sum;
}

}  // namespace shardweave::store_errors
