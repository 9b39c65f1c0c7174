#include "shardweave/dtensor/engine/fused.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/engine/pack_schedule.h"
#include "shardweave/dtensor/engine/provenance.h"
#include "shardweave/dtensor/observe/observer.h"

namespace shardweave::dtensor_internal {
namespace {

// Those that travel together.
struct Bucket {
  explicit Bucket(MeshContext* c) : context(c) {}
  Bucket(Bucket&&) = default;
  ~Bucket() { (void)work.wait(); }  // if an exception cuts in: the network still uses the memory

  MeshContext* context;
  std::vector<size_t> members;  // indices of transfers
  int64_t bytes = 0;
  CollectiveTransfer transfer;
  std::optional<CollectiveSpan> span;
  TensorWork work;
};

// The same collective for parts that differ in size.
OpKind with_counts(OpKind op) {
  switch (op) {
    case OpKind::kAllGather:
      return OpKind::kAllGatherV;
    case OpKind::kReduceScatter:
      return OpKind::kReduceScatterV;
    case OpKind::kAllToAll:
      return OpKind::kAllToAllV;
    default:
      return op;
  }
}

bool same_collective(const CollectiveTransfer& a, const CollectiveTransfer& b) {
  return with_counts(a.op) == with_counts(b.op) && a.mesh_dims == b.mesh_dims &&
         a.reduce_op == b.reduce_op && a.input.scalar_type() == b.input.scalar_type() &&
         a.input.device() == b.input.device();
}

// The parts of a flat tensor, in order.
class Parts {
 public:
  explicit Parts(const at::Tensor& tensor) : flat_(tensor.view({-1})) {}
  at::Tensor next(int64_t count) {
    at::Tensor part = flat_.narrow(0, at_, count);
    at_ += count;
    return part;
  }

