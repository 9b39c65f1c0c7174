//! Plans: lines made by functions, forwards in Rust that a plan meets, and where traces say that
//! something was called. The answer of one device is the oracle.

use shardweave::nn::{self, Layer as _};
use shardweave::{
    args, Code, Forward, Layout, Members, Module, Op, ParameterPlan, Placement::*, Result,
    ScriptModule, Sharding, Source, Tensor, TensorResult, World,
};

fn numbers(rows: i64, columns: i64, seed: i64) -> Result<Tensor> {
    let data: Vec<f32> =
        (0..rows * columns).map(|i| ((i * 7 + seed * 5) % 11 - 5) as f32 / 8.0).collect();
    Tensor::from_slice(&data, &[rows, columns])
}

fn expect_close(sharded: &Tensor, plain: &Tensor) -> Result<()> {
    let whole = sharded.full_tensor()?;
    assert_eq!(whole.sizes()?, plain.sizes()?);
    let (a, b) = (whole.detach()?.to_vec::<f32>()?, plain.detach()?.to_vec::<f32>()?);
    for (a, b) in a.iter().zip(&b) {
        assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{a} and {b}");
    }
    Ok(())
}

/// Without a weight of its own, and with two inputs.
struct Block {
    up: Tensor,
    down: Tensor,
    forward: Forward,
}

impl Block {
    fn new(seed: i64) -> Result<Block> {
        let (up, down) = (numbers(7, 5, seed)?, numbers(5, 7, seed + 2)?);
        for weight in [&up, &down] {
            weight.set_requires_grad(true)?;
        }
        Ok(Block { up, down, forward: Forward::new() })
    }

    fn forward(&self, x: &Tensor, scale: &Tensor) -> Result<Tensor> {
        let [y] = self.forward.run([x, scale], |[x, scale]| {
            Ok([(x * scale)?.linear(&self.up, None)?.relu()?.linear(&self.down, None)?])
        })?;
        Ok(y)
    }
}

impl Module for Block {
    fn members(&self, members: &mut Members) {
        members.parameter("up.weight", &self.up);
        members.parameter("down.weight", &self.down);
        members.forward(&self.forward);
    }
}

struct Model(Vec<Block>);

impl Model {
    fn new() -> Result<Model> {
        Ok(Model(vec![Block::new(0)?, Block::new(1)?]))
    }

    fn forward(&self, x: &Tensor, scale: &Tensor) -> Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, block| block.forward(&x, scale))
    }
}

impl Module for Model {
    fn members(&self, members: &mut Members) {
        members.child("blocks", &self.0);
    }
}

/// Outside of the blocks every rank of tp has a part of the tokens.
fn sequence_parallel() -> ParameterPlan {
    ParameterPlan::new()
        .line("*.up.weight", &[("tp", Shard(0))])
        .line("*.down.weight", &[("tp", Shard(1))])
        .forward("blocks.?.input", &[("tp", Replicate)])
        .forward("blocks.?.input.1", &[("tp", Replicate)])
        .forward("blocks.?.output", &[("tp", Shard(0))])
}

