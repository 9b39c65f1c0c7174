// Whether two functions take and give the same things in a binary interface: for tests that compare
// declarations of ours with those of NVIDIA's headers.
//
//   static_assert(kPassedAlike<int(void* stream), decltype(::cudaStreamDestroy)>);
//
// Pointers may point to anything, enums are ints, and values of class type have the same size.
#pragma once

#include <type_traits>

namespace shardweave::testing {

template <typename Mine, typename Theirs>
constexpr bool is_passed_alike() {
  if constexpr (std::is_pointer_v<Mine> || std::is_pointer_v<Theirs>) {
    return std::is_pointer_v<Mine> && std::is_pointer_v<Theirs>;
  } else if constexpr (std::is_enum_v<Theirs>) {
    return std::is_same_v<Mine, int> && sizeof(Theirs) == sizeof(int);
  } else if constexpr (std::is_class_v<Mine>) {
    return std::is_class_v<Theirs> && sizeof(Mine) == sizeof(Theirs) &&
           std::is_trivially_copyable_v<Mine> && std::is_trivially_copyable_v<Theirs>;
  } else {
    return std::is_same_v<Mine, Theirs>;
  }
}

template <typename Mine, typename Theirs>
inline constexpr bool kPassedAlike = false;
template <typename R, typename... A, typename S, typename... B>
  requires(sizeof...(A) == sizeof...(B))
inline constexpr bool kPassedAlike<R(A...), S(B...)> =
    is_passed_alike<R, S>() && (is_passed_alike<A, B>() && ...);

}  // namespace shardweave::testing
