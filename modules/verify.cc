#include "shardweave/modules/verify.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <utility>

#include "ATen/ATen.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "c10/core/GradMode.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/distribute.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/modules/module_watch.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;
using modules_internal::ModuleWatch;
using modules_internal::owner_of;
using modules_internal::Step;

constexpr char kVerify[] = "verify";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool sharded(const at::Tensor& tensor) {
  return tensor.defined() && is_dtensor(tensor.unsafeGetTensorImpl());
}

// What operators of one forward have given, by their steps' keys.
class Results final : public ModuleWatch::Listener {
 public:
  void begins(size_t step) override { all.resize(step + 1); }
  void ends(size_t step, const std::vector<at::Tensor>& results) override {
    const c10::AutoGradMode no_grad(false);
    std::vector<at::Tensor> copies;
    for (const at::Tensor& result : results) {
      const bool dense = result.layout() == at::kStrided && !result.is_quantized();
      // Later operators may write it.
      copies.push_back(dense ? result.detach().clone() : at::Tensor());
    }
    all[step] = std::move(copies);
  }
  // By step; nullopt: it has not ended.
  std::vector<std::optional<std::vector<at::Tensor>>> all;
};

// One forward, and what backward has left.
struct Run {
  std::vector<Step> steps;
  std::vector<std::string> descriptions, modules;
  std::vector<std::optional<std::vector<at::Tensor>>> results;  // of steps; nullopt: not ended
  at::Tensor result;
  std::string error;  // what was thrown
};

// What has no values yet.
bool makes_garbage(const Step& step) {
  return step.op.find("empty") != std::string::npos || step.op.find("resize") != std::string::npos;
}

// A gradient of the result that does not favour any of its elements.
at::Tensor seed_for(const at::Tensor& result) {
  at::Tensor seed = result.dim() == 0
                        ? at::ones({}, at::kDouble)
                        : at::arange(result.numel(), at::kDouble).cos().view(result.sizes());
  return seed.to(result.scalar_type());
}

void run_backward(const at::Tensor& result) {
  if (!result.defined() || !result.requires_grad()) return;
  at::Tensor seed = seed_for(result);
  if (sharded(result)) {
    const MeshPtr mesh = mesh_of(result);
    seed = distribute_tensor(seed, mesh, Placements(mesh->mesh().ndim()), {.source = std::nullopt});
  }
  torch::autograd::backward({result}, {seed});
}

Run run_watched(torch::nn::Module& model, const std::function<at::Tensor()>& forward,
                bool catches) {
  Run run;
  Results results;
  ModuleWatch watch(model, results);
  try {
    run.result = forward();
    watch.finish();
  } catch (const std::exception& error) {
    if (!catches) throw;
    run.error = message_of(error);
  }
  run.steps = watch.steps();
  for (size_t i = 0; i < run.steps.size(); ++i) {
    run.descriptions.push_back(watch.describe(i));
    run.modules.push_back(watch.module_of(i));
  }
  run.results = std::move(results.all);
  return run;
}

// One tensor of the sharded model beside the plain model's.
struct Item {
  Verification::Difference about;  // kind, module, what, hint
  at::Tensor got, wanted;          // `got` undefined: the sharded model has not come here
  double floor = 0;                // that the tolerance is measured against, at least
  bool threw = false;              // here
  bool is_result = false;          // of the model: compared in any case
};

// Member by member: where an initializer of an aggregate throws, GCC 12 ends the members before it
// twice.
Item item_about(const char* kind, std::string module, std::string what) {
  Item item;
  item.about.kind = kind;
  item.about.module = std::move(module);
  item.about.what = std::move(what);
  return item;
}

struct Compared {
  bool differs = false;
  double max_abs = 0, max_rel = 0, got = 0, wanted = 0;
  std::vector<int64_t> index;
  std::string reason;
};

double tolerance_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
    case at::kComplexDouble:
      return 1e-8;
    case at::kHalf:
    case at::kComplexHalf:
      return 1e-2;
    case at::kBFloat16:
      return 5e-2;
    default:
      return 1e-4;
  }
}

