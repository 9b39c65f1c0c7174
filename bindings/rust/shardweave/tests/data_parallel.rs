//! FSDP and ZeRO: a model in Rust whose parameters are whole only while they are used, and one whose
//! optimizer is divided, train as on one rank.
#![cfg(feature = "derive")]

use shardweave::nn::{self, Layer};
use shardweave::{
    no_grad, Adafactor, Adam, AdamW, CapturedStep, Code, DType, Device, FullParamsOptions,
    FullyShardOptions, GradScaler, GradScalerOptions, GradSync, GradSyncOptions, Lion, Mesh,
    Module, Muon, NativeModule, Optimizer, ParameterPlan, Placement::*, Result, Schedule, Sgd,
    Source, Tensor, World, ZeroOptions,
};

const STEPS: usize = 5;
const BLOCKS: i64 = 3;

#[derive(Module)]
struct Block {
    norm: nn::LayerNorm,
    up: nn::Linear,
    down: nn::Linear,
}

impl Layer for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + &self.down.forward(&self.up.forward(&self.norm.forward(x)?)?.gelu()?)?
    }
}

#[derive(Module)]
struct Net {
    blocks: Vec<Block>,
    head: nn::Linear,
}

impl Net {
    fn new() -> Result<Net> {
        let block = |_: i64| -> Result<Block> {
            Ok(Block {
                norm: nn::LayerNorm::new(5)?,
                up: nn::Linear::new(5, 7)?,
                down: nn::Linear::new(7, 5)?,
            })
        };
        let blocks = (0..BLOCKS).map(block).collect::<Result<_>>()?;
        let net = Net { blocks, head: nn::Linear::new(5, 3)? };
        for (i, (_, parameter)) in net.parameters().into_iter().enumerate() {
            let value = numbers(&parameter.sizes()?, i as f32)?;
            no_grad(|| parameter.copy_(&value))?;
        }
        Ok(net)
    }
}

impl Layer for Net {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.head.forward(&x)
    }
}

fn numbers(sizes: &[i64], phase: f32) -> Result<Tensor> {
    let count = sizes.iter().product::<i64>();
    let data: Vec<f32> = (0..count).map(|i| (i as f32 * 0.7 + phase).sin() * 0.5).collect();
    Tensor::from_slice(&data, sizes)
}

/// The losses, and the parameters by name.
type Trained = (Vec<f32>, Vec<(String, Vec<f32>)>);

fn train<M: Layer>(model: &M, mesh: Option<&Mesh>) -> Result<Trained> {
    train_with(model, mesh, &AdamW::new(1e-2).build(model)?)
}

fn train_with<M: Layer>(model: &M, mesh: Option<&Mesh>, optimizer: &Optimizer) -> Result<Trained> {
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let mut x = numbers(&[7, 5], step as f32)?; // rows that do not divide
        let mut y = numbers(&[7, 3], step as f32 + 0.3)?;
        if let Some(mesh) = mesh {
            x = x.distribute(mesh, [("dp", Shard(0))])?;
            y = y.distribute(mesh, [("dp", Shard(0))])?;
        }
        let loss = model.forward(&x)?.mse_loss(&y)?;
        loss.backward()?;
        model.finish_grad_sync()?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        losses.push(loss.detach()?.full_tensor()?.item::<f32>()?);
    }
    let mut parameters = Vec::new();
    for (name, parameter) in model.parameters() {
        parameters.push((name, no_grad(|| parameter.full_tensor()?.detach()?.to_vec::<f32>())?));
    }
    Ok((losses, parameters))
}

fn assert_same(got: &Trained, wanted: &Trained, place: &str) {
    for (a, b) in got.0.iter().zip(&wanted.0) {
        assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{place}: {got:?}, wanted {wanted:?}");
    }
    assert_eq!(got.1.len(), wanted.1.len(), "{place}");
    for ((name, got), (other, wanted)) in got.1.iter().zip(&wanted.1) {
        assert_eq!(name, other, "{place}");
        for (a, b) in got.iter().zip(wanted) {
            assert!((a - b).abs() <= 1e-4, "{place}: {name}: {got:?}, wanted {wanted:?}");
        }
    }
}

