// Data parallelism through C: as one rank trains, gradients through the host's function, PowerSGD's state,
// ranks that run out of input.
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "capi/testing/host_model.h"
#include "capi/testing/on_mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave.h"
#include "shardweave/capi/handles.h"
#include "shardweave/dtensor/dtensor.h"

namespace {

using namespace c_test;  // NOLINT: this file is a test in it

using ::testing::HasSubstr;

const Steps& of_one_rank() {
  static const Steps* const steps = [] {
    Module alone;
    make_model(alone);
    return new Steps(train(alone, nullptr));
  }();
  return *steps;
}
void expect_one_ranks(const Steps& got, const std::string& where) {
  for (int step = 0; step < kSteps; ++step) {
    const std::string place = where + ", step " + std::to_string(step);
    expect_close(got[step].second, of_one_rank()[step].second, place + ", gradients");
    expect_close(got[step].first, of_one_rank()[step].first, place);
  }
}

TEST(DataParallelTest, TrainsAsOneRank) {
  for (const char* text : {"dp=1", "dp=2", "dp=3", "dp=2,tp=2"}) {
    on_mesh(text, [&](swv_mesh* mesh) {
      Module module;
      Plan plan;
      Sync sync;
      make_model(module);
      swv_data_parallel_options options = SWV_DATA_PARALLEL_OPTIONS_INIT;
      swv_grad_sync_options buckets = SWV_GRAD_SYNC_OPTIONS_INIT;
      buckets.bucket_bytes = 300;
      options.mesh_dim = "dp";
      options.sync = &buckets;
      if (std::strstr(text, "tp") != nullptr) {
        ok(swv_plan_from_json(R"json({"parameter": {"blocks.*.up.*": {"tp": "S(0)"},
                                                    "blocks.*.down.weight": {"tp": "S(1)"}}})json",
                              plan.out()));
        ok(swv_module_distribute(module, mesh, plan, nullptr));
        ok(swv_module_enable_2d_with_fsdp(module, mesh, "dp"));
      }
      ok(swv_module_distributed_data_parallel(module, mesh, &options, sync.out()));
      expect_one_ranks(train(module, mesh), text);
      int64_t left = 0;
      ok(swv_grad_sync_counts(sync, nullptr, &left));
      EXPECT_GT(left, 0);
      Sync again;
      EXPECT_THAT(
          message_of(swv_module_distributed_data_parallel(module, mesh, nullptr, again.out()),
                     SWV_CODE_FAILED_PRECONDITION),
          HasSubstr("made data parallel once"));
      EXPECT_THAT(message_of(swv_grad_sync_num_states(sync, nullptr), SWV_CODE_INVALID_ARGUMENT),
                  HasSubstr("'out_num' is NULL"));
      size_t none = 0;
      EXPECT_THAT(message_of(swv_grad_sync_num_states(sync, &none), SWV_CODE_FAILED_PRECONDITION),
                  HasSubstr("without power_sgd"));
      ok(swv_module_broadcast_buffers(module, mesh, nullptr));
    });
  }
}

