//! Tensors: how they are made, what they are, and the common operators.

use std::ffi::c_void;
use std::fmt;
use std::mem::{size_of_val, ManuallyDrop};
use std::ptr::{self, NonNull};

use shardweave_sys as sys;

use crate::args;
use crate::autograd::{no_grad, Mode};
use crate::dtype::{number_of, DType, Device};
use crate::element::Element;
use crate::error::{Code, Error, Of, Result};
use crate::layout::{IntoLayout, Layout};
use crate::mesh::Mesh;
use crate::op::{item, FromValue, KnownOp};
use crate::source::called_here;

handle! {
    /// A tensor: plain, with its data here, or sharded, with the global shape and a part of the
    /// data on each rank of its mesh.
    ///
    /// ```
    /// use shardweave::Tensor;
    /// let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    /// let y = (&x * &x)?.sum_dims(&[1], false)?;
    /// assert_eq!(y.to_vec::<f32>()?, [5.0, 25.0]);
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    ///
    /// A value is a handle: `clone` gives another one to the same tensor, [`copy`](Tensor::copy) a
    /// tensor of its own.
    ///
    /// Belongs to its rank: neither `Send` nor `Sync`, because its data, its gradient and its graph
    /// are changed through any of its handles, and one thread at a time may do that.
    Tensor, swv_tensor, swv_tensor_free
}

/// How a new tensor shall be: `f32`, without gradient, in this machine's memory, and plain, unless this
/// says otherwise.
///
/// ```
/// use shardweave::{DType, Placement::*, TensorOptions, World};
/// World::threads(2).run(|world| {
///     let mesh = world.device_mesh(&[("tp", 2)])?;
///     let options = TensorOptions::new().dtype(DType::F64).on(&mesh, [("tp", Shard(0))])?;
///     let x = options.ones(&[7, 5])?;
///     assert_eq!(x.sizes()?, [7, 5]);
///     assert_eq!(x.to_local()?.sizes()?, [[4, 5], [3, 5]][world.rank()]);
///     Ok(())
/// })?;
/// # Ok::<(), shardweave::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct TensorOptions {
    dtype: Option<DType>,
    requires_grad: bool,
    device: Option<Device>,
    place: Option<(Mesh, Layout)>,
}

/// Whose data counts when a tensor is distributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// Of the rank at this place in the mesh, row-major. It is sent to the others.
    Rank(i64),
    /// All ranks have the same data already: nothing is sent.
    Same,
}

impl Default for Source {
    fn default() -> Source {
        Source::Rank(0)
    }
}

impl Source {
    pub(crate) fn to_raw(self) -> sys::swv_distribute_options {
        let source = match self {
            // What is no rank the library refuses.
            Source::Rank(rank) => i32::try_from(rank).unwrap_or(i32::MIN),
            Source::Same => -1,
        };
        sys::swv_distribute_options { source, ..sys::SWV_DISTRIBUTE_OPTIONS_INIT }
    }
}

