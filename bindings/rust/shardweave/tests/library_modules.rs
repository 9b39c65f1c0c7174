//! Modules of the library's by their kinds: on a mesh they compute what they do on one rank, values
//! and gradients; alone, as fields, deferred and not; and what is wrong is said.

use shardweave::debug::{self, VerifyOptions};
use shardweave::nn::{self, Layer};
use shardweave::{
    apply, args, auto_plan, deferred_init, materialize, no_grad, AutoPlanOptions, Code, CostModel,
    DeviceCost, Error, Forward, Function, FunctionContext, GradSync, GradSyncOptions, LinkCost,
    MaterializeOptions, Members, Mesh, Module, NativeModule, ParameterPlan, PatchCall,
    Placement::*, ReduceOp, Result, Source, State, Tensor, World,
};

const MESHES: [&[(&str, i64)]; 3] = [&[("tp", 1)], &[("tp", 2)], &[("dp", 2), ("tp", 2)]];

fn ranks(dims: &[(&str, i64)]) -> usize {
    dims.iter().map(|(_, size)| *size as usize).product()
}

fn numbers(sizes: &[i64], phase: f32) -> Result<Tensor> {
    let count = sizes.iter().product::<i64>();
    let data: Vec<f32> = (0..count).map(|i| (i as f32 * 0.7 + phase).sin()).collect();
    Tensor::from_slice(&data, sizes)
}

/// The same values on every rank.
fn fill<M: Module + ?Sized>(module: &M) -> Result<()> {
    fill_up_to(1.0, module)
}

fn fill_up_to<M: Module + ?Sized>(largest: f32, module: &M) -> Result<()> {
    for (i, (_, parameter)) in module.parameters().into_iter().enumerate() {
        let value = (numbers(&parameter.sizes()?, i as f32)? * largest)?;
        no_grad(|| parameter.copy_(&value))?;
    }
    Ok(())
}

fn whole(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.detach()?.full_tensor()?.to_vec::<f32>()
}

/// The output, then the gradients by name.
fn seen<M: Module + ?Sized>(
    module: &M,
    forward: &dyn Fn(&M) -> Result<Tensor>,
) -> Result<Vec<(String, Vec<f32>)>> {
    let y = forward(module)?;
    let mut all = vec![("output".to_owned(), whole(&y)?)];
    (&y * &numbers(&y.sizes()?, 2.0)?)?.sum()?.backward()?;
    module.finish_grad_sync()?;
    for (name, parameter) in module.parameters() {
        let gradient = parameter.grad()?.expect("everything is used");
        all.push((name, whole(&gradient)?));
    }
    module.zero_grad()?;
    Ok(all)
}

fn assert_close(got: &[(String, Vec<f32>)], wanted: &[(String, Vec<f32>)], place: &str) {
    assert_eq!(got.len(), wanted.len(), "{place}");
    for ((name, got), (other, wanted)) in got.iter().zip(wanted) {
        assert_eq!(name, other, "{place}");
        assert_eq!(got.len(), wanted.len(), "{place}: {name}");
        let largest = wanted.iter().fold(1.0f32, |most, x| most.max(x.abs()));
        for (a, b) in got.iter().zip(wanted) {
            assert!((a - b).abs() <= 1e-5 * largest, "{place}: {name}: {got:?}, wanted {wanted:?}");
        }
    }
}

