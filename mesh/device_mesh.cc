#include "shardweave/mesh/device_mesh.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/hash/hash.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace shardweave {
namespace {

constexpr size_t kMaxShownRanks = 8;

// One digit of a position in a mixed-radix number system. It belongs to the mesh dimension `dim`,
// in whose coordinate it counts `weight`. A dimension of evenly spaced ranks has one digit, one of
// size 1 has none, and one that was flattened from several may have more.
struct Digit {
  int64_t size;    // at least 2
  int64_t stride;  // what it counts in the position; positive
  int dim;
  int64_t weight;
  friend bool operator==(const Digit&, const Digit&) = default;
};
// Largest stride first. Always nested: a stride exceeds the largest number that the digits after it
// can make, so that a position determines its digits by division.
using Digits = absl::InlinedVector<Digit, 4>;

// The largest number that `digits` can make if they are nested, else (or beyond 64 bits) nothing.
std::optional<int64_t> nested_span(const Digits& digits) {
  int64_t span = 0;
  for (auto digit = digits.rbegin(); digit != digits.rend(); ++digit) {
    int64_t more = 0;
    if (digit->stride <= span || __builtin_mul_overflow(digit->size - 1, digit->stride, &more) ||
        __builtin_add_overflow(span, more, &span)) {
      return std::nullopt;
    }
  }
  return span;
}

void sort_digits(Digits& digits) {
  std::sort(digits.begin(), digits.end(),
            [](const Digit& a, const Digit& b) { return a.stride > b.stride; });
}

// Joins digits that continue each other, so that equal meshes have equal digits. Nesting leaves no
// room for another digit between two such: they are neighbours.
void join_digits(Digits& digits) {
  size_t kept = 0;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (kept > 0) {
      Digit& major = digits[kept - 1];
      const Digit& minor = digits[i];
      if (major.dim == minor.dim && major.stride == minor.stride * minor.size &&
          major.weight == minor.weight * minor.size) {
        major = {major.size * minor.size, minor.stride, minor.dim, minor.weight};
        continue;
      }
    }
    digits[kept++] = digits[i];
  }
  digits.resize(kept);
}

// An explicit array of ranks and its inverse. A mesh made from one counts positions in it.
struct Table {
  explicit Table(std::vector<int64_t> all) : ranks(std::move(all)) {
    for (size_t i = 0; i < ranks.size(); ++i) positions.emplace(ranks[i], i);
  }
  std::vector<int64_t> ranks;
  absl::flat_hash_map<int64_t, int64_t> positions;
};

bool good_name(std::string_view name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '_' || c == '-' || c == '.';
  });
}

std::string show(absl::Span<const MeshDim> dims) {
  return absl::StrJoin(dims, ", ", [](std::string* out, const MeshDim& dim) {
    absl::StrAppend(out, dim.name, "=", dim.size);
  });
}

std::string show_ranks(absl::Span<const int64_t> ranks, int64_t size) {
  return absl::StrCat("[", absl::StrJoin(ranks, ", "),
                      size > static_cast<int64_t>(ranks.size())
                          ? absl::StrCat(", ... ", size - ranks.size(), " more]")
                          : "]");
}

// The number of ranks, if names and sizes are good. `where()` begins the message.
absl::StatusOr<int64_t> checked_size(absl::Span<const MeshDim> dims,
                                     absl::FunctionRef<std::string()> where) {
  auto error = [&](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(where(), "(", show(dims), "): ", what...));
  };
  if (dims.empty()) return error("a mesh needs at least one dimension");
  int64_t size = 1;
  for (size_t i = 0; i < dims.size(); ++i) {
    const MeshDim& dim = dims[i];
    if (!good_name(dim.name)) {
      return error("\"", dim.name, "\" is no name for a dimension: wanted letters, digits, _ - .");
    }
    for (size_t j = 0; j < i; ++j) {
      if (dims[j].name == dim.name) return error("two dimensions are named \"", dim.name, "\"");
    }
    if (dim.size < 1) {
      return error("dimension \"", dim.name, "\" has size ", dim.size, ": wanted at least 1");
    }
    if (__builtin_mul_overflow(size, dim.size, &size)) {
      return error("the number of ranks does not fit 64 bits");
    }
  }
  return size;
}

}  // namespace

struct DeviceMesh::Grid {
  std::vector<MeshDim> dims;
  absl::InlinedVector<int64_t, 4> shape;
  Digits digits;
  int64_t offset = 0;                  // the position of coordinate 0
  std::shared_ptr<const Table> table;  // null: positions are ranks
  int64_t size = 1;
  size_t hash = 0;

