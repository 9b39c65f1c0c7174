#include "shardweave/modules/checkpoint/loader_position.h"

#include "shardweave/comm/str_cat.h"

namespace shardweave {

void add_loader_position(StateDict& state, TokenLoader& loader, const std::string& name) {
  state.add_value(name, {[&loader] { return loader.position(); },
                         [&loader, name](const std::string& text) {
                           const absl::Status status = loader.check_position(text);
                           if (status.ok()) return status;
                           return absl::Status(
                               status.code(),
                               str_cat("the value '", name, "': ", std::string(status.message())));
                         },
                         [&loader](const std::string& text) { loader.set_position(text); }});
}

}  // namespace shardweave