macro_rules! factories {
    ($($(#[$doc:meta])* $name:ident: $function:ident($($argument:ident: $type:ty)?);)*) => {
        impl TensorOptions {
            $($(#[$doc])*
            pub fn $name(&self, sizes: &[i64] $(, $argument: $type)?) -> Result<Tensor> {
                let options = self.to_raw();
                create!($function(sizes.as_ptr(), sizes.len(), $($argument,)? &options)).map(Tensor)
            })*
        }

        impl Tensor {
            $($(#[$doc])*
            /// Plain and `f32`; for others see [`TensorOptions`].
            pub fn $name(sizes: &[i64] $(, $argument: $type)?) -> Result<Tensor> {
                TensorOptions::new().$name(sizes $(, $argument)?)
            })*
        }
    };
}

factories! {
    /// With whatever is in the memory.
    empty: swv_tensor_empty();
    /// Of zeros.
    zeros: swv_tensor_zeros();
    /// Of ones.
    ones: swv_tensor_ones();
    /// Of one number.
    full: swv_tensor_full(value: f64);
    /// Uniform in [0, 1). On a mesh element i is drawn by its global index: the same numbers for
    /// every layout and number of ranks ([`Mesh::seed`]). Plain ones draw from the process
    /// ([`manual_seed`](crate::manual_seed)).
    rand: swv_tensor_rand();
    /// Normal, with mean 0 and variance 1; drawn as by `rand`.
    randn: swv_tensor_randn();
}

impl TensorOptions {
    /// `f32`, without gradient, in this machine's memory, plain.
    pub fn new() -> TensorOptions {
        TensorOptions::default()
    }

    /// The type of the elements.
    pub fn dtype(mut self, dtype: DType) -> TensorOptions {
        self.dtype = Some(dtype);
        self
    }

    /// Whether [`backward`](Tensor::backward) gives it a gradient.
    pub fn requires_grad(mut self, requires_grad: bool) -> TensorOptions {
        self.requires_grad = requires_grad;
        self
    }

    /// Where its data is, or that of the parts of a sharded one. A device that is not there is
    /// [`Unimplemented`](crate::Code::Unimplemented) when the tensor is made.
    pub fn device(mut self, device: Device) -> TensorOptions {
        self.device = Some(device);
        self
    }

    /// Sharded over a mesh.
    pub fn on(mut self, mesh: &Mesh, layout: impl IntoLayout) -> Result<TensorOptions> {
        self.place = Some((mesh.clone(), layout.into_layout(mesh).of("TensorOptions::on")?));
        Ok(self)
    }

    /// A plain tensor with a copy of row-major data, whose type is that of the elements.
    ///
    /// ```
    /// use shardweave::TensorOptions;
    /// let x = TensorOptions::new().requires_grad(true).from_slice(&[1.5f64, -2.0], &[2])?;
    /// (&x * &x)?.sum()?.backward()?;
    /// assert_eq!(x.grad()?.unwrap().to_vec::<f64>()?, [3.0, -4.0]);
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn from_slice<T: Element>(&self, data: &[T], sizes: &[i64]) -> Result<Tensor> {
        if self.place.is_some() {
            return Err(Error::invalid(
                "Tensor::from_slice: the options have a mesh; wanted none: Tensor::distribute cuts \
                 what all ranks have, Tensor::from_local takes each rank's part",
            ));
        }
        if let Some(dtype) = self.dtype.filter(|dtype| *dtype != T::DTYPE) {
            return Err(Error::invalid(format!(
                "Tensor::from_slice: the elements are {}, the options say {dtype}",
                T::DTYPE
            )));
        }
        let wanted = sizes
            .iter()
            .try_fold(1usize, |product, size| product.checked_mul(usize::try_from(*size).ok()?));
        if wanted.map_or(false, |wanted| wanted != data.len()) {
            return Err(Error::invalid(format!(
                "Tensor::from_slice: argument 'data' has {} elements; wanted as many as {sizes:?}",
                data.len()
            )));
        }
        let mut options = self.to_raw();
        options.dtype = T::DTYPE as i32;
        create!(swv_tensor_from_data(
            data.as_ptr().cast(),
            size_of_val(data),
            sizes.as_ptr(),
            sizes.len(),
            &options,
        ))
        .map(Tensor)
    }

    fn to_raw(&self) -> sys::swv_tensor_options {
        let mut raw = sys::SWV_TENSOR_OPTIONS_INIT;
        raw.dtype = number_of(self.dtype);
        raw.requires_grad = self.requires_grad.into();
        if let Some(device) = self.device {
            raw.device = device.to_raw();
        }
        if let Some((mesh, layout)) = &self.place {
            raw.mesh = mesh.as_ptr();
            raw.layout = layout.as_ptr();
        }
        raw
    }
}

/// Makes tensors.
impl Tensor {
    /// A plain tensor with a copy of row-major data.
    pub fn from_slice<T: Element>(data: &[T], sizes: &[i64]) -> Result<Tensor> {
        TensorOptions::new().from_slice(data, sizes)
    }

    /// The numbers 0 .. `end` - 1, plain, `i64`.
    pub fn arange(end: i64) -> Result<Tensor> {
        static ARANGE: KnownOp = KnownOp::new("aten::arange", "Tensor::arange");
        ARANGE.call(args![end])
    }

    /// Takes over memory of another library, without a copy. `managed` is used up, whether this
    /// succeeds or fails.
    ///
    /// # Safety
    /// - **Valid.** `managed` points to a `DLManagedTensorVersioned` of DLPack 1.x, aligned and
    ///   filled in: `ndim` sizes (and as many strides, unless they are NULL) that are read here;
    ///   `data` and `byte_offset` with all elements that sizes and strides reach, initialized, of
    ///   the dtype and on the device that it says. They stay so until its deleter has run.
    /// - **Exclusive.** From here until the deleter runs nobody else writes to that memory, and
    ///   nobody else reads it while this tensor, or what shares its memory, may be written to: not
    ///   through Rust references, not on another thread, not by a kernel that is still under way on
    ///   a GPU's stream.
    /// - **Deleter.** Only this library runs it, once: here if this fails, else when the last tensor
    ///   that shares the memory ends (views, graphs and pending operations count). That may be on
    ///   any thread, also after this rank's thread has ended: `deleter` and `manager_ctx` are good
    ///   for that, and `deleter` neither unwinds nor calls this library. It may be NULL.
    pub unsafe fn from_dlpack(managed: NonNull<c_void>) -> Result<Tensor> {
        create!(swv_tensor_from_dlpack(managed.as_ptr().cast(), ptr::null_mut())).map(Tensor)
    }

    /// [`from_dlpack`](Tensor::from_dlpack) of memory of a GPU that the other library uses on this
    /// stream (a `cudaStream_t`): what is under way there is done before this tensor is used. Yet a
    /// stream other than the default one, which `from_dlpack` stands for, is
    /// [`Unimplemented`](crate::Code::Unimplemented).
    ///
    /// # Safety
    /// As of `from_dlpack`, but kernels on this stream may be under way. `stream` is one of the device
    /// that `managed` says, and lives during the call.
    pub unsafe fn from_dlpack_on(
        managed: NonNull<c_void>,
        stream: NonNull<c_void>,
    ) -> Result<Tensor> {
        create!(swv_tensor_from_dlpack(managed.as_ptr().cast(), stream.as_ptr()))
            .map(Tensor)
            .of("Tensor::from_dlpack_on")
    }

    /// Lends the memory of a plain tensor, which does not require grad, to another library: a
    /// `DLManagedTensorVersioned` (DLPack 1.x), whose deleter that library runs, on any thread. This
    /// tensor goes on using the memory: whoever takes it reads and writes it only while nobody here
    /// does.
    pub fn to_dlpack(&self) -> Result<NonNull<c_void>> {
        create!(swv_tensor_to_dlpack(self.as_ptr(), ptr::null_mut())).map(NonNull::cast)
    }

    /// [`to_dlpack`](Tensor::to_dlpack) of memory of a GPU for a library that uses it on this stream
    /// (a `cudaStream_t`): what is under way here is done before what comes on that stream. Yet a
    /// stream other than the default one, which `to_dlpack` stands for, is
    /// [`Unimplemented`](crate::Code::Unimplemented).
    ///
    /// # Safety
    /// `stream` is one of the tensor's device, and lives during the call.
    pub unsafe fn to_dlpack_on(&self, stream: NonNull<c_void>) -> Result<NonNull<c_void>> {
        create!(swv_tensor_to_dlpack(self.as_ptr(), stream.as_ptr()))
            .map(NonNull::cast)
            .of("Tensor::to_dlpack_on")
    }

    /// Puts tensors behind each other along a dimension.
    #[track_caller]
    pub fn cat(tensors: &[Tensor], dim: i64) -> Result<Tensor> {
        static CAT: KnownOp = KnownOp::new("aten::cat", "Tensor::cat");
        CAT.call(args![tensors, dim])
    }

    /// Puts tensors beside each other along a new dimension.
    #[track_caller]
    pub fn stack(tensors: &[Tensor], dim: i64) -> Result<Tensor> {
        static STACK: KnownOp = KnownOp::new("aten::stack", "Tensor::stack");
        STACK.call(args![tensors, dim])
    }

    #[inline]
    pub(crate) fn as_const_ptr(&self) -> *const sys::swv_tensor {
        self.as_ptr()
    }

    /// Gives the handle away.
    pub(crate) fn into_raw(self) -> *mut sys::swv_tensor {
        ManuallyDrop::new(self).as_ptr()
    }
}

/// What a tensor is. Sizes and strides are global, in elements.
impl Tensor {
    /// The size of each dimension.
    pub fn sizes(&self) -> Result<Vec<i64>> {
        list!(swv_tensor_sizes(self.as_const_ptr()) -> i64)
    }

    /// The size of one dimension; a negative one counts from the end.
    pub fn size(&self, dim: i64) -> Result<i64> {
        let sizes = self.sizes().of("Tensor::size")?;
        let index = if dim < 0 { dim + sizes.len() as i64 } else { dim };
        usize::try_from(index).ok().and_then(|i| sizes.get(i)).copied().ok_or_else(|| {
            Error::new(
                Code::OutOfRange,
                format!("Tensor::size: argument 'dim' is {dim}; the tensor's sizes are {sizes:?}"),
            )
        })
    }

    /// The stride of each dimension.
    pub fn strides(&self) -> Result<Vec<i64>> {
        list!(swv_tensor_strides(self.as_const_ptr()) -> i64)
    }

    /// The number of dimensions.
    pub fn ndim(&self) -> Result<usize> {
        Ok(get!(swv_tensor_ndim(self.as_const_ptr()) -> i32)? as usize)
    }

    /// The number of elements.
    pub fn numel(&self) -> Result<i64> {
        get!(swv_tensor_numel(self.as_const_ptr()) -> i64)
    }

    /// The type of the elements.
    pub fn dtype(&self) -> Result<DType> {
        get!(swv_tensor_dtype(self.as_const_ptr()) -> i32)
            .and_then(DType::from_number)
            .of("Tensor::dtype")
    }

    /// Where the data is.
    pub fn device(&self) -> Result<Device> {
        let mut raw = sys::swv_device { type_: sys::SWV_DEVICE_CPU, index: 0 };
        call!(swv_tensor_device(self.as_const_ptr(), &mut raw))?;
        Device::from_raw(raw).of("Tensor::device")
    }

    /// Whether it has no values yet: it was made within [`deferred_init`](crate::deferred_init), and
    /// [`materialize`](crate::materialize) has not been there.
    pub fn is_deferred(&self) -> Result<bool> {
        Ok(get!(swv_tensor_is_deferred(self.as_const_ptr()) -> i32)? == 1)
    }

    /// Whether it lies on a mesh.
    pub fn is_sharded(&self) -> Result<bool> {
        Ok(get!(swv_tensor_is_sharded(self.as_const_ptr()) -> i32)? == 1)
    }

    /// Whether two handles mean one tensor.
    pub fn is_same(&self, other: &Tensor) -> Result<bool> {
        Ok(get!(swv_tensor_is_same(self.as_const_ptr(), other.as_const_ptr()) -> i32)? == 1)
    }

    /// The elements of a plain tensor, row-major.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.check_dtype::<T>("Tensor::to_vec")?;
        let mut data = vec![T::default(); self.numel().of("Tensor::to_vec")? as usize];
        let (bytes, to) = (size_of_val(data.as_slice()), data.as_mut_ptr());
        let result = call!(swv_tensor_copy_to_host(self.as_const_ptr(), to.cast(), bytes));
        // SAFETY: the vector's own memory, which the library uses no more.
        unsafe { T::settle(to, data.len()) };
        result.map(|()| data)
    }

    /// Overwrites the elements of a plain tensor, row-major.
    pub fn copy_from_slice<T: Element>(&self, data: &[T]) -> Result<()> {
        self.check_dtype::<T>("Tensor::copy_from_slice")?;
        if self.numel().of("Tensor::copy_from_slice")? as usize != data.len() {
            return Err(Error::invalid(format!(
                "Tensor::copy_from_slice: argument 'data' has {} elements; wanted as many as the \
                 tensor, {:?}",
                data.len(),
                self.sizes()?
            )));
        }
        let bytes = size_of_val(data);
        call!(swv_tensor_copy_from_host(self.as_ptr(), data.as_ptr().cast(), bytes))
    }

    fn check_dtype<T: Element>(&self, caller: &str) -> Result<()> {
        let dtype = self.dtype().of(caller)?;
        if dtype == T::DTYPE {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "{caller}: the tensor's elements are {dtype}; wanted {}: convert it by Tensor::to_dtype",
            T::DTYPE
        )))
    }

    /// The one element of a tensor of any dtype: any integer type (a number that does not fit is
    /// [`OutOfRange`](crate::Code::OutOfRange)), `f32`, `f64`, [`F16`](crate::F16),
    /// [`Bf16`](crate::Bf16), `bool`, [`Complex<f64>`](crate::Complex), or [`Value`](crate::Value)
    /// for whatever it is. Collective if it is sharded.
    pub fn item<T: FromValue>(&self) -> Result<T> {
        item(self).and_then(T::from_value).of("Tensor::item")
    }

    /// The tensor as text, with the elements of all ranks' parts. Collective if it is sharded; `{}`
    /// communicates nothing, and has no elements of a sharded one.
    ///
    /// ```
    /// use shardweave::{Placement::*, Tensor, World};
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("tp", 2)])?;
    ///     let x = Tensor::arange(3)?.distribute(&mesh, [("tp", Shard(0))])?;
    ///     let text = x.values_to_string()?; // all ranks
    ///     if world.rank() == 0 {
    ///         println!("{text}");
    ///     }
    ///     assert!(text.ends_with(" 0\n 1\n 2\n[ CPULongType{3} ]"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn values_to_string(&self) -> Result<String> {
        text!(swv_tensor_values_to_string(self.as_const_ptr()))
    }

    /// Which rank holds which part, as a picture of characters.
    pub fn picture(&self) -> Result<String> {
        text!(swv_tensor_picture(self.as_const_ptr()))
    }
}