  int64_t rank_of(int64_t position) const { return table ? table->ranks[position] : position; }

  std::optional<int64_t> position_of(Rank rank) const {
    if (!table) return rank.value;
    auto found = table->positions.find(rank.value);
    if (found == table->positions.end()) return std::nullopt;
    return found->second;
  }

  // The position of a coordinate that is in range.
  int64_t position_at(absl::Span<const int64_t> coordinate) const {
    int64_t position = offset;
    for (const Digit& digit : digits) {
      position += coordinate[digit.dim] / digit.weight % digit.size * digit.stride;
    }
    return position;
  }

  // The inverse; nothing if the position is not in the mesh.
  std::optional<Coordinate> coordinate_at(int64_t position) const {
    if (position < offset) return std::nullopt;
    Coordinate coordinate(dims.size(), 0);
    int64_t rest = position - offset;
    for (const Digit& digit : digits) {
      const int64_t value = rest / digit.stride;
      if (value >= digit.size) return std::nullopt;
      coordinate[digit.dim] += value * digit.weight;
      rest -= value * digit.stride;
    }
    if (rest != 0) return std::nullopt;
    return coordinate;
  }

  std::optional<Coordinate> coordinate_of(Rank rank) const {
    const std::optional<int64_t> position = position_of(rank);
    return position ? coordinate_at(*position) : std::nullopt;
  }

  // The first `count` ranks in row-major order.
  std::vector<int64_t> first_ranks(int64_t count) const {
    std::vector<int64_t> ranks;
    ranks.reserve(count);
    Coordinate coordinate(dims.size(), 0);
    while (static_cast<int64_t>(ranks.size()) < count) {
      ranks.push_back(rank_of(position_at(coordinate)));
      for (size_t i = dims.size(); i-- > 0;) {
        if (++coordinate[i] < dims[i].size) break;
        coordinate[i] = 0;
      }
    }
    return ranks;
  }
};

// Fills in what follows from the rest. Names and sizes are checked and the digits nested.
DeviceMesh DeviceMesh::finish(Grid grid) {
  join_digits(grid.digits);
  grid.shape.clear();
  grid.size = 1;
  for (const MeshDim& dim : grid.dims) {
    grid.shape.push_back(dim.size);
    grid.size *= dim.size;
  }
  // Meshes with and without a table must agree: hash a few ranks, not how they came about.
  Coordinate coordinate(grid.dims.size(), 0);
  absl::InlinedVector<int64_t, 5> samples = {grid.rank_of(grid.offset)};
  for (size_t i = 0; i < grid.dims.size(); ++i) {
    coordinate[i] = grid.dims[i].size - 1;
    samples.push_back(grid.rank_of(grid.position_at(coordinate)));
  }
  grid.hash = absl::HashOf(grid.shape, samples);
  for (const MeshDim& dim : grid.dims) grid.hash = absl::HashOf(grid.hash, dim.name);
  return DeviceMesh(std::make_shared<const Grid>(std::move(grid)));
}

absl::StatusOr<DeviceMesh> DeviceMesh::create(std::vector<MeshDim> dims) {
  absl::StatusOr<int64_t> size = checked_size(dims, [] { return "DeviceMesh"; });
  if (!size.ok()) return size.status();
  Grid grid;
  int64_t stride = *size;
  for (size_t i = 0; i < dims.size(); ++i) {
    stride /= dims[i].size;
    if (dims[i].size > 1) grid.digits.push_back({dims[i].size, stride, static_cast<int>(i), 1});
  }
  grid.dims = std::move(dims);
  return finish(std::move(grid));
}

absl::StatusOr<DeviceMesh> DeviceMesh::from_ranks(std::vector<MeshDim> dims,
                                                  std::vector<int64_t> ranks) {
  absl::StatusOr<int64_t> size = checked_size(dims, [] { return "DeviceMesh"; });
  if (!size.ok()) return size.status();
  auto error = [&](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat("DeviceMesh(", show(dims), "): ", what...));
  };
  if (*size != static_cast<int64_t>(ranks.size())) {
    return error("wanted ", *size, " ranks, given ", ranks.size());
  }
  for (int64_t rank : ranks) {
    if (rank < 0) return error("rank ", rank, " is negative");
  }
  Grid grid;
  grid.dims = std::move(dims);

  // Most arrays are layouts: prefer one, which also makes equal meshes compare fast.
  grid.offset = ranks[0];
  int64_t step = *size;
  for (size_t i = 0; i < grid.dims.size(); ++i) {
    step /= grid.dims[i].size;
    if (grid.dims[i].size == 1) continue;
    grid.digits.push_back({grid.dims[i].size, ranks[step] - grid.offset, static_cast<int>(i), 1});
  }
  sort_digits(grid.digits);
  if (nested_span(grid.digits) && grid.first_ranks(*size) == ranks) return finish(std::move(grid));

  auto table = std::make_shared<const Table>(std::move(ranks));
  if (table->positions.size() != table->ranks.size()) {
    std::vector<int64_t> sorted = table->ranks;
    std::sort(sorted.begin(), sorted.end());
    return absl::InvalidArgumentError(
        absl::StrCat("DeviceMesh(", show(grid.dims), "): rank ",
                     *std::adjacent_find(sorted.begin(), sorted.end()), " is there twice"));
  }
  absl::StatusOr<DeviceMesh> row_major = create(grid.dims);
  grid.digits = row_major->grid_->digits;
  grid.offset = 0;
  grid.table = std::move(table);
  return finish(std::move(grid));
}

