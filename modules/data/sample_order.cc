#include "shardweave/modules/data/sample_order.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "nlohmann/json.hpp"
#include "shardweave/comm/str_cat.h"

namespace shardweave {
namespace {

// Of epochs and of samples in one: sums of two are numbers still.
constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 2;

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
uint64_t scrambled(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// The place of index in a permutation of 0 .. size - 1 that the key chooses.
uint64_t permuted(uint64_t index, uint64_t size, uint64_t key) {
  if (size <= 1) return 0;
  constexpr int kRounds = 10;
  const int bits = std::bit_width(size - 1);
  const int low_bits = bits / 2;
  const uint64_t low_mask = (uint64_t{1} << low_bits) - 1;
  const uint64_t high_mask = (uint64_t{1} << (bits - low_bits)) - 1;
  do {
    uint64_t low = index & low_mask, high = index >> low_bits;
    for (int round = 0; round < kRounds; round += 2) {
      const uint64_t round_key = key + static_cast<uint64_t>(round) * 0x9e3779b97f4a7c15;
      high ^= scrambled(low + round_key) & high_mask;
      low ^= scrambled(high + ~round_key) & low_mask;
    }
    index = high << low_bits | low;
  } while (index >= size);  // less than half of them are not there
  return index;
}

}  // namespace

absl::StatusOr<SampleOrder> SampleOrder::create(const SampleOrderOptions& options) {
  if (options.num_samples < 1 || options.num_samples > kMost) {
    return absl::InvalidArgumentError(
        str_cat("num_samples is ", options.num_samples, "; wanted 1 to ", kMost));
  }
  if (options.epochs < 0 || options.epochs > kMost) {
    return absl::InvalidArgumentError(
        str_cat("epochs is ", options.epochs, "; wanted 0 to ", kMost, " (0: no end)"));
  }
  return SampleOrder(options);
}

int64_t SampleOrder::sample(SamplePosition position) const {
  if (!options_.shuffle) return position.sample;
  const uint64_t key =
      scrambled(scrambled(options_.seed) + static_cast<uint64_t>(position.epoch) + 1);
  return static_cast<int64_t>(permuted(static_cast<uint64_t>(position.sample),
                                       static_cast<uint64_t>(options_.num_samples), key));
}

int64_t SampleOrder::left(SamplePosition position, int64_t samples) const {
  if (options_.epochs == 0) return samples;
  const int64_t epochs = options_.epochs - position.epoch;
  if (epochs > samples / options_.num_samples + 1) return samples;  // and no product overflows
  return std::min(samples, epochs * options_.num_samples - position.sample);
}

SamplePosition SampleOrder::after(SamplePosition position, int64_t samples) const {
  position.epoch += samples / options_.num_samples;
  position.sample += samples % options_.num_samples;
  if (position.sample >= options_.num_samples) {
    position.sample -= options_.num_samples;
    ++position.epoch;
  }
  return position;
}

absl::Status SampleOrder::check(SamplePosition position) const {
  const int64_t most = options_.epochs == 0 ? kMost : options_.epochs;
  if (position.epoch < 0 || position.epoch > most) {
    return absl::InvalidArgumentError(str_cat("epoch is ", position.epoch, "; wanted 0 to ", most));
  }
  const int64_t end =
      position.epoch == options_.epochs && options_.epochs != 0 ? 1 : options_.num_samples;
  if (position.sample < 0 || position.sample >= end) {
    return absl::InvalidArgumentError(str_cat("sample is ", position.sample, " of epoch ",
                                              position.epoch, "; wanted 0 to ", end - 1));
  }
  return absl::OkStatus();
}

std::string SampleOrder::to_json(SamplePosition position) const {
  nlohmann::ordered_json json;
  json["epoch"] = position.epoch;
  json["sample"] = position.sample;
  json["num_samples"] = options_.num_samples;
  json["seed"] = options_.seed;
  json["shuffle"] = options_.shuffle;
  if (!options_.of.empty()) json["of"] = options_.of;
  return json.dump();
}

absl::StatusOr<SamplePosition> SampleOrder::from_json(std::string_view text) const {
  using Json = nlohmann::ordered_json;
  const auto refuse = [](const std::string& why) {
    return absl::InvalidArgumentError("a position: " + why);
  };
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object()) {
    return refuse(str_cat("wanted a JSON object as ", to_json({}), ", not ",
                          text.size() > 80 ? str_cat(text.substr(0, 80), "...") : str_cat(text)));
  }
  const Json wanted = Json::parse(to_json({}));
  for (const auto& [key, value] : json.items()) {
    if (!wanted.contains(key)) return refuse(str_cat("has '", key, "', which there is not"));
    if (value.type() != wanted[key].type() &&
        !(value.is_number_integer() && wanted[key].is_number())) {
      return refuse(str_cat("'", key, "' is ", value.dump(), "; wanted ",
                            wanted[key].is_boolean()  ? "true or false"
                            : wanted[key].is_string() ? "a text"
                                                      : "a whole number"));
    }
  }
  for (const auto& [key, value] : wanted.items()) {
    if (!json.contains(key)) return refuse(str_cat("has no '", key, "'"));
    if (key != "epoch" && key != "sample" && json[key] != value) {
      return refuse(str_cat("its '", key, "' is ", json[key].dump(), ", and here ", value.dump(),
                            ": other samples, or in another order"));
    }
  }
  for (const char* key : {"epoch", "sample"}) {
    if (json[key].is_number_unsigned() &&
        json[key].get<uint64_t>() > static_cast<uint64_t>(kMost)) {
      return refuse(str_cat("'", key, "' is ", json[key].dump(), "; wanted 0 to ", kMost));
    }
  }
  const SamplePosition position{json["epoch"].get<int64_t>(), json["sample"].get<int64_t>()};
  if (const absl::Status status = check(position); !status.ok()) {
    return refuse(std::string(status.message()));
  }
  return position;
}

}  // namespace shardweave
