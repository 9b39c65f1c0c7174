// Safetensors files, their indices, manifests, pickles, archives by torch.save and directories of DCP, from bytes that
// anybody may have written: what is accepted is consistent, and all of it can be read; everything else is an error.
//
//   ./bazelw run //modules/checkpoint/fuzz:parsers -- --seconds=3600 --seed=7
//   ./bazelw run //modules/checkpoint/fuzz:parsers -- --seconds=3600 --only=safetensors
//
// Inputs are good ones with a few changes, shared out among the readers as kReaders says. With libFuzzer they are its
// own: BUILD says how; --only is heard there, too.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "shardweave/modules/checkpoint/manifest.h"
#include "shardweave/modules/checkpoint/pickle.h"
#include "shardweave/modules/checkpoint/safetensors.h"
#include "shardweave/modules/checkpoint/safetensors_index.h"
#include "shardweave/modules/checkpoint/testing/pickled.h"
#include "shardweave/modules/checkpoint/torch_files.h"

namespace shardweave {
namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

class Bytes final : public ReadableFile {
 public:
  explicit Bytes(std::string bytes) : bytes_(std::move(bytes)) {}
  int64_t size() const override { return static_cast<int64_t>(bytes_.size()); }
  absl::Status read_at(int64_t offset, void* out, size_t size) const override {
    require(offset >= 0 && static_cast<uint64_t>(offset) <= bytes_.size() &&
                size <= bytes_.size() - static_cast<uint64_t>(offset),
            "a read outside of the file");
    std::memcpy(out, bytes_.data() + offset, size);
    return absl::OkStatus();
  }
  const std::byte* mapped() const override {
    return reinterpret_cast<const std::byte*>(bytes_.data());
  }

 private:
  const std::string bytes_;
};

// Every file is this one; but those of a name that ends in `other_end`.
class OneFile final : public FileSystem {
 public:
  explicit OneFile(std::string bytes) : bytes_(std::move(bytes)) {}
  OneFile(std::string bytes, std::string other_end, std::string other)
      : bytes_(std::move(bytes)), other_end_(std::move(other_end)), other_(std::move(other)) {}
  absl::StatusOr<std::unique_ptr<ReadableFile>> open(const std::string& path,
                                                     Symlinks /*symlinks*/) override {
    const bool is_other = !other_end_.empty() && path.ends_with(other_end_);
    return std::make_unique<Bytes>(is_other ? other_ : bytes_);
  }
  absl::Status create_directory(const std::string& /*path*/) override { return no(); }
  absl::StatusOr<std::unique_ptr<WritableFile>> create(const std::string& /*path*/) override {
    return no();
  }
  absl::Status sync_directory(const std::string& /*path*/) override { return no(); }
  absl::Status rename(const std::string& /*from*/, const std::string& /*to*/) override {
    return no();
  }
  absl::StatusOr<std::vector<DirectoryEntry>> list(const std::string& /*path*/) override {
    return no();
  }
  absl::Status remove_file(const std::string& /*path*/) override { return no(); }
  absl::Status remove_directory(const std::string& /*path*/) override { return no(); }
  absl::StatusOr<std::unique_ptr<FileLock>> lock(const std::string& /*path*/,
                                                 const std::string& /*holder*/) override {
    return no();
  }

