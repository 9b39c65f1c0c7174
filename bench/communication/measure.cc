#include "measure.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/observe/comm_trace.h"

namespace communication_bench {
namespace {

using namespace shardweave;

// A model with its batch, on one device or distributed.
struct Training {
  std::shared_ptr<Model> model;
  Batch batch;
};

Training on_one_device(const Scenario& s) {
  return {make_model(s.model, s.sizes), make_batch(s.model, s.sizes)};
}

Training on_mesh(const Scenario& s, const MeshPtr& mesh) {
  const DistributeOptions all_have_it = {.source = std::nullopt};
  Training t = on_one_device(s);
  distribute_module(*t.model, mesh, s.plan, all_have_it);
  t.batch.input = distribute_tensor(t.batch.input, mesh, s.input, all_have_it);
  t.batch.target = distribute_tensor(t.batch.target, mesh, s.target, all_have_it);
  return t;
}

struct NoPhases {
  void operator()() const {}
};

// `after_forward`, `after_backward` are called in between.
template <typename F = NoPhases, typename G = NoPhases>
double step(Training& t, F after_forward = {}, G after_backward = {}) {
  at::Tensor loss = t.model->loss(t.batch.input, t.batch.target);
  const double value = loss.item<double>();
  after_forward();
  loss.backward();
  after_backward();
  finish_grad_sync(*t.model);
  return value;
}

// As an optimizer leaves it.
void between_steps(Training& t) {
  const c10::AutoGradMode no_grad(false);
  for (at::Tensor& p : unique_parameters(*t.model)) {
    p.mul_(1.0);
    p.mutable_grad() = at::Tensor();
  }
}

Traffic traffic(const std::vector<CommEvent>& events, size_t begin, size_t end) {
  Traffic sum;
  for (size_t i = begin; i < end; ++i) sum += {{{events[i].collective, 1}}, events[i].bytes};
  return sum;
}

// The step that counts, on one rank.
Phases traced_step(Training& t, const MeshPtr& mesh, double& loss, std::string& text,
                   std::vector<CommEvent>& events) {
  const CommTrace trace(mesh);
  size_t forward = 0, backward = 0;
  loss =
      step(t, [&] { forward = trace.events().size(); }, [&] { backward = trace.events().size(); });
  text = trace.to_string();
  events = trace.events();
  return {traffic(events, 0, forward), traffic(events, forward, backward),
          traffic(events, backward, events.size())};
}

double largest(const at::Tensor& t) {
  return t.numel() == 0 ? 0 : t.detach().abs().max().item<double>();
}

// Collective. A difference that is not a number is the largest.
void compare(Training& want, Training& got, Measurement& m) {
  const c10::AutoGradMode no_grad(false);
  const auto names = want.model->named_parameters();
  double scale = 0;
  for (const auto& item : names) scale = std::max(scale, largest(item.value().grad()));
  for (const auto& item : got.model->named_parameters()) {
    const at::Tensor& right = names[item.key()].grad();
    const at::Tensor grad = item.value().grad();
    double error = INFINITY;
    if (grad.defined() && layout_of(grad) == layout_of(item.value())) {
      const at::Tensor whole = full_tensor(grad);
      const double own = largest(right);
      error = largest(whole - right) / (own > scale / 1000 ? own : scale);
    }
    if (error > m.gradient_error || std::isnan(error)) {
      m.gradient_error = std::isnan(error) ? INFINITY : error;
      m.worst_gradient = item.key();
    }
  }
}

int num_ranks(const Scenario& s) {
  int64_t ranks = 1;
  for (const MeshDim& dim : s.mesh) ranks *= dim.size;
  return static_cast<int>(ranks);
}

absl::Status on_ranks(const Scenario& s, const std::function<void(World&, const MeshPtr&)>& body) {
  return run_ranks(num_ranks(s), [&](World& world) -> absl::Status {
    at::set_num_threads(1);
    auto mesh = init_device_mesh(world, s.mesh);
    if (!mesh.ok()) return mesh.status();
    body(world, *mesh);
    return world.comm()->barrier().wait();
  });
}

// --- CPU time ------------------------------------------------------------------------------------

double process_seconds() {
  timespec now = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Of all threads, from when all ranks have come here until all are through `call`.
double timed(Communicator& all, const std::function<void()>& call) {
  throw_if_error(all.barrier().wait());
  const double start = process_seconds();
  throw_if_error(all.barrier().wait());
  call();
  throw_if_error(all.barrier().wait());
  const double seconds = process_seconds() - start;
  throw_if_error(all.barrier().wait());
  return seconds;
}

// A collective of an event's kind and size, by itself.
void repeat(dtensor_internal::MeshContext& context, const CommEvent& event) {
  std::vector<int> dims;
  for (const std::string& name : event.mesh_dims) {
    dims.push_back(value_or_throw(context.mesh().dim(name)));
  }
  Communicator& comm = context.communicator(dims);
  const int64_t k = event.group_size;
  const bool reduces = event.collective == "all_reduce";
  // A piece: what a rank sends to another.
  const int64_t piece = std::max<int64_t>(1, event.bytes / (reduces ? 2 : 1) / (k - 1) / 4);
  const at::Tensor in = at::zeros({k * piece}), out = at::empty({k * piece});
  const auto buffer = [](const at::Tensor& t, int64_t count) {
    return Buffer::of(t.data_ptr<float>(), count);
  };
  const std::vector<int64_t> counts(k, piece);
  if (reduces) {
    throw_if_error(
        comm.all_reduce(buffer(in, k * piece), buffer(out, k * piece), ReduceOp::kSum).wait());
  } else if (event.collective == "reduce_scatter") {
    throw_if_error(
        comm.reduce_scatter(buffer(in, k * piece), buffer(out, piece), ReduceOp::kSum).wait());
  } else if (event.collective == "all_gather") {
    throw_if_error(comm.all_gather(buffer(in, piece), buffer(out, k * piece)).wait());
  } else {
    throw_if_error(comm.all_to_all(buffer(in, k * piece), buffer(out, k * piece)).wait());
  }
}

}  // namespace

absl::StatusOr<Measurement> measure(const Scenario& scenario) {
  Training plain = on_one_device(scenario);
  const double want = step(plain);
  std::vector<Measurement> of_ranks(num_ranks(scenario));
  const absl::Status status = on_ranks(scenario, [&](World& world, const MeshPtr& mesh) {
    Training t = on_mesh(scenario, mesh);
    step(t);
    between_steps(t);
    Measurement& mine = of_ranks[world.rank()];
    double loss = 0;
    std::vector<CommEvent> events;
    mine.of_ranks = {traced_step(t, mesh, loss, mine.trace, events)};
    mine.loss_error = std::isfinite(loss) ? std::abs(loss - want) / std::abs(want) : INFINITY;
    compare(plain, t, mine);
  });
  if (!status.ok()) return status;
  Measurement result = of_ranks[0];
  for (size_t i = 1; i < of_ranks.size(); ++i) {
    const Measurement& other = of_ranks[i];
    result.of_ranks.push_back(other.phases());
    result.loss_error = std::max(result.loss_error, other.loss_error);
    if (other.gradient_error <= result.gradient_error) continue;
    result.gradient_error = other.gradient_error;
    result.worst_gradient = other.worst_gradient;
  }
  return result;
}

absl::StatusOr<CpuTime> cpu_time(const Scenario& scenario, int steps) {
  CpuTime result;
  const int at_once =
      std::min(num_ranks(scenario), static_cast<int>(std::thread::hardware_concurrency()));
  const absl::Status status = on_ranks(scenario, [&](World& world, const MeshPtr& mesh) {
    Training alone = on_one_device(scenario), t = on_mesh(scenario, mesh);
    Communicator& all = *world.comm();
    step(alone);
    between_steps(alone);
    step(t);
    between_steps(t);
    std::string trace;
    double loss = 0;
    std::vector<CommEvent> events;
    traced_step(t, mesh, loss, trace, events);
    between_steps(t);
    const auto context = dtensor_internal::MeshContext::of(mesh);
    std::vector<CpuTime> times(steps);
    std::vector<double> ratios;
    for (CpuTime& time : times) {
      time.one_device = timed(all,
                              [&] {
                                if (world.rank() < at_once) step(alone);
                              }) /
                        at_once;
      between_steps(alone);
      time.ranks = timed(all, [&] { step(t); });
      between_steps(t);
      time.communication = timed(all, [&] {
        for (const CommEvent& event : events) repeat(*context, event);
      });
      ratios.push_back(time.ranks / (time.one_device + time.communication));
    }
    if (world.rank() != 0) return;
    const auto median_of = [&](double CpuTime::*part) {
      std::vector<double> values;
      for (const CpuTime& time : times) values.push_back(time.*part);
      return median(std::move(values));
    };
    result = {.one_device = median_of(&CpuTime::one_device),
              .ranks = median_of(&CpuTime::ranks),
              .communication = median_of(&CpuTime::communication),
              .ratio = median(std::move(ratios))};
  });
  if (!status.ok()) return status;
  return result;
}

Verdict as_theory_says(const Scenario& scenario, const std::vector<Phases>& of_ranks) {
  Phases with_row_sums = scenario.theory;
  with_row_sums.backward += scenario.row_sums;
  const auto all_are = [&](const Phases& theory) {
    return std::all_of(of_ranks.begin(), of_ranks.end(),
                       [&](const Phases& measured) { return measured == theory; });
  };
  if (all_are(scenario.theory)) return Verdict::kYes;
  return all_are(with_row_sums) ? Verdict::kWithRowSums : Verdict::kNo;
}

std::string differences(const Scenario& scenario, const std::vector<Phases>& of_ranks) {
  std::string text;
  const Phases& theory = scenario.theory;
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const auto compare = [&](const char* phase, const Traffic& measured, const Traffic& want) {
      if (measured == want) return;
      absl::StrAppend(&text, "rank ", rank, ", ", phase, ": ", measured.to_string(),
                      "; theory: ", want.to_string(), "\n");
    };
    compare("forward", of_ranks[rank].forward, theory.forward);
    compare("backward", of_ranks[rank].backward, theory.backward);
    compare("gradient sync", of_ranks[rank].gradient_sync, theory.gradient_sync);
  }
  return text;
}

}  // namespace communication_bench
