// Models of Hugging Face through C: logits are those that transformers has computed, on every mesh, and what is
// written is what was read.
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "capi/testing/host_model.h"
#include "capi/testing/on_mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave.h"
#include "shardweave/capi/handles.h"
#include "shardweave/dtensor/dtensor.h"

namespace {

using namespace c_test;  // NOLINT: this file is a test in it

using ::testing::AllOf;
using ::testing::HasSubstr;
using Safetensors = Held<swv_safetensors, swv_safetensors_free>;

std::string reference(const std::string& kind) {
  return "modules/hugging_face/references/" + kind;
}
std::string new_directory(const std::string& name) {
  const std::string path = ::testing::TempDir() + "/c_pretrained_" + name;
  std::filesystem::remove_all(path);
  return path;
}
std::string config_of(const std::string& kind) {
  swv_string* json = nullptr;
  ok(swv_read_pretrained_config(reference(kind).c_str(), 0, &json));
  return text_of(json);
}
at::Tensor stored(const std::string& path, const char* name) {
  Safetensors file;
  Tensor tensor;
  ok(swv_safetensors_open(path.c_str(), file.out()));
  ok(swv_safetensors_read(file, name, nullptr, nullptr, 0, tensor.out()));
  return tensor->tensor;
}
// What transformers was given, and what it gave.
at::Tensor inputs_of(const std::string& kind) {
  return stored("modules/nn/references/" + kind + ".safetensors", "inputs")[0].contiguous();
}
at::Tensor logits_of(const std::string& kind) {
  return stored("modules/nn/references/" + kind + ".safetensors", "logits");
}
at::Tensor logits(swv_module* module, const at::Tensor& inputs) {
  Tensor x;
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  options.dtype = inputs.scalar_type() == at::kLong ? SWV_DTYPE_I64 : SWV_DTYPE_F32;
  ok(swv_tensor_from_data(inputs.data_ptr(), inputs.nbytes(), inputs.sizes().data(),
                          inputs.sizes().size(), &options, x.out()));
  const swv_value argument = swv_value_tensor(x);
  swv_value y = SWV_NONE;
  ok(swv_module_train(module, 0));
  ok(swv_module_call(module, "forward", SWV_MODE_NO_GRAD, &argument, 1, &y, 1, nullptr));
  const at::Tensor result = whole(y.as.tensor->tensor);
  swv_value_clear(&y);
  return result;
}
void make(const std::string& kind, swv_mesh* mesh, bool cut, Module& module) {
  ok(swv_module_create_by_kind(kind.c_str(), config_of(kind).c_str(), module.out()));
  Plan plan;
  if (cut) ok(swv_plan_from_zoo(nullptr, config_of(kind).c_str(), mesh, nullptr, plan.out()));
  ok(swv_module_distribute(module, mesh, plan, nullptr));
}
void expect_logits(swv_module* module, const std::string& kind) {
  const at::Tensor want = logits_of(kind);
  EXPECT_LE((logits(module, inputs_of(kind)) - want).abs().max().item<double>(),
            1e-5 * (1 + want.abs().max().item<double>()))
      << kind;
}

TEST(PretrainedTest, LogitsAreThoseOfTransformersAndFilesComeBack) {
  for (const std::string kind : {"llama", "gpt2", "mixtral", "vit"}) {
    for (const std::string mesh_text : {"dp=1", "tp=2", "dp=2,tp=2"}) {
      SCOPED_TRACE(kind + " on " + mesh_text);
      const std::string saved = new_directory(kind), half = new_directory(kind + "_half");
      on_mesh(mesh_text.c_str(), [&](swv_mesh* mesh) {
        Module module;
        make(kind, mesh, mesh_text != "dp=1", module);
        swv_string* json = nullptr;
        ok(swv_module_load_pretrained(module, reference(kind).c_str(), mesh, nullptr, &json));
        EXPECT_THAT(text_of(json), AllOf(HasSubstr("\"kind\":\"" + kind + "\""),
                                         HasSubstr("\"missing\":[],\"unexpected\":[]")));
        expect_logits(module, kind);
        swv_save_pretrained_options options = SWV_SAVE_PRETRAINED_OPTIONS_INIT;
        options.max_file_bytes = 9000;
        ok(swv_module_save_pretrained(module, saved.c_str(), config_of(kind).c_str(), mesh,
                                      &options));
        options.dtype = SWV_DTYPE_BF16;
        ok(swv_module_save_pretrained(module, half.c_str(), config_of(kind).c_str(), mesh,
                                      &options));
        message_of(swv_module_save_pretrained(module, half.c_str(), config_of(kind).c_str(), mesh,
                                              nullptr),
                   SWV_CODE_ALREADY_EXISTS);
      });
      Safetensors before, after, halved;
      ok(swv_safetensors_open(reference(kind).c_str(), before.out()));
      ok(swv_safetensors_open(saved.c_str(), after.out()));
      ok(swv_safetensors_open(half.c_str(), halved.out()));
      size_t count = 0, again = 0;
      ok(swv_safetensors_num_tensors(before, &count));
      ok(swv_safetensors_num_tensors(after, &again));
      EXPECT_EQ(count, again);
      for (size_t i = 0; i < count; ++i) {
        swv_string* name = nullptr;
        swv_dtype dtype = 0;
        ok(swv_safetensors_tensor(before, i, &name, nullptr, nullptr, 0, nullptr));
        ok(swv_safetensors_tensor(halved, i, nullptr, &dtype, nullptr, 0, nullptr));
        EXPECT_EQ(dtype, SWV_DTYPE_BF16);
        Tensor a, b;
        ok(swv_safetensors_read(before, swv_string_data(name), nullptr, nullptr, 0, a.out()));
        ok(swv_safetensors_read(after, swv_string_data(name), nullptr, nullptr, 0, b.out()));
        EXPECT_TRUE(at::equal(a->tensor, b->tensor)) << text_of(name);
      }
    }
  }
}

TEST(PretrainedTest, FullyShardedAndDeferred) {
  on_mesh("dp=3", [&](swv_mesh* mesh) {
    Module module;
    {
      Scope scope;
      ok(swv_deferred_init(scope.out()));
      ok(swv_module_create_by_kind("llama", config_of("llama").c_str(), module.out()));
    }
    EXPECT_THAT(message_of(swv_module_load_pretrained(module, reference("llama").c_str(), mesh,
                                                      nullptr, nullptr),
                           SWV_CODE_FAILED_PRECONDITION),
                HasSubstr("swv_module_load_pretrained: "));
    ok(swv_module_materialize(module, nullptr));
    ok(swv_module_fully_shard(module, mesh, nullptr, nullptr, nullptr));
    ok(swv_module_load_pretrained(module, reference("llama").c_str(), mesh, nullptr, nullptr));
    expect_logits(module, "llama");
  });
}

// The host's own modules, with the same names; what torch.save and torch.distributed.checkpoint have written.
TEST(PretrainedTest, ModulesOfTheHostAndFilesOfPyTorch) {
  on_mesh("tp=2", [&](swv_mesh* mesh) {
    for (const std::string kind : {"gpt2", "llama"}) {
      Module library, host, around;
      make(kind, mesh, true, library);
      ok(swv_module_load_pretrained(library, reference(kind).c_str(), mesh, nullptr, nullptr));
      ok(swv_module_create(host.out()));
      ok(swv_module_create(around.out()));
      std::vector<std::string> names;
      std::vector<at::Tensor> wanted;
      for (const auto& [name, tensor] : parameters_of(library)) {
        Tensor zeros;
        ok(swv_tensor_zeros(tensor.sizes().data(), tensor.sizes().size(), nullptr, zeros.out()));
        ok(swv_module_add_parameter(host, name.c_str(), zeros));
        wanted.push_back(whole(tensor));
      }
      const bool is_gpt2 = kind == "gpt2";
      if (is_gpt2) {  // tied
        Tensor wte;
        ok(swv_module_get(host, "transformer.wte.weight", wte.out()));
        ok(swv_module_add_parameter(host, "lm_head.weight", wte));
      }
      // DCP's are "model.", and then the names.
      ok(swv_module_add_child(around, "model", host));
      ok(swv_module_distribute(around, mesh, nullptr, nullptr));
      swv_string* json = nullptr;
      ok(swv_module_load_pretrained(is_gpt2 ? host : around,
                                    reference(is_gpt2 ? "gpt2_bin" : "llama_dcp").c_str(), mesh,
                                    nullptr, &json));
      EXPECT_THAT(text_of(json), HasSubstr(is_gpt2 ? "\"kind\":\"gpt2\"" : "\"kind\":\"\""));
      const Values got = parameters_of(host);
      ASSERT_EQ(got.size(), wanted.size());
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(at::equal(whole(got[i].second), wanted[i])) << got[i].first;
      }
    }
  });
}

