//! How the GPT is sharded, trained and asked for text.
//!
//! One loop for one device and for many: without a mesh parameters and batches are plain tensors,
//! with one they are sharded, and every function is collective over its ranks.

use shardweave::nn::Layer;
use shardweave::{
    no_grad, AdamW, Checkpointer, DataParallelOptions, FullyShardOptions, LoadOptions, Mesh,
    Module, ParameterPlan, Placement::*, Result, Source, State, Tensor, ZeroOptions,
};

use crate::model::{Gpt, GptOptions, VOCABULARY};
use crate::settings::{Parallel, Settings};
use crate::text::{self, Text};

/// Tensor parallelism as in Megatron-LM (Shoeybi et al., 2019): q, k, v and up are cut by their
/// outputs, o and down by their inputs, so that a block needs one reduction after attention and one
/// after the MLP. Everything else is replicated.
fn plan() -> ParameterPlan {
    ParameterPlan::new()
        .line("*.{q,k,v,up}.*", &[("tp", Shard(0))])
        .line("*.{o,down}.weight", &[("tp", Shard(1))])
}

/// With the same weights on every mesh. Every rank makes the same ones, as it does batches: none
/// has to be sent.
pub fn make_model(settings: &Settings, mesh: Option<&Mesh>) -> Result<Gpt> {
    let options = GptOptions {
        layers: settings.layers,
        dim: settings.dim,
        heads: settings.heads,
        seq: settings.seq,
    };
    let model = Gpt::new(&options, settings.seed)?;
    if let Some(mesh) = mesh {
        model.distribute(mesh, &plan(), Source::Same)?;
        if settings.parallel.is_fully_sharded() {
            // A unit for each block, and one for the rest: whole while it is used, forward and
            // backward.
            let options = FullyShardOptions::new().mesh_dim("dp").unit("blocks.*");
            model.fully_shard(mesh, &options)?;
        }
    }
    Ok(model)
}

/// Makes `settings.steps` steps, and says how many were made before, by a run that this one goes on
/// from. Without a mesh nothing is saved, nor gone on from.
pub fn train(
    model: &Gpt,
    settings: &Settings,
    text: &Text,
    mesh: Option<&Mesh>,
    step_done: &mut dyn FnMut(f64) -> Result<()>,
) -> Result<i64> {
    // Gradients leave in buckets while backward goes on, as long as this lives.
    let _ddp = match mesh {
        Some(mesh) if settings.parallel == Parallel::Ddp => {
            let options = DataParallelOptions::new().mesh_dim("dp").source(Source::Same);
            Some(model.distributed_data_parallel(mesh, &options)?)
        }
        _ => None,
    };
    let optimizer = AdamW::new(settings.learning_rate).build(model)?;
    if let (Some(_), Parallel::Zero { stage }) = (mesh, settings.parallel) {
        optimizer.use_zero(&ZeroOptions::new().mesh_dim("dp").stage(stage))?;
    }
    let mut rows = vec![("dp", Shard(0))];
    if settings.parallel == Parallel::Hsdp {
        rows.push(("replicas", Shard(0)));
    }
    let state = State::new()?;
    let mut checkpointer = None;
    let mut first = 0;
    if let Some(mesh) = mesh {
        // What a run needs to go on; the text's batches follow from the step.
        state.add_module(model)?;
        state.add_optimizer(&optimizer, model)?;
        state.add_random(mesh)?;
        if let Some(directory) = &settings.resume {
            first = state.load(directory, mesh, &LoadOptions::new())?.step;
        }
        if let Some(directory) = &settings.save {
            let mut its = Checkpointer::new(mesh, directory).open()?;
            its.open(Some(first))?; // or hours later there is nowhere to save
            checkpointer = Some(its);
        }
    }
    let end = first + settings.steps;
    for step in first..end {
        let (mut tokens, mut targets) = text.batch(step, settings)?;
        if let Some(mesh) = mesh {
            // Each row of the mesh gets its share of the sequences.
            for tensor in [&mut tokens, &mut targets] {
                *tensor = tensor.distribute_from(Source::Same, mesh, &rows)?;
            }
        }
        let loss = model.loss(&tokens, &targets)?;
        loss.backward()?;
        model.finish_grad_sync()?; // waits for what has left; nothing to do for plain tensors
        optimizer.step()?;
        optimizer.zero_grad()?;
        step_done(loss.item()?)?;
        let done = step + 1;
        match &mut checkpointer {
            Some(checkpointer) if done == end => checkpointer.save(done, &state)?,
            Some(checkpointer) if settings.save_every > 0 && done % settings.save_every == 0 => {
                checkpointer.save_async(done, &state)?;
            }
            _ => {}
        }
    }
    Ok(first)
}

/// Bytes that the model writes, and those of the text that it was given to begin with.
pub struct Sample {
    pub prompt: Vec<u8>,
    pub generated: Vec<u8>,
}

pub fn sample(model: &Gpt, settings: &Settings, text: &Text, mesh: &Mesh) -> Result<Sample> {
    const TEMPERATURE: f64 = 0.7;
    let seed = settings.seed.wrapping_add(1); // not the numbers that the batches come from
    let seq = settings.seq as usize;
    let starts = (text.bytes().len() - seq) as u64;
    let start = (text::random_at(seed, settings.sample as u64) % starts) as usize;
    let prompt = text.bytes()[start..start + seq].to_vec();
    let mut all = prompt.clone();
    for i in 0..settings.sample {
        let next = no_grad(|| -> Result<i64> {
            let tokens = text::to_tokens(&all[all.len() - seq..])?;
            let tokens = tokens.distribute_from(Source::Same, mesh, [("dp", Replicate)])?;
            let scores = model.forward(&tokens)?.i((.., -1))?.full_tensor()?;
            let sums = (scores / TEMPERATURE)?.softmax(-1)?.cumsum(-1)?;
            let smaller: Tensor = sums.lt(text::uniform_at(seed, i as u64))?;
            smaller.sum()?.item()
        })?;
        all.push(next.min(VOCABULARY - 1) as u8);
    }
    Ok(Sample { prompt, generated: all.split_off(seq) })
}
