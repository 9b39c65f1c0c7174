//! The modules of `shardweave::nn`: their numbers, and the same ones on every mesh.
#![cfg(feature = "derive")]

use shardweave::nn::init::{self, Fan, Gain};
use shardweave::nn::{
    self, AttentionOptions, Conv2dOptions, Layer, RopeScaling, RotaryOptions, Sequential,
};
use shardweave::{
    manual_seed, DType, Mesh, Module, ParameterPlan, Placement::*, Result, Source, Tensor,
    TensorOptions, World,
};

fn close(a: &Tensor, b: &Tensor, bound: f64) {
    let of =
        |t: &Tensor| t.detach().unwrap().to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap();
    assert_eq!(a.sizes().unwrap(), b.sizes().unwrap());
    for (a, b) in of(a).into_iter().zip(of(b)) {
        assert!((a - b).abs() <= bound * b.abs().max(1.0), "{a} and {b}");
    }
}

fn names(module: &impl Module) -> Vec<String> {
    module.parameters().into_iter().map(|(name, _)| name).collect()
}

/// Numbers that repeat nothing much.
fn sample(sizes: &[i64]) -> Result<Tensor> {
    let count: i64 = sizes.iter().product();
    let numbers: Vec<f64> = (0..count).map(|i| ((i * 37 % 23) as f64 - 11.0) / 7.0).collect();
    Tensor::from_slice(&numbers, sizes)
}

const DIM: i64 = 12;

/// All of them, as a small model that takes tokens and images.
#[derive(Module)]
struct All {
    embed: nn::Embedding,
    patches: nn::Conv2d,
    norm: nn::LayerNorm,
    attention: nn::Attention,
    rotary: nn::Rotary,
    grouped: nn::Attention,
    packed: nn::MultiheadAttention,
    rms: nn::RmsNorm,
    mlp: Sequential,
}

impl All {
    fn new() -> Result<All> {
        Ok(All {
            embed: nn::Embedding::new(11, DIM)?,
            patches: Conv2dOptions::new(3, DIM, [2, 2]).stride([2, 2]).build()?,
            norm: nn::LayerNorm::new(DIM)?,
            attention: nn::Attention::new(DIM, 3)?,
            rotary: RotaryOptions::new(2, 16).build()?,
            grouped: AttentionOptions::new(DIM, 6).kv_heads(2).causal(true).bias(false).build()?,
            packed: nn::MultiheadAttention::new(DIM, 2)?,
            rms: nn::RmsNorm::new(DIM, 1e-6)?,
            mlp: Sequential::new()
                .with(nn::Linear::new(DIM, 4 * DIM)?)
                .function(|x| x.gelu())
                .with(nn::Dropout::new(0.25))
                .with(nn::Linear::new(4 * DIM, DIM)?),
        })
    }

    fn forward(&self, tokens: &Tensor, images: &Tensor) -> Result<Tensor> {
        let patches = self.patches.forward(images)?.flatten(2, 3)?.transpose(1, 2)?;
        let mut x = Tensor::cat(&[self.embed.forward(tokens)?, patches], 1)?;
        x = (&x + self.attention.forward(&self.norm.forward(&x)?)?)?;
        x = (&x + self.grouped.forward_with(&self.rms.forward(&x)?, Some(&self.rotary), None)?)?;
        x = (&x + self.packed.forward(&x)?)?;
        &x + self.mlp.forward(&x)?
    }
}

/// Numbers of the forward, then those of every gradient.
fn run(model: &All, mesh: &Mesh) -> Result<Vec<f64>> {
    let place = |x: Tensor| x.distribute_from(Source::Same, mesh, [("dp", Shard(0))]);
    let tokens = (Tensor::arange(3 * 5)? % 11)?.view(&[3, 5])?;
    let y = model.forward(&place(tokens)?, &place(sample(&[3, 3, 4, 4])?)?)?;
    (&y * &y)?.mean()?.backward()?;
    model.finish_grad_sync()?;
    let mut numbers = y.detach()?.full_tensor()?.to_vec::<f64>()?;
    for (name, parameter) in model.parameters() {
        let grad = parameter.grad()?.unwrap_or_else(|| panic!("{name} has no gradient"));
        numbers.extend(grad.full_tensor()?.to_vec::<f64>()?);
    }
    Ok(numbers)
}

