// What the functions that read gradients have in common.
#pragma once

#include <string>

#include "shardweave/capi/guard.h"
#include "shardweave/dtensor/error.h"

namespace shardweave::capi {

// A gradient that is still to be synchronized is, in the layers below, another function's affair.
template <typename F>
auto saying_how_to_synchronize(F body) {
  try {
    return body();
  } catch (const Error& error) {
    const std::string message(error.status().message());
    if (!message.ends_with("are to be synchronized before the step")) throw;
    fail(error.status().code(),
         message + " (swv_module_finish_grad_sync and swv_finish_grad_sync do that)");
  }
}

}  // namespace shardweave::capi
