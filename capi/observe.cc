// Traces of communication, pictures of shards.
#include "shardweave/capi/handles.h"
#include "shardweave/dtensor/observe/comm_trace.h"
#include "shardweave/dtensor/observe/visualize_sharding.h"

struct swv_trace : shardweave::capi::Handle<shardweave::capi::Kind::kTrace> {
  std::shared_ptr<shardweave::CommTrace> trace;
};

namespace shardweave::capi {
namespace {

CommTrace& trace_of(const swv_trace* trace) {
  return *in(trace, "trace").trace;
}

std::string picture(const Layout& layout, const DeviceMesh& mesh, at::IntArrayRef shape) {
  return check(visualize_sharding_text(layout, mesh, {shape.data(), shape.size()}));
}

}  // namespace
}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_trace_create(const swv_mesh* mesh, swv_trace** out_trace) {
  return guarded(__func__, out_trace, "out_trace", [&] {
    const RecordedInOrder in_order;  // modules' names go by autograd's numbers
    return make<swv_trace>(std::make_shared<shardweave::CommTrace>(in(mesh, "mesh").mesh));
  });
}

swv_status* swv_trace_share(const swv_trace* trace, swv_trace** out_trace) {
  return guarded(__func__, out_trace, "out_trace",
                 [&] { return make<swv_trace>(in(trace, "trace").trace); });
}

void swv_trace_free(swv_trace* trace) {
  const RecordedInOrder in_order;  // as above
  release(trace, __func__);
}

swv_status* swv_trace_clear(swv_trace* trace) {
  return guarded(__func__, [&] { trace_of(trace).clear(); });
}

swv_status* swv_trace_num_events(const swv_trace* trace, size_t* out_num) {
  return guarded(__func__, out_num, "out_num", [&] { return trace_of(trace).events().size(); });
}

swv_status* swv_trace_bytes(const swv_trace* trace, int64_t* out_bytes) {
  return guarded(__func__, out_bytes, "out_bytes", [&] { return trace_of(trace).bytes(); });
}

swv_status* swv_trace_to_string(const swv_trace* trace, swv_string** out_text) {
  return guarded(__func__, out_text, "out_text",
                 [&] { return new_string(trace_of(trace).to_string()); });
}

swv_status* swv_trace_to_json(const swv_trace* trace, swv_string** out_json) {
  return guarded(__func__, out_json, "out_json",
                 [&] { return new_string(trace_of(trace).to_json()); });
}

swv_status* swv_tensor_picture(const swv_tensor* tensor, swv_string** out_text) {
  return guarded(__func__, out_text, "out_text", [&] {
    const at::Tensor& t = in(tensor, "tensor").tensor;
    return new_string(picture(shardweave::layout_of(t), shardweave::mesh_of(t)->mesh(), t.sizes()));
  });
}

swv_status* swv_layout_picture(const swv_layout* layout, const swv_mesh* mesh, const int64_t* sizes,
                               size_t num_sizes, swv_string** out_text) {
  return guarded(__func__, out_text, "out_text", [&] {
    return new_string(picture(in(layout, "layout").layout, in(mesh, "mesh").mesh->mesh(),
                              shardweave::capi::sizes(sizes, num_sizes, "sizes")));
  });
}
