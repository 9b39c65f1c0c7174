// A backend as a third party would begin one: nothing but send and recv, here those of another
// backend. All collectives are composed of them.
#pragma once

#include <memory>
#include <string>

#include "shardweave/comm/backend.h"

namespace shardweave {

class PointToPointBackend : public Backend {
 public:
  explicit PointToPointBackend(std::unique_ptr<Backend> carrier)
      : Backend(carrier->group()), carrier_(std::move(carrier)) {}

  std::string_view name() const override { return "point-to-point"; }
  bool implements(OpKind op) const override { return is_point_to_point(op); }
  absl::StatusOr<Ticket> start(const Call& call) override { return carrier_->start(call); }
  bool done(Ticket ticket) override { return carrier_->done(ticket); }
  absl::Status wait(Ticket ticket, Deadline deadline) override {
    return carrier_->wait(ticket, deadline);
  }
  absl::StatusOr<std::unique_ptr<Backend>> subgroup(GroupInfo group, absl::Span<const int> members,
                                                    std::string_view key,
                                                    Deadline deadline) override {
    auto carrier = carrier_->subgroup(std::move(group), members, key, deadline);
    if (!carrier.ok()) return carrier.status();
    return std::make_unique<PointToPointBackend>(*std::move(carrier));
  }
  void abort(const absl::Status& reason) override { carrier_->abort(reason); }

 private:
  const std::unique_ptr<Backend> carrier_;
};

}  // namespace shardweave
