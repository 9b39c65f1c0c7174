// The examples at the top of public headers, as docs_test finds them there: compiled, not run.
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "shardweave/comm/backend.h"
#include "shardweave/comm/buffer.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/comm/composed.h"
#include "shardweave/comm/counting/counting.h"
#include "shardweave/comm/flight_recorder.h"
#include "shardweave/comm/gloo/gloo_backend.h"
#include "shardweave/comm/inproc/inproc.h"
#include "shardweave/comm/patience.h"
#include "shardweave/comm/reduction.h"
#include "shardweave/comm/status_exception.h"
#include "shardweave/comm/store/store.h"
#include "shardweave/comm/work.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/activation_checkpoint.h"
#include "shardweave/dtensor/autocast.h"
#include "shardweave/dtensor/captured_step.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/compat/sharded_tensor.h"
#include "shardweave/dtensor/cost_model.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/grad_sync.h"
#include "shardweave/dtensor/gradient_hook.h"
#include "shardweave/dtensor/load_cuda.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/observe/explain.h"
#include "shardweave/dtensor/observe/profile_trace.h"
#include "shardweave/dtensor/observe/visualize_sharding.h"
#include "shardweave/dtensor/random.h"
#include "shardweave/dtensor/redistribute_async.h"
#include "shardweave/dtensor/rule.h"
#include "shardweave/dtensor/spec.h"
#include "shardweave/mesh/connected_mesh.h"
#include "shardweave/mesh/device_mesh.h"
#include "shardweave/modules/auto_plan.h"
#include "shardweave/modules/data_parallel.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/dump.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/hugging_face_plan.h"
#include "shardweave/modules/join.h"
#include "shardweave/modules/list_communication.h"
#include "shardweave/modules/module_memory.h"
#include "shardweave/modules/nn/causal_lm.h"
#include "shardweave/modules/nn/conv1d.h"
#include "shardweave/modules/nn/gated_mlp.h"
#include "shardweave/modules/nn/gpt2.h"
#include "shardweave/modules/nn/grouped_query_attention.h"
#include "shardweave/modules/nn/layer_registry.h"
#include "shardweave/modules/nn/llama.h"
#include "shardweave/modules/nn/mixtral.h"
#include "shardweave/modules/nn/mixture_of_experts.h"
#include "shardweave/modules/nn/plan_options.h"
#include "shardweave/modules/nn/registry.h"
#include "shardweave/modules/nn/rms_norm.h"
#include "shardweave/modules/nn/rotary_embedding.h"
#include "shardweave/modules/nn/routed_experts.h"
#include "shardweave/modules/nn/vit.h"
#include "shardweave/modules/non_persistent_buffers.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/optim/grad_scaler.h"
#include "shardweave/modules/optim/options.h"
#include "shardweave/modules/optim/schedule.h"
#include "shardweave/modules/parallel_style.h"
#include "shardweave/modules/parallel_style_json.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/plan_cost.h"
#include "shardweave/modules/plugin.h"
#include "shardweave/modules/power_sgd.h"
#include "shardweave/modules/prepare_tensors.h"
#include "shardweave/modules/sharding_plan_json.h"
#include "shardweave/modules/verify.h"
#include "shardweave/modules/zero.h"
#include "shardweave/placement/layout.h"
#include "shardweave/placement/placement.h"
#include "shardweave/placement/redistribute_bound.h"
#include "shardweave/placement/redistribute_plan.h"
#include "shardweave/placement/reduce_op.h"
#include "shardweave/placement/simulated_mesh.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/adamw.h"
#include "torch/optim/optimizer.h"

// Examples show what a call gives, and leave it at that.
#pragma GCC diagnostic ignored "-Wunused-result"
#pragma GCC diagnostic ignored "-Wunused-value"
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"
#pragma GCC diagnostic ignored "-Wshadow"

