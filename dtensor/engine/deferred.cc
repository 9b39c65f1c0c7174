#include "shardweave/dtensor/engine/deferred.h"

#include <algorithm>
#include <bit>
#include <map>
#include <set>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Functions.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "shardweave/comm/inproc/inproc.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/engine/arguments.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/fqn_pattern.h"

namespace shardweave::dtensor_internal {
namespace {

// Who asks a deferred tensor for memory gets an error, but for kernels of meta tensors, which
// compare addresses. That a storage refuses can be said, and not taken back: hence the member
// itself, which an explicit instantiation may name.
template <bool c10::StorageImpl::*Member>
struct Refusal {
  friend bool& refuses(c10::StorageImpl& storage) { return storage.*Member; }
};
bool& refuses(c10::StorageImpl& storage);
template struct Refusal<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

using c10::IValue;

constexpr c10::DispatchKey kDeferredKey = c10::DispatchKey::DeferredInit;

// Where in a storage a tensor lies.
struct Geometry {
  int storage = 0;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
  bool conjugate = false, negative = false;

  int64_t numel() const {
    int64_t n = 1;
    for (const int64_t size : sizes) n *= size;
    return n;
  }
  bool is_whole(const std::vector<int64_t>& shape) const {
    const Dims contiguous = contiguous_strides(sizes);
    return sizes == shape && offset == 0 && !conjugate && !negative &&
           std::equal(strides.begin(), strides.end(), contiguous.begin(), contiguous.end());
  }
};

// A tensor argument: of the tape, or one that was there already.
struct Operand {
  size_t arg;
  int element;  // of a list; -1: the argument itself
  std::optional<Geometry> deferred;
  at::Tensor constant;
  int64_t version = 0;  // of the constant
  bool written = false;
};

struct Node {
  explicit Node(const c10::OperatorHandle& op_in) : op(op_in) {}
  c10::OperatorHandle op;
  std::vector<IValue> args;  // without the operands
  std::vector<Operand> operands;
  std::vector<std::pair<int, Geometry>> makes;  // results, by index, with storages of their own
  std::optional<uint64_t> stream;               // of random numbers
  uint64_t sum = 0;                             // the same on ranks that have recorded the same
};

struct StorageRecord {
  c10::Storage meta;       // keeps the address from being given out again
  std::vector<int> nodes;  // that made it and have written it
  c10::Device device = at::kCPU;
  std::string fqn;
  bool is_constants = false;                       // lies in a tensor that was there before
  c10::weak_intrusive_ptr<c10::StorageImpl> made;  // for plain tensors that share it
  explicit StorageRecord(c10::Storage storage)
      : meta(std::move(storage)), made(c10::intrusive_ptr<c10::StorageImpl>()) {}
};

// "aten::uniform_"
const std::string& base_name(const c10::OperatorHandle& op) {
  return op.operator_name().name;
}

bool is_one_of(std::string_view name, absl::Span<const std::string_view> names) {
  constexpr std::string_view kAten = "aten::";
  if (!name.starts_with(kAten)) return false;
  return std::find(names.begin(), names.end(), name.substr(kAten.size())) != names.end();
}

// Random operators whose numbers DTensors draw by index (rules/random.cc).
constexpr std::string_view kDraws[] = {"uniform_", "normal_",    "log_normal_", "exponential_",
                                       "cauchy_",  "geometric_", "bernoulli_",  "random_"};
// Those, and others, after which nothing is left of what was there before.
constexpr std::string_view kOverwrites[] = {"uniform_",     "normal_", "log_normal_",
                                            "exponential_", "cauchy_", "geometric_",
                                            "random_",      "fill_",   "zero_"};
constexpr std::string_view kEmpty[] = {"empty", "empty_like", "empty_strided", "new_empty",
                                       "new_empty_strided"};
constexpr std::string_view kZeros[] = {"zeros", "zeros_like", "new_zeros"};
constexpr std::string_view kOnes[] = {"ones", "ones_like", "new_ones"};
constexpr std::string_view kFull[] = {"full", "full_like", "new_full"};
// One element at a time, rounded as IEEE arithmetic says: the same bits in a vector register and in
// the loop that does the rest. (exp, pow, erfinv, addcmul, an add with alpha are not.)
constexpr std::string_view kElementwise[] = {
    "abs",        "abs_",      "add",        "add_",  "clamp",      "clamp_", "clamp_max",
    "clamp_max_", "clamp_min", "clamp_min_", "clone", "contiguous", "copy_",  "div",
    "div_",       "fill_",     "mul",        "mul_",  "neg",        "neg_",   "sqrt",
    "sqrt_",      "sub",       "sub_",       "to",    "_to_copy",   "zero_"};
// Of a deferred tensor, after its scope: it stays deferred.
constexpr std::string_view kStaysDeferred[] = {"to",
                                               "_to_copy",
                                               "detach",
                                               "alias",
                                               "set_data",
                                               "detach_",
                                               "contiguous",
                                               "_has_compatible_shallow_copy_type",
                                               "requires_grad_",
                                               "retain_grad"};
// Writes nothing, though the schema says so.
constexpr std::string_view kNoWrite[] = {"set_data", "detach_", "requires_grad_", "retain_grad",
                                         "set_"};

constexpr char kNoValues[] =
    "a tensor that deferred_init has recorded has no values yet, and no memory: make the values "
    "outside of it, or materialize first";

}  // namespace

class Tape {
 public:
  std::vector<StorageRecord> storages;
  std::vector<Node> nodes;
  uint64_t draws = 0;
  // Random streams of each mesh, from `first` on beginning at `begin.offset`.
  struct Block {
    uint64_t first;
    PhiloxState begin;
  };
  std::map<std::shared_ptr<MeshContext>, std::vector<Block>> blocks;
  std::optional<uint64_t> seed_alone;  // of tensors that are on no mesh

  int find(const at::Tensor& tensor) const {
    const auto it = by_address_.find(tensor.storage().unsafeGetStorageImpl());
    return it == by_address_.end() ? -1 : it->second;
  }
  int add(const at::Tensor& tensor) {
    const auto index = static_cast<int>(storages.size());
    storages.emplace_back(tensor.storage());
    c10::StorageImpl* impl = tensor.storage().unsafeGetStorageImpl();
    impl->release_data_and_set_meta_custom_data_ptr_error_msg_(kNoValues);
    by_address_.emplace(impl, index);
    return index;
  }
  Geometry geometry(const at::Tensor& tensor) const {
    const int storage = find(tensor);
    if (storage < 0) {
      throw Error(absl::InternalError(
          "a tensor under deferred_init got a storage that it has not recorded"));
    }
    return {storage,
            tensor.sizes().vec(),
            tensor.strides().vec(),
            tensor.storage_offset(),
            tensor.scalar_type(),
            tensor.is_conj(),
            tensor.is_neg()};
  }
  // "'layers.0.weight'", or what it looks like.
  std::string name(const Geometry& g) const {
    const std::string& fqn = storages[g.storage].fqn;
    if (!fqn.empty()) return absl::StrCat("'", fqn, "'");
    return absl::StrCat("a ", c10::toString(g.dtype), " tensor of shape [",
                        absl::StrJoin(g.sizes, ", "), "] (no parameter or buffer of the module)");
  }

