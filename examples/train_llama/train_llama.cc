// Trains a byte-level Llama on a text, sharded over ranks that are threads or processes: a new one,
// or one that transformers has saved.
//
//   ./bazelw run //examples:train_llama -- --mesh=dp=2,tp=2 --sequence_parallel --check
//   ./bazelw run //examples:train_llama -- --plan=hf --mesh=tp=4 --backend=gloo --data=book.txt
//   ./bazelw run //examples:train_llama -- --model=llama/ --save=run --save_every=50
//   ./bazelw run //examples:train_llama -- --model=llama/ --resume=run --mesh=tp=2
//
// The model is constructed without memory, sharded by one call, and only then made: each rank draws
// its parts. The examples in Rust and Go (bindings/.../examples/train_llama) take the same batches
// and steps, so that each of the three goes on with what another one has saved.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/empty.h"
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/clip_grad_norm.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/examples/common/training.h"
#include "shardweave/examples/train_gpt/text.h"
#include "shardweave/mesh/connected_mesh.h"
#include "shardweave/modules/checkpoint/checkpointer.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/hugging_face/pretrained.h"
#include "shardweave/modules/nn/llama.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/optim/schedule.h"
#include "shardweave/modules/parallelize_module.h"

ABSL_FLAG(
    std::string, model, "",
    "a directory of transformers, with config.json and safetensors files, whose Llama goes on "
    "training; default: a new one, of the sizes below");
ABSL_FLAG(std::string, data, "/usr/share/common-licenses/GPL-3", "the text to train on");
ABSL_FLAG(int64_t, layers, 2, "decoder layers");
ABSL_FLAG(int64_t, dim, 96, "features of a token");
ABSL_FLAG(int64_t, heads, 8, "attention heads; they divide --dim, and --mesh's tp divides them");
ABSL_FLAG(int64_t, kv_heads, 4, "heads of keys and values; they divide --heads");
ABSL_FLAG(int64_t, seq, 64, "bytes per sequence");
ABSL_FLAG(
    std::string, save, "",
    "a directory, of all ranks, that gets a checkpoint after the last step; any --mesh goes on "
    "from it, in C++, Rust and Go");
ABSL_FLAG(int64_t, save_every, 0,
          "with --save: also after so many steps, each time, beside training; 0: at the end only");
ABSL_FLAG(std::string, resume, "",
          "goes on from the newest checkpoint of this directory; --steps are those of both runs");

