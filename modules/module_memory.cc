#include "shardweave/modules/module_memory.h"

#include <map>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "c10/core/StorageImpl.h"
#include "c10/util/intrusive_ptr.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/observe/text_table.h"
#include "shardweave/modules/module_watch.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;
using modules_internal::ModuleWatch;
using modules_internal::owner_of;

int64_t local_bytes(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  int64_t elements = tensor.numel();
  if (is_dtensor(tensor.unsafeGetTensorImpl())) {
    elements = 1;
    for (const int64_t size : meta_of(tensor).spec->local_sizes) elements *= size;
  }
  return elements * static_cast<int64_t>(tensor.element_size());
}

// Sees the memory of every tensor that operators make, and does not keep it alive.
class Activations final : public ModuleWatch::Listener {
 public:
  bool wants_inner() const override { return true; }
  void inner_begins(absl::Span<const at::Tensor> arguments) override {
    for (const at::Tensor& argument : arguments) see(argument, kThereBefore);  // nobody made it
  }
  void inner_ends(size_t step, absl::Span<const at::Tensor> results) override {
    for (const at::Tensor& result : results) see(result, static_cast<int64_t>(step));
  }

  // Bytes that are in memory still, by step.
  std::map<int64_t, int64_t> alive() const {
    std::map<int64_t, int64_t> bytes;
    for (const auto& [storage, made] : seen_) {
      if (made.second == kThereBefore) continue;
      const auto held = made.first.lock();
      if (held) bytes[made.second] += static_cast<int64_t>(held->nbytes());
    }
    return bytes;
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  static constexpr int64_t kThereBefore = -1;

  void see(const at::Tensor& tensor, int64_t step) {
    const at::Tensor it = plain(tensor);
    if (!it.defined() || !it.has_storage()) return;
    c10::StorageImpl* storage = it.storage().unsafeGetStorageImpl();
    seen_.try_emplace(storage, it.storage().getWeakStorageImpl(), step);
  }

  // The plain tensor that has the memory; undefined: there is none, or not yet.
  static at::Tensor plain(const at::Tensor& tensor) {
    if (!is_dtensor(tensor.unsafeGetTensorImpl())) {
      return tensor.has_storage() ? tensor : at::Tensor();
    }
    const LocalPart& part = meta_of(tensor).part;
    return part.state() == LocalPart::State::kReady ? part.get() : at::Tensor();
  }

  // A weak pointer keeps the address from being given out again.
  std::unordered_map<const c10::StorageImpl*, std::pair<Weak, int64_t>> seen_;
};

}  // namespace

ModuleMemory module_memory(torch::nn::Module& model, const std::function<at::Tensor()>& forward) {
  ModuleMemory memory;
  std::map<std::string, size_t, std::less<>> places;
  const auto row = [&](std::string_view module) -> ModuleMemory::Row& {
    const auto [it, is_new] = places.try_emplace(std::string(module), memory.rows.size());
    if (is_new) memory.rows.push_back({.module = it->first});
    return memory.rows[it->second];
  };
  // To a module and all that it is in.
  const auto add = [&](std::string_view module, int64_t ModuleMemory::Row::*what, int64_t bytes) {
    for (;; module = owner_of(module)) {
      row(module).*what += bytes;
      if (module.empty()) return;
    }
  };
  row("");
  for (const auto& item : model.named_modules("", /*include_self=*/false)) row(item.key());
  for (const Member& member : members_of(model)) {
    const std::string_view owner = owner_of(member.fqns[0]);
    add(owner, member.is_buffer ? &ModuleMemory::Row::buffers : &ModuleMemory::Row::parameters,
        local_bytes(member.tensor));
    if (!member.is_buffer)
      add(owner, &ModuleMemory::Row::gradients, local_bytes(member.tensor.grad()));
  }
  if (forward == nullptr) return memory;
  Activations activations;
  ModuleWatch watch(model, activations);
  const at::Tensor result = forward();
  watch.finish();
  for (const auto& [step, bytes] : activations.alive()) {
    const std::string module = watch.module_of(static_cast<size_t>(step));
    add(std::string_view(module).substr(0, module.find(" = ")), &ModuleMemory::Row::activations,
        bytes);
  }
  return memory;
}

std::string ModuleMemory::to_string() const {
  dtensor_internal::TextTable table({"module", "parameters", "buffers", "gradients", "activations"},
                                    /*right_aligned=*/{1, 2, 3, 4});
  for (const Row& r : rows) {
    table.add({r.module.empty() ? "(all)" : r.module, str_cat(r.parameters), str_cat(r.buffers),
               str_cat(r.gradients), str_cat(r.activations)});
  }
  return table.to_string();
}

std::string ModuleMemory::to_json() const {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const Row& r : rows) {
    all.push_back({{"module", r.module},
                   {"parameters", r.parameters},
                   {"buffers", r.buffers},
                   {"gradients", r.gradients},
                   {"activations", r.activations}});
  }
  return all.dump();
}

}  // namespace shardweave
