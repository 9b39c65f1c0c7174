// A table as text: columns as wide as they have to be. Internal to dtensor/.
//
//   TextTable table({"calls", "what"}, /*right_aligned=*/{0});
//   table.add({"12", "all_reduce"});
//   std::cout << table.to_string();
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace shardweave::dtensor_internal {

class TextTable {
 public:
  explicit TextTable(std::vector<std::string> header, std::vector<size_t> right_aligned = {});

  // As many cells as the header has.
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

  // Header and rows, each line with `indent` blanks before it; columns without any text in their
  // rows are left out; "" without rows.
  std::string to_string(size_t indent = 0) const;

 private:
  std::vector<std::vector<std::string>> rows_;  // the header first
  std::vector<bool> right_;
};

}  // namespace shardweave::dtensor_internal
