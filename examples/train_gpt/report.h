// What a training tells about itself, as text.
//
//   print_layouts(model->named_parameters().pairs(), mesh, std::cout);
//   print_sample(written.prompt, written.generated, std::cout);
#pragma once

#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/mesh/device_mesh.h"

namespace train_gpt {

// How each parameter lies on the mesh; one line for those that all blocks have alike.
void print_layouts(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                   const shardweave::DeviceMesh& mesh, std::ostream& out);

// `generated` as it continues `prompt`; bytes that are no printable ASCII become '?'.
void print_sample(const std::string& prompt, const std::string& generated, std::ostream& out);

}  // namespace train_gpt