  // The numbers of a random operator on a mesh.
  PhiloxState state(const std::shared_ptr<MeshContext>& context, uint64_t stream) const {
    const std::vector<Block>& of_mesh = blocks.at(context);
    auto block = of_mesh.end() - 1;
    while (block->first > stream) --block;
    return {block->begin.seed, block->begin.offset + stream - block->first};
  }
  // What has been recorded so far has its numbers from now on. False: it had them.
  bool reserve(const std::shared_ptr<MeshContext>& context) {
    std::vector<Block>& of_mesh = blocks[context];
    uint64_t& reserved = reserved_[context];
    if (!of_mesh.empty() && reserved == draws) return false;
    of_mesh.push_back({reserved, context->random.state});
    context->random.state.offset += draws - reserved;
    reserved = draws;
    return true;
  }
  // Takes the last reserve() that was true back.
  void unreserve(const std::shared_ptr<MeshContext>& context) {
    std::vector<Block>& of_mesh = blocks[context];
    reserved_[context] = of_mesh.back().first;
    context->random.state = of_mesh.back().begin;
    of_mesh.pop_back();
  }

  // What has to run for the last value of a storage, in order.
  std::vector<int> needed(int storage) const {
    std::set<std::pair<int, int>> seen;
    std::set<int> result;
    need(storage, static_cast<int>(nodes.size()), seen, result);
    return {result.begin(), result.end()};
  }

 private:
  // The value that a storage has before a node. What was read earlier, before an overwriting
  // operator, is another value: hence by both.
  void need(int storage, int before, std::set<std::pair<int, int>>& seen,
            std::set<int>& result) const {
    if (!seen.insert({storage, before}).second) return;
    const std::vector<int>& touching = storages[storage].nodes;
    std::vector<int> some(touching.begin(),
                          std::lower_bound(touching.begin(), touching.end(), before));
    if (some.empty()) return;
    // What is overwritten need not be made, but for the memory.
    const int maker = some[0];
    int overwriting = -1;
    for (size_t i = some.size() - 1; i > 0; --i) {
      if (!overwrites(storage, maker, nodes[some[i]])) continue;
      overwriting = some[i];
      some.erase(some.begin() + 1, some.begin() + static_cast<ptrdiff_t>(i));
      break;
    }
    for (const int node : some) {
      result.insert(node);
      if (node == overwriting) continue;  // reads nothing
      for (const Operand& operand : nodes[node].operands) {
        if (operand.deferred.has_value()) need(operand.deferred->storage, node, seen, result);
      }
    }
  }

  bool overwrites(int storage, int maker, const Node& node) const {
    if (node.operands.size() != 1 || !is_one_of(base_name(node.op), kOverwrites)) return false;
    const Geometry& g = *node.operands[0].deferred;
    for (const auto& [output, made] : nodes[maker].makes) {
      if (made.storage == storage) return g.dtype == made.dtype && g.is_whole(made.sizes);
    }
    return false;
  }

  absl::flat_hash_map<const c10::StorageImpl*, int> by_address_;
  std::map<std::shared_ptr<MeshContext>, uint64_t> reserved_;
};

namespace {

thread_local std::shared_ptr<Tape> recording;

// What a deferred tensor and its shallow copies carry.
struct DeferredMeta final : c10::BackendMeta {
  explicit DeferredMeta(std::shared_ptr<Tape> tape_in) : tape(std::move(tape_in)) {}
  c10::intrusive_ptr<c10::BackendMeta> clone(
      const c10::intrusive_ptr<c10::BackendMeta>& /*self*/) const override {
    return c10::make_intrusive<DeferredMeta>(tape);
  }
  std::shared_ptr<Tape> tape;
};

struct DeviceAccess : c10::TensorImpl {
  static auto device() { return &DeviceAccess::device_opt_; }
};

const std::shared_ptr<Tape>& tape_of(const at::Tensor& plain) {
  return static_cast<DeferredMeta*>(plain.unsafeGetTensorImpl()->get_backend_meta())->tape;
}

bool is_plain_deferred(const at::Tensor& tensor) {
  return tensor.defined() && is_deferred(tensor.unsafeGetTensorImpl());
}

[[noreturn]] void not_made(std::string_view who, const std::string& name) {
  throw Error(absl::FailedPreconditionError(
      absl::StrCat(std::string(who), who.empty() ? "" : ": ", name,
                   " has no values yet, for its module was made under deferred_init; materialize "
                   "that first, once it is distributed where it is to be sharded")));
}

// A DTensor's part that is not made yet. Whoever wants it gets an error, which names it, and by
// which materialize() finds what to do.
class DeferredPart final : public LocalPart::Source,
                           public std::enable_shared_from_this<DeferredPart> {
 public:
  DeferredPart(std::shared_ptr<Tape> tape_in, Geometry whole_in)
      : tape(std::move(tape_in)), whole(std::move(whole_in)) {}
  LocalPart::State state() const override {
    return made.defined() ? LocalPart::State::kReady : LocalPart::State::kDeferred;
  }
  const at::Tensor& bring() override;

  std::shared_ptr<Tape> tape;
  Geometry whole;
  at::Tensor made;
};

class NotMade : public Error {
 public:
  NotMade(absl::Status status, std::shared_ptr<DeferredPart> part_in)
      : Error(std::move(status)), part(std::move(part_in)) {}
  std::shared_ptr<DeferredPart> part;
};

const at::Tensor& DeferredPart::bring() {
  if (made.defined()) return made;
  try {
    not_made("", tape->name(whole));
  } catch (const Error& error) {
    throw NotMade(error.status(), shared_from_this());
  }
}

// Null: it is made.
std::shared_ptr<DeferredPart> deferred_part(const DTensorMeta& meta) {
  if (meta.part.state() != LocalPart::State::kDeferred) return nullptr;
  try {
    meta.part.get();
  } catch (const NotMade& error) {
    return error.part;
  }
  return nullptr;
}

// --- recording -----------------------------------------------------------------------------------

template <typename F>
void for_each_operand(absl::Span<IValue> args, F f) {
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i].isTensor()) {
      f(i, -1, args[i].toTensor());
    } else if (args[i].isList()) {
      const auto list = args[i].toListRef();
      for (size_t e = 0; e < list.size(); ++e) {
        if (list[e].isTensor()) f(i, static_cast<int>(e), list[e].toTensor());
      }
    }
  }
}

// Of tensors, also with holes; what the operator's schema wants.
void set_element(IValue& list, int element, IValue value) {
  c10::impl::GenericList copy(list.toList().elementType());
  int i = 0;
  for (const IValue& e : list.toListRef()) copy.push_back(i++ == element ? value : e);
  list = std::move(copy);
}

void set_operand(absl::Span<IValue> args, size_t arg, int element, IValue value) {
  if (element < 0) {
    args[arg] = std::move(value);
  } else {
    set_element(args[arg], element, std::move(value));
  }
}

bool has_tensor_result(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& r) {
    return r.type()->kind() == c10::TypeKind::TensorType ||
           r.type()->kind() == c10::TypeKind::ListType;
  });
}

bool is_written(const c10::FunctionSchema& schema, size_t arg) {
  const c10::AliasInfo* alias = schema.arguments()[arg].alias_info();
  return alias != nullptr && alias->isWrite();
}

// torch::tensor() fills what it makes by itself, and is known by the keys that it leaves out.
bool in_torch_tensor() {
  const c10::DispatchKeySet excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return excluded.has(c10::DispatchKey::AutogradCPU) &&
         !excluded.has(c10::DispatchKey::ADInplaceOrView) && !c10::InferenceMode::is_enabled();
}

