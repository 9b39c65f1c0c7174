// What a call of a function of the host's has: handles that it borrows, handles that it gives away,
// and its context.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "shardweave/capi/handles.h"
#include "shardweave/comm/str_cat.h"

namespace shardweave::capi {

// Of one call of a function, or of a patch's forward.
struct FunctionCallState {
  bool is_forward = false;
  std::vector<at::Tensor> saved;
  // What a patch is in place of; null: it is no patch's.
  const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>* original = nullptr;
};

}  // namespace shardweave::capi

struct swv_function_context : shardweave::capi::Handle<shardweave::capi::Kind::kFunctionContext>,
                              shardweave::capi::FunctionCallState {};

namespace shardweave::capi {

// What a callback that misuses handles is called on stderr.
inline constexpr char kCallback[] = "a callback";

// Handles that a callback borrows.
class Borrowed {
 public:
  explicit Borrowed(const std::vector<at::Tensor>& tensors) {
    handles_.reserve(tensors.size());
    for (const at::Tensor& t : tensors) handles_.push_back(new_tensor_or_null(t));
  }
  ~Borrowed() {
    for (swv_tensor* handle : handles_) release(handle, kCallback);
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  const swv_tensor* const* data() const { return handles_.data(); }
  size_t size() const { return handles_.size(); }
  bool has(const swv_tensor* handle) const {
    return std::find(handles_.begin(), handles_.end(), handle) != handles_.end();
  }

 private:
  std::vector<swv_tensor*> handles_;
};

// Handles that a callback writes, and gives away: not those that it has borrowed, or written before.
class Written {
 public:
  Written(size_t count, const Borrowed& borrowed) : handles_(count), borrowed_(borrowed) {}
  ~Written() {
    for (size_t i = 0; i < handles_.size(); ++i) {
      if (!is_repeated(i) && !borrowed_.has(handles_[i])) release(handles_[i], kCallback);
    }
  }
  Written(const Written&) = delete;
  Written& operator=(const Written&) = delete;

  swv_tensor** data() { return handles_.data(); }
  size_t size() const { return handles_.size(); }
  // NULL elements are undefined tensors.
  std::vector<at::Tensor> take(const char* what) const {
    std::vector<at::Tensor> result;
    for (size_t i = 0; i < handles_.size(); ++i) {
      swv_tensor* const handle = handles_[i];
      if (handle != nullptr && is_repeated(i)) {
        fail_argument(what, str_cat("element ", i, " is written twice"));
      }
      if (handle != nullptr && borrowed_.has(handle)) {
        fail_argument(what, str_cat("element ", i, " is a borrowed tensor; swv_tensor_share it"));
      }
      result.push_back(handle == nullptr ? at::Tensor() : tensor(handle, what));
    }
    return result;
  }

 private:
  bool is_repeated(size_t i) const {
    const auto end = handles_.begin() + static_cast<std::ptrdiff_t>(i);
    return std::find(handles_.begin(), end, handles_[i]) != end;
  }

  std::vector<swv_tensor*> handles_;
  const Borrowed& borrowed_;
};

// The context of one callback.
class CallContext {
 public:
  explicit CallContext(FunctionCallState state)
      : handle_(make<swv_function_context>(std::move(state))) {}
  ~CallContext() { release(handle_, kCallback); }
  CallContext(const CallContext&) = delete;
  CallContext& operator=(const CallContext&) = delete;

  swv_function_context* get() const { return handle_; }

 private:
  swv_function_context* handle_;
};

inline swv_function_call function_call(swv_function_context* context, const Borrowed& inputs,
                                       Written& outputs) {
  return {.struct_size = SWV_SIZE_TO(swv_function_call, fqn),
          .context = context,
          .mode = current_mode(),
          .reserved = 0,
          .inputs = inputs.data(),
          .num_inputs = inputs.size(),
          .outputs = outputs.data(),
          .num_outputs = outputs.size(),
          .module = nullptr,
          .fqn = nullptr};
}

inline void check_written(const std::vector<at::Tensor>& outputs, std::string_view callback) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].defined())
      fail(absl::StatusCode::kInvalidArgument,
           str_cat(callback, ": output ", i, " was not written"));
  }
}

}  // namespace shardweave::capi
