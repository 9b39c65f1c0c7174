// A rank that gives a bad argument to a call of all ranks ends it on all of them, at once and before
// anything has changed.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "capi/testing/host_model.h"
#include "capi/testing/on_mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave.h"

namespace {

using namespace c_test;  // NOLINT: this file is a test in it

using ::testing::HasSubstr;
using Checkpointer = Held<swv_checkpointer, swv_checkpointer_free>;
using Loader = Held<swv_loader, swv_loader_free>;
using State = Held<swv_state, swv_state_free>;
using TokenFile = Held<swv_token_file, swv_token_file_free>;

struct Case {
  const char* argument;  // as the rank that has given it is told
  // Makes the call, with the bad argument or a good one.
  std::function<swv_status*(swv_mesh* mesh, bool is_bad)> call;
};

// `code`: of the bad argument's.
void expect_refused_together(const std::string& name, const Case& each,
                             swv_code code = SWV_CODE_INVALID_ARGUMENT) {
  SCOPED_TRACE(name);
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    int64_t rank = 0;
    size_t ndim = 0;
    ok(swv_mesh_coordinate(mesh, &rank, 1, &ndim));
    for (const int64_t who : {1, 0}) {
      if (rank == who) {
        EXPECT_THAT(message_of(each.call(mesh, true), code), HasSubstr(each.argument));
      } else {
        EXPECT_THAT(message_of(each.call(mesh, false), SWV_CODE_INVALID_ARGUMENT),
                    HasSubstr("refused on other ranks"));
      }
    }
    ok(each.call(mesh, false));  // as if nothing had been
  });
}

// Of one module on each rank, whichever call it is.
Case of_module(const char* argument,
               std::function<swv_status*(swv_module*, swv_mesh*, bool is_bad)> call) {
  return {argument, [call = std::move(call)](swv_mesh* mesh, bool is_bad) {
            Module module;
            make_model(module);
            return call(module, mesh, is_bad);
          }};
}

TEST(RefusedTogetherTest, WhatShards) {
  expect_refused_together("distribute",
                          of_module("'options.source'", [](auto* module, auto* mesh, bool is_bad) {
                            swv_distribute_options options = SWV_DISTRIBUTE_OPTIONS_INIT;
                            options.source = is_bad ? -2 : 0;
                            return swv_module_distribute(module, mesh, nullptr, &options);
                          }));
  expect_refused_together(
      "fully_shard", of_module("'options.units[0]'", [](auto* module, auto* mesh, bool is_bad) {
        swv_fully_shard_options options = SWV_FULLY_SHARD_OPTIONS_INIT;
        const char* const units[] = {is_bad ? nullptr : "blocks.*"};
        options.units = units;
        options.num_units = 1;
        return swv_module_fully_shard(module, mesh, &options, nullptr, nullptr);
      }));
  expect_refused_together(
      "distributed_data_parallel",
      of_module("'options.sync.bucket_bytes'", [](auto* module, auto* mesh, bool is_bad) {
        swv_grad_sync_options buckets = SWV_GRAD_SYNC_OPTIONS_INIT;
        buckets.bucket_bytes = is_bad ? 0 : 100;
        swv_data_parallel_options options = SWV_DATA_PARALLEL_OPTIONS_INIT;
        options.sync = &buckets;
        Sync sync;
        return swv_module_distributed_data_parallel(module, mesh, &options, sync.out());
      }));
  using WithDim = swv_status* (*)(swv_module*, const swv_mesh*, const char*);
  const std::pair<const char*, WithDim> kWithDim[] = {
      {"pre_dp_transform",
       [](swv_module* module, const swv_mesh* mesh, const char* dim) {
         return swv_module_pre_dp_transform(module, mesh, dim, 0);
       }},
      {"broadcast_buffers", swv_module_broadcast_buffers},
  };
  for (const auto& [name, call] : kWithDim) {
    expect_refused_together(
        name, of_module("'mesh_dim'", [call = call](auto* module, auto* mesh, bool is_bad) {
          return call(module, mesh, is_bad ? "" : "dp");
        }));
  }
}

