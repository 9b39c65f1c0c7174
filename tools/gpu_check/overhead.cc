// What DTensors cost over plain tensors on a GPU: the host's time for an operator, the device's for
// a transformer block.
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "check.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/modules/fully_shard.h"
#include "transformer.h"

namespace shardweave_tool {
namespace {

using namespace shardweave;

// What the operators below work on: small, so that the device keeps up.
struct Operands {
  at::Tensor a, b;   // [8, 8]
  at::Tensor batch;  // [2, 8, 8]
  at::Tensor row;    // [8]
  at::Tensor mask;   // [8, 8] bool
  at::Tensor index;  // [8] int64
};

Operands make_operands(const std::function<at::Tensor(const at::Tensor&)>& place) {
  return {place(at::randn({8, 8})), place(at::randn({8, 8})),      place(at::randn({2, 8, 8})),
          place(at::randn({8})),    place(at::rand({8, 8}) > 0.5), place(at::arange(8))};
}

struct Operator {
  const char* name;
  void (*run)(const Operands&);
};

constexpr Operator kOperators[] = {
    {"add", [](const Operands& x) { at::add(x.a, x.b); }},
    {"add_", [](const Operands& x) { at::Tensor(x.a).add_(x.b, 1e-9); }},
    {"mul", [](const Operands& x) { at::mul(x.a, x.b); }},
    {"mul by a number", [](const Operands& x) { at::mul(x.a, 2.0); }},
    {"mm", [](const Operands& x) { at::mm(x.a, x.b); }},
    {"bmm", [](const Operands& x) { at::bmm(x.batch, x.batch); }},
    {"addmm", [](const Operands& x) { at::addmm(x.row, x.a, x.b); }},
    {"t", [](const Operands& x) { x.a.t(); }},
    {"view", [](const Operands& x) { x.batch.view({2, 64}); }},
    {"slice", [](const Operands& x) { x.a.slice(1, 2, 6); }},
    {"cat", [](const Operands& x) { at::cat({x.a, x.b}, 1); }},
    {"sum", [](const Operands& x) { at::sum(x.a, {1}); }},
    {"softmax", [](const Operands& x) { at::_softmax(x.a, 1, false); }},
    {"layer_norm", [](const Operands& x) { at::native_layer_norm(x.a, {8}, x.row, x.row, 1e-5); }},
    {"gelu", [](const Operands& x) { at::gelu(x.a); }},
    {"embedding", [](const Operands& x) { at::embedding(x.a, x.index); }},
    {"where", [](const Operands& x) { at::where(x.mask, x.a, x.b); }},
};

// Of the host, which does not wait.
double host_seconds(c10::Device device, const std::function<void()>& body, int calls) {
  synchronize(device);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) body();
  const auto end = std::chrono::steady_clock::now();
  synchronize(device);
  return std::chrono::duration<double>(end - start).count();
}

void measure_block(Session& session, Check& check, bool fused_attention) {
  const GpuCheckSizes& sizes = session.options.sizes;
  const c10::Device device = session.device;
  const MeshPtr mesh = session.this_rank();
  const TransformerSizes block_sizes = {
      .dim = sizes.block_dim, .heads = sizes.block_heads, .fused_attention = fused_attention};
  struct Way {
    const char* name;
    TransformerBlock block;
    at::Tensor x;
    std::vector<double> seconds = {};
  };
  const at::Tensor x =
      (at::cos(at::arange(sizes.block_batch * sizes.block_length * sizes.block_dim, at::kFloat))
           .view({sizes.block_batch, sizes.block_length, sizes.block_dim}))
          .to(device, at::kBFloat16);
  const auto make = [&] {
    TransformerBlock block(block_sizes);
    fill(*block);
    block->to(device, at::kBFloat16);
    return block;
  };
  std::vector<Way> ways = {{"plain", make(), x.clone()},
                           {"DTensor", make(), distribute_tensor(x, mesh, {Replicate()})},
                           {"fully_shard", make(), distribute_tensor(x, mesh, {Shard(0)})}};
  distribute_module(*ways[1].block, mesh, ParameterPlan());
  fully_shard(*ways[2].block, mesh);
  for (Way& way : ways) way.x.requires_grad_();
  const auto step = [](Way& way) {
    way.block->forward(way.x).sum().backward();
    way.block->zero_grad();
    way.x.mutable_grad().reset();
  };
  for (int i = 0; i < sizes.block_repeats + 3; ++i) {
    for (Way& way : ways) {
      const double seconds = device_seconds(device, [&] { step(way); });
      if (i >= 3) way.seconds.push_back(seconds);
    }
  }
  const double plain = median(ways[0].seconds);
  for (const Way& way : ways) {
    check.figure({.name = way.name, .value = median(way.seconds) * 1e3, .unit = "ms"});
  }
  check.figure(
      {.name = "DTensor / plain", .value = median(ways[1].seconds) / plain, .at_most = 1.01});
  check.figure(
      {.name = "fully_shard / plain", .value = median(ways[2].seconds) / plain, .at_most = 1.03});
  check.fact("clock", has_clock(device) ? "the device's" : "the host's");
  check.looked_at(absl::StrCat("forward and backward, dim ", sizes.block_dim, ", ",
                               sizes.block_batch, " x ", sizes.block_length,
                               " words, bfloat16, on one rank"));
}

}  // namespace

void check_dispatch(Session& session, Check& check) {
  const c10::Device device = session.device;
  const MeshPtr mesh = session.this_rank();
  const auto plain = [&](const at::Tensor& t) { return t.to(device); };
  const auto sharded = [&](const at::Tensor& t) {
    return distribute_tensor(t.to(device), mesh, {Replicate()});
  };
  const Operands p = make_operands(plain), s = make_operands(sharded);
  const c10::AutoGradMode no_grad(false);
  const int calls = session.options.sizes.dispatch_calls;
  std::vector<double> overheads;
  for (const Operator& op : kOperators) {
    std::vector<double> plain_us, sharded_us;
    for (int i = 0; i < session.options.sizes.dispatch_batches + 1; ++i) {
      const double of_plain = host_seconds(device, [&] { op.run(p); }, calls);
      const double of_sharded = host_seconds(device, [&] { op.run(s); }, calls);
      if (i == 0) continue;  // decided, compiled and loaded once
      plain_us.push_back(of_plain / calls * 1e6);
      sharded_us.push_back(of_sharded / calls * 1e6);
    }
    const double before = median(plain_us), more = median(sharded_us) - before;
    overheads.push_back(more);
    check.figure({.name = absl::StrCat(op.name, ": plain"), .value = before, .unit = "us"});
    check.figure(
        {.name = absl::StrCat(op.name, ": more for DTensors"), .value = more, .unit = "us"});
  }
  check.figure(
      {.name = "median of more", .value = median(overheads), .unit = "us", .at_most = 1.2});
  check.looked_at(
      absl::StrCat(std::size(kOperators), " operators on [8, 8], the host's time to issue them"));
}

void check_block(Session& session, Check& check) {
  measure_block(session, check, /*fused_attention=*/true);
}

void check_block_of_matmuls(Session& session, Check& check) {
  measure_block(session, check, /*fused_attention=*/false);
}

}  // namespace shardweave_tool
