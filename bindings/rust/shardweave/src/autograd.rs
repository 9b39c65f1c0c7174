//! Gradients.
#![allow(clippy::declare_interior_mutable_const)] // Clippy 1.63 means thread_local's insides

use std::cell::Cell;
use std::ffi::{c_void, CString};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::thread::{self, ThreadId};

use shardweave_sys as sys;

use crate::dtype::DType;
use crate::error::{Code, Error, Result};
use crate::ffi::{c_text, panic_error, status_of, without_panics};
use crate::source::called_here;
use crate::tensor::Tensor;

/// Whether what is called is recorded for gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[repr(i32)]
pub enum GradMode {
    /// If an input requires grad.
    Grad = sys::SWV_MODE_GRAD,
    /// Not.
    NoGrad = sys::SWV_MODE_NO_GRAD,
    /// Not at all, ever: the results cannot take part in a recorded call later.
    Inference = sys::SWV_MODE_INFERENCE,
}

/// What the C interface takes as an argument of each call: a [`GradMode`], and what is cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mode {
    recording: GradMode,
    autocast: i32,
}

thread_local! {
    /// Of this thread. The C interface remembers nothing; here it is what the innermost `no_grad`,
    /// `inference` and `autocast` around the call say, which cannot move to another thread while it
    /// runs.
    static MODE: Cell<Mode> =
        const { Cell::new(Mode { recording: GradMode::Grad, autocast: 0 }) };
}

impl Mode {
    /// Of hooks, whatever is around what calls them.
    pub(crate) const NO_GRAD: Mode = Mode { recording: GradMode::NoGrad, autocast: 0 };

    /// Around this call, as the C interface wants it.
    #[inline]
    pub(crate) fn current() -> i32 {
        let mode = MODE.with(Cell::get);
        mode.recording as i32 | mode.autocast
    }

    /// Of a callback.
    pub(crate) fn from_number(number: i32) -> Result<Mode> {
        let either = sys::SWV_MODE_AUTOCAST_F16 | sys::SWV_MODE_AUTOCAST_BF16;
        let autocast = number & either;
        let recording = match number - autocast {
            _ if autocast == either => return Err(Error::newer_library("mode", number)),
            sys::SWV_MODE_GRAD => GradMode::Grad,
            sys::SWV_MODE_NO_GRAD => GradMode::NoGrad,
            sys::SWV_MODE_INFERENCE => GradMode::Inference,
            _ => return Err(Error::newer_library("mode", number)),
        };
        Ok(Mode { recording, autocast })
    }

    /// Calls `body` in it.
    pub(crate) fn around<R>(self, body: impl FnOnce() -> R) -> R {
        struct Restore(Mode);
        impl Drop for Restore {
            fn drop(&mut self) {
                MODE.with(|current| current.set(self.0));
            }
        }
        let _restore = Restore(MODE.with(|current| current.replace(self)));
        body()
    }
}

impl GradMode {
    /// Of the innermost [`no_grad`] or [`inference`] around the call, else [`GradMode::Grad`].
    #[inline]
    pub fn current() -> GradMode {
        MODE.with(Cell::get).recording
    }
}

/// Calls `body` in a mode.
///
/// ```
/// use shardweave::{with_grad_mode, GradMode, TensorOptions};
/// let x = TensorOptions::new().requires_grad(true).ones(&[2])?;
/// let y = with_grad_mode(GradMode::NoGrad, || &x * 2.0)?;
/// assert!(!y.requires_grad()?);
/// # Ok::<(), shardweave::Error>(())
/// ```
pub fn with_grad_mode<R>(mode: GradMode, body: impl FnOnce() -> R) -> R {
    Mode { recording: mode, ..MODE.with(Cell::get) }.around(body)
}

/// Calls `body` without recording anything for gradients.
pub fn no_grad<R>(body: impl FnOnce() -> R) -> R {
    with_grad_mode(GradMode::NoGrad, body)
}

