//! What a program has frozen before it shards a model is not trained afterwards.
#![cfg(feature = "derive")]

use shardweave::nn::{self, Layer};
use shardweave::{
    debug, no_grad, AdamW, DataParallelOptions, FullyShardOptions, GradSync, GradSyncOptions,
    GradientBucket, GradientHook, Mesh, Module, ParameterPlan, Placement::*, ReduceOp, Result,
    Source, Tensor, World,
};

/// A linear layer that stays as it is, and what is trained beside it.
#[derive(Module)]
struct Tuned {
    base: nn::Linear,
    /// As a program makes a tensor.
    table: Tensor,
    lora_down: nn::Linear,
    lora_up: nn::Linear,
    /// Nobody has said anything about it: a parameter like any.
    lora_scale: Tensor,
}

impl Tuned {
    fn new() -> Result<Tuned> {
        Ok(Tuned {
            base: nn::Linear::new(5, 3)?,
            table: Tensor::ones(&[3])?,
            lora_down: nn::Linear::new(5, 2)?,
            lora_up: nn::Linear::new(2, 3)?,
            lora_scale: Tensor::ones(&[3])?,
        })
    }
}

impl Layer for Tuned {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let tuned = self.lora_up.forward(&self.lora_down.forward(x)?)?;
        (self.base.forward(x)? * &self.table)? + (tuned * &self.lora_scale)?
    }
}

struct Sum;

impl GradientHook for Sum {
    fn name(&self) -> String {
        "sum".to_owned()
    }
    fn finish(&self, bucket: &GradientBucket) -> Result<()> {
        let mut sums = bucket.flat.to_vec::<f32>()?;
        bucket.comm.all_reduce(&mut sums, ReduceOp::Sum)?;
        bucket.flat.copy_from_slice(&sums)
    }
}

/// What has to live as long as the training.
type Kept = Option<GradSync>;
type Shard = fn(&Tuned, &Mesh) -> Result<Kept>;

fn distribute(model: &Tuned, mesh: &Mesh) -> Result<Kept> {
    model.distribute(mesh, &ParameterPlan::new(), Source::default()).map(|()| None)
}

const WAYS: [(&str, Shard); 7] = [
    ("distribute", distribute),
    ("fully_shard", |model, mesh| {
        model.fully_shard(mesh, &FullyShardOptions::new())?;
        Ok(None)
    }),
    ("fully_shard of what is distributed", |model, mesh| {
        distribute(model, mesh)?;
        model.fully_shard(mesh, &FullyShardOptions::new().unit("lora_*").unit("base"))?;
        Ok(None)
    }),
    ("distributed_data_parallel", |model, mesh| {
        model.distributed_data_parallel(mesh, &DataParallelOptions::new()).map(Some)
    }),
    ("distributed_data_parallel_with_hook", |model, mesh| {
        let options = DataParallelOptions::new();
        model.distributed_data_parallel_with_hook(mesh, &options, Sum).map(Some)
    }),
    ("pre_dp_transform", |model, mesh| {
        model.pre_dp_transform(mesh, None, Source::default())?;
        GradSync::new(model).map(Some)
    }),
    ("GradSync", |model, mesh| {
        distribute(model, mesh)?;
        GradSync::with_hook(model, &GradSyncOptions::new(), Sum).map(Some)
    }),
];

fn values(model: &Tuned) -> Result<Vec<(String, Vec<f32>)>> {
    let mut all = Vec::new();
    for (name, parameter) in model.parameters() {
        all.push((name, no_grad(|| parameter.full_tensor()?.detach()?.to_vec::<f32>())?));
    }
    Ok(all)
}

#[test]
fn what_is_frozen_is_not_trained_however_it_is_sharded() {
    for (way, shard) in WAYS {
        let run = World::threads(2).run(|world| {
            let mesh = world.device_mesh(&[("dp", 2)])?;
            let model = Tuned::new()?;
            for (name, parameter) in model.parameters() {
                if !name.contains("lora") {
                    parameter.set_requires_grad(false)?;
                }
            }
            debug::dump(&model)?; // looking at it changes neither
            let _kept = shard(&model, &mesh)?;
            for (name, parameter) in model.parameters() {
                assert_eq!(parameter.requires_grad()?, name.contains("lora"), "{way}: {name}");
            }
            let optimizer = AdamW::new(1e-1).build(&model)?;
            let before = values(&model)?;
            let x = Tensor::ones(&[4, 5])?.distribute(&mesh, [("dp", Shard(0))])?;
            model.forward(&x)?.sum()?.backward()?;
            model.finish_grad_sync()?;
            optimizer.step()?;
            for (name, parameter) in model.parameters() {
                assert_eq!(parameter.grad()?.is_some(), name.contains("lora"), "{way}: {name}");
            }
            for ((name, was), (_, is)) in before.iter().zip(values(&model)?) {
                assert_eq!(
                    *was != is,
                    name.contains("lora"),
                    "{way}: {name} was {was:?}, is {is:?}"
                );
            }
            Ok(())
        });
        run.unwrap_or_else(|error| panic!("{way}: {error}"));
    }
}

/// What was frozen once and is not any more is trained.
#[test]
fn what_is_thawed_is_trained() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("dp", 2)])?;
            let model = Tuned::new()?;
            for (_, parameter) in model.parameters() {
                parameter.set_requires_grad(false)?;
                parameter.set_requires_grad(true)?;
            }
            distribute(&model, &mesh)?;
            for (name, parameter) in model.parameters() {
                assert_eq!(parameter.requires_grad(), Ok(true), "{name}");
            }
            model.base.weight.set_requires_grad(false)?;
            model.fully_shard(&mesh, &FullyShardOptions::new())?;
            assert_eq!(model.base.weight.requires_grad(), Ok(false));
            Ok(())
        })
        .unwrap();
}
