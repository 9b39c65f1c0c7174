#include "shardweave/comm/gloo/connection.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "shardweave/comm/str_cat.h"

namespace shardweave::gloo_internal {
namespace {

// Bytes per system call. Sending and receiving take turns, so that what one side has just written
// is still in the cache when the other side reads it.
constexpr int64_t kTurn = 256 * 1024;

}  // namespace

void Connection::queue(const FrameHeader& header, const void* payload, int* unsent) {
  output_.push_back({header, static_cast<const std::byte*>(payload), unsent});
}

absl::Status Connection::flush() {
  while (has_output()) {
    const Frame& frame = output_[first_];
    constexpr int64_t kHeader = sizeof(FrameHeader);
    iovec parts[2];
    int count = 0;
    if (sent_ < kHeader) {
      const auto* header = reinterpret_cast<const std::byte*>(&frame.header);
      parts[count++] = {const_cast<std::byte*>(header) + sent_,
                        static_cast<size_t>(kHeader - sent_)};
    }
    const int64_t payload_sent = std::max<int64_t>(0, sent_ - kHeader);
    const int64_t payload_left = frame.header.length - payload_sent;
    if (payload_left > 0) {
      parts[count++] = {const_cast<std::byte*>(frame.payload) + payload_sent,
                        static_cast<size_t>(std::min(payload_left, kTurn))};
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t written = ::sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return absl::OkStatus();
      return absl::UnavailableError(std::strerror(errno));
    }
    sent_ += written;
    traffic_ += written;
    if (sent_ < kHeader + frame.header.length) {
      if (written >= kTurn) return absl::OkStatus();  // the turn is over
      continue;
    }
    if (frame.unsent != nullptr) --*frame.unsent;
    sent_ = 0;
    if (++first_ == output_.size()) {
      output_.clear();
      first_ = 0;
    }
  }
  return absl::OkStatus();
}

bool Connection::owes() const {
  for (size_t i = first_; i < output_.size(); ++i) {
    if (output_[i].unsent != nullptr) return true;
  }
  return false;
}

void Connection::close_output(const FrameHeader& last, const void* payload) {
  if (!output_open_) return;
  output_.clear();
  first_ = 0;
  if (sent_ == 0) {
    queue(last, payload, nullptr);
    flush().IgnoreError();  // the peer may be gone, which is no news
  }
  close_output();
}

void Connection::close_output() {
  if (!output_open_) return;
  output_open_ = false;
  output_.clear();
  first_ = 0;
  ::shutdown(fd(), SHUT_WR);
}

Connection::Input Connection::receive(void* memory, int64_t bytes, int64_t* received) {
  // With the end of a payload comes the beginning of the next frame.
  const bool to_staging = bytes == missing_;
  iovec parts[2] = {{memory, static_cast<size_t>(bytes)},
                    {staging_.data() + end_, staging_.size() - end_}};
  msghdr message{};
  message.msg_iov = bytes > 0 ? parts : parts + 1;
  message.msg_iovlen = (bytes > 0 ? 1 : 0) + (to_staging ? 1 : 0);
  for (;;) {
    const ssize_t count = ::recvmsg(fd(), &message, MSG_DONTWAIT);
    if (count > 0) {
      traffic_ += count;
      *received = std::min<int64_t>(count, bytes);
      end_ += count - *received;
      return Input::kHeader;  // anything but the two below
    }
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Input::kNothing;
    closed_because_ = count == 0 ? "it closed the connection" : std::strerror(errno);
    state_ = State::kClosed;
    return Input::kClosed;
  }
}

bool Connection::take_header() {
  if (end_ - begin_ < sizeof(FrameHeader)) return false;
  std::memcpy(&header_, staging_.data() + begin_, sizeof(FrameHeader));
  begin_ += sizeof(FrameHeader);
  return true;
}

void Connection::accept(void* payload) {
  payload_ = static_cast<std::byte*>(payload);
  missing_ = header_.length;
  const int64_t here = std::min<int64_t>(missing_, end_ - begin_);
  if (here > 0) std::memcpy(payload_, staging_.data() + begin_, here);
  begin_ += here;
  payload_ += here;
  missing_ -= here;
  if (begin_ == end_) begin_ = end_ = 0;
  state_ = State::kInPayload;
}

Connection::Input Connection::read() {
  int64_t received = 0;
  switch (state_) {
    case State::kClosed:
      return Input::kClosed;
    case State::kAtPayload:
      return Input::kHeader;
    case State::kInHeader:
      while (!take_header()) {
        std::memmove(staging_.data(), staging_.data() + begin_, end_ - begin_);
        end_ -= begin_;
        begin_ = 0;
        const Input input = receive(nullptr, 0, &received);
        if (input != Input::kHeader) return input;
      }
      if (header_.magic != kFrameMagic || header_.length < 0) {
        closed_because_ = "it sent what is not a frame";
        state_ = State::kClosed;
        return Input::kGarbage;
      }
      state_ = State::kAtPayload;
      return Input::kHeader;
    case State::kInPayload:
      if (missing_ > 0) {
        const Input input = receive(payload_, std::min(missing_, kTurn), &received);
        if (input != Input::kHeader) return input;
        payload_ += received;
        missing_ -= received;
        if (missing_ > 0) return Input::kNothing;
      }
      state_ = State::kInHeader;
      return Input::kPayload;
  }
  return Input::kNothing;
}

}  // namespace shardweave::gloo_internal
