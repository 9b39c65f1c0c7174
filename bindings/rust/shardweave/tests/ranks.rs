//! What ranks compute, on many meshes; the answer of plain tensors is the oracle. And what they say
//! when something is wrong.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use shardweave::{
    apply, args, autocast, checkpoint, gradients, no_grad, AdamW, BackwardOptions, Code, Complex,
    CostModel, DType, DeviceCost, Error, Function, FunctionContext, Layout, LinkCost, Members,
    Module, Op, ParameterPlan, Placement, Placement::*, ReduceOp, Result, ScriptModule, Sgd,
    Source, Tensor, TensorOptions, Value, World,
};

const MESHES: [&[(&str, i64)]; 6] = [
    &[("x", 1)],
    &[("x", 2)],
    &[("x", 3)],
    &[("x", 4)],
    &[("x", 2), ("y", 2)],
    &[("x", 2), ("y", 2), ("z", 2)],
];

fn ranks_of(mesh: &[(&str, i64)]) -> usize {
    mesh.iter().map(|(_, size)| *size as usize).product()
}

/// Runs on every mesh.
fn on_meshes(body: impl Fn(&World, &shardweave::Mesh) -> Result<()> + Sync) {
    for dims in MESHES {
        World::threads(ranks_of(dims))
            .run(|world| body(world, &world.device_mesh(dims)?))
            .unwrap_or_else(|error| panic!("{dims:?}: {error}"));
    }
}

/// 7x5: divides by nothing.
fn sample() -> Result<Tensor> {
    let numbers: Vec<f32> = (0..35).map(|i| ((i * 37 % 23) as f32 - 11.0) / 7.0).collect();
    Tensor::from_slice(&numbers, &[7, 5])
}

/// A layout for each number of mesh dimensions; `i` chooses.
fn layout(mesh: &shardweave::Mesh, i: usize) -> Result<Layout> {
    let choices = [Shard(0), Shard(1), Replicate];
    let dims = mesh.shape()?.len();
    Layout::new(&(0..dims).map(|d| choices[(i + d) % 3].clone()).collect::<Vec<_>>())
}

fn expect_close(sharded: &Tensor, plain: &Tensor) -> Result<()> {
    let whole = sharded.full_tensor()?;
    let (a, b) = (whole.detach()?.to_vec::<f32>()?, plain.detach()?.to_vec::<f32>()?);
    assert_eq!(whole.sizes()?, plain.sizes()?);
    for (a, b) in a.iter().zip(&b) {
        assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{a} and {b}");
    }
    Ok(())
}

type Unary = fn(&Tensor) -> Result<Tensor>;

#[test]
fn operators_and_gradients_are_those_of_plain_tensors() {
    let operators: [(&str, Unary); 24] = [
        ("x + x", |x| x + x),
        ("x * x - 1", |x| (x * x)? - 1.0),
        ("2 - x", |x| 2.0 - x),
        ("1 / (x + 10)", |x| 1.0 / (x + 10.0)?),
        ("-x", |x| -x),
        ("x / (x * x + 1)", |x| x / ((x * x)? + 1.0)?),
        ("relu", Tensor::relu),
        ("gelu", Tensor::gelu),
        ("silu", Tensor::silu),
        ("tanh", Tensor::tanh),
        ("sigmoid", Tensor::sigmoid),
        ("exp", Tensor::exp),
        ("abs", Tensor::abs),
        ("pow", |x| x.pow(3.0)),
        ("clamp", |x| x.clamp(-0.5, 0.5)),
        ("softmax", |x| x.softmax(1)),
        ("log_softmax", |x| x.log_softmax(0)),
        ("sum_dims", |x| x.sum_dims(&[0], true)),
        ("mean", Tensor::mean),
        ("cumsum", |x| x.cumsum(0)),
        ("transpose, matmul", |x| x.matmul(&x.transpose(0, 1)?)),
        ("narrow", |x| x.narrow(0, 2, 4)),
        ("cat", |x| Tensor::cat(&[x.clone(), (x * 2.0)?], 0)),
        ("unsqueeze, squeeze", |x| x.unsqueeze(1)?.squeeze(1)),
    ];
    on_meshes(|_, mesh| {
        for i in 0..3 {
            for (name, operator) in operators {
                let run = |x: &Tensor| -> Result<(Tensor, Tensor)> {
                    let y = operator(x)?;
                    (&y * &y)?.sum()?.backward()?;
                    Ok((y, x.grad()?.expect("it requires grad")))
                };
                let plain = sample()?;
                plain.set_requires_grad(true)?;
                let sharded = sample()?.distribute(mesh, layout(mesh, i)?)?;
                sharded.set_requires_grad(true)?;
                let (expected, result) =
                    (run(&plain)?, run(&sharded).map_err(|e| e.context(name))?);
                expect_close(&result.0, &expected.0).map_err(|e| e.context(name))?;
                expect_close(&result.1, &expected.1).map_err(|e| e.context(name))?;
            }
        }
        Ok(())
    });
}

#[test]
fn every_layout_to_every_other() {
    on_meshes(|_, mesh| {
        for i in 0..3 {
            for j in 0..3 {
                let x = sample()?.distribute(mesh, layout(mesh, i)?)?;
                let y = x.redistribute(layout(mesh, j)?)?;
                assert_eq!(y.layout()?, layout(mesh, j)?);
                expect_close(&y, &sample()?)?;
                let local = y.to_local()?;
                let again = Tensor::from_local(&local, mesh, layout(mesh, j)?, Some(&[7, 5]))?;
                expect_close(&again, &sample()?)?;
            }
        }
        Ok(())
    });
}

