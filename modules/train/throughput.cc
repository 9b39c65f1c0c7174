#include "shardweave/modules/train/throughput.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>

#include "absl/strings/str_format.h"

namespace shardweave {

double transformer_flops_per_token(const TransformerSize& size) {
  const double attention = 12.0 * static_cast<double>(size.layers) * static_cast<double>(size.dim) *
                           static_cast<double>(size.seq);
  return 6.0 * static_cast<double>(size.parameters) + (size.causal ? attention / 2 : attention);
}

int64_t resident_bytes() {
  std::FILE* const file = std::fopen("/proc/self/statm", "re");
  if (file == nullptr) return 0;
  long long all = 0, resident = 0;  // pages
  const int found = std::fscanf(file, "%lld %lld", &all, &resident);
  std::fclose(file);
  return found == 2 ? resident * static_cast<int64_t>(::sysconf(_SC_PAGESIZE)) : 0;
}

int64_t peak_resident_bytes() {
  rusage usage{};
  // In KiB.
  return ::getrusage(RUSAGE_SELF, &usage) == 0 ? static_cast<int64_t>(usage.ru_maxrss) * 1024 : 0;
}

void Throughput::step_done(Clock::time_point now) {
  ++steps_;
  last_ = now;
}

void Throughput::leave_out(Clock::time_point now) {
  since_ += now - last_;
  last_ = now;
}

RunSpeed Throughput::since_last() {
  RunSpeed speed{.steps = steps_,
                 .seconds = std::chrono::duration<double>(last_ - since_).count(),
                 .peak_resident_bytes = peak_resident_bytes()};
  if (speed.seconds > 0) {
    speed.tokens_per_second =
        static_cast<double>(steps_ * options_.tokens_per_step) / speed.seconds;
  }
  speed.flops_per_second = speed.tokens_per_second * options_.flops_per_token;
  if (options_.peak_flops > 0) speed.mfu = speed.flops_per_second / options_.peak_flops;
  steps_ = 0;
  since_ = last_;
  return speed;
}

std::string RunSpeed::to_string() const {
  std::string text =
      absl::StrFormat("%.*f tokens/s", tokens_per_second < 10 ? 1 : 0, tokens_per_second);
  if (mfu > 0) {
    absl::StrAppendFormat(&text, ", %.1f %% MFU", 100 * mfu);
  } else if (flops_per_second > 0) {
    absl::StrAppendFormat(&text, ", %.3g TFLOP/s", flops_per_second / 1e12);
  }
  if (peak_resident_bytes > 0) {
    absl::StrAppendFormat(&text, ", %.3g GB resident at most",
                          static_cast<double>(peak_resident_bytes) / 1e9);
  }
  return text;
}

std::vector<Metric> RunSpeed::metrics() const {
  std::vector<Metric> all = {{"tokens_per_second", tokens_per_second}};
  if (flops_per_second > 0) all.push_back({"flops_per_second", flops_per_second});
  if (mfu > 0) all.push_back({"mfu", mfu});
  if (peak_resident_bytes > 0) {
    all.push_back({"peak_resident_bytes", static_cast<double>(peak_resident_bytes)});
  }
  return all;
}

}  // namespace shardweave
