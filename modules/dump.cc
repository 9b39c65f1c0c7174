#include "shardweave/modules/dump.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>

#include "absl/strings/ascii.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/engine/forward_plan.h"
#include "shardweave/dtensor/engine/members.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/observe/text_table.h"
#include "shardweave/modules/hooked.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

int64_t elements_of(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

std::string placements_of(const ForwardTarget& target) {
  return str_cat("[",
                 absl::StrJoin(target.placements, ", ",
                               [](std::string* out, const std::optional<Placement>& placement) {
                                 *out += placement.has_value() ? placement->to_string() : "-";
                               }),
                 "]");
}

// `parameter`: that has them, if not a Hooked module. Named where the plan names it.
void add_forward(const ForwardLayouts* layouts, std::string_view parameter, ModuleDump* to) {
  if (layouts == nullptr) return;
  for (const auto& [kind, values] :
       {std::pair("input", &layouts->inputs), {"output", &layouts->outputs}}) {
    for (const ForwardLayouts::Value& value : *values) {
      const int* index = std::get_if<int>(&value.slot);
      std::string name = str_cat(
          kind, ".", index != nullptr ? str_cat(*index) : std::get<std::string>(value.slot));
      const std::string own = str_cat(parameter, ".", name);
      if (!parameter.empty() && (value.name == own || value.name.ends_with(str_cat(".", own)))) {
        name = own;
      }
      to->forward.push_back(
          {.value = std::move(name),
           .placements = placements_of(value.target),
           .pattern = value.pattern,
           .source = layouts->where.line() == 0
                         ? ""
                         : str_cat(layouts->where.file_name(), ":", layouts->where.line())});
    }
  }
}

class Dumper {
 public:
  explicit Dumper(const torch::nn::Module& root) {
    for (Member& member : members_of(root)) {
      names_.emplace(member.tensor.unsafeGetTensorImpl(), std::move(member.fqns));
    }
  }

  ModuleDump dump(const torch::nn::Module& module, const std::string& name,
                  const std::string& fqn) {
    ModuleDump d{.name = name, .fqn = fqn, .type = module.name()};
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      add(item.key(), item.value(), /*is_buffer=*/false, &d);
    }
    for (const auto& item : module.named_buffers(/*recurse=*/false)) {
      add(item.key(), item.value(), /*is_buffer=*/true, &d);
    }
    if (const auto* hook = dynamic_cast<const modules_internal::ForwardHook*>(&module)) {
      if (hook->redistribution != nullptr) add_forward(hook->redistribution->layouts(), "", &d);
    }
    for (const auto& child : module.named_children()) {
      d.modules.push_back(dump(*child.value(), child.key(),
                               fqn.empty() ? child.key() : str_cat(fqn, ".", child.key())));
      d.elements += d.modules.back().elements;
      d.bytes += d.modules.back().bytes;
      d.global_bytes += d.modules.back().global_bytes;
    }
    return d;
  }

 private:
  void add(const std::string& name, const at::Tensor& tensor, bool is_buffer, ModuleDump* d) {
    if (!tensor.defined()) return;
    ModuleDump::Tensor t{.name = name,
                         .is_buffer = is_buffer,
                         .dtype = tensor.scalar_type(),
                         .shape = tensor.sizes().vec()};
    t.local_shape = t.shape;
    if (const auto names = names_.find(tensor.unsafeGetTensorImpl()); names != names_.end()) {
      t.fqns = names->second;
    }
    if (t.fqns.empty()) t.fqns = {d->fqn.empty() ? name : str_cat(d->fqn, ".", name)};
    const std::string here = d->fqn.empty() ? name : str_cat(d->fqn, ".", name);
    t.shown_before = t.fqns[0] != here;
    if (is_dtensor(tensor.unsafeGetTensorImpl())) {
      const DTensorMeta& meta = meta_of(tensor);
      t.local_shape.assign(meta.spec->local_sizes.begin(), meta.spec->local_sizes.end());
      t.placements = meta.spec->layout.to_string();
      if (meta.family != nullptr && meta.family->origin != nullptr) {
        t.pattern = meta.family->origin->pattern;
        t.source = meta.family->origin->where;
      }
      if (meta.family != nullptr && !t.shown_before)
        add_forward(meta.family->forward.get(), name, d);
    }
    const auto element = static_cast<int64_t>(c10::elementSize(t.dtype));
    t.bytes = elements_of(t.local_shape) * element;
    t.global_bytes = elements_of(t.shape) * element;
    if (!t.shown_before) {
      if (!is_buffer) d->elements += elements_of(t.shape);
      d->bytes += t.bytes;
      d->global_bytes += t.global_bytes;
    }
    d->tensors.push_back(std::move(t));
  }

  std::unordered_map<const c10::TensorImpl*, std::vector<std::string>> names_;
};

std::string shape_text(const std::vector<int64_t>& shape) {
  return str_cat("[", absl::StrJoin(shape, ", "), "]");
}

// "'*.up.*' at train.cc:41"
std::string by(const std::string& pattern, const std::string& source, bool planned) {
  std::string text = !pattern.empty() ? str_cat("'", pattern, "'") : planned ? "no entry" : "";
  if (!source.empty()) str_append(&text, text.empty() ? "at " : " at ", source);
  return text;
}

