#include "shardweave/dtensor/testing/samples/families.h"

#include <iterator>
#include <utility>

namespace shardweave::testing {

std::vector<Sample> each(const std::vector<std::string>& ops, const Sample& like) {
  std::vector<Sample> samples;
  for (const std::string& op : ops) {
    samples.push_back(like);
    samples.back().op = op;
  }
  return samples;
}

void append(std::vector<Sample>& to, std::vector<Sample> samples) {
  to.insert(to.end(), std::make_move_iterator(samples.begin()),
            std::make_move_iterator(samples.end()));
}

const std::vector<SampleFamily>& sample_families() {
  static const auto* const families = new std::vector<SampleFamily>{
      {"pointwise", pointwise_samples()},
      {"matmul", matmul_samples()},
      {"reduction", reduction_samples()},
      {"normalization", normalization_samples()},
      {"loss", loss_samples()},
      {"view", view_samples()},
      {"data movement", data_movement_samples()},
      {"indexing", indexing_samples()},
      {"spatial", spatial_samples()},
      {"linear algebra", linear_algebra_samples()},
      {"random", random_samples()},
  };
  return *families;
}

}  // namespace shardweave::testing
