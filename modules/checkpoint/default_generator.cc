#include "shardweave/modules/checkpoint/default_generator.h"

#include <mutex>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/core/Generator.h"
#include "ATen/core/Tensor.h"

namespace shardweave::checkpoint_internal {

at::Tensor default_generator_state(const MeshPtr& mesh) {
  if (mesh->mesh().size() != 1) return {};
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

bool is_default_generator_state(const at::Tensor& state) {
  try {
    at::detail::createCPUGenerator().set_state(state);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

void set_default_generator_state(const at::Tensor& state) {
  if (!state.defined()) return;
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace shardweave::checkpoint_internal
