#include "recorded_step.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>

#include "ATen/autocast_mode.h"
#include "ATen/core/LegacyTypeDispatch.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/record_function.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "shardweave/comm/backend.h"
#include "shardweave/comm/inproc/inproc.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/dtensor.h"

namespace bench_recorded_step {
namespace {

using shardweave::Backend;
using shardweave::Call;
using shardweave::Deadline;
using shardweave::OpKind;

constexpr int kNoSlot = -1;
constexpr std::chrono::minutes kPatience{5};

void throw_if_error(const absl::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

// An argument of a kernel: a slot's tensor, a list of such, or a constant.
struct Operand {
  c10::IValue constant;
  int slot = kNoSlot;
  std::vector<Operand> list;
};

// Fills slots, one for each tensor that it returns; kNoSlot for what is no tensor, or is there
// already. A list of tensors fills several.
struct Kernel {
  c10::OperatorHandle op;
  std::vector<Operand> operands;
  std::vector<std::vector<int>> outputs;
};

// Memory of a collective: within a slot's storage, or where it always is.
struct Memory {
  int slot = kNoSlot;
  std::ptrdiff_t offset = 0;
  void* address = nullptr;
};

struct Collective {
  Backend* backend;
  Call call;  // its pointers and views are those below
  Memory in, out;
  std::vector<int64_t> in_counts, out_counts;
  std::shared_ptr<Backend::Ticket> ticket;  // of the last start
};

struct Waiting {
  Backend* backend;
  std::shared_ptr<Backend::Ticket> ticket;
};

struct Instruction {
  std::variant<Kernel, Collective, Waiting> what;
  std::vector<int> last_uses;  // slots that nothing uses after it
};

struct Result {
  at::Tensor tensor;
  int slot;
};

// Calls `see` for each tensor of an argument or result: it, those of a list.
template <typename See>
void for_each_tensor(const c10::IValue& value, const See& see) {
  if (value.isTensor()) {
    see(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) for_each_tensor(element, see);
  }
}

using Values = std::span<const c10::IValue>;

// Of a call on a stack the values may be all that is there: its own are the last.
Values last(Values values, size_t count) {
  return values.last(std::min(count, values.size()));
}

// Whether it draws random numbers. (Attention may: if it drops something.)
bool draws(const c10::OperatorHandle& op, Values inputs) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  const std::optional<int> dropout = op.schema().argumentIndexWithName("dropout_p");
  return !dropout.has_value() || inputs[static_cast<size_t>(*dropout)].toDouble() != 0;
}

// What there is among an operator's arguments, beside plain tensors on the CPU.
struct Kinds {
  bool dtensors = false, meta = false;
  bool others = false;  // of another device or layout, or that keys above the kernels stand for
};
Kinds kinds_of(Values values) {
  Kinds kinds;
  for (const c10::IValue& value : values) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (shardweave::is_dtensor(tensor)) {
        kinds.dtensors = true;
      } else if (tensor.is_meta()) {
        kinds.meta = true;
      } else if (!tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.is_conj() ||
                 tensor.is_neg()) {
        kinds.others = true;
      }
    });
  }
  return kinds;
}

