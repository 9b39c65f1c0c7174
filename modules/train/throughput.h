// Throughput: how fast a training goes, and how well it uses its devices.
//
//   Throughput throughput({.tokens_per_step = 32 * 1024, .flops_per_token = 6e9, .peak_flops = 8 * 312e12});
//   throughput.step_done();                                         // after each step
//   const RunSpeed speed = throughput.since_last();                 // every hundred steps
//   speed.to_string();          // "21034 tokens/s, 41.2 % MFU, 3.1 GB resident at most"
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "shardweave/modules/train/metrics_writer.h"

namespace shardweave {

struct TransformerSize {
  int64_t parameters =
      0;  // that a token is multiplied by: without tables of embeddings that are looked up
  int64_t layers = 0;
  int64_t dim = 0;  // heads times the size of one
  int64_t seq = 0;
  bool causal = false;  // counts only what a causal mask leaves
};
// Of a step for each token, forward and backward: 6 for each parameter, and of attention 12 * layers * dim *
// seq, half of that if it is causal (PaLM, Chowdhery et al. 2022, appendix B; which does not halve). What
// activation checkpoints compute again does not count.
double transformer_flops_per_token(const TransformerSize& size);

struct ThroughputOptions {
  int64_t tokens_per_step = 1;  // of all ranks together
  double flops_per_token = 0;   // 0: not known
  double peak_flops = 0;        // per second, of all devices together; 0: not known
};

// Of this process; 0 where the system does not tell.
int64_t resident_bytes();
int64_t peak_resident_bytes();

struct RunSpeed {
  int64_t steps = 0;
  double seconds = 0;
  double tokens_per_second = 0;
  double flops_per_second = 0;  // 0: not known
  double mfu = 0;               // model FLOPs utilisation, 0 to 1; 0: not known
  int64_t peak_resident_bytes = 0;

  std::string to_string() const;
  // "tokens_per_second", "mfu" and so on, those that are known.
  std::vector<Metric> metrics() const;
};

// Used by one thread at a time.
class Throughput {
 public:
  using Clock = std::chrono::steady_clock;
  explicit Throughput(const ThroughputOptions& options, Clock::time_point now = Clock::now())
      : options_(options), last_(now), since_(now) {}

  void step_done(Clock::time_point now = Clock::now());
  // What has passed since the last step does not count: an evaluation, a checkpoint.
  void leave_out(Clock::time_point now = Clock::now());
  // Of the steps since the last call, or since the beginning.
  RunSpeed since_last();

 private:
  const ThroughputOptions options_;
  Clock::time_point last_, since_;
  int64_t steps_ = 0;
};

}  // namespace shardweave