#[test]
fn a_forward_in_rust_trains_as_on_one_rank() {
    let wanted = train(&Net::new().unwrap(), None).unwrap();
    let meshes: [&[(&str, i64)]; 3] = [&[("dp", 2)], &[("dp", 3)], &[("tp", 2), ("dp", 2)]];
    for dims in meshes {
        for keep in [false, true] {
            World::threads(dims.iter().map(|(_, size)| *size as usize).product())
                .run(|world| {
                    let mesh = world.device_mesh(dims)?;
                    let net = Net::new()?;
                    if dims.len() > 1 {
                        let plan = ParameterPlan::new()
                            .line("blocks.*.up.*", &[("tp", Shard(0))])
                            .line("blocks.*.down.weight", &[("tp", Shard(1))]);
                        net.distribute(&mesh, &plan, Source::Same)?;
                    }
                    let options = FullyShardOptions::new()
                        .mesh_dim("dp")
                        .unit("blocks.*")
                        .source(Source::Same)
                        .reshard_after_forward(!keep);
                    let units = net.fully_shard(&mesh, &options)?;
                    assert!(units.table.contains("blocks.2"), "{units}");
                    assert!(units.json.contains(r#""module":"blocks.2""#), "{}", units.json);
                    assert_same(&train(&net, Some(&mesh))?, &wanted, &format!("{dims:?}"));
                    let counters = mesh.fully_shard_counters()?;
                    let units = (BLOCKS + 1) * STEPS as i64;
                    assert!(counters.gathers >= units, "{counters:?}");
                    assert_eq!(counters.gathers > units, !keep, "{counters:?}");
                    assert_eq!(counters.reduce_scatters, units, "{counters:?}");
                    assert!(counters.prefetches > 0, "{counters:?}");
                    assert_eq!(counters.wrong_prefetches, 0, "{counters:?}");
                    Ok(())
                })
                .unwrap();
        }
    }
}

#[test]
fn backwards_that_send_nothing_are_summed_up() {
    let gradient = |mesh: Option<&Mesh>, net: &Net, held: usize| -> Result<Vec<f32>> {
        for step in 0..3 {
            let _scope = match mesh {
                Some(mesh) if step < held => Some(mesh.fully_shard_no_sync()?),
                _ => None,
            };
            let mut x = numbers(&[7, 5], step as f32)?;
            if let Some(mesh) = mesh {
                x = x.distribute(mesh, [("dp", Shard(0))])?;
            }
            net.forward(&x)?.square()?.sum()?.backward()?;
        }
        net.finish_grad_sync()?;
        let grad = net.head.weight.grad()?.expect("it has a gradient");
        if mesh.is_some() { grad.full_tensor() } else { Ok(grad) }?.to_vec::<f32>()
    };
    let wanted = World::threads(1).run(|_| gradient(None, &Net::new()?, 0)).unwrap().remove(0);
    for held in [0, 2, 3] {
        World::threads(2)
            .run(|world| {
                let mesh = world.device_mesh(&[("dp", 2)])?;
                let error = mesh.fully_shard_no_sync().unwrap_err();
                assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
                let net = Net::new()?;
                net.fully_shard(&mesh, &FullyShardOptions::new().unit("blocks.*"))?;
                let got = gradient(Some(&mesh), &net, held)?;
                for (got, wanted) in got.iter().zip(&wanted) {
                    assert!((got - wanted).abs() <= 1e-4 * wanted.abs().max(1.0), "{got} {wanted}");
                }
                let sent = if held == 0 { 3 } else { 1 } * (BLOCKS + 1);
                assert_eq!(mesh.fully_shard_counters()?.reduce_scatters, sent);
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn what_evaluation_leaves_is_emptied() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("dp", 2)])?;
            let net = Net::new()?;
            net.fully_shard(&mesh, &FullyShardOptions::new().unit("blocks.*"))?;
            let x = numbers(&[7, 5], 0.0)?.distribute(&mesh, [("dp", Shard(0))])?;
            no_grad(|| net.forward(&x))?;
            assert!(mesh.fully_shard_counters()?.gathered_bytes > 0);
            mesh.reshard()?;
            assert_eq!(mesh.fully_shard_counters()?.gathered_bytes, 0);
            Ok(())
        })
        .unwrap();
}

#[test]
fn parameters_are_whole_in_a_scope() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("dp", 2)])?;
            let first = mesh.coordinate()?[0] == 0;
            let net = Net::new()?;
            let options = FullyShardOptions::new().unit("blocks.*").equal_segments(true);
            let gpu = options.clone().compute_device(Device::Cuda(0));
            let error = net.fully_shard(&mesh, &gpu).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument);
            let said = "compute_device is cuda:0, and LibTorch has none here";
            assert!(error.to_string().contains(said), "{error}");
            net.fully_shard(&mesh, &options.reshard_after_forward_ranks(1))?;
            let sum = |t: &Tensor| -> Result<f64> { t.detach()?.sum()?.item() };
            let read = FullParamsOptions::new();
            let before = net.full_params(&read, |whole| {
                sum(&whole.get("head.weight")?.expect("on every rank"))
            })?;
            let write = FullParamsOptions::new().writeback(true).rank(0);
            net.full_params(&write, |whole| match whole.get("head.weight")? {
                Some(weight) => weight.mul_(2.0).map(|_| assert!(first)),
                None => {
                    assert!(!first);
                    Ok(())
                }
            })?;
            let after = net.full_params(&read, |whole| {
                let error = whole.get("nothing").unwrap_err();
                assert!(error.message().starts_with("FullParams::get: "), "{error}");
                sum(&whole.get("head.weight")?.expect("on every rank"))
            })?;
            assert!(before != 0.0 && after == 2.0 * before, "{before} {after}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn what_is_wrong_is_said() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("dp", 2)])?;
            let net = Net::new()?;
            let refused = |options: FullyShardOptions, code: Code, text: &str| {
                let error = net.fully_shard(&mesh, &options).unwrap_err();
                assert_eq!(error.code(), code, "{error}");
                assert!(error.message().starts_with("Module::fully_shard: "), "{error}");
                assert!(error.message().contains(text), "{error}");
                assert!(!net.head.weight.is_sharded().unwrap(), "{error}");
            };
            let options = FullyShardOptions::new;
            refused(options().unit("layers.*"), Code::NotFound, "'layers.*' matches no submodule");
            refused(options().unit_type("Block"), Code::NotFound, "the type of units 'Block'");
            refused(options().mesh_dim("tp"), Code::NotFound, "tp");
            refused(options().unit("a\0b"), Code::InvalidArgument, "has a NUL");
            refused(options().min_numel(-1), Code::InvalidArgument, "argument 'min_numel' is -1");
            let source = options().source(Source::Rank(-2));
            refused(source, Code::InvalidArgument, "argument 'source' is -2");
            let differs = options().reshard_after_forward(world.rank() == 0);
            refused(differs, Code::InvalidArgument, "is not the same on ranks 0 and 1");

            net.fully_shard(&mesh, &options())?;
            let error = net.fully_shard(&mesh, &options()).unwrap_err();
            assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
            assert!(error.message().contains("all parameters are in units already"), "{error}");
            let error = net.distribute(&mesh, &ParameterPlan::new(), Source::Same).unwrap_err();
            assert!(error.message().contains("is fully sharded already"), "{error}");

            let layers = r#"{"layers": [{"kind": "Linear", "in_features": 5, "out_features": 4}]}"#;
            let native = NativeModule::new("Sequential", layers)?;
            let units = native.fully_shard(&mesh, &options().unit_type("Linear"))?;
            assert!(units.json.contains(r#""module":"0""#), "{}", units.json);
            Ok(())
        })
        .unwrap();
}

