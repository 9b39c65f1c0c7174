#include "shardweave/modules/data/token_loader.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "ATen/ops/empty.h"
#include "c10/core/DispatchKey.h"
#include "c10/core/InferenceMode.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/modules/data/token_windows.h"

namespace shardweave {
namespace data_internal {

using namespace dtensor_internal;

constexpr char kTokenLoader[] = "TokenLoader";

[[noreturn]] void refuse(const std::string& why) {
  throw Error(kTokenLoader, absl::InvalidArgumentError(why));
}
void check(const absl::Status& status) {
  if (!status.ok()) throw Error(kTokenLoader, status);
}
template <typename T>
T check(absl::StatusOr<T> result) {
  check(result.status());
  return *std::move(result);
}

// Of a batch what a rank gets.
struct BatchBlock {
  Interval rows, columns;
};

// Batches by their position.
struct BatchSource {
  TokenWindows windows;
  SampleOrder order;
  TokenLoaderOptions options;
  std::function<BatchBlock(int64_t samples)> block_of;

  // 0: the end.
  int64_t samples_at(SamplePosition position) const {
    const int64_t samples = order.left(position, options.batch);
    return options.drop_last && samples < options.batch ? 0 : samples;
  }
  // Gives up, with anything in the batch, when nobody wants it any more.
  TokenBatch read(SamplePosition position, int64_t samples,
                  const std::atomic<bool>& is_stopped) const;
};

TokenBatch BatchSource::read(SamplePosition position, int64_t samples,
                             const std::atomic<bool>& is_stopped) const {
  // What trains with them saves them for backward; and they are there at once.
  const c10::InferenceMode normal(false);
  const c10::impl::ExcludeDispatchKeyGuard not_deferred(c10::DispatchKey::DeferredInit);
  const auto [rows, columns] = block_of(samples);
  const int64_t width = columns.size();
  TokenBatch batch{.tokens = at::empty({rows.size(), width}, at::kLong),
                   .targets = at::empty({rows.size(), width}, at::kLong),
                   .samples = samples};
  if (rows.size() == 0 || width == 0) return batch;
  std::vector<int64_t> window(static_cast<size_t>(width + 1));
  int64_t* tokens = batch.tokens.mutable_data_ptr<int64_t>();
  int64_t* targets = batch.targets.mutable_data_ptr<int64_t>();
  SamplePosition at = order.after(position, rows.begin);
  for (int64_t row = 0; row < rows.size() && !is_stopped; ++row, at = order.after(at, 1)) {
    const int64_t sample = order.sample(at);
    if (const absl::Status status = windows.read(sample, columns.begin, absl::MakeSpan(window));
        !status.ok()) {
      throw Error(
          "TokenLoader::next",
          absl::Status(status.code(), str_cat("sample ", sample, " of ", windows.num_samples(),
                                              ": ", status.message())));
    }
    tokens = std::copy(window.begin(), window.end() - 1, tokens);
    targets = std::copy(window.begin() + 1, window.end(), targets);
  }
  return batch;
}

// Batches one after the other, from a position on, read by a thread some ahead of their use.
class BatchReader {
 public:
  BatchReader(std::shared_ptr<const BatchSource> source, SamplePosition from)
      : source_(std::move(source)), from_(from) {
    if (source_->options.prefetch > 0) thread_ = std::thread([this] { run(); });
  }
  ~BatchReader() {
    {
      const std::lock_guard lock(mutex_);
      is_stopped_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  BatchReader(const BatchReader&) = delete;
  BatchReader& operator=(const BatchReader&) = delete;

  // The next one; of 0 samples at the end. Throws what its reading threw, once and for all.
  TokenBatch take() {
    if (!thread_.joinable()) return made(&from_);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !ready_.empty(); });
    Outcome& first = ready_.front();
    if (first.error != nullptr) std::rethrow_exception(first.error);
    if (first.batch.samples == 0) return first.batch;
    TokenBatch batch = std::move(first.batch);
    ready_.pop_front();
    lock.unlock();
    changed_.notify_all();
    return batch;
  }

 private:
  struct Outcome {
    TokenBatch batch;
    std::exception_ptr error;
  };

  TokenBatch made(SamplePosition* position) const {
    const int64_t samples = source_->samples_at(*position);
    if (samples == 0) return {};
    TokenBatch batch = source_->read(*position, samples, is_stopped_);
    *position = source_->order.after(*position, samples);
    return batch;
  }

  void run() {
    const auto most = static_cast<size_t>(source_->options.prefetch);
    for (SamplePosition position = from_;;) {
      Outcome outcome;
      try {
        outcome.batch = made(&position);
      } catch (...) {
        outcome.error = std::current_exception();
      }
      const bool is_last = outcome.error != nullptr || outcome.batch.samples == 0;
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return is_stopped_ || ready_.size() < most; });
      if (is_stopped_) return;
      ready_.push_back(std::move(outcome));
      lock.unlock();
      changed_.notify_all();
      if (is_last) return;
    }
  }