namespace shardweave::header_examples {

using Model = std::shared_ptr<torch::nn::SequentialImpl>;

// --- placement -----------------------------------------------------------------------------------

void placement() {
  Placement p = Shard(0);
  Placement r = Replicate();
  Placement s = Partial(ReduceOp::kSum);
  p.to_string();
  parse_placements("[S(0), R]");
}

void layout() {
  auto layout = Layout::create({Shard(0), Shard(0)});
  auto mine = local_extent(*layout, {2, 2}, {1, 0}, {7, 5});
  mine.shape;
  mine.offset;
  layout->to_string();
}

void reduce_op() {
  to_string(ReduceOp::kAvg);
  parse_reduce_op("avg");
}

void redistribute_bound() {
  least_bytes(*Layout::parse("[S(0)]"), *Layout::parse("[R]"), {4}, {8, 4}, 4);
}

void redistribute_plan(const Layout& from, const Layout& to, ExchangePart part,
                       const RedistributeStep& step, const std::vector<int>& mesh_dims,
                       void (*run)(const RedistributeStep&)) {
  auto plan = plan_redistribute(from, to, {2, 4}, {128, 64}, /*element_size=*/4, CostModel());
  plan->to_string();
  for (const RedistributeStep& step : plan->steps) run(step);
  part = exchange_part(step.before, step.after, mesh_dims, {2, 4}, {1, 3}, {128, 64});
}

void simulated_mesh(const Layout& from, const Layout& to, const RedistributePlan& plan) {
  SimulatedMesh mesh({2, 2}, {7, 5});
  mesh.distribute(from, /*seed=*/1);
  for (const RedistributeStep& step : plan.steps) mesh.run(step);
  mesh.first_difference(to);
}

// --- comm ----------------------------------------------------------------------------------------

namespace pigeons {

// What the example leaves out.
class Backend : public shardweave::Backend {
 public:
  Backend() : shardweave::Backend(GroupInfo()) {}
  void abort(const absl::Status& reason) override;
};

class Pigeons : public Backend {
  std::string_view name() const override { return "pigeons"; }
  bool implements(OpKind op) const override { return is_point_to_point(op); }
  absl::StatusOr<Ticket> start(const Call& call) override;
};
auto comm = Communicator::create(std::make_unique<Pigeons>());

}  // namespace pigeons

void compose(Backend& backend, const Call& call) {
  if (!backend.implements(call.op) && can_compose(backend, call)) {
    absl::Status status = run_composed(backend, call);
  }
}

absl::Status patience(const Wait& wait, Deadline deadline, absl::Span<const int> absent,
                      bool (*done)(), bool (*sleep_until)(Deadline),
                      absl::Status (*deadline_exceeded)()) {
  Patience patience(absl::Seconds(10));
  while (!done()) {
    if (sleep_until(patience.until(deadline))) continue;
    if (!patience.has_ended(deadline)) return deadline_exceeded();
    say_late(wait, absl::Seconds(10), absent);
  }
  return absl::OkStatus();
}

absl::Status work_on_a_device(Communicator& comm, const Buffer& x, DeviceStream stream,
                              void (*use_on)(DeviceStream, Buffer)) {
  Work work = comm.all_reduce(x, x, ReduceOp::kSum, {.stream = stream});
  if (absl::Status s = work.wait_on(stream); !s.ok()) return s;
  use_on(stream, x);
  return absl::OkStatus();
}

void buffer() {
  float values[3] = {1, 2, 3};
  Buffer b = Buffer::of(values, 3);
  b.bytes();
  ConstBuffer read_only = b;
}

absl::Status communicator(Communicator& comm) {
  float x = comm.rank();
  Work work = comm.all_reduce(Buffer::of(&x, 1), Buffer::of(&x, 1), ReduceOp::kSum);
  if (absl::Status s = work.wait(); !s.ok()) return s;
  comm.send(Buffer::of(&x, 1), /*peer=*/1).wait();
  return absl::OkStatus();
}

void coalescing(Communicator& comm, const std::vector<Buffer>& buckets) {
  Coalescing group(comm);
  for (const Buffer& b : buckets) comm.all_reduce(b, b, ReduceOp::kSum);
  Work work = group.finish();
}

absl::Status work(Communicator& comm, ConstBuffer mine, Buffer all, void (*use)(Buffer)) {
  Work work = comm.all_gather(mine, all);
  if (absl::Status s = work.wait(); !s.ok()) return s;
  use(all);
  return absl::OkStatus();
}

void world() {
  absl::Status s =
      run_ranks(4, [](World& world) -> absl::Status { return world.comm()->barrier().wait(); });
  auto world = World::from_environment({.backend = "gloo"});
}

void from_environment(Buffer x) {
  auto world = World::from_environment({.timeout = absl::Minutes(1)});
  if (absl::IsNotFound(world.status())) return;
  (*world)->comm()->all_reduce(x, x, ReduceOp::kSum).wait();
}

void flight_recorder(const std::shared_ptr<Communicator>& comm, void (*train_step)()) {
  CommCounters before = comm->flight_recorder().counters();
  train_step();
  (comm->flight_recorder().counters() - before).total().bytes;
  std::cerr << comm->flight_recorder().to_json();
}

void reduction(void* rank0, void* rank1, void* rank2, int64_t count) {
  const void* inputs[] = {rank0, rank1, rank2};
  void* outputs[] = {rank0, rank2};
  reduce_ranks(DType::kBF16, ReduceOp::kAvg, inputs, outputs, count);
}

void counting(void (*train_step)(Communicator&)) {
  auto log = std::make_shared<CountingLog>();
  auto comm = count_communication(/*rank=*/7, /*num_ranks=*/65536, log);
  train_step(**comm);
  log->totals()[{"dp", OpKind::kAllReduce}].bytes;
}

void inproc() {
  InprocHub hub(4);
  std::shared_ptr<Communicator> comm = hub.connect(2);
  comm->barrier().wait();
}

absl::Status gloo_backend(const std::shared_ptr<Store>& store, int rank) {
  auto backend =
      make_gloo_backend(store, {.name = "world", .rank = rank, .world_ranks = {0, 1, 2, 3}});
  if (!backend.ok()) return backend.status();
  auto comm = Communicator::create(*std::move(backend));
  return absl::OkStatus();
}

// --- mesh ----------------------------------------------------------------------------------------

void device_mesh() {
  auto mesh = DeviceMesh::create({{"dp", 2}, {"tp", 4}});
  mesh->coordinate(Rank(5));
  auto tp = mesh->slice({"tp"}, Rank(5));
  auto all = mesh->flatten();
}

void connected_mesh(World& world, Buffer x) {
  auto mesh = init_device_mesh(world, {{"dp", 2}, {"tp", 2}});
  auto tp = (*mesh)->communicator(1);
  (*tp)->all_reduce(x, x, ReduceOp::kSum).wait();
  auto dp_only = (*mesh)->slice({"dp"});
}

// --- dtensor -------------------------------------------------------------------------------------

void dtensor(World& world) {
  auto mesh = *init_device_mesh(world, {{"dp", 2}, {"tp", 2}});
  at::Tensor w = distribute_tensor(at::randn({6, 4}), mesh, {{"tp", Shard(0)}});
  at::Tensor x = distribute_tensor(at::randn({8, 4}), mesh, {{"dp", Shard(0)}});
  at::Tensor y = at::matmul(x, w.t());
  at::Tensor all = full_tensor(y);
}

void print(World& world, const at::Tensor& x) {
  const std::string text = values_to_string(x);
  if (world.rank() == 0) std::cout << text << "\n";
}

absl::Status status_exception(const at::Tensor& tensor) {
  try {
    redistribute(tensor, {Shard(0)});
  } catch (const StatusException& e) {
    return e.status();
  }
  return absl::OkStatus();
}

void error() {
  throw Error("redistribute", absl::InvalidArgumentError("the tensor is undefined"));
}

void random(const MeshPtr& mesh) {
  manual_seed(mesh, 42);
  at::Tensor a = randn({7, 5}, mesh, {Shard(0)});
  manual_seed(mesh, 42);
  at::Tensor b = randn({7, 5}, mesh, {Replicate()});
  at::Tensor c = at::dropout(b, 0.1, true);
}

void draw_again(const MeshPtr& mesh, at::Tensor (*block)(const at::Tensor&), const at::Tensor& x) {
  const PhiloxState before = random_state(mesh);
  at::Tensor y = block(x);
  const RandomStateScope again(mesh, before);
  y = block(x);
}

void prefetch(const at::Tensor& weight, at::Tensor (*layer)(const at::Tensor&), const at::Tensor& x,
              at::Tensor y) {
  PendingTensor next = redistribute_async(weight, {Replicate()});
  y = layer(x);
  at::Tensor whole = next.wait();
}

void prefetch_all(const std::vector<at::Tensor>& weights, const std::vector<Layout>& layouts) {
  std::vector<at::Tensor> all = redistribute_all(weights, layouts);
}

void set_costs(const MeshPtr& mesh, const std::string& text) {
  CostModel model = cost_model(mesh);
  model.links = {{.latency = 3e-5, .bandwidth = 2e10}, {.latency = 5e-6, .bandwidth = 3e11}};
  model.device = {.flops = 4e14, .bandwidth = 3e12};
  set_cost_model(mesh, model);
  set_cost_model(mesh, cost_model_from_json(text, mesh->mesh()));
}

void activation_checkpoint(const Model& block, const at::Tensor& x) {
  at::Tensor y = checkpoint([&](const at::Tensor& x) { return block->forward(x); }, x);
}

void clip(const Model& model, at::Tensor loss, torch::optim::Optimizer& optimizer) {
  loss.backward();
  finish_grad_sync(*model);
  const double norm = clip_grad_norm(model->parameters(), 1.0);
  optimizer.step();
}

void grad_sync(const Model& model, const at::Tensor& first_half, const at::Tensor& second_half,
               torch::optim::Optimizer& optimizer) {
  GradSync sync(*model, {.bucket_bytes = 25 << 20});
  for (int step = 0; step < 2; ++step) {
    {
      const GradSync::NoSync accumulate(sync);
      model->forward(first_half).backward();
    }
    model->forward(second_half).backward();
    finish_grad_sync(*model);
    optimizer.step();
    optimizer.zero_grad();
  }
}

void gradient_hook(const Model& model) {
  struct InHalf final : GradientHook {
    std::string name() const override { return "in half"; }
    void begin(GradientBucket& bucket) override {
      bucket.sent = bucket.flat.to(at::kHalf);
      bucket.all_reduce(bucket.sent);
    }
    void finish(GradientBucket& bucket) override { bucket.flat.copy_(bucket.sent); }
  };
  GradSync sync(*model, {.hook = std::make_shared<InHalf>()});
}

at::Tensor make_angles(int64_t dim);
struct RopeImpl : torch::nn::Module, NonPersistentBuffers {
  explicit RopeImpl(int64_t dim) { angles = register_buffer("angles", make_angles(dim)); }
  std::vector<std::string> non_persistent_buffers() const override { return {"angles"}; }
  at::Tensor angles;
};

void data_parallel(const Model& model, World& world, const at::Tensor& batch) {
  auto mesh = *init_device_mesh(world, {{"dp", 4}});
  GradSync ddp = distributed_data_parallel(*model, mesh);
  torch::optim::AdamW optimizer(unique_parameters(*model));
  auto x = distribute_tensor(batch, mesh, {{"dp", Shard(0)}});
  model->forward(x).square().mean().backward();
  finish_grad_sync(*model);
  optimizer.step();
  optimizer.zero_grad();
}

void power_sgd(const Model& model, const MeshPtr& mesh, GradScaler& scaler,
               const std::function<void(const std::map<std::string, at::Tensor>&)>& save) {
  auto power_sgd = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 2, .start_iteration = 100});
  GradSync ddp = distributed_data_parallel(*model, mesh, {.sync = {.hook = power_sgd}});
  power_sgd->rescale(scaler.update());
  save(power_sgd->state());
}

