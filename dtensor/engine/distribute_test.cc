// What one rank has, spread over the mesh: every rank gets its part and nothing else.
#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/dtensor/dtensor.h"
#include "shardweave/dtensor/testing/expect_comms.h"
#include "shardweave/dtensor/testing/on_mesh.h"

namespace shardweave {
namespace {

using testing::all_layouts;
using testing::on_mesh;
using testing::try_on_mesh;

int64_t rank_in(const MeshPtr& mesh) {
  int64_t rank = 0;
  for (int m = 0; m < mesh->mesh().ndim(); ++m) {
    rank = rank * mesh->mesh().size(m) + mesh->coordinate()[m];
  }
  return rank;
}

void expect_parts(const MeshPtr& mesh, const at::Tensor& values, const Placements& placements,
                  int64_t source) {
  SCOPED_TRACE(absl::StrCat(to_string(placements), " of rank ", source));
  // The others have nothing that counts.
  const at::Tensor mine = rank_in(mesh) == source ? values : at::zeros_like(values);
  const at::Tensor got = distribute_tensor(mine, mesh, placements, {.source = source});
  const at::Tensor want = distribute_tensor(values, mesh, placements, {.source = std::nullopt});
  EXPECT_EQ(layout_of(got), layout_of(want));
  EXPECT_TRUE(at::equal(to_local(got), to_local(want))) << to_local(got) << to_local(want);
  // A part owns its bytes, and no others.
  EXPECT_EQ(to_local(got).storage().nbytes(), to_local(got).nbytes());
  EXPECT_FALSE(to_local(got).is_alias_of(mine));
}

TEST(DistributeTest, EveryRankGetsItsPartOfTheSource) {
  const at::Tensor values = at::arange(7 * 3, at::kDouble).view({7, 3}) + 1;
  const std::vector<std::vector<MeshDim>> meshes = {
      {{"x", 1}}, {{"x", 2}}, {{"x", 5}}, {{"x", 2}, {"y", 3}}, {{"x", 2}, {"y", 1}, {"z", 2}}};
  for (const std::vector<MeshDim>& dims : meshes) {
    on_mesh(dims, [&](const MeshPtr& mesh) {
      for (int64_t source = 0; source < mesh->mesh().size(); source += 2) {
        for (const Placements& placements : all_layouts(mesh->mesh().ndim(), 2, false)) {
          expect_parts(mesh, values, placements, source);
        }
      }
    });
  }
}

// No dimension of the mesh is named: replicated.
TEST(DistributeTest, AnEmptyListOfPlacements) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor values = at::arange(6, at::kDouble).view({2, 3});
    const at::Tensor x = distribute_tensor(values, mesh, {});
    EXPECT_EQ(layout_of(x), Layout({Replicate(), Replicate()}));
    EXPECT_TRUE(at::equal(to_local(x), values));
    EXPECT_EQ(layout_of(distribute_tensor(values, mesh, {}, {.source = std::nullopt})),
              layout_of(x));
    const at::Tensor cut = distribute_tensor(values, mesh, {{"y", Shard(1)}});
    EXPECT_EQ(layout_of(redistribute(cut, {})), layout_of(x));
    EXPECT_TRUE(at::equal(to_local(redistribute(cut, {})), values));
    // The others are what they were.
    EXPECT_EQ(layout_of(distribute_tensor(values, mesh, {Shard(0), Shard(1)})),
              Layout({Shard(0), Shard(1)}));
    EXPECT_EQ(layout_of(redistribute(x, Layout({Shard(0), Shard(1)}))),
              Layout({Shard(0), Shard(1)}));
  });
}

// LibTorch's own errors, too, come without their backtraces.
TEST(DistributeTest, ErrorsOfRanksAreTheirMessages) {
  const absl::Status status = try_on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    if (mesh->coordinate()[0] == 1) at::ones({2, 3}).mm(at::ones({2, 3}));
    at::mm(zeros({2, 3}, mesh, {Shard(0)}), zeros({2, 3}, mesh, {Shard(0)}));
  });
  EXPECT_THAT(std::string(status.message()),
              ::testing::AllOf(::testing::HasSubstr("cannot be multiplied"),
                               ::testing::Not(::testing::HasSubstr("frame #")),
                               ::testing::Not(::testing::HasSubstr("Exception raised"))));
}

TEST(DistributeTest, OfADTensor) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor x = zeros({4}, mesh, {Shard(0)});
    const auto message_of_error = [](const std::function<void()>& call) -> std::string {
      try {
        call();
      } catch (const Error& error) {
        return std::string(error.status().message());
      }
      return "no error";
    };
    EXPECT_THAT(message_of_error([&] { distribute_tensor(x, mesh, {Replicate()}); }),
                ::testing::AllOf(::testing::HasSubstr("this is a DTensor already, DTensor[4]"),
                                 ::testing::HasSubstr("; redistribute it for another layout")));
    EXPECT_THAT(message_of_error([&] { from_local(x, mesh, {Shard(0)}); }),
                ::testing::AllOf(::testing::HasSubstr("wanted a plain tensor, got DTensor[4]"),
                                 ::testing::HasSubstr("or take its local part")));
  });
}

