#include "shardweave/modules/module_memory.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

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
    std::vector<const c10::StorageImpl*>& given = given_.emplace_back();
    for (const at::Tensor& argument : arguments) {
      const at::Tensor it = plain(argument);
      if (it.defined() && it.has_storage()) given.push_back(it.storage().unsafeGetStorageImpl());
    }
  }
  void inner_ends(size_t step, bool between, absl::Span<const at::Tensor> results) override {
    if (given_.empty()) return;
    const std::vector<const c10::StorageImpl*> given = std::move(given_.back());
    given_.pop_back();
    for (const at::Tensor& result : results) {
      const at::Tensor it = plain(result);
      if (!it.defined() || !it.has_storage()) continue;
      const c10::StorageImpl* storage = it.storage().unsafeGetStorageImpl();
      // A view, or what was written: nobody made it here.
      if (std::find(given.begin(), given.end(), storage) != given.end()) continue;
      made_.try_emplace(storage, it.storage().getWeakStorageImpl(), Place(step, between));
    }
  }

  using Place = std::pair<size_t, bool>;  // a step; true: before it

  // Bytes that are in memory still, by place.
  std::map<Place, int64_t> alive() const {
    std::map<Place, int64_t> bytes;
    for (const auto& [storage, made] : made_) {
      if (const auto held = made.first.lock()) {
        bytes[made.second] += static_cast<int64_t>(held->nbytes());
      }
    }
    return bytes;
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

  // The plain tensor that has the memory; undefined: there is none, or not yet.
  static at::Tensor plain(const at::Tensor& tensor) {
    if (!is_dtensor(tensor.unsafeGetTensorImpl())) {
      return tensor.has_storage() ? tensor : at::Tensor();
    }
    const LocalPart& part = meta_of(tensor).part;
    return part.state() == LocalPart::State::kReady ? part.get() : at::Tensor();
  }

  // A weak pointer keeps the address from being given out again.
  std::unordered_map<const c10::StorageImpl*, std::pair<Weak, Place>> made_;
  std::vector<std::vector<const c10::StorageImpl*>> given_;  // to the operators that run
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
  for (const auto& [place, bytes] : activations.alive()) {
    const auto& [step, between] = place;
    const std::string module = between ? watch.module_before(step) : watch.module_of(step);
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
