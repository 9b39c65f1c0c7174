// The private copy of Gloo works in one process with LibTorch, which brings another version of it.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <gloo/allreduce.h>
#include <gloo/common/error.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/hash_store.h>
#include <gloo/transport/tcp/device.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kRanks = 4;

void allreduce(const std::shared_ptr<gloo::Context>& context, std::vector<float>& values,
               std::chrono::milliseconds timeout) {
  gloo::AllreduceOptions options(context);
  options.setOutput(values.data(), values.size());
  options.setReduceFunction([](void* out, const void* left, const void* right, size_t size) {
    gloo::sum<float>(out, left, right, size);
  });
  options.setTimeout(timeout);
  gloo::allreduce(options);
}

// The library that a function of this process comes from.
std::string library_of(void* function) {
  Dl_info info;
  return dladdr(function, &info) != 0 ? info.dli_fname : "";
}

TEST(PrivateGlooTest, AllreducesAndThrowsBesideLibTorch) {
  ASSERT_EQ(at::ones({3}).sum().item<float>(), 3.0f);
  gloo::rendezvous::HashStore store;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&store, rank] {
      gloo::transport::tcp::attr attributes;
      attributes.iface = "lo";
      auto device = gloo::transport::tcp::CreateDevice(attributes);
      auto context = std::make_shared<gloo::rendezvous::Context>(rank, kRanks);
      context->connectFullMesh(store, device);

      std::vector<float> values(1000, static_cast<float>(rank + 1));
      allreduce(context, values, std::chrono::seconds(30));
      EXPECT_EQ(values.front(), 10.0f);
      EXPECT_EQ(values.back(), 10.0f);

      // One rank stays away: an exception of this copy's type crosses the library's border.
      if (rank != kRanks - 1) {
        EXPECT_THROW(allreduce(context, values, std::chrono::milliseconds(200)), gloo::IoException);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(PrivateGlooTest, IsNotLibTorchsCopy) {
  // One function under two names, of which code that says gloo::allreduce gets the first.
  void* ours = dlsym(RTLD_DEFAULT, "_ZN12gloo_private9allreduceERKNS_16AllreduceOptionsE");
  ASSERT_NE(ours, nullptr);
  EXPECT_NE(library_of(ours).find("libgloo_private.so"), std::string::npos) << library_of(ours);
  void* theirs = dlsym(RTLD_DEFAULT, "_ZN4gloo9allreduceERKNS_16AllreduceOptionsE");
  if (theirs != nullptr) {
    EXPECT_NE(library_of(theirs).find("libtorch"), std::string::npos) << library_of(theirs);
  }
}

}  // namespace