/// Tensors on meshes.
///
/// ```
/// use shardweave::{Placement::*, Tensor, World};
/// World::threads(2).run(|world| {
///     let mesh = world.device_mesh(&[("tp", 2)])?;
///     let whole = Tensor::arange(5)?; // the same on every rank
///     let parts = whole.distribute(&mesh, [("tp", Shard(0))])?;
///     assert_eq!(parts.to_local()?.numel()?, [3, 2][world.rank()]);
///     let everywhere = parts.redistribute([("tp", Replicate)])?;
///     assert_eq!(everywhere.to_local()?.to_vec::<i64>()?, [0, 1, 2, 3, 4]);
///     Ok(())
/// })?;
/// # Ok::<(), shardweave::Error>(())
/// ```
impl Tensor {
    /// Cuts a plain tensor, of the same shape and dtype on every rank, whose data is that of the
    /// mesh's first rank. A leaf that requires grad if the tensor does. Collective.
    #[track_caller]
    pub fn distribute(&self, mesh: &Mesh, layout: impl IntoLayout) -> Result<Tensor> {
        self.distribute_from(Source::default(), mesh, layout).of("Tensor::distribute")
    }

    /// The same with data of another rank, or of every rank's own. Collective unless that.
    #[track_caller]
    pub fn distribute_from(
        &self,
        source: Source,
        mesh: &Mesh,
        layout: impl IntoLayout,
    ) -> Result<Tensor> {
        let _here = called_here();
        let (layout, options) =
            (layout.into_layout(mesh).of("Tensor::distribute_from")?, source.to_raw());
        create!(swv_tensor_distribute(
            self.as_const_ptr(),
            mesh.as_ptr(),
            layout.as_ptr(),
            &options,
        ))
        .map(Tensor)
    }

