// Token files and loaders.
#include <fstream>

#include "fuzzer.h"

namespace shardweave::capi {

void Fuzzer::data() {
  const std::string path = folder_ + "/tokens";
  if (token_files_.empty()) {
    // Tokens of 16 bits; several ranks may write them at once, always the same.
    std::ofstream(path, std::ios::binary) << std::string(500, 'a') + std::string(500, '\x01');
  }
  swv_token_file* file = nullptr;
  swv_loader* loader = nullptr;
  swv_string* json = nullptr;
  swv_tensor *tokens = nullptr, *targets = nullptr;
  int64_t number_of = 0, some[4] = {};
  swv_dtype dtype = 0;
  swv_loader_options options = SWV_LOADER_OPTIONS_INIT;
  switch (below(8)) {
    case 0:
      if (done(swv_token_file_open(one_in(9) ? text() : path.c_str(),
                                   one_in(4) ? small() : SWV_DTYPE_U16, &file)))
        keep(token_files_, file, swv_token_file_free, 5);
      break;
    case 1:
      done(swv_token_file_num_tokens(pick(token_files_), one_in(9) ? nullptr : &number_of));
      done(swv_token_file_vocab_size(pick(token_files_), &number_of));
      done(swv_token_file_dtype(pick(token_files_), &dtype));
      done(swv_token_file_read(pick(token_files_), one_in(3) ? number() : 0,
                               one_in(9) ? nullptr : some, length(4)));
      if (one_in(4) && done(swv_token_file_share(pick(token_files_), &file)))
        keep(token_files_, file, swv_token_file_free, 5);
      break;
    case 2:
    case 3: {
      const swv_token_file* const files[] = {pick(token_files_), pick(token_files_)};
      options.seq = one_in(5) ? number() : 1 + static_cast<int64_t>(below(9));
      options.batch =
          one_in(9) ? static_cast<int64_t>(below(2)) - 1 : 1 + static_cast<int64_t>(below(9));
      options.seed = chance_.word();
      options.epochs = one_in(5) ? number() : static_cast<int64_t>(below(3));
      if (one_in(2)) options.mesh = pick(meshes_), options.layout = pick(layouts_);
      if (one_in(9)) options.part = small(), options.num_parts = small();
      options.prefetch = one_in(5) ? small() : static_cast<int32_t>(below(3));
      options.in_order = one_in(9) ? small() : static_cast<swv_bool>(below(2));
      options.drop_last = one_in(9) ? small() : static_cast<swv_bool>(below(2));
      if (one_in(20)) options.reserved = small();
      if (done(swv_loader_create(one_in(20) ? nullptr : files, length(2),
                                 one_in(9) ? nullptr : sized(options), &loader)))
        keep(loaders_, loader, swv_loader_free, 4);
      break;
    }
    case 4:
      done(swv_loader_num_samples(pick(loaders_), &number_of));
      if (one_in(4) && done(swv_loader_share(pick(loaders_), &loader)))
        keep(loaders_, loader, swv_loader_free, 4);
      break;
    case 5:
      loader = pick(loaders_);
      if (done(swv_loader_position(loader, one_in(20) ? nullptr : &json))) {
        if (one_in(2)) loader = pick(loaders_);
        done(swv_loader_set_position(loader, one_in(4) ? text() : swv_string_data(json)));
        swv_string_free(json);
      }
      break;
    default:
      if (done(swv_loader_next(pick(loaders_), one_in(20) ? nullptr : &tokens, &targets))) {
        keep(tokens);
        keep(targets);
      }
  }
}

}  // namespace shardweave::capi