// "Linear" of "torch::nn::LinearImpl", "Decoder<Mlp>" of
// "shardweave::Hooked<my::DecoderImpl<torch::nn::ModuleHolder<my::MlpImpl> > >".
std::string short_type(const std::string& full) {
  const auto is_name = [](char c) { return absl::ascii_isalnum(c) || c == '_' || c == ':'; };
  const std::string named =
      absl::StrReplaceAll(full, {{"(anonymous namespace)::", ""}, {" >", ">"}});
  std::string text;
  std::vector<bool> is_shown;  // of the brackets that are open
  for (std::string_view rest = named; !rest.empty();) {
    const auto end = std::find_if_not(rest.begin(), rest.end(), is_name);
    std::string_view name = rest.substr(0, static_cast<size_t>(end - rest.begin()));
    rest.remove_prefix(name.size());
    if (const size_t colon = name.rfind("::"); colon != name.npos) name.remove_prefix(colon + 2);
    if (name.ends_with("Impl")) name.remove_suffix(4);
    const bool opens = rest.starts_with('<'), closes = rest.starts_with('>') && !is_shown.empty();
    if (opens) is_shown.push_back(name != "Hooked" && name != "ModuleHolder");
    const bool shown = !(opens || closes) || is_shown.back();
    if (shown || !opens) text += name;
    if (shown) text += rest.substr(0, 1);
    if (closes) is_shown.pop_back();
    rest.remove_prefix(rest.empty() ? 0 : 1);
  }
  return text;
}

void add_rows(const ModuleDump& d, const std::string& begin, const std::string& indent,
              TextTable& table) {
  table.add({str_cat(begin, d.name, d.name.empty() ? "" : "  ", short_type(d.type)), "", "", "",
             str_cat(d.bytes), ""});
  size_t left = d.tensors.size() + d.forward.size() + d.modules.size();
  const auto branch = [&] { return indent + (--left == 0 ? "└─ " : "├─ "); };
  for (const ModuleDump::Tensor& t : d.tensors) {
    std::string name = branch() + t.name;
    if (t.is_buffer) name += " (buffer)";
    if (t.shown_before) {
      table.add({str_cat(name, " = ", t.fqns[0]), "", "", "", "", ""});
      continue;
    }
    if (t.fqns.size() > 1)
      str_append(&name, " = ", absl::StrJoin(t.fqns.begin() + 1, t.fqns.end(), " = "));
    const bool sharded = !t.placements.empty();
    std::string shape = shape_text(t.shape);
    if (t.dtype != at::kFloat) shape = str_cat(c10::toString(t.dtype), shape);
    table.add({std::move(name), std::move(shape), sharded ? shape_text(t.local_shape) : "",
               t.placements, str_cat(t.bytes), by(t.pattern, t.source, sharded)});
  }
  for (const ModuleDump::Forward& f : d.forward) {
    table.add({branch() + f.value, "", "", f.placements, "", by(f.pattern, f.source, true)});
  }
  for (const ModuleDump& child : d.modules) {
    const bool is_last = left == 1;
    const std::string start = branch();
    add_rows(child, start, indent + (is_last ? "   " : "│  "), table);
  }
}

nlohmann::ordered_json json_of(const ModuleDump& d) {
  using Json = nlohmann::ordered_json;
  Json tensors = Json::array(), forward = Json::array(), modules = Json::array();
  for (const ModuleDump::Tensor& t : d.tensors) {
    tensors.push_back({{"name", t.name},
                       {"fqns", t.fqns},
                       {"is_buffer", t.is_buffer},
                       {"shown_before", t.shown_before},
                       {"dtype", c10::toString(t.dtype)},
                       {"shape", t.shape},
                       {"local_shape", t.local_shape},
                       {"placements", t.placements},
                       {"bytes", t.bytes},
                       {"global_bytes", t.global_bytes},
                       {"pattern", t.pattern},
                       {"source", t.source}});
  }
  for (const ModuleDump::Forward& f : d.forward) {
    forward.push_back({{"value", f.value},
                       {"placements", f.placements},
                       {"pattern", f.pattern},
                       {"source", f.source}});
  }
  for (const ModuleDump& child : d.modules) modules.push_back(json_of(child));
  return {{"name", d.name},         {"fqn", d.fqn},       {"type", d.type},
          {"elements", d.elements}, {"bytes", d.bytes},   {"global_bytes", d.global_bytes},
          {"tensors", tensors},     {"forward", forward}, {"modules", modules}};
}

}  // namespace

ModuleDump dump(const torch::nn::Module& module) {
  return Dumper(module).dump(module, "", "");
}

std::string ModuleDump::to_string() const {
  TextTable table({"", "shape", "a rank's part", "placements", "bytes", "by"},
                  /*right_aligned=*/{4});
  add_rows(*this, "", "", table);
  std::string text = table.to_string();
  str_append(&text, elements, " elements in parameters; ", bytes, " of ", global_bytes,
             " bytes are on this rank\n");
  return text;
}

std::string ModuleDump::to_json() const {
  return json_of(*this).dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace shardweave
