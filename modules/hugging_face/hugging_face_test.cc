// Directories that transformers has written (references/), into models on meshes and back: the logits are
// those that transformers computed, and what is written is what was read, byte for byte.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/distribute_module.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/checkpoint/safetensors_tensor.h"
#include "shardweave/modules/checkpoint/testing/faulty_file_system.h"
#include "shardweave/modules/deferred_init.h"
#include "shardweave/modules/fully_shard.h"
#include "shardweave/modules/hugging_face/pretrained.h"
#include "shardweave/modules/nn/registry.h"
#include "torch/nn/module.h"

namespace shardweave {
namespace {

using ::testing::AllOf;
using testing::Fault;
using testing::FaultKind;
using testing::FaultyFileSystem;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::on_mesh;
using testing::try_on_mesh;
using Json = nlohmann::json;

const std::vector<std::string> kKinds = {"llama", "gpt2", "mixtral", "vit"};

std::string reference(const std::string& kind) {
  return "modules/hugging_face/references/" + kind;
}
std::string new_path(const std::string& name) {
  const std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
  std::filesystem::remove_all(path);
  return path;
}
std::string text_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}
std::string config_of(const std::string& kind) {
  return value_or_throw(read_pretrained_config(reference(kind)));
}

std::map<std::string, at::Tensor> all_of(const std::string& path) {
  std::map<std::string, at::Tensor> result;
  for (const TensorSource& source : value_or_throw(safetensors_sources(path))) {
    at::Tensor tensor = at::empty(at::IntArrayRef(source.shape.data(), source.shape.size()),
                                  at::TensorOptions(scalar_type_of(source.dtype)));
    const Box whole = whole_box(source.shape);
    throw_if_error(source.read(whole, whole, tensor.data_ptr()));
    result[source.name] = tensor;
  }
  return result;
}

struct Inputs {
  at::Tensor inputs, logits;
};
Inputs inputs_of(const std::string& kind) {
  const auto file =
      value_or_throw(SafetensorsFile::open("modules/nn/references/" + kind + ".safetensors"));
  return {read_tensor(*file, "inputs")[0], read_tensor(*file, "logits")};
}

nn::Model made(const std::string& config, const MeshPtr& mesh, bool tp, bool fsdp) {
  nn::Model model = deferred_init([&] { return value_or_throw(nn::make_model("", config)); });
  parallelize_module(*model.module, mesh, tp ? model.plan(mesh->mesh(), {}) : ShardingPlan());
  materialize(*model.module, {.seed = 1});
  if (fsdp) {
    fully_shard(*model.module, mesh, {.mesh_dim = "dp", .units = {"*.{layers,h}.*"}});
  }
  model.module->eval();
  return model;
}

struct Way {
  std::vector<MeshDim> mesh;
  bool tp, fsdp;
};
const std::vector<Way> kWays = {
    {{{"dp", 1}}, false, false}, {{{"tp", 2}}, true, false},           {{{"tp", 3}}, true, false},
    {{{"dp", 3}}, false, true},  {{{"dp", 2}, {"tp", 2}}, true, true},
};

TEST(HuggingFaceTest, LogitsAreThoseOfTransformersAndFilesComeBackAsTheyWere) {
  for (const std::string& kind : kKinds) {
    const Inputs want = inputs_of(kind);
    const std::map<std::string, at::Tensor> files = all_of(reference(kind));
    for (size_t w = 0; w < kWays.size(); ++w) {
      SCOPED_TRACE(kind + ", way " + std::to_string(w));
      const Way& way = kWays[w];
      // Heads of keys and values that do not divide are whole under the plan.
      const std::string saved = new_path(kind + std::to_string(w));
      on_mesh(way.mesh, [&](const MeshPtr& mesh) {
        const bool fsdp = way.fsdp;
        const nn::Model model = made(config_of(kind), mesh, way.tp, fsdp);
        const LoadedPretrained loaded = load_pretrained(reference(kind), *model.module, mesh);
        EXPECT_EQ(loaded.kind, kind);
        EXPECT_EQ(loaded.bytes_read, loaded.bytes_kept);
        EXPECT_TRUE(loaded.missing.empty() && loaded.unexpected.empty());
        {
          const at::NoGradGuard no_grad;
          at::Tensor logits = model.forward({want.inputs})[0];
          if (is_dtensor(logits)) logits = full_tensor(logits);
          const double off = (logits - want.logits).abs().max().item<double>();
          EXPECT_LE(off, 1e-5 * (1 + want.logits.abs().max().item<double>()));
        }
        save_pretrained(saved, *model.module, config_of(kind), mesh, {.max_file_bytes = 9000});
      });
      const std::map<std::string, at::Tensor> again = all_of(saved);
      ASSERT_EQ(again.size(), files.size());
      for (const auto& [name, tensor] : files) {
        ASSERT_TRUE(again.contains(name)) << name;
        EXPECT_TRUE(at::equal(again.at(name), tensor)) << name;
      }
      EXPECT_TRUE(std::filesystem::exists(saved + "/model.safetensors.index.json"));
      // What it said, and nothing else but the dtype.
      Json config = Json::parse(text_of(saved + "/config.json"));
      EXPECT_EQ(config["torch_dtype"], "float32");
      config.erase("torch_dtype");
      EXPECT_EQ(config, Json::parse(text_of(reference(kind) + "/config.json")));
    }
  }
}

TEST(HuggingFaceTest, AnotherDtypeIsConvertedBothWays) {
  const std::string saved = new_path("bf16");
  const std::map<std::string, at::Tensor> files = all_of(reference("llama"));
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    const nn::Model model = made(config_of("llama"), mesh, false, true);
    load_pretrained(reference("llama"), *model.module, mesh);
    save_pretrained(saved, *model.module, config_of("llama"), mesh, {.dtype = at::kBFloat16});
    EXPECT_FALSE(std::filesystem::exists(saved + "/model.safetensors.index.json"));
    const nn::Model other = made(config_of("llama"), mesh, false, false);
    const LoadedPretrained loaded = load_pretrained(saved, *other.module, mesh);
    EXPECT_EQ(loaded.bytes_read, loaded.bytes_kept);
    const at::NoGradGuard no_grad;
    for (const auto& item : other.module->named_parameters()) {
      if (item.key() == "lm_head.weight") continue;
      const at::Tensor want = files.at(item.key()).to(at::kBFloat16).to(at::kFloat);
      EXPECT_TRUE(at::equal(full_tensor(item.value()), want)) << item.key();
    }
  });
  EXPECT_EQ(Json::parse(text_of(saved + "/config.json"))["dtype"], "bfloat16");
  EXPECT_EQ(all_of(saved).at("model.norm.weight").scalar_type(), at::kBFloat16);
}

