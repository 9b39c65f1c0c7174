//! Modules of the library's own, by their kinds.

use std::ptr::NonNull;
use std::rc::Rc;

use shardweave_sys as sys;

use crate::autograd::Mode;
use crate::error::{Of, Result};
use crate::ffi::c_text;
use crate::members::Members;
use crate::module::Module;
use crate::module_handle::{members_of_handle, ModuleHandle};
use crate::op::{call_module, Arg, FromResults};
use crate::source::called_here;
use crate::tensor::Tensor;

/// A module of the library's, written in C++: a layer of LibTorch's or a model, by its kind and the
/// options that it has in PyTorch or Hugging Face's transformers. It is distributed and trained like
/// any [`Module`](trait@Module), also as a field of one.
///
/// ```
/// use shardweave::{args, Module, NativeModule, ParameterPlan, Placement::*, Source, Tensor, World};
///
/// World::threads(2).run(|world| {
///     let mesh = world.device_mesh(&[("tp", 2)])?;
///     let linear = NativeModule::new("Linear", r#"{"in_features": 3, "out_features": 5}"#)?;
///     let plan = ParameterPlan::new().line("*", &[("tp", Shard(0))]);
///     linear.distribute(&mesh, &plan, Source::default())?;
///     let x = Tensor::ones(&[4, 3])?.distribute(&mesh, [("tp", Replicate)])?;
///     let y: Tensor = linear.call(args![&x])?;
///     assert_eq!((y.sizes()?, y.layout()?.to_string()), (vec![4, 5], "[S(1)]".to_owned()));
///     Ok(())
/// })?;
///
/// let error = NativeModule::new("Linear", r#"{"in_feature": 3}"#).unwrap_err();
/// assert!(error.message().contains("did you mean 'in_features'?"), "{error}");
/// # Ok::<(), shardweave::Error>(())
/// ```
///
/// Kinds are Linear, Embedding, EmbeddingBag, LayerNorm, RMSNorm, BatchNorm1d, BatchNorm2d,
/// GroupNorm, Conv1d, Conv2d, Dropout, ReLU, GELU, SiLU, MultiheadAttention,
/// TransformerEncoderLayer, TransformerDecoderLayer, LSTM, Sequential, gpt2, llama, mixtral, vit:
/// `swv_module_create_by_kind` in `shardweave.h` says what they take.
///
/// Parameters are drawn as PyTorch draws them, from the process
/// ([`manual_seed`](crate::manual_seed)), which rank threads share;
/// [`Module::initialize`](crate::Module::initialize) leaves them alone.
///
/// Belongs to its rank: neither `Send` nor `Sync`, as its tensors. A clone is the same module.
#[derive(Clone)]
pub struct NativeModule(Rc<ModuleHandle>);

debug_by_name!(NativeModule);

impl NativeModule {
    /// Of this kind. `options` is a JSON object; `""` has none. An error lists the kinds, or the
    /// kind's options, and says which are nearly the same.
    pub fn new(kind: &str, options: &str) -> Result<NativeModule> {
        const NAME: &str = "NativeModule::new";
        let kind = c_text(kind, "kind").of(NAME)?;
        let options = c_text(options, "options").of(NAME)?;
        create!(swv_module_create_by_kind(kind.as_ptr(), options.as_ptr())).map(NativeModule::own)
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::swv_module {
        self.0.as_ptr()
    }

    pub(crate) fn own(handle: NonNull<sys::swv_module>) -> NativeModule {
        NativeModule(Rc::new(ModuleHandle::from_handle(handle)))
    }

    /// The module of this name inside of it, "layers.0.mlp"; `""` is the module itself.
    ///
    /// ```
    /// use shardweave::{Module, NativeModule};
    /// let options = r#"{"layers": [{"kind": "Linear", "in_features": 3, "out_features": 5}]}"#;
    /// let model = NativeModule::new("Sequential", options)?;
    /// let first = model.child("0")?;
    /// assert!(first.parameters()[0].1.is_same(&model.parameters()[0].1)?);
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn child(&self, name: &str) -> Result<NativeModule> {
        let name = c_text(name, "name").of("NativeModule::child")?;
        create!(swv_module_child(self.0.as_ptr(), name.as_ptr())).map(NativeModule::own)
    }

    /// Its forward. Collective where tensors are sharded.
    #[track_caller]
    pub fn call<R: FromResults>(&self, arguments: &[Arg<'_>]) -> Result<R> {
        call_module(self.0.as_ptr(), "forward", arguments).of("NativeModule::call")
    }

    /// The same with further arguments by name.
    ///
    /// ```
    /// use shardweave::{args, NativeModule, Tensor};
    /// let attention = NativeModule::new("MultiheadAttention", r#"{"embed_dim": 4, "num_heads": 2}"#)?;
    /// let x = Tensor::ones(&[3, 1, 4])?;
    /// let need_weights = [("need_weights", false.into())];
    /// let (y, _): (Tensor, Option<Tensor>) = attention.call_named(args![&x, &x, &x], &need_weights)?;
    /// assert_eq!(y.sizes()?, [3, 1, 4]);
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    #[track_caller]
    pub fn call_named<R: FromResults>(
        &self,
        arguments: &[Arg<'_>],
        named: &[(&str, Arg<'_>)],
    ) -> Result<R> {
        const NAME: &str = "NativeModule::call_named";
        let _here = called_here();
        let method = c_text("forward", "method")?;
        let texts = named.iter().map(|(name, _)| c_text(name, "argument"));
        let texts = texts.collect::<Result<Vec<_>>>().of(NAME)?;
        let names: Vec<_> = texts.iter().map(|name| name.as_ptr()).collect();
        let mut all = arguments.to_vec();
        all.extend(named.iter().map(|(_, value)| *value));
        R::receive(|out, capacity, count| {
            call!(swv_module_call_named(
                self.0.as_ptr(),
                method.as_ptr(),
                Mode::current(),
                all.as_ptr().cast(),
                all.len(),
                names.as_ptr(),
                names.len(),
                out,
                capacity,
                count,
            ))
        })
        .of(NAME)
    }

    /// Whether it is in training mode, as it is at first; [`Module::train`](crate::Module::train)
    /// and [`Module::eval`](crate::Module::eval) switch it.
    pub fn is_training(&self) -> Result<bool> {
        let training = get!(swv_module_is_training(self.0.as_ptr()) -> i32);
        Ok(training.of("NativeModule::is_training")? == 1)
    }
}

impl Module for NativeModule {
    fn members(&self, members: &mut Members) {
        let (parameters, buffers) = members_of_handle(&self.0).expect("what it has, it gives");
        let is_persistent = |i| {
            get!(swv_module_buffer_is_persistent(self.0.as_ptr(), i) -> i32).expect("it has that")
                == 1
        };
        let computed = (0..buffers.len()).filter(|i| !is_persistent(*i));
        let computed: Vec<_> = computed.map(|i| buffers[i].0.as_str()).collect();
        members.native(&self.0, &parameters, &buffers, &computed);
    }
}

impl crate::nn::Layer for NativeModule {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.call(&[x.into()])
    }
}
