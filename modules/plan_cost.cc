#include "shardweave/modules/plan_cost.h"

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/ivalue.h"
#include "ATen/record_function.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/counting/counting.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/cost_model.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/observe/text_table.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/module_memory.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using namespace modules_internal;

constexpr char kFunction[] = "plan_cost";

// --- what LibTorch records of an operator --------------------------------------------------------

// RecordFunction::inputs() of a program without NDEBUG asks a flag that LibTorch, which is built
// with it, never sets; module_watch.cc reads the same.
template <auto kMember>
struct RevealedArguments {
  friend c10::ArrayRef<const c10::IValue> arguments_on_stack(const at::RecordFunction& function) {
    return function.*kMember;
  }
};
c10::ArrayRef<const c10::IValue> arguments_on_stack(const at::RecordFunction& function);
template struct RevealedArguments<&at::RecordFunction::inputs_>;

std::optional<c10::OperatorHandle> recorded_operator(const at::RecordFunction& function) {
  const std::optional<c10::OperatorName> name = function.operator_name();
  if (!name.has_value()) return std::nullopt;
  return c10::Dispatcher::singleton().findSchema(*name);
}

// What it has on a stack that may hold more: arguments while it begins, results when it ends.
c10::ArrayRef<const c10::IValue> last_of(c10::ArrayRef<const c10::IValue> stack, size_t count) {
  return stack.size() <= count ? stack : stack.slice(stack.size() - count);
}
c10::ArrayRef<const c10::IValue> recorded_arguments(const at::RecordFunction& function,
                                                    const c10::FunctionSchema& schema) {
  return last_of(arguments_on_stack(function), schema.arguments().size());
}
c10::ArrayRef<const c10::IValue> recorded_results(const at::RecordFunction& function,
                                                  const c10::FunctionSchema& schema) {
  const std::vector<c10::IValue>& results = function.outputs();
  return last_of(c10::ArrayRef<const c10::IValue>(results.data(), results.size()),
                 schema.returns().size());
}

// Those that are defined, in lists too.
std::vector<at::Tensor> tensors_among(c10::ArrayRef<const c10::IValue> values) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : values) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) tensors.push_back(value.toTensor());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor() && element.toTensor().defined()) {
          tensors.push_back(element.toTensor());
        }
      }
    }
  }
  return tensors;
}

// --- what an operator costs ----------------------------------------------------------------------

// Bytes that an operator reads or writes of a tensor: of one that is expanded, what there is.
int64_t bytes_of(const at::Tensor& tensor) {
  const auto bytes = static_cast<int64_t>(tensor.numel() * tensor.element_size());
  if (!tensor.has_storage()) return bytes;
  return std::min(bytes, static_cast<int64_t>(tensor.storage().nbytes()));
}

bool argument_is_true(const c10::FunctionSchema& schema, c10::ArrayRef<const c10::IValue> values,
                      const char* name) {
  const std::optional<int> index = schema.argumentIndexWithName(name);
  return index.has_value() && values[*index].isBool() && values[*index].toBool();
}

// Multiplications and additions of one operator on plain tensors, by the sizes of its arguments.
// None of these operators is made of others of these.
double flops_of(const c10::OperatorHandle& op, c10::ArrayRef<const c10::IValue> values) {
  const std::string& name = op.operator_name().name;
  const auto numel = [&](size_t arg) {
    return static_cast<double>(values[arg].toTensor().numel());
  };
  const auto size = [&](size_t arg, int64_t dim) {
    return static_cast<double>(values[arg].toTensor().size(dim));
  };
  if (name == "aten::mm" || name == "aten::bmm") return 2 * numel(0) * size(1, -1);
  if (name == "aten::addmm" || name == "aten::baddbmm") return 2 * numel(1) * size(2, -1);
  if (name.starts_with("aten::_scaled_dot_product_")) {
    // Queries with keys and scores with values; in backward the scores once more, their gradient and
    // that of query, key and value. Of causal ones half.
    const bool backward = name.find("_backward") != std::string::npos;
    const size_t query = backward ? 1 : 0;
    const double products =
        (backward ? 5.0 : 2.0) * (argument_is_true(op.schema(), values, "is_causal") ? 0.5 : 1.0);
    return products * 2 * numel(query) * size(query + 1, 2);
  }
  if (name == "aten::convolution_backward") {
    const bool transposed = argument_is_true(op.schema(), values, "transposed");
    // Of the input and of the weight, as far as they are wanted.
    const auto mask = op.schema().argumentIndexWithName("output_mask");
    const c10::List<bool> wanted = values[static_cast<size_t>(*mask)].toBoolList();
    const double products = static_cast<double>(wanted.get(0)) + static_cast<double>(wanted.get(1));
    return products * 2 * numel(transposed ? 1 : 0) * numel(2) / size(2, 0);
  }
  return 0;
}