    /// From every rank's part. Without `sizes` the global ones are worked out from the parts:
    /// collective then. Parts that are not those of an even split, 1 + 2 rows, make a `Shard` a
    /// `RaggedShard`.
    #[track_caller]
    pub fn from_local(
        local: &Tensor,
        mesh: &Mesh,
        layout: impl IntoLayout,
        sizes: Option<&[i64]>,
    ) -> Result<Tensor> {
        let _here = called_here();
        let layout = layout.into_layout(mesh).of("Tensor::from_local")?;
        create!(swv_tensor_from_local(
            local.as_const_ptr(),
            mesh.as_ptr(),
            layout.as_ptr(),
            sizes.map_or(ptr::null(), <[i64]>::as_ptr),
            sizes.map_or(0, <[i64]>::len),
            Mode::current(),
        ))
        .map(Tensor)
    }

    /// This rank's part; shares memory. The gradients of the parts lie together as the tensor does,
    /// replicated where it is partial.
    pub fn to_local(&self) -> Result<Tensor> {
        self.local(ptr::null())
    }

    /// The same where the gradients of the parts lie together in another way.
    pub fn to_local_with_grad(&self, grad_layout: impl IntoLayout) -> Result<Tensor> {
        let layout = self.mesh().and_then(|mesh| grad_layout.into_layout(&mesh));
        layout.and_then(|layout| self.local(layout.as_ptr())).of("Tensor::to_local_with_grad")
    }

