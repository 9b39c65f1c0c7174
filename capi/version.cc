// Which version this is.
#include "torch/headeronly/version.h"
#include "shardweave.h"

#define SHARDWEAVE_TEXT(x) #x
#define SHARDWEAVE_DOTTED(a, b, c) SHARDWEAVE_TEXT(a) "." SHARDWEAVE_TEXT(b) "." SHARDWEAVE_TEXT(c)

int32_t swv_version(void) {
  return SWV_VERSION;
}

const char* swv_build_info(void) {
  return SHARDWEAVE_DOTTED(SWV_VERSION_MAJOR, SWV_VERSION_MINOR,
                           SWV_VERSION_PATCH) "; LibTorch " TORCH_VERSION
                                              "; backends inproc, gloo, counting";
}