/// Muon in double precision for what has two dimensions, Adafactor for the rest.
fn groups(net: &Net) -> Result<Optimizer> {
    let parameters = net.parameters();
    let (mut matrices, mut others) = (Vec::new(), Vec::new());
    for (_, parameter) in &parameters {
        let its = if parameter.ndim()? == 2 { &mut matrices } else { &mut others };
        its.push(parameter);
    }
    let muon = Muon::new(1e-2).iteration(2, [3.4445, -4.775, 2.0315]).dtype(DType::F64);
    let adafactor = Adafactor::new(1e-2).build_for(&others)?;
    Optimizer::of_groups(&[&muon.build_for(&matrices)?, &adafactor])
}

#[test]
fn groups_have_learning_rates_of_their_own() {
    let net = Net::new().unwrap();
    let optimizer = groups(&net).unwrap();
    assert_eq!(optimizer.num_groups().unwrap(), 2);
    optimizer.set_group_learning_rate(1, 0.5).unwrap();
    assert_eq!(optimizer.group_learning_rate(1).unwrap(), 0.5);
    assert_eq!(optimizer.learning_rate().unwrap(), 1e-2);
    let error = optimizer.set_group_learning_rate(2, 0.5).unwrap_err();
    assert!(error.message().contains("group 2 of 2"), "{error}");
    let error = Muon::new(0.1).build(&net).unwrap_err();
    assert!(error.message().contains("Muon wants two dimensions"), "{error}");
    let error = Optimizer::of_groups(&[&optimizer, &optimizer]).unwrap_err();
    assert!(error.message().contains("wanted one group for each"), "{error}");
}