uint64_t sum_of(uint64_t sum, const IValue& value) {
  if (value.isInt()) return mix(sum, static_cast<uint64_t>(value.toInt()));
  if (value.isDouble()) return mix(sum, std::bit_cast<uint64_t>(value.toDouble()));
  if (value.isBool()) return mix(sum, value.toBool() ? 3 : 5);
  if (value.isString()) return checksum(sum, value.toStringView());
  if (value.isList()) {
    for (const IValue& e : value.toListRef()) sum = sum_of(sum, e);
    return mix(sum, 7);
  }
  return mix(sum, 11);
}

uint64_t sum_of(uint64_t sum, const Geometry& g) {
  for (const auto& list : {g.sizes, g.strides}) {
    for (const int64_t i : list) sum = mix(sum, static_cast<uint64_t>(i));
    sum = mix(sum, 13);
  }
  sum = mix(sum, static_cast<uint64_t>(g.offset));
  return mix(sum, static_cast<uint64_t>(g.dtype));
}

void attach(const at::Tensor& tensor, const std::shared_ptr<Tape>& tape) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_backend_meta(c10::make_intrusive<DeferredMeta>(tape));
  set_keys(*impl, impl->key_set().add(kDeferredKey));
}

// One operator on its way to the tape.
class Recording {
 public:
  Recording(const c10::OperatorHandle& op, c10::Stack* stack, std::shared_ptr<Tape> tape)
      : op_(op),
        schema_(op.schema()),
        stack_(stack),
        args_(absl::MakeSpan(*stack).subspan(stack->size() - schema_.arguments().size())),
        tape_(std::move(tape)),
        node_(op) {}

  void run() {
    check_values_unread();
    if (draw()) return;
    keep_arguments();
    to_meta();
    {
      const c10::impl::ExcludeDispatchKeyGuard no_longer(kDeferredKey);
      allow_addresses(true);
      call();
      allow_addresses(false);
    }
    results();
    add();
  }

 private:
  [[noreturn]] void reads_values(std::string_view said) const {
    std::string name = "a tensor";
    for (const Operand& operand : node_.operands) {
      if (!operand.deferred.has_value()) continue;
      name = tape_->name(*operand.deferred);
      break;
    }
    fail(op_, absl::StatusCode::kFailedPrecondition,
         absl::StrCat("wants values of ", name, ", which deferred_init has recorded but not made",
                      said.empty() ? "" : absl::StrCat(" (LibTorch: ", std::string(said), ")"),
                      "; compute them outside of it"));
  }

  void check_values_unread() {
    if (op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape)) {
      keep_arguments();
      reads_values("");
    }
  }

  // True: it was random, and is made of operators that have come here by themselves.
  bool draw() {
    if (!op_.hasTag(at::Tag::nondeterministic_seeded)) return false;
    if (is_one_of(base_name(op_), kDraws)) {
      for (const IValue& v : args_) {
        if (!v.isGenerator()) continue;
        fail(op_, absl::StatusCode::kInvalidArgument,
             "takes no generator under deferred_init; materialize draws from the mesh, or from "
             "its option `seed`");
      }
      node_.stream = tape_->draws;  // counted when it has run
      return false;
    }
    for (const c10::DispatchKey key : {c10::DispatchKey::CompositeExplicitAutograd,
                                       c10::DispatchKey::CompositeExplicitAutogradNonFunctional,
                                       c10::DispatchKey::CompositeImplicitAutograd}) {
      if (!op_.hasKernelForDispatchKey(key)) continue;
      op_.callBoxedForDispatchKey(key, *stack_);
      return true;
    }
    fail(op_, absl::StatusCode::kUnimplemented,
         "this random operator cannot be deferred: its numbers would depend on the sharding; make "
         "what it makes outside of deferred_init");
  }

  void keep_arguments() {
    const c10::impl::ExcludeDispatchKeyGuard no_longer(kDeferredKey);
    node_.args.assign(args_.begin(), args_.end());
    node_.sum = checksum(0, c10::toString(op_.operator_name()));
    for (const IValue& v : args_) {
      if (!v.isTensor()) node_.sum = sum_of(node_.sum, v);
    }
    for_each_operand(args_, [&](size_t arg, int element, const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      Operand operand{.arg = arg, .element = element, .written = is_written(schema_, arg)};
      if (is_plain_deferred(tensor)) {
        if (tape_of(tensor) != tape_) {
          fail(op_, absl::StatusCode::kInvalidArgument,
               "takes tensors that two calls of deferred_init have made; make both within one");
        }
        operand.deferred = tape_->geometry(tensor);
        node_.sum = sum_of(node_.sum, *operand.deferred);
        if (operand.written && tape_->storages[operand.deferred->storage].is_constants) {
          fail(op_, absl::StatusCode::kInvalidArgument,
               "writes a tensor that was made outside of deferred_init, by a view of it");
        }
      } else if (is_dtensor(tensor)) {
        fail(op_, absl::StatusCode::kInvalidArgument,
             "takes a DTensor and a tensor that deferred_init has recorded");
      } else {
        if (operand.written && !is_one_of(base_name(op_), kNoWrite)) {
          fail(op_, absl::StatusCode::kFailedPrecondition,
               absl::StrCat("writes a tensor of shape [", absl::StrJoin(tensor.sizes(), ", "),
                            "] that was made outside of deferred_init, from one that has no "
                            "values yet; make both outside, or both within"));
        }
        if (base_name(op_) == "aten::set_data" || base_name(op_) == "aten::set_") {
          fail(op_, absl::StatusCode::kInvalidArgument,
               "would give memory to a tensor that deferred_init has recorded; give materialize "
               "the value, or copy it there");
        }
        // Small ones may be used again by whoever has made them.
        constexpr size_t kCopied = 1 << 20;
        operand.constant = tensor.detach();
        if (tensor.nbytes() <= kCopied && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
          operand.constant = tensor.detach().clone();
        } else if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
          operand.constant = tensor;
        }
        if (!operand.constant.is_inference()) operand.version = operand.constant._version();
        node_.sum = mix(node_.sum, checksum(operand.constant));
      }
      node_.operands.push_back(std::move(operand));
    });
    for (const Operand& operand : node_.operands) {
      set_operand(absl::MakeSpan(node_.args), operand.arg, operand.element, IValue(at::Tensor()));
    }
  }

  void to_meta() {
    const c10::impl::ExcludeDispatchKeyGuard no_longer(kDeferredKey);
    bool has_operand = false;
    for (const Operand& operand : node_.operands) {
      if (operand.deferred.has_value()) has_operand = true;
      if (!operand.constant.defined() || operand.constant.dim() == 0) continue;
      const at::Tensor& c = operand.constant;
      at::Tensor stand_in =
          at::empty_strided(c.sizes(), c.strides(), c.options().device(at::kMeta));
      stand_ins_.push_back(stand_in);
      set_operand(args_, operand.arg, operand.element, IValue(std::move(stand_in)));
    }
    for (size_t i = 0; i < args_.size(); ++i) {
      const std::string& name = schema_.arguments()[i].name();
      if (name == "device") {
        if (args_[i].isDevice()) {
          // That of a tensor that is deferred is none.
          if (args_[i].toDevice().is_meta()) node_.args[i] = IValue(c10::Device(at::kCPU));
          device_ = with_index(node_.args[i].toDevice());
        }
        if (args_[i].isDevice() || !has_operand) args_[i] = IValue(c10::Device(at::kMeta));
      } else if (name == "pin_memory") {
        args_[i] = IValue();
      }
    }
  }

  void allow_addresses(bool allow) const {
    for (const Operand& operand : node_.operands) {
      if (!operand.deferred.has_value()) continue;
      refuses(*tape_->storages[operand.deferred->storage].meta.unsafeGetStorageImpl()) = !allow;
    }
  }

  void call() {
    try {
      op_.callBoxed(*stack_);
    } catch (...) {
      allow_addresses(false);
      translate();
    }
  }

  [[noreturn]] void translate() const {
    try {
      throw;
    } catch (const Error&) {
      throw;
    } catch (const c10::NotImplementedError& error) {
      reads_values(message_of(error));
    } catch (const c10::Error& error) {
      const std::string said = message_of(error);
      if (said.find("meta") == std::string::npos && said.find(kNoValues) == std::string::npos) {
        throw;  // a mistake of the caller's
      }
      reads_values(said);
    }
  }

  void results() {
    if (!device_.has_value()) {
      for (const Operand& operand : node_.operands) {
        if (!operand.deferred.has_value()) continue;
        device_ = tape_->storages[operand.deferred->storage].device;
        break;
      }
    }
    int index = 0;
    const auto result = [&](const at::Tensor& tensor) {
      const int at = index++;
      if (!tensor.defined() || !tensor.is_meta()) return;
      if (tape_->find(tensor) < 0) {
        const int storage = tape_->add(tensor);
        tape_->storages[storage].device = device_.value_or(at::kCPU);
        tape_->storages[storage].is_constants =
            std::any_of(stand_ins_.begin(), stand_ins_.end(),
                        [&](const at::Tensor& s) { return s.is_alias_of(tensor); });
        node_.makes.emplace_back(at, tape_->geometry(tensor));
      }
      if (!is_plain_deferred(tensor)) attach(tensor, tape_);
    };
    for (size_t i = stack_->size() - schema_.returns().size(); i < stack_->size(); ++i) {
      const IValue& v = (*stack_)[i];
      if (v.isTensor()) {
        result(v.toTensor());
      } else if (v.isTensorList()) {
        for (const at::Tensor& t : v.toTensorVector()) result(t);
      }
    }
  }

  void add() {
    const auto index = static_cast<int>(tape_->nodes.size());
    std::set<int> touched;
    for (const auto& [output, g] : node_.makes) {
      touched.insert(g.storage);
      node_.sum = sum_of(node_.sum, g);
    }
    // A view's shape is changed, no element.
    const bool writes = !op_.hasTag(at::Tag::inplace_view) && !is_one_of(base_name(op_), kNoWrite);
    for (const Operand& operand : node_.operands) {
      if (operand.written && writes) touched.insert(operand.deferred->storage);
    }
    if (touched.empty()) return;
    if (node_.stream.has_value()) {
      node_.sum = mix(node_.sum, *node_.stream);
      ++tape_->draws;
    }
    for (const int storage : touched) tape_->storages[storage].nodes.push_back(index);
    tape_->nodes.push_back(std::move(node_));
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  c10::Stack* const stack_;
  const absl::Span<IValue> args_;
  const std::shared_ptr<Tape> tape_;
  Node node_;
  std::vector<at::Tensor> stand_ins_;
  std::optional<c10::Device> device_;
};