/// The same where the results will never take part in a recorded call: cheaper.
pub fn inference<R>(body: impl FnOnce() -> R) -> R {
    with_grad_mode(GradMode::Inference, body)
}

/// Calls `body` under LibTorch's autocast, whose lists say which operators see what: products,
/// convolutions and attention see floating-point tensors but `F64` cast to `dtype` (weights too, at
/// each use), most losses see 32 bits (on GPUs softmax, norms and sums, too); forms that write into a
/// tensor cast nothing. [`DType::Bf16`], [`DType::F16`], or [`DType::F32`] for no casts inside of
/// another `autocast`; another type is
/// [`InvalidArgument`](crate::Code::InvalidArgument).
///
/// Backward belongs outside: an operator goes back in the types that it had, and a parameter's
/// gradient has the parameter's.
///
/// ```
/// use shardweave::{autocast, DType, TensorOptions};
/// let w = TensorOptions::new().requires_grad(true).ones(&[3, 3])?;
/// let y = autocast(DType::Bf16, || w.matmul(&w))?;
/// assert_eq!(y.dtype()?, DType::Bf16);
/// y.sum()?.backward()?;
/// assert_eq!(w.grad()?.unwrap().dtype()?, DType::F32);
/// # Ok::<(), shardweave::Error>(())
/// ```
pub fn autocast<R>(dtype: DType, body: impl FnOnce() -> Result<R>) -> Result<R> {
    let autocast = match dtype {
        DType::F32 => 0,
        DType::F16 => sys::SWV_MODE_AUTOCAST_F16,
        DType::Bf16 => sys::SWV_MODE_AUTOCAST_BF16,
        other => {
            let what = format!(
                "autocast: argument 'dtype' is {other:?}; wanted Bf16 or F16, or F32 for no casts"
            );
            return Err(Error::invalid(what));
        }
    };
    Mode { autocast, ..MODE.with(Cell::get) }.around(body)
}

/// Of [`Tensor::backward_with`] and [`gradients`].
#[derive(Clone, Copy, Debug, Default)]
pub struct BackwardOptions {
    /// For another backward through the same graph.
    pub retain_graph: bool,
    /// The gradients can be differentiated; implies `retain_graph`.
    pub create_graph: bool,
    /// Of [`gradients`]: an input that the outputs do not depend on has no gradient, instead of an
    /// error.
    pub allow_unused: bool,
}

impl BackwardOptions {
    fn to_raw(self) -> sys::swv_backward_options {
        sys::swv_backward_options {
            retain_graph: self.retain_graph.into(),
            create_graph: self.create_graph.into(),
            allow_unused: self.allow_unused.into(),
            ..sys::SWV_BACKWARD_OPTIONS_INIT
        }
    }
}

/// A tensor's handle, or NULL.
fn or_null(tensor: Option<&Tensor>) -> *const sys::swv_tensor {
    tensor.map_or(ptr::null(), |tensor| tensor.as_ptr())
}

/// Gradients are of the leaves that a tensor was made from. Those of sharded tensors are sharded; a
/// parameter's may be partial until [`Module::finish_grad_sync`](crate::Module::finish_grad_sync)
/// brings it into the parameter's layout.
impl Tensor {
    /// Adds to the gradients of the leaves that this tensor, of one element, depends on. Collective
    /// on sharded tensors.
    ///
    /// ```
    /// use shardweave::TensorOptions;
    /// let x = TensorOptions::new().requires_grad(true).full(&[3], 2.0)?;
    /// (&x * &x)?.sum()?.backward()?;
    /// assert_eq!(x.grad()?.unwrap().to_vec::<f32>()?, [4.0; 3]);
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    #[track_caller]
    pub fn backward(&self) -> Result<()> {
        self.backward_with(None, BackwardOptions::default())
    }

    /// The same for a tensor of any shape, given the gradient of something with respect to it.
    #[track_caller]
    pub fn backward_with(&self, gradient: Option<&Tensor>, options: BackwardOptions) -> Result<()> {
        let _here = called_here();
        let options = options.to_raw();
        call!(swv_tensor_backward(self.as_ptr(), or_null(gradient), &options))
    }

