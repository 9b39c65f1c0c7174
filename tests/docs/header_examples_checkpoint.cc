// The examples at the top of the headers of modules/checkpoint and modules/hugging_face, as docs_test
// finds them there: compiled, not run.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/modules/checkpoint/box.h"
#include "shardweave/modules/checkpoint/checkpoint_directory.h"
#include "shardweave/modules/checkpoint/checkpointer.h"
#include "shardweave/modules/checkpoint/file_system.h"
#include "shardweave/modules/checkpoint/loader_position.h"
#include "shardweave/modules/checkpoint/manifest.h"
#include "shardweave/modules/checkpoint/rewrite_checkpoint.h"
#include "shardweave/modules/checkpoint/safetensors.h"
#include "shardweave/modules/checkpoint/safetensors_index.h"
#include "shardweave/modules/checkpoint/safetensors_tensor.h"
#include "shardweave/modules/checkpoint/save_plan.h"
#include "shardweave/modules/checkpoint/state_dict.h"
#include "shardweave/modules/checkpoint/tensor_source.h"
#include "shardweave/modules/checkpoint/torch_files.h"
#include "shardweave/modules/data/token_file.h"
#include "shardweave/modules/data/token_loader.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/hugging_face/model_config.h"
#include "shardweave/modules/hugging_face/model_files.h"
#include "shardweave/modules/hugging_face/names.h"
#include "shardweave/modules/hugging_face/pretrained.h"
#include "shardweave/modules/nn/llama.h"
#include "shardweave/modules/nn/registry.h"
#include "shardweave/modules/optim/fused_optimizer.h"
#include "shardweave/modules/parallelize_module.h"
#include "torch/nn/module.h"

// Examples show what a call gives, and leave it at that.
#pragma GCC diagnostic ignored "-Wunused-result"
#pragma GCC diagnostic ignored "-Wunused-value"
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"