// A directory like a reference, of other tensors.
std::string variant(const std::string& name, const std::string& kind,
                    const std::map<std::string, at::Tensor>& tensors) {
  const std::string path = new_path(name);
  std::filesystem::create_directories(path);
  std::filesystem::copy_file(reference(kind) + "/config.json", path + "/config.json");
  write_safetensors(path + "/model.safetensors", {tensors.begin(), tensors.end()});
  return path;
}

TEST(HuggingFaceTest, WhatDoesNotFitIsOneErrorAndChangesNothing) {
  std::map<std::string, at::Tensor> tensors = all_of(reference("mixtral"));
  tensors.erase("model.layers.1.block_sparse_moe.experts.3.w3.weight");
  tensors["model.layers.2.mlp.gate.weight"] = at::ones({5, 18});
  tensors["model.norm.weight"] = at::ones({19});
  tensors["lm_head.weight"] = at::ones({29, 18}, at::kLong);
  const std::string path = variant("unfit", "mixtral", tensors);
  on_mesh({{"tp", 3}}, [&](const MeshPtr& mesh) {
    const nn::Model model = made(config_of("mixtral"), mesh, true, false);
    load_pretrained(reference("mixtral"), *model.module, mesh);
    const at::NoGradGuard no_grad;
    const at::Tensor before = full_tensor(model.module->named_parameters()["model.norm.weight"]);
    try {
      load_pretrained(path, *model.module, mesh);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      const std::string said(error.status().message());
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(said, HasSubstr("missing: model.layers.1.block_sparse_moe.experts.3.w3.weight"));
      EXPECT_THAT(said, HasSubstr("unexpected: model.layers.2.mlp.gate.weight"));
      EXPECT_THAT(said, HasSubstr("model.norm.weight ([19] there, [18] here)"));
      EXPECT_THAT(said, HasSubstr("lm_head.weight (I64 there, F32 here)"));
    }
    EXPECT_TRUE(
        at::equal(before, full_tensor(model.module->named_parameters()["model.norm.weight"])));
  });
}

