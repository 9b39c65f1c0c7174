#include "shardweave/dtensor/cost_model.h"

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/mesh_context.h"

namespace shardweave {

using namespace dtensor_internal;

namespace {

using nlohmann::ordered_json;

absl::Status check_number(std::string_view what, double value, bool may_be_zero) {
  if (std::isfinite(value) && (may_be_zero ? value >= 0 : value > 0)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the cost model's ", std::string(what), " is ",
                                                 value, "; wanted a finite number ",
                                                 may_be_zero ? "of 0 or more" : "above 0"));
}

absl::Status validate(const CostModel& model, const DeviceMesh& mesh) {
  if (static_cast<int>(model.links.size()) != mesh.ndim()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the cost model has ", model.links.size(), " links; ", mesh.to_string(),
                     " has ", mesh.ndim(), mesh.ndim() == 1 ? " dimension" : " dimensions"));
  }
  absl::Status status;
  for (int m = 0; m < mesh.ndim(); ++m) {
    const std::string link = absl::StrCat("link '", mesh.dims()[m].name, "': ");
    status.Update(check_number(link + "latency", model.links[m].latency, true));
    status.Update(check_number(link + "bandwidth", model.links[m].bandwidth, false));
  }
  status.Update(check_number("device: flops", model.device.flops, false));
  status.Update(check_number("device: bandwidth", model.device.bandwidth, false));
  return status;
}

// A valid one's; never 0.
uint64_t checksum_of(const CostModel& model) {
  std::vector<double> numbers = {model.device.flops, model.device.bandwidth};
  for (const CostModel::Link& link : model.links) {
    numbers.insert(numbers.end(), {link.latency, link.bandwidth});
  }
  return checksum(at::tensor(numbers, at::kDouble)) | 1;
}

// The number at json[of][name].
absl::StatusOr<double> number(const ordered_json& json, std::string_view of, const char* name) {
  const auto found = json.is_object() ? json.find(name) : json.end();
  if (!json.is_object() || found == json.end() || !found->is_number()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the cost model's JSON has no number \"", name, "\" in ", std::string(of)));
  }
  return found->get<double>();
}

}  // namespace

CostModel cost_model(const MeshPtr& mesh) {
  const auto context = MeshContext::of(mesh);
  CostModel model = context->decisions.cost_model();
  model.links.resize(context->mesh().ndim());
  return model;
}

void set_cost_model(const MeshPtr& mesh, const absl::StatusOr<CostModel>& model,
                    std::source_location where) {
  constexpr char kName[] = "set_cost_model";
  const auto context = MeshContext::of(mesh);
  const DeviceMesh& grid = context->mesh();
  const absl::Status status = model.ok() ? validate(*model, grid) : model.status();
  // Also where something is wrong: the other ranks wait.
  const std::optional<Difference> difference = first_difference(
      *context, {status.ok() ? checksum_of(*model) : 0}, Cause{.name = kName, .where = where});
  if (!status.ok()) throw Error(kName, status);
  if (difference.has_value()) {
    throw Error(
        kName,
        absl::InvalidArgumentError(absl::StrCat(
            "ranks ", difference->ranks[0], " and ", difference->ranks[1], " of ", grid.to_string(),
            " were not given the same cost model; this rank: ", cost_model_to_json(*model, grid))));
  }
  context->decisions.set_cost_model(*model, context->operator_under_way());
}

absl::StatusOr<CostModel> cost_model_from_json(std::string_view text, const DeviceMesh& mesh) {
  const ordered_json json = ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("links") || !json.contains("device")) {
    return absl::InvalidArgumentError(
        "the cost model's JSON is no object with \"links\" and \"device\"");
  }
  CostModel model;
  const ordered_json& links = json["links"];
  for (const MeshDim& dim : mesh.dims()) {
    const std::string of = absl::StrCat("link \"", dim.name, "\"");
    if (!links.is_object() || !links.contains(dim.name)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the cost model's JSON has no ", of, ", a dimension of ", mesh.to_string()));
    }
    const ordered_json& link = links[dim.name];
    const absl::StatusOr<double> latency = number(link, of, "latency");
    if (!latency.ok()) return latency.status();
    const absl::StatusOr<double> bandwidth = number(link, of, "bandwidth");
    if (!bandwidth.ok()) return bandwidth.status();
    model.links.push_back({*latency, *bandwidth});
  }
  if (links.size() != model.links.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the cost model's JSON has ", links.size(), " links; ", mesh.to_string(),
                     " has ", mesh.ndim(), mesh.ndim() == 1 ? " dimension" : " dimensions"));
  }
  const absl::StatusOr<double> flops = number(json["device"], "\"device\"", "flops");
  if (!flops.ok()) return flops.status();
  const absl::StatusOr<double> bandwidth = number(json["device"], "\"device\"", "bandwidth");
  if (!bandwidth.ok()) return bandwidth.status();
  model.device = {*flops, *bandwidth};
  return model;
}

std::string cost_model_to_json(const CostModel& model, const DeviceMesh& mesh) {
  ordered_json links = ordered_json::object();
  const std::vector<MeshDim> dims = mesh.dims();
  for (int m = 0; m < mesh.ndim(); ++m) {
    links[dims[m].name] = {{"latency", model.link(m).latency},
                           {"bandwidth", model.link(m).bandwidth}};
  }
  const ordered_json device = {{"flops", model.device.flops},
                               {"bandwidth", model.device.bandwidth}};
  return ordered_json({{"links", std::move(links)}, {"device", device}}).dump();
}

}  // namespace shardweave
