// `shardweave ckpt` as users run it, on checkpoints that ranks have saved.

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/checkpoint/checkpointer.h"
#include "shardweave/modules/hugging_face/pretrained.h"
#include "shardweave/modules/nn/registry.h"

namespace {

using namespace shardweave;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

constexpr char kProgram[] = "tools/shardweave/shardweave";
constexpr char kReferences[] = "modules/hugging_face/references/";

std::string temporary(const std::string& name) {
  const std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
  std::filesystem::remove_all(path);
  return path;
}

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

struct Ran {
  int code = 0;
  std::string out, err;
  Json json() const { return Json::parse(out, nullptr, /*allow_exceptions=*/false); }
};

Ran ckpt(std::vector<std::string> args) {
  const std::string out = temporary("out"), err = temporary("err");
  args.insert(args.begin(), {kProgram, "ckpt"});
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(::open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
    ::dup2(::open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
    ::execv(kProgram, argv.data());
    ::_exit(99);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), read_text(out),
          read_text(err)};
}

// Two of a run, of a tensor cut over 8 ranks, a replicated one, a number and a value.
std::string saved_run(const std::string& name) {
  const std::string directory = temporary(name);
  shardweave::testing::on_mesh({{"dp", 8}}, [&](const MeshPtr& mesh) {
    at::Tensor w =
        distribute_tensor(at::arange(13 * 5, at::kFloat).view({13, 5}), mesh, {Shard(0)});
    at::Tensor b = distribute_tensor(at::ones({7}, at::kBFloat16), mesh, {Replicate()});
    StateDict state;
    state.add_tensor("model.w", w, {"model.tied"});
    state.add_tensor("model.b", b);
    state.add_tensor("steps", at::full({}, 3, at::kLong));
    state.set_value("epoch", "{\"n\": 3}");
    Checkpointer checkpointer(directory, mesh);
    checkpointer.save(10, state);
    const c10::AutoGradMode no_grad(false);
    w.add_(1);
    checkpointer.save(20, state);
  });
  return directory;
}

// `bazel run` starts the program elsewhere, and says where the user is.
TEST(CkptTest, RelativePathsMeanTheUsersDirectory) {
  const std::string directory = saved_run("relative");
  const size_t slash = directory.find_last_of('/');
  ASSERT_EQ(::setenv("BUILD_WORKING_DIRECTORY", directory.substr(0, slash).c_str(), 1), 0);
  const Ran ran = ckpt({"ls", directory.substr(slash + 1)});
  ::unsetenv("BUILD_WORKING_DIRECTORY");
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("relative/step-000010"));
}

TEST(CkptTest, ListsAndShows) {
  const std::string run = saved_run("looked_at");
  const Json list = ckpt({"ls", run, "--json"}).json();
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[0]["step"], 10);
  EXPECT_EQ(list[1]["path"], run + "/step-000020");
  EXPECT_EQ(list[1]["ranks"], 8);
  EXPECT_EQ(list[1]["tensors"], 3);
  EXPECT_THAT(ckpt({"ls", run}).out, AllOf(HasSubstr("step"), HasSubstr("8 (dp=8)")));
  const Json shown = ckpt({"show", run, "--json"}).json();
  EXPECT_EQ(shown["step"], 20);
  EXPECT_EQ(shown["values"]["epoch"]["n"], 3);
  EXPECT_EQ(shown["aliases"]["model.tied"], "model.w");
  ASSERT_EQ(shown["tensors"].size(), 3u);
  EXPECT_EQ(shown["tensors"][1], Json::parse(R"({"name": "model.w", "dtype": "F32",
      "shape": [13, 5], "bytes": 260, "pieces": 7})"));
  EXPECT_THAT(ckpt({"show", run + "/step-000010", "model.b"}).out,
              AllOf(HasSubstr("BF16"), HasSubstr("[7]"), Not(HasSubstr("model.w"))));
  // Of transformers' files, too.
  EXPECT_EQ(ckpt({"show", std::string(kReferences) + "llama", "--json"}).json()["tensors"].size(),
            34u);
}

