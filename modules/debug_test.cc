// What shows a sharded model: dump, list_communication, module_memory; and verify, which has to find
// every fault that is planted here, name its place, and say the same on every rank.
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave/dtensor/rule.h"
#include "shardweave/dtensor/testing/on_mesh.h"
#include "shardweave/modules/dump.h"
#include "shardweave/modules/hooked.h"
#include "shardweave/modules/list_communication.h"
#include "shardweave/modules/module_memory.h"
#include "shardweave/modules/parallelize_module.h"
#include "shardweave/modules/verify.h"
#include "torch/library.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"
#include "torch/optim/sgd.h"

namespace shardweave {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::on_mesh;
namespace nn = torch::nn;

constexpr int64_t kDim = 6, kHidden = 10, kVocabulary = 7;

at::Tensor numbers(at::IntArrayRef sizes, double from = 0) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return (at::arange(count, at::kDouble) + from).sin().view(sizes);
}

// `what` happens between the two layers.
struct MlpImpl : nn::Module {
  MlpImpl() {
    register_module("up", up);
    register_module("act", act);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = act(up(x));
    if (what) y = what(y);
    return down(y);
  }
  nn::Linear up{kDim, kHidden};
  nn::ReLU act;
  nn::Linear down{kHidden, kDim};
  std::function<at::Tensor(const at::Tensor&)> what;
};
using Mlp = nn::ModuleHolder<Hooked<MlpImpl>>;

struct HeadImpl : nn::Module {
  explicit HeadImpl(const at::Tensor& tied) : weight(register_parameter("weight", tied)) {}
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight;
};

// Tied weights, a buffer, a module without parameters, one that is called twice, a Hooked one.
struct NetImpl : nn::Module {
  NetImpl() {
    register_module("wte", wte);
    register_module("mlp", mlp);
    register_module("norm", norm);
    register_module("head", head);
    register_buffer("scale", scale);
    const c10::NoGradGuard no_grad;
    double from = 0;
    for (at::Tensor& p : parameters()) p.copy_(numbers(p.sizes(), from += 0.7) * 0.5);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = wte(tokens) * scale;
    for (int i = 0; i < 2; ++i) x = norm(x + mlp->forward(x));
    return head->forward(x);
  }
  nn::Embedding wte{kVocabulary, kDim};
  Mlp mlp;
  nn::LayerNorm norm{nn::LayerNormOptions({kDim})};
  std::shared_ptr<HeadImpl> head = std::make_shared<HeadImpl>(wte->weight);
  at::Tensor scale = at::ones({kDim});
};
TORCH_MODULE(Net);

Net make_net() {
  static std::mutex one_at_a_time;  // LibTorch's generator is the process's
  const std::lock_guard lock(one_at_a_time);
  return Net();
}

const ShardingPlan kPlan = {
    .parameter = {{"wte.weight", {{"tp", Shard(0)}}},
                  {"*.up.*", {{"tp", Shard(0)}}},
                  {"*.down.weight", {{"tp", Shard(1)}}}},
    .forward = {{"mlp.output", {{"tp", Replicate()}}}, {"*.down.output", {{"tp", Replicate()}}}}};

at::Tensor tokens(int64_t batch = 5) {
  return (at::arange(batch * 3, at::kLong) * 5 % kVocabulary).view({batch, 3});
}

int64_t bytes_in(const nlohmann::json& dump, const std::string& what) {
  int64_t sum = 0;
  for (const auto& tensor : dump["tensors"]) {
    if (!tensor["shown_before"].get<bool>()) sum += tensor[what].get<int64_t>();
  }
  for (const auto& child : dump["modules"]) sum += bytes_in(child, what);
  return sum;
}

