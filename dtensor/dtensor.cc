#include "shardweave/dtensor/dtensor.h"

#include <array>

#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "ATen/ops/view_as_real.h"
#include "ATen/ops/zeros.h"
#include "ATen/record_function.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/DefaultDtype.h"
#include "c10/core/GradMode.h"
#include "shardweave/dtensor/engine/adopt.h"
#include "shardweave/dtensor/engine/checksum.h"
#include "shardweave/dtensor/engine/distribute.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/remembered.h"
#include "shardweave/dtensor/engine/tensor_impl.h"
#include "shardweave/dtensor/observe/observer.h"
#include "torch/csrc/autograd/custom_function.h"

namespace shardweave {
namespace {

using namespace dtensor_internal;

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Of what users make: a parameter is told by its being a leaf that requires grad.
CutOrigins fed_in(const Layout& layout) {
  CutOrigins origins;
  for (int m = 0; m < std::min(layout.mesh_ndim(), 64); ++m) {
    origins.data |= uint64_t{layout[m].is_shard()} << m;
  }
  return origins;
}

absl::Span<const int64_t> span_of(at::IntArrayRef sizes) {
  return {sizes.data(), sizes.size()};
}

// The factor between a global value and one rank's summand: averages weigh each rank by 1 / ranks.
double gradient_scale(const MeshContext& context, const Layout& layout, std::string_view function) {
  double scale = 1;
  for (int m = 0; m < layout.mesh_ndim(); ++m) {
    if (!layout[m].is_partial() || layout[m].is_partial(ReduceOp::kSum)) continue;
    if (!layout[m].is_partial(ReduceOp::kAvg)) {
      throw Error(absl::UnimplementedError(absl::StrCat(std::string(function),
                                                        " has no gradient for ", layout.to_string(),
                                                        "; only Partial sum and avg have one")));
    }
    scale /= static_cast<double>(context.mesh().size(m));
  }
  return scale;
}

// Where a tensor is an average its gradient's gradients are summed all the same: FromLocal scales
// both.
Layout summed(const Layout& layout) {
  Placements placements = layout.placements();
  for (Placement& p : placements) {
    if (p.is_partial()) p = Partial();
  }
  return value_or_throw(Layout::create(std::move(placements), layout.order()));
}

// A function that a user called, or what its backward sends.
struct CallSite {
  const char* function;
  std::source_location where;
  bool backward = false;

