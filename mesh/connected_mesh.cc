#include "shardweave/mesh/connected_mesh.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace shardweave {

// The communicators by name and members: dimensions of size 1 have the same members, but errors
// should name the right one.
struct ConnectedMesh::Pool : std::enable_shared_from_this<Pool> {
  using Key = std::pair<std::string, std::vector<int64_t>>;

  explicit Pool(std::shared_ptr<Communicator> w) : world(std::move(w)) {}

  absl::StatusOr<std::shared_ptr<Communicator>> get(const Key& key) {
    std::shared_ptr<Group> group;
    {
      std::lock_guard lock(mutex);
      std::shared_ptr<Group>& place = groups[key];
      if (place == nullptr) place = std::make_shared<Group>();
      group = place;
    }
    std::lock_guard making(group->making);
    if (group->communicator == nullptr) {
      absl::StatusOr<std::shared_ptr<Communicator>> made = world->subgroup(key.second, key.first);
      if (!made.ok()) return made.status();
      group->communicator = *std::move(made);
    }
    return group->communicator;
  }

  // Whether a group has failed, as far as this rank knows.
  bool broken() {
    std::lock_guard lock(mutex);
    return std::any_of(groups.begin(), groups.end(), [](const auto& entry) {
      const std::unique_lock made(entry.second->making, std::try_to_lock);
      const auto& communicator = entry.second->communicator;
      return made.owns_lock() && communicator != nullptr && !communicator->health().ok();
    });
  }

  absl::StatusOr<std::shared_ptr<ConnectedMesh>> mesh(DeviceMesh grid) {
    if (grid.max_rank().value >= world->size()) {
      return absl::InvalidArgumentError(absl::StrCat(grid.to_string(), " has rank ",
                                                     grid.max_rank().value, ", the world only ",
                                                     world->size(), " ranks"));
    }
    const Rank rank(world->rank());
    absl::StatusOr<Coordinate> coordinate = grid.coordinate(rank);
    if (!coordinate.ok()) return coordinate.status();
    std::lock_guard lock(meshes_mutex);
    std::unique_ptr<ConnectedMesh>& one = meshes[grid];
    if (one == nullptr) {
      one.reset(new ConnectedMesh(std::move(grid), rank, *std::move(coordinate), this));
    }
    return std::shared_ptr<ConnectedMesh>(shared_from_this(), one.get());
  }

  // The communicator of `mesh` along several of its dimensions, if it has been asked for before: found
  // without a list of its ranks, which may be many.
  using OfMesh = std::pair<const ConnectedMesh*, absl::InlinedVector<int, 4>>;
  std::shared_ptr<Communicator> find(const OfMesh& key) {
    std::lock_guard lock(mutex);
    const auto found = by_dims.find(key);
    return found == by_dims.end() ? nullptr : found->second;
  }
  void keep(const OfMesh& key, std::shared_ptr<Communicator> communicator) {
    std::lock_guard lock(mutex);
    by_dims.emplace(key, std::move(communicator));
  }

  const std::shared_ptr<Communicator> world;
  // One that is being made holds up those who want it, not those who want another.
  struct Group {
    std::mutex making;  // guards communicator
    std::shared_ptr<Communicator> communicator;
  };
  std::mutex mutex;  // guards groups and by_dims
  absl::flat_hash_map<Key, std::shared_ptr<Group>> groups;
  absl::flat_hash_map<OfMesh, std::shared_ptr<Communicator>> by_dims;  // only those of `groups`
  std::mutex meshes_mutex;
  absl::flat_hash_map<DeviceMesh, std::unique_ptr<ConnectedMesh>> meshes;
};

namespace {

absl::Status check_world(const Communicator& world) {
  const std::vector<int64_t>& world_ranks = world.world_ranks();
  for (int i = 0; i < world.size(); ++i) {
    if (world_ranks[i] == i) continue;
    return absl::InvalidArgumentError(absl::StrCat("group \"", world.name(),
                                                   "\" is not the world: its rank ", i, " is rank ",
                                                   world_ranks[i], " of the world"));
  }
  return absl::OkStatus();
}

}  // namespace

