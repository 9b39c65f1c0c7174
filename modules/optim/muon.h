// Which rank makes which matrix orthogonal. Internal to modules/optim/; the rest of Muon is in
// update.h.
//
//   muon_owners({{4096, 4096}, {4096, 11008}, {64, 64}}, 2);   // {1, 0, 1}
//
// Whole matrices: of one that is cut over some ranks one of these gets all parts, and sends back the
// parts of the result. Pure functions, so that all ranks have the same answer.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/types/span.h"
#include "shardweave/modules/optim/options.h"

namespace shardweave::optim_internal {

// Of matrices with these rows and columns, so that `num_ranks` ranks have about as much to do: the
// most costly one first, each to the rank that has least so far (Graham, 1969).
std::vector<int> muon_owners(absl::Span<const std::array<int64_t, 2>> sizes, int num_ranks);

// The (nearly) orthogonal matrix next to one: by the Newton-Schulz iteration, in the matrix's own
// dtype, operator by operator as torch.optim.Muon has it.
at::Tensor newton_schulz(at::Tensor matrix, const MuonOptions& options);

}  // namespace shardweave::optim_internal