/// Patched modules compute on every mesh what they do on one rank, before a plan or behind it.
#[test]
fn patches_run_under_plans() {
    const CONFIG: &str = r#"{"vocab_size": 13, "hidden_size": 8, "intermediate_size": 6,
        "num_hidden_layers": 2, "num_attention_heads": 2}"#;
    let patch = |llama: &NativeModule| -> Result<()> {
        llama.patch("model.layers.*.mlp", |call: &PatchCall| {
            assert!(call.fqn().ends_with(".mlp"));
            let weight = &call.module()?.parameters()[0].1;
            assert_eq!(weight.sizes()?, [6, 8]);
            let [once] = call.forward(&[call.input(0)?])?;
            let [twice] = call.forward(&[&once])?;
            Ok([(once + twice)?])
        })?;
        llama.patch("model.layers.1.mlp", |call: &PatchCall| {
            assert_eq!((call.fqn(), call.inputs().len()), ("model.layers.1.mlp", 1));
            assert!(call.input(1).unwrap_err().message().contains("no such input"));
            let [y] = call.forward(&[call.input(0)?])?;
            Ok([(y * 0.5)?])
        })
    };
    let model = |mesh: Option<&Mesh>, behind: bool| -> Result<NativeModule> {
        let llama = NativeModule::new("llama", CONFIG)?;
        // (Where MLPs follow on MLPs larger weights let float32's last digits grow.)
        fill_up_to(0.5, &llama)?;
        if !behind {
            patch(&llama)?;
        }
        if let Some(mesh) = mesh {
            let plan = ParameterPlan::new()
                .line("*.{gate,up}_proj.weight", &[("tp", Shard(0))])
                .line("*.down_proj.weight", &[("tp", Shard(1))])
                .forward("model.layers.?.mlp.output", &[("tp", Replicate)]);
            llama.distribute(mesh, &plan, Source::Same)?;
        }
        if behind {
            patch(&llama)?;
        }
        Ok(llama)
    };
    let ids: Vec<i64> = (0..12).map(|i| i * 5 % 13).collect();
    let run = |llama: &NativeModule, mesh: Option<&Mesh>| {
        seen(llama, &|llama: &NativeModule| {
            let x = Tensor::from_slice(&ids, &[4, 3])?;
            let x = match mesh {
                Some(mesh) => x.distribute_from(Source::Same, mesh, [("tp", Replicate)])?,
                None => x,
            };
            llama.call(args![&x])
        })
    };
    let wanted = run(&model(None, false).unwrap(), None).unwrap();
    let plain = NativeModule::new("llama", CONFIG).unwrap();
    fill_up_to(0.5, &plain).unwrap();
    assert_ne!(run(&plain, None).unwrap()[0].1, wanted[0].1);
    for dims in MESHES {
        for behind in [false, true] {
            World::threads(ranks(dims))
                .run(|world| {
                    let mesh = world.device_mesh(dims)?;
                    let got = run(&model(Some(&mesh), behind)?, Some(&mesh))?;
                    assert_close(&got, &wanted, &format!("{dims:?}"));
                    Ok(())
                })
                .unwrap();
        }
    }
    let gelu = NativeModule::new("GELU", "").unwrap();
    gelu.patch("", |call: &PatchCall| {
        let x = call.input(0)?;
        Ok([x.detach()?, x.detach()?])
    })
    .unwrap();
    let error = gelu.call::<Tensor>(args![&Tensor::ones(&[2]).unwrap()]).unwrap_err();
    assert!(error.message().contains("the patch gives 2 tensors; wanted 1"), "{error}");
    let none = |call: &PatchCall| call.forward::<1>(&[]);
    let error = plain.patch("model.embed_tokens", none).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    let panics = |_: &PatchCall| -> Result<[Tensor; 1]> { panic!("not today") };
    plain.patch("lm_head", panics).unwrap();
    let x = Tensor::from_slice(&ids, &[4, 3]).unwrap();
    let error = plain.call::<Tensor>(args![&x]).unwrap_err();
    assert!(error.message().contains("not today"), "{error}");
}

/// What only looks at a module leaves what is frozen frozen.
#[test]
fn looking_at_a_module_unfreezes_nothing() {
    let world = World::counting(0, 2).unwrap();
    let mesh = world.device_mesh(&[("tp", 2)]).unwrap();
    let model = nn::Linear::new(3, 4).unwrap();
    model.weight.set_requires_grad(false).unwrap();
    debug::dump(&model).unwrap();
    debug::memory(&model).unwrap();
    ParameterPlan::new().resolve(&model, &mesh).unwrap();
    materialize(&model, &MaterializeOptions::default()).unwrap();
    assert_eq!(model.weight.requires_grad(), Ok(false));
}

