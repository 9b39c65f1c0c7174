#include "shardweave/modules/join.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/str_join.h"
#include "c10/core/ScalarType.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/observe/observer.h"
#include "shardweave/placement/layout.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

constexpr char kJoin[] = "Join";
constexpr int64_t kMaxRowDims = 6;

// What a rank says of a tensor: dtype, type of its device, number of dimensions, sizes.
using OneTensor = std::array<int64_t, 3 + kMaxRowDims + 1>;
constexpr std::ptrdiff_t kSizes = 3;  // where those begin
// What it says of its input.
struct Said {
  int64_t refused = 0;  // 1: this rank cannot take what it was given
  int64_t tensors = 0;  // 0: it has no input
  std::array<OneTensor, Join::kMaxTensors> each = {};
};
constexpr size_t kSaid = sizeof(Said) / sizeof(int64_t);

// Why the tensors cannot be a batch, or "".
std::string why_no_batch(const std::vector<at::Tensor>& mine) {
  if (mine.size() > Join::kMaxTensors) {
    return str_cat("there are ", mine.size(), " tensors; at most ", Join::kMaxTensors);
  }
  for (size_t i = 0; i < mine.size(); ++i) {
    const at::Tensor& tensor = mine[i];
    if (!tensor.defined()) return str_cat("tensor ", i, " is undefined");
    if (is_dtensor(tensor)) {
      return str_cat("tensor ", i, " is a DTensor; wanted this rank's rows, plain");
    }
    if (const std::string not_one = not_dense(tensor); !not_one.empty()) {
      return str_cat("tensor ", i, " cannot be a DTensor: ", not_one);
    }
    if (tensor.dim() < 1 || tensor.dim() > kMaxRowDims + 1) {
      return str_cat("tensor ", i, " has ", tensor.dim(), " dimensions; wanted 1 to ",
                     kMaxRowDims + 1);
    }
    if (tensor.requires_grad()) return str_cat("tensor ", i, " requires grad");
  }
  return "";
}

}  // namespace

Join::Join(const MeshPtr& mesh, const JoinOptions& options) : mesh_(mesh), device_(options.device) {
  std::vector<std::string> names = options.mesh_dims;
  if (names.empty()) names.emplace_back(mesh->mesh().name(0));
  for (const std::string& name : names) {
    const absl::StatusOr<int> found = mesh->mesh().dim(name);
    if (!found.ok()) throw Error(kJoin, found.status());
    if (std::find(mesh_dims_.begin(), mesh_dims_.end(), *found) != mesh_dims_.end()) {
      throw Error(kJoin, absl::InvalidArgumentError(
                             str_cat("the mesh dimension '", name, "' is named twice")));
    }
    mesh_dims_.push_back(*found);
    num_ranks_ *= mesh->mesh().size(*found);
  }
}