TEST(CkptTest, FsckFindsWhatIsDamaged) {
  const std::string run = saved_run("damaged");
  const Ran whole = ckpt({"fsck", run});
  EXPECT_EQ(whole.code, 0) << whole.err;
  EXPECT_THAT(whole.out, HasSubstr("step-000010: whole"));
  const std::string path = run + "/step-000010";
  std::string bytes = read_text(path + "/rank-00001.safetensors");
  bytes.back() ^= 1;
  std::ofstream(path + "/rank-00001.safetensors", std::ios::binary) << bytes;
  std::filesystem::remove(path + "/rank-00003.safetensors");
  std::ofstream(path + "/odd") << "x";
  const Ran ran = ckpt({"fsck", run, "--json"});
  EXPECT_EQ(ran.code, 2);
  const Json json = ran.json();
  EXPECT_EQ(json[0]["ok"], false);
  ASSERT_EQ(json[0]["errors"].size(), 3u) << json;
  EXPECT_THAT(json[0]["errors"][0], HasSubstr("rank-00001.safetensors' has the checksum"));
  EXPECT_THAT(json[0]["errors"][1], HasSubstr("rank-00003"));
  EXPECT_THAT(json[0]["errors"][2], HasSubstr("odd' is not in the manifest"));
  EXPECT_EQ(json[1]["ok"], true);
  // Nothing is made of it.
  EXPECT_EQ(ckpt({"reshard", path, temporary("of_damaged")}).code, 1);

  // One that has lost its manifest is not passed over, and the others are still listed.
  std::filesystem::remove(run + "/step-000020/manifest.json");
  const Ran lost = ckpt({"fsck", run});
  EXPECT_EQ(lost.code, 2);
  EXPECT_THAT(lost.out,
              AllOf(HasSubstr("step-000010: damaged"),
                    HasSubstr("step-000020' has files of a checkpoint and no manifest.json")));
  const Json errors = ckpt({"fsck", run, "--json"}).json()[1]["errors"];
  ASSERT_EQ(errors.size(), 1u) << errors;
  EXPECT_THAT(errors[0], HasSubstr("no manifest.json"));
  EXPECT_EQ(ckpt({"ls", run, "--json"}).json().size(), 1u);
  EXPECT_EQ(ckpt({"show", run}).code, 1);
}

TEST(CkptTest, DiffNamesWhatDiffers) {
  const std::string run = saved_run("differs");
  const Ran same = ckpt({"diff", run, run + "/step-000020"});
  EXPECT_EQ(same.code, 0) << same.err;
  EXPECT_THAT(same.out, HasSubstr("3 tensors are the same, 0 differences"));
  const Ran ran = ckpt({"diff", run + "/step-000010", run + "/step-000020", "--json"});
  EXPECT_EQ(ran.code, 2);
  EXPECT_EQ(ran.json(),
            Json::parse(R"({"steps": [10, 20], "only_first": [], "only_second": [], "same": 2,
      "different": [{"name": "model.w", "what": "values", "elements": 65, "largest": 1.0}]})"));
  const Ran other = ckpt({"diff", run, std::string(kReferences) + "gpt2"});
  EXPECT_EQ(other.code, 2);
  EXPECT_THAT(other.out, AllOf(HasSubstr("model.w"), HasSubstr("only in "),
                               HasSubstr("transformer.wte.weight")));
}