TEST(RefusedTogetherTest, WhatReadsAndWritesFiles) {
  const std::string path = ::testing::TempDir() + "/c_refused_together";
  std::filesystem::remove_all(path);
  const auto with_state = [](const std::function<swv_status*(swv_state*)>& call) {
    Module module;
    State state;
    make_model(module);
    ok(swv_state_create(state.out()));
    ok(swv_state_add_module(state, nullptr, module));
    return call(state);
  };
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    Checkpointer checkpointer;
    ok(swv_checkpointer_create(mesh, path.c_str(), nullptr, checkpointer.out()));
    ok(with_state([&](swv_state* state) { return swv_checkpointer_save(checkpointer, 1, state); }));
  });
  expect_refused_together("load", {"'path'", [&](swv_mesh* mesh, bool is_bad) {
                                     return with_state([&](swv_state* state) {
                                       return swv_state_load(state, is_bad ? nullptr : path.c_str(),
                                                             mesh, nullptr, nullptr, nullptr);
                                     });
                                   }});
  expect_refused_together(
      "Checkpointer::load",
      {"'options.cast'", [&](swv_mesh* mesh, bool bad) {
         swv_load_options options = SWV_LOAD_OPTIONS_INIT;
         options.cast = bad ? 7 : 0;
         Checkpointer checkpointer;
         ok(swv_checkpointer_create(mesh, path.c_str(), nullptr, checkpointer.out()));
         return with_state([&](swv_state* state) {
           return swv_checkpointer_load(checkpointer, state, &options, nullptr, nullptr);
         });
       }});
  const std::string tokens = path + "/tokens.bin";
  std::ofstream(tokens) << std::string(1000, '7');
  expect_refused_together("loader",
                          {"'options.part'", [&](swv_mesh* mesh, bool is_bad) {
                             TokenFile file;
                             Loader loader;
                             ok(swv_token_file_open(tokens.c_str(), SWV_DTYPE_U8, file.out()));
                             swv_loader_options options = SWV_LOADER_OPTIONS_INIT;
                             options.mesh = mesh;
                             options.seq = options.batch = 4;
                             options.part = is_bad ? 1 : 0;
                             const swv_token_file* const files[] = {file};
                             return swv_loader_create(files, 1, &options, loader.out());
                           }});
}

TEST(RefusedTogetherTest, WhatSaves) {
  for (const bool async : {false, true}) {
    for (const bool skips : {false, true}) {
      const std::string path = ::testing::TempDir() + "/c_refused_together_saves" +
                               (async ? "_async" : "") + (skips ? "_skips" : "");
      std::filesystem::remove_all(path);
      expect_refused_together(
          async ? "save_async" : "save",
          {"'state'", [&](swv_mesh* mesh, bool is_bad) {
             Checkpointer checkpointer;
             swv_checkpointer_options options = SWV_CHECKPOINTER_OPTIONS_INIT;
             options.skip_if_busy = skips ? 1 : 0;
             ok(swv_checkpointer_create(mesh, path.c_str(), &options, checkpointer.out()));
             Module module;
             State state;
             make_model(module);
             ok(swv_state_create(state.out()));
             ok(swv_state_add_module(state, nullptr, module));
             swv_state* const whole = state;
             const swv_state* const given = is_bad ? nullptr : whole;
             return async ? swv_checkpointer_save_async(checkpointer, 1, given, nullptr)
                          : swv_checkpointer_save(checkpointer, 1, given);
           }});
    }
  }
}

TEST(RefusedTogetherTest, WhatReadsPretrained) {
  const std::string path = ::testing::TempDir() + "/c_refused_together_pretrained";
  constexpr char kConfig[] =
      R"({"model_type": "gpt2", "vocab_size": 9, "n_positions": 4, "n_embd": 4,
          "n_layer": 1, "n_head": 2})";
  std::filesystem::remove_all(path);
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    Module model;
    ok(swv_module_create_by_kind("gpt2", kConfig, model.out()));
    ok(swv_module_distribute(model, mesh, nullptr, nullptr));
    ok(swv_module_save_pretrained(model, path.c_str(), kConfig, mesh, nullptr));
  });
  const auto load = [&](bool without_path, bool is_flag) -> Case {
    return {is_flag        ? "'options.allow_missing'"
            : without_path ? "'path'"
                           : "'module'",
            [=](swv_mesh* mesh, bool is_bad) {
              Module model;
              ok(swv_module_create_by_kind("gpt2", kConfig, model.out()));
              ok(swv_module_distribute(model, mesh, nullptr, nullptr));
              swv_module* const whole = model;
              swv_load_pretrained_options options = SWV_LOAD_PRETRAINED_OPTIONS_INIT;
              options.allow_missing = is_bad && is_flag ? 7 : 0;
              return swv_module_load_pretrained(
                  is_bad && !without_path && !is_flag ? nullptr : whole,
                  is_bad && without_path ? nullptr : path.c_str(), mesh, &options, nullptr);
            }};
  };
  expect_refused_together("a path", load(true, false));
  expect_refused_together("a module", load(false, false));
  expect_refused_together("an option", load(false, true));
}

