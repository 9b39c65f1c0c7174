#include "shardweave/dtensor/fqn_pattern.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace shardweave {
namespace {

constexpr std::string_view kRegex = "re:";

// libstdc++ searches depth first by default, for which "(a+)+b" takes longer than anybody waits.
constexpr std::regex::flag_type kSyntax = std::regex::ECMAScript
#ifdef __GLIBCXX__
                                          | std::regex_constants::__polynomial
#endif
    ;

// Edits that turn a text so far into the first i characters of the name, for every i.
using Edits = std::vector<int>;

Edits with_text(Edits edits, std::string_view text, std::string_view fqn) {
  for (const char c : text) {
    Edits next(edits.size());
    next[0] = edits[0] + 1;
    for (size_t i = 1; i < edits.size(); ++i) {
      next[i] = std::min({edits[i - 1] + (fqn[i - 1] == c ? 0 : 1), edits[i] + 1, next[i - 1] + 1});
    }
    edits = std::move(next);
  }
  return edits;
}

// From the '[' at `begin` to behind its ']'; npos: not understood.
size_t behind_brackets(std::string_view body, size_t begin) {
  size_t i = begin + 1;
  if (i < body.size() && body[i] == '^') ++i;
  if (i < body.size() && body[i] == ']') return std::string_view::npos;
  for (; i < body.size(); ++i) {
    if (body[i] == ']') return i + 1;
    if (body[i] == '\\') {
      ++i;
    } else if (body[i] == '[' && i + 1 < body.size() &&
               (body[i + 1] == ':' || body[i + 1] == '.' || body[i + 1] == '=')) {
      const char end[] = {body[i + 1], ']', 0};  // "[:alpha:]"
      i = body.find(end, i + 2);
      if (i == std::string_view::npos) return i;
      ++i;
    }
  }
  return std::string_view::npos;
}

// From the '(' at `begin` to behind its ')'; npos: not understood.
size_t behind_group(std::string_view body, size_t begin) {
  int depth = 0;
  for (size_t i = begin; i < body.size();) {
    if (body[i] == '\\') {
      i += 2;
    } else if (body[i] == '[') {
      i = behind_brackets(body, i);
      if (i == std::string_view::npos) return i;
    } else {
      if (body[i] == '(') ++depth;
      if (body[i] == ')' && --depth == 0) return i + 1;
      ++i;
    }
  }
  return std::string_view::npos;
}

}  // namespace

bool FqnPattern::Literals::in(std::string_view fqn) const {
  if (texts.empty()) return true;
  if (from_start && !fqn.starts_with(texts.front())) return false;
  if (to_end && !fqn.ends_with(texts.back())) return false;
  size_t begin = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    size_t at;
    if (i == 0 && from_start) {
      at = 0;
    } else if (i + 1 == texts.size() && to_end) {
      if (fqn.size() < begin + texts[i].size()) return false;
      at = fqn.size() - texts[i].size();
    } else {
      at = fqn.find(texts[i], begin);
    }
    if (at == std::string_view::npos) return false;
    begin = at + texts[i].size();
  }
  return true;
}

FqnPattern::Literals FqnPattern::literals_of(const std::vector<Piece>& pieces) {
  Literals literals;
  const auto is_literal = [](const Piece& piece) {
    return piece.kind == Piece::kText && piece.texts.size() == 1;
  };
  for (const Piece& piece : pieces) {
    if (is_literal(piece)) literals.texts.push_back(piece.texts[0]);
  }
  literals.from_start = !pieces.empty() && is_literal(pieces.front());
  literals.to_end = !pieces.empty() && is_literal(pieces.back());
  return literals;
}

