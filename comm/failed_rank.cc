#include "shardweave/comm/failed_rank.h"

#include <charconv>
#include <string>

#include "absl/strings/cord.h"

namespace shardweave {
namespace {

constexpr char kUrl[] = "shardweave/failed_rank";

}  // namespace

absl::Status of_rank(absl::Status status, int64_t world_rank) {
  if (!status.ok()) status.SetPayload(kUrl, absl::Cord(std::to_string(world_rank)));
  return status;
}

std::optional<int> failed_rank(const absl::Status& status) {
  const auto payload = status.GetPayload(kUrl);
  if (!payload.has_value()) return std::nullopt;
  const std::string text(*payload);
  int rank = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), rank);
  if (result.ec != std::errc() || rank < 0) return std::nullopt;
  return rank;
}

absl::Status retold(const absl::Status& why, const std::string& text) {
  absl::Status result(why.code(), text);
  const std::optional<int> rank = failed_rank(why);
  return rank.has_value() ? of_rank(std::move(result), *rank) : result;
}

absl::Status retold(const absl::Status& why) {
  return retold(why, std::string(why.message()));
}

}  // namespace shardweave
