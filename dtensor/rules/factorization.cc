// Factorizations, and systems whose matrix is one: a rank works on whole matrices, of which it has
// some; columns of a right-hand side are independent, too.
#include <algorithm>
#include <string_view>
#include <vector>

#include "shardweave/dtensor/rules/common.h"
#include "shardweave/dtensor/rules/families.h"

namespace shardweave::dtensor_internal {
namespace {

// --- shapes --------------------------------------------------------------------------------------

// What LAPACK leaves: matrices one after the other, each column by column.
TensorInfo column_major_info(Dims sizes, at::ScalarType dtype) {
  const size_t n = sizes.size();
  TensorInfo info = contiguous_info(std::move(sizes), dtype);
  info.strides[n - 2] = 1;
  info.strides[n - 1] = std::max<int64_t>(info.sizes[n - 2], 1);
  return info;
}

// An input as LAPACK leaves it.
ShardedRule::ShapeFunction column_major_like(const char* name) {
  return [name](OpCall& call) {
    call.outputs.push_back(column_major_info(call.input(name).sizes, call.input(name).dtype));
  };
}

Dims batch_sizes(const TensorInfo& matrices) {
  return Dims(matrices.sizes.begin(), matrices.sizes.end() - 2);
}

void eig_shapes(OpCall& call) {
  const TensorInfo& self = call.input("self");
  const at::ScalarType dtype = c10::toComplexType(self.dtype);
  call.outputs = {contiguous_info(Dims(self.sizes.begin(), self.sizes.end() - 1), dtype),
                  column_major_info(self.sizes, dtype)};
}

void eigvals_shape(OpCall& call) {
  eig_shapes(call);
  call.outputs.pop_back();
}

void geqrf_shapes(OpCall& call) {
  const TensorInfo& self = call.input("self");
  Dims tau = batch_sizes(self);
  tau.push_back(std::min(self.sizes.end()[-2], self.sizes.end()[-1]));
  call.outputs = {column_major_info(self.sizes, self.dtype),
                  contiguous_info(std::move(tau), self.dtype)};
}

// --- triangular systems --------------------------------------------------------------------------

// Which inputs are the matrix and the right-hand side.
struct System {
  const char* matrix;
  const char* side;
};
constexpr System kMatrixFirst = {.matrix = "self", .side = "B"};
constexpr System kSideFirst = {.matrix = "A", .side = "self"};
constexpr System kCholeskySolve = {.matrix = "input2", .side = "self"};

// Batches broadcast.
void solution_shape(const System& system, OpCall& call) {
  const TensorInfo& side = call.input(system.side);
  Dims sizes = broadcast_sizes({batch_sizes(call.input(system.matrix)), batch_sizes(side)});
  sizes.insert(sizes.end(), side.sizes.end() - 2, side.sizes.end());
  call.outputs.push_back(column_major_info(std::move(sizes), side.dtype));
}

void solve(const System& system, const OpCall& call, Strategies& out) {
  const TensorInfo& solution = call.output();
  const int n = solution.ndim();
  for (int d = 0; d < n - 2; ++d) {
    out.add(broadcast_cuts(call, solution.sizes, d), {Shard(d)}, zeros_if_empty);
  }
  // Right-hand sides: columns, or rows where the unknown is on the left of the matrix. What comes
  // with the solution is a copy of the matrix.
  const bool left = !call.has_arg("left") || call.bool_arg("left");
  const int back = left ? 1 : 2;
  auto of_side = [&](const Placement& in_side, const Placement& in_solution) {
    std::vector<Placement> outputs(call.num_outputs(), Replicate());
    outputs[0] = in_solution;
    out.add({{system.side, in_side}}, std::move(outputs), zeros_if_empty);
  };
  const TensorInfo& side = call.input(system.side);
  const int free = side.ndim() - back;
  // Who has no right-hand sides has no copy of the matrix.
  if (call.num_outputs() == 1 || !call.may_be_empty(side, free)) {
    of_side(Shard(free), Shard(n - back));
  }
  for (ReduceOp op : kLinearOps) of_side(Partial(op), Partial(op));
}

ShardedRule solver(System system) {
  return sharded([system](const OpCall& call, Strategies& out) { solve(system, call, out); });
}

// ormqr: Q is given by reflections, self and input2; input3 is the right-hand side.
void ormqr(const OpCall& call, Strategies& out) {
  over_batches({{2, 1, 2}, {2}})(call, out);
  out.add_linear({{"input3"}});
  const int free = call.input("input3").ndim() - (call.bool_arg("left") ? 1 : 2);
  out.add({{"input3", Shard(free)}}, {Shard(free)}, zeros_if_empty);
}

// --- least squares -------------------------------------------------------------------------------
// self [..., m, n], b [..., m, k] or [..., m] -> solution, residuals, rank, singular values; those
// that the driver does not compute are vectors of nothing.

std::string_view driver_of(const c10::IValue& given, bool on_gpu) {
  if (given.isNone()) return on_gpu ? "gels" : "gelsy";
  return given.toStringView();
}

// These find the rank, and leave the residuals out if any matrix has not the full one.
bool residuals_depend_on_values(const Arguments& args) {
  const std::string_view driver = driver_of(args["driver"], args.tensor("self").is_cuda());
  return driver == "gelsd" || driver == "gelss";
}

// b is one vector for each matrix.
bool has_vectors(const OpCall& call) {
  return call.input("b").ndim() == call.input("self").ndim() - 1;
}

void lstsq_shapes(OpCall& call) {
  const TensorInfo& self = call.input("self");
  TensorInfo b = call.input("b");
  const bool vectors = has_vectors(call);
  if (vectors) b.sizes.push_back(1);
  const int64_t m = self.sizes.end()[-2], n = self.sizes.end()[-1], k = b.sizes.back();
  const Dims batch = broadcast_sizes({batch_sizes(self), batch_sizes(b)});
  auto with = [&](std::initializer_list<int64_t> last) {
    Dims sizes = batch;
    sizes.insert(sizes.end(), last);
    return sizes;
  };
  // The first n of as many rows as the larger side has.
  TensorInfo solution = column_major_info(with({std::max(m, n), k}), self.dtype);
  solution.sizes = with({n, k});
  if (vectors) {
    solution.sizes.pop_back();
    solution.strides.pop_back();
  }
  const bool gels = driver_of(call.arg("driver"), is_on_gpu(self)) == "gels";
  const at::ScalarType real = c10::toRealValueType(self.dtype);
  const TensorInfo nothing = contiguous_info({0}, real);
  TensorInfo rank = contiguous_info(gels ? Dims{0} : batch, at::kLong);
  call.outputs = {std::move(solution), gels && m > n ? contiguous_info(with({k}), real) : nothing,
                  std::move(rank), nothing};
}

void lstsq(const OpCall& call, Strategies& out) {
  const bool vectors = has_vectors(call);
  const int of_b = vectors ? 1 : 2;
  over_batches({{2, of_b}, {of_b, 1, 0, 1}})(call, out);
  const bool has_residuals = call.output(1).numel() > 0;
  // Who has no right-hand sides does not find the rank.
  const TensorInfo& b = call.input("b");
  const int columns = b.ndim() - 1;
  if (!vectors && !call.may_be_empty(b, columns)) {
    out.add({{"b", Shard(columns)}},
            {Shard(columns), has_residuals ? Shard(columns - 1) : Replicate(), Replicate(),
             Replicate()},
            zeros_if_empty);
  }
  if (has_residuals) return;  // they are squares
  for (ReduceOp op : kLinearOps) {
    out.add({{"b", Partial(op)}}, {Partial(op), Replicate(), Replicate(), Replicate()});
  }
}

// --- calls that LibTorch refuses -----------------------------------------------------------------

// Its kernels look at more than there is; so that nobody's shape is made of what is not there.
bool is_no_matrix(const Arguments& args) {
  return args.tensor("self").dim() < 2;
}

bool are_no_reflectors(const Arguments& args) {
  return args.tensor("input").dim() < 2;
}

template <const System& system>
bool are_no_matrices(const Arguments& args) {
  const at::Tensor& a = args.tensor(system.matrix);
  const at::Tensor& b = args.tensor(system.side);
  return a.dim() < 2 || b.dim() < 2 || a.scalar_type() != b.scalar_type();
}

bool is_no_system(const Arguments& args) {
  return args.tensor("self").dim() < 2 || args.tensor("b").dim() < 1;
}

bool are_no_reflections(const Arguments& args) {
  const at::Tensor& self = args.tensor("self");
  return self.dim() < 2 || args.tensor("input3").dim() != self.dim();
}

template <const System& system>
Rule solver_with_shape() {
  return solver(system)
      .shapes([](OpCall& call) { solution_shape(system, call); })
      .refuses(are_no_matrices<system>);
}

}  // namespace

void add_factorization_rules(RuleTable& table) {
  table.add({"aten::cholesky", "aten::cholesky_inverse"},
            over_batches({{2}, {2}}).shapes(column_major_like("self")).refuses(is_no_matrix));
  table.add("aten::linalg_eig",
            over_batches({{2}, {1, 2}}).shapes(eig_shapes).refuses(is_no_matrix));
  table.add("aten::_linalg_eigvals",
            over_batches({{2}, {1}}).shapes(eigvals_shape).refuses(is_no_matrix));
  table.add("aten::geqrf", over_batches({{2}, {2, 1}}).shapes(geqrf_shapes).refuses(is_no_matrix));
  table.add(
      "aten::linalg_householder_product",
      over_batches({{2, 1}, {2}}).shapes(column_major_like("input")).refuses(are_no_reflectors));
  table.add("aten::ormqr",
            sharded(ormqr).shapes(column_major_like("input3")).refuses(are_no_reflections));

  table.add("aten::linalg_solve_triangular", solver_with_shape<kMatrixFirst>());
  table.add("aten::cholesky_solve", solver_with_shape<kCholeskySolve>());
  table.add("aten::_cholesky_solve_helper", solver_with_shape<kSideFirst>());
  table.add("aten::triangular_solve", solver(kSideFirst));
  table.add("aten::linalg_lstsq", sharded(lstsq)
                                      .shapes(lstsq_shapes)
                                      .reads({"driver"})
                                      .refuses(is_no_system)
                                      .when(residuals_depend_on_values, gathered()));
}

}  // namespace shardweave::dtensor_internal
