#include "shardweave/dtensor/engine/dispatch.h"

#include <algorithm>
#include <bit>
#include <optional>

#include "ATen/core/LegacyTypeDispatch.h"
#include "ATen/ops/empty.h"
#include "absl/algorithm/container.h"
#include "absl/base/attributes.h"
#include "absl/hash/hash.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "c10/core/AutogradState.h"
#include "c10/core/InferenceMode.h"
#include "c10/util/Exception.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/arguments.h"
#include "shardweave/dtensor/engine/decide.h"
#include "shardweave/dtensor/engine/detour.h"
#include "shardweave/dtensor/engine/fsdp_unit.h"
#include "shardweave/dtensor/engine/multiple.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/remembered.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/observe/observer.h"
#include "torch/csrc/autograd/graph_task.h"
#include "torch/library.h"

namespace shardweave::dtensor_internal {
namespace {

using c10::IValue;

const std::shared_ptr<MeshContext>& find_context(const c10::OperatorHandle& op,
                                                 absl::Span<const IValue> args) {
  for (const IValue& v : args) {
    if (v.isTensor()) {
      c10::TensorImpl* impl = v.unsafeToTensorImpl();
      if (defined(impl) && is_dtensor(impl)) return meta_of(impl).context;
    } else if (v.isList()) {
      for (const IValue& e : v.toListRef()) {
        if (e.isNone()) continue;
        if (!e.isTensor()) break;
        c10::TensorImpl* impl = e.unsafeToTensorImpl();
        if (defined(impl) && is_dtensor(impl)) return meta_of(impl).context;
      }
    }
  }
  fail(op, absl::StatusCode::kInternal, "dispatched to DTensor without a DTensor argument");
}

// --- cache key -----------------------------------------------------------------------------------

constexpr uint64_t kNone = 0x9e3779b97f4a7c15;
constexpr uint64_t kScalar = 0xc2b2ae3d27d4eb4f;
constexpr uint64_t kList = 0x165667b19e3779f9;
constexpr uint64_t kOther = 0x27d4eb2f165667c5;
constexpr uint64_t kLastAgain = 0x85ebca77c2b2ae63;

// What a call is looked up by, and what is found out on the way.
class CallKey {
 public:
  CallKey() = default;
  CallKey(const CallKey&) = delete;
  CallKey& operator=(const CallKey&) = delete;

  int numbers = 0;  // plain 0-dim tensors that are read, but for those of the program's text
  const DTensorMeta* last = nullptr;  // of the last DTensor
  uint64_t provenance = 0;            // of the tensors, and of the numbers that are not in the key

  ABSL_ATTRIBUTE_ALWAYS_INLINE void push_back(uint64_t word) {
    if (next_ == end_) [[unlikely]]
      grow();
    *next_++ = word;
  }
  void clear() {
    numbers = 0;
    last = nullptr;
    provenance = 0;
    next_ = begin_;
  }

  absl::Span<const uint64_t> words() const {
    return absl::MakeConstSpan(begin_, static_cast<size_t>(next_ - begin_));
  }
  // Of the words. In two chains, for each of their steps waits for the one before.
  uint64_t hash() const {
    const auto step = [](uint64_t sum, uint64_t word) {
      return (std::rotl(sum, 5) ^ word) * 0x9e3779b97f4a7c15;
    };
    uint64_t even = 0, odd = kOther;
    const uint64_t* word = begin_;
    for (; next_ - word >= 2; word += 2) {
      even = step(even, word[0]);
      odd = step(odd, word[1]);
    }
    if (word != next_) even = step(even, *word);
    const uint64_t sum = step(even, std::rotl(odd, 32));
    return sum ^ (sum >> 32);
  }

 private:
  ABSL_ATTRIBUTE_NOINLINE void grow() {
    const size_t size = next_ - begin_;
    std::vector<uint64_t> larger;
    larger.reserve(4 * size);
    larger.assign(begin_, next_);
    larger.resize(4 * size);
    more_ = std::move(larger);
    begin_ = more_.data();
    next_ = begin_ + size;
    end_ = begin_ + more_.size();
  }