template <typename LossModel, typename Loader>
void join_batches(const LossModel& model, Loader& loader, const MeshPtr& mesh,
                  torch::optim::Optimizer& optimizer) {
  Join join(mesh, {.mesh_dims = {"dp"}});
  while (auto batch = join.next(loader.next())) {
    const at::Tensor loss = model->loss((*batch)[0], (*batch)[1]);
    loss.backward();
    finish_grad_sync(*model);
    optimizer.step();
    optimizer.zero_grad();
  }
}

void patterns() {
  const FqnPattern pattern = *FqnPattern::parse("*.{q,k}.weight");
  pattern.matches("blocks.0.attn.k.weight");
}

void plan(const Model& model, const MeshPtr& mesh) {
  const ParameterPlan plan = {
      {"*", {{"dp", Shard(0)}}},
      {"*.{q,k,v,up}.weight", {{"tp", Shard(0)}}},
      {"lm_head.weight", {Replicate(), Shard(0)}},
  };
  std::cout << to_string(resolve_plan(*model, mesh->mesh(), plan));
}

void distribute(const Model& model, const MeshPtr& mesh, at::Tensor loss,
                torch::optim::Optimizer& optimizer) {
  distribute_module(*model, mesh,
                    {
                        {"*.{q,k,v,up}.weight", {{"tp", Shard(0)}}},
                        {"*.{o,down}.weight", {{"tp", Shard(1)}}},
                        {"*.qkv.weight", {{"tp", StridedShard(0, 3)}}},
                    });
  loss.backward();
  finish_grad_sync(*model);
  optimizer.step();
}

