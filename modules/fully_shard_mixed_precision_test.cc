// Units of other dtypes than what rests: what one device computes that casts in the same places.
#include "shardweave/modules/fully_shard.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/activation_checkpoint.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/testing/tied_net.h"
#include "shardweave/modules/testing/values.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/optim/adamw.h"
#include "torch/script.h"

namespace shardweave {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;
using testing::try_on_mesh;
using namespace testing;
using namespace testing::tied_net;
namespace nn = torch::nn;

using Dtype = std::optional<at::ScalarType>;

struct Casts {
  at::ScalarType rest;  // of the parameters
  Dtype param, reduce, output;
  at::ScalarType used() const { return param.value_or(rest); }
  at::ScalarType reduced() const { return reduce.value_or(used()); }
};
const std::vector<Casts> kCasts = {
    {at::kDouble, at::kFloat, at::kDouble, {}}, {at::kDouble, at::kFloat, {}, at::kDouble},
    {at::kDouble, {}, at::kFloat, {}},          {at::kFloat, at::kBFloat16, at::kFloat, at::kFloat},
    {at::kFloat, at::kBFloat16, {}, {}},        {at::kFloat, at::kHalf, at::kFloat, {}},
};

FullyShardOptions mixed(const Casts& casts) {
  return {.mesh_dim = "dp",
          .units = {"blocks.*"},
          .param_dtype = casts.param,
          .reduce_dtype = casts.reduce,
          .output_dtype = casts.output};
}

// One device that casts where units do: torch::nn's linear is a product, and then a sum in place.
at::Tensor logits_with_casts(NetImpl& m, const at::Tensor& tokens, const std::vector<int>& order,
                             const Casts& casts) {
  std::map<const c10::TensorImpl*, at::Tensor> used;  // once, as tied ones are
  const auto in = [&](const at::Tensor& t) { return t.to(casts.used()); };
  const auto weight = [&](const at::Tensor& t) {
    at::Tensor& its = used[t.unsafeGetTensorImpl()];
    if (!its.defined()) its = in(t);
    return its;
  };
  const auto out = [&](const at::Tensor& t) { return casts.output ? t.to(*casts.output) : t; };
  const auto norm = [&](nn::LayerNorm& its, const at::Tensor& x) {
    return out(at::layer_norm(in(x), {kDim}, weight(its->weight), weight(its->bias)));
  };
  const auto linear = [&](const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias) {
    return out(at::matmul(in(x), weight(w).t())) + weight(bias);
  };
  at::Tensor x = out(at::embedding(weight(m.embed->weight), tokens));
  for (const int i : order) {
    Block block = m.block(i);
    const at::Tensor h = linear(norm(block->norm, x), block->up->weight, block->up->bias);
    x = x + linear(at::gelu(h), block->down->weight, block->down->bias);
  }
  return linear(norm(m.norm, x), m.head->weight, m.head->bias);
}

// Rows of a batch, and what each of their logits counts for: the sum of a loss over ranks is then
// the loss of all rows, to the last bit of every gradient.
struct Rows {
  at::Tensor tokens, counts;
};
Rows rows(int step, int64_t count = kBatch) {
  return {batch(step).tokens.slice(0, 0, count),
          at::sin(at::arange(count * kLength * kWords, at::kDouble) * 0.3 + step)
              .view({count, kLength, kWords})};
}
at::Tensor loss_of(const at::Tensor& logits, const Rows& r) {
  return (logits.to(at::kDouble) * r.counts).sum();
}

struct Variant {
  std::string name;
  bool tied = false;
  std::vector<int> order = {0, 1, 2};
  bool frozen = false;
  bool checkpointed = false;
  bool accumulates = false;
};
const std::vector<Variant> kVariants = {
    {.name = "plain"},
    {.name = "tied", .tied = true},
    {.name = "unused", .order = {0, 2}},
    {.name = "frozen", .frozen = true},
    {.name = "checkpointed", .checkpointed = true},
    {.name = "accumulated", .accumulates = true},
};
void prepare(NetImpl& model, const Casts& casts, const Variant& variant) {
  model.to(casts.rest);
  if (variant.frozen) {
    model.block(1)->up->weight.requires_grad_(false);
    for (at::Tensor& p : model.block(2)->parameters()) p.requires_grad_(false);
  }
}

// What each rank of each group feeds: rows, cut as Shard(0) does.
std::vector<at::Tensor> pieces(const at::Tensor& tensor, int64_t count) {
  std::vector<at::Tensor> pieces = tensor.chunk(count);
  while (static_cast<int64_t>(pieces.size()) < count) pieces.push_back(tensor.slice(0, 0, 0));
  return pieces;
}

// The gradients of a backward: of each rank's rows on one device, summed as units sum them, over the
// ranks of a group and then over groups.
Values summed_gradients(NetImpl& model, const Rows& all, int64_t groups, int64_t ranks,
                        const Casts& casts, const Variant& variant) {
  Values total;
  const auto add = [](Values& sum, const std::string& name, const at::Tensor& value) {
    at::Tensor& its = sum[name];
    its = its.defined() ? its + value : value;
  };
  for (int64_t g = 0; g < groups; ++g) {
    Values of_group;
    for (int64_t r = 0; r < ranks; ++r) {
      const auto piece = [&](const at::Tensor& t) {
        return pieces(pieces(t, groups)[static_cast<size_t>(g)], ranks)[static_cast<size_t>(r)];
      };
      const Rows mine = {piece(all.tokens), piece(all.counts)};
      loss_of(logits_with_casts(model, mine.tokens, variant.order, casts), mine).backward();
      for (const auto& [name, grad] : gradients_of(model)) {
        add(of_group, name, grad.to(casts.reduced()));
      }
      for (at::Tensor& p : model.parameters()) p.mutable_grad() = at::Tensor();
    }
    for (const auto& [name, grad] : of_group) add(total, name, grad);
  }
  for (auto& [name, grad] : total) grad = grad.to(casts.rest);
  return total;
}

void expect_equal(const Values& got, const Values& wanted, const std::string& where) {
  EXPECT_EQ(got.size(), wanted.size());
  for (const auto& [name, value] : wanted) {
    const auto it = got.find(name);
    if (it == got.end()) {
      ADD_FAILURE() << name << " is not there";
      continue;
    }
    EXPECT_EQ(it->second.scalar_type(), value.scalar_type()) << name;
    EXPECT_TRUE(at::equal(it->second, value)) << where << ": " << name << " is off by at most "
                                              << (it->second - value).abs().max().item<double>();
  }
}

constexpr int kMixedSteps = 2;

// To the last bit, for steps of AdamW, too: rows are computed alone, so that nothing depends on the
// ranks but in which order gradients are summed; of two summands, and in a wider dtype, not even that.
TEST(FullyShardMixedPrecisionTest, IsThatOfOneDevice) {
  const std::vector<std::vector<MeshDim>> meshes = {
      {{"dp", 1}}, {{"dp", 2}}, {{"dp", 3}}, {{"replicas", 2}, {"dp", 2}}};
  for (size_t c = 0; c < kCasts.size(); ++c) {
    const Casts& casts = kCasts[c];
    for (const Variant& variant : kVariants) {
      for (const auto& dims : meshes) {
        const std::string where = absl::StrCat("case ", c, ", ", variant.name, ", ", dims.size(),
                                               " dims, the last ", dims.back().size);
        const int64_t groups = dims.size() == 2 ? dims[0].size : 1, ranks = dims.back().size;
        const bool is_wider = c10::elementSize(casts.reduced()) > c10::elementSize(casts.used());
        if (ranks > 2 && !is_wider) continue;
        if (c % 3 != 0 && variant.name != "plain") continue;  // the others are as these
        const int backwards = variant.accumulates ? 3 : 1;
        // Rows that two mesh dimensions cut unevenly move before they are flattened.
        const int64_t count = groups > 1 ? groups * ranks : kBatch;
        on_mesh(dims, [&](const MeshPtr& mesh) {
          // Here: kernels sum as many parts as their thread may use others.
          Net plain(3, variant.tied);
          prepare(*plain, casts, variant);
          std::vector<Values> wanted_gradients, wanted_values;
          torch::optim::AdamW alone(unique_parameters(*plain), torch::optim::AdamWOptions(0.02));
          for (int step = 0; step < kMixedSteps; ++step) {
            Values total;
            for (int b = 0; b < backwards; ++b) {
              for (const auto& [name, grad] : summed_gradients(
                       *plain, rows(step * backwards + b, count), groups, ranks, casts, variant)) {
                at::Tensor& its = total[name];
                its = its.defined() ? its + grad : grad;
              }
            }
            for (const auto& item : plain->named_parameters()) {
              const auto it = total.find(item.key());
              if (it != total.end()) item.value().mutable_grad() = it->second.clone();
            }
            wanted_gradients.push_back(gradients_of(*plain));
            alone.step();
            alone.zero_grad();
            wanted_values.push_back(values_of(*plain));
          }
          Net model(3, variant.tied);
          prepare(*model, casts, variant);
          fully_shard(*model, mesh, mixed(casts));
          torch::optim::AdamW optimizer(unique_parameters(*model),
                                        torch::optim::AdamWOptions(0.02));
          const auto cut = [&](const at::Tensor& t) {
            return distribute_tensor(t, mesh, Placements(dims.size(), Shard(0)));
          };
          for (int step = 0; step < kMixedSteps; ++step) {
            for (int b = 0; b < backwards; ++b) {
              const Rows all = rows(step * backwards + b, count);
              const Rows r = {cut(all.tokens), cut(all.counts)};
              const CommTrace trace(mesh);
              at::Tensor logits;
              if (variant.checkpointed) {
                at::Tensor x = model->embed(r.tokens);
                for (const int i : variant.order) {
                  x = checkpoint(
                      [&model, i](const std::vector<at::Tensor>& in) {
                        return std::vector<at::Tensor>{model->block(i)(in[0])};
                      },
                      {x})[0];
                }
                logits = model->head(model->norm(x));
              } else {
                logits = model->logits(r.tokens, variant.order);
              }
              loss_of(logits, r).backward();
              for (const CommEvent& event : trace.events()) {
                if (!is_of_units(event)) continue;
                const bool gathers = event.collective == "all_gather";
                EXPECT_EQ(event.dtype, gathers ? casts.used() : casts.reduced())
                    << event.collective;
              }
            }
            expect_equal(gradients_of(*model), wanted_gradients[static_cast<size_t>(step)], where);
            optimizer.step();
            optimizer.zero_grad();
            expect_equal(values_of(*model), wanted_values[static_cast<size_t>(step)], where);
          }
          EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
        });
      }
    }
  }
}

double furthest(const Values& got, const Values& wanted) {
  double far = 0;
  for (const auto& [name, value] : wanted) {
    far = std::max(far, (got.at(name).to(at::kDouble) - value).abs().max().item<double>());
  }
  return far;
}

// Tensor parallelism sums in other places, each with a rounding of its own. The measure is how far
// one device that casts is from one that has doubles everywhere: where it rounds once, k ranks round
// k summands and k - 1 sums.
TEST(FullyShardMixedPrecisionTest, OverTensorParallelIsAsExactAsOneDevice) {
  const Variant variant;
  for (const Casts& casts : kCasts) {
    Net exact, rounded;
    const Casts none = {at::kDouble, {}, {}, {}};
    prepare(*exact, none, variant);
    prepare(*rounded, casts, variant);
    const Values wanted = summed_gradients(*exact, rows(0), 1, 1, none, variant);
    const double off = furthest(summed_gradients(*rounded, rows(0), 1, 1, casts, variant), wanted);
    ASSERT_GT(off, 0);
    for (const auto& dims : std::vector<std::vector<MeshDim>>{
             {{"dp", 2}, {"tp", 2}}, {{"dp", 3}, {"tp", 2}}, {{"pp", 1}, {"dp", 2}, {"tp", 2}}}) {
      on_mesh(dims, [&](const MeshPtr& mesh) {
        Net model;
        prepare(*model, casts, variant);
        parallelize_module(*model, mesh, {.parameter = kTensorParallel});
        fully_shard(*model, mesh, mixed(casts));
        const Rows all = rows(0);
        const Rows r = {distribute_tensor(all.tokens, mesh, {{"dp", Shard(0)}}),
                        distribute_tensor(all.counts, mesh, {{"dp", Shard(0)}})};
        const CommTrace trace(mesh);
        loss_of(model->logits(r.tokens), r).backward();
        for (const CommEvent& event : trace.events()) {
          if (!is_of_units(event)) continue;
          const bool gathers = event.collective == "all_gather";
          EXPECT_EQ(event.dtype, gathers ? casts.used() : casts.reduced()) << event.collective;
        }
        const auto k = static_cast<double>(mesh->mesh().size());
        EXPECT_LE(furthest(gradients_of(*model), wanted), (2 * k - 1) * off) << dims.size();
      });
    }
  }
}

TEST(FullyShardMixedPrecisionTest, SendsAndGathersHalfTheBytes) {
  struct Sent {
    int64_t gathers = 0, gathered = 0, sums = 0, summed = 0, peak = 0;
    int64_t two_units = 0;  // the largest, in bytes as they rest
  };
  const auto run = [](const std::vector<MeshDim>& dims, Dtype param, Dtype reduce) {
    Sent sent;
    on_mesh(dims, [&](const MeshPtr& mesh) {
      Net model;
      if (has_dim(dims, "tp")) parallelize_module(*model, mesh, {.parameter = kTensorParallel});
      std::map<std::string, int64_t> units;
      for (const auto& p : model->named_parameters()) {
        const at::Tensor& t = p.value();
        const std::string& name = p.key();
        const bool is_of_block = name.starts_with("blocks.");
        units[is_of_block ? name.substr(0, name.find('.', 7)) : ""] +=
            (is_dtensor(t) ? to_local(t) : t).numel() * 4;
      }
      std::vector<int64_t> sizes;
      for (const auto& [name, bytes] : units) sizes.push_back(bytes);
      std::sort(sizes.rbegin(), sizes.rend());
      fully_shard(
          *model, mesh,
          {.mesh_dim = "dp", .units = {"blocks.*"}, .param_dtype = param, .reduce_dtype = reduce});
      Batch b = fed(0, mesh);
      if (has_dim(dims, "replicas")) {
        // Evenly: a view of rows that are cut unevenly along both gathers them along one, and then
        // gradients are whole along that.
        const NamedPlacements rows = {{"replicas", Shard(0)}, {"dp", Shard(0)}};
        const Batch all = batch(0);
        b.tokens = distribute_tensor(all.tokens.slice(0, 0, 4), mesh, rows);
        b.targets = distribute_tensor(all.targets.slice(0, 0, 4), mesh, rows);
      }
      const CommTrace trace(mesh);
      model->loss(b.tokens, b.targets).backward();
      EXPECT_EQ(fully_shard_counters(mesh).gathered_bytes, 0);
      const auto at = mesh->coordinate();
      if (std::any_of(at.begin(), at.end(), [](int64_t c) { return c != 0; })) return;
      for (const CommEvent& event : trace.events()) {
        if (!is_of_units(event)) continue;
        const bool gathers = event.collective == "all_gather";
        ++(gathers ? sent.gathers : sent.sums);
        (gathers ? sent.gathered : sent.summed) += event.bytes;
      }
      sent.peak = fully_shard_counters(mesh).peak_gathered_bytes;
      sent.two_units = sizes[0] + sizes[1];
    });
    return sent;
  };
  for (const auto& dims : std::vector<std::vector<MeshDim>>{
           {{"dp", 2}}, {{"dp", 3}}, {{"dp", 2}, {"tp", 2}}, {{"replicas", 2}, {"dp", 2}}}) {
    SCOPED_TRACE(::testing::Message() << dims.size() << " dims, the last " << dims.back().size);
    const Sent whole = run(dims, {}, {}), half = run(dims, at::kBFloat16, {}),
               wide = run(dims, at::kBFloat16, at::kFloat);
    EXPECT_GT(whole.gathers, 0);
    for (const Sent& s : {half, wide}) {
      EXPECT_EQ(s.gathers, whole.gathers);
      EXPECT_EQ(s.sums, whole.sums);
      EXPECT_EQ(2 * s.gathered, whole.gathered);
    }
    EXPECT_EQ(2 * half.summed, whole.summed);
    EXPECT_EQ(wide.summed, whole.summed);
    // The one that computes and the one whose gradients travel, until they have left: that depends on
    // how the ranks wait for each other. Gradients that are wider come in place of the parameters, not
    // beside them.
    EXPECT_LE(whole.peak, whole.two_units);
    EXPECT_LE(2 * half.peak, whole.two_units);
    EXPECT_LE(wide.peak, whole.two_units);
  }
  // One rank gathers nothing, and has a copy of what it uses.
  const Sent alone = run({{"dp", 1}}, at::kBFloat16, at::kFloat);
  EXPECT_EQ(alone.gathers + alone.sums, 0);
  EXPECT_GT(alone.peak, 0);
  EXPECT_LE(alone.peak, run({{"dp", 2}}, at::kBFloat16, {}).peak);
  EXPECT_EQ(run({{"dp", 1}}, {}, {}).peak, 0);
  // Of one unit it is either the parameters or the gradients.
  for (const bool is_wide : {false, true}) {
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      nn::Linear model(kDim, kHidden);
      fully_shard(
          *model, mesh,
          {.param_dtype = at::kBFloat16, .reduce_dtype = is_wide ? at::kFloat : at::kBFloat16});
      const at::Tensor x = distribute_tensor(at::ones({4, kDim}), mesh, {{"dp", Shard(0)}});
      model->forward(x).square().sum().backward();
      EXPECT_EQ(fully_shard_counters(mesh).peak_gathered_bytes,
                (kDim + 1) * kHidden * (is_wide ? 4 : 2));
    });
  }
}

