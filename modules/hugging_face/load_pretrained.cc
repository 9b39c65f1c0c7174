#include <algorithm>
#include <exception>
#include <optional>
#include <set>
#include <utility>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "shardweave/comm/status_exception.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/local_part.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/modules/checkpoint/agree.h"
#include "shardweave/modules/checkpoint/loadable.h"
#include "shardweave/modules/checkpoint/safetensors_tensor.h"
#include "shardweave/modules/checkpoint/snapshot.h"
#include "shardweave/modules/checkpoint/torch_files.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/hugging_face/pretrained.h"
#include "shardweave/modules/nn/registry.h"

namespace shardweave {
namespace {

using namespace checkpoint_internal;
using namespace dtensor_internal;
using namespace hugging_face_internal;

constexpr char kLoad[] = "load_pretrained";
constexpr char kConfigName[] = "config.json";
constexpr int64_t kMostConfigBytes = 100'000'000;

bool is_file(const std::string& path) {
  for (const char* end : {".safetensors", ".json", ".pt", ".pth", ".bin"}) {
    if (path.ends_with(end)) return true;
  }
  return false;
}

absl::StatusOr<std::string> config_of(FileSystem& fs, const std::string& directory,
                                      const ModelConfigRules& rules) {
  const std::string path = join_path(directory, kConfigName);
  absl::StatusOr<std::string> text = read_file(fs, path, kMostConfigBytes, Symlinks::kFollow);
  if (!text.ok()) return text.status();
  const absl::Status status = check_model_config(*text, rules);
  if (status.ok()) return text;
  return absl::Status(status.code(), str_cat("'", path, "': ", std::string(status.message())));
}

// This rank's part of one tensor.
class Reader {
 public:
  absl::StatusOr<at::Tensor> read(const at::Tensor& like, const TensorSource& source) {
    std::vector<LocalBox> held;
    Dims local_shape = source.shape;
    if (is_dtensor(like)) {
      const DTensorMeta& meta = meta_of(like);
      held = local_boxes(meta.spec->layout, meta.context->mesh().shape(),
                         meta.context->coordinate(), source.shape);
      local_shape = meta.spec->local_sizes;
    } else if (whole_box(source.shape).numel() > 0) {
      held = {{whole_box(source.shape), Dims(source.shape.size(), 0)}};
    }
    at::Tensor staged = at::empty(at::IntArrayRef(local_shape.data(), local_shape.size()),
                                  at::TensorOptions(scalar_type_of(source.dtype)));
    kept_ += static_cast<int64_t>(staged.nbytes());
    for (const LocalBox& box : held) {
      // Where elements lie in the local tensor: as if that were a box of the whole.
      Box local = {box.box.offset, local_shape};
      for (size_t d = 0; d < local.offset.size(); ++d) local.offset[d] -= box.local_offset[d];
      absl::Status status = source.read(box.box, local, staged.data_ptr());
      if (!status.ok()) return status;
      read_ += box.box.numel() * element_size(source.dtype);
    }
    return staged;
  }
  int64_t bytes_read() const { return read_; }
  int64_t bytes_kept() const { return kept_; }

