//! Starts this program once per rank, on this machine.

use std::env;
use std::fs;
use std::process::{self, Child, Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use shardweave::Result;

use crate::settings::Settings;

/// Ends with the first failure: the others have a moment to notice by themselves, so that they can
/// say what they were doing.
pub fn start(settings: &Settings) -> Result<ExitCode> {
    const NOTICE: Duration = Duration::from_secs(2);
    let ranks = settings.num_ranks().to_string();
    let run = format!("train_gpt-{}", process::id());
    let store = env::temp_dir().join(&run);
    let mut children = Children(Vec::new());
    for rank in 0..settings.num_ranks() {
        let rank = rank.to_string();
        let child = Command::new(env::current_exe()?)
            .args(env::args_os().skip(1))
            .env("RANK", &rank)
            .env("WORLD_SIZE", &ranks)
            .env("LOCAL_RANK", &rank)
            .env("LOCAL_WORLD_SIZE", &ranks)
            .env("SHARDWEAVE_STORE_FILE", &store)
            .env("SHARDWEAVE_RUN_ID", &run)
            .spawn()?;
        children.0.push(child);
    }
    let mut failed_at: Option<Instant> = None;
    loop {
        let mut running = 0;
        for child in &mut children.0 {
            match child.try_wait()? {
                None => running += 1,
                Some(status) if !status.success() => {
                    failed_at.get_or_insert_with(Instant::now);
                }
                Some(_) => {}
            }
        }
        if running == 0 || failed_at.map_or(false, |at| at.elapsed() > NOTICE) {
            fs::remove_file(&store).ok();
            return Ok(if failed_at.is_some() { ExitCode::FAILURE } else { ExitCode::SUCCESS });
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// They end with this value.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            child.kill().ok();
            child.wait().ok();
        }
    }
}
