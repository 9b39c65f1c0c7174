// PyTorch's own files beside the safetensors files of the same models; and damaged ones, which are errors.
#include "shardweave/modules/checkpoint/torch_files.h"

#include <sys/stat.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/modules/checkpoint/pickle.h"
#include "shardweave/modules/checkpoint/testing/pickled.h"

namespace shardweave {
namespace {

using namespace shardweave::testing;
using ::testing::HasSubstr;

const std::string kReferences = "modules/hugging_face/references/";

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::string written(const std::string& name, const std::string& bytes) {
  const std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

std::vector<char> bytes_of(const TensorSource& source) {
  std::vector<char> bytes(static_cast<size_t>(source.bytes()));
  const Box whole = whole_box(source.shape);
  const absl::Status status = source.read(whole, whole, bytes.data());
  EXPECT_TRUE(status.ok()) << status;
  return bytes;
}

void expect_as_safetensors(const std::string& path, const std::string& kind,
                           const std::string& prefix) {
  const auto sources = weight_sources(path);
  ASSERT_TRUE(sources.ok()) << sources.status();
  const auto want = safetensors_sources(kReferences + kind);
  ASSERT_TRUE(want.ok()) << want.status();
  std::map<std::string, const TensorSource*> by_name;
  for (const TensorSource& source : *sources) by_name[source.name] = &source;
  EXPECT_EQ(by_name.size(), want->size());
  for (const TensorSource& each : *want) {
    const auto found = by_name.find(prefix + each.name);
    ASSERT_NE(found, by_name.end()) << each.name;
    EXPECT_EQ(found->second->shape, each.shape);
    EXPECT_EQ(found->second->dtype, each.dtype);
    EXPECT_EQ(bytes_of(*found->second), bytes_of(each)) << each.name;
    if (each.shape.size() != 2) continue;
    // A part of it, which lies across what two ranks have saved.
    const Box part = {{each.shape[0] / 3, each.shape[1] / 4},
                      {each.shape[0] / 2, each.shape[1] / 2}};
    std::vector<float> got(static_cast<size_t>(part.numel())), wanted(got.size());
    EXPECT_TRUE(found->second->read(part, part, got.data()).ok());
    EXPECT_TRUE(each.read(part, part, wanted.data()).ok());
    EXPECT_EQ(got, wanted) << each.name;
  }
}

TEST(TorchFilesTest, StateDictsOfTorchSave) {
  expect_as_safetensors(kReferences + "gpt2_bin", "gpt2", "");
  expect_as_safetensors(kReferences + "gpt2_bin/pytorch_model.bin", "gpt2", "");
}

TEST(TorchFilesTest, DirectoriesOfDcp) {
  expect_as_safetensors(kReferences + "llama_dcp", "llama", "model.");
}

using checkpoint_internal::Pickle;

TEST(TorchFilesTest, DamagedFilesAreErrorsOrTheSame) {
  const std::string whole = read_text(kReferences + "gpt2_bin/pytorch_model.bin");
  for (size_t size = 0; size < whole.size(); size += 997) {
    EXPECT_FALSE(torch_save_sources(written("cut.bin", whole.substr(0, size))).ok()) << size;
  }
  // One bit, anywhere: no crash, and nothing is read from outside of the file.
  for (size_t at = 0; at < whole.size(); at += 29) {
    std::string odd = whole;
    odd[at] = static_cast<char>(odd[at] ^ (1 << (at % 8)));
    const auto sources = torch_save_sources(written("odd.bin", odd));
    if (!sources.ok()) continue;
    for (const TensorSource& source : *sources) {
      if (source.bytes() > 1 << 20) continue;
      std::vector<char> bytes(static_cast<size_t>(source.bytes()));
      const Box box = whole_box(source.shape);
      (void)source.read(box, box, bytes.data());
    }
  }
  const auto foreign = torch_save_sources(written("foreign.bin", "no archive at all"));
  EXPECT_THAT(std::string(foreign.status().message()), HasSubstr("is no zip archive"));
}

TEST(TorchFilesTest, DcpWithoutAFileOrAChunk) {
  namespace fs = std::filesystem;
  const std::string copy = std::string(std::getenv("TEST_TMPDIR")) + "/dcp";
  fs::create_directories(copy);
  for (const char* name : {".metadata", "__0_0.distcp", "__1_0.distcp"}) {
    fs::copy_file(fs::canonical(kReferences + "llama_dcp/" + name), copy + "/" + name,
                  fs::copy_options::overwrite_existing);
  }
  EXPECT_TRUE(dcp_sources(copy).ok());
  fs::resize_file(copy + "/__1_0.distcp", 30000);
  EXPECT_EQ(dcp_sources(copy).status().code(), absl::StatusCode::kDataLoss);
  fs::remove(copy + "/__1_0.distcp");
  EXPECT_EQ(dcp_sources(copy).status().code(), absl::StatusCode::kNotFound);
}

TEST(PickleTest, WhatIsCutShortOrOddIsAnError) {
  const std::string whole = read_text(kReferences + "llama_dcp/.metadata");
  ASSERT_TRUE(Pickle::parse(whole).ok());
  // Where it is cut short it is so everywhere: each byte of the beginning and of the end.
  for (size_t size = 0; size < whole.size();
       size += size < 1000 || size > whole.size() - 500 ? 1 : 61) {
    EXPECT_FALSE(Pickle::parse(std::string_view(whole).substr(0, size)).ok()) << size;
  }
  for (size_t at = 0; at < whole.size(); at += 7) {
    std::string odd = whole;
    odd[at] = static_cast<char>(odd[at] ^ (1 << (at % 8)));
    (void)Pickle::parse(odd);
  }
  // Itself among its items, and for its attributes.
  const auto cycle = Pickle::parse(std::string_view("]q\0h\0a.", 7));
  ASSERT_TRUE(cycle.ok()) << cycle.status();
  EXPECT_EQ(cycle->value().items[0], &cycle->value());
  EXPECT_EQ(cycle->value().entry("x"), nullptr);
  const auto itself = Pickle::parse(std::string("ca\nb\n)Rq\0h\0b.", 13));
  ASSERT_TRUE(itself.ok()) << itself.status();
  EXPECT_EQ(itself->value().entry("x"), nullptr);
  for (const char* odd : {"", ".", "a.", "t.", "K\x01\x85R.", "h\x05.", "(K\x01u.", "\x8a\x09"}) {
    EXPECT_FALSE(Pickle::parse(odd).ok()) << odd;
  }
  const auto numbers = Pickle::parse(std::string("(\x8a\x01\xffM\x00\x01J\xfe\xff\xff\xfft.", 14));
  ASSERT_TRUE(numbers.ok()) << numbers.status();
  EXPECT_EQ(numbers->value().items[0]->number, -1);
  EXPECT_EQ(numbers->value().items[1]->number, 256);
  EXPECT_EQ(numbers->value().items[2]->number, -2);
}

// --- Files as somebody else may make them ---

absl::StatusOr<std::vector<TensorSource>> saved(const std::string& pickle) {
  return torch_save_sources(written("made.pt", archive(pickle)));
}
std::string message_of(const absl::StatusOr<std::vector<TensorSource>>& sources) {
  return std::string(sources.status().message());
}

TEST(TorchFilesTest, TensorsMayShareAStorage) {
  const auto sources =
      saved(dict({{text("a"), tensor({})},
                  {text("nested"),
                   dict({{text("b"), tensor({.first = 2, .sizes = {2}, .strides = {1}})}})},
                  {text("step"), whole(7)},
                  {text("code"), "cos\nsystem\n" + text("touch ran") + "\x85R"}}) +
            ".");
  ASSERT_TRUE(sources.ok()) << sources.status();
  ASSERT_EQ(sources->size(), 2u);
  EXPECT_EQ((*sources)[1].name, "nested.b");
  const std::vector<char> a = bytes_of((*sources)[0]), b = bytes_of((*sources)[1]);
  EXPECT_EQ(std::memcmp(a.data(), kSix.data(), a.size()), 0);
  EXPECT_EQ(std::memcmp(b.data(), kSix.data() + 2, b.size()), 0);
  EXPECT_FALSE(std::filesystem::exists("ran"));  // names are names
}

TEST(TorchFilesTest, SaysWhatIsWrongWithAnArchive) {
  const int64_t huge = int64_t{1} << 62;
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {dict({{text("w"), tensor({.first = 1})}}), "\"w\" reaches out of its storage"},
      {dict({{text("w"), tensor({.first = huge})}}), "\"w\" reaches out of its storage"},
      {dict({{text("w"), tensor({.first = -1})}}), "\"w\" is no tensor"},
      {dict({{text("w"), tensor({.numel = 7})}}), "\"w\" reaches out of its storage"},
      {dict({{text("w"), tensor({.numel = huge})}}), "\"w\" reaches out of its storage"},
      {dict({{text("w"), tensor({.sizes = {3, 3}})}}), "\"w\" reaches out of its storage"},
      {dict({{text("w"), tensor({.sizes = {huge, huge}})}}), "\"w\" is too large"},
      {dict({{text("w"), tensor({.sizes = {-1, 3}})}}), "\"w\" has no shape"},
      {dict({{text("w"), tensor({.sizes = std::vector<int64_t>(65, 1)})}}), "\"w\" has no shape"},
      {dict({{text("w"), tensor({.strides = {1, 2}})}}), "\"w\" is not contiguous"},
      {dict({{text("w"), tensor({.strides = {0, 0}})}}), "\"w\" is not contiguous"},
      {dict({{text("w"), tensor({.storage = "1"})}}), "has no record \"data/1\""},
      {dict({{text("w"), tensor({.storage = "../data.pkl"})}}), "has no record"},
      {dict({{text("w"), tensor({.type = "QInt8Storage"})}}), "has a torch.QInt8Storage"},
      {dict({{text("w"), tensor({})}, {text("w"), tensor({})}}), "\"w\" is there twice"},
      {"cos\nsystem\n" + text("touch ran") + "\x85R", "no dict of tensors"},
      {dict({{text("w"), "ctorch._utils\n_rebuild_sparse_tensor\n)R"}}), "is no dense tensor"},
      {"}", "no dict of tensors"},
      {"K", "data.pkl: the pickle is cut short, at byte 0"}};
  for (const auto& [pickle, message] : wrong) {
    const auto sources = saved(pickle + (pickle == "K" ? "" : "."));
    EXPECT_THAT(message_of(sources), HasSubstr(message));
    EXPECT_THAT(message_of(sources), HasSubstr("made.pt'"));
  }
  EXPECT_FALSE(std::filesystem::exists("ran"));
  const std::string good = dict({{text("w"), tensor({})}}) + ".";
  EXPECT_TRUE(torch_save_sources(written("old.pt", archive(good, ""))).ok());
  const auto big = torch_save_sources(written("big.pt", archive(good, "big")));
  EXPECT_EQ(big.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(message_of(big), HasSubstr("big.pt' has big-endian numbers"));
  const auto packed = torch_save_sources(written("packed.pt", archive(good, "little", true)));
  EXPECT_EQ(packed.status().code(), absl::StatusCode::kUnimplemented) << packed.status();
  EXPECT_THAT(message_of(packed), HasSubstr("\"data/0\" is compressed"));
}

TEST(TorchFilesTest, CutAnywhereIsAnError) {
  const std::string good = archive(dict({{text("w"), tensor({})}}) + ".");
  ASSERT_TRUE(torch_save_sources(written("cut.pt", good)).ok());
  for (size_t size = 0; size < good.size(); size += 4) {  // LibTorch's exceptions take 10 ms each
    EXPECT_FALSE(torch_save_sources(written("cut.pt", good.substr(0, size))).ok()) << size;
  }
}

TEST(TorchFilesTest, OneDictInManyPlaces) {
  // Each of 15 levels has the next one a hundred times.
  std::string level = dict({{text("w"), tensor({})}});
  for (int i = 0; i < 14; ++i) {
    std::string next = level + "q" + std::string(1, static_cast<char>(i)) + "0}(";
    for (int k = 0; k < 100; ++k)
      next += text("k" + std::to_string(k)) + "h" + static_cast<char>(i);
    level = next + "u";
  }
  EXPECT_THAT(message_of(saved(level + ".")), HasSubstr("its names are too long, or too many"));
  std::string deep = tensor({});
  for (int i = 0; i < 1000; ++i) deep = dict({{text("d"), deep}});
  EXPECT_THAT(message_of(saved(deep + ".")), HasSubstr("dicts in dicts"));
  // A dict in itself.
  EXPECT_THAT(message_of(saved("}q" + std::string(1, '\0') + text("d") + "h" +
                               std::string(1, '\0') + "s.")),
              HasSubstr("dicts in dicts"));
}

TEST(TorchFilesTest, SaysWhatIsWrongWithADcpDirectory) {
  namespace fs = std::filesystem;
  const std::string directory = std::string(std::getenv("TEST_TMPDIR")) + "/made_dcp";
  fs::create_directories(directory);
  const std::string part = archive(tensor({}) + ".");
  const auto size = static_cast<int64_t>(part.size());
  written("made_dcp/__0_0.distcp", part + part);
  const auto read = [&](const std::string& chunks, const std::vector<Stored>& stored,
                        const std::vector<int64_t>& shape = {4, 3}) {
    written("made_dcp/.metadata", metadata(chunks, stored, shape));
    return dcp_sources(directory);
  };
  const std::string two = chunk({0, 0}, {2, 3}) + chunk({2, 0}, {2, 3});
  const Stored first = {.size = size}, second = {.offset = {2, 0}, .begin = size, .size = size};
  const auto good = read(two, {first, second});
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_EQ(std::memcmp(bytes_of((*good)[0]).data() + 24, kSix.data(), 24), 0);
  const std::vector<std::pair<absl::StatusOr<std::vector<TensorSource>>, std::string>> wrong = {
      {read(two, {first}), "the chunk [2:4, 0:3] of \"w\" is in no file"},
      {read(two, {first, first}), "a chunk of \"w\" is there twice"},
      {read(two, {first, {.offset = {2, 0}, .size = size}}),
       "two chunks have bytes of '__0_0.distcp'"},
      {read(two, {first, {.offset = {2, 0}, .begin = size, .size = size + 1}}), "is cut short"},
      {read(two, {first, {.offset = {2, 0}, .begin = INT64_MAX, .size = INT64_MAX}}),
       "is cut short"},
      {read(two, {first, {.offset = {2, 0}, .begin = size + 1, .size = size - 1}}),
       "is no zip archive"},
      {read(two, {first, second}, {5, 3}), "chunks of \"w\" do not cover it"},
      {read(two, {first, second}, {3, 3}), "a chunk of \"w\" reaches out of it"},
      {read(two, {first, second}, {INT64_MAX, INT64_MAX}), "\"w\" is too large"},
      {read(chunk({0, 0}, {2, 3}) + chunk({1, 0}, {2, 3}),
            {first, {.offset = {1, 0}, .begin = size, .size = size}}),
       "the chunks [0:2, 0:3] and [1:3, 0:3] of \"w\" overlap"},
      {read(chunk({0, 0}, {2, 2}), {first}, {2, 2}), "of \"w\" has another shape or dtype"},
      {read(two, {first, {.offset = {2, 0}, .file = "../made.pt", .size = size}}),
       "which is no name of a file in this directory"},
      {read(two, {first, {.offset = {2, 0}, .file = ".metadata", .size = size}}),
       "which is no name of a file in this directory"},
      {read("K\x01", {first}), "a chunk of \"w\" is none"},
      {read(two, {first, {.offset = {-1}, .begin = size, .size = size}}),
       "an offset of storage_data is none"}};
  for (const auto& [sources, message] : wrong) {
    EXPECT_THAT(message_of(sources), HasSubstr(message));
    EXPECT_THAT(message_of(sources), HasSubstr("/made_dcp/"));
  }
  // Links are followed, as in Hugging Face's cache; not what is no file.
  const std::string where = directory + "/__1_0.distcp";
  const Stored linked = {.offset = {2, 0}, .file = "__1_0.distcp", .size = size};
  fs::create_symlink("__0_0.distcp", where);
  EXPECT_TRUE(read(two, {first, linked}).ok());
  fs::remove(where);
  fs::create_symlink("__1_0.distcp", where);
  EXPECT_THAT(message_of(read(two, {first, linked})), HasSubstr("__1_0.distcp"));
  fs::remove(where);
  fs::create_symlink("nowhere", where);
  EXPECT_EQ(read(two, {first, linked}).status().code(), absl::StatusCode::kNotFound);
  fs::remove(where);
  fs::create_directory(where);
  EXPECT_THAT(message_of(read(two, {first, linked})), HasSubstr("__1_0.distcp"));
  fs::remove(where);
  ASSERT_EQ(::mkfifo(where.c_str(), 0600), 0);
  EXPECT_THAT(message_of(read(two, {first, linked})), HasSubstr("__1_0.distcp"));
}

TEST(PickleTest, MemoryIsBounded) {
  const std::string many = "(" + std::string(1000, 'N') + "tq" + std::string(1, '\0');
  std::string calls = many;
  for (int i = 0; i < 10000; ++i) calls += "ca\nb\nh" + std::string(1, '\0') + "R0";
  const size_t limit = size_t{16} << 20;
  const auto parsed = Pickle::parse(calls + ".", limit);
  EXPECT_THAT(std::string(parsed.status().message()),
              HasSubstr("needs more than 16777216 bytes, at byte"));
  std::string names = text(std::string(100000, 'm')) + "q" + std::string(1, '\0') + "0";
  for (int i = 0; i < 1000; ++i) names += std::string("h\0h\0\x93", 5) + "0";
  EXPECT_FALSE(Pickle::parse(names + "N.", limit).ok());
  std::string lists = many + "]";
  for (int i = 0; i < 10000; ++i) lists += "(" + std::string("h\0", 2) + "e";
  EXPECT_TRUE(Pickle::parse(lists + ".", limit).ok());
  EXPECT_FALSE(Pickle::parse(std::string(size_t{1} << 20, ']') + ".", limit).ok());
  // Counts of what is not there.
  for (const std::string& huge :
       {"X" + number32(0xffffffff), "B" + number32(0x80000000),
        std::string("\x8d") + std::string(8, '\xff'),
        std::string("\x8e") + std::string(7, '\xff') + "\x7f",
        std::string("r") + number32(0xffffffff), std::string("j") + number32(0xffffffff),
        std::string("\x95") + std::string(8, '\xff')}) {
    EXPECT_FALSE(Pickle::parse(huge).ok());
    EXPECT_FALSE(Pickle::parse(huge + "abc").ok());
  }
}

TEST(PickleTest, DepthIsNoRecursion) {
  std::string lists, tuples = "N", marks(100000, '(');
  for (int i = 0; i < 100000; ++i) lists += "]";
  for (int i = 1; i < 100000; ++i) lists += "a";
  for (int i = 0; i < 100000; ++i) tuples += "\x85";
  EXPECT_TRUE(Pickle::parse(lists + ".").ok());
  EXPECT_TRUE(Pickle::parse(tuples + ".").ok());
  EXPECT_FALSE(Pickle::parse(marks + ".").ok());
  EXPECT_TRUE(Pickle::parse(marks + std::string(100000, 't') + ".").ok());
}

TEST(PickleTest, EveryInstructionOrAnErrorThatSaysWhere) {
  int unknown = 0;
  for (int code = 0; code < 256; ++code) {
    for (const char* before : {"", "N", "NN", "(N", "]N", "}NN", "(NNN"}) {
      for (const char* after : {".", "\x01\x01\x01\x01\x01\x01\x01\x01.", "a\nb\n."}) {
        const auto parsed = Pickle::parse(std::string(before) + static_cast<char>(code) + after);
        if (parsed.ok()) continue;
        EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(", at byte "));
      }
    }
    const auto alone = Pickle::parse("NN" + std::string(1, static_cast<char>(code)));
    if (!alone.ok() &&
        alone.status().message().find("not known here, at byte 2") != std::string::npos) {
      ++unknown;
    }
  }
  EXPECT_GT(unknown, 150);
  // What would import, build or run something by other ways.
  for (const char* odd :
       {"cos\nsystem\n(S'x'\no.", "(S'x'\nios\nsystem\n.", "\x82\x01.", "Px\n."}) {
    EXPECT_FALSE(Pickle::parse(odd).ok()) << odd;
  }
  for (const char* odd : {"}Na.", "K\x01Na.", "K\x01Nb.", "]Nb.", "NNNs."}) {
    EXPECT_FALSE(Pickle::parse(odd).ok()) << odd;
  }
}

}  // namespace
}  // namespace shardweave