/// The factors of the library, which other languages have.
#[test]
fn a_schedule_is_applied_to_all_groups() {
    let net = Net::new().unwrap();
    let optimizer = groups(&net).unwrap();
    optimizer.set_group_learning_rate(0, 1.0).unwrap();
    optimizer.set_group_learning_rate(1, 2.0).unwrap();
    for schedule in [
        Schedule::constant(),
        Schedule::linear(9),
        Schedule::cosine(9),
        Schedule::wsd(9, 3),
        Schedule::step(4, 0.3),
    ] {
        let schedule = schedule.warmup(2).floor(0.1);
        for step in 0..25 {
            schedule.apply_to(&optimizer, step).unwrap();
            let wanted = schedule.factor(step);
            for (group, base) in [(0, 1.0), (1, 2.0)] {
                let rate = optimizer.group_learning_rate(group).unwrap();
                assert!((rate - base * wanted).abs() < 1e-15, "{schedule:?} at {step}: {rate}");
            }
        }
    }
    let error = Schedule::linear(9).floor(2.0).apply_to(&optimizer, 0).unwrap_err();
    assert!(error.message().contains("floor is 2"), "{error}");
}

#[test]
fn a_step_is_skipped_on_all_ranks_or_on_none() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("dp", 2)])?;
            let net = Net::new()?;
            net.distribute(&mesh, &ParameterPlan::new(), Source::Same)?;
            let options = GradScalerOptions::new().init_scale(4.0).growth(2.0, 1).backoff(0.25);
            let scaler = GradScaler::new(&options)?;
            let error = scaler.update().unwrap_err();
            assert!(error.message().contains("nothing was unscaled"), "{error}");
            for (step, scale) in [(0, 8.0), (1, 2.0), (2, 4.0)] {
                let parameters = net.parameters();
                let parameter = &parameters[0].1;
                let bad = step == 1 && world.rank() == 1;
                let value = if bad { f64::INFINITY } else { 1.0 };
                let grad = Tensor::full(&parameter.sizes()?, value)?;
                let whole = Tensor::from_local(&grad, &mesh, [("dp", Replicate)], None)?;
                parameter.set_grad(Some(&whole))?;
                assert_eq!(scaler.unscale(&net)?, step != 1);
                let error = scaler.unscale_for(&[parameter]).unwrap_err();
                assert!(error.message().contains("unscaled already"), "{error}");
                scaler.update()?;
                assert_eq!(scaler.state()?, (scale, 0));
                net.zero_grad()?;
            }
            scaler.set_state(16.0, 3)?;
            assert_eq!(scaler.state()?, (16.0, 3));
            let three = scaler.scale(&Tensor::full(&[], 0.5)?)?.to_vec::<f32>()?;
            assert_eq!(three, [8.0]);
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_step_is_captured_where_there_is_a_gpu() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("dp", 2)])?;
            let net = Net::new()?;
            net.distribute(&mesh, &ParameterPlan::new(), Source::Same)?;
            let parameters = net.parameters();
            let parameters: Vec<_> = parameters.iter().map(|(_, tensor)| tensor).collect();
            for given in [&parameters[..], &[]] {
                let error = CapturedStep::capture(&mesh, given, || panic!("called")).unwrap_err();
                assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
                assert_eq!(
                    error.message(),
                    "CapturedStep::capture: a step is captured on a GPU, and LibTorch has no CUDA \
                     here: a tensor on a GPU, which loads it, comes first"
                );
            }
            Ok(())
        })
        .unwrap();
}