std::optional<std::vector<at::Tensor>> Join::next(const std::vector<at::Tensor>& mine,
                                                  std::source_location where) {
  const std::shared_ptr<MeshContext> context = MeshContext::of(mesh_);
  const DeviceMesh& mesh = mesh_->mesh();
  std::vector<int> all_dims(static_cast<size_t>(mesh.ndim()));
  for (int m = 0; m < mesh.ndim(); ++m) all_dims[static_cast<size_t>(m)] = m;
  Communicator& comm = context->communicator(all_dims);

  const std::string why = why_no_batch(mine);
  Said said;
  said.refused = !why.empty();
  if (why.empty()) {
    said.tensors = static_cast<int64_t>(mine.size());
    for (size_t i = 0; i < mine.size(); ++i) {
      OneTensor& one = said.each[i];
      one[0] = static_cast<int64_t>(mine[i].scalar_type());
      one[1] = static_cast<int64_t>(mine[i].device().type());
      one[2] = mine[i].dim();
      std::copy(mine[i].sizes().begin(), mine[i].sizes().end(), one.begin() + kSizes);
    }
  }
  std::vector<Said> everyones(static_cast<size_t>(comm.size()));
  {
    static constexpr std::array<int64_t, 1> kShape = {static_cast<int64_t>(kSaid)};
    const CollectiveSpan span(*context, {.name = kJoin, .where = where}, [&]() -> Sending {
      const int64_t bytes = (comm.size() - 1) * static_cast<int64_t>(sizeof(Said));
      return {"all_gather", all_dims, bytes, at::kLong, kShape, Layout(), Layout()};
    });
    throw_if_error(comm.all_gather(Buffer::of(reinterpret_cast<int64_t*>(&said), kSaid),
                                   Buffer::of(reinterpret_cast<int64_t*>(everyones.data()),
                                              kSaid * everyones.size()),
                                   {.tag = kJoin})
                       .wait());
  }

  // From here on all ranks see the same.
  const auto refuse_batch = [](const std::string& text) {
    throw Error(kJoin, absl::InvalidArgumentError(text));
  };
  if (!why.empty()) refuse_batch(why);
  const Said* with_input = nullptr;
  int64_t ranks = 0;
  for (size_t r = 0; r < everyones.size(); ++r) {
    const Said& its = everyones[r];
    if (its.refused != 0) refuse_batch(str_cat("rank ", r, " has refused its input, and says why"));
    if (its.tensors == 0) continue;
    ++ranks;
    if (with_input == nullptr) with_input = &its;
    if (its.tensors != with_input->tensors) {
      refuse_batch(str_cat("rank ", r, " has ", its.tensors, " tensors, rank ",
                           with_input - everyones.data(), " has ", with_input->tensors));
    }
    for (size_t i = 0; i < static_cast<size_t>(its.tensors); ++i) {
      const OneTensor &a = with_input->each[i], &b = its.each[i];
      if (std::equal(a.begin(), a.begin() + kSizes, b.begin()) &&
          std::equal(a.begin() + kSizes + 1, a.end(), b.begin() + kSizes + 1)) {
        continue;
      }
      const auto text = [](const OneTensor& one) {
        return str_cat(
            c10::toString(static_cast<at::ScalarType>(one[0])), "[",
            absl::StrJoin(one.begin() + kSizes, one.begin() + kSizes + one[2], ", "), "] (",
            c10::DeviceTypeName(static_cast<c10::DeviceType>(one[1]), /*lower=*/true), ")");
      };
      refuse_batch(str_cat("tensor ", i, " is ", text(b), " on rank ", r, " and ", text(a),
                           " on rank ", with_input - everyones.data(),
                           "; wanted one dtype, one type of device, and rows of one shape"));
    }
  }
  // Of ranks with the same input the first one's, by rank.
  const int64_t copies = comm.size() / num_ranks_;
  if (copies > 1) {
    for (int64_t r = 0; r < comm.size(); ++r) {
      // Row-major; along dimensions that were not named the first.
      int64_t of = 0, stride = 1, left = r;
      for (int m = mesh.ndim() - 1; m >= 0; --m) {
        const bool is_named =
            std::find(mesh_dims_.begin(), mesh_dims_.end(), m) != mesh_dims_.end();
        if (is_named) of += left % mesh.size(m) * stride;
        left /= mesh.size(m);
        stride *= mesh.size(m);
      }
      const Said &a = everyones[static_cast<size_t>(of)], &b = everyones[static_cast<size_t>(r)];
      if (a.tensors == b.tensors && a.each == b.each) continue;
      refuse_batch(str_cat("ranks ", of, " and ", r,
                           " of the mesh differ in their input, which is to be the same along the "
                           "dimensions that were not named"));
    }
  }
  ranks_with_input_ = ranks / copies;
  if (with_input == nullptr) return std::nullopt;

  Placements rows(mesh.ndim());
  for (const int m : mesh_dims_) rows[static_cast<size_t>(m)] = Shard(0);
  std::vector<at::Tensor> batch;
  for (size_t i = 0; i < static_cast<size_t>(with_input->tensors); ++i) {
    const OneTensor& one = with_input->each[i];
    const Dims row(one.begin() + kSizes, one.begin() + kSizes + one[2]);
    std::vector<Dims> shapes;
    for (const Said& its : everyones) {
      Dims shape = row;
      shape[0] = its.tensors == 0 ? 0 : its.each[i][kSizes];
      shapes.push_back(std::move(shape));
    }
    const FittedLayout fit = value_or_throw(fit_local_shapes(Layout(rows), mesh.shape(), shapes));
    at::Tensor local;
    if (!mine.empty()) {
      local = mine[i];
      device_ = local.device();
    } else {
      // Where this rank's last input was, if others have theirs on such a device.
      const auto type = static_cast<c10::DeviceType>(one[1]);
      const at::Device device = device_.type() == type ? device_ : with_index(at::Device(type));
      Dims none = row;
      none[0] = 0;
      local = at::empty(array(none),
                        at::TensorOptions(static_cast<at::ScalarType>(one[0])).device(device));
    }
    batch.push_back(from_local(local, mesh_, fit.layout.placements(),
                               std::vector<int64_t>(fit.shape.begin(), fit.shape.end()), where));
  }
  return batch;
}

}  // namespace shardweave