#[test]
fn random_numbers_do_not_depend_on_the_mesh() {
    let mut all = Vec::new();
    for dims in MESHES {
        let numbers = World::threads(ranks_of(dims)).run(|world| {
            let mesh = world.device_mesh(dims)?;
            mesh.seed(7)?;
            let x = TensorOptions::new().on(&mesh, layout(&mesh, 0)?)?.randn(&[7, 5])?;
            let state = mesh.random_state()?;
            let y = TensorOptions::new().on(&mesh, layout(&mesh, 1)?)?.rand(&[7, 5])?;
            mesh.set_random_state(state)?;
            let z = TensorOptions::new().on(&mesh, layout(&mesh, 2)?)?.rand(&[7, 5])?;
            assert_eq!(y.full_tensor()?.to_vec::<f32>()?, z.full_tensor()?.to_vec::<f32>()?);
            x.full_tensor()?.to_vec::<f32>()
        });
        all.extend(numbers.unwrap());
    }
    assert!(all.iter().all(|numbers| *numbers == all[0]));
    // Numbers, and not one of them.
    assert!(all[0].windows(2).all(|pair| pair[0] != pair[1]), "{:?}", all[0]);
    assert!(all[0].iter().any(|number| *number < 0.0) && all[0].iter().any(|number| *number > 0.0));
}

struct Layer {
    weight: Tensor,
    bias: Tensor,
    scale: Tensor,
}

impl Module for Layer {
    fn members(&self, members: &mut Members) {
        members.parameter("weight", &self.weight);
        members.parameter("bias", &self.bias);
        members.buffer("scale", &self.scale);
    }
}

impl Layer {
    fn new() -> Result<Layer> {
        let bias = Tensor::from_slice(&[0.1f32; 7], &[7])?;
        let layer = Layer { weight: sample()?, bias, scale: Tensor::full(&[7], 0.5)? };
        layer.parameters().iter().try_for_each(|(_, tensor)| tensor.set_requires_grad(true))?;
        Ok(layer)
    }

    fn loss(&self, x: &Tensor) -> Result<Tensor> {
        let y = (x.linear(&self.weight, Some(&self.bias))? * &self.scale)?;
        (&y * &y)?.mean()
    }
}

#[test]
fn training_is_that_of_one_rank() {
    let optimizers: [fn(&Layer) -> Result<shardweave::Optimizer>; 4] = [
        |layer| AdamW::new(0.01).build(layer),
        |layer| {
            AdamW::new(0.01).betas(0.8, 0.9).eps(1e-6).weight_decay(0.1).amsgrad(true).build(layer)
        },
        |layer| Sgd::new(0.05).build(layer),
        |layer| Sgd::new(0.05).momentum(0.9).weight_decay(0.01).nesterov(true).build(layer),
    ];
    on_meshes(|_, mesh| {
        for make in optimizers {
            let run = |layer: &Layer, x: &Tensor| -> Result<Vec<f64>> {
                let optimizer = make(layer)?;
                let mut losses = Vec::new();
                for _ in 0..4 {
                    let loss = layer.loss(x)?;
                    loss.backward()?;
                    layer.finish_grad_sync()?;
                    optimizer.step()?;
                    optimizer.zero_grad()?;
                    losses.push(loss.item()?);
                }
                optimizer.set_learning_rate(0.0)?;
                assert_eq!(optimizer.learning_rate()?, 0.0);
                Ok(losses)
            };
            let (alone, together) = (Layer::new()?, Layer::new()?);
            let plan = ParameterPlan::new().line("{weight,bias}", &[("x", Shard(0))]);
            together.distribute(mesh, &plan, Source::Same)?;
            assert!(together.scale.is_sharded()?, "in place");
            let x = sample()?.distribute(mesh, layout(mesh, 2)?)?;
            let (expected, losses) = (run(&alone, &sample()?)?, run(&together, &x)?);
            assert!(expected[3] < expected[0]);
            for (a, b) in losses.iter().zip(&expected) {
                assert!((a - b).abs() < 1e-5, "{losses:?} and {expected:?}");
            }
            expect_close(&together.weight, &alone.weight)?;
        }
        Ok(())
    });
}

