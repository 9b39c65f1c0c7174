// SampleOrder: in which order samples are used, epoch after epoch, as a pure function.
//
//   absl::StatusOr<SampleOrder> order = SampleOrder::create({.num_samples = 1000, .seed = 7});
//   SamplePosition p;                                  // the beginning
//   order->sample(p);                                  // the first sample of the first epoch
//   p = order->after(p, 32);                           // 32 samples further on
//   order->to_json(p);                                 // what a checkpoint keeps
//
// Samples stand in one line: those of epoch 0 in an order of its own, those of epoch 1 in another, and
// so on; each epoch has every sample once. The batch of a step is the next `batch` of the line, also
// across the end of an epoch. So what is used at a step depends on the seed and on how many samples
// were used before, and not on how many ranks there are, nor on which of them takes which part of a
// batch: a run goes on where it was on any number of ranks, and with another batch as well.
//
// The order of an epoch is a permutation that is computed and not stored: a Feistel network (Luby,
// Rackoff 1988) over the bits of an index, walked on from an index that there is not to one that there
// is (Black, Rogaway 2002). 50 ns for a sample, no memory, whether there are ten or a billion. It stays the
// same in later versions: checkpoints depend on it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardweave {

// How far one is in the line. A value.
struct SamplePosition {
  int64_t epoch = 0;
  int64_t sample = 0;  // how many of this epoch were used; less than num_samples
  friend bool operator==(const SamplePosition&, const SamplePosition&) = default;
};

struct SampleOrderOptions {
  int64_t num_samples = 0;
  uint64_t seed = 0;
  bool shuffle = true;  // false: every epoch goes from the first to the last
  int64_t epochs = 0;   // how many there are; 0: no end
  std::string of =
      {};  // what the samples are of, as a text: positions of other samples are refused
};

// A value. Any thread, several at once.
class SampleOrder {
 public:
  // InvalidArgument for num_samples < 1, epochs < 0.
  static absl::StatusOr<SampleOrder> create(const SampleOrderOptions& options);

  const SampleOrderOptions& options() const { return options_; }

  // Which sample is used at a position that check() accepts and that is not the end.
  int64_t sample(SamplePosition position) const;
  // How many of `samples` there are from there on: less only at the end.
  int64_t left(SamplePosition position, int64_t samples) const;
  // So many samples further on; `samples` is 0 to left().
  SamplePosition after(SamplePosition position, int64_t samples) const;
  // InvalidArgument for a position that is not in the line.
  absl::Status check(SamplePosition position) const;

  // {"epoch":3,"sample":640,"num_samples":1000,"seed":7,"shuffle":true}
  std::string to_json(SamplePosition position) const;
  // InvalidArgument for anything but that, and for a position in another line (another number of
  // samples, seed or shuffle): what was used before would be used again, or never.
  absl::StatusOr<SamplePosition> from_json(std::string_view text) const;

 private:
  explicit SampleOrder(const SampleOrderOptions& options) : options_(options) {}

  SampleOrderOptions options_;
};

}  // namespace shardweave
