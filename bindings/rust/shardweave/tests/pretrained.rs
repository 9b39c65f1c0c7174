//! Models of Hugging Face: the logits are those that transformers has computed, of the library's
//! models and of a Llama that is written here, on one rank and on two; and what is written is what
//! was read.
#![cfg(feature = "derive")]

use std::path::{Path, PathBuf};

use serde_json::Value;
use shardweave::nn::{self, AttentionOptions, Layer, RopeScaling, RotaryOptions};
use shardweave::{
    args, no_grad, read_pretrained_config, Code, DType, LoadPretrained, Module, NativeModule,
    ParameterPlan, Placement::Shard, Result, Safetensors, SavePretrained, Source, Tensor, World,
};

const MODULES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../modules/");

fn reference(kind: &str) -> PathBuf {
    Path::new(MODULES).join("hugging_face/references").join(kind)
}

/// What transformers was given, and what it gave.
fn expected(kind: &str) -> Result<(Tensor, Vec<f32>)> {
    let file = Safetensors::open(format!("{MODULES}nn/references/{kind}.safetensors"))?;
    let inputs = file.read("inputs")?;
    let inputs = inputs.narrow(0, 0, 1)?.flatten(0, 1)?;
    Ok((inputs, file.read("logits")?.to_vec::<f32>()?))
}