// Of the line that `what` stands in first, in characters.
int64_t column_of(const std::string& text, const std::string& what) {
  const size_t at = text.find(what);
  if (at == std::string::npos) return -1;
  const size_t line = text.rfind('\n', at);
  const size_t begin = line == std::string::npos ? 0 : line + 1;
  return std::count_if(text.begin() + static_cast<int64_t>(begin),
                       text.begin() + static_cast<int64_t>(at),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

TEST(DumpTest, ShowsAPlainModel) {
  Net net = make_net();
  const ModuleDump d = dump(*net);
  EXPECT_EQ(d.bytes, d.global_bytes);
  EXPECT_EQ(d.elements, 7 * 6 + 10 * 6 + 10 + 6 * 10 + 6 + 6 + 6);  // the tied weight once
  EXPECT_EQ(d.bytes, 8 * (d.elements + kDim));
  const std::string text = d.to_string();
  EXPECT_THAT(text, AllOf(HasSubstr("├─ wte  Embedding"), HasSubstr("weight = head.weight"),
                          HasSubstr("└─ weight = wte.weight"), HasSubstr("Double[10, 6]"),
                          HasSubstr("scale (buffer)"), HasSubstr("act  ReLU"),
                          Not(HasSubstr("placements")), Not(HasSubstr(" at "))));
}

template <typename Inner>
struct OfAnotherImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
  Inner inner{nullptr};
};

TEST(DumpTest, NamesTypesAsTheyAreWritten) {
  EXPECT_THAT(dump(Hooked<OfAnotherImpl<Mlp>>()).to_string(), HasSubstr("\nOfAnother<Mlp>  "));
  EXPECT_THAT(dump(OfAnotherImpl<std::vector<nn::Linear>>()).to_string(),
              HasSubstr("\nOfAnother<vector<Linear, allocator<Linear>>>  "));
}

TEST(DumpTest, SaysWhereThePlanSaidSo) {
  std::atomic<int64_t> all_bytes = 0;
  int64_t global = 0;
  std::mutex mutex;
  on_mesh({{"dp", 1}, {"tp", 3}}, [&](const MeshPtr& mesh) {
    Net net = make_net();
    parallelize_module(*net, mesh, kPlan);
    const int line = __LINE__ - 1;
    if (mesh->rank().value == 1) {  // of one rank alone: nothing is sent
      const std::string here = "debug_test.cc:" + std::to_string(line);
      const std::string text = dump(*net).to_string();
      EXPECT_THAT(text, AllOf(HasSubstr("[R, S(0)]"), HasSubstr("'wte.weight' at"), HasSubstr(here),
                              HasSubstr("'*.up.*' at"), HasSubstr("no entry at"),
                              HasSubstr("output.0"), HasSubstr("[-, R]"),
                              HasSubstr("'*.down.output' at"), HasSubstr("'mlp.output' at")));
      // Columns stand below each other, whatever the branches are made of.
      EXPECT_EQ(column_of(text, "Double[7, 6]"), column_of(text, "shape"));
      EXPECT_EQ(column_of(text, "Double[10, 6]"), column_of(text, "shape"));
    }
    const auto json = nlohmann::json::parse(dump(*net).to_json());
    EXPECT_EQ(json["bytes"], bytes_in(json, "bytes"));
    EXPECT_EQ(json["global_bytes"], bytes_in(json, "global_bytes"));
    EXPECT_EQ(json["modules"][0]["fqn"], "wte");
    EXPECT_EQ(json["modules"][0]["tensors"][0]["fqns"],
              nlohmann::json::parse(R"(["wte.weight", "head.weight"])"));
    EXPECT_EQ(json["modules"][0]["tensors"][0]["pattern"], "wte.weight");
    // 10 rows over 3 ranks: 4, 4, 2.
    const int64_t rows = mesh->rank().value == 2 ? 2 : 4;
    EXPECT_EQ(json["modules"][1]["modules"][0]["tensors"][0]["local_shape"][0], rows);
    all_bytes += json["bytes"].get<int64_t>();
    const std::lock_guard lock(mutex);
    global = json["global_bytes"];
  });
  EXPECT_GT(all_bytes, global);      // some is on all ranks,
  EXPECT_LT(all_bytes, 3 * global);  // some is cut
}

TEST(DumpTest, NamesTheParameterThatAForwardEntryIsOf) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    struct Two : nn::Module {
      at::Tensor q = register_parameter("q_weight", at::ones({4, 4}));
      at::Tensor k = register_parameter("k_weight", at::ones({4, 4}));
    };
    struct Outer : nn::Module {
      Outer() { register_module("attn", attn); }
      std::shared_ptr<Two> attn = std::make_shared<Two>();
    };
    Outer model;
    parallelize_module(model, mesh,
                       {.forward = {{"attn.q_weight.input", {{"tp", Replicate()}}},
                                    {"attn.k_weight.input", {{"tp", Shard(0)}}}}});
    const ModuleDump d = dump(model);
    ASSERT_EQ(d.modules[0].forward.size(), 2);
    EXPECT_EQ(d.modules[0].forward[0].value, "q_weight.input.0");
    EXPECT_EQ(d.modules[0].forward[1].value, "k_weight.input.0");
    EXPECT_EQ(dump(*model.attn).forward[1].value, "k_weight.input.0");
  });
}

TEST(DumpTest, ShowsEmptyPartsAndModulesWithoutAnything) {
  on_mesh({{"tp", 4}}, [](const MeshPtr& mesh) {
    nn::Sequential model(nn::Linear(nn::LinearOptions(3, 2).bias(false)), nn::ReLU());
    distribute_module(*model, mesh, {{"0.weight", {{"tp", Shard(0)}}}});
    const ModuleDump d = dump(*model);
    EXPECT_THAT(d.modules[0].tensors[0].local_shape,
                ElementsAre(mesh->rank().value < 2 ? 1 : 0, 3));
    EXPECT_EQ(d.bytes, mesh->rank().value < 2 ? 12 : 0);
    EXPECT_THAT(d.modules[1].tensors, IsEmpty());
    EXPECT_THAT(d.to_string(), HasSubstr("└─ 1  ReLU"));
  });
}

