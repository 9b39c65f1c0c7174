//! Trains a Llama on from a Hugging Face checkpoint, config.json and *.safetensors in a folder,
//! sharded over ranks that are threads or processes.
//!
//!     cargo run --release --example train_llama -- --model=FOLDER
//!     cargo run --release --example train_llama -- --model=FOLDER --mesh=dp=1,tp=4 --check
//!     cargo run --release --example train_llama -- --model=FOLDER --backend=gloo
//!     cargo run --release --example train_llama -- --model=FOLDER --save=run --save_every=10
//!     cargo run --release --example train_llama -- --model=FOLDER --resume=run --mesh=tp=2
//!
//! Tokens are the bytes of a text: what a tokenizer would make of it is not this example's matter.
//! The examples in C++ and Go take the same batches and steps, so that each goes on with what
//! another one has saved.
//! The model is in model.rs, how its file is read in checkpoint.rs.

mod checkpoint;
mod model;

use std::path::PathBuf;
use std::process::ExitCode;

use checkpoint::Checkpoint;
use clap::builder::PossibleValuesParser;
use clap::{value_parser, Arg, ArgAction, Command};
use model::{Config, Llama};
use shardweave::{
    nn, AdamW, Checkpointer, Code, Error, LoadOptions, Mesh, Module, ParameterPlan, Placement::*,
    Result, Schedule, Source, State, Tensor, World,
};

struct Settings {
    model: PathBuf,
    mesh: Vec<(String, i64)>,
    backend: Option<String>,
    data: PathBuf,
    steps: u64,
    batch: i64,
    seq: i64,
    learning_rate: f64,
    save: Option<PathBuf>,
    save_every: u64,
    resume: Option<PathBuf>,
    check: bool,
    json: bool,
}

fn settings() -> Settings {
    let path =
        |name, help| Arg::new(name).long(name).value_parser(value_parser!(PathBuf)).help(help);
    let number = |name, default, help| {
        let parser = value_parser!(i64).range(1..);
        Arg::new(name).long(name).value_parser(parser).default_value(default).help(help)
    };
    let flag = |name, help| Arg::new(name).long(name).action(ArgAction::SetTrue).help(help);
    let backends = PossibleValuesParser::new(["inproc", "gloo"]);
    let learning_rate = Arg::new("lr").long("lr").value_parser(value_parser!(f64));
    let mesh = Arg::new("mesh").long("mesh").value_parser(parse_mesh).default_value("dp=2,tp=2");
    let backend = Arg::new("backend").long("backend").value_parser(backends);
    let matches = Command::new("train_llama")
        .args_override_self(true)
        .about("Trains a Llama on from a Hugging Face checkpoint, sharded over several ranks.")
        .arg(path("model", "folder with config.json and *.safetensors").required(true))
        .arg(mesh.help("dp (data parallel) times tp (tensor parallel), as in dp=2,tp=2"))
        .arg(backend.help(
            "inproc: ranks are threads; gloo: processes, started here unless a launcher has done it",
        ))
        .arg(
            path("data", "the text to train on")
                .default_value("/usr/share/common-licenses/GPL-3"),
        )
        .arg(number("steps", "30", "training steps, with those of the run that --resume goes on with"))
        .arg(number("batch", "8", "sequences per step, over all ranks"))
        .arg(number("seq", "32", "tokens per sequence"))
        .arg(learning_rate.default_value("1e-3").help("the highest learning rate"))
        .arg(path("save", "a directory, of all ranks, that gets a checkpoint after the last step"))
        .arg(
            Arg::new("save_every")
                .long("save_every")
                .value_parser(value_parser!(u64))
                .default_value("0")
                .requires("save")
                .help("with --save: also after so many steps, each time, beside training"),
        )
        .arg(path("resume", "goes on from the newest checkpoint of this directory, on any --mesh"))
        .arg(flag("check", "train on one rank too, and compare the loss of every step"))
        .arg(flag("json", "end with one line of JSON on stdout; all else goes to stderr"))
        .get_matches();
    fn get<T: Clone + Send + Sync + 'static>(matches: &clap::ArgMatches, name: &str) -> T {
        matches.get_one::<T>(name).expect("is there").clone()
    }
    Settings {
        model: get(&matches, "model"),
        mesh: get(&matches, "mesh"),
        backend: matches.get_one::<String>("backend").cloned(),
        data: get(&matches, "data"),
        steps: get::<i64>(&matches, "steps") as u64,
        batch: get(&matches, "batch"),
        seq: get(&matches, "seq"),
        learning_rate: get(&matches, "lr"),
        save: matches.get_one::<PathBuf>("save").cloned(),
        save_every: get(&matches, "save_every"),
        resume: matches.get_one::<PathBuf>("resume").cloned(),
        check: matches.get_flag("check"),
        json: matches.get_flag("json"),
    }
}

