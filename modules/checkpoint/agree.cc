#include "shardweave/modules/checkpoint/agree.h"

#include <cstdint>
#include <exception>
#include <new>
#include <numeric>

#include "shardweave/comm/status_exception.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::checkpoint_internal {
namespace {

CallOptions call(absl::Duration timeout) {
  return {.timeout = timeout, .tag = "checkpoint"};
}

}  // namespace

absl::StatusOr<std::vector<std::string>> exchange(Communicator& comm, const std::string& mine,
                                                  absl::Duration timeout) {
  const auto size = static_cast<size_t>(comm.size());
  const auto length = static_cast<int64_t>(mine.size());
  std::vector<int64_t> lengths(size);
  absl::Status status = comm.all_gather(ConstBuffer::of(&length, 1),
                                        Buffer::of(lengths.data(), comm.size()), call(timeout))
                            .wait();
  if (!status.ok()) return status;
  const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  std::vector<uint8_t> own(mine.begin(), mine.end());
  std::vector<uint8_t> all(static_cast<size_t>(total));
  if (total > 0) {
    status = comm.all_gather_v(ConstBuffer::of(own.data(), length), Buffer::of(all.data(), total),
                               lengths, call(timeout))
                 .wait();
    if (!status.ok()) return status;
  }
  std::vector<std::string> texts;
  auto at = all.begin();
  for (const int64_t its : lengths) {
    texts.emplace_back(at, at + its);
    at += its;
  }
  return texts;
}

absl::Status agree(Communicator& comm, const absl::Status& mine, absl::Duration timeout) {
  int32_t worst = mine.ok() ? 0 : 1;
  absl::Status status = comm.all_reduce(ConstBuffer::of(&worst, 1), Buffer::of(&worst, 1),
                                        ReduceOp::kMax, call(timeout))
                            .wait();
  if (!status.ok()) return mine.ok() ? status : mine;
  if (worst == 0) return absl::OkStatus();
  std::string text;
  if (!mine.ok()) {
    text = str_cat(static_cast<int>(mine.code()), " ", std::string(mine.message()));
  }
  const absl::StatusOr<std::vector<std::string>> texts = exchange(comm, text, timeout);
  if (!texts.ok()) return mine.ok() ? texts.status() : mine;
  for (size_t rank = 0; rank < texts->size(); ++rank) {
    const std::string& its = (*texts)[rank];
    if (its.empty()) continue;
    const size_t blank = its.find(' ');
    const auto code = static_cast<absl::StatusCode>(std::stoi(its.substr(0, blank)));
    return absl::Status(code, str_cat("rank ", rank, ": ", its.substr(blank + 1)));
  }
  return absl::InternalError("a rank has failed and says nothing of it");
}

absl::Status add_up(Communicator& comm, std::vector<uint64_t>& numbers, absl::Duration timeout) {
  if (numbers.empty()) return absl::OkStatus();
  const Buffer all = Buffer::of(numbers.data(), static_cast<int64_t>(numbers.size()));
  return comm.all_reduce(all, all, ReduceOp::kSum, call(timeout)).wait();
}

absl::Status status_of(absl::FunctionRef<absl::Status()> work) {
  try {
    return work();
  } catch (const StatusException& error) {
    return error.status();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("no memory for a checkpoint");
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

absl::StatusOr<std::string> from_first(Communicator& comm,
                                       absl::FunctionRef<absl::StatusOr<std::string>()> make,
                                       absl::Duration timeout) {
  absl::StatusOr<std::string> made = std::string();
  const absl::Status mine = status_of([&] {
    if (comm.rank() == 0) made = make();
    return made.status();
  });
  absl::Status status = agree(comm, mine, timeout);
  if (!status.ok()) return status;
  auto length = static_cast<int64_t>(made->size());
  status = comm.broadcast(Buffer::of(&length, 1), 0, call(timeout)).wait();
  if (!status.ok()) return status;
  std::vector<uint8_t> bytes(static_cast<size_t>(length));
  if (comm.rank() == 0) bytes.assign(made->begin(), made->end());
  if (length > 0) {
    status = comm.broadcast(Buffer::of(bytes.data(), length), 0, call(timeout)).wait();
    if (!status.ok()) return status;
  }
  return std::string(bytes.begin(), bytes.end());
}

}  // namespace shardweave::checkpoint_internal