struct Case {
    kind: &'static str,
    options: &'static str,
    plan: &'static str,
    inputs: &'static [&'static [i64]],
}

const CASES: [Case; 5] = [
    Case {
        kind: "Linear",
        options: r#"{"in_features": 5, "out_features": 7}"#,
        plan: r#"{"parameter": {"*": {"tp": "S(0)"}}, "forward": {"output": {"tp": "R"}}}"#,
        inputs: &[&[4, 5]],
    },
    Case {
        kind: "Conv2d",
        options: r#"{"in_channels": 3, "out_channels": 5, "kernel_size": 3, "padding": 1}"#,
        plan: r#"{"parameter": {"*": {"tp": "S(0)"}}}"#,
        inputs: &[&[2, 3, 5, 4]],
    },
    Case {
        kind: "TransformerEncoderLayer",
        options: r#"{"d_model": 8, "nhead": 4, "dim_feedforward": 11, "dropout": 0}"#,
        plan: r#"{"parameter": {"*.in_proj_*": {"tp": "S(0, sf=3)"}, "*.out_proj.weight": {"tp": "S(1)"},
                                "linear1.*": {"tp": "S(0)"}, "linear2.weight": {"tp": "S(1)"}}}"#,
        inputs: &[&[3, 2, 8]],
    },
    Case {
        kind: "TransformerDecoderLayer",
        options: r#"{"d_model": 8, "nhead": 4, "dim_feedforward": 11, "dropout": 0}"#,
        plan: r#"{"parameter": {"*.in_proj_*": {"tp": "S(0, sf=3)"}, "*.out_proj.weight": {"tp": "S(1)"}}}"#,
        inputs: &[&[3, 2, 8], &[5, 2, 8]],
    },
    Case {
        kind: "Sequential",
        options: r#"{"layers": [{"kind": "Linear", "in_features": 5, "out_features": 9},
                                {"kind": "GELU"},
                                {"kind": "Linear", "in_features": 9, "out_features": 3}]}"#,
        plan: r#"{"parameter": {"0.*": {"tp": "S(0)"}, "2.weight": {"tp": "S(1)"}},
                  "forward": {"1.input": {"tp": "S(-1)"}, "output": {"tp": "R"}}}"#,
        inputs: &[&[4, 5]],
    },
];

#[test]
fn kinds_on_meshes() {
    for case in &CASES {
        let forward = |module: &NativeModule| {
            let inputs = case.inputs.iter().enumerate();
            let inputs: Vec<Tensor> =
                inputs.map(|(i, sizes)| numbers(sizes, i as f32)).collect::<Result<_>>()?;
            let arguments: Vec<_> = inputs.iter().map(|x| x.into()).collect();
            module.call::<Tensor>(&arguments)
        };
        let alone = NativeModule::new(case.kind, case.options).unwrap();
        fill(&alone).unwrap();
        let wanted = seen(&alone, &forward).unwrap();
        for dims in MESHES {
            World::threads(ranks(dims))
                .run(|world| {
                    let mesh = world.device_mesh(dims)?;
                    let module = NativeModule::new(case.kind, case.options)?;
                    fill(&module)?;
                    let plan = ParameterPlan::from_json(case.plan)?;
                    module.distribute(&mesh, &plan, Source::Same)?;
                    assert_close(&seen(&module, &forward)?, &wanted, case.kind);
                    Ok(())
                })
                .unwrap();
        }
    }
}

/// In a struct, beside layers of Rust's own.
#[derive(Module)]
struct Mixed {
    first: nn::Linear,
    block: NativeModule,
    last: nn::Linear,
}