at::Tensor as_numbers(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()).to(at::kDouble)
                             : tensor.to(at::kDouble);
}

double largest(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return 0;
  const double most = as_numbers(tensor).abs().nan_to_num(0.0, 0.0, 0.0).max().item<double>();
  return std::isfinite(most) ? most : 0;
}

std::string shape_of(const at::Tensor& tensor) {
  return str_cat(c10::toString(tensor.scalar_type()), "[", absl::StrJoin(tensor.sizes(), ", "),
                 "]");
}

// Of plain tensors of one shape.
Compared compare(const at::Tensor& got, const at::Tensor& wanted, double scale, double floor,
                 const std::optional<double>& tolerance) {
  Compared c;
  if (got.numel() == 0) return c;
  const at::Tensor a = as_numbers(got), b = as_numbers(wanted);
  const at::Tensor same = a.eq(b).logical_or(a.isnan().logical_and(b.isnan()));
  // What is not a number here alone, or not finite, is infinitely far away.
  const at::Tensor distance =
      at::where(same, at::zeros_like(a), (a - b).abs().nan_to_num(kInfinity, kInfinity, kInfinity));
  const int64_t at = distance.argmax().item<int64_t>();
  c.max_abs = distance.flatten()[at].item<double>();
  c.got = a.flatten()[at].item<double>();
  c.wanted = b.flatten()[at].item<double>();
  c.max_rel = c.max_abs == 0 ? 0 : scale == 0 ? kInfinity : c.max_abs / scale;
  c.index.resize(static_cast<size_t>(a.dim()));
  for (int64_t d = a.dim(), rest = at; d-- > 0; rest /= a.size(d)) {
    c.index[static_cast<size_t>(d)] = rest % a.size(d);
  }
  const bool exact = !at::isFloatingType(wanted.scalar_type()) && !wanted.is_complex();
  const double allowed = exact ? 0
                               : tolerance.value_or(std::max(tolerance_of(wanted.scalar_type()),
                                                             tolerance_of(got.scalar_type()))) *
                                     std::max(scale, floor);
  c.differs = c.max_abs > allowed;
  return c;
}

// This rank's part of `item.got` beside what it should be.
Compared compare(const Item& item, const std::optional<double>& tolerance) {
  const double scale = largest(item.wanted);
  if (item.got.sizes() != item.wanted.sizes()) {
    return {.differs = true,
            .max_abs = kInfinity,
            .max_rel = kInfinity,
            .reason = str_cat("is ", shape_of(item.got),
                              sharded(item.got) ? "" : ", a plain tensor (a local part?)",
                              "; one device has ", shape_of(item.wanted))};
  }
  if (!sharded(item.got)) return compare(item.got, item.wanted, scale, item.floor, tolerance);
  const DTensorMeta& meta = meta_of(item.got);
  const MeshPtr mesh(meta.context, &meta.context->connected_mesh());
  const at::Tensor wanted = distributed(item.wanted, mesh, meta.spec->layout,
                                        {.source = std::nullopt}, {.name = kVerify});
  return compare(meta.local(), meta_of(wanted).local(), scale, item.floor, tolerance);
}

// What the ranks of a mesh tell each other; of a model without DTensors, this rank alone.
class Ranks {
 public:
  Ranks(std::shared_ptr<MeshContext> context, absl::Duration timeout)
      : context_(std::move(context)), timeout_(timeout) {
    if (context_ == nullptr || context_->mesh().size() == 1) return;
    std::vector<int> all(context_->mesh().ndim());
    std::iota(all.begin(), all.end(), 0);
    everyone_ = &context_->communicator(all);
  }

  int rank() const { return everyone_ == nullptr ? 0 : everyone_->rank(); }