// The disk, where one folder is another, and something may happen before a rename.
class OtherDisk final : public FileSystem {
 public:
  OtherDisk(std::string from, std::string to, std::function<void()> before_rename = {})
      : from_(std::move(from)), to_(std::move(to)), before_rename_(std::move(before_rename)) {}
  absl::Status create_directory(const std::string& path) override {
    return disk_->create_directory(of(path));
  }
  absl::StatusOr<std::unique_ptr<WritableFile>> create(const std::string& path) override {
    return disk_->create(of(path));
  }
  absl::StatusOr<std::unique_ptr<ReadableFile>> open(const std::string& path,
                                                     Symlinks symlinks) override {
    return disk_->open(of(path), symlinks);
  }
  absl::Status sync_directory(const std::string& path) override {
    return disk_->sync_directory(of(path));
  }
  absl::Status rename(const std::string& from, const std::string& to) override {
    if (before_rename_ != nullptr) before_rename_();
    return disk_->rename(of(from), of(to));
  }
  absl::StatusOr<std::vector<DirectoryEntry>> list(const std::string& path) override {
    return disk_->list(of(path));
  }
  absl::Status remove_file(const std::string& path) override {
    return disk_->remove_file(of(path));
  }
  absl::Status remove_directory(const std::string& path) override {
    return disk_->remove_directory(of(path));
  }
  absl::StatusOr<std::unique_ptr<FileLock>> lock(const std::string& path,
                                                 const std::string& holder) override {
    return disk_->lock(of(path), holder);
  }

 private:
  std::string of(const std::string& path) const {
    return path.starts_with(from_) ? to_ + path.substr(from_.size()) : path;
  }
  const std::shared_ptr<FileSystem> disk_ = posix_file_system();
  const std::string from_, to_;
  const std::function<void()> before_rename_;
};

struct Buffers final : torch::nn::Module {
  explicit Buffers(const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
    for (const auto& [name, tensor] : tensors) register_buffer(name, tensor);
  }
};

absl::Status status_of_load(const std::string& path, torch::nn::Module& module, const MeshPtr& mesh,
                            const LoadPretrainedOptions& options = {}) {
  try {
    load_pretrained(path, module, mesh, options);
  } catch (const Error& error) {
    return error.status();
  }
  return absl::OkStatus();
}

// Each has a directory of its own under that path; what they find in it is not the same.
TEST(HuggingFaceTest, RanksThatFindOtherFilesAreAllTold) {
  std::map<std::string, at::Tensor> tensors = all_of(reference("gpt2"));
  const std::string one = variant("found", "gpt2", tensors);
  std::map<std::string, at::Tensor> less = tensors, more = tensors;
  less.erase("transformer.ln_f.weight");
  more["extra"] = at::ones({2});
  std::map<std::string, at::Tensor> other = tensors;
  other["transformer.ln_f.weight"] = other["transformer.ln_f.weight"].to(at::kBFloat16);
  for (const auto& [name, change, words] :
       {std::tuple("less", less, "has of 'transformer.ln_f.weight' is not the same on ranks 0"),
        {"other", other, "has of 'transformer.ln_f.weight' is not the same on ranks 0"},
        {"more", more, "has beside the module's is not the same on ranks 0 and 1"}}) {
    SCOPED_TRACE(name);
    const std::string two = variant(std::string("elsewhere_") + name, "gpt2", change);
    on_mesh({{"dp", 2}}, [&, words = words](const MeshPtr& mesh) {
      const nn::Model model = made(config_of("gpt2"), mesh, false, false);
      LoadPretrainedOptions options = {.allow_missing = true, .allow_unexpected = true};
      if (mesh->rank().value == 1) options.file_system = std::make_shared<OtherDisk>(one, two);
      const at::NoGradGuard no_grad;
      const at::Tensor bias = model.module->named_parameters()["transformer.ln_f.bias"];
      const at::Tensor before = full_tensor(bias).clone();
      const absl::Status status = status_of_load(one, *model.module, mesh, options);
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(words));
      EXPECT_TRUE(at::equal(full_tensor(bias), before));
    });
  }
}

