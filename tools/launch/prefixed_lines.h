// Puts a prefix before each line of a stream that comes in pieces.
//
//   PrefixedLines lines("[3] ");
//   lines.feed("loss 2.");                  // ""
//   lines.feed("17\nstep 8");               // "[3] loss 2.17\n"
//   lines.finish();                         // "[3] step 8\n"
//
// Lines are held back until they are whole, so that the lines of several streams do not mix; one
// that grows beyond kMaxLine bytes is cut.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

namespace shardweave {

class PrefixedLines {
 public:
  static constexpr size_t kMaxLine = 1 << 16;

  explicit PrefixedLines(std::string prefix) : prefix_(std::move(prefix)) {}

  // The lines that `bytes` has completed, each with the prefix and its newline.
  std::string feed(std::string_view bytes);
  // The last line if it had no newline; it gets one.
  std::string finish();

 private:
  const std::string prefix_;
  std::string partial_;
};

}  // namespace shardweave
