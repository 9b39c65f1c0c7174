// The numbers of a run, step by step.
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "shardweave/capi/arguments.h"
#include "shardweave/capi/guard.h"
#include "shardweave/capi/handle.h"
#include "shardweave/modules/train/event_file.h"
#include "shardweave/modules/train/metrics_writer.h"

struct swv_metrics_writer : shardweave::capi::Handle<shardweave::capi::Kind::kMetricsWriter> {
  std::unique_ptr<shardweave::MetricsWriter> writer;
  std::mutex mutex;
};

namespace shardweave::capi {
namespace {

template <typename Writer>
swv_metrics_writer* new_writer(absl::StatusOr<Writer> writer) {
  return make<swv_metrics_writer>(std::make_unique<Writer>(check(std::move(writer))));
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_metrics_writer_open_json_lines(const char* path, swv_metrics_writer** out_writer) {
  return guarded(__func__, out_writer, "out_writer", [&] {
    return new_writer(shardweave::JsonLines::open(std::string(text(path, "path"))));
  });
}

swv_status* swv_metrics_writer_create_events(const char* folder, int64_t first_step,
                                             swv_metrics_writer** out_writer) {
  return guarded(__func__, out_writer, "out_writer", [&] {
    return new_writer(
        shardweave::EventFile::create(std::string(text(folder, "folder")), first_step));
  });
}

void swv_metrics_writer_free(swv_metrics_writer* writer) {
  release(writer, __func__);
}

swv_status* swv_metrics_writer_write(swv_metrics_writer* writer, int64_t step,
                                     const char* const* names, const double* values,
                                     size_t num_metrics) {
  return guarded(__func__, [&] {
    swv_metrics_writer& its = in(writer, "writer");
    std::vector<shardweave::Metric> metrics;
    for_each(span(names, num_metrics, "names"), "names", [&](const char* name) {
      metrics.push_back({.name = std::string(text(name, "names"))});
    });
    const auto numbers = span(values, num_metrics, "values");
    for (size_t i = 0; i < metrics.size(); ++i) metrics[i].value = numbers[i];
    const std::lock_guard lock(its.mutex);
    check(its.writer->write(step, metrics));
  });
}

swv_status* swv_metrics_writer_flush(swv_metrics_writer* writer) {
  return guarded(__func__, [&] {
    swv_metrics_writer& its = in(writer, "writer");
    const std::lock_guard lock(its.mutex);
    check(its.writer->flush());
  });
}