  std::string name() const { return backward ? absl::StrCat(function, " backward") : function; }
  CallSite in_backward() const { return {function, where, true}; }
};

// What travels through autograd: how the gradient lies, and who asked. Never a tensor: a value that
// only says how it lay would be kept alive.
struct Holder : torch::CustomClassHolder {
  Holder(std::shared_ptr<MeshContext> context_in, CallSite site_in)
      : context(std::move(context_in)), site(site_in) {}
  std::shared_ptr<MeshContext> context;
  CallSite site;
  Layout layout;         // of the gradient
  SpecRef spec;          // the same with sizes, for ToLocal
  Layout second_layout;  // FromLocal: of the gradient's gradient
  double scale = 1;      // FromLocal
};

void save(AutogradContext* ctx, c10::intrusive_ptr<Holder> holder) {
  ctx->saved_data["holder"] = c10::IValue::make_capsule(std::move(holder));
}
c10::intrusive_ptr<Holder> saved(AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<Holder>(ctx->saved_data["holder"].toCapsule());
}

// With create_graph a backward is recorded as the forward is, by the function that does in forward
// what it does: Redistribute by Redistribute, ToLocal and FromLocal by each other. A Partial's
// gradient is whole, so that no factor comes in but FromLocal's own.

// The gradient in holder.layout.
at::Tensor gradient_there(const at::Tensor& grad, const Holder& holder);

struct Redistribute : torch::autograd::Function<Redistribute> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tensor, const Layout& layout,
                            const CallSite& site) {
    auto holder = c10::make_intrusive<Holder>(meta_of(tensor).context, site.in_backward());
    holder->layout = gradient_layout(meta_of(tensor).spec->layout);
    save(ctx, std::move(holder));
    const std::string name = site.name();
    at::Tensor result = redistributed(tensor, layout, {.name = name, .where = site.where});
    return result.is_same(tensor) ? tensor.alias() : result;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (!grads[0].defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
    return {gradient_there(grads[0], *saved(ctx)), at::Tensor(), at::Tensor()};
  }
};

at::Tensor gradient_there(const at::Tensor& grad, const Holder& holder) {
  const at::Tensor there = as_dtensor(grad, holder.context);
  if (meta_of(there).spec->layout == holder.layout) return there;
  if (c10::GradMode::is_enabled()) return Redistribute::apply(there, holder.layout, holder.site);
  const std::string name = holder.site.name();
  at::Tensor result =
      redistributed(there, holder.layout, {.name = name, .where = holder.site.where});
  // The gradient of a sum goes to each of its summands: the operators that have it next need not reduce it once more.
  // In memory of its own, for the result may become a .grad, which is written to, on some ranks and not on others
  // (who else holds it decides). Here it is not looked for: what ranks have added to it may differ.
  DTensorMeta& meta = meta_of(there);
  const Layout& from = meta.spec->layout;
  if (from.has_partial() && is_kept(worth_remembering(from, {}, holder.layout))) {
    remember(meta, meta_of(result).spec, meta_of(result).local().clone());
  }
  return result;
}

struct FromLocal : torch::autograd::Function<FromLocal> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& local, const SpecRef& spec,
                            const std::shared_ptr<MeshContext>& context, const CallSite& site) {
    auto holder = c10::make_intrusive<Holder>(context, site.in_backward());
    holder->layout = gradient_layout(spec->layout);
    holder->second_layout = summed(spec->layout);
    if (local.requires_grad()) holder->scale = gradient_scale(*context, spec->layout, site.name());
    save(ctx, std::move(holder));
    return wrap(local._is_zerotensor() ? local.clone() : local.detach(), spec, context);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads);
};

struct ToLocal : torch::autograd::Function<ToLocal> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tensor,
                            const Layout& grad_layout, const CallSite& site) {
    const DTensorMeta& meta = meta_of(tensor);
    auto holder = c10::make_intrusive<Holder>(meta.context, site.in_backward());
    holder->spec = meta.context->with_layout(*meta.spec, grad_layout);
    save(ctx, std::move(holder));
    // What is gathered for a use is gone after it.
    if (meta.part.state() == LocalPart::State::kGatheredOnUse) return meta.local().clone();
    return meta.local().alias();
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    if (!grads[0].defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
    if (is_dtensor(grads[0])) {
      throw Error(absl::InvalidArgumentError(
          "the gradient of a DTensor's local part is a DTensor; wanted a plain one"));
    }
    const auto holder = saved(ctx);
    const Spec& like = *holder->spec;
    SpecRef spec = holder->context->intern(like.layout, like.sizes, like.strides,
                                           grads[0].scalar_type(), like.device, like.origins);
    // What others have must not become a .grad, to which more is added in place: LibTorch does not see
    // in the DTensor that they do. (autograd::Function has it twice.)
    const bool is_shared = grads[0].use_count() > 2;
    // Nor must one of other strides than it shows: of an expanded one every element is the same memory.
    const bool is_plain = like.strides == contiguous_strides(like.sizes);
    const bool is_other = is_plain && !grads[0].is_contiguous();
    // Nor one without memory: LibTorch's derivative of a sign is such a zero.
    const bool is_zero = grads[0]._is_zerotensor();
    const auto format = is_plain ? at::MemoryFormat::Contiguous : at::MemoryFormat::Preserve;
    at::Tensor grad =
        c10::GradMode::is_enabled()
            ? FromLocal::apply(grads[0], spec, holder->context, holder->site)
            : wrap(is_shared || is_other || is_zero ? grads[0].clone(format) : grads[0].detach(),
                   std::move(spec), holder->context);
    meta_of(grad).came_from(kRanksOwn);
    return {std::move(grad), at::Tensor(), at::Tensor()};
  }
};