  void reduce(std::vector<int64_t>& values, ReduceOp op) const {
    if (everyone_ == nullptr || values.empty()) return;
    const Buffer buffer = Buffer::of(values.data(), static_cast<int64_t>(values.size()));
    throw_if_error(everyone_->all_reduce(buffer, buffer, op, options()).wait());
  }
  int64_t reduced(int64_t value, ReduceOp op) const {
    std::vector<int64_t> one = {value};
    reduce(one, op);
    return one[0];
  }
  double max(double value) const {
    if (everyone_ == nullptr) return value;
    const Buffer buffer = Buffer::of(&value, 1);
    throw_if_error(everyone_->all_reduce(buffer, buffer, ReduceOp::kMax, options()).wait());
    return value;
  }
  std::string broadcast(std::string text, int root) const {
    if (everyone_ == nullptr) return text;
    auto size = static_cast<int64_t>(text.size());
    throw_if_error(everyone_->broadcast(Buffer::of(&size, 1), root, options()).wait());
    std::vector<uint8_t> bytes(text.begin(), text.end());
    bytes.resize(static_cast<size_t>(size));
    throw_if_error(everyone_->broadcast(Buffer::of(bytes.data(), size), root, options()).wait());
    return {bytes.begin(), bytes.end()};
  }

 private:
  CallOptions options() const { return {.timeout = timeout_, .tag = kVerify}; }

  std::shared_ptr<MeshContext> context_;
  absl::Duration timeout_;
  Communicator* everyone_ = nullptr;
};

using Json = nlohmann::ordered_json;

// JSON has no infinity.
Json number(double value) {
  return std::isfinite(value) ? Json(value)
                              : Json(std::isnan(value) ? "nan"
                                     : value > 0       ? "inf"
                                                       : "-inf");
}
double number(const Json& json) {
  if (json.is_number()) return json.get<double>();
  const auto text = json.get<std::string>();
  return text == "nan" ? std::nan("") : text == "inf" ? kInfinity : -kInfinity;
}

Json json_of(const Verification::Difference& d) {
  return {{"kind", d.kind},
          {"module", d.module},
          {"what", d.what},
          {"seen_at", d.seen_at},
          {"tensor", d.tensor},
          {"reason", d.reason},
          {"index", d.index},
          {"got", number(d.got)},
          {"wanted", number(d.wanted)},
          {"max_abs", number(d.max_abs)},
          {"max_rel", number(d.max_rel)},
          {"rank", d.rank},
          {"before", d.before},
          {"hint", d.hint}};
}

Verification::Difference difference_from(const Json& json) {
  return {.kind = json.at("kind"),
          .module = json.at("module"),
          .what = json.at("what"),
          .seen_at = json.at("seen_at"),
          .tensor = json.at("tensor"),
          .reason = json.at("reason"),
          .index = json.at("index").get<std::vector<int64_t>>(),
          .got = number(json.at("got")),
          .wanted = number(json.at("wanted")),
          .max_abs = number(json.at("max_abs")),
          .max_rel = number(json.at("max_rel")),
          .rank = json.at("rank"),
          .before = json.at("before"),
          .hint = json.at("hint")};
}

Verification::Difference difference_of(const Item& item, const Compared& c, int64_t rank,
                                       int64_t before) {
  Verification::Difference d = item.about;
  if (item.got.defined()) {
    d.tensor = shape_of(item.got);
    if (sharded(item.got)) str_append(&d.tensor, " as ", layout_of(item.got).to_string());
  }
  if (!item.threw) d.reason = c.reason;
  d.index = c.index;
  d.got = c.got;
  d.wanted = c.wanted;
  d.max_abs = c.max_abs;
  d.max_rel = c.max_rel;
  d.rank = rank;
  d.before = before;
  return d;
}

