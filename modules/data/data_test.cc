// Token files, windows of them, and the order of samples.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/modules/data/sample_order.h"
#include "shardweave/modules/data/token_file.h"
#include "shardweave/modules/data/token_windows.h"

namespace shardweave {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string path_of(const std::string& name) {
  return std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
}
std::string file_with(const std::string& name, const std::string& bytes) {
  std::ofstream(path_of(name), std::ios::binary) << bytes;
  return path_of(name);
}
std::string bytes_in(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
template <typename T>
std::string raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}
std::string written(const std::string& name, const std::vector<uint32_t>& tokens,
                    const TokenFileWriterOptions& options = {}) {
  absl::StatusOr<TokenFileWriter> writer = TokenFileWriter::create(path_of(name), options);
  EXPECT_TRUE(writer.ok()) << writer.status();
  EXPECT_TRUE(writer->write(tokens).ok());
  EXPECT_TRUE(writer->close().ok());
  return path_of(name);
}
std::vector<int64_t> read(const TokenFile& file, int64_t begin, int64_t count) {
  std::vector<int64_t> tokens(static_cast<size_t>(count), -1);
  const absl::Status status = file.read(begin, absl::MakeSpan(tokens));
  EXPECT_TRUE(status.ok()) << status;
  return tokens;
}
std::vector<int64_t> all(const TokenFile& file) {
  return read(file, 0, file.size());
}
std::string message(const absl::Status& status) {
  return std::string(status.message());
}
// Of a file that cannot be opened.
void expect_refused(const std::string& path, const std::string& why,
                    const TokenFileOptions& options = {},
                    absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
  const absl::Status status = TokenFile::open(path, options).status();
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(message(status), AllOf(HasSubstr(path), HasSubstr(why)));
}

// --- token files ---------------------------------------------------------------------------------

TEST(TokenFileTest, ReadsWhatWasWritten) {
  for (const TokenType type : {TokenType::kU8, TokenType::kU16, TokenType::kU32}) {
    const uint32_t most = static_cast<uint32_t>((uint64_t{1} << (8 * int(type))) - 1);
    const auto file = TokenFile::open(written("whole", {1, 0, most, 7, most}, {.type = type}));
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->type(), type);
    EXPECT_EQ(file->size(), 5);
    EXPECT_EQ(file->vocab_size(), 0);
    EXPECT_THAT(all(*file), ElementsAre(1, 0, most, 7, most));
    EXPECT_THAT(read(*file, 2, 2), ElementsAre(most, 7));
    EXPECT_THAT(read(*file, 5, 0), ElementsAre());
  }
}

TEST(TokenFileTest, FormatIsAsDocumented) {
  const std::string path = written("format", {513, 2}, {.vocab_size = 1000});
  std::string expected = "SWVTOKEN" + raw<uint32_t>({1, 2}) + raw<uint64_t>({2, 1000}) +
                         std::string(32, '\0') + "\x01\x02";
  expected += std::string("\x02\x00", 2);
  EXPECT_EQ(bytes_in(path), expected);
}

TEST(TokenFileTest, ManyTokensGoThroughTheBuffers) {
  std::vector<uint32_t> tokens;
  for (uint32_t i = 0; i < 700001; ++i) tokens.push_back(i * 7 % 65536);
  const auto file = TokenFile::open(written("many", tokens));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(all(*file), std::vector<int64_t>(tokens.begin(), tokens.end()));
  EXPECT_THAT(read(*file, 700000, 1), ElementsAre(tokens.back()));
}

