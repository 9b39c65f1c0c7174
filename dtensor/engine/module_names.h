// Which module runs at the moment, as ModuleScopes say; in backward, as they said in forward.
// Internal to dtensor/.
//
//   names.remember();              // from here on backward finds the names again
//   names.enter(this, "layers.0.attn");
//   names.current();               // "layers.0.attn", and so for the gradients of what runs here
//   names.leave(this);
//
// Autograd numbers the operators of a thread as it records them, and in backward it tells which of
// them it is at: what is kept are the numbers at which the name changes. Bounded: the oldest go
// first. One thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace shardweave::dtensor_internal {

class ModuleNames {
 public:
  // `scope` is whose name it is, by its address: scopes may end in any order.
  void enter(const void* scope, std::string name);
  void leave(const void* scope);

  // Names are remembered between remember() and forget(), which nest.
  void remember();
  void forget();

  // "": none.
  std::string current() const;

 private:
  struct Running {
    const void* scope;
    std::string name;
    int graph_task;  // entered while this backward ran; -1: none
  };
  struct Change {
    uint64_t sequence;  // autograd's: from this number on ...
    std::string name;   // ... this is the module
  };
  void note(std::string name);

  std::vector<Running> running_;  // outermost first
  std::deque<Change> changes_;    // ascending
  int remembering_ = 0;
};

}  // namespace shardweave::dtensor_internal