TEST(RefusedTogetherTest, WhatIsMadeAndWhatIsWhole) {
  const auto distribute = [](swv_module* module, swv_mesh* mesh) {
    Plan plan;
    ok(swv_plan_from_json(R"x({"parameter": {"*.up.weight": {"dp": "S(0)"}}})x", plan.out()));
    ok(swv_module_distribute(module, mesh, plan, nullptr));
  };
  expect_refused_together("materialize",
                          {"'options.has_seed'", [&](swv_mesh* mesh, bool is_bad) {
                             Module module;
                             {
                               Scope deferred;
                               ok(swv_deferred_init(deferred.out()));
                               Tensor weight;
                               const int64_t sizes[] = {6, 4};
                               ok(swv_tensor_ones(sizes, 2, nullptr, weight.out()));
                               ok(swv_module_create(module.out()));
                               ok(swv_module_add_parameter(module, "a.up.weight", weight));
                             }
                             distribute(module, mesh);
                             swv_materialize_options options = SWV_MATERIALIZE_OPTIONS_INIT;
                             options.has_seed = is_bad ? 7 : 0;
                             return swv_module_materialize(module, &options);
                           }});
  for (const char* const argument : {"'rank'", "'writeback'"}) {
    expect_refused_together(
        "full_params", of_module(argument, [=](auto* module, auto* mesh, bool is_bad) {
          ok(swv_module_fully_shard(module, mesh, nullptr, nullptr, nullptr));
          Scope scope;
          const bool is_rank = std::string(argument) == "'rank'";
          return swv_module_full_params(module, is_bad && !is_rank ? 7 : 0,
                                        is_bad && is_rank ? -2 : -1, scope.out());
        }));
  }
}

// An optimizer of one parameter, that lies on the mesh.
void make_optimizer(swv_mesh* mesh, Optimizer& optimizer, Tensor& like) {
  const int64_t sizes[] = {7, 5};
  swv_tensor_options on = SWV_TENSOR_OPTIONS_INIT;
  on.requires_grad = 1;
  on.mesh = mesh;
  ok(swv_tensor_ones(sizes, 2, &on, like.out()));
  swv_tensor* const parameters[] = {like};
  ok(swv_optimizer_create_adamw(parameters, 1, nullptr, optimizer.out()));
}

TEST(RefusedTogetherTest, WhatOptimizersDo) {
  expect_refused_together("use_zero", {"struct_size", [&](swv_mesh* mesh, bool is_bad) {
                                         Optimizer optimizer;
                                         Tensor parameter;
                                         make_optimizer(mesh, optimizer, parameter);
                                         swv_zero_options options = SWV_ZERO_OPTIONS_INIT;
                                         if (is_bad) options.struct_size = 1;
                                         return swv_optimizer_use_zero(optimizer, &options);
                                       }});
  expect_refused_together("use_zero",
                          {"has made steps",
                           [&](swv_mesh* mesh, bool is_bad) {
                             Optimizer optimizer;
                             Tensor parameter, state;
                             make_optimizer(mesh, optimizer, parameter);
                             if (is_bad) ok(swv_optimizer_state(optimizer, 0, "step", state.out()));
                             return swv_optimizer_use_zero(optimizer, nullptr);
                           }},
                          SWV_CODE_FAILED_PRECONDITION);
  struct Given {
    const char* argument;
    size_t index;
    const char* name;
    bool has_tensor;
    swv_code code;
  };
  for (const Given& bad : {Given{"'name'", 0, nullptr, true, SWV_CODE_INVALID_ARGUMENT},
                           Given{"'no_state'", 0, "no_state", true, SWV_CODE_NOT_FOUND},
                           Given{"parameter 1 of 1", 1, "exp_avg", true, SWV_CODE_OUT_OF_RANGE},
                           Given{"'name'", 1, nullptr, true, SWV_CODE_INVALID_ARGUMENT},
                           Given{"'tensor'", 0, "exp_avg", false, SWV_CODE_INVALID_ARGUMENT}}) {
    expect_refused_together("set_state",
                            {bad.argument,
                             [&](swv_mesh* mesh, bool is_bad) {
                               Optimizer optimizer;
                               Tensor parameter;
                               make_optimizer(mesh, optimizer, parameter);
                               if (!is_bad) {
                                 return swv_optimizer_set_state(optimizer, 0, "exp_avg", parameter);
                               }
                               const swv_tensor* value = nullptr;
                               if (bad.has_tensor) value = parameter;
                               return swv_optimizer_set_state(optimizer, bad.index, bad.name,
                                                              value);
                             }},
                            bad.code);
  }
}

}  // namespace
