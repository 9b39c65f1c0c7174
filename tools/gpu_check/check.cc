#include "check.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/Event.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "shardweave/comm/communicator.h"
#include "shardweave/dtensor/error.h"
#include "shardweave/mesh/connected_mesh.h"

namespace shardweave_tool {

using namespace shardweave;

MeshPtr Session::mesh(const std::vector<MeshDim>& dims) const {
  return value_or_throw(init_device_mesh(*world, dims));
}

MeshPtr Session::all_ranks() const {
  return mesh({{"dp", ranks()}});
}

MeshPtr Session::this_rank() const {
  return value_or_throw(mesh({{"all", ranks()}, {"one", 1}})->slice({"one"}));
}

void Check::fail(const std::string& what) {
  constexpr size_t kMost = 5, kLongest = 600;
  ++failures_;
  if (first_failures_.size() < kMost) first_failures_.push_back(what.substr(0, kLongest));
}

void Check::skip(std::string why) {
  result.outcome = Outcome::kSkipped;
  result.why = std::move(why);
}

void Check::attempt(const std::string& what, const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    fail(absl::StrCat(what, ": ", message_of(error)));
  }
}

std::string Check::failed_text() const {
  std::string text = absl::StrJoin(first_failures_, "; ");
  const int64_t more = failures_ - static_cast<int64_t>(first_failures_.size());
  if (more > 0) absl::StrAppend(&text, "; and ", more, " more");
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

absl::StatusOr<std::vector<std::string>> texts_of_ranks(const Session& session,
                                                        const std::string& text) {
  Communicator& comm = *session.world->comm();
  const auto length = static_cast<int64_t>(text.size());
  std::vector<int64_t> lengths(static_cast<size_t>(comm.size()));
  const CallOptions options = {.tag = "gpu_check: texts"};
  absl::Status status =
      comm.all_gather(ConstBuffer::of(&length, 1), Buffer::of(lengths.data(), comm.size()), options)
          .wait();
  if (!status.ok()) return status;
  const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  std::string all(static_cast<size_t>(total), ' ');
  status = comm.all_gather_v(ConstBuffer(text.data(), length, DType::kU8),
                             Buffer{all.data(), total, DType::kU8, {}}, lengths, options)
               .wait();
  if (!status.ok()) return status;
  std::vector<std::string> result;
  size_t begin = 0;
  for (const int64_t n : lengths) {
    result.push_back(all.substr(begin, static_cast<size_t>(n)));
    begin += static_cast<size_t>(n);
  }
  return result;
}

std::string message_of(const std::exception& error) {
  const auto* const libtorchs = dynamic_cast<const c10::Error*>(&error);
  return libtorchs == nullptr ? error.what() : libtorchs->what_without_backtrace();
}

at::Tensor on_host(const at::Tensor& tensor) {
  return (is_dtensor(tensor) ? full_tensor(tensor) : tensor).detach().to(at::kCPU);
}

double difference(const at::Tensor& got, const at::Tensor& want) {
  constexpr double kAll = std::numeric_limits<double>::infinity();
  if (got.sizes() != want.sizes()) return kAll;
  if (!want.is_floating_point()) return at::equal(got.to(want.scalar_type()), want) ? 0 : kAll;
  if (want.numel() == 0) return 0;
  const at::Tensor x = got.to(at::kDouble), y = want.to(at::kDouble);
  const double most = (x - y).abs().max().item<double>();
  const double largest = y.abs().max().item<double>();
  return most == 0 ? 0 : most / std::max(largest, 1e-30);
}

void synchronize(c10::Device device) {
  const c10::impl::VirtualGuardImpl gpu(device.type());
  gpu.synchronizeStream(gpu.getStream(device));
}

bool has_clock(c10::Device device) {
  try {
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    c10::Event event(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    event.record(stream);
    event.synchronize();
    event.elapsedTime(event);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

double device_seconds(c10::Device device, const std::function<void()>& body) {
  if (!has_clock(device)) {
    synchronize(device);
    const auto start = std::chrono::steady_clock::now();
    body();
    synchronize(device);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  c10::Event begin(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  c10::Event end(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  begin.record(stream);
  body();
  end.record(stream);
  end.synchronize();
  return begin.elapsedTime(end) / 1e3;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

}  // namespace shardweave_tool