// Members of both models, by their first names.
std::vector<std::pair<Member, at::Tensor>> pairs_of(const torch::nn::Module& model,
                                                    const torch::nn::Module& reference) {
  std::map<std::string, at::Tensor> plain;
  for (const auto& item : reference.named_parameters()) plain[item.key()] = item.value();
  for (const auto& item : reference.named_buffers()) plain[item.key()] = item.value();
  std::vector<std::pair<Member, at::Tensor>> pairs;
  size_t names = 0;
  for (Member& member : members_of(model)) {
    names += member.fqns.size();
    const auto found = plain.find(member.fqns[0]);
    const auto refuse = [&](const std::string& why) {
      throw Error(kVerify,
                  absl::InvalidArgumentError(str_cat("'", member.fqns[0], "' of the model ", why)));
    };
    if (found == plain.end()) refuse("is not in the reference");
    if (sharded(found->second)) refuse("is a DTensor in the reference, too; wanted a plain model");
    if (found->second.sizes() != member.tensor.sizes()) {
      refuse(
          str_cat("is ", shape_of(member.tensor), ", in the reference ", shape_of(found->second)));
    }
    pairs.emplace_back(std::move(member), found->second);
  }
  if (names != plain.size()) {
    throw Error(kVerify,
                absl::InvalidArgumentError(str_cat("the reference has ", plain.size(),
                                                   " parameters and buffers, the model ", names)));
  }
  return pairs;
}

std::string hint_for(const Run& reference, size_t step) {
  for (size_t i = 0; i <= step && i < reference.steps.size(); ++i) {
    if (!reference.steps[i].random) continue;
    return str_cat(
        reference.descriptions[i],
        " draws random numbers, which are others on DTensors: call eval(), or take it out");
  }
  return "";
}

// `error`: what the sharded model has thrown; taken where its place is found.
void add_outputs(const Run& reference, const Run& run, std::string& error, std::vector<Item>& items,
                 int64_t& not_met) {
  std::map<std::string, size_t> places;
  for (size_t i = 0; i < run.results.size(); ++i) places.emplace(run.steps[i].key, i);
  double most = 0;
  for (const auto& results : reference.results) {
    if (!results.has_value()) continue;
    for (const at::Tensor& result : *results) most = std::max(most, largest(result));
  }
  for (size_t i = 0; i < reference.results.size(); ++i) {
    if (!reference.results[i].has_value() || makes_garbage(reference.steps[i])) continue;
    const auto place = places.find(reference.steps[i].key);
    const std::vector<at::Tensor>& wanted_of = *reference.results[i];
    const size_t count = wanted_of.size();
    const bool met = place != places.end() && run.results[place->second].has_value() &&
                     run.results[place->second]->size() == count;
    // As many on every rank, whatever each has met.
    for (size_t r = 0; r < count; ++r) {
      const at::Tensor& wanted = wanted_of[r];
      if (!wanted.defined()) continue;
      Item item = item_about("output", reference.modules[i], reference.descriptions[i]);
      item.about.hint = hint_for(reference, i);
      item.wanted = wanted;
      item.floor = 1e-6 * most;
      if (count > 1) str_append(&item.about.what, ", result ", r, ",");
      if (met) {
        item.got = (*run.results[place->second])[r];
      } else if (!error.empty()) {  // the first that the sharded model has not come to
        item.about.kind = "error";
        item.about.reason = std::exchange(error, "");
        item.threw = true;
      }
      items.push_back(std::move(item));
    }
    not_met += !met;
  }
}

