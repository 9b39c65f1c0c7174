#include "shardweave/dtensor/fused.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "shardweave/dtensor/observer.h"
#include "shardweave/dtensor/pack_schedule.h"
#include "shardweave/dtensor/provenance.h"

namespace shardweave::dtensor_internal {
namespace {

// Larger tensors gain nothing from sharing a collective: what they save in latency they lose in
// copying.
constexpr int64_t kMaxSharedBytes = 1 << 20;
// What is in one collective at most, if it is shared.
constexpr int64_t kBucketBytes = 25 << 20;

// Those that travel together.
struct Bucket {
  explicit Bucket(MeshContext* c) : context(c) {}
  Bucket(Bucket&&) = default;
  Bucket& operator=(Bucket&&) = default;
  ~Bucket() { (void)work.wait(); }  // if an exception cuts in: the network still uses the memory

  MeshContext* context;
  std::vector<size_t> members;  // indices of parcels
  int64_t bytes = 0;
  Parcel parcel;
  std::optional<CollectiveSpan> span;
  Work work;
};

bool same_collective(const Parcel& a, const Parcel& b) {
  return a.op == b.op && a.mesh_dims == b.mesh_dims && a.reduce_op == b.reduce_op &&
         a.input.scalar_type() == b.input.scalar_type() && a.input.device() == b.input.device();
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

// Of the members' counts.
std::vector<int64_t> sum(const std::vector<const Parcel*>& members,
                         std::vector<int64_t> Parcel::*counts) {
  std::vector<int64_t> total((members[0]->*counts).size(), 0);
  for (const Parcel* member : members) {
    for (size_t r = 0; r < total.size(); ++r) total[r] += (member->*counts)[r];
  }
  return total;
}

// Where the members' parts lie in a joint buffer of `numel` elements: for each rank one member's
// after the other's.
std::vector<PackSchedule> places_of(const std::vector<const Parcel*>& members,
                                    std::vector<int64_t> Parcel::*counts, int64_t numel) {
  std::vector<PackSchedule> places(members.size(), PackSchedule({numel}));
  int64_t at = 0;
  for (size_t r = 0; r < (members[0]->*counts).size(); ++r) {
    for (size_t i = 0; i < members.size(); ++i) {
      const int64_t n = (members[i]->*counts)[r];
      places[i].add_part({at}, {n});
      at += n;
    }
  }
  for (PackSchedule& member : places) member.finish();
  return places;
}

// One collective that does what each of `members` asks for: for each rank the members' parts lie
// one after the other.
Parcel join(const std::vector<const Parcel*>& members) {
  Parcel joint;
  joint.op = members[0]->op;
  joint.reduce_op = members[0]->reduce_op;
  joint.mesh_dims = members[0]->mesh_dims;
  joint.in_counts = sum(members, &Parcel::in_counts);
  joint.out_counts = sum(members, &Parcel::out_counts);
  if (joint.in_counts.empty()) {
    std::vector<at::Tensor> inputs;
    for (const Parcel* member : members) inputs.push_back(member->input.view({-1}));
    joint.input = at::cat(inputs);
  } else {
    int64_t leaving = 0;
    for (const Parcel* member : members) leaving += member->input.numel();
    joint.input = at::empty({leaving}, members[0]->input.options());
    const std::vector<PackSchedule> places = places_of(members, &Parcel::in_counts, leaving);
    for (size_t i = 0; i < members.size(); ++i) places[i].unpack(members[i]->input, joint.input);
  }
  int64_t arriving = 0;
  for (const Parcel* member : members) arriving += member->output.numel();
  joint.output = at::empty({arriving}, joint.input.options());
  return joint;
}

// The members' outputs from that of the joint collective.
void part(const Parcel& joint, const std::vector<Parcel*>& members) {
  if (joint.out_counts.empty()) {
    Parts parts(joint.output);
    for (Parcel* member : members) {
      member->output = parts.next(member->output.numel()).view(member->output.sizes());
    }
    return;
  }
  const std::vector<PackSchedule> places =
      places_of({members.begin(), members.end()}, &Parcel::out_counts, joint.output.numel());
  for (size_t i = 0; i < members.size(); ++i) places[i].pack(joint.output, members[i]->output);
}

// One collective for each tensor that needs one.
void run_round(const std::vector<Travel>& travels, std::vector<PlanRun>& runs,
               const std::vector<size_t>& moving, std::vector<Parcel>& parcels,
               const Cause& cause) {
  std::vector<Bucket> buckets;  // in the order of first use, the same on all ranks
  for (size_t i : moving) {
    const int64_t bytes = travels[i].bytes;
    auto fits = [&](const Bucket& b) {
      return b.context == travels[i].context && bytes <= kMaxSharedBytes &&
             b.bytes + bytes <= kBucketBytes && travels[b.members[0]].bytes <= kMaxSharedBytes &&
             same_collective(parcels[b.members[0]], parcels[i]);
    };
    auto bucket = std::find_if(buckets.begin(), buckets.end(), fits);
    if (bucket == buckets.end()) {
      buckets.emplace_back(travels[i].context);
      bucket = buckets.end() - 1;
    }
    bucket->members.push_back(i);
    bucket->bytes += bytes;
  }
  auto members_of = [&](const Bucket& bucket) {
    std::vector<Parcel*> members;
    for (size_t i : bucket.members) members.push_back(&parcels[i]);
    return members;
  };
  for (Bucket& bucket : buckets) {
    const std::vector<Parcel*> members = members_of(bucket);
    uint64_t all = 0;
    for (size_t i : bucket.members) all = mix(all, travels[i].provenance);
    const About about(*bucket.context, all);
    const PlanRun& first = runs[bucket.members[0]];
    if (members.size() == 1) {
      bucket.span.emplace(*bucket.context, cause, [&] { return first.sending(); });
      bucket.work = send(*bucket.context, *members[0], cause.name);
      continue;
    }
    bucket.parcel = join({members.begin(), members.end()});
    const std::string argument = absl::StrCat(members.size(), " tensors");
    const int64_t numel = bucket.parcel.input.numel();
    bucket.span.emplace(*bucket.context, Cause{cause.name, argument, cause.where},
                        [&]() -> Sending {
                          int64_t sent = 0;
                          for (size_t i : bucket.members) sent += runs[i].sending().bytes;
                          return {first.sending().collective,
                                  bucket.parcel.mesh_dims,
                                  sent,
                                  first.sending().dtype,
                                  absl::MakeConstSpan(&numel, 1),
                                  Layout(),
                                  Layout()};
                        });
    bucket.work = send(*bucket.context, bucket.parcel, cause.name);
  }
  // All of them, before an error may take away their memory.
  absl::Status status;
  for (Bucket& bucket : buckets) {
    status.Update(bucket.work.wait());
    bucket.span.reset();
  }
  throw_if_error(std::move(status));
  for (const Bucket& bucket : buckets) {
    if (bucket.members.size() > 1) part(bucket.parcel, members_of(bucket));
    for (size_t i : bucket.members) runs[i].arrived(parcels[i]);
  }
}

}  // namespace

Travel travel(const DTensorMeta& meta, const Layout& layout) {
  SpecRef target = meta.context->with_layout(*meta.spec, layout);
  PlanRef plan = plan_for(*meta.context, meta.spec, target);
  return {meta.context.get(),
          std::move(target),
          std::move(plan),
          meta.local,
          meta.spec->sizes,
          static_cast<int64_t>(meta.spec->numel() * c10::elementSize(meta.spec->dtype)),
          provenance_of(meta)};
}

void run_plans(std::vector<Travel>& travels, const Cause& cause) {
  std::vector<PlanRun> runs;
  for (const Travel& t : travels) runs.emplace_back(*t.context, *t.plan, t.local, t.sizes);
  std::vector<Parcel> parcels(travels.size());
  while (true) {
    std::vector<size_t> moving;
    for (size_t i = 0; i < travels.size(); ++i) {
      if (runs[i].next(&parcels[i])) moving.push_back(i);
    }
    if (moving.empty()) break;
    run_round(travels, runs, moving, parcels, cause);
  }
  for (size_t i = 0; i < travels.size(); ++i) {
    travels[i].local = owned(runs[i].local(), travels[i].local);
  }
}

}  // namespace shardweave::dtensor_internal