variable_list FromLocal::backward(AutogradContext* ctx, variable_list grads) {
  if (!grads[0].defined()) return {at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  const auto holder = saved(ctx);
  settle_plain_tensors(*holder->context);  // it leaves the mesh
  const at::Tensor there = gradient_there(grads[0], *holder);
  const at::Tensor grad = c10::GradMode::is_enabled()
                              ? ToLocal::apply(there, holder->second_layout, holder->site)
                              : meta_of(there).local();
  return {holder->scale == 1 ? grad : grad.mul(holder->scale), at::Tensor(), at::Tensor(),
          at::Tensor()};
}

// What ranks together have.
struct OfAllRanks {
  FittedLayout fitted;
  bool requires_grad = false;  // of any
};

// Every rank learns all local shapes and dtypes, so that a misfit is the same error everywhere.
OfAllRanks gather_global_shape(MeshContext& context, const Layout& layout, const at::Tensor& local,
                               std::source_location where) {
  std::vector<int> all_dims;
  for (int m = 0; m < context.mesh().ndim(); ++m) all_dims.push_back(m);
  Communicator& comm = context.communicator(all_dims);
  constexpr int64_t kMaxDims = 32;
  // The number of dimensions, these, whether it requires grad, the dtype.
  std::vector<int64_t> mine(kMaxDims + 3, 0);
  if (local.dim() > kMaxDims) {
    throw Error("from_local",
                absl::InvalidArgumentError(absl::StrCat("the local tensor has ", local.dim(),
                                                        " dimensions; at most ", kMaxDims)));
  }
  mine[0] = local.dim();
  for (int64_t d = 0; d < local.dim(); ++d) mine[d + 1] = local.size(d);
  mine[kMaxDims + 1] = int64_t{local.requires_grad()};
  mine.back() = static_cast<int64_t>(local.scalar_type());
  std::vector<int64_t> everyones(mine.size() * comm.size());
  const CollectiveSpan span(context, {.name = "from_local", .where = where}, [&]() -> Sending {
    const int64_t bytes = (comm.size() - 1) * static_cast<int64_t>(mine.size() * sizeof(int64_t));
    static constexpr std::array<int64_t, 1> kShape = {kMaxDims + 3};
    return {"all_gather", all_dims, bytes, at::kLong, kShape, Layout(), Layout()};
  });
  throw_if_error(comm.all_gather(Buffer::of(mine.data(), mine.size()),
                                 Buffer::of(everyones.data(), everyones.size()),
                                 {.timeout = absl::ZeroDuration(), .tag = "from_local"})
                     .wait());
  std::vector<Dims> shapes;
  bool any_requires_grad = false;
  for (int r = 0; r < comm.size(); ++r) {
    const int64_t* shape = &everyones[r * mine.size()];
    shapes.emplace_back(shape + 1, shape + 1 + shape[0]);
    any_requires_grad |= shape[kMaxDims + 1] != 0;
    const auto dtype_of = [&](int rank) {
      return static_cast<at::ScalarType>(everyones[(rank + 1) * mine.size() - 1]);
    };
    if (dtype_of(r) == dtype_of(0)) continue;
    throw Error("from_local", absl::InvalidArgumentError(absl::StrCat(
                                  "the local tensor is ", c10::toString(dtype_of(0)),
                                  " on rank 0 and ", c10::toString(dtype_of(r)), " on rank ", r)));
  }
  // Of the first rank's dimensions, on all ranks.
  return {value_or_throw(fit_local_shapes(
              layout_for(context, layout, static_cast<int64_t>(shapes[0].size()), "from_local"),
              context.mesh().shape(), shapes)),
          any_requires_grad};
}

template <typename Fill>
at::Tensor factory(at::IntArrayRef sizes, const MeshPtr& mesh, const Placements& placements,
                   const at::TensorOptions& options, const char* function, Fill fill) {
  std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  const Layout layout =
      layout_for(*context, Layout(placements), static_cast<int64_t>(sizes.size()), function);
  SpecRef spec =
      context->intern(layout, span_of(sizes), contiguous_strides(span_of(sizes)),
                      c10::typeMetaToScalarType(options.dtype()), options.device(), fed_in(layout));
  const bool requires_grad = options.requires_grad();
  at::Tensor local = fill(array(spec->local_sizes), options.requires_grad(std::nullopt));
  const uint64_t provenance = checksum(0, spec->to_string());  // one rank may make it alone
  at::Tensor result = wrap(std::move(local), std::move(spec), std::move(context));
  meta_of(result).came_from(provenance);
  if (requires_grad) result.requires_grad_();
  return result;
}

// As at::full() does: without a dtype that of the value.
at::TensorOptions with_dtype_of(const at::Scalar& value, const at::TensorOptions& options) {
  if (options.has_dtype()) return options;
  const at::ScalarType real = c10::get_default_dtype_as_scalartype();
  return options.dtype(value.isBoolean()                         ? at::kBool
                       : value.isIntegral(/*includeBool=*/false) ? at::kLong
                       : value.isComplex()                       ? c10::toComplexType(real)
                                                                 : real);
}

// `function`: which was called; several are made of these.
at::Tensor filled(at::IntArrayRef sizes, const at::Scalar& value, const MeshPtr& mesh,
                  const Placements& placements, const at::TensorOptions& options,
                  const char* function) {
  return factory(
      sizes, mesh, placements, options, function,
      [&](at::IntArrayRef local, const at::TensorOptions& o) { return at::full(local, value, o); });
}

at::Tensor uninitialized(at::IntArrayRef sizes, const MeshPtr& mesh, const Placements& placements,
                         const at::TensorOptions& options, const char* function) {
  return factory(
      sizes, mesh, placements, options, function,
      [](at::IntArrayRef local, const at::TensorOptions& o) { return at::empty(local, o); });
}

// For what does not look at the elements: brings nothing up to date, and so communicates nothing.
const DTensorMeta& described(const at::Tensor& tensor, const char* function) {
  return is_dtensor(tensor) ? meta_of(tensor) : checked_meta(tensor, function);
}

void check_dense(const at::Tensor& plain, const char* function) {
  const std::string why = not_dense(plain);
  if (why.empty()) return;
  throw Error(function, absl::InvalidArgumentError(
                            absl::StrCat("a tensor of shape [", absl::StrJoin(plain.sizes(), ", "),
                                         "] cannot be a DTensor: ", why, "; make it dense first")));
}

void refuse_partial(const Placements& placements, const char* function) {
  for (const Placement& p : placements) {
    if (p.is_partial()) {
      throw Error(function, absl::InvalidArgumentError(
                                absl::StrCat(to_string(placements),
                                             " has a Partial; wanted Shard or Replicate (a Partial "
                                             "is made of every rank's local part)")));
    }
  }
}

Placements resolve_for(const DeviceMesh& mesh, const NamedPlacements& named, const char* function) {
  absl::StatusOr<Placements> resolved = try_resolve(mesh, named);
  if (!resolved.ok()) throw Error(function, resolved.status());
  return *std::move(resolved);
}

std::string elements_to_string(const at::Tensor& plain) {
  if (!plain.is_complex()) return c10::str(plain);
  // LibTorch prints the real parts alone.
  return absl::StrCat(plain.toString(), ", each element as its real and its imaginary part:\n",
                      c10::str(at::view_as_real(plain.resolve_conj())));
}

}  // namespace