// Those next to the result first: backward comes there first.
void add_gradients(const std::vector<std::pair<Member, at::Tensor>>& pairs, const Run& reference,
                   std::vector<Item>& items) {
  std::vector<std::pair<int64_t, Item>> gradients;
  double most = 0;
  for (const auto& [member, plain] : pairs) {
    if (member.is_buffer || !plain.requires_grad()) continue;
    at::Tensor got = member.tensor.grad(), wanted = plain.grad();
    const c10::AutoGradMode no_grad(false);
    if (!wanted.defined()) wanted = at::zeros_like(plain);
    if (!got.defined()) got = at::zeros_like(member.tensor);
    most = std::max(most, largest(wanted));
    int64_t met = -1;
    for (size_t i = 0; i < reference.steps.size(); ++i) {
      const std::optional<std::string>& layer = reference.steps[i].layer;
      if (!layer.has_value()) continue;
      const std::string owner(owner_of(member.fqns[0]));
      if (*layer == owner || layer->starts_with(owner + " = ")) met = static_cast<int64_t>(i);
    }
    Item item = item_about("gradient", std::string(owner_of(member.fqns[0])),
                           str_cat("the gradient of '", absl::StrJoin(member.fqns, "' = '"), "'"));
    item.about.hint = hint_for(reference, reference.steps.size());
    item.got = std::move(got);
    item.wanted = std::move(wanted);
    gradients.emplace_back(met, std::move(item));
  }
  std::stable_sort(gradients.begin(), gradients.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  for (auto& [met, item] : gradients) {
    item.floor = 1e-2 * most;
    items.push_back(std::move(item));
  }
}

// Sums that are owed are reduced, where all ranks have them.
void reduce_partials(std::vector<Item>& items, const Ranks& ranks, std::vector<int64_t>& met) {
  // 0: this rank has not come there; 1: can be compared as it is; 2: is a sum that is owed.
  std::vector<int64_t> least(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const at::Tensor& got = items[i].got;
    least[i] = !got.defined() ? 0 : sharded(got) && layout_of(got).has_partial() ? 2 : 1;
  }
  std::vector<int64_t> most = least;
  ranks.reduce(least, ReduceOp::kMin);
  ranks.reduce(most, ReduceOp::kMax);
  met = least;
  for (size_t i = 0; i < items.size(); ++i) {
    if (most[i] < 2) continue;
    if (least[i] != 2) {
      if (items[i].got.defined() && sharded(items[i].got) &&
          layout_of(items[i].got).has_partial()) {
        items[i].got = at::Tensor();
      }
      continue;
    }
    const Layout& layout = layout_of(items[i].got);
    Placements whole = layout.placements();
    for (Placement& placement : whole) {
      if (placement.is_partial()) placement = Replicate();
    }
    items[i].got = redistributed(items[i].got,
                                 value_or_throw(Layout::create(std::move(whole), layout.order())),
                                 {.name = kVerify});
  }
}

// Gradients and buffers of a model, to be put back.
class Kept {
 public:
  explicit Kept(torch::nn::Module& model) {
    const c10::AutoGradMode no_grad(false);
    for (const Member& member : members_of(model)) {
      if (member.is_buffer) {
        buffers_.emplace_back(member.tensor, member.tensor.clone());
      } else {
        gradients_.emplace_back(member.tensor, member.tensor.grad());
        member.tensor.mutable_grad() = at::Tensor();
      }
    }
  }
  ~Kept() {
    const c10::AutoGradMode no_grad(false);
    for (auto& [parameter, gradient] : gradients_) parameter.mutable_grad() = gradient;
    try {
      for (auto& [buffer, value] : buffers_) buffer.copy_(value);
    } catch (const std::exception&) {  // a mesh that has failed; what failed is on its way already
    }
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_, buffers_;
};

std::shared_ptr<MeshContext> context_of(const std::vector<std::pair<Member, at::Tensor>>& pairs) {
  for (const auto& [member, plain] : pairs) {
    if (sharded(member.tensor)) return meta_of(member.tensor).context;
  }
  return nullptr;
}

void add_tensors(const std::vector<std::pair<Member, at::Tensor>>& pairs, bool buffers_behind,
                 std::vector<Item>& items) {
  const c10::AutoGradMode no_grad(false);
  for (const auto& [member, plain] : pairs) {
    if (buffers_behind && !member.is_buffer) continue;
    Item item =
        item_about(buffers_behind ? "buffer" : "parameter", std::string(owner_of(member.fqns[0])),
                   str_cat(member.is_buffer ? "the buffer '" : "the parameter '", member.fqns[0],
                           buffers_behind ? "' behind forward" : "' itself, before anything ran,"));
    item.got = member.tensor.detach().clone();
    item.wanted = plain.detach().clone();
    items.push_back(std::move(item));
  }
}

// What all ranks agree on: the first item that differs on any, as the rank has it where it differs
// most.
Verification agreed(Verification v, std::vector<Item>& items,
                    const std::shared_ptr<MeshContext>& context, const VerifyOptions& options,
                    const std::string& error) {
  // A rank that has thrown alone is not where the others wait.
  const Ranks ranks(context, error.empty() ? absl::ZeroDuration() : absl::Seconds(30));
  try {
    const c10::AutoGradMode no_grad(false);
    v.not_met = ranks.reduced(v.not_met, ReduceOp::kMax);
    std::vector<int64_t> met;
    reduce_partials(items, ranks, met);
    const auto is_local_part = [&](const Item& item) {
      return context != nullptr && item.about.kind == "output" && item.got.defined() &&
             !sharded(item.got) && !item.is_result;
    };
    std::vector<Compared> compared(items.size());
    std::vector<bool> on_local_part(items.size());
    auto first = static_cast<int64_t>(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i].threw) {
        compared[i] = {.differs = true, .max_abs = kInfinity};
      } else if (met[i] > 0) {  // on every rank, also behind the first: all do as much
        compared[i] = compare(items[i], options.tolerance);
      }
      // Of a part that is here there is nothing to say; what comes behind it will tell.
      if (is_local_part(items[i])) {
        on_local_part[i] = std::exchange(compared[i].differs, false);
      }
      if (compared[i].differs) first = std::min(first, static_cast<int64_t>(i));
    }
    // What some rank has as a local part only has not been compared.
    std::vector<int64_t> counted(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      counted[i] = met[i] > 0 && !is_local_part(items[i]);
    }
    ranks.reduce(counted, ReduceOp::kMin);
    const int64_t place = ranks.reduced(first, ReduceOp::kMin);
    for (size_t i = 0; i < items.size(); ++i) {
      const std::string& kind = items[i].about.kind;
      if (counted[i] == 0) continue;
      ++(kind == "output" ? v.outputs : kind == "gradient" ? v.gradients : v.parameters);
    }
    if (place == static_cast<int64_t>(items.size())) return v;
    const int64_t before = std::accumulate(counted.begin(), counted.begin() + place, int64_t{0});
    const double mine = first == place ? compared[static_cast<size_t>(place)].max_abs : -1;
    const double most = ranks.max(mine);
    const int64_t who = ranks.reduced(
        mine == most ? ranks.rank() : std::numeric_limits<int64_t>::max(), ReduceOp::kMin);
    std::string text;
    if (who == ranks.rank()) {
      const auto i = static_cast<size_t>(place);
      Verification::Difference d = difference_of(items[i], compared[i], who, before);
      for (size_t j = i; j-- > 0;) {
        if (on_local_part[j]) {
          if (d.seen_at.empty()) d.seen_at = d.what;
          d.what = items[j].about.what;
          d.module = items[j].about.module;
        } else if (sharded(items[j].got) && items[j].about.kind == "output") {
          break;
        }
      }
      text = json_of(d).dump(-1, ' ', false, Json::error_handler_t::replace);
    }
    v.difference =
        difference_from(Json::parse(ranks.broadcast(std::move(text), static_cast<int>(who))));
    return v;
  } catch (const Error& failure) {
    if (error.empty()) throw;
    throw Error(kVerify, absl::Status(failure.status().code(),
                                      str_cat("this rank's model has thrown: ", error,
                                              "; and the ranks could not agree: ",
                                              std::string(failure.status().message()))));
  }
}

}  // namespace

