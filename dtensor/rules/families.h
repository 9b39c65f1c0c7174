// The families of sharding rules, one file each. RuleTable::builtin() calls them all.
#pragma once

namespace shardweave {
class RuleTable;
}

namespace shardweave::dtensor_internal {

void add_attention_rules(RuleTable& table);
void add_convolution_rules(RuleTable& table);
void add_data_movement_rules(RuleTable& table);
void add_data_dependent_rules(RuleTable& table);
void add_diagonal_rules(RuleTable& table);
void add_distance_rules(RuleTable& table);
void add_distribution_rules(RuleTable& table);
void add_embedding_rules(RuleTable& table);
void add_factorization_rules(RuleTable& table);
void add_histogram_rules(RuleTable& table);
void add_indexing_rules(RuleTable& table);
void add_linear_algebra_rules(RuleTable& table);
void add_loss_rules(RuleTable& table);
void add_margin_loss_rules(RuleTable& table);
void add_matmul_rules(RuleTable& table);
void add_norm_rules(RuleTable& table);
void add_optimizer_rules(RuleTable& table);
void add_pointwise_rules(RuleTable& table);
void add_random_rules(RuleTable& table);
void add_range_rules(RuleTable& table);
void add_recurrent_rules(RuleTable& table);
void add_reduction_rules(RuleTable& table);
void add_segment_rules(RuleTable& table);
void add_softmax_rules(RuleTable& table);
void add_spatial_rules(RuleTable& table);
void add_view_rules(RuleTable& table);

}  // namespace shardweave::dtensor_internal