#[test]
fn blocks_in_rust_follow_a_plan() {
    for dims in [&[("tp", 2)][..], &[("tp", 3)], &[("dp", 2), ("tp", 2)]] {
        let ranks = dims.iter().map(|(_, size)| *size as usize).product();
        World::threads(ranks)
            .run(|world| {
                let mesh = world.device_mesh(dims)?;
                let (alone, model) = (Model::new()?, Model::new()?);
                model.distribute(&mesh, &sequence_parallel(), Source::Same)?;
                let (x, scale) = (numbers(9, 5, 1)?, numbers(9, 5, 4)?);
                let wanted = alone.forward(&x, &scale)?;
                let on_mesh = |x: &Tensor| x.distribute(&mesh, [("tp", Shard(0))]);
                let trace = mesh.trace()?;
                let y = model.forward(&on_mesh(&x)?, &on_mesh(&scale)?)?;
                let json = trace.to_json()?;
                assert!(json.contains(r#""module":"blocks.1""#), "{json}");
                assert!(json.contains(r#""collective":"reduce_scatter"#), "{json}");
                drop(trace);
                let places = y.layout()?.placements()?;
                assert_eq!(places.last(), Some(&Shard(0)));
                expect_close(&y, &wanted)?;
                for (y, module) in [(&y, &model), (&wanted, &alone)] {
                    (y * y)?.sum()?.backward()?;
                    module.finish_grad_sync()?;
                }
                for ((name, a), (_, b)) in model.parameters().iter().zip(alone.parameters()) {
                    let grad = a.grad()?.unwrap_or_else(|| panic!("{name} has no gradient"));
                    expect_close(&grad, &b.grad()?.unwrap())?;
                }
                Ok(())
            })
            .unwrap_or_else(|error| panic!("{dims:?}: {error}"));
    }
}

#[test]
fn a_derived_struct_has_the_forward_that_is_its_field() {
    #[derive(Module)]
    struct Part {
        up: nn::Linear,
        down: nn::Linear,
        forward: Forward,
    }
    #[derive(Module)]
    struct Parts {
        parts: Vec<Part>,
    }
    let plan = ParameterPlan::new()
        .line("*.up.*", &[("tp", Shard(0))])
        .line("*.down.weight", &[("tp", Shard(1))])
        .forward("parts.?.input", &[("tp", Replicate)])
        .forward("parts.?.output", &[("tp", Shard(0))]);
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("tp", 2)])?;
            let part = || -> Result<Part> {
                let (up, down) = (nn::Linear::new(5, 7)?, nn::Linear::new(7, 5)?);
                Ok(Part { up, down, forward: Forward::new() })
            };
            let model = Parts { parts: vec![part()?, part()?] };
            model.distribute(&mesh, &plan, Source::Rank(0))?;
            let mut x = numbers(9, 5, 1)?.distribute(&mesh, [("tp", Shard(0))])?;
            for Part { up, down, forward } in &model.parts {
                let body = |[x]: [Tensor; 1]| {
                    assert_eq!(x.layout()?.placements()?, [Replicate]);
                    Ok([down.forward(&up.forward(&x)?.relu()?)?])
                };
                let [y] = forward.run([&x], body)?;
                assert_eq!(y.layout()?.placements()?, [Shard(0)]);
                x = y;
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_forward_that_cannot_be_met_is_an_error() {
    struct Bare(Block);
    impl Module for Bare {
        fn members(&self, members: &mut Members) {
            members.parameter("blocks.0.up.weight", &self.0.up);
            members.parameter("blocks.0.down.weight", &self.0.down);
        }
    }
    struct Shared(Block);
    impl Module for Shared {
        fn members(&self, members: &mut Members) {
            members.child("a", &self.0);
            members.child("b", &self.0);
        }
    }
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("tp", 2)])?;
            let bare = Bare(Block::new(0)?);
            let plan = sequence_parallel();
            let errors = [
                bare.distribute(&mesh, &plan, Source::Same).unwrap_err(),
                plan.resolve(&bare, &mesh).unwrap_err(),
            ];
            for (error, function) in
                errors.iter().zip(["Module::distribute", "ParameterPlan::resolve"])
            {
                assert_eq!(error.code(), Code::FailedPrecondition);
                let message = error.message();
                assert!(message.starts_with(function), "{message}");
                assert!(
                    message.contains(
                        "the forward of 'blocks.0' cannot be met: it has no parameter of its own; \
                         announce it by Members::forward first, and run it by Forward::run"
                    ),
                    "{message}"
                );
            }
            assert!(!bare.0.up.is_sharded()?);
            let error = Shared(Block::new(0)?).distribute(&mesh, &plan, Source::Same).unwrap_err();
            assert_eq!(
                error.message(),
                "Module::distribute: 'a' and 'b' have one Forward; wanted one each"
            );
            // One that the plan speaks of, but not with as many inputs.
            let block = Block::new(0)?;
            let many = ParameterPlan::new().forward("input.7", &[("tp", Replicate)]);
            block.distribute(&mesh, &many, Source::Same)?;
            let x = numbers(9, 5, 1)?;
            let error = block.forward(&x, &x).unwrap_err();
            assert_eq!(
                error.message(),
                "Forward::run: the plan's 'input.7': there are only 2 tensors that a plan can \
                 speak of, also within optionals, tuples and vectors"
            );
            // What the body says stays, and the next run is a run as any.
            let error = block.forward.run([&x], |[x]| Ok([x.matmul(&x)?])).unwrap_err();
            assert!(error.message().starts_with("Tensor::matmul: "), "{error}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn lines_that_agree_may_stand_twice() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("tp", 2)])?;
            let model = Model::new()?;
            let twice = sequence_parallel()
                .line("*.up.weight", &[("tp", Shard(0))])
                .forward("blocks.?.output", &[("tp", Shard(0))]);
            model.distribute(&mesh, &twice, Source::Same)?;
            assert_eq!(model.0[0].up.layout()?.to_string(), "[S(0)]");
            let contrary = sequence_parallel().forward("blocks.?.output", &[("tp", Shard(1))]);
            let error = contrary.resolve(&Model::new()?, &mesh).unwrap_err();
            assert!(error.message().contains("two placements"), "{error}");
            Ok(())
        })
        .unwrap();
}

#[test]
fn lines_by_position_say_who_cuts_first() {
    World::threads(4)
        .run(|world| {
            let mesh = world.device_mesh(&[("dp", 2), ("tp", 2)])?;
            let block = Block::new(0)?;
            let plan = ParameterPlan::new()
                .layout_line("up.weight", "[S(0)@1, S(0)@0]")
                .layout_line("down.weight", Layout::new(&[Replicate, Shard(1)])?)
                .forward_layout("output", "[S(0), R]");
            let resolved = plan.resolve(&block, &mesh)?;
            assert!(resolved.to_string().contains("down.weight"), "{resolved}");
            assert!(resolved.json.contains(r#""layout":"[S(0)@1, S(0)@0]""#), "{}", resolved.json);
            block.distribute(&mesh, &plan, Source::Same)?;
            assert_eq!(block.up.layout()?.to_string(), "[S(0)@1, S(0)@0]");
            let x = numbers(9, 5, 1)?.distribute(&mesh, "[R, R]")?;
            assert_eq!(block.forward(&x, &x)?.layout()?.to_string(), "[S(0), R]");
            let wrong = ParameterPlan::new().layout_line("up.weight", "[S(0)");
            let error = wrong.resolve(&block, &mesh).unwrap_err();
            assert!(error.message().starts_with("ParameterPlan::resolve: "), "{error}");
            Ok(())
        })
        .unwrap();
}

#[derive(Module)]
#[module(sharding = Mlp::pair)]
struct Mlp {
    up: nn::Linear,
    down: nn::Linear,
}

impl Mlp {
    fn new(seed: i64) -> Result<Mlp> {
        let mlp =
            Mlp { up: nn::Linear::without_bias(4, 6)?, down: nn::Linear::without_bias(6, 4)? };
        shardweave::no_grad(|| {
            mlp.up.weight.copy_(&numbers(6, 4, seed)?)?;
            mlp.down.weight.copy_(&numbers(4, 6, seed + 1)?)
        })?;
        Ok(mlp)
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&self.up.forward(x)?.relu()?)
    }

    fn pair(&self) -> Sharding {
        Sharding::new()
            .parameter("up.*", Shard(0))
            .parameter("down.weight", Shard(1))
            .forward("down.output", Replicate)
            .style("\"columns\"")
            .parameter("{up,down}.weight", Shard(-1))
    }
}

/// Behind whatever else implements `Module` for what it holds.
#[test]
fn modules_say_how_they_shard() {
    let blocks = || (0..2).map(|i| Ok(Some(Box::new(Mlp::new(i)?)))).collect::<Result<Vec<_>>>();
    let run = |blocks: &[Option<Box<Mlp>>], mut x: Tensor| -> Result<Tensor> {
        for block in blocks {
            x = block.as_ref().unwrap().forward(&x)?;
        }
        Ok(x)
    };
    let data = || numbers(3, 4, 2);
    for (style, up) in [("", "[S(0)]"), ("\"columns\"", "[S(1)]")] {
        World::threads(3)
            .run(|world| {
                let mesh = world.device_mesh(&[("tp", 3)])?;
                let (plain, model) = (blocks()?, blocks()?);
                let plan = ParameterPlan::new().module("?", &[("tp", style)]);
                model.distribute(&mesh, &plan, Source::default())?;
                assert_eq!(model[1].as_ref().unwrap().up.weight.layout()?.to_string(), up);
                let y = run(&model, data()?.distribute(&mesh, [("tp", Replicate)])?)?;
                expect_close(&y, &run(&plain, data()?)?)
            })
            .unwrap();
    }
    let refused = World::threads(1).run(|world| {
        let mesh = world.device_mesh(&[("tp", 1)])?;
        let plan = ParameterPlan::new().module("?", &[("tp", "rows")]);
        blocks()?.distribute(&mesh, &plan, Source::Same)
    });
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("in the style 'rows', which it does not say"), "{text}");
}

#[test]
fn plans_as_data() {
    let text = r#"{"parameter":{"a":{"tp":"S(0)"},"b":["R","S(1)"],"c":"[S(0)@1, S(0)@0]"},
                   "forward":{"a.input":{},"b.output.1":"[R, R]"},
                   "module":{"a.*":"tp","b":{"tp":"R","dp":"columns"}}}"#;
    let plan = ParameterPlan::from_json(text).unwrap();
    let lines: Vec<_> = plan.lines().map(|(pattern, _)| pattern).collect();
    assert_eq!(lines, ["a", "b", "c"]);
    assert_eq!(plan.forward_lines().count(), 2);
    let same = ParameterPlan::new()
        .line("a", &[("tp", Shard(0))])
        .layout_line("b", "[R, S(1)]")
        .layout_line("c", "[S(0)@1, S(0)@0]")
        .forward::<&str>("a.input", &[])
        .forward_layout("b.output.1", "[R, R]")
        .module("a.*", &[("tp", "")])
        .module("b", &[("tp", "R"), ("dp", "columns")]);
    assert_eq!(plan, same);
    #[cfg(feature = "serde")]
    {
        assert_eq!(serde_json::from_str::<ParameterPlan>(text).unwrap(), plan);
        let written = serde_json::to_string(&plan).unwrap();
        assert_eq!(ParameterPlan::from_json(&written).unwrap(), plan);
        for wrong in [
            r#"{"parameter":{"a":7}}"#,
            r#"{"parameter":{"a":["X"]}}"#,
            r#"{"x":{}}"#,
            r#"{"module":{"a":7}}"#,
        ] {
            serde_json::from_str::<ParameterPlan>(wrong).unwrap_err();
        }
    }
    for wrong in ["{", "7", r#"{"parameter":{"a":"[X]"}}"#, "{}\0"] {
        let error = ParameterPlan::from_json(wrong).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().starts_with("ParameterPlan::from_json: "), "{error}");
    }
}

