// Gated MLPs of which every token takes some: only the tokens that an expert was chosen for are
// computed by it.
//
//   const at::Tensor y = nn::routed_experts(x, weights, gate_up_proj, down_proj, Activation::kSilu);
//
// An operator of its own, shardweave::routed_experts: rows are bucketed by expert, each expert is two
// matrix products of its rows, and its results are added where the rows came from. On DTensors it
// is cut along the tokens, the experts (the result is a Partial sum), or the features within every
// expert (likewise), without communication.
#pragma once

#include "ATen/core/Tensor.h"
#include "shardweave/modules/nn/activation.h"

namespace shardweave::nn {

// The sum over the experts e of weights[:, e] * down(act(gate(x)) * up(x)).
//
// x: [tokens, hidden]. weights: [tokens, experts]; 0: the expert is not chosen, computes nothing for
// the token, and the weight has no gradient. gate_up_proj: [experts, 2 intermediate, hidden], gate
// first; down_proj: [experts, hidden, intermediate]. Returns [tokens, hidden].
//
// How many rows an expert gets is read by the host: on a GPU it waits for the routing. Backward
// keeps nothing but the arguments and computes the gate and the up projection again. A backward that
// is itself differentiated (create_graph) computes every expert for every token.
//
// Throws c10::Error for shapes or dtypes that do not go together. Threads: as any operator.
at::Tensor routed_experts(const at::Tensor& x, const at::Tensor& weights,
                          const at::Tensor& gate_up_proj, const at::Tensor& down_proj,
                          Activation activation);

}  // namespace shardweave::nn
