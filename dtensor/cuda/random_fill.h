// Random numbers in a GPU's memory, drawn there: the very bits that draw_numbers() gives on the
// host.
//
//   RandomDraw draw = RandomDraw::normal(DType::kBF16, 0, 0.02);
//   absl::Status status = fill_random(draw, {.seed = seed, .stream = stream},
//                                     index_boxes(held, sizes, local.strides()), memory,
//                                     {.device = 0, .stream = stream_of_cuda});
//
// Built with --config=cuda there are kernels for compute capability 8.x, 9.0, 10.x and later ones;
// else there are none, and everything here says Unimplemented. Neither needs a GPU, a driver or
// CUDA's runtime to be built, linked or started.
//
// dtensor/rules/random.cc calls it. Any strides will do: no buffer, no copy. Of bernoulli_(tensor)
// `draw.each` would be on the GPU, doubles, with the strides of `out`; the host draws those.
// Complex tensors, dropout and normal(mean, std) are made of these and need nothing.
// distribution.cc (Poisson, gamma, binomial) has no kernels and goes on drawing on the host.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "shardweave/dtensor/cuda/index_boxes.h"
#include "shardweave/dtensor/engine/random_draw.h"

namespace shardweave::dtensor_internal {

// Where a kernel runs.
struct OnDevice {
  int device = 0;          // as CUDA numbers those that are visible
  void* stream = nullptr;  // CUstream, which is cudaStream_t; null: the device's default stream
};

// Whether this program was built with kernels.
bool has_random_kernels();

// Finds the driver, loads the kernels for `device` and makes them ready; calls after the first are
// cheap. fill_random() does it too, but not while its stream is being captured, where it may fail:
// call this before. Errors: see fill_random().
absl::Status load_random_kernels(int device);

// Begins to draw the elements of `boxes` into `out`, memory of the GPU, in the order of the stream,
// and returns. `out`, and what `draw.each` and `source.added` point to, must live until the stream
// has done it. Boxes must not overlap. With `source.added`, the numbers are those of stream number
// source.stream + *source.added as it is when the kernel runs: a captured graph that adds to it
// draws anew in every replay. The calling thread's current context is as before. Any thread.
//
//   Unimplemented       built without kernels; or there are no such numbers (can_draw())
//   FailedPrecondition  no driver, an old one, no GPU, no such device, one older than 8.0
//   ResourceExhausted   no memory on the GPU for the kernels
//   Internal            whatever else the driver says
absl::Status fill_random(const RandomDraw& draw, const RandomSource& source,
                         absl::Span<const IndexBox> boxes, void* out, const OnDevice& where);

}  // namespace shardweave::dtensor_internal