  uint64_t few_[24];  // NOLINT: not initialized, for a hit costs less than that
  std::vector<uint64_t> more_;
  uint64_t* begin_ = few_;
  uint64_t* next_ = few_;
  uint64_t* end_ = few_ + std::size(few_);
};

void add_value(const IValue& v, CallKey& key) {
  if (v.isInt()) {
    key.push_back(static_cast<uint64_t>(v.toInt()));
  } else if (v.isBool()) {
    key.push_back(kOther);
    key.push_back(v.toBool());
  } else if (v.isNone()) {
    key.push_back(kNone);
  } else if (v.isList()) {
    auto list = v.toListRef();
    key.push_back(kList + list.size());
    for (const IValue& e : list) add_value(e, key);
  } else if (v.isDouble()) {
    key.push_back(kOther + 1);
    key.push_back(std::bit_cast<uint64_t>(v.toDouble()));
  } else if (v.isComplexDouble()) {
    key.push_back(kOther + 5);
    key.push_back(std::bit_cast<uint64_t>(v.toComplexDouble().real()));
    key.push_back(std::bit_cast<uint64_t>(v.toComplexDouble().imag()));
  } else if (v.isDevice()) {
    key.push_back(kOther + 2);
    key.push_back(std::hash<c10::Device>()(v.toDevice()));
  } else if (v.isString()) {
    key.push_back(kOther + 3);
    key.push_back(absl::HashOf(v.toStringView()));
  } else {
    key.push_back(kOther + 4);
    key.push_back(IValue::hash(v));
  }
}

// The impl of an argument that may be None.
c10::TensorImpl* impl_of(const IValue& v) {
  return v.isTensor() ? v.unsafeToTensorImpl() : nullptr;
}

// False for a plain tensor that has to become a DTensor: all but numbers that are read. (`arg`: where
// it stands in the schema.)
ABSL_ATTRIBUTE_ALWAYS_INLINE inline bool add_tensor(const c10::OperatorHandle& op,
                                                    const OpInfo& info, size_t arg,
                                                    c10::TensorImpl* impl, CallKey& key) {
  if (impl == nullptr) {
    key.push_back(kNone);
  } else if (is_dtensor(impl)) [[likely]] {
    const DTensorMeta& meta = synchronise(impl, op.operator_name().name);
    // Specs are aligned: bits of the address say whether cuts are a weight's, and whether what is
    // remembered follows.
    const bool weight = meta.spec->origins.data != 0 && is_parameter(impl);
    const SpecRef* kept = remembered_spec(meta, info.makes_view());
    if (kept != nullptr && meta.part.state() == LocalPart::State::kGatheredOnUse) {
      meta.local();  // gathered anew, nothing is remembered of it
      kept = remembered_spec(meta, info.makes_view());
    }
    key.push_back(reinterpret_cast<uint64_t>(meta.spec.get()) | weight | (kept != nullptr ? 2 : 0));
    if (kept != nullptr) key.push_back(reinterpret_cast<uint64_t>(kept->get()));
    if (key.last != nullptr && have_same_elements(*key.last, meta)) key.push_back(kLastAgain);
    key.last = &meta;
    key.provenance = mix(key.provenance, provenance_of(meta));
  } else if (!defined(impl)) {
    key.push_back(kNone);
  } else {
    if (impl->dim() != 0 || info.is_out[arg]) return false;
    if (!impl->is_wrapped_number()) ++key.numbers;
    key.push_back(kScalar + 2 * static_cast<uint64_t>(c10::typeMetaToScalarType(impl->dtype())) +
                  impl->is_wrapped_number());
  }
  return true;
}

// What a Scalar says about the dtype of the result: 2 and 2.5 are not the same to an integer
// tensor.
uint64_t scalar_kind(const IValue& v) {
  return v.isDouble() ? 0 : v.isInt() ? 1 : v.isBool() ? 2 : v.isComplexDouble() ? 3 : kNone;
}

uint64_t bits_of(const IValue& v) {
  if (v.isDouble()) return std::bit_cast<uint64_t>(v.toDouble());
  if (v.isInt()) return static_cast<uint64_t>(v.toInt());
  if (v.isBool()) return v.toBool();
  if (!v.isComplexDouble()) return 0;
  const c10::complex<double> z = v.toComplexDouble();
  return mix(std::bit_cast<uint64_t>(z.real()), std::bit_cast<uint64_t>(z.imag()));
}

// False if a plain tensor has to become a DTensor first.
bool make_key(const c10::OperatorHandle& op, const OpInfo& info, absl::Span<const IValue> args,
              CallKey& key) {
  // What numbers make of integers depends on the default dtype; addresses have room for it.
  key.push_back(reinterpret_cast<uint64_t>(&info) ^
                (static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) << 56));
  const ArgKind* const kinds = info.args.data();
  for (size_t i = 0; i < args.size(); ++i) {
    const IValue& v = args[i];
    switch (kinds[i]) {
      case ArgKind::kTensor:
        if (!add_tensor(op, info, i, impl_of(v), key)) return false;
        break;
      case ArgKind::kTensorList:
        if (!v.isList()) {
          key.push_back(kNone);
          break;
        }
        key.push_back(kList + v.toListRef().size());
        for (const IValue& e : v.toListRef()) {
          if (!add_tensor(op, info, i, impl_of(e), key)) return false;
        }
        break;
      case ArgKind::kKeyed:
        add_value(v, key);
        break;
      case ArgKind::kScalar:
        if (!v.isList()) {
          key.push_back(scalar_kind(v));
          key.provenance = mix(key.provenance, bits_of(v));
          break;
        }
        for (const IValue& e : v.toListRef()) {
          key.push_back(scalar_kind(e));
          key.provenance = mix(key.provenance, bits_of(e));
        }
        break;
      case ArgKind::kUnkeyed:
        key.provenance = mix(key.provenance, bits_of(v));
        break;
    }
  }
  return true;
}

// --- run ---------------------------------------------------------------------------------------

// "(the weight 'layers.0.up') "; "": it has no name.
std::string weight_of(const OpCall& call, const InputChange& change) {
  const IValue& v = call.args[change.arg];
  const int element = call.input_element[change.input];
  const DTensorMeta& weight =
      meta_of(element < 0 ? v.unsafeToTensorImpl() : v.toListRef()[element].unsafeToTensorImpl());
  const std::string fqn(parameter_of(weight));
  return fqn.empty() ? "" : absl::StrCat("(the weight '", fqn, "') ");
}

[[noreturn]] void refuse_implicit(const c10::OperatorHandle& op, const CacheEntry& entry,
                                  const MeshContext& context, const OpCall& call) {
  std::string changes, advice;
  for (const InputChange& change : entry.input_changes) {
    if (change.plan->is_local) continue;
    const std::string& argument = op.schema().arguments()[change.arg].name();
    absl::StrAppend(&advice, advice.empty() ? "write " : " and ",
                    advised_call(argument, change.target->layout));
    absl::StrAppend(&changes, changes.empty() ? "" : "; ", "argument '", argument, "' ",
                    change.unshards_weight ? weight_of(call, change) : "",
                    call.input(change.input).spec->to_string(), " -> ",
                    change.target->layout.to_string(), " (", change.plan->plan.bytes(), " bytes)");
  }
  for (const CacheEntry::OutputChange& change : entry.output_changes) {
    if (change.plan->is_local) continue;
    absl::StrAppend(&changes, changes.empty() ? "" : "; ", "result ", change.output, " ",
                    entry.outputs[change.output]->to_string(), " -> ",
                    change.target->layout.to_string(), " (", change.plan->plan.bytes(), " bytes)");
  }
  for (const CacheEntry::Written& written : entry.written) {
    if (written.plan == nullptr || written.plan->is_local) continue;
    absl::StrAppend(&changes, changes.empty() ? "" : "; ", "result back to ",
                    written.spec->layout.to_string(), " (", written.plan->plan.bytes(), " bytes)");
  }
  const std::string module = context.observation.modules.current();
  fail(op, absl::StatusCode::kFailedPrecondition,
       absl::StrCat("needs communication that the strict scope refuses",
                    module.empty() ? "" : absl::StrCat(" in module '", module, "'"), ": ", changes,
                    "; ",
                    advice.empty() ? "it always does so: let it run outside of the scope"
                                   : absl::StrCat(advice, " in front of it")));
}

bool is_first_rank(const MeshContext& context) {
  return absl::c_all_of(context.coordinate(), [](int64_t c) { return c == 0; });
}

// TORCH_WARN, but for its place: LibTorch prints the function, and users do not know ours.
void warn(const c10::OperatorHandle& op, const std::string& text) {
  c10::warn(c10::Warning(c10::UserWarning(),
                         c10::SourceLocation{op.operator_name().name.c_str(), __FILE__, __LINE__},
                         absl::StrCat("shardweave: ", text), /*verbatim=*/false));
}

// Says once per operator that it has no rule.
void note_gathered(const c10::OperatorHandle& op, MeshContext& context) {
  ++context.observation.counters.gathered_operators;
  if (!context.observation.said_gathered.insert(name_of(op)).second || !is_first_rank(context))
    return;
  warn(op,
       absl::StrCat(name_of(op), " has no sharding rule; its inputs are gathered on every rank"));
}

// The dearest first, those whose names differ in a number only as one:
// "layers.*.up.weight (4, aten::mm, 4096 bytes), head.weight (aten::mm, 512 bytes)".
std::string listed(absl::Span<const Observation::Unsharded> weights) {
  struct Alike {
    Observation::Unsharded sum;
    int64_t count;
  };
  std::vector<Alike> all;
  for (const Observation::Unsharded& weight : weights) {
    std::vector<std::string> parts = absl::StrSplit(weight.name, '.');
    for (std::string& part : parts) {
      if (!part.empty() && absl::c_all_of(part, absl::ascii_isdigit)) part = "*";
    }
    std::string pattern = absl::StrJoin(parts, ".");
    const auto same = absl::c_find_if(
        all, [&](const Alike& one) { return one.sum.name == pattern && one.sum.op == weight.op; });
    if (same == all.end()) {
      all.push_back({{std::move(pattern), weight.op, weight.bytes}, 1});
    } else {
      same->sum.bytes += weight.bytes;
      ++same->count;
    }
  }
  absl::c_stable_sort(all,
                      [](const Alike& a, const Alike& b) { return a.sum.bytes > b.sum.bytes; });
  constexpr size_t kMost = 32;
  const size_t shown = std::min(all.size(), kMost);
  const auto append = [](std::string* out, const Alike& one) {
    absl::StrAppend(out, one.sum.name, " (",
                    one.count > 1 ? absl::StrCat(one.count, ", ") : std::string(), one.sum.op, ", ",
                    one.sum.bytes, " bytes)");
  };
  return absl::StrCat(
      absl::StrJoin(all.begin(), all.begin() + shown, ", ", append),
      shown < all.size() ? absl::StrCat(", and ", all.size() - shown, " more kinds") : "");
}

// "along dp": the mesh dimensions whose cut a change gives up.
std::string given_up(const MeshContext& context, const Layout& from, const Layout& to) {
  std::vector<std::string> whole, moved;
  for (int m = 0; m < from.mesh_ndim(); ++m) {
    if (!from[m].is_shard() || from[m] == to[m]) continue;
    (to[m].is_shard() ? moved : whole).emplace_back(context.mesh().name(m));
  }
  std::string text;
  if (!whole.empty()) absl::StrAppend(&text, " whole along ", absl::StrJoin(whole, ", "));
  if (!moved.empty()) {
    absl::StrAppend(&text, text.empty() ? "" : " and", " cut in another way along ",
                    absl::StrJoin(moved, ", "));
  }
  return text;
}

// Says once per weight that a cut of it, which the user wanted, is given up, by which operator and for how
// many bytes; of a plan that means so (every parameter is cut, and gathered where it is used) in two
// lines, not in one for each.
void note_unsharded(const c10::OperatorHandle& op, const InputChange& change,
                    const DTensorMeta& weight, MeshContext& context) {
  ++context.observation.counters.unsharded_weights;
  const std::string module = context.observation.modules.current();
  const std::string where = module.empty() ? "" : absl::StrCat(" in module '", module, "'");
  // What is made of a weight anew in every step (a cast) has no name, and no memory. Its sizes, which
  // may be others in every step, do not make it another.
  const std::string fqn(parameter_of(weight));
  const std::string name = !fqn.empty() ? fqn
                                        : absl::StrCat("a weight of ", name_of(op), where, " ",
                                                       weight.spec->layout.to_string(), " ",
                                                       change.target->layout.to_string());
  // A cast of a parameter (forward_plan.h) has its name, and is made anew in every step, too.
  const bool is_parameter = !fqn.empty() && weight.family->parameter != nullptr;
  const bool is_new = is_parameter ? !std::exchange(weight.family->said_unsharded, true)
                                   : context.observation.said_unsharded.insert(name).second;
  if (!is_first_rank(context)) return;
  auto& said = context.observation.unsharded;
  const int64_t bytes = change.plan->plan.bytes();
  constexpr char kCounted[] = "(the counter unsharded_weights counts each)";
  if (said.first.empty()) {
    said.first = name;
    // A view has dimensions of its own: users know the parameter's.
    const SpecRef& spec = is_parameter ? weight.family->parameter : weight.spec;
    warn(op, absl::StrCat(name_of(op), where, " needs ",
                          fqn.empty() ? "a weight" : absl::StrCat("the weight '", fqn, "'"), ", ",
                          spec->to_string(), ",",
                          given_up(context, weight.spec->layout, change.target->layout), ": ",
                          bytes, " bytes for each rank, every time ", kCounted));
  } else if (is_new) {
    said.more.push_back(
        {fqn.empty() ? absl::StrCat("a weight without a name", where) : fqn, name_of(op), bytes});
  } else if (name == said.first && !said.more.empty()) {
    int64_t sum = 0;
    for (const Observation::Unsharded& other : said.more) sum += other.bytes;
    warn(op, absl::StrCat("as ", fqn.empty() ? "that one" : absl::StrCat("'", fqn, "'"), " is, ",
                          said.more.size(), " more ",
                          said.more.size() == 1 ? "weight is" : "weights are",
                          " brought elsewhere where operators need them, ", sum,
                          " bytes for each rank, every time ", kCounted, ": ", listed(said.more)));
    said.more.clear();
  }
}

class Runner {
 public:
  Runner(const c10::OperatorHandle& op, const OpInfo& info, const CacheEntry& entry,
         std::shared_ptr<MeshContext>& context, c10::Stack* stack, size_t base)
      : op_(op),
        info_(info),
        entry_(entry),
        context_(*context),
        reference_(context),
        stack_(stack),
        base_(base),
        takes_parts_(entry.input_changes.empty() && !info.is_view && !info.changes_shape) {}

