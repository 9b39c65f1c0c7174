#include "shardweave/modules/hugging_face/names.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/modules/checkpoint/safetensors.h"

namespace shardweave {
namespace {

// A `*` is one part of a name between dots; those of both sides follow each other. With `#` our tensor is
// a stack, and # the number in it; several names then lie one after the other along dimension 1.
struct NameRule {
  const char* kind;
  const char* ours;
  std::vector<const char*> in_files;
};

const std::vector<NameRule>& name_rules() {
  static const auto* const kRules = new std::vector<NameRule>{
      {"vit",
       "vit.layers.*.attention.q_proj.*",
       {"vit.encoder.layer.*.attention.attention.query.*"}},
      {"vit", "vit.layers.*.attention.k_proj.*", {"vit.encoder.layer.*.attention.attention.key.*"}},
      {"vit",
       "vit.layers.*.attention.v_proj.*",
       {"vit.encoder.layer.*.attention.attention.value.*"}},
      {"vit", "vit.layers.*.attention.o_proj.*", {"vit.encoder.layer.*.attention.output.dense.*"}},
      {"vit", "vit.layers.*.mlp.fc1.*", {"vit.encoder.layer.*.intermediate.dense.*"}},
      {"vit", "vit.layers.*.mlp.fc2.*", {"vit.encoder.layer.*.output.dense.*"}},
      {"vit", "vit.layers.*.layernorm_before.*", {"vit.encoder.layer.*.layernorm_before.*"}},
      {"vit", "vit.layers.*.layernorm_after.*", {"vit.encoder.layer.*.layernorm_after.*"}},
      {"mixtral",
       "model.layers.*.mlp.gate.weight",
       {"model.layers.*.block_sparse_moe.gate.weight"}},
      {"mixtral",
       "model.layers.*.mlp.experts.gate_up_proj",
       {"model.layers.*.block_sparse_moe.experts.#.w1.weight",
        "model.layers.*.block_sparse_moe.experts.#.w3.weight"}},
      {"mixtral",
       "model.layers.*.mlp.experts.down_proj",
       {"model.layers.*.block_sparse_moe.experts.#.w2.weight"}},
  };
  return *kRules;
}

struct KindNames {
  const char* kind;
  const char* around;                    // the layers
  std::vector<const char*> made;         // ends of names of ours that are in no file
  std::vector<const char*> passed_over;  // ends of names in files
};

const std::vector<KindNames>& kinds() {
  static const auto* const kKinds = new std::vector<KindNames>{
      {"llama", "model.", {".rotary_emb.inv_freq", ".rotary_emb.long_inv_freq"}, {}},
      {"mixtral", "model.", {".rotary_emb.inv_freq", ".rotary_emb.long_inv_freq"}, {}},
      {"gpt2", "transformer.", {}, {".attn.bias", ".attn.masked_bias"}},
      {"vit", "vit.", {}, {"pooler.dense.weight", "pooler.dense.bias"}},
  };
  return *kKinds;
}

const KindNames* find_kind(std::string_view kind) {
  for (const KindNames& each : kinds()) {
    if (each.kind == kind) return &each;
  }
  return nullptr;
}

bool ends_with_any(std::string_view name, const std::vector<const char*>& ends) {
  return std::any_of(ends.begin(), ends.end(),
                     [&](const char* end) { return name.ends_with(end); });
}

std::vector<std::string> segments(std::string_view name) {
  return absl::StrSplit(std::string(name), '.');
}

// What the pattern's stars stand for, if the name is one of its.
std::optional<std::vector<std::string>> stars_of(std::string_view pattern, std::string_view name) {
  const std::vector<std::string> wanted = segments(pattern), given = segments(name);
  if (wanted.size() != given.size()) return std::nullopt;
  std::vector<std::string> stars;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] == "*") {
      stars.push_back(given[i]);
    } else if (wanted[i] != given[i]) {
      return std::nullopt;
    }
  }
  return stars;
}

std::string filled(std::string_view pattern, const std::vector<std::string>& stars,
                   int64_t number) {
  std::vector<std::string> parts = segments(pattern);
  size_t next = 0;
  for (std::string& part : parts) {
    if (part == "*") part = stars[next++];
    if (part == "#") part = std::to_string(number);
  }
  return absl::StrJoin(parts, ".");
}

std::vector<FilePart> whole_part(std::string name, const Dims& shape) {
  return {{std::move(name), whole_box(shape), shape}};
}