// What an all-reduce does, by the host.
struct Host {
  int begun = 0, finished = 0, dropped = 0, threads = 0;
  bool fails = false;
  std::vector<std::string> parameters;
  swv_grad_sync* sync = nullptr;  // its own, which it may ask
};
swv_status* begin(void* data, const swv_gradient_bucket* bucket) {
  Host& host = *static_cast<Host*>(data);
  ++host.begun;
  EXPECT_EQ(bucket->struct_size, SWV_SIZE_TO(swv_gradient_bucket, is_discarded));
  for (size_t i = 0; i < bucket->num_gradients; ++i) {
    host.parameters.emplace_back(bucket->parameters[i]);
    EXPECT_TRUE(bucket->gradients[i]->tensor.is_alias_of(bucket->flat->tensor));
  }
  if (host.sync == nullptr) return nullptr;
  int64_t buckets = -1;
  swv_scope* scope = nullptr;
  ok(swv_grad_sync_counts(host.sync, &buckets, nullptr));
  EXPECT_GE(buckets, 0);
  ok(swv_grad_sync_no_sync(host.sync, &scope));
  swv_scope_free(scope);
  return nullptr;
}
swv_status* finish(void* data, const swv_gradient_bucket* bucket) {
  Host& host = *static_cast<Host*>(data);
  ++host.finished;
  if (host.fails) return swv_status_new(SWV_CODE_OUT_OF_RANGE, "no more today");
  swv_buffer buffer = SWV_BUFFER_INIT;
  if (swv_status* status = swv_tensor_buffer(bucket->flat, &buffer)) return status;
  return swv_comm_all_reduce(bucket->comm, &buffer, &buffer, SWV_REDUCE_SUM, nullptr, nullptr);
}
void drop(void* data) {
  ++static_cast<Host*>(data)->dropped;
}
swv_gradient_hook hook_of(Host& host) {
  swv_gradient_hook hook = SWV_GRADIENT_HOOK_INIT;
  hook.name = "by the host";
  hook.user_data = &host;
  hook.begin = begin;
  hook.finish = finish;
  hook.drop = drop;
  return hook;
}

TEST(DataParallelTest, GradientsThroughTheHostsFunction) {
  for (const bool fails : {false, true}) {
    on_mesh("dp=3", [&](swv_mesh* mesh) {
      Host host;
      {
        Module module;
        Sync sync;
        make_model(module);
        const swv_gradient_hook hook = hook_of(host);
        swv_data_parallel_options options = SWV_DATA_PARALLEL_OPTIONS_INIT;
        swv_grad_sync_options how = SWV_GRAD_SYNC_OPTIONS_INIT;
        how.bucket_bytes = 400;
        how.hook = &hook;
        options.sync = &how;
        ok(swv_module_distributed_data_parallel(module, mesh, &options, sync.out()));
        host.sync = sync;
        if (!fails) {
          expect_one_ranks(train(module, mesh), "a hook");
          EXPECT_GT(host.begun, 2 * kSteps);
          EXPECT_EQ(host.begun, host.finished);
          EXPECT_EQ(host.parameters.size(), kSteps * shapes().size());
        } else {
          int32_t coordinate = 0;
          coordinate = static_cast<int32_t>(mesh->mesh->coordinate()[0]);
          host.fails = coordinate == 1;
          Tensor x, y, loss;
          feed(0, false, mesh, x);
          forward(module, x, y);
          call("aten::sum", {swv_value_tensor(y)}, loss);
          ok(swv_tensor_backward(loss, nullptr, nullptr));
          EXPECT_THAT(
              message_of(swv_module_finish_grad_sync(module),
                         host.fails ? SWV_CODE_OUT_OF_RANGE : SWV_CODE_ABORTED),
              HasSubstr(host.fails ? "by the host.finish: no more today" : "'by the host' failed"));
        }
        EXPECT_EQ(host.dropped, 0);
      }
      EXPECT_EQ(host.dropped, 1);
    });
  }
}

// The bucket's rank may be on another thread by now.
TEST(DataParallelTest, GradientsAreFinishedAsAnyCallRuns) {
  const int before = at::get_num_threads();
  ok(swv_set_num_threads(before + 2));
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    for (const bool of_module : {false, true}) {
      Host host;
      Module module;
      Sync sync;
      make_model(module);
      swv_gradient_hook hook = hook_of(host);
      hook.finish = [](void* data, const swv_gradient_bucket* bucket) {
        static_cast<Host*>(data)->threads = at::get_num_threads();
        return finish(data, bucket);
      };
      swv_data_parallel_options options = SWV_DATA_PARALLEL_OPTIONS_INIT;
      swv_grad_sync_options how = SWV_GRAD_SYNC_OPTIONS_INIT;
      how.hook = &hook;
      options.sync = &how;
      ok(swv_module_distributed_data_parallel(module, mesh, &options, sync.out()));
      Tensor x, y, loss;
      feed(0, false, mesh, x);
      forward(module, x, y);
      call("aten::sum", {swv_value_tensor(y)}, loss);
      ok(swv_tensor_backward(loss, nullptr, nullptr));
      std::vector<swv_tensor*> all;
      std::vector<Tensor> held(shapes().size());
      for (size_t i = 0; i < held.size(); ++i) {
        ok(swv_module_get(module, shapes()[i].first.c_str(), held[i].out()));
        all.push_back(held[i]);
      }
      std::thread([&] {
        at::set_num_threads(1);  // as a thread of the host's may have it
        of_module ? ok(swv_module_finish_grad_sync(module))
                  : ok(swv_finish_grad_sync(all.data(), all.size()));
      }).join();
      EXPECT_EQ(host.threads, before + 2) << of_module;
    }
  });
  ok(swv_set_num_threads(before));
}

