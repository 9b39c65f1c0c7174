// PyTorch's own files beside the safetensors files of the same models; and damaged ones, which are errors.
#include "shardweave/modules/checkpoint/torch_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/modules/checkpoint/pickle.h"
#include "shardweave/modules/checkpoint/testing/faulty_file_system.h"
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

// By make_torch_files.py.
TEST(TorchFilesTest, TensorsAsPythonSeldomSavesThem) {
  const auto want = safetensors_sources(kReferences + "odd/odd.safetensors");
  ASSERT_TRUE(want.ok()) << want.status();
  for (const char* path : {"odd/odd.pt", "odd_dcp"}) {
    SCOPED_TRACE(path);
    const auto sources = weight_sources(kReferences + path);
    ASSERT_TRUE(sources.ok()) << sources.status();
    EXPECT_EQ(sources->size(), want->size());
    for (const TensorSource& each : *want) {
      SCOPED_TRACE(each.name);
      const auto found = std::find_if(sources->begin(), sources->end(),
                                      [&](const auto& source) { return source.name == each.name; });
      ASSERT_NE(found, sources->end());
      EXPECT_EQ(found->shape, each.shape);
      EXPECT_EQ(found->dtype, each.dtype);
      EXPECT_EQ(bytes_of(*found), bytes_of(each));
      Box part = whole_box(each.shape);
      for (size_t d = 0; d < part.shape.size(); ++d) {
        part.offset[d] = part.shape[d] / 3;
        part.shape[d] = (part.shape[d] + 1) / 2;
      }
      std::vector<char> got(static_cast<size_t>(part.numel() * element_size(each.dtype)));
      std::vector<char> wanted(got.size());
      EXPECT_TRUE(found->read(part, part, got.data()).ok());
      EXPECT_TRUE(each.read(part, part, wanted.data()).ok());
      EXPECT_EQ(got, wanted);
    }
  }
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

TEST(PickleTest, WhatPythonWritesBesideWeights) {
  // A seed of more than 64 bits, by LONG1 and by LONG4; a deque; bytearray.
  const std::string seed = std::string("\x8a\x09") + std::string(8, '\0') + "\x01";
  const std::string negative = "\x8b" + number32(9) + std::string(8, '\0') + "\xff";
  const std::string deque =
      "ccollections\ndeque\n)R(K\x01K\x02"
      "e";
  const std::string bytes = "\x96\x02" + std::string(7, '\0') + "ab";
  const auto parsed = Pickle::parse("(" + seed + negative + deque + bytes + "(0t.");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(parsed->value().items.size(), 4u);
  EXPECT_EQ(parsed->value().items[0]->real, 0x1p64);
  EXPECT_EQ(parsed->value().items[1]->real, -0x1p64);
  EXPECT_TRUE(parsed->value().items[2]->is_call_of("collections.deque"));
  EXPECT_EQ(parsed->value().items[3]->text, "ab");
  EXPECT_FALSE(Pickle::parse("\x8a\x09"
                             "abc.")
                   .ok());
  EXPECT_FALSE(Pickle::parse("\x8b" + number32(0xffffffff) + "abc.").ok());
  // Of two values of a key the later is Python's.
  const auto twice = Pickle::parse(dict({{text("k"), whole(1)}, {text("k"), whole(2)}}) + ".");
  ASSERT_TRUE(twice.ok()) << twice.status();
  EXPECT_EQ(twice->value().entry("k")->number, 2);
  EXPECT_THAT(std::string(Pickle::parse("ca\nb\n)R}b}b.").status().message()),
              HasSubstr("attributes twice"));
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

// No tensor is passed over: it has a name, or is an error.
TEST(TorchFilesTest, TensorsUnderNumbersAndInLists) {
  const std::string one = tensor({.sizes = {1}, .strides = {1}});
  const auto names_of = [](const absl::StatusOr<std::vector<TensorSource>>& sources) {
    std::vector<std::string> names;
    if (!sources.ok()) return std::vector<std::string>{std::string(sources.status().message())};
    for (const TensorSource& source : *sources) names.push_back(source.name);
    return names;
  };
  using Names = std::vector<std::string>;
  const std::string list = "](" + one + whole(3) + dict({{text("b"), one}}) + "e";
  EXPECT_EQ(names_of(saved(dict({{text("state"),
                                  dict({{whole(0), dict({{text("m"), one}})}, {whole(-7), one}})},
                                 {text("a"), list},
                                 {text("pair"), "(" + one + one + "t"}}) +
                           ".")),
            (Names{"state.0.m", "state.-7", "a.0", "a.2.b", "pair.0", "pair.1"}));
  EXPECT_EQ(names_of(saved(list + ".")), (Names{"0", "2.b"}));
  EXPECT_THAT(message_of(saved(dict({{whole(0), one}, {text("0"), one}}) + ".")),
              HasSubstr("\"0\" is there twice"));
  // A long list of numbers costs no names.
  std::string numbers = "](";
  for (int i = 0; i < 300'000; ++i) numbers += whole(i);
  EXPECT_EQ(names_of(saved(dict({{text("losses"), numbers + "e"}, {text("w"), one}}) + ".")),
            Names{"w"});
  const std::string object = "cargparse\nNamespace\n)\x81";
  EXPECT_THAT(
      message_of(saved(dict({{text("args"), object + dict({{text("w"), one}}) + "b"}}) + ".")),
      HasSubstr("\"args\" has a tensor in an object"));
  EXPECT_THAT(
      message_of(saved(dict({{text("a"), dict({{"\x88", list}})}}) + ".")),
      HasSubstr("\"a\" has a tensor under a key that is neither a text nor a whole number"));
  EXPECT_EQ(names_of(saved(dict({{text("args"), object + dict({{text("lr"), whole(1)}}) + "b"},
                                 {"\x88", whole(1)},
                                 {text("w"), one}}) +
                           ".")),
            Names{"w"});
  // A list in itself.
  EXPECT_THAT(message_of(saved(std::string("]q\0h\0a.", 7))),
              HasSubstr("dicts in dicts, or lists"));
}

// Of `all`, element by element.
std::vector<float> picked(const std::vector<float>& all, const PickledTensor& t, const Box& part,
                          const Box& to) {
  std::vector<float> out(static_cast<size_t>(to.numel()), -1.F);
  std::vector<int64_t> index(part.shape.size(), 0);
  while (true) {
    int64_t from = t.first, at = 0;
    for (size_t d = 0; d < index.size(); ++d) {
      from += (part.offset[d] + index[d]) * t.strides[d];
      at = at * to.shape[d] + part.offset[d] + index[d] - to.offset[d];
    }
    out[static_cast<size_t>(at)] = all[static_cast<size_t>(from)];
    size_t d = index.size();
    while (d > 0 && ++index[d - 1] == part.shape[d - 1]) index[--d] = 0;
    if (d == 0) return out;
  }
}

TEST(TorchFilesTest, TensorsLieInTheirStorageAsTheyLike) {
  std::vector<float> all(2'100'000);
  std::iota(all.begin(), all.end(), 0.F);
  const auto numel = static_cast<int64_t>(all.size());
  const std::vector<PickledTensor> cases = {
      {.sizes = {3, 2}, .strides = {1, 3}},                     // transposed
      {.first = 5, .sizes = {2, 2}, .strides = {3, 2}},         // sliced
      {.sizes = {2, 3}, .strides = {0, 1}},                     // expanded
      {.first = 9, .sizes = {7, 1, 5}, .strides = {5, 77, 1}},  // contiguous
      {.sizes = {4, 3, 50, 60}, .strides = {9000, 1, 180, 3}},  // channels last
      {.sizes = {700, 3000}, .strides = {1, 700}},              // 8 MB, transposed
      {.first = 1, .sizes = {999'983}, .strides = {2}},         // every other one
      {.sizes = {1001}, .strides = {2000}},                     // gaps of more than a page
      {.sizes = {3, 333'333, 2}, .strides = {700'000, 2, 1}},   // long stretches with gaps
      {.sizes = {2, 5, 100'003}, .strides = {1, 1000, 20}},     // they overlap
      {.sizes = {}, .strides = {}},
      {.sizes = {3, 0, 2}, .strides = {1, 5, 9}},
  };
  Entries entries;
  for (size_t i = 0; i < cases.size(); ++i) {
    PickledTensor t = cases[i];
    t.numel = numel;
    entries.emplace_back(text("t" + std::to_string(i)), tensor(t));
  }
  const auto sources = torch_save_sources(
      written("strided.pt", archive_of(dict(entries) + ".", all.data(), all.size() * 4)));
  ASSERT_TRUE(sources.ok()) << sources.status();
  ASSERT_EQ(sources->size(), cases.size());
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    const TensorSource& source = (*sources)[i];
    const Box whole = whole_box(source.shape);
    Box part = whole, to = whole;
    for (size_t d = 0; d < part.shape.size(); ++d) {
      part.offset[d] = part.shape[d] / 3;
      part.shape[d] = (part.shape[d] + 1) / 2;
      to.offset[d] = part.offset[d] / 2;
      to.shape[d] = part.offset[d] + part.shape[d] - to.offset[d];
    }
    for (const auto& [some, around] : {std::pair(whole, whole), {part, part}, {part, to}}) {
      std::vector<float> got(static_cast<size_t>(around.numel()), -1.F);
      const absl::Status status = source.read(some, around, got.data());
      ASSERT_TRUE(status.ok()) << status;
      if (some.numel() == 0) continue;
      EXPECT_TRUE(got == picked(all, cases[i], some, around));
    }
  }
}

TEST(TorchFilesTest, AStridedTensorIsReadInFewPieces) {
  std::vector<float> all(300'000);
  const auto numel = static_cast<int64_t>(all.size());
  const std::string path = written(
      "few.pt",
      archive_of(
          dict({{text("w"), tensor({.numel = numel, .sizes = {500, 600}, .strides = {1, 500}})}}) +
              ".",
          all.data(), all.size() * 4));
  const auto fs = std::make_shared<FaultyFileSystem>(Fault());
  const auto sources = torch_save_sources(path, fs);
  ASSERT_TRUE(sources.ok()) << sources.status();
  // What tells where it is: neither the tensor nor all of the file.
  EXPECT_LT(fs->bytes_read(), 5000);
  const int64_t before = fs->bytes_read();
  EXPECT_EQ(bytes_of((*sources)[0]).size(), all.size() * 4);
  EXPECT_EQ(fs->bytes_read() - before, static_cast<int64_t>(all.size() * 4));
}

TEST(TorchFilesTest, TypesThatHaveNoStorageOfTheirOwn) {
  const auto sources = saved(
      dict({{text("e4"), tensor({.numel = 24, .first = 2, .dtype = "float8_e4m3fn"})},
            {text("e5"), tensor({.numel = 24,
                                 .sizes = {2, 2},
                                 .strides = {1, 2},
                                 .dtype = "float8_e5m2",
                                 .metadata = dict({{text("conj"), "\x89"}})})},
            {text("u2"), tensor({.numel = 24, .first = 1, .dtype = "uint16"})},
            {text("u8"), tensor({.numel = 24, .sizes = {3}, .strides = {1}, .dtype = "uint64"})}}) +
      ".");
  ASSERT_TRUE(sources.ok()) << sources.status();
  ASSERT_EQ(sources->size(), 4u);
  const auto* bytes = reinterpret_cast<const char*>(kSix.data());
  EXPECT_EQ((*sources)[0].dtype, DType::kF8E4M3);
  EXPECT_EQ(bytes_of((*sources)[0]), std::vector<char>(bytes + 2, bytes + 8));
  EXPECT_EQ((*sources)[1].dtype, DType::kF8E5M2);
  EXPECT_EQ(bytes_of((*sources)[1]), (std::vector<char>{bytes[0], bytes[2], bytes[1], bytes[3]}));
  EXPECT_EQ((*sources)[2].dtype, DType::kU16);
  EXPECT_EQ(bytes_of((*sources)[2]), std::vector<char>(bytes + 2, bytes + 14));
  EXPECT_EQ((*sources)[3].dtype, DType::kU64);
  EXPECT_EQ(bytes_of((*sources)[3]), std::vector<char>(bytes, bytes + 24));
}

// What nn.Parameter and tensors with attributes of their own become.
TEST(TorchFilesTest, ParametersAndTensorsWithAttributes) {
  const auto parameter = [](const std::string& function, const std::string& of) {
    return "ctorch._utils\n" + function + "\n(" + of + "\x88" + "ccollections\nOrderedDict\n)R}tR";
  };
  const auto typed = [](const std::string& type) {
    const auto [name, args] = tensor_call({});
    return "ctorch._tensor\n_rebuild_from_type_v2\n(" + name + type + args +
           dict({{text("tag"), whole(1)}}) + "tR";
  };
  const std::string with_state =
      parameter("_rebuild_parameter_with_state", parameter("_rebuild_parameter", tensor({})));
  const auto sources = saved(dict({{text("a"), parameter("_rebuild_parameter", tensor({}))},
                                   {text("b"), with_state},
                                   {text("c"), typed("ctorch\nTensor\n")},
                                   {text("d"), typed("ctorch.nn.parameter\nParameter\n")}}) +
                             ".");
  ASSERT_TRUE(sources.ok()) << sources.status();
  ASSERT_EQ(sources->size(), 4u);
  for (const TensorSource& source : *sources) {
    EXPECT_EQ(std::memcmp(bytes_of(source).data(), kSix.data(), 24), 0) << source.name;
  }
  // A class of somebody's is an error, not passed over.
  const auto foreign = saved(dict({{text("w"), typed("ctorchao.dtypes\nAffine\n")}}) + ".");
  EXPECT_EQ(foreign.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(message_of(foreign), HasSubstr("\"w\" is no dense tensor"));
  std::string deep = tensor({});
  for (int i = 0; i < 10; ++i) deep = parameter("_rebuild_parameter", deep);
  EXPECT_THAT(message_of(saved(dict({{text("w"), deep}}) + ".")), HasSubstr("is no dense tensor"));
  EXPECT_THAT(message_of(saved(dict({{text("w"), "ccollections\nOrderedDict\n(]tR"}}) + ".")),
              HasSubstr("OrderedDict"));
}

// --- Archives by other hands ---

std::string number16(uint64_t value) {
  return number32(value).substr(0, 2);
}
std::string number64(uint64_t value) {
  return number32(value) + number32(value >> 32);
}
struct ZipRecord {
  std::string name, data;
  uint64_t method = 0, flags = 0;
  std::string header_name = "";    // in front of the data; "": as in the directory
  int64_t header = -1;             // where the directory says that it begins; -1: where it does
  int64_t size = -1, packed = -1;  // likewise
  bool is_wide = false;            // numbers of 64 bits
};
struct ZipFile {
  std::vector<ZipRecord> records;
  bool is_wide = false;
  std::string comment = "";
  int64_t count = -1, bytes = -1, offset = -1;  // of the directory; -1: as they are
};
std::string zip(const ZipFile& file) {
  std::string all, directory;
  for (const ZipRecord& each : file.records) {
    const std::string& local = each.header_name.empty() ? each.name : each.header_name;
    const size_t begin = all.size();
    // Sizes are said behind it, as the flag 8 wants.
    all += "PK\3\4" + number16(20) + number16(each.flags | 8) + number16(each.method) +
           number32(0) + number32(0) + number32(0) + number32(0) + number16(local.size()) +
           number16(5) + local + "extra" + each.data + "PK\7\b" + number32(0) +
           number32(each.data.size()) + number32(each.data.size());
    const uint64_t header = each.header < 0 ? begin : static_cast<uint64_t>(each.header);
    const uint64_t size = each.size < 0 ? each.data.size() : static_cast<uint64_t>(each.size);
    const uint64_t packed = each.packed < 0 ? each.data.size() : static_cast<uint64_t>(each.packed);
    const std::string wide = each.is_wide ? number16(1) + number16(24) + number64(size) +
                                                number64(packed) + number64(header)
                                          : "";
    const auto narrow = [&](uint64_t value) { return number32(each.is_wide ? 0xffffffff : value); };
    directory += "PK\1\2" + number16(20) + number16(20) + number16(each.flags | 8) +
                 number16(each.method) + number32(0) + number32(0) + narrow(packed) + narrow(size) +
                 number16(each.name.size()) + number16(wide.size()) + number16(0) + number16(0) +
                 number16(0) + number32(0) + narrow(header) + each.name + wide;
  }
  const uint64_t count = file.count < 0 ? file.records.size() : static_cast<uint64_t>(file.count);
  const uint64_t bytes = file.bytes < 0 ? directory.size() : static_cast<uint64_t>(file.bytes);
  const uint64_t offset = file.offset < 0 ? all.size() : static_cast<uint64_t>(file.offset);
  const uint64_t end = all.size() + directory.size();
  all += directory;
  if (file.is_wide) {
    all += "PK\6\6" + number64(44) + number16(20) + number16(20) + number32(0) + number32(0) +
           number64(count) + number64(count) + number64(bytes) + number64(offset) + "PK\6\7" +
           number32(0) + number64(end) + number32(1);
  }
  const auto narrow = [&](uint64_t value) { return number32(file.is_wide ? 0xffffffff : value); };
  const std::string count16 = number16(file.is_wide ? 0xffff : count);
  return all + "PK\5\6" + number16(0) + number16(0) + count16 + count16 + narrow(bytes) +
         narrow(offset) + number16(file.comment.size()) + file.comment;
}

TEST(TorchFilesTest, ArchivesOfOtherTools) {
  const std::string pickle = dict({{text("w"), tensor({})}}) + ".";
  const std::string data(reinterpret_cast<const char*>(kSix.data()), 24);
  const ZipRecord pkl = {.name = "a/data.pkl", .data = pickle};
  const ZipRecord zero = {.name = "a/data/0", .data = data};
  const auto with = [](ZipRecord record, const auto& change) {
    change(record);
    return record;
  };
  const ZipRecord wide = with(zero, [](ZipRecord& r) { r.is_wide = true; });
  const ZipRecord version = {.name = "a/version", .data = "3\n"};
  for (const ZipFile& good :
       std::vector<ZipFile>{{{pkl, zero}},
                            {{pkl, zero, version, {.name = "a/folder/"}}},
                            {{pkl, wide}, true},
                            {.records = {pkl, zero}, .comment = std::string(60'000, 'c')}}) {
    const auto sources = torch_save_sources(written("other.pt", zip(good)));
    ASSERT_TRUE(sources.ok()) << sources.status();
    EXPECT_EQ(std::memcmp(bytes_of((*sources)[0]).data(), data.data(), data.size()), 0);
  }
  const int64_t second = static_cast<int64_t>(zip({{pkl}}).find("PK\1\2"));  // where it begins
  const std::vector<std::pair<ZipFile, std::string>> wrong = {
      {{{pkl, zero, zero}}, "its record \"a/data/0\" is there twice"},
      {{{pkl, with(zero, [](ZipRecord& r) { r.header = 0; })}}, "two of its records overlap"},
      {{{pkl, with(zero, [&](ZipRecord& r) { r.header = second - 25; })}},
       "two of its records overlap"},
      {{{with(pkl, [](ZipRecord& r) { r.size = r.packed = 228; }), zero}},
       "two of its records overlap"},
      {{{pkl, with(zero, [](ZipRecord& r) { r.size = r.packed = 41; })}},
       "reaches into what is behind it"},
      {{{pkl, with(zero, [](ZipRecord& r) { r.size = r.packed = 4000; })}}, "reaches out of it"},
      {{{pkl, with(zero, [](ZipRecord& r) { r.header = 4000; })}}, "reaches out of it"},
      {{{pkl, with(wide, [](ZipRecord& r) { r.header = INT64_MAX; })}}, "reaches out of it"},
      {{{pkl, with(wide, [](ZipRecord& r) { r.size = r.packed = INT64_MAX; })}},
       "reaches out of it"},
      {{{pkl, with(zero, [](ZipRecord& r) { r.size = 23; })}}, "\"data/0\" has two sizes"},
      {{{pkl, with(zero, [](ZipRecord& r) { r.header_name = "a/data/1"; })}},
       "\"data/0\" has no header, or that of another"},
      {{{pkl, with(zero, [](ZipRecord& r) { r.method = 8; })}}, "\"data/0\" is compressed"},
      {{{pkl, with(zero, [](ZipRecord& r) { r.flags = 1; })}}, "\"data/0\" is encrypted"},
      {{{with(pkl, [](ZipRecord& r) { r.method = 8; }), zero}}, "\"data.pkl\" is compressed"},
      {{{pkl, zero, {.name = "a/version", .data = "11"}}}, "is of version 11"},
      {{{pkl, zero, {.name = "a/version", .data = "x"}}}, "its version is no number"},
      {{{pkl, zero, {.name = "a/version", .data = std::string(21, '1')}}},
       "its version is too large"},
      {{{pkl, zero, {.name = "a/byteorder", .data = "big"}}}, "big-endian"},
      {{{zero}}, "has no record \"data.pkl\""},
      {{{{.name = "data.pkl", .data = pickle}}}, "its records are in no folder"},
      {{.records = {pkl, zero}, .count = 3}, "its directory is cut short"},
      {{.records = {pkl, zero}, .count = 65535}, "its directory is cut short"},
      {{.records = {pkl, zero}, .bytes = 60}, "its directory is cut short"},
      {{.records = {pkl, zero}, .offset = 0}, "an entry is none"},
      {{.records = {pkl, zero}, .offset = 100'000}, "lies outside of it"},
      {{.records = {pkl, zero}, .is_wide = true, .offset = INT64_MAX}, "lies outside of it"},
      {{.records = {pkl, zero}, .is_wide = true, .bytes = INT64_MAX}, "lies outside of it"},
      {{.records = {pkl, zero}, .is_wide = true, .count = INT64_MAX}, "is cut short"}};
  for (const auto& [file, message] : wrong) {
    const auto sources = torch_save_sources(written("other.pt", zip(file)));
    EXPECT_THAT(message_of(sources), HasSubstr(message));
    EXPECT_THAT(message_of(sources), HasSubstr("other.pt'"));
  }
  std::string two = zip({{pkl, wide}, true});
  two.replace(two.size() - 22 + 8, 4, number16(1) + number16(1));
  EXPECT_THAT(message_of(torch_save_sources(written("other.pt", two))),
              HasSubstr("it has two directories"));
}

TEST(TorchFilesTest, SeveralFilesWithAnIndex) {
  const std::string directory = std::string(std::getenv("TEST_TMPDIR")) + "/bins";
  std::filesystem::create_directories(directory);
  const auto file = [&](const std::string& name, const std::string& tensor_name, int64_t first) {
    written("bins/" + name,
            archive(dict({{text(tensor_name),
                           tensor({.first = first, .sizes = {2}, .strides = {1}})}}) +
                    "."));
  };
  const auto index = [&](const std::string& map) {
    return written("bins/pytorch_model.bin.index.json",
                   R"({"metadata": {"total_size": 16}, "weight_map": )" + map + "}");
  };
  file("pytorch_model-00001-of-00002.bin", "a", 0);
  file("pytorch_model-00002-of-00002.bin", "b", 2);
  const std::string path = index(
      R"({"b": "pytorch_model-00002-of-00002.bin", "a": "pytorch_model-00001-of-00002.bin"})");
  for (const std::string& from : {directory, path}) {
    const auto sources = weight_sources(from);
    ASSERT_TRUE(sources.ok()) << sources.status();
    ASSERT_EQ(sources->size(), 2u);
    EXPECT_EQ((*sources)[1].name, "b");
    EXPECT_EQ(std::memcmp(bytes_of((*sources)[1]).data(), kSix.data() + 2, 8), 0);
  }
  index(R"({"b": "pytorch_model-00001-of-00002.bin"})");
  EXPECT_THAT(message_of(weight_sources(directory)),
              HasSubstr("no tensor \"b\", which the index says is there"));
  index(R"({"b": "../bins/pytorch_model-00002-of-00002.bin"})");
  EXPECT_THAT(message_of(weight_sources(directory)), HasSubstr("the name of a file beside"));
  index(R"({"b": "pytorch_model-00003-of-00002.bin"})");
  EXPECT_EQ(weight_sources(directory).status().code(), absl::StatusCode::kNotFound);
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
      {dict({{text("w"), tensor({.strides = {4, 1}})}}), "\"w\" reaches out of its storage"},
      {dict({{text("w"), tensor({.first = 1, .strides = {1, 2}})}}),
       "\"w\" reaches out of its storage"},
      {dict({{text("w"), tensor({.strides = {INT64_MAX, INT64_MAX}})}}),
       "\"w\" reaches out of its storage"},
      {dict({{text("w"), tensor({.sizes = {huge, 1}, .strides = {0, 1}})}}), "\"w\" is too large"},
      {dict({{text("w"), tensor({.sizes = {4, 3}, .strides = {0, 1}})}}),
       "\"w\" has its elements many times"},
      {dict({{text("w"), tensor({.strides = {3}})}}), "\"w\" has no shape"},
      {dict({{text("w"), tensor({.metadata = dict({{text("neg"), "\x88"}})})}}),
       "\"w\" is negated or conjugated"},
      {dict({{text("w"), tensor({.metadata = "]"})}}), "\"w\" is negated or conjugated"},
      {dict({{text("w"), tensor({.numel = 24, .dtype = "float8_e8m0fnu"})}}),
       "\"w\" has a torch.float8_e8m0fnu"},
      {dict({{text("w"), tensor({.numel = 25, .dtype = "float8_e5m2"})}}),
       "\"w\" reaches out of its storage"},
      {dict({{text("w"), tensor({.numel = 24, .first = 19, .dtype = "float8_e5m2"})}}),
       "\"w\" reaches out of its storage"},
      {dict({{text("w"), tensor({.type = "storage.UntypedStorage"})}}),
       "\"w\" has a torch.storage.UntypedStorage"},
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
  EXPECT_THAT(message_of(big), HasSubstr("big.pt': has big-endian numbers"));
  const auto packed = torch_save_sources(written("packed.pt", archive(good, "little", true)));
  EXPECT_EQ(packed.status().code(), absl::StatusCode::kUnimplemented) << packed.status();
  EXPECT_THAT(message_of(packed), HasSubstr("\"data/0\" is compressed"));
}

TEST(TorchFilesTest, CutAnywhereIsAnError) {
  const std::string good = archive(dict({{text("w"), tensor({})}}) + ".");
  ASSERT_TRUE(torch_save_sources(written("cut.pt", good)).ok());
  for (size_t size = 0; size < good.size(); ++size) {
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
      // Where the first would end is no number.
      {read(chunk({INT64_MAX, 0}, {2, 3}) + chunk({2, 0}, {2, 3}),
            {{.offset = {INT64_MAX, 0}, .size = size}, second}),
       "a chunk of \"w\" reaches out of it"},
      {read(chunk({0, 0}, {int64_t{1} << 62, int64_t{1} << 62}) + two, {first, second}),
       "a chunk of \"w\" reaches out of it"},
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
