// The tables of samples, one file each. sample_families() gives them all.
#pragma once

#include <vector>

#include "shardweave/dtensor/testing/sample.h"

namespace shardweave::testing {

std::vector<Sample> pointwise_samples();
std::vector<Sample> matmul_samples();
std::vector<Sample> reduction_samples();
std::vector<Sample> normalization_samples();
std::vector<Sample> loss_samples();
std::vector<Sample> view_samples();
std::vector<Sample> data_movement_samples();
std::vector<Sample> indexing_samples();
std::vector<Sample> spatial_samples();
std::vector<Sample> linear_algebra_samples();
std::vector<Sample> random_samples();

// One sample for each of these operators, with the same tensors and attributes.
std::vector<Sample> each(const std::vector<std::string>& ops, const Sample& like);
void append(std::vector<Sample>& to, std::vector<Sample> samples);

}  // namespace shardweave::testing