TEST(DataParallelTest, WhatIsRefusedIsDroppedOnce) {
  on_mesh("dp=1", [&](swv_mesh* mesh) {
    Module module;
    make_model(module);
    ok(swv_module_pre_dp_transform(module, mesh, "dp", 0));
    int expected = 0;
    Host host;
    const auto refused = [&](const std::string& text, swv_code code, auto change) {
      swv_gradient_hook hook = hook_of(host);
      swv_grad_sync_options how = SWV_GRAD_SYNC_OPTIONS_INIT;
      how.hook = &hook;
      swv_power_sgd_options power_sgd = SWV_POWER_SGD_OPTIONS_INIT;
      change(hook, how, power_sgd);
      Sync sync;
      EXPECT_THAT(message_of(swv_grad_sync_create(module, &how, sync.out()), code),
                  HasSubstr(text));
      if (how.hook != nullptr) ++expected;
      EXPECT_EQ(host.dropped, expected) << text;
    };
    using Hook = swv_gradient_hook;
    using Sgd = swv_power_sgd_options;
    using How = swv_grad_sync_options;
    refused("'options.bucket_bytes' is 0", SWV_CODE_INVALID_ARGUMENT,
            [](Hook&, How& how, Sgd&) { how.bucket_bytes = 0; });
    refused("'options.hook.finish' is NULL", SWV_CODE_INVALID_ARGUMENT,
            [](Hook& hook, How&, Sgd&) { hook.finish = nullptr; });
    refused("'options.power_sgd' is given", SWV_CODE_INVALID_ARGUMENT,
            [](Hook&, How& how, Sgd& sgd) { how.power_sgd = &sgd; });
    refused("rank is 0", SWV_CODE_INVALID_ARGUMENT, [](Hook&, How& how, Sgd& sgd) {
      how.hook = nullptr;
      how.power_sgd = &sgd;
      sgd.columns = 0;
    });
    refused("'options.power_sgd.warm_start' is 7", SWV_CODE_INVALID_ARGUMENT,
            [](Hook&, How& how, Sgd& sgd) {
              how.hook = nullptr;
              how.power_sgd = &sgd;
              sgd.warm_start = 7;
            });
    swv_gradient_hook hook = hook_of(host);
    swv_grad_sync_options how = SWV_GRAD_SYNC_OPTIONS_INIT;
    swv_data_parallel_options options = SWV_DATA_PARALLEL_OPTIONS_INIT;
    how.hook = &hook;
    options.sync = &how;
    options.reserved = 1;
    Sync sync;
    EXPECT_THAT(message_of(swv_module_distributed_data_parallel(module, mesh, &options, sync.out()),
                           SWV_CODE_INVALID_ARGUMENT),
                HasSubstr("'options.reserved'"));
    EXPECT_EQ(host.dropped, expected + 1);
  });
}

