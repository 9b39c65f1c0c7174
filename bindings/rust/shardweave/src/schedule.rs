//! Learning rates over the steps of a training.

use shardweave_sys as sys;

use crate::error::{Of, Result};
use crate::optimizer::{Optimizer, OptimizerGroups};

/// By what the learning rate is multiplied at each step: a function of the step alone, so that a
/// training that resumes has nothing to restore.
///
/// ```
/// use shardweave::{Schedule, Sgd, TensorOptions};
/// let x = TensorOptions::new().requires_grad(true).ones(&[1])?;
/// let optimizer = Sgd::new(0.5).build_for(&[&x])?;
/// let schedule = Schedule::cosine(100).warmup(10).floor(0.1);
/// for step in 0..100 {
///     schedule.apply(&optimizer, 0.5, step)?;
///     // forward, backward, optimizer.step()
/// }
/// assert_eq!((schedule.factor(5), schedule.factor(10), schedule.factor(100)), (0.5, 1.0, 0.1));
/// # Ok::<(), shardweave::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    shape: Shape,
    warmup: u64,
    floor: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    Constant,
    Linear { steps: u64 },
    Cosine { steps: u64 },
    Wsd { steps: u64, decay: u64 },
    Step { every: u64, gamma: f64 },
}

impl Schedule {
    const fn new(shape: Shape) -> Schedule {
        Schedule { shape, warmup: 0, floor: 0.0 }
    }

    /// Always 1, after the warm-up.
    pub const fn constant() -> Schedule {
        Schedule::new(Shape::Constant)
    }

    /// From 1 after the warm-up down to 0 at step `steps`, and 0 from then on.
    pub const fn linear(steps: u64) -> Schedule {
        Schedule::new(Shape::Linear { steps })
    }

    /// From 1 after the warm-up down to 0 at step `steps` by half a wave of the cosine (Loshchilov
    /// and Hutter, 2017, without restarts), and 0 from then on.
    pub const fn cosine(steps: u64) -> Schedule {
        Schedule::new(Shape::Cosine { steps })
    }

    /// Warm-up, stable, decay (Hu et al., MiniCPM, 2024): 1 after the warm-up, and in the last `decay`
    /// of `steps` steps in a line down to 0.
    pub const fn wsd(steps: u64, decay: u64) -> Schedule {
        Schedule::new(Shape::Wsd { steps, decay })
    }

    /// Multiplied by `gamma` every so many steps (0: never) after the warm-up.
    pub const fn step(every: u64, gamma: f64) -> Schedule {
        Schedule::new(Shape::Step { every, gamma })
    }

    /// From 0 at step 0 linearly up to 1 at this step.
    pub const fn warmup(mut self, steps: u64) -> Schedule {
        self.warmup = steps;
        self
    }

    /// The smallest factor after the warm-up: the shape ends there instead of at 0. [`Schedule::step`]
    /// stops there.
    pub const fn floor(mut self, factor: f64) -> Schedule {
        self.floor = factor;
        self
    }

    /// At a step, counted from 0.
    pub fn factor(&self, step: u64) -> f64 {
        if step < self.warmup {
            return step as f64 / self.warmup as f64;
        }
        let after = step - self.warmup;
        let progress = |steps: u64| match steps.saturating_sub(self.warmup) {
            0 => 1.0,
            all => (after as f64 / all as f64).min(1.0),
        };
        let from_floor = |factor: f64| self.floor + (1.0 - self.floor) * factor;
        match self.shape {
            Shape::Constant => 1.0,
            Shape::Linear { steps } => from_floor(1.0 - progress(steps)),
            Shape::Cosine { steps } => {
                from_floor(0.5 * (1.0 + (std::f64::consts::PI * progress(steps)).cos()))
            }
            Shape::Wsd { steps, decay } => {
                let begin = steps.saturating_sub(decay).max(self.warmup);
                let done = match steps.saturating_sub(begin) {
                    0 => f64::from(u8::from(step >= steps)),
                    all => (step.saturating_sub(begin) as f64 / all as f64).min(1.0),
                };
                from_floor(1.0 - done)
            }
            Shape::Step { every: 0, .. } => 1.0,
            Shape::Step { every, gamma } => {
                let times = i32::try_from(after / every).unwrap_or(i32::MAX);
                gamma.powi(times).max(self.floor)
            }
        }
    }

