// What became of a model under a plan: the command line of modules/dump.h and its neighbours.
//
//   ./bazelw run //tools:shardweave -- dump --mesh=dp=2,tp=2
//   ./bazelw run //tools:shardweave -- verify --script=model.pt --plan=plan.json --mesh=2x2:dp,tp
//       --inputs='float[8,16]'
//
// and of checkpoints (ckpt.h):
//
//   ./bazelw run //tools:shardweave -- ckpt ls run
//   ./bazelw run //tools:shardweave -- ckpt export run llama-tuned --dtype=bfloat16
//
// Ranks are threads. Exit codes: 0; 1 for what cannot be done; 2 where verify, fsck or diff find something.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "ckpt.h"
#include "models.h"
#include "nlohmann/json.hpp"
#include "shardweave/comm/world.h"
#include "shardweave/dtensor/cost_model.h"
#include "shardweave/dtensor/observe/explain.h"
#include "shardweave/mesh/connected_mesh.h"
#include "shardweave/modules/auto_plan.h"
#include "shardweave/modules/dump.h"
#include "shardweave/modules/list_communication.h"
#include "shardweave/modules/module_memory.h"
#include "shardweave/modules/sharding_plan_json.h"
#include "shardweave/modules/verify.h"
#include "shardweave/tools/working_directory/working_directory.h"

ABSL_FLAG(std::string, model, "mlp", "a model that is built in; `shardweave models` lists them");
ABSL_FLAG(std::string, script, "", "a TorchScript file, in place of --model");
ABSL_FLAG(std::string, mesh, "tp=2", "the mesh: dp=2,tp=2 or 2x2:dp,tp");
ABSL_FLAG(std::string, plan, "",
          "a plan's file (JSON), or zoo: the model's own; default: zoo, of a script none");
ABSL_FLAG(
    std::string, inputs, "",
    "what forward takes: 'float[8,16];long[2,5]<100' (numbers below 100); default: the model's");
ABSL_FLAG(std::string, batch, "", "cut dimension 0 of the inputs along this mesh dimension");
ABSL_FLAG(int64_t, rank, 0, "the rank whose parts are shown");
ABSL_FLAG(bool, backward, true, "of verify and communication: gradients, too");
ABSL_FLAG(double, tolerance, 0, "of verify; 0: by the dtype");
ABSL_FLAG(std::string, cost_model, "", "of auto-plan: the mesh's, a file (JSON)");
ABSL_FLAG(int64_t, memory_limit, 0, "of auto-plan: bytes that a rank has; 0: no limit");
ABSL_FLAG(std::string, out, "", "of auto-plan: where the plan goes (JSON)");
ABSL_FLAG(bool, json, false, "print JSON");
ABSL_FLAG(int64_t, files, 0, "of ckpt reshard and import: how many; default: as many, or 1");
ABSL_FLAG(int64_t, step, 0, "of ckpt import: the checkpoint's");
ABSL_FLAG(std::string, config, "",
          "of ckpt export and import: a config.json, a directory with one, or none; default: the "
          "checkpoint's or the directory's");
ABSL_FLAG(std::string, prefix, "model.",
          "of ckpt export and import: how names of the model begin in a checkpoint");
ABSL_FLAG(std::string, dtype, "", "of ckpt export: bfloat16, ...; default: as it is");
ABSL_FLAG(int64_t, max_file_bytes, 0, "of ckpt export: above it there are several; default: 5e9");
ABSL_FLAG(bool, check, true, "of ckpt reshard and export: compare checksums before");
ABSL_FLAG(bool, allow_unknown, false,
          "of ckpt export and import: pass over keys of config.json that are not known");

namespace {

using namespace shardweave;
using shardweave_tool::Model;
using shardweave_tool::ModelKind;

constexpr char kUsageFormat[] = R"(What became of a model under a plan, and what is in checkpoints.

