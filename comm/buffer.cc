#include "shardweave/comm/buffer.h"

#include "shardweave/comm/str_cat.h"

namespace shardweave {

std::string_view to_string(DType dtype) {
  constexpr std::string_view kNames[kNumDTypes] = {"f64",    "f32", "f16", "bf16", "f8e4m3",
                                                   "f8e5m2", "i64", "i32", "i16",  "i8",
                                                   "u64",    "u32", "u16", "u8",   "bool"};
  return kNames[static_cast<int>(dtype)];
}

std::string to_string(Device device) {
  return device.type == DeviceType::kCpu ? "cpu" : str_cat("cuda:", device.index);
}

}  // namespace shardweave
