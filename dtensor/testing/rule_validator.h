// Tries what sharding rules claim, and what they do not claim though they could.
//
//   const Sample sample = {"mylib::swiglu", {in({7, 5}), in({7, 5})}};
//   EXPECT_THAT(validate_strategies(sample, rule).wrong, IsEmpty());
//
// validate_strategies() works on the rule alone, one mesh dimension at a time: it cuts the whole
// inputs into what each of 2, 3 and 4 ranks would hold, runs the operator on every piece, puts the
// results together as the strategy says and compares them with the whole answer. No ranks, no
// communication, so that every combination of Replicate, Shard and Partial (sum, avg, min, max) can
// be tried. A strategy that does not give the whole answer is wrong. A combination that gives it on
// all these meshes, is not offered, and does not follow from one that is offered by cutting
// replicated tensors, is missing.
//
// validate_decisions() works in the same way on what the engine (propagate.h) makes of the rule on
// meshes of two and three dimensions: for inputs that lie anyhow, so that several mesh dimensions
// cut one tensor dimension or dimensions that belong together (channels and groups), in any order,
// into strided and ragged shards, every rank must decide the same, and the results together must be
// the whole answer. A rule that looks at one mesh dimension where it should look at all is found
// here.
//
// validate_end_to_end() runs the operator on DTensors on rank threads and compares values, gradients
// and their gradients (check_on_mesh in op_check.h), in its functional, in-place and out= forms.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "c10/core/Device.h"
#include "shardweave/dtensor/rule.h"
#include "shardweave/dtensor/testing/sample.h"

namespace shardweave::testing {

struct ValidationOptions {
  int max_combinations = 4000;  // per sample and mesh; more are sampled
  bool find_missing = true;
  uint64_t seed = 1;
  c10::Device device = c10::kCPU;  // whose kernels run
};

struct Validation {
  std::set<std::string> operators;  // that were tried, with their overloads
  std::set<std::string> reached;    // these, and what ran for them: their derivatives, their parts
  int64_t combinations = 0;         // of placements, on all meshes
  int64_t second_gradients = 0;     // combinations of these, where they were compared
  // Samples with a gradient that one device cannot differentiate again, and what it says.
  std::vector<std::string> no_second_derivative;
  std::vector<std::string> wrong;
  std::vector<std::string> missing;

  void merge(Validation other);
};

// `rule` may be one without strategies (composites): then there is nothing to try.
Validation validate_strategies(const Sample& sample, const Rule& rule,
                               const ValidationOptions& options = {});

// options.max_combinations: layouts per sample and mesh, all drawn from the seed.
Validation validate_decisions(const Sample& sample, const Rule& rule,
                              const ValidationOptions& options = {.max_combinations = 100});

Validation validate_end_to_end(const Sample& sample,
                               const std::vector<std::vector<MeshDim>>& meshes,
                               const CheckOptions& options = {});

}  // namespace shardweave::testing
