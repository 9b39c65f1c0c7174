// Layer, group and batch normalization.
#include "shardweave/dtensor/testing/samples/families.h"

namespace shardweave::testing {

std::vector<Sample> normalization_samples() {
  const c10::IValue all = flags({true, true, true});
  const Operand statistics = in({3, 5, 1}).uniform(0.5, 1.5).constant();
  const Operand of_groups = in({5, 4}).uniform(0.5, 1.5).constant();
  const Operand of_six = in({4, 6}).uniform(0.5, 1.5).constant();
  return {
      {"aten::native_layer_norm",
       {in({3, 5, 4}), in({4}), in({4})},
       {{"normalized_shape", ints({4})}, {"eps", 1e-5}}},
      {"aten::native_layer_norm",
       {in({3, 5, 4}), none(), none()},
       {{"normalized_shape", ints({5, 4})}, {"eps", 1e-5}}},
      {"aten::native_layer_norm_backward",
       {in({3, 5, 4}), in({3, 5, 4}), statistics, statistics, in({4}), in({4})},
       {{"normalized_shape", ints({4})}, {"output_mask", all}}},
      {"aten::native_group_norm",
       {in({5, 8, 3}), in({8}), in({8})},
       {{"N", 5}, {"C", 8}, {"HxW", 3}, {"group", 4}, {"eps", 1e-5}}},
      {"aten::native_group_norm",  // groups that one mesh dimension may cut, not all together
       {in({4, 12, 3}), in({12}), in({12})},
       {{"N", 4}, {"C", 12}, {"HxW", 3}, {"group", 6}, {"eps", 1e-5}}},
      {"aten::native_group_norm_backward",
       {in({5, 8, 3}), in({5, 8, 3}), of_groups, of_groups, in({8})},
       {{"N", 5}, {"C", 8}, {"HxW", 3}, {"group", 4}, {"output_mask", all}}},
      {"aten::native_group_norm_backward",
       {in({4, 12, 3}), in({4, 12, 3}), of_six, of_six, in({12})},
       {{"N", 4}, {"C", 12}, {"HxW", 3}, {"group", 6}, {"output_mask", all}}},
      {"aten::native_batch_norm",
       {in({5, 3, 4}), in({3}), in({3}), in({3}).constant(), in({3}).uniform(0.5, 2).constant()},
       {{"training", true}, {"momentum", 0.1}, {"eps", 1e-5}}},
      {"aten::native_batch_norm",
       {in({5, 3, 4}), in({3}), in({3}), in({3}).constant(), in({3}).uniform(0.5, 2).constant()},
       {{"training", false}, {"momentum", 0.1}, {"eps", 1e-5}}},
      {"aten::_native_batch_norm_legit",
       {in({5, 3, 4}), in({3}), in({3}), in({3}).constant(), in({3}).uniform(0.5, 2).constant()},
       {{"training", true}, {"momentum", 0.1}, {"eps", 1e-5}}},
      {"aten::_native_batch_norm_legit.no_stats",
       {in({5, 3, 4}), in({3}), in({3})},
       {{"training", true}, {"momentum", 0.1}, {"eps", 1e-5}}},
      {"aten::native_batch_norm_backward",
       {in({5, 3, 4}), in({5, 3, 4}), in({3}), in({3}).constant(),
        in({3}).uniform(0.5, 2).constant(), none(), none()},
       {{"train", false}, {"eps", 1e-5}, {"output_mask", all}}},
  };
}

}  // namespace shardweave::testing
