// Weights that PyTorch has saved: state dicts of torch.save, and directories of torch.distributed.checkpoint.
//
//   auto sources = weight_sources("pytorch_model.bin");        // StatusOr; or run/dcp/, llama/
//   (*sources)[0].name;                                        // "model.layers.0.mlp.up_proj.weight"
//
// Weights only: what is no dense tensor is passed over if it is a number or text, and an error if it is a tensor.
// Tensors may lie in their storages with any offset and strides; of one that is not contiguous, gaps of up to a page
// are read with it. No code of the file is run. Nothing is read but what tells where tensors are.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "shardweave/modules/checkpoint/file_system.h"
#include "shardweave/modules/checkpoint/tensor_source.h"

namespace shardweave {

// Of a file by torch.save: a dict or list of tensors, or of such dicts and lists; names get dots between them, and whole
// numbers are names ("optimizer.state.0.exp_avg", of a list "blocks.2"). A tensor anywhere else (in an object's
// attributes, under a key of another kind) is Unimplemented: none is passed over. InvalidArgument for a file that is none, or damaged; Unimplemented for tensors that are not dense, of dtypes that are not here, or
// expanded, for archives that are compressed, and for files of before PyTorch 1.6.
absl::StatusOr<std::vector<TensorSource>> torch_save_sources(
    const std::string& path, const std::shared_ptr<FileSystem>& fs = nullptr);

// Of a directory by torch.distributed.checkpoint.save(): each tensor of its parts. As above.
absl::StatusOr<std::vector<TensorSource>> dcp_sources(
    const std::string& directory, const std::shared_ptr<FileSystem>& fs = nullptr);

// Whichever it is: *.pt, *.pth or *.bin of torch.save, an index of several (*.bin.index.json), a directory with
// .metadata, else safetensors (safetensors_sources()) or, in a directory without those, pytorch_model.bin or its index.
absl::StatusOr<std::vector<TensorSource>> weight_sources(
    const std::string& path, const std::shared_ptr<FileSystem>& fs = nullptr);

}  // namespace shardweave
