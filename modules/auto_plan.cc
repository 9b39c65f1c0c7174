#include "shardweave/modules/auto_plan.h"

#include <algorithm>
#include <map>
#include <new>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/observe/text_table.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/parallel_style.h"
#include "shardweave/modules/sharding_plan_json.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using modules_internal::ForwardHook;

constexpr char kFunction[] = "auto_plan";

bool is_number(std::string_view part) {
  return !part.empty() &&
         std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// "h.0.attn": "h.*.attn".
std::string without_numbers(const std::string& fqn) {
  std::vector<std::string> parts = absl::StrSplit(fqn, '.');
  for (std::string& part : parts) {
    if (is_number(part)) part = "*";
  }
  return absl::StrJoin(parts, ".");
}

bool has_number(const std::string& fqn) {
  return without_numbers(fqn) != fqn;
}

// --- what there is to decide ---------------------------------------------------------------------

struct StyleOption {
  std::string name;
  std::optional<ParallelStyle> style;  // nullopt: whole, as it comes
  // Whether it is what this group has where all are in pairs, or all along the sequence.
  bool in_pairs = false, along_sequence = false;
  std::string obstacle = {};
};

struct GroupToDecide {
  std::string name;
  std::vector<std::string> members;  // FQNs
  std::vector<StyleOption> options;
  // Embeddings: what they give is brought elsewhere where it is needed, for a table of positions may
  // be read without its forward.
  bool only_parameters = false;
};

// The groups of a model, in the order of its modules.
class DecisionFinder {
 public:
  DecisionFinder(const torch::nn::Module& model, const DeviceMesh& mesh,
                 const AutoPlanOptions& options)
      : model_(model), mesh_(mesh), options_(options) {
    modules_.emplace("", &model);
    order_.emplace_back("");
    for (const auto& item : model.named_modules("", /*include_self=*/false)) {
      modules_.emplace(item.key(), item.value().get());
      order_.push_back(item.key());
    }
    for (const std::string& fqn : order_) visit(fqn);
  }

  std::vector<GroupToDecide> take() { return std::move(decisions_); }

 private:
  // As styles, which refuse by an error.
  std::optional<ShardingPlan> plan_of(const std::string& fqn, const ParallelStyle& style,
                                      std::string* why = nullptr) const {
    try {
      return sharding_plan(model_, mesh_, StylePlan{{fqn, style}}, options_.tp_mesh_dim);
    } catch (const Error& error) {
      if (error.status().code() == absl::StatusCode::kNotFound) throw;  // of the mesh
      if (why != nullptr) *why = std::string(error.status().message());
      return std::nullopt;
    }
  }

  std::set<std::string> cut_in_pairs(const std::string& fqn) const {
    std::set<std::string> cut;
    if (const std::optional<ShardingPlan> plan = plan_of(fqn, PairwiseParallel())) {
      for (const PlanEntry& entry : plan->parameter) cut.insert(entry.pattern);
    }
    return cut;
  }

  // Whether it has a pair that is none of its children's.
  bool is_unit(const std::string& fqn) const {
    const std::set<std::string> all = cut_in_pairs(fqn);
    if (all.empty()) return false;
    std::set<std::string> of_children;
    for (const auto& item : modules_.at(fqn)->named_children()) {
      of_children.merge(cut_in_pairs(fqn.empty() ? item.key() : str_cat(fqn, ".", item.key())));
    }
    return all != of_children;
  }

  // What modules have in common that are decided together.
  std::string kind_of(const std::string& fqn) const {
    const torch::nn::Module& module = *modules_.at(fqn);
    std::string kind = str_cat(without_numbers(fqn), "|", module.name());
    for (const auto& item : module.named_parameters()) {
      str_append(&kind, "|", item.key(), " ", absl::StrJoin(item.value().sizes(), ","));
    }
    return kind;
  }

  void visit(const std::string& fqn) {
    const bool is_inner = std::any_of(units_.begin(), units_.end(), [&](const std::string& unit) {
      return unit.empty() ||
             (fqn.starts_with(unit) && fqn.size() > unit.size() && fqn[unit.size()] == '.');
    });
    if (is_inner) return;
    const std::string kind = kind_of(fqn);
    if (const auto known = known_.find(kind); known != known_.end()) {
      const auto& [decision, unit] = known->second;
      if (unit) units_.push_back(fqn);
      if (decision.has_value()) decisions_[*decision].members.push_back(fqn);
      return;
    }
    const bool unit = is_unit(fqn);
    if (unit) units_.push_back(fqn);
    std::vector<StyleOption> options = unit ? of_unit(fqn) : of_layer(fqn);
    std::optional<size_t> index;
    if (!options.empty()) index = add(without_numbers(fqn), fqn, std::move(options));
    known_.emplace(kind, std::pair(index, unit));
    if (!unit) add_stream(fqn);
  }

  size_t add(std::string name, const std::string& fqn, std::vector<StyleOption> options) {
    for (StyleOption& option : options) {
      if (option.style.has_value()) plan_of(fqn, *option.style, &option.obstacle);
    }
    // Of single layers the second is what is usual for a linear one, the third for an embedding.
    const StyleOption& last = options.back();
    const bool embedding = last.in_pairs && last.style.has_value() &&
                           std::holds_alternative<RowwiseParallel>(*last.style);
    decisions_.push_back({std::move(name), {fqn}, std::move(options), embedding});
    return decisions_.size() - 1;
  }

  std::vector<StyleOption> of_unit(const std::string& fqn) const {
    std::vector<StyleOption> options = {{"replicate", std::nullopt}};
    const auto add_pairs = [&](int64_t heads, const std::string& how) {
      const PairwiseParallel pairs{.output = {}, .heads = heads};
      const PairwiseParallel along{.output = Shard(options_.sequence_dim), .heads = heads};
      options.push_back({str_cat("PairwiseParallel", how), pairs, true, false});
      options.push_back(
          {str_cat("PairwiseParallel", how, ", along the sequence"), along, false, true});
    };
    add_pairs(options_.heads, "");
    // Queries that share keys and values: all queries of one key together, and that whole.
    const int64_t sharing = options_.heads == 0 ? queries_per_key(fqn) : 1;
    if (sharing > 1) {
      const auto one = plan_of(fqn, PairwiseParallel());
      const auto other = plan_of(fqn, PairwiseParallel{.output = {}, .heads = sharing});
      if (one && other && to_json(*one) != to_json(*other)) add_pairs(sharing, ", keys whole");
    }
    return options;
  }

  // How many times the outputs of its smallest linear layer are in those of its largest; 0: not known.
  int64_t queries_per_key(const std::string& fqn) const {
    int64_t least = 0, most = 0;
    for (const auto& child : modules_.at(fqn)->children()) {
      const auto parameters = child->named_parameters(/*recurse=*/false);
      const at::Tensor* weight = parameters.find("weight");
      if (weight == nullptr || weight->dim() != 2) continue;
      least = least == 0 ? weight->size(0) : std::min(least, weight->size(0));
      most = std::max(most, weight->size(0));
    }
    return least > 0 && most % least == 0 ? most / least : 0;
  }

  std::vector<StyleOption> of_layer(const std::string& fqn) {
    const torch::nn::Module& module = *modules_.at(fqn);
    if (!module.children().empty()) return {};
    for (const auto& item : module.named_parameters()) {
      // Tied: decided where it came first.
      if (!seen_.insert(item.value().unsafeGetTensorImpl()).second) return {};
    }
    if (const std::optional<ShardingPlan> plan = plan_of(fqn, RowwiseParallel())) {
      // The words of an embedding, the outputs of a linear layer are what is usually cut.
      const bool embedding =
          std::none_of(plan->forward.begin(), plan->forward.end(), [](const ForwardEntry& entry) {
            const NamedPlacements* named = entry.placements.named();
            return entry.pattern.ends_with(".input") && named != nullptr &&
                   std::any_of(named->begin(), named->end(),
                               [](const auto& dim) { return dim.second.is_shard(); });
          });
      return {{"replicate", std::nullopt},
              {"ColwiseParallel", ColwiseParallel(), !embedding, !embedding},
              {"RowwiseParallel", RowwiseParallel(), embedding, embedding}};
    }
    const auto parameters = module.named_parameters(/*recurse=*/false);
    const at::Tensor* weight = parameters.find("weight");
    if (weight == nullptr || weight->dim() != 1 || has_number(fqn)) return {};
    return {{"as it comes", std::nullopt, true, false},
            {"output whole", PrepareModuleOutput{.outputs = {Replicate()}}, false, true}};
  }

  // Where activations come to the first of equal layers.
  void add_stream(const std::string& fqn) {
    const size_t dot = fqn.rfind('.');
    const std::string outer = dot == std::string::npos ? "" : fqn.substr(0, dot);
    if (fqn.substr(dot + 1) != "0" || has_number(outer)) return;
    if (dynamic_cast<const ForwardHook*>(modules_.at(fqn)) == nullptr) return;
    add(str_cat(fqn, ".input"), fqn,
        {{"as it comes", std::nullopt},
         {"whole", PrepareModuleInput{.inputs = {Replicate()}, .by_name = {}}, true, false},
         {"along the sequence",
          PrepareModuleInput{.inputs = {Shard(options_.sequence_dim)}, .by_name = {}}, false,
          true}});
  }

  const torch::nn::Module& model_;
  const DeviceMesh& mesh_;
  const AutoPlanOptions& options_;
  std::map<std::string, const torch::nn::Module*> modules_;
  std::vector<std::string> order_;  // outer modules before inner ones
  std::vector<std::string> units_;
  std::set<const c10::TensorImpl*> seen_;
  // By kind: the decision, and whether it is a unit.
  std::map<std::string, std::pair<std::optional<size_t>, bool>> known_;
  std::vector<GroupToDecide> decisions_;
};

// --- a plan with few entries ---------------------------------------------------------------------

// Exact names become one pattern where their placements are the same and it matches nothing else.
class PlanNames {
 public:
  explicit PlanNames(const torch::nn::Module& model) {
    for (const dtensor_internal::Member& member : dtensor_internal::members_of(model)) {
      for (const std::string& fqn : member.fqns) ++parameters_[without_numbers(fqn)];
    }
    for (const auto& item : model.named_modules("", /*include_self=*/false)) {
      ++modules_[without_numbers(item.key())];
      module_names_.insert(item.key());
    }
    ++modules_[""];  // the model itself, which "*" matches, too
  }

  ShardingPlan shortened(const ShardingPlan& plan) const {
    ShardingPlan result;
    result.parameter = shortened(plan.parameter, [&](const std::string& pattern) {
      return std::pair(without_numbers(pattern), stands_for(parameters_, without_numbers(pattern)));
    });
    result.forward = shortened(plan.forward, [&](const std::string& pattern) {
      const size_t end = std::max(find_part(pattern, ".input"), find_part(pattern, ".output"));
      const std::string module = pattern.substr(0, end);
      if (!module_names_.contains(module)) return std::pair(pattern, int64_t{1});
      return std::pair(str_cat(without_numbers(module), pattern.substr(end)),
                       stands_for(modules_, without_numbers(module)));
    });
    return result;
  }

 private:
  static size_t find_part(const std::string& pattern, const char* part) {
    const size_t at = pattern.rfind(part);
    return at == std::string::npos ? 0 : at;
  }
  // PlanNames that the pattern matches, wildcards matching dots too.
  static int64_t stands_for(const std::map<std::string, int64_t>& all, const std::string& pattern) {
    const absl::StatusOr<FqnPattern> glob = FqnPattern::parse(pattern);
    int64_t count = 0;
    for (const auto& [name, times] : all) {
      if (glob.ok() && glob->matches(name)) count += times;
    }
    return count;
  }
  template <typename Entries, typename Pattern>
  static Entries shortened(const Entries& entries, const Pattern& pattern_of) {
    std::map<std::string, std::vector<size_t>> groups;
    std::vector<std::pair<std::string, int64_t>> patterns;
    for (size_t i = 0; i < entries.size(); ++i) {
      patterns.push_back(pattern_of(entries[i].pattern));
      groups[patterns.back().first].push_back(i);
    }
    Entries result;
    for (size_t i = 0; i < entries.size(); ++i) {
      const std::vector<size_t>& group = groups[patterns[i].first];
      const bool fits = static_cast<int64_t>(group.size()) == patterns[i].second &&
                        std::all_of(group.begin(), group.end(), [&](size_t j) {
                          return entries[j].placements == entries[i].placements;
                        });
      if (!fits) {
        result.push_back(entries[i]);
      } else if (group.front() == i) {
        result.push_back({patterns[i].first, entries[i].placements});
      }
    }
    return result;
  }

  std::map<std::string, int64_t> parameters_, modules_;  // names without numbers, how many
  std::set<std::string> module_names_;
};

// --- the search ----------------------------------------------------------------------------------

using PlanChoices = std::vector<size_t>;  // an option of each decision

struct MeasuredPlan {
  ShardingPlan plan;
  std::optional<PlanCost> cost;  // nullopt: it cannot be
  std::string obstacle;
};

class PlanSearch {
 public:
  PlanSearch(const MakeModel& make, const torch::nn::Module& model, const DeviceMesh& mesh,
             const CostModel& cost_model, const AutoPlanOptions& options)
      : make_(make),
        model_(model),
        mesh_(mesh),
        cost_model_(cost_model),
        options_(options),
        names_(model),
        decisions_(DecisionFinder(model, mesh, options).take()) {}

  AutoPlan run() {
    best_ = PlanChoices(decisions_.size(), 0);
    measure(best_, /*must_be=*/true);
    int64_t combinations = 1;
    for (const GroupToDecide& d : decisions_) {
      combinations = std::min<int64_t>(combinations * static_cast<int64_t>(d.options.size()),
                                       options_.max_evaluations + 1);
    }
    if (combinations <= options_.max_evaluations) {
      all_of_them();
    } else {
      from_seeds();
    }
    return result();
  }

 private:
  // Less is better: what is over the limit, the time, then what is sent, the memory, and how much is
  // cut at all.
  auto rank_of(const PlanChoices& choices, const PlanCost& cost) const {
    const int64_t over = options_.memory_limit.has_value()
                             ? std::max<int64_t>(0, cost.memory() - *options_.memory_limit)
                             : 0;
    const auto cut = static_cast<int64_t>(choices.size()) -
                     std::count(choices.begin(), choices.end(), size_t{0});
    return std::tuple(over, cost.seconds(), cost.bytes_sent(), cost.memory(), cut);
  }
  bool is_better(const PlanChoices& a, const PlanChoices& b) {
    const MeasuredPlan &x = measured_.at(a), &y = measured_.at(b);
    return x.cost.has_value() && rank_of(a, *x.cost) < rank_of(b, *y.cost);
  }

  bool may_go_on() const {
    return static_cast<int64_t>(measured_.size()) < options_.max_evaluations;
  }

  // False: there is no time left for it.
  bool measure(const PlanChoices& choices, bool must_be = false) {
    if (measured_.contains(choices)) return true;
    if (!must_be && !may_go_on()) {
      finished_ = false;
      return false;
    }
    MeasuredPlan result;
    StylePlan styles;
    std::vector<std::string> only_parameters;
    for (size_t d = 0; d < decisions_.size(); ++d) {
      const StyleOption& option = decisions_[d].options[choices[d]];
      if (!option.style.has_value()) continue;
      for (const std::string& fqn : decisions_[d].members) {
        styles.push_back({fqn, *option.style});
        if (decisions_[d].only_parameters) only_parameters.push_back(str_cat(fqn, "."));
      }
    }
    try {
      ShardingPlan plan = sharding_plan(model_, mesh_, styles, options_.tp_mesh_dim);
      std::erase_if(plan.forward, [&](const ForwardEntry& entry) {
        return std::any_of(only_parameters.begin(), only_parameters.end(),
                           [&](const std::string& of) { return entry.pattern.starts_with(of); });
      });
      result.plan = names_.shortened(plan);
      result.cost = plan_cost(make_, mesh_, result.plan, cost_model_, options_.cost);
    } catch (const std::bad_alloc&) {
      throw;  // says nothing of the plan
    } catch (const std::exception& error) {
      if (must_be) throw;
      result.obstacle = message_of(error);
    }
    measured_.emplace(choices, std::move(result));
    if (is_better(choices, best_)) best_ = choices;
    if (options_.progress != nullptr) {
      options_.progress(static_cast<int64_t>(measured_.size()), *measured_.at(best_).cost);
    }
    return true;
  }

  bool is_possible(size_t decision, size_t option) const {
    return decisions_[decision].options[option].obstacle.empty();
  }

  // Measures what differs from `from` in one more decision, from `decision` on; `f` is told of each.
  template <typename F>
  void with_one_changed(const PlanChoices& from, size_t decision, const F& f) {
    for (size_t d = decision; d < decisions_.size(); ++d) {
      for (size_t o = 0; o < decisions_[d].options.size(); ++o) {
        if (o == from[d] || !is_possible(d, o)) continue;
        PlanChoices changed = from;
        changed[d] = o;
        f(changed, d);
      }
    }
  }

  void all_of_them() {
    PlanChoices choices(decisions_.size(), 0);
    for (;;) {
      size_t d = 0;
      for (; d < choices.size(); ++d) {
        if (++choices[d] < decisions_[d].options.size()) break;
        choices[d] = 0;
      }
      if (d == choices.size()) return;
      bool possible = true;
      for (size_t i = 0; i < choices.size(); ++i) possible &= is_possible(i, choices[i]);
      if (possible) measure(choices);
    }
  }

  void from_seeds() {
    for (const bool layers_too : {false, true}) {
      for (bool StyleOption::*seed : {&StyleOption::in_pairs, &StyleOption::along_sequence}) {
        PlanChoices choices(decisions_.size(), 0);
        for (size_t d = 0; d < decisions_.size(); ++d) {
          const std::vector<StyleOption>& options = decisions_[d].options;
          // Single layers come in only where a seed has all of them.
          const bool layer = options.back().style.has_value() &&
                             std::holds_alternative<RowwiseParallel>(*options.back().style);
          for (size_t o = 0; o < options.size() && (layers_too || !layer); ++o) {
            if (options[o].*seed && is_possible(d, o)) choices[d] = o;
          }
        }
        measure(choices);
      }
    }
    for (;;) {
      const PlanChoices from = best_;
      with_one_changed(from, 0, [&](const PlanChoices& changed, size_t d) {
        // From the best so far: what helped stays.
        PlanChoices next = best_;
        next[d] = changed[d];
        measure(next);
      });
      if (best_ != from && may_go_on()) continue;
      with_one_changed(from, 0, [&](const PlanChoices& one, size_t d) {
        with_one_changed(one, d + 1, [&](const PlanChoices& two, size_t /*d*/) {
          if (best_ == from) measure(two);
        });
      });
      if (best_ == from) return;
      if (may_go_on()) continue;
      finished_ = false;
      return;
    }
  }

  AutoPlan result() {
    const PlanCost& cost = *measured_.at(best_).cost;
    if (options_.memory_limit.has_value() && cost.memory() > *options_.memory_limit) {
      throw Error(kFunction,
                  absl::ResourceExhaustedError(str_cat(
                      "no plan of ", measured_.size(), " on ", mesh_.to_string(), " keeps to ",
                      *options_.memory_limit, " bytes for a rank; the smallest takes ",
                      cost.memory(), ": ", cost.parameters, " of parameters, ", cost.gradients,
                      " of gradients, ", cost.optimizer, " of the optimizer, ", cost.activations,
                      " of activations and ", cost.buffers, " of buffers")));
    }
    AutoPlan found{.plan = measured_.at(best_).plan, .cost = cost};
    for (size_t d = 0; d < decisions_.size(); ++d) {
      const GroupToDecide& decision = decisions_[d];
      AutoPlan::Group group{.modules = decision.name,
                            .count = static_cast<int64_t>(decision.members.size()),
                            .choices = {},
                            .chosen = best_[d]};
      std::optional<PlanChoices> next;
      for (size_t o = 0; o < decision.options.size(); ++o) {
        AutoPlan::Choice& choice = group.choices.emplace_back();
        choice.style = decision.options[o].name;
        choice.obstacle = decision.options[o].obstacle;
        PlanChoices with = best_;
        with[d] = o;
        const auto it = measured_.find(with);
        if (it == measured_.end()) continue;
        choice.cost = it->second.cost;
        choice.obstacle = it->second.obstacle;
        if (o == best_[d] || !choice.cost.has_value()) continue;
        if (next.has_value() && !is_better(with, *next)) continue;
        next = with;
        group.next_best = o;
      }
      found.groups.push_back(std::move(group));
    }
    found.evaluations = static_cast<int64_t>(measured_.size());
    found.finished = finished_;
    return found;
  }

  const MakeModel& make_;
  const torch::nn::Module& model_;
  const DeviceMesh& mesh_;
  const CostModel& cost_model_;
  const AutoPlanOptions& options_;
  const PlanNames names_;
  const std::vector<GroupToDecide> decisions_;
  std::map<PlanChoices, MeasuredPlan> measured_;
  PlanChoices best_;
  bool finished_ = true;
};

void check_options(const AutoPlanOptions& options) {
  const auto wrong = [](const std::string& what) {
    throw Error(kFunction, absl::InvalidArgumentError(what));
  };
  if (options.max_evaluations < 1) {
    wrong(str_cat("max_evaluations is ", options.max_evaluations, "; wanted 1 or more"));
  }
  if (options.sequence_dim < 0) {
    wrong(str_cat("sequence_dim is ", options.sequence_dim, "; wanted 0 or more"));
  }
  if (options.heads < 0) wrong(str_cat("heads is ", options.heads, "; wanted 0 or more"));
  if (options.memory_limit.has_value() && *options.memory_limit < 0) {
    wrong(str_cat("memory_limit is ", *options.memory_limit, " bytes; wanted 0 or more"));
  }
}

}  // namespace

