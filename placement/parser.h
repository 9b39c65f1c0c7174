// Reads the printed form of placements and layouts. Internal to placement/.
//
//   list      = "[" [ entry { "," entry } ] "]"
//   entry     = placement [ "@" integer ]              (the "@" in layouts only)
//   placement = "R" | "P" [ "(" reduction ")" ] | "S(" integer [ "," how ] ")"
//   how       = "sf=" integer | "sizes=[" [ integer { "," integer } ] "]"
//
// Every read_...() returns false after the first error, which status() then tells.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "shardweave/placement/placement.h"

namespace shardweave::placement_internal {

class Parser {
 public:
  // `what` names the thing in error messages: "placement", "layout".
  Parser(std::string_view what, std::string_view text) : what_(what), text_(text) {}

  bool read_placement(Placement* out);
  // An integer from `min` to `max`; `meaning` is for the error message.
  bool read_integer(int64_t min, int64_t max, const char* meaning, int64_t* out);
  // Skips spaces and `word` if it comes next; else leaves the position alone.
  bool accept(std::string_view word);
  bool expect(std::string_view word);
  bool expect_end();

  const absl::Status& status() const { return status_; }

 private:
  bool read_shard(Placement* out);
  bool read_partial(Placement* out);
  void skip_spaces();
  bool fail(const std::string& expected);

  const std::string what_;
  const std::string_view text_;
  size_t position_ = 0;
  absl::Status status_;
};

}  // namespace shardweave::placement_internal
