//! One family of models, twice: the library's Llama by its kind, and one written in Rust. One plan of
//! the zoo fits both, and on every mesh they train as on one device.

use shardweave::nn::{self, Layer, RotaryOptions};
use shardweave::{
    no_grad, AdamW, Forward, GradSync, GradSyncOptions, Mesh, Module, NativeModule, ParameterPlan,
    Result, Source, Tensor, World,
};

const CONFIG: &str = r#"{"model_type": "llama", "vocab_size": 29, "hidden_size": 24,
    "intermediate_size": 23, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "rms_norm_eps": 1e-5}"#;
const VOCABULARY: i64 = 29;
const DIM: i64 = 24;
const HEADS: i64 = 4;
const KV_HEADS: i64 = 2;
const LENGTH: i64 = 7;
const STEPS: usize = 20;

#[derive(Module)]
struct SelfAttention {
    q_proj: nn::Linear,
    k_proj: nn::Linear,
    v_proj: nn::Linear,
    o_proj: nn::Linear,
    forward: Forward,
}

impl SelfAttention {
    fn attend(&self, x: &Tensor, rotary: &nn::Rotary) -> Result<Tensor> {
        let [y] = self.forward.run([x], |[x]| {
            let heads =
                |y: Tensor| y.view(&[x.sizes()?[0], LENGTH, -1, DIM / HEADS])?.transpose(1, 2);
            let q = rotary.forward(&heads(self.q_proj.forward(&x)?)?)?;
            let k = rotary.forward(&heads(self.k_proj.forward(&x)?)?)?;
            let v = heads(self.v_proj.forward(&x)?)?;
            let each = HEADS / KV_HEADS;
            let (k, v) = (k.repeat_interleave(each, 1)?, v.repeat_interleave(each, 1)?);
            let y = q.scaled_dot_product_attention(&k, &v, None, 0.0, true)?;
            let y = y.transpose(1, 2)?.reshape(&[x.sizes()?[0], LENGTH, DIM])?;
            Ok([self.o_proj.forward(&y)?])
        })?;
        Ok(y)
    }
}

#[derive(Module)]
struct Mlp {
    gate_proj: nn::Linear,
    up_proj: nn::Linear,
    down_proj: nn::Linear,
    forward: Forward,
}

impl Layer for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [y] = self.forward.run([x], |[x]| {
            let gated = (self.gate_proj.forward(&x)?.silu()? * self.up_proj.forward(&x))?;
            Ok([self.down_proj.forward(&gated)?])
        })?;
        Ok(y)
    }
}

#[derive(Module)]
struct DecoderLayer {
    self_attn: SelfAttention,
    mlp: Mlp,
    input_layernorm: nn::RmsNorm,
    post_attention_layernorm: nn::RmsNorm,
    forward: Forward,
}

impl DecoderLayer {
    fn run(&self, x: &Tensor, rotary: &nn::Rotary) -> Result<Tensor> {
        let [y] = self.forward.run([x], |[x]| {
            let x = (&x + self.self_attn.attend(&self.input_layernorm.forward(&x)?, rotary))?;
            let y = self.mlp.forward(&self.post_attention_layernorm.forward(&x)?)?;
            Ok([(&x + &y)?])
        })?;
        Ok(y)
    }
}

#[derive(Module)]
struct Decoder {
    embed_tokens: nn::Embedding,
    layers: Vec<DecoderLayer>,
    norm: nn::RmsNorm,
    rotary: nn::Rotary,
}

#[derive(Module)]
struct Llama {
    model: Decoder,
    lm_head: nn::Linear,
}

impl Llama {
    fn new() -> Result<Llama> {
        let linear = nn::Linear::without_bias;
        let head = DIM / HEADS;
        let layer = |_| {
            Ok(DecoderLayer {
                self_attn: SelfAttention {
                    q_proj: linear(DIM, HEADS * head)?,
                    k_proj: linear(DIM, KV_HEADS * head)?,
                    v_proj: linear(DIM, KV_HEADS * head)?,
                    o_proj: linear(HEADS * head, DIM)?,
                    forward: Forward::new(),
                },
                mlp: Mlp {
                    gate_proj: linear(DIM, 23)?,
                    up_proj: linear(DIM, 23)?,
                    down_proj: linear(23, DIM)?,
                    forward: Forward::new(),
                },
                input_layernorm: nn::RmsNorm::new(DIM, 1e-5)?,
                post_attention_layernorm: nn::RmsNorm::new(DIM, 1e-5)?,
                forward: Forward::new(),
            })
        };
        Ok(Llama {
            model: Decoder {
                embed_tokens: nn::Embedding::new(VOCABULARY, DIM)?,
                layers: (0..2).map(layer).collect::<Result<_>>()?,
                norm: nn::RmsNorm::new(DIM, 1e-5)?,
                rotary: RotaryOptions::new(head, LENGTH).build()?,
            },
            lm_head: linear(DIM, VOCABULARY)?,
        })
    }
}

impl Layer for Llama {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let mut x = self.model.embed_tokens.forward(tokens)?;
        for layer in &self.model.layers {
            x = layer.run(&x, &self.model.rotary)?;
        }
        self.lm_head.forward(&self.model.norm.forward(&x)?)
    }
}

