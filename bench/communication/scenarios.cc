#include "scenarios.h"

#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace communication_bench {
namespace {

using shardweave::MeshDim;
using shardweave::NamedPlacements;
using shardweave::ParameterPlan;
using shardweave::Replicate;
using shardweave::ResolvedTensor;
using shardweave::Shard;
using shardweave::StridedShard;

constexpr int64_t kElementSize = 4;  // float

// A network that the theory assumes where it has to choose between a few large collectives and many
// small ones: rank threads. The library's own defaults are no part of a theory of what is best.
constexpr double kLatency = 5e-6;   // seconds
constexpr double kBandwidth = 5e9;  // bytes per second

// Gradients travel together as long as a bucket is no larger than PyTorch's DDP has them; those that
// are worth a message of their own are not copied into one.
constexpr int64_t kBucket = 25 << 20;
constexpr int64_t kAlone = 1 << 20;

// --- sizes ---------------------------------------------------------------------------------------

bool reads_images(const Scenario& s) {
  return s.model == ModelKind::kVit || s.model == ModelKind::kConvNet;
}

// Tokens of a batch: rows of every activation.
int64_t rows(const Scenario& s) {
  const int64_t side = s.sizes.image / s.sizes.patch;
  return s.sizes.batch * (s.model == ModelKind::kVit ? 1 + side * side : s.sizes.tokens);
}

// X: the activation between two layers, [batch, tokens, dim].
int64_t activation(const Scenario& s) {
  return rows(s) * s.sizes.dim;
}

// GPT's, which the MoE shares; ViT adds its own to the activations.
bool has_position_table(const Scenario& s) {
  return s.model == ModelKind::kGpt || s.model == ModelKind::kMoe;
}

// Positions, as indices or as rotary tables: the same on every rank, as one comparison finds out.
bool makes_constants(const Scenario& s) {
  return !reads_images(s);
}

// Features that the batch norms of the convolutional net normalise.
std::vector<int64_t> batch_norm_channels(const Sizes& sizes) {
  return {sizes.channels, 2 * sizes.channels, 4 * sizes.channels};
}

// A parameter: its elements, how many of them the ranks along one mesh dimension share, and whether
// that cuts them.
struct Parameter {
  std::string name;
  int64_t whole;
  int64_t elements;
  bool is_cut;
};

// What the mesh dimensions other than `dim` leave of every parameter.
std::vector<Parameter> parameters(const Scenario& s, std::string_view dim) {
  std::vector<Parameter> all;
  for (const ResolvedTensor& tensor : shardweave::resolve_plan(
           *make_model(s.model, s.sizes), *shardweave::DeviceMesh::create(s.mesh), s.plan)) {
    if (tensor.is_buffer) continue;
    int64_t whole = 1;
    for (const int64_t size : tensor.sizes) whole *= size;
    int64_t count = whole;
    bool is_cut = false;
    for (size_t i = 0; i < s.mesh.size(); ++i) {
      if (!tensor.layout[i].is_shard()) continue;
      if (s.mesh[i].name == dim) {
        is_cut = true;
      } else {
        count /= s.mesh[i].size;
      }
    }
    all.push_back({tensor.fqns[0], whole, count, is_cut});
  }
  return all;
}

// --- collectives ---------------------------------------------------------------------------------

using Collective = Traffic (*)(int64_t k, int64_t elements);

Traffic one_each(Collective collective, int64_t k, const std::vector<Parameter>& tensors) {
  Traffic all;
  for (const Parameter& p : tensors) all += collective(k, p.elements);
  return all;
}

Traffic in_buckets(Collective collective, int64_t k, const std::vector<Parameter>& tensors) {
  Traffic all;
  int64_t bucket = 0;  // bytes in it
  for (const Parameter& p : tensors) {
    const int64_t bytes = p.whole * kElementSize;
    const bool alone = bytes > kAlone;
    const bool joins = !alone && bucket > 0 && bucket + bytes <= kBucket;
    if (!alone) bucket = joins ? bucket + bytes : bytes;
    Traffic own = collective(k, p.elements);
    if (joins) own.kinds.clear();
    all += own;
  }
  return all;
}

// --- theory --------------------------------------------------------------------------------------

// Of a checksum of all constants that a step makes: its least and its greatest value over all ranks.
Traffic comparison(const Scenario& s) {
  int64_t ranks = 1;
  for (const MeshDim& dim : s.mesh) ranks *= dim.size;
  Traffic traffic = all_reduce(ranks, 2);
  traffic.bytes *= static_cast<int64_t>(sizeof(int64_t)) / kElementSize;
  return traffic;
}

// Linears in pairs, column-parallel and row-parallel (Megatron-LM), over k ranks; each has
// 1 / `parts` of the batch.
Phases tensor_parallel(const Scenario& s, int64_t k, int64_t parts) {
  const int64_t x = activation(s) / parts;
  Phases t;
  // The product of the row-parallel linear: after attention, after the feed-forward part.
  t.forward = 2 * s.sizes.layers * all_reduce(k, x);
  // The gradient of what goes into the column-parallel ones. Norm weights and biases see it whole.
  t.backward = 2 * s.sizes.layers * all_reduce(k, x);
  if (s.model == ModelKind::kMoe) {
    // Each rank knows the gradient of its own experts' weights: what norms them sums over a token's,
    // softmax needs all of them.
    t.backward += s.sizes.layers * (all_reduce(k, rows(s) / parts) +
                                    all_gather(k, rows(s) / parts * s.sizes.experts));
  }
  return t;
}

// A batch, or its sequences, cut over k ranks: the sum of the losses, and how many they are.
Traffic mean_loss(int64_t k) {
  return all_reduce(k, 2);
}

// The embedding table and the head's rows of the vocabulary over k ranks too.
void add_vocabulary(Scenario& s, int64_t k, int64_t parts) {
  const int64_t n = rows(s) / parts;
  // Each token's embedding is on one rank.
  s.theory.forward += all_reduce(k, activation(s) / parts);
  // Cross entropy: each row's maximum, and the sum of its exponentials.
  s.theory.forward += 2 * all_reduce(k, n);
  // Each row's target is on one rank; what is reduced is the loss.
  if (parts == 1) s.theory.forward += mean_loss(k);
  // The gradient of what goes into the head.
  s.theory.backward += all_reduce(k, activation(s) / parts);
  s.row_sums = all_reduce(k, n);
}

// Batch norm over a batch that is cut.
void add_batch_norms(Phases& t, const Sizes& sizes, int64_t k) {
  for (int64_t channels : batch_norm_channels(sizes)) {
    t.forward += all_reduce(k, 4 * channels);   // sums of x and of its squares, as doubles
    t.backward += all_reduce(k, 2 * channels);  // sums of the gradient, and of it times x
  }
}

// Without the batch norms', which come out of the sums above whole.
std::vector<Parameter> gradients_to_sync(const Scenario& s, std::string_view dim) {
  std::vector<Parameter> some = parameters(s, dim);
  if (s.model == ModelKind::kConvNet) {
    std::erase_if(some, [](const Parameter& p) { return p.name.starts_with("norm"); });
  }
  return some;
}

Phases data_parallel(const Scenario& s, int64_t k) {
  Phases t;
  t.forward = mean_loss(k);
  if (s.model == ModelKind::kConvNet) add_batch_norms(t, s.sizes, k);
  t.gradient_sync = in_buckets(all_reduce, k, gradients_to_sync(s, "dp"));
  return t;
}

Phases sharded_parameters(const Scenario& s, int64_t k) {
  Phases t;
  // Each where it is needed first; kept for backward.
  std::vector<Parameter> gathered = parameters(s, "dp");
  std::erase_if(gathered, [](const Parameter& p) {
    return !p.is_cut || p.name == "positions.weight" || p.name == "cls";
  });
  t.forward = one_each(all_gather, k, gathered) + mean_loss(k);
  // Positions are no data that is cut: each rank looks up what is among its rows.
  if (has_position_table(s)) t.forward += all_reduce(k, s.sizes.tokens * s.sizes.dim);
  // The class token meets the batch when it has been expanded to it.
  if (s.model == ModelKind::kVit) t.forward += all_to_all(k, s.sizes.batch * s.sizes.dim);
  if (s.model == ModelKind::kConvNet) add_batch_norms(t, s.sizes, k);
  std::vector<Parameter> cut, whole;
  for (Parameter& p : gradients_to_sync(s, "dp")) (p.is_cut ? cut : whole).push_back(std::move(p));
  t.gradient_sync = in_buckets(reduce_scatter, k, cut) + in_buckets(all_reduce, k, whole);
  return t;
}

// Convolutions and the head in pairs, as linears: between those of a pair each rank has its own
// channels, and batch norm is of a channel.
Phases channel_parallel(const Scenario& s, int64_t k) {
  const Sizes& z = s.sizes;
  const int64_t half = z.image / 2;
  Phases t;
  // What comes out of the second convolution, and of the head.
  t.forward =
      all_reduce(k, z.batch * 2 * z.channels * half * half) + all_reduce(k, z.batch * z.classes);
  // The gradient of what goes into the third. That of the image nobody asks for.
  t.backward = all_reduce(k, z.batch * 2 * z.channels * half / 2 * half / 2);
  return t;
}

double seconds(const Traffic& t) {
  return static_cast<double>(t.collectives()) * kLatency +
         static_cast<double>(t.bytes) / kBandwidth;
}

// Of the keys, or the values, where they are summed over the queries that share them.
int64_t key_gradient(const Scenario& s) {
  const bool grouped = s.model == ModelKind::kLlama;
  return grouped ? activation(s) / s.sizes.heads * s.sizes.kv_heads : activation(s);
}

// What attention needs when every rank has a part of the sequence, in a step. Models repeat keys and
// values that queries share before they come to it.
Phases sequence_attention(const Scenario& s, int64_t k) {
  const int64_t x = activation(s);
  // A query sees the keys and values of the whole sequence, gathered again in backward, for whoever
  // cuts a sequence wants the memory; each of them has a gradient from every part of the queries.
  Phases gathered;
  gathered.forward = s.sizes.layers * 2 * all_gather(k, x);
  gathered.backward = s.sizes.layers * 2 * (all_gather(k, x) + reduce_scatter(k, x));
  // Or every rank takes some heads of the whole sequence (DeepSpeed-Ulysses): query, key, value and
  // the result are exchanged, and so are their gradients.
  Phases exchanged;
  exchanged.forward = s.sizes.layers * 4 * all_to_all(k, x);
  exchanged.backward = s.sizes.layers * (2 * all_to_all(k, x) + 2 * all_to_all(k, key_gradient(s)));
  return seconds(exchanged.step()) < seconds(gathered.step()) ? exchanged : gathered;
}

Phases sequence_parallel(const Scenario& s, int64_t k) {
  Phases t = sequence_attention(s, k);
  t.forward += mean_loss(k);
  // Each rank has the gradients of its own heads' biases whole.
  std::vector<Parameter> of_heads, others;
  for (Parameter& p : parameters(s, "sp")) {
    const bool bias = shardweave::matches_fqn("*.{q,k,v}.bias", p.name);
    (bias ? of_heads : others).push_back(std::move(p));
  }
  t.gradient_sync = in_buckets(all_reduce, k, others) + in_buckets(all_gather, k, of_heads);
  return t;
}

// --- plans ---------------------------------------------------------------------------------------

ParameterPlan tensor_parallel_plan(const Scenario& s) {
  ParameterPlan plan;
  if (s.model == ModelKind::kVit) {
    // Query, key and value are the thirds of its rows: heads of each.
    plan.push_back({"*.qkv.*", {{"tp", StridedShard(0, 3)}}});
    plan.push_back({"*.up.*", {{"tp", Shard(0)}}});
  } else if (s.model == ModelKind::kMoe) {
    plan.push_back({"*.{q,k,v}.*", {{"tp", Shard(0)}}});
    plan.push_back({"*.feed_forward.{up,down}", {{"tp", Shard(0)}}});  // experts
    plan.push_back({"*.o.weight", {{"tp", Shard(1)}}});
    return plan;
  } else if (s.model == ModelKind::kLlama) {
    plan.push_back({"*.{q,k,v,gate,up}.weight", {{"tp", Shard(0)}}});
  } else {
    plan.push_back({"*.{q,k,v,up}.*", {{"tp", Shard(0)}}});
  }
  plan.push_back({"*.{o,down}.weight", {{"tp", Shard(1)}}});
  return plan;
}

void shard_vocabulary(Scenario& s) {
  s.plan.push_back({"tokens.weight", {{"tp", Shard(0)}}});
  if (!s.sizes.tied) s.plan.push_back({"head.weight", {{"tp", Shard(0)}}});
}

ParameterPlan sharded_plan(const Scenario& s) {
  ParameterPlan plan;
  if (s.model == ModelKind::kVit) plan.push_back({"{cls,positions}", {{"dp", Shard(2)}}});
  plan.push_back({"*{weight,bias,up,down}", {{"dp", Shard(0)}}});  // not batch norm's buffers
  return plan;
}

ParameterPlan channel_parallel_plan() {
  return {{"{conv1,conv3}.weight", {{"tp", Shard(0)}}},
          {"{norm1,norm3}.{weight,bias,running_mean,running_var}", {{"tp", Shard(0)}}},
          {"{conv2,head}.weight", {{"tp", Shard(1)}}}};
}

// "dp" cuts each rank's part along "tp" once more.
ParameterPlan sharded_tensor_parallel_plan(const Scenario& s) {
  ParameterPlan plan = sharded_plan(s);
  for (const shardweave::PlanEntry& entry : tensor_parallel_plan(s)) {
    const shardweave::Placement& tp = entry.placements.named()->at(0).second;
    plan.push_back({entry.pattern, *shardweave::Layout::create({Shard(0), tp}, {1, 0})});
  }
  return plan;
}

// --- scenarios -----------------------------------------------------------------------------------

Scenario named(const Scenario& model, const std::string& plan, std::vector<MeshDim> mesh) {
  Scenario s = model;
  absl::StrAppend(&s.name, ", ", plan);
  s.mesh = std::move(mesh);
  return s;
}

void add_tensor_parallel(const Scenario& model, bool vocabulary, int64_t k,
                         std::vector<Scenario>& all) {
  Scenario s = named(model, vocabulary ? "tp with vocabulary" : "tp", {{"tp", k}});
  s.plan = tensor_parallel_plan(s);
  s.theory = tensor_parallel(s, k, 1);
  if (vocabulary) {
    shard_vocabulary(s);
    add_vocabulary(s, k, 1);
  }
  all.push_back(std::move(s));
}

void add_channel_parallel(const Scenario& model, int64_t k, std::vector<Scenario>& all) {
  Scenario s = named(model, "tp", {{"tp", k}});
  s.plan = channel_parallel_plan();
  s.theory = channel_parallel(s, k);
  all.push_back(std::move(s));
}

void add_data_parallel(const Scenario& model, int64_t k, std::vector<Scenario>& all) {
  Scenario s = named(model, "dp", {{"dp", k}});
  s.input = s.target = {{"dp", Shard(0)}};
  s.theory = data_parallel(s, k);
  all.push_back(std::move(s));
}

void add_sharded_parameters(const Scenario& model, int64_t k, std::vector<Scenario>& all) {
  Scenario s = named(model, "dp, every parameter sharded", {{"dp", k}});
  s.plan = sharded_plan(s);
  s.input = s.target = {{"dp", Shard(0)}};
  s.theory = sharded_parameters(s, k);
  all.push_back(std::move(s));
}

void add_sequence_parallel(const Scenario& model, int64_t k, std::vector<Scenario>& all) {
  Scenario s = named(model, "sequence", {{"sp", k}});
  // One long sequence: with several, it would be cheaper to give each rank whole ones.
  s.sizes.tokens *= std::exchange(s.sizes.batch, 1);
  s.input = s.target = {{"sp", Shard(1)}};
  s.theory = sequence_parallel(s, k);
  all.push_back(std::move(s));
}

void add_tensor_and_data_parallel(const Scenario& model, bool vocabulary,
                                  std::vector<Scenario>& all) {
  Scenario s =
      named(model, vocabulary ? "tp with vocabulary, dp" : "tp, dp", {{"dp", 2}, {"tp", 2}});
  s.plan = tensor_parallel_plan(s);
  s.input = s.target = {{"dp", Shard(0)}};
  s.theory = tensor_parallel(s, 2, 2);
  if (vocabulary) {
    shard_vocabulary(s);
    add_vocabulary(s, 2, 2);
    // The sum of the losses over all ranks at once.
    s.theory.forward += mean_loss(4);
  } else {
    s.theory.forward += mean_loss(2);
  }
  s.theory.gradient_sync = in_buckets(all_reduce, 2, parameters(s, "dp"));
  all.push_back(std::move(s));
}

void add_tensor_parallel_and_sharded_parameters(const Scenario& model, std::vector<Scenario>& all) {
  Scenario s = named(model, "tp, dp, every parameter sharded", {{"dp", 2}, {"tp", 2}});
  s.plan = sharded_tensor_parallel_plan(s);
  s.input = s.target = {{"dp", Shard(0)}};
  s.theory = sharded_parameters(s, 2);
  const Phases tp = tensor_parallel(s, 2, 2);
  s.theory.forward += tp.forward;
  s.theory.backward += tp.backward;
  all.push_back(std::move(s));
}

}  // namespace

