// What checkpoints ask of the handles of other files.
#pragma once

#include <memory>
#include <string>

#include "shardweave/capi/handles.h"
#include "shardweave/modules/checkpoint/state_dict.h"
#include "shardweave/modules/data/token_loader.h"

namespace shardweave::capi {

// In data.cc.
std::shared_ptr<TokenLoader> token_loader(const swv_loader* loader);

// In optimizer.cc.
void add_optimizer_state(StateDict& state, const swv_optimizer* optimizer,
                         const torch::nn::Module& module, const std::string& prefix);
// What has to live as long as the state.
std::shared_ptr<const void> optimizer_owner(const swv_optimizer* optimizer);

}  // namespace shardweave::capi