/// tests/data/linear.pt, which capi/script_module_test.cc wrote: forward(x, scale=2) is
/// (x weight' + offset) scale, with inner.weight 0 .. 11 / 7 and inner.offset 1, and inner.frozen is
/// not trained; both(x) gives x too;
/// turned(z, by=None) multiplies complex numbers.
#[test]
fn torch_script_modules_are_sharded_and_trained() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/linear.pt");
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, -1.0, 0.0, 5.0], &[2, 3]).unwrap();
    let alone = ScriptModule::load(path).unwrap();
    let expected: Tensor = alone.call("forward", args![&x]).unwrap();
    assert!((expected.to_vec::<f32>().unwrap()[0] - (8.0 / 7.0 + 1.0) * 2.0).abs() < 1e-5);
    let (same, half): (Tensor, Tensor) = alone.call("both", args![&x]).unwrap();
    assert_eq!((same.sizes().unwrap(), half.sizes().unwrap()), (vec![2, 3], vec![2, 4]));
    // turned(z, by=None) is z, or z by: complex numbers, which real ones are, too.
    let (z, i) = (Complex { re: 1.0, im: 2.0 }, Complex { re: 0.0, im: 1.0 });
    assert_eq!(alone.call::<Complex<f64>>("turned", args![z]).unwrap(), z);
    let turned: Complex<f64> = alone.call("turned", args![z, i]).unwrap();
    assert_eq!(turned, Complex { re: -2.0, im: 1.0 });
    assert_eq!(
        alone.call::<Complex<f64>>("turned", args![0.5, i]).unwrap(),
        Complex { re: 0.0, im: 0.5 }
    );
    let error = alone.call::<Tensor>("froward", args![&x]).unwrap_err();
    assert!(error.message().contains("did you mean 'forward'"), "{error}");

    let (x, expected) =
        (x.to_vec::<f32>().unwrap(), expected.detach().unwrap().to_vec::<f32>().unwrap());
    World::threads(3)
        .run(|world| {
            let mesh = world.device_mesh(&[("tp", 3)])?;
            let x = Tensor::from_slice(&x, &[2, 3])?.distribute(&mesh, "[R]")?;
            let gathered = ScriptModule::load(path)?;
            let plan = ParameterPlan::new()
                .line("inner.weight", &[("tp", Shard(0))])
                .forward("inner.output", &[("tp", Replicate)]);
            gathered.distribute(&mesh, &plan, Source::Same)?;
            let y: Tensor = gathered.call("forward", args![&x])?;
            assert_eq!(y.layout()?, Layout::parse("[R]")?);
            let odd = ParameterPlan::new().forward("a\"\\\n.output", &[("tp", Replicate)]);
            let error =
                ScriptModule::load(path)?.distribute(&mesh, &odd, Source::Same).unwrap_err();
            assert!(error.message().contains("'a\"\\\n.output' matches no module"), "{error}");

            let module = ScriptModule::load(path)?;
            let plan = ParameterPlan::new().line("inner.*", &[("tp", Shard(0))]);
            module.distribute(&mesh, &plan, Source::Same)?;
            for (name, parameter) in module.parameters() {
                assert_eq!(parameter.requires_grad()?, name != "inner.frozen", "as it was saved");
            }
            let y: Tensor = module.call("forward", args![&x])?;
            assert_eq!(y.layout()?, Layout::parse("[S(1)]")?);
            expect_close(&y, &Tensor::from_slice(&expected, &[2, 4])?)?;
            let optimizer = Sgd::new(1e-3).build(&module)?;
            let loss = |y: Tensor| (&y * &y)?.sum();
            let before = loss(y)?;
            before.backward()?;
            module.finish_grad_sync()?;
            optimizer.step()?;
            let after = loss(module.call("forward", args![&x])?)?;
            assert!(after.item::<f64>()? < before.item::<f64>()?);
            Ok(())
        })
        .unwrap();
}

#[test]
fn optimizers_have_sharded_state() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("x", 2)])?;
            let layer = Layer::new()?;
            let plan = ParameterPlan::new().line("weight", &[("x", Shard(0))]);
            layer.distribute(&mesh, &plan, Source::Rank(1))?;
            let optimizer = AdamW::new(0.01).build(&layer)?;
            let average = optimizer.state(0, "exp_avg")?.expect("before the first step");
            assert_eq!(average.abs()?.sum()?.item::<f64>()?, 0.0);
            layer.loss(&sample()?.distribute(&mesh, "[R]")?)?.backward()?;
            layer.finish_grad_sync()?;
            optimizer.step()?;
            let state = optimizer.state(0, "exp_avg")?.expect("after a step");
            assert_eq!(state.layout()?, Layout::new(&[Shard(0)])?);
            let norm = layer.clip_grad_norm(0.01)?;
            assert!(norm > 0.01, "{norm}");
            assert!((layer.clip_grad_norm(1.0)? - 0.01).abs() < 1e-4);
            layer.zero_grad()?;
            assert!(layer.weight.grad()?.is_none());
            Ok(())
        })
        .unwrap();
}

#[test]
fn plans_that_do_not_fit() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("x", 2)])?;
            let layer = Layer::new()?;
            let plan = ParameterPlan::new().line("wieght", &[("x", Shard(0))]);
            let error = layer.distribute(&mesh, &plan, Source::Same).unwrap_err();
            assert!(error.message().contains("wieght"), "{error}");
            assert!(!layer.weight.is_sharded()?, "nothing has changed");
            let plan = ParameterPlan::new().line("weight", &[("tp", Shard(0))]);
            assert!(layer.distribute(&mesh, &plan, Source::Same).is_err());
            Ok(())
        })
        .unwrap();
}

#[cfg(feature = "serde")]
#[test]
fn texts_that_are_no_plans() {
    for text in [
        "[]",
        "{\"buffer\": {}}",
        "{\"parameter\": {\"*\": {\"tp\": \"Q\"}}}",
        "{\"parameter\": 3}",
    ] {
        assert!(serde_json::from_str::<ParameterPlan>(text).is_err(), "{text}");
    }
}

