//! Nothing leaks: a test alone in its process, because it counts all handles there are.

use std::process::Command;

use shardweave::{
    apply, checkpoint, live_handles, AdamW, Function, FunctionContext, Layout, Result, Tensor,
};
use shardweave::{Op, ParameterPlan, Placement::*, Source, TensorOptions, World};

struct Double;

impl Function for Double {
    fn forward(&self, _: &FunctionContext, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![(&inputs[0] * 2.0)?])
    }

    fn backward(
        &self,
        _: &FunctionContext,
        grads: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![grads[0].as_ref().map(|grad| grad * 2.0).transpose()?])
    }
}

struct One(Tensor);

impl shardweave::Module for One {
    fn members(&self, members: &mut shardweave::Members) {
        members.parameter("weight", &self.0);
    }
}

fn everything() -> Result<()> {
    use shardweave::Module;
    World::threads(2).run(|world| {
        let mesh = world.device_mesh(&[("x", 2)])?;
        let model = One(Tensor::ones(&[5, 3])?);
        let plan = ParameterPlan::new().line("weight", &[("x", Shard(0))]);
        model.distribute(&mesh, &plan, Source::Same)?;
        let optimizer = AdamW::new(0.1).build(&model)?;
        let trace = mesh.trace()?;
        let y = apply(Double, &[&model.0], 1)?.remove(0);
        (&y * &y)?.sum()?.backward()?;
        model.finish_grad_sync()?;
        let weight = model.0.clone();
        let [y2] = checkpoint(move |x: &[Tensor]| Ok([(&x[0] * &weight)?]), &[&y.detach()?])?;
        y2.sum()?.backward()?;
        model.finish_grad_sync()?;
        let _ = checkpoint(
            |_| Err::<[Tensor; 1], _>(shardweave::Error::new(shardweave::Code::Unknown, "no")),
            &[&y],
        );
        optimizer.step()?;
        optimizer.state(0, "exp_avg")?;
        let _parts: Vec<Tensor> = y.detach()?.full_tensor()?.split(2, 0)?;
        drop(trace);
        // Errors free what there is.
        let _ = TensorOptions::new().on(&mesh, "[Q]").unwrap_err();
        let _ = Op::find("aten::ad").unwrap_err();
        let _ = apply(Double, &[&y], 2).unwrap_err();
        let _ = y.matmul(&y).unwrap_err();
        world.comm()?.start_all_reduce(vec![1.0f32; 8], shardweave::ReduceOp::Sum)?.wait()?;
        Layout::parse("[R]")
    })?;
    Ok(())
}

#[test]
fn nothing_leaks() {
    const CHECK: &str = "SWV_CHECK_HANDLES"; // looked at when the library is loaded
    if std::env::var_os(CHECK).is_none() {
        let mut again = Command::new(std::env::current_exe().unwrap());
        let output = again.env(CHECK, "1").arg("--nocapture").output().unwrap();
        let (out, err) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{out}\n{err}");
        assert!(out.contains("counted"), "{out}");
        return;
    }
    everything().unwrap(); // operators that are looked up stay
    let before = live_handles().expect("handles are counted");
    for _ in 0..3 {
        everything().unwrap();
    }
    assert_eq!(live_handles(), Some(before));
    println!("{before} handles counted");
}