    fn local(&self, grad_layout: *const sys::swv_layout) -> Result<Tensor> {
        let mode = Mode::current();
        create!(swv_tensor_to_local(self.as_const_ptr(), grad_layout, mode)).map(Tensor)
    }

    /// The same tensor in another layout. Collective.
    #[track_caller]
    pub fn redistribute(&self, layout: impl IntoLayout) -> Result<Tensor> {
        let _here = called_here();
        let layout = self.mesh().and_then(|mesh| layout.into_layout(&mesh));
        let (layout, mode) = (layout.of("Tensor::redistribute")?, Mode::current());
        create!(swv_tensor_redistribute(self.as_const_ptr(), layout.as_ptr(), mode)).map(Tensor)
    }

    /// The whole tensor, plain, on every rank; of a plain one itself. Collective.
    #[track_caller]
    pub fn full_tensor(&self) -> Result<Tensor> {
        let _here = called_here();
        let mode = Mode::current();
        create!(swv_tensor_full_tensor(self.as_const_ptr(), mode)).map(Tensor)
    }

    /// How a sharded tensor lies.
    pub fn layout(&self) -> Result<Layout> {
        create!(swv_tensor_layout(self.as_const_ptr())).map(Layout::from_handle)
    }

    /// The mesh of a sharded tensor.
    pub fn mesh(&self) -> Result<Mesh> {
        create!(swv_tensor_mesh(self.as_const_ptr())).map(Mesh::from_handle)
    }
}