std::vector<FilePart> parts_by(const NameRule& rule, const std::vector<std::string>& stars,
                               std::string_view name, const Dims& shape) {
  const auto count = static_cast<int64_t>(rule.in_files.size());
  if (std::string_view(rule.in_files[0]).find('#') == std::string_view::npos) {
    return whole_part(filled(rule.in_files[0], stars, 0), shape);
  }
  // Of another shape it is something else, and so called.
  if (shape.size() != 3 || shape[1] % count != 0) return whole_part(std::string(name), shape);
  const int64_t rows = shape[1] / count;
  std::vector<FilePart> parts;
  for (int64_t expert = 0; expert < shape[0]; ++expert) {
    for (int64_t i = 0; i < count; ++i) {
      parts.push_back({filled(rule.in_files[static_cast<size_t>(i)], stars, expert),
                       Box{{expert, i * rows, 0}, {1, rows, shape[2]}},
                       {rows, shape[2]}});
    }
  }
  return parts;
}

// All the ways in which it may be in files, the usual one first.
std::vector<std::vector<FilePart>> ways(std::string_view kind, const std::string& name,
                                        const Dims& shape) {
  std::vector<std::vector<FilePart>> result = {file_parts(kind, name, shape)};
  if (result[0].size() != 1 || result[0][0].name != name) {
    result.push_back(whole_part(name, shape));
  }
  const KindNames* its = find_kind(kind);
  if (its == nullptr) return result;
  for (size_t i = 0, size = result.size(); i < size; ++i) {
    std::vector<FilePart> without = result[i];
    bool all = true;
    for (FilePart& part : without) {
      all = all && part.name.starts_with(its->around);
      if (all) part.name.erase(0, std::string_view(its->around).size());
    }
    if (all) result.push_back(std::move(without));
  }
  return result;
}

std::string in_brackets(const Dims& shape) {
  return str_cat("[", absl::StrJoin(shape, ", "), "]");
}

bool is_floating(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
    case DType::kF8E4M3:
    case DType::kF8E5M2:
      return true;
    default:
      return false;
  }
}

// The first few of them.
void append_list(std::string* text, const char* what, const std::vector<std::string>& names) {
  constexpr size_t kMost = 20;
  if (names.empty()) return;
  str_append(text, text->empty() ? "" : "; ", what, ": ");
  for (size_t i = 0; i < std::min(names.size(), kMost); ++i) {
    str_append(text, i == 0 ? "" : ", ", names[i]);
  }
  if (names.size() > kMost) str_append(text, " and ", names.size() - kMost, " more");
}

// Whether the bytes of a box are the same in both: some rows at a time, of rows that are too large some
// of theirs.
absl::StatusOr<bool> is_equal(const TensorSource& a, const TensorSource& b, const Box& box,
                              size_t dim) {
  constexpr int64_t kMostBytes = int64_t{4} << 20;
  const int64_t bytes = box.numel() * element_size(a.dtype);
  if (bytes == 0) return true;
  if (bytes <= kMostBytes || dim == box.shape.size()) {
    std::vector<char> x(static_cast<size_t>(bytes)), y(x.size());
    absl::Status status = a.read(box, box, x.data());
    if (status.ok()) status = b.read(box, box, y.data());
    if (!status.ok()) return status;
    return x == y;
  }
  const int64_t rows = box.shape[dim];
  const int64_t step = std::max<int64_t>(1, kMostBytes / (bytes / rows));
  for (int64_t row = 0; row < rows; row += step) {
    Box part = box;
    part.offset[dim] += row;
    part.shape[dim] = std::min(step, rows - row);
    absl::StatusOr<bool> equal = is_equal(a, b, part, dim + 1);
    if (!equal.ok() || !*equal) return equal;
  }
  return true;
}

class Matcher {
 public:
  Matcher(std::string_view kind, const std::vector<TensorSource>& there)
      : kind_(kind), there_(there) {
    for (size_t i = 0; i < there.size(); ++i) places_.emplace(there[i].name, i);
  }

  void find(const WantedTensor& wanted) {
    std::vector<std::vector<FilePart>> chosen;  // of each name that is there
    std::vector<std::string> names = {wanted.name};
    names.insert(names.end(), wanted.aliases.begin(), wanted.aliases.end());
    for (const std::string& name : names) {
      for (std::vector<FilePart>& way : ways(kind_, name, wanted.shape)) {
        if (!has_all(way)) continue;
        for (const FilePart& part : way) used_.insert(part.name);
        chosen.push_back(std::move(way));
        break;
      }
    }
    match_.found.emplace_back();
    if (chosen.empty()) {
      for (const FilePart& part : file_parts(kind_, wanted.name, wanted.shape)) {
        if (!places_.contains(part.name)) match_.missing.push_back(part.name);
        used_.insert(part.name);
      }
      return;
    }
    std::optional<TensorSource>& found = match_.found.back();
    found = together(wanted, chosen[0]);
    // The other names of a tied weight are of no use, but are to be the same.
    for (size_t i = 1; i < chosen.size(); ++i) {
      std::optional<TensorSource> copy = together(wanted, chosen[i]);
      if (!found.has_value() || !copy.has_value()) continue;
      const std::string& name = chosen[i].front().name;
      const std::string& its = chosen[0].front().name;
      if (copy->dtype != found->dtype) {
        match_.differing.push_back(str_cat(name, " (", safetensors_name(copy->dtype), "; ", its,
                                           ", to which it is tied, is ",
                                           safetensors_name(found->dtype), ")"));
        continue;
      }
      match_.copies.push_back({name, *std::move(copy), *found});
      match_.copies.back().found.name = its;
    }
  }