// After its scope a deferred tensor can still be initialised, cast and viewed; what needs its
// values is an error.
bool stays_deferred(const c10::OperatorHandle& op, absl::Span<IValue> args) {
  const c10::FunctionSchema& schema = op.schema();
  if (is_one_of(base_name(op), kStaysDeferred) || op.hasTag(at::Tag::inplace_view)) return true;
  bool writes_deferred = false, writes_other = false, reads_other = false;
  for_each_operand(args, [&](size_t arg, int, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const bool deferred = is_plain_deferred(tensor);
    if (is_written(schema, arg)) {
      (deferred ? writes_deferred : writes_other) = true;
    } else if (!deferred) {
      reads_other = true;
    }
  });
  if (writes_deferred || writes_other) return !writes_other;
  const bool is_view =
      std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& r) {
        return r.alias_info() != nullptr && !r.alias_info()->isWrite();
      });
  return (is_view || !has_tensor_result(schema)) && !reads_other;
}

// --- making --------------------------------------------------------------------------------------

c10::TensorOptions options_of(const Tape& tape, const Geometry& g) {
  return at::TensorOptions(g.dtype).device(tape.storages[g.storage].device);
}

// As the tape draws on a mesh.
class DrawScope {
 public:
  DrawScope(MeshContext& context, const PhiloxState& state)
      : context_(context), before_(std::exchange(context.random.state, state)) {}
  ~DrawScope() { context_.random.state = before_; }
  DrawScope(const DrawScope&) = delete;
  DrawScope& operator=(const DrawScope&) = delete;

 private:
  MeshContext& context_;
  const PhiloxState before_;
};

class Maker {
 public:
  Maker(std::shared_ptr<Tape> tape, std::shared_ptr<MeshContext> context,
        std::optional<uint64_t> seed)
      : tape_(std::move(tape)), context_(std::move(context)), seed_(seed) {}

  // What determines the values.
  uint64_t sum(const Geometry& g) const {
    uint64_t sum = sum_of(17, g);
    for (const int n : tape_->needed(g.storage)) {
      const Node& node = tape_->nodes[n];
      sum = mix(sum, node.sum);
      if (!node.stream.has_value()) continue;
      const PhiloxState state = state_of(node);
      sum = mix(mix(sum, state.seed), state.offset);
    }
    return sum;
  }

  // The whole, of which other tensors may be views.
  at::Tensor whole(const Geometry& g) {
    const std::vector<int> needed = tape_->needed(g.storage);
    std::map<int, int> last_use;
    for (const int n : needed) {
      for (const Operand& operand : tape_->nodes[n].operands) {
        if (operand.deferred.has_value()) last_use[operand.deferred->storage] = n;
      }
    }
    last_use[g.storage] = -1;
    storages_.clear();
    for (const int n : needed) {
      run(tape_->nodes[n]);
      for (const auto& [storage, last] : last_use) {
        if (last == n) storages_.erase(storage);
      }
    }
    const at::Tensor result = view(g);
    storages_.clear();
    return result;
  }

  // This rank's part as `spec` says, contiguous, with memory of its own.
  at::Tensor part(const Geometry& g, const Spec& spec) {
    if (std::optional<at::Tensor> alone = part_alone(g, spec)) return *std::move(alone);
    at::Tensor part = whole(g).resolve_conj().resolve_neg();
    for (int d = 0; d < spec.ndim(); ++d) part = select(part, d, held(spec, d));
    return part.clone(at::MemoryFormat::Contiguous);
  }

 private:
  PhiloxState state_of(const Node& node) const {
    if (seed_.has_value()) return {*seed_, *node.stream};
    return tape_->state(context_, *node.stream);
  }

  Intervals held(const Spec& spec, int dim) const {
    return local_intervals(spec.layout, context_->mesh().shape(), context_->coordinate(),
                           spec.sizes, dim);
  }