  void run() {
    const bool writes = !entry_.written.empty();
    if (writes) keep_written();
    if (entry_.makes_multiple) [[unlikely]]
      keep_sum();
    replace_inputs();
    if (writes) count_writes();
    for (const ArgChange& change : entry_.arg_changes) (*stack_)[base_ + change.arg] = change.value;
    if (writes) {
      for (Kept& k : kept_) k.local = written_arg(*k.written);
    }
    if (entry_.kernel != nullptr) {
      entry_.kernel(op_, *stack_, {entry_.inputs, entry_.outputs});
    } else {
      op_.callBoxed(stack_);
    }
    if (writes) {
      if (info_.changes_shape) take_reshaped();
      finish_written();
      for (const at::Tensor& view : written_views_) {
        written(meta_of(view), op_.operator_name().name);
      }
    }
    wrap_outputs();
    if (sum_.defined()) [[unlikely]]
      note_multiple(meta_of(sum_), meta_of(stack_->back().toTensor()), {op_, number_});
  }

 private:
  struct Kept {
    const CacheEntry::Written* written;
    at::Tensor handle;  // the DTensor that the operator writes
    at::Tensor local;   // what the local operator got for it
  };

  uint64_t provenance_of_result(uint64_t place) const {
    return place == 0 ? context_.provenance.about : mix(context_.provenance.about, place);
  }