TEST(DumpTest, ShowsAModelOfWhichAPartIsDistributed) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    Net net = make_net();
    parallelize_module(*net->mlp, mesh, {.parameter = {{"up.weight", {{"tp", Shard(0)}}}}});
    const ModuleDump d = dump(*net);
    EXPECT_EQ(d.modules[0].tensors[0].placements, "");  // wte
    const ModuleDump::Tensor& up = d.modules[1].modules[0].tensors[0];
    EXPECT_EQ(up.fqns[0], "mlp.up.weight");
    EXPECT_EQ(up.pattern, "up.weight");
    EXPECT_EQ(up.placements, "[S(0)]");
  });
}

TEST(ListCommunicationTest, NamesTheModuleOfEveryCollective) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    Net net = make_net();
    parallelize_module(*net, mesh, kPlan);
    const int line = __LINE__ - 1;
    torch::optim::SGD optimizer(unique_parameters(*net), torch::optim::SGDOptions(0.1));
    const at::Tensor x = distribute_tensor(tokens(), mesh, {{"dp", Shard(0)}});
    const CommunicationList list = list_communication(*net, [&] {
      net->forward(x).pow(2).sum().backward();
      finish_grad_sync(*net);
      double norm = 0;
      for (const at::Tensor& p : unique_parameters(*net)) {
        const c10::NoGradGuard no_grad;
        norm += p.grad().norm().item<double>();  // as an optimizer may
      }
      EXPECT_GT(norm, 0);
      optimizer.step();
    });
    std::map<std::string, std::vector<std::string>> modules;
    for (const CommEvent& e : list.events) {
      modules[std::string(to_string(e.phase))].push_back(e.module);
    }
    // wte's rows are cut, and summed for the model's own `scale`; `down` ends with a sum over tp, twice.
    EXPECT_THAT(modules["forward"], ElementsAre("", "mlp.down", "mlp.down"));
    EXPECT_THAT(modules["backward"], ElementsAre("norm", "norm", ""));
    EXPECT_THAT(list.events[1].source, HasSubstr("debug_test.cc:" + std::to_string(line)));
    EXPECT_THAT(modules["gradient sync"], Not(IsEmpty()));
    EXPECT_THAT(modules["optimizer"], Not(IsEmpty()));
    // In order: nothing of forward behind backward.
    bool behind = false;
    for (const CommEvent& e : list.events) {
      behind |= e.phase != Phase::kForward;
      EXPECT_FALSE(behind && e.phase == Phase::kForward) << e.to_string();
      EXPECT_THAT(e.module, Not(HasSubstr("#")));
    }
    const std::string text = list.to_string();
    EXPECT_THAT(text, AllOf(HasSubstr("optimizer"), HasSubstr("gradient sync"), HasSubstr("calls"),
                            HasSubstr("bytes sent by a rank")));
    const auto json = nlohmann::json::parse(list.to_json());
    EXPECT_EQ(json["events"].size(), list.events.size());
    EXPECT_EQ(json["bytes"], list.bytes());
  });
}

TEST(ListCommunicationTest, NamesWhatRunsBetweenTwoModules) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    Net net = make_net();
    net->mlp->what = [](const at::Tensor& y) { return y.softmax(-1); };  // needs all of them
    parallelize_module(*net, mesh, {.parameter = kPlan.parameter});
    const CommunicationList list =
        list_communication(*net, [&] { net->forward(tokens()).sum().backward(); });
    const auto softmax = [&](Phase phase) {
      int count = 0;
      for (const CommEvent& e : list.events) {
        if (e.op.find("softmax") == std::string::npos || e.phase != phase) continue;
        EXPECT_EQ(e.module, "mlp") << e.to_string();
        ++count;
      }
      return count;
    };
    EXPECT_GE(softmax(Phase::kForward), 2);
    EXPECT_GE(softmax(Phase::kBackward), 1);
    // A scope of the program's own counts more.
    const CommunicationList named = list_communication(*net, [&] {
      const ModuleScope scope(mesh, "mine");
      net->forward(tokens());
    });
    for (const CommEvent& e : named.events) EXPECT_EQ(e.module, "mine");
    EXPECT_FALSE(named.events.empty());
  });
}

