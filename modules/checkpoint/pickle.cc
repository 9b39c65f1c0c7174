#include "shardweave/modules/checkpoint/pickle.h"

#include <algorithm>
#include <bit>
#include <unordered_map>

#include "absl/status/status.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::checkpoint_internal {

using Kind = PickleValue::Kind;

bool PickleValue::is_call_of(std::string_view name) const {
  return kind == Kind::kObject && called != nullptr && called->kind == Kind::kGlobal &&
         called->text == name;
}

const PickleValue* PickleValue::entry(std::string_view key) const {
  const bool has_state = kind == Kind::kObject && state != nullptr && state->kind == Kind::kDict;
  const auto& among = has_state ? state->entries : entries;
  // No class has more attributes, and a long dict that is looked through again and again takes forever.
  for (size_t i = std::min<size_t>(among.size(), 64); i-- > 0;) {
    const auto& [name, value] = among[i];
    if (name->kind == Kind::kText && name->text == key) return value;
  }
  return nullptr;
}

// The machine that a pickle is a program of: a stack, marks in it, and a memo.
class PickleReader {
 public:
  PickleReader(std::string_view bytes, size_t most_memory)
      : bytes_(bytes), most_memory_(most_memory) {}

  absl::StatusOr<Pickle> run() {
    while (!is_done_) {
      instruction_ = at_;
      if (at_ >= bytes_.size()) return wrong("is cut short");
      const auto code = static_cast<uint8_t>(bytes_[at_++]);
      used_ += 64;  // places on the stack, marks, the memo
      if (!step(code)) {
        return wrong(error_.empty() ? str_cat("has the instruction ", int{code}, ", not known here")
                                    : error_);
      }
      // One instruction copies no more than there is.
      if (used_ > most_memory_) return wrong(str_cat("needs more than ", most_memory_, " bytes"));
    }
    return std::move(pickle_);
  }

 private:
  absl::Status wrong(const std::string& what) const {
    return absl::InvalidArgumentError(str_cat("the pickle ", what, ", at byte ", instruction_));
  }
  bool fail(const char* what) {
    if (error_.empty()) error_ = what;
    return false;
  }

  // --- input ---