void spec(const OpCall& call) {
  const SpecRef& spec = call.input("self").spec;
  spec->local_sizes;
}

// --- rules ---------------------------------------------------------------------------------------

void take(const OpCall& call, Strategies& out) {
  for (int d = 0; d < call.input("index").ndim(); ++d) out.add({{"index", Shard(d)}}, {Shard(d)});
  out.add_linear({{"self"}});
}

void rules(RuleTable& table, void (*take_shape)(OpCall&),
           void (*equal)(const c10::OperatorHandle&, c10::Stack&), Condition is_no_mask,
           void (*nonzero)(const c10::OperatorHandle&, c10::Stack&)) {
  table.add("aten::mm", einsum("mk,kn->mn"));
  table.add("aten::take", sharded(take).shapes(take_shape));
  table.add("aten::equal", composed(equal));
  table.add("aten::nonzero", gathered().when(is_no_mask, composed(nonzero)));
}

void own_rule(const MeshPtr& mesh) {
  add_rule(mesh, "mylib::swiglu", pointwise());
}

// --- what shows what happens ---------------------------------------------------------------------

void comm_trace(const MeshPtr& mesh, const Model& model, const at::Tensor& x) {
  CommTrace trace(mesh);
  model->forward(x).sum().backward();
  std::cout << trace.to_string();
  trace.events().size();
}

struct AttentionImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x);
  std::string name_;
};

at::Tensor AttentionImpl::forward(const at::Tensor& x) {
  const ModuleScope scope(x, name_);
  return x;
}

void explain_it(const MeshPtr& mesh, const at::Tensor& x, const at::Tensor& w,
                const at::Tensor& b) {
  std::cout << explain("aten::mm", {x, w}).to_string();
  for (const Explanation& e : explain(mesh, [&] { at::linear(x, w, b); })) {
    std::cout << e.to_string();
  }
}

void profile(const MeshPtr& mesh, void (*train_step)()) {
  ProfileScope profile(mesh);
  for (int step = 0; step < 3; ++step) train_step();
  profile.write_merged("trace.json");
}

