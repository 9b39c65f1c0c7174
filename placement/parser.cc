#include "shardweave/placement/parser.h"

#include <charconv>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace shardweave::placement_internal {
namespace {

constexpr int64_t kMinInt = std::numeric_limits<int>::min();
constexpr int64_t kMaxInt = std::numeric_limits<int>::max();
constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

// Printable whatever was given, and of bounded length.
std::string quoted(std::string_view text) {
  constexpr size_t kMaxShown = 100;
  return absl::StrCat("\"", absl::CHexEscape(std::string(text.substr(0, kMaxShown))),
                      text.size() > kMaxShown ? "...\"" : "\"");
}

}  // namespace

void Parser::skip_spaces() {
  while (position_ < text_.size() && text_[position_] == ' ') ++position_;
}

bool Parser::fail(const std::string& expected) {
  const std::string_view rest = text_.substr(position_, 16);
  status_ = absl::InvalidArgumentError(
      absl::StrCat("cannot read the ", what_, " ", quoted(text_), ": expected ", expected,
                   " at position ", position_, ", found ", rest.empty() ? "the end" : quoted(rest),
                   "; placements are written R, S(0), P or P(max), a layout [S(0), R]"));
  return false;
}

bool Parser::accept(std::string_view word) {
  skip_spaces();
  if (!text_.substr(position_).starts_with(word)) return false;
  position_ += word.size();
  return true;
}

bool Parser::expect(std::string_view word) {
  return accept(word) || fail(quoted(word));
}

bool Parser::expect_end() {
  skip_spaces();
  return position_ == text_.size() || fail("the end");
}

bool Parser::read_integer(int64_t min, int64_t max, const char* meaning, int64_t* out) {
  skip_spaces();
  const char* begin = text_.data() + position_;
  const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), *out);
  if (error != std::errc() || *out < min || *out > max) {
    return fail(absl::StrCat(meaning, " (an integer from ", min, " to ", max, ")"));
  }
  position_ += end - begin;
  return true;
}

bool Parser::read_placement(Placement* out) {
  if (accept("R")) {
    *out = Replicate();
    return true;
  }
  if (accept("S")) return read_shard(out);
  if (accept("P")) return read_partial(out);
  return fail("R, S(...) or P(...)");
}

bool Parser::read_shard(Placement* out) {
  int64_t dim;
  if (!expect("(") || !read_integer(kMinInt, kMaxInt, "a tensor dimension", &dim)) return false;
  *out = Shard(static_cast<int>(dim));
  if (accept(",")) {
    if (accept("sf")) {
      int64_t split_factor;
      if (!expect("=") || !read_integer(1, kMaxInt64, "a split factor", &split_factor)) {
        return false;
      }
      *out = StridedShard(static_cast<int>(dim), split_factor);
    } else if (accept("sizes")) {
      if (!expect("=") || !expect("[")) return false;
      std::vector<int64_t> sizes;
      if (!accept("]")) {
        do {
          int64_t size;
          if (!read_integer(0, kMaxInt64, "the size of a rank's piece", &size)) return false;
          sizes.push_back(size);
        } while (accept(","));
        if (!expect("]")) return false;
      }
      *out = RaggedShard(static_cast<int>(dim), std::move(sizes));
    } else {
      return fail("sf= or sizes=");
    }
  }
  return expect(")");
}

bool Parser::read_partial(Placement* out) {
  *out = Partial();
  if (!accept("(")) return true;
  skip_spaces();
  size_t end = position_;
  while (end < text_.size() && absl::ascii_isalpha(text_[end])) ++end;
  const std::optional<ReduceOp> op = parse_reduce_op(text_.substr(position_, end - position_));
  if (!op.has_value()) return fail("sum, avg, min, max or product");
  position_ = end;
  *out = Partial(*op);
  return expect(")");
}

}  // namespace shardweave::placement_internal

namespace shardweave {

using placement_internal::Parser;

absl::StatusOr<Placement> parse_placement(std::string_view text) {
  Parser parser("placement", text);
  Placement placement;
  if (!parser.read_placement(&placement) || !parser.expect_end()) return parser.status();
  return placement;
}

absl::StatusOr<Placements> parse_placements(std::string_view text) {
  Parser parser("placements", text);
  Placements placements;
  if (!parser.expect("[")) return parser.status();
  if (!parser.accept("]")) {
    do {
      if (!parser.read_placement(&placements.emplace_back())) return parser.status();
    } while (parser.accept(","));
    if (!parser.expect("]")) return parser.status();
  }
  if (!parser.expect_end()) return parser.status();
  return placements;
}

}  // namespace shardweave