AutoPlan auto_plan(const MakeModel& make, const DeviceMesh& mesh, const CostModel& model,
                   const AutoPlanOptions& options) {
  check_options(options);
  StepModel made;
  deferred_init([&] { made = make(); });
  if (made.module == nullptr) {
    throw Error(kFunction, absl::InvalidArgumentError("make() gives a module that is null"));
  }
  return PlanSearch(make, *made.module, mesh, model, options).run();
}

std::string AutoPlan::to_string() const {
  dtensor_internal::TextTable table({"modules", "count", "choice", "seconds", "bytes sent",
                                     "memory", "next best", "seconds", "bytes sent", "memory"},
                                    /*right_aligned=*/{1, 3, 4, 5, 7, 8, 9});
  std::string refused;
  for (const Group& group : groups) {
    std::vector<std::string> row = {group.modules, str_cat(group.count)};
    for (const std::optional<size_t>& of : {std::optional(group.chosen), group.next_best}) {
      const Choice* choice = of.has_value() ? &group.choices[*of] : nullptr;
      row.push_back(choice != nullptr ? choice->style : "");
      const bool known = choice != nullptr && choice->cost.has_value();
      row.push_back(known ? str_cat(choice->cost->seconds()) : "");
      row.push_back(known ? str_cat(choice->cost->bytes_sent()) : "");
      row.push_back(known ? str_cat(choice->cost->memory()) : "");
    }
    table.add(std::move(row));
    for (const Choice& choice : group.choices) {
      if (choice.obstacle.empty()) continue;
      str_append(&refused, group.modules, ": no ", choice.style, ": ", choice.obstacle, "\n");
    }
  }
  return str_cat(table.to_string(), refused, cost.to_string(), evaluations, " plans measured",
                 finished ? "" : ", as many as were allowed: there may be better ones", "\n");
}

std::string AutoPlan::to_json() const {
  const auto cost_of = [](const PlanCost& c) { return nlohmann::ordered_json::parse(c.to_json()); };
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const Group& group : groups) {
    nlohmann::ordered_json choices = nlohmann::ordered_json::array();
    for (const Choice& choice : group.choices) {
      choices.push_back(
          {{"style", choice.style},
           {"cost", choice.cost.has_value() ? cost_of(*choice.cost) : nlohmann::ordered_json()},
           {"obstacle", choice.obstacle}});
    }
    all.push_back({{"modules", group.modules},
                   {"count", group.count},
                   {"chosen", group.choices[group.chosen].style},
                   {"choices", std::move(choices)}});
  }
  return nlohmann::ordered_json({{"plan", nlohmann::ordered_json::parse(shardweave::to_json(plan))},
                                 {"cost", cost_of(cost)},
                                 {"evaluations", evaluations},
                                 {"finished", finished},
                                 {"groups", std::move(all)}})
      .dump();
}

}  // namespace shardweave