void visualize(const DeviceMesh& mesh) {
  const Layout layout({Shard(0), Replicate()});
  absl::Status printed = visualize_sharding(layout, mesh, {7, 5});
}

void compat(const Model& model, const MeshPtr& mesh) {
  at::Tensor table = sharded_tensor::rand(ChunkSpec{0, {0, 1, 2, 3}}, {1000, 64}, mesh);
  shard_parameter(*model, "fc.weight", ChunkSpec{0}, mesh);
  shard_parameter(*model, "words.weight",
                  EnumerableSpec{{{{0, 0}, {600, 64}, 0}, {{600, 0}, {400, 64}, 1}}}, mesh);
}

// --- modules -------------------------------------------------------------------------------------

void fused_optimizer(const Model& model, at::Tensor loss, const at::Tensor& state) {
  FusedOptimizer optimizer(model->parameters(), AdamWOptions{.lr = 3e-4});
  loss.backward();
  finish_grad_sync(*model);
  optimizer.step();
  optimizer.zero_grad();
  for (size_t i = 0; i < optimizer.parameters().size(); ++i) {
    for (std::string_view name : optimizer.state_names(i)) optimizer.set_state(i, name, state);
  }
}

void muon_and_adamw(const std::vector<at::Tensor>& hidden) {
  FusedOptimizer optimizer(muon_groups(hidden, MuonOptions{.lr = 0.02}, AdamWOptions{}));
  optimizer.set_lr(0, 0.01);
}

void optimizer_groups(const std::vector<at::Tensor>& matrices,
                      const std::vector<at::Tensor>& others) {
  std::vector<ParameterGroup> groups = {
      {.parameters = matrices, .options = MuonOptions{.lr = 0.02}},
      {.parameters = others, .options = AdamWOptions{.lr = 3e-4}},
  };
  FusedOptimizer optimizer(groups);
}

void schedules(FusedOptimizer& optimizer, const std::function<void()>& train) {
  const Schedule schedule = Schedule::cosine(1000).warmup(100).floor(0.1);
  Scheduler scheduler(optimizer, schedule);
  for (int64_t step = 0; step < 1000; ++step) {
    train();
    scheduler.step();
  }
}

void grad_scaler(const Model& model, const at::Tensor& loss, FusedOptimizer& optimizer) {
  GradScaler scaler;
  scaler.scale(loss).backward();
  finish_grad_sync(*model);
  if (scaler.unscale(model->parameters())) {
    clip_grad_norm(model->parameters(), 1.0);
    optimizer.step();
  }
  scaler.update();
  optimizer.zero_grad();
}

void under_autocast(const Model& model, const at::Tensor& x) {
  at::Tensor loss;
  {
    const AutocastScope autocast(at::kBFloat16);
    loss = model->forward(x).sum();
  }
  loss.backward();  // outside: each operator has the types of its forward
}

void fully_sharded(const Model& model, const MeshPtr& mesh, const at::Tensor& batch) {
  fully_shard(*model, mesh, {.units = {"blocks.*"}});
  torch::optim::AdamW optimizer(unique_parameters(*model));
  auto x = distribute_tensor(batch, mesh, {{"dp", Shard(0)}});
  model->forward(x).sum().backward();
  finish_grad_sync(*model);
  clip_grad_norm(model->parameters(), 1.0);
  optimizer.step();
}

void gradients_that_wait(const Model& model, const MeshPtr& mesh,
                         const std::function<at::Tensor(int)>& part) {
  {
    const FullyShardNoSync accumulate(mesh);
    for (int i = 0; i < 3; ++i) model->forward(part(i)).sum().backward();
  }
  model->forward(part(3)).sum().backward();
}

void master_weights(const Model& model, const MeshPtr& mesh) {
  fully_shard(*model, mesh,
              {.units = {"blocks.*"}, .param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
  FusedOptimizer optimizer(model->parameters(), AdamWOptions{.lr = 3e-4});  // of float32
}

void divided_optimizer(const Model& model, const MeshPtr& mesh, const ParameterPlan& plan,
                       const at::Tensor& batch) {
  distribute_module(*model, mesh, plan);
  ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
      unique_parameters(*model), torch::optim::AdamWOptions(3e-4), {.mesh_dim = "dp", .stage = 2});
  model->forward(batch).sum().backward();
  finish_grad_sync(*model);
  clip_grad_norm(model->parameters(), 1.0);
  optimizer.step();
  optimizer.zero_grad();
}

using MyOptimizer = torch::optim::AdamW;

void divided_parameters(const Model& model, const at::Tensor& batch) {
  ZeroPartition partition(model->parameters(), {.mesh_dim = "dp"});
  MyOptimizer optimizer(partition.shards());
  model->forward(batch).sum().backward();
  partition.hand_out_gradients();
  optimizer.step();
  partition.share_parameters();
}

struct GptOptions {};
struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptOptions& /*options*/) {}
};
TORCH_MODULE(Gpt);