/// Initial values, dropout, results and gradients do not depend on the mesh, whatever divides.
#[test]
fn every_module_on_every_mesh() {
    let of_mesh = |dims: &[(&str, i64)]| -> Vec<f64> {
        let ranks = dims.iter().map(|(_, size)| *size as usize).product();
        let ranks = World::threads(ranks).run(|world| {
            let mesh = world.device_mesh(dims)?;
            let model = nn::with_dtype(DType::F64, || init::skip(All::new))?;
            let plan = ParameterPlan::new()
                .line("*.{q,k,v}_proj.*", &[("tp", Shard(0))])
                .line("*.o_proj.weight", &[("tp", Shard(1))])
                .line("packed.in_proj_*", &[("tp", Shard(0))])
                .line("mlp.0.*", &[("tp", Shard(0))])
                .line("mlp.3.weight", &[("tp", Shard(1))])
                .line("embed.weight", &[("tp", Shard(1))])
                .line("patches.*", &[("tp", Shard(0))]);
            model.distribute(&mesh, &plan, Source::Same)?;
            mesh.seed(5)?;
            model.initialize()?;
            run(&model, &mesh)
        });
        let mut ranks = ranks.unwrap_or_else(|error| panic!("{dims:?}: {error}"));
        for other in &ranks {
            assert_eq!(other.len(), ranks[0].len());
        }
        ranks.remove(0)
    };
    let alone = of_mesh(&[("dp", 1), ("tp", 1)]);
    let largest = alone.iter().fold(0.0f64, |a, b| a.max(b.abs()));
    assert!(largest > 0.1 && largest < 1e4, "{largest}");
    for dims in [
        &[("dp", 1), ("tp", 2)][..],
        &[("dp", 1), ("tp", 3)],
        &[("dp", 2), ("tp", 1)],
        &[("dp", 2), ("tp", 2)],
        &[("dp", 4), ("tp", 1)], // a rank without a sample
    ] {
        for (i, (a, b)) in of_mesh(dims).iter().zip(&alone).enumerate() {
            assert!((a - b).abs() <= 1e-9 * b.abs().max(1.0), "{dims:?}, number {i}: {a} and {b}");
        }
    }
}

#[test]
fn names_are_those_of_torch_and_transformers() {
    let expected = [
        "embed.weight",
        "patches.weight",
        "patches.bias",
        "norm.weight",
        "norm.bias",
        "attention.q_proj.weight",
        "attention.q_proj.bias",
        "attention.k_proj.weight",
        "attention.k_proj.bias",
        "attention.v_proj.weight",
        "attention.v_proj.bias",
        "attention.o_proj.weight",
        "attention.o_proj.bias",
        "grouped.q_proj.weight",
        "grouped.k_proj.weight",
        "grouped.v_proj.weight",
        "grouped.o_proj.weight",
        "packed.in_proj_weight",
        "packed.in_proj_bias",
        "packed.out_proj.weight",
        "packed.out_proj.bias",
        "rms.weight",
        "mlp.0.weight",
        "mlp.0.bias",
        "mlp.3.weight",
        "mlp.3.bias",
    ];
    let model = All::new().unwrap();
    assert_eq!(names(&model), expected);
    let buffers: Vec<String> = model.buffers().into_iter().map(|(name, _)| name).collect();
    assert_eq!(buffers, ["rotary.cos", "rotary.sin"]);
}

/// Attention, written out.
fn attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let dim = q.size(-1)? as f64;
    let mut scores = (q.matmul(&k.transpose(-1, -2)?)? / dim.sqrt())?;
    if let Some(mask) = mask {
        scores = scores.masked_fill(&(!mask)?, f64::NEG_INFINITY)?;
    }
    scores.softmax(-1)?.matmul(v)
}

