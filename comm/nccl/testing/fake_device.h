// A rank's device on the machine of the fake, as on_device.h wants it.
#pragma once

#include <memory>

#include "shardweave/comm/nccl/testing/fake_gpu.h"
#include "shardweave/comm/testing/on_device.h"

namespace shardweave {

std::shared_ptr<TestDevice> fake_device(int index);

}  // namespace shardweave