#[test]
fn collectives_move_what_they_say() {
    for size in [1usize, 2, 3, 4] {
        World::threads(size)
            .run(|world| {
                let comm = world.comm()?.with_tag("test")?;
                let (rank, n) = (world.rank(), size);
                assert_eq!((comm.rank()?, comm.size()?), (rank as i64, n as i64));

                let mut data = vec![rank as i64 + 1; 3];
                comm.all_reduce(&mut data, ReduceOp::Product)?;
                assert_eq!(data, vec![(1..=n as i64).product::<i64>(); 3]);

                let mut all = vec![0u8; 2 * n];
                comm.all_gather(&[rank as u8; 2], &mut all)?;
                assert_eq!(all, (0..2 * n).map(|i| (i / 2) as u8).collect::<Vec<_>>());

                // Rank r has r elements: rank 0 none.
                let counts: Vec<i64> = (0..n as i64).collect();
                let mut all = vec![9i32; n * (n - 1) / 2];
                comm.all_gather_v(&vec![rank as i32; rank], &mut all, &counts)?;
                let expected = (0..n as i32).flat_map(|r| vec![r; r as usize]);
                assert_eq!(all, expected.collect::<Vec<_>>());

                let mut part = [0f64];
                let input: Vec<f64> = (0..n).map(|i| i as f64).collect();
                comm.reduce_scatter(&input, &mut part, ReduceOp::Sum)?;
                assert_eq!(part, [(rank * n) as f64]);

                let mut part = vec![0f32; rank];
                let input = vec![1f32; n * (n - 1) / 2];
                comm.reduce_scatter_v(&input, &mut part, &counts, ReduceOp::Sum)?;
                assert_eq!(part, vec![n as f32; rank]);

                let mut out = vec![0u16; n];
                let input: Vec<u16> = (0..n).map(|to| (10 * rank + to) as u16).collect();
                comm.all_to_all(&input, &mut out)?;
                assert_eq!(out, (0..n).map(|from| (10 * from + rank) as u16).collect::<Vec<_>>());
                comm.all_to_all_v(&input, &vec![1; n], &mut out, &vec![1; n])?;
                assert_eq!(out, (0..n).map(|from| (10 * from + rank) as u16).collect::<Vec<_>>());

                let root = n - 1;
                let mut data = [rank as i8];
                comm.broadcast(&mut data, root)?;
                assert_eq!(data, [root as i8]);

                let mut out = vec![0u64; n];
                let mine = if rank == root { Some(&mut out[..]) } else { None };
                comm.gather(&[rank as u64], mine, root)?;
                let mut back = [99u64];
                comm.scatter((rank == root).then(|| &out[..]), &mut back, root)?;
                assert_eq!(back, [rank as u64]);

                let mut sum = [0i64];
                let mine = if rank == root { Some(&mut sum[..]) } else { None };
                comm.reduce(&[1], mine, ReduceOp::Sum, root)?;
                assert_eq!(sum[0], if rank == root { n as i64 } else { 0 });

                if n > 1 && rank < 2 {
                    let mut got = [0f32; 4];
                    let pending = comm.start_recv(vec![0f32; 4], 1 - rank, 5)?;
                    comm.send(&[rank as f32; 4], 1 - rank, 5)?;
                    got.copy_from_slice(&pending.wait()?);
                    assert_eq!(got, [1.0 - rank as f32; 4]);
                }
                let pending = comm.start_broadcast(vec![rank as i32; 5], 0)?;
                drop(pending); // waits

                let color = (rank % 2 == 0).then_some(0);
                let evens = comm.split(color, -(rank as i32), "evens")?;
                assert_eq!(evens.is_some(), rank % 2 == 0);
                if let Some(evens) = evens {
                    let ranks = evens.world_ranks()?;
                    assert!(ranks.windows(2).all(|pair| pair[0] > pair[1]), "{ranks:?}");
                }
                let issued = comm.counters()?;
                assert_eq!(issued.of("all_gather_v").calls, 1);
                assert!(issued.total().calls >= 12);
                comm.barrier()?;
                comm.health()
            })
            .unwrap_or_else(|error| panic!("{size} ranks: {error}"));
    }
}

