// A Sample is one call of an operator as data: the schema's name, tensors by shape, the other
// arguments by name.
//
//   const Sample sample = {"aten::addmm", {in({5}), in({7, 4}), in({4, 5})}, {{"beta", 0.5}}};
//   const SampleCall call(sample);
//   Tensors outputs = call.run(inputs);   // boxed, on plain tensors or on DTensors
//
// Arguments that are not named have the schema's default. The tables of samples are in samples/.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/ivalue.h"
#include "ATen/core/stack.h"
#include "shardweave/dtensor/testing/op_check.h"

namespace shardweave::testing {

// A tensor argument: a tensor, a list of tensors, or None (also within a list).
class Operand {
 public:
  Operand(Input input) : elements_{std::move(input)} {}  // NOLINT: for tables
  static Operand none() { return Operand({std::nullopt}, false); }
  static Operand list(std::vector<Operand> elements);

  bool is_list() const { return is_list_; }
  const std::vector<std::optional<Input>>& elements() const { return elements_; }

 private:
  Operand(std::vector<std::optional<Input>> elements, bool is_list)
      : elements_(std::move(elements)), is_list_(is_list) {}

  std::vector<std::optional<Input>> elements_;
  bool is_list_ = false;
};

inline Operand none() {
  return Operand::none();
}
inline Operand list(std::vector<Operand> elements) {
  return Operand::list(std::move(elements));
}
inline c10::IValue ints(std::vector<int64_t> values) {
  return c10::IValue(std::move(values));
}
inline c10::IValue flags(const std::vector<bool>& values) {
  c10::List<bool> result;
  for (bool value : values) result.push_back(value);
  return c10::IValue(std::move(result));
}

struct Sample {
  std::string op;  // "aten::add.Tensor"
  std::vector<Operand>
      operands;  // one per tensor argument in the schema's order, out= arguments excepted
  std::vector<std::pair<std::string, c10::IValue>> attributes = {};
  double tolerance = 1e-9;
  bool values = true;   // false: what is in the result is not compared
  bool strides = true;  // false: nor its strides
  // Of several results those that LibTorch's kernels for GPUs leave as the memory was.
  std::vector<size_t> unset_on_gpus = {};
};

// A sample bound to the operator that it names.
class SampleCall {
 public:
  // Throws Error, naming the sample, if there is no such operator or its schema does not fit.
  explicit SampleCall(const Sample& sample);

  const c10::OperatorHandle& op() const { return op_; }
  // The tensors, without None; run() takes one for each.
  const std::vector<Input>& inputs() const { return inputs_; }
  // As the rules count them, None included: which of inputs() (-1: None) and which argument of the
  // schema.
  struct Flat {
    int input;
    int arg;
  };
  const std::vector<Flat>& flat() const { return flat_; }

  c10::Stack stack(const Tensors& inputs) const;
  // The results, lists flattened; an operator that writes its arguments gets copies.
  Tensors run(const Tensors& inputs) const;

  // The same call in another form: in place, or into out= tensors. Those that LibTorch has.
  std::vector<c10::OperatorHandle> other_forms() const;
  Tensors run_as(const c10::OperatorHandle& form, const Tensors& inputs) const;

 private:
  c10::OperatorHandle op_;
  std::vector<Input> inputs_;
  std::vector<Flat> flat_;
  c10::Stack defaults_;  // one per argument; tensors are put into their places
};

// The tensors among boxed results, lists flattened.
Tensors flat_tensors(const c10::Stack& results);

// The tables, one per family of operators.
struct SampleFamily {
  std::string name;
  std::vector<Sample> samples;
};
const std::vector<SampleFamily>& sample_families();

}  // namespace shardweave::testing
