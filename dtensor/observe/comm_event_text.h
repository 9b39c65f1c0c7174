// A CommEvent in the words of tables and of JSON. Internal to Shardweave.
#pragma once

#include <string>

#include "shardweave/dtensor/observe/comm_trace.h"

namespace shardweave::dtensor_internal {

std::string tensor_of(const CommEvent& event);      // "Float[8, 12] [R, P(sum)] -> [R, R]"
std::string parameters_of(const CommEvent& event);  // "layers.0.up.weight"; of many the first
std::string cause_of(const CommEvent& event);       // "aten::add 'other'"
std::string group_of(const CommEvent& event);       // "tp (2)"
std::string json_text_of(const CommEvent& event);   // an object, as in CommTrace::to_json()

}  // namespace shardweave::dtensor_internal
