#include "shardweave/examples/common/run_program.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace examples {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

}  // namespace

std::string file_with(const std::string& name, const std::string& text) {
  const std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

Ran run_program(const std::string& path, const std::vector<std::string>& args) {
  const std::string out = file_with("out", ""), err = file_with("err", "");
  std::vector<std::string> all = {path};
  all.insert(all.end(), args.begin(), args.end());
  std::vector<char*> argv;
  for (std::string& arg : all) argv.push_back(arg.data());
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    // A launcher around this test says nothing about the ranks in it.
    for (const char* name :
         {"RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}) {
      ::unsetenv(name);
    }
    ::dup2(::open(out.c_str(), O_WRONLY | O_TRUNC), STDOUT_FILENO);
    ::dup2(::open(err.c_str(), O_WRONLY | O_TRUNC), STDERR_FILENO);
    ::execv(path.c_str(), argv.data());
    ::_exit(99);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  Ran ran{.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status),
          .out = read_file(out),
          .err = read_file(err)};
  if (std::find(args.begin(), args.end(), "--json") == args.end()) return ran;
  std::istringstream lines(ran.out);
  for (std::string line; std::getline(lines, line);) {
    ran.json.push_back(nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false));
  }
  return ran;
}

}  // namespace examples