// As an error on all ranks, where the shape is not given either.
TEST(DistributeTest, LocalPartsOfTwoDtypes) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const at::ScalarType dtype = mesh->coordinate()[0] == 1 ? at::kDouble : at::kFloat;
    try {
      from_local(at::ones({2}, dtype), mesh, {Shard(0)});
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(std::string(error.status().message()),
                  ::testing::HasSubstr("is Float on rank 0 and Double on rank 1"));
    }
  });
}

TEST(DistributeTest, OfEveryKindOfCutAndElement) {
  on_mesh({{"x", 2}, {"y", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor values = at::arange(8 * 3, at::kDouble).view({8, 3}) + 1;
    const Placements cuts[] = {{StridedShard(0, 2), Replicate()},
                               {Replicate(), StridedShard(0, 4)},
                               {RaggedShard(0, {1, 7}), Shard(1)},
                               {RaggedShard(0, {0, 8}), Shard(0)},
                               {Shard(0), StridedShard(0, 2)}};
    for (const Placements& placements : cuts) {
      expect_parts(mesh, values, placements, 0);
      expect_parts(mesh, at::complex(values, -values), placements, 3);
      expect_parts(mesh, values.remainder(2).to(at::kBool), placements, 2);
      expect_parts(mesh, values.t().contiguous().t(), placements, 1);  // other strides
    }
    expect_parts(mesh, at::full({}, 3), {Replicate(), Replicate()}, 2);
    expect_parts(mesh, at::empty({0, 4}), {Shard(0), Replicate()}, 2);
  });
}

// Not the whole to every rank: the source sends parts, and only what several ranks have alike is
// broadcast.
TEST(DistributeTest, SendsParts) {
  on_mesh({{"dp", 2}, {"tp", 2}}, [](const MeshPtr& mesh) {
    const at::Tensor values = at::ones({4, 2}, at::kFloat);
    const auto sent = [&](const Placements& placements) {
      CommTrace trace(mesh);
      distribute_tensor(values, mesh, placements);
      std::vector<std::string> all;
      for (const CommEvent& event : trace.events()) {
        all.push_back(absl::StrCat(event.collective, " ", event.bytes));
      }
      return all;
    };
    using ::testing::ElementsAre;
    EXPECT_THAT(sent({Replicate(), Replicate()}), ElementsAre("broadcast 32"));
    EXPECT_THAT(sent({Shard(0), Shard(1)}), ElementsAre("scatter 32"));
    const auto cut_over_tp = sent({Replicate(), Shard(0)});
    if (mesh->coordinate()[0] == 0) {
      EXPECT_THAT(cut_over_tp, ElementsAre("barrier 0", "scatter 32", "broadcast 16"));
    } else {
      EXPECT_THAT(cut_over_tp, ElementsAre("barrier 0", "broadcast 16"));
    }
  });
}

// A rank with another shape: all ranks hear of it, those that would not have talked to it, too.
TEST(DistributeTest, ARankWithAnotherShape) {
  for (const Placements& placements :
       {Placements{Replicate(), Shard(0)}, Placements{Shard(0), Shard(1)},
        Placements{Replicate(), Replicate()}}) {
    for (int64_t odd = 0; odd < 4; ++odd) {
      std::atomic<int> failed = 0;
      const auto status = try_on_mesh({{"dp", 2}, {"tp", 2}}, [&](const MeshPtr& mesh) {
        try {
          distribute_tensor(at::ones({rank_in(mesh) == odd ? 6 : 4, 2}), mesh, placements);
        } catch (const Error&) {
          ++failed;
          throw;
        }
      });
      EXPECT_EQ(failed, 4) << to_string(placements) << " " << odd << ": " << status;
    }
  }
}

// Without a dtype full() has the value's, as LibTorch's.
TEST(DistributeTest, FullOfEveryKindOfNumber) {
  on_mesh({{"x", 2}}, [](const MeshPtr& mesh) {
    for (const at::Scalar& value : {at::Scalar(2), at::Scalar(2.5), at::Scalar(true),
                                    at::Scalar(c10::complex<double>(1, 2))}) {
      const at::Tensor x = full({3}, value, mesh, Placements{Shard(0)});
      const at::Tensor want = at::full({3}, value);
      EXPECT_EQ(x.scalar_type(), want.scalar_type());
      EXPECT_EQ(to_local(x).scalar_type(), want.scalar_type());
      EXPECT_TRUE(at::equal(full_tensor(x + x), want + want));
    }
    EXPECT_EQ(full({3}, 2, mesh, Placements{Shard(0)}, at::kHalf).scalar_type(), at::kHalf);
  });
}

// An expert without tokens makes zeros, which require no gradient.
TEST(DistributeTest, APartThatAloneRequiresNoGradient) {
  on_mesh({{"x", 3}}, [](const MeshPtr& mesh) {
    const int64_t rank = mesh->coordinate()[0];
    at::Tensor local = at::ones({rank, 8});
    if (rank == 2) local.requires_grad_();
    const at::Tensor x = from_local(local, mesh, {Shard(0)});
    EXPECT_TRUE(x.requires_grad());
    at::Tensor w = distribute_tensor(at::ones({8, 6}), mesh, Placements{Shard(0)}).requires_grad_();
    x.mm(w).sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(w.grad()), at::full({8, 6}, 3.0f)));
    EXPECT_EQ(local.grad().defined(), rank == 2);
    EXPECT_TRUE(rank != 2 || at::equal(local.grad(), at::full({2, 8}, 6.0f)));
  });
}

}  // namespace
}  // namespace shardweave
