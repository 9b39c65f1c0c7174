// What the calls are made of, and which comes next.
#include "fuzzer.h"

namespace shardweave::capi {

const char* Fuzzer::text() {
  static const char* const kTexts[] = {nullptr,
                                       "",
                                       "x",
                                       "dp",
                                       "tp",
                                       "weight",
                                       "a.b.c",
                                       "..",
                                       "a.",
                                       "\xff\xfe",
                                       "\xe2\x82",
                                       "[R]",
                                       "[S(0)]",
                                       "[S(1)]",
                                       "[P(sum)]",
                                       "[S(0), R]",
                                       "[S(99)]",
                                       "[S(0, sf=3)]",
                                       "[S(0, sizes=[2])]",
                                       "S(0)",
                                       "R",
                                       "P(avg)",
                                       "x=1",
                                       "x=1,y=1",
                                       "x=2",
                                       "{}",
                                       "{\"parameter\": {\"*\": {\"x\": \"S(0)\"}}}",
                                       "{\"parameter\": {\"*\": {\"x\": \"R\"}}}",
                                       "{\"forward\": {\"input\": {\"x\": \"R\"}}}",
                                       "input",
                                       "{\"parameter\": 3}",
                                       "[[[[",
                                       "step",
                                       "exp_avg",
                                       "momentum_buffer",
                                       "forward",
                                       "/proc/nowhere/x",
                                       "gloo"};
  return kTexts[below(std::size(kTexts))];
}

const char* Fuzzer::op_name() {
  static const char* const kNames[] = {"aten::add.Tensor",
                                       "aten::add",
                                       "aten::mul",
                                       "aten::mm",
                                       "aten::matmul",
                                       "aten::sum",
                                       "aten::sum.dim_IntList",
                                       "aten::mean",
                                       "aten::cat",
                                       "aten::stack",
                                       "aten::split_with_sizes",
                                       "aten::t",
                                       "aten::view",
                                       "aten::reshape",
                                       "aten::relu",
                                       "aten::gelu",
                                       "aten::softmax.int",
                                       "aten::layer_norm",
                                       "aten::embedding",
                                       "aten::index.Tensor",
                                       "aten::max.dim",
                                       "aten::clamp",
                                       "aten::linear",
                                       "aten::mse_loss",
                                       "aten::zeros_like",
                                       "aten::detach",
                                       "aten::clone",
                                       "aten::to.dtype",
                                       "aten::mul_",
                                       "aten::copy_",
                                       "aten::dropout",
                                       "aten::transpose.int",
                                       "aten::expand",
                                       "aten::squeeze",
                                       "aten::select.int",
                                       "aten::slice.Tensor",
                                       "aten::pow",
                                       "aten::where",
                                       "aten::topk",
                                       "aten::sort",
                                       "aten::_local_scalar_dense",
                                       "aten::size.int",
                                       "aten::full",
                                       "aten::zeros",
                                       "aten::ones_like",
                                       "aten::to",
                                       "aten::to.device",
                                       "aten::where.self",
                                       "aten::div.Tensor_mode",
                                       "aten::lerp",
                                       "aten::norm",
                                       "aten::cumsum",
                                       "aten::flip",
                                       "aten::any",
                                       "aten::sub",
                                       "aten::eq",
                                       "aten::add_",
                                       "aten::upsample_nearest2d",
                                       "aten::contiguous",
                                       "aten::nope",
                                       "aten::ad",
                                       "prim::print",
                                       "",
                                       "::",
                                       "aten::add.",
                                       "aten::add.default"};
  return one_in(30) ? text() : kNames[below(std::size(kNames))];
}

swv_value Fuzzer::value() {
  static const char* const kStrings[] = {
      "contiguous_format", "channels_last", "strided", "tanh", "none", "mean", "trunc", "floor", "",
      "\xff\xfe"};
  swv_value v = SWV_NONE;
  switch (below(17)) {
    case 0:
      v = swv_value_none();
      break;
    case 1:
      v = swv_value_default();
      break;
    case 2:
    case 3:
    case 4:
    case 5:
    case 6:
      v = swv_value_tensor(pick(tensors_));
      break;
    case 7:
      v = swv_value_int(one_in(6) ? number() : static_cast<int64_t>(below(3)));
      break;
    case 8:
      v = swv_value_float(real());
      break;
    case 9:
      v = swv_value_bool(one_in(20) ? small() : static_cast<swv_bool>(below(2)));
      break;
    case 10:
      for (int64_t& i : ints_) i = one_in(10) ? number() : static_cast<int64_t>(below(3));
      v = swv_value_ints(one_in(40) ? nullptr : ints_, length(4));
      break;
    case 11:
      for (swv_tensor*& t : list_) t = pick(tensors_);
      v = swv_value_tensors(one_in(40) ? nullptr : list_, length(4));
      break;
    case 12:
      for (double& x : floats_) x = real();
      v = swv_value_floats(one_in(40) ? nullptr : floats_, length(4));
      break;
    case 13:
      for (swv_bool& x : bools_) x = one_in(20) ? small() : static_cast<swv_bool>(below(2));
      v.kind = SWV_VALUE_BOOLS;
      v.as.bools.data = one_in(40) ? nullptr : bools_;
      v.as.bools.size = length(4);
      break;
    case 14: {
      const char* const chars = kStrings[below(std::size(kStrings))];
      v = swv_value_string(one_in(40) ? nullptr : chars, length(std::strlen(chars)));
      break;
    }
    case 15:
      if (one_in(2)) {
        v.kind = SWV_VALUE_DEVICE;
        v.as.device = {one_in(4) ? small() : SWV_DEVICE_CPU, one_in(4) ? small() : 0};
      } else {
        v.kind = SWV_VALUE_COMPLEX;
        v.as.complex_number.real = real();
        v.as.complex_number.imaginary = real();
      }
      break;
    default:
      v = swv_value_dtype(small());
      break;
  }
  if (one_in(60)) {
    const swv_value_kind kind = one_in(4) ? 14 + static_cast<int32_t>(below(4)) : small();
    // A kind that reads other memory than was given is the caller's lie, not bad input.
    if (kind == SWV_VALUE_TENSOR) {
      v = swv_value_tensor(pick(tensors_));
    } else if (kind < SWV_VALUE_STRING || kind > SWV_VALUE_FLOATS) {
      v.kind = kind;
    }
  }
  if (one_in(100)) v.reserved = 1;
  return v;
}

swv_tensor_options Fuzzer::tensor_options() {
  swv_tensor_options o = SWV_TENSOR_OPTIONS_INIT;
  o.dtype = one_in(3) ? small() : 0;
  o.requires_grad = one_in(30) ? small() : static_cast<swv_bool>(below(2));
  if (one_in(30)) o.device = {small(), small()};
  if (one_in(2)) o.mesh = pick(meshes_);
  if (one_in(3)) o.layout = pick(layouts_);
  return o;
}

// What a step may be, and how often one is against the others.
struct Fuzzer::Step {
  void (Fuzzer::*run)();
  int weight;
};
constexpr Fuzzer::Step Fuzzer::kSteps[] = {
    {&Fuzzer::operators, 140},     {&Fuzzer::tensors, 40},   {&Fuzzer::autograd, 40},
    {&Fuzzer::modules, 40},        {&Fuzzer::layouts, 20},   {&Fuzzer::communication, 20},
    {&Fuzzer::point_to_point, 20}, {&Fuzzer::queries, 20},   {&Fuzzer::worlds, 15},
    {&Fuzzer::observe, 13},        {&Fuzzer::data, 7},       {&Fuzzer::guided, 5},
    {&Fuzzer::backends, 4},        {&Fuzzer::contention, 4}, {&Fuzzer::dlpack, 4},
    {&Fuzzer::scripts, 4},         {&Fuzzer::ranks, 4},      {&Fuzzer::safetensors, 3},
    {&Fuzzer::checkpoints, 1},     {&Fuzzer::metrics, 1},    {&Fuzzer::pretrained, 1},
};

void Fuzzer::step() {
  static_assert(std::size(kSteps) <= 64);  // their set is a word
  uint64_t sum = 0;
  for (const Step& step : kSteps) sum += static_cast<uint64_t>(step.weight);
  size_t i = 0;
  if (favoured_ != 0 && one_in(2)) {
    for (auto skip = below(static_cast<uint64_t>(std::popcount(favoured_)));; ++i) {
      if ((favoured_ >> i & 1) != 0 && skip-- == 0) break;
    }
  } else {
    for (uint64_t left = below(sum); left >= static_cast<uint64_t>(kSteps[i].weight); ++i) {
      left -= static_cast<uint64_t>(kSteps[i].weight);
    }
  }
  current_step = i;
  (this->*kSteps[i].run)();
}

}  // namespace shardweave::capi