#[test]
fn attention_as_it_is_written() {
    let body = || -> Result<()> {
        let (batch, length, dim, heads) = (2, 5, 12, 6);
        let x = sample(&[batch, length, dim])?;
        let split = |y: Tensor| -> Result<Tensor> {
            y.view(&[batch, length, -1, dim / heads])?.transpose(1, 2)
        };
        let join = |y: Tensor| y.transpose(1, 2)?.reshape(&[batch, length, dim]);
        let causal = Tensor::ones(&[length, length])?.tril(0)?.gt(0)?;
        for kv_heads in [6, 3, 2, 1] {
            let options = AttentionOptions::new(dim, heads).kv_heads(kv_heads).causal(true);
            let module = nn::with_dtype(DType::F64, || options.build())?;
            let of = |layer: &nn::Linear| split(layer.forward(&x)?);
            let repeated = |y: Tensor| y.repeat_interleave(heads / kv_heads, 1);
            let (k, v) = (repeated(of(&module.k_proj)?)?, repeated(of(&module.v_proj)?)?);
            let y = attention(&of(&module.q_proj)?, &k, &v, Some(&causal))?;
            let expected = module.o_proj.forward(&join(y)?)?;
            close(&module.forward(&x)?, &expected, 1e-12);
            // A mask takes the place of the causal one: the same, and another one.
            close(&module.forward_with(&x, None, Some(&causal))?, &expected, 1e-12);
            let all = Tensor::ones(&[length, length])?.gt(0)?;
            let y = attention(&of(&module.q_proj)?, &k, &v, None)?;
            let expected = module.o_proj.forward(&join(y)?)?;
            close(&module.forward_with(&x, None, Some(&all))?, &expected, 1e-12);
            close(&module.cross(&x, &x, Some(&all))?, &expected, 1e-12);
            close(&module.cross(&x, &x, None)?, &expected, 1e-12);
            let error = module.cross(&x, &x.narrow(2, 0, 1)?, None).unwrap_err();
            assert!(error.message().starts_with("Attention::cross: 'x' is "), "{error}");
        }
        let packed = nn::with_dtype(DType::F64, || nn::MultiheadAttention::new(dim, heads))?;
        let weights = packed.in_proj_weight.split(dim, 0)?;
        let parts: Vec<Tensor> =
            weights.iter().map(|w| split(x.linear(w, None)?)).collect::<Result<_>>()?;
        let y = attention(&parts[0], &parts[1], &parts[2], None)?;
        close(&packed.forward(&x)?, &packed.out_proj.forward(&join(y)?)?, 1e-12);
        assert!(packed.in_proj_bias.as_ref().unwrap().to_vec::<f64>()?.iter().all(|b| *b == 0.0));
        Ok(())
    };
    body().unwrap();
}

