#include "shardweave/modules/data/token_windows.h"

#include <algorithm>
#include <utility>

#include "shardweave/comm/str_cat.h"

namespace shardweave {

absl::StatusOr<TokenWindows> TokenWindows::create(std::vector<TokenFile> files, int64_t seq) {
  if (files.empty())
    return absl::InvalidArgumentError("there is no token file; wanted one or more");
  if (seq < 1) return absl::InvalidArgumentError(str_cat("seq is ", seq, "; wanted 1 or more"));
  std::vector<int64_t> ends;
  int64_t longest = 0;
  for (const TokenFile& file : files) {
    ends.push_back((ends.empty() ? 0 : ends.back()) + (file.size() - 1) / seq);
    longest = std::max(longest, file.size());
  }
  if (ends.back() == 0) {
    return absl::InvalidArgumentError(
        str_cat(files.size() == 1 && !files[0].path().empty() ? files[0].path() + " has "
                                                              : "the longest text or file has ",
                longest, " tokens; wanted ", seq, " + 1 or more, for one sample of seq ", seq));
  }
  return TokenWindows(std::move(files), seq, std::move(ends));
}

absl::Status TokenWindows::read(int64_t sample, int64_t begin, absl::Span<int64_t> tokens) const {
  if (sample < 0 || sample >= num_samples()) {
    return absl::OutOfRangeError(str_cat("sample ", sample, "; wanted one of ", num_samples()));
  }
  if (begin < 0 || begin > seq_ + 1 || tokens.size() > static_cast<uint64_t>(seq_ + 1 - begin)) {
    return absl::OutOfRangeError(
        str_cat("a sample has ", seq_ + 1, " tokens; wanted ", tokens.size(), " from ", begin));
  }
  const auto end = std::upper_bound(ends_.begin(), ends_.end(), sample);
  const int64_t first = end == ends_.begin() ? 0 : *(end - 1);
  return files_[static_cast<size_t>(end - ends_.begin())].read((sample - first) * seq_ + begin,
                                                               tokens);
}

}  // namespace shardweave
