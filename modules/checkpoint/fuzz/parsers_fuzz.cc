// Safetensors files, their indices, manifests, pickles and archives by torch.save, from bytes that anybody may have written: what is
// accepted is consistent, and all of it can be read; everything else is an error.
//
//   ./bazelw run //modules/checkpoint/fuzz:parsers -- --seconds=3600 --seed=7
//
// Inputs are good ones with a few changes. With libFuzzer they are its own: BUILD says how.
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

#include "caffe2/serialize/inline_container.h"
#include "shardweave/modules/checkpoint/manifest.h"
#include "shardweave/modules/checkpoint/pickle.h"
#include "shardweave/modules/checkpoint/safetensors.h"
#include "shardweave/modules/checkpoint/safetensors_index.h"
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

// Every file is this one.
class OneFile final : public FileSystem {
 public:
  explicit OneFile(std::string bytes) : bytes_(std::move(bytes)) {}
  absl::StatusOr<std::unique_ptr<ReadableFile>> open(const std::string& /*path*/,
                                                     Symlinks /*symlinks*/) override {
    return std::make_unique<Bytes>(bytes_);
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
  const std::string bytes_;
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

void try_torch_save(const std::string& bytes) {
  const auto sources = torch_save_sources("x.pt", std::make_shared<OneFile>(bytes));
  if (!sources.ok()) {
    require(sources.status().message().find("'x.pt'") != std::string::npos, "an error of no file");
    return;
  }
  ++accepted;
  std::vector<char> all;
  for (const TensorSource& source : *sources) {
    require(source.bytes() <= static_cast<int64_t>(bytes.size()), "more than there is");
    all.resize(static_cast<size_t>(source.bytes()));
    const Box whole = whole_box(source.shape);
    require(source.read(whole, whole, all.data()).ok(), "a tensor that cannot be read");
  }
}

void try_all(const std::string& bytes) {
  if (bytes.empty()) return;
  const std::string rest = bytes.substr(1);
  switch (static_cast<unsigned char>(bytes[0]) % 5) {
    case 0:
      return try_safetensors(rest);
    case 1:
      return try_manifest(rest);
    case 3:
      return try_pickle(rest);
    case 4:
      return try_torch_save(rest);
    default:
      if (const auto index = parse_safetensors_index(rest); index.ok()) {
        ++accepted;
        for (const auto& [name, file] : *index) {
          require(file.find('/') == std::string::npos && file[0] != '.', "a file elsewhere");
        }
      }
  }
}

#ifndef SHARDWEAVE_LIBFUZZER

// By protocol 2, which torch.save writes; of a tensor of three numbers from the second on, under two names.
std::string pickled() {
  const auto text = [](const std::string& value) {
    return std::string("X") + static_cast<char>(value.size()) + std::string(3, '\0') + value;
  };
  return "\x80\x02}q" + std::string(1, '\0') + "(" + text("w") +
         "ctorch._utils\n_rebuild_tensor_v2\nq\x01((" + text("storage") + "ctorch\nFloatStorage\n" +
         text("0") + text("cpu") + "K\x04tQK\x01K\x03\x85K\x01\x85\x89" +
         "ccollections\nOrderedDict\n)RtRq\x02" + text("v") + "h\x02" + text("n") +
         "J\xff\xff\xff\xffu.";
}
std::string archived() {
  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  const std::string pickle = pickled();
  const float values[] = {1, 2, 3, 4};
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  writer.writeRecord("byteorder", "little", 6);
  writer.writeRecord("data/0", values, sizeof(values));
  writer.writeEndOfFile();
  return bytes;
}

std::vector<std::string> seeds() {
  std::vector<std::string> result = {"\x03" + pickled(), "\x04" + archived()};
  const auto safetensors = [&](const std::string& header, size_t data) {
    const uint64_t size = header.size();
    result.push_back(std::string(1, '\0') + std::string(reinterpret_cast<const char*>(&size), 8) +
                     header + std::string(data, 'd'));
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
  manifest.tensors["n"] = {DType::kI64, {}, {{"b", {{}, {}}, 4}}};
  manifest.tensors["e"] = {DType::kI64, {0}, {}};
  manifest.aliases = {{"v", "w"}};
  manifest.without_state = {"optimizer.w."};
  manifest.values = {{"x", "[1,{\"y\":2.5}]"}};
  result.push_back("\x01" + manifest.to_json());
  result.push_back(
      "\x02"
      R"({"metadata":{},"weight_map":{"a":"x.safetensors","b":"y"}})");
  return result;
}

std::string changed(std::string bytes, std::mt19937_64& random) {
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
    if (bytes.empty()) bytes = "\x01";
  }
  // A length that fits, for what is behind it to be looked at.
  if (bytes[0] == 0 && bytes.size() > 9 && random() % 4 != 0) {
    const size_t end = bytes.rfind('}');
    if (end != std::string::npos && end >= 9) {
      const uint64_t size = end - 8;
      std::memcpy(bytes.data() + 1, &size, 8);
    }
  }
  return bytes;
}

int run(int argc, char** argv) {
  int seconds = 10;
  uint64_t seed = std::random_device()();
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--seconds=", 10) == 0) seconds = std::atoi(argv[i] + 10);
    if (std::strncmp(argv[i], "--seed=", 7) == 0) seed = std::strtoull(argv[i] + 7, nullptr, 10);
  }
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  std::mt19937_64 random(seed);
  const std::vector<std::string> good = seeds();
  for (const std::string& one : good) {
    const int64_t before = accepted;
    try_all(one);
    require(accepted == before + 1, "a seed was refused");
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  int64_t tries = 0;
  accepted = 0;
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 1000; ++i, ++tries) try_all(changed(good[random() % good.size()], random));
  }
  std::printf("%lld inputs, %lld of them accepted\n", static_cast<long long>(tries),
              static_cast<long long>(accepted));
  require(accepted > 0, "nothing was accepted");
  return 0;
}

#endif

}  // namespace
}  // namespace shardweave

#ifdef SHARDWEAVE_LIBFUZZER
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  shardweave::try_all(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
#else
int main(int argc, char** argv) {
  return shardweave::run(argc, argv);
}
#endif