void deferred(const GptOptions& options, const MeshPtr& mesh, const ShardingPlan& plan) {
  auto model = deferred_init([&] { return Gpt(options); });
  parallelize_module(*model, mesh, plan);
  materialize(*model);
}

void sharding_plan_json(const Model& model, const MeshPtr& mesh) {
  auto plan = parse_sharding_plan(R"json({
      "parameter": {
          "*.{q,k,v,up}.weight":   {"tp": "S(0)"},
          "*.{o,down}.weight":     {"tp": "S(1)"},
          "lm_head.weight":        "[R, S(0)]",
          "re:h\\.[0-9]+\\.bias":  ["R", "R"]},
      "forward": {
          "*.norm.input":          {"tp": "S(1)"}}})json");
  parallelize_module(*model, mesh, *plan);
  to_json(*plan);
}

void hugging_face(const Model& model, const MeshPtr& mesh) {
  auto plan = hugging_face_plan(*model, R"json({
      "layers.*.self_attn.q_proj": "colwise",
      "layers.*.self_attn.o_proj": "rowwise",
      "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
      "lm_head": "colwise_gather_output"})json");
  parallelize_module(*model, mesh, *plan);
}

namespace layers {
void rms_norm(const at::Tensor& x) {
  nn::RMSNorm norm(/*size=*/4096, /*eps=*/1e-5);
  const at::Tensor y = norm(x);
}

void rotary(const at::Tensor& x, const at::Tensor& queries) {
  const nn::RopeOptions options = {.rope_type = "llama3",
                                   .rope_theta = 500000,
                                   .factor = 8,
                                   .original_max_position_embeddings = 8192};
  nn::RotaryEmbedding rotary(/*head_dim=*/128, /*max_position_embeddings=*/131072, options);
  const auto [cos, sin] = rotary->forward(/*length=*/x.size(1), x.scalar_type());
  const at::Tensor q = nn::rotate(queries, cos, sin);
}

void attention(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  nn::GroupedQueryAttention attention(nn::AttentionOptions{
      .hidden_size = 4096, .num_attention_heads = 32, .num_key_value_heads = 8});
  const at::Tensor y = attention(x, cos, sin);
}

void gpt2_linear(const at::Tensor& x) {
  nn::Conv1d layer(768, 3072);
  layer(x);
}

void mlp(const at::Tensor& x) {
  nn::GatedMlp mlp(nn::GatedMlpOptions{.hidden_size = 4096, .intermediate_size = 11008});
  const at::Tensor y = mlp(x);
}

void experts(const at::Tensor& x) {
  nn::MixtureOfExperts experts(nn::MixtureOfExpertsOptions{
      .hidden_size = 4096, .intermediate_size = 14336, .num_experts = 8, .num_experts_per_tok = 2});
  const at::Tensor y = experts(x);
}
}  // namespace layers

namespace models {
void causal_lm(const at::Tensor& input_ids) {
  nn::Llama model(
      nn::LlamaOptions{.vocab_size = 32000, .hidden_size = 512, .num_hidden_layers = 2});
  const at::Tensor logits = model(input_ids);
  nn::next_token_loss(logits, /*labels=*/input_ids).backward();
}

void llama(const MeshPtr& mesh, const at::Tensor& input_ids) {
  const nn::LlamaOptions options = {.vocab_size = 32000,
                                    .hidden_size = 512,
                                    .intermediate_size = 1376,
                                    .num_hidden_layers = 8,
                                    .num_attention_heads = 8,
                                    .num_key_value_heads = 2};
  nn::Llama model(options);
  parallelize_module(*model, mesh, nn::llama_plan(options, mesh->mesh()));
  nn::next_token_loss(model(input_ids), input_ids).backward();
}

void zoo(const MeshPtr& mesh, const nn::LlamaOptions& options, nn::Llama& model) {
  const auto plan = nn::llama_plan(options, mesh->mesh(), {.sequence_parallel = true});
  parallelize_module(*model, mesh, plan);
}

void mixtral(const MeshPtr& mesh, const at::Tensor& input_ids) {
  const nn::MixtralOptions options = {.vocab_size = 32000,
                                      .hidden_size = 512,
                                      .intermediate_size = 1792,
                                      .num_hidden_layers = 8,
                                      .num_attention_heads = 8,
                                      .num_key_value_heads = 2,
                                      .num_local_experts = 4};
  nn::Mixtral model(options);
  parallelize_module(*model, mesh, nn::mixtral_plan(options, mesh->mesh()));
  nn::next_token_loss(model(input_ids), input_ids).backward();
}

void gpt2(const MeshPtr& mesh, const at::Tensor& input_ids) {
  const nn::Gpt2Options options = {
      .vocab_size = 50257, .n_positions = 1024, .n_embd = 768, .n_layer = 12, .n_head = 12};
  nn::Gpt2 model(options);
  parallelize_module(*model, mesh, nn::gpt2_plan(options, mesh->mesh()));
  nn::next_token_loss(model(input_ids), input_ids).backward();
}

void vit(const MeshPtr& mesh, const at::Tensor& images, const at::Tensor& labels) {
  const nn::VitOptions options = {.hidden_size = 64,
                                  .num_hidden_layers = 4,
                                  .num_attention_heads = 4,
                                  .intermediate_size = 256,
                                  .image_size = 8,
                                  .patch_size = 2,
                                  .num_channels = 1,
                                  .num_labels = 10};
  nn::Vit model(options);
  parallelize_module(*model, mesh, nn::vit_plan(options, mesh->mesh()));
  at::cross_entropy_loss(model(images), labels).backward();
}

void routed(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& gate_up_proj,
            const at::Tensor& down_proj) {
  using nn::Activation;
  const at::Tensor y = nn::routed_experts(x, weights, gate_up_proj, down_proj, Activation::kSilu);
}

void registry(std::string_view config_json, const MeshPtr& mesh, const at::Tensor& input_ids) {
  const nn::Model model = *nn::make_model("", config_json);
  parallelize_module(*model.module, mesh, model.plan(mesh->mesh(), {}));
  const at::Tensor logits = model.forward({input_ids})[0];
}

void layer_registry(const at::Tensor& x, const MeshPtr& mesh, const ShardingPlan& plan) {
  nn::Layer layer = *nn::make_layer("Linear", R"json({"in_features": 4, "out_features": 8})json");
  c10::Stack stack = {x};
  layer.forward(stack);                           // {y}
  parallelize_module(*layer.module, mesh, plan);  // a module as any other
}
}  // namespace models

