#include "text.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <vector>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "counter_random.h"

namespace train_gpt {
namespace {

namespace fs = std::filesystem;

constexpr char kLicences[] = "/usr/share/common-licenses";

// In the order of their names; links only repeat what is there already.
std::vector<fs::path> licence_files() {
  std::vector<fs::path> files;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(kLicences, ignored)) {
    if (!entry.is_symlink(ignored) && entry.is_regular_file(ignored)) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

absl::Status append(const fs::path& file, std::string& bytes) {
  std::error_code ignored;
  errno = 0;
  std::ifstream in(file, std::ios::binary);
  if (fs::is_directory(file, ignored)) errno = EISDIR;
  if (!in || errno == EISDIR) {
    return absl::NotFoundError(absl::StrCat("--data=", file.string(), ": ", std::strerror(errno)));
  }
  bytes.append(std::istreambuf_iterator<char>(in), {});
  return absl::OkStatus();
}

}  // namespace

at::Tensor to_tokens(std::string_view bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  at::Tensor tokens = at::empty({1, size}, at::kLong);
  std::transform(bytes.begin(), bytes.end(), tokens.data_ptr<int64_t>(),
                 [](char c) { return static_cast<unsigned char>(c); });
  return tokens;
}

absl::StatusOr<Text> Text::read(const std::string& file) {
  const std::vector<fs::path> files = file.empty() ? licence_files() : std::vector<fs::path>{file};
  if (files.empty()) {
    return absl::NotFoundError(absl::StrCat("no text to train on: there is nothing in ", kLicences,
                                            "; name one by --data=FILE"));
  }
  std::string bytes;
  for (const fs::path& path : files) {
    if (absl::Status status = append(path, bytes); !status.ok()) return status;
  }
  if (bytes.empty())
    return absl::InvalidArgumentError(absl::StrCat("--data=", file, ": the file is empty"));
  return Text(std::move(bytes));
}

Batch Text::batch(const Draw& draw) const {
  Batch batch{at::empty({draw.batch, draw.seq}, at::kLong),
              at::empty({draw.batch, draw.seq}, at::kLong)};
  auto* tokens = batch.tokens.data_ptr<int64_t>();
  auto* targets = batch.targets.data_ptr<int64_t>();
  const uint64_t starts = bytes_.size() - static_cast<uint64_t>(draw.seq);
  for (int64_t row = 0; row < draw.batch; ++row) {
    const uint64_t start =
        random_at(draw.seed, static_cast<uint64_t>(draw.step * draw.batch + row)) % starts;
    for (int64_t i = 0; i < draw.seq; ++i) {
      *tokens++ = static_cast<unsigned char>(bytes_[start + static_cast<uint64_t>(i)]);
      *targets++ = static_cast<unsigned char>(bytes_[start + static_cast<uint64_t>(i) + 1]);
    }
  }
  return batch;
}

}  // namespace train_gpt
