//! How far the training is: the loss of every step, the speed, and a progress bar.

use std::fmt::Write;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::settings::Settings;

pub struct Progress {
    title: &'static str,
    /// On a terminal; elsewhere a line is printed for every tenth of the way.
    bar: Option<ProgressBar>,
    /// Where to print.
    json: bool,
    steps: usize,
    tokens_per_step: f64,
    /// Steps that do not count for the speed: caches are still empty.
    warm_up: usize,
    /// The end of the last step that does not count.
    counted_from: Instant,
    last: Instant,
    losses: Vec<f64>,
}

impl Progress {
    pub fn new(title: &'static str, settings: &Settings, show: bool) -> Progress {
        let steps = settings.steps as usize;
        Progress {
            title,
            bar: show.then(|| bar(title, settings)),
            json: settings.json,
            steps,
            tokens_per_step: (settings.batch * settings.seq) as f64,
            warm_up: (steps / 2).min(5),
            counted_from: Instant::now(),
            last: Instant::now(),
            losses: Vec::with_capacity(steps),
        }
    }

    pub fn step_done(&mut self, loss: f64) {
        self.losses.push(loss);
        self.last = Instant::now();
        if self.losses.len() == self.warm_up {
            self.counted_from = self.last;
        }
        let bar = match &self.bar {
            Some(bar) => bar,
            None => return,
        };
        let done = self.losses.len();
        let mut text = format!("{done}/{}  loss {loss:.3}", self.steps);
        if done > self.warm_up {
            let _ = write!(text, "  {:.0} tokens/s", self.tokens_per_second());
        }
        if !bar.is_hidden() {
            bar.set_message(text);
            bar.set_position(done as u64);
            if done == self.steps {
                bar.finish();
                self.print("");
            }
        } else if done % (self.steps / 10).max(1) == 0 || done == 1 || done == self.steps {
            self.print(&format!("{} {text}", self.title));
        }
    }

    fn print(&self, line: &str) {
        if self.json {
            eprintln!("{line}");
        } else {
            println!("{line}");
        }
    }

    pub fn losses(&self) -> &[f64] {
        &self.losses
    }

    /// Of the steps after the first few.
    pub fn tokens_per_second(&self) -> f64 {
        let done = self.losses.len();
        let steps = if done > self.warm_up { done - self.warm_up } else { done };
        let seconds = self.last.duration_since(self.counted_from).as_secs_f64();
        steps as f64 * self.tokens_per_step / seconds.max(1e-9)
    }
}

fn bar(title: &'static str, settings: &Settings) -> ProgressBar {
    let target = match settings.json {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::stdout(),
    };
    let style = ProgressStyle::with_template("{prefix} [{bar:24}] {msg}  {eta} left");
    ProgressBar::with_draw_target(Some(settings.steps as u64), target)
        .with_prefix(title)
        .with_style(style.expect("a template that indicatif knows").progress_chars("=> "))
}