  shardweave dump           modules, shapes, placements, bytes, and where the plan said so
  shardweave explain        what the plan does to each tensor, before anything is touched
  shardweave explain OP TENSOR...
                            why an operator moves what it moves: the strategies, their costs
                            explain aten::mm 'Float[64, 32] [S(1)]' 'Float[32, 16] [S(0)]'
  shardweave communication  every collective of forward and backward, and the module that needs it
  shardweave memory         bytes of parameters, gradients and activations, module by module
  shardweave verify         runs it beside one device and names the first difference (exit code 2)
  shardweave auto-plan      finds a plan: what each choice costs, and what the next best would
  shardweave models         the models that are built in

Of checkpoints:

%s
  --model=NAME      a model that is built in (default: mlp)
  --script=FILE     a TorchScript file in its place
  --mesh=MESH       dp=2,tp=2 or 2x2:dp,tp; a rank is a thread (default: tp=2)
  --plan=PLAN       FILE.json, zoo (the model's own) or none; default: zoo, of a script none
  --inputs=TENSORS  what forward takes: 'float[8,16];long[2,5]<100' (default: the model's own)
  --batch=DIM       cut dimension 0 of the inputs along this mesh dimension
  --rank=N          the rank whose parts dump and memory show (default: 0)
  --backward=false  verify and communication: forward alone
  --tolerance=X     verify: relative to a tensor's largest element (default: by the dtype)
  --cost_model=FILE auto-plan: of the mesh, as //tools:measure_cost_model prints it
  --memory_limit=N  auto-plan: bytes that a rank has (default: no limit)
  --out=FILE        auto-plan: writes the plan there, as --plan takes it
  --files=N         ckpt reshard, import: how many (default: as many as there are, or 1)
  --step=N          ckpt import: the checkpoint's (default: 0)
  --config=FILE     ckpt export, import: a config.json, a directory with one, or none: names stay as
                    they are (default: the checkpoint's value "config", or the directory's)
  --prefix=TEXT     ckpt export, import: names of the model in a checkpoint (default: model.)
  --dtype=DTYPE     ckpt export: float32, bfloat16, float16 or float64 (default: as it is)
  --max_file_bytes=N ckpt export: above it there are several files and an index (default: 5e9)
  --check=false     ckpt reshard, export: without comparing checksums before
  --allow_unknown   ckpt export, import: passes over keys of config.json that are not known
  --json            JSON on stdout

Exit codes: 0; 1: what was asked cannot be done; 2: verify, ckpt fsck or diff have found something.
)";

std::string usage() {
  std::string text = kUsageFormat;
  return text.replace(text.find("%s"), 2, shardweave_tool::ckpt_usage());
}

absl::Status in_flag(const char* flag, std::string_view value, std::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, "=", std::string(value), ": ", std::string(why)));
}

// "dp=2,tp=2" or "2x2:dp,tp".
absl::StatusOr<DeviceMesh> mesh_from_flag() {
  const std::string given = absl::GetFlag(FLAGS_mesh);
  std::string text = given;
  if (const size_t colon = text.find(':'); colon != std::string::npos) {
    const std::vector<std::string> sizes = absl::StrSplit(text.substr(0, colon), 'x');
    const std::vector<std::string> names = absl::StrSplit(text.substr(colon + 1), ',');
    if (sizes.size() != names.size()) {
      return in_flag("mesh", given,
                     absl::StrCat(sizes.size(), " sizes and ", names.size(), " names"));
    }
    text.clear();
    for (size_t i = 0; i < sizes.size(); ++i) {
      absl::StrAppend(&text, i == 0 ? "" : ",", names[i], "=", sizes[i]);
    }
  }
  absl::StatusOr<DeviceMesh> mesh = DeviceMesh::parse(text);
  if (!mesh.ok()) return in_flag("mesh", given, std::string(mesh.status().message()));
  constexpr int64_t kMostThreads = 256;
  if (mesh->size() > kMostThreads) {
    return in_flag("mesh", given, absl::StrCat("wanted ", kMostThreads, " ranks at most"));
  }
  return mesh;
}