absl::StatusOr<Placements> dtensor_internal::try_resolve(const DeviceMesh& mesh,
                                                         const NamedPlacements& named) {
  Placements placements(mesh.ndim());
  std::vector<bool> given(mesh.ndim());
  for (const auto& [name, placement] : named) {
    const absl::StatusOr<int> dim = mesh.dim(name);
    if (!dim.ok()) return dim.status();
    if (given[*dim]) {
      return absl::InvalidArgumentError(
          absl::StrCat("mesh dimension '", name, "' is given two placements"));
    }
    given[*dim] = true;
    placements[*dim] = placement;
  }
  return placements;
}

void dtensor_internal::check_source(const DeviceMesh& mesh, const DistributeOptions& options,
                                    const char* function) {
  if (!options.source.has_value()) return;
  if (*options.source >= 0 && *options.source < mesh.size()) return;
  throw Error(function, absl::OutOfRangeError(absl::StrCat(
                            "the source is rank ", *options.source, " of ", mesh.to_string(),
                            "; wanted ", mesh.size() == 1 ? "" : "0 to ", mesh.size() - 1)));
}

Placements resolve(const DeviceMesh& mesh, const NamedPlacements& named) {
  return resolve_for(mesh, named, "resolve");
}

at::Tensor distribute_tensor(const at::Tensor& tensor, const MeshPtr& mesh,
                             const Placements& placements, const DistributeOptions& options,
                             std::source_location where) {
  return dtensor_internal::distributed(tensor, mesh, Layout(placements), options,
                                       {.name = "distribute_tensor", .where = where});
}