// Those of a convolution for each element of its output, which meets one filter; of a transposed one
// it is each of the input.
std::pair<double, bool> flops_per_element(const c10::OperatorHandle& op,
                                          c10::ArrayRef<const c10::IValue> values) {
  if (op.operator_name().name != "aten::convolution") return {0, false};
  const at::Tensor& weight = values[1].toTensor();
  return {2 * static_cast<double>(weight.numel()) / static_cast<double>(weight.size(0)),
          argument_is_true(op.schema(), values, "transposed")};
}

bool gives_views(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& r) {
    return r.alias_info() != nullptr && !r.alias_info()->isWrite();
  });
}

// What this thread computes while it lives, autograd's backward on CPUs too: operators on plain
// tensors, which are those on local parts, and of those that others are made of the others.
class WorkMeter {
 public:
  WorkMeter() : outer_(meter_here) {
    meter_here = this;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&on_begin, &on_end)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  }
  ~WorkMeter() { stop(); }
  WorkMeter(const WorkMeter&) = delete;
  WorkMeter& operator=(const WorkMeter&) = delete;

  // Throws what went wrong while it looked.
  void finish() {
    stop();
    if (failure_ != nullptr) std::rethrow_exception(std::exchange(failure_, nullptr));
  }
  double flops() const { return flops_; }
  int64_t bytes() const { return bytes_; }

 private:
  struct Running {
    bool counts = false;      // it is on plain tensors alone
    bool is_product = false;  // one of those of flops_of()
    int64_t bytes = 0;        // of its arguments
    int64_t inner = 0;        // touched by those that it is made of
    double flops_per_result = 0;
  };

  void stop() {
    if (!handle_.has_value()) return;
    at::removeCallback(*handle_);
    handle_.reset();
    meter_here = outer_;
  }

  static std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& function) {
    if (meter_here != nullptr) meter_here->look([&] { meter_here->begin(function); });
    return nullptr;
  }
  static void on_end(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
    if (meter_here != nullptr) meter_here->look([&] { meter_here->end(function); });
  }
  // Exceptions do not pass through LibTorch's callbacks.
  template <typename F>
  void look(F f) {
    const at::DisableRecordFunctionGuard unseen;
    try {
      f();
    } catch (...) {
      if (failure_ == nullptr) failure_ = std::current_exception();
    }
  }

  void begin(const at::RecordFunction& function) {
    Running& it = running_.emplace_back();
    const std::optional<c10::OperatorHandle> op = recorded_operator(function);
    if (!op.has_value() || op->operator_name().name.starts_with("aten::empty")) return;
    const auto values = recorded_arguments(function, op->schema());
    const std::vector<at::Tensor> tensors = tensors_among(values);
    const auto has = [&](bool (*is)(const at::Tensor&)) {
      return std::any_of(tensors.begin(), tensors.end(), is);
    };
    if (has([](const at::Tensor& t) { return is_dtensor(t); })) return check_reads_no_values(*op);
    // On those without memory the shapes of results are found out.
    if (has([](const at::Tensor& t) { return t.is_meta(); })) return;
    it.counts = true;
    for (const at::Tensor& tensor : tensors) it.bytes += bytes_of(tensor);
    const double product = flops_of(*op, values);
    const auto [flops, of_input] = flops_per_element(*op, values);
    flops_ += product;
    (of_input ? flops_ : it.flops_per_result) +=
        flops * (of_input ? static_cast<double>(tensors[0].numel()) : 1);
    it.is_product = product > 0 || flops > 0;
  }

  // On DTensors, whose values are not those that ranks would have.
  static void check_reads_no_values(const c10::OperatorHandle& op) {
    if (!op.hasTag(at::Tag::data_dependent_output) && !op.hasTag(at::Tag::dynamic_output_shape)) {
      return;
    }
    throw Error(kFunction,
                absl::FailedPreconditionError(str_cat(
                    "the step reads values (", c10::toString(op.operator_name()),
                    "), which are not there without the other ranks; wanted a loss that costs the "
                    "same whatever the values are")));
  }

  void end(const at::RecordFunction& function) {
    if (running_.empty()) return;  // it had begun before
    const Running it = running_.back();
    running_.pop_back();
    (running_.empty() ? bytes_ : running_.back().inner) +=
        it.counts ? touched(it, function) : it.inner;
  }

  // What a product's kernel does within is no more than that.
  int64_t touched(const Running& it, const at::RecordFunction& function) {
    const c10::FunctionSchema& schema = recorded_operator(function)->schema();
    const std::vector<at::Tensor> results = tensors_among(recorded_results(function, schema));
    if (it.flops_per_result > 0 && !results.empty()) {
      flops_ += it.flops_per_result * static_cast<double>(results[0].numel());
    }
    const bool is_number = results.empty() && !schema.returns().empty();
    if (gives_views(schema) || is_number || (it.inner > 0 && !it.is_product)) return it.inner;
    int64_t bytes = it.bytes;
    for (const at::Tensor& result : results) bytes += bytes_of(result);
    return bytes;
  }

  static thread_local WorkMeter* meter_here;  // LibTorch's callbacks have no data of their own
  WorkMeter* const outer_;
  std::optional<at::CallbackHandle> handle_;
  std::vector<Running> running_;  // outermost first
  double flops_ = 0;
  int64_t bytes_ = 0;
  std::exception_ptr failure_;
};
thread_local WorkMeter* WorkMeter::meter_here = nullptr;