TEST(ListCommunicationTest, ListsTheInputAndTheOutputOfAHookedModuleUnderIt) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    Net net = make_net();
    ShardingPlan plan = kPlan;
    plan.forward = {{"mlp.output", {{"tp", Replicate()}}}};
    plan.parameter.erase(plan.parameter.begin());
    parallelize_module(*net, mesh, plan);
    std::vector<std::string> modules;
    for (const CommEvent& e : list_communication(*net, [&] { net->forward(tokens()); }).events) {
      if (e.is_check) continue;  // of the plain tokens
      modules.push_back(e.module);
    }
    EXPECT_THAT(modules, ElementsAre("mlp", "mlp"));
  });
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    Net net = make_net();
    parallelize_module(*net, mesh, {.forward = {{"mlp.input", {{"tp", Replicate()}}}}});
    const at::Tensor x = distribute_tensor(numbers({4, kDim}), mesh, {{"tp", Shard(0)}});
    const CommunicationList list = list_communication(*net, [&] { net->mlp->forward(x); });
    ASSERT_EQ(list.events.size(), 1);
    EXPECT_EQ(list.events[0].module, "mlp");
  });
}

TEST(ListCommunicationTest, DoesNotRunWithinAnother) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    Net net = make_net();
    parallelize_module(*net, mesh, kPlan);
    const auto hook = net->mlp->redistribution;
    list_communication(*net, [&] {
      const auto watched = net->mlp->redistribution;
      try {
        module_memory(*net, [&] { return net->forward(tokens()); });
        ADD_FAILURE();
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
        EXPECT_THAT(error.what(), HasSubstr("is watched on this thread already"));
      }
      EXPECT_EQ(net->mlp->redistribution, watched);
    });
    EXPECT_EQ(net->mlp->redistribution, hook);
  });
}

TEST(ListCommunicationTest, RefusesAPlainModel) {
  Net net = make_net();
  try {
    list_communication(*net, [] {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(error.what(), HasSubstr("parallelize_module"));
  }
}

const ModuleMemory::Row& row_of(const ModuleMemory& memory, const std::string& module) {
  for (const ModuleMemory::Row& row : memory.rows) {
    if (row.module == module) return row;
  }
  ADD_FAILURE() << "no row for " << module;
  return memory.rows[0];
}

TEST(ModuleMemoryTest, CountsWhatIsOnThisRank) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    nn::Sequential model(nn::Linear(8, 16), nn::ReLU(), nn::Linear(16, 4));
    parallelize_module(
        *model, mesh,
        {.parameter = {{"0.*", {{"tp", Shard(0)}}}, {"2.weight", {{"tp", Shard(1)}}}}});
    const at::Tensor x = distribute_tensor(at::ones({32, 8}), mesh, {{"tp", Replicate()}});
    ModuleMemory memory = module_memory(*model, [&] { return model->forward(x); });
    EXPECT_EQ(row_of(memory, "0").parameters, 4 * (8 * 8 + 8));
    EXPECT_EQ(row_of(memory, "2").parameters, 4 * (4 * 8 + 4));
    EXPECT_EQ(row_of(memory, "").parameters, 4 * (8 * 8 + 8 + 4 * 8 + 4));
    EXPECT_EQ(row_of(memory, "").gradients, 0);
    // relu's result is kept for backward (linear's, which it is made of, is not), and the result of all.
    EXPECT_EQ(row_of(memory, "0").activations, 0);
    EXPECT_EQ(row_of(memory, "").activations - row_of(memory, "2").activations, 4 * 32 * 8);
    EXPECT_EQ(row_of(memory, "2").activations, 4 * 32 * 4);
    model->forward(x).sum().backward();
    finish_grad_sync(*model);
    memory = module_memory(*model);
    EXPECT_EQ(row_of(memory, "0").gradients, row_of(memory, "0").parameters);
    EXPECT_EQ(row_of(memory, "").activations, 0);
    EXPECT_THAT(memory.to_string(), HasSubstr("(all)"));
    EXPECT_EQ(nlohmann::json::parse(memory.to_json()).size(), 4);
  });
}

TEST(ModuleMemoryTest, KnowsPlainModels) {
  nn::Sequential model(nn::Linear(8, 16), nn::ReLU());
  const at::Tensor x = at::ones({3, 8});
  const ModuleMemory memory = module_memory(*model, [&] { return model->forward(x); });
  EXPECT_EQ(row_of(memory, "").parameters, 4 * (8 * 16 + 16));
  EXPECT_EQ(row_of(memory, "").activations, 4 * 3 * 16);  // not x, which no operator in it made
}

TEST(ModuleMemoryTest, CountsNothingThatOnlyTheWatchWouldKeep) {
  nn::Sequential model(nn::Linear(nn::LinearOptions(8, 16).bias(false)));
  const c10::NoGradGuard no_grad;
  const at::Tensor x = at::ones({3, 8}, at::kBFloat16);
  const at::Tensor weight = model->parameters()[0];
  const ModuleMemory memory =
      module_memory(*model, [&] { return x.matmul(weight.to(at::kBFloat16).t()).sum(); });
  EXPECT_EQ(row_of(memory, "").activations, 2);  // the result alone
}