// Whether it calls other operators, and has nothing to run itself.
bool is_composed(const c10::OperatorHandle& op) {
  return !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

// While a step is recorded, in its thread.
class StepRecorder {
 public:
  static StepRecorder* current() { return current_; }

  StepRecorder() {
    if (current_ != nullptr) throw std::runtime_error("a step is being recorded already");
    current_ = this;
    callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&begin, &end)
                                               .needsInputs(true)
                                               .needsOutputs(true)
                                               .scopes({at::RecordScope::FUNCTION}));
  }
  ~StepRecorder() {
    at::removeCallback(callback_);
    current_ = nullptr;
  }
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  void add(Backend* backend, const Call& call, Backend::Ticket ticket) {
    Collective collective = {.backend = backend,
                             .call = call,
                             .in = memory_of(call.in.data, call.in.bytes()),
                             .out = memory_of(call.out.data, call.out.bytes()),
                             .in_counts = {call.in_counts.begin(), call.in_counts.end()},
                             .out_counts = {call.out_counts.begin(), call.out_counts.end()},
                             .ticket = std::make_shared<Backend::Ticket>(ticket)};
    collective.call.tag = {};
    const bool is_received = call.op == OpKind::kBroadcast && call.peer != backend->group().rank;
    if (!is_received) check_written(collective.in, "a collective");
    wrote(collective.out);
    if (shardweave::is_point_to_point(call.op)) fail("a send or recv");
    const Waiting wait = {backend, collective.ticket};
    instructions_.push_back({.what = std::move(collective), .last_uses = {}});
    // One that is done at once here need not be in a replay: others may come later.
    if (ticket == Backend::kDone) {
      instructions_.push_back({.what = wait, .last_uses = {}});
    } else {
      under_way_[{backend, ticket}] = wait;
    }
  }
  void add_wait(Backend* backend, Backend::Ticket ticket) {
    const auto found = under_way_.find({backend, ticket});
    if (found == under_way_.end()) return;  // from before the step
    instructions_.push_back({.what = found->second, .last_uses = {}});
    under_way_.erase(found);
  }

  // Of what the step has returned.
  std::vector<Result> results(const std::vector<at::Tensor>& tensors) {
    std::vector<Result> results;
    for (const at::Tensor& tensor : tensors) {
      check_written(tensor, "a result");
      results.push_back({tensor, slot_of(tensor)});
    }
    return results;
  }
  // Then what was recorded.
  std::vector<Instruction> take() {
    for (const auto& [key, wait] : under_way_) {
      instructions_.push_back({.what = wait, .last_uses = {}});
    }
    if (!error_.empty()) throw std::runtime_error("this step cannot be recorded: " + error_);
    return std::move(instructions_);
  }
  size_t num_slots() const { return slots_.size(); }

 private:
  struct Frame : at::ObserverContext {
    std::optional<Kernel> kernel;
  };

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    auto frame = std::make_unique<Frame>();
    if (current_ != nullptr) current_->guarded([&] { current_->enter(function, *frame); });
    return frame;
  }
  static void end(const at::RecordFunction& function, at::ObserverContext* frame) {
    if (current_ == nullptr) return;
    current_->guarded([&] { current_->leave(function, *static_cast<Frame*>(frame)); });
  }
  // LibTorch only logs what a callback throws.
  template <typename Part>
  void guarded(const Part& part) {
    try {
      part();
    } catch (const c10::Error& e) {
      fail(e.what_without_backtrace());
    } catch (const std::exception& e) {
      fail(e.what());
    }
  }

  void enter(const at::RecordFunction& function, Frame& frame) {
    if (within_kernel_) return;
    const std::optional<c10::OperatorName> name = function.operator_name();
    if (!name.has_value()) return;
    const std::optional<c10::OperatorHandle> op = c10::Dispatcher::singleton().findSchema(*name);
    if (!op.has_value() || is_composed(*op)) return;
    const auto& arguments = op->schema().arguments();
    const Values inputs =
        last({function.inputs().data(), function.inputs().size()}, arguments.size());
    const Kinds kinds = kinds_of(inputs);
    if (kinds.dtensors && draws(*op, inputs)) {
      fail(shardweave::str_cat(name->name, " draws random numbers of a DTensor, on the host"));
    }
    if (kinds.dtensors || kinds.meta) return;  // those of shapes alone are the engine's own
    if (kinds.others)
      fail(shardweave::str_cat(name->name, " is not of strided tensors on the CPU"));
    if (name->name == "aten::_local_scalar_dense") fail("the host reads a number (item())");
    if (at::autocast::is_autocast_enabled(at::kCPU)) fail("it runs under autocast");
    frame.kernel.emplace(Kernel{.op = *op, .operands = {}, .outputs = {}});
    for (size_t i = 0; i < inputs.size(); ++i) {
      // What a view is taken of is not read. What is written to is read as well, but by these.
      const auto* alias = arguments[i].alias_info();
      const bool is_view = alias != nullptr && !alias->isWrite();
      const bool is_overwritten = alias != nullptr && alias->isWrite() &&
                                  (arguments[i].is_out() || name->name == "aten::copy_" ||
                                   name->name == "aten::fill_" || name->name == "aten::zero_");
      for_each_tensor(inputs[i], [&](const at::Tensor& tensor) {
        if (is_overwritten) {
          wrote(tensor);
        } else if (!is_view) {
          check_written(tensor, name->name);
        }
      });
      frame.kernel->operands.push_back(operand(inputs[i]));
    }
    within_kernel_ = true;
  }

  void leave(const at::RecordFunction& function, Frame& frame) {
    if (!frame.kernel.has_value()) return;
    within_kernel_ = false;
    const bool is_empty = frame.kernel->op.operator_name().name.find("empty") != std::string::npos;
    for (const c10::IValue& output :
         last(function.outputs(), frame.kernel->op.schema().returns().size())) {
      std::vector<int>& slots = frame.kernel->outputs.emplace_back();
      for_each_tensor(output, [&](const at::Tensor& tensor) {
        const bool is_there = !tensor.defined() || by_impl_.contains(tensor.unsafeGetTensorImpl());
        slots.push_back(is_there ? kNoSlot : new_slot(tensor));
        if (!is_there && is_empty) unwritten_.insert(storage_of(tensor));
      });
    }
    instructions_.push_back({.what = *std::move(frame.kernel), .last_uses = {}});
  }

  static const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
    return tensor.storage().unsafeGetStorageImpl();
  }

  int new_slot(const at::Tensor& tensor) {
    const int slot = static_cast<int>(slots_.size());
    slots_.push_back(tensor);
    by_impl_[tensor.unsafeGetTensorImpl()] = {slot, storage_of(tensor)};
    by_storage_.try_emplace(storage_of(tensor), slot);
    if (const size_t bytes = tensor.storage().nbytes(); bytes > 0) {
      by_address_.try_emplace(static_cast<const std::byte*>(tensor.storage().data()), bytes, slot);
    }
    return slot;
  }

  // kNoSlot: a tensor from before the step, which stays where it is.
  int slot_of(const at::Tensor& tensor) {
    if (!tensor.defined()) return kNoSlot;
    const auto known = by_impl_.find(tensor.unsafeGetTensorImpl());
    if (known != by_impl_.end()) {
      if (known->second.second != storage_of(tensor)) fail("a tensor was given other memory");
      return known->second.first;
    }
    const auto storage = by_storage_.find(storage_of(tensor));
    if (storage == by_storage_.end()) return kNoSlot;
    // Another tensor of a slot's memory, which was made past the dispatcher (a saved variable).
    if (slots_[static_cast<size_t>(storage->second)].scalar_type() != tensor.scalar_type()) {
      fail("memory is seen as two types");
    }
    static const c10::OperatorHandle as_strided =
        c10::Dispatcher::singleton().findSchemaOrThrow("aten::as_strided", "");
    const int slot = new_slot(tensor);
    instructions_.push_back(
        {.what =
             Kernel{
                 .op = as_strided,
                 .operands = {{.constant = {}, .slot = storage->second, .list = {}},
                              {.constant = tensor.sizes(), .slot = kNoSlot, .list = {}},
                              {.constant = tensor.strides(), .slot = kNoSlot, .list = {}},
                              {.constant = tensor.storage_offset(), .slot = kNoSlot, .list = {}}},
                 .outputs = {{slot}}},
         .last_uses = {}});
    return slot;
  }

  Operand operand(const c10::IValue& value) {
    Operand result;
    if (value.isTensor()) {
      result.slot = slot_of(value.toTensor());
    } else if (value.isList()) {
      bool has_slots = false;
      for (const c10::IValue& element : value.toListRef()) {
        has_slots = (result.list.emplace_back(operand(element)).slot != kNoSlot) || has_slots;
      }
      if (!has_slots) result.list.clear();
    }
    if (!result.list.empty()) {
      result.constant = c10::impl::GenericList(value.toList().elementType());  // to be filled
    } else if (result.slot == kNoSlot) {
      result.constant = value;
    }
    return result;
  }

  Memory memory_of(const void* data, int64_t bytes) {
    Memory memory = {.slot = kNoSlot, .offset = 0, .address = const_cast<void*>(data)};
    if (bytes == 0) return memory;
    const auto* address = static_cast<const std::byte*>(data);
    auto found = by_address_.upper_bound(address);
    if (found == by_address_.begin() ||
        address >= std::prev(found)->first + std::prev(found)->second.first) {
      fail("a collective has memory that no operator of the step has made");
      return memory;
    }
    --found;
    memory.slot = found->second.second;
    memory.offset = address - found->first;
    return memory;
  }

  void wrote(const Memory& memory) {
    if (memory.slot != kNoSlot) wrote(slots_[static_cast<size_t>(memory.slot)]);
  }
  void check_written(const Memory& memory, std::string_view reader) {
    if (memory.slot != kNoSlot) check_written(slots_[static_cast<size_t>(memory.slot)], reader);
  }
  void wrote(const at::Tensor& tensor) {
    if (tensor.defined()) unwritten_.erase(storage_of(tensor));
  }
  void check_written(const at::Tensor& tensor, std::string_view reader) {
    if (tensor.defined() && tensor.numel() > 0 && unwritten_.contains(storage_of(tensor))) {
      fail(
          shardweave::str_cat(reader, " reads memory that was written past LibTorch's dispatcher"));
    }
  }
  // Thrown at the end: where it is found LibTorch goes on.
  void fail(std::string why) {
    if (error_.empty()) error_ = std::move(why);
  }

  static thread_local StepRecorder* current_;

  at::CallbackHandle callback_;
  bool within_kernel_ = false;
  std::vector<at::Tensor> slots_;  // kept, so that no memory is used twice
  std::unordered_map<const c10::TensorImpl*, std::pair<int, const c10::StorageImpl*>> by_impl_;
  std::unordered_map<const c10::StorageImpl*, int> by_storage_;  // the first
  std::map<const std::byte*, std::pair<size_t, int>> by_address_;
  std::unordered_set<const c10::StorageImpl*> unwritten_;
  std::map<std::pair<Backend*, Backend::Ticket>, Waiting> under_way_;
  std::vector<Instruction> instructions_;
  std::string error_;
};