impl Mixed {
    fn new() -> Result<Mixed> {
        let block = r#"{"layers": [{"kind": "Linear", "in_features": 6, "out_features": 9},
                                   {"kind": "ReLU"}, {"kind": "Dropout", "p": 0.5},
                                   {"kind": "Linear", "in_features": 9, "out_features": 4}]}"#;
        Ok(Mixed {
            first: nn::Linear::new(5, 6)?,
            block: NativeModule::new("Sequential", block)?,
            last: nn::Linear::new(4, 3)?,
        })
    }
}

impl Layer for Mixed {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.last.forward(&self.block.forward(&self.first.forward(x)?)?)
    }
}

fn distributed(mesh: &Mesh) -> Result<Mixed> {
    let model = Mixed::new()?;
    fill(&model)?;
    model.eval(); // also what is the library's
    assert!(!model.block.is_training()?);
    // The second line of the second part is about a module without a weight, inside the library's.
    let plan = ParameterPlan::new()
        .line("{first,block.0}.*", &[("tp", Shard(0))])
        .line("block.3.weight", &[("tp", Shard(1))])
        .forward("block.3.output", &[("tp", Replicate)])
        .forward("block.1.output", &[("tp", Shard(1))]);
    model.distribute(mesh, &plan, Source::Same)?;
    Ok(model)
}