absl::StatusOr<ShardingPlan> plan_from_flag(const ModelKind& kind, const DeviceMesh& mesh) {
  const std::string given = absl::GetFlag(FLAGS_plan);
  if (given.empty() || given == "zoo") {
    return kind.plan == nullptr ? ShardingPlan() : kind.plan(mesh);
  }
  if (given == "none") return ShardingPlan();
  std::ifstream in(given, std::ios::binary);
  if (!in) return in_flag("plan", given, "cannot be read");
  std::ostringstream text;
  text << in.rdbuf();
  absl::StatusOr<ShardingPlan> plan = parse_sharding_plan(text.str());
  if (!plan.ok()) return in_flag("plan", given, std::string(plan.status().message()));
  return plan;
}

absl::StatusOr<at::ScalarType> dtype_of(std::string_view name) {
  const std::string wanted = absl::AsciiStrToLower(std::string(name));
  for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i) {
    const auto dtype = static_cast<at::ScalarType>(i);
    if (absl::AsciiStrToLower(c10::toString(dtype)) == wanted) return dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", std::string(name), "' is no dtype; float, double, bfloat16, long, ..."));
}

struct TensorText {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  std::string rest;  // behind the ']'
};

// "float[8,16] ..."
absl::StatusOr<TensorText> parse_tensor(std::string_view given) {
  const std::string text(absl::StripAsciiWhitespace(std::string(given)));
  const size_t open = text.find('['), close = text.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "': wanted a tensor, as float[8,16]"));
  }
  const absl::StatusOr<at::ScalarType> dtype = dtype_of(text.substr(0, open));
  if (!dtype.ok()) return dtype.status();
  TensorText tensor{.dtype = *dtype};
  const std::string sizes = text.substr(open + 1, close - open - 1);
  if (!sizes.empty()) {
    for (const auto& size : absl::StrSplit(sizes, ',')) {
      int64_t value = 0;
      if (!absl::SimpleAtoi(size, &value) || value < 0) {
        return absl::InvalidArgumentError(absl::StrCat("'", text, "': '", size, "' is no size"));
      }
      tensor.sizes.push_back(value);
    }
  }
  tensor.rest = std::string(absl::StripAsciiWhitespace(text.substr(close + 1)));
  return tensor;
}

// So many numbers from 0 to `below`, all of them if there is room.
at::Tensor spread(int64_t count, int64_t below) {
  const at::Tensor i = at::arange(count, at::kLong);
  return (i + i.div(below, "floor") * 3).remainder(below);
}

absl::StatusOr<std::vector<at::Tensor>> inputs_from_flag(const ModelKind& kind) {
  const std::string given = absl::GetFlag(FLAGS_inputs);
  if (given.empty()) {
    if (kind.inputs == nullptr) {
      return absl::InvalidArgumentError(
          "--inputs is missing: what the script's forward takes, as --inputs='float[8,16]'");
    }
    return kind.inputs();
  }
  std::vector<at::Tensor> inputs;
  for (const auto& text : absl::StrSplit(given, ';')) {
    const absl::StatusOr<TensorText> tensor = parse_tensor(std::string(text));
    if (!tensor.ok()) return in_flag("inputs", given, std::string(tensor.status().message()));
    int64_t below = 2;
    if (!tensor->rest.empty() && (tensor->rest[0] != '<' ||
                                  !absl::SimpleAtoi(tensor->rest.substr(1), &below) || below < 1)) {
      return in_flag("inputs", given,
                     absl::StrCat("'", tensor->rest, "': wanted <NUMBER or nothing"));
    }
    int64_t count = 1;
    for (const int64_t size : tensor->sizes) count *= size;
    at::Tensor values = at::isIntegralType(tensor->dtype, /*includeBool=*/true)
                            ? spread(count, below)
                            : at::arange(count, at::kDouble).sin();
    inputs.push_back(values.view(tensor->sizes).to(tensor->dtype));
  }
  return inputs;
}

void print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  if (text.empty() || text.back() != '\n') std::fputs("\n", stdout);
}

// What a command prints, or nothing; and whether all is well.
struct Outcome {
  std::string text;
  bool ok = true;
};

