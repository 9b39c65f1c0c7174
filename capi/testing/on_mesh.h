// What tests in C++ of the C interface need: handles that end with their block, statuses as exceptions,
// and all ranks of a mesh.
//
//   on_mesh("dp=2,tp=2", [](swv_mesh* mesh) {
//     Tensor x;
//     ok(swv_tensor_ones(sizes, 2, nullptr, x.out()));
//     EXPECT_THAT(message_of(swv_tensor_backward(x, nullptr, nullptr)), HasSubstr("..."));
//   });
#ifndef SHARDWEAVE_CAPI_TESTING_ON_MESH_H_
#define SHARDWEAVE_CAPI_TESTING_ON_MESH_H_

#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "shardweave.h"

namespace c_test {

inline void ok(swv_status* status) {
  if (status == nullptr) return;
  const std::string message = swv_status_message(status);
  swv_status_free(status);
  throw std::runtime_error(message);
}
inline std::string message_of(swv_status* status, swv_code code = SWV_CODE_INVALID_ARGUMENT) {
  EXPECT_EQ(swv_status_code(status), code) << swv_status_message(status);
  std::string message = swv_status_message(status);
  swv_status_free(status);
  return message;
}
inline std::string text_of(swv_string* string) {
  std::string text = swv_string_data(string);
  swv_string_free(string);
  return text;
}

// A handle that ends with its block.
template <typename H, void (*kFree)(H*)>
class Held {
 public:
  Held() = default;
  ~Held() { kFree(handle_); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  H** out() {
    kFree(std::exchange(handle_, nullptr));
    return &handle_;
  }
  operator H*() const { return handle_; }  // NOLINT: as the pointer
  H* operator->() const { return handle_; }

 private:
  H* handle_ = nullptr;
};
using Layout = Held<swv_layout, swv_layout_free>;
using Mesh = Held<swv_mesh, swv_mesh_free>;
using Module = Held<swv_module, swv_module_free>;
using Op = Held<swv_op, swv_op_free>;
using Optimizer = Held<swv_optimizer, swv_optimizer_free>;
using Plan = Held<swv_plan, swv_plan_free>;
using Scope = Held<swv_scope, swv_scope_free>;
using Sync = Held<swv_grad_sync, swv_grad_sync_free>;
using Tensor = Held<swv_tensor, swv_tensor_free>;

// On every rank of a mesh; a test fails that throws.
inline void on_mesh(const char* text, const std::function<void(swv_mesh*)>& body) {
  struct Job {
    const char* mesh;
    const std::function<void(swv_mesh*)>* body;
  } given{text, &body};
  int32_t ranks = 1;
  for (const char* at = text; (at = std::strchr(at, '=')) != nullptr;) ranks *= std::atoi(++at);
  swv_status* const status = swv_run_ranks(
      ranks,
      [](void* user_data, swv_world* world) -> swv_status* {
        const Job& job = *static_cast<Job*>(user_data);
        try {
          Mesh mesh;
          ok(swv_mesh_parse(world, job.mesh, mesh.out()));
          (*job.body)(mesh);
          return nullptr;
        } catch (const std::exception& error) {
          return swv_status_new(SWV_CODE_UNKNOWN, error.what());
        }
      },
      &given, nullptr);
  EXPECT_EQ(status, nullptr) << text << ": " << swv_status_message(status);
  swv_status_free(status);
}

}  // namespace c_test

#endif  // SHARDWEAVE_CAPI_TESTING_ON_MESH_H_
