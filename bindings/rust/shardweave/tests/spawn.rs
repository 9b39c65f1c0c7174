//! Ranks that are processes, which the program starts itself. Here the program is this test, so
//! that a rank is this test again, with the name of the function that wants it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use shardweave::{Code, Error, Placement::Shard, ReduceOp, Result, Source, Spawn, Tensor, World};

fn spawn(num_ranks: usize, test: &str) -> Spawn {
    World::spawn(num_ranks)
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .timeout(Duration::from_secs(60))
}

/// A folder for what ranks tell this test; it ends with this value.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("shardweave-{test}-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    /// What rank `rank` has written, as soon as it has.
    fn wait_for(&self, rank: usize) -> u32 {
        let start = Instant::now();
        loop {
            if let Ok(text) = fs::read_to_string(self.0.join(rank.to_string())) {
                return text.parse().unwrap();
            }
            assert!(start.elapsed() < Duration::from_secs(60), "rank {rank} writes nothing");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

fn write_pid(folder: &Path, world: &World) -> Result<()> {
    let path = folder.join(world.rank().to_string());
    fs::write(path.with_extension("new"), process::id().to_string())?;
    Ok(fs::rename(path.with_extension("new"), path)?)
}

fn is_running(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    !status.is_empty() && !status.contains("State:\tZ")
}

fn expect_ends(pid: u32) {
    let start = Instant::now();
    while is_running(pid) {
        assert!(start.elapsed() < Duration::from_secs(20), "process {pid} does not end");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn ranks_compute_together() {
    for size in [1, 2, 3] {
        spawn(size, "ranks_compute_together")
            .run(|world| {
                assert_eq!((world.size(), world.local_rank()), (size, world.rank()));
                let mut sum = [world.rank() as i64];
                world.comm()?.all_reduce(&mut sum, ReduceOp::Sum)?;
                assert_eq!(sum[0] as usize, size * (size - 1) / 2);
                Ok(())
            })
            .unwrap_or_else(|error| panic!("{size} ranks: {error}"));
    }
    // Another call, which the ranks of the first do not come to.
    spawn(2, "ranks_compute_together")
        .prefix_output(false)
        .run(|world| {
            let mesh = world.device_mesh(&[("tp", 2)])?;
            let x = Tensor::arange(5)?.distribute_from(Source::Same, &mesh, [("tp", Shard(0))])?;
            assert_eq!(x.sum()?.item::<i64>()?, 10);
            let error = World::spawn(2).run(|_| Ok(())).unwrap_err();
            assert_eq!(error.code(), Code::FailedPrecondition);
            assert!(error.message().contains("is a rank"), "{error}");
            Ok(())
        })
        .unwrap();
    assert_eq!(World::spawn(0).run(|_| Ok(())).unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn an_error_of_one_rank_is_the_result() {
    let start = Instant::now();
    let error = spawn(3, "an_error_of_one_rank_is_the_result")
        .run(|world| match world.rank() {
            1 => Err(Error::new(Code::DataLoss, "the dog\0ate it")),
            _ => world.comm()?.barrier(),
        })
        .unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::DataLoss, "rank 1: the dog\0ate it"));
    assert_eq!(error.rank(), Some(1));
    assert!(start.elapsed() < Duration::from_secs(30), "nobody waits for a deadline");
}

#[test]
fn a_backend_that_is_not_there() {
    let error =
        spawn(2, "a_backend_that_is_not_there").backend("nccl").run(|_| Ok(())).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
}

#[test]
fn a_rank_that_panics() {
    let start = Instant::now();
    let error = spawn(3, "a_rank_that_panics")
        .run(|world| {
            if world.rank() == 2 {
                panic!("rank {} has enough", world.rank());
            }
            world.comm()?.barrier()
        })
        .unwrap_err();
    let wanted = "rank 2: panicked: rank 2 has enough";
    assert_eq!(error, Error::new(Code::Internal, wanted));
    assert!(start.elapsed() < Duration::from_secs(30), "nobody waits for a deadline");
}

#[test]
fn a_rank_that_is_killed() {
    let start = Instant::now();
    let error = spawn(3, "a_rank_that_is_killed")
        .run(|world| {
            world.comm()?.barrier()?;
            if world.rank() == 1 {
                let kill = format!("kill -KILL {}", process::id());
                Command::new("sh").args(["-c", &kill]).status()?;
                thread::sleep(Duration::from_secs(60));
            }
            world.comm()?.barrier()
        })
        .unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().starts_with("rank 1: died: signal: 9"), "{error}");
    assert_eq!(error.rank(), Some(1));
    assert!(start.elapsed() < Duration::from_secs(30), "nobody waits for a deadline");
}

#[test]
fn a_rank_that_ends_by_itself() {
    const NAME: &str = "a_rank_that_ends_by_itself";
    // A rank of the second call gets the first one's error, too.
    for (code, wanted) in [(0, "ended before World::spawn"), (3, "died: exit status: 3")] {
        let error = spawn(2, NAME)
            .run(|world| match world.rank() {
                0 => process::exit(code),
                _ => world.comm()?.barrier(),
            })
            .unwrap_err();
        assert!(error.message().starts_with(&format!("rank 0: {wanted}")), "{error}");
    }
}

/// There is nothing to wait for then: the system forgets processes as they end.
#[test]
fn a_program_that_ignores_its_children() {
    const NAME: &str = "a_program_that_ignores_its_children";
    if std::env::var_os("SHARDWEAVE_TEST_PROGRAM").is_some() {
        if std::env::var_os("SHARDWEAVE_SPAWN_CALL").is_none() {
            extern "C" {
                fn signal(number: i32, handler: usize) -> usize;
            }
            const SIGCHLD: i32 = 17;
            const SIG_IGN: usize = 1;
            // SAFETY: no handler is installed.
            unsafe { signal(SIGCHLD, SIG_IGN) };
        }
        let good = spawn(2, NAME).run(|world| world.comm()?.barrier());
        let bad = spawn(2, NAME).run(|world| match world.rank() {
            0 => process::exit(3),
            _ => world.comm()?.barrier(),
        });
        return println!("\n{good:?}\n{}", bad.unwrap_err());
    }
    let folder = Folder::new(NAME);
    let mut child = program(NAME, "", &folder.0).spawn().unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("it waits for ever");
        }
        thread::sleep(Duration::from_millis(10));
    }
    let out = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    assert!(out.lines().any(|line| line == "Ok(())"), "{out}");
    let bad = out.lines().find(|line| line.starts_with("rank 0: ended before World::spawn at "));
    assert!(bad.map_or(false, |line| line.contains("nobody can say how")), "{out}");
}

/// It holds open whatever the rank has had.
#[test]
fn what_a_rank_leaves_behind_holds_nobody_up() {
    if std::env::var_os("SHARDWEAVE_SPAWN_CALL").is_some() {
        Command::new("sleep").arg("20").spawn().unwrap();
        process::exit(3);
    }
    let start = Instant::now();
    let error = spawn(2, "what_a_rank_leaves_behind_holds_nobody_up").run(|_| Ok(())).unwrap_err();
    assert!(error.message().contains(": died: exit status: 3"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
}

#[test]
fn ranks_that_hang_are_killed() {
    const NAME: &str = "ranks_that_hang_are_killed";
    let folder = Folder::new(NAME);
    let start = Instant::now();
    let path = folder.0.clone().into_os_string().into_string().unwrap();
    // The ranks' folder is that of the first process, which is in their arguments.
    let given = std::env::args().find_map(|a| a.strip_prefix("--skip=").map(str::to_owned));
    let error = World::spawn(2)
        .args(["--exact", NAME, "--nocapture", &format!("--skip={path}")])
        .run(|world| {
            write_pid(Path::new(given.as_ref().expect("a rank has it")), world)?;
            world.comm()?.barrier()?;
            match world.rank() {
                0 => loop {
                    thread::sleep(Duration::from_secs(60));
                },
                _ => Err(Error::new(Code::NotFound, "where is it?")),
            }
        })
        .unwrap_err();
    assert_eq!((error.code(), error.message()), (Code::NotFound, "rank 1: where is it?"));
    assert!(start.elapsed() < Duration::from_secs(30));
    assert!(!is_running(folder.wait_for(0)) && !is_running(folder.wait_for(1)));
}

/// This test again, as a program of its own, whose ranks do what `what` says.
fn program(test: &str, what: &str, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env("SHARDWEAVE_TEST_PROGRAM", what)
        .env("SHARDWEAVE_TEST_FOLDER", folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

#[test]
fn what_ranks_write() {
    const NAME: &str = "what_ranks_write";
    if let Ok(what) = std::env::var("SHARDWEAVE_TEST_PROGRAM") {
        let result = spawn(2, NAME).prefix_output(what == "prefix").run(|world| {
            println!("\nfrom {world}\nand more");
            eprint!("no end of a line {}", world.rank());
            match world.rank() {
                1 => Err(Error::new(Code::NotFound, "where is it?")),
                _ => world.comm()?.barrier(),
            }
        });
        println!("\n{}", result.unwrap_err());
        return;
    }
    let folder = Folder::new(NAME);
    let output = program(NAME, "prefix", &folder.0).output().unwrap();
    let (out, err) = (String::from_utf8(output.stdout), String::from_utf8(output.stderr));
    let (out, err) = (out.unwrap(), err.unwrap());
    for line in ["[0] from rank 0 of 2", "[1] and more", "rank 1: where is it? (NotFound)"] {
        assert!(out.lines().any(|other| other == line), "{line:?} is not in\n{out}");
    }
    for line in ["[1] no end of a line 1", "rank 1 of 2 failed: where is it? (NotFound)"] {
        assert!(err.lines().any(|other| other == line), "{line:?} is not in\n{err}");
    }
    let output = program(NAME, "none", &folder.0).output().unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    assert!(out.lines().any(|line| line == "from rank 0 of 2"), "{out}");
}

#[test]
fn ranks_end_with_the_program() {
    const NAME: &str = "ranks_end_with_the_program";
    if let Some(folder) = std::env::var_os("SHARDWEAVE_TEST_FOLDER") {
        let result = spawn(2, NAME).run(|world| {
            write_pid(Path::new(&folder), world)?;
            loop {
                thread::sleep(Duration::from_secs(60));
            }
        });
        return println!("{result:?}");
    }
    let folder = Folder::new(NAME);
    let mut parent = program(NAME, "", &folder.0).spawn().unwrap();
    let pids = [folder.wait_for(0), folder.wait_for(1)];
    assert!(pids.iter().all(|pid| is_running(*pid)));
    parent.kill().unwrap();
    parent.wait().unwrap();
    pids.into_iter().for_each(expect_ends);
}
