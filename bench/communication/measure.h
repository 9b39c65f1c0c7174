// Runs a training step of a scenario on rank threads: what it communicates, whether its numbers are
// one device's, and the CPU time that it takes.
//
//   absl::StatusOr<Measurement> m = measure(scenario);
//   m->phases().forward == scenario.theory.forward;
//
// A step: forward, loss.item(), backward, finish_grad_sync(). Between two steps the parameters are
// written, as an optimizer would. What happens only once (constants that ranks compare when they
// first meet them) is in the steps before the one that counts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "scenarios.h"

namespace communication_bench {

struct Measurement {
  std::vector<Phases> of_ranks;
  std::string trace;  // CommTrace::to_string() of the whole step, on rank 0
  // Against one device, relative, of the rank that is furthest off: of the loss; and of the gradient
  // that is furthest off, in its largest entry. (Of a gradient that is zero but for rounding, as that
  // of a key's bias: relative to the model's largest.)
  double loss_error = 0;
  double gradient_error = 0;
  std::string worst_gradient;  // the parameter's name

  const Phases& phases() const { return of_ranks[0]; }
  bool right() const { return loss_error <= 1e-5 && gradient_error <= 1e-5; }
};
absl::StatusOr<Measurement> measure(const Scenario& scenario);

// Seconds of one step, of all threads together; medians. The three take turns, step by step: a machine
// that is slower for a while is so for each. And one device's step runs on as many threads at once as
// the ranks can (each its own), for a core is slower where its neighbour is busy.
struct CpuTime {
  double one_device = 0;     // of one of them
  double ranks = 0;          // all of them together
  double communication = 0;  // the step's collectives alone, on all ranks
  double ratio = 0;          // ranks / (one_device + communication), of each turn; their median
};
absl::StatusOr<CpuTime> cpu_time(const Scenario& scenario, int steps);

// Whether what was sent is what the theory says, of every rank, kind by kind; and if it is, whether
// that takes the scenario's row_sums.
enum class Verdict : uint8_t { kNo, kYes, kWithRowSums };
Verdict as_theory_says(const Scenario& scenario, const std::vector<Phases>& of_ranks);

// The phases that differ from the theory, a line each: "rank 1, forward: 3 all_reduce, 12 bytes; theory:
// 2 all_reduce, 8 bytes".
std::string differences(const Scenario& scenario, const std::vector<Phases>& of_ranks);

}  // namespace communication_bench
