#include "digits.h"

#include "ATen/ATen.h"

namespace digits {

// A row per image: its pixels, 0 to 16, and what it shows. Generated; see BUILD.
extern const unsigned char kRows[];

namespace {

constexpr int64_t kPixels = kSide * kSide;

at::Tensor rows() {
  return at::from_blob(const_cast<unsigned char*>(kRows), {kCount, kPixels + 1}, at::kByte);
}

}  // namespace

at::Tensor images() {
  return rows().narrow(1, 0, kPixels).to(at::kFloat).div(16).view({kCount, 1, kSide, kSide});
}

at::Tensor labels() {
  return rows().select(1, kPixels).to(at::kLong);
}

std::string_view bytes() {
  return {reinterpret_cast<const char*>(kRows), kCount * (kPixels + 1)};
}

}  // namespace digits
