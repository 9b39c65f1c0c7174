// What a model is and how it lies: a tree of its modules with their tensors, and where a plan said
// so.
//
//   parallelize_module(*model, mesh, plan);
//   std::cout << dump(*model).to_string();   // on any rank, before or after: nothing is sent
//
//                         shape     a rank's part  placements  bytes  by
//   Mlp                                                          848
//   ├─ up  Linear                                                576
//   │  ├─ weight          [32, 8]   [16, 8]        [S(0)]        512  '*.up.*' at train.cc:41
//   │  ├─ bias            [32]      [16]           [S(0)]         64  '*.up.*' at train.cc:41
//   │  └─ input.0                                  [R]                'up.input' at train.cc:41
//   ...
//
// Bytes are those of this rank's parts; a tensor that has two names (tied weights) counts once,
// where it stands first.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "c10/core/ScalarType.h"

namespace torch::nn {
class Module;
}

namespace shardweave {

struct ModuleDump {
  struct Tensor {
    std::string name;               // "weight"
    std::vector<std::string> fqns;  // all of its names; more than one: it is tied
    bool is_buffer = false;
    bool shown_before = false;  // under another of its names, and counted there
    at::ScalarType dtype = at::kFloat;
    std::vector<int64_t> shape, local_shape;
    std::string placements;  // "[S(0), R]"; "": it is a plain tensor
    int64_t bytes = 0;       // of this rank's part
    int64_t global_bytes = 0;
    std::string pattern;  // of the plan's entry that decided; "": none
    std::string source;   // "train.cc:41", where the module was distributed; "": unknown
  };
  // What a plan says of the module's forward.
  struct Forward {
    // "input.0", "output.0", "input.mask"; of one parameter of several: "q_weight.input.0"
    std::string value;
    std::string placements;  // "[R, -]": along the second mesh dimension it stays as it is
    std::string pattern;
    std::string source;
  };
  std::string name, fqn, type;  // "q", "h.0.attn.q", "torch::nn::LinearImpl"
  std::vector<Tensor> tensors;
  std::vector<Forward> forward;
  std::vector<ModuleDump> modules;
  // Of the module and those in it.
  int64_t elements = 0;  // of parameters, over all ranks
  int64_t bytes = 0, global_bytes = 0;

  std::string to_string() const;
  // {"name": "", "fqn": "", "type": "MlpImpl", "elements": 420, "bytes": 848, "global_bytes": 1680,
  //  "tensors": [{"name": "weight", "fqns": ["up.weight"], "is_buffer": false,
  //               "shown_before": false, "dtype": "Float", "shape": [32, 8],
  //               "local_shape": [16, 8], "placements": "[S(0)]", "bytes": 512,
  //               "global_bytes": 1024, "pattern": "*.up.*", "source": "train.cc:41"}],
  //  "forward": [{"value", "placements", "pattern", "source"}], "modules": [...]}
  std::string to_json() const;
};

// Of a model in any state: plain, distributed in part or as a whole. Sends nothing, makes nothing.
ModuleDump dump(const torch::nn::Module& module);

}  // namespace shardweave
