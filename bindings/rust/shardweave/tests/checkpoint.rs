//! Checkpoints: saved on one mesh, loaded on another; and files of tensors.
#![cfg(feature = "derive")]

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use shardweave::nn::{self, Layer};
use shardweave::{
    debug, find_checkpoint, list_checkpoints, no_grad, verify_checkpoint, write_safetensors, AdamW,
    Checkpointer, Code, DType, LoadOptions, Mesh, Module, NativeModule, Optimizer, ParameterPlan,
    Placement::*, Result, Safetensors, Source, State, Tensor, TokenFile, TokenLoader,
    TokenLoaderOptions, World, ZeroOptions,
};

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("shardweave-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Folder(path)
    }
    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn numbers(sizes: &[i64], from: f32) -> Result<Tensor> {
    let count = sizes.iter().product::<i64>() as usize;
    let values: Vec<f32> = (0..count).map(|i| (from + i as f32 * 0.7).sin()).collect();
    Tensor::from_slice(&values, sizes)
}

#[derive(Module)]
struct Net {
    up: nn::Linear,
    down: nn::Linear,
}

struct Run {
    net: Net,
    optimizer: Optimizer,
    state: State,
}

impl Run {
    fn new(mesh: &Mesh, plan: &ParameterPlan, zero: bool) -> Result<Run> {
        let net = Net { up: nn::Linear::new(5, 7)?, down: nn::Linear::new(7, 3)? };
        for (i, (_, parameter)) in net.parameters().into_iter().enumerate() {
            let value = numbers(&parameter.sizes()?, i as f32)?;
            no_grad(|| parameter.copy_(&value))?;
        }
        net.distribute(mesh, plan, Source::Same)?;
        let optimizer = AdamW::new(0.01).build(&net)?;
        if zero {
            optimizer.use_zero(&ZeroOptions::new())?;
        }
        let state = State::new()?;
        state.add_module(&net)?;
        state.add_optimizer(&optimizer, &net)?;
        state.add_random(mesh)?;
        state.set_value("epoch", "0")?;
        Ok(Run { net, optimizer, state })
    }

    fn step(&self, mesh: &Mesh, number: f32) -> Result<f64> {
        let x = numbers(&[4, 5], number)?.distribute(mesh, [("dp", Replicate)])?;
        let y = self.net.down.forward(&self.net.up.forward(&x)?.gelu()?)?;
        let loss = (&y * &y)?.sum()?;
        loss.backward()?;
        self.net.finish_grad_sync()?;
        self.optimizer.step()?;
        self.optimizer.zero_grad()?;
        loss.item::<f64>()
    }
}

#[test]
fn another_mesh_plan_and_optimizer_go_on() -> Result<()> {
    let folder = Folder::new("checkpoint");
    let wanted = Mutex::new(Vec::new());
    World::threads(3).run(|world| {
        let mesh = world.device_mesh(&[("dp", 3)])?;
        let run = Run::new(&mesh, &ParameterPlan::new(), true)?;
        run.step(&mesh, 1.0)?;
        run.state.set_value("epoch", "[7]")?;
        let mut checkpointer = Checkpointer::new(&mesh, folder.path()).keep_last(1).open()?;
        checkpointer.save(1, &run.state)?;
        assert!(checkpointer.save_async(2, &run.state)?);
        let losses = vec![run.step(&mesh, 2.0)?, run.step(&mesh, 3.0)?];
        checkpointer.wait()?;
        let error = checkpointer.save(2, &run.state).unwrap_err();
        assert_eq!(error.code(), Code::AlreadyExists);
        assert!(error.to_string().contains("Checkpointer::save"), "{error}");
        if world.rank() == 0 {
            *wanted.lock().unwrap() = losses;
        }
        Ok(())
    })?;
    verify_checkpoint(folder.0.join("step-000002"))?;
    let wanted = wanted.into_inner().unwrap();
    World::threads(4).run(|world| {
        let mesh = world.device_mesh(&[("dp", 2), ("tp", 2)])?;
        let plan = ParameterPlan::new()
            .line("up.*", &[("tp", Shard(0))])
            .line("down.weight", &[("tp", Shard(1))]);
        let run = Run::new(&mesh, &plan, false)?;
        run.step(&mesh, 9.0)?;
        let loaded = run.state.load(folder.path(), &mesh, &LoadOptions::new().verify(true))?;
        assert_eq!(loaded.step, 2);
        assert!(loaded.json.contains("\"missing\":[]"), "{}", loaded.json);
        assert_eq!(run.state.value("epoch")?, "[7]");
        for (i, wanted) in wanted.iter().enumerate() {
            let loss = run.step(&mesh, 2.0 + i as f32)?;
            assert!((loss - wanted).abs() < 1e-4 * wanted.abs(), "{loss} is not {wanted}");
        }
        // Another state: nothing has changed.
        let other = State::new()?;
        let x = Tensor::ones(&[2])?;
        other.add_tensor("x", &x)?;
        let mut checkpointer = Checkpointer::new(&mesh, folder.path()).open()?;
        let error = checkpointer.load(&other).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.to_string().contains("missing: x"), "{error}");
        assert_eq!(other.add_tensor("x", &x).unwrap_err().code(), Code::AlreadyExists);
        assert_eq!(other.set_value("v", "{").unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(other.value("v").unwrap_err().code(), Code::NotFound);
        Ok(())
    })?;
    Ok(())
}

