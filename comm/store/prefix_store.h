// A view of a Store in which every key begins with a prefix, so that several users share one store.
//
//   auto gloo = make_prefix_store(store, "gloo/tp0/");
//   gloo->set("0", address);                                  // store key "gloo/tp0/0"
#pragma once

#include <memory>
#include <string>

#include "shardweave/comm/store/store.h"

namespace shardweave {

std::shared_ptr<Store> make_prefix_store(std::shared_ptr<Store> store, std::string prefix);

}  // namespace shardweave
