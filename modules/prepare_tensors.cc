#include "shardweave/modules/prepare_tensors.h"

#include <string_view>

#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

[[noreturn]] void refuse(std::string_view function, const std::string& why) {
  throw Error(function, absl::InvalidArgumentError(why));
}

// The mesh, checked.
MeshPtr mesh_for(std::string_view function, const at::Tensor& tensor, const MeshPtr& given) {
  if (!tensor.defined()) refuse(function, "the tensor is undefined");
  const MeshPtr of_tensor = is_dtensor(tensor) ? mesh_of(tensor) : nullptr;
  if (of_tensor == nullptr && given == nullptr) {
    refuse(function, "a plain tensor has no mesh; wanted one, or a DTensor");
  }
  const MeshPtr mesh = given != nullptr ? given : of_tensor;
  if (mesh->mesh().ndim() != 1) {
    refuse(function, str_cat(mesh->mesh().to_string(), " has ", mesh->mesh().ndim(),
                             " dimensions; wanted a mesh of one, such as a slice of it"));
  }
  if (of_tensor != nullptr && !(of_tensor->mesh() == mesh->mesh())) {
    refuse(function, str_cat("the tensor is ", describe(tensor), ", which is not on ",
                             mesh->mesh().to_string(), "; leave out the mesh, or take that one"));
  }
  return of_tensor != nullptr ? of_tensor : mesh;
}

void check_dim(std::string_view function, const at::Tensor& tensor, int dim) {
  if (dim >= -tensor.dim() && dim < tensor.dim()) return;
  refuse(function,
         str_cat("dim ", dim, " is not one of the ", tensor.dim(), " dimensions of the tensor"));
}

at::Tensor input_as(std::string_view function, const at::Tensor& input, const MeshPtr& given,
                    const Placement& placement, std::source_location where) {
  const MeshPtr mesh = mesh_for(function, input, given);
  if (placement.is_shard()) check_dim(function, input, placement.dim());
  if (is_dtensor(input)) return redistribute(input, Placements{placement}, where);
  return from_local(input, mesh, {placement}, std::nullopt, where);
}

at::Tensor output_as(std::string_view function, const at::Tensor& output, const MeshPtr& given,
                     const Placement& placement, std::source_location where) {
  if (output.defined() && !is_dtensor(output)) {
    refuse(function,
           "the output is a plain tensor; wanted a DTensor, as a parallelized module gives");
  }
  mesh_for(function, output, given);
  if (placement.is_shard()) check_dim(function, output, placement.dim());
  return redistribute(output, Placements{placement}, where);
}

}  // namespace

at::Tensor make_input_replicate_1d(const at::Tensor& input, const MeshPtr& mesh,
                                   std::source_location where) {
  return input_as("make_input_replicate_1d", input, mesh, Replicate(), where);
}

at::Tensor make_input_shard_1d(const at::Tensor& input, const MeshPtr& mesh, int dim,
                               std::source_location where) {
  return input_as("make_input_shard_1d", input, mesh, Shard(dim), where);
}

at::Tensor make_input_shard_1d_last_dim(const at::Tensor& input, const MeshPtr& mesh,
                                        std::source_location where) {
  return input_as("make_input_shard_1d_last_dim", input, mesh, Shard(-1), where);
}

at::Tensor make_input_reshard_replicate(const at::Tensor& input, const MeshPtr& mesh,
                                        std::source_location where) {
  constexpr std::string_view kName = "make_input_reshard_replicate";
  return redistribute(input_as(kName, input, mesh, Shard(0), where), Placements{Replicate()},
                      where);
}

at::Tensor make_output_replicate_1d(const at::Tensor& output, const MeshPtr& mesh,
                                    std::source_location where) {
  return output_as("make_output_replicate_1d", output, mesh, Replicate(), where);
}

at::Tensor make_output_shard_1d(const at::Tensor& output, const MeshPtr& mesh, int dim,
                                std::source_location where) {
  return output_as("make_output_shard_1d", output, mesh, Shard(dim), where);
}

at::Tensor make_output_tensor(const at::Tensor& output, const MeshPtr& mesh,
                              std::source_location where) {
  return to_local(output_as("make_output_tensor", output, mesh, Replicate(), where), std::nullopt,
                  where);
}

at::Tensor make_output_reshard_tensor(const at::Tensor& output, const MeshPtr& mesh,
                                      std::source_location where) {
  return to_local(output_as("make_output_reshard_tensor", output, mesh, Shard(0), where),
                  std::nullopt, where);
}

}  // namespace shardweave