TEST(DataParallelTest, PowerSgdAndWhatItHasLearned) {
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    Module module;
    Sync sync;
    make_model(module);
    swv_data_parallel_options options = SWV_DATA_PARALLEL_OPTIONS_INIT;
    swv_grad_sync_options how = SWV_GRAD_SYNC_OPTIONS_INIT;
    swv_power_sgd_options power_sgd = SWV_POWER_SGD_OPTIONS_INIT;
    power_sgd.columns = 1;
    power_sgd.start_iteration = 1;
    how.power_sgd = &power_sgd;
    options.sync = &how;
    ok(swv_module_distributed_data_parallel(module, mesh, &options, sync.out()));
    const Steps got = train(module, mesh);
    expect_close(got[0].second, of_one_rank()[0].second, "not compressed yet");
    size_t count = 0;
    ok(swv_grad_sync_num_states(sync, &count));
    std::map<std::string, at::Tensor> states;
    std::vector<Tensor> tensors(count);
    std::vector<std::string> names;
    for (size_t i = 0; i < count; ++i) {
      swv_string* name = nullptr;
      ok(swv_grad_sync_state(sync, i, &name, tensors[i].out()));
      names.push_back(text_of(name));
      states[names.back()] = tensors[i]->tensor;
    }
    EXPECT_EQ(states.at("scale.iteration").item<int64_t>(), kSteps);
    EXPECT_EQ(states.at("blocks.1.up.weight.error").sizes(), (at::IntArrayRef{kHidden, kDim}));
    std::vector<const char*> texts;
    std::vector<const swv_tensor*> handles;
    for (size_t i = 0; i < count; ++i) {
      texts.push_back(names[i].c_str());
      handles.push_back(tensors[i]);
    }
    ok(swv_grad_sync_set_states(sync, texts.data(), handles.data(), count));
    ok(swv_grad_sync_set_states(sync, nullptr, nullptr, 0));
    ok(swv_grad_sync_num_states(sync, &count));
    EXPECT_EQ(count, 0);
    texts[0] = "nobody";
    EXPECT_THAT(message_of(swv_grad_sync_set_states(sync, texts.data(), handles.data(), 1),
                           SWV_CODE_INVALID_ARGUMENT),
                HasSubstr("'nobody' does not end with"));
    EXPECT_THAT(message_of(swv_grad_sync_state(sync, 0, nullptr, nullptr), SWV_CODE_OUT_OF_RANGE),
                HasSubstr("'index' is 0; there are 0"));
  });
}

TEST(DataParallelTest, RanksThatRunOutOfInput) {
  on_mesh("dp=3", [&](swv_mesh* mesh) {
    const auto me = static_cast<int>(mesh->mesh->coordinate()[0]);
    std::vector<int64_t> rows, with_input;
    for (int batches = 0;; ++batches) {
      Tensor mine;
      numbers({2, kDim}, me, mine);
      const swv_tensor* given[] = {mine};
      swv_tensor* out[SWV_MAX_BATCH_TENSORS] = {};
      size_t count = 9;
      int64_t ranks = 9;
      ok(swv_mesh_join_batch(mesh, nullptr, 0, given, batches < 1 + me % 2 ? 1 : 0, out, &count,
                             &ranks));
      if (count == 0) break;
      ASSERT_EQ(count, 1);
      Tensor batch;
      *batch.out() = out[0];
      rows.push_back(batch->tensor.size(0));
      with_input.push_back(ranks);
    }
    EXPECT_EQ(rows, (std::vector<int64_t>{6, 2}));
    EXPECT_EQ(with_input, (std::vector<int64_t>{3, 1}));
    swv_tensor* out[SWV_MAX_BATCH_TENSORS] = {};
    size_t count = 9;
    // One rank's NULL is everybody's error, at once.
    Tensor fine;
    numbers({2, kDim}, me, fine);
    const swv_tensor* given[] = {fine};
    if (me == 1) given[0] = nullptr;
    EXPECT_THAT(message_of(swv_mesh_join_batch(mesh, nullptr, 0, given, 1, out, &count, nullptr),
                           SWV_CODE_INVALID_ARGUMENT),
                HasSubstr(me == 1 ? "tensor 0 is undefined" : "rank 1 has refused its input"));
    const char* dims[] = {"pp"};
    EXPECT_THAT(message_of(swv_mesh_join_batch(mesh, dims, 1, nullptr, 0, out, &count, nullptr),
                           SWV_CODE_NOT_FOUND),
                HasSubstr("pp"));
    EXPECT_EQ(count, 9);
  });
}

}  // namespace