struct Job {
  DeviceMesh mesh;
  ModelKind kind;
  ShardingPlan plan;
  std::vector<at::Tensor> inputs;

  // As --batch says.
  std::vector<at::Tensor> on(const MeshPtr& connected) const {
    const std::string batch = absl::GetFlag(FLAGS_batch);
    if (batch.empty()) return inputs;
    std::vector<at::Tensor> cut;
    for (const at::Tensor& input : inputs) {
      cut.push_back(
          distribute_tensor(input, connected, {{batch, Shard(0)}}, {.source = std::nullopt}));
    }
    return cut;
  }
};

Outcome run_dump(const Job& job, const MeshPtr& mesh) {
  const Model model = job.kind.make();
  parallelize_module(*model.module, mesh, job.plan, {}, {});
  const ModuleDump d = dump(*model.module);
  return {absl::GetFlag(FLAGS_json) ? d.to_json() : d.to_string()};
}

Outcome run_communication(const Job& job, const MeshPtr& mesh) {
  const Model model = job.kind.make();
  parallelize_module(*model.module, mesh, job.plan, {}, {});
  const std::vector<at::Tensor> inputs = job.on(mesh);
  const CommunicationList list = list_communication(*model.module, [&] {
    const at::Tensor result = model.forward(inputs);
    if (!absl::GetFlag(FLAGS_backward) || !result.requires_grad()) return;
    result.sum().backward();
    finish_grad_sync(*model.module, {});
  });
  return {absl::GetFlag(FLAGS_json) ? list.to_json() : list.to_string()};
}

Outcome run_memory(const Job& job, const MeshPtr& mesh) {
  const Model model = job.kind.make();
  parallelize_module(*model.module, mesh, job.plan, {}, {});
  const std::vector<at::Tensor> inputs = job.on(mesh);
  const ModuleMemory memory = module_memory(*model.module, [&] { return model.forward(inputs); });
  return {absl::GetFlag(FLAGS_json) ? memory.to_json() : memory.to_string()};
}

Outcome run_verify(const Job& job, const MeshPtr& mesh) {
  const Model model = job.kind.make(), reference = job.kind.make();
  parallelize_module(*model.module, mesh, job.plan, {}, {});
  modules_internal::copy_values(*model.module, *reference.module);
  const std::vector<at::Tensor> inputs = job.on(mesh);
  VerifyOptions options{.backward = absl::GetFlag(FLAGS_backward)};
  if (absl::GetFlag(FLAGS_tolerance) > 0) options.tolerance = absl::GetFlag(FLAGS_tolerance);
  const Verification v = verify(
      *model.module, [&] { return model.forward(inputs); }, *reference.module,
      [&] { return reference.forward(job.inputs); }, options);
  return {absl::GetFlag(FLAGS_json) ? v.to_json() : v.to_string(), v.ok()};
}