void styles(const Model& model, const Model& mlp, const MeshPtr& mesh) {
  parallelize_module(*model, mesh,
                     {{"embedding", RowwiseParallel{.output = Shard(1)}},
                      {"blocks.*", SequenceParallel{.sequence_dim = 1, .heads = 8}},
                      {"head", ColwiseParallel()}},
                     "tp");
  parallelize_module(*mlp, mesh, PairwiseParallel());
}

void styles_json(const Model& model, const MeshPtr& mesh) {
  auto styles = parallel_styles_from_json(R"json({
      "layers.*.mlp":  "pairwise",
      "layers.*.attn": {"style": "sequence", "sequence_dim": 1, "heads": 8},
      "embedding":     {"style": "rowwise", "output": "S(1)"},
      "layers.*":      {"style": "prepare_input", "input": ["S(1)", null], "mask": "R"},
      "out":           {"style": "colwise", "output": "R"}})json");
  parallelize_module(*model, mesh, *styles);
}

void prepare_tensors(const Model& model, const at::Tensor& rows_of_this_rank, const MeshPtr& mesh) {
  at::Tensor x = make_input_shard_1d(rows_of_this_rank, mesh);
  at::Tensor y = model->forward(make_input_replicate_1d(x));
  at::Tensor all = make_output_tensor(y);
}

void sharding_plan(const Model& model, const MeshPtr& mesh) {
  const ShardingPlan plan = {
      .parameter = {{"*.{q,k,v,up}.weight", {{"tp", Shard(0)}}},
                    {"*.{o,down}.weight", {{"tp", Shard(1)}}}},
      .forward = {{"*.norm.input", {{"tp", Shard(1)}}},
                  {"*.{q,k,v,up}.input", {{"tp", Replicate()}}},
                  {"*.{o,down}.output", {{"tp", Shard(1)}}}},
  };
  parallelize_module(*model, mesh, plan);
}

namespace hooked {
struct BlockImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask);
};
using Block = torch::nn::ModuleHolder<Hooked<BlockImpl>>;

void parallelize(const Model& model, const MeshPtr& mesh) {
  parallelize_module(*model, mesh, {.forward = {{"blocks.*.output", {{"tp", Shard(1)}}}}});
}
}  // namespace hooked

namespace plug_ins {
struct MlpImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x);
  at::Tensor up, down;
};
struct FusedMlpImpl : torch::nn::Module {
  FusedMlpImpl(const at::Tensor& up, const at::Tensor& down);
  at::Tensor forward(const at::Tensor& x);
};
using FusedMlp = torch::nn::ModuleHolder<Hooked<FusedMlpImpl>>;
Rule linear_gelu_rule();

