//! Token files, and batches of them that are read ahead.

use std::fmt;
use std::path::Path;

use shardweave_sys as sys;

use crate::dtype::{number_of, DType};
use crate::error::{Of, Result};
use crate::ffi::{c_path, c_text};
use crate::layout::{IntoLayout, Layout};
use crate::mesh::Mesh;
use crate::tensor::Tensor;

handle! {
    /// A file of token ids, read where it lies: one that `tools/tokenize` has written, or a plain one.
    ///
    /// ```
    /// use shardweave::{DType, TokenFile};
    /// let path = std::env::temp_dir().join("shardweave_doc_token_file");
    /// std::fs::write(&path, "some text")?;
    /// let text = TokenFile::open_plain(&path, DType::U8)?; // its tokens are its bytes
    /// let mut tokens = [0; 4];
    /// text.read(5, &mut tokens)?;
    /// assert_eq!(tokens, [116, 101, 120, 116]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    TokenFile, swv_token_file, swv_token_file_free
}

// SAFETY: files belong to no rank, and do not change; any thread may use and end them
// (shardweave.h, "Data").
unsafe impl Send for TokenFile {}
// SAFETY: as above.
unsafe impl Sync for TokenFile {}

impl TokenFile {
    /// One with a header, which says what the tokens are.
    pub fn open(path: impl AsRef<Path>) -> Result<TokenFile> {
        TokenFile::opened(path.as_ref(), None).of("TokenFile::open")
    }

    /// One of nothing but tokens: a text ([`DType::U8`]), a `.bin` of nanoGPT ([`DType::U16`]), or
    /// [`DType::U32`].
    pub fn open_plain(path: impl AsRef<Path>, dtype: DType) -> Result<TokenFile> {
        TokenFile::opened(path.as_ref(), Some(dtype)).of("TokenFile::open_plain")
    }

    fn opened(path: &Path, dtype: Option<DType>) -> Result<TokenFile> {
        let path = c_path(path)?;
        let file = create!(swv_token_file_open(path.as_ptr(), number_of(dtype)))?;
        Ok(TokenFile::from_handle(file))
    }

    /// How many tokens there are; never 0.
    pub fn num_tokens(&self) -> Result<i64> {
        get!(swv_token_file_num_tokens(self.as_ptr()) -> i64)
    }

    /// Of a token: [`DType::U8`], [`DType::U16`] or [`DType::U32`].
    pub fn dtype(&self) -> Result<DType> {
        DType::from_number(get!(swv_token_file_dtype(self.as_ptr()) -> i32)?)
    }

    /// Every token is smaller. None: not known.
    pub fn vocab_size(&self) -> Result<Option<i64>> {
        let size = get!(swv_token_file_vocab_size(self.as_ptr()) -> i64)?;
        Ok(Some(size).filter(|size| *size != 0))
    }

    /// As many tokens as there is room for, from `begin` on.
    pub fn read(&self, begin: i64, tokens: &mut [i64]) -> Result<()> {
        call!(swv_token_file_read(self.as_ptr(), begin, tokens.as_mut_ptr(), tokens.len()))
    }
}

impl fmt::Debug for TokenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenFile").field("num_tokens", &self.num_tokens().ok()).finish()
    }
}

/// What [`TokenLoader`] reads: samples of `seq` tokens, `batch` of them at a time, of all ranks
/// together; shuffled, without end, two batches ahead.
#[derive(Debug)]
pub struct TokenLoaderOptions {
    raw: sys::swv_loader_options,
    place: Option<(Mesh, Layout)>,
}

impl TokenLoaderOptions {
    /// Of samples and batches.
    pub fn new(seq: i64, batch: i64) -> TokenLoaderOptions {
        let raw = sys::swv_loader_options { seq, batch, ..sys::SWV_LOADER_OPTIONS_INIT };
        TokenLoaderOptions { raw, place: None }
    }

    /// Batches are sharded tensors of `[batch, seq]`, cut by `S(0)`, `S(1)` and `R`. Loaders are made
    /// collectively then.
    pub fn on(mut self, mesh: &Mesh, layout: impl IntoLayout) -> Result<TokenLoaderOptions> {
        self.place = Some((mesh.clone(), layout.into_layout(mesh).of("TokenLoaderOptions::on")?));
        Ok(self)
    }

    /// Plain tensors, of one of `count` parts of each batch's rows; without it of all.
    pub fn part(mut self, index: i64, count: i64) -> TokenLoaderOptions {
        (self.raw.part, self.raw.num_parts) = (index, count);
        self
    }

    /// Of the shuffles, another one in each epoch.
    pub fn seed(mut self, seed: u64) -> TokenLoaderOptions {
        self.raw.seed = seed;
        self
    }

    /// Every epoch goes from the first sample to the last.
    pub fn in_order(mut self) -> TokenLoaderOptions {
        self.raw.in_order = 1;
        self
    }