TEST(VerifyTest, IsRightOnEveryMesh) {
  const std::vector<std::vector<MeshDim>> meshes = {{{"tp", 1}},
                                                    {{"tp", 2}},
                                                    {{"tp", 3}},
                                                    {{"dp", 2}, {"tp", 2}},
                                                    {{"pp", 1}, {"dp", 2}, {"tp", 2}}};
  for (const std::vector<MeshDim>& dims : meshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      Placements batch(mesh->mesh().ndim());
      if (batch.size() > 1) batch[batch.size() - 2] = Shard(0);
      for (const int64_t size : {5, 1}) {  // 1: empty parts
        const at::Tensor x = distribute_tensor(tokens(size), mesh, batch);
        const Verification v = verify(make_net, mesh, kPlan, {x});
        EXPECT_TRUE(v.ok()) << v.to_string();
        EXPECT_EQ(v.gradients, 7);
        EXPECT_GE(v.outputs, 14);
        EXPECT_EQ(v.not_met, 0);
        EXPECT_EQ(nlohmann::json::parse(v.to_json())["ok"], true);
      }
    });
  }
}

TEST(VerifyTest, WorksWithoutAMeshAndWithPlainInputs) {
  Net a = make_net(), b = make_net();
  EXPECT_TRUE(verify(*a, *b, {tokens()}).ok());
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    const Verification v = verify(
        make_net, mesh, kPlan, {tokens()},
        [](NetImpl& net, const auto& in) { return net.forward(in[0]).logsumexp(-1).mean(); });
    EXPECT_TRUE(v.ok()) << v.to_string();
  });
}

// Two models with the same values, one of them sharded.
struct Pair {
  explicit Pair(const MeshPtr& mesh, const ShardingPlan& plan = kPlan) {
    parallelize_module(*model, mesh, plan);
  }
  Net reference = make_net();
  Net model = make_net();
};

// What every rank has said.
class Verdicts {
 public:
  void add(const Verification& v) {
    const std::lock_guard lock(mutex_);
    all_.push_back(v.to_string() + v.to_json());
    last_ = v;
  }
  // The one that all ranks share.
  Verification::Difference one() {
    for (const std::string& text : all_) EXPECT_EQ(text, all_[0]);
    EXPECT_FALSE(last_.ok());
    return last_.ok() ? Verification::Difference() : *last_.difference;
  }
  std::string text() const { return last_.to_string(); }

 private:
  std::mutex mutex_;
  std::vector<std::string> all_;
  Verification last_;
};

TEST(VerifyTest, FindsAWeightThatIsAnotherOnOneRank) {
  for (const char* fqn : {"norm.weight", "mlp.up.weight"}) {  // replicated; cut
    Verdicts verdicts;
    on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
      Pair pair(mesh);
      if (mesh->rank().value == 2) {
        const c10::NoGradGuard no_grad;
        to_local(pair.model->named_parameters()[fqn].detach()).view({-1})[1] += 0.25;
      }
      verdicts.add(verify(*pair.model, *pair.reference, {tokens()}));
    });
    const Verification::Difference d = verdicts.one();
    EXPECT_EQ(d.kind, "parameter");
    EXPECT_THAT(d.what, HasSubstr(fqn));
    EXPECT_EQ(d.rank, 2);
    EXPECT_NEAR(d.max_abs, 0.25, 1e-9);
    EXPECT_THAT(verdicts.text(), HasSubstr("rank 2"));
  }
}

TEST(VerifyTest, FindsAModuleThatUsesItsLocalPart) {
  for (const bool wraps : {true, false}) {
    Verdicts verdicts;
    on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
      Pair pair(mesh);
      const auto softmax = [](const at::Tensor& y) { return y.softmax(-1); };
      pair.reference->mlp->what = softmax;
      pair.model->mlp->what = [&](const at::Tensor& y) {
        const at::Tensor local = to_local(y).softmax(-1);  // of the half that is here
        return wraps ? from_local(local, mesh, layout_of(y).placements()) : local;
      };
      verdicts.add(verify(*pair.model, *pair.reference, {tokens()}));
    });
    const Verification::Difference d = verdicts.one();
    EXPECT_EQ(d.kind, wraps ? "output" : "error");
    EXPECT_EQ(d.module, "mlp");
    EXPECT_THAT(d.what,
                AllOf(HasSubstr("aten::softmax"), HasSubstr("between 'mlp.up' and 'mlp.down'")));
    EXPECT_THAT(d.seen_at, HasSubstr("'mlp.down'"));
    EXPECT_THAT(verdicts.text(), HasSubstr("works on local parts"));
    EXPECT_GT(d.before, 10);
  }
}