  void keep_sum() {
    sum_ = (*stack_)[base_].toTensor();
    if (info_.args.size() > 1) number_ = (*stack_)[base_ + 1];
  }

  // What has another shape now: what the operator returns, for its kernel may have copied it.
  void take_reshaped() {
    const IValue* const results = stack_->data() + stack_->size() - info_.num_returns;
    for (Kept& k : kept_) {
      if (k.written->output >= 0) k.local = results[k.written->output].toTensor();
    }
  }

  // What now stands where the operator writes.
  at::Tensor written_arg(const CacheEntry::Written& written) const {
    const IValue& v = (*stack_)[base_ + written.arg];
    return written.element < 0 ? v.toTensor() : v.toListRef()[written.element].toTensor();
  }

  void keep_written() {
    uint64_t place = 0;
    for (const CacheEntry::Written& written : entry_.written) {
      at::Tensor handle = written_arg(written);
      meta_of(handle).came_from(provenance_of_result(place++));
      // What changes the shape in place writes no element.
      if (context_.gradients.fsdp != nullptr && !info_.changes_shape) {
        check_writable(meta_of(handle), op_.operator_name().name);  // without a family, too
      }
      if (meta_of(handle).family != nullptr && !info_.changes_shape) {
        check_writable(meta_of(handle), op_.operator_name().name);
        written_views_.push_back(handle);
      }
      if (written.direct && written.output < 0 && !info_.changes_shape && !entry_.gathered)
        continue;
      kept_.push_back({&written, std::move(handle), {}});
    }
    check_written_together(written_views_, op_.operator_name().name);
  }

  // Who has saved a local part that is written (to_local) has to know; what is remembered of it ends
  // here. Inputs have been read by now: they may come from what is remembered.
  void count_writes() {
    if (info_.changes_shape) return;
    auto kept = kept_.begin();
    for (const CacheEntry::Written& written : entry_.written) {
      const bool is_kept = kept != kept_.end() && kept->written == &written;
      const at::Tensor local = is_kept ? meta_of((kept++)->handle).local() : written_arg(written);
      if (!local.is_inference()) local.unsafeGetTensorImpl()->bump_version();
    }
  }

  // The input of a change, brought where it has to be: `impl` is the DTensor, or null.
  at::Tensor changed(const InputChange& change, c10::TensorImpl* impl, const at::Tensor& local) {
    // What the operator writes, or makes views of (also without a word, as unsafe_chunk does, or
    // perhaps, without a rule), is its own.
    const bool shared = impl != nullptr && !info_.is_view && !entry_.gathered &&
                        !is_written(change) &&
                        !std::string_view(op_.operator_name().name).starts_with("aten::unsafe_");
    if (shared && change.remember != Remember::kNever) {
      if (std::optional<at::Tensor> kept = recall(meta_of(impl), *change.target)) {
        ++context_.observation.counters.remembered_uses;
        return *std::move(kept);
      }
    }
    if (change.from != nullptr) {
      const at::Tensor kept = remembered_for(change, impl);
      ++context_.observation.counters.remembered_uses;
      at::Tensor result = moved(change, kept, parameter_of(meta_of(impl)));
      if (shared && is_kept(change.remember)) remember(meta_of(impl), change.target, result);
      // As the tensor lies, whichever view of it has been brought.
      if (!result.is_contiguous() &&
          change.target->strides == contiguous_strides(change.target->sizes)) {
        return result.contiguous();
      }
      return shared || !result.is_alias_of(kept) ? result : result.clone();
    }
    if (change.unshards_weight) note_unsharded(op_, change, meta_of(impl), context_);
    if (shared && is_kept(change.remember)) {
      DTensorMeta& meta = meta_of(impl);
      if (auto multiple = multiple_of(meta)) {
        return bring_by_sum(meta, std::move(multiple), change.target, [&](const at::Tensor& sum) {
          return moved(change, sum, parameter_of(meta));
        });
      }
    }
    at::Tensor result =
        moved(change, local, impl == nullptr ? std::string_view() : parameter_of(meta_of(impl)));
    if (shared && is_kept(change.remember)) remember(meta_of(impl), change.target, result);
    return result;
  }

