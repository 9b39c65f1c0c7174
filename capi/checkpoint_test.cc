// Checkpoints and safetensors files through C.
#include <cmath>
#include <cstdint>
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
#include "shardweave/modules/checkpoint/checkpointer.h"

namespace {

using namespace c_test;  // NOLINT: this file is a test in it

using ::testing::AllOf;
using ::testing::HasSubstr;
using State = Held<swv_state, swv_state_free>;
using Checkpointer = Held<swv_checkpointer, swv_checkpointer_free>;
using Safetensors = Held<swv_safetensors, swv_safetensors_free>;
using Loader = Held<swv_loader, swv_loader_free>;

std::string new_directory(const std::string& name) {
  const std::string path = ::testing::TempDir() + "/c_checkpoint_" + name;
  std::filesystem::remove_all(path);
  return path;
}

// A model of the host's, its optimizer, and what a checkpoint has of both.
struct Trained {
  Trained(swv_mesh* mesh, bool zero) {
    Plan plan;
    make_model(module);
    ok(swv_module_distribute(module, mesh, plan, nullptr));
    std::vector<swv_tensor*> handles;
    std::vector<Tensor> held(shapes().size());
    for (size_t i = 0; i < held.size(); ++i) {
      ok(swv_module_parameter(module, i, nullptr, held[i].out()));
      handles.push_back(held[i]);
    }
    ok(swv_optimizer_create_adamw(handles.data(), handles.size(), nullptr, optimizer.out()));
    if (zero) ok(swv_optimizer_use_zero(optimizer, nullptr));
    ok(swv_state_create(state.out()));
    ok(swv_state_add_module(state, nullptr, module));
    ok(swv_state_add_optimizer(state, nullptr, optimizer, module));
    ok(swv_state_add_random(state, nullptr, mesh));
    ok(swv_state_set_value(state, "epoch", "0"));
  }
  double step(swv_mesh* mesh, double phase) {
    Tensor plain, x, y, squares, loss;
    numbers({kRows, kDim}, phase, plain);
    Layout everywhere;
    ok(swv_layout_create_named(mesh, nullptr, 0, everywhere.out()));
    ok(swv_tensor_distribute(plain, mesh, everywhere, nullptr, x.out()));
    forward(module, x, y);
    call("aten::mul.Tensor", {swv_value_tensor(y), swv_value_tensor(y)}, squares);
    call("aten::sum", {swv_value_tensor(squares)}, loss);
    ok(swv_tensor_backward(loss, nullptr, nullptr));
    ok(swv_module_finish_grad_sync(module));
    ok(swv_optimizer_step(optimizer));
    ok(swv_optimizer_zero_grad(optimizer));
    return loss->tensor.item<double>();
  }
  Module module;
  Optimizer optimizer;
  State state;
};

TEST(CheckpointTest, CopiesBesideTraining) {
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    const std::string directory = new_directory("beside");
    Trained run(mesh, /*zero=*/false);
    run.step(mesh, 1);
    Checkpointer checkpointer;
    swv_checkpointer_options options = SWV_CHECKPOINTER_OPTIONS_INIT;
    options.copy_beside_training = 1;
    ok(swv_checkpointer_create(mesh, directory.c_str(), &options, checkpointer.out()));
    ok(swv_checkpointer_save_async(checkpointer, 1, run.state, nullptr));
    ok(swv_checkpointer_wait_for_copy(checkpointer));
    const double second = run.step(mesh, 2);
    ok(swv_checkpointer_wait(checkpointer));
    ok(swv_checkpointer_load(checkpointer, run.state, nullptr, nullptr, nullptr));
    EXPECT_EQ(run.step(mesh, 2), second);
    // Not asked for before the optimizer's step.
    ok(swv_checkpointer_save_async(checkpointer, 2, run.state, nullptr));
    run.step(mesh, 3);
    EXPECT_THAT(message_of(swv_checkpointer_wait(checkpointer), SWV_CODE_FAILED_PRECONDITION),
                HasSubstr("was written to after save_async(), before wait_for_copy()"));
    options.copy_beside_training = 2;
    Checkpointer other;
    EXPECT_THAT(message_of(swv_checkpointer_create(mesh, directory.c_str(), &options, other.out()),
                           SWV_CODE_INVALID_ARGUMENT),
                HasSubstr("options.copy_beside_training"));
  });
}