 private:
  int64_t read_ = 0;
  int64_t kept_ = 0;
};

absl::Status match(const std::string& path, std::string_view kind,
                   const std::vector<ModelTensor>& tensors, const LoadPretrainedOptions& options,
                   const std::shared_ptr<FileSystem>& fs, const Communicator& comm,
                   FileMatch& matched) {
  const absl::StatusOr<std::vector<TensorSource>> there = weight_sources(path, fs);
  if (!there.ok()) return there.status();
  matched = match_files(kind, wanted_of(tensors), *there);
  FileMatch wrong = matched;
  if (options.allow_missing) wrong.missing.clear();
  if (options.allow_unexpected) wrong.unexpected.clear();
  if (wrong.ok()) {
    const absl::Status read = compare_copies(wrong, comm.rank(), comm.size());
    if (!read.ok()) return read;
  }
  if (wrong.ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      str_cat("'", path, "' is of another model: ", wrong.to_string()));
}

// That of a directory without one; a link to nothing is no such.
bool has_no_config(FileSystem& fs, const std::string& directory) {
  const absl::StatusOr<std::vector<DirectoryEntry>> entries = fs.list(directory);
  if (!entries.ok()) return true;
  return std::none_of(entries->begin(), entries->end(),
                      [](const DirectoryEntry& entry) { return entry.name == kConfigName; });
}

// Local: what this rank cannot load into, else what all ranks have to have alike.
std::vector<uint64_t> sums_of(const std::vector<ModelTensor>& tensors, const std::string& path,
                              std::string_view config, const LoadPretrainedOptions& options) {
  std::vector<uint64_t> sums;
  for (const ModelTensor& one : tensors) {
    if (is_deferred(one.tensor)) {
      throw Error(kLoad, absl::FailedPreconditionError(str_cat(
                             "'", one.name, "' has no values yet; call materialize() before")));
    }
    if (is_dtensor(one.tensor) && meta_of(one.tensor).spec->layout.has_partial()) {
      throw Error(kLoad, absl::InvalidArgumentError(str_cat(
                             "'", one.name, "' lies ", meta_of(one.tensor).spec->layout.to_string(),
                             ": a Partial is no value; redistribute it to Replicate or Shard")));
    }
    uint64_t sum = checksum(static_cast<uint64_t>(one.tensor.scalar_type()), one.name);
    sum = checksum(sum, absl::StrJoin(one.aliases, ","));
    sums.push_back(checksum(sum, absl::StrJoin(one.tensor.sizes(), ",")));
  }
  const uint64_t flags = uint64_t{options.allow_missing} | uint64_t{options.allow_unexpected} << 1 |
                         uint64_t{options.config.allow_unknown} << 2;
  sums.push_back(checksum(checksum(flags, path), config));
  return sums;
}

// What this rank has found for each, and in the end what it passes over: not the values.
std::vector<uint64_t> sums_of(const std::vector<ModelTensor>& tensors, const FileMatch& matched) {
  std::vector<uint64_t> sums;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::optional<TensorSource>& found = matched.found[i];
    sums.push_back(
        checksum(found.has_value() ? 1 + static_cast<uint64_t>(found->dtype) : 0, tensors[i].name));
  }
  sums.push_back(checksum(0, absl::StrJoin(matched.unexpected, "\n")));
  return sums;
}

// A tensor of the module, and what becomes its value: of its dtype.
struct Prepared {
  const ModelTensor* tensor;
  at::Tensor part;
  at::Tensor value;
};

// So that nothing but copying is left to do. May be collective, as part_to_write().
absl::Status prepare(const std::vector<ModelTensor>& tensors, std::vector<at::Tensor>& staged,
                     std::vector<Prepared>& prepared) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!staged[i].defined()) continue;
    const at::Tensor part = part_to_write(tensors[i].tensor, kLoad).detach();
    if (absl::Status status = check_loadable(tensors[i].name, part); !status.ok()) return status;
    if (part.sizes() != staged[i].sizes()) {
      return absl::FailedPreconditionError(
          str_cat("'", tensors[i].name, "' has a part of another shape"));
    }
    prepared.push_back({&tensors[i], part, staged[i].to(part.scalar_type())});
    staged[i].reset();
  }
  return absl::OkStatus();
}

}  // namespace

namespace hugging_face_internal {

std::vector<ModelTensor> tensors_of(const torch::nn::Module& module, std::string_view kind,
                                    const std::vector<std::string>& ignored, const char* what) {
  std::vector<ModelTensor> tensors;
  std::set<std::string_view> unmet(ignored.begin(), ignored.end());
  const std::set<std::string> computed = checkpoint_internal::non_persistent_fqns(module);
  for (const Member& member : members_of(module)) {
    bool is_ignored = std::all_of(member.fqns.begin(), member.fqns.end(),
                                  [&](const std::string& fqn) { return computed.contains(fqn); });
    for (const std::string& fqn : member.fqns) {
      if (std::find(ignored.begin(), ignored.end(), fqn) == ignored.end()) continue;
      is_ignored = true;
      unmet.erase(fqn);
    }
    if (is_ignored) continue;
    if (!member.tensor.defined() || is_made_by_configuration(kind, member.fqns[0])) continue;
    tensors.push_back({.name = member.fqns[0],
                       .tensor = member.tensor,
                       .aliases = {member.fqns.begin() + 1, member.fqns.end()}});
  }
  if (!unmet.empty()) {
    throw Error(what, absl::InvalidArgumentError(
                          str_cat("'", *unmet.begin(), "' is ignored, but the module has none")));
  }
  return tensors;
}

std::vector<WantedTensor> wanted_of(const std::vector<ModelTensor>& tensors) {
  std::vector<WantedTensor> wanted;
  for (const ModelTensor& one : tensors) {
    const at::IntArrayRef sizes = one.tensor.sizes();
    wanted.push_back({.name = one.name,
                      .aliases = one.aliases,
                      .shape = Dims(sizes.begin(), sizes.end()),
                      .dtype = safetensors_dtype_of(one.tensor.scalar_type())});
  }
  return wanted;
}

}  // namespace hugging_face_internal

absl::StatusOr<std::string> read_pretrained_config(const std::string& directory,
                                                   const ModelConfigRules& rules) {
  return config_of(*posix_file_system(), directory, rules);
}

