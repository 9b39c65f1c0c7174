// What a check has at hand, and what it says. Internal to gpu_check.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "gpu_check.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/dtensor.h"

namespace shardweave_tool {

// Of a run, on this rank.
struct Session {
  const GpuCheckOptions& options;
  absl::Status gpu;                          // that LibTorch has one
  c10::Device device{c10::kCUDA, 0};         // this rank's
  std::unique_ptr<shardweave::World> world;  // null until it is joined, and where it cannot be
  std::string lost;                          // why it is of no use any more

  int ranks() const { return world == nullptr ? 1 : world->size(); }
  // Throw Error. Of all ranks; one dimension, "dp".
  shardweave::MeshPtr all_ranks() const;
  // Of this rank alone.
  shardweave::MeshPtr this_rank() const;
  shardweave::MeshPtr mesh(const std::vector<shardweave::MeshDim>& dims) const;
};

// One check under way.
class Check {
 public:
  // More than a few are counted only.
  void fail(const std::string& what);
  void expect(bool holds, const std::string& what) {
    if (!holds) fail(what);
  }
  // Instead of all of it. All ranks alike.
  void skip(std::string why);
  // What was looked at.
  void looked_at(std::string what) { result.why = std::move(what); }
  void figure(Figure figure) { result.figures.push_back(std::move(figure)); }
  void fact(std::string name, std::string what) {
    result.facts.emplace_back(std::move(name), std::move(what));
  }
  // Runs `body`; an exception is a failure of `what`.
  void attempt(const std::string& what, const std::function<void()>& body);

  int64_t failures() const { return failures_; }
  // What has failed, in a line.
  std::string failed_text() const;

  CheckResult result;

 private:
  int64_t failures_ = 0;
  std::vector<std::string> first_failures_;
};

// Every rank's text, on every rank. Collective.
absl::StatusOr<std::vector<std::string>> texts_of_ranks(const Session& session,
                                                        const std::string& text);

// Without the stack.
std::string message_of(const std::exception& error);

// A copy on the CPU, of a DTensor's whole value (collective).
at::Tensor on_host(const at::Tensor& tensor);

// The largest difference between two tensors on the CPU, relative to the largest element of `want`;
// NaN where either has one, infinity for other sizes. Of integers and bools 0 or infinity.
double difference(const at::Tensor& got, const at::Tensor& want);

// Seconds that the device takes for what `body` issues on the current stream; by the host's clock,
// until the device is done, where the device has none.
double device_seconds(c10::Device device, const std::function<void()>& body);
bool has_clock(c10::Device device);
void synchronize(c10::Device device);
double median(std::vector<double> values);

// --- checks --------------------------------------------------------------------------------------

void check_machine(Session& session, Check& check);
void check_collectives(Session& session, Check& check);
void check_streams(Session& session, Check& check);
void check_bandwidth(Session& session, Check& check);
void check_operators_alone(Session& session, Check& check);
void check_operators(Session& session, Check& check);
void check_redistribution(Session& session, Check& check);
void check_random(Session& session, Check& check);
void check_training(Session& session, Check& check);
void check_captured(Session& session, Check& check);
void check_checkpoint(Session& session, Check& check);
void check_memory(Session& session, Check& check);
void check_dispatch(Session& session, Check& check);
void check_block(Session& session, Check& check);
void check_block_of_matmuls(Session& session, Check& check);

}  // namespace shardweave_tool