// An average of weights is of what rests, in 32 bits, whoever keeps it: a buffer of the module, or another
// module, whole or sharded.
TEST(FullyShardMixedPrecisionTest, DoesNotRoundAverages) {
  struct KeeperImpl : nn::Module {
    KeeperImpl() {
      layer = register_module("layer", nn::Linear(kDim, kHidden));
      shadow = register_buffer("shadow", at::zeros({kHidden, kDim}));
    }
    nn::Linear layer{nullptr};
    at::Tensor shadow;
  };
  const at::Tensor whole = [] {
    nn::Linear plain(kDim, kHidden);
    initialize(*plain);
    return plain->weight.detach().clone();
  }();
  ASSERT_FALSE(at::equal(whole.to(at::kBFloat16).to(at::kFloat), whole));
  for (const std::vector<MeshDim>& dims :
       {std::vector<MeshDim>{{"dp", 2}}, {{"dp", 3}}, {{"dp", 2}, {"replicas", 2}}}) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      KeeperImpl keeper;
      nn::Linear teacher(kDim, kHidden);
      for (nn::Linear layer : {keeper.layer, teacher}) initialize(*layer);
      fully_shard(keeper, mesh, {.mesh_dim = "dp", .param_dtype = at::kBFloat16});
      distribute_module(*teacher, mesh, {});
      const at::Tensor& p = keeper.layer->weight;
      const at::Tensor kept = p.detach().clone();  // while gradients are recorded
      EXPECT_EQ(layout_of(kept), layout_of(p));
      const c10::AutoGradMode no_grad(false);
      const auto expect = [&](const at::Tensor& got, const at::Tensor& wanted) {
        EXPECT_EQ(got.scalar_type(), at::kFloat);
        EXPECT_TRUE(at::equal(full_tensor(got), wanted)) << full_tensor(got) << wanted;
      };
      expect(kept, whole);
      expect(kept.clone().lerp_(p * 2, 0.25), at::lerp(whole, whole * 2, 0.25));
      keeper.shadow.copy_(p);
      expect(keeper.shadow, whole);
      keeper.shadow.add_(p, 0.5);
      expect(keeper.shadow, whole.add(whole, 0.5));
      keeper.shadow.lerp_(p, 0.1);
      expect(keeper.shadow, whole.add(whole, 0.5).lerp_(whole, 0.1));
      teacher->weight.mul_(0.9).add_(p, 0.1);
      expect(teacher->weight, whole.mul(0.9).add_(whole, 0.1));
      // What is no member sees what is used.
      const at::Tensor x = distribute_tensor(at::ones({4, kDim}), mesh, Placements(dims.size()));
      EXPECT_EQ(at::linear(x, p).scalar_type(), at::kBFloat16);
    });
  }
}