namespace {

using examples::Settings;
using examples::StepDone;
using examples::Training;
using shardweave::MeshPtr;
using shardweave::nn::LlamaOptions;
using train_gpt::Text;

// What transformers' LlamaConfig says.
constexpr char kHuggingFacePlan[] = R"json({
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise"})json";

LlamaOptions options_from_flags() {
  return {.vocab_size = 256,  // bytes
          .hidden_size = absl::GetFlag(FLAGS_dim),
          .intermediate_size = 8 * absl::GetFlag(FLAGS_dim) / 3,
          .num_hidden_layers = absl::GetFlag(FLAGS_layers),
          .num_attention_heads = absl::GetFlag(FLAGS_heads),
          .num_key_value_heads = absl::GetFlag(FLAGS_kv_heads),
          .max_position_embeddings = absl::GetFlag(FLAGS_seq),
          .initializer_range = 0.05};
}

absl::StatusOr<LlamaOptions> make_options() {
  if (const std::string model = absl::GetFlag(FLAGS_model); !model.empty()) {
    const absl::StatusOr<std::string> config = shardweave::read_pretrained_config(model);
    if (!config.ok()) return config.status();
    return LlamaOptions::from_json(*config);
  }
  if (absl::Status status = check(options_from_flags()); !status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--layers, --dim, --heads, --kv_heads: ", std::string(status.message())));
  }
  return options_from_flags();
}

struct Batch {
  at::Tensor tokens, targets;  // both [batch, seq], int64
};

// One piece of the text after the other, a byte a token; targets are one byte further on. A function
// of the step alone, so nothing of it has to be saved.
Batch batch_of(std::string_view text, int64_t step, int64_t batch, int64_t vocab_size) {
  const int64_t seq = absl::GetFlag(FLAGS_seq);
  const at::Tensor pieces = at::empty({batch, seq + 1}, at::kLong);
  auto* to = pieces.data_ptr<int64_t>();
  for (int64_t row = 0; row < batch; ++row) {
    const int64_t begin = (step * batch + row) * seq % (static_cast<int64_t>(text.size()) - seq);
    for (const char byte : text.substr(static_cast<size_t>(begin), static_cast<size_t>(seq + 1))) {
      *to++ = static_cast<unsigned char>(byte) % vocab_size;
    }
  }
  return {pieces.slice(1, 0, seq).contiguous(), pieces.slice(1, 1).contiguous()};
}

at::Tensor loss_of(shardweave::nn::Llama& model, const Batch& batch, const MeshPtr& mesh) {
  const at::Tensor logits = model(examples::on_mesh(batch.tokens, mesh));
  return at::cross_entropy_loss(logits.flatten(0, 1),
                                examples::on_mesh(batch.targets, mesh).flatten());
}

// Each rank reads what it keeps. Without a mesh: all of it, on a mesh of this rank alone.
void load_weights(shardweave::nn::Llama& model, const MeshPtr& mesh) {
  const std::string from = absl::GetFlag(FLAGS_model);
  if (mesh != nullptr) {
    shardweave::load_pretrained(from, *model, mesh);
    return;
  }
  shardweave::throw_if_error(shardweave::run_ranks(1, [&](shardweave::World& alone) {
    shardweave::load_pretrained(from, *model,
                                shardweave::value_or_throw(init_device_mesh(alone, {{"dp", 1}})));
  }));
}

void train(const Settings& settings, const LlamaOptions& options, std::string_view text,
           const MeshPtr& mesh, const StepDone& step_done) {
  auto model = shardweave::deferred_init([&] { return shardweave::nn::Llama(options); });
  if (mesh != nullptr) {
    const auto zoo = [&](const shardweave::nn::PlanOptions& plan_options) {
      return shardweave::nn::llama_plan(options, mesh->mesh(), plan_options);
    };
    const Batch batch = batch_of(text, 0, settings.batch, options.vocab_size);
    const auto step = [&] {
      shardweave::nn::Llama one(options);
      return shardweave::StepModel{
          one.ptr(), [=](const MeshPtr& on) mutable { return loss_of(one, batch, on); }};
    };
    shardweave::parallelize_module(
        *model, mesh, examples::plan_for(*model, settings, zoo, kHuggingFacePlan, step, mesh));
  }
  shardweave::materialize(*model, {.seed = settings.seed});

  const std::vector<at::Tensor> parameters = shardweave::unique_parameters(*model);
  shardweave::FusedOptimizer optimizer(parameters,
                                       shardweave::AdamWOptions{.lr = settings.learning_rate});
  shardweave::StateDict state;
  std::optional<shardweave::Checkpointer> checkpointer;
  int64_t first = 0;
  const bool is_resumed = mesh != nullptr && !absl::GetFlag(FLAGS_resume).empty();
  if (!absl::GetFlag(FLAGS_model).empty() && !is_resumed) load_weights(model, mesh);
  if (mesh != nullptr) {  // what a run needs to go on, beside what follows from the step
    shardweave::add_module(state, *model);
    shardweave::add_optimizer(state, optimizer, *model);
    shardweave::add_random_state(state, mesh);
    if (is_resumed) {
      first = shardweave::load_checkpoint(absl::GetFlag(FLAGS_resume), state, mesh).step;
    }
    if (const std::string save = absl::GetFlag(FLAGS_save); !save.empty()) {
      checkpointer.emplace(save, mesh);
      checkpointer->open(first);  // or hours later there is nowhere to save
    }
  }
  if (first >= settings.steps) {
    throw shardweave::Error(absl::InvalidArgumentError(absl::StrCat(
        "--steps=", settings.steps, ": wanted more than ", first, ", as --resume has")));
  }
  shardweave::Scheduler scheduler(
      optimizer,
      shardweave::Schedule::cosine(settings.steps).warmup(settings.steps / 10).floor(0.1));
  scheduler.set_step(first);
  for (int64_t step = first; step < settings.steps; ++step) {
    const Batch batch = batch_of(text, step, settings.batch, options.vocab_size);
    const at::Tensor loss = loss_of(model, batch, mesh);
    loss.backward();
    shardweave::finish_grad_sync(*model);  // nothing to do for plain tensors
    shardweave::clip_grad_norm(parameters, 1.0);
    optimizer.step();
    optimizer.zero_grad();
    scheduler.step();
    const int64_t done = step + 1, every = absl::GetFlag(FLAGS_save_every);
    step_done(done, loss.item<double>());
    if (checkpointer.has_value() && done == settings.steps) {
      checkpointer->save(done, state);
    } else if (checkpointer.has_value() && every > 0 && done % every == 0) {
      checkpointer->save_async(done, state);
    }
  }
}

absl::StatusOr<Training> make_training(const Settings& settings) {
  const int64_t seq = absl::GetFlag(FLAGS_seq);
  if (absl::Status status = examples::check_at_least("seq", seq, 1); !status.ok()) return status;
  const int64_t every = absl::GetFlag(FLAGS_save_every);
  if (every < 0 || (every > 0 && absl::GetFlag(FLAGS_save).empty())) {
    return absl::InvalidArgumentError(
        absl::StrCat("--save_every=", every, ": wanted --save, too, and 0 or more"));
  }
  const absl::StatusOr<LlamaOptions> options = make_options();
  if (!options.ok()) return options.status();
  if (options->max_position_embeddings < seq) {
    return absl::InvalidArgumentError(absl::StrCat("--seq=", seq, ": the model is for ",
                                                   options->max_position_embeddings,
                                                   " positions at most"));
  }
  absl::StatusOr<Text> read = Text::read(absl::GetFlag(FLAGS_data));
  if (!read.ok()) return read.status();
  const auto text = std::make_shared<const Text>(*std::move(read));
  if (static_cast<int64_t>(text->bytes().size()) <= seq) {
    return absl::InvalidArgumentError(absl::StrCat("--seq=", seq, ": the text has only ",
                                                   text->bytes().size(),
                                                   " bytes, wanted more than --seq"));
  }
  return Training{
      .unit = "tokens",
      .per_step = settings.batch * seq,
      .description = absl::StrCat(
          "model ", absl::GetFlag(FLAGS_model), ", layers ", options->num_hidden_layers, ", dim ",
          options->hidden_size, ", heads ", options->num_attention_heads, ", seq ", seq, ", save ",
          absl::GetFlag(FLAGS_save), " ", every, ", resume ", absl::GetFlag(FLAGS_resume)),
      .data = text->bytes(),
      .train =
          [&settings, text, its = *options](const MeshPtr& mesh, const StepDone& step_done) {
            train(settings, its, text->bytes(), mesh, step_done);
            return examples::Summary();
          },
  };
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run("train_llama", "Trains a byte-level Llama on a text, sharded over ranks.",
                       argc, argv, make_training);
}
