//! Steps that are captured as CUDA graphs.

use std::os::raw::c_void;
use std::ptr;

use shardweave_sys as sys;

use crate::error::Result;
use crate::ffi::status_of;
use crate::mesh::Mesh;
use crate::source::called_here;
use crate::tensor::Tensor;

handle! {
    /// A step on a GPU that is captured once and replayed: the GPU runs its kernels and collectives
    /// again, and the host does nothing for each of them (a CUDA graph).
    ///
    /// ```no_run
    /// use std::cell::RefCell;
    ///
    /// use shardweave::nn::{self, Layer};
    /// use shardweave::{no_grad, CapturedStep, Mesh, Module, Optimizer, Result, Tensor};
    ///
    /// // Of a model and an `x` on this rank's GPU.
    /// fn train(
    ///     mesh: &Mesh,
    ///     model: &nn::Linear,
    ///     optimizer: &Optimizer,
    ///     x: &Tensor,
    ///     batches: &[Tensor],
    /// ) -> Result<()> {
    ///     let loss = RefCell::new(None);
    ///     let step = || {
    ///         optimizer.zero_grad()?;
    ///         let its = model.forward(x)?.sum()?;
    ///         its.backward()?;
    ///         model.finish_grad_sync()?;
    ///         optimizer.step()?;
    ///         loss.replace(Some(its));
    ///         Ok(())
    ///     };
    ///     for _ in 0..3 {
    ///         step()?; // as ever: what is made at first use is there
    ///     }
    ///     let parameters = model.parameters();
    ///     let parameters: Vec<_> = parameters.iter().map(|(_, parameter)| parameter).collect();
    ///     let mut captured = CapturedStep::capture(mesh, &parameters, step)?;
    ///     for (i, batch) in batches.iter().enumerate() {
    ///         no_grad(|| x.copy_(batch))?; // inputs are where they were
    ///         captured.replay()?;
    ///         if i % 100 == 0 {
    ///             let loss = loss.borrow(); // and so are results
    ///             println!("{}", loss.as_ref().expect("the step has one").item::<f32>()?);
    ///         }
    ///     }
    ///     Ok(())
    /// }
    /// # fn main() {}
    /// ```
    ///
    /// All shapes are those of the capture, and so is what the host decides in the step (branches,
    /// numbers that it computes): the next batch and a schedule's learning rate come between
    /// replays, never in the step, and `zero_grad` before the backward, in it. Between replays
    /// anything may be called: it finds the weights as the last one has left them. Read anew in
    /// each replay: steps and learning rates of an
    /// [`Optimizer`](crate::Optimizer) (`Sgd`, `Adam`, `AdamW`); random numbers go on as if the
    /// step had been called (where the library has kernels for them: `--config=cuda`). Closures,
    /// traces and counters see the step once. No number of it may be wanted by the host
    /// ([`Tensor::item`], [`clip_grad_norm`](crate::clip_grad_norm), a
    /// [`GradScaler`](crate::GradScaler)): that is an error.
    ///
    /// What the step allocates stays the graph's as long as this value lives: results and gradients
    /// hold the numbers of the last replay, for which its end waits, and may not be used after it.
    /// Tensors that the step only reads (inputs, weights) must stay where they are, and live.
    /// Neither `Send` nor `Sync`, as the mesh.
    CapturedStep, swv_captured_step, swv_captured_step_free
}

debug_by_name!(CapturedStep);

impl CapturedStep {
    /// Calls `step` once, on this thread; nothing of it runs: the first replay is the first time.
    /// `parameters`: those that the step has gradients for; without backward, a tensor that it
    /// reads. The first one's GPU is the step's.
    ///
    /// [`FailedPrecondition`](crate::Code::FailedPrecondition): LibTorch has no CUDA here, the
    /// backend is not NCCL (one rank needs none), something is being captured already, the step
    /// wants a number on the host, or random numbers without kernels.
    /// [`InvalidArgument`](crate::Code::InvalidArgument): a parameter is on the CPU or on another
    /// GPU; a rank has captured another step. [`Unimplemented`](crate::Code::Unimplemented): a step
    /// of another optimizer. An error of `step` comes out with its code, a panic as an error; the
    /// mesh can be used as before. Collective: all ranks of the mesh capture the same step.
    #[track_caller]
    pub fn capture(
        mesh: &Mesh,
        parameters: &[&Tensor],
        step: impl FnOnce() -> Result<()>,
    ) -> Result<CapturedStep> {
        let _here = called_here();
        let handles: Vec<_> = parameters.iter().map(|tensor| tensor.as_ptr()).collect();
        let mut step = Some(step);
        let mut run = || step.take().map_or(Ok(()), |step| step());
        let mut run: Run<'_> = &mut run;
        create!(swv_captured_step_create(
            mesh.as_ptr(),
            handles.as_ptr(),
            handles.len(),
            Some(run_it),
            ptr::addr_of_mut!(run).cast(),
        ))
        .map(CapturedStep)
    }

    /// Runs the step on the GPU, behind what is there; the host does not wait. All ranks replay it
    /// equally often: a rank that does not is an error on the others. Collective.
    #[track_caller]
    pub fn replay(&mut self) -> Result<()> {
        let _here = called_here();
        call!(swv_captured_step_replay(self.as_ptr()))
    }

    /// So far.
    pub fn replays(&self) -> Result<i64> {
        get!(swv_captured_step_replays(self.as_ptr()) -> i64)
    }
}

type Run<'a> = &'a mut dyn FnMut() -> Result<()>;

unsafe extern "C" fn run_it(run: *mut c_void) -> *mut sys::swv_status {
    status_of(|| {
        // SAFETY: what capture() gave the library, which calls back from within it, on its thread.
        let run = unsafe { &mut *run.cast::<Run<'_>>() };
        run()
    })
}
