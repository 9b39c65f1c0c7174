#include "shardweave/modules/checkpoint/snapshot.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "ATen/core/Tensor.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/local_part.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/modules/checkpoint/safetensors_tensor.h"

namespace shardweave::checkpoint_internal {
namespace {

using namespace dtensor_internal;

[[noreturn]] void refuse_save(absl::StatusCode code, const std::string& why) {
  throw Error(absl::Status(code, why));
}

// All that there is now.
std::vector<StateTensor> tensors_now(const StateDict& state, Manifest& manifest) {
  std::vector<StateTensor> tensors;
  for (const NamedTensor& one : state.tensors()) {
    const bool is_trained = one.tensor.requires_grad() && one.tensor.is_leaf();
    tensors.push_back({one.name, one.tensor, one.aliases, is_trained});
  }
  for (const LateTensors& late : state.late()) {
    OptimizerState now = late.now();
    if (now.empty()) manifest.without_state.insert(late.prefix);
    for (auto& [name, tensor] : now) {
      tensors.push_back({late.prefix + name, tensor, {}, late.is_optimizers});
    }
  }
  std::set<std::string_view> names;
  for (const StateTensor& one : tensors) {
    if (names.insert(one.name).second) continue;
    refuse_save(absl::StatusCode::kAlreadyExists,
                str_cat("the state has two tensors '", one.name, "'"));
  }
  return tensors;
}

}  // namespace

std::optional<Layout> layout_on(const DeviceMesh& mesh, Rank rank, const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) return Layout(Placements(static_cast<size_t>(mesh.ndim())));
  const DTensorMeta& meta = meta_of(tensor);
  const DeviceMesh& its = meta.context->mesh();
  const Layout& layout = meta.spec->layout;
  if (its == mesh) return layout;
  std::vector<std::string> names;
  std::vector<int> places;
  bool fits = true;
  for (int d = 0; d < its.ndim() && fits; ++d) {
    names.emplace_back(its.name(d));
    const absl::StatusOr<int> place = mesh.dim(its.name(d));
    fits = place.ok();
    if (fits) places.push_back(*place);
  }
  if (fits) {
    const absl::StatusOr<DeviceMesh> slice = mesh.slice(names, rank);
    fits = slice.ok() && *slice == its;
  }
  if (!fits) return std::nullopt;
  Placements placements(static_cast<size_t>(mesh.ndim()));
  std::vector<int> order;
  for (const int d : layout.order()) order.push_back(places[static_cast<size_t>(d)]);
  for (int d = 0; d < its.ndim(); ++d) {
    placements[static_cast<size_t>(places[static_cast<size_t>(d)])] = layout[d];
  }
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (std::find(places.begin(), places.end(), d) == places.end()) order.push_back(d);
  }
  return value_or_throw(Layout::create(std::move(placements), std::move(order)));
}

