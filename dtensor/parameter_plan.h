// How the parameters and buffers of a module lie on a mesh, said by name.
//
//   const ParameterPlan plan = {
//       {"*", {{"dp", Shard(0)}}},                      // what nothing else speaks of
//       {"*.{q,k,v,up}.weight", {{"tp", Shard(0)}}},    // more characters: more specific
//       {"lm_head.weight", {Replicate(), Shard(0)}},    // one per mesh dimension, in their order
//   };
//   std::cout << to_string(resolve_plan(*model, mesh->mesh(), plan));
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/fqn_pattern.h"

namespace torch::nn {
class Module;
}

namespace shardweave {

// By the names of mesh dimensions, where what is not named is replicated; or by position: a placement
// for each of the mesh's dimensions, and the order in which they cut.
class PlanPlacements {
 public:
  PlanPlacements() = default;  // Replicate everywhere
  PlanPlacements(NamedPlacements named) : value_(std::move(named)) {}
  PlanPlacements(std::initializer_list<NamedPlacements::value_type> named)
      : value_(NamedPlacements(named)) {}
  PlanPlacements(Layout by_position) : value_(std::move(by_position)) {}
  PlanPlacements(Placements by_position) : value_(Layout(std::move(by_position))) {}
  PlanPlacements(std::initializer_list<Placement> by_position)
      : value_(Layout(Placements(by_position))) {}

  // nullptr: it is the other.
  const NamedPlacements* named() const { return std::get_if<NamedPlacements>(&value_); }
  const Layout* by_position() const { return std::get_if<Layout>(&value_); }

  friend bool operator==(const PlanPlacements&, const PlanPlacements&) = default;

 private:
  std::variant<NamedPlacements, Layout> value_;
};

// Parameters and buffers whose FQN matches `pattern` (see FqnPattern) get these placements.
struct PlanEntry {
  std::string pattern;
  PlanPlacements placements;
};
// In any order. Of two entries that match a name the more specific counts.
using ParameterPlan = std::vector<PlanEntry>;

// What a plan says of one tensor.
struct ResolvedTensor {
  std::vector<std::string> fqns;  // more than one: it is tied
  std::vector<int64_t> sizes;
  bool is_buffer = false;
  Layout layout;  // dimensions counted from the front
  std::vector<int64_t>
      local_sizes;  // of the part of the mesh's first rank, which is as large as any
  // The entry that decided, of several that agree the first; nullopt: none matches, and it is
  // replicated.
  std::optional<size_t> entry;
  std::string pattern;  // of that entry, else empty
};

// What distribute_module() would do, without doing anything: every parameter, then every buffer,
// each tensor once, in the order of the module. A tensor with several names (tied weights) is what
// the entries say of any of its names.
//
// Throws Error, naming the entry and what it matches: NotFound for an entry that matches nothing (with
// names that are nearly the same) or names a dimension that the mesh does not have; InvalidArgument
// for what is no pattern, a Partial, a number of placements that is not the mesh's, placements that do
// not fit the tensor, two entries that are equally specific and differ, an entry that decides nothing,
// since more specific ones match all that it does, and entries that place the names of one tensor
// differently.
std::vector<ResolvedTensor> resolve_plan(const torch::nn::Module& module, const DeviceMesh& mesh,
                                         const ParameterPlan& plan);

// A row per tensor: names, shape, local shape of the first rank, placements, the pattern that decided.
std::string to_string(const std::vector<ResolvedTensor>& resolved);

}  // namespace shardweave
