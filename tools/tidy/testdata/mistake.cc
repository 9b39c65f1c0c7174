#include "shardweave/tools/tidy/testdata/mistake.h"

#include <string>
#include <utility>

size_t gone(std::string text) {
  const std::string taken = std::move(text);
  return text.size() + taken.size();
}
