// Writes losses.json: what one device computes.
//
//   ./bazelw run //tests/same_model:losses -- --write

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>

#include "ATen/Parallel.h"
#include "gpt.h"

int main(int argc, char** argv) {
  at::set_num_threads(1);
  std::string text = "{\"losses\": [";
  const char* comma = "\n  ";
  for (const double loss : same_model::train(same_model::make_gpt(), nullptr, "")) {
    char number[32];
    std::snprintf(number, sizeof(number), "%.9g", loss);
    text += comma;
    text += number;
    comma = ",\n  ";
  }
  text += "\n]}\n";
  if (argc < 2 || std::strcmp(argv[1], "--write") != 0) {
    std::cout << text;
    return 0;
  }
  const char* const checkout = std::getenv("BUILD_WORKSPACE_DIRECTORY");
  if (checkout == nullptr) {
    std::cerr << "--write: wanted `./bazelw run //tests/same_model:losses -- --write`\n";
    return 2;
  }
  std::ofstream file(std::string(checkout) + "/tests/same_model/losses.json");
  file << text << std::flush;
  return file ? 0 : 1;
}
