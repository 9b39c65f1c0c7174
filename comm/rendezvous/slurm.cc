#include "shardweave/comm/rendezvous/slurm.h"

#include "absl/strings/numbers.h"

namespace shardweave::slurm {

std::optional<std::string> first_host(std::string_view nodelist) {
  // "rack[1-2]node[08,10]-ib,...": from each bracket the first number, with its leading zeros.
  std::string host;
  size_t at = 0;
  while (at < nodelist.size() && nodelist[at] != ',') {
    if (nodelist[at] != '[') {
      host.push_back(nodelist[at++]);
      continue;
    }
    const size_t end = nodelist.find(']', at);
    const size_t first = nodelist.find_first_of("-,]", at);
    if (end == std::string_view::npos || first == at + 1) return std::nullopt;
    host.append(nodelist.substr(at + 1, first - at - 1));
    at = end + 1;
  }
  if (host.empty() || host.find_first_of(" ]") != std::string::npos) return std::nullopt;
  return host;
}

std::optional<uint16_t> first_port(std::string_view ports) {
  int port = 0;
  if (!absl::SimpleAtoi(std::string(ports.substr(0, ports.find_first_of("-,"))), &port) ||
      port < 1 || port > 65535) {
    return std::nullopt;
  }
  return static_cast<uint16_t>(port);
}

}  // namespace shardweave::slurm
