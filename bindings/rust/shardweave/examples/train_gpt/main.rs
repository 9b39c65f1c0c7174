//! Trains a byte-level GPT on a text, sharded over ranks that are threads or processes: what
//! examples/train_gpt of the checkout does in C++, with the same losses.
//!
//!     cargo run --release --example train_gpt
//!     cargo run --release --example train_gpt -- --mesh=dp=1,tp=4 --backend=gloo --check
//!     ./bazelw run //tools/launch -- -n 4 -- target/release/examples/train_gpt
//!
//! Here: the backends, and what one rank does. The model is in model.rs, how it is sharded and
//! trained in training.rs.

mod model;
mod progress;
mod report;
mod settings;
mod text;
mod training;

use std::io::{stderr, stdout, Write};
use std::process::ExitCode;

use progress::Progress;
use settings::{Backend, Settings};
use shardweave::{Code, Error, Result, World};
use text::Text;

fn main() -> ExitCode {
    let settings = Settings::from_command_line();
    match run(&settings) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("train_gpt: {error}");
            ExitCode::from(if error.code() == Code::InvalidArgument { 2 } else { 1 })
        }
    }
}

fn run(settings: &Settings) -> Result<ExitCode> {
    let threads = World::threads(settings.num_ranks()).timeout(settings.timeout);
    if settings.backend != Some(Backend::Inproc) {
        match World::processes().timeout(settings.timeout).from_environment() {
            Ok(world) => {
                let result = run_rank(&world, settings);
                if let Err(error) = &result {
                    // The others learn it from here, not from a deadline.
                    world.abort(error.message()).ok();
                }
                return result.map(|()| ExitCode::SUCCESS).map_err(|error| error.context(world));
            }
            Err(error) if error.code() != Code::NotFound => return Err(error),
            Err(_) if settings.backend == Some(Backend::Gloo) => {
                let ranks = World::spawn(settings.num_ranks()).timeout(settings.timeout);
                ranks.prefix_output(false).run(|world| run_rank(world, settings))?;
                return Ok(ExitCode::SUCCESS);
            }
            Err(_) => {} // no launcher has started this process
        }
    }
    threads.run(|world| run_rank(world, settings))?;
    Ok(ExitCode::SUCCESS)
}

/// What one rank does, from the text to the sample; rank 0 tells about it.
fn run_rank(world: &World, settings: &Settings) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    shardweave::set_num_threads((cores / world.size()).max(1))?;
    let leader = world.rank() == 0;
    let mut out: Box<dyn Write> = match (leader, settings.json) {
        (true, false) => Box::new(stdout()),
        (true, true) => Box::new(stderr()), // stdout is for the line of JSON
        (false, _) => Box::new(std::io::sink()),
    };

    if settings.num_ranks() != world.size() {
        return Err(Error::new(
            Code::InvalidArgument,
            format!(
                "--mesh has {} ranks; wanted {}, as there are",
                settings.num_ranks(),
                world.size()
            ),
        ));
    }
    let text = Text::read(settings.data.as_deref())?;
    if text.bytes().len() <= settings.seq as usize {
        return Err(Error::new(
            Code::InvalidArgument,
            format!(
                "--seq={}: the text has only {} bytes, wanted more than --seq",
                settings.seq,
                text.bytes().len()
            ),
        ));
    }
    check_same_everywhere(world, settings, &text)?;

    let mesh = world.device_mesh(&settings.mesh).map_err(|e| e.context("making the mesh"))?;
    let model = training::make_model(settings, Some(&mesh))
        .map_err(|error| error.context("making the model"))?;
    report::layouts(&model, &mesh, &mut out)?;

    let mut progress = Progress::new("training", settings, leader);
    let mut before = world.counters()?;
    let mut of_step = before.clone();
    let steps_before = training::train(&model, settings, &text, Some(&mesh), &mut |loss| {
        progress.step_done(loss);
        let now = world.counters()?;
        of_step = now.since(&before);
        before = now;
        Ok(())
    })
    .map_err(|e| e.context(format!("training step {}", progress.losses().len() + 1)))?;
    if let Some(directory) = &settings.resume {
        writeln!(out, "went on after step {steps_before} of {}", directory.display())?;
    }
    report::traffic(&of_step, &mut out)?;

    let sample = training::sample(&model, settings, &text, &mesh)
        .map_err(|error| error.context("generating the sample"))?;
    report::sample(&sample, &mut out)?;

    if leader {
        finish(world, settings, &text, &progress, steps_before, &mut out)?;
    }
    Ok(())
}

/// Ranks that were started with different flags or files would train on, wrongly.
fn check_same_everywhere(world: &World, settings: &Settings, text: &Text) -> Result<()> {
    let mine = hash(text.bytes(), hash(settings.to_text().as_bytes(), 0xcbf2_9ce4_8422_2325));
    let mut all = vec![0u64; world.size()];
    world.comm()?.with_tag("settings")?.all_gather(&[mine], &mut all)?;
    match all.iter().position(|other| *other != all[0]) {
        None => Ok(()),
        Some(other) => Err(Error::new(
            Code::FailedPrecondition,
            format!(
                "ranks 0 and {other} were started with different flags or texts; here: {}, {} \
                 bytes of text",
                settings.to_text(),
                text.bytes().len()
            ),
        )),
    }
}

/// FNV-1a.
fn hash(bytes: &[u8], seed: u64) -> u64 {
    bytes.iter().fold(seed, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// On rank 0, which needs the others no more.
fn finish(
    world: &World,
    settings: &Settings,
    text: &Text,
    progress: &Progress,
    steps_before: i64,
    out: &mut dyn Write,
) -> Result<()> {
    let mut difference = None;
    if settings.check {
        let unbroken = Settings { steps: steps_before + settings.steps, ..settings.clone() };
        let mut alone = Progress::new("one rank", &unbroken, true);
        let model = training::make_model(&unbroken, None)?;
        training::train(&model, &unbroken, text, None, &mut |loss| {
            alone.step_done(loss);
            Ok(())
        })
        .map_err(|error| error.context("training on one rank, to compare"))?;
        let same_steps = &alone.losses()[steps_before as usize..];
        let largest = largest_difference(progress.losses(), same_steps);
        writeln!(out, "largest difference between the losses of a step: {largest:e}")?;
        difference = Some(largest);
    }
    if settings.json {
        let line = serde_json::json!({
            "ranks": world.size(),
            "first_loss": progress.losses().first(),
            "last_loss": progress.losses().last(),
            "tokens_per_second": progress.tokens_per_second(),
            "max_loss_diff": difference,
        });
        println!("{line}");
    }
    Ok(())
}

/// NaN if a loss is.
fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |largest, difference| {
        if difference <= largest {
            largest
        } else {
            difference
        }
    })
}
