#include "shardweave/comm/store/c10d_store.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <string_view>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shardweave/comm/store/store_conformance.h"

namespace shardweave {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(30);

// A name of loopback that has no address before its time has come, as that of a container that is
// not up yet.
class LateName {
 public:
  static constexpr char kName[] = "late.test";
  LateName(int failure, absl::Duration after) {
    failure_ = failure;
    appears_ = absl::ToUnixMicros(absl::Now() + after);
  }
  // What the name server says now: 0, or a failure.
  static int ask() { return absl::ToUnixMicros(absl::Now()) < appears_ ? failure_.load() : 0; }

 private:
  static inline std::atomic<int> failure_ = 0;
  static inline std::atomic<int64_t> appears_ = 0;
};

std::shared_ptr<C10dStore> serve() {
  return open_c10d_store({.serve = true}).value();
}
std::shared_ptr<C10dStore> join(uint16_t port) {
  return open_c10d_store({.port = port}).value();
}

// A socket on a free port of loopback; `backlog` < 0: bound, but nobody listens.
struct Socket {
  explicit Socket(int backlog) : fd(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_TRUE(backlog < 0 || ::listen(fd, backlog) == 0);
    socklen_t size = sizeof(address);
    EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
    port = ntohs(address.sin_port);
  }
  int fd;
  uint16_t port;
};

INSTANTIATE_TEST_SUITE_P(C10d, StoreConformance,
                         testing::Values(StoreCase{"tcp",
                                                   [] {
                                                     auto server = serve();
                                                     return [server](int client) {
                                                       return client == 0 ? server
                                                                          : join(server->port());
                                                     };
                                                   }}),
                         testing::PrintToStringParamName());

TEST(C10dStoreTest, PortZeroGivesTheRealPort) {
  auto a = serve();
  auto b = serve();
  EXPECT_NE(a->port(), 0);
  EXPECT_NE(a->port(), b->port());
  ASSERT_TRUE(join(a->port())->set("k", "of a").ok());
  EXPECT_EQ(a->get("k", kLong).value(), "of a");
  EXPECT_FALSE(b->check({"k"}).value());
}

TEST(C10dStoreTest, TakesOverAListeningSocket) {
  Socket socket(8);
  // Clients may come before the server does: the socket holds them.
  std::thread early([&] { EXPECT_EQ(join(socket.port)->get("k", kLong).value(), "v"); });
  absl::SleepFor(absl::Milliseconds(50));
  auto server =
      open_c10d_store({.port = socket.port, .serve = true, .listen_fd = socket.fd}).value();
  EXPECT_EQ(server->port(), socket.port);
  ASSERT_TRUE(server->set("k", "v").ok());
  early.join();
}

TEST(C10dStoreTest, MissingServerIsUnavailableWithinTheDeadline) {
  Socket nobody(-1);
  const absl::Time start = absl::Now();
  const absl::Status status =
      open_c10d_store({.port = nobody.port, .timeout = absl::Milliseconds(500)}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat("TCP store 127.0.0.1:", nobody.port,
                                     ": nobody answers in 500ms: Connection refused")));
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
  ::close(nobody.fd);
}

TEST(C10dStoreTest, UnknownHostIsUnavailable) {
  const absl::Status status =
      open_c10d_store(
          {.host = "no-such-host.invalid", .port = 1, .timeout = absl::Milliseconds(50)})
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no-such-host.invalid:1"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("cannot resolve the name"));
}

TEST(C10dStoreTest, ANameHasAWhileToAppear) {
  auto server = serve();
  for (const bool serves : {false, true}) {
    for (const int failure : {EAI_NONAME, EAI_AGAIN}) {
      const LateName name(failure, absl::Milliseconds(300));
      testing::internal::CaptureStderr();
      auto store = open_c10d_store({.host = LateName::kName,
                                    .port = serves ? uint16_t{0} : server->port(),
                                    .serve = serves});
      const std::string said = testing::internal::GetCapturedStderr();
      EXPECT_TRUE(store.ok()) << store.status();
      EXPECT_THAT(said, HasSubstr("shardweave: waiting for "));
      EXPECT_THAT(said, HasSubstr(absl::StrCat(LateName::kName)));
      EXPECT_THAT(said, HasSubstr("cannot resolve the name"));
    }
  }
}