    /// The loader ends after so many. Its last batch may be smaller.
    pub fn epochs(mut self, epochs: i64) -> TokenLoaderOptions {
        self.raw.epochs = epochs;
        self
    }

    /// The last batch is left out if it is not whole.
    pub fn drop_last(mut self) -> TokenLoaderOptions {
        self.raw.drop_last = 1;
        self
    }

    /// How many batches are read ahead, by a thread; 0: none, and there is no thread.
    pub fn prefetch(mut self, batches: i32) -> TokenLoaderOptions {
        self.raw.prefetch = batches;
        self
    }
}

/// Of [`TokenLoader`]: of `DType::I64`, `[samples, seq]`.
#[derive(Debug)]
#[non_exhaustive]
pub struct TokenBatch {
    /// What the model gets.
    pub tokens: Tensor,
    /// What it is to say: one token further on.
    pub targets: Tensor,
}

handle! {
    /// Batches of token files, an iterator. What a batch consists of is the same on any number of
    /// ranks, which read their parts of it and no more; a loader goes on at another one's
    /// [`position`](TokenLoader::position), on any number of ranks.
    ///
    /// ```
    /// use shardweave::{DType, Placement::*, TokenFile, TokenLoader, TokenLoaderOptions, World};
    /// let path = std::env::temp_dir().join("shardweave_doc_token_loader");
    /// std::fs::write(&path, "Once upon a time there was a loader of many small batches.")?;
    /// let file = TokenFile::open_plain(&path, DType::U8)?;
    ///
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("dp", 2)])?;
    ///     let options = || TokenLoaderOptions::new(8, 3).seed(7).on(&mesh, [("dp", Shard(0))]);
    ///     let mut loader = TokenLoader::new(&[&file], &options()?)?;
    ///     let first = loader.next().unwrap()?;
    ///     assert_eq!(first.tokens.sizes()?, [3, 8]);
    ///
    ///     let position = loader.position()?; // for a checkpoint
    ///     let mut resumed = TokenLoader::new(&[&file], &options()?)?;
    ///     resumed.set_position(&position)?;
    ///     let (a, b) = (loader.next().unwrap()?, resumed.next().unwrap()?);
    ///     assert_eq!(a.tokens.full_tensor()?.to_vec::<i64>()?, b.tokens.full_tensor()?.to_vec()?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// An error of a file comes in the place of its batch, on the rank that has read it alone, and
    /// stays until [`set_position`](TokenLoader::set_position). Belongs to its rank: neither `Send` nor
    /// `Sync`.
    TokenLoader, swv_loader, swv_loader_free
}

debug_by_name!(TokenLoader);

impl TokenLoader {
    /// Of files one behind the other. A sample is of one file: `seq` tokens, and one more as the last
    /// target.
    pub fn new(files: &[&TokenFile], options: &TokenLoaderOptions) -> Result<TokenLoader> {
        let files: Vec<*const sys::swv_token_file> =
            files.iter().map(|file| file.as_ptr() as *const _).collect();
        let mut raw = options.raw;
        if let Some((mesh, layout)) = &options.place {
            raw.mesh = mesh.as_ptr();
            raw.layout = layout.as_ptr();
        }
        let loader = create!(swv_loader_create(files.as_ptr(), files.len(), &raw))?;
        Ok(TokenLoader::from_handle(loader))
    }

    /// Of one pass through the files.
    pub fn num_samples(&self) -> Result<i64> {
        get!(swv_loader_num_samples(self.as_ptr()) -> i64)
    }

    /// Where the next batch begins, as JSON, whatever was read ahead.
    pub fn position(&self) -> Result<String> {
        text!(swv_loader_position(self.as_ptr()))
    }

    /// Goes on there. The position is one of a loader of the same files, `seq` and seed, on any number
    /// of ranks, of any batch. Collective on a mesh.
    pub fn set_position(&mut self, position: &str) -> Result<()> {
        let position = c_text(position, "position")?;
        call!(swv_loader_set_position(self.as_ptr(), position.as_ptr()))
    }

    fn next_batch(&mut self) -> Result<Option<TokenBatch>> {
        let mut tokens = std::ptr::null_mut();
        let targets = create_or_none!(swv_loader_next(self.as_ptr(), &mut tokens))?;
        let pair = std::ptr::NonNull::new(tokens).zip(targets);
        Ok(pair.map(|(tokens, targets)| TokenBatch {
            tokens: Tensor::from_handle(tokens),
            targets: Tensor::from_handle(targets),
        }))
    }
}

/// Ends with the last epoch. After an error it is the same error again.
impl Iterator for TokenLoader {
    type Item = Result<TokenBatch>;

    fn next(&mut self) -> Option<Result<TokenBatch>> {
        self.next_batch().transpose()
    }
}
