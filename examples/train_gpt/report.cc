#include "report.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "shardweave/dtensor/dtensor.h"

namespace train_gpt {
namespace {

// "blocks.3.q.weight" -> "blocks.*.q.weight"
std::string without_numbers(const std::string& name) {
  std::vector<std::string> parts = absl::StrSplit(name, '.');
  for (std::string& part : parts) {
    if (std::all_of(part.begin(), part.end(), absl::ascii_isdigit)) part.assign(1, '*');
  }
  return absl::StrJoin(parts, ".");
}

template <typename Sizes>
std::string shape(const Sizes& sizes) {
  return absl::StrCat("[", absl::StrJoin(sizes, ", "), "]");
}

std::string printable(std::string text) {
  for (char& c : text) {
    if (!absl::ascii_isprint(static_cast<unsigned char>(c)) && c != '\n' && c != '\t') c = '?';
  }
  return text;
}

}  // namespace

void print_layouts(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                   const shardweave::DeviceMesh& mesh, std::ostream& out) {
  out << mesh.to_string() << ", S(d): cut along dimension d, R: replicated\n"
      << absl::StrFormat("  %-22s %-12s %-14s %s\n", "parameter", "shape", "placements",
                         "on rank 0");
  std::vector<std::string> seen;
  for (const auto& [name, tensor] : parameters) {
    const std::string line =
        absl::StrFormat("  %-22s %-12s %-14s %s\n", without_numbers(name), shape(tensor.sizes()),
                        shardweave::layout_of(tensor).to_string(),
                        shape(shardweave::to_local(tensor.detach()).sizes()));
    if (std::find(seen.begin(), seen.end(), line) != seen.end()) continue;
    seen.push_back(line);
    out << line;
  }
  out << std::flush;
}

void print_sample(const std::string& prompt, const std::string& generated, std::ostream& out) {
  out << "sample, after " << prompt.size() << " bytes of the text:\n"
      << printable(prompt) << " ... " << printable(generated) << std::endl;
}

}  // namespace train_gpt
