#!/usr/bin/env python3
"""Macros that note which functions of the header are called, and which succeed: what the fuzzer has missed is an error.

    calls.py SHARDWEAVE_H > calls.h
"""

import re
import sys

HEAD = """// From shardweave.h, by calls.py.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shardweave.h"

namespace shardweave::capi {

inline constexpr const char* kFunctions[] = {
%s};
inline constexpr size_t kNumFunctions = std::size(kFunctions);

// How often each was called; and has succeeded.
inline std::array<std::atomic<int64_t>, kNumFunctions> calls = {};
inline std::array<std::atomic<int64_t>, kNumFunctions> successes = {};
// In which steps, as a set of bits; and in which this thread is.
inline std::array<std::atomic<uint64_t>, kNumFunctions> called_in = {};
inline thread_local size_t current_step = 0;

inline void note_call(size_t function) {
  calls[function].fetch_add(1, std::memory_order_relaxed);
  called_in[function].fetch_or(uint64_t{1} << current_step, std::memory_order_relaxed);
}
inline void note(size_t function) {
  note_call(function);
  successes[function].fetch_add(1, std::memory_order_relaxed);
}
template <typename Result>
Result noted(size_t function, Result result) {
  note(function);
  return result;
}
inline swv_status* noted(size_t function, swv_status* status) {
  note_call(function);
  if (status == nullptr) successes[function].fetch_add(1, std::memory_order_relaxed);
  return status;
}

}  // namespace shardweave::capi

"""


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        header = re.sub(r"/\*.*?\*/", " ", file.read(), flags=re.S)
    found = re.findall(r"^SWV_API ([^;]*?)\b(swv_\w+)\(", header, re.M)
    sys.stdout.write(HEAD % "".join(f'    "{name}",\n' for _, name in found))
    for i, (result, name) in enumerate(found):
        if result.split() == ["void"]:
            print(f"#define {name}(...) (::shardweave::capi::note({i}), {name}(__VA_ARGS__))")
        elif name.startswith("swv_status_new"):  # which make one and cannot fail
            print(f"#define {name}(...) (::shardweave::capi::note({i}), {name}(__VA_ARGS__))")
        else:
            print(f"#define {name}(...) ::shardweave::capi::noted({i}, {name}(__VA_ARGS__))")


if __name__ == "__main__":
    main()