    fn raw(&self) -> sys::swv_schedule {
        let number = |steps: u64| i64::try_from(steps).unwrap_or(i64::MAX);
        let mut raw = sys::swv_schedule {
            warmup: number(self.warmup),
            floor: self.floor,
            ..sys::SWV_SCHEDULE_INIT
        };
        (raw.shape, raw.steps) = match self.shape {
            Shape::Constant => (sys::SWV_SCHEDULE_CONSTANT, 0),
            Shape::Linear { steps } => (sys::SWV_SCHEDULE_LINEAR, number(steps)),
            Shape::Cosine { steps } => (sys::SWV_SCHEDULE_COSINE, number(steps)),
            Shape::Wsd { steps, decay } => {
                raw.decay = number(decay);
                (sys::SWV_SCHEDULE_WSD, number(steps))
            }
            Shape::Step { every, gamma } => {
                raw.gamma = gamma;
                (sys::SWV_SCHEDULE_STEP, number(every))
            }
        };
        raw
    }

    /// Sets the learning rate of each of an optimizer's groups for the next step: what it was made
    /// with, or set to, times the factor.
    ///
    /// ```
    /// use shardweave::{Schedule, Sgd, Tensor, TensorOptions};
    /// let x = TensorOptions::new().requires_grad(true).ones(&[3])?;
    /// let optimizer = Sgd::new(0.5).build_for(&[&x])?;
    /// Schedule::wsd(10, 2).apply_to(&optimizer, 9)?;
    /// assert_eq!(optimizer.learning_rate()?, 0.25);
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn apply_to(&self, optimizer: &Optimizer, step: u64) -> Result<()> {
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        call!(swv_optimizer_apply_schedule(optimizer.as_ptr(), &self.raw(), step))
    }

    /// Sets the learning rate of the next step: `base` times the factor.
    pub fn apply(&self, optimizer: &impl LearningRate, base: f64, step: u64) -> Result<()> {
        optimizer.set_learning_rate(base * self.factor(step)).of("Schedule::apply")
    }
}

/// What a [`Schedule`] may be applied to: [`Optimizer`], [`OptimizerGroups`].
pub trait LearningRate {
    /// From the next step on.
    fn set_learning_rate(&self, learning_rate: f64) -> Result<()>;
}

impl LearningRate for Optimizer {
    fn set_learning_rate(&self, learning_rate: f64) -> Result<()> {
        Optimizer::set_learning_rate(self, learning_rate)
    }
}

impl LearningRate for OptimizerGroups {
    fn set_learning_rate(&self, learning_rate: f64) -> Result<()> {
        OptimizerGroups::set_learning_rate(self, learning_rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of transformers' get_cosine_schedule_with_warmup(.., 4, 12), get_linear_schedule_with_warmup
    /// and torch.optim.lr_scheduler.StepLR(.., 3, 0.5).
    #[test]
    fn the_factors_of_other_libraries() {
        let near = |schedule: Schedule, wanted: &[f64]| {
            for (step, wanted) in wanted.iter().enumerate() {
                let factor = schedule.factor(step as u64);
                assert!((factor - wanted).abs() < 1e-12, "{schedule:?} at {step}: {factor}");
            }
        };
        let cosine = [
            0.0,
            0.25,
            0.5,
            0.75,
            1.0,
            0.9619397662556434,
            0.8535533905932737,
            0.6913417161825449,
            0.5,
            0.3086582838174551,
            0.1464466094067262,
            0.0380602337443566,
            0.0,
            0.0,
        ];
        near(Schedule::cosine(12).warmup(4), &cosine);
        let floored: Vec<f64> = cosine
            .iter()
            .enumerate()
            .map(|(i, f)| if i < 4 { *f } else { 0.1 + 0.9 * f })
            .collect();
        near(Schedule::cosine(12).warmup(4).floor(0.1), &floored);
        near(Schedule::linear(6).warmup(2), &[0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
        near(Schedule::step(3, 0.5), &[1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25]);
        near(Schedule::step(1, 0.5).floor(0.3), &[1.0, 0.5, 0.3, 0.3]);
        near(Schedule::constant().warmup(2), &[0.0, 0.5, 1.0, 1.0]);
        // get_wsd_schedule(.., 2 of warm-up, 4 of decay, 8 in all) with decay_type "linear".
        let wsd = Schedule::wsd(8, 4).warmup(2);
        near(wsd, &[0.0, 0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
        near(wsd.floor(0.2), &[0.0, 0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]);
        near(Schedule::wsd(6, 9).warmup(2), &[0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]);
        near(Schedule::wsd(3, 0), &[1.0, 1.0, 1.0, 0.0]);
        // Nothing divides by 0.
        near(Schedule::cosine(0), &[0.0, 0.0]);
        near(Schedule::linear(3).warmup(3), &[0.0, 1.0 / 3.0, 2.0 / 3.0, 0.0]);
        near(Schedule::step(0, 0.5), &[1.0, 1.0]);
        assert_eq!(Schedule::step(1, 0.5).factor(u64::MAX), 0.0);
    }
}
