// Random numbers without a state: the i-th of a stream is a function of its seed and i alone, so
// that every rank of every run draws the same ones.
//
//   uint64_t start = random_at(seed, step * batch + row) % size;
//   double u = uniform_at(seed, i);                               // in [0, 1)
#pragma once

#include <cstdint>

namespace train_gpt {

// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
inline uint64_t random_at(uint64_t seed, uint64_t index) {
  const auto mix = [](uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  };
  return mix(mix(seed) + (index + 1) * 0x9e3779b97f4a7c15);
}

inline double uniform_at(uint64_t seed, uint64_t index) {
  return static_cast<double>(random_at(seed, index) >> 11) * 0x1p-53;
}

}  // namespace train_gpt
