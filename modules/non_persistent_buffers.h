// Buffers that a module computes from its options, and that checkpoints therefore leave out: what
// persistent=False of PyTorch's register_buffer() says.
//
//   struct RopeImpl : torch::nn::Module, NonPersistentBuffers {
//     explicit RopeImpl(int64_t dim) { angles = register_buffer("angles", make_angles(dim)); }
//     std::vector<std::string> non_persistent_buffers() const override { return {"angles"}; }
//     at::Tensor angles;
//   };
//
// They are buffers otherwise: distributed, materialized and moved with the module. add_module()
// (checkpoint/state_dict.h) asks each submodule.
#pragma once

#include <string>
#include <vector>

namespace shardweave {

class NonPersistentBuffers {
 public:
  virtual ~NonPersistentBuffers() = default;
  // The names that register_buffer() got, those of the module's own.
  virtual std::vector<std::string> non_persistent_buffers() const = 0;
};

}  // namespace shardweave
