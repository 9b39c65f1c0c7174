// The Store of ranks that are threads of one process: a hash map under a mutex.
//
//   std::shared_ptr<Store> store = make_in_process_store();   // one for all rank threads
#pragma once

#include <memory>

#include "shardweave/comm/store/store.h"

namespace shardweave {

std::shared_ptr<Store> make_in_process_store();

}  // namespace shardweave