namespace {

at::Tensor part_of(const at::Tensor& local, const LocalBox& held, const Box& piece) {
  at::Tensor part = local;
  for (size_t d = 0; d < piece.shape.size(); ++d) {
    part = part.narrow(static_cast<int64_t>(d),
                       held.local_offset[d] + piece.offset[d] - held.box.offset[d], piece.shape[d]);
  }
  return part;
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// Whether the thread that saves can copy it, and find out that it has been written to: of a plain tensor it could
// not, for torch::optim::SGD writes by data(). (Numbers are not worth it, and are the host's also if what
// they are about is a GPU's.)
bool can_wait(const at::Tensor& tensor, const at::Tensor& part) {
  return is_dtensor(tensor) && tensor.dim() > 0 && part.is_cpu() && !tensor.is_inference() &&
         !part.is_inference();
}

std::shared_ptr<const void> bytes_in(const at::Tensor& part) {
  const c10::AutoGradMode no_grad(false);
  auto owner = std::make_shared<at::Tensor>(part.to(at::kCPU).resolve_neg().contiguous());
  return {owner, owner->const_data_ptr()};
}

}  // namespace

void LateCopies::add(const std::string& name, const at::Tensor& tensor, const at::Tensor& local,
                     at::Tensor part, at::Tensor copy) {
  copies_.push_back({std::move(part), std::move(copy)});
  watched_.push_back({name, tensor, version_of(tensor)});
  if (!local.is_same(tensor)) watched_.push_back({name, local, version_of(local)});
}

void LateCopies::run() {
  const c10::InferenceMode normal(false);
  const c10::AutoGradMode no_grad(false);
  for (const Copy& one : copies_) copy_staged(one.copy, one.part, /*use_threads=*/false);
  copies_.clear();
}

absl::Status LateCopies::check() const {
  for (const Written& one : watched_) {
    if (version_of(one.tensor) == one.version) continue;
    return absl::FailedPreconditionError(
        str_cat("'", one.name,
                "' was written to after save_async(), before wait_for_copy(); wanted "
                "wait_for_copy() first, in front of optimizer.step(), or no copy_beside_training"));
  }
  return absl::OkStatus();
}

Communicator& whole(MeshContext& context) {
  std::vector<int> dims;
  for (int d = 0; d < context.mesh().ndim(); ++d) dims.push_back(d);
  return context.communicator(dims);
}

std::string mesh_text(const DeviceMesh& mesh) {
  return absl::StrJoin(mesh.dims(), ",", [](std::string* text, const MeshDim& dim) {
    str_append(text, dim.name, "=", dim.size);
  });
}

void take_snapshot(MeshContext& context, const StateDict& state, int64_t step,
                   std::shared_ptr<StagingMemory>* memory, LateCopies* late,
                   const std::string& settings, const Cause& cause, SaveRequest& request) {
  const c10::InferenceMode normal(false);
  const c10::AutoGradMode no_grad(false);
  const DeviceMesh& mesh = context.mesh();
  Communicator& comm = whole(context);
  Agreement agreement(context, cause);
  if (step < 0 || step > 999'999'999'999'999'999) {
    refuse_save(absl::StatusCode::kInvalidArgument,
                str_cat("step is ", step, "; wanted 0 or more, of at most 18 digits"));
  }
  Manifest& manifest = request.manifest;
  manifest.step = step;
  manifest.world_size = mesh.size();
  manifest.mesh = mesh_text(mesh);
  const std::vector<StateTensor> tensors = tensors_now(state, manifest);
  std::vector<uint64_t> sums;
  for (const StateTensor& one : tensors) {
    const at::IntArrayRef sizes = one.tensor.sizes();
    LaidOutTensor laid_out = {.name = one.name, .shape = Dims(sizes.begin(), sizes.end())};
    try {
      laid_out.dtype = safetensors_dtype_of(one.tensor.scalar_type());
    } catch (const Error& error) {
      refuse_save(error.status().code(),
                  str_cat("'", one.name, "': ", std::string(error.status().message())));
    }
    if (!is_dtensor(one.tensor) && one.tensor.layout() != at::kStrided) {
      refuse_save(absl::StatusCode::kInvalidArgument, str_cat("'", one.name, "' is not dense"));
    }
    if (one.tensor.is_meta()) {
      refuse_save(absl::StatusCode::kFailedPrecondition,
                  str_cat("'", one.name, "' has no values: it is on the meta device"));
    }
    laid_out.is_plain = !is_dtensor(one.tensor);
    std::optional<Layout> layout = layout_on(mesh, context.connected_mesh().rank(), one.tensor);
    if (!layout.has_value()) {
      refuse_save(
          absl::StatusCode::kInvalidArgument,
          str_cat("'", one.name, "' lies on ", meta_of(one.tensor).context->mesh().to_string(),
                  ", which is no slice of ", mesh.to_string()));
    }
    laid_out.layout = *std::move(layout);
    uint64_t sum = checksum(static_cast<uint64_t>(laid_out.dtype), one.name);
    sum = checksum(sum, laid_out.is_plain ? "plain" : laid_out.layout.to_string());
    sum = checksum(sum, absl::StrJoin(laid_out.shape, ","));
    sums.push_back(checksum(sum, absl::StrJoin(one.aliases, ",")));
    manifest.tensors[one.name] = {laid_out.dtype, laid_out.shape, {}};
    for (const std::string& alias : one.aliases) manifest.aliases[alias] = one.name;
    request.tensors.push_back(std::move(laid_out));
  }
  std::vector<std::string> values;
  for (const auto& [name, value] : state.values()) {
    absl::StatusOr<std::string> json = normalized_json(value.get());
    if (!json.ok()) {
      refuse_save(json.status().code(),
                  str_cat("value '", name, "': ", std::string(json.status().message())));
    }
    manifest.values[name] = *std::move(json);
    sums.push_back(checksum(checksum(0, name), manifest.values[name]));
    values.push_back(name);
    if (value.resumes()) manifest.resumes.insert(name);
  }
  uint64_t others = checksum(static_cast<uint64_t>(step), settings);
  for (const std::string& prefix : manifest.without_state) others = checksum(others, prefix);
  for (const std::string& name : manifest.resumes) others = checksum(others, name);
  sums.push_back(others);
  request.plan = value_or_throw(plan_save(request.tensors, mesh.shape()));

  // Parts are asked for on all ranks alike, whoever writes them.
  std::vector<at::Tensor> locals;
  for (const StateTensor& one : tensors) locals.push_back(part_to_read(one.tensor, "checkpoint"));
  for (const StateTensor& one : tensors) {
    if (is_dtensor(one.tensor)) meta_of(one.tensor).context->before_host_reads();
  }
  const Coordinate& at = context.coordinate();
  size_t known = request.tensors.size();  // whose boxes `held` has
  std::vector<LocalBox> held;
  std::vector<at::Tensor> parts;
  std::vector<size_t> places;  // of their tensors
  int64_t bytes = 0;
  for (const PlannedPiece& piece : request.plan) {
    if (piece.rank != comm.rank()) continue;
    const LaidOutTensor& tensor = request.tensors[piece.tensor];
    if (known != piece.tensor) {
      held = local_boxes(tensor.layout, mesh.shape(), at, tensor.shape);
      known = piece.tensor;
    }
    const auto its = std::find_if(held.begin(), held.end(), [&](const LocalBox& box) {
      return contains(box.box, piece.box);
    });
    parts.push_back(part_of(locals[piece.tensor], *its, piece.box).detach());
    places.push_back(piece.tensor);
    bytes += StagingMemory::padded(static_cast<int64_t>(parts.back().nbytes()));
  }
  if (memory != nullptr) {
    *memory = StagingMemory::of(bytes, StagingMemory::Pages::kHuge, std::move(*memory));
    for (size_t i = 0; i < parts.size(); ++i) {
      const StateTensor& one = tensors[places[i]];
      at::Tensor copy = take_tensor(*memory, parts[i].sizes(), parts[i].scalar_type());
      if (late != nullptr && one.is_trained && can_wait(one.tensor, parts[i])) {
        late->add(one.name, one.tensor, locals[places[i]], parts[i], copy);
      } else {
        copy_staged(copy, parts[i]);
      }
      parts[i] = std::move(copy);
    }
  }
  for (const at::Tensor& part : parts) {
    request.bytes.push_back([part] { return bytes_in(part); });
  }
  const std::optional<Difference> differs = agreement.reach(sums);
  if (!differs.has_value()) return;
  const size_t value = differs->index - tensors.size();
  const std::string which =
      differs->index < tensors.size()
          ? str_cat("tensor ", differs->index, " ('", tensors[differs->index].name, "')")
      : value < values.size()
          ? str_cat("value '", values[value], "'")
          : std::string("the step, an option or the number of tensors and values");
  refuse_save(absl::StatusCode::kInvalidArgument,
              str_cat(which, " is not the same on ranks ", differs->ranks[0], " and ",
                      differs->ranks[1], "; wanted one state on all ranks"));
}

}  // namespace shardweave::checkpoint_internal