macro_rules! methods {
    ($(
        $(#[$doc:meta])*
        $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $op:literal;
    )*) => {
        $($(#[$doc])*
        ///
        #[doc = concat!("LibTorch's `", $op, "`.")]
        #[track_caller]
        pub fn $name(&self $(, $argument: $type)*) -> Result<$result> {
            static OP: KnownOp = KnownOp::new($op, concat!("Tensor::", stringify!($name)));
            OP.call(args![self $(, $argument)*])
        })*
    };
}

pub(crate) use methods;

/// Operators that are not alike in other languages (operators.rs has the rest). Every other one is
/// there by its name: [`Op`](crate::Op).
impl Tensor {
    /// The elements on another device; the tensor itself, if they are there.
    ///
    /// LibTorch's `aten::to.dtype_layout`.
    #[track_caller]
    pub fn to_device(&self, device: Device) -> Result<Tensor> {
        static OP: KnownOp = KnownOp::new("aten::to.dtype_layout", "Tensor::to_device");
        let as_it_is: Option<DType> = None;
        OP.call(args![self, as_it_is, as_it_is, device])
    }

    methods! {
        /// Attention of these queries to keys and values, all [..., length, features].
        scaled_dot_product_attention(
            keys: &Tensor, values: &Tensor, mask: Option<&Tensor>, dropout: f64, causal: bool
        ) -> Tensor = "aten::scaled_dot_product_attention";

        /// The sum of all elements.
        sum() -> Tensor = "aten::sum";
        /// The sums over some dimensions.
        sum_dims(dims: &[i64], keep: bool) -> Tensor = "aten::sum.dim_IntList";
        /// The mean of all elements.
        mean() -> Tensor = "aten::mean";
        /// The means over some dimensions.
        mean_dims(dims: &[i64], keep: bool) -> Tensor = "aten::mean.dim";
        /// The largest elements over some dimensions; over all of them if there are none.
        amax(dims: &[i64], keep: bool) -> Tensor = "aten::amax";
        /// The smallest elements over some dimensions; over all of them if there are none.
        amin(dims: &[i64], keep: bool) -> Tensor = "aten::amin";
        /// Where the largest elements along a dimension are.
        argmax(dim: i64, keep: bool) -> Tensor = "aten::argmax";
        /// Pieces of `size` along a dimension; the last one may be smaller.
        split(size: i64, dim: i64) -> Vec<Tensor> = "aten::split.Tensor";

        /// Whether all elements of two tensors are nearly the same: |a - b| <= 1e-8 + 1e-5 |b|, and
        /// none is NaN. Plain tensors, or sharded ones in any layouts, with the same answer on every
        /// rank. Collective if they are sharded.
        allclose(other: &Tensor) -> bool = "aten::allclose";
    }
}

macro_rules! in_place {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) = $op:literal;)*) => {
        $($(#[$doc])*
        ///
        #[doc = concat!("LibTorch's `", $op, "`.")]
        #[track_caller]
        pub fn $name(&self $(, $argument: $type)*) -> Result<()> {
            static OP: KnownOp = KnownOp::new($op, concat!("Tensor::", stringify!($name)));
            OP.call(args![self $(, $argument)*])
        })*
    };
}