at::Tensor dtensor_internal::distributed(const at::Tensor& tensor, const MeshPtr& mesh,
                                         const Layout& given, const DistributeOptions& options,
                                         const Cause& cause) {
  if (!tensor.defined() || is_dtensor(tensor)) {
    throw Error("distribute_tensor",
                absl::InvalidArgumentError(
                    tensor.defined() ? absl::StrCat("this is a DTensor already, ", describe(tensor),
                                                    "; redistribute it for another layout")
                                     : "the tensor is undefined"));
  }
  check_dense(tensor, "distribute_tensor");
  refuse_partial(given.placements(), "distribute_tensor");
  check_source(mesh->mesh(), options, "distribute_tensor");
  std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  const Layout layout = layout_for(*context, given, tensor.dim(), "distribute_tensor");
  const auto sizes = tensor.sizes();
  SpecRef spec = context->intern(layout, span_of(sizes), contiguous_strides(span_of(sizes)),
                                 tensor.scalar_type(), tensor.device(), fed_in(layout));
  const uint64_t provenance = provenance_of_new(*context, *spec);
  const About about(*context, provenance);

  const at::Tensor whole = tensor.detach().resolve_conj().resolve_neg().contiguous();
  at::Tensor local;
  if (options.source.has_value()) {
    local = part_of_source(*context, *spec, whole, *options.source, provenance, cause);
  } else {
    const SpecRef from = context->with_layout(*spec, Layout{Placements(layout.mesh_ndim())});
    local = run_plan(*context, *plan_for(*context, from, spec), whole, spec->sizes, cause);
  }
  // Never an alias of the user's tensor: writing to one must not change the other.
  at::Tensor result = wrap(owned(std::move(local), tensor), std::move(spec), context);
  meta_of(result).came_from(provenance);
  if (tensor.requires_grad()) result.requires_grad_();
  return result;
}

at::Tensor distribute_tensor(const at::Tensor& tensor, const MeshPtr& mesh,
                             const NamedPlacements& placements, const DistributeOptions& options,
                             std::source_location where) {
  return distribute_tensor(tensor, mesh, resolve_for(mesh->mesh(), placements, "distribute_tensor"),
                           options, where);
}

