//! The model, the plan and the losses that all languages share (tests/same_model/README.md): written
//! down in Rust, trained on every mesh, against the file.

use std::fs;

use serde_json::Value;
use shardweave::nn::{self, Layer};
use shardweave::{AdamW, Module, ParameterPlan, Placement::Shard, Result, Source, Tensor, World};

const VOCABULARY: i64 = 13;
const DIM: i64 = 24;
const HEADS: i64 = 12;
const LAYERS: i64 = 2;
const LENGTH: i64 = 6;
const BATCH: i64 = 5;

fn text_of(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../tests/same_model/");
    fs::read_to_string(format!("{folder}{name}")).unwrap_or_else(|e| panic!("{folder}{name}: {e}"))
}

#[derive(Module)]
struct Block {
    norm1: nn::LayerNorm,
    q: nn::Linear,
    k: nn::Linear,
    v: nn::Linear,
    o: nn::Linear,
    norm2: nn::LayerNorm,
    up: nn::Linear,
    down: nn::Linear,
}

impl Block {
    fn new() -> Result<Block> {
        Ok(Block {
            norm1: nn::LayerNorm::new(DIM)?,
            q: nn::Linear::new(DIM, DIM)?,
            k: nn::Linear::new(DIM, DIM)?,
            v: nn::Linear::new(DIM, DIM)?,
            o: nn::Linear::new(DIM, DIM)?,
            norm2: nn::LayerNorm::new(DIM)?,
            up: nn::Linear::new(DIM, 4 * DIM)?,
            down: nn::Linear::new(4 * DIM, DIM)?,
        })
    }
}

impl Layer for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let heads = |t: Tensor| t.view(&[BATCH, LENGTH, HEADS, DIM / HEADS])?.transpose(1, 2);
        let n = self.norm1.forward(x)?;
        let (q, k, v) = (self.q.forward(&n)?, self.k.forward(&n)?, self.v.forward(&n)?);
        let mixed =
            heads(q)?.scaled_dot_product_attention(&heads(k)?, &heads(v)?, None, 0.0, true)?;
        let mixed = mixed.transpose(1, 2)?.reshape(&[BATCH, LENGTH, DIM])?;
        let y = (x + self.o.forward(&mixed))?;
        &y + self.down.forward(&self.up.forward(&self.norm2.forward(&y)?)?.gelu()?)
    }
}

#[derive(Module)]
struct Gpt {
    embedding: nn::Embedding,
    positions: nn::Embedding,
    blocks: Vec<Block>,
    norm: nn::LayerNorm,
    head: nn::Linear,
}

impl Gpt {
    /// With the file's values, which come from no generator.
    fn new() -> Result<Gpt> {
        let gpt = nn::init::skip(|| -> Result<Gpt> {
            Ok(Gpt {
                embedding: nn::Embedding::new(VOCABULARY, DIM)?,
                positions: nn::Embedding::new(LENGTH, DIM)?,
                blocks: (0..LAYERS).map(|_| Block::new()).collect::<Result<_>>()?,
                norm: nn::LayerNorm::new(DIM)?,
                head: nn::Linear::without_bias(DIM, VOCABULARY)?,
            })
        })?;
        for (p, (name, parameter)) in gpt.parameters().iter().enumerate() {
            let is_norm = name.contains("norm") && name.ends_with("weight");
            let values: Vec<f32> = (0..parameter.numel()? as u32)
                .map(|i| {
                    let mixed = i
                        .wrapping_mul(2654435761)
                        .wrapping_add((p as u32).wrapping_mul(2246822519))
                        .wrapping_add(374761393);
                    let bits = (mixed ^ (mixed >> 15)).wrapping_mul(2246822519);
                    (bits >> 8) as f32 / 33554432.0 - 0.25 + if is_norm { 1.0 } else { 0.0 }
                })
                .collect();
            parameter.copy_from_slice(&values)?;
        }
        Ok(gpt)
    }

    fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let mut x = (self.embedding.forward(tokens) + &self.positions.weight)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        let scores = self.head.forward(&self.norm.forward(&x)?)?;
        scores.view(&[-1, VOCABULARY])?.cross_entropy(&targets.view(&[-1])?)
    }
}

/// What the model reads, or what is to come out of it: each row one token further on.
fn batch(shift: i64) -> Result<Tensor> {
    let token = |b: i64, t: i64| (5 * b + 3 * t + b * t) % VOCABULARY;
    let tokens: Vec<i64> =
        (0..BATCH * LENGTH).map(|i| token(i / LENGTH, i % LENGTH + shift)).collect();
    Tensor::from_slice(&tokens, &[BATCH, LENGTH])
}

fn train(world: &World, dims: &[(&str, i64)], plan: &str, steps: usize) -> Result<Vec<f64>> {
    let mesh = world.device_mesh(dims)?;
    let gpt = Gpt::new()?;
    gpt.distribute(&mesh, &ParameterPlan::from_json(plan)?, Source::Same)?;
    let rows: &[_] = if dims[0].0 == "dp" { &[("dp", Shard(0))] } else { &[] };
    let on_mesh = |t: Tensor| t.distribute_from(Source::Same, &mesh, rows);
    let (tokens, targets) = (on_mesh(batch(0)?)?, on_mesh(batch(1)?)?);
    let optimizer = AdamW::new(0.01).build(&gpt)?;
    (0..steps)
        .map(|_| {
            let loss = gpt.loss(&tokens, &targets)?;
            loss.backward()?;
            gpt.finish_grad_sync()?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            loss.item()
        })
        .collect()
}

#[test]
fn the_losses_of_the_file_on_every_mesh() {
    shardweave::set_num_threads(1).unwrap();
    let plan = text_of("plan.json");
    let file: Value = serde_json::from_str(&text_of("losses.json")).unwrap();
    let wanted: Vec<f64> =
        file["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect();
    assert_eq!(wanted.len(), 20);
    let meshes: [&[(&str, i64)]; 5] =
        [&[("tp", 1)], &[("tp", 2)], &[("tp", 4)], &[("dp", 2), ("tp", 2)], &[("tp", 3)]];
    for dims in meshes {
        let ranks = dims.iter().map(|(_, size)| *size as usize).product();
        let of_ranks = World::threads(ranks)
            .run(|world| train(world, dims, &plan, wanted.len()))
            .unwrap_or_else(|error| panic!("{dims:?}: {error}"));
        for losses in of_ranks {
            for (step, (loss, wanted)) in losses.iter().zip(&wanted).enumerate() {
                assert!(
                    (loss - wanted).abs() <= 1e-5 * wanted,
                    "{dims:?}, step {}: {loss}, wanted {wanted}",
                    step + 1
                );
            }
        }
    }
}
