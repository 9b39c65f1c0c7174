#include "shardweave/dtensor/observe/text_table.h"

#include <algorithm>
#include <utility>

namespace shardweave::dtensor_internal {

TextTable::TextTable(std::vector<std::string> header, std::vector<size_t> right_aligned)
    : right_(header.size()) {
  for (size_t column : right_aligned) right_[column] = true;
  rows_.push_back(std::move(header));
}

std::string TextTable::to_string(size_t indent) const {
  if (rows_.size() == 1) return "";
  std::vector<size_t> widths(right_.size());  // 0: left out
  for (size_t c = 0; c < widths.size(); ++c) {
    for (size_t r = 1; r < rows_.size(); ++r) widths[c] = std::max(widths[c], rows_[r][c].size());
    if (widths[c] > 0) widths[c] = std::max(widths[c], rows_[0][c].size());
  }
  std::string text;
  for (const std::vector<std::string>& row : rows_) {
    std::string line(indent, ' ');
    for (size_t c = 0; c < widths.size(); ++c) {
      if (widths[c] == 0) continue;
      const std::string blanks(widths[c] - row[c].size(), ' ');
      if (line.size() > indent) line += "  ";
      line += right_[c] ? blanks + row[c] : row[c] + blanks;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace shardweave::dtensor_internal