fn assert_logits(got: &Tensor, wanted: &[f32], place: &str) -> Result<()> {
    let got = got.full_tensor()?.to_vec::<f32>()?;
    assert_eq!(got.len(), wanted.len(), "{place}");
    let largest = wanted.iter().fold(1.0f32, |most, x| most.max(x.abs()));
    for (got, wanted) in got.iter().zip(wanted) {
        assert!((got - wanted).abs() <= 2e-5 * largest, "{place}: {got}, wanted {wanted}");
    }
    Ok(())
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let name = format!("shardweave-pretrained-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[derive(Module)]
struct Mlp {
    gate_proj: nn::Linear,
    up_proj: nn::Linear,
    down_proj: nn::Linear,
}

#[derive(Module)]
struct Block {
    input_layernorm: nn::RmsNorm,
    self_attn: nn::Attention,
    post_attention_layernorm: nn::RmsNorm,
    mlp: Mlp,
}

#[derive(Module)]
struct Decoder {
    embed_tokens: nn::Embedding,
    layers: Vec<Block>,
    norm: nn::RmsNorm,
    rotary: nn::Rotary, // tables that are in no file
}

/// With biases, and the embedding's table for a head.
#[derive(Module)]
struct Llama {
    model: Decoder,
}

impl Llama {
    fn new(config: &str) -> Result<Llama> {
        let config: Value = serde_json::from_str(config).unwrap();
        let of = |name: &str| config[name].as_i64().unwrap();
        let rope = |name: &str| config["rope_parameters"][name].as_f64().unwrap();
        let (dim, inner, head_dim) = (of("hidden_size"), of("intermediate_size"), of("head_dim"));
        let norm = || nn::RmsNorm::new(dim, config["rms_norm_eps"].as_f64().unwrap());
        let attention = AttentionOptions::new(dim, of("num_attention_heads"))
            .kv_heads(of("num_key_value_heads"))
            .head_dim(head_dim)
            .causal(true);
        let block = |_| {
            Ok(Block {
                input_layernorm: norm()?,
                self_attn: attention.build()?,
                post_attention_layernorm: norm()?,
                mlp: Mlp {
                    gate_proj: nn::Linear::new(dim, inner)?,
                    up_proj: nn::Linear::new(dim, inner)?,
                    down_proj: nn::Linear::new(inner, dim)?,
                },
            })
        };
        let scaling = RopeScaling::Llama3 {
            factor: rope("factor"),
            low_freq_factor: rope("low_freq_factor"),
            high_freq_factor: rope("high_freq_factor"),
            original_max_position_embeddings: rope("original_max_position_embeddings"),
        };
        let rotary = RotaryOptions::new(head_dim, of("max_position_embeddings"));
        Ok(Llama {
            model: Decoder {
                embed_tokens: nn::Embedding::new(of("vocab_size"), dim)?,
                layers: (0..of("num_hidden_layers")).map(block).collect::<Result<_>>()?,
                norm: norm()?,
                rotary: rotary.theta(rope("rope_theta")).scaling(scaling).build()?,
            },
        })
    }
}

impl Layer for Llama {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let mut x = self.model.embed_tokens.forward(tokens)?;
        for block in &self.model.layers {
            let y = block.input_layernorm.forward(&x)?;
            x = (&x + block.self_attn.forward_with(&y, Some(&self.model.rotary), None)?)?;
            let y = block.post_attention_layernorm.forward(&x)?;
            let gated = (block.mlp.gate_proj.forward(&y)?.silu()? * block.mlp.up_proj.forward(&y))?;
            x = (&x + block.mlp.down_proj.forward(&gated)?)?;
        }
        self.model.norm.forward(&x)?.linear(&self.model.embed_tokens.weight, None)
    }
}

fn assert_same_files(a: &Path, b: &Path) -> Result<()> {
    let (a, b) = (Safetensors::open(a)?, Safetensors::open(b)?);
    assert_eq!(a.tensors()?, b.tensors()?);
    for stored in a.tensors()? {
        let (one, other) = (a.read(&stored.name)?, b.read(&stored.name)?);
        assert_eq!(one.to_vec::<f32>()?, other.to_vec::<f32>()?, "{}", stored.name);
    }
    Ok(())
}

#[test]
fn a_llama_of_ones_own() -> Result<()> {
    let config = read_pretrained_config(reference("llama"), false)?;
    let (tokens, wanted) = expected("llama")?;
    let alone = Llama::new(&config)?;
    for ranks in [1, 2] {
        let saved = Folder::new(&format!("own{ranks}"));
        World::threads(ranks).run(|world| {
            let mesh = world.device_mesh(&[("tp", ranks as i64)])?;
            let model = Llama::new(&config)?;
            // Megatron's, which the library has for these names; its head is the embedding here.
            let plan = ParameterPlan::new()
                .line("*.{q,k,v}_proj.*", &[("tp", Shard(0))])
                .line("*.{gate,up}_proj.*", &[("tp", Shard(0))])
                .line("*.{o,down}_proj.weight", &[("tp", Shard(1))]);
            model.distribute(&mesh, &plan, Source::default())?;
            let loaded =
                model.load_pretrained(&reference("llama"), &mesh, &LoadPretrained::new())?;
            assert!(loaded.json.contains(r#""kind":"llama","missing":[],"unexpected":[]"#));
            let (tokens, wanted) = expected("llama")?;
            let logits = no_grad(|| model.forward(&tokens))?;
            assert_logits(&logits, &wanted, &format!("{ranks} ranks"))?;
            model.save_pretrained(&saved.0, &config, &mesh, &SavePretrained::new())
        })?;
        assert_same_files(&saved.0, &reference("llama"))?;
    }
    // The numbers are the file's: before they are read there are others.
    let logits = no_grad(|| alone.forward(&tokens))?.to_vec::<f32>()?;
    assert!(logits.iter().zip(&wanted).any(|(a, b)| (a - b).abs() > 1e-3));
    Ok(())
}

#[test]
fn models_of_the_library() -> Result<()> {
    for kind in ["llama", "gpt2", "mixtral", "vit"] {
        let config = read_pretrained_config(reference(kind), false)?;
        for ranks in [1, 2] {
            let saved = Folder::new(&format!("{kind}{ranks}"));
            World::threads(ranks).run(|world| {
                let mesh = world.device_mesh(&[("tp", ranks as i64)])?;
                let model = NativeModule::new(kind, &config)?;
                let plan = ParameterPlan::from_zoo(kind, &config, &mesh, "")?;
                model.distribute(&mesh, &plan, Source::default())?;
                model.load_pretrained(&reference(kind), &mesh, &LoadPretrained::new())?;
                model.eval();
                let (inputs, wanted) = expected(kind)?;
                let logits: Tensor = no_grad(|| model.call(args![&inputs]))?;
                assert_logits(&logits, &wanted, &format!("{kind}, {ranks} ranks"))?;
                let options = SavePretrained::new().max_file_bytes(9000);
                model.save_pretrained(&saved.0, &config, &mesh, &options)
            })?;
            assert_same_files(&saved.0, &reference(kind))?;
        }
    }
    Ok(())
}

#[test]
fn files_of_pytorch_half_precision_and_mistakes() -> Result<()> {
    let config = read_pretrained_config(reference("gpt2"), false)?;
    let (half, odd) = (Folder::new("half"), Folder::new("odd"));
    std::fs::create_dir_all(&odd.0).unwrap();
    std::fs::write(odd.0.join("config.json"), config.replacen('{', r#"{"quite_new": 1,"#, 1))
        .unwrap();
    let error = read_pretrained_config(&odd.0, false).unwrap_err();
    assert!(error.message().starts_with("read_pretrained_config: "), "{error}");
    assert!(error.message().contains("quite_new"), "{error}");
    assert!(read_pretrained_config(&odd.0, true)?.contains("quite_new"));
    World::threads(2).run(|world| {
        let mesh = world.device_mesh(&[("tp", 2)])?;
        let model = NativeModule::new("gpt2", &config)?;
        model.distribute(&mesh, &ParameterPlan::new(), Source::default())?;
        model.load_pretrained(&reference("gpt2_bin"), &mesh, &LoadPretrained::new())?;
        model.eval();
        let (inputs, wanted) = expected("gpt2")?;
        assert_logits(&no_grad(|| model.call(args![&inputs]))?, &wanted, "gpt2_bin")?;
        let options = SavePretrained::new().dtype(DType::Bf16);
        model.save_pretrained(&half.0, &config, &mesh, &options)?;
        let error = model.save_pretrained(&half.0, &config, &mesh, &options).unwrap_err();
        assert_eq!(error.code(), Code::AlreadyExists);
        assert!(error.message().starts_with("Module::save_pretrained: "), "{error}");
        let strict = LoadPretrained::new();
        let error = model.load_pretrained(&reference("llama"), &mesh, &strict).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains("missing: ") && error.message().contains("unexpected: "));
        let error = model.load_pretrained(&odd.0.join("none"), &mesh, &strict).unwrap_err();
        assert_eq!(error.code(), Code::NotFound, "{error}");
        assert!(error.message().starts_with("Module::load_pretrained: "), "{error}");
        assert_logits(&no_grad(|| model.call(args![&inputs]))?, &wanted, "after errors")?;
        let lenient = LoadPretrained::new().allow_missing(true).allow_unexpected(true);
        let lenient = lenient.allow_unknown(true);
        let loaded = model.load_pretrained(&reference("llama"), &mesh, &lenient)?;
        assert!(loaded.json.contains(r#""unexpected":["#), "{}", loaded.json);
        let other = read_pretrained_config(reference("vit"), false)?;
        let options = SavePretrained::new().max_file_bytes(0);
        let error = model.save_pretrained(&odd.0.join("x"), &other, &mesh, &options).unwrap_err();
        assert!(error.message().contains("max_file_bytes"), "{error}");
        let error = model.save_pretrained(&odd.0.join("x"), &other, &mesh, &SavePretrained::new());
        assert!(error.unwrap_err().message().contains("is of another model"));
        Ok(())
    })?;
    let file = Safetensors::open(&half.0)?;
    assert!(file.tensors()?.iter().all(|tensor| tensor.dtype == DType::Bf16));
    Ok(())
}