TEST(FullyShardMixedPrecisionTest, OfOtherUses) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    nn::Linear model(kDim, kHidden);
    initialize(*model);
    fully_shard(
        *model, mesh,
        {.param_dtype = at::kBFloat16, .reduce_dtype = at::kDouble, .output_dtype = at::kFloat});
    const at::Tensor& w = model->weight;
    // As they rest: what optimizers and initialisers see.
    EXPECT_EQ(full_tensor(w.detach()).scalar_type(), at::kFloat);
    {
      const c10::AutoGradMode no_grad(false);
      EXPECT_EQ(w.norm().scalar_type(), at::kFloat);
      w.mul_(2);
    }
    // As it is used, whole or through views.
    EXPECT_EQ((w * 1).scalar_type(), at::kBFloat16);
    EXPECT_EQ(w.t().scalar_type(), at::kBFloat16);
    const at::Tensor x = distribute_tensor(at::ones({4, kDim}), mesh, {{"dp", Shard(0)}});
    for (const at::Tensor& y :
         {at::linear(x, w), at::matmul(x, w.t()), at::mm(x, w.view({kHidden, kDim}).t()),
          at::addmm(model->bias, x, w.t()), model->forward(x)}) {
      EXPECT_EQ(y.scalar_type(), at::kFloat);
    }
    EXPECT_EQ(x.scalar_type(), at::kFloat);  // that which was given stays
    EXPECT_EQ((x * 2).scalar_type(), at::kFloat);
    // A gradient of gradients.
    const at::Tensor squares = at::linear(x, w).square().sum();
    const CommTrace trace(mesh);
    const auto grads = torch::autograd::grad({squares}, {w}, {}, std::nullopt,
                                             /*create_graph=*/true);
    int sums = 0;
    for (const CommEvent& event : trace.events()) {
      if (event.collective == "all_gather") continue;
      ++sums;
      EXPECT_EQ(event.dtype, at::kDouble) << event.collective;
    }
    EXPECT_EQ(sums, 1) << trace.to_string();
    EXPECT_EQ(grads[0].scalar_type(), at::kFloat);
    grads[0].square().sum().backward();
    EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
    EXPECT_EQ(layout_of(w.grad()), layout_of(w));
  });
  // A gradient that is whole on every rank, and one that lies as the parameter: nothing is summed,
  // and the number of ranks is not seen in it.
  for (const int64_t ranks : {1, 2}) {
    on_mesh({{"dp", ranks}}, [](const MeshPtr& mesh) {
      nn::Linear model(kDim, kHidden);
      initialize(*model);
      const at::Tensor x = at::sin(at::arange(3 * kDim, at::kFloat)).view({3, kDim});
      const at::Tensor wanted = at::ones({kHidden, 3}).mm(x).to(at::kBFloat16).to(at::kFloat);
      fully_shard(*model, mesh, {.reduce_dtype = at::kBFloat16});
      model->forward(distribute_tensor(x, mesh, Placements(1))).sum().backward();
      EXPECT_TRUE(at::equal(full_tensor(model->weight.grad()), wanted));
    });
  }
}