    /// Whether calls with it are recorded.
    pub fn requires_grad(&self) -> Result<bool> {
        Ok(get!(swv_tensor_requires_grad(self.as_ptr()) -> i32)? == 1)
    }

    /// Of a leaf. `false` freezes a parameter for good, before or after its module is sharded: what
    /// trains a module ([`Module::distribute`](crate::Module::distribute), `fully_shard`,
    /// `distributed_data_parallel`, ...) leaves it as it is.
    ///
    /// ```
    /// use shardweave::{nn, Module, ParameterPlan, Source, World};
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("tp", 2)])?;
    ///     let model = nn::Linear::new(3, 4)?;
    ///     for (name, parameter) in model.parameters() {
    ///         if !name.contains("bias") {
    ///             parameter.set_requires_grad(false)?;
    ///         }
    ///     }
    ///     model.distribute(&mesh, &ParameterPlan::new(), Source::default())?;
    ///     assert!(!model.weight.requires_grad()? && model.bias.as_ref().unwrap().requires_grad()?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        call!(swv_tensor_set_requires_grad(self.as_ptr(), requires_grad.into()))
    }

    /// Whether it is no result of a recorded call.
    pub fn is_leaf(&self) -> Result<bool> {
        Ok(get!(swv_tensor_is_leaf(self.as_ptr()) -> i32)? == 1)
    }

    /// The same data without history.
    pub fn detach(&self) -> Result<Tensor> {
        create!(swv_tensor_detach(self.as_ptr())).map(Tensor::from_handle)
    }

    /// What `backward` has added up.
    pub fn grad(&self) -> Result<Option<Tensor>> {
        Ok(create_or_none!(swv_tensor_grad(self.as_ptr()))?.map(Tensor::from_handle))
    }

    /// Replaces the gradient.
    pub fn set_grad(&self, grad: Option<&Tensor>) -> Result<()> {
        call!(swv_tensor_set_grad(self.as_ptr(), or_null(grad)))
    }
}

/// The gradients of the outputs' sum with respect to the inputs, without touching any leaf's own.
/// `grad_outputs` weighs the outputs: empty, or one for each. Collective on sharded tensors.
///
/// ```
/// use shardweave::{gradients, BackwardOptions, TensorOptions};
/// let x = TensorOptions::new().requires_grad(true).full(&[], 3.0)?;
/// let y = x.pow(3.0)?;
/// let again = BackwardOptions { create_graph: true, ..Default::default() };
/// let first = gradients(&[&y], &[&x], &[], again)?.remove(0).unwrap();
/// let second = gradients(&[&first], &[&x], &[], Default::default())?.remove(0).unwrap();
/// assert_eq!((first.item::<f64>()?, second.item::<f64>()?), (27.0, 18.0));
/// # Ok::<(), shardweave::Error>(())
/// ```
#[track_caller]
pub fn gradients(
    outputs: &[&Tensor],
    inputs: &[&Tensor],
    grad_outputs: &[Option<&Tensor>],
    options: BackwardOptions,
) -> Result<Vec<Option<Tensor>>> {
    if !grad_outputs.is_empty() && grad_outputs.len() != outputs.len() {
        return Err(Error::invalid(format!(
            "gradients: argument 'grad_outputs' has {} elements; wanted none or {}, one for each output",
            grad_outputs.len(),
            outputs.len()
        )));
    }
    let _here = called_here();
    let handles = |tensors: &[&Tensor]| -> Vec<*const sys::swv_tensor> {
        tensors.iter().map(|tensor| tensor.as_const_ptr()).collect()
    };
    let (outputs, inputs) = (handles(outputs), handles(inputs));
    let grad_outputs: Vec<_> = grad_outputs.iter().copied().map(or_null).collect();
    let options = options.to_raw();
    let mut grads = vec![ptr::null_mut(); inputs.len()];
    call!(swv_gradients(
        outputs.as_ptr(),
        outputs.len(),
        inputs.as_ptr(),
        inputs.len(),
        if grad_outputs.is_empty() { ptr::null() } else { grad_outputs.as_ptr() },
        &options,
        grads.as_mut_ptr(),
    ))?;
    Ok(grads.into_iter().map(|grad| NonNull::new(grad).map(Tensor::from_handle)).collect())
}