absl::StatusOr<DeviceMesh> DeviceMesh::parse(std::string_view text) {
  const std::string whole(text);
  auto error = [&](const auto&... what) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh \"", whole, "\": ", what..., "; wanted a form such as \"dp=2,tp=4\""));
  };
  std::vector<MeshDim> dims;
  for (absl::string_view part : absl::StrSplit(whole, ',')) {
    const std::vector<std::string> sides = absl::StrSplit(part, '=');
    if (sides.size() != 2) return error("\"", part, "\" is not NAME=SIZE");
    MeshDim dim{std::string(absl::StripAsciiWhitespace(sides[0])), 0};
    if (!absl::SimpleAtoi(sides[1], &dim.size)) {
      return error("the size \"", sides[1], "\" of \"", dim.name, "\" is not a number");
    }
    dims.push_back(std::move(dim));
  }
  return create(std::move(dims));
}

int DeviceMesh::ndim() const {
  return static_cast<int>(grid_->dims.size());
}
int64_t DeviceMesh::size() const {
  return grid_->size;
}
int64_t DeviceMesh::size(int dim) const {
  return grid_->shape[dim];
}
absl::Span<const int64_t> DeviceMesh::shape() const {
  return grid_->shape;
}
std::string_view DeviceMesh::name(int dim) const {
  return grid_->dims[dim].name;
}
std::vector<MeshDim> DeviceMesh::dims() const {
  return grid_->dims;
}
size_t DeviceMesh::hash() const {
  return grid_->hash;
}

absl::StatusOr<int> DeviceMesh::dim(std::string_view name) const {
  for (int i = 0; i < ndim(); ++i) {
    if (grid_->dims[i].name == name) return i;
  }
  return absl::NotFoundError(
      absl::StrCat(to_string(), " has no dimension \"", std::string(name), "\"; it has ",
                   absl::StrJoin(grid_->dims, ", ", [](std::string* out, const MeshDim& dim) {
                     absl::StrAppend(out, "\"", dim.name, "\"");
                   })));
}

absl::StatusOr<Rank> DeviceMesh::rank_at(absl::Span<const int64_t> coordinate) const {
  auto error = [&](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(
        to_string(), ": coordinate (", absl::StrJoin(coordinate, ", "), "): ", what...));
  };
  if (coordinate.size() != grid_->dims.size()) {
    return error("wanted ", ndim(), " numbers, given ", coordinate.size());
  }
  for (int i = 0; i < ndim(); ++i) {
    if (coordinate[i] < 0 || coordinate[i] >= size(i)) {
      return error(coordinate[i], " is outside dimension ", grid_->dims[i].name, " of size ",
                   size(i));
    }
  }
  return Rank(grid_->rank_of(grid_->position_at(coordinate)));
}

absl::StatusOr<Coordinate> DeviceMesh::coordinate(Rank rank) const {
  std::optional<Coordinate> coordinate = grid_->coordinate_of(rank);
  if (coordinate) return *std::move(coordinate);
  return absl::NotFoundError(absl::StrCat("rank ", rank.value, " is not in ", to_string()));
}

bool DeviceMesh::contains(Rank rank) const {
  return grid_->coordinate_of(rank).has_value();
}

absl::StatusOr<std::vector<int64_t>> DeviceMesh::group(int dim, Rank rank) const {
  if (dim < 0 || dim >= ndim()) {
    return absl::InvalidArgumentError(
        absl::StrCat(to_string(), ": there is no dimension ", dim, "; wanted 0 to ", ndim() - 1));
  }
  absl::StatusOr<Coordinate> coordinate = this->coordinate(rank);
  if (!coordinate.ok()) return coordinate.status();
  std::vector<int64_t> ranks;
  ranks.reserve(size(dim));
  for (int64_t i = 0; i < size(dim); ++i) {
    (*coordinate)[dim] = i;
    ranks.push_back(grid_->rank_of(grid_->position_at(*coordinate)));
  }
  return ranks;
}