TEST(HuggingFaceTest, WhatOneRankCannotTakeNoRankGets) {
  const std::string path = new_path("buffers") + ".safetensors";
  std::filesystem::remove(path);
  write_safetensors(path, {{"a", at::ones({4})}, {"b", at::ones({4})}, {"c", at::ones({4})}});
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    const bool is_odd = mesh->rank().value == 1;
    const auto told = [&](const at::Tensor& b, const at::Tensor& c, absl::StatusCode code,
                          const std::string& words) {
      const at::Tensor a = at::zeros({4});
      Buffers module({{"a", a}, {"c", c}, {"b", b}});
      const absl::Status status = status_of_load(path, module, mesh);
      EXPECT_EQ(status.code(), code) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(words));
      EXPECT_TRUE(at::equal(a, at::zeros({4}))) << words;
    };
    const at::Tensor zeros = at::zeros({4}), c = at::zeros({4});
    using enum absl::StatusCode;
    told(is_odd ? at::zeros({1}).expand({4}) : zeros, c, kFailedPrecondition,
         "rank 1: 'b' has elements that share memory");
    told(is_odd ? at::zeros({4}, at::TensorOptions(at::kMeta)) : zeros, c, kFailedPrecondition,
         "rank 1: 'b' has no memory");
    told(from_local(at::ones({4}), mesh, {Partial()}), c, kInvalidArgument,
         "'b' lies [P(sum)]: a Partial is no value");
    // Tied to one on a rank, and to another on the other.
    const at::Tensor a = at::zeros({4});
    Buffers tied({{"a", a}, {"c", c}, {"b", is_odd ? c : a}});
    EXPECT_THAT(std::string(status_of_load(path, tied, mesh).message()),
                HasSubstr("tensor 'a' is not the same on ranks 0 and 1"));
    EXPECT_TRUE(at::equal(a, at::zeros({4})));
  });
}

TEST(HuggingFaceTest, AConfigurationThatIsALinkToNothingIsAnError) {
  const std::string path = variant("dangling", "gpt2", all_of(reference("gpt2")));
  std::filesystem::remove(path + "/config.json");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    const nn::Model model = made(config_of("gpt2"), mesh, false, false);
    EXPECT_TRUE(status_of_load(path, *model.module, mesh).ok());
  });
  std::filesystem::create_symlink("nowhere", path + "/config.json");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    const nn::Model model = made(config_of("gpt2"), mesh, false, false);
    const absl::Status status = status_of_load(path, *model.module, mesh);
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(std::string(status.message()), HasSubstr("config.json"));
  });
}

TEST(HuggingFaceTest, NegatedTensorsAreWrittenAsTheyAre) {
  const std::string path = new_path("negated") + ".safetensors";
  std::filesystem::remove(path);
  write_safetensors(path, {{"n", at::_neg_view(at::arange(3, at::kFloat))}});
  EXPECT_TRUE(at::equal(all_of(path).at("n"), -at::arange(3, at::kFloat)));
}

TEST(HuggingFaceTest, MissingAndUnexpectedMayBeAllowed) {
  std::map<std::string, at::Tensor> tensors = all_of(reference("vit"));
  tensors.erase("classifier.weight");
  tensors["head"] = at::ones({2});
  tensors["vit.pooler.dense.weight"] = at::ones({2});  // of no use, and so no error
  const std::string path = variant("headless", "vit", tensors);
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    const nn::Model model = made(config_of("vit"), mesh, false, false);
    const LoadedPretrained loaded = load_pretrained(
        path, *model.module, mesh, {.allow_missing = true, .allow_unexpected = true});
    EXPECT_EQ(loaded.missing, std::vector<std::string>{"classifier.weight"});
    EXPECT_EQ(loaded.unexpected, std::vector<std::string>{"head"});
  });
}