/// A function with a derivative of its own.
///
/// ```
/// use shardweave::{apply, Function, FunctionContext, Result, Tensor, TensorOptions};
/// struct Clip; // its gradient goes through as if it were not there
/// impl Function for Clip {
///     fn forward(&self, _: &FunctionContext, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
///         Ok(vec![inputs[0].clamp(-1.0, 1.0)?])
///     }
///     fn backward(
///         &self,
///         _: &FunctionContext,
///         grads: &[Option<Tensor>],
///     ) -> Result<Vec<Option<Tensor>>> {
///         Ok(grads.to_vec())
///     }
/// }
/// let x = TensorOptions::new().requires_grad(true).full(&[2], 5.0)?;
/// let y = apply(Clip, &[&x], 1)?.remove(0);
/// y.sum()?.backward()?;
/// assert_eq!(y.to_vec::<f32>()?, [1.0, 1.0]);
/// assert_eq!(x.grad()?.unwrap().to_vec::<f32>()?, [1.0, 1.0]);
/// # Ok::<(), shardweave::Error>(())
/// ```
///
/// # Threads
///
/// LibTorch runs `backward` on a thread of its own where it has to (gradients that are asked for
/// inside of 60 other backwards, say), while the one that asked waits; and it drops the function
/// on the thread that lets go of the graph. So a function is `Send` and `Sync`. Tensors are not:
/// give them as inputs, and [`save`](FunctionContext::save) them for backward.
///
/// ```compile_fail,E0277
/// # use shardweave::{Function, FunctionContext, Result, Tensor};
/// struct Counts(std::rc::Rc<()>); // not Send: an Arc is
/// impl Function for Counts {
///     fn forward(&self, _: &FunctionContext, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
///         Ok(inputs.to_vec())
///     }
///     fn backward(
///         &self,
///         _: &FunctionContext,
///         grads: &[Option<Tensor>],
///     ) -> Result<Vec<Option<Tensor>>> {
///         Ok(grads.to_vec())
///     }
/// }
/// ```
pub trait Function: Send + Sync + 'static {
    /// The outputs.
    fn forward(&self, context: &FunctionContext, inputs: &[Tensor]) -> Result<Vec<Tensor>>;

    /// The gradients of the inputs, from those of the outputs. None for an output that nothing
    /// depends on, and for an input that has no gradient.
    fn backward(
        &self,
        context: &FunctionContext,
        grads: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>>;
}

/// What one call of a [`Function`] keeps from forward to backward.
pub struct FunctionContext(NonNull<sys::swv_function_context>, PhantomData<*mut ()>);

impl FunctionContext {
    /// In forward: what backward needs, in place of what was saved before.
    pub fn save(&self, tensors: &[&Tensor]) -> Result<()> {
        let handles: Vec<_> = tensors.iter().map(|t| t.as_const_ptr()).collect();
        call!(swv_function_context_save(self.0.as_ptr(), handles.as_ptr(), handles.len()))
    }

    /// In backward: the tensor that was saved at this place.
    pub fn saved(&self, index: usize) -> Result<Tensor> {
        create!(swv_function_context_saved(self.0.as_ptr(), index)).map(Tensor::from_handle)
    }
}

/// A function in a graph, and the thread that it was applied on, where tensors that its callbacks
/// keep may stay.
struct Applied<F> {
    function: F,
    home: ThreadId,
}