 private:
  at::Tensor flat_;
  int64_t at_ = 0;
};

// One side of a collective in which ranks have parts: what leaves, or what arrives.
struct Side {
  at::Tensor CollectiveTransfer::*data;
  std::vector<int64_t> CollectiveTransfer::*counts;
};
constexpr Side kLeaving{&CollectiveTransfer::input, &CollectiveTransfer::in_counts};
constexpr Side kArriving{&CollectiveTransfer::output, &CollectiveTransfer::out_counts};

bool has_parts(OpKind op, const Side& side) {
  op = with_counts(op);
  return op == OpKind::kAllToAllV ||
         op == (side.data == kLeaving.data ? OpKind::kReduceScatterV : OpKind::kAllGatherV);
}

using Members = std::vector<const CollectiveTransfer*>;

// Elements of each rank.
std::vector<int64_t> counts_of(const CollectiveTransfer& member, const Side& side,
                               int64_t num_ranks) {
  if (!(member.*side.counts).empty()) return member.*side.counts;
  return std::vector<int64_t>(num_ranks, (member.*side.data).numel() / num_ranks);
}

// Where the members' parts lie in a joint buffer: for each rank one member's after the other's. With
// `counts` the joint ones, of parts that differ in size.
struct Places {
  std::vector<int64_t> sizes;  // of the buffer
  std::vector<PackSchedule> of;
  std::vector<int64_t> counts;
};

Places places_of(const Members& members, const Side& side, int64_t num_ranks, bool has_counts) {
  Places places;
  int64_t numel = 0;
  for (const CollectiveTransfer* member : members) numel += (member->*side.data).numel();
  if (!has_counts) {
    // A column of the buffer each.
    const Dims sizes{num_ranks, numel / num_ranks};
    places.sizes.assign(sizes.begin(), sizes.end());
    int64_t at = 0;
    for (const CollectiveTransfer* member : members) {
      const int64_t n = (member->*side.data).numel() / num_ranks;
      places.of.emplace_back(sizes).add_part(Dims{0, at}, Dims{num_ranks, n});
      at += n;
    }
  } else {
    places.sizes = {numel};
    places.of.assign(members.size(), PackSchedule({numel}));
    places.counts.assign(num_ranks, 0);
    std::vector<std::vector<int64_t>> counts;
    for (const CollectiveTransfer* member : members) {
      counts.push_back(counts_of(*member, side, num_ranks));
    }
    int64_t at = 0;
    for (int64_t r = 0; r < num_ranks; ++r) {
      for (size_t i = 0; i < members.size(); ++i) {
        places.of[i].add_part(Dims{at}, Dims{counts[i][r]});
        places.counts[r] += counts[i][r];
        at += counts[i][r];
      }
    }
  }
  for (PackSchedule& member : places.of) member.finish();
  return places;
}

int64_t num_ranks_of(const MeshContext& context, const CollectiveTransfer& transfer) {
  int64_t n = 1;
  for (const int m : transfer.mesh_dims) n *= context.mesh().size(m);
  return n;
}

// One collective that does what each of `members` asks for: for each rank the members' parts lie
// one after the other.
CollectiveTransfer join(const MeshContext& context, const Members& members) {
  CollectiveTransfer joint;
  joint.op = members[0]->op;
  for (const CollectiveTransfer* member : members) {
    if (member->op != joint.op) joint.op = with_counts(joint.op);
  }
  const bool has_counts = with_counts(joint.op) == joint.op;
  joint.reduce_op = members[0]->reduce_op;
  joint.mesh_dims = members[0]->mesh_dims;
  const int64_t num_ranks = num_ranks_of(context, joint);
  if (!has_parts(joint.op, kLeaving)) {
    std::vector<at::Tensor> inputs;
    for (const CollectiveTransfer* member : members) inputs.push_back(member->input.view({-1}));
    joint.input = at::cat(inputs);
  } else {
    Places places = places_of(members, kLeaving, num_ranks, has_counts);
    joint.input = at::empty(places.sizes, members[0]->input.options());
    for (size_t i = 0; i < members.size(); ++i) {
      places.of[i].unpack(members[i]->input, joint.input);
    }
    joint.in_counts = std::move(places.counts);
  }
  int64_t arriving = 0;
  for (const CollectiveTransfer* member : members) arriving += member->output.numel();
  joint.output = at::empty({arriving}, joint.input.options());
  if (has_counts && has_parts(joint.op, kArriving)) {
    joint.out_counts.assign(num_ranks, 0);
    for (const CollectiveTransfer* member : members) {
      const std::vector<int64_t> counts = counts_of(*member, kArriving, num_ranks);
      for (int64_t r = 0; r < num_ranks; ++r) joint.out_counts[r] += counts[r];
    }
  }
  return joint;
}

// The members' outputs from that of the joint collective.
void part(const MeshContext& context, const CollectiveTransfer& joint,
          const std::vector<CollectiveTransfer*>& members) {
  if (!has_parts(joint.op, kArriving)) {
    Parts parts(joint.output);
    for (CollectiveTransfer* member : members) {
      member->output = parts.next(member->output.numel()).view(member->output.sizes());
    }
    return;
  }
  const Places places = places_of({members.begin(), members.end()}, kArriving,
                                  num_ranks_of(context, joint), !joint.out_counts.empty());
  const at::Tensor all = joint.output.view(places.sizes);
  for (size_t i = 0; i < members.size(); ++i) places.of[i].pack(all, members[i]->output);
}

std::vector<CollectiveTransfer*> members_of(const Bucket& bucket,
                                            std::vector<CollectiveTransfer>& transfers) {
  std::vector<CollectiveTransfer*> members;
  for (size_t i : bucket.members) members.push_back(&transfers[i]);
  return members;
}

// Begins one collective for each tensor that needs one. `copies`: of what may be written meanwhile.
std::vector<Bucket> issue_round(const std::vector<InFlight>& in_flight,
                                const std::vector<PlanRun>& runs, const std::vector<size_t>& moving,
                                std::vector<CollectiveTransfer>& transfers, const Cause& cause,
                                const Sharing& sharing, bool copies) {
  std::vector<Bucket> buckets;  // in the order of first use, the same on all ranks
  for (size_t i : moving) {
    const int64_t bytes = in_flight[i].bytes;
    auto fits = [&](const Bucket& b) {
      return b.context == in_flight[i].context && bytes <= sharing.max_tensor &&
             b.bytes + bytes <= sharing.max_bucket &&
             in_flight[b.members[0]].bytes <= sharing.max_tensor &&
             same_collective(transfers[b.members[0]], transfers[i]);
    };
    auto bucket = std::find_if(buckets.begin(), buckets.end(), fits);
    if (bucket == buckets.end()) {
      buckets.emplace_back(in_flight[i].context);
      bucket = buckets.end() - 1;
    }
    bucket->members.push_back(i);
    bucket->bytes += bytes;
  }
  for (Bucket& bucket : buckets) {
    const std::vector<CollectiveTransfer*> members = members_of(bucket, transfers);
    uint64_t all = 0;
    for (size_t i : bucket.members) all = mix(all, in_flight[i].provenance);
    const About about(*bucket.context, all);
    const PlanRun& first = runs[bucket.members[0]];
    if (members.size() == 1) {
      Cause one = cause;
      one.parameter = in_flight[bucket.members[0]].parameter;
      bucket.span.emplace(*bucket.context, one, [&] { return first.sending(); });
      const at::Tensor& source = in_flight[bucket.members[0]].local;
      if (copies && members[0]->input.is_alias_of(source)) {
        members[0]->input = members[0]->input.clone();
      }
      bucket.work = send(*bucket.context, *members[0], cause.name);
      continue;
    }
    bucket.transfer = join(*bucket.context, {members.begin(), members.end()});
    const std::string argument = absl::StrCat(members.size(), " tensors");
    const int64_t numel = bucket.transfer.input.numel();
    Cause all_of = cause;
    all_of.argument = argument;
    bucket.span.emplace(*bucket.context, all_of, [&]() -> Sending {
      int64_t sent = 0;
      std::vector<std::string> parameters;
      for (size_t i : bucket.members) {
        sent += runs[i].sending().bytes;
        if (!in_flight[i].parameter.empty()) {
          parameters.emplace_back(in_flight[i].parameter);
        }
      }
      return {first.sending().collective,
              bucket.transfer.mesh_dims,
              sent,
              first.sending().dtype,
              absl::MakeConstSpan(&numel, 1),
              Layout(),
              Layout(),
              std::move(parameters)};
    });
    bucket.work = send(*bucket.context, bucket.transfer, cause.name);
  }
  return buckets;
}

void finish_round(std::vector<Bucket>& buckets, std::vector<PlanRun>& runs,
                  std::vector<CollectiveTransfer>& transfers) {
  // All of them, before an error may take away their memory.
  absl::Status status;
  for (Bucket& bucket : buckets) {
    status.Update(bucket.work.wait());
    bucket.span.reset();
  }
  throw_if_error(std::move(status));
  for (const Bucket& bucket : buckets) {
    if (bucket.members.size() > 1) {
      part(*bucket.context, bucket.transfer, members_of(bucket, transfers));
    }
    for (size_t i : bucket.members) runs[i].arrived(transfers[i]);
  }
}

}  // namespace

InFlight moving_to(const DTensorMeta& meta, const Layout& layout) {
  SpecRef target = meta.context->with_layout(*meta.spec, layout);
  PlanRef plan = plan_for(*meta.context, meta.spec, target);
  return {meta.context.get(),
          std::move(target),
          std::move(plan),
          meta.local(),
          meta.spec->sizes,
          static_cast<int64_t>(meta.spec->numel() * c10::elementSize(meta.spec->dtype)),
          provenance_of(meta),
          parameter_of(meta)};
}

struct PlansUnderWay::State {
  State(std::vector<InFlight> in_flight_in, const Cause& cause_in, const Sharing& sharing_in)
      : in_flight(std::move(in_flight_in)),
        cause(cause_in),
        sharing(sharing_in),
        transfers(in_flight.size()) {
    for (const InFlight& t : in_flight) runs.emplace_back(*t.context, *t.plan, t.local, t.sizes);
  }