// An operator of the rank's own, well done.
TEST(VerifyTest, AllowsLocalParts) {
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    Pair pair(mesh);
    pair.reference->mlp->what = [](const at::Tensor& y) { return y.exp().sin(); };
    pair.model->mlp->what = [&](const at::Tensor& y) {
      return from_local(to_local(y).exp().sin(), mesh, layout_of(y).placements());
    };
    const Verification v = verify(*pair.model, *pair.reference, {tokens()});
    EXPECT_TRUE(v.ok()) << v.to_string();
    // A result that stays local is none.
    const auto local = [](NetImpl& net, const std::vector<at::Tensor>& in) {
      const at::Tensor y = net.mlp->up(net.wte(in[0]));
      return is_dtensor(y) ? to_local(y) : y;
    };
    const Verification left = verify(*pair.model, *pair.reference, {tokens()}, local);
    ASSERT_FALSE(left.ok());
    EXPECT_THAT(left.to_string(),
                AllOf(HasSubstr("the model's result"), HasSubstr("a local part?")));
  });
}

// The sum over what the ranks have is forgotten.
at::Tensor sum_rows(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("debugtest::sum_rows", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}

TEST(VerifyTest, FindsARuleThatForgetsASum) {
  Verdicts verdicts;
  on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
    add_rule(mesh, "debugtest::sum_rows", sharded([](const OpCall& call, Strategies& out) {
               const int d = call.input("x").ndim() - 1;
               out.add({{"x", Shard(d)}}, {Replicate()});
             }));
    Pair pair(mesh);
    const auto divided = [](const at::Tensor& y) { return y / (1 + sum_rows(y)); };
    pair.reference->mlp->what = pair.model->mlp->what = divided;
    verdicts.add(verify(*pair.model, *pair.reference, {tokens()}, {}, {.backward = false}));
  });
  const Verification::Difference d = verdicts.one();
  EXPECT_EQ(d.kind, "output");
  EXPECT_EQ(d.module, "mlp");
  EXPECT_THAT(d.what, HasSubstr("debugtest::sum_rows"));
  EXPECT_THAT(d.tensor, HasSubstr("[R, R]"));
}

TEST(VerifyTest, FindsAGradientThatIsNotSummed) {
  Verdicts verdicts;
  on_mesh({{"dp", 2}}, [&](const MeshPtr& mesh) {
    Pair pair(mesh, {});
    const auto bias = [](Net& net) { return net->mlp->up->bias; };
    pair.reference->mlp->what = [&](const at::Tensor& y) { return y * bias(pair.reference); };
    pair.model->mlp->what = [&](const at::Tensor& y) {
      // The copies are used differently by each rank; to_local() is not told.
      const at::Tensor local = to_local(y) * to_local(bias(pair.model));
      return from_local(local, mesh, {Shard(0)}, y.sizes().vec());
    };
    const at::Tensor x = distribute_tensor(tokens(), mesh, {{"dp", Shard(0)}});
    verdicts.add(verify(*pair.model, *pair.reference, {x}));
  });
  const Verification::Difference d = verdicts.one();
  EXPECT_EQ(d.kind, "gradient");
  EXPECT_EQ(d.module, "mlp.up");
  EXPECT_THAT(d.what, HasSubstr("'mlp.up.bias'"));
}

// The plan redistributes what a Hooked module gives, with a collective, and so does the program.
TEST(VerifyTest, ComparesWhatIsRedistributed) {
  for (const bool falsifies : {false, true}) {
    Verdicts verdicts;
    on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
      ShardingPlan plan = kPlan;
      plan.forward = {{"mlp.output", {{"tp", Replicate()}}}};
      Pair pair(mesh, plan);
      struct Wrong final : modules_internal::ForwardRedistribution {
        at::Tensor input(int index, const at::Tensor& t) const override {
          return inner->input(index, t);
        }
        at::Tensor output(int index, const at::Tensor& t) const override {
          return inner->output(index, t) * 1.5;
        }
        void check_met(int inputs, int outputs) const override {
          inner->check_met(inputs, outputs);
        }
        std::shared_ptr<const modules_internal::ForwardRedistribution> inner;
      };
      if (falsifies) {
        const auto wrong = std::make_shared<Wrong>();
        wrong->inner = pair.model->mlp->redistribution;
        pair.model->mlp->redistribution = wrong;
      }
      const Verification v = verify(*pair.model, *pair.reference, {tokens()});
      if (!falsifies) {
        EXPECT_TRUE(v.ok()) << v.to_string();
        EXPECT_EQ(v.not_met, 0);
        const Verification plain = verify(*make_net(), *make_net(), {tokens()});
        EXPECT_EQ(v.outputs, plain.outputs);
      }
      verdicts.add(v);
    });
    if (!falsifies) continue;
    const Verification::Difference d = verdicts.one();
    EXPECT_EQ(d.module, "mlp");
    EXPECT_THAT(d.what, HasSubstr("'mlp' (forward)"));
    EXPECT_EQ(d.seen_at, "");
  }
}