/// Calls a function's forward, and its backward when gradients pass. The function lives as long as
/// the graph needs it.
pub fn apply<F: Function>(
    function: F,
    inputs: &[&Tensor],
    num_outputs: usize,
) -> Result<Vec<Tensor>> {
    let name: CString = c_text(std::any::type_name::<F>(), "name")?;
    let mut raw = sys::SWV_FUNCTION_INIT;
    raw.name = name.as_ptr();
    raw.user_data =
        Box::into_raw(Box::new(Applied { function, home: thread::current().id() })).cast();
    raw.forward = Some(forward::<F>);
    raw.backward = Some(backward::<F>);
    raw.drop = Some(drop_function::<F>);
    let inputs: Vec<_> = inputs.iter().map(|tensor| tensor.as_const_ptr()).collect();
    let mut outputs = vec![ptr::null_mut(); num_outputs];
    // Drops the function also if it fails.
    call!(swv_function_apply(
        &raw,
        Mode::current(),
        inputs.as_ptr(),
        inputs.len(),
        outputs.as_mut_ptr(),
        outputs.len(),
    ))?;
    Ok(outputs
        .into_iter()
        .map(|output| Tensor::from_handle(NonNull::new(output).expect("one for every output")))
        .collect())
}

/// A closure in a graph, and the thread that it belongs to.
pub(crate) struct Segment<F> {
    function: F,
    home: ThreadId,
}

impl<F> Segment<F> {
    /// For the library to keep, until it calls [`drop_segment`].
    pub(crate) fn leaked(function: F) -> *mut c_void {
        Box::into_raw(Box::new(Segment { function, home: thread::current().id() })).cast()
    }

    /// # Safety
    /// `segment` came from `leaked`, and was not dropped.
    pub(crate) unsafe fn on_its_thread<'a>(segment: *mut c_void, what: &str) -> Result<&'a F> {
        let segment = segment.cast::<Segment<F>>();
        // SAFETY: `home` may be read on any thread.
        let home = unsafe { (*segment).home };
        if thread::current().id() != home {
            return Err(Error::new(
                Code::FailedPrecondition,
                format!(
                    "a {what}'s closure runs on its own thread only; LibTorch has left that inside \
                     of 60 backwards of each other"
                ),
            ));
        }
        // SAFETY: the same, on the closure's thread.
        Ok(unsafe { &(*segment).function })
    }
}

/// Activation checkpointing: what the closure computes in between is not kept; the backward calls it
/// a second time, with the same inputs and the same random numbers of their meshes. It must compute
/// the same then. Collective as the closure is, both times.
///
/// ```
/// use shardweave::{checkpoint, Tensor, TensorOptions};
/// let weight = TensorOptions::new().requires_grad(true).ones(&[4, 4])?;
/// let x = TensorOptions::new().requires_grad(true).ones(&[2, 4])?;
/// let block = {
///     let weight = weight.clone();
///     move |x: &[Tensor]| Ok([x[0].matmul(&weight)?.relu()?])
/// };
/// let [y] = checkpoint(block, &[&x])?;
/// y.sum()?.backward()?; // calls it again
/// assert_eq!(weight.grad()?.unwrap().to_vec::<f32>()?, [2.0; 16]);
/// # Ok::<(), shardweave::Error>(())
/// ```
///
/// Gradients of what the closure uses besides its inputs are added to its leaves, so
/// [`Tensor::backward`] gives them and [`gradients`] does not. `create_graph` through it is refused.
///
/// The closure lives as long as the graph needs it, and runs on this thread only, so that it may
/// hold tensors: where LibTorch would call it elsewhere, inside of 60 other backwards, the backward
/// fails.
pub fn checkpoint<F, const N: usize>(function: F, inputs: &[&Tensor]) -> Result<[Tensor; N]>
where
    F: Fn(&[Tensor]) -> Result<[Tensor; N]> + 'static,
{
    let name: CString = c_text(std::any::type_name::<F>(), "name")?;
    let mut raw = sys::SWV_SEGMENT_INIT;
    raw.name = name.as_ptr();
    raw.user_data = Segment::leaked(function);
    raw.forward = Some(run_segment::<F, N>);
    raw.drop = Some(drop_segment::<F>);
    let inputs: Vec<_> = inputs.iter().map(|tensor| tensor.as_const_ptr()).collect();
    let mut outputs = [ptr::null_mut(); N];
    // Drops the closure also if it fails.
    call!(swv_checkpoint(
        &raw,
        Mode::current(),
        inputs.as_ptr(),
        inputs.len(),
        outputs.as_mut_ptr(),
        outputs.len(),
    ))?;
    Ok(outputs
        .map(|output| Tensor::from_handle(NonNull::new(output).expect("one for every output"))))
}