  at::Tensor view(const Geometry& g) const {
    at::Tensor tensor = at::empty({0}, options_of(*tape_, g));
    tensor.set_(storages_.at(g.storage), g.offset, g.sizes, g.strides);
    if (g.conjugate) tensor = tensor.conj();
    if (g.negative) tensor = tensor._neg_view();
    return tensor;
  }

  const at::Tensor& constant(const Node& node, const Operand& operand) const {
    if (!operand.constant.is_inference() && operand.constant._version() != operand.version) {
      fail(node.op, absl::StatusCode::kFailedPrecondition,
           "a tensor from outside of deferred_init, which it has recorded, was written since");
    }
    return operand.constant;
  }

  // `tensor` is drawn where it stands: all of a tensor, or this rank's part of it.
  void draw(const Node& node, const at::Tensor& tensor, SpecRef spec,
            absl::Span<const at::Tensor> operands) {
    const DrawScope scope(*context_, state_of(node));
    c10::Stack stack(node.args.begin(), node.args.end());
    const at::Tensor there = wrap(tensor, std::move(spec), context_);
    for (size_t i = 0; i < node.operands.size(); ++i) {
      const Operand& operand = node.operands[i];
      set_operand(absl::MakeSpan(stack), operand.arg, operand.element,
                  operand.written ? there : operands[i]);
    }
    node.op.callBoxed(stack);
  }

  SpecRef whole_spec(const at::Tensor& tensor) const {
    const absl::Span<const int64_t> sizes(tensor.sizes().data(), tensor.sizes().size());
    return context_->intern(Layout(Placements(context_->mesh().ndim())), sizes,
                            contiguous_strides(sizes), tensor.scalar_type(), tensor.device());
  }

  void run(const Node& node) {
    std::vector<at::Tensor> operands;
    for (const Operand& operand : node.operands) {
      operands.push_back(operand.deferred.has_value() ? view(*operand.deferred)
                                                      : constant(node, operand));
    }
    if (node.stream.has_value()) {
      const auto written = std::find_if(node.operands.begin(), node.operands.end(),
                                        [](const Operand& o) { return o.written; });
      const at::Tensor& self = operands[static_cast<size_t>(written - node.operands.begin())];
      draw(node, self, whole_spec(self), operands);
      return;
    }
    c10::Stack stack(node.args.begin(), node.args.end());
    for (size_t i = 0; i < operands.size(); ++i) {
      set_operand(absl::MakeSpan(stack), node.operands[i].arg, node.operands[i].element,
                  operands[i]);
    }
    node.op.callBoxed(stack);
    std::vector<at::Tensor> results;
    for (const IValue& v : stack) {
      if (v.isTensor()) results.push_back(v.toTensor());
      if (!v.isTensorList()) continue;
      for (const at::Tensor& t : v.toTensorVector()) results.push_back(t);
    }
    for (const auto& [output, g] : node.makes) {
      at::Tensor made = results.at(static_cast<size_t>(output));
      if (made.scalar_type() != g.dtype || made.sizes() != g.sizes) {
        fail(node.op, absl::StatusCode::kInternal,
             "made another tensor than deferred_init has recorded");
      }
      if (made.strides() != g.strides || made.storage_offset() != g.offset) {
        // Kernels of devices may lay out results in another way than that of meta tensors.
        const at::Tensor base = at::empty_strided(g.sizes, g.strides, made.options());
        base.copy_(made);
        made = base;
      }
      storages_.insert_or_assign(g.storage, made.storage());
    }
  }

  // --- this rank's part, and nothing else ---

  // The dimensions' ranges of a tensor of `shape` that a view is: of select, slice, narrow, chunk.
  static std::optional<std::vector<Interval>> box_of(const Geometry& g,
                                                     const std::vector<int64_t>& shape) {
    if (g.conjugate || g.negative) return std::nullopt;
    const Dims strides = contiguous_strides(shape);
    std::vector<Interval> box;
    int64_t rest = g.offset;
    for (size_t d = 0; d < shape.size(); ++d) {
      if (shape[d] == 0) return std::nullopt;
      const int64_t begin = rest / strides[d];
      rest -= begin * strides[d];
      if (begin >= shape[d]) return std::nullopt;
      box.push_back({begin, begin + 1});
    }
    if (rest != 0) return std::nullopt;
    size_t next = 0;
    for (size_t v = 0; v < g.sizes.size(); ++v) {
      if (g.sizes[v] == 1) continue;
      while (next < shape.size() && (strides[next] != g.strides[v] || shape[next] == 1)) ++next;
      if (next == shape.size() || box[next].begin + g.sizes[v] > shape[next]) return std::nullopt;
      box[next].end = box[next].begin + g.sizes[v];
      ++next;
    }
    return box;
  }

  // Where a rank's part of dimension `dim` meets [begin, end), as ranges of the local tensor.
  Intervals local_ranges(const Spec& spec, int dim, const Interval& range) const {
    Intervals ranges;
    int64_t local = 0;
    for (const Interval& i : held(spec, dim)) {
      const int64_t begin = std::max(i.begin, range.begin), end = std::min(i.end, range.end);
      if (begin < end) ranges.push_back({local + begin - i.begin, local + end - i.begin});
      local += i.size();
    }
    return ranges;
  }

  // Whether every operator that the value depends on can run on a part, which is of the type that
  // its storage was made with: not through a view of another type.
  bool can_be_alone(const Geometry& value, const std::vector<int>& needed,
                    const std::vector<int64_t>& shape) const {
    std::map<int, at::ScalarType> dtypes;  // by storage
    const auto is_as_made = [&](const Geometry& g) {
      const auto made = dtypes.find(g.storage);
      return made != dtypes.end() && made->second == g.dtype;
    };
    for (const int n : needed) {
      const Node& node = tape_->nodes[n];
      const std::string& name = base_name(node.op);
      const bool fills = is_one_of(name, kEmpty) || is_one_of(name, kZeros) ||
                         is_one_of(name, kOnes) || is_one_of(name, kFull);
      for (const auto& [output, g] : node.makes) {
        if (output != 0 || !g.is_whole(shape)) return false;
        dtypes[g.storage] = g.dtype;
      }
      if (fills) continue;
      const bool draws = node.stream.has_value() && node.operands.size() == 1;
      if (!draws && !is_one_of(name, kElementwise)) return false;
      const auto& arguments = node.op.schema().arguments();
      for (size_t i = 0; i < arguments.size(); ++i) {
        if (arguments[i].name() == "alpha" && !node.args[i].isNone() &&
            node.args[i].toScalar().toDouble() != 1) {
          return false;
        }
        if (arguments[i].name() == "rounding_mode") return false;
      }
      std::optional<std::vector<Interval>> box;
      std::vector<int64_t> sizes;
      for (const Operand& operand : node.operands) {
        if (operand.element >= 0) return false;
        if (!operand.deferred.has_value()) {
          if (operand.constant.dim() != 0) return false;
          continue;
        }
        const Geometry& g = *operand.deferred;
        if (!is_as_made(g)) return false;
        const bool whole = g.is_whole(shape);
        if (!whole && (draws || !node.makes.empty())) return false;
        const auto its = box_of(g, shape);
        if (!whole && !its.has_value()) return false;
        if (box.has_value() && (!its.has_value() || *its != *box || g.sizes != sizes)) return false;
        box = its;
        sizes = g.sizes;
      }
    }
    return is_as_made(value);
  }