// A file has no configuration, which would say what is computed: the module does.
TEST(HuggingFaceTest, AFileAloneIsAllOfAModel) {
  const std::string file = new_path("llama.safetensors");
  const std::map<std::string, at::Tensor> tensors = all_of(reference("llama"));
  write_safetensors(file, {tensors.begin(), tensors.end()});
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    const nn::Model model = made(config_of("llama"), mesh, true, false);
    EXPECT_TRUE(load_pretrained(file, *model.module, mesh).missing.empty());
    const Inputs given = inputs_of("llama");
    const at::Tensor x = distribute_tensor(given.inputs, mesh, Placements(1));
    EXPECT_TRUE(at::allclose(full_tensor(model.forward({x})[0]), given.logits, 1e-3, 1e-4));
  });
}

TEST(HuggingFaceTest, OlderAndNewerNamesAreRead) {
  // GPT-2's first files have no "transformer.", and masks.
  std::map<std::string, at::Tensor> old;
  for (const auto& [name, tensor] : all_of(reference("gpt2"))) {
    old[name.substr(std::string("transformer.").size())] = tensor;
  }
  old["h.0.attn.bias"] = at::ones({1, 1, 11, 11});
  // Those in memory, as transformers 5 can write them, and a head beside what it is tied to.
  std::map<std::string, at::Tensor> memory;
  const auto mixtral =
      value_or_throw(SafetensorsFile::open("modules/nn/references/mixtral.safetensors"));
  for (const StoredTensor& info : mixtral->tensors()) {
    if (!info.name.starts_with("parameter.")) continue;
    memory[info.name.substr(10)] = read_tensor(*mixtral, info.name);
  }
  std::map<std::string, at::Tensor> tied = all_of(reference("llama"));
  tied["lm_head.weight"] = tied.at("model.embed_tokens.weight").clone();
  tied["model.layers.0.self_attn.rotary_emb.inv_freq"] = at::zeros({2});
  const std::vector<std::pair<std::string, std::string>> paths = {
      {"gpt2", variant("old", "gpt2", old)},
      {"gpt2", reference("gpt2_bin")},  // a state dict of torch.save
      {"mixtral", variant("memory", "mixtral", memory)},
      {"llama", variant("tied", "llama", tied)}};
  for (const auto& [kind, path] : paths) {
    SCOPED_TRACE(kind);
    const Inputs want = inputs_of(kind);
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      const nn::Model model = made(config_of(kind), mesh, false, true);
      load_pretrained(path, *model.module, mesh);
      const at::NoGradGuard no_grad;
      const at::Tensor logits = full_tensor(model.forward({want.inputs})[0]);
      EXPECT_LE((logits - want.logits).abs().max().item<double>(), 2e-5);
    });
  }
}

// transformers does not tie a head that is there and differs: as an embedding it would be another model.
TEST(HuggingFaceTest, AHeadThatDiffersFromWhatItIsTiedToIsAnError) {
  std::map<std::string, at::Tensor> tensors = all_of(reference("llama"));
  const at::Tensor embedding = tensors.at("model.embed_tokens.weight");
  at::Tensor head = embedding.clone();
  head[28][17] += 1;  // of the last rank's rows
  const std::vector<std::pair<at::Tensor, std::string>> heads = {
      {head, "tie_word_embeddings"},
      {embedding.to(at::kDouble), "F64"},
      {embedding.slice(0, 0, 28).clone(), "[28, 18] there"}};
  for (const auto& [its, why] : heads) {
    SCOPED_TRACE(why);
    tensors["lm_head.weight"] = its;
    const std::string path = variant("head", "llama", tensors);
    on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
      const nn::Model model = made(config_of("llama"), mesh, false, false);
      const absl::Status status = status_of_load(path, *model.module, mesh);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("differing: lm_head.weight"), HasSubstr(why)));
    });
  }
}