TEST(VerifyTest, TakesNoOperatorOfRedistributeForTheModels) {
  Verdicts verdicts;
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    Pair pair(mesh);
    // Both slice: redistribute() on its own, and the program.
    pair.reference->mlp->what = [](const at::Tensor& y) {
      return at::cat({y, y}, -1).narrow(-1, 0, kHidden);
    };
    pair.model->mlp->what = [](const at::Tensor& y) {
      const at::Tensor all =
          redistribute(redistribute(y, Placements{Replicate()}), Placements{Shard(2)});
      const at::Tensor full = redistribute(all, Placements{Replicate()});
      return (at::cat({full, full}, -1) * 1.5).narrow(-1, 0, kHidden);
    };
    const CommunicationList list =
        list_communication(*pair.model, [&] { pair.model->forward(tokens()); });
    int count = 0;
    for (const CommEvent& e : list.events) {
      if (e.collective != "all_gather") continue;  // what the program asks for
      EXPECT_EQ(e.module, "mlp") << e.to_string();
      ++count;
    }
    EXPECT_EQ(count, 4);  // two in each of two calls
    verdicts.add(verify(*pair.model, *pair.reference, {tokens()}));
  });
  const Verification::Difference d = verdicts.one();
  EXPECT_EQ(d.module, "mlp");
  EXPECT_THAT(d.what, HasSubstr("aten::narrow"));
  EXPECT_EQ(d.seen_at, "");
}

TEST(VerifyTest, SaysWhereTheShardedModelThrows) {
  Verdicts verdicts;
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    Pair pair(mesh);
    pair.model->mlp->what = [](const at::Tensor& /*y*/) -> at::Tensor {
      throw Error(absl::InvalidArgumentError("heads do not divide"));
    };
    verdicts.add(verify(*pair.model, *pair.reference, {tokens()}));
  });
  const Verification::Difference d = verdicts.one();
  EXPECT_EQ(d.kind, "error");
  EXPECT_EQ(d.module, "mlp.down");
  EXPECT_THAT(d.reason, HasSubstr("heads do not divide"));
  EXPECT_THAT(verdicts.text(), AllOf(HasSubstr("'mlp.down'"), HasSubstr("not reached")));
}

TEST(VerifyTest, NamesTheCallOfAModuleThatIsCalledTwice) {
  Verdicts verdicts;
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    Pair pair(mesh);
    int calls = 0;
    pair.reference->mlp->what = [](const at::Tensor& y) { return y + 0.0; };
    pair.model->mlp->what = [&](const at::Tensor& y) { return y + (++calls == 2 ? 0.5 : 0.0); };
    verdicts.add(verify(*pair.model, *pair.reference, {tokens()}));
  });
  EXPECT_THAT(verdicts.one().what, HasSubstr("aten::add"));
  EXPECT_EQ(verdicts.one().module, "mlp");
  EXPECT_GT(verdicts.one().before, 14);  // the first call, too
}

TEST(VerifyTest, LeavesModelsAsTheyWere) {
  on_mesh({{"dp", 2}}, [](const MeshPtr& mesh) {
    struct Normed : nn::Module {
      Normed() {
        register_module("norm", norm);
        norm->to(at::kDouble);
      }
      at::Tensor forward(const at::Tensor& x) { return norm(x); }
      nn::BatchNorm1d norm{4};
    };
    const auto make = [] { return std::make_shared<Normed>(); };
    const at::Tensor x = distribute_tensor(numbers({6, 4}), mesh, {{"dp", Shard(0)}});
    EXPECT_TRUE(verify(make, mesh, {}, {x}).ok());  // and buffers behind forward

    auto model = make(), reference = make();
    parallelize_module(*model, mesh, {});
    model->forward(x).pow(2).sum().backward();
    const at::Tensor gradient = model->norm->weight.grad();
    const Verification v = verify(*model, *reference, {x});
    EXPECT_EQ(v.difference->kind, "parameter");  // the running mean has moved on
    EXPECT_THAT(v.difference->what, HasSubstr("norm.running_mean"));
    EXPECT_TRUE(model->norm->weight.grad().is_same(gradient));
    EXPECT_FALSE(reference->norm->weight.grad().defined());
    EXPECT_EQ(full_tensor(model->norm->num_batches_tracked).item<int64_t>(), 1);
    EXPECT_EQ(reference->norm->num_batches_tracked.item<int64_t>(), 0);
  });
}

TEST(VerifyTest, SaysThatRandomNumbersAreOthers) {
  Verdicts verdicts;
  on_mesh({{"tp", 2}}, [&](const MeshPtr& mesh) {
    Pair pair(mesh);
    pair.reference->mlp->what =
        pair.model->mlp->what = [](const at::Tensor& y) { return at::dropout(y, 0.5, true); };
    // Ranks share LibTorch's generator, and each has another reference.
    verdicts.add(verify(*pair.model, *pair.reference, {tokens()}));
  });
  EXPECT_THAT(verdicts.one().hint, AllOf(HasSubstr("aten::dropout"), HasSubstr("eval()")));
}

