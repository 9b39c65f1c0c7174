// A Connection carries frames to and from one peer, and never blocks.
//
//   connection.queue(header, data, &unsent);                      // one more frame to go out
//   absl::Status s = connection.flush();                          // what the kernel takes now
//   if (connection.read() == Connection::Input::kHeader) connection.accept(memory);
//   if (connection.read() == Connection::Input::kPayload) ...  // header().length bytes are in memory
//
// Payloads are borrowed: read from and written to the caller's memory, until they are sent or
// complete, or until close_output() and the destructor. One thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "shardweave/comm/gloo/frame.h"
#include "shardweave/comm/gloo/unique_fd.h"

namespace shardweave::gloo_internal {

class Connection {
 public:
  // A connected, non-blocking stream socket.
  explicit Connection(UniqueFd socket) : socket_(std::move(socket)) {}

  int fd() const { return socket_.get(); }

  // `*unsent` is decremented once all of the frame is in the kernel's hands.
  void queue(const FrameHeader& header, const void* payload, int* unsent);
  bool has_output() const { return first_ < output_.size(); }
  // Unavailable if the connection is gone.
  absl::Status flush();
  // Whether a frame that somebody counts on (`unsent`) is not in the kernel's hands.
  bool owes() const;
  // Forgets what is queued, sends a last frame if none is half sent, and no more after that.
  void close_output(const FrameHeader& last, const void* payload);
  // Forgets what is queued, and sends no more.
  void close_output();

  enum class Input {
    kNothing,  // until more arrives
    kHeader,   // header() is there, and accept() is wanted
    kPayload,  // all of the accepted frame is there
    kClosed,   // nothing comes any more; closed_because() says why
    kGarbage,  // not what a Connection sends
  };
  Input read();
  const FrameHeader& header() const { return header_; }
  // Where the payload of the frame with header() goes.
  void accept(void* payload);
  // Whether read() has something to say without asking the kernel.
  bool has_input() const {
    return state_ == State::kAtPayload || (state_ == State::kInPayload && missing_ == 0) ||
           (state_ == State::kInHeader && end_ - begin_ >= sizeof(FrameHeader));
  }
  const std::string& closed_because() const { return closed_because_; }

  // Bytes sent and received so far: whether a call got anywhere.
  uint64_t traffic() const { return traffic_; }

 private:
  struct Frame {
    FrameHeader header;
    const std::byte* payload;
    int* unsent;
  };
  enum class State { kInHeader, kAtPayload, kInPayload, kClosed };

  Input receive(void* memory, int64_t bytes, int64_t* received);
  bool take_header();

  UniqueFd socket_;
  uint64_t traffic_ = 0;

  std::vector<Frame> output_;
  size_t first_ = 0;  // of output_ that is not sent
  int64_t sent_ = 0;  // bytes of it, header included
  bool output_open_ = true;

  State state_ = State::kInHeader;
  FrameHeader header_;
  std::byte* payload_ = nullptr;
  int64_t missing_ = 0;  // bytes of the payload
  std::string closed_because_;

  // Small frames come with one system call; of large ones, only the beginning passes through here.
  std::array<std::byte, 16 * 1024> staging_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace shardweave::gloo_internal