int64_t Traffic::collectives() const {
  int64_t sum = 0;
  for (const auto& [kind, count] : kinds) sum += count;
  return sum;
}

std::string Traffic::to_string() const {
  std::string text;
  for (const auto& [kind, count] : kinds) absl::StrAppend(&text, count, " ", kind, ", ");
  return absl::StrCat(text, bytes, " bytes");
}

Traffic& Traffic::operator+=(const Traffic& other) {
  for (const auto& [kind, count] : other.kinds) kinds[kind] += count;
  bytes += other.bytes;
  return *this;
}

Traffic operator*(int64_t times, const Traffic& t) {
  Traffic all;
  for (int64_t i = 0; i < times; ++i) all += t;
  return all;
}

Traffic all_reduce(int64_t k, int64_t elements) {
  return {{{"all_reduce", 1}}, 2 * (elements - elements / k) * kElementSize};
}

Traffic all_gather(int64_t k, int64_t elements) {
  return {{{"all_gather", 1}}, (elements - elements / k) * kElementSize};
}

Traffic reduce_scatter(int64_t k, int64_t elements) {
  return {{{"reduce_scatter", 1}}, (elements - elements / k) * kElementSize};
}

Traffic all_to_all(int64_t k, int64_t elements) {
  return {{{"all_to_all", 1}}, (elements / k - elements / k / k) * kElementSize};
}