TEST(HuggingFaceTest, SavingRefusesAnotherModelAndADirectoryThatIsThere) {
  const std::string there = new_path("there");
  std::filesystem::create_directories(there);
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    const nn::Model model = made(config_of("llama"), mesh, false, false);
    Json untied = Json::parse(config_of("llama"));
    untied["tie_word_embeddings"] = false;
    untied["intermediate_size"] = 24;
    const auto error_of = [&](const std::string& path, const std::string& config,
                              const ModelFilesOptions& options) {
      try {
        save_pretrained(path, *model.module, config, mesh, options);
      } catch (const Error& error) {
        return std::string(error.status().message());
      }
      return std::string("no error");
    };
    const std::string other = new_path("other" + std::to_string(mesh->rank().value));
    const std::string said = error_of(there + "2", untied.dump(), {});
    EXPECT_THAT(said, HasSubstr("missing: lm_head.weight"));
    EXPECT_THAT(said, HasSubstr("model.layers.0.mlp.down_proj.weight"));
    EXPECT_THAT(error_of(there, config_of("llama"), {}), HasSubstr("is there already"));
    EXPECT_THAT(error_of(there + "2", config_of("llama"), {.max_file_bytes = 0}),
                HasSubstr("max_file_bytes"));
    EXPECT_THAT(error_of(there + "2", config_of("llama"), {.dtype = at::kLong}),
                HasSubstr("floating-point"));
    EXPECT_THAT(error_of(other, config_of("llama"), {}), HasSubstr("is not the same on ranks"));
    EXPECT_FALSE(std::filesystem::exists(there + "2"));
  });
}

TEST(HuggingFaceTest, SavingToldDifferentlyIsAnErrorOnAllRanks) {
  const std::string path = new_path("told_differently");
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    const nn::Model model = made(config_of("llama"), mesh, false, false);
    const auto status_of_save = [&](const ModelFilesOptions& options) {
      try {
        save_pretrained(path, *model.module, config_of("llama"), mesh, options);
      } catch (const Error& error) {
        return error.status();
      }
      return absl::OkStatus();
    };
    // config.json says float32 of both.
    ModelFilesOptions options = {.max_file_bytes = 5000};
    if (mesh->rank().value == 0) options.dtype = at::kFloat8_e4m3fn;
    EXPECT_THAT(std::string(status_of_save(options).message()),
                HasSubstr("is not the same on ranks 0 and 1"));
    EXPECT_THAT(std::string(status_of_save({.dtype = at::kFloat8_e4m3fnuz}).message()),
                HasSubstr("safetensors files have no Float8_e4m3fnuz"));
  });
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(HuggingFaceTest, AnotherRunMayBeFaster) {
  const std::string folder = new_path("faster");
  std::filesystem::create_directories(folder);
  const auto disk = std::make_shared<OtherDisk>("none", "none", [&] {
    std::filesystem::create_directories(folder + "/model");
    std::ofstream(folder + "/model/config.json") << "theirs";
  });
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    const nn::Model model = made(config_of("gpt2"), mesh, false, false);
    try {
      save_pretrained(folder + "/model", *model.module, config_of("gpt2"), mesh,
                      {.file_system = disk});
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.status().code(), absl::StatusCode::kAlreadyExists) << error.status();
    }
  });
  EXPECT_EQ(text_of(folder + "/model/config.json"), "theirs");
  const std::filesystem::directory_iterator left(folder);
  EXPECT_EQ(std::distance(begin(left), end(left)), 1);
}

TEST(ModelFilesTest, WhatCannotBeWrittenIsAStatus) {
  const std::string folder = new_path("statuses");
  std::filesystem::create_directories(folder);
  const auto source = [](const std::string& name) {
    return TensorSource{.name = name, .shape = {2}, .read = [](const Box&, const Box&, void* out) {
                          std::fill_n(static_cast<float*>(out), 2, 1.F);
                          return absl::OkStatus();
                        }};
  };
  const auto status = [&](const std::vector<TensorSource>& sources,
                          const ModelFilesOptions& options) {
    return write_model_files(folder + "/model", config_of("mixtral"), sources, options);
  };
  const TensorSource ours = source("model.layers.0.mlp.gate.weight"),
                     theirs = source("model.layers.0.block_sparse_moe.gate.weight");
  const absl::Status twice = status({ours, theirs}, {.max_file_bytes = 1});
  EXPECT_EQ(twice.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(twice.message()), HasSubstr("two tensors would be called"));
  EXPECT_EQ(status({ours}, {.dtype = at::kFloat8_e4m3fnuz}).code(),
            absl::StatusCode::kInvalidArgument);
  TensorSource throws = ours;
  throws.read = [](const Box&, const Box&, void*) -> absl::Status {
    throw std::runtime_error("no way");
  };
  EXPECT_THAT(std::string(status({throws}, {}).message()), HasSubstr("no way"));
  EXPECT_FALSE(status({source("\xff")}, {.max_file_bytes = 1}).ok());
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  EXPECT_TRUE(status({ours}, {}).ok());
}

