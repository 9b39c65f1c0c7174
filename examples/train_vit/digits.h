// scikit-learn's digits (UCI, Alpaydin and Kaynak, 1998): 1797 scanned digits of 8 x 8 pixels.
//
//   digits::images();   // [1797, 1, 8, 8], float, 0 to 1
//   digits::labels();   // [1797], int64, 0 to 9
//
// They are read from scikit-learn's package when this is built (@digits), and linked in.
#pragma once

#include <string_view>

#include "ATen/core/Tensor.h"

namespace digits {

inline constexpr int kCount = 1797, kSide = 8, kClasses = 10;

at::Tensor images();
at::Tensor labels();
// What the numbers are made of.
std::string_view bytes();

}  // namespace digits