TEST(TokenFileTest, PlainFiles) {
  const std::string path = file_with("plain.bin", raw<uint16_t>({5, 65535, 0}));
  const auto file = TokenFile::open(path, {.plain_type = TokenType::kU16});
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(all(*file), ElementsAre(5, 65535, 0));
  const auto text =
      TokenFile::open(file_with("plain.txt", "a\xff\n"), {.plain_type = TokenType::kU8});
  EXPECT_THAT(all(text.value()), ElementsAre('a', 255, '\n'));
  EXPECT_EQ(text->vocab_size(), 256);
  const auto of_text = TokenFile::of_text("a\xff\n");
  EXPECT_THAT(all(of_text.value()), ElementsAre('a', 255, '\n'));
  EXPECT_EQ(of_text->path(), "");
  EXPECT_THAT(message(TokenFile::of_text("").status()), HasSubstr("the text is empty"));
  // With a header: what the header says.
  const std::string with_header = written("with_header", {1, 2});
  EXPECT_EQ(TokenFile::open(with_header, {.plain_type = TokenType::kU16})->size(), 2);
  expect_refused(with_header, "says u16; plain_type is u32", {.plain_type = TokenType::kU32});
}

TEST(TokenFileTest, SaysWhatIsNoTokenFile) {
  const TokenFileOptions u16{.plain_type = TokenType::kU16};
  expect_refused(path_of("nowhere"), "No such file", {}, absl::StatusCode::kNotFound);
  expect_refused(path_of("."), "is a directory");
  expect_refused("/dev/null", "is no regular file");
  ASSERT_EQ(::mkfifo(path_of("pipe").c_str(), 0600), 0);
  expect_refused(path_of("pipe"), "is no regular file");
  expect_refused(file_with("empty", ""), "is empty");
  expect_refused(file_with("empty", ""), "is empty", u16);
  expect_refused(file_with("text", "Once upon a time"), "has no header");
  expect_refused(file_with("odd", "abc"), "has 3 bytes; wanted a multiple of 2", u16);
  expect_refused(file_with("odd", "abc"), "plain_type has 3 bytes", {.plain_type = TokenType(3)});

  const std::string good = bytes_in(written("good", {1, 2, 3}, {.vocab_size = 9}));
  const auto with = [&](size_t at, const std::string& bytes) {
    std::string changed = good;
    changed.replace(at, bytes.size(), bytes);
    return file_with("changed", changed);
  };
  expect_refused(with(8, raw<uint32_t>({2})), "is of version 2 of the format; this reads 1");
  expect_refused(with(12, raw<uint32_t>({3})), "a token has 3 bytes");
  expect_refused(with(12, raw<uint32_t>({4})), "3 tokens of 4 bytes: it is truncated");
  expect_refused(with(16, raw<uint64_t>({4})), "4 tokens of 2 bytes: it is truncated");
  expect_refused(with(16, raw<uint64_t>({2})), "2 tokens of 2 bytes: it is longer");
  expect_refused(with(16, raw<uint64_t>({0})), "has no tokens");
  // 2^63 + 3 tokens of two bytes are six bytes, if one does not look.
  expect_refused(with(16, raw<uint64_t>({(uint64_t{1} << 63) + 3})), "truncated");
  expect_refused(with(24, raw<uint64_t>({65537})), "more than u16 has");
  expect_refused(with(40, "x"), "bytes 32 to 63 are not 0");
  for (size_t size = 8; size < good.size(); ++size) {
    expect_refused(file_with("cut", good.substr(0, size)),
                   size < 64 ? "ends within its header" : "truncated");
  }
  expect_refused(file_with("more", good + "xy"), "longer");
  if (::geteuid() != 0) {
    ASSERT_EQ(::chmod(file_with("secret", good).c_str(), 0), 0);
    expect_refused(path_of("secret"), "denied", {}, absl::StatusCode::kPermissionDenied);
  }
}

TEST(TokenFileTest, ReadsInRangeOnly) {
  const auto file = TokenFile::open(written("three", {1, 2, 3}));
  std::vector<int64_t> two(2);
  for (const int64_t begin : {int64_t{-1}, int64_t{2}, int64_t{4}, INT64_MAX, INT64_MIN}) {
    const absl::Status status = file->read(begin, absl::MakeSpan(two));
    EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << begin;
    EXPECT_THAT(message(status), HasSubstr("has 3 tokens; wanted 2 from"));
  }
}

