// Token files, and the loader of batches of them.
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "shardweave/capi/checkpoint.h"
#include "shardweave/capi/deferred.h"
#include "shardweave/capi/handles.h"
#include "shardweave/modules/data/token_file.h"
#include "shardweave/modules/data/token_loader.h"

struct swv_token_file : shardweave::capi::Handle<shardweave::capi::Kind::kTokenFile> {
  shardweave::TokenFile file;
};
struct swv_loader : shardweave::capi::Handle<shardweave::capi::Kind::kLoader> {
  std::shared_ptr<shardweave::TokenLoader> loader;
};

namespace shardweave::capi {
namespace {

const TokenFile& token_file(const swv_token_file* file) {
  return in(file, "file").file;
}

swv_token_file* opened(const char* path, swv_dtype plain_dtype) {
  TokenFileOptions options;
  switch (plain_dtype) {
    case SWV_DTYPE_DEFAULT:
      break;
    case SWV_DTYPE_U8:
      options.plain_type = TokenType::kU8;
      break;
    case SWV_DTYPE_U16:
      options.plain_type = TokenType::kU16;
      break;
    case SWV_DTYPE_U32:
      options.plain_type = TokenType::kU32;
      break;
    default:
      fail_argument("plain_dtype",
                    str_cat("is ", plain_dtype,
                            "; wanted SWV_DTYPE_U8, SWV_DTYPE_U16, SWV_DTYPE_U32, or "
                            "SWV_DTYPE_DEFAULT for a file with a header"));
  }
  return make<swv_token_file>(check(TokenFile::open(std::string(text(path, "path")), options)));
}

swv_dtype dtype_of_tokens(const TokenFile& file) {
  switch (file.type()) {
    case TokenType::kU8:
      return SWV_DTYPE_U8;
    case TokenType::kU16:
      return SWV_DTYPE_U16;
    case TokenType::kU32:
      return SWV_DTYPE_U32;
  }
  return SWV_DTYPE_DEFAULT;
}

void read_tokens(const swv_token_file* file, int64_t begin, int64_t* tokens, size_t num_tokens) {
  const TokenFile& of = token_file(file);
  if (tokens == nullptr && num_tokens != 0) fail_null("tokens");
  check(of.read(begin, absl::MakeSpan(tokens, num_tokens)));
}

std::vector<TokenFile> token_files(const swv_token_file* const* given, size_t num_files) {
  std::vector<TokenFile> files;
  for_each(span(given, num_files, "files"), "files",
           [&](const swv_token_file* file) { files.push_back(in(file, "files").file); });
  return files;
}

TokenLoaderOptions loader_options(const swv_loader_options& o) {
  check_reserved(o.reserved, "options.reserved");
  return {.seq = o.seq,
          .batch = o.batch,
          .seed = o.seed,
          .shuffle = !flag(o.in_order, "options.in_order"),
          .epochs = o.epochs,
          .drop_last = flag(o.drop_last, "options.drop_last"),
          .prefetch = o.prefetch};
}

Placements loader_placements(const swv_loader_options& o, const DeviceMesh& mesh) {
  if (o.part != 0 || o.num_parts != 1) {
    fail_argument("options.part",
                  str_cat("is ", o.part, " of ", o.num_parts, "; with a mesh the layout says it"));
  }
  if (o.layout == nullptr) return Placements(static_cast<size_t>(mesh.ndim()));
  const Layout& layout = in(o.layout, "options.layout").layout;
  if (!layout.default_order()) {
    fail(absl::StatusCode::kUnimplemented,
         str_cat("argument 'options.layout' is ", layout.to_string(),
                 ": batches are cut in the mesh's order"));
  }
  return layout.placements();
}

swv_loader* new_loader(const swv_token_file* const* given, size_t num_files,
                       const swv_loader_options* given_options) {
  const swv_loader_options o =
      options<swv_loader_options>(given_options, SWV_LOADER_OPTIONS_INIT, "options");
  if (o.mesh == nullptr) {
    const std::vector<TokenFile> files = token_files(given, num_files);
    const TokenLoaderOptions how = loader_options(o);
    if (o.layout != nullptr) fail_argument("options.layout", "is not NULL, but there is no mesh");
    return make<swv_loader>(std::make_shared<TokenLoader>(
        files, how, BatchPart{.index = o.part, .count = o.num_parts}));
  }
  const MeshPtr& mesh = in(o.mesh, "options.mesh").mesh;
  const CallMode mode(SWV_MODE_GRAD, "mode");
  const auto [files, how, placements] = read_together(mesh, "TokenLoader", [&] {
    return std::tuple(token_files(given, num_files), loader_options(o),
                      loader_placements(o, mesh->mesh()));
  });
  return make<swv_loader>(std::make_shared<TokenLoader>(files, how, mesh, placements, kHost));
}

const std::shared_ptr<TokenLoader>& loader_of(const swv_loader* loader) {
  return in(loader, "loader").loader;
}

void write_next(swv_loader* loader, swv_tensor** out_tokens, swv_tensor** out_targets) {
  TokenLoader& of = *loader_of(loader);
  out(out_tokens, "out_tokens");
  out(out_targets, "out_targets");
  const CallMode mode(SWV_MODE_GRAD, "mode");
  const MadeAtOnce values;
  std::optional<TokenBatch> batch = of.next();
  swv_tensor* made[2] = {};
  if (batch.has_value()) {
    write_tensors({std::move(batch->tokens), std::move(batch->targets)}, made);
  }
  *out_tokens = made[0];
  *out_targets = made[1];
}

void go_to(swv_loader* loader, const char* json) {
  TokenLoader& of = *loader_of(loader);
  const CallMode mode(SWV_MODE_GRAD, "mode");
  of.set_position(text(json, "json"), kHost);
}

}  // namespace

std::shared_ptr<TokenLoader> token_loader(const swv_loader* loader) {
  return loader_of(loader);
}

}  // namespace shardweave::capi