/// Operators that write to the tensor, which all handles to it see. Of a leaf that requires grad
/// only inside of [`no_grad`](crate::no_grad).
impl Tensor {
    in_place! {
        /// Copies the elements of another one.
        copy_(source: &Tensor) = "aten::copy_";
        /// All elements are one number.
        fill_(value: f64) = "aten::fill_.Scalar";
        /// All elements are 0.
        zero_() = "aten::zero_";
        /// Draws from a normal distribution; as [`Tensor::randn`].
        normal_(mean: f64, std: f64) = "aten::normal_";
        /// Draws from a uniform distribution; as [`Tensor::rand`].
        uniform_(from: f64, to: f64) = "aten::uniform_";
    }
}

/// A plain tensor that may go to another thread: memory of this machine that no other handle leads
/// to, without history and without gradient. A thread that loads data makes it, the thread of a rank
/// takes it.
///
/// ```
/// use shardweave::{Placement::*, SendTensor, Source, World};
/// use std::{sync::mpsc, thread};
/// World::threads(2).run(|world| {
///     let (sender, batches) = mpsc::sync_channel(2);
///     let loader = thread::spawn(move || {
///         for i in 0..3 {
///             let batch = SendTensor::from_slice(&[i as f32; 8], &[4, 2])?;
///             if sender.send(batch).is_err() {
///                 break; // nobody wants more
///             }
///         }
///         Ok::<(), shardweave::Error>(())
///     });
///     let mesh = world.device_mesh(&[("dp", 2)])?;
///     for (i, batch) in batches.into_iter().enumerate() {
///         let batch = batch.into_tensor().distribute_from(Source::Same, &mesh, [("dp", Shard(0))])?;
///         assert_eq!(batch.sum()?.item::<f32>()?, 8.0 * i as f32);
///     }
///     loader.join().unwrap()
/// })?;
/// # Ok::<(), shardweave::Error>(())
/// ```
///
/// `Send`, because no other value knows its memory; not `Sync`, and not `Clone`, so that it stays so:
///
/// ```compile_fail,E0277
/// fn between_threads<T: Sync>() {}
/// between_threads::<shardweave::SendTensor>();
/// ```
/// ```compile_fail,E0599
/// let tensor = shardweave::SendTensor::from_slice(&[1.0f32], &[1])?;
/// let _ = Tensor::clone(&tensor.clone());
/// # use shardweave::Tensor;
/// # Ok::<(), shardweave::Error>(())
/// ```
pub struct SendTensor(Tensor);

// SAFETY: the tensor belongs to no mesh, its memory was allocated for it alone, and this value is the
// only one that knows the handle: nobody gets at any of it on the thread that it leaves. Plain
// tensors may be driven from any thread, one at a time, and handles freed from any.
unsafe impl Send for SendTensor {}

