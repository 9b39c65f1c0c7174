// Python's pickles, as trees of values; nothing of them is run. Internal to modules/checkpoint/; without LibTorch.
//
//   auto pickle = Pickle::parse(bytes);                    // StatusOr
//   pickle->value().entry("size");                         // of an object's attributes; null: it is not there
//
// LibTorch's own (torch::pickle_load, torch::jit::Unpickler; 2.11) cannot be used. It makes nothing of an OrderedDict
// that has attributes, which what state_dict() gives is ("Expected GenericDict but got None"); refuses protocols other
// than 2, where DCP's metadata has 4; and reads all tensors, where a rank wants its parts.
// What Python would call (a class, a function) is a name and its arguments here, which whoever reads the tree knows
// or refuses. A tree may have cycles, and a value many places in it: who walks it counts. Whole numbers of more than
// 64 bits (seeds) are floats, about as large; what is appended to an object (a deque) is dropped.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace shardweave::checkpoint_internal {

struct PickleValue {
  enum class Kind : uint8_t {
    kNone,
    kBool,
    kInt,
    kFloat,
    kText,  // text or bytes
    kList,  // or tuple, or set
    kDict,
    kGlobal,  // "torch.FloatStorage"
    kObject,  // of `called`, with `items` for arguments
    kPersistent,
  };
  Kind kind = Kind::kNone;
  int64_t number = 0;
  double real = 0;
  std::string text;
  const PickleValue* called = nullptr;
  std::vector<const PickleValue*> items;  // of a persistent one: its id
  std::vector<std::pair<const PickleValue*, const PickleValue*>>
      entries;                         // an object may have some
  const PickleValue* state = nullptr;  // an object's attributes

  bool is_call_of(std::string_view name) const;
  // By a key that is a text, among the first 64, of two the later, as in Python; of an object its attribute.
  const PickleValue* entry(std::string_view key) const;
};

class Pickle {
 public:
  Pickle(Pickle&&) = default;
  Pickle& operator=(Pickle&&) = default;

  // InvalidArgument: no pickle, cut short, with what is not known here, or a tree that needs more memory. Says at
  // which byte the instruction is.
  static absl::StatusOr<Pickle> parse(std::string_view bytes, size_t most_memory = size_t{2} << 30);

  const PickleValue& value() const { return *value_; }

 private:
  friend class PickleReader;
  Pickle() = default;

  std::deque<PickleValue> values_;
  const PickleValue* value_ = nullptr;
};

}  // namespace shardweave::checkpoint_internal
