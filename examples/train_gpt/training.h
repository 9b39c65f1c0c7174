// How the GPT is sharded, trained and asked for text. Read this file's .cc first.
//
//   Gpt model = make_model(settings, mesh);
//   train(model, settings, text, mesh, [](double loss) { ... });
//   std::cout << sample(model, settings, text, mesh).generated;
//
// One loop for one device and for many: without a mesh (null) parameters and batches are plain
// tensors, with one they are DTensors. With a mesh every function is collective over its ranks.
// Errors: exceptions.
#pragma once

#include <functional>
#include <string>

#include "model.h"
#include "settings.h"
#include "shardweave/dtensor/dtensor.h"
#include "text.h"

namespace train_gpt {

// With the same weights on every mesh.
Gpt make_model(const Settings& settings, const shardweave::MeshPtr& mesh);

// settings.steps steps, and how many were made before: by a run that this one goes on from. Without a
// mesh nothing is saved, nor gone on from.
int64_t train(Gpt model, const Settings& settings, const Text& text,
              const shardweave::MeshPtr& mesh, const std::function<void(double loss)>& step_done);

// Bytes that the model writes, and those of the text that it was given to begin with.
struct Sample {
  std::string prompt;
  std::string generated;
};
Sample sample(Gpt model, const Settings& settings, const Text& text,
              const shardweave::MeshPtr& mesh);

}  // namespace train_gpt
