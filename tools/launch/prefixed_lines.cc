#include "shardweave/tools/launch/prefixed_lines.h"

#include <algorithm>

namespace shardweave {

std::string PrefixedLines::feed(std::string_view bytes) {
  std::string lines;
  while (!bytes.empty()) {
    const size_t newline = bytes.find('\n');
    const size_t room = kMaxLine - partial_.size();
    const size_t taken = std::min({newline, bytes.size(), room});
    partial_.append(bytes.substr(0, taken));
    bytes.remove_prefix(taken);
    if (taken == newline) bytes.remove_prefix(1);
    if (taken == newline || partial_.size() == kMaxLine) {
      lines += prefix_ + partial_ + "\n";
      partial_.clear();
    }
  }
  return lines;
}

std::string PrefixedLines::finish() {
  if (partial_.empty()) return "";
  std::string line = prefix_ + partial_ + "\n";
  partial_.clear();
  return line;
}

}  // namespace shardweave