std::vector<int64_t> DeviceMesh::ranks() const {
  return grid_->first_ranks(size());
}

Rank DeviceMesh::min_rank() const {
  if (grid_->table) {
    const std::vector<int64_t> all = ranks();
    return Rank(*std::min_element(all.begin(), all.end()));
  }
  return Rank(grid_->position_at(Coordinate(grid_->shape.size(), 0)));
}

Rank DeviceMesh::max_rank() const {
  if (grid_->table) {
    const std::vector<int64_t> all = ranks();
    return Rank(*std::max_element(all.begin(), all.end()));
  }
  Coordinate last(grid_->shape.begin(), grid_->shape.end());
  for (int64_t& value : last) --value;
  return Rank(grid_->position_at(last));
}

absl::StatusOr<DeviceMesh> DeviceMesh::slice(const std::vector<std::string>& names,
                                             Rank member) const {
  absl::StatusOr<Coordinate> coordinate = this->coordinate(member);
  if (!coordinate.ok()) return coordinate.status();
  Grid grid;
  std::vector<int> new_dim(ndim(), -1);
  for (const std::string& name : names) {
    absl::StatusOr<int> dim = this->dim(name);
    if (!dim.ok()) return dim.status();
    new_dim[*dim] = static_cast<int>(grid.dims.size());
    grid.dims.push_back(grid_->dims[*dim]);
    (*coordinate)[*dim] = 0;
  }
  absl::StatusOr<int64_t> size =
      checked_size(grid.dims, [&] { return "a slice of " + to_string() + " as "; });
  if (!size.ok()) return size.status();
  for (Digit digit : grid_->digits) {
    if (new_dim[digit.dim] < 0) continue;
    digit.dim = new_dim[digit.dim];
    grid.digits.push_back(digit);
  }
  grid.offset = grid_->position_at(*coordinate);
  grid.table = grid_->table;
  return finish(std::move(grid));
}

absl::StatusOr<DeviceMesh> DeviceMesh::flatten(const std::vector<std::string>& names,
                                               std::string_view new_name) const {
  int first = 0;
  int last = ndim() - 1;
  for (size_t i = 0; i < names.size(); ++i) {
    absl::StatusOr<int> dim = this->dim(names[i]);
    if (!dim.ok()) return dim.status();
    if (i == 0) first = *dim;
    if (*dim != first + static_cast<int>(i)) {
      return absl::InvalidArgumentError(
          absl::StrCat("cannot flatten (", absl::StrJoin(names, ", "), ") of ", to_string(),
                       ": wanted neighbouring dimensions in the mesh's order"));
    }
    last = *dim;
  }
  Grid grid = *grid_;
  MeshDim merged{std::string(new_name), 1};
  std::vector<int64_t> weight(ndim(), 1);  // of one step along each old dimension in the new one
  for (int i = last; i >= first; --i) {
    weight[i] = merged.size;
    merged.size *= size(i);
  }
  if (new_name.empty()) {
    merged.name =
        absl::StrJoin(grid.dims.begin() + first, grid.dims.begin() + last + 1, "_",
                      [](std::string* out, const MeshDim& dim) { absl::StrAppend(out, dim.name); });
  }
  for (Digit& digit : grid.digits) {
    digit.weight *= weight[digit.dim];
    digit.dim = digit.dim > last ? digit.dim - (last - first) : std::min(digit.dim, first);
  }
  grid.dims.erase(grid.dims.begin() + first, grid.dims.begin() + last);
  grid.dims[first] = std::move(merged);
  absl::StatusOr<int64_t> size =
      checked_size(grid.dims, [&] { return to_string() + ", flattened to "; });
  if (!size.ok()) return size.status();
  return finish(std::move(grid));
}