TEST(C10dStoreTest, ANameThatDoesNotAppearIsAnErrorOfEveryRank) {
  for (const bool serves : {false, true}) {
    for (const int failure : {EAI_NONAME, EAI_AGAIN}) {
      const LateName name(failure, absl::Hours(1));
      const absl::Time start = absl::Now();
      testing::internal::CaptureStderr();
      const absl::Status status = open_c10d_store({.host = LateName::kName,
                                                   .port = 1,
                                                   .serve = serves,
                                                   .name_timeout = absl::Milliseconds(200)})
                                      .status();
      const std::string said = testing::internal::GetCapturedStderr();
      EXPECT_GE(absl::Now() - start, absl::Milliseconds(200));
      EXPECT_LT(absl::Now() - start, absl::Seconds(20));
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
      EXPECT_THAT(std::string(status.message()), HasSubstr(LateName::kName));
      EXPECT_THAT(std::string(status.message()), HasSubstr("cannot resolve the name"));
      EXPECT_THAT(said, HasSubstr("shardweave: waiting for "));
    }
  }
}

TEST(C10dStoreTest, ClientsMayComeBeforeTheServer) {
  Socket socket(-1);
  std::thread early([&] { EXPECT_EQ(join(socket.port)->get("k", kLong).value(), "v"); });
  absl::SleepFor(absl::Milliseconds(50));
  ASSERT_EQ(::listen(socket.fd, 8), 0);
  auto server =
      open_c10d_store({.port = socket.port, .serve = true, .listen_fd = socket.fd}).value();
  ASSERT_TRUE(server->set("k", "v").ok());
  early.join();
}

TEST(C10dStoreTest, OccupiedPortIsUnavailable) {
  auto server = serve();
  const absl::Status status = open_c10d_store({.port = server->port(), .serve = true}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cannot serve"));
}

// Another program has the port.
TEST(C10dStoreTest, WhatListensAndSaysNothingIsNotWaitedForLonger) {
  const Socket silent(4);
  const absl::Time begin = absl::Now();
  const absl::Status status =
      open_c10d_store({.port = silent.port, .timeout = absl::Milliseconds(300)}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("has not answered as a store in 300ms"));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
  ::close(silent.fd);  // which ends the thread that is left
}

TEST(C10dStoreTest, CallsAfterTheServerHasGoneAreUnavailable) {
  auto server = serve();
  auto client = join(server->port());
  ASSERT_TRUE(client->set("k", "v").ok());
  server.reset();
  const absl::Status status = client->get("k", absl::Seconds(5)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("TCP store 127.0.0.1"));
  // LibTorch says on stderr, with its stack, of each call that fails: there is no further one.
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(client->set("k", "w"), status);
  EXPECT_EQ(client->check({"k"}).status(), status);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(C10dStoreTest, RefusesOptionsThatContradict) {
  EXPECT_EQ(open_c10d_store({}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(open_c10d_store({}).status().message()), HasSubstr("needs the port"));
  const absl::Status client_fd = open_c10d_store({.port = 1, .listen_fd = 3}).status();
  EXPECT_EQ(client_fd.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(client_fd.message()), HasSubstr("listen_fd"));
  EXPECT_THAT(std::string(open_c10d_store({.host = "", .port = 1}).status().message()),
              HasSubstr("the host is empty"));
}

}  // namespace

// The C library's, with the late name: of this program and of the libraries that it uses.
extern "C" int getaddrinfo(const char* node, const char* service, const addrinfo* hints,
                           addrinfo** found) noexcept(false) {
  static const auto real =
      reinterpret_cast<int (*)(const char*, const char*, const addrinfo*, addrinfo**)>(
          ::dlsym(RTLD_NEXT, "getaddrinfo"));
  if (node != nullptr && std::string_view(node) == LateName::kName) {
    if (const int failure = LateName::ask(); failure != 0) return failure;
    node = "127.0.0.1";
  }
  return real(node, service, hints, found);
}

}  // namespace shardweave