thread_local StepRecorder* StepRecorder::current_ = nullptr;

// Numbers collectives itself: a replay issues them past the Communicator, which does so else.
class RecordableBackend final : public Backend {
 public:
  explicit RecordableBackend(std::unique_ptr<Backend> inner)
      : Backend(inner->group()), inner_(std::move(inner)) {}

  std::string_view name() const override { return inner_->name(); }
  bool implements(OpKind op) const override { return inner_->implements(op); }
  bool can_reduce(shardweave::DType dtype, shardweave::ReduceOp op) const override {
    return inner_->can_reduce(dtype, op);
  }
  absl::StatusOr<Ticket> start(const Call& call) override {
    Call numbered = call;
    if (!is_point_to_point(call.op)) numbered.sequence = ++collectives_;
    const absl::StatusOr<Ticket> ticket = inner_->start(numbered);
    if (StepRecorder* recorder = StepRecorder::current(); recorder != nullptr && ticket.ok()) {
      recorder->add(this, call, *ticket);
    }
    return ticket;
  }
  // So that whoever needs it waits, which is recorded.
  bool done(Ticket ticket) override {
    return StepRecorder::current() == nullptr && inner_->done(ticket);
  }
  absl::Status wait(Ticket ticket, Deadline deadline) override {
    if (StepRecorder* recorder = StepRecorder::current(); recorder != nullptr)
      recorder->add_wait(this, ticket);
    return inner_->wait(ticket, deadline);
  }
  absl::Status health() override { return inner_->health(); }
  absl::StatusOr<std::unique_ptr<Backend>> subgroup(shardweave::GroupInfo group,
                                                    absl::Span<const int> members,
                                                    std::string_view key,
                                                    Deadline deadline) override {
    absl::StatusOr<std::unique_ptr<Backend>> made =
        inner_->subgroup(std::move(group), members, key, deadline);
    if (!made.ok()) return made;
    return std::make_unique<RecordableBackend>(*std::move(made));
  }
  void abort(const absl::Status& reason) override { inner_->abort(reason); }