#[test]
fn traces_say_where_the_call_was() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("tp", 2)])?;
            let model = Model::new()?;
            let x = numbers(9, 5, 1)?;
            let at = |line: u32| format!(r#""source":"{}:{line}""#, file!().replace('\\', "\\\\"));
            let trace = mesh.trace()?;
            let check = |line: u32, op: &str| -> Result<()> {
                let json = trace.to_json()?;
                assert!(json.contains(&at(line)), "{op}, line {line}: {json}");
                assert!(json.contains(&format!(r#""op":"{op}""#)), "{op}: {json}");
                trace.clear()
            };
            model.distribute(&mesh, &sequence_parallel(), Source::Rank(0))?;
            check(line!() - 1, "distribute_module")?;
            let on_mesh = x.distribute(&mesh, [("tp", Shard(0))])?;
            check(line!() - 1, "distribute_tensor")?;
            on_mesh.redistribute([("tp", Replicate)])?;
            check(line!() - 1, "redistribute")?;
            on_mesh.full_tensor()?;
            check(line!() - 1, "full_tensor")?;
            // Of each rank's own elements; a new one each time: what was gathered is remembered.
            let sum = || on_mesh.sum();
            sum()?.relu()?;
            check(line!() - 1, "aten::relu")?;
            (sum()? * sum()?)?;
            check(line!() - 1, "aten::mul")?;
            let (a, b) = (sum()?, sum()?);
            (2 * &a + &a).times(&b)?;
            check(line!() - 1, "aten::mul")?;
            Op::find("aten::exp")?.call::<Tensor>(args![&sum()?])?;
            check(line!() - 1, "aten::exp")?;
            let linear = nn::Linear::without_bias(5, 4)?;
            let plan = ParameterPlan::new().line("weight", &[("tp", Shard(0))]);
            linear.distribute(&mesh, &plan, Source::Rank(0))?;
            trace.clear()?;
            linear.forward(&on_mesh)?;
            check(line!() - 1, "aten::mm")?;
            let layer = nn::Sequential::new().function(|x| x.relu());
            layer.forward(&sum()?)?;
            check(line!() - 2, "aten::relu")?;
            let y = model.forward(&on_mesh, &on_mesh)?;
            trace.clear()?;
            y.sum()?.redistribute([("tp", Replicate)])?.backward()?;
            check(line!() - 1, "redistribute backward")?;
            // Nothing is said after the last trace, and nothing fails.
            drop(trace);
            on_mesh.full_tensor()?;
            let other = mesh.trace()?;
            on_mesh.full_tensor()?;
            assert_eq!(other.to_json()?.matches(r#""source":""#).count(), 1);
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_file_takes_names_and_has_a_mode() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/linear.pt");
    let module = ScriptModule::load(path).unwrap();
    let x = Tensor::ones(&[2, 3]).unwrap();
    let y: Tensor = module.call("forward", args![&x]).unwrap();
    let named: Tensor = module.call_named("forward", &[], &[("x", (&x).into())]).unwrap();
    assert_eq!(y.to_vec::<f32>().unwrap(), named.to_vec::<f32>().unwrap());
    let error = module.call_named::<Tensor>("forward", &[], &[("xx", (&x).into())]).unwrap_err();
    assert!(error.message().starts_with("ScriptModule::call_named: forward: "), "{error}");
    for on in [false, true] {
        module.train(on).unwrap();
        assert_eq!(module.is_training(), Ok(on));
    }
    Module::eval(&module);
    assert_eq!(module.is_training(), Ok(false));
    #[derive(Module)]
    struct Holds {
        file: ScriptModule,
    }
    let holds = Holds { file: module };
    Module::train(&holds);
    assert_eq!(holds.file.is_training(), Ok(true));
}
