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
    apply, checkpoint, inference, with_grad_mode, Code, DType, Error, Function, FunctionContext,
    GradMode, Placement::Shard, Result, SendTensor, Source, Tensor, TensorOptions, World,
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

// --- Tensors that go to another thread --------------------------------------------------------------

/// Threads that load, for ranks that take turns with them.
#[test]
fn loader_threads() {
    World::threads(2)
        .run(|world| {
            let (sender, batches) = std::sync::mpsc::sync_channel::<SendTensor>(1);
            let loaders: Vec<_> = (0..3)
                .map(|loader| {
                    let sender = sender.clone();
                    thread::spawn(move || -> Result<()> {
                        for i in 0..20i64 {
                            let batch = SendTensor::from_slice(&[loader * 100 + i; 7], &[7])?;
                            assert_eq!((batch.sizes()?, batch.dtype()?), (vec![7], DType::I64));
                            sender
                                .send(batch)
                                .map_err(|_| Error::new(Code::Cancelled, "enough"))?;
                        }
                        // What was computed here may go, too.
                        let x = TensorOptions::new().requires_grad(true).full(&[7], 1.0)?;
                        let last = (&x * 1000.0)?.to_dtype(DType::I64)?.to_send()?;
                        sender.send(last).map_err(|_| Error::new(Code::Cancelled, "enough"))
                    })
                })
                .collect();
            drop(sender);
            let mesh = world.device_mesh(&[("dp", 2)])?;
            let mut sum = 0;
            for batch in batches {
                let batch = batch.into_tensor();
                batch.add_(&Tensor::ones(&[7])?.to_dtype(DType::I64)?)?; // it is this thread's now
                let first = batch.select(0, 0)?.item::<i64>()?;
                assert_eq!(batch.to_vec::<i64>()?, [first; 7]);
                // As many on both ranks, in whatever order: nothing is sent.
                let parts = batch.distribute_from(Source::Same, &mesh, [("dp", Shard(0))])?;
                assert_eq!(parts.to_local()?.to_vec::<i64>()?.len(), [4, 3][world.rank()]);
                sum += first;
            }
            for loader in loaders {
                loader.join().unwrap()?;
            }
            let wanted: i64 = (0..3).flat_map(|l| (0..20).map(move |i| l * 100 + i + 1)).sum();
            assert_eq!(sum, wanted + 3 * 1001);
            Ok(())
        })
        .unwrap();
}

/// Whatever leads to the memory of a tensor, nothing leads to that of what was made of it to go.
#[test]
fn what_goes_to_another_thread_is_nobody_elses() {
    let x = TensorOptions::new().requires_grad(true).full(&[4, 3], 2.0).unwrap();
    let plain = Tensor::from_slice(&[1.0f32; 12], &[4, 3]).unwrap();
    let history = (&x * 3.0).unwrap();
    let row = plain.select(0, 1).unwrap();
    let wide = Tensor::ones(&[1, 3]).unwrap().expand(&[4, 3]).unwrap();
    let turned = plain.transpose(0, 1).unwrap();
    let unseen = inference(|| &plain + 1.0).unwrap();
    for source in [&x, &plain, &history, &row, &wide, &turned, &unseen] {
        let before = source.detach().unwrap().to_vec::<f32>().unwrap();
        let sent = source.to_send().unwrap();
        shardweave::no_grad(|| source.copy().unwrap().fill_(7.0)).unwrap();
        let (sizes, strides) = (source.sizes().unwrap(), source.strides().unwrap());
        let (there, after) = thread::spawn(move || -> Result<_> {
            let tensor = sent.into_tensor();
            assert!(!tensor.requires_grad()? && tensor.is_leaf()? && tensor.grad()?.is_none());
            assert_eq!(tensor.sizes()?, sizes, "of strides {strides:?}");
            let there = tensor.to_vec::<f32>()?;
            tensor.fill_(-1.0)?; // nobody sees it
            let leaf = tensor.copy()?;
            leaf.set_requires_grad(true)?;
            (&leaf * &tensor)?.sum()?.backward()?; // as any other tensor of this thread
            Ok((there, leaf.grad()?.unwrap().to_vec::<f32>()?))
        })
        .join()
        .unwrap()
        .unwrap();
        assert_eq!(there, before);
        assert_eq!(after, vec![-1.0; before.len()]);
        assert_eq!(source.detach().unwrap().to_vec::<f32>().unwrap(), before);
    }
    // Written to after it has been sent, the source changes, and what was sent does not.
    let sent = plain.to_send().unwrap();
    plain.zero_().unwrap();
    assert_eq!(sent.into_tensor().to_vec::<f32>().unwrap(), [1.0; 12]);
    // One that nobody takes ends on the other thread.
    let sent = plain.to_send().unwrap();
    thread::spawn(move || drop(sent)).join().unwrap();
}

#[test]
fn a_tensor_of_a_mesh_stays_with_its_rank() {
    World::threads(2)
        .run(|world| {
            let mesh = world.device_mesh(&[("x", 2)])?;
            let parts = Tensor::arange(5)?.distribute(&mesh, [("x", Shard(0))])?;
            let error = parts.to_send().unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument);
            let wanted = "Tensor::to_send: the tensor is DTensor[5] Long [S(0)]";
            assert!(error.message().starts_with(wanted), "{error}");
            assert_eq!(parts.to_local()?.to_send()?.sizes()?, [[3], [2]][world.rank()]);
            Ok(())
        })
        .unwrap();
}
