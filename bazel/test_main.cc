// The main function of tests that are one program (shardweave_cc_tests). Started by the name of one of its files, it
// runs the tests of that; by any other name, all of them.

#include <filesystem>
#include <string>

#include "gtest/gtest.h"

namespace {

std::string name_of(const char* file) {
  return std::filesystem::path(file).stem().string();
}

// ":Suite.Test" for each test in other files than `name`.cc; "" if there is none in that.
std::string tests_elsewhere(const std::string& name) {
  const testing::UnitTest& program = *testing::UnitTest::GetInstance();
  std::string elsewhere;
  bool is_file = false;
  for (int i = 0; i < program.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *program.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const testing::TestInfo& test = *suite.GetTestInfo(j);
      const bool is_here = test.file() != nullptr && name_of(test.file()) == name;
      is_file = is_file || is_here;
      if (!is_here) elsewhere += std::string(":") + suite.name() + "." + test.name();
    }
  }
  return is_file ? elsewhere : "";
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const std::string elsewhere = tests_elsewhere(name_of(argv[0]));
  if (!elsewhere.empty()) {
    std::string& filter =
        testing::GTEST_FLAG(filter);  // the user's, of --gtest_filter or --test_filter
    // Behind its "-" stands what is left out.
    filter += filter.find('-') == std::string::npos ? "-" + elsewhere.substr(1) : elsewhere;
  }
  return RUN_ALL_TESTS();
}