Verification verify(torch::nn::Module& model, const std::function<at::Tensor()>& run,
                    torch::nn::Module& reference, const std::function<at::Tensor()>& run_reference,
                    const VerifyOptions& options) {
  if (options.tolerance.has_value() && !(*options.tolerance >= 0)) {
    throw Error(kVerify, absl::InvalidArgumentError(str_cat("the tolerance is ", *options.tolerance,
                                                            "; wanted 0 or more")));
  }
  const auto pairs = pairs_of(model, reference);
  std::vector<Item> items;
  add_tensors(pairs, /*buffers_behind=*/false, items);
  const Kept kept(model), kept_reference(reference);

  const std::shared_ptr<MeshContext> context = context_of(pairs);
  // A rank whose reference fails says so before the others meet it in the model.
  std::optional<Agreement> agreement;
  if (context != nullptr) agreement.emplace(*context, Cause{.name = kVerify});
  Run plain = run_watched(reference, run_reference, /*catches=*/false);
  if (options.backward) run_backward(plain.result);
  if (agreement.has_value()) agreement->reach({});
  Run ours = run_watched(model, run, /*catches=*/true);
  std::string error = ours.error;
  Verification v;
  add_outputs(plain, ours, error, items, v.not_met);
  if (plain.result.defined()) {
    Item result = item_about("output", "", "the model's result");
    if (ours.result.defined()) result.got = ours.result.detach();
    result.wanted = plain.result.detach();
    result.is_result = true;
    items.push_back(std::move(result));
  }
  add_tensors(pairs, /*buffers_behind=*/true, items);
  if (options.backward && ours.error.empty()) {
    try {
      if (sharded(ours.result) || ours.result.sizes() == plain.result.sizes()) {
        run_backward(ours.result);
        finish_grad_sync(model);
      }
    } catch (const std::exception& thrown) {
      error = ours.error = message_of(thrown);
    }
  }
  // On every rank, whether it has thrown there or not.
  Item behind = item_about("error", "", "what comes behind forward");
  behind.about.reason = error;
  behind.threw = !error.empty();
  items.push_back(std::move(behind));
  if (options.backward) add_gradients(pairs, plain, items);
  for (Item& item : items) {
    if (item.about.kind == "gradient" && !ours.error.empty()) item.got = at::Tensor();
  }
  return agreed(std::move(v), items, context, options, ours.error);
}

