#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "ATen/core/Tensor.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "shardweave/comm/status_exception.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/modules/checkpoint/agree.h"
#include "shardweave/modules/checkpoint/safetensors_tensor.h"
#include "shardweave/modules/checkpoint/snapshot.h"
#include "shardweave/modules/hugging_face/pretrained.h"

namespace shardweave {
namespace {

using namespace checkpoint_internal;
using namespace dtensor_internal;
using namespace hugging_face_internal;

constexpr char kSave[] = "save_pretrained";

// A tensor of a file, and the box of the model's that it is.
struct Planned {
  StoredTensor stored;
  size_t tensor;
  Box box;
};

std::vector<Planned> planned(std::string_view kind, const std::vector<ModelTensor>& tensors,
                             const ModelFilesOptions& options) {
  std::vector<Planned> result;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i].tensor;
    const at::ScalarType dtype = options.dtype.has_value() && tensor.is_floating_point()
                                     ? *options.dtype
                                     : tensor.scalar_type();
    for (FilePart& part :
         file_parts(kind, tensors[i].name, Dims(tensor.sizes().begin(), tensor.sizes().end()))) {
      result.push_back({{.name = std::move(part.name),
                         .dtype = safetensors_dtype_of(dtype),
                         .shape = std::move(part.shape)},
                        i,
                        std::move(part.box)});
    }
  }
  // As they are written.
  std::stable_sort(result.begin(), result.end(), [](const Planned& a, const Planned& b) {
    return element_size(a.stored.dtype) > element_size(b.stored.dtype);
  });
  return result;
}

// What the configuration's model has, and the module has otherwise.
absl::Status check_same_model(const std::vector<WantedTensor>& described,
                              const std::vector<WantedTensor>& given) {
  std::vector<std::string> missing, surplus, differing;
  const auto find = [](const std::vector<WantedTensor>& among, const std::string& name) {
    return std::find_if(among.begin(), among.end(),
                        [&](const WantedTensor& each) { return each.name == name; });
  };
  for (const WantedTensor& each : described) {
    const auto its = find(given, each.name);
    if (its == given.end()) {
      missing.push_back(each.name);
    } else if (its->shape != each.shape ||
               !std::all_of(its->aliases.begin(), its->aliases.end(), [&](const std::string& name) {
                 return std::count(each.aliases.begin(), each.aliases.end(), name) > 0;
               })) {  // a model may use a tensor twice without a name for that
      differing.push_back(each.name);
    }
  }
  for (const WantedTensor& each : given) {
    if (find(described, each.name) == described.end()) surplus.push_back(each.name);
  }
  if (missing.empty() && surplus.empty() && differing.empty()) return absl::OkStatus();
  const FileMatch lists = {.found = {},
                           .missing = std::move(missing),
                           .unexpected = std::move(surplus),
                           .differing = std::move(differing)};
  return absl::InvalidArgumentError(
      str_cat("the configuration is of another model: ", lists.to_string()));
}

// Writes the files of one rank, while all ranks gather.
class Gatherer {
 public:
  explicit Gatherer(const std::vector<ModelTensor>& tensors) : tensors_(tensors) {}

  // Collective.
  at::Tensor whole_of(size_t i) {
    if (known_ != i || !whole_.defined()) {
      whole_.reset();
      const at::Tensor& tensor = tensors_[i].tensor;
      whole_ = (is_dtensor(tensor) ? full_tensor(tensor) : tensor).detach();
      known_ = i;
    }
    return whole_;
  }

 private:
  const std::vector<ModelTensor>& tensors_;
  size_t known_ = 0;
  at::Tensor whole_;
};

at::Tensor part_of_whole(at::Tensor whole, const Planned& planned) {
  for (size_t d = 0; d < planned.box.shape.size(); ++d) {
    whole = whole.narrow(static_cast<int64_t>(d), planned.box.offset[d], planned.box.shape[d]);
  }
  return whole.to(at::TensorOptions(at::kCPU).dtype(scalar_type_of(planned.stored.dtype)))
      .resolve_neg()
      .contiguous();
}

// Goes with what has failed, on whatever rank.
class Temporary {
 public:
  Temporary(std::shared_ptr<FileSystem> fs, std::string path, bool is_mine)
      : fs_(std::move(fs)), path_(std::move(path)), is_mine_(is_mine) {}
  ~Temporary() {
    if (is_mine_) (void)remove_all(*fs_, path_);
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  void release() { is_mine_ = false; }

 private:
  const std::shared_ptr<FileSystem> fs_;
  const std::string path_;
  bool is_mine_;
};

}  // namespace