#[derive(Module)]
struct Mixed {
    native: NativeModule,
    frozen: Tensor,
    #[module(buffer)]
    mean: Tensor,
    #[module(buffer, non_persistent)]
    table: Tensor,
}

/// Not what is not persistent, also of the library's own modules; and nothing changes by it.
#[test]
fn what_a_state_has_of_a_module() -> Result<()> {
    let folder = Folder::new("persistent");
    World::threads(2).run(|world| {
        let mesh = world.device_mesh(&[("dp", 2)])?;
        let llama = r#"{"model_type": "llama", "vocab_size": 5, "hidden_size": 4, "intermediate_size": 3,
            "num_hidden_layers": 1, "num_attention_heads": 2}"#;
        let model = Mixed {
            native: NativeModule::new("llama", llama)?,
            frozen: Tensor::ones(&[3])?,
            mean: Tensor::ones(&[2])?,
            table: Tensor::ones(&[4])?,
        };
        model.distribute(&mesh, &ParameterPlan::new(), Source::Rank(0))?;
        model.frozen.set_requires_grad(false)?;
        let optimizer = AdamW::new(0.01).build(&model.native)?;
        let state = State::new()?;
        state.add_module(&model)?;
        state.add_optimizer(&optimizer, &model)?; // the module is there a second time
        debug::dump(&model)?;
        assert!(!model.frozen.requires_grad()?); // it was registered four times
        Checkpointer::new(&mesh, folder.path()).open()?.save(1, &state)
    })?;
    let manifest = std::fs::read_to_string(folder.0.join("step-000001/manifest.json")).unwrap();
    for name in ["model.mean", "model.frozen", "model.native.model.norm.weight"] {
        assert!(manifest.contains(&format!("\"{name}\"")), "{name}: {manifest}");
    }
    assert!(!manifest.contains("table") && !manifest.contains("rotary"), "{manifest}");
    Ok(())
}

#[test]
fn directories() -> Result<()> {
    let folder = Folder::new("directories");
    let error = list_checkpoints(folder.path()).unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.to_string().contains("list_checkpoints: "), "{error}");
    assert_eq!(find_checkpoint(folder.path()).unwrap_err().code(), Code::NotFound);
    World::threads(2).run(|world| {
        let mesh = world.device_mesh(&[("dp", 2)])?;
        let state = State::new()?;
        state.set_value("v", "1")?;
        let timeout = Duration::from_secs(60);
        let options = Checkpointer::new(&mesh, folder.path()).keep_last(3).timeout(timeout);
        let mut checkpointer = options.skip_if_busy(true).open()?;
        for step in [5, 7, 20, 100] {
            checkpointer.save(step, &state)?;
        }
        let options = Checkpointer::new(&mesh, folder.path()).keep_last(-1);
        let error = options.open().unwrap_err();
        assert!(error.to_string().contains("argument 'keep_last' is -1"), "{error}");
        Ok(())
    })?;
    assert_eq!(list_checkpoints(folder.path())?, [7, 20, 100]);
    assert_eq!(find_checkpoint(folder.path())?, folder.0.join("step-000100"));
    assert_eq!(verify_checkpoint("a\0b").unwrap_err().code(), Code::InvalidArgument);
    Ok(())
}