TEST(VerifyTest, RefusesModelsThatAreOthers) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    Pair pair(mesh);
    const auto refused = [&](nn::Module& reference, const std::string& why) {
      const auto run = [] { return at::Tensor(); };
      try {
        verify(*pair.model, run, reference, run);
        ADD_FAILURE() << why;
      } catch (const Error& error) {
        EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(error.what(), HasSubstr(why));
      }
    };
    refused(*nn::Linear(2, 2), "'wte.weight' of the model is not in the reference");
    refused(*pair.model, "is a DTensor in the reference, too");
    Net larger = make_net();
    larger->register_parameter("more", at::ones({1}));
    refused(*larger, "the reference has 10 parameters and buffers, the model 9");
  });
}

// Whose reference fails on one rank, the others do not wait for it in the model.
TEST(VerifyTest, AReferenceThatFailsOnOneRankEndsItOnAll) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    Pair pair(mesh);
    const int64_t rank = mesh->coordinate()[0];
    const at::Tensor x = at::zeros({2, 3}, at::kLong);
    try {
      verify(
          *pair.model, [&] { return pair.model->forward(x); }, *pair.reference,
          [&] {
            if (rank == 1) throw std::runtime_error("its file is gone");
            return pair.reference->forward(x);
          });
      ADD_FAILURE() << "rank " << rank;
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr(rank == 1 ? "its file is gone" : "refused on other ranks"));
    }
  });
}

class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { said.push_back(warning.msg()); }
  std::vector<std::string> said;
};

struct BiasedImpl : nn::Module {
  at::Tensor weight = register_parameter("weight", at::ones({4}));
  at::Tensor forward(const at::Tensor& x) { return x + weight; }
};

TEST(UnmetPlanTest, IsSaidOnceWithTheParameter) {
  on_mesh({{"tp", 2}}, [](const MeshPtr& mesh) {
    Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    const ShardingPlan plan = {.forward = {{"*output", {{"tp", Shard(0)}}}}};
    const ShardingPlan of_one = {.forward = {{"output", {{"tp", Shard(0)}}}}};
    const at::Tensor x = ones({6, 4}, mesh, {Replicate()});
    const bool first = mesh->rank().value == 0;
    {  // by its gradient
      BiasedImpl biased;
      parallelize_module(biased, mesh, of_one);
      for (int step = 0; step < 3; ++step) {
        biased.forward(x).sum().backward();
        if (step == 0) {
          EXPECT_THAT(warnings.said, IsEmpty());
        }
        finish_grad_sync(biased);
      }
      ASSERT_EQ(warnings.said.size(), first ? 1 : 0);
      if (first) {
        EXPECT_THAT(warnings.said[0], AllOf(HasSubstr("'output.0'"), HasSubstr("'weight'"),
                                            HasSubstr("aten::add"), HasSubstr("Hooked")));
      }
    }
    warnings.said.clear();
    {  // without gradients: when it happens again
      const c10::NoGradGuard no_grad;
      BiasedImpl biased;
      parallelize_module(biased, mesh, of_one);
      biased.forward(x);
      EXPECT_THAT(warnings.said, IsEmpty());
      for (int i = 0; i < 3; ++i) biased.forward(x);
      EXPECT_EQ(warnings.said.size(), first ? 1 : 0);
    }
    warnings.said.clear();
    {  // an input that the layer's operator does not have
      nn::Linear layer(4, 4);
      parallelize_module(*layer, mesh, {.forward = {{"input.offsets", {{"tp", Shard(0)}}}}});
      layer->forward(x).sum().backward();
      finish_grad_sync(*layer);
      EXPECT_EQ(warnings.said.size(), first ? 1 : 0);
      if (first) {
        EXPECT_THAT(warnings.said[0], HasSubstr("'input.offsets'"));
      }
    }
    warnings.said.clear();
    {  // what is met is not said, whatever else the weight is read for
      nn::Linear layer(4, 4);
      parallelize_module(*layer, mesh, of_one);
      torch::optim::SGD optimizer(layer->parameters(),
                                  torch::optim::SGDOptions(0.1).weight_decay(0.1));
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        (layer->forward(x).sum() + layer->weight.norm()).backward();
        finish_grad_sync(*layer);
        optimizer.step();
      }
      EXPECT_THAT(warnings.said, IsEmpty());
    }
  });
}

}  // namespace
}  // namespace shardweave

TORCH_LIBRARY(debugtest, m) {
  m.def("sum_rows(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(debugtest, CPU, m) {
  m.impl("sum_rows", [](const at::Tensor& x) { return x.sum({-1}, /*keepdim=*/true); });
}
TORCH_LIBRARY_IMPL(debugtest, Meta, m) {
  m.impl("sum_rows", [](const at::Tensor& x) { return x.sum({-1}, /*keepdim=*/true); });
}
