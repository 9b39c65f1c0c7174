// Pickles, archives by torch.save and metadata of DCP as anybody may make them: by hand.
//
//   const std::string pickle = dict({{text("w"), tensor({.sizes = {2, 3}})}}) + ".";
//   const std::string file = archive(pickle);       // with six floats in "data/0"
//
// By protocol 2, which torch.save writes. Values.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "caffe2/serialize/inline_container.h"

namespace shardweave::testing {

inline std::string number32(uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 4; ++i) bytes.push_back(static_cast<char>(value >> (8 * i)));
  return bytes;
}
inline std::string text(const std::string& value) {
  return "X" + number32(value.size()) + value;
}
inline std::string whole(int64_t value) {
  std::string bytes = "\x8a\x08";
  for (int i = 0; i < 8; ++i) {
    bytes.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
  }
  return bytes;
}
inline std::string tuple(const std::vector<int64_t>& values) {
  std::string bytes = "(";
  for (const int64_t value : values) bytes += whole(value);
  return bytes + "t";
}
using Entries = std::vector<std::pair<std::string, std::string>>;  // pickled
inline std::string dict(const Entries& entries) {
  std::string bytes = "}(";
  for (const auto& [key, value] : entries) bytes += key + value;
  return bytes + "u";
}
inline std::string object(const std::string& name, const Entries& attributes) {
  return "ctorch.distributed.checkpoint.metadata\n" + name + "\n)\x81" + dict(attributes) + "b";
}

struct PickledTensor {
  std::string storage = "0";
  int64_t numel = 6;  // of the storage; with a dtype its bytes
  int64_t first = 0;
  std::vector<int64_t> sizes = {2, 3}, strides = {3, 1};
  std::string type = "FloatStorage";
  std::string dtype = "";     // by _rebuild_tensor_v3, of a storage without a type
  std::string metadata = "";  // pickled
};
// Name and arguments of the function that makes it.
inline std::pair<std::string, std::string> tensor_call(const PickledTensor& t) {
  const bool is_v3 = !t.dtype.empty();
  const std::string type = is_v3 ? "ctorch.storage\nUntypedStorage\n" : "ctorch\n" + t.type + "\n";
  return {std::string("ctorch._utils\n_rebuild_tensor_v") + (is_v3 ? "3" : "2") + "\n",
          "((" + text("storage") + type + text(t.storage) + text("cpu") + whole(t.numel) + "tQ" +
              whole(t.first) + tuple(t.sizes) + tuple(t.strides) + "\x89" +
              "ccollections\nOrderedDict\n)R" + (is_v3 ? "ctorch\n" + t.dtype + "\n" : "") +
              t.metadata + "t"};
}
inline std::string tensor(const PickledTensor& t) {
  const auto [name, args] = tensor_call(t);
  return name + args + "R";
}

inline const std::vector<float> kSix = {1, 2, 3, 4, 5, 6};

// With `bytes` bytes of `data` as "data/0"; and with six numbers.
inline std::string archive_of(const std::string& pickle, const void* data, size_t bytes,
                              const std::string& order = "little", bool compress = false) {
  std::string file;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* part, size_t size) {
    file.append(static_cast<const char*>(part), size);
    return size;
  });
  writer.writeRecord("data.pkl", pickle.data(), pickle.size(), false);
  if (!order.empty()) writer.writeRecord("byteorder", order.data(), order.size());
  writer.writeRecord("data/0", data, bytes, compress);
  writer.writeEndOfFile();
  return file;
}
inline std::string archive(const std::string& pickle, const std::string& order = "little",
                           bool compress = false) {
  // What can be compressed: else it is stored all the same.
  std::vector<float> values = kSix;
  if (compress) values.resize(4096);
  return archive_of(pickle, values.data(), values.size() * sizeof(float), order, compress);
}

// --- .metadata of a directory with one tensor "w" ---

inline std::string chunk(const std::vector<int64_t>& offsets, const std::vector<int64_t>& sizes) {
  return object("ChunkStorageMetadata",
                {{text("offsets"), tuple(offsets)}, {text("sizes"), tuple(sizes)}});
}
struct Stored {
  std::vector<int64_t> offset = {0, 0};
  std::string file = "__0_0.distcp";
  int64_t begin = 0, size = 0;  // of the archive
};
inline std::string metadata(const std::string& chunks, const std::vector<Stored>& stored,
                            const std::vector<int64_t>& shape) {
  std::string entries = "}(";
  for (const Stored& each : stored) {
    entries +=
        object("MetadataIndex", {{text("fqn"), text("w")}, {text("offset"), tuple(each.offset)}}) +
        object("_StorageInfo", {{text("relative_path"), text(each.file)},
                                {text("offset"), whole(each.begin)},
                                {text("length"), whole(each.size)}});
  }
  return object("Metadata", {{text("state_dict_metadata"),
                              dict({{text("w"), object("TensorStorageMetadata",
                                                       {{text("size"), tuple(shape)},
                                                        {text("chunks"), "](" + chunks + "e"}})}})},
                             {text("storage_data"), entries + "u"}}) +
         ".";
}

}  // namespace shardweave::testing