using namespace shardweave::capi;  // NOLINT: this file is the C interface of it

swv_status* swv_token_file_open(const char* path, swv_dtype plain_dtype,
                                swv_token_file** out_file) {
  return guarded(__func__, out_file, "out_file", [&] { return opened(path, plain_dtype); });
}

swv_status* swv_token_file_share(const swv_token_file* file, swv_token_file** out_file) {
  return guarded(__func__, out_file, "out_file",
                 [&] { return make<swv_token_file>(token_file(file)); });
}

void swv_token_file_free(swv_token_file* file) {
  release(file, __func__);
}

swv_status* swv_token_file_num_tokens(const swv_token_file* file, int64_t* out_num) {
  return guarded(__func__, out_num, "out_num", [&] { return token_file(file).size(); });
}

swv_status* swv_token_file_dtype(const swv_token_file* file, swv_dtype* out_dtype) {
  return guarded(__func__, out_dtype, "out_dtype",
                 [&] { return dtype_of_tokens(token_file(file)); });
}

swv_status* swv_token_file_vocab_size(const swv_token_file* file, int64_t* out_size) {
  return guarded(__func__, out_size, "out_size", [&] { return token_file(file).vocab_size(); });
}

swv_status* swv_token_file_read(const swv_token_file* file, int64_t begin, int64_t* tokens,
                                size_t num_tokens) {
  return guarded(__func__, [&] { read_tokens(file, begin, tokens, num_tokens); });
}

swv_status* swv_loader_create(const swv_token_file* const* files, size_t num_files,
                              const swv_loader_options* options, swv_loader** out_loader) {
  return guarded(__func__, out_loader, "out_loader",
                 [&] { return new_loader(files, num_files, options); });
}

swv_status* swv_loader_share(const swv_loader* loader, swv_loader** out_loader) {
  return guarded(__func__, out_loader, "out_loader",
                 [&] { return make<swv_loader>(loader_of(loader)); });
}

void swv_loader_free(swv_loader* loader) {
  release(loader, __func__);
}

swv_status* swv_loader_num_samples(const swv_loader* loader, int64_t* out_num) {
  return guarded(__func__, out_num, "out_num", [&] { return loader_of(loader)->num_samples(); });
}

swv_status* swv_loader_next(swv_loader* loader, swv_tensor** out_tokens, swv_tensor** out_targets) {
  return guarded(__func__, [&] { write_next(loader, out_tokens, out_targets); });
}

swv_status* swv_loader_position(const swv_loader* loader, swv_string** out_json) {
  return guarded(__func__, out_json, "out_json",
                 [&] { return new_string(loader_of(loader)->position()); });
}

swv_status* swv_loader_set_position(swv_loader* loader, const char* json) {
  return guarded(__func__, [&] { go_to(loader, json); });
}
