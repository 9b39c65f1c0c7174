// What Plugins (plugin.h) do to a module and a plan, for parallelize_module(). Internal to modules/.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "shardweave/modules/plugin.h"

namespace shardweave::modules_internal {

// The patches of `plugins`, applied to a module: while this lives, and for good behind keep().
class AppliedPatches {
 public:
  // Throws Error, having taken back what it had done.
  AppliedPatches(torch::nn::Module& module, const DeviceMesh& mesh, const ShardingPlan& plan,
                 const Plugins& plugins);
  void keep() { undo_.steps.clear(); }
  // What they are, for ranks to compare.
  const std::string& text() const { return text_; }

 private:
  struct Undo {
    Undo() = default;
    ~Undo();
    Undo(const Undo&) = delete;
    Undo& operator=(const Undo&) = delete;
    std::vector<std::function<void()>> steps;
  };
  Undo undo_;
  std::string text_;
};

// The plan without its module part: what the modules' plug-ins answer stands behind its other entries.
ShardingPlan with_answers(torch::nn::Module& module, const DeviceMesh& mesh,
                          const ShardingPlan& plan, const Plugins& plugins);

// Which entries of `answered` are a plug-in's, for errors that number them; "": none.
std::string which_are_answers(const ShardingPlan& plan, const ShardingPlan& answered);

// Throws Error if one cannot be added to the mesh.
void check_rules(const MeshPtr& mesh, const Plugins& plugins);
void add_rules(const MeshPtr& mesh, const Plugins& plugins);
// Their operators, for ranks to compare.
std::string text_of_rules(const Plugins& plugins);

}  // namespace shardweave::modules_internal