  std::optional<at::Tensor> part_alone(const Geometry& g, const Spec& spec) {
    const std::vector<int64_t> shape(spec.sizes.begin(), spec.sizes.end());
    const std::vector<int> needed = tape_->needed(g.storage);
    if (!g.is_whole(shape) || !can_be_alone(g, needed, shape)) return std::nullopt;
    std::map<int, at::Tensor> parts;  // by storage
    for (const int n : needed) {
      const Node& node = tape_->nodes[n];
      const std::string& name = base_name(node.op);
      std::vector<at::Tensor> operands;
      for (const Operand& operand : node.operands) {
        operands.push_back(operand.deferred.has_value() ? parts[operand.deferred->storage]
                                                        : constant(node, operand));
      }
      if (!node.makes.empty()) {
        const Geometry& made = node.makes[0].second;
        parts[made.storage] = make_part(node, name, made, spec, operands);
      } else if (node.stream.has_value()) {
        const at::Tensor& self = operands[0];
        draw(node, self,
             context_->intern(spec.layout, spec.sizes, contiguous_strides(spec.sizes),
                              self.scalar_type(), self.device()),
             operands);
      } else {
        write_part(node, shape, spec, operands);
      }
    }
    return parts.at(g.storage);
  }

  at::Tensor make_part(const Node& node, const std::string& name, const Geometry& made,
                       const Spec& spec, const std::vector<at::Tensor>& operands) const {
    const bool fills = is_one_of(name, kFull);
    if (fills || is_one_of(name, kEmpty) || is_one_of(name, kZeros) || is_one_of(name, kOnes)) {
      at::Tensor part = at::empty(array(spec.local_sizes), options_of(*tape_, made));
      if (is_one_of(name, kZeros)) part.zero_();
      if (is_one_of(name, kOnes)) part.fill_(1);
      if (fills) {
        const auto& arguments = node.op.schema().arguments();
        for (size_t i = 0; i < arguments.size(); ++i) {
          if (arguments[i].name() == "fill_value") part.fill_(node.args[i].toScalar());
        }
      }
      return part;
    }
    c10::Stack stack(node.args.begin(), node.args.end());
    for (size_t i = 0; i < operands.size(); ++i) stack[node.operands[i].arg] = operands[i];
    node.op.callBoxed(stack);
    // A part of the source, of which each storage has its own.
    const at::Tensor result = stack[0].toTensor().contiguous();
    const bool shares = std::any_of(operands.begin(), operands.end(),
                                    [&](const at::Tensor& t) { return t.is_alias_of(result); });
    return shares ? result.clone() : result;
  }

  // Piece by piece of what this rank holds of the box.
  void write_part(const Node& node, const std::vector<int64_t>& shape, const Spec& spec,
                  const std::vector<at::Tensor>& operands) const {
    std::vector<Intervals> ranges;
    for (const Operand& operand : node.operands) {
      if (!operand.deferred.has_value()) continue;
      const auto box = box_of(*operand.deferred, shape);
      if (!box.has_value()) return;  // a tensor without elements
      for (int d = 0; d < spec.ndim(); ++d) {
        ranges.push_back(local_ranges(spec, d, (*box)[static_cast<size_t>(d)]));
      }
      break;
    }
    const auto descend = [&](auto& self, int d, const std::vector<at::Tensor>& pieces) -> void {
      if (d == spec.ndim()) {
        c10::Stack stack(node.args.begin(), node.args.end());
        for (size_t i = 0; i < pieces.size(); ++i) stack[node.operands[i].arg] = pieces[i];
        node.op.callBoxed(stack);
        return;
      }
      for (const Interval& range : ranges[static_cast<size_t>(d)]) {
        std::vector<at::Tensor> narrowed;
        for (size_t i = 0; i < pieces.size(); ++i) {
          narrowed.push_back(node.operands[i].deferred.has_value()
                                 ? pieces[i].narrow(d, range.begin, range.size())
                                 : pieces[i]);
        }
        self(self, d + 1, narrowed);
      }
    };
    descend(descend, 0, operands);
  }

  const std::shared_ptr<Tape> tape_;
  const std::shared_ptr<MeshContext> context_;
  const std::optional<uint64_t> seed_;
  std::map<int, c10::Storage> storages_;  // made, of whole tensors
};

// --- materialize() -------------------------------------------------------------------------------

// A tensor to be made.
struct Item {
  const Member* member;
  std::shared_ptr<Tape> tape;
  Geometry whole;
  std::shared_ptr<DeferredPart> part;    // of a DTensor
  std::shared_ptr<MeshContext> context;  // the same
  at::Tensor given;
  std::string given_as;
  at::Tensor made;  // and not there yet
};

// Random numbers that tapes have taken from meshes, which go back unless they are kept.
class Reservations {
 public:
  Reservations() = default;
  ~Reservations() {
    for (auto it = taken_.rbegin(); it != taken_.rend(); ++it) it->first->unreserve(it->second);
  }
  Reservations(const Reservations&) = delete;
  Reservations& operator=(const Reservations&) = delete;

  void reserve(const std::shared_ptr<Tape>& tape, const std::shared_ptr<MeshContext>& context) {
    taken_.reserve(taken_.size() + 1);
    if (tape->reserve(context)) taken_.emplace_back(tape, context);
  }
  void keep() { taken_.clear(); }

 private:
  std::vector<std::pair<std::shared_ptr<Tape>, std::shared_ptr<MeshContext>>> taken_;
};

std::shared_ptr<MeshContext> one_rank() {
  InprocHub hub(1);
  World world(hub.connect(0));
  return MeshContext::of(value_or_throw(init_device_mesh(world, {{"one", 1}})));
}

std::vector<Item> items_of(const std::vector<Member>& members) {
  std::vector<Item> items;
  for (const Member& member : members) {
    if (is_plain_deferred(member.tensor)) {
      const std::shared_ptr<Tape>& tape = tape_of(member.tensor);
      items.push_back({&member, tape, tape->geometry(member.tensor), nullptr, nullptr, {}, {}, {}});
    } else if (is_dtensor(member.tensor)) {
      const DTensorMeta& meta = meta_of(member.tensor);
      if (auto part = deferred_part(meta)) {
        items.push_back({&member, part->tape, part->whole, part, meta.context, {}, {}, {}});
      }
    }
  }
  return items;
}

// "; did you mean 'a.weight'?"
std::string near(const std::string& fqn, const std::vector<Member>& members) {
  const absl::StatusOr<FqnPattern> pattern = FqnPattern::parse(fqn);
  if (!pattern.ok()) return "";
  std::vector<std::string> names;
  for (const Member& member : members)
    names.insert(names.end(), member.fqns.begin(), member.fqns.end());
  return pattern->suggestion(names, /*most=*/1);
}