std::string Verification::to_string() const {
  const std::string counts = str_cat(parameters, " parameters and buffers, ", outputs,
                                     " results of operators and ", gradients, " gradients");
  const std::string others =
      not_met == 0 ? "" : str_cat("; ", not_met, " operators of the plain model were not met");
  if (ok()) return str_cat("as on one device: ", counts, others, "\n");
  const Difference& d = *difference;
  std::string text = d.seen_at.empty() ? d.what : d.seen_at;
  if (d.kind == "error") {
    str_append(&text, text == "what comes behind forward" ? "" : " is not reached", ": ", d.reason,
               " (rank ", d.rank, ")");
  } else if (!d.reason.empty()) {
    str_append(&text, " differs: on rank ", d.rank, " it ", d.reason);
  } else {
    str_append(&text, " differs: at [", absl::StrJoin(d.index, ", "), "] of its part of ", d.tensor,
               " rank ", d.rank, " has ", absl::StrFormat("%.6g", d.got), ", one device ",
               absl::StrFormat("%.6g", d.wanted), "; largest difference ",
               absl::StrFormat("%.3g", d.max_abs), ", relative ",
               absl::StrFormat("%.3g", d.max_rel));
  }
  if (!d.seen_at.empty()) {
    str_append(&text, "; right before it ", d.what,
               " works on local parts, which cannot be compared");
  }
  if (!d.module.empty() && d.kind == "output" && d.what.find(d.module) == std::string::npos) {
    str_append(&text, "; in module '", d.module, "'");
  }
  str_append(&text, "; what comes before it (", d.before, " tensors) is the same", others, "\n");
  if (!d.hint.empty()) str_append(&text, d.hint, "\n");
  return text;
}

std::string Verification::to_json() const {
  Json json = {{"ok", ok()}};
  if (!ok()) json["difference"] = json_of(*difference);
  json["parameters"] = parameters;
  json["outputs"] = outputs;
  json["gradients"] = gradients;
  json["not_met"] = not_met;
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

namespace modules_internal {

std::vector<at::Tensor> whole(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> plain;
  for (const at::Tensor& tensor : tensors) {
    if (!sharded(tensor)) {
      plain.push_back(tensor);
      continue;
    }
    const c10::AutoGradMode no_grad(false);
    plain.push_back(full_tensor(tensor).clone().set_requires_grad(tensor.requires_grad()));
  }
  return plain;
}

void copy_values(const torch::nn::Module& from, torch::nn::Module& to) {
  const c10::AutoGradMode no_grad(false);
  for (auto& [member, plain] : pairs_of(from, to)) {
    plain.copy_(sharded(member.tensor) ? full_tensor(member.tensor) : member.tensor);
  }
}

}  // namespace modules_internal
}  // namespace shardweave