 private:
  const std::unique_ptr<Backend> inner_;
  uint64_t collectives_ = 0;
};

}  // namespace

struct RecordedStep::State {
  // Where a slot's tensor is used for the last time, it is let go of.
  void find_last_uses() {
    std::vector<bool> is_used_later(slots.size(), false);
    for (const Result& result : results) {
      if (result.slot != kNoSlot) is_used_later[static_cast<size_t>(result.slot)] = true;
    }
    // What a collective uses is in use until it is waited for.
    std::unordered_map<const Backend::Ticket*, std::vector<int>> until_wait;
    for (const Instruction& instruction : instructions) {
      if (const auto* collective = std::get_if<Collective>(&instruction.what)) {
        until_wait[collective->ticket.get()] = {collective->in.slot, collective->out.slot};
      }
    }
    for (size_t i = instructions.size(); i-- > 0;) {
      Instruction& instruction = instructions[i];
      const auto use = [&](int slot) {
        if (slot == kNoSlot || is_used_later[static_cast<size_t>(slot)]) return;
        is_used_later[static_cast<size_t>(slot)] = true;
        instruction.last_uses.push_back(slot);
      };
      if (const auto* kernel = std::get_if<Kernel>(&instruction.what)) {
        for (const std::vector<int>& outputs : kernel->outputs) {
          for (const int slot : outputs) use(slot);
        }
        for (const Operand& operand : kernel->operands) {
          use(operand.slot);
          for (const Operand& element : operand.list) use(element.slot);
        }
      } else if (const auto* collective = std::get_if<Collective>(&instruction.what)) {
        use(collective->in.slot);
        use(collective->out.slot);
      } else {
        for (const int slot : until_wait[std::get<Waiting>(instruction.what).ticket.get()])
          use(slot);
      }
    }
  }