#[test]
fn wrong_calls_are_errors_of_every_rank() {
    let results = World::threads(3).run(|world| {
        let comm = world.comm()?;
        let mut data = [1.0f32; 2];
        let result = match world.rank() {
            2 => comm.barrier(),
            _ => comm.all_reduce(&mut data, ReduceOp::Sum),
        };
        let error = result.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.message().contains("barrier"), "{error}");
        assert!(error.message().contains("all_reduce"), "{error}");
        Ok(comm.health().is_err())
    });
    assert_eq!(results.unwrap(), [true; 3]);

    World::threads(2)
        .run(|world| {
            let comm = world.comm()?;
            let error = comm.all_gather(&[1u8; 2], &mut [0u8; 3]).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument);
            let error = comm.all_to_all_v(&[1u8], &[1], &mut [0u8; 2], &[1, 1]).unwrap_err();
            assert!(error.message().contains("'send_counts' has 1 numbers"), "{error}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn panics_and_errors_of_a_rank_end_the_others() {
    let start = std::time::Instant::now();
    let error = World::threads(3)
        .run(|world| {
            if world.rank() == 1 {
                panic!("rank {} has enough", world.rank());
            }
            world.comm()?.barrier()
        })
        .unwrap_err();
    assert_eq!(error.code(), Code::Internal);
    assert!(error.message().contains("rank 1: panicked: rank 1 has enough"), "{error}");

    let error = World::threads(3)
        .run(|world| match world.rank() {
            2 => Err(Error::new(Code::DataLoss, "lost\0it")),
            _ => world.comm()?.barrier(),
        })
        .unwrap_err();
    assert_eq!(error.code(), Code::DataLoss);
    assert!(error.message().contains("lost\\0it"), "{error}");
    assert!(start.elapsed().as_secs() < 30, "they did not wait for a deadline");
    assert!(World::threads(0).run(|_| Ok(())).is_err());
}

#[derive(Clone, Copy)]
enum Bad {
    Nothing,
    Panics,
    Fails,
    WrongNumber,
}

/// x^2, with what is wrong in forward and in backward.
struct Square(Bad, Bad);

impl Square {
    fn act(bad: Bad, results: Vec<Tensor>) -> Result<Vec<Tensor>> {
        match bad {
            Bad::Nothing => Ok(results),
            Bad::Panics => panic!("no squares today"),
            Bad::Fails => Err(Error::new(Code::Unavailable, "no squares today")),
            Bad::WrongNumber => Ok(Vec::new()),
        }
    }
}

impl Function for Square {
    fn forward(&self, context: &FunctionContext, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        context.save(&[&inputs[0]])?;
        Square::act(self.0, vec![(&inputs[0] * &inputs[0])?])
    }

    fn backward(
        &self,
        context: &FunctionContext,
        grads: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        let grad = grads[0].as_ref().expect("something depends on it");
        let result = (grad * (context.saved(0)? * 2.0)?)?;
        Ok(Square::act(self.1, vec![result])?.into_iter().map(Some).collect())
    }
}

#[test]
fn functions_with_derivatives_of_their_own() {
    on_meshes(|_, mesh| {
        let x = sample()?.distribute(mesh, layout(mesh, 0)?)?;
        x.set_requires_grad(true)?;
        let y = apply(Square(Bad::Nothing, Bad::Nothing), &[&x], 1)?.remove(0);
        y.sum()?.backward()?;
        expect_close(&y, &(sample()? * sample()?)?)?;
        expect_close(&x.grad()?.unwrap(), &(sample()? * 2.0)?)
    });
}

#[test]
fn callbacks_that_panic_or_fail() {
    let x = sample().unwrap();
    x.set_requires_grad(true).unwrap();
    let cases = [
        (Bad::Panics, "panicked: no squares today"),
        (Bad::Fails, "no squares today"),
        (Bad::WrongNumber, "wanted 1"),
    ];
    for (bad, message) in cases {
        let error = apply(Square(bad, Bad::Nothing), &[&x], 1).unwrap_err();
        assert!(error.message().contains(message), "{error}");
        let y = apply(Square(Bad::Nothing, bad), &[&x], 1).unwrap().remove(0);
        let error = y.sum().unwrap().backward().unwrap_err();
        assert!(error.message().contains(message), "{error}");
    }
}

#[test]
fn operators_shard_by_rules_of_the_host() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("x", 2)])?;
            let name = "aten::bucketize.Tensor";
            let error = mesh.add_rule("aten::bucketise", &["pointwise"]).unwrap_err();
            assert_eq!(error.code(), Code::NotFound);
            assert!(error.message().starts_with("Mesh::add_rule: argument 'name'"), "{error}");
            let error = mesh.add_rule(name, &["S(0), R -> S(0)", "S(0) -> R"]).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument);
            assert!(error.message().contains(name), "{error}");
            assert!(error.message().contains("argument 'ways[1]'"), "{error}");
            mesh.add_rule(name, &["no\0"]).unwrap_err();
            mesh.add_rule("aten::hypot", &["S(0), S(0) -> S(0)"])?;
            let error = mesh.add_rule("aten::hypot", &["pointwise"]).unwrap_err();
            assert_eq!(error.code(), Code::AlreadyExists);
            let hypot = |x: &Tensor| Op::find("aten::hypot")?.call::<Tensor>(args![x, x]);
            let plain = sample()?;
            for layout in ["[S(0)]", "[S(1)]"] {
                let x = plain.distribute(&mesh, &Layout::parse(layout)?)?;
                let y = hypot(&x)?;
                // The library's own rule would leave columns where they are.
                assert_ne!(y.layout()?, Layout::parse("[S(1)]")?);
                expect_close(&y, &hypot(&plain)?)?;
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn cost_models_are_the_same_on_all_ranks() {
    World::threads(4)
        .run(|world| {
            let mesh = world.device_mesh(&[("dp", 2), ("tp", 2)])?;
            let slow = LinkCost { latency: 3e-5, bandwidth: 2e10 };
            let fast = LinkCost { latency: 0.0, bandwidth: 3e11 };
            let mut model = CostModel { links: vec![slow, fast], ..CostModel::default() };
            mesh.set_cost_model(&model)?;
            assert_eq!(mesh.cost_model()?, model);
            let text = r#"{"links": {"dp": {"latency": 1e-6, "bandwidth": 7},
                                     "tp": {"latency": 0, "bandwidth": 8}},
                           "device": {"flops": 9, "bandwidth": 10}}"#;
            mesh.set_cost_model_from_json(if world.rank() == 1 { "no\0" } else { text })
                .unwrap_err();
            assert_eq!(mesh.cost_model()?, model);
            mesh.set_cost_model_from_json(text)?;
            let links = mesh.cost_model()?.links;
            assert_eq!((links[0].bandwidth, links[1].bandwidth), (7.0, 8.0));
            if world.rank() == 3 {
                model.device.flops *= 2.0;
            }
            let error = mesh.set_cost_model(&model).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument);
            assert!(error.message().starts_with("Mesh::set_cost_model: ranks 0 and 3"), "{error}");
            assert_eq!(mesh.cost_model()?.links, links);
            let measured = mesh.measure_cost_model()?;
            assert_eq!(mesh.cost_model()?.links, links);
            mesh.set_cost_model_from_json(&measured)?;
            let model = mesh.cost_model()?;
            assert_ne!(model.links, links);
            assert!(model.links.iter().all(|link| link.bandwidth > 1e5), "{measured}");
            assert!(model.device.flops > 1e6, "{measured}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn checkpoints_compute_and_draw_the_same_again() {
    on_meshes(|_, mesh| {
        let x = sample()?.distribute(mesh, layout(mesh, 0)?)?;
        x.set_requires_grad(true)?;
        let weight = sample()?.distribute(mesh, layout(mesh, 1)?)?;
        weight.set_requires_grad(true)?;
        fn block(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
            let dropped: Tensor = Op::find("aten::dropout")?.call(args![&x.gelu()?, 0.5, true])?;
            &dropped * weight
        }
        let start = mesh.random_state()?;
        let wanted = block(&x, &weight)?;
        (&wanted * &wanted)?.sum()?.backward()?;
        let (x_grad, weight_grad) = (x.grad()?.unwrap(), weight.grad()?.unwrap());
        let end = mesh.random_state()?;
        assert!(end.offset > start.offset);
        x.set_grad(None)?;
        weight.set_grad(None)?;

        mesh.set_random_state(start)?;
        let runs = Rc::new(Cell::new(0));
        let segment = {
            let (runs, weight) = (runs.clone(), weight.clone());
            move |inputs: &[Tensor]| {
                runs.set(runs.get() + 1);
                Ok([block(&inputs[0], &weight)?])
            }
        };
        let [y] = checkpoint(segment, &[&x])?;
        assert_eq!((runs.get(), Rc::strong_count(&runs)), (1, 2));
        expect_close(&y, &wanted.full_tensor()?)?;
        (&y * &y)?.sum()?.backward()?;
        drop(y);
        assert_eq!((runs.get(), Rc::strong_count(&runs)), (2, 1), "it ran twice, and ended");
        assert_eq!(mesh.random_state()?, end);
        expect_close(&x.grad()?.unwrap(), &x_grad.full_tensor()?)?;
        expect_close(&weight.grad()?.unwrap(), &weight_grad.full_tensor()?)?;

        let again = {
            let _scope = mesh.random_scope(start)?;
            no_grad(|| block(&x, &weight))?
        };
        assert_eq!(mesh.random_state()?, end);
        expect_close(&again, &wanted.full_tensor()?)
    });
}

#[test]
fn checkpoints_that_panic_or_fail() {
    let x = sample().unwrap();
    x.set_requires_grad(true).unwrap();
    let runs = Rc::new(Cell::new(0));
    let failing_in = |run: usize, panics: bool| {
        runs.set(0);
        let runs = runs.clone();
        move |inputs: &[Tensor]| {
            runs.set(runs.get() + 1);
            match runs.get() == run {
                true if panics => panic!("no squares today"),
                true => Err(Error::new(Code::Unavailable, "no squares today")),
                false => Ok([(&inputs[0] * &inputs[0])?, inputs[0].exp()?]),
            }
        }
    };
    for (panics, code) in [(false, Code::Unavailable), (true, Code::Internal)] {
        let error = checkpoint(failing_in(1, panics), &[&x]).unwrap_err();
        assert_eq!(error.code(), code);
        assert!(error.message().contains("no squares today"), "{error}");
        assert_eq!(Rc::strong_count(&runs), 1);
        let [y, _] = checkpoint(failing_in(2, panics), &[&x]).unwrap();
        let error = y.sum().unwrap().backward().unwrap_err();
        assert_eq!(error.code(), code);
        assert!(error.message().contains("run again in backward: "), "{error}");
        assert!(error.message().contains("no squares today"), "{error}");
        drop(y);
        assert_eq!((runs.get(), Rc::strong_count(&runs)), (2, 1));
    }
    let error = checkpoint(failing_in(0, false), &[]).unwrap_err();
    assert!(error.message().starts_with("checkpoint: "), "{error}");
    assert_eq!(Rc::strong_count(&runs), 1);
}

/// Is what the innermost says, whatever is recorded, on a mesh too; a segment has it in both runs.
#[test]
fn autocast_nests_and_ends() {
    let body = |world: &World| {
        let mesh = world.device_mesh(&[("x", 2)])?;
        let whole = Tensor::ones(&[4, 4])?;
        let cut = whole.distribute(&mesh, [("x", Shard(0))])?;
        for w in [&whole, &cut] {
            w.set_requires_grad(true)?;
            let product = || w.matmul(w).and_then(|y| y.dtype());
            autocast(DType::Bf16, || {
                assert_eq!(product()?, DType::Bf16);
                assert_eq!(no_grad(product)?, DType::Bf16);
                assert_eq!(autocast(DType::F32, product)?, DType::F32);
                assert_eq!(autocast(DType::F16, product)?, DType::F16);
                product()
            })?;
            let recorded = || w.matmul(w).and_then(|y| y.requires_grad());
            assert!(!no_grad(|| autocast(DType::Bf16, recorded))?);
            assert_eq!(product()?, DType::F32);
            let panics = || autocast::<()>(DType::Bf16, || panic!("inside"));
            assert!(std::panic::catch_unwind(panics).is_err());
            assert_eq!(product()?, DType::F32);

            let seen = Rc::new(RefCell::new(Vec::new()));
            let sees = seen.clone();
            let square = move |x: &[Tensor]| {
                let y = x[0].matmul(&x[0])?;
                sees.borrow_mut().push(y.dtype()?);
                Ok([y])
            };
            let [y] = autocast(DType::Bf16, || checkpoint(square, &[w]))?;
            y.sum()?.backward()?;
            assert_eq!(*seen.borrow(), [DType::Bf16; 2]);
        }
        let error = autocast(DType::F64, || Ok(())).unwrap_err();
        assert!(
            error.message().contains("autocast: argument 'dtype' is F64; wanted Bf16"),
            "{error}"
        );
        Ok(())
    };
    World::threads(2).run(body).unwrap();
}

#[test]
fn grad_modes_nest_and_survive_panics() {
    let x = sample().unwrap();
    x.set_requires_grad(true).unwrap();
    let recorded = || (&x * 2.0).unwrap().requires_grad().unwrap();
    assert!(recorded());
    assert!(!no_grad(recorded));
    assert!(!no_grad(|| shardweave::with_grad_mode(shardweave::GradMode::NoGrad, recorded)));
    assert!(no_grad(|| shardweave::with_grad_mode(shardweave::GradMode::Grad, recorded)));
    assert!(std::panic::catch_unwind(|| no_grad(|| panic!("inside"))).is_err());
    assert!(recorded());
    let y = shardweave::inference(|| &x * 2.0).unwrap();
    assert!((&y * &x).is_err(), "it can take part in no recorded call");

    let unused = Tensor::ones(&[1]).unwrap();
    unused.set_requires_grad(true).unwrap();
    let y = (&x * 2.0).unwrap().sum().unwrap();
    let options = BackwardOptions { allow_unused: true, ..Default::default() };
    let grads = gradients(&[&y], &[&x, &unused], &[], options).unwrap();
    assert!(grads[0].is_some() && grads[1].is_none());
}

#[test]
fn operators_by_name() {
    let x = sample().unwrap();
    let op = |name: &str| Op::find(name).unwrap();
    let error = op("aten::item").call::<f64>(args![&x]).unwrap_err();
    assert!(error.message().contains("35 elements"), "7x5 is no one element: {error}");
    assert_eq!(
        op("aten::item").call::<f64>(args![&x.mean().unwrap()]).unwrap(),
        x.mean().unwrap().item::<f64>().unwrap()
    );
    let (values, indices): (Tensor, Tensor) = op("aten::topk").call(args![&x, 2, 0]).unwrap();
    assert_eq!((values.sizes().unwrap(), indices.dtype().unwrap()), (vec![2, 5], DType::I64));
    let parts: Vec<Tensor> = op("aten::chunk").call(args![&x, 3]).unwrap();
    assert_eq!(parts.len(), 3);
    let all: Vec<Value> = op("aten::max.dim").call(args![&x, 1]).unwrap();
    assert_eq!(all.len(), 2);
    let clamped: Tensor = op("aten::clamp").call(args![&x, None::<f64>, 0.0]).unwrap();
    assert!(clamped.amax(&[], false).unwrap().item::<f64>().unwrap() <= 0.0);
    let float: Tensor = op("aten::to.dtype").call(args![&x, DType::F64]).unwrap();
    assert_eq!(float.dtype().unwrap(), DType::F64);
    let text: Tensor =
        op("aten::gelu").call_named(args![&x], &[("approximate", "tanh".into())]).unwrap();
    assert_eq!(text.sizes().unwrap(), [7, 5]);

    let error = op("aten::topk").call::<(Tensor, Tensor)>(args!["seven"]).unwrap_err();
    assert!(error.message().contains("aten::topk("), "the schemas: {error}");
    let error = op("aten::relu").call::<i64>(args![&x]).unwrap_err();
    assert!(error.message().contains("wanted an integer"), "{error}");
    let error = Op::find("aten::rulo").unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(Op::find("aten::re\0lu").is_err());
}

#[test]
fn data_goes_in_and_out() {
    let x = Tensor::from_slice(&[1i32, 2, 3, 4, 5, 6], &[2, 3]).unwrap();
    assert_eq!(x.strides().unwrap(), [3, 1]);
    assert_eq!((x.size(-1).unwrap(), x.ndim().unwrap(), x.numel().unwrap()), (3, 2, 6));
    assert_eq!(x.size(2).unwrap_err().code(), Code::OutOfRange);
    assert_eq!(x.transpose(0, 1).unwrap().to_vec::<i32>().unwrap(), [1, 4, 2, 5, 3, 6]);
    let error = x.to_vec::<f32>().unwrap_err();
    assert!(error.message().contains("i32"), "{error}");
    x.copy_from_slice(&[6i32, 5, 4, 3, 2, 1]).unwrap();
    assert!(x.copy_from_slice(&[6i32, 5]).is_err());
    assert_eq!(x.select(0, 1).unwrap().to_vec::<i32>().unwrap(), [3, 2, 1]);
    assert!(Tensor::from_slice(&[1.0f32; 5], &[2, 3]).is_err());
    let same = x.clone();
    assert!(same.is_same(&x).unwrap() && !x.copy().unwrap().is_same(&x).unwrap());
    let y = Tensor::empty(&[0, 3]).unwrap();
    assert!(y.to_vec::<f32>().unwrap().is_empty());
    assert_eq!(format!("{x:?}"), "Tensor[2, 3] i32");
    // SAFETY: nobody else has the struct.
    let z = unsafe { Tensor::from_dlpack(x.to_dlpack().unwrap()) }.unwrap();
    z.zero_().unwrap();
    assert_eq!(x.to_vec::<i32>().unwrap(), [0; 6], "one memory");
}

#[test]
fn what_happened() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("x", 2)])?;
            let trace = mesh.trace()?;
            let x = sample()?.distribute_from(Source::Same, &mesh, "[S(0)]")?;
            assert_eq!(trace.num_events()?, 0);
            {
                let _scope = mesh.module_scope("blocks.0")?;
                x.redistribute("[R]")?;
            }
            assert_eq!(trace.num_events()?, 1);
            assert!(trace.bytes()? > 0);
            let json: serde_json::Value = serde_json::from_str(&trace.to_json()?).unwrap();
            assert!(json.to_string().contains("blocks.0"), "{json}");
            assert!(trace.to_string().contains("all_gather"), "{trace}");
            let record: serde_json::Value = serde_json::from_str(&world.flight_record()?).unwrap();
            assert!(record.is_object() || record.is_array());
            let before = world.counters()?;
            {
                let _strict = mesh.forbid_communication()?;
                x.full_tensor()?; // asked for by name
                let error = x.sum()?.item::<f64>().unwrap_err();
                assert_eq!(error.code(), Code::FailedPrecondition);
            }
            world.comm()?.barrier()?;
            assert!(world.counters()?.since(&before).of("barrier").calls == 1);
            assert!(mesh.dispatch_counters()?.operators >= 1);
            let partial =
                Op::find("aten::sum.dim_IntList")?.call::<Tensor>(args![&x, &[0i64][..]])?;
            for uses in 0..2 {
                partial.relu()?; // reduced for the first use, and there for the next
                let counters = mesh.dispatch_counters()?;
                assert_eq!((counters.remembered_uses, counters.remembered_bytes), (uses, 5 * 4));
            }
            assert!(x.picture()?.contains('0'));
            let product = Op::find("aten::mm")?;
            let why = product.explain(args![&x, &x.transpose(0, 1)?])?;
            assert!(why.table.contains("mm"), "{}", why.table);
            assert!(serde_json::from_str::<serde_json::Value>(&why.json).is_ok());
            assert!(x.layout()?.picture(&mesh, &[7, 5])?.contains('0'));
            Ok(())
        })
        .unwrap();
    let world = World::counting(3, 1000).unwrap();
    assert_eq!((world.rank(), world.size()), (3, 1000));
}