  bool take(uint64_t count, std::string_view* out) {
    if (count > bytes_.size() - at_) return fail("is cut short");
    *out = bytes_.substr(at_, static_cast<size_t>(count));
    at_ += static_cast<size_t>(count);
    return true;
  }
  // Little-endian.
  bool take_number(size_t bytes, uint64_t* out) {
    std::string_view raw;
    if (!take(bytes, &raw)) return false;
    *out = 0;
    for (size_t i = 0; i < bytes; ++i) {
      *out |= uint64_t{static_cast<uint8_t>(raw[i])} << (8 * i);
    }
    return true;
  }
  bool take_line(std::string_view* out) {
    const size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos) return fail("is cut short");
    *out = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    return true;
  }

  // --- stack ---

  PickleValue* make(Kind kind) {
    pickle_.values_.emplace_back();
    pickle_.values_.back().kind = kind;
    used_ += sizeof(PickleValue);
    return &pickle_.values_.back();
  }
  bool push(PickleValue* value) {
    stack_.push_back(value);
    return true;
  }
  bool pop(PickleValue** out) {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) return fail("has an empty stack");
    *out = stack_.back();
    stack_.pop_back();
    return true;
  }
  bool top(PickleValue** out) {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) return fail("has an empty stack");
    *out = stack_.back();
    return true;
  }
  bool pop_to_mark(std::vector<PickleValue*>* out) {
    if (marks_.empty()) return fail("has no mark");
    const size_t begin = marks_.back();
    marks_.pop_back();
    out->assign(stack_.begin() + static_cast<int64_t>(begin), stack_.end());
    stack_.resize(begin);
    return true;
  }
  bool pop_count(size_t count, std::vector<PickleValue*>* out) {
    out->resize(count);
    for (size_t i = count; i-- > 0;) {
      if (!pop(&(*out)[i])) return false;
    }
    return true;
  }

  bool push_list(const std::vector<PickleValue*>& items) {
    PickleValue* list = make(Kind::kList);
    list->items.assign(items.begin(), items.end());
    used_ += items.size() * sizeof(void*);
    return push(list);
  }
  bool push_int(int64_t number, Kind kind = Kind::kInt) {
    PickleValue* value = make(kind);
    value->number = number;
    return push(value);
  }
  bool push_text(size_t length_bytes) {
    uint64_t length = 0;
    std::string_view text;
    if (!take_number(length_bytes, &length) || !take(length, &text)) return false;
    PickleValue* value = make(Kind::kText);
    value->text = std::string(text);
    used_ += text.size();
    return push(value);
  }
  bool push_call(PickleValue* called, PickleValue* args) {
    if (args->kind != Kind::kList) return fail("calls something without a tuple");
    PickleValue* object = make(Kind::kObject);
    object->called = called;
    object->items = args->items;
    used_ += args->items.size() * sizeof(void*);
    return push(object);
  }
  bool set_items(PickleValue* dict, const std::vector<PickleValue*>& pairs) {
    if (pairs.size() % 2 != 0) return fail("has a key without a value");
    if (dict->kind != Kind::kDict && dict->kind != Kind::kObject) return fail("fills no dict");
    for (size_t i = 0; i < pairs.size(); i += 2) dict->entries.emplace_back(pairs[i], pairs[i + 1]);
    used_ += pairs.size() * sizeof(void*);
    return true;
  }
  bool append(PickleValue* list, const std::vector<PickleValue*>& items) {
    if (list->kind == Kind::kObject) return true;
    if (list->kind != Kind::kList) return fail("appends to no list");
    list->items.insert(list->items.end(), items.begin(), items.end());
    used_ += items.size() * sizeof(void*);
    return true;
  }
  bool push_global(const std::string& name) {
    PickleValue* global = make(Kind::kGlobal);
    global->text = name;
    used_ += name.size();
    return push(global);
  }
  bool memoize(uint64_t index) {
    PickleValue* value = nullptr;
    if (!top(&value)) return false;
    memo_[index] = value;
    return true;
  }
  bool push_memo(uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) return fail("takes what is not in its memo");
    return push(found->second);
  }

  bool step(uint8_t code) {
    uint64_t number = 0;
    std::string_view first, second;
    PickleValue *a = nullptr, *b = nullptr;
    std::vector<PickleValue*> values;
    switch (code) {
      case 0x80:  // PROTO
        return take_number(1, &number) && (number <= 5 || fail("is of a later protocol"));
      case 0x95:  // FRAME
        return take_number(8, &number);
      case '.':  // STOP
        if (!pop(&a)) return false;
        pickle_.value_ = a;
        is_done_ = true;
        return true;
      case '(':  // MARK
        marks_.push_back(stack_.size());
        return true;
      case '0':  // POP, of a mark as well
        if (!marks_.empty() && marks_.back() == stack_.size()) {
          marks_.pop_back();
          return true;
        }
        return pop(&a);
      case '1':  // POP_MARK
        return pop_to_mark(&values);
      case '2':  // DUP
        return top(&a) && push(a);
      case 'N':  // NONE
        return push(make(Kind::kNone));
      case 0x88:  // NEWTRUE
        return push_int(1, Kind::kBool);
      case 0x89:  // NEWFALSE
        return push_int(0, Kind::kBool);
      case 'J':  // BININT
        return take_number(4, &number) && push_int(static_cast<int32_t>(number));
      case 'K':  // BININT1
        return take_number(1, &number) && push_int(static_cast<int64_t>(number));
      case 'M':  // BININT2
        return take_number(2, &number) && push_int(static_cast<int64_t>(number));
      case 0x8a:  // LONG1
        return push_long(1);
      case 0x8b:  // LONG4
        return push_long(4);
      case 'G':  // BINFLOAT, big-endian
        if (!take_number(8, &number)) return false;
        a = make(Kind::kFloat);
        a->real = std::bit_cast<double>(__builtin_bswap64(number));
        return push(a);
      case 0x8c:  // SHORT_BINUNICODE
      case 'C':   // SHORT_BINBYTES
      case 'U':   // SHORT_BINSTRING
        return push_text(1);
      case 'X':  // BINUNICODE
      case 'B':  // BINBYTES
      case 'T':  // BINSTRING
        return push_text(4);
      case 0x8d:  // BINUNICODE8
      case 0x8e:  // BINBYTES8
      case 0x96:  // BYTEARRAY8
        return push_text(8);
      case ']':   // EMPTY_LIST
      case ')':   // EMPTY_TUPLE
      case 0x8f:  // EMPTY_SET
        return push(make(Kind::kList));
      case '}':  // EMPTY_DICT
        return push(make(Kind::kDict));
      case 'l':   // LIST
      case 't':   // TUPLE
      case 0x91:  // FROZENSET
        return pop_to_mark(&values) && push_list(values);
      case 0x85:  // TUPLE1
      case 0x86:  // TUPLE2
      case 0x87:  // TUPLE3
        return pop_count(size_t{code} - 0x84, &values) && push_list(values);
      case 'd':  // DICT
        return pop_to_mark(&values) && push(make(Kind::kDict)) && set_items(stack_.back(), values);
      case 'a':  // APPEND
        return pop_count(1, &values) && top(&b) && append(b, values);
      case 'e':   // APPENDS
      case 0x90:  // ADDITEMS
        return pop_to_mark(&values) && top(&b) && append(b, values);
      case 's':  // SETITEM
        return pop_count(2, &values) && top(&b) && set_items(b, values);
      case 'u':  // SETITEMS
        return pop_to_mark(&values) && top(&b) && set_items(b, values);
      case 'q':  // BINPUT
        return take_number(1, &number) && memoize(number);
      case 'r':  // LONG_BINPUT
        return take_number(4, &number) && memoize(number);
      case 0x94:  // MEMOIZE
        return memoize(memo_.size());
      case 'h':  // BINGET
        return take_number(1, &number) && push_memo(number);
      case 'j':  // LONG_BINGET
        return take_number(4, &number) && push_memo(number);
      case 'c':  // GLOBAL
        if (!take_line(&first) || !take_line(&second)) return false;
        return push_global(str_cat(first, ".", second));
      case 0x93:  // STACK_GLOBAL
        if (!pop(&b) || !pop(&a)) return false;
        if (a->kind != Kind::kText || b->kind != Kind::kText) return fail("names no class");
        return push_global(str_cat(a->text, ".", b->text));
      case 'R':   // REDUCE
      case 0x81:  // NEWOBJ
        return pop(&b) && pop(&a) && push_call(a, b);
      case 0x92: {  // NEWOBJ_EX
        PickleValue* names = nullptr;
        return pop(&names) && pop(&b) && pop(&a) && push_call(a, b);
      }
      case 'b':  // BUILD
        if (!pop(&a) || !top(&b)) return false;
        if (b->kind != Kind::kObject) return fail("gives attributes to no object");
        if (b->state != nullptr) return fail("gives an object attributes twice");
        b->state = a;
        return true;
      case 'Q':  // BINPERSID
        if (!pop(&a)) return false;
        b = make(Kind::kPersistent);
        b->items.push_back(a);
        return push(b);
      default:
        return false;
    }
  }

  bool push_long(size_t length_bytes) {
    uint64_t length = 0, number = 0;
    if (!take_number(length_bytes, &length)) return false;
    if (length > 8) return push_longer(length);
    if (!take_number(static_cast<size_t>(length), &number)) return false;
    // The highest bit is the sign.
    if (length > 0 && length < 8 && (number >> (8 * length - 1)) != 0) {
      number |= ~uint64_t{0} << (8 * length);
    }
    return push_int(static_cast<int64_t>(number));
  }

  bool push_longer(uint64_t length) {
    std::string_view raw;
    if (!take(length, &raw)) return false;
    const bool is_negative = (static_cast<uint8_t>(raw.back()) & 0x80) != 0;
    PickleValue* value = make(Kind::kFloat);
    for (size_t i = raw.size(); i-- > 0;) {
      const auto byte = static_cast<uint8_t>(raw[i]);
      value->real = value->real * 256 + (is_negative ? 255 - byte : byte);
    }
    if (is_negative) value->real = -1 - value->real;
    return push(value);
  }

  const std::string_view bytes_;
  const size_t most_memory_;
  size_t used_ = 0;
  size_t at_ = 0, instruction_ = 0;
  bool is_done_ = false;
  std::string error_;
  Pickle pickle_;
  std::vector<PickleValue*> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, PickleValue*> memo_;
};

absl::StatusOr<Pickle> Pickle::parse(std::string_view bytes, size_t most_memory) {
  return PickleReader(bytes, most_memory).run();
}

}  // namespace shardweave::checkpoint_internal
