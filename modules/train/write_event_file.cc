// Writes event files for tensorboard_test.py: write_event_file FOLDER
#include <iostream>

#include "shardweave/modules/train/event_file.h"

namespace {

absl::Status write(const char* folder, int64_t begin, int64_t end, double scale) {
  auto file = shardweave::EventFile::create(folder, begin);
  absl::Status status = file.status();
  for (int64_t step = begin; status.ok() && step < end; ++step) {
    const double loss = scale / static_cast<double>(step + 1);
    status = file->write(step, {{"loss", loss}, {"train/lr", 1e-3 * static_cast<double>(step)}});
  }
  return status.ok() ? file->flush() : status;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  // One that was killed at 150, and goes on at 120 with other numbers.
  absl::Status status = write(argv[1], 0, 150, 5.0);
  if (status.ok()) status = write(argv[1], 120, 200, 7.0);
  if (status.ok()) return 0;
  std::cerr << status << "\n";
  return 1;
}
