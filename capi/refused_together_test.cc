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

}  // namespace