  c10::IValue value_of(const Operand& operand) const {
    if (operand.slot != kNoSlot) return slots[static_cast<size_t>(operand.slot)];
    if (operand.list.empty()) return operand.constant;
    c10::impl::GenericList list = operand.constant.toList().copy();
    for (const Operand& element : operand.list) list.push_back(value_of(element));
    return list;
  }

  void* address_of(const Memory& memory) const {
    if (memory.slot == kNoSlot) return memory.address;
    const at::Tensor& tensor = slots[static_cast<size_t>(memory.slot)];
    return static_cast<std::byte*>(tensor.storage().mutable_data()) + memory.offset;
  }

  void run(const Kernel& kernel) {
    stack.clear();
    for (const Operand& operand : kernel.operands) stack.push_back(value_of(operand));
    kernel.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    for (size_t i = 0; i < kernel.outputs.size(); ++i) {
      size_t next = 0;
      const std::vector<int>& outputs = kernel.outputs[i];
      for_each_tensor(stack[i], [&](const at::Tensor& tensor) {
        const int slot = outputs[next++];
        if (slot != kNoSlot) slots[static_cast<size_t>(slot)] = tensor;
      });
    }
  }
  void run(const Collective& collective) {
    Call call = collective.call;
    call.in.data = address_of(collective.in);
    call.out.data = address_of(collective.out);
    call.in_counts = collective.in_counts;
    call.out_counts = collective.out_counts;
    call.deadline = std::chrono::steady_clock::now() + kPatience;
    const absl::StatusOr<Backend::Ticket> ticket = collective.backend->start(call);
    throw_if_error(ticket.status());
    *collective.ticket = *ticket;
  }
  void run(const Waiting& wait) {
    if (*wait.ticket == Backend::kDone) return;
    throw_if_error(wait.backend->wait(*wait.ticket, std::chrono::steady_clock::now() + kPatience));
  }