TEST(TokenFileTest, AFileThatHasBecomeShorterIsAnError) {
  const std::string path = written("shrinks", std::vector<uint32_t>(100000, 3));
  const auto file = TokenFile::open(path);
  ASSERT_EQ(::truncate(path.c_str(), 8192), 0);
  EXPECT_EQ(read(*file, 0, 10), std::vector<int64_t>(10, 3));
  std::vector<int64_t> window(1000);
  for (const int64_t begin : {4000, 50000, 99000}) {
    const absl::Status status = file->read(begin, absl::MakeSpan(window));
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(message(status), AllOf(HasSubstr(path), HasSubstr("has become shorter")));
  }
}

TEST(TokenFileTest, IdsOutsideOfTheVocabularyAreErrors) {
  const std::string path = written("vocab", {1, 2, 3}, {.vocab_size = 4});
  std::string bytes = bytes_in(path);
  bytes[66] = 4;
  const auto file = TokenFile::open(file_with("vocab2", bytes));
  EXPECT_THAT(read(*file, 0, 1), ElementsAre(1));
  std::vector<int64_t> tokens(2);
  const absl::Status status = file->read(1, absl::MakeSpan(tokens));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(message(status), HasSubstr("token 4 among 1 to 3; the vocabulary has 4"));
}

TEST(TokenFileWriterTest, RefusesWhatDoesNotFit) {
  auto writer = TokenFileWriter::create(path_of("narrow"), {.vocab_size = 300});
  EXPECT_THAT(message(writer->write({1, 300})), HasSubstr("token 300; wanted less than 300"));
  EXPECT_EQ(writer->size(), 0);
  auto wide = TokenFileWriter::create(path_of("wide"));
  EXPECT_THAT(message(wide->write({65536})), HasSubstr("wanted less than 65536, what u16 holds"));
  EXPECT_THAT(message(wide->close()), HasSubstr("no tokens were written"));
  EXPECT_THAT(message(TokenFileWriter::create(path_of("x"), {.vocab_size = 65537}).status()),
              HasSubstr("vocab_size is 65537; wanted 0 to 65536"));
  EXPECT_EQ(TokenFileWriter::create(path_of("no/such/folder")).status().code(),
            absl::StatusCode::kNotFound);
}