StepModel checked(StepModel made) {
  if (made.module == nullptr || made.loss == nullptr) {
    throw Error(kFunction, absl::InvalidArgumentError(str_cat(
                               "make() gives a ", made.module == nullptr ? "module" : "loss",
                               " that is null")));
  }
  return made;
}

// As the mesh's links say: several dimensions at once are as slow as the slowest.
double seconds_of(const CommEvent& event, const DeviceMesh& mesh, const CostModel& model) {
  if (event.bytes == 0) return 0;
  CostModel::Link link{.latency = 0, .bandwidth = 0};
  for (const std::string& name : event.mesh_dims) {
    const CostModel::Link one = model.link(value_or_throw(mesh.dim(name)));
    link.latency = std::max(link.latency, one.latency);
    link.bandwidth = link.bandwidth == 0 ? one.bandwidth : std::min(link.bandwidth, one.bandwidth);
  }
  return link.latency + static_cast<double>(event.bytes) / link.bandwidth;
}

std::vector<PlanCost::Traffic> traffic_of(const std::vector<CommEvent>& events,
                                          const DeviceMesh& mesh, const CostModel& model) {
  std::map<std::pair<std::string, std::vector<std::string>>, PlanCost::Traffic> sums;
  for (const CommEvent& event : events) {
    if (event.is_check) continue;
    PlanCost::Traffic& sum = sums[{event.collective, event.mesh_dims}];
    sum.calls += 1;
    sum.bytes += event.bytes;
    sum.seconds += seconds_of(event, mesh, model);
  }
  std::vector<PlanCost::Traffic> traffic;
  for (auto& [key, sum] : sums) {
    sum.collective = key.first;
    sum.mesh_dims = key.second;
    traffic.push_back(std::move(sum));
  }
  return traffic;
}

}  // namespace