TEST(CheckpointTest, AnotherMeshAndOptimizerGoOn) {
  const std::string directory = new_directory("goes_on");
  std::vector<double> wanted;
  on_mesh("dp=3", [&](swv_mesh* mesh) {
    Trained run(mesh, /*zero=*/true);
    run.step(mesh, 1);
    run.step(mesh, 2);
    ok(swv_state_set_value(run.state, "epoch", " 7 "));
    Checkpointer checkpointer;
    swv_checkpointer_options options = SWV_CHECKPOINTER_OPTIONS_INIT;
    options.keep_last = 1;
    ok(swv_checkpointer_create(mesh, directory.c_str(), &options, checkpointer.out()));
    ok(swv_checkpointer_save(checkpointer, 1, run.state));
    swv_bool saved = 0;
    ok(swv_checkpointer_save_async(checkpointer, 2, run.state, &saved));
    EXPECT_EQ(saved, 1);
    const std::vector<double> losses = {run.step(mesh, 3), run.step(mesh, 4)};
    ok(swv_checkpointer_wait(checkpointer));
    EXPECT_THAT(
        message_of(swv_checkpointer_save(checkpointer, 2, run.state), SWV_CODE_ALREADY_EXISTS),
        AllOf(HasSubstr("swv_checkpointer_save: "), HasSubstr("is there already")));
    if (mesh->mesh->rank() == shardweave::Rank(0)) wanted = losses;
  });
  EXPECT_FALSE(std::filesystem::exists(directory + "/step-000001"));
  ok(swv_verify_checkpoint((directory + "/step-000002").c_str()));
  for (const char* mesh_text : {"dp=2", "dp=1", "dp=2,tp=2"}) {
    on_mesh(mesh_text, [&](swv_mesh* mesh) {
      Trained run(mesh, /*zero=*/false);
      run.step(mesh, 9);
      Checkpointer checkpointer;
      ok(swv_checkpointer_create(mesh, directory.c_str(), nullptr, checkpointer.out()));
      int64_t step = 0;
      swv_string* json = nullptr;
      ok(swv_checkpointer_load(checkpointer, run.state, nullptr, &step, &json));
      EXPECT_EQ(step, 2);
      EXPECT_THAT(text_of(json), AllOf(HasSubstr("\"step\":2"), HasSubstr("\"missing\":[]"),
                                       HasSubstr("\"epoch\":7")));
      swv_string* epoch = nullptr;
      ok(swv_state_value(run.state, "epoch", &epoch));
      EXPECT_EQ(text_of(epoch), "7");
      EXPECT_NEAR(run.step(mesh, 3), wanted[0], 1e-4 * std::abs(wanted[0]));
      EXPECT_NEAR(run.step(mesh, 4), wanted[1], 1e-4 * std::abs(wanted[1]));
    });
  }
}

// Batches of a text, on the rows of the mesh.
void make_loader(const std::string& path, swv_mesh* mesh, uint64_t seed, Loader& loader) {
  Held<swv_token_file, swv_token_file_free> file;
  ok(swv_token_file_open(path.c_str(), SWV_DTYPE_U8, file.out()));
  const swv_token_file* const files[] = {file};
  Layout rows;
  ok(swv_layout_parse("[S(0)]", rows.out()));
  swv_loader_options options = SWV_LOADER_OPTIONS_INIT;
  options.seq = 4;
  options.batch = 6;
  options.seed = seed;
  options.mesh = mesh;
  options.layout = rows;
  ok(swv_loader_create(files, 1, &options, loader.out()));
}

TEST(CheckpointTest, ALoaderGoesOnWhereItWas) {
  const std::string directory = new_directory("loader"), text = new_directory("text");
  {
    std::ofstream out(text, std::ios::binary);
    for (int i = 0; i < 201; ++i) out.put(static_cast<char>(i));
  }
  const auto next = [](swv_loader* loader) {
    Tensor tokens, targets;
    ok(swv_loader_next(loader, tokens.out(), targets.out()));
    return whole(tokens->tensor);
  };
  at::Tensor wanted;
  on_mesh("dp=3", [&](swv_mesh* mesh) {
    State state;
    Checkpointer checkpointer;
    ok(swv_state_create(state.out()));
    ok(swv_checkpointer_create(mesh, directory.c_str(), nullptr, checkpointer.out()));
    Loader loader;
    make_loader(text, mesh, 7, loader);
    ok(swv_state_add_loader(state, nullptr, loader));
    EXPECT_THAT(message_of(swv_state_add_loader(state, "loader", loader), SWV_CODE_ALREADY_EXISTS),
                HasSubstr("swv_state_add_loader: "));
    next(loader);
    ok(swv_checkpointer_save(checkpointer, 1, state));
    const at::Tensor second = next(loader);
    if (mesh->mesh->rank() == shardweave::Rank(0)) wanted = second;
  });
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    State state, other;
    Loader loader, other_loader;
    make_loader(text, mesh, 7, loader);
    ok(swv_state_create(state.out()));
    ok(swv_state_add_loader(state, "loader", loader));
    {
      // Whoever has made it may let it go.
      swv_loader* second = nullptr;
      ok(swv_loader_share(loader, &second));
      swv_loader_free(second);
    }
    ok(swv_state_load(state, directory.c_str(), mesh, nullptr, nullptr, nullptr));
    EXPECT_TRUE(at::equal(next(loader), wanted));
    make_loader(text, mesh, 8, other_loader);
    ok(swv_state_create(other.out()));
    ok(swv_state_add_loader(other, nullptr, other_loader));
    EXPECT_THAT(
        message_of(swv_state_load(other, directory.c_str(), mesh, nullptr, nullptr, nullptr)),
        AllOf(HasSubstr("differing: the value 'loader': "),
              HasSubstr("its 'seed' is 7, and here 8")));
  });
}

