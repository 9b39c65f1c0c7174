// What every Store must do, as GoogleTest cases that each store's test instantiates.
//
//   INSTANTIATE_TEST_SUITE_P(
//       InProcess, StoreConformance, testing::Values(StoreCase{"in_process", [] {
//         auto store = make_in_process_store();
//         return [store](int) { return store; };      // the store as client `i` sees it
//       }}));
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "gtest/gtest.h"
#include "shardweave/comm/store/store.h"

namespace shardweave {

// Client number -> its handle of one shared, empty store. Handles live as long as the function.
using StoreClients = std::function<std::shared_ptr<Store>(int client)>;

struct StoreCase {
  std::string name;
  std::function<StoreClients()> make;  // a new store each time
};
inline void PrintTo(const StoreCase& store_case, std::ostream* os) {
  *os << store_case.name;
}

class StoreConformance : public testing::TestWithParam<StoreCase> {
 protected:
  StoreClients clients_ = GetParam().make();
  std::shared_ptr<Store> store_ = clients_(0);
};

}  // namespace shardweave