  FileMatch finish() {
    for (const TensorSource& source : there_) {
      if (used_.contains(source.name) || is_passed_over(kind_, source.name)) continue;
      match_.unexpected.push_back(source.name);
    }
    return std::move(match_);
  }

 private:
  // None, and said so, if they do not fit.
  std::optional<TensorSource> together(const WantedTensor& wanted,
                                       const std::vector<FilePart>& way) {
    bool fits = true;
    std::vector<SourcePart> parts;
    for (const FilePart& part : way) {
      const TensorSource& source = there_[places_.at(part.name)];
      fits = is_as(source, part, wanted, there_[places_.at(way.front().name)].dtype) && fits;
      parts.push_back({source, part.box});
    }
    if (!fits) return std::nullopt;
    return put_together(wanted.name, wanted.shape, std::move(parts));
  }

  bool has_all(const std::vector<FilePart>& parts) const {
    return std::all_of(parts.begin(), parts.end(),
                       [&](const FilePart& part) { return places_.contains(part.name); });
  }

  bool is_as(const TensorSource& source, const FilePart& part, const WantedTensor& wanted,
             DType first) {
    if (source.shape != part.shape) {
      match_.differing.push_back(str_cat(part.name, " (", in_brackets(source.shape), " there, ",
                                         in_brackets(part.shape), " here)"));
      return false;
    }
    if (source.dtype != first) {
      match_.differing.push_back(str_cat(part.name, " (", safetensors_name(source.dtype),
                                         "; what belongs to it is ", safetensors_name(first), ")"));
      return false;
    }
    if (!wanted.dtype.has_value() || *wanted.dtype == source.dtype ||
        (is_floating(*wanted.dtype) && is_floating(source.dtype))) {
      return true;
    }
    match_.differing.push_back(str_cat(part.name, " (", safetensors_name(source.dtype), " there, ",
                                       safetensors_name(*wanted.dtype), " here)"));
    return false;
  }

  const std::string kind_;
  const std::vector<TensorSource>& there_;
  std::unordered_map<std::string, size_t> places_;
  std::set<std::string> used_;
  FileMatch match_;
};

}  // namespace

std::vector<FilePart> file_parts(std::string_view kind, std::string_view name, const Dims& shape) {
  for (const NameRule& rule : name_rules()) {
    if (rule.kind != kind) continue;
    const std::optional<std::vector<std::string>> stars = stars_of(rule.ours, name);
    if (stars.has_value()) return parts_by(rule, *stars, name, shape);
  }
  return whole_part(std::string(name), shape);
}

bool is_made_by_configuration(std::string_view kind, std::string_view name) {
  const KindNames* its = find_kind(kind);
  return its != nullptr && ends_with_any(name, its->made);
}

bool is_passed_over(std::string_view kind, std::string_view file_name) {
  const KindNames* its = find_kind(kind);
  return its != nullptr &&
         (ends_with_any(file_name, its->made) || ends_with_any(file_name, its->passed_over));
}

std::string FileMatch::to_string() const {
  std::string text;
  append_list(&text, "missing", missing);
  append_list(&text, "unexpected", unexpected);
  append_list(&text, "differing", differing);
  return text;
}

FileMatch match_files(std::string_view kind, const std::vector<WantedTensor>& wanted,
                      const std::vector<TensorSource>& there) {
  Matcher matcher(kind, there);
  for (const WantedTensor& each : wanted) matcher.find(each);
  return matcher.finish();
}

absl::Status compare_copies(FileMatch& match, int64_t rank, int64_t num_ranks) {
  for (const FileMatch::Copy& copy : match.copies) {
    Box share = whole_box(copy.tensor.shape);
    if (share.shape.empty()) {
      if (rank != 0) continue;
    } else {
      const int64_t rows = share.shape[0];
      const int64_t each = rows / num_ranks, rest = rows % num_ranks;
      share.offset[0] = rank * each + std::min(rank, rest);
      share.shape[0] = each + (rank < rest ? 1 : 0);
    }
    const absl::StatusOr<bool> equal = is_equal(copy.tensor, copy.found, share, 0);
    if (!equal.ok()) return equal.status();
    if (*equal) continue;
    match.differing.push_back(str_cat(
        copy.name, " (other values than ", copy.found.name,
        ", to which it is tied here; set \"tie_word_embeddings\" to false in config.json if "
        "it is a head of its own)"));
  }
  return absl::OkStatus();
}

}  // namespace shardweave