void give(std::vector<Item>& items, const std::vector<Member>& members,
          const std::vector<std::pair<std::string, at::Tensor>>& given, std::string_view function) {
  const auto refuse = [&](absl::StatusCode code, const std::string& why) {
    throw Error(function, absl::Status(code, why));
  };
  for (const auto& [fqn, tensor] : given) {
    const auto has_name = [&](const Member& m) {
      return std::find(m.fqns.begin(), m.fqns.end(), fqn) != m.fqns.end();
    };
    if (std::none_of(members.begin(), members.end(), has_name)) {
      refuse(absl::StatusCode::kNotFound,
             absl::StrCat("a value is given for '", fqn,
                          "', which is no parameter or buffer of the module", near(fqn, members)));
    }
    const auto item = std::find_if(items.begin(), items.end(),
                                   [&](const Item& i) { return has_name(*i.member); });
    if (item == items.end()) {
      refuse(absl::StatusCode::kFailedPrecondition,
             absl::StrCat("a value is given for '", fqn, "', which has values already"));
    }
    if (item->given.defined()) {
      refuse(absl::StatusCode::kInvalidArgument,
             absl::StrCat("two values are given for one tensor, as '", item->given_as, "' and as '",
                          fqn, "'"));
    }
    if (!tensor.defined() || is_deferred(tensor)) {
      refuse(absl::StatusCode::kInvalidArgument,
             absl::StrCat("the value for '", fqn, "' is ",
                          tensor.defined() ? "not made yet itself" : "an undefined tensor"));
    }
    if (tensor.sizes() != at::IntArrayRef(item->whole.sizes)) {
      refuse(
          absl::StatusCode::kInvalidArgument,
          absl::StrCat("the value for '", fqn, "' has shape [", absl::StrJoin(tensor.sizes(), ", "),
                       "], wanted [", absl::StrJoin(item->whole.sizes, ", "), "]"));
    }
    if (!c10::canCast(tensor.scalar_type(), item->whole.dtype)) {
      refuse(absl::StatusCode::kInvalidArgument,
             absl::StrCat("the value for '", fqn, "' is ", c10::toString(tensor.scalar_type()),
                          ", which cannot become ", c10::toString(item->whole.dtype)));
    }
    if (is_dtensor(tensor)) {
      if (meta_of(tensor).context != item->context) {
        refuse(absl::StatusCode::kInvalidArgument,
               absl::StrCat("the value for '", fqn, "' is a DTensor on another mesh, ",
                            describe(tensor)));
      }
    } else if (const std::string why = not_dense(tensor); !why.empty()) {
      refuse(absl::StatusCode::kInvalidArgument, absl::StrCat("the value for '", fqn, "': ", why));
    }
    item->given = tensor;
    item->given_as = fqn;
  }
}

// A DTensor that was given, in the layout of this rank's part. Collective over its mesh.
void bring_given(const Item& item, const Spec& spec, const Cause& cause) {
  Cause of_it = cause;
  of_it.parameter = item.member->fqns[0];
  item.made.copy_(meta_of(redistributed(item.given.detach(), spec.layout, of_it)).local());
}

// This rank's part. Of a DTensor that was given only the memory.
at::Tensor make_part(const Item& item, const Spec& spec, std::optional<uint64_t> seed) {
  if (!item.given.defined()) {
    return Maker(item.tape, item.context, seed).part(item.whole, spec).to(spec.device);
  }
  const at::Tensor made =
      at::empty(array(spec.local_sizes), at::TensorOptions(item.whole.dtype).device(spec.device));
  if (is_dtensor(item.given)) return made;
  at::Tensor part = item.given.detach();
  for (int d = 0; d < spec.ndim(); ++d) {
    part = select(part, d,
                  local_intervals(spec.layout, item.context->mesh().shape(),
                                  item.context->coordinate(), spec.sizes, d));
  }
  made.copy_(part);
  return made;
}

// Of no mesh. `alone`: that of one rank, made when the first needs it.
at::Tensor make_plain(const Item& item, std::optional<uint64_t> seed,
                      std::shared_ptr<MeshContext>& alone) {
  StorageRecord& storage = item.tape->storages[item.whole.storage];
  at::Tensor made;
  if (c10::intrusive_ptr<c10::StorageImpl> shared = storage.made.lock()) {
    made = at::empty({0}, options_of(*item.tape, item.whole));
    made.set_(c10::Storage(std::move(shared)), item.whole.offset, item.whole.sizes,
              item.whole.strides);
  } else {
    if (item.given.defined() && item.whole.is_whole(item.whole.sizes) &&
        static_cast<size_t>(item.whole.numel()) * c10::elementSize(item.whole.dtype) ==
            storage.meta.nbytes()) {
      made = at::empty(item.whole.sizes, options_of(*item.tape, item.whole));
    } else {
      if (alone == nullptr) alone = one_rank();
      std::optional<uint64_t>& drawn = item.tape->seed_alone;
      if (!seed.has_value() && !drawn.has_value()) {
        // Another model made after this one gets other numbers; torch::manual_seed() repeats them.
        at::Generator generator = at::detail::getDefaultCPUGenerator();
        const std::lock_guard lock(generator.mutex());
        drawn = at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
      }
      made = Maker(item.tape, alone, seed.has_value() ? seed : drawn).whole(item.whole);
    }
    storage.made = c10::weak_intrusive_ptr<c10::StorageImpl>(made.storage().getWeakStorageImpl());
  }
  if (item.given.defined()) made.copy_(item.given.detach());
  return made;
}

uint64_t sum_of_item(const Item& item, std::optional<uint64_t> seed) {
  const Spec& spec = *meta_of(item.member->tensor).spec;
  uint64_t sum = checksum(0, absl::StrCat(item.member->fqns[0], spec.to_string()));
  if (item.given.defined()) {
    return mix(sum, is_dtensor(item.given) ? checksum(19, meta_of(item.given).spec->to_string())
                                           : static_cast<uint64_t>(item.given.scalar_type()) + 23);
  }
  return mix(sum, Maker(item.tape, item.context, seed).sum(item.whole));
}

// Where it stands, so that every handle sees it.
void become_plain(const at::Tensor& tensor, const at::Tensor& made) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->shallow_copy_from(made.getIntrusivePtr());
  impl->set_backend_meta(nullptr);
}

}  // namespace

DeferredScope::DeferredScope() : outer_(recording), include_(kDeferredKey) {
  if (recording == nullptr) recording = std::make_shared<Tape>();
}

DeferredScope::~DeferredScope() {
  recording = std::move(outer_);
}

namespace {

// Where `to()` would bring a tensor, and as what.
struct Move {
  c10::Device device;
  std::optional<at::ScalarType> dtype;
  std::optional<at::MemoryFormat> format;
};
std::optional<Move> move_of(const c10::OperatorHandle& op, absl::Span<const IValue> args) {
  if (base_name(op) != "aten::to") return std::nullopt;
  std::optional<c10::Device> device;
  std::optional<at::ScalarType> dtype;
  std::optional<at::MemoryFormat> format;
  for (size_t i = 1; i < args.size(); ++i) {
    const std::string& name = op.schema().arguments()[i].name();
    if (name == "device" && args[i].isDevice()) device = args[i].toDevice();
    if (name == "dtype" && args[i].isInt()) dtype = args[i].toScalarType();
    if (name == "memory_format" && args[i].isInt()) format = args[i].toMemoryFormat();
    if (name != "other" || !args[i].isTensor()) continue;
    const at::Tensor& other = args[i].toTensor();
    device = is_plain_deferred(other) ? deferred_device(other) : other.device();
    dtype = other.scalar_type();
  }
  if (!device.has_value() || device->is_meta()) return std::nullopt;
  return Move{with_index(*device), dtype, format};
}

}  // namespace

