// Checkpoints: saving a StateDict from all ranks, beside training if wanted, and loading it on any mesh.
//
//   Checkpointer checkpointer("run", mesh, {.keep_last = 3});
//   int64_t step = 0;                                                // steps that are done
//   if (resume) step = checkpointer.load(state).step;                // the newest, in place
//   while (step < steps) {
//     ...
//     if (++step % 100 == 0) checkpointer.save_async(step, state);   // a copy; then beside training
//   }
//   checkpointer.wait();
//
// What several ranks hold alike one of them writes, so that each writes about as much (save_plan.h). A
// rank that loads reads what it keeps and no more, from a checkpoint of any mesh, plan or number of
// ranks. The directory is shared by all ranks (one disk, NFS, Lustre). Files and what a reader may rely on:
// docs/checkpoints.md.
//
// Crash-safe. A checkpoint is there with all its bytes on the disk, or not at all: whatever moment a
// process is killed, the disk is full, or the power goes.
//
// Everything here but wait() and wait_for_copy() is collective over the mesh; errors are thrown as Error, the same on all
// ranks, with the rank in front that has met it; nothing hangs where one rank fails. Threads: as
// tensors. Saving in the background uses a group of ranks of its own.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/modules/checkpoint/checkpoint_directory.h"
#include "shardweave/modules/checkpoint/file_system.h"
#include "shardweave/modules/checkpoint/state_dict.h"

namespace shardweave {

enum class WhenBusy : uint8_t {
  kWait,  // for the save before to end
  kSkip,  // and save nothing, if on any rank it is under way
};

struct CheckpointOptions {
  // How many checkpoints stay; older ones are removed after a new one is there. 0: all. Directories
  // without a manifest are somebody else's, and neither counted nor removed.
  int64_t keep_last = 0;
  WhenBusy when_busy = WhenBusy::kWait;  // of save_async()
  // When save_async() copies parameters and what optimizers keep of them, if these are DTensors in the CPU's
  // memory: before it returns, or beside the forward and backward that follow, which only read them. Then
  // wait_for_copy() has to be called before they are written to. Nothing of the save is on the disk before all
  // ranks have called that, or another function of their Checkpointer.
  bool copy_beside_training = false;
  // How long ranks wait for the slowest to write its part, or to read it.
  absl::Duration timeout = absl::Hours(1);
  // Null: POSIX.
  std::shared_ptr<FileSystem> file_system = {};
};

struct LoadOptions {
  // What the state has and the checkpoint has not stays as it is, and is no error.
  bool allow_missing = false;
  // What the checkpoint has and the state has not is no error: tensors, and values that add_...() functions
  // have added (random numbers, a loader's position, a scaler), without which a run goes on otherwise. Those of
  // set_value() are none in any case.
  bool allow_unexpected = false;
  // Another floating-point dtype is converted instead of refused.
  bool cast = false;
  // Every byte of every file is compared with its checksum first (ranks share them out). Without it every byte
  // that is loaded is, too: what ranks cut anew by a sum that adds up over them, if the checkpoint has such
  // (docs/checkpoints.md, "sum"). But only with it the file that is damaged is named in any case.
  bool verify = false;
  std::shared_ptr<FileSystem> file_system = {};
};

struct LoadedCheckpoint {
  std::string path;  // of the checkpoint
  int64_t step = 0;
  std::vector<std::string> missing;     // tensors and values, where that is allowed
  std::vector<std::string> unexpected;  // likewise
  std::map<std::string, std::string, std::less<>> values;  // all of the checkpoint's: JSON
  // Of tensors, by this rank.
  int64_t bytes_read = 0;
  int64_t bytes_kept = 0;
};

class Checkpointer {
 public:
  // Touches nothing yet. From open() or the first save on the directory is this one's, until it goes.
  Checkpointer(std::string directory, const MeshPtr& mesh, const CheckpointOptions& options = {});
  // Waits. An error that nobody has asked for is a warning. On a mesh that is broken, as by a rank that
  // hangs, the save that is under way is given up, soon; and so it is where other ranks do not ask for their
  // copies (copy_beside_training), as they cannot if this one ends by an exception.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Makes the directory, if it is not there, and takes it: what the first save does, before there is
  // anything to save, so that a run that cannot save says so at its beginning. `done`: how many steps are; a
  // checkpoint of a later one is an error then, as it would be at the first save. Who resumes from this
  // directory calls it without before load(), so that no other run saves in between. May be called again.
  // After wait(). Throws Error, on all ranks: FailedPrecondition if another run saves there, or for that
  // later step; DataLoss if what would be the newest checkpoint has no manifest; PermissionDenied, ... of the
  // disk. Collective.
  void open(std::optional<int64_t> done = std::nullopt);
  // DIRECTORY/step-000100 when it returns. What the optimizer or the model does afterwards is not in it.
  // An error of the save_async() before is a warning here, for that would be a second checkpoint lost.
  // Throws Error: AlreadyExists for a step that is there (that save_async() has saved, too: at the end of a
  // run wait() is enough); FailedPrecondition if another run saves there, or there is a later step (a run
  // that goes back to an older checkpoint saves elsewhere);
  // ResourceExhausted, PermissionDenied, ... of the disk; InvalidArgument for a state or a step that
  // differs between ranks, and a Partial.
  void save(int64_t step, const StateDict& state,
            std::source_location where = std::source_location::current());

