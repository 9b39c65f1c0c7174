// Random operators: their numbers are not those of one device, so that shapes are compared here;
// random_test compares the numbers of different layouts.
#include "shardweave/dtensor/testing/samples/families.h"

namespace shardweave::testing {

std::vector<Sample> random_samples() {
  std::vector<Sample> samples;
  const Operand probability = in({7, 5}).uniform(0.1, 0.9).constant();
  append(samples, each({"aten::bernoulli", "aten::cauchy", "aten::exponential", "aten::log_normal",
                        "aten::rand_like", "aten::randn_like", "aten::random", "aten::uniform",
                        "aten::normal_", "aten::uniform_", "aten::bernoulli_.float"},
                       {"", {probability}}));
  append(samples,
         {{"aten::geometric", {probability}, {{"p", 0.3}}},
          {"aten::randint_like", {probability}, {{"high", 9}}},
          {"aten::normal.Tensor_float", {probability}},
          {"aten::normal.float_Tensor", {probability}, {{"mean", 1.0}}},
          {"aten::normal.Tensor_Tensor", {probability, in({5}).uniform(1, 2).constant()}},
          {"aten::normal_functional", {probability}},
          {"aten::bernoulli.p", {probability}, {{"p", 0.3}}},
          {"aten::bernoulli_.Tensor", {probability, in({7, 5}).uniform(0, 1).constant()}},
          {"aten::poisson", {probability}},
          {"aten::binomial", {in({7, 5}).uniform(1, 9).constant(), probability}},
          {"aten::_standard_gamma", {probability}},
          {"aten::_sample_dirichlet", {probability}},
          {"aten::multinomial", {probability}, {{"num_samples", 3}}},
          {"aten::multinomial", {probability}, {{"num_samples", 9}, {"replacement", true}}},
          {"aten::rrelu_with_noise_functional",
           {probability, in({7, 5}).constant()},
           {{"training", true}}},
          {"aten::_standard_gamma_grad", {probability, in({7, 5}).uniform(1, 2).constant()}},
          {"aten::_dirichlet_grad", {probability, probability, probability}},
          {"aten::native_dropout", {probability}, {{"p", 0.3}, {"train", true}}}});
  for (Sample& sample : samples) sample.values = false;
  return samples;
}

}  // namespace shardweave::testing