// What a run goes on with is not in tensors alone.
TEST(CkptTest, DiffComparesWhatManifestsSayBesideTensors) {
  const std::string directory = temporary("beside");
  shardweave::testing::on_mesh({{"dp", 1}}, [&](const MeshPtr& mesh) {
    for (const int64_t step : {1, 2, 3}) {
      StateDict state;
      state.add_tensor("w", at::ones({3}),
                       step == 1 ? std::vector<std::string>() : std::vector<std::string>{"tied"});
      state.set_value("epoch", step == 1 ? "1" : "{\"n\": 2}");
      state.set_value("same", "[1]");
      if (step == 1) state.set_value("first", "null");
      checkpoint_internal::LateTensors late = {
          .prefix = step == 1 ? "optimizer.p." : "optimizer.q.",
          .items = [] { return std::vector<checkpoint_internal::LateTensors::Item>(); },
          .now = [] { return OptimizerState(); },
          .set = [](OptimizerState) {}};
      state.add_late(late);
      save_checkpoint(directory, step, state, mesh);
    }
  });
  const auto diff = [&](const std::string& first, const std::string& second) {
    return ckpt({"diff", directory + first, directory + second, "--json"});
  };
  const Ran ran = diff("/step-000001", "/step-000002");
  EXPECT_EQ(ran.code, 2) << ran.err;
  EXPECT_EQ(ran.json(), Json::parse(R"({"steps": [1, 2], "same": 1,
      "only_first": ["value first", "without state optimizer.p."],
      "only_second": ["alias tied", "without state optimizer.q."],
      "different": [{"name": "value epoch", "what": "value", "first": 1, "second": {"n": 2}}]})"));
  EXPECT_THAT(ckpt({"diff", directory + "/step-000001", directory + "/step-000002"}).out,
              AllOf(HasSubstr("value epoch"), HasSubstr("1 and {\"n\":2}"),
                    HasSubstr("steps 1 and 2"), HasSubstr("5 differences")));
  // Another step is none.
  EXPECT_EQ(diff("/step-000002", "/step-000003").code, 0);
}

TEST(CkptTest, DiffSeesWhatADoubleDoesNotHold) {
  constexpr int64_t kLarge = int64_t{1} << 53;
  const std::string directory = temporary("large_numbers");
  shardweave::testing::on_mesh({{"dp", 1}}, [&](const MeshPtr& mesh) {
    for (const int64_t step : {1, 2}) {
      StateDict state;
      state.add_tensor("n", at::tensor({kLarge, INT64_MIN, int64_t{3}}, at::kLong) + (step - 1));
      state.add_tensor("same", at::tensor({kLarge + 1}, at::kLong));
      save_checkpoint(directory, step, state, mesh);
    }
  });
  const Ran ran = ckpt({"diff", directory + "/step-000001", directory + "/step-000002", "--json"});
  EXPECT_EQ(ran.code, 2);
  EXPECT_EQ(ran.json(),
            Json::parse(R"({"steps": [1, 2], "only_first": [], "only_second": [], "same": 1,
      "different": [{"name": "n", "what": "values", "elements": 3, "largest": 1.0}]})"));
}

// Whose rows are larger than what is compared at once.
TEST(CkptTest, DiffOfTensorsWithLargeRows) {
  const std::string directory = temporary("large_rows");
  shardweave::testing::on_mesh({{"dp", 1}}, [&](const MeshPtr& mesh) {
    for (const int64_t step : {1, 2}) {
      StateDict state;
      at::Tensor wide = at::zeros({2, 3, (1 << 21) + 1}, at::kHalf);
      if (step == 2) wide.slice(-1, -2).fill_(4);
      at::Tensor none =
          wide.clone();  // of which the first part has what is no number, and others differ
      if (step == 2) none.view({-1})[0] = std::nan("");
      state.add_tensor("none", none);
      state.add_tensor("wide", wide);
      save_checkpoint(directory, step, state, mesh);
    }
  });
  const Ran ran = ckpt({"diff", directory + "/step-000001", directory + "/step-000002", "--json"});
  EXPECT_EQ(ran.json(),
            Json::parse(R"({"steps": [1, 2], "only_first": [], "only_second": [], "same": 0,
      "different": [{"name": "none", "what": "values", "elements": 13, "largest": null},
                    {"name": "wide", "what": "values", "elements": 12, "largest": 4.0}]})"));
}

