#include "shardweave/dtensor/testing/fake_cuda.h"
#include "shardweave/dtensor/testing/programs.h"

namespace shardweave::testing {

ProgramRanks program_ranks() {
  return {at::kCUDA, [](const std::vector<MeshDim>& dims,
                        const std::function<void(const MeshPtr&)>& body) { on_gpus(dims, body); }};
}

}  // namespace shardweave::testing
