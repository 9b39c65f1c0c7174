#include "shardweave/modules/checkpoint/rewrite_checkpoint.h"

#include <mutex>
#include <utility>

#include "absl/time/time.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/checkpoint/save_plan.h"
#include "shardweave/modules/checkpoint/write_checkpoint.h"

namespace shardweave {
namespace {

using namespace checkpoint_internal;

constexpr int64_t kMostFiles = 256;  // a thread each

// A piece's bytes; nobody else has any while this lives.
struct HeldPiece {
  explicit HeldPiece(std::mutex& mutex) : lock(mutex) {}
  std::unique_lock<std::mutex> lock;
  std::vector<char> bytes;
};

}  // namespace

absl::Status rewrite_checkpoint(const std::string& directory, const Manifest& about,
                                const std::vector<TensorSource>& sources,
                                const RewriteOptions& options) {
  if (options.num_files < 1 || options.num_files > kMostFiles) {
    return absl::InvalidArgumentError(
        str_cat("num_files is ", options.num_files, "; wanted 1 to ", kMostFiles));
  }
  if (about.step < 0) {
    return absl::InvalidArgumentError(str_cat("step is ", about.step, "; wanted 0 or more"));
  }
  const std::shared_ptr<FileSystem> fs =
      options.file_system != nullptr ? options.file_system : posix_file_system();
  SaveRequest request;
  request.directory = directory;
  request.manifest = about;
  request.manifest.tensors.clear();
  request.manifest.files.clear();
  request.manifest.world_size = options.num_files;
  request.manifest.mesh = str_cat("files=", options.num_files);
  const absl::StatusOr<Layout> layout = Layout::create({Replicate()});
  if (!layout.ok()) return layout.status();
  for (const TensorSource& source : sources) {
    request.manifest.tensors[source.name] = {source.dtype, source.shape, {}};
    request.tensors.push_back(
        {.name = source.name, .dtype = source.dtype, .shape = source.shape, .layout = *layout});
  }
  const Dims mesh_shape = {options.num_files};
  absl::StatusOr<std::vector<PlannedPiece>> plan = plan_save(request.tensors, mesh_shape);
  if (!plan.ok()) return plan.status();
  request.plan = *std::move(plan);

  std::mutex one_at_a_time;
  const auto bytes_of = [&](const PlannedPiece& piece) {
    return [&sources, &options, &one_at_a_time, &piece]() -> std::shared_ptr<const void> {
      auto held = std::make_shared<HeldPiece>(one_at_a_time);
      const TensorSource& source = sources[piece.tensor];
      held->bytes.resize(static_cast<size_t>(piece.box.numel() * element_size(source.dtype)));
      throw_if_error(source.read(piece.box, piece.box, held->bytes.data()));
      if (options.piece_done != nullptr) {
        options.piece_done(static_cast<int64_t>(held->bytes.size()));
      }
      const void* data = held->bytes.data();
      return {std::move(held), data};
    };
  };
  // Each file's rank is a thread, so that there is one way in which checkpoints get to the disk.
  std::mutex mutex;
  absl::Status result;
  const absl::Status ran = run_ranks(static_cast<int>(options.num_files), [&](World& world) {
    SaveRequest mine = request;
    for (const PlannedPiece& piece : request.plan) {
      if (piece.rank == world.rank()) mine.bytes.emplace_back(bytes_of(piece));
    }
    std::unique_ptr<FileLock> lock;
    const absl::Status status = write_checkpoint(*world.comm(), fs, mine, lock, absl::Hours(24));
    const std::lock_guard guard(mutex);
    if (world.rank() == 0) result = status;
    return absl::OkStatus();
  });
  return ran.ok() ? result : ran;
}

}  // namespace shardweave
