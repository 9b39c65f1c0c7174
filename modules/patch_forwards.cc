// Patches of forwards by the names of their modules.
#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/fqn_pattern.h"
#include "shardweave/modules/apply_plugins.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/plugin.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace modules_internal {
namespace {

[[noreturn]] void refuse_patch(absl::StatusCode code, const std::string& why) {
  throw Error("patch_forwards", absl::Status(code, why));
}

// A module that a pattern names; null: its forward cannot be patched.
ForwardHook* patchable(torch::nn::Module& module) {
  auto* const hook = dynamic_cast<ForwardHook*>(&module);
  return hook != nullptr && hook->patch_tensors(nullptr) ? hook : nullptr;
}

struct NamedHook {
  ForwardHook* hook;
  std::string fqn;
};

// "here 'layers.0.mlp', 'layers.1.mlp' and 4 more can be patched".
std::string what_can_be(torch::nn::Module& module) {
  constexpr size_t kShown = 4;
  std::vector<std::string> names;
  for (const auto& item : module.named_modules()) {
    if (patchable(*item.value()) != nullptr) names.push_back(str_cat("'", item.key(), "'"));
  }
  if (names.empty()) return "; nothing here can be patched";
  const size_t more = names.size() - std::min(names.size(), kShown);
  names.resize(names.size() - more);
  return str_cat("; here ", absl::StrJoin(names, ", "),
                 more > 0 ? str_cat(" and ", more, " more") : "", " can be patched");
}

std::vector<NamedHook> named_by(torch::nn::Module& module, const FqnPattern& pattern,
                                std::string_view text) {
  std::vector<NamedHook> found;
  std::vector<std::string> names;
  const auto visit = [&](const std::string& fqn, torch::nn::Module& m) {
    names.push_back(fqn);
    if (!pattern.matches(fqn)) return;
    const bool again = std::any_of(found.begin(), found.end(), [&](const NamedHook& other) {
      return other.hook == dynamic_cast<ForwardHook*>(&m);
    });
    if (again) return;  // by its first name
    found.push_back({patchable(m), fqn});
    if (found.back().hook != nullptr) return;
    const auto* const hook = dynamic_cast<const ForwardHook*>(&m);
    const std::string what = fqn.empty() ? str_cat("the model itself (", m.name(), ")")
                                         : str_cat("'", fqn, "' (", m.name(), ")");
    refuse_patch(absl::StatusCode::kFailedPrecondition,
                 str_cat("the forward of ", what,
                         hook == nullptr
                             ? " is called where nobody can be in between; in C++ make it as "
                               "Hooked<Impl> (hooked.h), or patch a module that calls it"
                             : " takes or gives something else than tensors, or is the host's own "
                               "code",
                         what_can_be(module)));
  };
  visit("", module);
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    visit(item.key(), *item.value());
  }
  if (found.empty()) {
    refuse_patch(absl::StatusCode::kNotFound,
                 str_cat("no module is called '", text, "'", pattern.suggestion(names)));
  }
  return found;
}

// A patch that runs, in this thread. One that calls its module, and not what it was given, would come
// back to itself without end.
class RunningPatch {
 public:
  RunningPatch(const PatchedRun* run, const torch::nn::Module* module, const std::string& fqn) {
    const std::pair<const void*, const void*> mine = {run, module};
    if (std::find(running().begin(), running().end(), mine) != running().end()) {
      refuse_patch(absl::StatusCode::kFailedPrecondition,
                   str_cat("the patch of the forward of '", fqn,
                           "' calls that forward again, and so itself; what would have run without "
                           "it is PatchedCall::forward, in C swv_function_context_original"));
    }
    running().push_back(mine);
  }
  ~RunningPatch() { running().pop_back(); }
  RunningPatch(const RunningPatch&) = delete;
  RunningPatch& operator=(const RunningPatch&) = delete;

 private:
  static std::vector<std::pair<const void*, const void*>>& running() {
    thread_local std::vector<std::pair<const void*, const void*>> patches;
    return patches;
  }
};

}  // namespace

void check_inputs_of_patch(const std::vector<at::Tensor>& given, size_t wanted) {
  if (given.size() == wanted) return;
  refuse_patch(absl::StatusCode::kInvalidArgument,
               str_cat("the forward that is patched was called with ", given.size(),
                       " inputs; wanted ", wanted));
}

void check_results_of_patch(const std::vector<at::Tensor>& given, size_t wanted) {
  bool defined = true;
  for (const at::Tensor& tensor : given) defined &= tensor.defined();
  if (given.size() == wanted && defined) return;
  refuse_patch(
      absl::StatusCode::kInvalidArgument,
      defined ? str_cat("the patch of a forward gave ", given.size(), " results; wanted ", wanted)
              : std::string("the patch of a forward gave an undefined result"));
}

}  // namespace modules_internal

void patch_forwards(torch::nn::Module& module, std::string_view pattern, PatchedRun run) {
  using namespace modules_internal;
  if (run == nullptr) {
    refuse_patch(absl::StatusCode::kInvalidArgument, "the patch is empty; wanted a function");
  }
  absl::StatusOr<FqnPattern> parsed = FqnPattern::parse(pattern);
  if (!parsed.ok()) {
    refuse_patch(absl::StatusCode::kInvalidArgument,
                 str_cat("pattern '", pattern, "' ", std::string(parsed.status().message())));
  }
  const auto shared = std::make_shared<const PatchedRun>(std::move(run));
  for (const NamedHook& named : named_by(module, *parsed, pattern)) {
    named.hook->patch_tensors(
        [shared, fqn = named.fqn](torch::nn::Module& m, const TensorForward& forward,
                                  const std::vector<at::Tensor>& inputs, size_t num_results) {
          const RunningPatch running(shared.get(), &m, fqn);
          return (*shared)({m, fqn, inputs, num_results, forward});
        });
  }
}

}  // namespace shardweave
