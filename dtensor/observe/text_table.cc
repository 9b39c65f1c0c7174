#include "shardweave/dtensor/observe/text_table.h"

#include <algorithm>
#include <utility>

namespace shardweave::dtensor_internal {
namespace {

// In columns: UTF-8's continuation bytes take none.
size_t width_of(const std::string& cell) {
  return static_cast<size_t>(std::count_if(cell.begin(), cell.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

}  // namespace

TextTable::TextTable(std::vector<std::string> header, std::vector<size_t> right_aligned)
    : right_(header.size()) {
  for (size_t column : right_aligned) right_[column] = true;
  rows_.push_back(std::move(header));
}

std::string TextTable::to_string(size_t indent) const {
  if (rows_.size() == 1) return "";
  std::vector<size_t> widths(right_.size());  // 0: left out
  for (size_t c = 0; c < widths.size(); ++c) {
    for (size_t r = 1; r < rows_.size(); ++r)
      widths[c] = std::max(widths[c], width_of(rows_[r][c]));
    if (widths[c] > 0) widths[c] = std::max(widths[c], width_of(rows_[0][c]));
  }
  std::string text;
  for (const std::vector<std::string>& row : rows_) {
    std::string line(indent, ' ');
    for (size_t c = 0; c < widths.size(); ++c) {
      if (widths[c] == 0) continue;
      const std::string blanks(widths[c] - width_of(row[c]), ' ');
      if (line.size() > indent) line += "  ";
      line += right_[c] ? blanks + row[c] : row[c] + blanks;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace shardweave::dtensor_internal
