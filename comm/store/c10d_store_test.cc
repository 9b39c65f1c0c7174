#include "shardweave/comm/store/c10d_store.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

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

TEST(C10dStoreTest, CallsAfterTheServerHasGoneAreUnavailable) {
  auto server = serve();
  auto client = join(server->port());
  ASSERT_TRUE(client->set("k", "v").ok());
  server.reset();
  const absl::Status status = client->get("k", absl::Seconds(5)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("TCP store 127.0.0.1"));
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
}  // namespace shardweave