at::Tensor from_local(const at::Tensor& local, const MeshPtr& mesh, const Placements& placements,
                      std::optional<std::vector<int64_t>> global_sizes,
                      std::source_location where) {
  RECORD_FUNCTION("shardweave::from_local", {});
  if (!local.defined() || is_dtensor(local)) {
    throw Error(
        "from_local",
        absl::InvalidArgumentError(
            local.defined() ? absl::StrCat("wanted a plain tensor, got ", describe(local),
                                           "; redistribute it for another layout, or take its "
                                           "local part")
                            : "the tensor is undefined"));
  }
  check_dense(local, "from_local");
  std::shared_ptr<MeshContext> context = MeshContext::of(mesh);
  const Layout given(placements);
  if (given.mesh_ndim() != context->mesh().ndim()) layout_for(*context, given, 0, "from_local");
  const auto [fitted, requires_grad] =
      global_sizes.has_value()
          ? OfAllRanks{{layout_for(*context, given, static_cast<int64_t>(global_sizes->size()),
                                   "from_local"),
                        Dims(global_sizes->begin(), global_sizes->end())},
                       local.requires_grad()}
          : gather_global_shape(*context, given, local, where);
  const auto& [layout, sizes] = fitted;
  // What the graph has computed is not what is fed in.
  SpecRef spec = context->intern(layout, sizes, contiguous_strides(sizes), local.scalar_type(),
                                 local.device(), requires_grad ? CutOrigins() : fed_in(layout));
  if (local.sizes() != array(spec->local_sizes)) {
    throw Error("from_local",
                absl::InvalidArgumentError(
                    absl::StrCat("the local tensor has shape [", absl::StrJoin(local.sizes(), ", "),
                                 "], ", spec->to_string(), " has [",
                                 absl::StrJoin(spec->local_sizes, ", "), "] on this rank")));
  }
  // A part that requires none among others that do (an expert without tokens): all record the same.
  const bool follows = requires_grad && !local.requires_grad();
  const at::Tensor part = follows ? local.detach().requires_grad_() : local;
  at::Tensor result =
      FromLocal::apply(part.contiguous(), spec, context, CallSite{"from_local", where});
  meta_of(result).came_from(provenance_of_new(*context, *spec));
  hand_out(meta_of(result));
  return result;
}

at::Tensor zeros(at::IntArrayRef sizes, const MeshPtr& mesh, const Placements& placements,
                 at::TensorOptions options) {
  return factory(
      sizes, mesh, placements, options, "zeros",
      [](at::IntArrayRef local, const at::TensorOptions& o) { return at::zeros(local, o); });
}

at::Tensor ones(at::IntArrayRef sizes, const MeshPtr& mesh, const Placements& placements,
                at::TensorOptions options) {
  refuse_partial(placements, "ones");
  return filled(sizes, 1, mesh, placements, options.dtype(options.dtype()), "ones");
}

at::Tensor empty(at::IntArrayRef sizes, const MeshPtr& mesh, const Placements& placements,
                 at::TensorOptions options) {
  return uninitialized(sizes, mesh, placements, options, "empty");
}

at::Tensor full(at::IntArrayRef sizes, const at::Scalar& value, const MeshPtr& mesh,
                const Placements& placements, at::TensorOptions options) {
  refuse_partial(placements, "full");
  return filled(sizes, value, mesh, placements, with_dtype_of(value, options), "full");
}

at::Tensor rand(at::IntArrayRef sizes, const MeshPtr& mesh, const Placements& placements,
                at::TensorOptions options) {
  refuse_partial(placements, "rand");
  const bool requires_grad = options.requires_grad();
  at::Tensor result =
      uninitialized(sizes, mesh, placements, options.requires_grad(std::nullopt), "rand")
          .uniform_();
  if (requires_grad) result.requires_grad_();
  return result;
}

at::Tensor randn(at::IntArrayRef sizes, const MeshPtr& mesh, const Placements& placements,
                 at::TensorOptions options) {
  refuse_partial(placements, "randn");
  const bool requires_grad = options.requires_grad();
  at::Tensor result =
      uninitialized(sizes, mesh, placements, options.requires_grad(std::nullopt), "randn")
          .normal_();
  if (requires_grad) result.requires_grad_();
  return result;
}

bool is_dtensor(const at::Tensor& tensor) {
  return tensor.defined() && is_dtensor(tensor.unsafeGetTensorImpl());
}

const Layout& layout_of(const at::Tensor& tensor) {
  return described(tensor, "layout_of").spec->layout;
}