// Whatever operation fails, the directory is not there, all ranks hear of it, and nothing is left.
TEST(HuggingFaceTest, AFullDiskLeavesNothing) {
  const std::string folder = new_path("full");
  int failures = 0;
  for (int64_t at = 0;; ++at) {
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    auto fs = std::make_shared<FaultyFileSystem>(
        Fault{.kind = FaultKind::kFail, .at = at, .most_written = 5000});
    const auto failed = std::make_shared<std::atomic<int>>(0);
    on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      const nn::Model model = made(config_of("gpt2"), mesh, false, false);
      try {
        save_pretrained(folder + "/model", *model.module, config_of("gpt2"), mesh,
                        {.max_file_bytes = 9000, .file_system = fs});
      } catch (const Error&) {
        ++*failed;
      }
    });
    if (*failed == 0) break;
    EXPECT_EQ(*failed, 2) << at;
    ++failures;
    const bool whole = std::filesystem::exists(folder + "/model");
    // After the rename only the name's way to the disk can fail.
    EXPECT_TRUE(!whole || all_of(folder + "/model").size() == 28) << at;
    EXPECT_TRUE(whole || std::filesystem::is_empty(folder)) << at;
  }
  EXPECT_GT(failures, 15);
}

TEST(HuggingFaceTest, ModelsWithoutValuesAndPathsWithoutModelsAreErrors) {
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    const std::string config = config_of("gpt2");
    const nn::Model model = deferred_init([&] { return *nn::make_model("", config); });
    const auto code_of = [&](const std::string& path) {
      try {
        load_pretrained(path, *model.module, mesh);
      } catch (const Error& error) {
        return error.status().code();
      }
      return absl::StatusCode::kOk;
    };
    EXPECT_EQ(code_of(reference("gpt2")), absl::StatusCode::kFailedPrecondition);
    materialize(*model.module, {.seed = 1});
    EXPECT_EQ(code_of("nowhere"), absl::StatusCode::kNotFound);
    EXPECT_EQ(code_of(reference("vit")), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(code_of(reference("gpt2") + "/model.safetensors"), absl::StatusCode::kOk);
  });
}

TEST(ModelConfigTest, OptionsComeBack) {
  const auto again = [](const auto& options) {
    using Options = std::decay_t<decltype(options)>;
    const std::string text = model_config(options);
    const absl::Status fits = check_model_config(text);
    EXPECT_TRUE(fits.ok()) << fits;
    EXPECT_EQ(model_config(value_or_throw(Options::from_json(text))), text);
  };
  again(nn::LlamaOptions());
  again(nn::LlamaOptions{.vocab_size = 7,
                         .num_key_value_heads = 4,
                         .head_dim = 6,
                         .hidden_act = nn::Activation::kGeluTanh,
                         .tie_word_embeddings = true,
                         .pad_token_id = -1,
                         .rope_parameters = {.rope_type = "yarn",
                                             .rope_theta = 500,
                                             .factor = 4,
                                             .original_max_position_embeddings = 64,
                                             .beta_fast = 16,
                                             .mscale = 0.5,
                                             .truncate = false},
                         .attention_bias = true});
  again(nn::Gpt2Options{.n_inner = 7, .resid_pdrop = 0, .tie_word_embeddings = false});
  again(nn::MixtralOptions{.num_local_experts = 3});
  again(nn::VitOptions{.qkv_bias = false, .num_labels = 11});
  for (const std::string& kind : kKinds) EXPECT_EQ(*model_kind(config_of(kind)), kind);
}

