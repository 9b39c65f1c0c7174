// Where is my rank? Prints the coordinate of every rank of a mesh and the ranks along each
// dimension.
//
//   bazel run //:only_mesh -- "dp=2,tp=4"
#include <iostream>
#include <string_view>

#include "absl/strings/str_join.h"
#include "shardweave/mesh/device_mesh.h"

namespace {

absl::Status print_ranks(std::string_view text) {
  auto mesh = shardweave::DeviceMesh::parse(text);
  if (!mesh.ok()) return mesh.status();
  std::cout << mesh->to_string() << "\n";
  for (int64_t rank : mesh->ranks()) {
    auto coordinate = mesh->coordinate(shardweave::Rank(rank));
    if (!coordinate.ok()) return coordinate.status();
    std::cout << "rank " << rank << " at (" << absl::StrJoin(*coordinate, ", ") << ")";
    for (int dim = 0; dim < mesh->ndim(); ++dim) {
      auto group = mesh->group(dim, shardweave::Rank(rank));
      if (!group.ok()) return group.status();
      std::cout << "  " << mesh->name(dim) << ": " << absl::StrJoin(*group, " ");
    }
    std::cout << "\n";
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  absl::Status status = print_ranks(argc > 1 ? argv[1] : "dp=2,tp=4");
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