absl::StatusOr<std::vector<WantedTensor>> tensors_of_config(std::string_view config_json) {
  const absl::StatusOr<std::string> kind = model_kind(config_json);
  if (!kind.ok()) return kind.status();
  try {
    const absl::StatusOr<nn::Model> model =
        deferred_init([&] { return nn::make_model(*kind, config_json); });
    if (!model.ok()) return model.status();
    return wanted_of(tensors_of(*model->module, *kind));
  } catch (const std::exception& error) {
    // Sizes that LibTorch cannot have.
    return absl::InvalidArgumentError(str_cat("there is no such model: ", message_of(error)));
  }
}

LoadedPretrained load_pretrained(const std::string& path, torch::nn::Module& module,
                                 const MeshPtr& mesh, const LoadPretrainedOptions& options,
                                 std::source_location where) {
  if (mesh == nullptr) throw Error(kLoad, absl::InvalidArgumentError("the mesh is null"));
  const c10::InferenceMode normal(false);
  const c10::AutoGradMode no_grad(false);
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  const std::shared_ptr<FileSystem> fs =
      options.file_system != nullptr ? options.file_system : posix_file_system();
  Communicator& comm = whole(*context);
  const absl::Duration timeout = absl::Hours(1);
  const auto check = [](const absl::Status& status) {
    if (!status.ok()) throw Error(kLoad, status);
  };

  // One rank looks, so that all load the same.
  const absl::StatusOr<std::string> config = from_first(
      comm,
      [&]() -> absl::StatusOr<std::string> {
        if (is_file(path)) return std::string();
        absl::StatusOr<std::string> text = config_of(*fs, path, options.config);
        if (absl::IsNotFound(text.status()) && has_no_config(*fs, path)) return std::string();
        return text;
      },
      timeout);
  check(config.status());
  LoadedPretrained result;
  if (!config->empty()) result.kind = value_or_throw(model_kind(*config));

  std::vector<ModelTensor> tensors;
  {
    Agreement agreement(*context, {.name = kLoad, .where = where});
    tensors = tensors_of(module, result.kind, options.ignored, kLoad);
    const std::vector<uint64_t> sums = sums_of(tensors, path, *config, options);
    if (const std::optional<Difference> differs = agreement.reach(sums)) {
      const std::string which = differs->index < tensors.size()
                                    ? str_cat("tensor '", tensors[differs->index].name, "'")
                                    : std::string("the path or an option");
      check(absl::InvalidArgumentError(str_cat(which, " is not the same on ranks ",
                                               differs->ranks[0], " and ", differs->ranks[1],
                                               "; wanted one module on all ranks")));
    }
  }

  FileMatch matched;
  std::vector<at::Tensor> staged(tensors.size());
  Reader reader;
  const auto guarded = [](const auto& body) -> absl::Status {
    try {
      return body();
    } catch (const StatusException& error) {
      return error.status();
    } catch (const std::exception& error) {
      return absl::ResourceExhaustedError(str_cat("cannot read: ", std::string_view(error.what())));
    }
  };
  check(agree(
      comm, guarded([&] { return match(path, result.kind, tensors, options, fs, comm, matched); }),
      timeout));
  // They may have met two directories of one name, or one that is changing.
  if (const std::optional<Difference> differs =
          first_difference(*context, sums_of(tensors, matched), {.name = kLoad, .where = where})) {
    const std::string which = differs->index < tensors.size()
                                  ? str_cat("of '", tensors[differs->index].name, "'")
                                  : std::string("beside the module's");
    check(absl::FailedPreconditionError(str_cat(
        "what '", path, "' has ", which, " is not the same on ranks ", differs->ranks[0], " and ",
        differs->ranks[1], "; wanted one directory, shared by all ranks, that nobody writes to")));
  }
  check(agree(comm, guarded([&] {
                for (size_t i = 0; i < tensors.size(); ++i) {
                  if (!matched.found[i].has_value()) continue;
                  absl::StatusOr<at::Tensor> part =
                      reader.read(tensors[i].tensor, *matched.found[i]);
                  if (!part.ok()) return part.status();
                  staged[i] = *std::move(part);
                }
                return absl::OkStatus();
              }),
              timeout));
  // After the reading, which may fail on one rank alone: others would wait for it in here.
  std::vector<Prepared> prepared;
  check(agree(comm, guarded([&] { return prepare(tensors, staged, prepared); }), timeout));
  const absl::Status applied =
      agree(comm, guarded([&] {
              for (Prepared& each : prepared) {
                each.part.copy_(each.value);
                part_replaced(each.tensor->tensor, kLoad, checksum(1, each.tensor->name));
                each.value.reset();
              }
              return absl::OkStatus();
            }),
            timeout);
  if (!applied.ok()) {
    check(absl::Status(applied.code(), str_cat(std::string(applied.message()),
                                               "; the module has new values in part")));
  }
  result.missing = std::move(matched.missing);
  result.unexpected = std::move(matched.unexpected);
  result.bytes_read = reader.bytes_read();
  result.bytes_kept = reader.bytes_kept();
  return result;
}

}  // namespace shardweave
