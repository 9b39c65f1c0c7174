// Decompositions, solvers, Fourier transforms, distances.
#include "shardweave/dtensor/testing/samples/families.h"

namespace shardweave::testing {

std::vector<Sample> linear_algebra_samples() {
  const Operand matrices = in({5, 3, 3}).positive_definite();
  std::vector<Sample> samples;
  append(samples,
         each({"aten::linalg_inv_ex", "aten::linalg_cholesky_ex", "aten::linalg_lu_factor_ex",
               "aten::linalg_lu", "aten::linalg_ldl_factor_ex", "aten::_linalg_eigh",
               "aten::_linalg_det", "aten::_linalg_slogdet", "aten::linalg_matrix_exp"},
              {"", {matrices}, {}, 1e-8}));
  append(samples, {{"aten::linalg_inv_ex", {in({3, 3}).positive_definite()}, {}, 1e-8},
                   {"aten::linalg_qr", {in({5, 4, 3})}, {}, 1e-8},
                   {"aten::_linalg_svd", {in({5, 4, 3})}, {}, 1e-7},
                   {"aten::_linalg_svd", {in({5, 4, 3})}, {{"compute_uv", false}}, 1e-7},
                   {"aten::_linalg_solve_ex", {matrices, in({5, 3, 4})}, {}, 1e-8},
                   {"aten::linalg_cross", {in({5, 3}), in({5, 3})}},
                   {"aten::linalg_cross", {in({4, 3, 5}), in({4, 3, 5})}, {{"dim", 1}}},
                   {"aten::_cdist_forward", {in({3, 5, 2}), in({3, 4, 2})}, {{"p", 2.0}}, 1e-7},
                   {"aten::_cdist_forward", {in({5, 2}), in({4, 2})}, {{"p", 1.0}}, 1e-7},
                   {"aten::lu_unpack", {in({5, 3, 3}), in({5, 3}).dtype(at::kInt).uniform(3, 4)}}});
  // --- factorizations, and systems whose matrix is one ---
  const Operand wide = in({5, 3, 4});
  append(samples, each({"aten::cholesky", "aten::cholesky_inverse"}, {"", {matrices}, {}, 1e-8}));
  append(samples,
         {{"aten::linalg_eig", {in({5, 3, 3}).constant()}, {}, 1e-7},
          {"aten::_linalg_eigvals", {matrices}, {}, 1e-7},
          {"aten::geqrf", {in({5, 4, 3})}, {}, 1e-8},
          {"aten::geqrf", {in({4, 3})}, {}, 1e-8},
          {"aten::linalg_householder_product", {in({5, 4, 3}), in({5, 3})}, {}, 1e-8},
          {"aten::ormqr", {in({5, 4, 3}), in({5, 3}), in({5, 4, 6})}, {}, 1e-8},
          {"aten::ormqr", {in({4, 3}), in({3}), in({5, 4})}, {{"left", false}}, 1e-8},
          {"aten::cholesky_solve", {wide, matrices}, {}, 1e-7},
          {"aten::cholesky_solve", {in({3, 4}), matrices}, {{"upper", true}}, 1e-7},
          {"aten::_cholesky_solve_helper", {wide, matrices}, {{"upper", false}}, 1e-7},
          {"aten::triangular_solve", {wide, matrices}, {}, 1e-7},
          {"aten::triangular_solve", {wide, in({3, 3}).positive_definite()}, {}, 1e-7},
          {"aten::linalg_solve_triangular", {matrices, wide}, {{"upper", true}}, 1e-7},
          {"aten::linalg_solve_triangular",
           {in({3, 3}).positive_definite(), in({5, 4, 3})},
           {{"upper", false}, {"left", false}, {"unitriangular", true}},
           1e-7},
          {"aten::linalg_lstsq", {in({5, 4, 3}), in({5, 4, 6})}, {}, 1e-7},
          {"aten::linalg_lstsq", {in({5, 4, 3}), in({5, 4, 2})}, {{"driver", "gels"}}, 1e-7},
          {"aten::linalg_lstsq", {in({5, 4, 3}), in({5, 4, 2})}, {{"driver", "gelsd"}}, 1e-7},
          {"aten::linalg_lstsq",
           {in({5, 4, 3}).complex(), in({5, 4, 2}).complex()},
           {{"driver", "gels"}},
           1e-7},
          {"aten::linalg_lstsq", {in({5, 4, 3}).complex(), in({5, 4, 2}).complex()}, {}, 1e-7},
          {"aten::linalg_lstsq", {wide, in({5, 3, 7})}, {{"driver", "gels"}}, 1e-7},
          {"aten::linalg_lstsq", {in({5, 4, 3}), in({5, 4})}, {}, 1e-7}});
  // --- distances ---
  append(samples,
         {{"aten::_cdist_backward",
           {in({3, 5, 4}), in({3, 5, 2}), in({3, 4, 2}), in({3, 5, 4}).uniform(1, 2)},
           {{"p", 2.0}},
           1e-7},
          {"aten::_cdist_backward",
           {in({5, 4}), in({5, 7}), in({4, 7}), in({5, 4}).uniform(1, 2)},
           {{"p", 1.0}},
           1e-7},
          {"aten::_cdist_backward",
           {in({0, 3, 4}), in({1, 3, 5}), in({0, 4, 5}), in({0, 3, 4}).uniform(1, 2)},
           {{"p", 2.0}}},
          {"aten::_euclidean_dist", {in({5, 2}), in({4, 2})}, {}, 1e-6},
          {"aten::_pdist_forward", {in({5, 4})}, {}, 1e-7},
          {"aten::_pdist_backward", {in({10}), in({5, 4}), in({10}).uniform(1, 2)}, {{"p", 3.0}}}});
  // --- Fourier transforms ---
  append(samples, {{"aten::_fft_c2c",
                    {in({7, 4, 5}).complex()},
                    {{"dim", ints({1})}, {"normalization", 0}, {"forward", true}}},
                   {"aten::_fft_c2c",
                    {in({7, 4, 5}).complex()},
                    {{"dim", ints({0, 2})}, {"normalization", 2}, {"forward", false}}},
                   {"aten::_fft_r2c",
                    {in({7, 4, 5})},
                    {{"dim", ints({2})}, {"normalization", 0}, {"onesided", true}}},
                   {"aten::_fft_r2c",
                    {in({7, 4})},
                    {{"dim", ints({0})}, {"normalization", 1}, {"onesided", false}}},
                   {"aten::_fft_c2r",
                    {in({7, 4, 3}).complex()},
                    {{"dim", ints({2})}, {"normalization", 2}, {"last_dim_size", 5}}}});
  return samples;
}

}  // namespace shardweave::testing