TEST(CheckpointTest, Directories) {
  const std::string directory = new_directory("list");
  int64_t steps[3] = {-1, -1, -1};
  size_t count = 9;
  swv_string* path = nullptr;
  EXPECT_THAT(
      message_of(swv_list_checkpoints(directory.c_str(), steps, 3, &count), SWV_CODE_NOT_FOUND),
      HasSubstr("swv_list_checkpoints: "));
  message_of(swv_find_checkpoint(directory.c_str(), &path), SWV_CODE_NOT_FOUND);
  EXPECT_EQ(count, 9u);
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    State state;
    Checkpointer checkpointer;
    ok(swv_state_create(state.out()));
    ok(swv_state_set_value(state, "v", "1"));
    swv_checkpointer_options options = SWV_CHECKPOINTER_OPTIONS_INIT;
    options.keep_last = 3;
    options.skip_if_busy = 1;
    ok(swv_checkpointer_create(mesh, directory.c_str(), &options, checkpointer.out()));
    for (const int64_t step : {5, 7, 20, 100}) ok(swv_checkpointer_save(checkpointer, step, state));
  });
  ok(swv_list_checkpoints(directory.c_str(), steps, 2, &count));
  EXPECT_EQ(count, 3u);
  EXPECT_THAT(steps, ::testing::ElementsAre(7, 20, -1));
  ok(swv_find_checkpoint(directory.c_str(), &path));
  EXPECT_EQ(text_of(path), directory + "/step-000100");
  ok(swv_find_checkpoint((directory + "/step-000020").c_str(), &path));
  EXPECT_EQ(text_of(path), directory + "/step-000020");
  std::ofstream(directory + "/latest") << "step-000007";  // for people
  ok(swv_find_checkpoint(directory.c_str(), &path));
  EXPECT_EQ(text_of(path), directory + "/step-000100");
}