  // The same, beside training: returns when this rank's part is copied, but for copy_beside_training (as many
  // bytes of memory as it is to write, which stay for the next copy as long as the Checkpointer is there). One save is under
  // way at a time: see WhenBusy. False: it was skipped. An error of the save comes out of the next
  // save_async(), load(), open() or wait(), and save() warns of it.
  bool save_async(int64_t step, const StateDict& state,
                  std::source_location where = std::source_location::current());
  // With copy_beside_training: until the copy of the save that is under way is there; in front of
  // optimizer.step(), in each step, for it costs nothing without. If a tensor has been written to before, the
  // save fails (FailedPrecondition, which comes out where its other errors do): nothing goes to the disk that was
  // not copied whole. Any other call does it, too. It sees what LibTorch counts as a write
  // (Tensor::_version()), not one through .data() or a pointer. Local; no errors.
  void wait_for_copy();
  // Until what is under way is on the disk. Throws its error, the same on all ranks. Local; but with
  // copy_beside_training it waits for the other ranks to ask for their copies, and so may not be called by one
  // rank alone before they do: they would wait for it in training.
  void wait();

  // The newest checkpoint of the directory, after wait(): see load_checkpoint().
  LoadedCheckpoint load(StateDict& state, const LoadOptions& options = {},
                        std::source_location where = std::source_location::current());

  const std::string& directory() const;

 private:
  class State;
  const std::unique_ptr<State> state_;
};

// `path`: a checkpoint, or a directory of them: then that of the highest step. Writes the values to where
// the state's tensors lie: gradients stay, views see it.
//
// Throws Error before anything is changed, on all ranks: NotFound without a checkpoint (and
// for nothing else: a run may begin anew); InvalidArgument for a state that is another one, with all of what is missing, unexpected,
// of another shape or dtype in one message, and for files that are foreign; DataLoss for a file that
// is gone or cut short, or has another checksum, which says what older checkpoint there is; FailedPrecondition for a symbolic link in the checkpoint.
// Needs memory for the tensors that it loads, a second time.
LoadedCheckpoint load_checkpoint(const std::string& path, StateDict& state, const MeshPtr& mesh,
                                 const LoadOptions& options = {},
                                 std::source_location where = std::source_location::current());

// One checkpoint, by a Checkpointer of its own.
void save_checkpoint(const std::string& directory, int64_t step, const StateDict& state,
                     const MeshPtr& mesh, const CheckpointOptions& options = {},
                     std::source_location where = std::source_location::current());

}  // namespace shardweave
