#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/dtensor/testing/programs.h"

namespace shardweave::testing {

ProgramRanks program_ranks() {
  return {at::kCPU, &on_mesh};
}

}  // namespace shardweave::testing