type MakeOptimizer = fn(&Net) -> Result<Optimizer>;

#[test]
fn a_divided_optimizer_trains_as_one_that_is_not() {
    let kinds: [(&str, MakeOptimizer); 5] = [
        ("max_exp_avg_sq", |net| Adam::new(1e-2).weight_decay(0.1).amsgrad(true).build(net)),
        ("exp_avg_sq", |net| AdamW::new(1e-2).betas(0.8, 0.9).build(net)),
        ("exp_avg", |net| Lion::new(1e-3).betas(0.8, 0.9).weight_decay(0.1).build(net)),
        ("momentum_buffer", |net| Sgd::new(1e-2).momentum(0.9).build(net)),
        ("step", groups),
    ];
    let meshes: [&[(&str, i64)]; 3] = [&[("dp", 2)], &[("dp", 3)], &[("tp", 2), ("dp", 2)]];
    for (state, make) in kinds {
        let alone = Net::new().unwrap();
        let wanted = train_with(&alone, None, &make(&alone).unwrap()).unwrap();
        for (dims, stage) in meshes.iter().flat_map(|dims| [(*dims, 1), (*dims, 2)]) {
            World::threads(dims.iter().map(|(_, size)| *size as usize).product())
                .run(|world| {
                    let mesh = world.device_mesh(dims)?;
                    let net = Net::new()?;
                    let mut plan = ParameterPlan::new();
                    if dims.len() > 1 {
                        plan = plan
                            .line("blocks.*.up.*", &[("tp", Shard(0))])
                            .line("blocks.*.down.weight", &[("tp", Shard(1))]);
                    }
                    net.distribute(&mesh, &plan, Source::Same)?;
                    let optimizer = make(&net)?;
                    let options = ZeroOptions::new().mesh_dim("dp").stage(stage).bucket_bytes(200);
                    optimizer.use_zero(&options)?;
                    let place = format!("{state}, {dims:?}, stage {stage}");
                    assert_same(&train_with(&net, Some(&mesh), &optimizer)?, &wanted, &place);
                    if state == "step" {
                        return Ok(());
                    }
                    let (mut kept, mut whole) = (0, 0);
                    for (i, (_, parameter)) in net.parameters().iter().enumerate() {
                        let state = optimizer.state(i, state)?.unwrap();
                        assert_eq!(state.sizes()?, parameter.sizes()?, "{place}");
                        kept += state.to_local()?.numel()?;
                        whole += parameter.to_local()?.numel()?;
                    }
                    assert!(kept < whole, "{place}: {kept} of {whole}");
                    Ok(())
                })
                .unwrap();
        }
    }
}

