// Patterns of fully qualified names (FQN, "blocks.0.attn.q.weight"), and which of two counts.
//
//   const FqnPattern pattern = *FqnPattern::parse("*.{q,k}.weight");
//   pattern.matches("blocks.0.attn.k.weight");   // true
//
// A pattern is one of three kinds, and always speaks of the whole name: an exact name; a glob, with *
// for any characters, ? for one and {a,b} for either (names, not patterns); or "re:" and a regular
// expression in ECMAScript's syntax, "re:blocks\.[0-9]+\.q".
//
// Dots are characters, too: "blocks.*" also matches "blocks.0.up". The blocks alone are "blocks.?",
// or, of ten and more, "re:blocks\.[0-9]+".
#pragma once

#include <compare>
#include <cstddef>
#include <memory>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace shardweave {

class FqnPattern {
 public:
  // InvalidArgument: an odd brace, or no regular expression. The message continues "the pattern 'x'".
  static absl::StatusOr<FqnPattern> parse(std::string_view text);

  bool matches(std::string_view fqn) const;

  // Of two patterns that match a name, the greater is the more specific. An exact name is more
  // specific than any glob, a glob than any regular expression; of two globs, the one with more
  // characters of its own, then the one with fewer wildcards. Two regular expressions are equal.
  struct Specificity {
    int kind = 0;
    int characters = 0;
    int exactness = 0;  // wildcards, negative
    friend auto operator<=>(const Specificity&, const Specificity&) = default;
  };
  const Specificity& specificity() const { return specificity_; }

  // How many characters of `fqn` would have to be another, come or go for this to match; `limit`
  // + 1 if more than `limit`. Modules before the first one count as one: "layers.*" is 1 from
  // "model.layers.0". Of a regular expression nobody knows: `limit` + 1.
  int distance(std::string_view fqn, int limit) const;
  // "; did you mean 'a', 'b'?": the nearest of these, nearest first, that differ by a quarter of the
  // pattern's own characters (or two) at most; "" if there is none.
  std::string suggestion(absl::Span<const std::string> fqns, size_t most = 3) const;

 private:
  // A piece of a glob: '*' (kAny), '?' (kOne), or one of some texts.
  struct Piece {
    enum Kind { kText, kOne, kAny } kind = kText;
    std::vector<std::string> texts;
  };

  // Texts that every name that matches has, in their order. Compared first: most names have them not.
  struct Literals {
    std::vector<std::string> texts;
    bool from_start = false;  // the first one begins the name
    bool to_end = false;      // the last one ends it
    bool in(std::string_view fqn) const;
  };
  static Literals literals_of(const std::vector<Piece>& pieces);
  static Literals literals_of_regex(std::string_view body);

  std::vector<Piece> pieces_;
  std::shared_ptr<const std::regex> regex_;  // else a glob
  Literals literals_;
  Specificity specificity_;
};

// Whether a pattern is one and matches. Whoever asks for many names parses it once.
bool matches_fqn(std::string_view pattern, std::string_view fqn);

}  // namespace shardweave
