// What swv_op_explain() says as JSON: each term of a cost, by a cost model that can be counted by hand.
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "shardweave.h"

namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

void must(swv_status* status) {
  if (status == nullptr) return;
  ADD_FAILURE() << swv_status_message(status);
  swv_status_free(status);
}

std::vector<std::string> keys(const json& object) {
  std::vector<std::string> names;
  for (const auto& item : object.items()) names.push_back(item.key());
  return names;
}

std::vector<std::string> texts(const json& list) {
  return list.get<std::vector<std::string>>();
}

// One rank of two that need not be there: a link takes 8 s and a second for 2 bytes, a rank does 4 flops
// and touches 16 bytes in a second. A product of a whole [8, 4] with a weight of [4, 2] that is cut.
TEST(ExplainTest, EachTermIsInTheJson) {
  swv_world* world = nullptr;
  swv_mesh* mesh = nullptr;
  swv_layout *whole = nullptr, *rows = nullptr;
  swv_tensor *x = nullptr, *w = nullptr;
  swv_op* mm = nullptr;
  swv_string *table = nullptr, *text = nullptr;
  must(swv_world_create_counting(0, 2, &world));
  must(swv_mesh_parse(world, "tp=2", &mesh));
  const swv_link_cost link = {8, 2};
  swv_device_cost device = SWV_DEVICE_COST_INIT;
  device.flops = 4;
  device.bandwidth = 16;
  must(swv_mesh_set_cost_model(mesh, &link, 1, &device));
  must(swv_layout_parse("[R]", &whole));
  must(swv_layout_parse("[S(0)]", &rows));
  const int64_t of_x[] = {8, 4}, of_w[] = {4, 2};
  swv_tensor_options options = SWV_TENSOR_OPTIONS_INIT;
  options.mesh = mesh;
  options.layout = whole;
  must(swv_tensor_ones(of_x, 2, &options, &x));
  options.layout = rows;
  must(swv_tensor_ones(of_w, 2, &options, &w));
  must(swv_tensor_set_requires_grad(w, 1));
  must(swv_op_find("aten::mm", &mm));
  const swv_value args[] = {swv_value_tensor(x), swv_value_tensor(w)};
  must(swv_op_explain(mm, args, 2, &table, &text));

  // The keys that the header lists.
  const json why = json::parse(swv_string_data(text));
  EXPECT_THAT(keys(why), UnorderedElementsAre("op", "mesh", "has_rule", "gathered", "bytes", "dims",
                                              "inputs", "outputs"));
  const json& tp = why["dims"][0];
  EXPECT_THAT(keys(tp), UnorderedElementsAre("name", "ranks", "chosen", "not_offered", "options"));
  const json& chosen = tp["options"][tp["chosen"].get<size_t>()];
  EXPECT_THAT(keys(chosen), UnorderedElementsAre("inputs", "outputs", "seconds", "move", "compute",
                                                 "owed", "gives_up", "bytes", "obstacle"));
  EXPECT_THAT(keys(why["inputs"][0]),
              UnorderedElementsAre("name", "dtype", "shape", "before", "after", "steps"));
  EXPECT_THAT(texts(chosen["inputs"]), ElementsAre("S(1)", "S(0)"));
  EXPECT_THAT(texts(chosen["outputs"]), ElementsAre("P(sum)"));
  EXPECT_NEAR(chosen["move"], 0, 1e-6);
  EXPECT_EQ(chosen["compute"], 64 / 4 + (64 + 16 + 64) / 16);
  EXPECT_EQ(chosen["owed"], (8 + 64 / 2) / 2);  // half of an all-reduce
  EXPECT_NEAR(chosen["seconds"], 25 + 20, 1e-6);
  EXPECT_EQ(chosen["gives_up"], "");
  EXPECT_EQ(chosen["bytes"], 0);
  const json& gathered = tp["options"][0];
  EXPECT_THAT(texts(gathered["inputs"]), ElementsAre("R", "R"));
  EXPECT_NEAR(gathered["move"], 8 + 16 / 2, 1e-6);
  EXPECT_EQ(gathered["compute"], 128 / 4 + (128 + 32 + 64) / 16);
  EXPECT_EQ(gathered["owed"], 0);
  EXPECT_EQ(gathered["gives_up"], "weight");
  EXPECT_EQ(gathered["bytes"], 16);

  swv_string_free(text);
  swv_string_free(table);
  swv_op_free(mm);
  swv_tensor_free(w);
  swv_tensor_free(x);
  swv_layout_free(rows);
  swv_layout_free(whole);
  swv_mesh_free(mesh);
  swv_world_free(world);
}

}  // namespace