#[test]
fn what_is_wrong_with_a_divided_optimizer_is_said() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("dp", 2)])?;
            let net = Net::new()?;
            let optimizer = AdamW::new(1e-2).build(&net)?;
            let refused = |options: ZeroOptions, code: Code, text: &str| {
                let error = optimizer.use_zero(&options).unwrap_err();
                assert_eq!(error.code(), code, "{error}");
                assert!(error.message().starts_with("Optimizer::use_zero: "), "{error}");
                assert!(error.message().contains(text), "{error}");
            };
            refused(ZeroOptions::new(), Code::InvalidArgument, "DTensor");
            net.distribute(&mesh, &ParameterPlan::new(), Source::Same)?;
            refused(ZeroOptions::new().mesh_dim("tp"), Code::NotFound, "tp");
            refused(ZeroOptions::new().mesh_dim("d\0p"), Code::InvalidArgument, "mesh_dim");
            refused(ZeroOptions::new().stage(3), Code::InvalidArgument, "stage is 3");
            refused(ZeroOptions::new().bucket_bytes(0), Code::InvalidArgument, "bucket_bytes is 0");
            let error = optimizer.no_sync().unwrap_err();
            assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
            assert!(error.message().contains("does not use ZeRO"), "{error}");

            optimizer.use_zero(&ZeroOptions::new().stage(2))?;
            refused(ZeroOptions::new(), Code::FailedPrecondition, "uses ZeRO already");
            let x = numbers(&[7, 5], 0.0)?.distribute(&mesh, [("dp", Shard(0))])?;
            let backward = || -> Result<usize> {
                let loss = net.forward(&x)?.sum()?;
                let trace = mesh.trace()?;
                loss.backward()?;
                trace.num_events()
            };
            backward()?; // shows in which order gradients come
            net.finish_grad_sync()?;
            net.zero_grad()?;
            {
                let _outer = optimizer.no_sync()?;
                let _inner = optimizer.no_sync()?;
                assert_eq!(backward()?, 0);
            }
            assert!(backward()? > 0);
            net.finish_grad_sync()
        })
        .unwrap();
}

#[test]
fn mixed_precision_keeps_what_rests() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("dp", 2)])?;
            let net = Net::new()?;
            let options = FullyShardOptions::new()
                .unit("blocks.*")
                .param_dtype(DType::Bf16)
                .reduce_dtype(DType::F32)
                .output_dtype(DType::F32);
            net.fully_shard(&mesh, &options)?;
            let trace = mesh.trace()?;
            let (losses, _) = train(&net, Some(&mesh))?;
            let sent = trace.to_json()?;
            assert!(sent.contains(r#""dtype":"BFloat16""#), "{sent}");
            for (name, parameter) in net.parameters() {
                assert_eq!(parameter.dtype()?, DType::F32, "{name}");
            }
            let (exact, _) = train(&Net::new()?, None)?;
            for (got, wanted) in losses.iter().zip(&exact) {
                assert!((got - wanted).abs() <= 0.03 * wanted.abs(), "{losses:?}, {exact:?}");
            }
            assert_ne!(losses, exact);
            let error = Net::new()?
                .fully_shard(&mesh, &FullyShardOptions::new().param_dtype(DType::I64))
                .unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{error}");
            assert!(error.message().contains("param_dtype is Long"), "{error}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn gradients_travel_in_fewer_bits() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("dp", 2)])?;
            let net = Net::new()?;
            net.distribute(&mesh, &ParameterPlan::new(), Source::Same)?;
            let _sync = GradSync::with(&net, &GradSyncOptions::new().reduce_dtype(DType::Bf16))?;
            let trace = mesh.trace()?;
            let (losses, _) = train(&net, Some(&mesh))?;
            let bytes = trace.bytes()?;
            let mut elements = 0;
            for (_, parameter) in net.parameters() {
                elements += parameter.numel()?;
            }
            assert!(bytes >= 2 * STEPS as i64 * elements, "{bytes}");
            assert!(bytes < 3 * STEPS as i64 * elements, "{bytes}"); // in f32 it is 4
            let (exact, _) = train(&Net::new()?, None)?;
            for (got, wanted) in losses.iter().zip(&exact) {
                assert!((got - wanted).abs() <= 0.03 * wanted.abs(), "{losses:?}, {exact:?}");
            }
            Ok(())
        })
        .unwrap();
}