// On no rank at all, too. The loss is the sum of what forward gives.
Outcome find_plan(const Job& job) {
  CostModel costs;
  if (const std::string file = absl::GetFlag(FLAGS_cost_model); !file.empty()) {
    std::ifstream in(file, std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    if (!in) throw Error(in_flag("cost_model", file, "cannot be read"));
    costs = value_or_throw(cost_model_from_json(text.str(), job.mesh));
  }
  AutoPlanOptions options;
  if (const int64_t limit = absl::GetFlag(FLAGS_memory_limit); limit != 0) {
    options.memory_limit = limit;
  }
  const auto begin = std::chrono::steady_clock::now();
  auto said = begin;
  options.progress = [&](int64_t evaluations, const PlanCost& best) {
    constexpr auto kBetween = std::chrono::seconds(5);
    if (std::chrono::steady_clock::now() - said < kBetween) return;
    said = std::chrono::steady_clock::now();
    std::fprintf(stderr, "%lld of at most %lld plans, the best takes %g s a step\n",
                 static_cast<long long>(evaluations),
                 static_cast<long long>(options.max_evaluations), best.seconds());
  };
  const auto make = [&] {
    const Model model = job.kind.make();
    return StepModel{model.module, [&job, model](const MeshPtr& mesh) {
                       return model.forward(job.on(mesh)).sum();
                     }};
  };
  const AutoPlan found = auto_plan(make, job.mesh, costs, options);
  if (const std::string file = absl::GetFlag(FLAGS_out); !file.empty()) {
    std::ofstream out(file, std::ios::binary);
    out << to_json(found.plan) << "\n";
    if (!out.flush()) throw Error(in_flag("out", file, "cannot be written"));
  }
  return {absl::GetFlag(FLAGS_json)
              ? found.to_json()
              : absl::StrCat(found.to_string(), "the plan: ", to_json(found.plan), "\n")};
}

// What the plan does, on no rank at all.
std::string explain_plan(const Job& job) {
  const Model model = job.kind.make();
  const ResolvedPlan resolved = resolve_sharding_plan(*model.module, job.mesh, job.plan);
  return absl::GetFlag(FLAGS_json) ? resolved_to_json(resolved) : to_string(resolved);
}

// Of an operator on tensors that need no memory.
Outcome explain_operator(const std::vector<std::string>& words, const MeshPtr& mesh) {
  std::vector<c10::IValue> args;
  for (size_t i = 1; i < words.size(); ++i) {
    const TensorText tensor = value_or_throw(parse_tensor(words[i]));
    const Layout layout = value_or_throw(Layout::parse(tensor.rest));
    if (layout.mesh_ndim() != mesh->mesh().ndim()) {
      throw Error(absl::InvalidArgumentError(
          absl::StrCat("'", words[i], "': ", layout.to_string(), " has ", layout.mesh_ndim(),
                       " placements; ", mesh->mesh().to_string(), " wants ", mesh->mesh().ndim())));
    }
    args.emplace_back(empty(tensor.sizes, mesh, layout.placements(),
                            at::TensorOptions(at::kMeta).dtype(tensor.dtype)));
  }
  const Explanation explanation = explain(words[0], std::move(args));
  return {absl::GetFlag(FLAGS_json) ? explanation.to_json() : explanation.to_string()};
}

// On rank threads; the text is that of one of them.
absl::StatusOr<Outcome> on_ranks(const DeviceMesh& mesh,
                                 const std::function<Outcome(const MeshPtr&)>& command) {
  const auto num_ranks = static_cast<int>(mesh.size());
  const int64_t shown = absl::GetFlag(FLAGS_rank);
  if (shown < 0 || shown >= num_ranks) {
    return in_flag("rank", std::to_string(shown), absl::StrCat("there are ", num_ranks, " ranks"));
  }
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  Outcome outcome;
  const absl::Status status = run_ranks(num_ranks, [&](World& world) {
    at::set_num_threads(std::max(1, cores / num_ranks));
    const auto connected = init_device_mesh(world, mesh.dims());
    if (!connected.ok()) return connected.status();
    try {
      Outcome mine = command(*connected);
      if (world.rank() == shown) outcome = std::move(mine);
      return absl::OkStatus();
    } catch (const Error& error) {
      return error.status();
    } catch (const std::exception& error) {
      return absl::InvalidArgumentError(message_of(error));
    }
  });
  if (!status.ok()) return status;
  return outcome;
}

absl::StatusOr<Outcome> run_ckpt(const std::vector<std::string>& words) {
  const shardweave_tool::CkptFlags flags = {.json = absl::GetFlag(FLAGS_json),
                                            .files = absl::GetFlag(FLAGS_files),
                                            .step = absl::GetFlag(FLAGS_step),
                                            .config = absl::GetFlag(FLAGS_config),
                                            .prefix = absl::GetFlag(FLAGS_prefix),
                                            .dtype = absl::GetFlag(FLAGS_dtype),
                                            .max_file_bytes = absl::GetFlag(FLAGS_max_file_bytes),
                                            .verify = absl::GetFlag(FLAGS_check),
                                            .allow_unknown = absl::GetFlag(FLAGS_allow_unknown)};
  absl::StatusOr<shardweave_tool::CkptOutcome> outcome =
      shardweave_tool::run_ckpt({words.begin() + 1, words.end()}, flags);
  if (!outcome.ok()) return outcome.status();
  return Outcome{std::move(outcome->text), outcome->ok};
}

absl::StatusOr<Outcome> run(const std::vector<std::string>& words) {
  const std::string& command = words[0];
  using Command = Outcome (*)(const Job&, const MeshPtr&);
  if (command == "ckpt") return run_ckpt(words);
  const std::vector<std::pair<std::string_view, Command>> commands = {
      {"dump", run_dump},
      {"communication", run_communication},
      {"memory", run_memory},
      {"verify", run_verify}};
  if (command == "models") {
    std::string text;
    nlohmann::ordered_json json = nlohmann::ordered_json::array();
    for (const ModelKind& kind : shardweave_tool::models()) {
      absl::StrAppend(&text, kind.name, "  ", kind.description, "\n");
      json.push_back({{"name", kind.name}, {"description", kind.description}});
    }
    return Outcome{absl::GetFlag(FLAGS_json) ? json.dump() : text};
  }
  const auto found = std::find_if(commands.begin(), commands.end(),
                                  [&](const auto& c) { return c.first == command; });
  if (found == commands.end() && command != "explain" && command != "auto-plan") {
    return absl::InvalidArgumentError(
        absl::StrCat("'", command,
                     "': wanted dump, explain, communication, memory, verify, auto-plan, models or "
                     "ckpt; --help says what they do"));
  }
  const absl::StatusOr<DeviceMesh> mesh = mesh_from_flag();
  if (!mesh.ok()) return mesh.status();
  if (command == "explain" && words.size() > 1) {
    const std::vector<std::string> rest(words.begin() + 1, words.end());
    return on_ranks(*mesh, [&](const MeshPtr& m) { return explain_operator(rest, m); });
  }
  if (words.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", words[1], "': ", command, " takes flags only"));
  }
  const std::string script = absl::GetFlag(FLAGS_script);
  const absl::StatusOr<ModelKind> kind =
      script.empty() ? shardweave_tool::find_model(absl::GetFlag(FLAGS_model))
                     : shardweave_tool::script_model(script);
  if (!kind.ok()) return kind.status();
  const absl::StatusOr<ShardingPlan> plan = plan_from_flag(*kind, *mesh);
  if (!plan.ok()) return plan.status();
  Job job{*mesh, *kind, *plan, {}};
  if (command == "explain") return Outcome{explain_plan(job)};
  if (command != "dump") {
    absl::StatusOr<std::vector<at::Tensor>> inputs = inputs_from_flag(*kind);
    if (!inputs.ok()) return inputs.status();
    job.inputs = *std::move(inputs);
  }
  if (command == "auto-plan") return find_plan(job);
  return on_ranks(*mesh, [&](const MeshPtr& m) { return found->second(job, m); });
}

}  // namespace

int main(int argc, char** argv) {
  constexpr int kFailed = 1, kDiffers = 2;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word != "--help" && word != "-help" && word != "-h" && word != "help") continue;
    print(usage());
    return 0;
  }
  absl::SetProgramUsageMessage(usage());
  shardweave::enter_working_directory();
  std::vector<std::string> words;
  for (const char* word : absl::ParseCommandLine(argc, argv)) words.emplace_back(word);
  words.erase(words.begin());
  if (words.empty()) {
    std::fputs(usage().c_str(), stderr);
    return kFailed;
  }
  absl::StatusOr<Outcome> outcome = Outcome{};
  try {
    outcome = run(words);
  } catch (const std::exception& error) {
    outcome = absl::InvalidArgumentError(message_of(error));
  }
  if (!outcome.ok()) {
    std::fprintf(stderr, "shardweave: %s\n", std::string(outcome.status().message()).c_str());
    return kFailed;
  }
  print(outcome->text);
  return outcome->ok ? 0 : kDiffers;
}
