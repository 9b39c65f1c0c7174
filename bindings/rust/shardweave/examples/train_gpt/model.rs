//! A byte-level GPT, written for one device: nothing in it knows of ranks or meshes.
//!
//!     let model = Gpt::new(&GptOptions { layers: 2, dim: 64, heads: 4, seq: 64 }, /*seed=*/ 1)?;
//!     let loss = model.loss(&tokens, &targets)?; // both [batch, seq], i64
//!     loss.backward()?;

use std::sync::Mutex;

use shardweave::nn::{self, Layer};
use shardweave::{manual_seed, Module, Result, Tensor};

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

#[derive(Module)]
struct Block {
    head_dim: i64,
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
    fn new(options: &GptOptions) -> Result<Block> {
        let dim = options.dim;
        Ok(Block {
            head_dim: dim / options.heads,
            norm1: nn::LayerNorm::new(dim)?,
            q: nn::Linear::new(dim, dim)?,
            k: nn::Linear::new(dim, dim)?,
            v: nn::Linear::new(dim, dim)?,
            o: nn::Linear::new(dim, dim)?,
            norm2: nn::LayerNorm::new(dim)?,
            up: nn::Linear::new(dim, 4 * dim)?,
            down: nn::Linear::new(4 * dim, dim)?,
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
}

impl Layer for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (x + self.attention(&self.norm1.forward(x)?))?;
        &x + self.down.forward(&self.up.forward(&self.norm2.forward(&x)?)?.gelu()?)
    }
}

#[derive(Module)]
pub struct Gpt {
    tokens: nn::Embedding,
    positions: nn::Embedding,
    blocks: Vec<Block>,
    norm: nn::LayerNorm,
    head: nn::Linear,
    /// 0 .. seq - 1, on the mesh with the parameters.
    #[module(buffer)]
    index: Tensor,
}

/// Plain tensors draw from the process' one generator: rank threads take turns.
static GENERATOR: Mutex<()> = Mutex::new(());

impl Gpt {
    /// With weights that only the seed decides.
    pub fn new(options: &GptOptions, seed: u64) -> Result<Gpt> {
        let model = nn::init::skip(|| Gpt::zeros(options))?;
        let _turn = GENERATOR.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        manual_seed(seed)?;
        for (name, weight) in model.parameters() {
            if let [_, inputs] = weight.sizes()?[..] {
                let is_table = name == "tokens.weight" || name == "positions.weight";
                let std = if is_table { 0.3 } else { 0.5 / (inputs as f64).sqrt() };
                nn::init::normal_(&weight, 0.0, std)?;
            }
        }
        Ok(model)
    }

    fn zeros(options: &GptOptions) -> Result<Gpt> {
        Ok(Gpt {
            tokens: nn::Embedding::new(VOCABULARY, options.dim)?,
            positions: nn::Embedding::new(options.seq, options.dim)?,
            blocks: (0..options.layers).map(|_| Block::new(options)).collect::<Result<_>>()?,
            norm: nn::LayerNorm::new(options.dim)?,
            head: nn::Linear::without_bias(options.dim, VOCABULARY)?,
            index: Tensor::arange(options.seq)?,
        })
    }

    /// The mean cross entropy, in nats per byte.
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let scores = self.forward(tokens)?.view(&[-1, VOCABULARY])?;
        scores.cross_entropy(&targets.view(&[-1])?)
    }
}

impl Layer for Gpt {
    /// Scores of the next byte, [batch, seq, VOCABULARY], for tokens [batch, seq].
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let positions = self.positions.forward(&self.index.i(..tokens.size(1)?)?)?;
        let mut x = (self.tokens.forward(tokens) + positions)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.head.forward(&self.norm.forward(&x)?)
    }
}