absl::StatusOr<DeviceMesh> DeviceMesh::unflatten(std::string_view name,
                                                 std::vector<MeshDim> dims) const {
  absl::StatusOr<int> split = dim(name);
  if (!split.ok()) return split.status();
  auto where = [&] { return to_string() + ", unflattened to "; };
  absl::StatusOr<int64_t> product = checked_size(dims, where);
  if (!product.ok()) return product.status();
  if (*product != size(*split)) {
    return absl::InvalidArgumentError(
        absl::StrCat(where(), "(", show(dims), "): the sizes multiply to ", *product,
                     ", wanted the ", size(*split), " of \"", std::string(name), "\""));
  }
  Grid grid = *grid_;
  grid.dims.erase(grid.dims.begin() + *split);
  grid.dims.insert(grid.dims.begin() + *split, dims.begin(), dims.end());
  absl::StatusOr<int64_t> size = checked_size(grid.dims, where);
  if (!size.ok()) return size.status();

  // Cut the digits of the old dimension where a new one ends.
  grid.digits.clear();
  for (Digit digit : grid_->digits) {
    if (digit.dim != *split) {
      if (digit.dim > *split) digit.dim += static_cast<int>(dims.size()) - 1;
      grid.digits.push_back(digit);
      continue;
    }
    int64_t begin = 1;  // the new dimension covers the weights [begin, end)
    for (size_t i = dims.size(); i-- > 0;) {
      const int64_t end = begin * dims[i].size;
      const int64_t low = std::max(begin, digit.weight);
      const int64_t high = std::min(end, digit.weight * digit.size);
      if (low < high) {
        if (low % digit.weight != 0 || high % low != 0) {
          return from_ranks(std::move(grid.dims), ranks());  // no layout describes it
        }
        grid.digits.push_back({high / low, digit.stride * (low / digit.weight),
                               *split + static_cast<int>(i), low / begin});
      }
      begin = end;
    }
  }
  sort_digits(grid.digits);
  return finish(std::move(grid));
}

absl::StatusOr<DeviceMesh> DeviceMesh::concatenate(absl::Span<const DeviceMesh> meshes) {
  auto error = [&](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cannot concatenate (",
        absl::StrJoin(meshes, ", ",
                      [](std::string* out, const DeviceMesh& mesh) { *out += mesh.to_string(); }),
        "): ", what...));
  };
  if (meshes.empty()) return error("wanted at least one mesh");
  Grid grid;
  grid.table = meshes[0].grid_->table;
  for (const DeviceMesh& mesh : meshes) {
    const std::shared_ptr<const Table>& table = mesh.grid_->table;
    if (table != grid.table && !(table && grid.table && table->ranks == grid.table->ranks)) {
      return error("they are not slices of one mesh");
    }
    for (Digit digit : mesh.grid_->digits) {
      digit.dim += static_cast<int>(grid.dims.size());
      grid.digits.push_back(digit);
    }
    grid.dims.insert(grid.dims.end(), mesh.grid_->dims.begin(), mesh.grid_->dims.end());
  }
  absl::StatusOr<int64_t> size = checked_size(grid.dims, [] { return "DeviceMesh"; });
  if (!size.ok()) return size.status();
  sort_digits(grid.digits);
  const std::optional<int64_t> span = nested_span(grid.digits);
  if (!span) return error("they would put one rank at two coordinates");

  // A common rank has the coordinates of all slices at once; count back from it to coordinate 0.
  const DeviceMesh& smallest = *std::min_element(
      meshes.begin(), meshes.end(),
      [](const DeviceMesh& a, const DeviceMesh& b) { return a.size() < b.size(); });
  for (int64_t rank : smallest.ranks()) {
    const int64_t position = *smallest.grid_->position_of(Rank(rank));
    grid.offset = position;
    const bool common = std::all_of(meshes.begin(), meshes.end(), [&](const DeviceMesh& mesh) {
      grid.offset -= position - mesh.grid_->offset;
      return mesh.grid_->coordinate_at(position).has_value();
    });
    if (!common) continue;
    const int64_t end = grid.table ? static_cast<int64_t>(grid.table->ranks.size())
                                   : std::numeric_limits<int64_t>::max();
    if (grid.offset < 0 || *span >= end - grid.offset) {
      return error("they are not slices of one mesh");
    }
    return finish(std::move(grid));
  }
  return error("they have no rank in common");
}

std::string DeviceMesh::to_string() const {
  std::string text = absl::StrCat("DeviceMesh(", show(grid_->dims));
  absl::StatusOr<DeviceMesh> plain = create(grid_->dims);
  if (!(*this == *plain)) {
    const int64_t shown = std::min<int64_t>(size(), kMaxShownRanks);
    absl::StrAppend(&text, ", ranks ", show_ranks(grid_->first_ranks(shown), size()));
  }
  return text + ")";
}

bool operator==(const DeviceMesh& a, const DeviceMesh& b) {
  const DeviceMesh::Grid& x = *a.grid_;
  const DeviceMesh::Grid& y = *b.grid_;
  if (&x == &y) return true;
  if (x.hash != y.hash || x.dims != y.dims) return false;
  if (x.table == y.table) return x.offset == y.offset && x.digits == y.digits;
  return a.ranks() == b.ranks();
}

}  // namespace shardweave