/// Complex numbers that are turned.
#[test]
fn rotary_turns_by_position() {
    let body = || -> Result<()> {
        let x = sample(&[1, 1, 4, 6])?;
        let y = RotaryOptions::new(6, 9).theta(100.0).build()?.forward(&x)?;
        let (x, y) = (x.to_vec::<f64>()?, y.to_vec::<f64>()?);
        for at in 0..4 {
            for i in 0..3 {
                let angle = at as f64 * 100f64.powf(-(i as f64) / 3.0);
                let (a, b) = (x[at * 6 + i], x[at * 6 + i + 3]);
                let turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin());
                assert!((y[at * 6 + i] - turned.0).abs() < 1e-6);
                assert!((y[at * 6 + i + 3] - turned.1).abs() < 1e-6);
            }
        }
        // Half as fast is as if the position were half as far.
        let slow = RotaryOptions::new(6, 9).scaling(RopeScaling::Linear { factor: 2.0 }).build()?;
        let (slow, fast) = (slow.buffers(), RotaryOptions::new(6, 9).build()?.buffers());
        close(&slow[0].1.i(4)?, &fast[0].1.i(2)?, 1e-6);
        // transformers' _compute_llama3_parameters for Llama 3.2 1B, base 500000, heads of 64.
        let scaling = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0,
        };
        let rotary = RotaryOptions::new(64, 2).theta(500_000.0).scaling(scaling).build()?;
        let sin = rotary.buffers()[1].1.i(1)?.to_vec::<f32>()?;
        let of = |i: usize| f64::from(sin[i]).asin();
        let plain = |i: i32| 500_000f64.powf(-f64::from(i) / 32.0);
        assert!((of(10) / plain(10) - 1.0).abs() < 1e-5); // turns often
        assert!((of(31) / (plain(31) / 32.0) - 1.0).abs() < 1e-5); // hardly
        let turns = 8192.0 * plain(16) / (2.0 * std::f64::consts::PI);
        assert!(turns > 1.0 && turns < 4.0, "{turns}");
        let smooth = (turns - 1.0) / 3.0;
        let between = (1.0 - smooth) * plain(16) / 32.0 + smooth * plain(16);
        assert!((of(16) / between - 1.0).abs() < 1e-5);
        assert!(RotaryOptions::new(5, 9).build().is_err());
        for scaling in [
            RopeScaling::Linear { factor: 0.0 },
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 4.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192.0,
            },
        ] {
            let refused = RotaryOptions::new(6, 9).scaling(scaling).build();
            assert!(refused.unwrap_err().to_string().contains("low_freq_factor below"));
        }
        // Angles are products of floats, as in transformers: far positions of the fastest pairs.
        let far = RotaryOptions::new(6, 20_000).build()?.buffers();
        let (at, frequency) = (19_999_f32, 10_000_f64.powf(-1.0 / 3.0) as f32);
        let wanted = f64::from(at * frequency).cos() as f32;
        assert_eq!(far[0].1.i((19_999, 1))?.item::<f32>()?, wanted);
        Ok(())
    };
    body().unwrap();
}

#[test]
fn norms_and_convolutions_as_they_are_written() {
    let body = || -> Result<()> {
        let x = sample(&[3, 7])?;
        let mean = x.mean_dims(&[1], true)?;
        let square = |y: &Tensor| y.square()?.mean_dims(&[1], true);
        let (norm, rms) = nn::with_dtype(DType::F64, || -> Result<_> {
            Ok((nn::LayerNorm::new(7)?, nn::RmsNorm::new(7, 1e-6)?))
        })?;
        let centered = (&x - &mean)?;
        close(&norm.forward(&x)?, &(&centered * (square(&centered)? + 1e-5)?.rsqrt())?, 1e-12);
        close(&rms.forward(&x)?, &(&x * (square(&x)? + 1e-6)?.rsqrt())?, 1e-12);

        let images = sample(&[2, 4, 5, 6])?;
        let options = Conv2dOptions::new(4, 6, [3, 2]).stride([2, 1]).padding([1, 0]).groups(2);
        let conv = nn::with_dtype(DType::F64, || options.dilation([1, 2]).build())?;
        let y = conv.forward(&images)?;
        assert_eq!(y.sizes()?, [2, 6, 3, 4]);
        // One of its numbers: output channel 4 is of the second group.
        let (at, image) = ((1, 4, 1, 2), images.i(1)?);
        let mut sum = conv.bias.as_ref().unwrap().i(4)?.item::<f64>()?;
        for c in 0..2 {
            for dy in 0..3 {
                for dx in 0..2 {
                    let row = at.2 * 2 + dy - 1;
                    let pixel = image.i((2 + c, row, at.3 + 2 * dx))?.item::<f64>()?;
                    sum += conv.weight.i((4, c, dy, dx))?.item::<f64>()? * pixel;
                }
            }
        }
        assert!((y.i(at)?.item::<f64>()? - sum).abs() < 1e-12);
        Ok(())
    };
    body().unwrap();
}