  // The form that was decided on: another input of this call may have added one.
  at::Tensor remembered_for(const InputChange& change, c10::TensorImpl* impl) const {
    for (const auto& [held_for, form] : held_) {
      if (held_for == &change) return form;
    }
    std::optional<at::Tensor> part = remembered_part(meta_of(impl), *change.from);
    if (!part.has_value()) {
      fail(op_, absl::StatusCode::kInternal, "what was remembered of an input is gone");
    }
    return *std::move(part);
  }

  // Not many forms are remembered: what one input adds may be the end of another's.
  void hold_remembered() {
    auto change = entry_.input_changes.begin();
    int flat = 0;
    for_each_tensor(info_, absl::MakeConstSpan(*stack_).subspan(base_),
                    [&](size_t arg, c10::TensorImpl* impl) {
                      if (info_.is_out[arg] || change == entry_.input_changes.end()) return;
                      if (change->input != flat++) return;
                      if (change->from != nullptr) {
                        held_.emplace_back(&*change, remembered_for(*change, impl));
                      }
                      ++change;
                    });
  }

  bool is_written(const InputChange& change) const {
    return std::any_of(entry_.written.begin(), entry_.written.end(),
                       [&](const CacheEntry::Written& w) { return w.arg == change.arg; });
  }

  // `parameter`: its FQN, or "".
  at::Tensor moved(const InputChange& change, const at::Tensor& local, std::string_view parameter) {
    if (!change.plan->is_local) ++context_.observation.counters.implicit_redistributions;
    at::Tensor result = run_plan(context_, *change.plan, local, change.target->sizes,
                                 {.name = op_.operator_name().name,
                                  .argument = op_.schema().arguments()[change.arg].name(),
                                  .parameter = parameter});
    if (local.dim() == 0 && local.unsafeGetTensorImpl()->is_wrapped_number()) {
      if (result.is_same(local)) return result;
      result.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    // The operator may write into it.
    if (result.is_same(local) && is_written(change)) result = result.clone();
    return result;
  }

  // Puts the local tensor in place of one flat input; advances over entry_.input_changes.
  ABSL_ATTRIBUTE_ALWAYS_INLINE void localize(at::Tensor& input) {
    c10::TensorImpl* impl = input.unsafeGetTensorImpl();
    if (!takes_parts_) {
      input = local_of(input);
    } else if (is_dtensor(impl)) {
      input = meta_of(impl).local();
    }
  }

  // The same where the part is not all that the operator takes.
  at::Tensor local_of(at::Tensor& input) {
    const int i = next_input_++;
    c10::TensorImpl* impl = input.unsafeGetTensorImpl();
    if (!input.defined()) return {};
    const bool sharded = is_dtensor(impl);
    if (next_change_ < entry_.input_changes.size() &&
        entry_.input_changes[next_change_].input == i) {
      const InputChange& change = entry_.input_changes[next_change_++];
      const at::Tensor there =
          changed(change, sharded ? impl : nullptr, sharded ? meta_of(impl).local() : input);
      if (!sharded) return there;
      if (info_.changes_shape) {
        if (meta_of(impl).family != nullptr) begin_detour(meta_of(impl), change, there);
        return sharing_alias(there);
      }
      if (info_.is_view && !viewed_.defined()) begin_detour(view_of(input), change, there);
      return there;
    }
    if (!sharded) return std::move(input);
    if (info_.is_view && !viewed_.defined()) {
      const DTensorMeta& base = view_of(input);
      detour_ = base.detour;
      if (!info_.changes_shape) return base.local();
    }
    // The operator changes the shape of the handle that it gets: shallow copies share ours.
    return info_.changes_shape ? sharing_alias(meta_of(impl).local()) : meta_of(impl).local();
  }

  // Views of `base` are views of what it was brought to for the operator.
  void begin_detour(const DTensorMeta& base, const InputChange& change, const at::Tensor& there) {
    detour_ = std::make_shared<const Detour>(
        Detour{there, change.target, base.local(), base.spec, base.detour, base.family->writes});
  }

  static at::Tensor sharing_alias(const at::Tensor& local) {
    at::Tensor alias = local.alias();
    share_version(local, alias);
    return alias;
  }

  // The operator makes views of this: takes it.
  const DTensorMeta& view_of(at::Tensor& input) {
    viewed_ = std::move(input);
    DTensorMeta& base = meta_of(viewed_);
    if (base.family == nullptr) base.family = std::make_shared<ViewFamily>();
    return base;
  }

  void replace_inputs() {
    if (entry_.input_changes.size() > 1) hold_remembered();
    const ArgKind* const kinds = info_.args.data();
    const bool has_outs = !info_.writes.empty();
    IValue* const args = stack_->data() + base_;
    for (size_t i = 0, n = info_.args.size(); i < n; ++i) {
      IValue& v = args[i];
      const bool is_out = has_outs && info_.is_out[i];
      if (kinds[i] == ArgKind::kTensor) {
        if (is_out) {
          v = out_arg(i, -1, v);
        } else if (v.isTensor()) {
          localize(v.toTensor());
        } else {
          ++next_input_;
        }
      } else if (kinds[i] == ArgKind::kTensorList && v.isList()) {
        c10::impl::GenericList list = std::move(v).toList();
        if (list.use_count() > 1) list = list.copy();  // a variable of TorchScript's is in it, too
        for (size_t e = 0; e < list.size(); ++e) {
          IValue element = list.extract(e);
          if (is_out) {
            element = out_arg(i, static_cast<int>(e), element);
          } else if (element.isTensor()) {
            localize(element.toTensor());
          } else {
            ++next_input_;
          }
          list.set(e, std::move(element));
        }
        v = std::move(list);
      }
    }
  }

  // The local tensor that an out= operator writes instead of `v`.
  IValue out_arg(size_t arg, int element, const IValue& v) const {
    const DTensorMeta& meta = meta_of(v.unsafeToTensorImpl());
    for (const CacheEntry::Written& written : entry_.written) {
      if (written.arg != static_cast<int>(arg) || written.element != element) continue;
      if (written.direct) continue;
      // Of the size of the result: some operators do not resize.
      const bool known = !entry_.gathered && written.output >= 0;
      const Dims& sizes = known ? entry_.outputs[written.output]->local_sizes : meta.spec->sizes;
      return at::empty(array(sizes), meta.local().options());
    }
    return meta.local();
  }

  void finish_written() {
    for (Kept& k : kept_) {
      DTensorMeta& meta = meta_of(k.handle);
      if (info_.changes_shape) {
        const at::Tensor before = detour_ != nullptr ? detour_->moved : meta.local();
        meta.spec = k.written->spec;
        // Perhaps not the same: the operator may have worked on a copy that was brought here.
        meta.part = LocalPart(k.local);
        follow_fsdp(meta);
        if (meta.family != nullptr) {
          meta.place = place_of_view(meta, *meta.family, k.written->output);
          // Views and shallow copies go on with what was there before it was moved. (If there are any
          // is a rank's own affair: writes go back to them only where nobody else is needed for it.)
          const bool leads_back =
              k.local.is_alias_of(before) &&
              (detour_ == nullptr ||
               plan_for(context_, detour_->moved_spec, detour_->base_spec)->is_local);
          if (detour_ != nullptr) meta.detour = detour_;
          if (!leads_back) meta.detour = copy_of_its_own(meta.family);
        }
        k.handle.unsafeGetTensorImpl()->set_sizes_and_strides(array(meta.spec->sizes),
                                                              array(meta.spec->strides));
        continue;
      }
      if (k.written->becomes) {
        convert_in_place(k.handle, std::move(k.local), k.written->spec, reference_);
        continue;
      }
      if (entry_.gathered &&
          k.local.sizes() != array(meta.spec->sizes)) {  // an out= of another shape
        SpecRef spec = replicated_spec(context_, k.local);
        convert_in_place(k.handle, std::move(k.local), std::move(spec), reference_);
        continue;
      }
      if (k.written->direct) continue;
      if (!k.written->plan->is_local) ++context_.observation.counters.implicit_redistributions;
      meta.local().copy_(run_plan(context_, *k.written->plan, k.local, meta.spec->sizes,
                                  {.name = op_.operator_name().name, .argument = "result"}));
    }
  }

  at::Tensor wrapped(at::Tensor&& local, size_t flat, bool is_last = false) {
    if (!local.defined()) return {};
    if (entry_.gathered) {
      if (const std::string why = not_dense(local); !why.empty()) {
        fail(op_, absl::StatusCode::kUnimplemented,
             absl::StrCat("its result cannot be a DTensor, for ", why,
                          "; take the local part, or the full tensor, first"));
      }
      SpecRef spec = replicated_spec(context_, local);  // the same on all ranks
      at::Tensor result = wrap_view(std::move(local), std::move(spec), reference_,
                                    !info_.is_view || viewed_.is_inference());
      follow_base(result, flat);
      follow_fsdp(meta_of(result));
      meta_of(result).came_from(provenance_of_result(flat));
      return result;
    }
    const SpecRef& spec = entry_.outputs[flat];
    if (spec == nullptr || !absl::c_equal(local.sizes(), spec->local_sizes) ||
        local.scalar_type() != spec->dtype) [[unlikely]] {
      fail(op_, absl::StatusCode::kInternal,
           absl::StrCat("the local result ", flat, " is ", c10::toString(local.scalar_type()),
                        " of shape [", absl::StrJoin(local.sizes(), ", "),
                        "], the sharding rule promised ",
                        spec == nullptr ? "none"
                                        : absl::StrCat(c10::toString(spec->dtype), " [",
                                                       absl::StrJoin(spec->local_sizes, ", "),
                                                       "] of ", spec->to_string())));
    }
    for (const CacheEntry::OutputChange& change : entry_.output_changes) {
      if (change.output == static_cast<int>(flat)) return brought(local, change);
    }
    std::shared_ptr<MeshContext> reference = is_last ? std::move(reference_) : reference_;
    at::Tensor result =
        info_.is_view && c10::InferenceMode::is_enabled()
            ? wrap_view(std::move(local), spec, std::move(reference), viewed_.is_inference())
            : wrap(std::move(local), spec, std::move(reference));
    if (info_.is_view) follow_base(result, flat);
    follow_fsdp(meta_of(result));
    meta_of(result).came_from(provenance_of_result(flat));
    return result;
  }

  // Also of operators that make views without a word, as unsafe_chunk does.
  ABSL_ATTRIBUTE_ALWAYS_INLINE void follow_fsdp(DTensorMeta& meta) const {
    if (context_.gradients.fsdp != nullptr) [[unlikely]]
      follow_unit(*context_.gradients.fsdp, meta);
  }

  at::Tensor brought(const at::Tensor& local, const CacheEntry::OutputChange& change) {
    if (!change.plan->is_local) ++context_.observation.counters.implicit_redistributions;
    at::Tensor there = owned(run_plan(context_, *change.plan, local, change.target->sizes,
                                      {.name = op_.operator_name().name, .argument = "result"}),
                             local);
    at::Tensor result = wrap(std::move(there), change.target, reference_);
    meta_of(result).came_from(provenance_of_result(change.output));
    return result;
  }

  // A detour from which there is no way back.
  static std::shared_ptr<const Detour> copy_of_its_own(const std::shared_ptr<ViewFamily>& family) {
    return std::make_shared<const Detour>(Detour{.seen = family->writes});
  }

  // Local views are made below autograd's bookkeeping: that one was written is known of the other.
  static void share_version(const at::Tensor& source, const at::Tensor& view) {
    c10::TensorImpl* to = view.unsafeGetTensorImpl();
    if (source.is_inference() || to->is_inference()) return;
    to->set_version_counter(source.unsafeGetTensorImpl()->version_counter());
  }

  // Where the view that is result `flat` lies.
  Place place_of_view(const DTensorMeta& base, ViewFamily& family, size_t flat) const {
    const bool is_in_place = entry_.input_changes.empty() && flat < entry_.begins.size() &&
                             entry_.begins[flat].has_value();
    if (!is_in_place) return family.new_place();
    return {base.place.memory, base.place.begin + *entry_.begins[flat]};
  }

  // storage_offset() of the view that is result `flat`, as on one device: of a copy, too. But what is
  // detached begins a storage: autograd replays the views of what has no base on tensors that do.
  int64_t offset_of_view(const at::Tensor& view, size_t flat) const {
    const int64_t begin = flat < entry_.begins.size() ? entry_.begins[flat].value_or(0) : 0;
    const int64_t of_base = viewed_.storage_offset();
    if (of_base == 0) return begin;
    if (op_.operator_name().name == "aten::detach") return 0;
    return of_base * viewed_.element_size() / view.element_size() + begin;
  }

  // A view of something that was brought here first remembers where that came from.
  void follow_base(const at::Tensor& result, size_t flat) const {
    if (!viewed_.defined()) return;
    DTensorMeta& meta = meta_of(result);
    const DTensorMeta& base = meta_of(viewed_);
    meta.family = base.family;
    meta.place = place_of_view(base, *base.family, flat);
    if (const int64_t offset = offset_of_view(result, flat); offset != 0) {
      result.unsafeGetTensorImpl()->set_storage_offset(offset);
    }
    if (detour_ != nullptr) meta.detour = detour_;
    const at::Tensor& part = meta.local();
    if (!part.defined()) return;
    const bool is_in_place = detour_ == base.detour;  // it was not moved
    const bool aliases = is_in_place && part.is_alias_of(base.local());
    // A copy, too: what is remembered of one is found by the other, and has to end on all ranks.
    if (is_in_place && base.local().defined()) share_version(base.local(), part);
    // What the view's kernel, or one before it, may have copied.
    const bool is_copy = detour_ != nullptr
                             ? detour_->moved.defined() && !part.is_alias_of(detour_->moved)
                             : entry_.kernel != nullptr && base.local().defined() && !aliases;
    if (is_copy) meta.detour = copy_of_its_own(base.family);
  }

  void wrap_outputs() {
    size_t flat = 0;
    const int num_results = info_.num_returns;
    const bool writes = !kept_.empty();
    IValue* const results = stack_->data() + stack_->size() - num_results;
    for (int r = 0; r < num_results; ++r) {
      IValue& v = results[r];
      if (const Kept* k = writes ? kept_for(r) : nullptr) {
        v = k->handle;
        ++flat;
      } else if (v.isTensor()) {
        at::Tensor& tensor = v.toTensor();
        tensor = wrapped(std::move(tensor), flat++, r + 1 == num_results);
      } else if (v.isTensorList()) {
        c10::List<at::Tensor> list = std::move(v).toTensorList();
        if (list.use_count() > 1) list = list.copy();
        for (size_t e = 0; e < list.size(); ++e) {
          list.set(e, wrapped(list.extract(e), flat++));
        }
        v = std::move(list);
      }
    }
  }

  const Kept* kept_for(int output) const {
    for (const Kept& k : kept_) {
      if (k.written->output == output) return &k;
    }
    return nullptr;
  }

  const c10::OperatorHandle& op_;
  const OpInfo& info_;
  const CacheEntry& entry_;
  MeshContext& context_;
  std::shared_ptr<MeshContext>& reference_;  // to it; the last result takes it
  c10::Stack* const stack_;
  const size_t base_;
  const bool takes_parts_;  // of every DTensor what this rank has, as it is
  absl::InlinedVector<Kept, 1> kept_;
  int next_input_ = 0;
  size_t next_change_ = 0;
  at::Tensor viewed_;                     // the base of the views that are made
  std::shared_ptr<const Detour> detour_;  // of viewed_, or made here
  // What inputs are remembered as, if several have to be brought.
  absl::InlinedVector<std::pair<const InputChange*, at::Tensor>, 2> held_;
  at::Tensor sum_;  // that the result is a multiple of
  IValue number_;
  // What is written and has views or is one.
  absl::InlinedVector<at::Tensor, 1> written_views_;
};

// Null: the call is not made of other operators, as far as its rule says.
const ComposedRule* composed_rule(const c10::OperatorHandle& op, const OpInfo& info,
                                  absl::Span<const IValue> args) {
  return info.rule == nullptr ? nullptr : info.rule->composed({op, args});
}

// Of an operator whose result is an argument as it is: that argument's. Copies of a gradient have to
// count as the gradient, for which of them autograd makes depends on who else holds it.
std::optional<uint64_t> kept_provenance(const OpInfo& info, absl::Span<const IValue> args) {
  const c10::TensorImpl* to = args[0].unsafeToTensorImpl();
  c10::TensorImpl* from = args[info.keeps_arg].unsafeToTensorImpl();
  if (!is_dtensor(from) || from->dtype() != to->dtype() || from->sizes() != to->sizes()) {
    return std::nullopt;
  }
  return provenance_of(meta_of(from));
}

// detach() of what is under way is so, too: autograd makes one of each gradient that it keeps. False:
// the operator has to run.
bool stays_under_way(const CacheEntry& entry, MeshContext& context, c10::Stack& stack,
                     size_t base) {
  if (!stack[base].isTensor() || c10::InferenceMode::is_enabled()) return false;
  c10::TensorImpl* impl = stack[base].unsafeToTensorImpl();
  if (!defined(impl) || !is_dtensor(impl)) return false;
  const DTensorMeta& meta = meta_of(impl);
  if (meta.part.state() != LocalPart::State::kUnderWay || meta.detour != nullptr ||
      !entry.input_changes.empty() || entry.outputs[0] != meta.spec) {
    return false;
  }
  if (meta.family == nullptr) meta.family = std::make_shared<ViewFamily>();
  at::Tensor result = wrap(meta.part, meta.spec, meta.context);
  meta_of(result).family = meta.family;
  meta_of(result).place = meta.place;
  meta_of(result).came_from(context.provenance.about);
  torch::jit::drop(stack, stack.size() - base);
  torch::jit::push(stack, std::move(result));
  return true;
}

// The operators that it is made of note where their results come from; what it makes by itself, and
// what it draws, has that of the whole.
void run_composed(const c10::OperatorHandle& op, const OpInfo& info, const ComposedRule& rule,
                  MeshContext& context, c10::Stack& stack, size_t base) {
  uint64_t provenance = provenance_of_name(op);
  for_each_tensor(info, absl::MakeConstSpan(stack).subspan(base), [&](size_t, c10::TensorImpl* t) {
    if (defined(t) && is_dtensor(t)) provenance = mix(provenance, provenance_of(meta_of(t)));
  });
  if (info.is_random) {
    provenance = mix(mix(provenance, context.random.state.seed), context.random.state.offset);
  }
  const About about(context, provenance);
  rule.run(op, stack);
  for (size_t i = stack.size() - info.num_returns; i < stack.size(); ++i) {
    if (!stack[i].isTensor() || !stack[i].toTensor().defined()) continue;
    c10::TensorImpl* result = stack[i].unsafeToTensorImpl();
    if (!is_dtensor(result)) continue;
    DTensorMeta& meta = meta_of(result);
    if (meta.provenance == 0 || info.is_random) meta.came_from(mix(provenance, stack.size() - i));
  }
}

}  // namespace

std::optional<Decided> decide_only(const c10::OperatorHandle& op, absl::Span<const IValue> given) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const std::shared_ptr<MeshContext> shared = find_context(op, given);
  MeshContext& context = *shared;
  const OpInfo& info = context.decisions.op_info(op);
  if (composed_rule(op, info, given) != nullptr || info.decompose) return std::nullopt;
  const std::vector<IValue> args = taken_as_equal(op, info, shared, given);
  for_each_tensor(info, args, [&](size_t, c10::TensorImpl* impl) {
    if (defined(impl) && is_dtensor(impl)) synchronise(impl, op.operator_name().name);
  });
  OpCall call = make_call(op, info, args);
  Decided decided{&context, nullptr, std::move(call.inputs), std::move(call.input_arg), {}};
  decided.entry = decide(op, info, context, args, &decided.weighed);
  return decided;
}