fn parse_mesh(text: &str) -> std::result::Result<Vec<(String, i64)>, String> {
    let wanted = || format!("'{text}'; wanted dp=RANKS,tp=RANKS, each from 1 to 64");
    let mut mesh = vec![("dp".to_owned(), 1), ("tp".to_owned(), 1)];
    for part in text.split(',') {
        let (name, size) = part.split_once('=').ok_or_else(wanted)?;
        let dim = mesh.iter_mut().find(|(dim, _)| dim == name).ok_or_else(wanted)?;
        dim.1 = size.parse().ok().filter(|size| (1..=64).contains(size)).ok_or_else(wanted)?;
    }
    Ok(mesh)
}

fn main() -> ExitCode {
    match run(&settings()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("train_llama: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(settings: &Settings) -> Result<()> {
    let ranks = settings.mesh.iter().map(|(_, size)| *size as usize).product();
    let body = |world: &World| run_rank(world, settings);
    if settings.backend.as_deref() != Some("inproc") {
        match World::from_environment() {
            Ok(world) => {
                let result = run_rank(&world, settings);
                if let Err(error) = &result {
                    world.abort(error.message()).ok(); // the others learn it from here
                }
                return result;
            }
            Err(error) if error.code() != Code::NotFound => return Err(error),
            Err(_) if settings.backend.is_some() => {
                return World::spawn(ranks).prefix_output(false).run(body).map(drop)
            }
            Err(_) => {} // no launcher has started this process
        }
    }
    World::threads(ranks).run(body).map(drop)
}

fn run_rank(world: &World, settings: &Settings) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    shardweave::set_num_threads((cores / world.size()).max(1))?;
    let mesh = world.device_mesh(&settings.mesh)?;
    let (first, losses) = train(settings, Some(&mesh), world.rank() == 0)?;
    if world.rank() > 0 {
        return Ok(());
    }
    let mut difference = None;
    if settings.check {
        let (_, alone) = train(settings, None, false)?;
        let both = losses.iter().zip(&alone[first as usize..]).map(|(a, b)| (a - b).abs());
        // NaN stays NaN.
        let largest = both.fold(0.0, |a: f64, b| if b <= a { a } else { b });
        eprintln!("largest difference between the losses of a step: {largest:e}");
        difference = Some(largest);
    }
    if settings.json {
        let line = serde_json::json!({
            "ranks": world.size(),
            "first_loss": losses.first(),
            "last_loss": losses.last(),
            "max_loss_diff": difference,
        });
        println!("{line}");
    }
    Ok(())
}

/// As Hugging Face's base_model_tp_plan of Llama: each rank has some of the heads, and some of the
/// features of the MLP.
fn plan() -> ParameterPlan {
    ParameterPlan::new()
        .line("*.{q,k,v,gate,up}_proj.*", &[("tp", Shard(0))]) // biases, too
        .line("*.{o,down}_proj.weight", &[("tp", Shard(1))])
}

/// After which step it went on, and the loss of every step from there. Without a mesh on one device, from
/// the beginning, and nothing is saved.
fn train(settings: &Settings, mesh: Option<&Mesh>, tell: bool) -> Result<(u64, Vec<f64>)> {
    let config = Config::read(&settings.model.join("config.json"))?;
    if settings.seq > config.positions {
        let (seq, most) = (settings.seq, config.positions);
        let what = format!("--seq={seq}: the model is for {most} positions at most");
        return Err(Error::new(Code::InvalidArgument, what));
    }
    let model = nn::init::skip(|| Llama::new(&config, settings.seq))?;
    if let Some(mesh) = mesh {
        model.distribute(mesh, &plan(), Source::Same)?;
    }
    let resume = settings.resume.as_ref().filter(|_| mesh.is_some());
    if resume.is_none() {
        Checkpoint::open(&settings.model)?.load_into(&model)?;
    }

    let text = std::fs::read(&settings.data)
        .map_err(|error| Error::from(error).context(settings.data.display()))?;
    let optimizer = AdamW::new(settings.learning_rate).build(&model)?;
    let schedule = Schedule::cosine(settings.steps).warmup(settings.steps / 10).floor(0.1);
    let state = State::new()?;
    let mut checkpointer = None;
    let mut first = 0;
    if let Some(mesh) = mesh {
        // What a run needs to go on; batches and learning rates follow from the step.
        state.add_module(&model)?;
        state.add_optimizer(&optimizer, &model)?;
        state.add_random(mesh)?;
        if let Some(directory) = resume {
            first = state.load(directory, mesh, &LoadOptions::new())?.step as u64;
        }
        if let Some(directory) = &settings.save {
            let mut its = Checkpointer::new(mesh, directory).open()?;
            its.open(Some(first as i64))?; // or hours later there is nowhere to save
            checkpointer = Some(its);
        }
    }
    if first >= settings.steps {
        let what = format!("--steps={}; wanted more than {first}, as --resume has", settings.steps);
        return Err(Error::new(Code::InvalidArgument, what));
    }
    let mut losses = Vec::new();
    for step in first..settings.steps {
        let (tokens, targets) = batch(&text, settings, config.vocab_size, step, mesh)?;
        let loss = model.loss(&tokens, &targets)?;
        loss.backward()?;
        model.finish_grad_sync()?; // nothing to do for plain tensors
        model.clip_grad_norm(1.0)?;
        schedule.apply(&optimizer, settings.learning_rate, step)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        let (loss, done) = (loss.item()?, step + 1);
        losses.push(loss);
        if tell {
            eprintln!("step {done}/{}  loss {loss:.4}", settings.steps);
        }
        match &mut checkpointer {
            Some(to) if done == settings.steps => to.save(done as i64, &state)?,
            Some(to) if settings.save_every > 0 && done % settings.save_every == 0 => {
                to.save_async(done as i64, &state)?;
            }
            _ => {}
        }
    }
    Ok((first, losses))
}

/// Tokens and targets, [batch, seq]: one piece of the text after the other.
fn batch(
    text: &[u8],
    settings: &Settings,
    vocab_size: i64,
    step: u64,
    mesh: Option<&Mesh>,
) -> Result<(Tensor, Tensor)> {
    let (batch, seq) = (settings.batch, settings.seq as usize);
    let starts = text.len().checked_sub(seq + 1).ok_or_else(|| {
        let what = format!("--data has {} bytes; wanted more than --seq={seq}", text.len());
        Error::new(Code::InvalidArgument, what)
    })?;
    let piece = |row: i64| {
        let at = (step as usize * batch as usize + row as usize) * seq % (starts + 1);
        text[at..=at + seq].iter().map(|byte| i64::from(*byte) % vocab_size)
    };
    let pieces: Vec<i64> = (0..batch).flat_map(piece).collect();
    let mut pieces = Tensor::from_slice(&pieces, &[batch, settings.seq + 1])?;
    if let Some(mesh) = mesh {
        pieces = pieces.distribute_from(Source::Same, mesh, [("dp", Shard(0))])?;
    }
    Ok((pieces.i((.., ..-1))?, pieces.i((.., 1..))?))
}