#[test]
fn dropout_drops_in_training_alone() {
    let dropout = nn::Dropout::new(0.25);
    let x = Tensor::ones(&[100, 100]).unwrap();
    manual_seed(3).unwrap();
    let y = dropout.forward(&x).unwrap().to_vec::<f32>().unwrap();
    let zeros = y.iter().filter(|y| **y == 0.0).count();
    assert!((2300..2700).contains(&zeros), "{zeros}");
    assert!(y.iter().all(|y| *y == 0.0 || (*y - 4.0 / 3.0).abs() < 1e-6));
    dropout.eval();
    assert!(dropout.forward(&x).unwrap().is_same(&x).unwrap());
    let model = Sequential::new().with(dropout);
    model.train();
    let y = model.forward(&x).unwrap().to_vec::<f32>().unwrap();
    assert!(y.contains(&0.0));
    assert!(nn::Dropout::new(1.5).forward(&x).is_err());
}

/// Mean, deviation and the furthest number.
fn statistics(x: &Tensor) -> Result<(f64, f64, f64)> {
    let numbers = x.detach()?.full_tensor()?.to_dtype(DType::F64)?.to_vec::<f64>()?;
    let count = numbers.len() as f64;
    let mean = numbers.iter().sum::<f64>() / count;
    let variance = numbers.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / count;
    Ok((mean, variance.sqrt(), numbers.iter().fold(0.0, |a, b| b.abs().max(a))))
}

type Draw = fn(&Tensor) -> Result<()>;

#[test]
fn initial_values() {
    let (inputs, outputs) = (80.0f64, 120.0f64);
    let uniform = |std: f64| (std, 3f64.sqrt() * std);
    let normal = |std: f64| (std, 6.0 * std);
    let cases: [(Draw, (f64, f64)); 9] = [
        (|x| init::xavier_uniform_(x, Gain::Linear), uniform((2.0 / (inputs + outputs)).sqrt())),
        (|x| init::xavier_normal_(x, Gain::Tanh), normal(5.0 / 3.0 * 0.1)),
        (|x| init::kaiming_uniform_(x, Fan::In, Gain::Relu), uniform((2.0 / inputs).sqrt())),
        (|x| init::kaiming_normal_(x, Fan::Out, Gain::Relu), normal((2.0 / outputs).sqrt())),
        (
            |x| init::kaiming_uniform_(x, Fan::In, Gain::LeakyRelu(5f64.sqrt())),
            uniform((1.0 / 3.0 / inputs).sqrt()),
        ),
        (|x| init::normal_(x, 0.0, 0.02), normal(0.02)),
        (|x| init::uniform_(x, -0.5, 0.5), uniform(0.5 / 3f64.sqrt())),
        // The deviation of a normal distribution that is cut at two deviations.
        (|x| init::trunc_normal_(x, 0.0, 0.1, -0.2, 0.2), (0.0879626, 0.2)),
        (init::zeros_, (0.0, 0.0)),
    ];
    let mut of_meshes: Vec<Vec<f32>> = Vec::new();
    for ranks in [1, 3] {
        let all = World::threads(ranks).run(|world| {
            let mesh = world.device_mesh(&[("tp", ranks as i64)])?;
            let mut numbers = Vec::new();
            for (i, (draw, (std, furthest))) in cases.iter().enumerate() {
                mesh.seed(7 + i as u64)?;
                let layout = [("tp", Shard((i % 2) as i32))];
                let options = TensorOptions::new().requires_grad(true);
                let sharded = options.on(&mesh, layout)?.zeros(&[120, 80])?;
                let plain = TensorOptions::new().requires_grad(true).zeros(&[120, 80])?;
                for x in [&sharded, &plain] {
                    draw(x)?;
                    assert!(x.is_leaf()? && x.requires_grad()?);
                    let (mean, deviation, most) = statistics(x)?;
                    assert!(mean.abs() <= 0.04 * std, "{i}: {mean}");
                    assert!((deviation - std).abs() <= 0.03 * std, "{i}: {deviation} and {std}");
                    assert!(most <= *furthest * 1.000001, "{i}: {most} and {furthest}");
                }
                numbers.extend(sharded.detach()?.full_tensor()?.to_vec::<f32>()?);
            }
            Ok(numbers)
        });
        of_meshes.extend(all.unwrap().into_iter().take(1));
    }
    assert!(of_meshes[0] == of_meshes[1], "numbers of 1 and of 3 ranks");

    let ones = Tensor::zeros(&[2]).unwrap();
    init::ones_(&ones).unwrap();
    assert_eq!(ones.to_vec::<f32>().unwrap(), [1.0; 2]);
    let error = init::kaiming_normal_(&ones, Fan::In, Gain::Relu).unwrap_err();
    let text = "init::kaiming_normal_: the tensor's sizes are [2]; wanted two dimensions at least";
    assert_eq!(error.message(), text);
    assert!(init::trunc_normal_(&ones, 0.0, 1.0, 2.0, 1.0).is_err());
    // No element, nothing to divide by.
    init::xavier_normal_(&Tensor::zeros(&[0, 0]).unwrap(), Gain::Linear).unwrap();
}