// What a forward asks for in the dtype that rests is computed in it, of the numbers that operators see.
TEST(FullyShardMixedPrecisionTest, GivesWhatIsAskedFor) {
  const at::Tensor x = at::sin(at::arange(4 * kDim, at::kFloat)).view({4, kDim});
  nn::Linear plain(kDim, kHidden);
  initialize(*plain);
  const at::Tensor seen = plain->weight.detach().to(at::kBFloat16).to(at::kFloat);
  const at::Tensor wanted = at::linear(x, seen);
  ASSERT_FALSE(at::allclose(wanted, wanted.to(at::kBFloat16).to(at::kFloat), 1e-5, 1e-5));
  for (const int64_t ranks : {1, 2, 3}) {
    on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
      nn::Linear model(kDim, kHidden);
      initialize(*model);
      fully_shard(*model, mesh, {.param_dtype = at::kBFloat16});
      const at::Tensor& w = model->weight;
      const auto scores = [&](const at::Tensor& in) {
        return at::linear(in.to(at::kFloat), w.to(at::kFloat));
      };
      EXPECT_TRUE(at::allclose(full_tensor(w.to(at::ones({1}, at::kFloat)).detach()), seen));
      const at::Tensor in = distribute_tensor(x, mesh, {{"dp", Shard(0)}}).requires_grad_();
      for (const bool again : {false, true}) {
        const at::Tensor got = again ? checkpoint(scores, in) : scores(in);
        EXPECT_EQ(got.scalar_type(), at::kFloat);
        EXPECT_TRUE(at::allclose(full_tensor(got.detach()), wanted, 1e-6, 1e-6));
        got.sum().backward();
        const at::Tensor grad = full_tensor(w.grad());
        EXPECT_TRUE(at::allclose(grad, at::ones({kHidden, 4}).mm(x), 1e-2, 1e-2)) << grad;
        w.mutable_grad() = at::Tensor();
      }
      // module->to() leaves all as it is.
      const c10::AutoGradMode no_grad(false);
      model->to(at::kFloat);
      EXPECT_TRUE(at::equal(full_tensor(w.detach()), plain->weight.detach()));
    });
  }
}

