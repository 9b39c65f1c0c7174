#include "shardweave/modules/optim/options.h"

#include "absl/status/status.h"
#include "shardweave/comm/str_cat.h"
#include "shardweave/dtensor/error.h"

namespace shardweave {
namespace {

class Check {
 public:
  explicit Check(std::string_view who) : who_(who) {}

  void operator()(const SgdOptions& o) const {
    lr_and_decay(o);
    not_negative("momentum", o.momentum);
    finite("dampening", o.dampening);
    if (o.nesterov && (o.momentum <= 0 || o.dampening != 0)) {
      refuse("nesterov", 1, "a momentum and no dampening with it");
    }
  }
  void operator()(const AdafactorOptions& o) const {
    lr_and_decay(o);
    if (!(o.beta2_decay < 0)) refuse("beta2_decay", o.beta2_decay, "less than 0");
    if (o.eps1.has_value()) not_negative("eps1", *o.eps1);
    not_negative("eps2", o.eps2);
    if (!(o.clip_threshold > 0)) refuse("clip_threshold", o.clip_threshold, "above 0");
  }
  void operator()(const MuonOptions& o) const {
    lr_and_decay(o);
    beta("momentum", o.momentum);
    if (o.ns_steps < 1 || o.ns_steps > 99) refuse("ns_steps", o.ns_steps, "1 to 99");
    finite("ns_a", o.ns_a);
    finite("ns_b", o.ns_b);
    finite("ns_c", o.ns_c);
    if (!(o.eps > 0)) refuse("eps", o.eps, "above 0");
    if (o.lr_scale != MuonLrScale::kOriginal && o.lr_scale != MuonLrScale::kMatchRmsAdamW) {
      refuse("lr_scale", static_cast<double>(o.lr_scale), "one of MuonLrScale");
    }
    if (o.ns_dtype != at::kBFloat16 && o.ns_dtype != at::kFloat && o.ns_dtype != at::kDouble) {
      throw Error(who_,
                  absl::InvalidArgumentError(str_cat("ns_dtype is ", c10::toString(o.ns_dtype),
                                                     "; wanted bfloat16, float32 or float64")));
    }
  }
  template <typename Options>  // Adam's, AdamW's, Lion's
  void operator()(const Options& o) const {
    lr_and_decay(o);
    beta("beta1", o.beta1);
    beta("beta2", o.beta2);
    if constexpr (requires { o.eps; }) not_negative("eps", o.eps);
  }

 private:
  [[noreturn]] void refuse(std::string_view name, double value, std::string_view wanted) const {
    throw Error(who_,
                absl::InvalidArgumentError(str_cat(name, " is ", value, "; wanted ", wanted)));
  }
  void not_negative(std::string_view name, double value) const {
    if (!(value >= 0)) refuse(name, value, "0 or more");
    finite(name, value);
  }
  void beta(std::string_view name, double value) const {
    if (!(value >= 0 && value < 1)) refuse(name, value, "at least 0, less than 1");
  }
  void finite(std::string_view name, double value) const {
    if (!(value - value == 0)) refuse(name, value, "a finite number");
  }
  template <typename Options>
  void lr_and_decay(const Options& o) const {
    not_negative("lr", o.lr);
    not_negative("weight_decay", o.weight_decay);
  }

  std::string_view who_;
};

}  // namespace

std::vector<ParameterGroup> muon_groups(const std::vector<at::Tensor>& parameters,
                                        const MuonOptions& matrices, const AdamWOptions& others) {
  std::vector<ParameterGroup> groups = {{.parameters = {}, .options = matrices},
                                        {.parameters = {}, .options = others}};
  for (const at::Tensor& parameter : parameters) {
    const bool is_matrix = parameter.defined() && parameter.dim() == 2;
    groups[is_matrix ? 0 : 1].parameters.push_back(parameter);
  }
  return groups;
}

void check_options(const OptimizerOptions& options, std::string_view who) {
  std::visit(Check(who), options);
}

}  // namespace shardweave