TEST(ModelConfigTest, WhatWouldChangeNumbersIsAnError) {
  const auto with = [](const std::string& kind, const std::string& key, const Json& value) {
    Json config = Json::parse(config_of(kind));
    config[key] = value;
    return config.dump(1);
  };
  const auto message = [](const std::string& text) {
    return std::string(check_model_config(text).message());
  };
  EXPECT_THAT(message(with("llama", "quantization_config", {{"bits", 4}})),
              HasSubstr("\"quantization_config\": is {\"bits\":4}, which is not here"));
  EXPECT_THAT(message(with("llama", "residual_multiplier", 0.5)),
              HasSubstr("\"residual_multiplier\": is not known of llama"));
  EXPECT_THAT(message(with("gpt2", "reorder_and_upcast_attn", true)), HasSubstr("wanted false"));
  EXPECT_THAT(message(with("gpt2", "add_cross_attention", true)), HasSubstr("cross"));
  EXPECT_THAT(message(with("mixtral", "sliding_window", 4096)), HasSubstr("sliding_window"));
  EXPECT_THAT(message(with("mixtral", "output_router_logits", true)), HasSubstr("wanted false"));
  EXPECT_THAT(message(with("llama", "rope_parameters",
                           {{"rope_type", "linear"}, {"factor", 2}, {"other", 1}})),
              HasSubstr("\"rope_parameters\", \"other\": is not known"));
  EXPECT_THAT(message(with("vit", "model_type", "deit")), HasSubstr("no model \"deit\""));
  EXPECT_THAT(message(R"({"vocab_size": 3})"), HasSubstr("model_type"));
  // What changes none.
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, Json>>{{"temperature", 0.6},
                                                 {"unsloth_version", "2025.1"},
                                                 {"_flash_attn", true},
                                                 {"new_switch", false},
                                                 {"other", nullptr},
                                                 {"pretraining_tp", 2}}) {
    EXPECT_EQ(message(with("llama", key, value)), "") << key;
  }
  const std::string odd = with("llama", "residual_multiplier", 0.5);
  EXPECT_TRUE(check_model_config(odd, {.allow_unknown = true}).ok());
}

TEST(ModelConfigTest, WhatIsTooMuchIsAnError) {
  const auto message = [](const std::string& text) {
    return std::string(check_model_config(text).message());
  };
  EXPECT_THAT(message("{\"a\": " + std::string(200, '[')),
              HasSubstr("nested deeper than 100 times"));
  // Each key is noted with those around it: 300 MB of 4.
  std::string around, keys;
  for (int i = 0; i < 90; ++i) around += "{\"" + std::string(40'000, 'k') + "\": ";
  for (int i = 0; i < 80; ++i) keys += "\"" + std::to_string(i) + "\": 0, ";
  EXPECT_THAT(message(around + "{" + keys + "\"end\": 0}" + std::string(90, '}')),
              HasSubstr("has too many keys, or too long ones"));
  // Sizes that LibTorch cannot have.
  Json config = Json::parse(config_of("llama"));
  config["num_hidden_layers"] = 1'000'000;
  EXPECT_THAT(message(config.dump()), HasSubstr("is 1000000; wanted at most 100000"));
  config["num_hidden_layers"] = 2;
  Json experts = Json::parse(config_of("mixtral"));
  experts["num_local_experts"] = 1'000'000;  // each is a tensor in files
  EXPECT_THAT(message(experts.dump()), HasSubstr("is 1000000; wanted at most 100000"));
  config["vocab_size"] = int64_t{1} << 60;
  EXPECT_THAT(message(config.dump()),
              HasSubstr("\"vocab_size\": is 1152921504606846976; wanted at most 1000000000"));
  const auto tensors = tensors_of_config(config.dump());
  EXPECT_EQ(tensors.status().code(), absl::StatusCode::kInvalidArgument) << tensors.status();
}

TEST(NamesTest, PartsCoverTheTensor) {
  const std::vector<FilePart> parts =
      file_parts("mixtral", "model.layers.7.mlp.experts.gate_up_proj", {2, 6, 3});
  ASSERT_EQ(parts.size(), 4u);
  EXPECT_EQ(parts[1].name, "model.layers.7.block_sparse_moe.experts.0.w3.weight");
  EXPECT_EQ(parts[1].box, (Box{{0, 3, 0}, {1, 3, 3}}));
  EXPECT_EQ(parts[1].shape, (Dims{3, 3}));
  EXPECT_EQ(file_parts("llama", "lm_head.weight", {2, 3})[0].name, "lm_head.weight");
  EXPECT_EQ(file_parts("vit", "vit.layers.11.attention.o_proj.bias", {3})[0].name,
            "vit.encoder.layer.11.attention.output.dense.bias");
}

}  // namespace
}  // namespace shardweave
