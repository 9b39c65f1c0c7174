// What a process is doing, in words, for those who find out that it had to stop.
//
//   auto activity = std::make_shared<Activity>("starting");
//   say_last_words("rank 2 of 4", activity);
//   activity->set("training step 17 of 60");
//   kill(getpid(), SIGTERM);   // rank 2 of 4, training step 17 of 60: asked to end by signal 15
//
// Threads: any thread at any time.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace train_gpt {

class Activity {
 public:
  explicit Activity(std::string what) : what_(std::move(what)) {}
  void set(std::string what) {
    absl::MutexLock lock(&mutex_);
    what_ = std::move(what);
  }
  std::string get() const {
    absl::MutexLock lock(&mutex_);
    return what_;
  }

 private:
  mutable absl::Mutex mutex_;
  std::string what_ ABSL_GUARDED_BY(mutex_);
};

// From now on this process, asked to end by SIGTERM, says on stderr who it is and what it was
// doing. A launcher asks so when another rank has failed: a rank that waits for that one has a
// moment to find out by itself, and to say more. Called before the process has other threads.
void say_last_words(std::string who, std::shared_ptr<const Activity> activity);

}  // namespace train_gpt