fn library() -> Result<NativeModule> {
    NativeModule::new("llama", CONFIG)
}

/// The same numbers for the same names, whatever their order.
fn fill<M: Module + ?Sized>(module: &M) -> Result<()> {
    let mut parameters = module.parameters();
    parameters.sort_by(|(a, _), (b, _)| a.cmp(b));
    for (i, (name, parameter)) in parameters.into_iter().enumerate() {
        let sizes = parameter.sizes()?;
        let count = sizes.iter().product::<i64>();
        let shift = if name.contains("norm") { 1.0 } else { 0.0 };
        let number = |j: i64| ((j as f32 * 12.9898 + i as f32).sin() * 43758.547).fract() * 0.3;
        let data: Vec<f32> = (0..count).map(|j| number(j) + shift).collect();
        no_grad(|| parameter.copy_(&Tensor::from_slice(&data, &sizes)?))?;
    }
    Ok(())
}

fn batch(step: usize) -> Result<(Tensor, Tensor)> {
    let id = |i: i64| (i * i + 3 * i + (step % 2) as i64 * 5) % VOCABULARY;
    let tokens: Vec<i64> = (0..4 * LENGTH).map(id).collect();
    let targets: Vec<i64> = (1..=4 * LENGTH).map(id).collect();
    Ok((Tensor::from_slice(&tokens, &[4, LENGTH])?, Tensor::from_slice(&targets, &[4, LENGTH])?))
}

/// The losses of 20 steps, and the parameters behind them by name.
type Trained = (Vec<f32>, Vec<(String, Vec<f32>)>);

fn train<M: Layer>(model: &M, mesh: Option<&Mesh>) -> Result<Trained> {
    let optimizer = AdamW::new(1e-2).build(model)?;
    let _sync = mesh
        .map(|_| GradSync::with(model, &GradSyncOptions::new().bucket_bytes(2000)))
        .transpose()?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (mut tokens, mut targets) = batch(step)?;
        if let Some(mesh) = mesh {
            let rows = mesh.dim_names()?.iter().any(|name| name == "dp");
            let layout = if rows { "[S(0), R]" } else { "[R]" };
            tokens = tokens.distribute(mesh, layout)?;
            targets = targets.distribute(mesh, layout)?;
        }
        let scores = model.forward(&tokens)?.flatten(0, 1)?;
        let loss = scores.cross_entropy(&targets.flatten(0, 1)?)?;
        loss.backward()?;
        model.finish_grad_sync()?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        losses.push(loss.detach()?.full_tensor()?.item::<f32>()?);
    }
    let mut parameters = Vec::new();
    for (name, parameter) in model.parameters() {
        parameters.push((name, parameter.detach()?.full_tensor()?.to_vec::<f32>()?));
    }
    parameters.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok((losses, parameters))
}

fn assert_same(got: &Trained, wanted: &Trained, place: &str) {
    for (step, (a, b)) in got.0.iter().zip(&wanted.0).enumerate() {
        assert!((a - b).abs() <= 1e-5 * b.abs(), "{place}: step {step}: {a}, wanted {b}");
    }
    let names = |of: &Trained| of.1.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(got), names(wanted), "{place}");
    for ((name, got), (_, wanted)) in got.1.iter().zip(&wanted.1) {
        let largest = wanted.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (a, b) in got.iter().zip(wanted) {
            // Adam divides by gradients that may be what is left of sums that cancel.
            assert!((a - b).abs() <= 2e-3 * largest, "{place}: {name}: {a}, wanted {b}");
        }
    }
}

#[test]
fn one_plan_for_both() {
    let ours = Llama::new().unwrap();
    fill(&ours).unwrap();
    let wanted = train(&ours, None).unwrap();
    assert!(wanted.0[STEPS - 1] < wanted.0[0] - 0.5, "nothing was learned: {:?}", wanted.0);
    let theirs = library().unwrap();
    fill(&theirs).unwrap();
    assert_same(&train(&theirs, None).unwrap(), &wanted, "the library's on one device");

    for (dims, options) in [
        (&[("tp", 1)][..], ""),
        (&[("tp", 2)][..], ""),
        (&[("tp", 2)][..], r#"{"sequence_parallel": true}"#),
        (&[("dp", 2), ("tp", 2)][..], ""),
        (&[("dp", 2), ("tp", 2)][..], r#"{"sequence_parallel": true, "shard_vocabulary": false}"#),
    ] {
        let ranks = dims.iter().map(|(_, size)| *size as usize).product();
        World::threads(ranks)
            .run(|world| {
                let mesh = world.device_mesh(dims)?;
                let plan = ParameterPlan::from_zoo("llama", CONFIG, &mesh, options)?;
                let ours = Llama::new()?;
                fill(&ours)?;
                ours.distribute(&mesh, &plan, Source::Same)?;
                let place = format!("{dims:?} {options}");
                assert_same(&train(&ours, Some(&mesh))?, &wanted, &format!("Rust's on {place}"));
                let theirs = library()?;
                fill(&theirs)?;
                theirs.distribute(&mesh, &plan, Source::Same)?;
                assert_same(
                    &train(&theirs, Some(&mesh))?,
                    &wanted,
                    &format!("the library's on {place}"),
                );
                Ok(())
            })
            .unwrap();
    }
}
