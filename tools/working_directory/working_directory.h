// Relative paths mean the user's directory, also of programs that `bazel run` has started: it does so in
// its runfiles, and leaves the user's directory in BUILD_WORKING_DIRECTORY.
#pragma once

namespace shardweave {

// Goes there, if `bazel run` has started this process; what does not work is said on stderr. Of a
// process, not of a thread: first thing in main(), before anything is opened.
void enter_working_directory();

}  // namespace shardweave