// Of what stands outside of groups. Whatever is not understood (alternatives, say) has none.
FqnPattern::Literals FqnPattern::literals_of_regex(std::string_view body) {
  Literals literals;
  std::string run;
  bool at_start = true;  // nothing but literals so far
  const auto end_run = [&] {
    if (!run.empty()) {
      literals.from_start |= at_start && literals.texts.empty();
      literals.texts.push_back(std::exchange(run, ""));
    }
    at_start = false;
  };
  for (size_t i = 0; i < body.size();) {
    const char c = body[i];
    switch (c) {
      case '|':
        return {};
      case '^':
        if (i != 0) return {};
        ++i;
        break;
      case '$':
        if (i + 1 != body.size()) return {};
        ++i;
        break;
      case '[':
      case '(':
        end_run();
        i = c == '[' ? behind_brackets(body, i) : behind_group(body, i);
        if (i == std::string_view::npos) return {};
        break;
      case '.':
      case '+':
        end_run();
        ++i;
        break;
      case '*':
      case '?':
      case '{':  // what stands before it may be missing
        if (!run.empty()) run.pop_back();
        end_run();
        i = c == '{' ? body.find('}', i) : i;
        if (i == std::string_view::npos) return {};
        ++i;
        break;
      case '\\': {
        const char escaped = i + 1 < body.size() ? body[i + 1] : 0;
        if (std::string_view("dDwWsSbBtnrfv").find(escaped) != std::string_view::npos) {
          end_run();
        } else if (absl::ascii_ispunct(static_cast<unsigned char>(escaped))) {
          run.push_back(escaped);
        } else {
          return {};  // by its number; another group's
        }
        i += 2;
        break;
      }
      default:
        run.push_back(c);
        ++i;
    }
  }
  literals.to_end = !run.empty();
  end_run();
  return literals;
}

absl::StatusOr<FqnPattern> FqnPattern::parse(std::string_view text) {
  FqnPattern pattern;
  if (text.starts_with(kRegex)) {
    const std::string_view body = text.substr(kRegex.size());
    // libstdc++ descends once for each parenthesis.
    constexpr size_t kMost = 4096;
    if (body.size() > kMost) {
      return absl::InvalidArgumentError(absl::StrCat("is a regular expression of ", body.size(),
                                                     " characters; wanted at most ", kMost));
    }
    try {
      pattern.regex_ = std::make_shared<std::regex>(body.begin(), body.end(), kSyntax);
    } catch (const std::regex_error& error) {
      return absl::InvalidArgumentError(
          absl::StrCat("is no regular expression: ", std::string(error.what())));
    }
    pattern.literals_ = literals_of_regex(body);
    return pattern;
  }

  std::string literal;
  const auto end_literal = [&] {
    if (!literal.empty()) pattern.pieces_.push_back({Piece::kText, {std::exchange(literal, "")}});
  };
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '}') return absl::InvalidArgumentError("has a '}' without a '{' before it");
    if (c != '*' && c != '?' && c != '{') {
      literal.push_back(c);
      continue;
    }
    end_literal();
    if (c != '{') {
      pattern.pieces_.push_back({c == '*' ? Piece::kAny : Piece::kOne, {}});
      continue;
    }
    const size_t close = text.find_first_of("{}", i + 1);
    if (close == std::string_view::npos) {
      return absl::InvalidArgumentError("has a '{' without a '}' behind it");
    }
    if (text[close] == '{') {
      return absl::InvalidArgumentError(
          "has a '{' inside of '{...}', where only names and commas are");
    }
    if (text.substr(i, close - i).find_first_of("*?") != std::string_view::npos) {
      return absl::InvalidArgumentError(
          "has a wildcard inside of '{...}', where only names and commas are");
    }
    Piece either;
    for (std::string_view rest = text.substr(i + 1, close - i - 1);;) {
      const size_t comma = rest.find(',');
      either.texts.emplace_back(rest.substr(0, comma));
      if (comma == std::string_view::npos) break;
      rest.remove_prefix(comma + 1);
    }
    pattern.pieces_.push_back(std::move(either));
    i = close;
  }
  end_literal();
  pattern.literals_ = literals_of(pattern.pieces_);

  Specificity& specificity = pattern.specificity_;
  specificity.kind = 2;
  for (const Piece& piece : pattern.pieces_) {
    if (piece.kind != Piece::kText || piece.texts.size() != 1) {
      specificity.kind = 1;
      --specificity.exactness;
    }
    if (piece.kind != Piece::kText) continue;
    const auto shortest = std::min_element(
        piece.texts.begin(), piece.texts.end(),
        [](const std::string& a, const std::string& b) { return a.size() < b.size(); });
    specificity.characters += static_cast<int>(shortest->size());
  }
  return pattern;
}

