// Trains a byte-level Llama on a text, sharded over ranks that are threads or processes.
//
//   ./bazelw run //examples:train_llama -- --mesh=dp=2,tp=2 --sequence_parallel --check
//   ./bazelw run //examples:train_llama -- --plan=hf --mesh=tp=4 --backend=gloo --data=book.txt
//
// The model is constructed without memory, sharded by one call, and only then made: each rank draws
// its parts.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/examples/common/training.h"
#include "shardweave/examples/train_gpt/text.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/nn/llama.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/parallelize_module.h"

ABSL_FLAG(std::string, data, "", "the text to train on; default: the licence texts of Debian");
ABSL_FLAG(int64_t, layers, 2, "decoder layers");
ABSL_FLAG(int64_t, dim, 96, "features of a token");
ABSL_FLAG(int64_t, heads, 8, "attention heads; they divide --dim, and --mesh's tp divides them");
ABSL_FLAG(int64_t, kv_heads, 4, "heads of keys and values; they divide --heads");
ABSL_FLAG(int64_t, seq, 64, "bytes per sequence");

namespace {

using examples::Settings;
using examples::StepDone;
using examples::Training;
using shardweave::MeshPtr;
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

shardweave::nn::LlamaOptions options_from_flags() {
  return {.vocab_size = 256,  // bytes
          .hidden_size = absl::GetFlag(FLAGS_dim),
          .intermediate_size = 8 * absl::GetFlag(FLAGS_dim) / 3,
          .num_hidden_layers = absl::GetFlag(FLAGS_layers),
          .num_attention_heads = absl::GetFlag(FLAGS_heads),
          .num_key_value_heads = absl::GetFlag(FLAGS_kv_heads),
          .max_position_embeddings = absl::GetFlag(FLAGS_seq),
          .initializer_range = 0.05};
}

void train(const Settings& settings, const Text& text, const MeshPtr& mesh,
           const StepDone& step_done) {
  const shardweave::nn::LlamaOptions options = options_from_flags();
  auto model = shardweave::deferred_init([&] { return shardweave::nn::Llama(options); });
  if (mesh != nullptr) {
    const auto zoo = [&](const shardweave::nn::PlanOptions& plan_options) {
      return shardweave::nn::llama_plan(options, mesh->mesh(), plan_options);
    };
    const at::Tensor tokens =
        text.batch({0, settings.batch, absl::GetFlag(FLAGS_seq), settings.seed}).tokens;
    const auto step = [&] {
      shardweave::nn::Llama one(options);
      return shardweave::StepModel{one.ptr(), [=](const MeshPtr& on) mutable {
                                     const at::Tensor batch = examples::on_mesh(tokens, on);
                                     return shardweave::nn::next_token_loss(one(batch), batch);
                                   }};
    };
    shardweave::parallelize_module(
        *model, mesh, examples::plan_for(*model, settings, zoo, kHuggingFacePlan, step, mesh));
  }
  shardweave::materialize(*model, {.seed = settings.seed});

  shardweave::FusedOptimizer optimizer(model->parameters(),
                                       shardweave::AdamWOptions{.lr = settings.learning_rate});
  for (int64_t step = 0; step < settings.steps; ++step) {
    const at::Tensor tokens = examples::on_mesh(
        text.batch({step, settings.batch, absl::GetFlag(FLAGS_seq), settings.seed}).tokens, mesh);
    const at::Tensor loss = shardweave::nn::next_token_loss(model(tokens), tokens);
    loss.backward();
    shardweave::finish_grad_sync(*model);  // nothing to do for plain tensors
    optimizer.step();
    optimizer.zero_grad();
    step_done(loss.item<double>());
  }
}

absl::StatusOr<Training> make_training(const Settings& settings) {
  const int64_t seq = absl::GetFlag(FLAGS_seq);
  if (absl::Status status = examples::check_at_least("seq", seq, 2); !status.ok()) return status;
  if (absl::Status status = check(options_from_flags()); !status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--layers, --dim, --heads, --kv_heads: ", std::string(status.message())));
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
      .description = absl::StrCat("layers ", absl::GetFlag(FLAGS_layers), ", dim ",
                                  absl::GetFlag(FLAGS_dim), ", heads ", absl::GetFlag(FLAGS_heads),
                                  " and ", absl::GetFlag(FLAGS_kv_heads), ", seq ", seq),
      .data = text->bytes(),
      .train =
          [&settings, text](const MeshPtr& mesh, const StepDone& step_done) {
            train(settings, *text, mesh, step_done);
            return examples::Summary();
          },
  };
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run("train_llama", "Trains a byte-level Llama on a text, sharded over ranks.",
                       argc, argv, make_training);
}