#[test]
fn a_module_of_both() {
    let forward = |model: &Mixed| model.forward(&numbers(&[4, 5], 0.5)?);
    let alone = Mixed::new().unwrap();
    fill(&alone).unwrap();
    alone.eval();
    let wanted = seen(&alone, &forward).unwrap();
    assert_eq!(wanted.len(), 9);
    assert!(wanted.iter().any(|(name, _)| name == "block.3.weight"));
    for dims in MESHES {
        World::threads(ranks(dims))
            .run(|world| {
                let mesh = world.device_mesh(dims)?;
                let model = distributed(&mesh)?;
                assert_close(&seen(&model, &forward)?, &wanted, "mixed");

                let report = debug::dump(&model)?;
                assert!(report.json.contains(r#""fqns":["block.0.weight"]"#), "{}", report.json);
                let x = numbers(&[4, 5], 0.5)?;
                let plain = alone_like()?;
                let found = debug::verify(
                    &model,
                    || model.forward(&x),
                    &plain,
                    || plain.forward(&x),
                    VerifyOptions::default(),
                )?;
                assert!(found.same, "{}", found.report);
                assert!(found.report.table.contains(" gradients"), "{}", found.report);
                let again = no_grad(|| {
                    debug::verify(
                        &model,
                        || model.forward(&x),
                        &plain,
                        || plain.forward(&x),
                        VerifyOptions::default(),
                    )
                })?;
                assert_eq!(again.report.table, found.report.table);
                no_grad(|| plain.last.weight.copy_(&(&plain.last.weight.detach()? * 2.0)?))?;
                let found = debug::verify(
                    &model,
                    || model.forward(&x),
                    &plain,
                    || plain.forward(&x),
                    VerifyOptions::default(),
                )?;
                assert!(!found.same && found.report.table.contains("last.weight"));
                Ok(())
            })
            .unwrap();
    }
}

fn alone_like() -> Result<Mixed> {
    let model = Mixed::new()?;
    fill(&model)?;
    model.eval();
    Ok(model)
}

#[test]
fn deferred_ones_have_the_same_numbers() {
    let made = |mesh: Option<&Mesh>| -> Result<Vec<Vec<f32>>> {
        let model = deferred_init(Mixed::new)?;
        for (name, parameter) in model.parameters() {
            assert!(parameter.is_deferred()?, "{name}");
        }
        let error = model.first.weight.to_vec::<f32>().unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(
            error.message().starts_with("Tensor::to_vec: argument 'self' is deferred"),
            "{error}"
        );
        if let Some(mesh) = mesh {
            let plan = ParameterPlan::new().line("*.weight", &[("tp", Shard(0))]);
            model.distribute(mesh, &plan, Source::Same)?;
        }
        let last = numbers(&[3], 9.0)?;
        let options = MaterializeOptions::new().seed(3).value("last.bias", &last);
        materialize(&model, &options)?;
        assert_eq!(whole(&model.last.bias.clone().unwrap())?, last.to_vec::<f32>()?);
        model.parameters().iter().map(|(_, parameter)| whole(parameter)).collect()
    };
    let wanted = made(None).unwrap();
    for dims in MESHES {
        World::threads(ranks(dims))
            .run(|world| {
                assert_eq!(made(Some(&world.device_mesh(dims)?))?, wanted);
                Ok(())
            })
            .unwrap();
    }
    let model = deferred_init(Mixed::new).unwrap();
    let wrong = MaterializeOptions::new().value("last.bais", &numbers(&[3], 0.0).unwrap());
    let error = materialize(&model, &wrong).unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.message().starts_with("materialize: "), "{error}");
    assert!(error.message().contains("did you mean 'last.bias'?"), "{error}");
    // What fails in the body fails outside of it, and nothing stays deferred.
    let error = deferred_init(|| nn::Linear::new(-1, 2)).unwrap_err();
    assert!(!error.message().is_empty());
    assert!(!Tensor::ones(&[2]).unwrap().is_deferred().unwrap());
}

#[test]
fn gradients_leave_during_backward() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("dp", 2)])?;
            let model = Mixed::new()?;
            fill(&model)?;
            model.eval();
            model.distribute(&mesh, &ParameterPlan::new(), Source::Same)?;
            let x = numbers(&[4, 5], 0.5)?.distribute(&mesh, [("dp", Shard(0))])?;
            let forward = |model: &Mixed| model.forward(&x);
            let wanted = seen(&model, &forward)?;
            let sync = GradSync::with(&model, &GradSyncOptions::new().bucket_bytes(100))?;
            let error = GradSync::new(&model).unwrap_err();
            assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
            for _ in 0..3 {
                assert_close(&seen(&model, &forward)?, &wanted, "with GradSync");
            }
            let counts = sync.counts()?;
            assert!(counts.buckets > 1, "{counts:?}");
            assert_eq!(counts.left_in_backward, 2 * counts.buckets);
            {
                let _accumulate = sync.no_sync()?;
                model.forward(&x)?.sum()?.backward()?;
                assert_eq!(sync.counts()?, counts);
            }
            model.zero_grad()?;
            drop(sync);
            drop(GradSync::new(&model)?); // the hooks are gone
            let error =
                GradSync::with(&model, &GradSyncOptions::new().bucket_bytes(0)).unwrap_err();
            let message = "GradSync::with: argument 'bucket_bytes' is 0";
            assert!(error.message().starts_with(message), "{error}");
            Ok(())
        })
        .unwrap();
}

