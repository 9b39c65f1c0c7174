//! Closures in place of the library's forwards.

use std::ffi::{c_void, CStr, CString};
use std::ptr::{self, NonNull};

use shardweave_sys as sys;

use crate::autograd::{drop_segment, inputs_of, Mode, Segment};
use crate::error::{Error, Of, Result};
use crate::ffi::{c_text, status_of};
use crate::native_module::NativeModule;
use crate::source::called_here;
use crate::tensor::Tensor;

/// One run of a forward that [`NativeModule::patch`] is in place of.
pub struct PatchCall<'a> {
    context: NonNull<sys::swv_function_context>,
    module: NonNull<sys::swv_module>,
    fqn: &'a str,
    inputs: &'a [Option<Tensor>],
}

impl PatchCall<'_> {
    /// The name of the module whose forward it is, in the one that was patched.
    pub fn fqn(&self) -> &str {
        self.fqn
    }

    /// That module. What the closure would hold of it would keep it, and so itself.
    pub fn module(&self) -> Result<NativeModule> {
        create!(swv_module_share(self.module.as_ptr())).map(NativeModule::own)
    }

    /// The tensors that its forward takes: `None` for one that it is not given.
    pub fn inputs(&self) -> &[Option<Tensor>] {
        self.inputs
    }

    /// The one at this place, which has to be there.
    pub fn input(&self, index: usize) -> Result<&Tensor> {
        self.inputs.get(index).and_then(Option::as_ref).ok_or_else(|| {
            Error::invalid(format!(
                "PatchCall::input: argument 'index' is {index}; the forward of '{}' has no such \
                 input among {}",
                self.fqn,
                self.inputs.len()
            ))
        })
    }

    /// What would have run without the patch, on other inputs or the same, as often as wanted.
    /// Inputs that are left out at the end are not given.
    #[track_caller]
    pub fn forward<const N: usize>(&self, inputs: &[&Tensor]) -> Result<[Tensor; N]> {
        let _here = called_here();
        let mut handles: Vec<_> = inputs.iter().map(|tensor| tensor.as_const_ptr()).collect();
        handles.resize(handles.len().max(self.inputs.len()), ptr::null());
        let mut outputs = [ptr::null_mut(); N];
        call!(swv_function_context_original(
            self.context.as_ptr(),
            Mode::current(),
            handles.as_ptr(),
            handles.len(),
            outputs.as_mut_ptr(),
            outputs.len(),
        ))?;
        Ok(outputs
            .map(|output| Tensor::from_handle(NonNull::new(output).expect("one for every output"))))
    }
}

impl std::fmt::Debug for PatchCall<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PatchCall").field("fqn", &self.fqn).finish_non_exhaustive()
    }
}

impl NativeModule {
    /// From now on the closure runs in place of the forward of every module of this name in it
    /// (`pattern` as in plans; `""` is the module itself), whoever calls it, between the inputs and
    /// outputs of a plan, which may come before or after. A module that is patched already gives its
    /// patched forward to the new closure. It gives as many results as the forward, and runs on this
    /// thread; the same on every rank.
    ///
    /// ```
    /// use shardweave::{args, NativeModule, PatchCall, Tensor};
    /// let options = r#"{"layers": [{"kind": "Linear", "in_features": 3, "out_features": 4},
    ///                              {"kind": "GELU"}]}"#;
    /// let model = NativeModule::new("Sequential", options)?;
    /// model.patch("1", |call: &PatchCall| {
    ///     let x = call.input(0)?;
    ///     let [y] = call.forward(&[x])?; // LibTorch's own
    ///     Ok([(x + &y)?])
    /// })?;
    /// let y: Tensor = model.call(args![&Tensor::ones(&[2, 3])?])?;
    /// let error = model.patch("2", |call: &PatchCall| call.forward::<1>(&[])).unwrap_err();
    /// assert!(error.message().contains("no module is called '2'"), "{error}");
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    ///
    /// LibTorch's layers inside of a model (its Linear, its Embedding) are called directly, and are
    /// an error: patch what calls them. So are modules in Rust, which wrap what they hold
    /// themselves.
    pub fn patch<F, const N: usize>(&self, pattern: &str, function: F) -> Result<()>
    where
        F: Fn(&PatchCall) -> Result<[Tensor; N]> + 'static,
    {
        const NAME: &str = "NativeModule::patch";
        let pattern = c_text(pattern, "pattern").of(NAME)?;
        let name: CString = c_text(std::any::type_name::<F>(), "name")?;
        let mut raw = sys::SWV_PATCH_INIT;
        raw.name = name.as_ptr();
        raw.user_data = Segment::leaked(function);
        raw.forward = Some(run_patch::<F, N>);
        raw.drop = Some(drop_segment::<F>);
        // Drops the closure also if it fails.
        call!(swv_module_patch(self.as_ptr(), pattern.as_ptr(), &raw))
    }
}

unsafe extern "C" fn run_patch<F, const N: usize>(
    patch: *mut c_void,
    call: *const sys::swv_function_call,
) -> *mut sys::swv_status
where
    F: Fn(&PatchCall) -> Result<[Tensor; N]> + 'static,
{
    status_of(|| {
        // SAFETY: what patch() gave the library.
        let function = unsafe { Segment::<F>::on_its_thread(patch, "patch")? };
        // SAFETY: what the header says of the call.
        let (call, inputs) = unsafe { (&*call, inputs_of(&*call)) };
        if call.num_outputs != N {
            return Err(Error::invalid(format!(
                "the patch gives {N} tensors; wanted {}",
                call.num_outputs
            )));
        }
        let patched = PatchCall {
            context: NonNull::new(call.context).expect("a patch has a context"),
            module: NonNull::new(call.module).expect("and a module"),
            // SAFETY: a text, that lives during the call.
            fqn: unsafe { CStr::from_ptr(call.fqn) }.to_str().unwrap_or("?"),
            inputs,
        };
        let results = Mode::from_number(call.mode)?.around(|| function(&patched))?;
        for (i, result) in results.into_iter().enumerate() {
            // SAFETY: there is room for N; the library takes the handle over.
            unsafe { *call.outputs.add(i) = result.into_raw() };
        }
        Ok(())
    })
}