unsafe extern "C" fn run_segment<F, const N: usize>(
    segment: *mut c_void,
    call: *const sys::swv_function_call,
) -> *mut sys::swv_status
where
    F: Fn(&[Tensor]) -> Result<[Tensor; N]> + 'static,
{
    status_of(|| {
        // SAFETY: what checkpoint() gave the library.
        let function = unsafe { Segment::<F>::on_its_thread(segment, "checkpoint")? };
        // SAFETY: what the header says of the call.
        let (call, inputs) = unsafe { (&*call, inputs_of(&*call)) };
        let results = Mode::from_number(call.mode)?.around(|| function(inputs))?;
        debug_assert_eq!(call.num_outputs, N);
        for (i, result) in results.into_iter().enumerate() {
            // SAFETY: there is room for N; the library takes the handle over.
            unsafe { *call.outputs.add(i) = result.into_raw() };
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn drop_segment<F>(segment: *mut c_void) {
    // A panic has nowhere to go from here.
    let _ = without_panics(|| {
        let segment = segment.cast::<Segment<F>>();
        // SAFETY: as in run_segment().
        let home = unsafe { (*segment).home };
        if thread::current().id() == home {
            // SAFETY: checkpoint() made it by Box::into_raw, and the library drops it once.
            drop(unsafe { Box::from_raw(segment) });
        } // Else what it holds may be in use on its own thread: it stays.
        Ok(())
    });
}

/// # Safety
/// A call as the library passes it to callbacks.
pub(crate) unsafe fn inputs_of<T>(call: &sys::swv_function_call) -> &[T] {
    if call.num_inputs == 0 {
        return &[];
    }
    // SAFETY: so many handles. A Tensor is a pointer to its handle, and Option<Tensor> may be NULL;
    // what is behind a reference is not dropped.
    unsafe { std::slice::from_raw_parts(call.inputs.cast(), call.num_inputs) }
}

fn context_of(context: *mut sys::swv_function_context) -> FunctionContext {
    FunctionContext(NonNull::new(context).expect("a callback has a context"), PhantomData)
}

unsafe extern "C" fn forward<F: Function>(
    function: *mut c_void,
    call: *const sys::swv_function_call,
) -> *mut sys::swv_status {
    status_of(|| {
        // SAFETY: what apply() gave the library, and what the header says of the arguments.
        let applied = unsafe { &*function.cast::<Applied<F>>() };
        // SAFETY: the same.
        let (call, inputs) = unsafe { (&*call, inputs_of(&*call)) };
        let results = Mode::from_number(call.mode)?
            .around(|| applied.function.forward(&context_of(call.context), inputs))?;
        check_count::<F>("forward", "outputs", results.len(), call.num_outputs)?;
        for (i, result) in results.into_iter().enumerate() {
            // SAFETY: there is room for num_outputs; the library takes the handle over.
            unsafe { *call.outputs.add(i) = result.into_raw() };
        }
        Ok(())
    })
}

unsafe extern "C" fn backward<F: Function>(
    function: *mut c_void,
    call: *const sys::swv_function_call,
) -> *mut sys::swv_status {
    // Nothing that may panic stands outside of status_of.
    status_of(|| {
        // SAFETY: as in forward().
        let applied = unsafe { &*function.cast::<Applied<F>>() };
        let body = || {
            // SAFETY: as in forward().
            let (call, grads) = unsafe { (&*call, inputs_of(&*call)) };
            let results = Mode::from_number(call.mode)?
                .around(|| applied.function.backward(&context_of(call.context), grads))?;
            check_count::<F>("backward", "gradients", results.len(), call.num_outputs)?;
            for (i, result) in results.into_iter().enumerate() {
                // SAFETY: there is room for num_outputs; the library takes the handle over.
                unsafe { *call.outputs.add(i) = result.map_or(ptr::null_mut(), Tensor::into_raw) };
            }
            Ok(())
        };
        if thread::current().id() == applied.home {
            body()
        } else {
            on_a_thread_of_its_own(body)
        }
    })
}

/// Calls `body` while this thread waits, on one that ends with it: one of LibTorch's own, which
/// goes on, could keep a tensor in its thread-local variables while the tensor's rank goes on too.
fn on_a_thread_of_its_own(body: impl FnOnce() -> Result<()>) -> Result<()> {
    struct Lent<T>(T);
    // SAFETY: what is lent comes back before the lender goes on, which is all that tensors want
    // (one thread at a time). Functions are Send and Sync.
    unsafe impl<T> Send for Lent<T> {}
    impl<T: FnOnce() -> Result<()>> Lent<T> {
        fn call(self) -> Result<()> {
            (self.0)()
        }
    }
    let lent = Lent(body);
    let name = thread::current().name().unwrap_or("backward").to_owned();
    thread::scope(|scope| {
        let thread = thread::Builder::new().name(name).spawn_scoped(scope, || lent.call());
        let thread = thread.map_err(|e| Error::from(e).context("no thread for a backward"))?;
        thread.join().unwrap_or_else(|payload| Err(panic_error(payload)))
    })
}

unsafe extern "C" fn drop_function<F: Function>(function: *mut c_void) {
    // A panic has nowhere to go from here.
    let _ = without_panics(|| {
        // SAFETY: apply() made it by Box::into_raw, and the library drops it once. It may be on
        // any thread: a Function is Send.
        drop(unsafe { Box::from_raw(function.cast::<Applied<F>>()) });
        Ok(())
    });
}

fn check_count<F>(callback: &str, what: &str, given: usize, wanted: usize) -> Result<()> {
    if given == wanted {
        return Ok(());
    }
    let name = std::any::type_name::<F>();
    Err(Error::invalid(format!("{name}::{callback} gave {given} {what}; wanted {wanted}")))
}

debug_by_name!(FunctionContext);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    /// What records for gradients is never guessed.
    #[test]
    fn a_mode_of_a_newer_library_is_an_error() {
        for recording in [GradMode::Grad, GradMode::NoGrad, GradMode::Inference] {
            for autocast in [0, sys::SWV_MODE_AUTOCAST_F16, sys::SWV_MODE_AUTOCAST_BF16] {
                let mode = Mode { recording, autocast };
                assert_eq!(Mode::from_number(recording as i32 | autocast), Ok(mode));
                assert_eq!(mode.around(Mode::current), recording as i32 | autocast);
            }
        }
        for number in [3, 12, 15, 16, 77, -1] {
            assert_eq!(Mode::from_number(number).unwrap_err().code(), Code::Unimplemented);
        }
    }

    #[test]
    fn the_mode_around_a_call_comes_back() {
        let inside = no_grad(|| (GradMode::current(), inference(GradMode::current)));
        assert_eq!(inside, (GradMode::NoGrad, GradMode::Inference));
        assert!(std::panic::catch_unwind(|| no_grad(|| panic!("out of it"))).is_err());
        assert_eq!(GradMode::current(), GradMode::Grad);
    }

    /// A function on a thread of its own: what it says and what it panics with come back.
    #[test]
    fn a_body_on_a_thread_of_its_own() {
        let (here, mut there) = (thread::current().id(), None);
        on_a_thread_of_its_own(|| {
            there = Some(thread::current().id());
            Ok(())
        })
        .unwrap();
        assert_ne!(Some(here), there);
        let error = on_a_thread_of_its_own(|| panic!("too {}", "far")).unwrap_err();
        assert_eq!(error, Error::new(Code::Internal, "panicked: too far"));
    }
}