void dispatch(const c10::OperatorHandle& op, c10::Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const size_t num_args = op.schema().arguments().size();
  const size_t base = stack->size() - num_args;
  auto args = absl::MakeSpan(*stack).subspan(base);
  // A copy: the arguments that hold it are replaced while the operator runs.
  std::shared_ptr<MeshContext> context = find_context(op, args);
  const OpInfo& info = context->decisions.op_info(op);
  ++context->observation.counters.operators;
  if (!info.writes.empty()) adopt_written(op, info, context, args);
  const OperatorSpan span(*context, op, args);
  if (const ComposedRule* composed = composed_rule(op, info, args)) {
    check_one_mesh(op, info, *context, args);
    check_call(op, info, args);
    for_each_tensor(info, args, [&](size_t, c10::TensorImpl* impl) {
      if (defined(impl) && is_dtensor(impl)) synchronise(impl, op.operator_name().name);
    });
    run_composed(op, info, *composed, *context, *stack, base);
    return;
  }
  if (info.decompose) {
    op.callBoxedForDispatchKey(info.composite_key, *stack);
    return;
  }
  if (info.is_random && info.rule == nullptr) {
    fail(op, absl::StatusCode::kUnimplemented,
         "this random operator has no rule; its numbers would differ from rank to rank");
  }

  CallKey key;
  if (!make_key(op, info, args, key)) {
    adopt_equal(op, info, context, args);
    key.clear();
    make_key(op, info, args, key);
  }
  if (key.numbers > 0) put_off_numbers(op, info, *context, args);
  if (info.shows_values) settle_plain_tensors(*context);
  const bool reaches_host =
      info.shows_values || (info.device_arg >= 0 && args[info.device_arg].isDevice() &&
                            args[info.device_arg].toDevice().is_cpu());
  const uint64_t hash = key.hash();
  const CacheEntry* entry = context->decisions.cache.find(hash, key.words());
  if (entry == nullptr) {
    ++context->observation.counters.cache_misses;
    std::unique_ptr<CacheEntry> made = decide(op, info, *context, args);
    made->key.assign(key.words().begin(), key.words().end());
    made->provenance = provenance_of_call(op, info, args);
    for_each_tensor(info, args, [&](size_t, c10::TensorImpl* impl) {
      if (!defined(impl) || !is_dtensor(impl)) return;
      made->key_specs.push_back(meta_of(impl).spec);
      if (const SpecRef* kept = remembered_spec(meta_of(impl), info.makes_view())) {
        made->key_specs.push_back(*kept);
      }
    });
    entry = context->decisions.cache.insert(hash, std::move(made), context->operator_under_way());
  }
  // Autograd asks for this after we have run, to keep how the view is made of its base: it cannot
  // find the view in the base by strides and offset in memory, as it does for plain tensors.
  if (info.is_view) c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
  uint64_t provenance = mix(key.provenance, entry->provenance);
  if (info.keeps_arg >= 0) provenance = kept_provenance(info, args).value_or(provenance);
  if (info.is_random) {
    provenance = mix(mix(provenance, context->random.state.seed), context->random.state.offset);
  }
  const About about(*context, provenance);  // from here on the entry stays
  if (entry->gathered && info.rule == nullptr) note_gathered(op, *context);
  if (entry->communicates && context->decisions.strict_depth > 0) {
    refuse_implicit(op, *entry, *context, make_call(op, info, args));
  }
  if (info.is_view && info.keeps_arg == 0 && stays_under_way(*entry, *context, *stack, base))
    return;
  const std::shared_ptr<MeshContext> asked = reaches_host ? context : nullptr;  // the call takes it
  if (asked != nullptr && asked->captures.under_way != nullptr)
    asked->before_host_reads();  // refuses
  Runner(op, info, *entry, context, stack, base).run();
  // The collectives of this call, too: an error comes in the place of what it has spoilt.
  if (asked != nullptr) asked->before_host_reads();
}

}  // namespace shardweave::dtensor_internal

TORCH_LIBRARY_IMPL(_, Fake, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&shardweave::dtensor_internal::dispatch>());
}