/// The plan that is found is one device's model; and what is wrong.
#[test]
fn a_plan_is_searched_for() {
    #[derive(Module)]
    struct Mlp {
        up: nn::Linear,
        down: nn::Linear,
    }
    impl Layer for Mlp {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            self.down.forward(&self.up.forward(x)?.relu()?)
        }
    }
    let make =
        || -> Result<Mlp> { Ok(Mlp { up: nn::Linear::new(5, 9)?, down: nn::Linear::new(9, 3)? }) };
    World::threads(3)
        .run(|world| {
            let mesh = world.device_mesh(&[("tp", 3)])?;
            // Computing takes long, so that cutting pays.
            mesh.set_cost_model(&CostModel {
                links: vec![LinkCost { latency: 1e-8, bandwidth: 1e8 }],
                device: DeviceCost { flops: 1e7, bandwidth: 1e7 },
            })?;
            let x = numbers(&[4, 5], 0.5)?;
            let on = |mesh: &Mesh| x.distribute_from(Source::Same, mesh, [("tp", Replicate)]);
            let loss = |model: &Mlp, mesh: &Mesh| (&model.forward(&on(mesh)?)? * 1.0)?.sum();
            let found = auto_plan(&mesh, make, loss, &AutoPlanOptions::new())?;
            assert!(found.report.table.contains("plans measured"), "{}", found.report);
            assert!(found.report.json.contains("\"evaluations\""), "{}", found.report.json);
            let (alone, model) = (make()?, make()?);
            for model in [&alone, &model] {
                fill(model)?;
            }
            model.distribute(&mesh, &found.plan, Source::Same)?;
            let cut = model.up.weight.to_local()?.numel()? < model.up.weight.numel()?;
            assert!(cut, "{}", found.report);
            let wanted = seen(&alone, &|model: &Mlp| model.forward(&x))?;
            assert_close(&seen(&model, &|model: &Mlp| model.forward(&on(&mesh)?))?, &wanted, "");

            let new = AutoPlanOptions::new;
            for (options, code, text) in [
                (new().tp_mesh_dim("dp"), Code::NotFound, "no dimension \"dp\""),
                (new().tp_mesh_dim("d\0"), Code::InvalidArgument, "has a NUL"),
                (new().memory_limit(10), Code::ResourceExhausted, "10"),
                (new().memory_limit(-1), Code::InvalidArgument, "memory_limit"),
                (new().max_evaluations(0), Code::InvalidArgument, "max_evaluations is 0"),
                (new().heads(-1), Code::InvalidArgument, "heads is -1"),
                (new().sequence_dim(-1), Code::InvalidArgument, "sequence_dim is -1"),
            ] {
                let error = auto_plan(&mesh, make, loss, &options).unwrap_err();
                assert_eq!(error.code(), code, "{error}");
                assert!(error.message().starts_with("auto_plan: "), "{error}");
                assert!(error.message().contains(text), "{error}");
            }
            let fails = || -> Result<Mlp> { Err(Error::new(Code::DataLoss, "the cat ate it")) };
            let error = auto_plan(&mesh, fails, loss, &new()).unwrap_err();
            assert_eq!(error.code(), Code::DataLoss, "{error}");
            assert!(error.message().contains("the cat ate it"), "{error}");
            Ok(())
        })
        .unwrap();
}

/// A module of the library's has no room for others of its own: what stands beside it under no name
/// would be left out.
#[test]
fn members_beside_a_nameless_native_module_are_an_error() {
    struct Beside {
        native: NativeModule,
        parameter: Option<Tensor>,
        buffer: Option<Tensor>,
        forward: Option<Forward>,
        name: &'static str,
    }
    impl Module for Beside {
        fn members(&self, members: &mut Members) {
            match self.name {
                "" => self.native.members(members),
                name => members.child(name, &self.native),
            }
            if let Some(tensor) = &self.parameter {
                members.parameter("scale", tensor);
            }
            if let Some(tensor) = &self.buffer {
                members.buffer("mean", tensor);
            }
            if let Some(forward) = &self.forward {
                members.forward(forward);
            }
        }
    }
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("tp", 2)])?;
            let bare = |name| -> Result<Beside> {
                let native =
                    NativeModule::new("Linear", r#"{"in_features": 3, "out_features": 2}"#)?;
                Ok(Beside { native, parameter: None, buffer: None, forward: None, name })
            };
            let plan = ParameterPlan::new();
            for which in 0..3 {
                let with = |name| -> Result<Beside> {
                    let mut module = bare(name)?;
                    match which {
                        0 => module.parameter = Some(nn::parameter(Tensor::ones(&[4])?)?),
                        1 => module.buffer = Some(Tensor::ones(&[4])?),
                        _ => module.forward = Some(Forward::new()),
                    }
                    Ok(module)
                };
                let module = with("")?;
                let errors = [
                    module.distribute(&mesh, &plan, Source::Rank(0)).unwrap_err(),
                    plan.resolve(&module, &mesh).unwrap_err(),
                    debug::dump(&module).unwrap_err(),
                    GradSync::new(&module).unwrap_err(),
                ];
                for error in errors {
                    assert_eq!(error.code(), Code::InvalidArgument, "{which}: {error}");
                    let text =
                        "a NativeModule without a name of its own has other members beside it";
                    assert!(error.message().contains(text), "{which}: {error}");
                }
                assert!(!module.parameters()[0].1.is_sharded()?, "{which}");
                // With a name all of them are there.
                let module = with("linear")?;
                module.distribute(&mesh, &plan, Source::Rank(0))?;
                for (name, tensor) in module.parameters().iter().chain(&module.buffers()) {
                    assert!(tensor.is_sharded()?, "{which}: {name}");
                }
            }
            // Alone it is what it is.
            let module = bare("")?;
            module.distribute(&mesh, &plan, Source::Rank(0))?;
            assert!(module.parameters()[0].1.is_sharded()?);
            Ok(())
        })
        .unwrap();
}