// checkpoint() runs a function twice, and both runs are of one function.
TEST(FullyShardMixedPrecisionTest, UnderCheckpoints) {
  struct GainImpl : nn::Module {
    GainImpl() { gain = register_parameter("gain", at::arange(kDim, at::kFloat) / 37); }
    at::Tensor forward(const at::Tensor& x) { return x * (1 + gain); }
    at::Tensor gain;
  };
  for (const bool outer : {false, true}) {  // one within another
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      GainImpl model;
      fully_shard(model, mesh, {.param_dtype = at::kBFloat16});
      const at::Tensor x =
          distribute_tensor(
              at::sin(at::arange(4 * kDim, at::kFloat) + 1).view({4, kDim}).to(at::kBFloat16), mesh,
              {{"dp", Shard(0)}})
              .requires_grad_();
      std::vector<at::Tensor> runs;
      const auto run = [&](const at::Tensor& in) {
        const at::Tensor out = model.forward(in);
        runs.push_back(out.detach().clone());
        return out;
      };
      // The function's own guard means the same in both runs.
      std::vector<at::Tensor> guarded;
      checkpoint(
          [&](const at::Tensor& in) {
            {
              const c10::AutoGradMode no_grad(false);
              guarded.push_back(full_tensor(model.gain * 1).to(at::kDouble));
            }
            return model.forward(in);
          },
          x)
          .sum()
          .backward();
      ASSERT_EQ(guarded.size(), 2U);
      EXPECT_TRUE(at::equal(guarded[0], guarded[1]));
      const at::Tensor wanted = model.forward(x).detach();
      EXPECT_EQ(wanted.scalar_type(), at::kBFloat16);
      const at::Tensor got =
          outer ? checkpoint([&](const at::Tensor& in) { return checkpoint(run, in); }, x)
                : checkpoint(run, x);
      got.sum().backward();
      ASSERT_GE(runs.size(), 2U);
      runs.push_back(got.detach());
      for (const at::Tensor& one : runs) {
        EXPECT_EQ(one.scalar_type(), at::kBFloat16);
        EXPECT_TRUE(at::equal(full_tensor(one), full_tensor(wanted)));
      }
      // Behind it averages are of what rests again.
      const c10::AutoGradMode no_grad(false);
      EXPECT_EQ((1 + model.gain).scalar_type(), at::kFloat);
    });
  }
}