#[test]
fn what_is_written_to_before_its_copy_is_not_saved() -> Result<()> {
    let folder = Folder::new("beside");
    World::threads(2).run(|world| {
        let mesh = world.device_mesh(&[("dp", 2)])?;
        let w = Tensor::ones(&[4])?.distribute(&mesh, [("dp", Shard(0))])?;
        w.set_requires_grad(true)?;
        let state = State::new()?;
        state.add_tensor("w", &w)?;
        let options = Checkpointer::new(&mesh, folder.path()).copy_beside_training(true);
        let mut checkpointer = options.open()?;
        checkpointer.save_async(1, &state)?;
        no_grad(|| w.fill_(2.0))?;
        let error = checkpointer.wait().unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.to_string().contains("'w' was written to after save_async()"), "{error}");
        assert_eq!(find_checkpoint(folder.path()).unwrap_err().code(), Code::NotFound);
        checkpointer.save_async(2, &state)?;
        checkpointer.wait_for_copy()?;
        no_grad(|| w.fill_(3.0))?;
        checkpointer.wait()?;
        checkpointer.load(&state)?;
        assert_eq!(w.full_tensor()?.to_vec::<f32>()?, [2f32; 4]);
        Ok(())
    })?;
    Ok(())
}

#[test]
fn a_loader_goes_on_where_it_was() -> Result<()> {
    let folder = Folder::new("loader");
    std::fs::create_dir_all(folder.path()).unwrap();
    let text = folder.0.join("text");
    std::fs::write(&text, (0..200).collect::<Vec<u8>>()).unwrap();
    let file = TokenFile::open_plain(&text, DType::U8)?;
    let second = |ranks: usize, saves: bool| {
        World::threads(ranks).run(|world| {
            let mesh = world.device_mesh(&[("dp", ranks as i64)])?;
            let options = TokenLoaderOptions::new(4, 6).seed(3).on(&mesh, [("dp", Shard(0))])?;
            let mut loader = TokenLoader::new(&[&file], &options)?;
            let state = State::new()?;
            state.add_loader(&loader)?;
            state.add_loader_as("second", &loader)?;
            state.add_random(&mesh)?;
            state.add_random_as("other", &mesh)?;
            let mut checkpointer = Checkpointer::new(&mesh, folder.0.join("run")).open()?;
            if saves {
                loader.next().unwrap()?;
                checkpointer.save(1, &state)?;
            } else {
                checkpointer.load(&state)?;
            }
            loader.next().unwrap()?.tokens.full_tensor()?.to_vec::<i64>()
        })
    };
    let wanted = second(3, true)?.swap_remove(0);
    for tokens in second(2, false)? {
        assert_eq!(tokens, wanted);
    }
    Ok(())
}

#[test]
fn safetensors_come_back() -> Result<()> {
    let folder = Folder::new("safetensors");
    std::fs::create_dir_all(folder.path()).unwrap();
    let path = format!("{}/a.safetensors", folder.path());
    let a = numbers(&[4, 3], 0.0)?;
    let b = Tensor::ones(&[])?;
    write_safetensors(&path, &[("b", &b), ("a", &a)], &[("format", "pt")])?;
    let again = write_safetensors(&path, &[], &[]).unwrap_err();
    assert_eq!(again.code(), Code::AlreadyExists);
    let file = Safetensors::open(&path)?;
    let tensors = file.tensors()?;
    assert_eq!(tensors.len(), 2);
    assert_eq!((tensors[0].name.as_str(), tensors[0].dtype), ("a", DType::F32));
    assert_eq!(tensors[0].sizes, [4, 3]);
    assert_eq!(file.read("a")?.to_vec::<f32>()?, a.to_vec::<f32>()?);
    let part = file.read_part("a", &[1, 1], &[2, 2])?.to_vec::<f32>()?;
    let all = a.to_vec::<f32>()?;
    assert_eq!(part, [all[4], all[5], all[7], all[8]]);
    assert_eq!(file.read("c").unwrap_err().code(), Code::NotFound);
    assert_eq!(file.read_part("a", &[3, 0], &[2, 1]).unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(file.read_part("a", &[3], &[2, 1]).unwrap_err().code(), Code::InvalidArgument);
    Ok(())
}
