// The memory of a model on this rank, module by module.
//
//   const ModuleMemory memory = module_memory(*model, [&] { return loss_of(*model, batch); });
//   std::cout << memory.to_string();
//
//   module  parameters  buffers  gradients  activations
//                 1320        0          0         4608
//   up             660        0          0         2048
//   down           ...
//
// Parameters, buffers and gradients are those that are there: this rank's parts of them.
// Activations are measured: what operators have made while the forward ran, and what is in memory
// still when it is over, because backward needs it, because it is the result, or because a tensor
// that was brought elsewhere is remembered. Each is the module's whose operator made it; what runs
// between two modules counts for the innermost that both are in. Memory that is shared counts once.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"

namespace torch::nn {
class Module;
}

namespace shardweave {

struct ModuleMemory {
  // In bytes, of the module and those in it.
  struct Row {
    std::string module;  // the FQN; "": the model
    int64_t parameters = 0, buffers = 0, gradients = 0, activations = 0;
  };
  std::vector<Row> rows;  // in the order of the modules, the model first

  std::string to_string() const;
  // [{"module": "", "parameters": 1320, "buffers": 0, "gradients": 0, "activations": 4608}]
  std::string to_json() const;
};

// Without `forward`: sends nothing. With it: runs it once, and frees what it returns. Throws what
// it throws. Collective, if it is.
ModuleMemory module_memory(torch::nn::Module& model,
                           const std::function<at::Tensor()>& forward = nullptr);

}  // namespace shardweave