TEST(FullyShardMixedPrecisionTest, OfIndices) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    nn::Embedding model(kWords, kDim);
    initialize(*model);
    const at::Tensor whole = model->weight.detach().clone();
    fully_shard(*model, mesh, {.param_dtype = at::kBFloat16});
    const at::Tensor rows = at::arange(6) * 5 % kWords;
    const at::Tensor ids = distribute_tensor(rows, mesh, {{"dp", Shard(0)}});
    const auto look_up = [&] { return model->weight.index({ids}); };
    const at::Tensor wanted = whole.to(at::kBFloat16).index({rows});
    EXPECT_TRUE(at::equal(full_tensor(look_up().detach()), wanted));
    {
      const c10::AutoGradMode no_grad(false);
      EXPECT_EQ(look_up().scalar_type(), at::kBFloat16);
      EXPECT_TRUE(at::equal(full_tensor(look_up()), wanted));
    }
    look_up().sum().backward();
    at::Tensor counts = at::zeros({kWords, kDim});
    counts.index_put_({rows}, at::ones({6, kDim}), /*accumulate=*/true);
    EXPECT_TRUE(at::equal(full_tensor(model->weight.grad()), counts));
  });
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    nn::Embedding model(kWords, kDim);
    fully_shard(*model, mesh, {.param_dtype = at::kBFloat16, .output_dtype = at::kDouble});
    const at::Tensor ids = distribute_tensor(at::arange(6), mesh, {{"dp", Shard(0)}});
    EXPECT_EQ(model->weight.index({ids}).scalar_type(), at::kDouble);
  });
}