TEST(CkptTest, ReshardsForAnotherNumberOfRanks) {
  const std::string run = saved_run("from8"), other = temporary("to3");
  const Ran ran = ckpt({"reshard", run, other, "--files=3", "--json"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.json()["path"], other + "/step-000020");
  EXPECT_EQ(ckpt({"fsck", other}).code, 0);
  EXPECT_EQ(ckpt({"diff", run, other}).code, 0);
  EXPECT_EQ(ckpt({"ls", other, "--json"}).json()[0]["ranks"], 3);
  shardweave::testing::on_mesh({{"dp", 3}}, [&](const MeshPtr& mesh) {
    StateDict state;
    at::Tensor w = zeros({13, 5}, mesh, {Shard(1)});
    at::Tensor b = zeros({7}, mesh, {Shard(0)}, at::TensorOptions(at::kBFloat16));
    at::Tensor steps = at::zeros({}, at::kLong);
    state.add_tensor("model.tied", w);
    state.add_tensor("model.b", b);
    state.add_tensor("steps", steps);
    state.set_value("epoch", "0");
    load_checkpoint(other, state, mesh, {.verify = true});
    EXPECT_TRUE(at::equal(full_tensor(w), at::arange(13 * 5, at::kFloat).view({13, 5}) + 1));
    EXPECT_EQ(steps.item<int64_t>(), 3);
  });
  // It is there already.
  EXPECT_THAT(ckpt({"reshard", run, other}).err, HasSubstr("is there already"));
  EXPECT_THAT(ckpt({"reshard", run, other, "--files=1000"}).err, HasSubstr("wanted 1 to 256"));
}

TEST(CkptTest, ImportsAndExportsWhatTransformersHasWritten) {
  for (const std::string kind : {"llama", "gpt2", "mixtral", "vit"}) {
    SCOPED_TRACE(kind);
    const std::string run = temporary("imported"), again = temporary("exported");
    const std::string reference = kReferences + kind;
    const Ran in = ckpt({"import", reference, run, "--files=2", "--step=5"});
    ASSERT_EQ(in.code, 0) << in.err;
    EXPECT_EQ(ckpt({"fsck", run}).code, 0);
    // In the model's names.
    shardweave::testing::on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
      const auto config = *read_pretrained_config(reference);
      const nn::Model model = *nn::make_model("", config), other = *nn::make_model("", config);
      distribute_module(*model.module, mesh, {});
      distribute_module(*other.module, mesh, {});
      StateDict state;
      add_module(state, *model.module);
      state.set_value("config", "0");
      // What the configuration gives is in no file.
      EXPECT_EQ(load_checkpoint(run, state, mesh, {.allow_missing = true}).step, 5);
      load_pretrained(reference, *other.module, mesh);
      for (const auto& item : model.module->named_parameters()) {
        EXPECT_TRUE(at::equal(full_tensor(item.value()),
                              full_tensor(other.module->named_parameters()[item.key()])))
            << item.key();
      }
    });
    const Ran out = ckpt({"export", run, again, "--max_file_bytes=9000"});
    ASSERT_EQ(out.code, 0) << out.err;
    const Ran diff = ckpt({"diff", reference, again});
    EXPECT_EQ(diff.code, 0) << diff.out;
    const std::string half = temporary("half");
    EXPECT_EQ(ckpt({"export", run, half, "--dtype=bfloat16", "--config=" + reference}).code, 0);
    EXPECT_EQ(Json::parse(read_text(half + "/config.json"))["dtype"], "bfloat16");
    EXPECT_EQ(ckpt({"diff", reference, half}).code, 2);
  }
}

// What the configuration's model does not have is not left out without a word.
TEST(CkptTest, ExportsNoPartOfAModel) {
  const auto exported = [&](const char* kind, const char* key, const Json& value) {
    const std::string reference = std::string(kReferences) + kind, run = temporary("more");
    EXPECT_EQ(ckpt({"import", reference, run}).code, 0);
    Json config = Json::parse(read_text(reference + "/config.json"));
    config[key] = value;
    const std::string file = temporary("changed.json"), out = temporary("less");
    std::ofstream(file) << config;
    const Ran ran = ckpt({"export", run, out, "--config=" + file});
    EXPECT_EQ(ran.code, 1) << ran.out;
    EXPECT_FALSE(std::filesystem::exists(out));
    return ran.err;
  };
  EXPECT_THAT(exported("llama", "num_hidden_layers", 1),
              HasSubstr("unexpected: model.model.layers.1."));
  EXPECT_THAT(exported("mixtral", "tie_word_embeddings", true),
              HasSubstr("unexpected: model.lm_head.weight"));
}