  void replay() {
    const at::AutoDispatchBelowADInplaceOrView kernels_only;
    try {
      for (const Instruction& instruction : instructions) {
        std::visit([&](const auto& what) { run(what); }, instruction.what);
        for (const int slot : instruction.last_uses) slots[static_cast<size_t>(slot)].reset();
      }
    } catch (const std::exception& e) {
      give_up(absl::AbortedError(e.what()));
      throw;
    }
    for (const Result& result : results) {
      if (result.slot != kNoSlot) result.tensor.copy_(slots[static_cast<size_t>(result.slot)]);
    }
    for (const Result& result : results) {
      if (result.slot != kNoSlot) slots[static_cast<size_t>(result.slot)].reset();
    }
  }

  // Nobody touches this rank's memory any more.
  void give_up(const absl::Status& why) const {
    for (const Instruction& instruction : instructions) {
      const auto* collective = std::get_if<Collective>(&instruction.what);
      if (collective == nullptr) continue;
      collective->backend->abort(why);
      if (*collective->ticket == Backend::kDone) continue;
      collective->backend->wait(*collective->ticket, Deadline::max()).IgnoreError();
    }
  }

  std::vector<Instruction> instructions;
  std::vector<at::Tensor> slots;  // of this replay, as long as they are used
  std::vector<Result> results;
  torch::jit::Stack stack;
};

RecordedStep RecordedStep::record(const std::function<std::vector<at::Tensor>()>& step) {
  auto state = std::make_unique<State>();
  {
    StepRecorder recorder;
    const std::vector<at::Tensor> tensors = step();
    state->results = recorder.results(tensors);
    state->instructions = recorder.take();
    state->slots.resize(recorder.num_slots());
  }
  state->find_last_uses();
  return RecordedStep(std::move(state));
}

RecordedStep::RecordedStep(std::unique_ptr<State> state) : state_(std::move(state)) {}
RecordedStep::~RecordedStep() = default;
RecordedStep::RecordedStep(RecordedStep&&) noexcept = default;

void RecordedStep::replay() {
  state_->replay();
}

absl::Status run_recordable_ranks(int num_ranks,
                                  const std::function<absl::Status(shardweave::World&)>& body) {
  shardweave::InprocHub hub(num_ranks);
  std::mutex mutex;
  absl::Status first_failure;  // guarded by mutex
  const auto run_rank = [&](int rank) {
    shardweave::World world(shardweave::Communicator::create(
        std::make_unique<RecordableBackend>(hub.make_backend(rank))));
    absl::Status status;
    try {
      status = body(world);
    } catch (const std::exception& e) {
      status = absl::InternalError(shardweave::str_cat("rank ", rank, ": ", e.what()));
    }
    if (status.ok()) return hub.leave(rank);
    {
      const std::lock_guard lock(mutex);
      first_failure.Update(status);
    }
    hub.abort(status);
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back(run_rank, rank);
  for (std::thread& thread : threads) thread.join();
  return first_failure;
}

}  // namespace bench_recorded_step
