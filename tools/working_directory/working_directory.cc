#include "shardweave/tools/working_directory/working_directory.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace shardweave {

void enter_working_directory() {
  if (const char* directory = std::getenv("BUILD_WORKING_DIRECTORY")) {
    if (::chdir(directory) != 0) std::perror(directory);
  }
}

}  // namespace shardweave
