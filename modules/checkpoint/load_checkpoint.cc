#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "shardweave/comm/status_exception.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/local_part.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/modules/checkpoint/agree.h"
#include "shardweave/modules/checkpoint/checkpointer.h"
#include "shardweave/modules/checkpoint/checksum.h"
#include "shardweave/modules/checkpoint/loadable.h"
#include "shardweave/modules/checkpoint/read_ahead.h"
#include "shardweave/modules/checkpoint/safetensors_tensor.h"
#include "shardweave/modules/checkpoint/snapshot.h"
#include "shardweave/modules/checkpoint/staging_memory.h"

namespace shardweave {
namespace {

using namespace checkpoint_internal;
using namespace dtensor_internal;

constexpr char kLoad[] = "load_checkpoint";

// One tensor that is to be filled, or to be made.
struct Target {
  std::string name;
  std::vector<std::string> aliases;
  at::Tensor like;  // lies as the target does; undefined: a number, whole on every rank
  at::ScalarType dtype = at::kFloat;
  bool is_number = false;
  bool is_optional = false;
  double most = 0;  // of a number
  size_t late = 0;  // index + 1 of its LateTensors; 0: in place
  // What was found, and read.
  const SavedTensor* saved = nullptr;
  std::string saved_name;
  at::Tensor staged;     // this rank's part, of the saved dtype
  int64_t replicas = 0;  // ranks that hold each element of a DTensor; 0: nobody can say
  uint64_t sum = 0;      // of the elements that this rank holds: see compare_sums()
};

std::vector<Target> targets_of(const StateDict& state, const std::vector<LateTensors>& all_late) {
  std::vector<Target> targets;
  for (const NamedTensor& one : state.tensors()) {
    targets.push_back({.name = one.name,
                       .aliases = one.aliases,
                       .like = one.tensor,
                       .dtype = one.tensor.scalar_type()});
  }
  for (size_t i = 0; i < all_late.size(); ++i) {
    const LateTensors& late = all_late[i];
    for (const LateTensors::Item& item : late.items()) {
      targets.push_back({.name = late.prefix + item.name,
                         .like = item.like,
                         .dtype = item.dtype,
                         .is_number = !item.like.defined(),
                         .is_optional = item.is_optional,
                         .most = item.most,
                         .late = i + 1});
    }
  }
  return targets;
}

// How many ranks of the mesh hold each element; 0 for what is whole on all of them, or lies elsewhere.
int64_t replicas_on(const MeshPtr& mesh, const at::Tensor& tensor) {
  if (!tensor.defined() || !is_dtensor(tensor)) return 0;
  const std::optional<Layout> layout = layout_on(mesh->mesh(), mesh->rank(), tensor);
  if (!layout.has_value()) return 0;
  int64_t replicas = 1;
  for (int d = 0; d < mesh->mesh().ndim(); ++d) {
    if ((*layout)[d].is_replicate()) replicas *= mesh->mesh().shape()[static_cast<size_t>(d)];
  }
  return replicas;
}

// Each of its summands would become all of the value.
bool is_partial(const at::Tensor& tensor) {
  return tensor.defined() && is_dtensor(tensor) && meta_of(tensor).spec->layout.has_partial();
}

const SavedTensor* find_saved(const Manifest& manifest, const std::string& name,
                              std::string* found) {
  auto it = manifest.tensors.find(name);
  if (it == manifest.tensors.end()) {
    const auto alias = manifest.aliases.find(name);
    if (alias == manifest.aliases.end()) return nullptr;
    it = manifest.tensors.find(alias->second);
  }
  *found = it->first;
  return &it->second;
}

std::string in_brackets(absl::Span<const int64_t> shape) {
  return str_cat("[", absl::StrJoin(shape, ", "), "]");
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

bool is_floating(DType dtype) {
  return at::isFloatingType(scalar_type_of(dtype));
}

// As its shape, its dtype and the checksums of its pieces say.
bool is_copy(const SavedTensor& a, const SavedTensor& b) {
  return a.dtype == b.dtype && a.shape == b.shape &&
         std::equal(a.pieces.begin(), a.pieces.end(), b.pieces.begin(), b.pieces.end(),
                    [](const SavedPiece& x, const SavedPiece& y) {
                      return x.box == y.box && x.xxh3 == y.xxh3;
                    });
}

// Pairs targets with what is saved; all that does not fit is one error.
absl::Status match(const StateDict& state, const std::vector<LateTensors>& late,
                   const Manifest& manifest, const LoadOptions& options,
                   std::vector<Target>& targets, LoadedCheckpoint& result) {
  std::vector<std::string> missing;
  std::vector<std::string> differing;
  std::set<std::string> used;
  std::vector<bool> has_state(late.size(), false);
  for (Target& target : targets) {
    target.saved = find_saved(manifest, target.name, &target.saved_name);
    for (const std::string& alias : target.aliases) {
      std::string found;
      const SavedTensor* other = find_saved(manifest, alias, &found);
      // Two tensors there that are one here: the second is not used, unless it is the first's copy.
      if (other == nullptr || (target.saved != nullptr && !is_copy(*other, *target.saved)))
        continue;
      used.insert(found);
      if (target.saved != nullptr) continue;
      target.saved = other;
      target.saved_name = found;
    }
    if (target.saved == nullptr) continue;
    used.insert(target.saved_name);
    if (target.late > 0) has_state[target.late - 1] = true;
    const SavedTensor& saved = *target.saved;
    if (target.is_number) {
      if (whole_box(saved.shape).numel() != 1) {
        differing.push_back(
            str_cat(target.name, " (", in_brackets(saved.shape), "; wanted one number)"));
      }
      continue;
    }
    const at::IntArrayRef sizes = target.like.sizes();
    const DType dtype = safetensors_dtype_of(target.dtype);
    if (!std::equal(sizes.begin(), sizes.end(), saved.shape.begin(), saved.shape.end())) {
      differing.push_back(str_cat(target.name, " (", in_brackets(saved.shape), " there, ",
                                  in_brackets(absl::MakeConstSpan(sizes.data(), sizes.size())),
                                  " here)"));
    } else if (saved.dtype != dtype &&
               !(options.cast && is_floating(saved.dtype) && is_floating(dtype))) {
      differing.push_back(str_cat(target.name, " (", safetensors_name(saved.dtype), " there, ",
                                  safetensors_name(dtype), " here)"));
    }
  }
  // FusedOptimizer's SGD counts its steps, torch::optim's does not: that is no other state.
  for (size_t i = 0; i < late.size(); ++i) {
    std::string found;
    if (find_saved(manifest, late[i].prefix + "step", &found) == nullptr) continue;
    used.insert(found);
    has_state[i] = true;
  }
  std::vector<bool> is_incomplete(late.size(), false);
  std::vector<bool> needs_some(late.size(), false);
  for (const Target& target : targets) {
    if (target.late > 0 && !target.is_optional) needs_some[target.late - 1] = true;
  }
  for (const Target& target : targets) {
    if (target.saved != nullptr) continue;
    if (target.late > 0) {
      // Without any of its state the parameter is as before its first step, if the checkpoint says so.
      const bool was_without = manifest.without_state.contains(late[target.late - 1].prefix);
      if (was_without && !has_state[target.late - 1]) continue;
      if (target.is_optional && has_state[target.late - 1]) continue;
      is_incomplete[target.late - 1] = true;
      if (target.is_optional && needs_some[target.late - 1])
        continue;  // what it needs is missing, too
    }
    missing.push_back(target.name);
  }
  for (const auto& [name, value] : state.values()) {
    const auto it = manifest.values.find(name);
    if (it == manifest.values.end()) {
      if (!value.is_optional) missing.push_back(str_cat("value ", name));
    } else if (value.check != nullptr) {
      const absl::Status status = value.check(it->second);
      if (!status.ok()) differing.emplace_back(status.message());
    }
  }
  std::vector<std::string> unexpected;
  for (const auto& [name, saved] : manifest.tensors) {
    if (!used.contains(name)) unexpected.push_back(name);
  }
  for (const std::string& name : manifest.resumes) {
    if (!state.has_value(name)) unexpected.push_back(str_cat("value ", name));
  }
  std::string wrong;
  if (!options.allow_missing) append_list(&wrong, "missing", missing);
  if (!options.allow_unexpected) append_list(&wrong, "unexpected", unexpected);
  append_list(&wrong, "differing", differing);
  if (!wrong.empty()) {
    return absl::InvalidArgumentError(str_cat("'", result.path, "' is of another state: ", wrong));
  }
  const auto own = std::count_if(targets.begin(), targets.end(),
                                 [](const Target& target) { return target.late == 0; });
  const bool has_none = std::none_of(targets.begin(), targets.end(), [](const Target& target) {
    return target.late == 0 && target.saved != nullptr;
  });
  if (has_none && own > 0 && !manifest.tensors.empty()) {
    return absl::InvalidArgumentError(str_cat("'", result.path, "' has none of the ", own,
                                              " tensors that are wanted, such as ", targets[0].name,
                                              "; it has ", manifest.tensors.begin()->first,
                                              " and others: is the prefix another?"));
  }
  // Half of an optimizer's state is none.
  for (Target& target : targets) {
    if (target.late > 0 && is_incomplete[target.late - 1]) target.saved = nullptr;
  }
  result.missing = std::move(missing);
  result.unexpected = std::move(unexpected);
  return absl::OkStatus();
}

// Reads this rank's parts of all targets. begin() says what is wrong with the files before a byte of a tensor
// is read; threads are ahead of finish(), which is called for one target after the other.
class Reader {
 public:
  Reader(std::string path, const Manifest& manifest, std::shared_ptr<FileSystem> fs)
      : path_(std::move(path)), manifest_(manifest), fs_(std::move(fs)) {}

  // `memory`: see load_to().
  absl::Status begin(const std::vector<Target*>& targets, std::shared_ptr<StagingMemory> memory) {
    int64_t bytes = 0, late_bytes = 0;
    for (const Target* target : targets) {
      if (target->is_number) continue;
      (target->late == 0 ? bytes : late_bytes) += StagingMemory::padded(bytes_of(*target));
    }
    memory_ =
        StagingMemory::of(bytes, StagingMemory::Pages::kUsual, std::move(memory), /*owners=*/2);
    late_memory_ = std::make_shared<StagingMemory>(late_bytes, StagingMemory::Pages::kUsual);
    std::vector<ReadAhead::Read> ahead;
    for (Target* target : targets) {
      absl::Status status = plan(*target, ahead);
      if (!status.ok()) return status;
    }
    ahead_.emplace(std::move(ahead));
    return absl::OkStatus();
  }

  // Until the target's `staged` has this rank's part of it, as it lies in a contiguous tensor.
  absl::Status finish(Target& target) {
    for (const PieceRead& read : reads_[&target]) {
      absl::Status status = finish(target, read);
      if (!status.ok()) return status;
      if (target.replicas == 0 || !read.piece->sum.has_value()) continue;
      target.sum += read.is_whole() ? *read.piece->sum
                                    : element_sum(target.staged.const_data_ptr(), read.info->dtype,
                                                  read.common, read.local, target.saved->shape);
    }
    return absl::OkStatus();
  }
  int64_t bytes_read() const { return read_; }
  int64_t bytes_kept() const { return kept_; }

 private:
  // What is read at a time: large enough for the disk, and soon enough in the cache to be summed up there. With the
  // rest of its first and last pages of the file, what a read can take past the system's cache.
  static constexpr int64_t kChunk = ReadAhead::kThrough - 2 * kFilePage;
  struct Chunk {
    int64_t begin;
    int64_t size;
  };

  // What this rank holds of a piece that is in a file.
  struct PieceRead {
    const SavedPiece* piece;
    const SafetensorsFile* file;
    const StoredTensor* info;
    Box common;    // of the whole tensor
    Box local;     // the rank's part, as if it were a box of the whole: where elements lie in it
    bool is_ours;  // no other rank reads it, which would find it in the system's cache
    char* in_place = nullptr;  // where all of the piece belongs, if that is one run of bytes
    size_t first_read = 0;     // among those ahead, of chunks of `in_place`
    size_t num_reads = 0;
    int64_t bytes() const { return common.numel() * element_size(info->dtype); }
    bool is_whole() const { return common == piece->box; }
    // Of `in_place`; empty behind the last.
    Chunk chunk(size_t i) const {
      const int64_t begin = std::min(static_cast<int64_t>(i) * kChunk, bytes());
      return {begin, std::min(kChunk, bytes() - begin)};
    }
  };

  static Dims local_shape_of(const Target& target) {
    const bool is_laid_out = target.like.defined() && is_dtensor(target.like);
    return is_laid_out ? meta_of(target.like).spec->local_sizes : target.saved->shape;
  }
  static int64_t bytes_of(const Target& target) {
    return whole_box(local_shape_of(target)).numel() * element_size(target.saved->dtype);
  }
  // Of the whole, what this rank keeps of it.
  static std::vector<LocalBox> held_of(const Target& target) {
    const Dims& shape = target.saved->shape;
    if (target.like.defined() && is_dtensor(target.like)) {
      const DTensorMeta& meta = meta_of(target.like);
      return local_boxes(meta.spec->layout, meta.context->mesh().shape(),
                         meta.context->coordinate(), shape);
    }
    if (whole_box(shape).numel() == 0) return {};
    return {{whole_box(shape), Dims(shape.size(), 0)}};
  }

  absl::StatusOr<SafetensorsFile*> file_of(const SavedPiece& piece) {
    std::shared_ptr<SafetensorsFile>& file = open_[piece.file];
    if (file == nullptr) {
      absl::StatusOr<std::shared_ptr<SafetensorsFile>> opened =
          open_checkpoint_file(path_, manifest_, piece.file, fs_);
      if (!opened.ok()) return opened.status();
      file = *std::move(opened);
    }
    return file.get();
  }

  absl::Status plan(Target& target, std::vector<ReadAhead::Read>& ahead) {
    const SavedTensor& saved = *target.saved;
    const Dims local_shape = local_shape_of(target);
    std::vector<PieceRead>& reads = reads_[&target];
    for (const LocalBox& box : held_of(target)) {
      Box local = {box.box.offset, local_shape};
      for (size_t d = 0; d < local.offset.size(); ++d) local.offset[d] -= box.local_offset[d];
      for (const SavedPiece& piece : saved.pieces) {
        const std::optional<Box> common = intersect(piece.box, box.box);
        if (!common.has_value()) continue;
        const absl::StatusOr<SafetensorsFile*> file = file_of(piece);
        if (!file.ok()) return file.status();
        const std::string key = piece_name(target.saved_name, saved.shape, piece.box);
        const StoredTensor* info = (*file)->find(key);
        if (info == nullptr || info->dtype != saved.dtype || info->shape != piece.box.shape) {
          return absl::DataLossError(
              str_cat("'", (*file)->path(), "' has no \"", key, "\" as the manifest says"));
        }
        reads.push_back({&piece, *file, info, *common, local, target.replicas == 1});
      }
    }
    const at::ScalarType dtype = scalar_type_of(saved.dtype);
    target.staged = target.is_number ? at::empty(array(local_shape), at::TensorOptions(dtype))
                                     : take_tensor(target.late == 0 ? memory_ : late_memory_,
                                                   array(local_shape), dtype);
    kept_ += bytes_of(target);
    for (PieceRead& read : reads) {
      read_ += read.bytes();
      add_reads(static_cast<char*>(target.staged.data_ptr()), read, ahead);
    }
    return absl::OkStatus();
  }

  struct FirstRun {
    int64_t bytes_before;  // in the rank's part
    bool is_all;           // of what is read
  };
  static FirstRun first_run(const PieceRead& read) {
    int64_t place = 0, step = 1;
    bool is_all = true, is_full = true;  // in all further dimensions
    for (size_t d = read.common.shape.size(); d-- > 0;) {
      place += (read.common.offset[d] - read.local.offset[d]) * step;
      step *= read.local.shape[d];
      if (!is_full && read.common.shape[d] != 1) is_all = false;
      if (read.common.shape[d] != read.local.shape[d]) is_full = false;
    }
    return {place * element_size(read.info->dtype), is_all};
  }

  // `out`: the rank's part.
  static void add_reads(char* out, PieceRead& read, std::vector<ReadAhead::Read>& ahead) {
    read.first_read = ahead.size();
    const FirstRun run = first_run(read);
    if (read.is_whole() && run.is_all) {
      read.in_place = out + run.bytes_before;
      for (size_t i = 0; read.chunk(i).size > 0; ++i) {
        ahead.emplace_back([read, chunk = read.chunk(i)](absl::Span<char> through) {
          char* const to = read.in_place + chunk.begin;
          if (chunk.size >= kFilePage) populate_pages(to, chunk.size);
          return read.is_ours
                     ? read.file->read_past_cache(*read.info, chunk.begin, chunk.size, to, through)
                     : read.file->read(*read.info, chunk.begin, chunk.size, to);
        });
      }
    } else if (!read.is_whole() || read.piece->sum.has_value()) {
      ahead.emplace_back([out, read](absl::Span<char>) {
        return read.file->read(*read.info, read.piece->box, read.common, read.local, out);
      });
    }
    read.num_reads = ahead.size() - read.first_read;
  }

  absl::Status finish(const Target& target, const PieceRead& read) {
    Checksum sum;
    for (size_t i = 0; i < read.num_reads; ++i) {
      absl::Status status = ahead_->wait_for(read.first_read + i);
      if (!status.ok()) return status;
      if (read.in_place == nullptr) continue;
      const Chunk chunk = read.chunk(i);
      sum.add(read.in_place + chunk.begin, static_cast<size_t>(chunk.size));
    }
    if (!read.is_whole()) return absl::OkStatus();
    if (read.in_place != nullptr) return compare(sum.value(), read);
    if (read.piece->sum.has_value()) {
      const uint64_t its = element_sum(target.staged.const_data_ptr(), read.info->dtype,
                                       read.common, read.local, target.saved->shape);
      if (its == *read.piece->sum) return absl::OkStatus();
      return absl::DataLossError(str_cat("'", read.file->path(), "': the elements of \"",
                                         read.info->name, "\" have the sum ", to_hex(its),
                                         "; the manifest says ", to_hex(*read.piece->sum)));
    }
    // It is apart from where it belongs, so that its checksum can be taken.
    std::vector<char> apart(static_cast<size_t>(read.bytes()));
    uint64_t value = 0;
    absl::Status status = read.file->read(*read.info, apart.data(), &value);
    if (status.ok()) status = compare(value, read);
    if (!status.ok()) return status;
    auto* const out = static_cast<char*>(target.staged.data_ptr());
    const int64_t element = element_size(read.info->dtype);
    for_each_run(read.common, read.piece->box, read.local,
                 [&](int64_t from, int64_t to, int64_t count) {
                   std::memcpy(out + to * element, apart.data() + from * element,
                               static_cast<size_t>(count * element));
                 });
    return absl::OkStatus();
  }

  static absl::Status compare(uint64_t sum, const PieceRead& read) {
    if (sum == read.piece->xxh3) return absl::OkStatus();
    return absl::DataLossError(str_cat("'", read.file->path(), "': \"", read.info->name,
                                       "\" has the checksum ", to_hex(sum), "; the manifest says ",
                                       to_hex(read.piece->xxh3)));
  }

  const std::string path_;
  const Manifest& manifest_;
  const std::shared_ptr<FileSystem> fs_;
  std::shared_ptr<StagingMemory> memory_;       // of what is copied to where it belongs
  std::shared_ptr<StagingMemory> late_memory_;  // of what an optimizer keeps as it was read
  std::map<std::string, std::shared_ptr<SafetensorsFile>> open_;
  std::unordered_map<const Target*, std::vector<PieceRead>> reads_;
  int64_t read_ = 0;
  int64_t kept_ = 0;
  std::optional<ReadAhead> ahead_;  // ends before what it reads to
};

// What ranks have read of a piece in parts no rank can compare with the checksum of all of it. But sums of
// elements add up.
struct Sums {
  std::vector<uint64_t> sums, wanted;
  std::vector<const Target*> of;
};
Sums sums_of(const std::vector<Target*>& targets) {
  Sums all;
  for (const Target* target : targets) {
    uint64_t wanted = 0;
    bool is_known = target->replicas > 0;
    for (const SavedPiece& piece : target->saved->pieces) {
      is_known = is_known && piece.sum.has_value();
      wanted += piece.sum.value_or(0);
    }
    if (!is_known) continue;
    all.sums.push_back(target->sum);
    all.wanted.push_back(wanted * static_cast<uint64_t>(target->replicas));
    all.of.push_back(target);
  }
  return all;
}

// Of what add_up() has made of them: the same on all ranks.
absl::Status compare(const Sums& all, const std::string& path) {
  for (size_t i = 0; i < all.of.size(); ++i) {
    if (all.sums[i] == all.wanted[i]) continue;
    std::set<std::string> files;
    for (const SavedPiece& piece : all.of[i]->saved->pieces) files.insert(piece.file);
    return absl::DataLossError(
        str_cat("'", path, "': the elements of \"", all.of[i]->saved_name,
                "\", read in parts from ", absl::StrJoin(files, ", "), ", have the sum ",
                to_hex(all.sums[i]), "; the manifest says ", to_hex(all.wanted[i]),
                " (verify_checkpoint names a damaged file; if it finds none, reading has failed)"));
  }
  return absl::OkStatus();
}

// "step" is a whole number, whatever dtype it has.
absl::Status check_number(Target& target) {
  if (!target.is_number || target.saved == nullptr) return absl::OkStatus();
  const auto value = target.staged.item<double>();
  if (value >= 0 && value <= target.most && value == std::floor(value)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("'%s' is %.17g; wanted a whole number from 0 to %d", target.name, value,
                      static_cast<int64_t>(target.most)));
}

// What is left to do when all ranks have what they need: copying, of which nothing is known that could fail.
struct Prepared {
  std::vector<std::pair<Target*, at::Tensor>> parts;  // of tensors, to write to
  std::vector<OptimizerState> late;                   // of each of the state's
  std::vector<bool> is_set;                           // likewise
};

// Goes through all of them even if one cannot be written: part_to_write() may be collective.
absl::Status prepare(const std::vector<LateTensors>& late, std::vector<Target>& targets,
                     Prepared& prepared) {
  absl::Status status;
  prepared.late.resize(late.size());
  prepared.is_set.resize(late.size(), false);
  for (Target& target : targets) {
    if (target.saved == nullptr) continue;
    if (target.late == 0) {
      status.Update(status_of([&] {
        at::Tensor part = part_to_write(target.like, kLoad).detach();
        const absl::Status loadable = check_loadable(target.name, part);
        prepared.parts.emplace_back(&target, std::move(part));
        return loadable;
      }));
    } else {
      prepared.is_set[target.late - 1] = true;
      const LateTensors& its = late[target.late - 1];
      const std::string name = target.name.substr(its.prefix.size());
      at::Tensor value = target.staged;
      if (target.is_number) {
        value = value.reshape({}).to(target.dtype);
      } else {
        const at::Device device =
            is_dtensor(target.like) ? meta_of(target.like).spec->device : target.like.device();
        if (device.is_meta()) {
          status.Update(check_loadable(target.name, at::empty({}, at::kMeta)));
          continue;
        }
        value = lying_as(target.like, value.to(at::TensorOptions(target.dtype).device(device)));
      }
      prepared.late[target.late - 1][name] = std::move(value);
      target.staged.reset();
    }
  }
  return status;
}

void apply(const StateDict& state, const std::vector<LateTensors>& late, const Manifest& manifest,
           Prepared& prepared) {
  for (auto& [target, part] : prepared.parts) {
    copy_staged(part, target->staged);
    // Ranks that had gone apart have the same again.
    part_replaced(target->like, kLoad,
                  checksum(static_cast<uint64_t>(manifest.step), target->name));
    target->staged.reset();
  }
  for (size_t i = 0; i < prepared.late.size(); ++i) {
    const LateTensors& its = late[i];
    if (prepared.is_set[i] || manifest.without_state.contains(its.prefix)) {
      its.set(std::move(prepared.late[i]));
    }
  }
  for (const auto& [name, value] : state.values()) {
    const auto it = manifest.values.find(name);
    if (it != manifest.values.end()) value.set(it->second);
  }
}

}  // namespace

LoadedCheckpoint load_checkpoint(const std::string& path, StateDict& state, const MeshPtr& mesh,
                                 const LoadOptions& options, std::source_location where) {
  return load_to(path, state, mesh, options, nullptr, absl::Hours(1), where);
}

LoadedCheckpoint checkpoint_internal::load_to(const std::string& path, StateDict& state,
                                              const MeshPtr& mesh, const LoadOptions& options,
                                              std::shared_ptr<StagingMemory> memory,
                                              absl::Duration timeout, std::source_location where) {
  if (mesh == nullptr) throw Error(kLoad, absl::InvalidArgumentError("the mesh is null"));
  const c10::InferenceMode normal(false);
  const c10::AutoGradMode no_grad(false);
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  const std::shared_ptr<FileSystem> fs =
      options.file_system != nullptr ? options.file_system : posix_file_system();
  Communicator& comm = whole(*context);
  const auto check = [](const absl::Status& status) {
    if (!status.ok()) throw Error(kLoad, status);
  };

  std::vector<LateTensors> late;
  std::vector<Target> targets;
  {
    Agreement agreement(*context, {.name = kLoad, .where = where});
    late = state.late();
    targets = targets_of(state, late);
    for (Target& target : targets) target.replicas = replicas_on(mesh, target.like);
    std::vector<uint64_t> sums;
    for (const Target& target : targets) {
      if (is_partial(target.like)) {
        check(absl::InvalidArgumentError(
            str_cat("'", target.name, "' lies ", meta_of(target.like).spec->layout.to_string(),
                    ": a Partial is no value; redistribute it to Replicate or Shard first")));
      }
      uint64_t sum = checksum(static_cast<uint64_t>(target.dtype), target.name);
      if (target.like.defined()) sum = checksum(sum, absl::StrJoin(target.like.sizes(), ","));
      sum = checksum(sum, std::to_string(target.replicas));
      sums.push_back(sum);
    }
    uint64_t others =
        checksum(uint64_t{options.allow_missing} | uint64_t{options.allow_unexpected} << 1 |
                     uint64_t{options.cast} << 2 | uint64_t{options.verify} << 3,
                 path);
    for (const auto& [name, value] : state.values()) others = checksum(others, name);
    sums.push_back(others);
    if (const std::optional<Difference> differs = agreement.reach(sums)) {
      const std::string which = differs->index < targets.size()
                                    ? str_cat("tensor '", targets[differs->index].name, "'")
                                    : std::string("the path, a value or an option");
      check(absl::InvalidArgumentError(str_cat(which, " is not the same on ranks ",
                                               differs->ranks[0], " and ", differs->ranks[1],
                                               "; wanted one state on all ranks")));
    }
  }

  // One rank looks, so that all load the same.
  LoadedCheckpoint result;
  const absl::StatusOr<std::string> found = from_first(
      comm,
      [&]() -> absl::StatusOr<std::string> {
        absl::StatusOr<std::string> its = find_checkpoint(path, fs.get());
        if (absl::IsDataLoss(its.status())) return with_way_on(its.status(), path, *fs);
        if (!its.ok()) return its.status();
        std::string text;
        const absl::StatusOr<Manifest> read = read_manifest(*its, fs.get(), &text);
        if (!read.ok()) return with_way_on(read.status(), *its, *fs);
        return str_cat(*its, std::string_view("\0", 1), text);
      },
      timeout);
  check(found.status());
  const size_t end = found->find('\0');
  result.path = found->substr(0, end);
  absl::StatusOr<Manifest> manifest = absl::UnknownError("");
  check(agree(comm, status_of([&] {
                manifest = Manifest::parse(std::string_view(*found).substr(end + 1));
                if (!manifest.ok()) return manifest.status();
                return match(state, late, *manifest, options, targets, result);
              }),
              timeout));
  result.step = manifest->step;

  if (options.verify) {
    check(agree(comm, status_of([&] {
                  return with_way_on(
                      verify_files(result.path, *manifest, fs, comm.rank(), comm.size()),
                      result.path, *fs);
                }),
                timeout));
  }
  std::optional<Reader> reader;
  Sums sums;
  std::vector<Target*> wanted;
  for (Target& target : targets) {
    if (target.saved != nullptr) wanted.push_back(&target);
  }
  const absl::Status read = status_of([&] {
    reader.emplace(result.path, *manifest, fs);
    absl::Status status = reader->begin(wanted, std::move(memory));
    for (size_t i = 0; i < wanted.size() && status.ok(); ++i) {
      status = reader->finish(*wanted[i]);
      if (status.ok()) status = check_number(*wanted[i]);
    }
    if (status.ok()) sums = sums_of(wanted);
    return with_way_on(status, result.path, *fs);
  });
  check(agree(comm, read, timeout));
  check(add_up(comm, sums.sums, timeout));
  check(agree(comm,
              status_of([&] { return with_way_on(compare(sums, result.path), result.path, *fs); }),
              timeout));
  // Only now, for it may be collective.
  Prepared prepared;
  check(agree(comm, status_of([&] { return prepare(late, targets, prepared); }), timeout));
  const absl::Status applied = agree(comm, status_of([&] {
                                       apply(state, late, *manifest, prepared);
                                       return absl::OkStatus();
                                     }),
                                     timeout);
  if (!applied.ok()) {
    check(absl::Status(applied.code(), str_cat(std::string(applied.message()),
                                               "; the state has new values in part")));
  }
  result.values = manifest->values;
  result.bytes_read = reader->bytes_read();
  result.bytes_kept = reader->bytes_kept();
  return result;
}

}  // namespace shardweave