  const std::shared_ptr<const BatchSource> source_;
  SamplePosition from_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Outcome> ready_;
  std::atomic<bool> is_stopped_ = false;  // set under the mutex
  std::thread thread_;                    // what is above is there before it, and after it
};

void check_options(const TokenLoaderOptions& options) {
  constexpr int64_t kMost = int64_t{1} << 40;
  if (options.batch < 1 || options.batch > kMost) {
    refuse(str_cat("batch is ", options.batch, "; wanted 1 to ", kMost));
  }
  if (options.seq > kMost) refuse(str_cat("seq is ", options.seq, "; wanted 1 to ", kMost));
  constexpr int kMostAhead = 1024;  // more cannot be meant, and would take all memory
  if (options.prefetch < 0 || options.prefetch > kMostAhead) {
    refuse(str_cat("prefetch is ", options.prefetch, "; wanted 0 to ", kMostAhead, " batches"));
  }
}

// Of what is in the files, as far as one sees without reading them.
uint64_t sum_of(const std::vector<TokenFile>& files) {
  uint64_t sum = files.size();
  for (const TokenFile& file : files) {
    sum =
        mix(mix(sum, static_cast<uint64_t>(file.size())), static_cast<uint64_t>(file.vocab_size()));
    std::vector<int64_t> tokens(static_cast<size_t>(std::min<int64_t>(file.size(), 1024)));
    for (const int64_t begin : {int64_t{0}, file.size() - static_cast<int64_t>(tokens.size())}) {
      check(file.read(begin, absl::MakeSpan(tokens)));
      sum = checksum(sum, {reinterpret_cast<const char*>(tokens.data()), tokens.size() * 8});
    }
  }
  return sum;
}

std::shared_ptr<BatchSource> source_of(const std::vector<TokenFile>& files,
                                       const TokenLoaderOptions& options) {
  check_options(options);
  TokenWindows windows = check(TokenWindows::create(files, options.seq));
  SampleOrder order = check(SampleOrder::create(
      {.num_samples = windows.num_samples(),
       .seed = options.seed,
       .shuffle = options.shuffle,
       .epochs = options.epochs,
       .of = str_cat("windows of ", options.seq, " tokens of ", sum_of(files))}));
  return std::make_shared<BatchSource>(
      BatchSource{std::move(windows), std::move(order), options, nullptr});
}

void check_placements(const Placements& placements, const MeshPtr& mesh) {
  const int mesh_ndim = mesh->mesh().ndim();
  if (static_cast<int>(placements.size()) != mesh_ndim) {
    refuse(str_cat("there are ", placements.size(), " placements; the mesh has ", mesh_ndim,
                   " dimensions"));
  }
  for (const Placement& p : placements) {
    if (p.is_replicate() || (p.is_plain_shard() && p.dim() >= -2 && p.dim() < 2)) continue;
    refuse(str_cat("the placement ", p.to_string(),
                   "; wanted S(0), S(1) or R, of batches of [samples, seq]"));
  }
}

uint64_t sum_of(const TokenLoaderOptions& o) {
  return checksum(0, str_cat(o.seq, ",", o.batch, ",", o.seed, ",", o.shuffle, ",", o.epochs, ",",
                             o.drop_last));
}

}  // namespace data_internal

using namespace data_internal;  // NOLINT: this file's own

class TokenLoader::State {
 public:
  State(const std::vector<TokenFile>& files, const TokenLoaderOptions& options,
        const BatchPart& part) {
    const auto source = source_of(files, options);
    if (part.count < 1 || part.index < 0 || part.index >= part.count) {
      refuse(str_cat("part ", part.index, " of ", part.count,
                     "; wanted one of 1 or more, counted from 0"));
    }
    source->block_of = [part, seq = options.seq](int64_t samples) {
      return BatchBlock{chunk(samples, part.count, part.index), {0, seq}};
    };
    source_ = source;
    start({});
  }
  State(const std::vector<TokenFile>& files, const TokenLoaderOptions& options, MeshPtr mesh,
        const std::function<Placements(const DeviceMesh&)>& placements, std::source_location where)
      : mesh_(std::move(mesh)) {
    if (mesh_ == nullptr) refuse("the mesh is null");
    context_ = MeshContext::of(mesh_);
    Agreement agreement(*context_, {.name = kTokenLoader, .where = where});
    placements_ = placements(mesh_->mesh());
    check_placements(placements_, mesh_);
    const Layout layout = check(with_dims_of(Layout(placements_), 2));
    const auto source = source_of(files, options);
    source->block_of = [layout, mesh = mesh_->mesh(), coordinate = mesh_->coordinate(),
                        seq = options.seq](int64_t samples) {
      const LocalExtent e = local_extent(layout, mesh.shape(), coordinate, {samples, seq});
      return BatchBlock{{e.offset[0], e.offset[0] + e.shape[0]},
                        {e.offset[1], e.offset[1] + e.shape[1]}};
    };
    const std::vector<uint64_t> sums = {sum_of(options), checksum(0, layout.to_string()),
                                        sum_of(files)};
    if (const std::optional<Difference> differs = agreement.reach(sums)) {
      const char* const kWhat[] = {"the options", "the placements", "the files"};
      refuse(str_cat(kWhat[std::min<size_t>(differs->index, 2)], " are not the same on ranks ",
                     differs->ranks[0], " and ", differs->ranks[1]));
    }
    source_ = source;
    start({});
  }

