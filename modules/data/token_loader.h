// TokenLoader: batches of token files, made ahead by a thread, each rank's part of them.
//
//   auto file = TokenFile::open("tokens.bin").value();
//   TokenLoader loader({file}, {.seq = 1024, .batch = 32, .seed = 7}, mesh, {{"dp", Shard(0)}});
//   while (std::optional<TokenBatch> batch = loader.next()) {
//     model->loss(batch->tokens, batch->targets).backward();       // [32, 1024], DTensors
//   }
//   const std::string position = loader.position();                // for a checkpoint
//   loader.set_position(position);                                 // on any number of ranks
//
// What a batch consists of is the same on any number of ranks, in the same order (sample_order.h): a
// rank reads its rows of it and no others. position() is that of the batch that next() gives next,
// whatever was read ahead, so that a run that was broken off goes on with the batch that it had not
// used.
//
// Threads: used by one thread at a time. The thread of its own only reads files and makes plain
// tensors; it ends in the destructor, which waits for a read that is under way.
//
// Errors of files come out of next(), in the place of the batch that could not be read; batches before
// it are given first. They are this rank's alone, and tell no other: let run_ranks() or the program do
// that, as with any error of one rank. set_position() on all ranks, to a position kept from before, tries again.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/modules/data/sample_order.h"
#include "shardweave/modules/data/token_file.h"

namespace shardweave {

struct TokenLoaderOptions {
  int64_t seq = 1;    // tokens of a sample
  int64_t batch = 1;  // samples of a batch, of all ranks together
  uint64_t seed = 0;
  bool shuffle = true;
  int64_t epochs = 0;      // 0: no end
  bool drop_last = false;  // with an end: the last batch is left out if it is not whole
  int prefetch = 2;        // batches that are read ahead, 1024 at most; 0: next() reads
};

struct TokenBatch {
  at::Tensor tokens;    // int64, [samples, seq]
  at::Tensor targets;   // the same, one token further on
  int64_t samples = 0;  // of all ranks together: `batch`, or less in the last one
};

// Which rows of a batch this rank gets, where there is no mesh: those that Shard(0) gives it.
struct BatchPart {
  int64_t index = 0;
  int64_t count = 1;
};

class TokenLoader {
 public:
  // Plain tensors, of this part of the rows; there may be none in the last part of a small batch.
  // Throws Error (InvalidArgument) for options out of range, and what TokenWindows::create() refuses.
  TokenLoader(const std::vector<TokenFile>& files, const TokenLoaderOptions& options,
              const BatchPart& part = {});
  // DTensors of [samples, seq] on `mesh`. Wants Shard(0), Shard(1) (of long sequences) or Replicate along
  // each of its dimensions. Collective over the mesh: compares the ranks' options, placements and
  // numbers of tokens. Throws Error on all ranks: as above, and (InvalidArgument) where they differ.
  TokenLoader(const std::vector<TokenFile>& files, const TokenLoaderOptions& options, MeshPtr mesh,
              const Placements& placements,
              std::source_location where = std::source_location::current());
  TokenLoader(const std::vector<TokenFile>& files, const TokenLoaderOptions& options, MeshPtr mesh,
              const NamedPlacements& placements,
              std::source_location where = std::source_location::current());
  ~TokenLoader();
  TokenLoader(const TokenLoader&) = delete;
  TokenLoader& operator=(const TokenLoader&) = delete;

  // Nothing at the end. On a mesh all ranks call it alike; nothing is sent, and ranks that are at
  // different positions hear so at the next collective of what they were given.
  std::optional<TokenBatch> next();

  // Of a pass through all samples, shuffled or not.
  int64_t num_samples() const;

  // As SampleOrder::to_json().
  std::string position() const;
  // The next batch is the one at `position`, which position() of any loader of these files has given,
  // with the same seq, seed and shuffle. Collective on a mesh. Throws Error before anything is changed,
  // on all ranks: (InvalidArgument) for what is no such position, or differs between ranks.
  void set_position(std::string_view position,
                    std::source_location where = std::source_location::current());
  // Whether set_position() takes it, as far as one rank sees: InvalidArgument. Sends nothing.
  absl::Status check_position(std::string_view position) const;

 private:
  class State;
  const std::unique_ptr<State> state_;
};

}  // namespace shardweave