/// As torch's modules draw: Linear and Conv2d up to 1 / sqrt(inputs), Embedding normally.
#[test]
fn modules_draw_as_torch_does() {
    manual_seed(11).unwrap();
    let linear = nn::Linear::new(100, 200).unwrap();
    let (_, std, most) = statistics(&linear.weight).unwrap();
    assert!((std - 0.1 / 3f64.sqrt()).abs() < 1e-3 && most <= 0.1, "{std} {most}");
    let (_, std, most) = statistics(linear.bias.as_ref().unwrap()).unwrap();
    assert!((std - 0.1 / 3f64.sqrt()).abs() < 1e-2 && most <= 0.1 && most > 0.09, "{std} {most}");
    let (_, std, _) = statistics(&nn::Embedding::new(100, 100).unwrap().weight).unwrap();
    assert!((std - 1.0).abs() < 0.03, "{std}");
    let conv = nn::Conv2d::new(25, 40, 2).unwrap();
    let (_, std, most) = statistics(&conv.weight).unwrap();
    assert!((std - 0.1 / 3f64.sqrt()).abs() < 3e-3 && most <= 0.1, "{std} {most}");
    let skipped = init::skip(|| nn::Linear::new(3, 3)).unwrap();
    assert_eq!(skipped.weight.to_vec::<f32>().unwrap(), [0.0; 9]);
    let norm = init::skip(|| nn::LayerNorm::new(3)).unwrap();
    assert_eq!(norm.weight.to_vec::<f32>().unwrap(), [1.0; 3]);
    // And draws again afterwards, also if that had panicked.
    let panic = std::panic::catch_unwind(|| init::skip(|| panic!("inside")));
    assert!(panic.is_err());
    assert_ne!(nn::Linear::new(3, 3).unwrap().weight.to_vec::<f32>().unwrap(), [0.0; 9]);
}

#[test]
fn bad_input() {
    let error = AttentionOptions::new(12, 4).kv_heads(3).build().unwrap_err();
    assert!(error.message().contains("4 heads, 3 of keys and values"), "{error}");
    let error = nn::Attention::new(10, 4).unwrap_err();
    assert!(error.message().starts_with("Attention::new: 4 heads of 10 features"), "{error}");
    let error = nn::MultiheadAttention::new(10, 4).unwrap_err();
    assert!(error.message().starts_with("MultiheadAttention::new: 4 heads of 10"), "{error}");
    let error = Conv2dOptions::new(4, 6, [3, 3]).groups(4).build().unwrap_err();
    assert!(error.message().contains("4 channels to 6 in 4 groups"), "{error}");
    let attention = nn::Attention::new(4, 2).unwrap();
    let error = attention.forward(&Tensor::ones(&[3, 4]).unwrap()).unwrap_err();
    assert!(error.message().contains("wanted [batch, length, features]"), "{error}");
    let error = nn::Linear::new(3, -1).unwrap_err();
    assert!(error.message().starts_with("Linear::new: "), "{error}");
}