  // False: all have arrived.
  bool issue(bool copies) {
    std::vector<size_t> moving;
    for (size_t i = 0; i < in_flight.size(); ++i) {
      if (runs[i].next(&transfers[i])) moving.push_back(i);
    }
    if (moving.empty()) return false;
    buckets = issue_round(in_flight, runs, moving, transfers, cause, sharing, copies);
    return true;
  }

  void finish() {
    do {
      finish_round(buckets, runs, transfers);
    } while (issue(/*copies=*/false));
    for (size_t i = 0; i < in_flight.size(); ++i) {
      InFlight& arrived = in_flight[i];
      arrived.local = owned(runs[i].local(), arrived.is_given_up ? at::Tensor() : arrived.local);
    }
  }

  std::vector<InFlight> in_flight;
  const Cause cause;
  const Sharing sharing;
  std::vector<PlanRun> runs;
  std::vector<CollectiveTransfer> transfers;
  std::vector<Bucket> buckets;  // under way; ended before what they send
};

PlansUnderWay::PlansUnderWay(std::vector<InFlight> in_flight, const Cause& cause,
                             const Sharing& sharing)
    : state_(std::make_unique<State>(std::move(in_flight), cause, sharing)) {
  state_->issue(/*copies=*/true);
}

PlansUnderWay::~PlansUnderWay() = default;

std::vector<InFlight> PlansUnderWay::finish() {
  state_->finish();
  return std::move(state_->in_flight);
}

void run_plans(std::vector<InFlight>& in_flight, const Cause& cause) {
  PlansUnderWay::State run(std::move(in_flight), cause, Sharing());
  run.issue(/*copies=*/false);
  run.finish();
  in_flight = std::move(run.in_flight);
}

}  // namespace shardweave::dtensor_internal
