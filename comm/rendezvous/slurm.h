// What Slurm writes into its variables.
//
//   first_host("node[007-012,20],login");      // "node007"
//   first_port("12003-12010");                  // 12003
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace shardweave::slurm {

// The first host of a nodelist, or nothing if it is ill-formed.
std::optional<std::string> first_host(std::string_view nodelist);
// The first port of SLURM_STEP_RESV_PORTS, or nothing if it is ill-formed.
std::optional<uint16_t> first_port(std::string_view ports);

}  // namespace shardweave::slurm
