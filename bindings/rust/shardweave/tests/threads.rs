//! Threads: whose they are, what they are called, and what may not leave them.
#![allow(clippy::declare_interior_mutable_const)] // Clippy 1.63 means thread_local's insides

use std::cell::{Cell, RefCell};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use shardweave::{
    apply, checkpoint, with_grad_mode, Code, Error, Function, FunctionContext, GradMode, Result,
    Tensor, TensorOptions, World,
};

/// Its backward does the same again, `depth` times: LibTorch goes on in a thread of its own after
/// 60.
struct Nested {
    depth: usize,
    threads: Arc<Mutex<Vec<ThreadId>>>,
    dropped: Arc<Mutex<usize>>,
}

thread_local! {
    static KEPT: Cell<Option<(Tensor, Note)>> = const { Cell::new(None) };
}

/// Notes its end.
struct Note(Arc<Mutex<usize>>);

impl Drop for Note {
    fn drop(&mut self) {
        *self.0.lock().unwrap() += 1;
    }
}

impl Function for Nested {
    fn forward(&self, _: &FunctionContext, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![(&inputs[0] * 2.0)?])
    }

    fn backward(
        &self,
        _: &FunctionContext,
        grads: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        self.threads.lock().unwrap().push(thread::current().id());
        if self.depth > 0 {
            let x = TensorOptions::new().requires_grad(true).ones(&[1])?;
            let inner = Nested {
                depth: self.depth - 1,
                threads: self.threads.clone(),
                dropped: self.dropped.clone(),
            };
            with_grad_mode(GradMode::Grad, || apply(inner, &[&x], 1)?.remove(0).backward())?;
            // A tensor that would wait here for whoever comes next.
            KEPT.with(|kept| kept.set(Some((x, Note(self.dropped.clone())))));
        }
        Ok(vec![grads[0].clone()])
    }
}

#[test]
fn what_a_backward_leaves_on_a_thread_of_libtorch_goes_with_it() {
    let threads = Arc::new(Mutex::new(Vec::new()));
    let dropped = Arc::new(Mutex::new(0));
    let x = TensorOptions::new().requires_grad(true).ones(&[1]).unwrap();
    let function = Nested { depth: 130, threads: threads.clone(), dropped: dropped.clone() };
    apply(function, &[&x], 1).unwrap().remove(0).backward().unwrap();
    assert_eq!(x.grad().unwrap().unwrap().to_vec::<f32>().unwrap(), [1.0]);
    let threads = threads.lock().unwrap().clone();
    let elsewhere = threads.iter().filter(|id| **id != thread::current().id()).count();
    assert_eq!(threads.len(), 131);
    assert!(elsewhere > 0, "LibTorch went on elsewhere");
    let dropped = *dropped.lock().unwrap();
    assert_eq!(dropped, 129, "the last one is on this thread");
}

/// Checkpoints in each other: `depth` of them.
fn nested(depth: usize, x: &Tensor, seen: &Rc<RefCell<Vec<ThreadId>>>) -> Result<Tensor> {
    if depth == 0 {
        return x * 2.0;
    }
    let kept = seen.clone();
    let [y] = checkpoint(
        move |x: &[Tensor]| {
            kept.borrow_mut().push(thread::current().id());
            Ok([nested(depth - 1, &x[0], &kept)?])
        },
        &[x],
    )?;
    Ok(y)
}

#[test]
fn a_checkpoint_runs_on_its_own_thread_or_not_at_all() {
    for depth in [3, 70] {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let x = TensorOptions::new().requires_grad(true).ones(&[1]).unwrap();
        let result = nested(depth, &x, &seen).unwrap().backward();
        if depth < 60 {
            result.unwrap();
            assert_eq!(x.grad().unwrap().unwrap().to_vec::<f32>().unwrap(), [2.0]);
        } else {
            let error = result.unwrap_err();
            assert_eq!(error.code(), Code::FailedPrecondition);
            assert!(error.message().contains("runs on its own thread only"), "{error}");
        }
        assert!(seen.borrow().iter().all(|id| *id == thread::current().id()));
    }
}

/// A value whose end is another panic.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("and so does its value");
    }
}

struct Throws {
    in_backward: bool,
    in_drop: bool,
}

impl Function for Throws {
    fn forward(&self, _: &FunctionContext, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        if !self.in_backward && !self.in_drop {
            std::panic::panic_any(Bomb);
        }
        Ok(vec![(&inputs[0] * 2.0)?])
    }

    fn backward(&self, _: &FunctionContext, _: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> {
        std::panic::panic_any(Bomb)
    }
}

impl Drop for Throws {
    fn drop(&mut self) {
        if self.in_drop {
            std::panic::panic_any(Bomb);
        }
    }
}

#[test]
fn a_panic_whose_value_panics_too() {
    let x = TensorOptions::new().requires_grad(true).ones(&[1]).unwrap();
    for (in_backward, in_drop) in [(false, false), (true, false), (true, true)] {
        let result = apply(Throws { in_backward, in_drop }, &[&x], 1)
            .and_then(|mut outputs| outputs.remove(0).backward());
        let error = result.unwrap_err();
        assert_eq!(error.code(), Code::Internal);
        assert!(error.message().contains("panicked"), "{error}");
    }
    let error = World::threads(2)
        .run(|world| match world.rank() {
            1 => std::panic::panic_any(Bomb),
            _ => world.comm()?.barrier(),
        })
        .unwrap_err();
    assert!(error.message().contains("rank 1: panicked"), "{error}");
}

#[test]
fn threads_of_ranks_have_names() {
    let names = World::threads(3)
        .run(|world| {
            let thread = thread::current();
            let system = std::fs::read_to_string("/proc/thread-self/comm")?;
            Ok((thread.name().map(str::to_owned), world.to_string(), system))
        })
        .unwrap();
    for (name, wanted, system) in names {
        assert_eq!(name.as_deref(), Some(&*wanted));
        assert_eq!(system.trim_end(), wanted);
    }
}

/// One rank fails, another one hangs: what happened is said all the same, and at once.
#[test]
fn the_first_failure_is_said_while_a_rank_hangs() {
    const HANGS: &str = "SHARDWEAVE_TEST_HANGS";
    const NAME: &str = "the_first_failure_is_said_while_a_rank_hangs";
    if std::env::var_os(HANGS).is_some() {
        let error = World::threads(3).run(|world| match world.rank() {
            1 => Err(Error::new(Code::DataLoss, "the dog ate it")),
            2 => world.comm()?.barrier(), // fails too, a little later
            _ => {
                thread::sleep(Duration::from_secs(20));
                Ok(())
            }
        });
        panic!("too late: {error:?}");
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture"])
        .env(HANGS, "1")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(|line| line.unwrap());
    let said = lines.find(|line| line.contains(" failed: ") || line.contains("too late"));
    let elapsed = start.elapsed();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(said.as_deref(), Some("rank 1 of 3 failed: the dog ate it (DataLoss)"));
    assert!(elapsed < Duration::from_secs(15), "{elapsed:?}");
    let others: Vec<String> = lines.filter(|line| line.contains(" failed: ")).collect();
    assert!(others.is_empty(), "only the first: {others:?}");
}