void parallelize(const Model& model, const MeshPtr& mesh) {
  const Plugins plugins =
      Plugins()
          .rule("mylib::linear_gelu", linear_gelu_rule())
          .shards<FusedMlpImpl>([](const FusedMlpImpl&, const ShardingRequest&) {
            return ModuleSharding{.parameter = {{"up", Shard(0)}, {"down", Shard(1)}},
                                  .forward = {{"output", Replicate()}}};
          })
          .patch<MlpImpl>(
              [](MlpImpl& mlp, const PatchRequest&) { return FusedMlp(mlp.up, mlp.down); });
  parallelize_module(*model, mesh, {.module = {{"blocks.*.mlp", {{"tp"}}}}}, plugins);
}
void by_names(nn::Llama& llama) {
  patch_forwards(*llama, "model.layers.*.mlp", [](const PatchedCall& call) {
    return std::vector{call.forward(call.inputs)[0] * 0.5};
  });
}
}  // namespace plug_ins

at::Tensor loss_of(torch::nn::SequentialImpl& model, const at::Tensor& batch);

void debug(const Model& model, const MeshPtr& mesh, const ShardingPlan& plan,
           torch::optim::Optimizer& optimizer, const at::Tensor& batch) {
  parallelize_module(*model, mesh, plan);
  std::cout << dump(*model).to_string();
  const CommunicationList list = list_communication(*model, [&] {
    loss_of(*model, batch).backward();
    finish_grad_sync(*model);
    optimizer.step();
  });
  std::cout << list.to_string();
  const ModuleMemory memory = module_memory(*model, [&] { return loss_of(*model, batch); });
  std::cout << memory.to_string();
}

void verifying(const std::function<Model()>& make_model, const MeshPtr& mesh,
               const ShardingPlan& plan, const at::Tensor& tokens) {
  const Verification v = verify(make_model, mesh, plan, {tokens});
  if (!v.ok()) std::cout << v.to_string();
}

void plan_costs(const nn::LlamaOptions& options, const at::Tensor& tokens,
                const MeshPtr& connected_mesh, const ShardingPlan& plan) {
  const DeviceMesh& mesh = connected_mesh->mesh();
  const auto make = [&] {
    nn::Llama model(options);
    return StepModel{model.ptr(), [=](const MeshPtr& on) mutable {
                       const at::Tensor ids = distribute_tensor(tokens, on, {{"dp", Shard(0)}},
                                                                {.source = std::nullopt});
                       return nn::next_token_loss(model(ids), ids);
                     }};
  };
  const PlanCost cost = plan_cost(make, mesh, plan, cost_model(connected_mesh));
  std::cout << cost.to_string();
}

void auto_plans(const MakeModel& make, const DeviceMesh& mesh, const MeshPtr& connected_mesh,
                const Model& model) {
  const AutoPlan found = auto_plan(make, mesh, cost_model(connected_mesh));
  std::cout << found.to_string();
  parallelize_module(*model, connected_mesh, found.plan);
}

absl::Status to_a_gpu(int local_rank) {
  if (absl::Status s = load_cuda(local_rank); !s.ok()) return s;  // first thing
  at::Tensor x = at::ones({4}, at::kCUDA);                        // on that GPU
  return absl::OkStatus();
}

absl::Status gpus_of_all_ranks(const Model& model) {
  auto world = World::from_environment({.backend = "nccl"});  // a process per GPU
  if (!world.ok()) return world.status();
  if (absl::Status s = load_cuda((*world)->local_rank()); !s.ok()) return s;  // LibTorch's CUDA
  auto mesh = init_device_mesh(**world, {{"dp", 8}});
  if (!mesh.ok()) return mesh.status();
  model->to(at::kCUDA);
  fully_shard(*model, *mesh);  // and on as on the CPU
  return absl::OkStatus();
}

void cpu_offload(const Model& model, const MeshPtr& mesh, const at::Tensor& batch) {
  fully_shard(*model, mesh, {.units = {"blocks.*"}, .compute_device = at::kCUDA});
  FusedOptimizer optimizer(model->parameters(), AdamWOptions{});  // steps on the CPU
  auto x = distribute_tensor(batch.to(at::kCUDA), mesh, {{"dp", Shard(0)}});
  model->forward(x).sum().backward();
  optimizer.step();
}

bool next_batch(const at::Tensor& words);

void captured_steps(const MeshPtr& mesh, const Model& model, FusedOptimizer& optimizer,
                    const std::function<at::Tensor(const at::Tensor&)>& loss_of,
                    const std::function<double(int)>& schedule, const at::Tensor& words) {
  int n = 0;
  at::Tensor loss;
  const auto train = [&] {
    optimizer.zero_grad();  // gradients are made anew in the step
    loss = loss_of(words);
    loss.backward();
    finish_grad_sync(*model);
    optimizer.step();
  };
  for (int i = 0; i < 3; ++i) train();  // as ever: what is made at first use is there
  CapturedStep captured = CapturedStep::capture(mesh, model->parameters(), train);
  while (next_batch(words)) {  // words.copy_(...): inputs are where they were
    captured.replay();
    optimizer.set_lr(schedule(++n));  // between replays, never in the step
    if (n % 100 == 0) std::cout << loss.item<float>() << "\n";  // as are results
  }
}

}  // namespace shardweave::header_examples
