// Every collective gives what its definition says: all dtypes, odd and zero counts, every root, in
// place.
#include <algorithm>
#include <atomic>
#include <numeric>

#include "shardweave/comm/testing/cases.h"

namespace shardweave {
namespace {

constexpr int64_t kCounts[] = {0, 1, 7, 130};

// Different for every rank, and zero for some.
std::vector<int64_t> ragged(int num_ranks, int salt = 0) {
  std::vector<int64_t> counts;
  for (int r = 0; r < num_ranks; ++r) counts.push_back((r * 5 + salt * 3 + 3) % 8);
  return counts;
}

int64_t sum(const std::vector<int64_t>& counts, int end) {
  return std::accumulate(counts.begin(), counts.begin() + end, int64_t{0});
}
int64_t sum(const std::vector<int64_t>& counts) {
  return sum(counts, static_cast<int>(counts.size()));
}

bool can_reduce(DType dtype, ReduceOp op) {
  return dtype != DType::kF8E4M3 && dtype != DType::kF8E5M2 &&
         !(dtype == DType::kBool && op == ReduceOp::kAvg);
}

Values samples(DType dtype, int rank, int64_t count) {
  return Values(dtype, count, [=](int64_t i) { return sample(dtype, rank, i); });
}
Values samples(DType dtype, ReduceOp op, int rank, int64_t count) {
  return Values(dtype, count, [=](int64_t i) { return sample(dtype, op, rank, i); });
}

// Which rank's part of `counts` element i is in, and where in it.
std::pair<int, int64_t> locate(const std::vector<int64_t>& counts, int64_t i) {
  int rank = 0;
  while (i >= counts[rank]) i -= counts[rank++];
  return {rank, i};
}

TEST_P(CommConformance, AllReduce) {
  run([](const auto& comm) -> absl::Status {
    for (DType dtype : all_dtypes()) {
      for (ReduceOp op : all_reduce_ops()) {
        if (!can_reduce(dtype, op)) continue;
        for (int64_t count : kCounts) {
          const Values want(dtype, count,
                            [&](int64_t i) { return reduced_sample(dtype, op, comm->size(), i); });
          Values in = samples(dtype, op, comm->rank(), count);
          Values out(dtype, count);
          SHARDWEAVE_RETURN_IF_ERROR(comm->all_reduce(in.buffer(), out.buffer(), op).wait());
          EXPECT_EQ(out, want) << to_string(op);
          EXPECT_EQ(in, samples(dtype, op, comm->rank(), count)) << to_string(op);
          SHARDWEAVE_RETURN_IF_ERROR(comm->all_reduce(in.buffer(), in.buffer(), op).wait());
          EXPECT_EQ(in, want) << to_string(op) << " in place";
        }
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, LargeAllReduce) {
  run([](const auto& comm) -> absl::Status {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kI8}) {
      const int64_t count = 300'007;
      const Values want(dtype, count, [&](int64_t i) {
        return reduced_sample(dtype, ReduceOp::kSum, comm->size(), i);
      });
      Values in = samples(dtype, comm->rank(), count);
      SHARDWEAVE_RETURN_IF_ERROR(comm->all_reduce(in.buffer(), in.buffer(), ReduceOp::kSum).wait());
      EXPECT_EQ(in, want);
    }
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, Reduce) {
  run([](const auto& comm) -> absl::Status {
    for (DType dtype : {DType::kF64, DType::kF16, DType::kU8, DType::kBool}) {
      for (int root = 0; root < comm->size(); ++root) {
        const int64_t count = 41 + root;
        const Values want(dtype, count, [&](int64_t i) {
          return reduced_sample(dtype, ReduceOp::kMax, comm->size(), i);
        });
        Values in = samples(dtype, ReduceOp::kMax, comm->rank(), count);
        const Values kept = in;
        Values out(dtype, comm->rank() == root ? count : 0);
        SHARDWEAVE_RETURN_IF_ERROR(
            comm->reduce(in.buffer(), out.buffer(), ReduceOp::kMax, root).wait());
        if (comm->rank() == root) {
          EXPECT_EQ(out, want);
        }
        EXPECT_EQ(in, kept);
        SHARDWEAVE_RETURN_IF_ERROR(
            comm->reduce(in.buffer(), in.buffer(), ReduceOp::kMax, root).wait());
        EXPECT_EQ(in, comm->rank() == root ? want : kept) << "in place";
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, AllGather) {
  run([](const auto& comm) -> absl::Status {
    for (DType dtype : all_dtypes()) {
      for (int64_t count : kCounts) {
        const Values want(dtype, count * comm->size(), [&](int64_t i) {
          return sample(dtype, static_cast<int>(i / count), i % count);
        });
        Values in = samples(dtype, comm->rank(), count);
        Values out(dtype, count * comm->size());
        SHARDWEAVE_RETURN_IF_ERROR(comm->all_gather(in.buffer(), out.buffer()).wait());
        EXPECT_EQ(out, want);

        const int64_t mine = comm->rank() * count;
        Values in_place(dtype, count * comm->size(), [&](int64_t i) {
          return i < mine || i >= mine + count ? 99 : sample(dtype, comm->rank(), i - mine);
        });
        SHARDWEAVE_RETURN_IF_ERROR(
            comm->all_gather(in_place.part(mine, count), in_place.buffer()).wait());
        EXPECT_EQ(in_place, want) << "in place";
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, AllGatherV) {
  run([](const auto& comm) -> absl::Status {
    for (DType dtype : {DType::kF32, DType::kI64, DType::kF8E5M2}) {
      for (int salt = 0; salt < 4; ++salt) {
        const std::vector<int64_t> counts = ragged(comm->size(), salt);
        const Values want(dtype, sum(counts), [&](int64_t i) {
          const auto [rank, index] = locate(counts, i);
          return sample(dtype, rank, index);
        });
        Values in = samples(dtype, comm->rank(), counts[comm->rank()]);
        Values out(dtype, sum(counts));
        SHARDWEAVE_RETURN_IF_ERROR(comm->all_gather_v(in.buffer(), out.buffer(), counts).wait());
        EXPECT_EQ(out, want);

        const int64_t begin = sum(counts, comm->rank());
        Values in_place(dtype, sum(counts), [&](int64_t i) {
          return locate(counts, i).first == comm->rank() ? sample(dtype, comm->rank(), i - begin)
                                                         : 99;
        });
        SHARDWEAVE_RETURN_IF_ERROR(comm->all_gather_v(in_place.part(begin, counts[comm->rank()]),
                                                      in_place.buffer(), counts)
                                       .wait());
        EXPECT_EQ(in_place, want) << "in place";
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, ReduceScatter) {
  run([](const auto& comm) -> absl::Status {
    for (DType dtype : all_dtypes()) {
      for (ReduceOp op : all_reduce_ops()) {
        if (!can_reduce(dtype, op)) continue;
        for (int64_t count : kCounts) {
          const int64_t mine = comm->rank() * count;
          const Values want(dtype, count, [&](int64_t i) {
            return reduced_sample(dtype, op, comm->size(), mine + i);
          });
          Values in = samples(dtype, op, comm->rank(), count * comm->size());
          Values out(dtype, count);
          SHARDWEAVE_RETURN_IF_ERROR(comm->reduce_scatter(in.buffer(), out.buffer(), op).wait());
          EXPECT_EQ(out, want) << to_string(op);
          EXPECT_EQ(in, samples(dtype, op, comm->rank(), count * comm->size()));
          SHARDWEAVE_RETURN_IF_ERROR(
              comm->reduce_scatter(in.buffer(), in.part(mine, count), op).wait());
          for (int64_t i = 0; i < count; ++i) EXPECT_EQ(in[mine + i], want[i]) << "in place";
        }
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, ReduceScatterV) {
  run([](const auto& comm) -> absl::Status {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kI16}) {
      for (int salt = 0; salt < 4; ++salt) {
        const std::vector<int64_t> counts = ragged(comm->size(), salt);
        const int64_t begin = sum(counts, comm->rank());
        const Values want(dtype, counts[comm->rank()], [&](int64_t i) {
          return reduced_sample(dtype, ReduceOp::kAvg, comm->size(), begin + i);
        });
        Values in = samples(dtype, comm->rank(), sum(counts));
        Values out(dtype, counts[comm->rank()]);
        SHARDWEAVE_RETURN_IF_ERROR(
            comm->reduce_scatter_v(in.buffer(), out.buffer(), counts, ReduceOp::kAvg).wait());
        EXPECT_EQ(out, want);
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, AllToAll) {
  run([](const auto& comm) -> absl::Status {
    for (DType dtype : all_dtypes()) {
      for (int64_t part : kCounts) {
        Values in = samples(dtype, comm->rank(), part * comm->size());
        Values out(dtype, part * comm->size());
        SHARDWEAVE_RETURN_IF_ERROR(comm->all_to_all(in.buffer(), out.buffer()).wait());
        EXPECT_EQ(out, Values(dtype, part * comm->size(), [&](int64_t i) {
                    return sample(dtype, static_cast<int>(i / part),
                                  comm->rank() * part + i % part);
                  }));
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, AllToAllV) {
  run([](const auto& comm) -> absl::Status {
    const int rank = comm->rank();
    for (int salt = 0; salt < 4; ++salt) {
      const auto sends = [&](int from, int to) { return int64_t{(from * 3 + to * 5 + salt) % 7}; };
      std::vector<int64_t> send_counts;
      std::vector<int64_t> recv_counts;
      std::vector<double> want;
      for (int peer = 0; peer < comm->size(); ++peer) {
        send_counts.push_back(sends(rank, peer));
        recv_counts.push_back(sends(peer, rank));
        int64_t begin = 0;
        for (int r = 0; r < rank; ++r) begin += sends(peer, r);
        for (int64_t i = 0; i < sends(peer, rank); ++i) {
          want.push_back(sample(DType::kF32, peer, begin + i));
        }
      }
      Values in = samples(DType::kF32, rank, sum(send_counts));
      Values out(DType::kF32, sum(recv_counts));
      SHARDWEAVE_RETURN_IF_ERROR(
          comm->all_to_all_v(in.buffer(), send_counts, out.buffer(), recv_counts).wait());
      EXPECT_EQ(out, Values(DType::kF32, sum(recv_counts), [&](int64_t i) { return want[i]; }));
    }
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, Broadcast) {
  run([](const auto& comm) -> absl::Status {
    for (DType dtype : all_dtypes()) {
      for (int root = 0; root < comm->size(); ++root) {
        for (int64_t count : kCounts) {
          Values data = samples(dtype, comm->rank(), count);
          SHARDWEAVE_RETURN_IF_ERROR(comm->broadcast(data.buffer(), root).wait());
          EXPECT_EQ(data, samples(dtype, root, count));
        }
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, GatherAndScatter) {
  run([](const auto& comm) -> absl::Status {
    const int rank = comm->rank();
    for (DType dtype : {DType::kF64, DType::kU16, DType::kBool}) {
      for (int root = 0; root < comm->size(); ++root) {
        for (int64_t count : kCounts) {
          const Values all(dtype, count * comm->size(), [&](int64_t i) {
            return sample(dtype, static_cast<int>(i / count), i % count);
          });
          Values mine = samples(dtype, rank, count);
          Values gathered(dtype, rank == root ? count * comm->size() : 0);
          SHARDWEAVE_RETURN_IF_ERROR(comm->gather(mine.buffer(), gathered.buffer(), root).wait());
          if (rank == root) {
            EXPECT_EQ(gathered, all);
          }

          Values part(dtype, count);
          SHARDWEAVE_RETURN_IF_ERROR(comm->scatter(gathered.buffer(), part.buffer(), root).wait());
          EXPECT_EQ(part, mine);

          // In place on the root.
          Buffer in = rank == root ? gathered.part(root * count, count) : mine.buffer();
          SHARDWEAVE_RETURN_IF_ERROR(comm->gather(in, gathered.buffer(), root).wait());
          if (rank == root) {
            EXPECT_EQ(gathered, all);
          }
          SHARDWEAVE_RETURN_IF_ERROR(comm->scatter(gathered.buffer(), in, root).wait());
          EXPECT_EQ(mine, samples(dtype, rank, count));
        }
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(CommConformance, LargeMoves) {
  run([](const auto& comm) -> absl::Status {
    const int64_t part = 40'003;
    const int64_t whole = part * comm->size();
    Values mine = samples(DType::kF32, comm->rank(), part);
    Values all(DType::kF32, whole);
    SHARDWEAVE_RETURN_IF_ERROR(comm->all_gather(mine.buffer(), all.buffer()).wait());
    EXPECT_EQ(all, Values(DType::kF32, whole, [&](int64_t i) {
                return sample(DType::kF32, static_cast<int>(i / part), i % part);
              }));
    Values back(DType::kF32, part);
    SHARDWEAVE_RETURN_IF_ERROR(
        comm->reduce_scatter(all.buffer(), back.buffer(), ReduceOp::kAvg).wait());
    EXPECT_EQ(back, mine);
    Values turned(DType::kF32, whole);
    SHARDWEAVE_RETURN_IF_ERROR(comm->all_to_all(all.buffer(), turned.buffer()).wait());
    EXPECT_EQ(turned, Values(DType::kF32, whole, [&](int64_t i) {
                return sample(DType::kF32, comm->rank(), i % part);
              }));
    return comm->broadcast(all.buffer(), comm->size() - 1).wait();
  });
}

TEST_P(CommConformance, NobodyLeavesABarrierBeforeAllHaveCome) {
  std::atomic<int> arrived{0};
  run([&](const auto& comm) -> absl::Status {
    for (int round = 1; round <= 20; ++round) {
      arrived.fetch_add(1);
      SHARDWEAVE_RETURN_IF_ERROR(comm->barrier().wait());
      EXPECT_GE(arrived.load(), round * comm->size());
    }
    return absl::OkStatus();
  });
}

// bf16: ((256 + 1) + 1) is 256 if every step is rounded, 258 if the sum is.
TEST_P(CommConformance, ReductionsRoundOnce) {
  if (!backend().rounds_once) GTEST_SKIP() << "not promised";
  run([](const auto& comm) -> absl::Status {
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      const double first = dtype == DType::kBF16 ? 256 : 2048;
      Values data(dtype, 5, [&](int64_t) { return comm->rank() == 0 ? first : 1; });
      SHARDWEAVE_RETURN_IF_ERROR(
          comm->all_reduce(data.buffer(), data.buffer(), ReduceOp::kSum).wait());
      for (int64_t i = 0; i < 5; ++i) {
        EXPECT_EQ(data[i], rounded(dtype, first + comm->size() - 1));
      }
    }
    return absl::OkStatus();
  });
}

// Every order of a float sum rounds differently; ranks must agree to the bit.
TEST_P(CommConformance, AllRanksGetTheSameBits) {
  run([](const auto& comm) -> absl::Status {
    const int64_t count = 10'001;
    for (int round = 0; round < 5; ++round) {
      Values data(DType::kF32, count, [&](int64_t i) {
        return 1.0 / (1 + (i * 31 + comm->rank() * 17 + round) % 1000);
      });
      SHARDWEAVE_RETURN_IF_ERROR(
          comm->all_reduce(data.buffer(), data.buffer(), ReduceOp::kSum).wait());
      Values all(DType::kF32, count * comm->size());
      SHARDWEAVE_RETURN_IF_ERROR(comm->all_gather(data.buffer(), all.buffer()).wait());
      for (int64_t i = 0; i < count * comm->size(); ++i) {
        if (all[i] != data[i % count]) return absl::InternalError("ranks differ");
      }
    }
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace shardweave