bool record_deferred(const c10::OperatorHandle& op, c10::Stack* stack) {
  const absl::Span<IValue> args =
      absl::MakeSpan(*stack).subspan(stack->size() - op.schema().arguments().size());
  std::shared_ptr<Tape> tape;
  bool has_tensor = false;
  Geometry first;
  for_each_operand(args, [&](size_t, int, const at::Tensor& tensor) {
    has_tensor |= tensor.defined();
    if (tape != nullptr || !is_plain_deferred(tensor)) return;
    tape = tape_of(tensor);
    first = tape->geometry(tensor);
  });
  if (tape == nullptr) {
    const bool makes = recording != nullptr && !has_tensor && has_tensor_result(op.schema()) &&
                       base_name(op) != "aten::from_file" && !in_torch_tensor();
    if (!makes) return false;
    tape = recording;
  } else if (tape != recording && !stays_deferred(op, args)) {
    not_made(name_of(op), tape->name(first));
  }
  // Elsewhere it would find that what stands in for the tensor, on no device, is there already.
  const std::optional<Move> move = move_of(op, args);
  if (move.has_value() && is_plain_deferred(args[0].toTensor()) &&
      move->device != deferred_device(args[0].toTensor())) {
    at::Tensor moved = at::_to_copy(args[0].toTensor(),
                                    at::TensorOptions().device(move->device).dtype(move->dtype),
                                    /*non_blocking=*/false, move->format);
    stack->resize(stack->size() - args.size());
    stack->emplace_back(std::move(moved));
    return true;
  }
  Recording(op, stack, std::move(tape)).run();
  return true;
}

bool is_deferred(c10::TensorImpl* impl) {
  // LibTorch gives views the key set of their base.
  return impl->key_set().has(kDeferredKey) && !is_dtensor(impl) &&
         impl->get_backend_meta() != nullptr;
}

bool is_deferred(const at::Tensor& tensor) {
  if (!tensor.defined()) return false;
  if (is_deferred(tensor.unsafeGetTensorImpl())) return true;
  return is_dtensor(tensor) && deferred_part(meta_of(tensor)) != nullptr;
}

c10::Device deferred_device(const at::Tensor& tensor) {
  const std::shared_ptr<Tape>& tape = tape_of(tensor);
  return tape->storages[tape->find(tensor)].device;
}

DeferredExtent deferred_extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto item = static_cast<int64_t>(tensor.element_size());
  const int64_t begin = tensor.storage_offset() * item;
  return {tensor.storage().unsafeGetStorageImpl(), begin,
          tensor.numel() == 0 ? begin : begin + (last + 1) * item};
}

void name_deferred(const at::Tensor& tensor, std::string_view fqn) {
  const std::shared_ptr<Tape>& tape = tape_of(tensor);
  tape->storages[tape->find(tensor)].fqn = fqn;
}

void shard_deferred(const at::Tensor& tensor, SpecRef spec, std::shared_ptr<MeshContext> context) {
  const std::shared_ptr<Tape> tape = tape_of(tensor);
  auto part = std::make_shared<DeferredPart>(tape, tape->geometry(tensor));
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->*DeviceAccess::device() = spec->device;
  convert_in_place(tensor, at::Tensor(), std::move(spec), std::move(context));
  meta_of(tensor).part = LocalPart(std::move(part));
}

void move_in_place(const at::Tensor& tensor, c10::Device device) {
  const c10::AutoGradMode no_grad(false);
  const c10::InferenceMode normal(false);
  DTensorMeta& meta = meta_of(tensor);
  const SpecRef was = meta.spec;
  const SpecRef there =
      meta.context->intern(was->layout, was->sizes, was->strides, was->dtype, device, was->origins);
  if (deferred_part(meta) == nullptr) meta.move_to(meta.local().to(there->device));
  meta.spec = there;
  if (meta.family != nullptr && meta.family->parameter == was) meta.family->parameter = there;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->*DeviceAccess::device() = there->device;
  c10::DispatchKeySet keys = keys_for(there->device);
  if (impl->is_inference()) keys = keys - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  set_keys(*impl, (impl->key_set() - keys_for(was->device)) | keys);
}

void make_deferred(const std::vector<Member>& members,
                   const std::vector<std::pair<std::string, at::Tensor>>& given,
                   std::optional<uint64_t> seed, const Cause& cause) {
  const c10::AutoGradMode no_grad(false);
  const c10::InferenceMode normal(false);
  const c10::impl::ExcludeDispatchKeyGuard not_recorded(kDeferredKey);
  std::vector<Item> items = items_of(members);
  std::vector<std::shared_ptr<MeshContext>> contexts;
  for (const Item& item : items) {
    if (item.context == nullptr) continue;
    if (std::find(contexts.begin(), contexts.end(), item.context) == contexts.end()) {
      contexts.push_back(item.context);
    }
  }
  // Everything is made before anything changes: the others learn of what fails here while all can
  // still go back.
  Reservations reservations;
  std::exception_ptr failure;
  try {
    give(items, members, given, cause.name);
    if (!seed.has_value()) {
      for (const Item& item : items) {
        if (item.context != nullptr) reservations.reserve(item.tape, item.context);
      }
    }
    std::shared_ptr<MeshContext> alone;
    for (Item& item : items) {
      item.made = item.part != nullptr ? make_part(item, *meta_of(item.member->tensor).spec, seed)
                                       : make_plain(item, seed, alone);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  for (const std::shared_ptr<MeshContext>& context : contexts) {
    std::vector<uint64_t> sums;
    std::vector<const Item*> compared;
    for (const Item& item : items) {
      if (item.context != context) continue;
      sums.push_back(failure != nullptr ? 1 : sum_of_item(item, seed));
      compared.push_back(&item);
    }
    const std::optional<Difference> difference = first_difference(*context, sums, cause);
    if (!difference.has_value() || failure != nullptr) continue;
    failure = std::make_exception_ptr(Error(
        cause.name,
        absl::InvalidArgumentError(absl::StrCat(
            "'", compared[difference->index]->member->fqns[0], "' would not be the same on ranks ",
            difference->ranks[0], " and ", difference->ranks[1],
            ": their modules were made in other ways (shapes, initialisers, or what was drawn "
            "before), their random states or seeds differ, other values are given, or one rank "
            "has an error of its own"))));
  }
  // Ranks of one mesh hear of what another mesh has found.
  for (size_t i = 0; contexts.size() > 1 && i < contexts.size(); ++i) {
    const uint64_t failed = failure != nullptr ? 1 : 0;
    if (!first_difference(*contexts[i], {failed}, cause).has_value() || failed != 0) continue;
    failure = std::make_exception_ptr(Error(
        cause.name, absl::InvalidArgumentError(absl::StrCat("it has failed on other ranks of ",
                                                            contexts[i]->mesh().to_string()))));
  }
  if (failure != nullptr) std::rethrow_exception(failure);
  for (const Item& item : items) {
    if (item.part == nullptr || !is_dtensor(item.given)) continue;
    bring_given(item, *meta_of(item.member->tensor).spec, cause);
  }

  reservations.keep();
  for (const Item& item : items) {
    if (item.part == nullptr) {
      become_plain(item.member->tensor, item.made);
      continue;
    }
    DTensorMeta& meta = meta_of(item.member->tensor);
    item.part->made = item.made;
    meta.part = LocalPart(item.made);
    meta.came_from(provenance_of_new(*item.context, *meta.spec));
  }
  // Before anybody has their parts in hand.
  for (const Item& item : items) {
    if (const Resting* resting = resting_of(item.member->tensor)) resting->unit->pack_if_made();
  }
}

}  // namespace shardweave::dtensor_internal
