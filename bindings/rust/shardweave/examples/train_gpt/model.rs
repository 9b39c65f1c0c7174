//! A byte-level GPT, written for one device: nothing in it knows of ranks or meshes.
//!
//!     let model = Gpt::new(&GptOptions { layers: 2, dim: 64, heads: 4, seq: 64 }, /*seed=*/ 1)?;
//!     let loss = model.loss(&tokens, &targets)?; // both [batch, seq], i64
//!     loss.backward()?;

use std::sync::Mutex;

use shardweave::{manual_seed, no_grad, Members, Module, Result, Tensor, TensorOptions};

/// Bytes.
pub const VOCABULARY: i64 = 256;

pub struct GptOptions {
    pub layers: i64,
    pub dim: i64,
    /// They divide `dim`.
    pub heads: i64,
    /// The longest sequence.
    pub seq: i64,
}

fn parameter(value: f64, sizes: &[i64]) -> Result<Tensor> {
    TensorOptions::new().requires_grad(true).full(sizes, value)
}

struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    fn new(inputs: i64, outputs: i64) -> Result<Linear> {
        Ok(Linear {
            bias: Some(parameter(0.0, &[outputs])?),
            ..Linear::without_bias(inputs, outputs)?
        })
    }

    fn without_bias(inputs: i64, outputs: i64) -> Result<Linear> {
        let weight = parameter(0.0, &[outputs, inputs])?;
        no_grad(|| weight.normal_(0.0, 0.5 / (inputs as f64).sqrt()))?;
        Ok(Linear { weight, bias: None })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.linear(&self.weight, self.bias.as_ref())
    }
}

impl Module for Linear {
    fn members(&self, members: &mut Members) {
        members.parameter("weight", &self.weight);
        if let Some(bias) = &self.bias {
            members.parameter("bias", bias);
        }
    }
}

struct Embedding(Tensor);

impl Embedding {
    fn new(rows: i64, dim: i64) -> Result<Embedding> {
        let weight = parameter(0.0, &[rows, dim])?;
        no_grad(|| weight.normal_(0.0, 0.3))?;
        Ok(Embedding(weight))
    }

    fn forward(&self, indices: &Tensor) -> Result<Tensor> {
        self.0.embedding(indices)
    }
}

impl Module for Embedding {
    fn members(&self, members: &mut Members) {
        members.parameter("weight", &self.0);
    }
}

struct LayerNorm {
    dim: i64,
    weight: Tensor,
    bias: Tensor,
}

impl LayerNorm {
    fn new(dim: i64) -> Result<LayerNorm> {
        Ok(LayerNorm { dim, weight: parameter(1.0, &[dim])?, bias: parameter(0.0, &[dim])? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.layer_norm(&[self.dim], Some(&self.weight), Some(&self.bias), 1e-5)
    }
}

impl Module for LayerNorm {
    fn members(&self, members: &mut Members) {
        members.parameter("weight", &self.weight);
        members.parameter("bias", &self.bias);
    }
}

struct Block {
    head_dim: i64,
    norm1: LayerNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(options: &GptOptions) -> Result<Block> {
        let dim = options.dim;
        Ok(Block {
            head_dim: dim / options.heads,
            norm1: LayerNorm::new(dim)?,
            q: Linear::new(dim, dim)?,
            k: Linear::new(dim, dim)?,
            v: Linear::new(dim, dim)?,
            o: Linear::new(dim, dim)?,
            norm2: LayerNorm::new(dim)?,
            up: Linear::new(dim, 4 * dim)?,
            down: Linear::new(4 * dim, dim)?,
        })
    }

    fn attention(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, seq) = (x.size(0)?, x.size(1)?);
        let heads = |y: Tensor| -> Result<Tensor> {
            y.view(&[batch, seq, -1, self.head_dim])?.transpose(1, 2)
        };
        let (q, k, v) = (self.q.forward(x)?, self.k.forward(x)?, self.v.forward(x)?);
        let y = heads(q)?.scaled_dot_product_attention(&heads(k)?, &heads(v)?, None, 0.0, true)?;
        self.o.forward(&y.transpose(1, 2)?.reshape(&[batch, seq, -1])?)
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = (x + self.attention(&self.norm1.forward(x)?)?)?;
        let mlp = self.down.forward(&self.up.forward(&self.norm2.forward(&y)?)?.gelu()?)?;
        y + mlp
    }
}

impl Module for Block {
    fn members(&self, members: &mut Members) {
        members.child("norm1", &self.norm1);
        members.child("q", &self.q);
        members.child("k", &self.k);
        members.child("v", &self.v);
        members.child("o", &self.o);
        members.child("norm2", &self.norm2);
        members.child("up", &self.up);
        members.child("down", &self.down);
    }
}

pub struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
    /// 0 .. seq - 1. A buffer, so that it lies on the mesh with the parameters.
    index: Tensor,
}

/// Plain tensors draw from the process' one generator: rank threads take turns.
static GENERATOR: Mutex<()> = Mutex::new(());

impl Gpt {
    /// With weights that only the seed decides.
    pub fn new(options: &GptOptions, seed: u64) -> Result<Gpt> {
        let _turn = GENERATOR.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        manual_seed(seed)?;
        Ok(Gpt {
            tokens: Embedding::new(VOCABULARY, options.dim)?,
            positions: Embedding::new(options.seq, options.dim)?,
            blocks: (0..options.layers).map(|_| Block::new(options)).collect::<Result<_>>()?,
            norm: LayerNorm::new(options.dim)?,
            head: Linear::without_bias(options.dim, VOCABULARY)?,
            index: Tensor::arange(options.seq)?,
        })
    }

    /// Scores of the next byte, [batch, seq, VOCABULARY], for tokens [batch, seq].
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let positions = self.index.narrow(0, 0, tokens.size(1)?)?;
        let mut x = (self.tokens.forward(tokens)? + self.positions.forward(&positions)?)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.head.forward(&self.norm.forward(&x)?)
    }

    /// The mean cross entropy, in nats per byte.
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let scores = self.forward(tokens)?.view(&[-1, VOCABULARY])?;
        scores.cross_entropy(&targets.view(&[-1])?)
    }
}

impl Module for Gpt {
    fn members(&self, members: &mut Members) {
        members.buffer("index", &self.index);
        members.child("tokens", &self.tokens);
        members.child("positions", &self.positions);
        members.child("blocks", &self.blocks);
        members.child("norm", &self.norm);
        members.child("head", &self.head);
    }
}
