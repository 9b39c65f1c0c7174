//! Llama, written for one device: nothing in it knows of ranks or meshes. The names of its fields
//! are those of Hugging Face's checkpoints.

use std::fs;
use std::path::Path;

use serde_json::Value;
use shardweave::nn::{self, AttentionOptions, Layer, RopeScaling, RotaryOptions};
use shardweave::{Code, Error, Module, Result, Tensor};

/// Of a Hugging Face config.json.
pub struct Config {
    pub vocab_size: i64,
    hidden_size: i64,
    intermediate_size: i64,
    layers: i64,
    heads: i64,
    kv_heads: i64,
    head_dim: i64,
    eps: f64,
    theta: f64,
    scaling: RopeScaling,
    pub positions: i64,
    attention_bias: bool,
    mlp_bias: bool,
    tied: bool,
}

impl Config {
    pub fn read(path: &Path) -> Result<Config> {
        let of = |error: Error| error.context(path.display());
        let text = fs::read_to_string(path).map_err(|error| of(error.into()))?;
        let wrong = |what: String| of(Error::new(Code::InvalidArgument, what));
        let json: Value = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        let integer = |name: &str, default: Option<i64>| {
            json.get(name).and_then(Value::as_i64).or(default).filter(|size| *size > 0).ok_or_else(
                || wrong(format!("'{name}' is {:?}; wanted an integer above 0", json.get(name))),
            )
        };
        let flag = |name: &str| json.get(name).and_then(Value::as_bool).unwrap_or(false);
        let number = |of: &Value, name: &str, default: f64| {
            of.get(name).and_then(Value::as_f64).unwrap_or(default)
        };
        let (hidden_size, heads) =
            (integer("hidden_size", None)?, integer("num_attention_heads", None)?);
        // Newer files have all of it in "rope_parameters".
        let rope = json.get("rope_parameters").or_else(|| json.get("rope_scaling"));
        let rope = rope.unwrap_or(&Value::Null);
        let kind = rope.get("rope_type").or_else(|| rope.get("type")).and_then(Value::as_str);
        let scaling = match kind {
            None | Some("default") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: number(rope, "factor", 1.0) },
            Some("llama3") => RopeScaling::Llama3 {
                factor: number(rope, "factor", 8.0),
                low_freq_factor: number(rope, "low_freq_factor", 1.0),
                high_freq_factor: number(rope, "high_freq_factor", 4.0),
                original_max_position_embeddings: number(
                    rope,
                    "original_max_position_embeddings",
                    8192.0,
                ),
            },
            Some(other) => {
                let what = format!("rope_type '{other}'; wanted default, linear or llama3");
                return Err(wrong(what));
            }
        };
        Ok(Config {
            vocab_size: integer("vocab_size", None)?,
            hidden_size,
            intermediate_size: integer("intermediate_size", None)?,
            layers: integer("num_hidden_layers", None)?,
            heads,
            kv_heads: integer("num_key_value_heads", Some(heads))?,
            head_dim: integer("head_dim", Some(hidden_size / heads))?,
            eps: number(&json, "rms_norm_eps", 1e-6),
            theta: number(rope, "rope_theta", number(&json, "rope_theta", 10000.0)),
            scaling,
            positions: integer("max_position_embeddings", Some(2048))?,
            attention_bias: flag("attention_bias"),
            mlp_bias: flag("mlp_bias"),
            tied: flag("tie_word_embeddings"),
        })
    }
}

#[derive(Module)]
struct Mlp {
    gate_proj: nn::Linear,
    up_proj: nn::Linear,
    down_proj: nn::Linear,
}

impl Layer for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gated = (self.gate_proj.forward(x)?.silu()? * self.up_proj.forward(x))?;
        self.down_proj.forward(&gated)
    }
}

#[derive(Module)]
struct DecoderLayer {
    input_layernorm: nn::RmsNorm,
    self_attn: nn::Attention,
    post_attention_layernorm: nn::RmsNorm,
    mlp: Mlp,
}

impl DecoderLayer {
    fn forward(&self, x: &Tensor, rotary: &nn::Rotary) -> Result<Tensor> {
        let y = self.input_layernorm.forward(x)?;
        let x = (x + self.self_attn.forward_with(&y, Some(rotary), None))?;
        &x + self.mlp.forward(&self.post_attention_layernorm.forward(&x)?)
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
pub struct Llama {
    model: Decoder,
    /// None: the embedding's table is used again.
    lm_head: Option<nn::Linear>,
}

impl Llama {
    pub fn new(config: &Config, seq: i64) -> Result<Llama> {
        let (dim, inner) = (config.hidden_size, config.intermediate_size);
        let attention = AttentionOptions::new(dim, config.heads)
            .kv_heads(config.kv_heads)
            .head_dim(config.head_dim)
            .bias(config.attention_bias)
            .causal(true);
        let layer = |_| {
            Ok(DecoderLayer {
                input_layernorm: nn::RmsNorm::new(dim, config.eps)?,
                self_attn: attention.build()?,
                post_attention_layernorm: nn::RmsNorm::new(dim, config.eps)?,
                mlp: Mlp {
                    gate_proj: nn::Linear::with_bias(dim, inner, config.mlp_bias)?,
                    up_proj: nn::Linear::with_bias(dim, inner, config.mlp_bias)?,
                    down_proj: nn::Linear::with_bias(inner, dim, config.mlp_bias)?,
                },
            })
        };
        let rotary = RotaryOptions::new(config.head_dim, seq).theta(config.theta);
        let lm_head = || nn::Linear::without_bias(dim, config.vocab_size);
        Ok(Llama {
            model: Decoder {
                embed_tokens: nn::Embedding::new(config.vocab_size, dim)?,
                layers: (0..config.layers).map(layer).collect::<Result<_>>()?,
                norm: nn::RmsNorm::new(dim, config.eps)?,
                rotary: rotary.scaling(config.scaling).build()?,
            },
            lm_head: if config.tied { None } else { Some(lm_head()?) },
        })
    }

    /// The mean cross entropy of the next token.
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let scores = self.forward(tokens)?.flatten(0, 1)?;
        scores.cross_entropy(&targets.flatten(0, 1)?)
    }
}

impl Layer for Llama {
    /// Scores of the next token, [batch, seq, vocabulary], for tokens [batch, seq].
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let mut x = self.model.embed_tokens.forward(tokens)?;
        for layer in &self.model.layers {
            x = layer.forward(&x, &self.model.rotary)?;
        }
        let x = self.model.norm.forward(&x)?;
        match &self.lm_head {
            Some(head) => head.forward(&x),
            None => x.linear(&self.model.embed_tokens.weight, None),
        }
    }
}