TEST(TokenFileWriterTest, AFileIsWholeOrNotThere) {
  const std::string folder = path_of("whole_or_not");
  std::filesystem::create_directory(folder);
  const auto files = [&] {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      names.insert(entry.path().filename());
    }
    return names;
  };
  {
    auto writer = TokenFileWriter::create(folder + "/a");
    ASSERT_TRUE(writer->write({1}).ok());
    EXPECT_EQ(files().count("a"), 0u);
    auto other = TokenFileWriter::create(folder + "/a");  // beside it
    ASSERT_TRUE(other->write({2}).ok());
    ASSERT_TRUE(other->close().ok());
    EXPECT_EQ(other->close().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(message(other->write({1})), HasSubstr("is closed"));
  }
  EXPECT_THAT(files(), ElementsAre("a"));
  EXPECT_THAT(all(TokenFile::open(folder + "/a").value()), ElementsAre(2));

  // A disk that is full.
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  {
    auto writer = TokenFileWriter::create(folder + "/a");
    const std::vector<uint32_t> many(1 << 20, 1);
    const absl::Status status = writer->write(many);
    EXPECT_THAT(message(status), HasSubstr("cannot be written: File too large"));
    EXPECT_EQ(writer->write({1}), status);  // there would be a hole
    EXPECT_EQ(writer->close(), status);
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_THAT(files(), ElementsAre("a"));
  EXPECT_THAT(all(TokenFile::open(folder + "/a").value()), ElementsAre(2));
}

// --- windows -------------------------------------------------------------------------------------

TEST(TokenWindowsTest, SamplesShareOneToken) {
  for (const int64_t tokens : {4, 5, 6, 7, 8}) {
    std::string text;
    for (int64_t i = 0; i < tokens; ++i) text.push_back(static_cast<char>(i));
    const auto windows = TokenWindows::create({TokenFile::of_text(text).value()}, 3);
    ASSERT_EQ(windows->num_samples(), (tokens - 1) / 3) << tokens;
    for (int64_t i = 0; i < windows->num_samples(); ++i) {
      std::vector<int64_t> sample(4);
      ASSERT_TRUE(windows->read(i, 0, absl::MakeSpan(sample)).ok());
      EXPECT_THAT(sample, ElementsAre(3 * i, 3 * i + 1, 3 * i + 2, 3 * i + 3));
    }
  }
}

TEST(TokenWindowsTest, OfSeveralFiles) {
  std::vector<TokenFile> files;
  for (const char* text : {"abcde", "x", "ABCDEF", "12"}) {
    files.push_back(TokenFile::of_text(text).value());
  }
  const auto windows = TokenWindows::create(files, 2);
  ASSERT_EQ(windows->num_samples(), 4);  // two, none, two, none
  std::string seen;
  for (int64_t i = 0; i < 4; ++i) {
    std::vector<int64_t> sample(3);
    ASSERT_TRUE(windows->read(i, 0, absl::MakeSpan(sample)).ok());
    seen += std::string(sample.begin(), sample.end()) + " ";
  }
  EXPECT_EQ(seen, "abc cde ABC CDE ");
  std::vector<int64_t> end(1);
  ASSERT_TRUE(windows->read(3, 2, absl::MakeSpan(end)).ok());
  EXPECT_EQ(end[0], 'E');
  EXPECT_EQ(windows->read(3, 3, absl::MakeSpan(end)).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(windows->read(4, 0, absl::MakeSpan(end)).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(windows->read(-1, 0, absl::MakeSpan(end)).code(), absl::StatusCode::kOutOfRange);
}

TEST(TokenWindowsTest, SaysWhatIsWrong) {
  const TokenFile file = TokenFile::of_text("abc").value();
  EXPECT_THAT(message(TokenWindows::create({}, 3).status()), HasSubstr("there is no token file"));
  EXPECT_THAT(message(TokenWindows::create({file}, 0).status()), HasSubstr("seq is 0"));
  EXPECT_THAT(message(TokenWindows::create({file}, 3).status()),
              HasSubstr("has 3 tokens; wanted 3 + 1 or more"));
  EXPECT_THAT(message(TokenWindows::create({file}, INT64_MAX).status()), HasSubstr("3 tokens"));
}

// --- orders --------------------------------------------------------------------------------------

SampleOrder order_of(const SampleOrderOptions& options) {
  absl::StatusOr<SampleOrder> order = SampleOrder::create(options);
  EXPECT_TRUE(order.ok()) << order.status();
  return *std::move(order);
}
std::vector<int64_t> epoch_of(const SampleOrder& order, int64_t epoch) {
  std::vector<int64_t> samples;
  for (int64_t i = 0; i < order.options().num_samples; ++i) {
    samples.push_back(order.sample({epoch, i}));
  }
  return samples;
}

TEST(SampleOrderTest, EveryEpochIsAPermutation) {
  for (const int64_t n :
       {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 100, 1000, 65535, 65536, 65537}) {
    for (const uint64_t seed : {0ull, 1ull, ~0ull}) {
      const SampleOrder order = order_of({.num_samples = n, .seed = seed});
      for (const int64_t epoch : {0, 1, 1000000}) {
        std::vector<int64_t> samples = epoch_of(order, epoch);
        std::sort(samples.begin(), samples.end());
        for (int64_t i = 0; i < n; ++i)
          ASSERT_EQ(samples[i], i) << n << " " << seed << " " << epoch;
      }
    }
  }
}

TEST(SampleOrderTest, OrdersAreOfTheirSeedAndEpoch) {
  const SampleOrder order = order_of({.num_samples = 1000, .seed = 1});
  EXPECT_EQ(epoch_of(order, 3), epoch_of(order, 3));
  EXPECT_NE(epoch_of(order, 3), epoch_of(order, 4));
  EXPECT_NE(epoch_of(order, 3), epoch_of(order_of({.num_samples = 1000, .seed = 2}), 3));
  // Not the epoch added to the seed.
  EXPECT_NE(epoch_of(order, 1), epoch_of(order_of({.num_samples = 1000, .seed = 2}), 0));
  const SampleOrder in_order = order_of({.num_samples = 5, .shuffle = false});
  EXPECT_THAT(epoch_of(in_order, 0), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(epoch_of(in_order, 1), ElementsAre(0, 1, 2, 3, 4));
}

// Checkpoints depend on it.
TEST(SampleOrderTest, OrdersStayAsTheyAre) {
  EXPECT_THAT(epoch_of(order_of({.num_samples = 7, .seed = 1}), 0),
              ElementsAre(0, 4, 1, 3, 2, 5, 6));
  const SampleOrder order = order_of({.num_samples = 1000000007, .seed = 42});
  std::vector<int64_t> first;
  for (int64_t i = 0; i < 4; ++i) first.push_back(order.sample({3, i}));
  EXPECT_THAT(first, ElementsAre(479517397, 600597870, 423940023, 565543452));
}

// Each sample stands at each place about as often as at others, and so does each pair of neighbours.
TEST(SampleOrderTest, PermutationsAreEven) {
  for (const int64_t n : {2, 3, 5, 7, 16}) {
    constexpr int kEpochs = 20000;
    const SampleOrder order = order_of({.num_samples = n, .seed = 9});
    std::vector<double> places(n * n), pairs(n * n);
    for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
      const std::vector<int64_t> samples = epoch_of(order, epoch);
      for (int64_t i = 0; i < n; ++i) {
        ++places[i * n + samples[i]];
        if (i > 0) ++pairs[samples[i - 1] * n + samples[i]];
      }
    }
    const auto expect_even = [&](const std::vector<double>& counts, double expected,
                                 bool diagonal) {
      double chi2 = 0;
      for (int64_t i = 0; i < n * n; ++i) {
        if (!diagonal && i % (n + 1) == 0) continue;
        chi2 += (counts[i] - expected) * (counts[i] - expected) / expected;
      }
      const double freedom = static_cast<double>(n * n);  // at least what there is of it
      EXPECT_LT(chi2, freedom + 5 * std::sqrt(2 * freedom)) << n << " " << diagonal;
    };
    expect_even(places, double(kEpochs) / n, true);
    expect_even(pairs, double(kEpochs) / n, false);
  }
}

// Half of the places of a large epoch have a sample of the upper half, whatever half of places that is.
TEST(SampleOrderTest, LargeEpochsAreMixed) {
  const int64_t n = (int64_t{1} << 40) + 12345;
  const SampleOrder order = order_of({.num_samples = n, .seed = 5});
  for (const int64_t step : {int64_t{1}, int64_t{2}, int64_t{1} << 20, int64_t{104729}}) {
    int upper = 0, rising = 0;
    int64_t before = 0;
    for (int64_t i = 0; i < 20000; ++i) {
      const int64_t sample = order.sample({0, i * step});
      ASSERT_TRUE(sample >= 0 && sample < n);
      upper += sample >= n / 2;
      rising += sample > before;
      before = sample;
    }
    EXPECT_NEAR(upper, 10000, 400) << step;
    EXPECT_NEAR(rising, 10000, 400) << step;
  }
}

TEST(SampleOrderTest, PositionsGoAcrossEpochs) {
  const SampleOrder order = order_of({.num_samples = 10});
  EXPECT_EQ(order.after({0, 0}, 9), (SamplePosition{0, 9}));
  EXPECT_EQ(order.after({0, 0}, 10), (SamplePosition{1, 0}));
  EXPECT_EQ(order.after({2, 7}, 4), (SamplePosition{3, 1}));
  EXPECT_EQ(order.after({2, 7}, 35), (SamplePosition{6, 2}));
  EXPECT_EQ(order.left({2, 7}, 1000), 1000);
  const SampleOrder two = order_of({.num_samples = 10, .epochs = 2});
  EXPECT_EQ(two.left({0, 0}, 4), 4);
  EXPECT_EQ(two.left({1, 7}, 4), 3);
  EXPECT_EQ(two.left({0, 7}, 1000), 13);
  EXPECT_EQ(two.left({2, 0}, 4), 0);
  EXPECT_EQ(two.after({1, 7}, 3), (SamplePosition{2, 0}));
  const int64_t huge = int64_t{1} << 60;
  EXPECT_EQ(order_of({.num_samples = huge, .epochs = huge}).left({1, 0}, 5), 5);
  EXPECT_EQ(order_of({.num_samples = 1, .epochs = huge}).left({1, 0}, huge), huge - 1);
}

TEST(SampleOrderTest, PositionsAsJson) {
  const SampleOrder order = order_of({.num_samples = 10, .seed = ~uint64_t{0}, .epochs = 3});
  const SamplePosition position{2, 9};
  const std::string json = order.to_json(position);
  EXPECT_EQ(
      json,
      R"({"epoch":2,"sample":9,"num_samples":10,"seed":18446744073709551615,"shuffle":true})");
  EXPECT_EQ(order.from_json(json).value(), position);
  EXPECT_EQ(order.from_json(order.to_json({3, 0})).value(), (SamplePosition{3, 0}));

  const auto expect_wrong = [&](const std::string& text, const std::string& why) {
    const absl::Status status = order.from_json(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(message(status), HasSubstr(why)) << text;
  };
  const auto with = [&](const std::string& was, const std::string& is) {
    std::string changed = json;
    return changed.replace(changed.find(was), was.size(), is);
  };
  for (const char* text : {"", "3", "[]", "{", "null", "\"x\""})
    expect_wrong(text, "wanted a JSON object as");
  expect_wrong("{}", "has no 'epoch'");
  expect_wrong(with("\"epoch\":2,", ""), "has no 'epoch'");
  expect_wrong(with("\"epoch\":2", "\"epoch\":2,\"step\":1"), "has 'step', which there is not");
  expect_wrong(with("\"epoch\":2", "\"epoch\":2.5"), "'epoch' is 2.5; wanted a whole number");
  expect_wrong(with("\"epoch\":2", "\"epoch\":\"2\""), "'epoch' is \"2\"; wanted a whole number");
  expect_wrong(with("\"epoch\":2", "\"epoch\":true"), "wanted a whole number");
  expect_wrong(with("\"epoch\":2", "\"epoch\":-1"), "epoch is -1");
  expect_wrong(with("\"epoch\":2", "\"epoch\":18446744073709551615"),
               "'epoch' is 18446744073709551615");
  expect_wrong(with("\"epoch\":2", "\"epoch\":3"), "sample is 9 of epoch 3; wanted 0 to 0");
  expect_wrong(with("\"epoch\":2", "\"epoch\":4"), "epoch is 4; wanted 0 to 3");
  expect_wrong(with("\"sample\":9", "\"sample\":10"), "sample is 10 of epoch 2; wanted 0 to 9");
  expect_wrong(with("\"sample\":9", "\"sample\":-1"), "sample is -1");
  expect_wrong(with("\"num_samples\":10", "\"num_samples\":11"),
               "its 'num_samples' is 11, and here 10");
  expect_wrong(with("18446744073709551615", "18446744073709551614"),
               "its 'seed' is 18446744073709551614, and here ");
  expect_wrong(with("true", "false"), "its 'shuffle' is false, and here true");
  expect_wrong(with("true", "1"), "'shuffle' is 1; wanted true or false");
}

TEST(SampleOrderTest, SaysWhatIsWrong) {
  EXPECT_THAT(message(SampleOrder::create({.num_samples = 0}).status()),
              HasSubstr("num_samples is 0"));
  EXPECT_THAT(message(SampleOrder::create({.num_samples = 1, .epochs = -1}).status()),
              HasSubstr("epochs is -1"));
}

}  // namespace
}  // namespace shardweave