// What is damaged, or where a rank has something else, is an error on all ranks, and changes nothing.
TEST(CheckpointTest, ErrorsAreThoseOfAllRanks) {
  const std::string directory = new_directory("damaged");
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    Tensor x, other;
    numbers({8, 3}, 0, x);
    numbers({8, 3}, mesh->mesh->rank().value, other);
    Tensor sharded, partial;
    Layout rows, sums;
    ok(swv_layout_parse("[S(0)]", rows.out()));
    ok(swv_layout_parse("[P]", sums.out()));
    ok(swv_tensor_distribute(x, mesh, rows, nullptr, sharded.out()));
    ok(swv_tensor_from_local(x, mesh, sums, nullptr, 0, SWV_MODE_NO_GRAD, partial.out()));
    State state, bad, differing;
    ok(swv_state_create(state.out()));
    ok(swv_state_add_tensor(state, "x", sharded));
    Checkpointer checkpointer, second;
    ok(swv_checkpointer_create(mesh, directory.c_str(), nullptr, checkpointer.out()));
    ok(swv_checkpointer_create(mesh, directory.c_str(), nullptr, second.out()));
    // Before there is anything to save.
    ok(swv_checkpointer_open(checkpointer, 0));
    EXPECT_THAT(message_of(swv_checkpointer_open(second, -1), SWV_CODE_FAILED_PRECONDITION),
                HasSubstr("swv_checkpointer_open: "));
    ok(swv_checkpointer_open(checkpointer, -1));  // it is taken already
    ok(swv_checkpointer_save(checkpointer, 1, state));
    ok(swv_checkpointer_open(checkpointer, 1));
    EXPECT_THAT(message_of(swv_checkpointer_open(checkpointer, 0), SWV_CODE_FAILED_PRECONDITION),
                HasSubstr("step"));
    EXPECT_THAT(message_of(swv_checkpointer_save(second, 2, state), SWV_CODE_FAILED_PRECONDITION),
                HasSubstr("swv_checkpointer_save: "));
    ok(swv_state_create(bad.out()));
    ok(swv_state_add_tensor(bad, "x", partial));
    EXPECT_THAT(message_of(swv_checkpointer_save(checkpointer, 2, bad)), HasSubstr("Partial"));
    // One step on one rank, another on the other.
    EXPECT_THAT(
        message_of(swv_checkpointer_save(checkpointer, 2 + mesh->mesh->rank().value, state)),
        HasSubstr("ranks 0 and 1"));
    ok(swv_state_create(differing.out()));
    ok(swv_state_set_value(differing, "rank", std::to_string(mesh->mesh->rank().value).c_str()));
    EXPECT_THAT(message_of(swv_checkpointer_save(checkpointer, 2, differing)),
                HasSubstr("ranks 0 and 1"));
    // A file that only rank 1 reads.
    const std::string file = directory + "/step-000001/rank-00001.safetensors";
    swv_comm* comm = nullptr;
    ok(swv_mesh_comm(mesh, 0, &comm));
    ok(swv_comm_barrier(comm, nullptr, nullptr));
    if (mesh->mesh->rank() == shardweave::Rank(0)) {
      std::fstream damaged(file, std::ios::in | std::ios::out | std::ios::binary);
      damaged.seekp(-1, std::ios::end);
      damaged.put('\x7f');
    }
    ok(swv_comm_barrier(comm, nullptr, nullptr));
    swv_comm_free(comm);
    const at::Tensor before = whole(sharded->tensor);
    EXPECT_THAT(message_of(swv_checkpointer_load(checkpointer, state, nullptr, nullptr, nullptr),
                           SWV_CODE_DATA_LOSS),
                AllOf(HasSubstr("swv_checkpointer_load: "), HasSubstr("rank-00001.safetensors")));
    EXPECT_TRUE(at::equal(whole(sharded->tensor), before));
  });
  EXPECT_THAT(
      message_of(swv_verify_checkpoint((directory + "/step-000001").c_str()), SWV_CODE_DATA_LOSS),
      HasSubstr("checksum"));
}

TEST(CheckpointTest, MistakesAreErrors) {
  const std::string directory = new_directory("mistakes");
  on_mesh("dp=2", [&](swv_mesh* mesh) {
    State state;
    Tensor x;
    numbers({2, 3}, 0, x);
    ok(swv_state_create(state.out()));
    ok(swv_state_add_tensor(state, "x", x));
    EXPECT_THAT(message_of(swv_state_add_tensor(state, "x", x), SWV_CODE_ALREADY_EXISTS),
                HasSubstr("there is a 'x' already"));
    EXPECT_THAT(message_of(swv_state_set_value(state, "v", "{")), HasSubstr("no JSON"));
    swv_string* json = nullptr;
    EXPECT_THAT(message_of(swv_state_value(state, "v", &json), SWV_CODE_NOT_FOUND),
                HasSubstr("there is no value 'v'"));
    Checkpointer checkpointer;
    swv_checkpointer_options options = SWV_CHECKPOINTER_OPTIONS_INIT;
    options.keep_last = -1;
    EXPECT_THAT(message_of(swv_checkpointer_create(mesh, "x", &options, checkpointer.out())),
                HasSubstr("options.keep_last' is -1"));
    options.keep_last = 0;
    options.skip_if_busy = 2;
    EXPECT_THAT(message_of(swv_checkpointer_create(mesh, "x", &options, checkpointer.out())),
                HasSubstr("options.skip_if_busy"));
    EXPECT_THAT(message_of(swv_checkpointer_create(mesh, "", nullptr, checkpointer.out())),
                HasSubstr("directory"));
    EXPECT_THAT(
        message_of(swv_state_load(state, directory.c_str(), mesh, nullptr, nullptr, nullptr),
                   SWV_CODE_NOT_FOUND),
        HasSubstr("swv_state_load: "));
    ok(swv_checkpointer_create(mesh, directory.c_str(), nullptr, checkpointer.out()));
    EXPECT_THAT(message_of(swv_checkpointer_save(checkpointer, -1, state)),
                HasSubstr("step is -1"));
    ok(swv_checkpointer_save(checkpointer, 1, state));
    State other;
    Tensor y;
    numbers({3, 2}, 0, y);
    ok(swv_state_create(other.out()));
    ok(swv_state_add_tensor(other, "x", y));
    ok(swv_state_add_tensor(other, "y", y));
    EXPECT_THAT(message_of(swv_checkpointer_load(checkpointer, other, nullptr, nullptr, nullptr)),
                AllOf(HasSubstr("missing: y; differing: x ([2, 3] there, [3, 2] here)")));
    swv_load_options lenient = SWV_LOAD_OPTIONS_INIT;
    lenient.verify = 7;
    EXPECT_THAT(message_of(swv_checkpointer_load(checkpointer, state, &lenient, nullptr, nullptr)),
                HasSubstr("options.verify"));
    // It uses ZeRO from the beginning, or not.
    Trained run(mesh, /*zero=*/false);
    message_of(swv_optimizer_use_zero(run.optimizer, nullptr), SWV_CODE_FAILED_PRECONDITION);
    // What fails half-way has added nothing.
    Tensor taken;
    numbers({2}, 0, taken);
    State half;
    ok(swv_state_create(half.out()));
    ok(swv_state_add_tensor(half, "model.scale", taken));
    EXPECT_THAT(
        message_of(swv_state_add_module(half, nullptr, run.module), SWV_CODE_ALREADY_EXISTS),
        HasSubstr("there is a 'model.scale' already"));
    ok(swv_state_add_tensor(half, "model.head.weight", taken));
    Module empty;
    ok(swv_module_create(empty.out()));
    EXPECT_THAT(message_of(swv_state_add_optimizer(state, nullptr, run.optimizer, empty)),
                HasSubstr("is none of the module's"));
  });
}

