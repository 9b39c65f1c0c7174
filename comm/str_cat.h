// absl::StrCat that takes std::string_view too: an Abseil built for C++11, as Debian's is, has a
// string_view of its own.
#pragma once

#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace shardweave {
namespace str_cat_internal {

template <typename T>
const T& piece(const T& value) {
  return value;
}
inline absl::string_view piece(const std::string_view& value) {
  return {value.data(), value.size()};
}

}  // namespace str_cat_internal

template <typename... T>
std::string str_cat(const T&... parts) {
  return absl::StrCat(str_cat_internal::piece(parts)...);
}

template <typename... T>
void str_append(std::string* text, const T&... parts) {
  absl::StrAppend(text, str_cat_internal::piece(parts)...);
}

}  // namespace shardweave
