// An Observer is told what happens on a mesh as it happens: the common ground of CommTrace,
// explain() and ProfileScope. Internal to dtensor/.
//
//   class Printer final : public Observer {
//     void collective_begins(int64_t id, const CommEvent& event) override { ... }
//   };
//   Printer printer;
//   const Observing observing(context, printer);   // until it goes
//
// Operators begin and end like the calls that they are, an end comes also when a call throws. Collectives may overlap.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/types/span.h"
#include "shardweave/dtensor/engine/mesh_context.h"
#include "shardweave/dtensor/engine/redistribute.h"
#include "shardweave/dtensor/observe/comm_trace.h"

namespace shardweave::dtensor_internal {

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void operator_begins(const c10::OperatorHandle& /*op*/,
                               absl::Span<const c10::IValue> /*args*/) {}
  virtual void operator_ends() {}
  // `id` is the collective's own.
  virtual void collective_begins(int64_t /*id*/, const CommEvent& /*event*/) {}
  virtual void collective_ends(int64_t /*id*/) {}
  // Scopes may end in any order: `scope` is the one that ends, by its address.
  virtual void module_begins(const void* /*scope*/, std::string_view /*name*/) {}
  virtual void module_ends(const void* /*scope*/) {}
  // What runs until the end is called there in a host's code (SourceScope).
  virtual void source_begins(const void* /*scope*/, std::string_view /*source*/) {}
  virtual void source_ends(const void* /*scope*/) {}
};

// Registers an observer with a mesh.
class Observing {
 public:
  Observing(std::shared_ptr<MeshContext> context, Observer& observer);
  ~Observing();
  Observing(const Observing&) = delete;
  Observing& operator=(const Observing&) = delete;

  MeshContext& context() const { return *context_; }

 private:
  const std::shared_ptr<MeshContext> context_;
  Observer* const observer_;
};

// While it lives, an operator runs.
class OperatorSpan {
 public:
  OperatorSpan(MeshContext& context, const c10::OperatorHandle& op,
               absl::Span<const c10::IValue> args) {
    if (!context.observation.observers.empty()) begin(context, op, args);
  }
  ~OperatorSpan() {
    if (context_ != nullptr) end();
  }
  OperatorSpan(const OperatorSpan&) = delete;
  OperatorSpan& operator=(const OperatorSpan&) = delete;

 private:
  void begin(MeshContext& context, const c10::OperatorHandle& op,
             absl::Span<const c10::IValue> args);
  void end();

  MeshContext* context_ = nullptr;  // null: nobody looks
};

// While it lives, the collective runs. `sending` is a function, so that nothing is put together
// while nobody looks.
class CollectiveSpan {
 public:
  template <typename F>
  CollectiveSpan(MeshContext& context, const Cause& cause, F sending) {
    if (!context.observation.observers.empty()) begin(context, cause, sending());
  }
  ~CollectiveSpan() {
    if (context_ != nullptr) end();
  }
  CollectiveSpan(CollectiveSpan&& other) noexcept
      : context_(std::exchange(other.context_, nullptr)), id_(other.id_) {}

 private:
  void begin(MeshContext& context, const Cause& cause, const Sending& sending);
  void end();

  MeshContext* context_ = nullptr;  // null: nobody looks
  int64_t id_ = 0;
};

}  // namespace shardweave::dtensor_internal