TEST(SafetensorsTest, WritesAndReads) {
  const std::string path = new_directory("file") + ".safetensors";
  std::filesystem::remove(path);
  Tensor a, b, part, all;
  numbers({4, 3}, 0, a);
  numbers({}, 1, b);
  const char* names[] = {"b", "a"};
  const swv_tensor* tensors[] = {b, a};
  const char* metadata[] = {"format", "pt"};
  ok(swv_safetensors_write(path.c_str(), names, tensors, 2, metadata, 1));
  message_of(swv_safetensors_write(path.c_str(), names, tensors, 2, nullptr, 0),
             SWV_CODE_ALREADY_EXISTS);
  Safetensors file, second;
  ok(swv_safetensors_open(path.c_str(), file.out()));
  ok(swv_safetensors_share(file, second.out()));
  size_t count = 0;
  ok(swv_safetensors_num_tensors(second, &count));
  EXPECT_EQ(count, 2u);
  swv_string* name = nullptr;
  swv_dtype dtype = 0;
  int64_t sizes[4] = {};
  size_t ndim = 0;
  ok(swv_safetensors_tensor(file, 0, &name, &dtype, sizes, 1, &ndim));
  EXPECT_EQ(text_of(name), "a");
  EXPECT_EQ(dtype, SWV_DTYPE_F32);
  EXPECT_EQ(ndim, 2u);
  EXPECT_EQ(sizes[0], 4);
  EXPECT_EQ(sizes[1], 0);  // there was no room
  message_of(swv_safetensors_tensor(file, 2, nullptr, nullptr, nullptr, 0, nullptr),
             SWV_CODE_OUT_OF_RANGE);
  ok(swv_safetensors_read(file, "a", nullptr, nullptr, 0, all.out()));
  EXPECT_TRUE(at::equal(all->tensor, a->tensor));
  const int64_t offset[] = {1, 1}, box[] = {2, 2}, outside[] = {4, 2};
  ok(swv_safetensors_read(file, "a", offset, box, 2, part.out()));
  EXPECT_TRUE(at::equal(part->tensor, a->tensor.narrow(0, 1, 2).narrow(1, 1, 2)));
  ok(swv_safetensors_read(file, "b", nullptr, nullptr, 0, all.out()));
  EXPECT_TRUE(at::equal(all->tensor, b->tensor));
  EXPECT_THAT(message_of(swv_safetensors_read(file, "a", offset, outside, 2, part.out())),
              HasSubstr("[1:5, 1:3] is not in \"a\""));
  message_of(swv_safetensors_read(file, "a", offset, box, 1, part.out()));
  message_of(swv_safetensors_read(file, "c", nullptr, nullptr, 0, part.out()), SWV_CODE_NOT_FOUND);
  std::ofstream(path, std::ios::binary) << "no";
  EXPECT_THAT(message_of(swv_safetensors_open(path.c_str(), second.out())),
              HasSubstr("swv_safetensors_open: "));
}

}  // namespace