MeshPtr mesh_of(const at::Tensor& tensor) {
  const DTensorMeta& meta = described(tensor, "mesh_of");
  return MeshPtr(meta.context, &meta.context->connected_mesh());
}

std::string describe(const at::Tensor& tensor) {
  const DTensorMeta& meta = described(tensor, "describe");
  const LocalExtent extent = local_extent(meta.spec->layout, meta.context->mesh().shape(),
                                          meta.context->coordinate(), meta.spec->sizes);
  return absl::StrCat(meta.spec->to_string(), " on ", meta.context->mesh().to_string(), ", local [",
                      absl::StrJoin(extent.shape, ", "), "] at [",
                      absl::StrJoin(extent.offset, ", "), "]");
}

std::string values_to_string(const at::Tensor& tensor, std::source_location where) {
  const c10::AutoGradMode no_grad(false);
  if (!is_dtensor(tensor)) return elements_to_string(tensor);
  return absl::StrCat(describe(tensor), "\n", elements_to_string(full_tensor(tensor, where)));
}

void visualize_sharding(const at::Tensor& tensor, const VisualizeOptions& options, std::FILE* out) {
  const DTensorMeta& meta = described(tensor, "visualize_sharding");
  throw_if_error(
      visualize_sharding(meta.spec->layout, meta.context->mesh(), meta.spec->sizes, options, out));
}

at::Tensor redistribute(const at::Tensor& tensor, const Layout& layout,
                        std::source_location where) {
  RECORD_FUNCTION("shardweave::redistribute", {});
  const DTensorMeta& meta = checked_meta(tensor, "redistribute");
  return Redistribute::apply(tensor,
                             layout_for(*meta.context, layout, tensor.dim(), "redistribute"),
                             CallSite{"redistribute", where});
}

at::Tensor redistribute(const at::Tensor& tensor, const Placements& placements,
                        std::source_location where) {
  return redistribute(tensor, Layout(placements), where);
}

at::Tensor redistribute(const at::Tensor& tensor, const NamedPlacements& placements,
                        std::source_location where) {
  return redistribute(
      tensor,
      resolve_for(checked_meta(tensor, "redistribute").context->mesh(), placements, "redistribute"),
      where);
}

at::Tensor to_local(const at::Tensor& tensor, std::optional<Placements> grad_placements,
                    std::source_location where) {
  RECORD_FUNCTION("shardweave::to_local", {});
  DTensorMeta& meta = checked_meta(tensor, "to_local");
  if (const Resting* resting = resting_of(tensor)) resting->unit->settle();  // it may be written
  settle_plain_tensors(*meta.context);
  hand_out(meta);
  const Layout grad_layout =
      grad_placements.has_value()
          ? layout_for(*meta.context, Layout(*grad_placements), tensor.dim(), "to_local")
          : gradient_layout(meta.spec->layout);
  return ToLocal::apply(tensor, grad_layout, CallSite{"to_local", where});
}

at::Tensor full_tensor(const at::Tensor& tensor, std::source_location where) {
  RECORD_FUNCTION("shardweave::full_tensor", {});
  const DTensorMeta& meta = checked_meta(tensor, "full_tensor");
  const Layout replicated{Placements(meta.context->mesh().ndim())};
  at::Tensor whole = to_local(
      Redistribute::apply(tensor, replicated, CallSite{"full_tensor", where}), std::nullopt, where);
  // It may go to the host, and nothing of ours is asked then.
  if (!meta.spec->device.is_cpu()) meta.context->before_host_reads();
  return whole;
}

StrictScope::StrictScope(const MeshPtr& mesh) : mesh_(mesh) {
  const auto context = MeshContext::of(mesh_);
  ++context->decisions.strict_depth;
  context->observation.modules.remember();
}

StrictScope::~StrictScope() {
  const auto context = MeshContext::of(mesh_);
  --context->decisions.strict_depth;
  context->observation.modules.forget();
}

DispatchCounters dispatch_counters(const MeshPtr& mesh) {
  return MeshContext::of(mesh)->observation.counters;
}

}  // namespace shardweave