namespace shardweave::header_examples {

// --- files ---------------------------------------------------------------------------------------

void box() {
  Box piece = {{0, 0}, {4, 8}}, mine = {{2, 0}, {5, 8}};
  Box common = *intersect(piece, mine);  // {2, 0}, {2, 8}
  for_each_run(common, piece, mine,
               [&](int64_t from, int64_t to, int64_t count) { (void)(from + to + count); });
}

void file_system(const std::string& bytes) {
  std::shared_ptr<FileSystem> fs = posix_file_system();
  auto file = fs->create("a.tmp");  // StatusOr
  write_all(**file, bytes.data(), bytes.size());
  (*file)->sync();           // survives a crash of the machine,
  fs->rename("a.tmp", "a");  // and so does its name
  fs->sync_directory(".");
}

void manifest(std::string_view text) {
  auto manifest = Manifest::parse(text);  // StatusOr
  const SavedTensor& w = manifest->tensors.at("model.w");
  w.pieces[0].file;  // "rank-00000.safetensors"
}

void save_plan() {
  auto pieces =
      plan_save({{"w", DType::kF32, {8, 4}, *Layout::create({Shard(0), Replicate()})}}, {2, 2});
  (*pieces)[0];  // {tensor 0, [0:4, 0:4], rank 1}
}

void safetensors(void* out) {
  auto file = SafetensorsFile::open("model.safetensors");         // StatusOr; the header alone
  const StoredTensor* info = (*file)->find("h.0.attn.q.weight");  // null: not there
  (*file)->read(*info, Box{{0, 0}, {2, 8}}, out);                 // two rows: no byte more is read
}

void safetensors_writer(const std::string& path, const char* bytes) {
  auto writer =
      SafetensorsWriter::create(path, {{"a", DType::kF32, {2, 3}}, {"b", DType::kF32, {4}}});
  for (const StoredTensor& info : (*writer)->tensors())
    (*writer)->append(bytes, info.end - info.begin);
  (*writer)->finish();  // all there, and on the disk
}

void safetensors_index(void (*use)(const std::string& name)) {
  auto model = SafetensorsIndex::open("llama/");  // StatusOr; or a file of either kind
  for (const std::string& name : (*model)->names()) use(name);
  auto place = (*model)->find("lm_head.weight");  // StatusOr: its file and its StoredTensor
}

void safetensors_tensor() {
  auto file = *SafetensorsFile::open("model.safetensors");
  at::Tensor q = read_tensor(*file, "h.0.attn.q.weight");
  at::Tensor rows = read_tensor(*file, "h.0.attn.q.weight", Box{{0, 0}, {2, 8}});
  write_safetensors("two.safetensors", {{"q", q}, {"rows", rows}}, {{"format", "pt"}});
}

void tensor_source() {
  auto sources = safetensors_sources("llama/");  // StatusOr; headers alone are read
  const TensorSource& w = sources->front();
  std::vector<char> rows(2 * 8 * 4);
  const Box part = {{0, 0}, {2, 8}};
  absl::Status status = w.read(part, part, rows.data());  // two rows: no byte more is read
}

void torch_files() {
  auto sources = weight_sources("pytorch_model.bin");  // StatusOr; or run/dcp/, llama/
  (*sources)[0].name;                                  // "model.layers.0.mlp.up_proj.weight"
}

// --- checkpoints ---------------------------------------------------------------------------------

void checkpoint_directory() {
  auto steps = list_checkpoints("run");           // StatusOr: {100}
  auto path = find_checkpoint("run");             // "run/step-000100"
  absl::Status whole = verify_checkpoint(*path);  // every byte
}

void checkpointer(const MeshPtr& mesh, StateDict& state, bool resume, int64_t steps,
                  void (*train)()) {
  Checkpointer checkpointer("run", mesh, {.keep_last = 3});
  int64_t step = 0;                                  // steps that are done
  if (resume) step = checkpointer.load(state).step;  // the newest, in place
  while (step < steps) {
    train();
    if (++step % 100 == 0) checkpointer.save_async(step, state);  // a copy; then beside training
  }
  checkpointer.wait();
}

void state_dict(Checkpointer& checkpointer, int64_t step, torch::nn::Module* model,
                FusedOptimizer& optimizer, const MeshPtr& mesh) {
  StateDict state;
  add_module(state, *model);                // "model.h.0.attn.q.weight", ...
  add_optimizer(state, optimizer, *model);  // "optimizer.h.0.attn.q.weight.exp_avg", ...
  add_random_state(state, mesh);
  state.set_value("epoch", "3");
  checkpointer.save(step, state);  // checkpointer.h
}

void loader_position(Checkpointer& checkpointer, int64_t step, StateDict& state,
                     const TokenFile& file, const MeshPtr& mesh) {
  TokenLoader loader({file}, {.seq = 1024, .batch = 32}, mesh, {{"dp", Shard(0)}});
  add_loader_position(state, loader);  // the value "loader"
  checkpointer.save(step, state);      // of the batch that comes next
  checkpointer.load(state);            // and there it goes on, on any mesh
}

void rewrite() {
  auto manifest = read_manifest("run/step-000100");  // StatusOr
  auto sources = checkpoint_sources("run/step-000100", *manifest);
  rewrite_checkpoint("other", *manifest, *sources, {.num_files = 6});  // other/step-000100
}

// --- models of Hugging Face ----------------------------------------------------------------------

void model_config_of(std::string_view text) {
  absl::Status fits = check_model_config(text);      // does it say what a model here computes?
  auto options = nn::LlamaOptions::from_json(text);  // StatusOr
  std::string again = model_config(*options);        // and back
}

void model_files(const Manifest* manifest, std::string_view config) {
  auto sources = checkpoint_sources("run/step-000100", *manifest);
  absl::Status status =
      write_model_files("llama-tuned", config, *std::move(sources), {.dtype = at::kBFloat16});
}

void names() {
  file_parts("vit", "vit.layers.0.mlp.fc1.weight", {72, 18});
  file_parts("mixtral", "model.layers.0.mlp.experts.down_proj", {8, 64, 224});
}

void pretrained(const MeshPtr& mesh, void (*tune)()) {
  const std::string config = value_or_throw(read_pretrained_config("llama/"));
  auto model = deferred_init([&] { return value_or_throw(nn::make_model("", config)); });
  parallelize_module(*model.module, mesh, model.plan(mesh->mesh(), {}));  // or fully_shard(), ...
  materialize(*model.module);
  load_pretrained("llama/", *model.module, mesh);  // each rank reads what it keeps
  tune();
  save_pretrained("llama-tuned/", *model.module, config, mesh, {.dtype = at::kBFloat16});
}

}  // namespace shardweave::header_examples