/// What it is given; its backward fails where it shall.
struct Passes {
    fails: bool,
}

impl Function for Passes {
    fn forward(&self, _: &FunctionContext, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![(&inputs[0] * 1.0)?])
    }

    fn backward(
        &self,
        _: &FunctionContext,
        gradients: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        match self.fails {
            true => Err(Error::new(Code::DataLoss, "this rank's")),
            false => Ok(gradients.to_vec()),
        }
    }
}

/// On rank 1 backward fails when the last layer's gradients have left.
#[test]
fn what_has_left_in_a_backward_that_failed_is_discarded() {
    #[derive(Module)]
    struct Two {
        first: nn::Linear,
        last: nn::Linear,
    }
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("dp", 2)])?;
            let model = Two { first: nn::Linear::new(5, 7)?, last: nn::Linear::new(7, 3)? };
            fill(&model)?;
            model.distribute(&mesh, &ParameterPlan::new(), Source::Same)?;
            let x = numbers(&[4, 5], 0.5)?.distribute(&mesh, [("dp", Shard(0))])?;
            let through = |model: &Two, fails: bool| {
                let middle = model.first.forward(&x)?;
                model.last.forward(&apply(Passes { fails }, &[&middle], 1)?[0])
            };
            let forward = |model: &Two| through(model, false);
            let wanted = seen(&model, &forward)?;
            let sync = GradSync::with(&model, &GradSyncOptions::new().bucket_bytes(1))?;
            for _ in 0..2 {
                seen(&model, &forward)?;
                let backward = through(&model, world.rank() == 1)?.sum()?.backward();
                let mut failed = [i64::from(backward.is_err())];
                assert_eq!(failed[0] == 1, world.rank() == 1, "{backward:?}");
                world.comm()?.all_reduce(&mut failed, ReduceOp::Max)?;
                assert_eq!(failed, [1]);
                sync.discard()?;
                model.zero_grad()?;
                assert_close(&seen(&model, &forward)?, &wanted, "after what failed");
            }
            // Half of the buckets on rank 1, where it failed.
            let counts = sync.counts()?;
            let failed = if world.rank() == 1 { counts.buckets / 2 } else { counts.buckets };
            assert!(counts.buckets >= 2, "{counts:?}");
            assert_eq!(counts.left_in_backward, 3 * counts.buckets + 2 * failed);
            Ok(())
        })
        .unwrap();
}