TEST(PretrainedTest, MistakesAreErrorsOnAllRanksAndChangeNothing) {
  const std::string odd = new_directory("odd"), nowhere = new_directory("nowhere");
  std::filesystem::create_directory(odd);
  std::string config = config_of("gpt2");
  config.insert(config.find('{') + 1, "\"quite_new\": 3,");
  std::ofstream(odd + "/config.json") << config;
  swv_string* json = nullptr;
  EXPECT_THAT(message_of(swv_read_pretrained_config(odd.c_str(), 0, &json)),
              AllOf(HasSubstr("swv_read_pretrained_config: "), HasSubstr("quite_new")));
  ok(swv_read_pretrained_config(odd.c_str(), 1, &json));
  EXPECT_EQ(text_of(json), config);
  message_of(swv_read_pretrained_config(odd.c_str(), 2, &json));
  message_of(swv_read_pretrained_config(nowhere.c_str(), 0, &json), SWV_CODE_NOT_FOUND);
  std::filesystem::copy_file(std::filesystem::canonical(reference("gpt2") + "/model.safetensors"),
                             odd + "/model.safetensors");
  on_mesh("tp=2", [&](swv_mesh* mesh) {
    Module gpt2, llama;
    make("gpt2", mesh, true, gpt2);
    make("llama", mesh, false, llama);
    const Values before = parameters_of(llama);
    std::vector<at::Tensor> values;
    for (const auto& [name, tensor] : before) values.push_back(whole(tensor));
    swv_load_pretrained_options load = SWV_LOAD_PRETRAINED_OPTIONS_INIT;
    const auto loads = [&](swv_module* module, const std::string& path) {
      return swv_module_load_pretrained(module, path.c_str(), mesh, &load, nullptr);
    };
    EXPECT_THAT(message_of(loads(gpt2, odd)), HasSubstr("quite_new"));
    load.allow_unknown = 1;
    ok(loads(gpt2, odd));
    expect_logits(gpt2, "gpt2");
    EXPECT_THAT(message_of(loads(llama, odd)),
                AllOf(HasSubstr("swv_module_load_pretrained: "), HasSubstr("missing: "),
                      HasSubstr("unexpected: ")));
    message_of(loads(llama, nowhere), SWV_CODE_NOT_FOUND);
    message_of(loads(llama, ""), SWV_CODE_NOT_FOUND);
    EXPECT_THAT(message_of(loads(mesh->mesh->rank().value == 0 ? gpt2 : llama, reference("gpt2"))),
                HasSubstr("not the same on ranks 0 and 1"));
    load.allow_missing = 3;
    EXPECT_THAT(message_of(loads(llama, odd)), HasSubstr("options.allow_missing"));
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_TRUE(at::equal(whole(before[i].second), values[i])) << before[i].first;
    }
    load.allow_missing = load.allow_unexpected = 1;
    swv_string* told = nullptr;
    ok(swv_module_load_pretrained(llama, odd.c_str(), mesh, &load, &told));
    EXPECT_THAT(text_of(told),
                AllOf(HasSubstr("\"missing\":[\""), HasSubstr("\"unexpected\":[\"")));

    swv_save_pretrained_options save = SWV_SAVE_PRETRAINED_OPTIONS_INIT;
    const auto saves = [&](swv_module* module, const std::string& text) {
      return swv_module_save_pretrained(module, nowhere.c_str(), text.c_str(), mesh, &save);
    };
    EXPECT_THAT(message_of(saves(llama, config_of("gpt2"))),
                HasSubstr("the configuration is of another model"));
    message_of(saves(llama, "{"));
    save.max_file_bytes = 0;
    EXPECT_THAT(message_of(saves(llama, config_of("llama"))), HasSubstr("options.max_file_bytes"));
    save.max_file_bytes = 1;
    save.dtype = SWV_DTYPE_I64;
    EXPECT_THAT(message_of(saves(llama, config_of("llama"))), HasSubstr("options.dtype"));
    save.dtype = 99;
    EXPECT_THAT(message_of(saves(llama, config_of("llama"))), HasSubstr("options.dtype"));
    EXPECT_FALSE(std::filesystem::exists(nowhere));
  });
}

}  // namespace
