use std::cell::RefCell;
use std::ptr::{self, NonNull};
use std::rc::Rc;

use shardweave_sys as sys;

use crate::autograd::Mode;
use crate::error::{Code, Error, Result};
use crate::ffi::c_text;
use crate::field::ModuleField;
use crate::members::Members;
use crate::mesh::Scope;
use crate::module_handle::ModuleHandle;
use crate::source::called_here;
use crate::tensor::Tensor;

handle! {
    /// The C interface's own.
    ForwardHandle, swv_forward, swv_forward_free
}

/// Where a plan meets a module without a weight of its own: a block, an attention. It is a member
/// of the module's struct, and the module's forward runs within it.
///
/// ```
/// use shardweave::{
///     Forward, Module, ParameterPlan, Placement::*, Result, Source, Tensor, World,
/// };
///
/// #[derive(Module)]
/// struct Block {
///     up: Tensor,
///     down: Tensor,
///     forward: Forward, // without the derive macro: `members.forward(&self.forward)`
/// }
///
/// impl Block {
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         let [y] = self.forward.run([x], |[x]| {
///             Ok([x.linear(&self.up, None)?.relu()?.linear(&self.down, None)?])
///         })?;
///         Ok(y)
///     }
/// }
///
/// World::threads(2).run(|world| {
///     let mesh = world.device_mesh(&[("tp", 2)])?;
///     let block = Block {
///         up: Tensor::ones(&[8, 3])?,
///         down: Tensor::ones(&[3, 8])?,
///         forward: Forward::new(),
///     };
///     // Sequence parallel: outside of the block every rank has a part of the tokens.
///     let plan = ParameterPlan::new()
///         .line("up", &[("tp", Shard(0))])
///         .line("down", &[("tp", Shard(1))])
///         .forward("input", &[("tp", Replicate)])
///         .forward("output", &[("tp", Shard(0))]);
///     block.distribute(&mesh, &plan, Source::Same)?;
///     let x = Tensor::ones(&[5, 3])?.distribute(&mesh, [("tp", Shard(0))])?;
///     let y = block.forward(&x)?;
///     assert_eq!(y.layout()?.to_string(), "[S(0)]");
///     assert_eq!(y.full_tensor()?.to_vec::<f32>()?, [24.0; 15]);
///     Ok(())
/// })?;
/// # Ok::<(), shardweave::Error>(())
/// ```
///
/// A clone is the same one.
#[derive(Clone, Default)]
pub struct Forward(Rc<RefCell<Option<ForwardHandle>>>);

impl Forward {
    /// Of a module that no plan was applied to.
    pub fn new() -> Forward {
        Forward::default()
    }

    /// Calls `body` with the inputs as the plan wants them, and gives its outputs, as the plan wants
    /// those; meanwhile traces and errors say that the module runs. Before
    /// [`Module::distribute`](crate::Module::distribute), or where the plan says nothing of the
    /// module, they are as they come. Collective as what the plan says is.
    #[track_caller]
    pub fn run<const N: usize, const M: usize>(
        &self,
        inputs: [&Tensor; N],
        body: impl FnOnce([Tensor; N]) -> Result<[Tensor; M]>,
    ) -> Result<[Tensor; M]> {
        let given = inputs.map(|tensor| tensor.as_const_ptr());
        let mut laid_out = [ptr::null_mut(); N];
        // Not borrowed while the body runs, which may distribute, or run this again.
        let here = called_here();
        let scope = match &*self.0.borrow() {
            Some(forward) => Some(create!(swv_forward_begin(
                forward.as_ptr(),
                Mode::current(),
                given.as_ptr(),
                given.len(),
                laid_out.as_mut_ptr(),
            ))?),
            None => None,
        };
        let scope = match scope {
            Some(scope) => Scope::from_handle(scope),
            None => {
                drop(here);
                return body(inputs.map(Tensor::clone));
            }
        };
        drop(here);
        let outputs = body(laid_out.map(own))?;
        let mut given = [ptr::null(); M];
        for (handle, output) in given.iter_mut().zip(&outputs) {
            *handle = output.as_const_ptr();
        }
        let mut laid_out = [ptr::null_mut(); M];
        let _here = called_here();
        call!(
            swv_forward_end(scope.as_ptr(), given.as_ptr(), given.len(), laid_out.as_mut_ptr(),)
        )?;
        Ok(laid_out.map(own))
    }

    /// The same object.
    pub(crate) fn is_same(&self, other: &Forward) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// What a plan was applied to.
    pub(crate) fn set(&self, handle: ForwardHandle) {
        *self.0.borrow_mut() = Some(handle);
    }
}

fn own(handle: *mut sys::swv_tensor) -> Tensor {
    Tensor::from_handle(NonNull::new(handle).expect("one for each that was given"))
}

/// Announces that the module `fqn` in `module` is run by a [`Forward`].
pub(crate) fn forward_of(module: &ModuleHandle, fqn: &str) -> Result<ForwardHandle> {
    let name = c_text(fqn, "name")?;
    let made = create!(swv_module_forward(module.as_ptr(), name.as_ptr()));
    match made {
        Err(error) if error.code() == Code::NotFound => {
            // Nothing has a name in it: it is no module there yet.
            let empty = ModuleHandle::new()?;
            call!(swv_module_add_child(module.as_ptr(), name.as_ptr(), empty.as_ptr()))?;
            create!(swv_module_forward(module.as_ptr(), name.as_ptr())).map(ForwardHandle)
        }
        made => made.map(ForwardHandle),
    }
}

/// That each belongs to one module.
pub(crate) fn check_distinct(forwards: &[(String, Forward)]) -> Result<()> {
    for (i, (name, forward)) in forwards.iter().enumerate() {
        if let Some((other, _)) = forwards[..i].iter().find(|(_, other)| other.is_same(forward)) {
            return Err(Error::invalid(format!(
                "Members::forward: '{other}' and '{name}' have one Forward; wanted one each"
            )));
        }
    }
    Ok(())
}

/// Of the struct whose field it is.
impl ModuleField for Forward {
    fn register(&self, _: &str, members: &mut Members) {
        members.forward(self);
    }
}

debug_by_name!(Forward);