// What rests as several dtypes, and what mixed precision leaves as it is.
TEST(FullyShardMixedPrecisionTest, OfSeveralDtypes) {
  struct ManyImpl : nn::Module {
    ManyImpl() {
      first = register_module("first", nn::Linear(kDim, kHidden));
      second = register_module("second", nn::Linear(kHidden, kWords));
      initialize(*this);
      first->to(at::kDouble);
      turn = register_parameter(
          "turn", at::polar(at::ones({kWords}), at::arange(kWords, at::kFloat) * 0.1));
      const at::Tensor eighths =
          ((at::arange(2 * kWords, at::kFloat) - kWords) / 8).to(at::kFloat8_e4m3fn);
      small = register_parameter("small", eighths, /*requires_grad=*/false);
    }
    at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))); }
    nn::Linear first{nullptr}, second{nullptr};
    at::Tensor turn, small;
  };
  const at::Tensor x = at::cos(at::arange(6 * kDim, at::kDouble)).view({6, kDim});
  ManyImpl plain;
  const auto in = [](const at::Tensor& t) { return t.to(at::kFloat); };
  const auto linear = [&](const at::Tensor& t, nn::Linear& l) {
    return at::addmm(in(l->bias), in(t), in(l->weight).t());
  };
  const auto forward = [&](const at::Tensor& t) {
    return linear(at::tanh(linear(t, plain.first)), plain.second);
  };
  forward(x).to(at::kDouble).sum().backward();
  const Values wanted = gradients_of(plain);
  for (const int64_t ranks : {1, 2}) {
    on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
      ManyImpl model;
      const auto units = fully_shard(model, mesh, {.param_dtype = at::kFloat});
      EXPECT_EQ(units.size(), 4U);  // one of each dtype
      const at::Tensor got = model.forward(distribute_tensor(x, mesh, {{"dp", Shard(0)}}));
      EXPECT_EQ(got.scalar_type(), at::kFloat);
      // Rank by rank: on some processors a row's last bits depend on how many are multiplied at once.
      std::vector<at::Tensor> rows;
      for (const at::Tensor& part : x.chunk(ranks)) rows.push_back(forward(part));
      EXPECT_TRUE(at::equal(full_tensor(got), at::cat(rows)));
      got.to(at::kDouble).sum().backward();
      const Values gradients = gradients_of(model);
      if (ranks == 1) expect_equal(gradients, wanted, "one rank");
      for (const auto& [name, grad] : wanted) {
        EXPECT_EQ(gradients.at(name).scalar_type(), grad.scalar_type()) << name;
        // Sums of six in another order: five roundings each.
        EXPECT_TRUE(at::allclose(gradients.at(name), grad, 1e-6, 1e-6)) << name;
      }
      for (at::Tensor& p : model.parameters()) p.mutable_grad() = at::Tensor();
      // As they are, and as what meets them is.
      EXPECT_EQ((model.turn * at::ones({kWords}, at::kComplexDouble)).scalar_type(),
                at::kComplexDouble);
      at::real(model.turn * model.turn.conj()).sum().backward();
      EXPECT_EQ(model.turn.grad().scalar_type(), at::kComplexFloat);
      EXPECT_TRUE(at::equal(full_tensor(model.small.to(at::kFloat)), plain.small.to(at::kFloat)));
      EXPECT_EQ(model.small.view({2, kWords}).scalar_type(), at::kFloat8_e4m3fn);
      EXPECT_EQ(fully_shard_counters(mesh).gathers > 0, ranks > 1);
    });
  }
}