// A head that is in the files and no copy, of a configuration by which it is one.
TEST(CkptTest, ImportsNoHeadAsAnEmbedding) {
  const std::string reference = std::string(kReferences) + "mixtral";
  Json config = Json::parse(read_text(reference + "/config.json"));
  config["tie_word_embeddings"] = true;
  const std::string file = temporary("tied.json"), run = temporary("tied_head");
  std::ofstream(file) << config;
  const Ran ran = ckpt({"import", reference, run, "--config=" + file});
  EXPECT_EQ(ran.code, 1) << ran.out;
  EXPECT_THAT(ran.err, AllOf(HasSubstr("differing: lm_head.weight"),
                             HasSubstr("set \"tie_word_embeddings\" to false")));
  EXPECT_FALSE(std::filesystem::exists(run));
}

TEST(CkptTest, ImportsWhatPyTorchHasSaved) {
  const std::string reference = kReferences;
  const std::string bin = temporary("of_bin"), dcp = temporary("of_dcp"),
                    plain = temporary("plain");
  EXPECT_EQ(ckpt({"diff", reference + "gpt2_bin/pytorch_model.bin", reference + "gpt2"}).code, 0);
  EXPECT_EQ(ckpt({"import", reference + "gpt2_bin", bin}).code, 0);
  EXPECT_EQ(ckpt({"export", bin, plain}).code, 0);
  EXPECT_EQ(ckpt({"diff", plain, reference + "gpt2"}).code, 0);
  // Under its own names: "model." is in them.
  const Ran ran = ckpt({"import", reference + "llama_dcp", dcp, "--prefix=", "--files=3"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  const std::string out = temporary("out_of_dcp");
  EXPECT_EQ(ckpt({"export", dcp, out, "--config=" + reference + "llama"}).code, 0);
  EXPECT_EQ(ckpt({"diff", out, reference + "llama"}).code, 0);
}

TEST(CkptTest, SaysWhatIsWrong) {
  const std::string run = saved_run("wrong"), nowhere = temporary("nowhere");
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{}, "wanted ckpt ls, ckpt show"},
      {{"list"}, "wanted ckpt ls"},
      {{"ls"}, "takes PATH, not 0 arguments"},
      {{"ls", nowhere}, "nowhere"},
      {{"show", run, "zzz"}, "no tensor with 'zzz'"},
      {{"diff", run}, "takes PATH PATH, not 1 argument"},
      {{"export", run, nowhere}, "no value \"config\""},
      {{"export", run, nowhere, "--config=" + std::string(kReferences) + "gpt2"},
       "missing: model.transformer.wte.weight"},
      {{"export", run, nowhere, "--config=none", "--prefix=other."}, "no tensor \"other."},
      {{"export", run, nowhere, "--config=none", "--dtype=int8"}, "--dtype=int8"},
      {{"export", std::string(kReferences) + "gpt2", nowhere}, "is no checkpoint"},
      {{"import", run, nowhere}, "nor one *.safetensors"},
      {{"import", std::string(kReferences) + "gpt2_bin", nowhere,
        "--config=" + std::string(kReferences) + "vit/config.json"},
       "missing: vit.embeddings"}};
  for (const auto& [args, message] : wrong) {
    const Ran ran = ckpt(args);
    EXPECT_EQ(ran.code, 1);
    EXPECT_THAT(ran.err, HasSubstr(message));
  }
  EXPECT_FALSE(std::filesystem::exists(nowhere));
  // Under the names that they have.
  EXPECT_EQ(ckpt({"export", run, nowhere, "--config=none"}).code, 0);
  EXPECT_EQ(ckpt({"show", nowhere, "--json"}).json()["tensors"].size(), 2u);
}

}  // namespace