impl SendTensor {
    /// With a copy of row-major data.
    pub fn from_slice<T: Element>(data: &[T], sizes: &[i64]) -> Result<SendTensor> {
        Tensor::from_slice(data, sizes).map(SendTensor).of("SendTensor::from_slice")
    }

    /// The tensor, on this thread from now on.
    pub fn into_tensor(self) -> Tensor {
        self.0
    }

    /// The size of each dimension.
    pub fn sizes(&self) -> Result<Vec<i64>> {
        self.0.sizes().of("SendTensor::sizes")
    }

    /// The type of the elements.
    pub fn dtype(&self) -> Result<DType> {
        self.0.dtype().of("SendTensor::dtype")
    }
}

/// Sizes and dtype.
impl fmt::Debug for SendTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Send{:?}", self.0)
    }
}

impl Tensor {
    /// A copy of a plain tensor, for another thread; without this one's history and gradient. The
    /// memory is copied because others may know this tensor's (clones, views, graphs); what is
    /// loaded for another thread anyway is made by [`SendTensor::from_slice`] at once.
    pub fn to_send(&self) -> Result<SendTensor> {
        static CLONE: KnownOp = KnownOp::new("aten::clone", "Tensor::to_send");
        if self.is_sharded().of("Tensor::to_send")? {
            return Err(Error::invalid(format!(
                "Tensor::to_send: the tensor is {self:?}, which belongs to its rank's mesh; wanted a \
                 plain one: take Tensor::to_local or Tensor::full_tensor of it first"
            )));
        }
        match self.device().of("Tensor::to_send")? {
            Device::Cpu => no_grad(|| CLONE.call(args![self])).map(SendTensor),
            device => Err(Error::new(
                Code::Unimplemented,
                format!(
                    "Tensor::to_send: the tensor is on {device:?}, whose work may still be under \
                     way; wanted one in this machine's memory: copy it there first"
                ),
            )),
        }
    }
}

/// A second handle to the same tensor.
impl Clone for Tensor {
    fn clone(&self) -> Tensor {
        Tensor(create!(swv_tensor_share(self.as_const_ptr())).expect("a live handle can be shared"))
    }
}

/// The elements of a plain tensor; "DTensor[7, 5] Float [S(0), R] on DeviceMesh(dp=2, tp=2), local
/// [4, 5] at [0, 0]" of a sharded one, whose elements [`Tensor::values_to_string`] gives: what is
/// formatted communicates nothing, with `{:#}` neither. (`println!` holds the lock of stdout while it
/// formats: ranks that are threads would wait for each other.) A precision (`{:.3}`) changes nothing.
///
/// ```
/// use shardweave::{Placement::*, Tensor, World};
/// World::threads(2).run(|world| {
///     let mesh = world.device_mesh(&[("tp", 2)])?;
///     let x = Tensor::arange(3)?.distribute(&mesh, [("tp", Shard(0))])?;
///     assert_eq!(
///         x.to_string(),
///         format!(
///             "DTensor[3] Long [S(0)] on DeviceMesh(tp=2), local [{}] at [{}]",
///             [2, 1][world.rank()],
///             [0, 2][world.rank()]
///         )
///     );
///     Ok(())
/// })?;
/// # Ok::<(), shardweave::Error>(())
/// ```
impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = text!(swv_tensor_to_string(self.as_const_ptr()));
        // An error of the formatter would be a panic of format!(): the text says what went wrong.
        f.write_str(&text.unwrap_or_else(|error| format!("<{error}>")))
    }
}

/// Sizes and dtype, and how it lies.
impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |f: &mut fmt::Formatter<'_>| -> Result<fmt::Result> {
            if self.is_sharded()? {
                let text = text!(swv_tensor_to_string(self.as_const_ptr()))?;
                return Ok(f.write_str(&text)); // never collective
            }
            Ok(write!(f, "Tensor{:?} {}", self.sizes()?, self.dtype()?))
        };
        text(f).map_err(|_| fmt::Error)?
    }
}
