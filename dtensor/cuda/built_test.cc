// A program with kernels, on a machine without a GPU: what is in it.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/cuda/random_fill.h"

extern "C" const unsigned char shardweave_random_kernels[];
extern "C" const unsigned char shardweave_random_kernels_end[];

namespace shardweave::dtensor_internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// What fatbinary writes: a header, then entries with headers of their own. (NVIDIA has no document
// of it; LLVM's clang-linker-wrapper and the CUDA Toolkit's cuobjdump read it so.)
struct FatHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t header_size;
  uint64_t size;
};
struct FatEntry {
  uint16_t kind;  // 1: PTX, 2: a cubin, which is an ELF file
  uint16_t version;
  uint32_t header_size;
  uint64_t size;
  uint32_t unused[3];
  uint32_t architecture;
};

template <typename T>
T at(const unsigned char* where) {
  T value;
  std::memcpy(&value, where, sizeof(value));
  return value;
}

TEST(BuiltTest, ThreeArchitecturesAndPtxOfTheNewest) {
  const unsigned char* where = shardweave_random_kernels;
  const auto header = at<FatHeader>(where);
  ASSERT_EQ(header.magic, 0xBA55ED50);
  const unsigned char* const end = where + header.header_size + header.size;
  // All of the file, and perhaps some bytes after it.
  ASSERT_LE(end, shardweave_random_kernels_end);
  ASSERT_GT(end + 16, shardweave_random_kernels_end);
  std::vector<uint32_t> cubins, ptx;
  for (where += header.header_size; where < end;) {
    const auto entry = at<FatEntry>(where);
    ASSERT_GT(entry.size, 1000);
    if (entry.kind == 2) cubins.push_back(entry.architecture);
    if (entry.kind == 1) ptx.push_back(entry.architecture);
    where += entry.header_size + entry.size;
  }
  EXPECT_EQ(where, end);
  std::sort(cubins.begin(), cubins.end());
  EXPECT_THAT(cubins, ElementsAre(80, 90, 100));
  EXPECT_THAT(ptx, ElementsAre(100));
}

// Each kernel that fill_random() may look for; and no fused multiplication, which would round
// otherwise than the host does.
TEST(BuiltTest, Ptx) {
  std::ifstream file("dtensor/cuda/random_kernels.ptx");
  std::stringstream all;
  all << file.rdbuf();
  const std::string text = all.str();
  ASSERT_THAT(text, HasSubstr(".target sm_100"));
  std::set<std::string> want, got;
  for (int kind = 0; kind < kNumRandomKinds; ++kind) {
    for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
      const RandomDraw draw = {.kind = static_cast<RandomKind>(kind),
                               .dtype = static_cast<DType>(dtype)};
      if (can_draw(draw.kind, draw.dtype)) want.insert(kernel_name(draw));
    }
  }
  const std::regex entry("\\.entry ([a-z0-9_]+)\\(");
  for (std::sregex_iterator i(text.begin(), text.end(), entry), none; i != none; ++i) {
    got.insert((*i)[1]);
  }
  EXPECT_EQ(got, want);
  EXPECT_THAT(text, HasSubstr("mul.rn.f32"));
  EXPECT_THAT(text, HasSubstr("add.rn.f64"));
  for (const char* fused : {"fma.", "mad.f", "mad.rn", ".ftz", ".approx"}) {
    EXPECT_EQ(text.find(fused), std::string::npos) << fused;
  }
}

// Without a driver it runs as far as it can. (With one, the tests of a GPU say more.)
TEST(BuiltTest, SaysThatThereIsNoDriver) {
  EXPECT_TRUE(has_random_kernels());
  ASSERT_EQ(::setenv("SHARDWEAVE_CUDA_DRIVER_LIBRARY", "libno_driver.so", 1), 0);
  float out[3] = {1, 2, 3};
  const IndexBox box = {.length = 3};
  const absl::Status status =
      fill_random(RandomDraw::normal(DType::kF32, 0, 1), {}, {box}, out, {});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("no NVIDIA driver: cannot load libno_driver.so"));
  EXPECT_EQ(load_random_kernels(0), status);
}

}  // namespace
}  // namespace shardweave::dtensor_internal