/// A link takes 8 s and a second for 2 bytes, a rank does 4 flops and touches 16 bytes in a second.
#[test]
fn each_term_of_a_cost_is_in_the_json() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("tp", 2)])?;
            mesh.set_cost_model(&CostModel {
                links: vec![LinkCost { latency: 8.0, bandwidth: 2.0 }],
                device: DeviceCost { flops: 4.0, bandwidth: 16.0 },
            })?;
            let x = Tensor::ones(&[8, 4])?.distribute(&mesh, [("tp", Replicate)])?;
            let w = Tensor::ones(&[4, 2])?.distribute(&mesh, [("tp", Shard(0))])?;
            w.set_requires_grad(true)?;
            let why = Op::find("aten::mm")?.explain(args![&x, &w])?;
            let json: serde_json::Value = serde_json::from_str(&why.json).unwrap();
            let tp = &json["dims"][0];
            assert_eq!((tp["name"].as_str(), tp["ranks"].as_i64()), (Some("tp"), Some(2)));
            assert!(tp["not_offered"].as_array().unwrap().is_empty());
            // To move, to compute, what is owed, and their sum, in seconds.
            let check = |index: usize, terms: [f64; 4], gives_up: &str, bytes: i64| {
                let option = &tp["options"][index];
                for (name, term) in ["move", "compute", "owed", "seconds"].iter().zip(terms) {
                    let got = option[name].as_f64().unwrap();
                    assert!((got - term).abs() < 1e-6, "{name}: {got}, {term}: {option}");
                }
                assert_eq!(option["gives_up"].as_str(), Some(gives_up));
                assert_eq!(option["bytes"].as_i64(), Some(bytes));
            };
            let chosen = tp["chosen"].as_u64().unwrap() as usize;
            assert_eq!(tp["options"][chosen]["inputs"], serde_json::json!(["S(1)", "S(0)"]));
            check(chosen, [0.0, 25.0, 20.0, 45.0], "", 0);
            assert_eq!(tp["options"][0]["inputs"], serde_json::json!(["R", "R"]));
            check(0, [16.0, 46.0, 0.0, 62.0], "weight", 16);
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_weight_that_a_plan_cut_is_not_gathered_unseen() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("dp", 2)])?;
            let layer = Layer::new()?;
            let plan = ParameterPlan::new().line("weight", &[("dp", Shard(0))]);
            layer.distribute(&mesh, &plan, Source::Same)?;
            let x = sample()?.distribute_from(Source::Same, &mesh, "[S(0)]")?;
            {
                let _strict = mesh.forbid_communication()?;
                let error = layer.loss(&x).unwrap_err();
                assert_eq!(error.code(), Code::FailedPrecondition);
                assert!(error.message().contains("(the weight 'weight')"), "{error}");
            }
            assert_eq!(mesh.dispatch_counters()?.unsharded_weights, 0);
            layer.loss(&x)?;
            assert_eq!(mesh.dispatch_counters()?.unsharded_weights, 1);
            Ok(())
        })
        .unwrap();
}

