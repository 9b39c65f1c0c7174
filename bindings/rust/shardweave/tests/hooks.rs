//! Data parallelism in one call, gradients through a hook of Rust's, and what PowerSGD has learned.

use std::cell::Cell;
use std::rc::Rc;

use shardweave::nn::{self, Layer};
use shardweave::{
    autocast, Code, DType, DataParallelOptions, Error, GradSync, GradSyncOptions, GradientBucket,
    GradientHook, Members, Module, Placement::*, PowerSgd, ReduceOp, Result, Source, Tensor, World,
};

/// What an all-reduce does; counts, and fails if it is told to.
struct Sum {
    begun: Rc<Cell<usize>>,
    fails: bool,
}

impl GradientHook for Sum {
    fn name(&self) -> String {
        "sum".to_owned()
    }
    fn begin(&self, bucket: &GradientBucket) -> Result<()> {
        self.begun.set(self.begun.get() + bucket.parameters.len());
        Ok(())
    }
    fn finish(&self, bucket: &GradientBucket) -> Result<()> {
        assert!(!self.fails, "no more today");
        assert_eq!(bucket.gradients.len(), bucket.parameters.len());
        // The step is under autocast, which is not the hook's.
        let row = bucket.flat.reshape(&[1, -1])?;
        assert_eq!(row.matmul(&row.reshape(&[-1, 1])?)?.dtype()?, DType::F32);
        let mut sums = bucket.flat.to_vec::<f32>()?;
        bucket.comm.all_reduce(&mut sums, ReduceOp::Sum)?;
        bucket.flat.copy_from_slice(&sums)
    }
}

fn step(world: &World, layer: &nn::Linear, mesh: &shardweave::Mesh) -> Result<()> {
    let rows = 1 + world.rank() as i64;
    let mine = [Tensor::ones(&[rows, 8])?, Tensor::ones(&[rows, 7])?];
    let batch = mesh.join_batch(&["dp"], &mine)?.expect("all have rows");
    assert_eq!(batch.ranks_with_input, world.size() as i64);
    // A mere sum's gradient is the same on all ranks, and nobody would send the bias's.
    let sum = (layer.forward(&batch.tensors[0])? * &batch.tensors[1])?.sum()?;
    autocast(DType::Bf16, || {
        sum.backward()?;
        layer.finish_grad_sync()
    })
}

#[test]
fn gradients_go_through_a_hook_and_its_end_is_everyones() {
    for (fails, in_one_call) in [(false, false), (true, false), (false, true), (true, true)] {
        let result = World::threads(3).run(|world| {
            let mesh = world.device_mesh(&[("dp", 3)])?;
            let layer = nn::Linear::new(8, 7)?;
            let begun = Rc::new(Cell::new(0));
            let hook = Sum { begun: Rc::clone(&begun), fails: fails && world.rank() == 1 };
            let sync = if in_one_call {
                let options = DataParallelOptions::new();
                layer.distributed_data_parallel_with_hook(&mesh, &options, hook)?
            } else {
                layer.pre_dp_transform(&mesh, Some("dp"), Source::default())?;
                GradSync::with_hook(&layer, &GradSyncOptions::new(), hook)?
            };
            for _ in 0..3 {
                let stepped = step(world, &layer, &mesh);
                if fails {
                    let error = stepped.expect_err("one rank's hook fails");
                    let text = if world.rank() == 1 { "no more today" } else { "'sum' failed" };
                    assert!(error.to_string().contains(text), "{error}");
                    return Ok(());
                }
                stepped?;
                for (_, parameter) in layer.parameters() {
                    let grad = parameter.grad()?.expect("there is one").full_tensor()?;
                    assert!(grad.to_vec::<f32>()?.iter().all(|sum| *sum == 6.0), "{grad:?}");
                }
                layer.zero_grad()?;
            }
            assert_eq!(begun.get(), 6);
            drop(sync);
            assert_eq!(Rc::strong_count(&begun), 1); // the hook went with it
            Ok::<(), Error>(())
        });
        assert!(result.is_ok(), "{result:?}");
    }
}

/// A module that cannot be registered.
struct Integers(Tensor);

impl Module for Integers {
    fn members(&self, members: &mut Members) {
        members.parameter("index", &self.0);
    }
}

#[test]
fn a_hook_ends_with_the_call_that_did_not_take_it() {
    let world = World::counting(0, 2).unwrap();
    let mesh = world.device_mesh(&[("dp", 2)]).unwrap();
    let module = Integers(Tensor::arange(3).unwrap());
    let begun = Rc::new(Cell::new(0));
    let hook = || Sum { begun: Rc::clone(&begun), fails: false };
    let error = GradSync::with_hook(&module, &GradSyncOptions::new(), hook()).unwrap_err();
    assert!(error.message().contains("has integers"), "{error}");
    let options = DataParallelOptions::new();
    let failed = module.distributed_data_parallel_with_hook(&mesh, &options, hook());
    assert!(failed.unwrap_err().message().contains("has integers"));
    let options = options.mesh_dim("a\0b");
    let layer = nn::Linear::new(3, 5).unwrap();
    let failed = layer.distributed_data_parallel_with_hook(&mesh, &options, hook());
    assert_eq!(failed.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(Rc::strong_count(&begun), 1);
}

#[test]
fn power_sgd_goes_on_from_what_it_has_learned() {
    let result = World::threads(2).run(|world| {
        let mesh = world.device_mesh(&[("dp", 2)])?;
        let layer = nn::Linear::new(8, 7)?;
        let options = DataParallelOptions::new()
            .mesh_dim("dp")
            .sync(GradSyncOptions::new().power_sgd(PowerSgd::new(1).seed(3)));
        let ddp = layer.distributed_data_parallel(&mesh, &options)?;
        let again = layer.distributed_data_parallel(&mesh, &options).expect_err("twice");
        assert_eq!(again.code(), Code::FailedPrecondition);
        for _ in 0..2 {
            step(world, &layer, &mesh)?;
            layer.zero_grad()?;
        }
        let states = ddp.states()?;
        let names: Vec<&str> = states.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["bias.iteration", "weight.error", "weight.iteration", "weight.q"]);
        assert_eq!(states[1].1.sizes()?, [7, 8]);
        ddp.set_states(&states)?;
        let wrong = ddp.set_states(&[("nobody".to_owned(), Tensor::ones(&[1])?)]);
        assert_eq!(wrong.expect_err("no such state").code(), Code::InvalidArgument);
        layer.broadcast_buffers(&mesh, None)?;
        let order = layer.enable_2d_with_fsdp(&mesh, None).expect_err("it is not cut");
        assert_eq!(order.code(), Code::FailedPrecondition);
        let x = Tensor::ones(&[2, 8])?.distribute(&mesh, [("dp", Shard(0))])?;
        layer.forward(&x)?;
        Ok(())
    });
    assert!(result.is_ok(), "{result:?}");
}
