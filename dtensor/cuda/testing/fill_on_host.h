// What the kernels of fill_random() do, done by the host: the same code, thread by thread.
#pragma once

#include "absl/types/span.h"
#include "shardweave/dtensor/cuda/random_kernel.h"
#include "shardweave/dtensor/engine/random_draw.h"

namespace shardweave::testing {

// As fill_random(), with all pointers to memory of the host. Wants can_draw().
inline void fill_on_host(const dtensor_internal::RandomDraw& draw,
                         const dtensor_internal::RandomSource& source,
                         absl::Span<const dtensor_internal::IndexBox> boxes, void* out) {
  constexpr uint64_t kThreads = 7;
  dtensor_internal::with_functor(draw, [&](const auto& functor) {
    using Functor = std::remove_cvref_t<decltype(functor)>;
    for (const dtensor_internal::IndexBox& box : boxes) {
      for (uint64_t thread = 0; thread < kThreads; ++thread) {
        dtensor_internal::fill_items(thread, kThreads, source, functor, box,
                                     static_cast<typename Functor::Element*>(out));
      }
    }
  });
}

}  // namespace shardweave::testing