// From the third run on LibTorch differentiates the graph by itself, and its gradients come past the
// unit's node.
TEST(FullyShardMixedPrecisionTest, OfTorchScript) {
  struct Holder : nn::Module {
    explicit Holder(const torch::jit::Module& script) {
      for (const auto& p : script.named_parameters()) register_parameter(p.name, p.value);
    }
  };
  for (const Dtype output : {Dtype(), Dtype(at::kDouble)}) {
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      torch::jit::Module script("m");
      for (const auto& [name, sizes] : std::vector<std::pair<std::string, std::vector<int64_t>>>{
               {"a", {kHidden, kDim}}, {"b", {kHidden}}, {"c", {kWords, kHidden}}}) {
        const at::Tensor value = at::sin(at::arange(c10::multiply_integers(sizes), at::kDouble));
        script.register_parameter(name, value.view(sizes).requires_grad_(), /*is_buffer=*/false);
      }
      script.define(R"(
        def forward(self, x):
            h = torch.tanh(torch.linear(x, self.a, self.b))
            return torch.linear(h, self.c).square().mean()
      )");
      Holder parameters(script);
      fully_shard(parameters, mesh,
                  {.param_dtype = at::kFloat, .reduce_dtype = at::kFloat, .output_dtype = output});
      // Of one dtype with what operators give: its own backward takes inputs as they were.
      const at::Tensor all = at::cos(at::arange(kBatch * kDim, at::kDouble)).view({kBatch, kDim});
      const at::Tensor x =
          distribute_tensor(all.to(output.value_or(at::kFloat)), mesh, {{"dp", Shard(0)}});
      Values first;
      for (int step = 0; step < 4; ++step) {
        const CommTrace trace(mesh);
        const at::Tensor loss = script.forward({x}).toTensor();
        EXPECT_EQ(loss.scalar_type(), output.value_or(at::kFloat));
        loss.backward();
        for (const CommEvent& event : trace.events()) {
          if (!is_of_units(event)) continue;
          EXPECT_EQ(event.dtype, at::kFloat) << event.collective;
        }
        const Values gradients = gradients_of(parameters);
        if (step == 0) first = gradients;
        expect_close(gradients, first, 1e-6);
        for (const auto& [name, grad] : gradients) EXPECT_EQ(grad.scalar_type(), at::kDouble);
        for (at::Tensor& p : parameters.parameters()) p.mutable_grad() = at::Tensor();
      }
    });
  }
}

// Statistics are of float32, weights of what operators see; also after to(), which gives a module's
// tensors others' data.
TEST(FullyShardMixedPrecisionTest, BatchNormTrainsAndIsEvaluated) {
  struct NetImpl : nn::Module {
    nn::Linear in = register_module("in", nn::Linear(kDim, kDim));
    nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(kDim));
    at::Tensor forward(const at::Tensor& x) { return norm->forward(in->forward(x)); }
  };
  const at::Tensor x = at::sin(at::arange(6 * kDim, at::kFloat)).view({6, kDim});
  NetImpl plain;
  initialize(plain);
  plain.forward(x);
  plain.eval();
  const at::Tensor wanted = plain.forward(x);
  wanted.square().sum().backward();
  for (const int64_t ranks : {1, 2, 8}) {  // some ranks have no rows
    for (const bool converted : {false, true}) {
      on_mesh({{"dp", ranks}}, [&](const MeshPtr& mesh) {
        NetImpl model;
        initialize(model);
        if (converted) {
          distribute_module(model, mesh, {});
          model.to(at::kDouble);
          model.to(at::kFloat);
        }
        fully_shard(model, mesh, {.param_dtype = at::kBFloat16});
        const at::Tensor mine = distribute_tensor(x, mesh, {{"dp", Shard(0)}});
        model.forward(mine);
        for (const auto& [name, statistics] :
             {std::pair{"mean", &nn::BatchNorm1dImpl::running_mean},
              std::pair{"var", &nn::BatchNorm1dImpl::running_var}}) {
          const at::Tensor got = (*model.norm).*statistics;
          EXPECT_EQ(got.scalar_type(), at::kFloat);
          EXPECT_TRUE(at::allclose(full_tensor(got), (*plain.norm).*statistics, 1e-2, 1e-2))
              << name;
        }
        model.eval();
        {
          const at::NoGradGuard no_grad;
          EXPECT_TRUE(
              at::allclose(full_tensor(model.forward(mine)).to(at::kFloat), wanted, 5e-2, 5e-2));
        }
        const at::Tensor got = model.forward(mine);
        EXPECT_TRUE(at::allclose(full_tensor(got.detach()).to(at::kFloat), wanted, 5e-2, 5e-2));
        got.square().sum().backward();
        const Values gradients = gradients_of(model);
        for (const auto& item : plain.named_parameters()) {
          const at::Tensor& grad = gradients.at(item.key());
          EXPECT_LE((grad - item.value().grad()).abs().max().item<double>(),
                    0.05 * item.value().grad().abs().max().item<double>())
              << item.key();
        }
      });
    }
  }
}

}  // namespace
}  // namespace shardweave