PlanCost plan_cost(const MakeModel& make, const DeviceMesh& mesh, const ShardingPlan& plan,
                   const CostModel& model, const PlanCostOptions& options) {
  if (options.optimizer_states < 0) {
    throw Error(kFunction,
                absl::InvalidArgumentError(str_cat("optimizer_states is ", options.optimizer_states,
                                                   "; wanted 0 or more")));
  }
  const c10::AutoGradMode recording(true);
  World world(value_or_throw(count_communication(
      0, static_cast<int>(mesh.size()), std::make_shared<CountingLog>(), {.stand_in = true})));
  const MeshPtr counted = value_or_throw(init_device_mesh(world, mesh.dims()));
  CostModel links = model;
  if (links.links.empty()) links.links.resize(mesh.ndim());
  set_cost_model(counted, links);

  StepModel step;
  {
    const DeferredInitScope without_memory;
    step = checked(make());
  }
  name_deferred_members(*step.module);
  parallelize_module(*step.module, counted, plan, {}, {});
  materialize(*step.module, {.seed = 0}, {});

  CommTrace trace(counted);
  WorkMeter work;
  PlanCost cost;
  int64_t gradients = 0;  // before they are brought where their parameters lie
  try {
    at::Tensor loss;
    const auto forward = [&] { return loss = step.loss(counted); };
    cost.activations = module_memory(*step.module, forward).rows[0].activations;
    if (!loss.defined() || loss.numel() != 1 || !loss.requires_grad()) {
      throw Error(kFunction, absl::InvalidArgumentError(
                                 "the loss is not one number that depends on the parameters"));
    }
    loss.backward();
    gradients = module_memory(*step.module).rows[0].gradients;
    finish_grad_sync(*step.module, {});
  } catch (...) {
    work.finish();  // what was seen comes first: the rest may follow from it
    throw;
  }
  work.finish();
  cost.traffic = traffic_of(trace.events(), mesh, links);

  const ModuleMemory::Row memory = module_memory(*step.module).rows[0];
  cost.parameters = memory.parameters;
  cost.buffers = memory.buffers;
  cost.gradients = std::max(memory.gradients, gradients);
  int64_t trained = 0;  // bytes: what is frozen has no state
  for (const at::Tensor& parameter : unique_parameters(*step.module)) {
    if (!parameter.requires_grad()) continue;
    const int64_t numel = is_dtensor(parameter)
                              ? dtensor_internal::meta_of(parameter).spec->local_numel()
                              : parameter.numel();
    trained += numel * static_cast<int64_t>(parameter.element_size());
  }
  cost.optimizer = options.optimizer_states * trained;
  cost.flops = work.flops();
  // The optimizer reads parameters, gradients and states, and writes parameters and states.
  cost.bytes_touched = work.bytes() + 2 * (trained + cost.optimizer) + memory.gradients;
  cost.compute_seconds = cost.flops / links.device.flops +
                         static_cast<double>(cost.bytes_touched) / links.device.bandwidth;
  return cost;
}

int64_t PlanCost::collectives() const {
  int64_t sum = 0;
  for (const Traffic& t : traffic) sum += t.calls;
  return sum;
}

int64_t PlanCost::bytes_sent() const {
  int64_t sum = 0;
  for (const Traffic& t : traffic) sum += t.bytes;
  return sum;
}

double PlanCost::communication_seconds() const {
  double sum = 0;
  for (const Traffic& t : traffic) sum += t.seconds;
  return sum;
}

std::string PlanCost::to_string() const {
  std::string text =
      str_cat("a step: ", seconds(), " s = ", compute_seconds, " s of computation (", flops,
              " operations, ", bytes_touched, " bytes touched) + ", communication_seconds(),
              " s of ", collectives(), " collectives (", bytes_sent(),
              " bytes sent by a rank)\nmemory of a rank: ", memory(), " bytes = ", parameters,
              " parameters + ", buffers, " buffers + ", gradients, " gradients + ", optimizer,
              " optimizer + ", activations, " activations\n");
  dtensor_internal::TextTable table({"collective", "along", "calls", "bytes", "seconds"},
                                    /*right_aligned=*/{2, 3, 4});
  for (const Traffic& t : traffic) {
    table.add({t.collective, absl::StrJoin(t.mesh_dims, ", "), str_cat(t.calls), str_cat(t.bytes),
               str_cat(t.seconds)});
  }
  return text + table.to_string();
}

std::string PlanCost::to_json() const {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const Traffic& t : traffic) {
    all.push_back({{"collective", t.collective},
                   {"mesh_dims", t.mesh_dims},
                   {"calls", t.calls},
                   {"bytes", t.bytes},
                   {"seconds", t.seconds}});
  }
  return nlohmann::ordered_json({{"seconds", seconds()},
                                 {"communication_seconds", communication_seconds()},
                                 {"compute_seconds", compute_seconds},
                                 {"flops", flops},
                                 {"bytes_touched", bytes_touched},
                                 {"bytes_sent", bytes_sent()},
                                 {"collectives", collectives()},
                                 {"memory", memory()},
                                 {"parameters", parameters},
                                 {"buffers", buffers},
                                 {"gradients", gradients},
                                 {"optimizer", optimizer},
                                 {"activations", activations},
                                 {"traffic", std::move(all)}})
      .dump();
}

}  // namespace shardweave
