// What the library says while no call fails: who is waited for, which operator gathers. A line each.
// say("rank 0 has waited 10s") writes "shardweave: rank 0 has waited 10s" to stderr; a host may have
// it elsewhere: set_log().
//
// The place is the process's, as stderr is, and not a world's: there is something to say before a
// world is there (who does not come to the rendezvous), after it is gone (a handle that was freed
// twice), and by LibTorch, which knows no worlds. Lines about ranks name them.
#pragma once

#include <functional>
#include <string_view>

namespace shardweave {

using Log = std::function<void(std::string_view line)>;

// Where lines go from now on, in the whole process; an empty function: to stderr. Called by any thread,
// by several at once. The one before is destroyed when no thread is in it any more.
void set_log(Log log);

bool has_log();  // cheap

// Any thread. Without an end of line.
void say(std::string_view line);

}  // namespace shardweave