bool FqnPattern::matches(std::string_view fqn) const {
  if (!literals_.in(fqn)) return false;
  if (specificity_.kind == 2 && pieces_.size() == 1)
    return fqn.size() == pieces_[0].texts[0].size();
  if (regex_ != nullptr) return std::regex_match(fqn.begin(), fqn.end(), *regex_);
  // Whether the pieces so far match the first i characters.
  std::vector<bool> reached(fqn.size() + 1);
  reached[0] = true;
  for (const Piece& piece : pieces_) {
    std::vector<bool> next(reached.size());
    for (size_t i = 0; i < reached.size(); ++i) {
      if (!reached[i]) continue;
      if (piece.kind == Piece::kAny) {
        std::fill(next.begin() + static_cast<int64_t>(i), next.end(), true);
        break;
      }
      if (piece.kind == Piece::kOne && i < fqn.size()) next[i + 1] = true;
      for (const std::string& text : piece.texts) {
        if (fqn.substr(i).starts_with(text)) next[i + text.size()] = true;
      }
    }
    reached = std::move(next);
  }
  return reached.back();
}

int FqnPattern::distance(std::string_view fqn, int limit) const {
  if (regex_ != nullptr) return limit + 1;
  Edits edits(fqn.size() + 1);
  std::iota(edits.begin(), edits.end(), 0);
  for (size_t i = 1; i < edits.size(); ++i) {
    if (fqn[i - 1] == '.') edits[i] = 1;
  }
  for (const Piece& piece : pieces_) {
    if (piece.kind == Piece::kAny) {
      for (size_t i = 1; i < edits.size(); ++i) edits[i] = std::min(edits[i], edits[i - 1]);
    } else if (piece.kind == Piece::kOne) {
      edits.insert(edits.begin(), edits[0] + 1);
      edits.pop_back();
    } else {
      Edits best = with_text(edits, piece.texts[0], fqn);
      for (size_t t = 1; t < piece.texts.size(); ++t) {
        const Edits other = with_text(edits, piece.texts[t], fqn);
        std::transform(best.begin(), best.end(), other.begin(), best.begin(),
                       [](int a, int b) { return std::min(a, b); });
      }
      edits = std::move(best);
    }
  }
  return std::min(edits.back(), limit + 1);
}

std::string FqnPattern::suggestion(absl::Span<const std::string> fqns, size_t most) const {
  const int far = std::max(2, specificity_.characters / 4);
  std::vector<std::pair<int, std::string_view>> near;
  for (const std::string& fqn : fqns) {
    const int edits = distance(fqn, far);
    if (edits <= far && !fqn.empty()) near.emplace_back(edits, fqn);
  }
  if (near.empty()) return "";
  std::stable_sort(near.begin(), near.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  near.resize(std::min(near.size(), most));
  return absl::StrCat("; did you mean ",
                      absl::StrJoin(near, ", ",
                                    [](std::string* out, const auto& n) {
                                      absl::StrAppend(out, "'", std::string(n.second), "'");
                                    }),
                      "?");
}

bool matches_fqn(std::string_view pattern, std::string_view fqn) {
  const absl::StatusOr<FqnPattern> parsed = FqnPattern::parse(pattern);
  return parsed.ok() && parsed->matches(fqn);
}

}  // namespace shardweave