#[test]
fn layouts_say_what_ranks_hold() {
    let ragged = RaggedShard { dim: 0, sizes: vec![3, 0, 4] };
    for placement in [Shard(1), Replicate, Partial(ReduceOp::Avg), ragged] {
        assert_eq!(placement.to_string().parse::<Placement>().unwrap(), placement);
    }
    let ordered = Layout::with_order(&[Shard(0), Shard(0)], &[1, 0]).unwrap();
    assert_ne!(ordered, Layout::new(&[Shard(0), Shard(0)]).unwrap());
    assert_eq!(Layout::parse(&ordered.to_string()).unwrap(), ordered);
    let from = Layout::parse("[S(0)]").unwrap();
    let plan = from.plan_to(&Layout::parse("[R]").unwrap(), &[4], &[8, 8], DType::F32).unwrap();
    assert!(plan.bytes > 0 && plan.steps.contains("all_gather"), "{plan:?}");
    assert!(Layout::parse("[S(").is_err() && "[R, R]".parse::<Placement>().is_err());
    assert!(from.local_extent(&[4], &[0, 0], &[8]).is_err());
}

#[test]
fn an_aborter_ends_ranks_that_wait() {
    let seats = World::local(2).unwrap();
    let mut worlds = seats.into_iter();
    let waiting = worlds.next().unwrap();
    let (send, receive) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let world = waiting.take();
        send.send(world.aborter()).unwrap();
        let result = world.comm().and_then(|comm| comm.barrier());
        result.unwrap_err()
    });
    receive.recv().unwrap().abort("enough").unwrap();
    let error = thread.join().unwrap();
    assert_eq!(error.code(), Code::Aborted);
    assert!(error.message().contains("enough"), "{error}");
}

/// What belongs to a rank is in the documentation of [`shardweave`], which shows that it is not.
#[test]
fn what_may_go_to_other_threads() {
    fn shared<T: Send + Sync>() {}
    fn sent<T: Send>() {}
    shared::<Op>();
    shared::<Layout>();
    shared::<ParameterPlan>();
    shared::<shardweave::Aborter>();
    shared::<Error>();
    sent::<shardweave::Seat>();
}