ConnectedMesh::ConnectedMesh(DeviceMesh mesh, Rank rank, Coordinate coordinate, Pool* pool)
    : mesh_(std::move(mesh)),
      rank_(rank),
      coordinate_(std::move(coordinate)),
      pool_(pool),
      by_dim_(mesh_.ndim()) {}

ConnectedMesh::~ConnectedMesh() = default;

const std::shared_ptr<Communicator>& ConnectedMesh::world() const {
  return pool_->world;
}

absl::StatusOr<std::shared_ptr<ConnectedMesh>> ConnectedMesh::create(
    DeviceMesh mesh, std::shared_ptr<Communicator> world) {
  if (absl::Status status = check_world(*world); !status.ok()) return status;
  return std::make_shared<Pool>(std::move(world))->mesh(std::move(mesh));
}

absl::StatusOr<std::shared_ptr<Communicator>> ConnectedMesh::communicator(int dim) {
  std::lock_guard lock(mutex_);
  if (dim >= 0 && dim < mesh_.ndim() && by_dim_[dim]) return by_dim_[dim];
  absl::StatusOr<std::shared_ptr<Communicator>> made = communicator(absl::MakeConstSpan(&dim, 1));
  if (made.ok()) by_dim_[dim] = *made;
  return made;
}

absl::StatusOr<std::shared_ptr<Communicator>> ConnectedMesh::communicator(
    absl::Span<const int> dims) {
  const Pool::OfMesh key{this, {dims.begin(), dims.end()}};
  if (std::shared_ptr<Communicator> made = pool_->find(key); made != nullptr) return made;
  std::vector<std::string> names;
  for (int dim : dims) {
    if (dim < 0 || dim >= mesh_.ndim()) {
      return absl::InvalidArgumentError(absl::StrCat(mesh_.to_string(), ": there is no dimension ",
                                                     dim, "; wanted 0 to ", mesh_.ndim() - 1));
    }
    names.emplace_back(mesh_.name(dim));
  }
  absl::StatusOr<DeviceMesh> group = mesh_.slice(names, rank_);
  if (!group.ok()) return group.status();
  absl::StatusOr<std::shared_ptr<Communicator>> made =
      pool_->get({absl::StrJoin(names, "_"), group->ranks()});
  if (made.ok()) pool_->keep(key, *made);
  return made;
}

absl::Status ConnectedMesh::connect() {
  for (int dim = 0; dim < mesh_.ndim(); ++dim) {
    absl::Status status = communicator(dim).status();
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<ConnectedMesh>> ConnectedMesh::slice(
    const std::vector<std::string>& names) const {
  absl::StatusOr<DeviceMesh> mesh = mesh_.slice(names, rank_);
  if (!mesh.ok()) return mesh.status();
  return pool_->mesh(*std::move(mesh));
}

absl::StatusOr<std::shared_ptr<ConnectedMesh>> ConnectedMesh::another(DeviceMesh mesh) const {
  return pool_->mesh(std::move(mesh));
}

std::shared_ptr<void> ConnectedMesh::extension(
    const std::function<std::shared_ptr<void>(ConnectedMesh&)>& make) {
  std::lock_guard lock(extension_mutex_);
  if (!extension_) extension_ = make(*this);
  return extension_;
}

absl::StatusOr<std::shared_ptr<ConnectedMesh>> connect_mesh(World& world, DeviceMesh mesh) {
  auto pool = std::static_pointer_cast<ConnectedMesh::Pool>(world.extension());
  if (pool == nullptr || pool->broken()) {
    if (absl::Status status = check_world(*world.comm()); !status.ok()) return status;
    pool = std::make_shared<ConnectedMesh::Pool>(world.comm());
    world.extension() = pool;
  }
  return pool->mesh(std::move(mesh));
}

absl::StatusOr<std::shared_ptr<ConnectedMesh>> init_device_mesh(World& world,
                                                                std::vector<MeshDim> dims) {
  absl::StatusOr<DeviceMesh> mesh = DeviceMesh::create(std::move(dims));
  if (!mesh.ok()) return mesh.status();
  if (mesh->size() != world.size()) {
    return absl::InvalidArgumentError(absl::StrCat(mesh->to_string(), " has ", mesh->size(),
                                                   " ranks, the world has ", world.size()));
  }
  return connect_mesh(world, *std::move(mesh));
}

}  // namespace shardweave