#[test]
fn what_is_wrong_is_said() {
    let refused = |kind: &str, options: &str| {
        let error = NativeModule::new(kind, options).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().starts_with("NativeModule::new: "), "{error}");
        error.message().to_owned()
    };
    assert!(refused("Linaer", "").contains("did you mean 'Linear'?"));
    assert!(refused("Linear", "").contains("\"in_features\" is missing"));
    assert!(refused("Linear", r#"{"in_features": 18446744073709551615, "out_features": 1}"#)
        .contains("wanted an integer, 1 or more"));
    assert!(refused("Linear\0", "").contains("has a NUL"));
    let model = NativeModule::new("Linear", r#"{"in_features": 3, "out_features": 2}"#).unwrap();
    let error = model.child("weigth").unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.message().starts_with("NativeModule::child: "), "{error}");
    let x = Tensor::ones(&[4, 3]).unwrap();
    let error = model.call::<Tensor>(args![&x, &x]).unwrap_err();
    assert!(error.message().starts_with("NativeModule::call: "), "{error}");
    assert!(error.message().contains("forward(Tensor input) -> Tensor"), "{error}");
    let error = model.call_named::<Tensor>(&[], &[("inptu", (&x).into())]).unwrap_err();
    assert!(error.message().starts_with("NativeModule::call_named: "), "{error}");
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("tp", 2)])?;
            let zoo =
                |options: &str| ParameterPlan::from_zoo("llama", "{}", &mesh, options).unwrap_err();
            let error = zoo(r#"{"expert_parallel": true}"#);
            assert!(error.message().starts_with("ParameterPlan::from_zoo: line 1, "), "{error}");
            let error =
                ParameterPlan::from_styles(&model_of()?, &mesh, "{\"x\": \"colwise\"}", None);
            assert_eq!(error.unwrap_err().code(), Code::NotFound);
            let plain = model_of()?;
            let error = debug::list_communication(&plain, || Ok(())).unwrap_err();
            assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
            plain.distribute(&mesh, &ParameterPlan::new(), Source::Same)?;
            let error = debug::list_communication(&plain, || panic!("at once")).unwrap_err();
            assert!(error.message().contains("panicked: at once"), "{error}");
            Ok(())
        })
        .unwrap();
}

fn model_of() -> Result<NativeModule> {
    let model = NativeModule::new("Linear", r#"{"in_features": 3, "out_features": 2}"#)?;
    fill(&model)?;
    Ok(model)
}

/// A module with a forward of its own above one of the library's is used as often as one likes.
#[test]
fn a_forward_above_a_native_module_does_not_hold_it() {
    #[derive(Module)]
    struct Block {
        linear: NativeModule,
        forward: Forward,
    }
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("tp", 2)])?;
            let linear = NativeModule::new("Linear", r#"{"in_features": 4, "out_features": 2}"#)?;
            let block = Block { linear, forward: Forward::new() };
            let plan = ParameterPlan::new().forward("output", &[("tp", Replicate)]);
            block.distribute(&mesh, &plan, Source::Rank(0))?;
            for _ in 0..2 {
                State::new()?.add_module(&block)?;
                debug::dump(&block)?;
            }
            // The plan is still met.
            let x = Tensor::ones(&[4, 4])?.distribute(&mesh, [("tp", Shard(0))])?;
            let [y] = block.forward.run([&x], |[x]| Ok([block.linear.call(args![&x])?]))?;
            assert_eq!(y.layout()?.to_string(), "[R]");
            Ok(())
        })
        .unwrap();
}

/// What a module of the library's computes from its options is in no file.
#[test]
fn computed_buffers_of_native_modules_are_not_loaded() -> Result<()> {
    let config = r#"{"model_type": "llama", "vocab_size": 7, "hidden_size": 8,
        "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}"#;
    let llama = NativeModule::new("llama", config)?;
    let mut names = Vec::new();
    llama.load(&mut |name: &str| {
        names.push(name.to_owned());
        let found = llama.parameters().into_iter().find(|(known, _)| known == name);
        Tensor::ones(&found.expect("a parameter").1.sizes()?)
    })?;
    assert_eq!(names.len(), llama.parameters().len(), "{names:?}");
    assert!(llama.buffers().iter().any(|(name, _)| name.ends_with("inv_freq")));
    Ok(())
}
