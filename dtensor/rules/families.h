// The families of sharding rules, one file each.
#pragma once

namespace shardweave {
class RuleTable;
}

namespace shardweave::dtensor_internal {

void add_attention_rules(RuleTable& table);
void add_convolution_rules(RuleTable& table);
void add_data_dependent_rules(RuleTable& table);
void add_data_movement_rules(RuleTable& table);
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

// What RuleTable::builtin() consists of. (rule_families_test: every family of this folder is here.)
inline constexpr void (*kRuleFamilies[])(RuleTable&) = {
    add_attention_rules,     add_convolution_rules, add_data_dependent_rules,
    add_data_movement_rules, add_diagonal_rules,    add_distance_rules,
    add_distribution_rules,  add_embedding_rules,   add_factorization_rules,
    add_histogram_rules,     add_indexing_rules,    add_linear_algebra_rules,
    add_loss_rules,          add_margin_loss_rules, add_matmul_rules,
    add_norm_rules,          add_optimizer_rules,   add_pointwise_rules,
    add_random_rules,        add_range_rules,       add_recurrent_rules,
    add_reduction_rules,     add_segment_rules,     add_softmax_rules,
    add_spatial_rules,       add_view_rules,
};

}  // namespace shardweave::dtensor_internal
