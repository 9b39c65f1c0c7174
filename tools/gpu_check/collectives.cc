// Collectives over NCCL against numbers computed on the CPU, in the order of streams, and how fast.
#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "check.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/comm/reduction.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/engine/tensor_work.h"
#include "shardweave/dtensor/error.h"

namespace shardweave_tool {
namespace {

using namespace shardweave;
using dtensor_internal::comm_buffer;
using dtensor_internal::comm_dtype;
using dtensor_internal::current_stream;

constexpr at::ScalarType kTypes[] = {
    at::kDouble,      at::kFloat,  at::kHalf,   at::kBFloat16, at::kFloat8_e4m3fn,
    at::kFloat8_e5m2, at::kLong,   at::kInt,    at::kShort,    at::kChar,
    at::kUInt64,      at::kUInt32, at::kUInt16, at::kByte,     at::kBool};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};

bool is_signed(at::ScalarType type) {
  return c10::isFloatingType(type) || type == at::kLong || type == at::kInt || type == at::kShort ||
         type == at::kChar;
}

// Element `index` of what `rank` gives: a small whole number. Sums and products of many are exact.
double value(at::ScalarType type, ReduceOp op, int rank, int64_t index) {
  const int64_t number = (7 * static_cast<int64_t>(rank) + 3 * index + index / 5) % 5;  // 0 to 4
  if (type == at::kBool) return number > 2 ? 1 : 0;
  if (op == ReduceOp::kProduct) {
    const double factor = rank < 3 && number % 2 == 1 ? 2 : 1;
    return is_signed(type) && number == 4 ? -factor : factor;
  }
  return static_cast<double>(is_signed(type) ? number - 2 : number);
}

// On the CPU.
at::Tensor values(at::ScalarType type, ReduceOp op, int rank, int64_t count, int64_t first = 0) {
  at::Tensor result = at::empty({count}, at::kDouble);
  double* const out = result.mutable_data_ptr<double>();
  for (int64_t i = 0; i < count; ++i) out[i] = value(type, op, rank, first + i);
  return result.to(type);
}

// What each rank gives or gets: uneven, some nothing.
int64_t part_of(int rank) {
  return (3 * static_cast<int64_t>(rank) + 2) % 5;
}
int64_t sent(int from, int to) {
  return (from + 2 * static_cast<int64_t>(to) + 1) % 4;
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  return a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// Of a float's average the order and the way are NCCL's.
double tolerance(at::ScalarType type, ReduceOp op) {
  if (op != ReduceOp::kAvg || !c10::isFloatingType(type)) return 0;
  switch (type) {
    case at::kDouble:
      return 1e-14;
    case at::kFloat:
      return 1e-6;
    case at::kHalf:
      return 4e-3;
    default:
      return 3e-2;
  }
}

// What comes on the current stream finds the result; the host does not wait.
void wait_in_order(const Work& work, c10::Device device) {
  const absl::Status status = work.wait_on(current_stream(device));
  throw_if_error(status.ok() ? status : work.wait());
}

class Conformance {
 public:
  Conformance(Session& session, Check& check)
      : check_(check),
        comm_(*session.world->comm()),
        device_(session.device),
        rank_(comm_.rank()),
        size_(comm_.size()) {}

  void run() {
    for (const at::ScalarType type : kTypes) {
      type_ = type;
      move();
      for (const ReduceOp op : kOps) {
        if (is_reduction_defined(comm_dtype(type), op)) reduce(op);
      }
    }
    type_ = at::kFloat;
    messages();
    coalesced();
    groups();
    check_.looked_at(
        absl::StrCat(calls_, " calls, ", std::size(kTypes), " dtypes, ", size_, " ranks"));
  }

 private:
  at::Tensor there(const at::Tensor& tensor) const { return tensor.to(device_); }
  // Of this type, filled with what no call gives.
  at::Tensor blank(int64_t count) const { return there(at::full({count}, 1, at::kByte).to(type_)); }
  at::Tensor plain(int rank, int64_t count, int64_t first = 0) const {
    return values(type_, ReduceOp::kSum, rank, count, first);
  }
  static at::Tensor joined(const std::vector<at::Tensor>& parts) {
    // By bytes: LibTorch has no cat of some dtypes.
    std::vector<at::Tensor> bytes;
    for (const at::Tensor& part : parts) bytes.push_back(part.view(at::kByte));
    return at::cat(bytes).view(parts[0].scalar_type());
  }
  CallOptions options(const char* call) const {
    return {.tag = call, .stream = current_stream(device_)};
  }

  // Compares what `work` has brought.
  void expect(const std::string& call, const Work& work, const at::Tensor& out,
              const at::Tensor& want, double within = 0) {
    ++calls_;
    wait_in_order(work, device_);
    const at::Tensor got = out.to(at::kCPU);
    throw_if_error(work.wait());  // numbers after an error are nothing
    const bool same = within == 0 ? same_bytes(got, want) : difference(got, want) <= within;
    if (same) return;
    check_.fail(absl::StrCat("rank ", rank_, ": ", call, " of ", c10::toString(type_),
                             ": other numbers than the CPU's"));
  }

  // Issues, waits and compares.
  void call(const std::string& name, const std::function<Work(const CallOptions&)>& issue,
            const at::Tensor& out, const at::Tensor& want, double within = 0) {
    check_.attempt(absl::StrCat(name, " of ", c10::toString(type_)),
                   [&] { expect(name, issue(options(name.c_str())), out, want, within); });
  }

  void move() {
    constexpr int64_t kCount = 5;
    std::vector<at::Tensor> even, uneven, from_all, from_all_v, to_all_v;
    std::vector<int64_t> counts, send_counts, recv_counts;
    for (int r = 0; r < size_; ++r) {
      even.push_back(plain(r, kCount));
      counts.push_back(part_of(r));
      uneven.push_back(plain(r, counts[r]));
      send_counts.push_back(sent(rank_, r));
      recv_counts.push_back(sent(r, rank_));
      // Part `rank_` of what r sends to all.
      from_all.push_back(plain(r, kCount, kCount * rank_));
      from_all_v.push_back(plain(r, recv_counts[r], 100 * static_cast<int64_t>(rank_)));
      to_all_v.push_back(plain(rank_, send_counts[r], 100 * static_cast<int64_t>(r)));
    }
    const at::Tensor in = there(even[rank_]), all = joined(even), in_v = there(uneven[rank_]);
    const at::Tensor gathered = joined(uneven);
    {
      const at::Tensor out = blank(kCount * size_);
      call(
          "all_gather",
          [&](const CallOptions& o) {
            return comm_.all_gather(comm_buffer(in), comm_buffer(out), o);
          },
          out, all);
    }
    {
      const at::Tensor out = blank(gathered.numel());
      call(
          "all_gather_v",
          [&](const CallOptions& o) {
            return comm_.all_gather_v(comm_buffer(in_v), comm_buffer(out), counts, o);
          },
          out, gathered);
    }
    {
      const at::Tensor from = there(plain(rank_, kCount * size_)), out = blank(kCount * size_);
      call(
          "all_to_all",
          [&](const CallOptions& o) {
            return comm_.all_to_all(comm_buffer(from), comm_buffer(out), o);
          },
          out, joined(from_all));
    }
    {
      const at::Tensor from = there(joined(to_all_v)), want = joined(from_all_v);
      const at::Tensor out = blank(want.numel());
      call(
          "all_to_all_v",
          [&](const CallOptions& o) {
            return comm_.all_to_all_v(comm_buffer(from), send_counts, comm_buffer(out), recv_counts,
                                      o);
          },
          out, want);
    }
    const int root = size_ - 1;
    {
      const at::Tensor data = there(even[rank_]);
      call(
          "broadcast",
          [&](const CallOptions& o) { return comm_.broadcast(comm_buffer(data), root, o); }, data,
          even[root]);
    }
    {
      const at::Tensor out = blank(kCount * size_), before = out.to(at::kCPU);
      call(
          "gather",
          [&](const CallOptions& o) {
            return comm_.gather(comm_buffer(in), comm_buffer(out), root, o);
          },
          out, rank_ == root ? all : before);
    }
    {
      const at::Tensor from = there(plain(rank_, kCount * size_)), out = blank(kCount);
      call(
          "scatter",
          [&](const CallOptions& o) {
            return comm_.scatter(comm_buffer(from), comm_buffer(out), root, o);
          },
          out, plain(root, kCount, kCount * rank_));
    }
  }

  // Of all ranks' values, on the CPU.
  at::Tensor reduced(ReduceOp op, int64_t count) const {
    std::vector<at::Tensor> ins;
    std::vector<const void*> addresses;
    for (int r = 0; r < size_; ++r) {
      ins.push_back(values(type_, op, r, count));
      addresses.push_back(ins.back().const_data_ptr());
    }
    const at::Tensor out = at::empty_like(ins[0]);
    void* const to[] = {out.mutable_data_ptr()};
    reduce_ranks(comm_dtype(type_), op, addresses, to, count);
    return out;
  }

  void reduce(ReduceOp op) {
    constexpr int64_t kCount = 7;
    const double within = tolerance(type_, op);
    const std::string of = absl::StrCat("(", std::string(shardweave::to_string(op)), ")");
    {
      const at::Tensor in = there(values(type_, op, rank_, kCount)), out = blank(kCount);
      const at::Tensor want = reduced(op, kCount);
      call(
          absl::StrCat("all_reduce", of),
          [&](const CallOptions& o) {
            return comm_.all_reduce(comm_buffer(in), comm_buffer(out), op, o);
          },
          out, want, within);
      call(
          absl::StrCat("all_reduce in place", of),
          [&](const CallOptions& o) {
            return comm_.all_reduce(comm_buffer(in), comm_buffer(in), op, o);
          },
          in, want, within);
    }
    {
      const at::Tensor in = there(values(type_, op, rank_, kCount * size_)), out = blank(kCount);
      call(
          absl::StrCat("reduce_scatter", of),
          [&](const CallOptions& o) {
            return comm_.reduce_scatter(comm_buffer(in), comm_buffer(out), op, o);
          },
          out, reduced(op, kCount * size_).narrow(0, kCount * rank_, kCount).clone(), within);
    }
    {
      std::vector<int64_t> counts;
      int64_t total = 0, begin = 0;
      for (int r = 0; r < size_; ++r) {
        counts.push_back(part_of(r));
        if (r < rank_) begin += counts[r];
        total += counts[r];
      }
      const at::Tensor in = there(values(type_, op, rank_, total)), out = blank(counts[rank_]);
      call(
          absl::StrCat("reduce_scatter_v", of),
          [&](const CallOptions& o) {
            return comm_.reduce_scatter_v(comm_buffer(in), comm_buffer(out), counts, op, o);
          },
          out, reduced(op, total).narrow(0, begin, counts[rank_]).clone(), within);
    }
    {
      const at::Tensor in = there(values(type_, op, rank_, kCount)), out = blank(kCount);
      const at::Tensor before = out.to(at::kCPU);
      call(
          absl::StrCat("reduce", of),
          [&](const CallOptions& o) {
            return comm_.reduce(comm_buffer(in), comm_buffer(out), op, /*root=*/0, o);
          },
          out, rank_ == 0 ? reduced(op, kCount) : before, within);
    }
  }

  // Around a ring; a rank alone sends to itself.
  void messages() {
    constexpr int64_t kCount = 1000;
    const int next = (rank_ + 1) % size_, last = (rank_ + size_ - 1) % size_;
    const at::Tensor from = there(plain(rank_, kCount)), to = blank(kCount);
    check_.attempt("send and recv", [&] {
      const Work sending = comm_.send(comm_buffer(from), next, 3, options("send"));
      const Work receiving = comm_.recv(comm_buffer(to), last, 3, options("recv"));
      wait_in_order(sending, device_);
      expect("recv", receiving, to, plain(last, kCount));
    });
  }

  void coalesced() {
    std::vector<at::Tensor> tensors, wanted;
    for (int64_t i = 1; i <= 4; ++i) {
      tensors.push_back(there(values(type_, ReduceOp::kSum, rank_, 10 * i)));
      wanted.push_back(reduced(ReduceOp::kSum, 10 * i));
    }
    check_.attempt("coalesced all_reduce", [&] {
      Coalescing group(comm_);
      for (const at::Tensor& t : tensors) {
        comm_.all_reduce(comm_buffer(t), comm_buffer(t), ReduceOp::kSum, options("coalesced"));
      }
      const Work work = group.finish();
      for (size_t i = 0; i < tensors.size(); ++i) {
        expect("coalesced all_reduce", work, tensors[i], wanted[i]);
      }
    });
  }

  // Of every second rank.
  void groups() {
    check_.attempt("split", [&] {
      const auto group = value_or_throw(comm_.split(rank_ % 2, rank_, "gpu_check"));
      const at::Tensor data = there(at::full({3}, static_cast<double>(rank_ + 1), at::kFloat));
      const Work work = group->all_reduce(comm_buffer(data), comm_buffer(data), ReduceOp::kSum,
                                          options("all_reduce"));
      double sum = 0;
      for (int r = rank_ % 2; r < size_; r += 2) sum += r + 1;
      expect("all_reduce of a group", work, data, at::full({3}, sum, at::kFloat));
    });
  }

  Check& check_;
  Communicator& comm_;
  const c10::Device device_;
  const int rank_, size_;
  at::ScalarType type_ = at::kFloat;
  int64_t calls_ = 0;
};

}  // namespace

void check_collectives(Session& session, Check& check) {
  Conformance(session, check).run();
}

void check_streams(Session& session, Check& check) {
  Communicator& comm = *session.world->comm();
  const c10::impl::VirtualGuardImpl gpu(session.device.type());
  const double ranks = session.ranks();
  const int rounds = 10;
  for (const bool side : {false, true}) {
    const c10::StreamGuard on(side ? gpu.getStreamFromGlobalPool(session.device)
                                   : gpu.getStream(session.device));
    at::Tensor x = at::ones({1000, 100}, at::TensorOptions(at::kFloat).device(session.device));
    double want = 1;
    for (int i = 0; i < rounds; ++i) {
      // Each step wants the one before to be there.
      x = x * 2 + 1;
      const CallOptions options = {.tag = "streams", .stream = current_stream(session.device)};
      wait_in_order(comm.all_reduce(comm_buffer(x), comm_buffer(x), ReduceOp::kSum, options),
                    session.device);
      x = x / ranks;
      want = want * 2 + 1;
    }
    const at::Tensor got = on_host(x);
    check.expect(difference(got, at::full_like(got, want)) <= 1e-5,
                 absl::StrCat("on ", side ? "a stream of its own" : "the default stream",
                              ": an operation was not in the order of its stream"));
  }
  check.looked_at(absl::StrCat(rounds, " all-reduces between operators, on two streams"));
}

void check_bandwidth(Session& session, Check& check) {
  Communicator& comm = *session.world->comm();
  const int64_t size = comm.size();
  const int64_t part = std::max<int64_t>(1, session.options.sizes.bandwidth_bytes / 2 / size);
  const at::TensorOptions options = at::TensorOptions(at::kBFloat16).device(session.device);
  const at::Tensor mine = at::ones({part}, options), all = at::ones({part * size}, options);
  const auto measure = [&](const char* name, double factor,
                           const std::function<Work(const CallOptions&)>& issue) {
    const auto run = [&] {
      wait_in_order(issue({.tag = name, .stream = current_stream(session.device)}), session.device);
    };
    for (int i = 0; i < 3; ++i) run();
    std::vector<double> seconds;
    for (int i = 0; i < 10; ++i) seconds.push_back(device_seconds(session.device, run));
    const double bytes = static_cast<double>(2 * part * size) * factor;
    check.figure({.name = absl::StrCat(name, " of ", 2 * part * size, " bytes"),
                  .value = bytes / median(seconds) / 1e9,
                  .unit = "GB/s"});
  };
  // What each rank sends at least, of what it has.
  const double share = static_cast<double>(size - 1) / static_cast<double>(size);
  measure("all_reduce", 2 * share, [&](const CallOptions& o) {
    return comm.all_reduce(comm_buffer(all), comm_buffer(all), ReduceOp::kMax, o);
  });
  measure("all_gather", share, [&](const CallOptions& o) {
    return comm.all_gather(comm_buffer(mine), comm_buffer(all), o);
  });
  measure("reduce_scatter", share, [&](const CallOptions& o) {
    return comm.reduce_scatter(comm_buffer(all), comm_buffer(mine), ReduceOp::kMax, o);
  });
  check.fact("clock", has_clock(session.device) ? "the device's" : "the host's");
  check.looked_at("bytes that a rank sends at least, in bfloat16, in a second");
}

}  // namespace shardweave_tool