std::string mesh_name(const Scenario& scenario) {
  return absl::StrCat(
      "(",
      absl::StrJoin(scenario.mesh, ", ",
                    [](std::string* out, const MeshDim& dim) { absl::StrAppend(out, dim.size); }),
      ")");
}

std::vector<Scenario> scenarios(const Sizes& sizes) {
  std::vector<Scenario> models;
  for (ModelKind kind : {ModelKind::kGpt, ModelKind::kLlama, ModelKind::kVit, ModelKind::kMoe,
                         ModelKind::kConvNet}) {
    models.push_back({.name = std::string(to_string(kind)), .model = kind, .sizes = sizes});
    if (kind != ModelKind::kLlama) continue;
    models.push_back(models.back());
    models.back().name = "llama, tied";
    models.back().sizes.tied = true;
  }
  std::vector<Scenario> all;
  for (const Scenario& model : models) {
    const bool convolutions = model.model == ModelKind::kConvNet;
    const bool text = !reads_images(model);
    for (int64_t k : {2, 4}) {
      if (convolutions) {
        add_channel_parallel(model, k, all);
      } else {
        add_tensor_parallel(model, false, k, all);
      }
      if (text) add_tensor_parallel(model, true, k, all);
      add_data_parallel(model, k, all);
      add_sharded_parameters(model, k, all);
      if (text) add_sequence_parallel(model, k, all);
    }
    if (convolutions) continue;
    add_tensor_and_data_parallel(model, false, all);
    if (text) add_tensor_and_data_parallel(model, true, all);
    add_tensor_parallel_and_sharded_parameters(model, all);
  }
  for (Scenario& s : all) {
    if (makes_constants(s)) s.theory.forward += comparison(s);
  }
  return all;
}

std::vector<Skipped> skipped() {
  return {
      {"vit, tp with vocabulary", "it has no vocabulary"},
      {"conv net, tp with vocabulary", "it has no vocabulary"},
      {"vit, sequence",
       "an image becomes a sequence in the model, and with its class token an odd one"},
      {"conv net, sequence", "it has no sequence"},
      {"conv net, tp, dp", "the sums of batch norm would be a formula for each of its layers"},
      {"conv net, tp, dp, every parameter sharded", "likewise"},
      {"tp, (2, 2)", "tensor parallelism over two mesh dimensions is a plan of its own"},
      {"dp, (2, 2)", "data parallelism over two mesh dimensions is that over (4)"},
  };
}

}  // namespace communication_bench