  std::optional<TokenBatch> next();
  const SampleOrder& order() const { return source_->order; }
  SamplePosition position() const { return position_; }
  void set_position(std::string_view text, std::source_location where);

 private:
  // If the thread cannot be had, all is as before.
  void start(SamplePosition position) {
    reader_ = std::make_unique<BatchReader>(source_, position);  // the thread before ends
    position_ = position;
  }
  at::Tensor on_mesh(const at::Tensor& local, int64_t samples) const;

  MeshPtr mesh_;  // null: plain tensors
  std::shared_ptr<MeshContext> context_;
  Placements placements_;
  std::shared_ptr<const BatchSource> source_;
  SamplePosition position_;
  std::unique_ptr<BatchReader> reader_;
};

std::optional<TokenBatch> TokenLoader::State::next() {
  TokenBatch batch = reader_->take();
  if (batch.samples == 0) return std::nullopt;
  if (mesh_ != nullptr) {
    batch.tokens = on_mesh(batch.tokens, batch.samples);
    batch.targets = on_mesh(batch.targets, batch.samples);
  }
  position_ = order().after(position_, batch.samples);
  return batch;
}

at::Tensor TokenLoader::State::on_mesh(const at::Tensor& local, int64_t samples) const {
  at::Tensor result =
      from_local(local, mesh_, placements_, std::vector<int64_t>{samples, source_->options.seq});
  // Ranks with other samples have gone apart.
  DTensorMeta& meta = meta_of(result);
  meta.came_from(checksum(provenance_of(meta), order().to_json(position_)));
  return result;
}

void TokenLoader::State::set_position(std::string_view text, std::source_location where) {
  constexpr char kFunction[] = "TokenLoader::set_position";
  std::optional<Agreement> agreement;
  if (mesh_ != nullptr) agreement.emplace(*context_, Cause{.name = kFunction, .where = where});
  const absl::StatusOr<SamplePosition> position = order().from_json(text);
  if (!position.ok()) throw Error(kFunction, position.status());
  if (agreement.has_value()) {
    const auto differs = agreement->reach({checksum(0, order().to_json(*position))});
    if (differs.has_value()) {
      throw Error(kFunction, absl::InvalidArgumentError(
                                 str_cat("the position is not the same on ranks ",
                                         differs->ranks[0], " and ", differs->ranks[1])));
    }
  }
  start(*position);
}

TokenLoader::TokenLoader(const std::vector<TokenFile>& files, const TokenLoaderOptions& options,
                         const BatchPart& part)
    : state_(std::make_unique<State>(files, options, part)) {}
TokenLoader::TokenLoader(const std::vector<TokenFile>& files, const TokenLoaderOptions& options,
                         MeshPtr mesh, const Placements& placements, std::source_location where)
    : state_(std::make_unique<State>(
          files, options, std::move(mesh), [&](const DeviceMesh&) { return placements; }, where)) {}
TokenLoader::TokenLoader(const std::vector<TokenFile>& files, const TokenLoaderOptions& options,
                         MeshPtr mesh, const NamedPlacements& placements,
                         std::source_location where)
    : state_(std::make_unique<State>(
          files, options, std::move(mesh),
          [&](const DeviceMesh& on) { return resolve(on, placements); }, where)) {}
TokenLoader::~TokenLoader() = default;

std::optional<TokenBatch> TokenLoader::next() {
  return state_->next();
}
int64_t TokenLoader::num_samples() const {
  return state_->order().options().num_samples;
}
std::string TokenLoader::position() const {
  return state_->order().to_json(state_->position());
}
void TokenLoader::set_position(std::string_view position, std::source_location where) {
  state_->set_position(position, where);
}
absl::Status TokenLoader::check_position(std::string_view position) const {
  return state_->order().from_json(position).status();
}

}  // namespace shardweave