 private:
  static absl::Status no() { return absl::UnimplementedError("not here"); }
  const std::string bytes_, other_end_, other_;
};

int64_t accepted = 0;

void try_safetensors(const std::string& bytes) {
  const auto file = SafetensorsFile::open("x", std::make_shared<OneFile>(bytes));
  if (!file.ok()) return;
  ++accepted;
  int64_t end = 0;
  std::vector<char> all;
  for (const StoredTensor& tensor : (*file)->tensors()) {
    require(tensor.begin == end, "tensors with a hole");
    end = tensor.end;
    require((*file)->find(tensor.name) != nullptr, "a tensor that is not found");
    all.resize(static_cast<size_t>(tensor.end - tensor.begin));
    require((*file)->read(tensor, all.data()).ok(), "a tensor that cannot be read");
    require(all.empty() || std::memcmp(all.data(), (*file)->mapped(tensor), all.size()) == 0,
            "other bytes");
  }
}

void try_manifest(const std::string& text) {
  const auto manifest = Manifest::parse(text);
  if (!manifest.ok()) return;
  ++accepted;
  for (const auto& [name, tensor] : manifest->tensors) {
    int64_t numel = 0;
    for (const SavedPiece& piece : tensor.pieces) {
      numel += piece.box.numel();
      require(contains(whole_box(tensor.shape), piece.box), "a piece outside of its tensor");
      require(manifest->files.contains(piece.file), "a piece in no file");
      for (const SavedPiece& other : tensor.pieces) {
        require(&other == &piece || !intersect(other.box, piece.box).has_value(), "an overlap");
      }
    }
    require(numel == whole_box(tensor.shape).numel(), "a tensor that is not whole");
  }
  const auto again = Manifest::parse(manifest->to_json());
  require(again.ok() && *again == *manifest, "a manifest that does not come back");
}

void try_pickle(const std::string& bytes) {
  const auto pickle = checkpoint_internal::Pickle::parse(bytes, size_t{16} << 20);
  if (!pickle.ok()) {
    require(pickle.status().message().find("at byte ") != std::string::npos, "an error of nowhere");
    return;
  }
  ++accepted;
  (void)pickle->value().entry("w");
}

// Each tensor is no larger than the file, and every byte of it is given.
void read_all(const std::vector<TensorSource>& sources, size_t file_bytes) {
  std::vector<char> once, twice;
  for (const TensorSource& source : sources) {
    require(source.bytes() >= 0 && static_cast<size_t>(source.bytes()) <= file_bytes,
            "more than there is");
    once.assign(static_cast<size_t>(source.bytes()), '\x00');
    twice.assign(once.size(), '\x7f');
    const Box whole = whole_box(source.shape);
    require(source.read(whole, whole, once.data()).ok(), "a tensor that cannot be read");
    require(source.read(whole, whole, twice.data()).ok(), "a tensor that cannot be read twice");
    require(once == twice, "bytes that are not written");
  }
}

void try_torch_save(const std::string& bytes) {
  const auto sources = torch_save_sources("x.pt", std::make_shared<OneFile>(bytes));
  if (!sources.ok()) {
    require(sources.status().message().find("'x.pt'") != std::string::npos, "an error of no file");
    return;
  }
  ++accepted;
  read_all(*sources, bytes.size());
}

// Two pieces of six numbers, one behind the other.
const std::string& dcp_file() {
  static const auto* const kFile = new std::string([] {
    const std::string part = testing::archive(testing::tensor({}) + ".");
    return part + part;
  }());
  return *kFile;
}

void try_dcp(const std::string& bytes) {
  const auto sources = dcp_sources("x", std::make_shared<OneFile>(bytes, ".distcp", dcp_file()));
  if (!sources.ok()) {
    require(sources.status().message().find("'x/") != std::string::npos, "an error of no file");
    return;
  }
  ++accepted;
  read_all(*sources, dcp_file().size());
}

void try_index(const std::string& text) {
  const auto index = parse_safetensors_index(text);
  if (!index.ok()) return;
  ++accepted;
  for (const auto& [name, file] : *index) {
    require(file.find('/') == std::string::npos && file[0] != '.', "a file elsewhere");
  }
}

struct Reader {
  const char* name;
  int share;  // of the inputs
  void (*try_one)(const std::string& bytes);
};
constexpr Reader kReaders[] = {
    {"safetensors", 8, try_safetensors}, {"manifest", 8, try_manifest},     {"index", 2, try_index},
    {"pickle", 2, try_pickle},           {"torch_save", 2, try_torch_save}, {"dcp", 2, try_dcp}};
constexpr size_t kNumReaders = std::size(kReaders);

size_t only = kNumReaders;  // the one that is tried; this: all

// `number` is any.
size_t reader_of(uint64_t number) {
  if (only < kNumReaders) return only;
  uint64_t shares = 0;
  for (const Reader& each : kReaders) shares += static_cast<uint64_t>(each.share);
  number %= shares;
  size_t reader = 0;
  for (; number >= static_cast<uint64_t>(kReaders[reader].share); ++reader) {
    number -= static_cast<uint64_t>(kReaders[reader].share);
  }
  return reader;
}

// Whether the argument is one of ours.
bool take_only(const char* argument) {
  if (std::strncmp(argument, "--only=", 7) != 0) return false;
  std::string names;
  for (size_t i = 0; i < kNumReaders; ++i) {
    if (std::strcmp(argument + 7, kReaders[i].name) == 0) only = i;
    names += std::string(i == 0 ? "" : ", ") + kReaders[i].name;
  }
  if (only < kNumReaders) return true;
  std::fprintf(stderr, "%s: there are: %s\n", argument, names.c_str());
  std::exit(2);
}

#ifndef SHARDWEAVE_LIBFUZZER

// Of tensors of one storage, in several orders.
std::string pickled() {
  using namespace testing;
  return dict({{text("w"), tensor({.first = 1, .sizes = {3}, .strides = {1}}) + "q\x02"},
               {text("v"), "h\x02"},
               {text("t"), tensor({.sizes = {3, 2}, .strides = {1, 3}})},
               {text("f"), tensor({.numel = 24,
                                   .sizes = {2, 4},
                                   .strides = {12, 2},
                                   .dtype = "float8_e4m3fn",
                                   .metadata = "}"})},
               {text("n"), "J\xff\xff\xff\xff"}}) +
         ".";
}

std::string dcp_metadata() {
  using namespace testing;
  const auto size = static_cast<int64_t>(dcp_file().size() / 2);
  return metadata(chunk({0, 0}, {2, 3}) + chunk({2, 0}, {2, 3}),
                  {{.size = size}, {.offset = {2, 0}, .begin = size, .size = size}}, {4, 3});
}

struct Seed {
  size_t reader;
  std::string bytes;
};

std::vector<Seed> seeds() {
  std::vector<Seed> result;
  const auto add = [&](std::string_view name, std::string bytes) {
    for (size_t i = 0; i < kNumReaders; ++i) {
      if (kReaders[i].name == name) result.push_back({i, std::move(bytes)});
    }
  };
  add("pickle", pickled());
  add("torch_save", testing::archive(pickled()));
  add("dcp", dcp_metadata());
  const auto safetensors = [&](const std::string& header, size_t data) {
    const uint64_t size = header.size();
    add("safetensors",
        std::string(reinterpret_cast<const char*>(&size), 8) + header + std::string(data, 'd'));
  };
  safetensors(R"({"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
              R"("v":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},)"
              R"("e":{"dtype":"U8","shape":[0,9],"data_offsets":[24,24]}})",
              26);
  safetensors(
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BOOL","shape":[5],"data_offsets":[0,5]}}  )",
      5);
  safetensors("{}", 0);
  Manifest manifest;
  manifest.step = 3;
  manifest.files = {{"a", {1, 2}}, {"b", {3, 4}}};
  manifest.tensors["w"] = {
      DType::kF32,
      {4, 4},
      {{"a", {{0, 0}, {2, 4}}, 1}, {"a", {{2, 0}, {2, 2}}, 2}, {"b", {{2, 2}, {2, 2}}, 3}}};
  manifest.tensors["n"] = {DType::kI64, {}, {{"b", {{}, {}}, 4, 5}}};
  manifest.tensors["e"] = {DType::kI64, {0}, {}};
  manifest.aliases = {{"v", "w"}};
  manifest.without_state = {"optimizer.w."};
  manifest.values = {{"x", "[1,{\"y\":2.5}]"}};
  manifest.resumes = {"x"};
  add("manifest", manifest.to_json());
  add("index", R"({"metadata":{},"weight_map":{"a":"x.safetensors","b":"y"}})");
  return result;
}

std::string changed(std::string bytes, bool is_safetensors, std::mt19937_64& random) {
  static const char* const kPieces[] = {"0",
                                        "-1",
                                        "1e3",
                                        "9223372036854775807",
                                        "18446744073709551616",
                                        "[",
                                        "]",
                                        "{",
                                        "}",
                                        "\"",
                                        ",",
                                        ":",
                                        "null",
                                        "[0,0]",
                                        "\"a\"",
                                        "4294967296",
                                        "\\u0000",
                                        "\"F64\"",
                                        "2",
                                        "t",
                                        "(",
                                        "R",
                                        "b",
                                        "Q",
                                        "h\x02",
                                        "q\x02",
                                        "\x8a\x08",
                                        "\xff\xff\xff\xff"};
  for (uint64_t i = 0; i <= random() % 4; ++i) {
    const size_t at = random() % bytes.size();
    const size_t many = 1 + random() % 4;
    switch (random() % 6) {
      case 0:
        bytes[at] = static_cast<char>(random());
        break;
      case 1:
        bytes.erase(at, many);
        break;
      case 2:
        bytes.insert(at, kPieces[random() % std::size(kPieces)]);
        break;
      case 3:
        bytes.replace(at, std::min(many, bytes.size() - at),
                      kPieces[random() % std::size(kPieces)]);
        break;
      case 4:
        bytes.insert(at, bytes.substr(random() % bytes.size(), random() % 40));
        break;
      default:
        bytes.resize(at);
    }
    if (bytes.empty()) bytes = "x";
  }
  // A length that fits, for what is behind it to be looked at.
  if (is_safetensors && bytes.size() > 8 && random() % 4 != 0) {
    const size_t end = bytes.rfind('}');
    if (end != std::string::npos && end >= 8) {
      const uint64_t size = end - 7;
      std::memcpy(bytes.data(), &size, 8);
    }
  }
  return bytes;
}

int run(int argc, char** argv) {
  int seconds = 10;
  uint64_t seed = std::random_device()();
  for (int i = 1; i < argc; ++i) {
    if (take_only(argv[i])) continue;
    if (std::strncmp(argv[i], "--seconds=", 10) == 0) seconds = std::atoi(argv[i] + 10);
    if (std::strncmp(argv[i], "--seed=", 7) == 0) seed = std::strtoull(argv[i] + 7, nullptr, 10);
  }
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  std::mt19937_64 random(seed);
  std::vector<std::vector<std::string>> good(kNumReaders);
  for (Seed& one : seeds()) {
    const int64_t before = accepted;
    kReaders[one.reader].try_one(one.bytes);
    require(accepted == before + 1, "a seed was refused");
    good[one.reader].push_back(std::move(one.bytes));
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  int64_t tries[kNumReaders] = {}, taken[kNumReaders] = {};
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 1000; ++i) {
      const size_t reader = reader_of(random());
      const std::vector<std::string>& its = good[reader];
      const int64_t before = accepted;
      kReaders[reader].try_one(changed(its[random() % its.size()], reader == 0, random));
      ++tries[reader];
      taken[reader] += accepted - before;
    }
  }
  for (size_t i = 0; i < kNumReaders; ++i) {
    if (tries[i] == 0) continue;
    std::printf("%s: %lld inputs, %lld of them accepted\n", kReaders[i].name,
                static_cast<long long>(tries[i]), static_cast<long long>(taken[i]));
    require(taken[i] > 0, "nothing was accepted");
  }
  return 0;
}

#endif

}  // namespace
}  // namespace shardweave

#ifdef SHARDWEAVE_LIBFUZZER
// Arguments that begin with -- are not libFuzzer's.
extern "C" int LLVMFuzzerInitialize(const int* argc, char*** argv) {
  for (int i = 1; i < *argc; ++i) (void)shardweave::take_only((*argv)[i]);
  return 0;
}
// The first byte says which reader; not with --only.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const bool has_tag = shardweave::only == shardweave::kNumReaders;
  const size_t reader = shardweave::reader_of(data[0]);
  shardweave::kReaders[reader].try_one(std::string(
      reinterpret_cast<const char*>(data) + (has_tag ? 1 : 0), size - (has_tag ? 1 : 0)));
  return 0;
}
#else
int main(int argc, char** argv) {
  return shardweave::run(argc, argv);
}
#endif