void save_pretrained(const std::string& directory, const torch::nn::Module& module,
                     std::string_view config_json, const MeshPtr& mesh,
                     const ModelFilesOptions& options, std::source_location where) {
  if (mesh == nullptr) throw Error(kSave, absl::InvalidArgumentError("the mesh is null"));
  const c10::InferenceMode normal(false);
  const c10::AutoGradMode no_grad(false);
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  const std::shared_ptr<FileSystem> fs =
      options.file_system != nullptr ? options.file_system : posix_file_system();
  Communicator& comm = whole(*context);
  const absl::Duration timeout = absl::Hours(1);
  const auto check = [](const absl::Status& status) {
    if (!status.ok()) throw Error(kSave, status);
  };

  std::vector<ModelTensor> tensors;
  std::vector<Planned> plan;
  std::vector<StoredTensor> stored;
  std::string config;
  {
    Agreement agreement(*context, {.name = kSave, .where = where});
    check(check_options(options));
    const absl::StatusOr<std::string> kind = model_kind(config_json);
    check(kind.status());
    tensors = tensors_of(module, *kind, options.ignored, kSave);
    const absl::StatusOr<std::vector<WantedTensor>> described = tensors_of_config(config_json);
    check(described.status());
    check(check_same_model(*described, wanted_of(tensors)));
    plan = planned(*kind, tensors, options);
    for (const Planned& each : plan) stored.push_back(each.stored);
    check(check_names(stored));
    absl::StatusOr<std::string> with = config_with_dtype(config_json, torch_name(stored));
    check(with.status());
    config = *std::move(with);
    std::vector<uint64_t> sums;
    for (const ModelTensor& one : tensors) {
      sums.push_back(checksum(static_cast<uint64_t>(one.tensor.scalar_type()), one.name));
    }
    uint64_t others =
        checksum(checksum(static_cast<uint64_t>(options.max_file_bytes), directory), config);
    for (const StoredTensor& each : stored) {
      others = checksum(checksum(others, each.name), safetensors_name(each.dtype));
    }
    sums.push_back(others);
    if (const std::optional<Difference> differs = agreement.reach(sums)) {
      const std::string which = differs->index < tensors.size()
                                    ? str_cat("tensor '", tensors[differs->index].name, "'")
                                    : std::string("the directory, the configuration or an option");
      check(absl::InvalidArgumentError(str_cat(which, " is not the same on ranks ",
                                               differs->ranks[0], " and ", differs->ranks[1],
                                               "; wanted one model on all ranks")));
    }
  }

  const DividedFiles files = divide(stored, options.max_file_bytes);
  const absl::StatusOr<std::string> temporary =
      from_first(comm, [&] { return begin_directory(*fs, directory); }, timeout);
  check(temporary.status());
  Temporary goes(fs, *temporary, comm.rank() == 0);
  Gatherer gatherer(tensors);
  absl::Status status;
  size_t i = 0;
  for (size_t f = 0; f < files.names.size() && status.ok(); ++f) {
    const size_t begin = i;
    while (i < plan.size() && files.file_of[i] == f) ++i;
    const bool is_mine = static_cast<int64_t>(f) % comm.size() == comm.rank();
    std::unique_ptr<SafetensorsWriter> writer;
    absl::Status mine;
    if (is_mine) {
      mine = status_of([&] {
        auto made = SafetensorsWriter::create(join_path(*temporary, files.names[f]),
                                              {stored.begin() + static_cast<int64_t>(begin),
                                               stored.begin() + static_cast<int64_t>(i)},
                                              {{"format", "pt"}}, fs);
        if (made.ok()) writer = *std::move(made);
        return made.status();
      });
    }
    for (size_t k = begin; k < i; ++k) {
      // Here the others wait for a slow disk, and not in the gathering, which has the world's deadline.
      if (k == begin || plan[k].tensor != plan[k - 1].tensor) status = agree(comm, mine, timeout);
      if (!status.ok()) break;
      try {
        const at::Tensor whole = gatherer.whole_of(plan[k].tensor);
        if (!is_mine || !mine.ok()) continue;  // the others go on until they agree
        const at::Tensor part = part_of_whole(whole, plan[k]);
        mine = writer->append(part.const_data_ptr(), static_cast<int64_t>(part.nbytes()));
        if (options.tensor_done != nullptr) options.tensor_done(bytes_of(plan[k].stored));
      } catch (const StatusException& error) {
        mine.Update(error.status());
      } catch (const std::exception& error) {
        mine.Update(absl::ResourceExhaustedError(
            str_cat("cannot write: ", std::string_view(error.what()))));
      }
    }
    if (status.ok() && is_mine && mine.ok()) mine = writer->finish();
    writer.reset();  // before rank 0 removes what is there, if it came to nothing
    const absl::Status finished = agree(comm, mine, timeout);
    if (status.ok()) status = finished;
  }
  check(status);
  const absl::Status published = status_of([&] {
    if (comm.rank() != 0) return absl::OkStatus();
    return publish_directory(*fs, *temporary, directory, config, stored, files);
  });
  // What publish_directory() has not removed has its name.
  if (published.ok()) goes.release();
  check(agree(comm, published, timeout));
}

}  // namespace shardweave
