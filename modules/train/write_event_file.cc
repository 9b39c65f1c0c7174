// Writes an event file for tensorboard_test.py: write_event_file FOLDER
#include <iostream>

#include "shardweave/modules/train/event_file.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  auto file = shardweave::EventFile::create(argv[1]);
  absl::Status status = file.status();
  for (int64_t step = 0; status.ok() && step < 200; ++step) {
    const double loss = 5.0 / static_cast<double>(step + 1);
    status = file->write(step, {{"loss", loss}, {"train/lr", 1e-3 * static_cast<double>(step)}});
  }
  if (status.ok()) status = file->flush();
  if (status.ok()) return 0;
  std::cerr << status << "\n";
  return 1;
}
