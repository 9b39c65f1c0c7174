// Trains a byte-level GPT on a text, sharded over ranks that are threads or processes.
//
//   ./bazelw run //examples:train_gpt
//   ./bazelw run //examples:train_gpt -- --mesh=dp=1,tp=4 --backend=gloo --data=book.txt --check
//   ./bazelw run //examples:train_gpt -- --mesh=dp=8 --device=cuda       # docs/gpu.md
//
// Here: the command line. The backends are in backends.cc. The model is in model.cc, how it is sharded and trained
// in training.cc.

#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "activity.h"
#include "backends.h"
#include "rank.h"
#include "settings.h"
#include "shardweave/comm/world.h"

namespace train_gpt {
namespace {

int run(int argc, char** argv) {
  absl::SetProgramUsageMessage("Trains a byte-level GPT on a text, sharded over several ranks.");
  const absl::StatusOr<Settings> settings = settings_from_flags(absl::ParseCommandLine(argc, argv));
  if (!settings.ok()) return fail("train_gpt", settings.status(), kUsage);
  enter_working_directory();
  return run_on_ranks({.name = "train_gpt",
                       .num_ranks = settings->num_ranks(),
                       .backend = settings->backend,
                       .timeout = settings->timeout,
                       .on_gpus = settings->device == "cuda"},
                      argc, argv, [&](shardweave::World& world, Activity& activity) {
                        return run_rank(world, *settings, activity);
                      });
}

}  // namespace
}  // namespace train_gpt

int main(int argc, char** argv) {
  return train_gpt::run(argc, argv);
}
