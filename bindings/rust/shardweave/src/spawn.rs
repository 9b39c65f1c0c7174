//! Ranks that are processes of this machine, which the program starts itself.
//!
//! The program is started once per rank, with the variables of tools/launch, and with two more:
//! which call of [`Spawn::run`] wants it, and a socket for what became of it. A rank comes to that
//! call as the program did, joins the others, runs the body, and ends.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::raw::{c_int, c_ulong};
use std::os::unix::io::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{parent_id, CommandExt};
use std::panic::Location;
use std::process::{self, Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::error::{Code, Error, Result};
use crate::ffi::without_panics;
use crate::world::{say, Processes, World};

/// Ranks that are processes, about to start. See [`World::spawn`].
#[derive(Clone, Debug)]
pub struct Spawn {
    num_ranks: usize,
    processes: Processes,
    prefix_output: bool,
    arguments: Option<Vec<OsString>>,
}

impl World {
    /// Ranks that are processes of this machine, started by the program itself: copies of it, with
    /// its arguments. Nobody needs a launcher.
    ///
    /// ```
    /// use shardweave::{ReduceOp, World};
    ///
    /// fn main() -> shardweave::Result<()> {
    ///     // What stands here, every process does.
    ///     World::spawn(3).run(|world| {
    ///         let mut sum = [world.rank() as i64];
    ///         world.comm()?.all_reduce(&mut sum, ReduceOp::Sum)?;
    ///         println!("{world} has {}", sum[0]); // [1] rank 1 of 3 has 3
    ///         assert_eq!(sum, [3]);
    ///         Ok(())
    ///     })?;
    ///     // What stands here, only the first process does.
    ///     Ok(())
    /// }
    /// ```
    pub fn spawn(num_ranks: usize) -> Spawn {
        Spawn { num_ranks, processes: World::processes(), prefix_output: true, arguments: None }
    }
}

impl Spawn {
    /// How long a rank waits for the others; five minutes unless this is called.
    pub fn timeout(mut self, timeout: Duration) -> Spawn {
        self.processes = self.processes.timeout(timeout);
        self
    }

    /// How they communicate: "gloo", as without, or "nccl" between GPUs, of which a rank has that of its
    /// number.
    pub fn backend(mut self, name: impl Into<String>) -> Spawn {
        self.processes = self.processes.backend(name);
        self
    }

    /// Whether each line that a rank writes gets its rank in front, `[2] loss 0.5`; true unless
    /// this is called. Without, ranks write to where the program does.
    pub fn prefix_output(mut self, prefix_output: bool) -> Spawn {
        self.prefix_output = prefix_output;
        self
    }

    /// Arguments of the ranks, in place of the program's own. In a test of libtest they choose that
    /// test: `["--exact", "its::name", "--nocapture"]`.
    pub fn args<A: Into<OsString>>(mut self, arguments: impl IntoIterator<Item = A>) -> Spawn {
        self.arguments = Some(arguments.into_iter().map(Into::into).collect());
        self
    }

    /// Runs `body` in a process per rank, and waits for all of them.
    ///
    /// A signal to this process, which is none of the ranks, is not theirs: with a handler for SIGTERM
    /// it goes on, and so do they. Tell them, by a signal to the process group.
    ///
    /// The processes run the program from its beginning: what stands before this call, all of them
    /// do. A rank ends with the body; what stands after this call, only the first process does. A
    /// rank passes over calls that come before its own, with the results that they had; it starts
    /// no others itself.
    ///
    /// If a rank fails, panics or is killed, the others' collectives fail, naming it; those that
    /// have not ended two seconds later are killed. The result is the failure that came first, with
    /// its rank in the message, which is also written to stderr at once. Ranks end with this
    /// process, whatever ends it. They have no stdin.
    #[track_caller]
    pub fn run(&self, body: impl FnOnce(&World) -> Result<()>) -> Result<()> {
        let call = Call::here(Location::caller());
        match Call::wanted() {
            None => {
                let result = self.start(&call);
                call.remember(&result);
                result
            }
            Some(wanted) if wanted == call.to_string() => self.be_a_rank(body),
            Some(_) if IS_RANK.load(Ordering::Acquire) => Err(Error::new(
                Code::FailedPrecondition,
                format!(
                    "World::spawn at {call}: this process is a rank that World::spawn has started; \
                     wanted one that is no rank"
                ),
            )),
            Some(_) => call.past_result(), // the first process has been here
        }
    }
}

/// Which call: "1234 src/main.rs:7:5 #0", of process 1234 the first one there.
const CALL: &str = "SHARDWEAVE_SPAWN_CALL";
/// The calls before it that have failed. Linux takes 128 KiB.
const PAST: &str = "SHARDWEAVE_SPAWN_PAST";
/// The descriptor of a socket that takes what became of a rank.
const REPORT: &str = "SHARDWEAVE_SPAWN_REPORT_FD";
/// How long the others have, after a failure, to notice it and say what they were doing.
const NOTICE: Duration = Duration::from_secs(2);
/// How long the parent waits for the end of what a rank wrote, after the rank's.
const LEFT_BEHIND: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(10);

static IS_RANK: AtomicBool = AtomicBool::new(false);

/// Whether this process will be a rank, at a call that it has not come to yet. Until then it does
/// what the first process has done, which is no rank.
pub(crate) fn is_on_its_way() -> bool {
    !IS_RANK.load(Ordering::Acquire) && Call::wanted().is_some()
}

/// A call of [`Spawn::run`], the same in this process and in its ranks.
struct Call {
    place: &'static Location<'static>,
    number: usize,
}

impl Call {
    fn here(place: &'static Location<'static>) -> Call {
        static SO_FAR: Mutex<Vec<&'static Location<'static>>> = Mutex::new(Vec::new());
        let mut all = SO_FAR.lock().unwrap_or_else(PoisonError::into_inner);
        let number = all.iter().filter(|other| **other == place).count();
        all.push(place);
        Call { place, number }
    }

    /// The one that has started this process. What this process starts in its turn, by whatever
    /// way, finds the variable too, and another parent.
    fn wanted() -> Option<String> {
        let call = env::var(CALL).ok()?;
        let (starter, call) = call.split_once(' ')?;
        (starter.parse() == Ok(parent_id())).then(|| call.to_owned())
    }

    fn remember(&self, result: &Result<()>) {
        if let Err(error) = result {
            // Neither of the separators, no NUL, which a variable cannot hold, and not too much.
            let message = error.message().replace(['\0', UNIT, RECORD], " ");
            let message: String = message.chars().take(500).collect();
            let record = (format!("{self}{UNIT}{}{UNIT}", error.code() as i32), message);
            FAILED.lock().unwrap_or_else(PoisonError::into_inner).push(record);
        }
    }

    /// In a rank: the result that a call before its own had in the first process.
    fn past_result(&self) -> Result<()> {
        let past = env::var(PAST).unwrap_or_default();
        let record = past
            .split(RECORD)
            .map(|record| record.splitn(3, UNIT).collect::<Vec<_>>())
            .find(|record| record[0] == self.to_string());
        match record.as_deref() {
            Some([_, code, message]) => {
                Err(Error::new(Code::from_number(code.parse().unwrap_or(0)), *message))
            }
            _ => Ok(()),
        }
    }
}

const UNIT: char = '\x1f';
const RECORD: char = '\x1e';
/// Of this process's calls: the beginning of a record, and the message.
static FAILED: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());

/// The records as the variable takes them: the more there are, the less is told of each.
fn past(failed: &[(String, String)]) -> String {
    const MAX: usize = 1 << 16;
    let mut limit = 500;
    loop {
        let records = failed.iter().map(|(call, message)| {
            let message: String = message.chars().take(limit).collect();
            format!("{call}{message}{RECORD}")
        });
        let all: String = records.collect();
        if all.len() <= MAX || limit == 0 {
            return all;
        }
        limit /= 2;
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.place, self.number)
    }
}

// --- A rank ---------------------------------------------------------------------------------------

impl Spawn {
    fn be_a_rank(&self, body: impl FnOnce(&World) -> Result<()>) -> ! {
        IS_RANK.store(true, Ordering::Release);
        let mut report = Report::to_parent();
        let result = without_panics(|| {
            let world = self.processes.from_environment()?;
            let result = without_panics(|| body(&world));
            // First the parent, then the others, whose errors follow from this one.
            report.send(&result);
            if let Err(error) = &result {
                let reason = format!("rank {} failed: {error}", world.rank());
                world.abort(&reason.replace('\0', "\\0")).ok();
            }
            result
        });
        report.send(&result); // if nobody has yet
        process::exit(i32::from(result.is_err()));
    }
}

/// What became of a rank: the code and the message of its error, or 0.
struct Report(Option<UnixStream>);

impl Report {
    fn to_parent() -> Report {
        let fd = env::var(REPORT).ok().and_then(|fd| fd.parse::<RawFd>().ok());
        Report(fd.filter(|fd| system::set_inherited(*fd, false).is_ok()).map(|fd| {
            // SAFETY: the parent has made it for this, and nobody else in this process knows it.
            unsafe { UnixStream::from_raw_fd(fd) }
        }))
    }

    /// Only the first time. A parent that is gone needs none.
    fn send(&mut self, result: &Result<()>) {
        if let Some(mut stream) = self.0.take() {
            let (code, message) =
                result.as_ref().err().map_or((0, ""), |e| (e.code() as i32, e.message()));
            let mut bytes = code.to_le_bytes().to_vec();
            bytes.extend_from_slice(&(message.len() as u64).to_le_bytes());
            bytes.extend_from_slice(message.as_bytes());
            stream.write_all(&bytes).ok();
        }
    }

    /// None if the rank has ended without.
    fn receive(mut stream: UnixStream) -> Option<Result<()>> {
        let (mut code, mut length) = ([0; 4], [0; 8]);
        stream.read_exact(&mut code).and_then(|()| stream.read_exact(&mut length)).ok()?;
        let mut message = Vec::new();
        stream.take(u64::from_le_bytes(length)).read_to_end(&mut message).ok()?;
        Some(match i32::from_le_bytes(code) {
            0 => Ok(()),
            code => Err(Error::new(Code::from_number(code), String::from_utf8_lossy(&message))),
        })
    }
}

// --- The parent -----------------------------------------------------------------------------------

/// A rank's process. It ends with this value.
struct Rank {
    child: Child,
    /// Once its socket is closed: what it has reported, if it has.
    report: Option<Option<Result<()>>>,
    ended: Option<(Status, Instant)>,
    failure: Option<Failure>,
    killed: bool,
}

/// How a process has ended; `Unknown` if somebody else has waited for it, or SIGCHLD is ignored.
#[derive(Clone, Copy)]
enum Status {
    Known(ExitStatus),
    Unknown,
}

impl Drop for Rank {
    fn drop(&mut self) {
        if self.ended.is_none() {
            // Afterwards the number may be another process's.
            self.child.kill().ok();
            self.child.wait().ok();
        }
    }
}

/// Why a rank has failed.
#[derive(Clone)]
struct Failure {
    error: Error,
    /// Whether it may be that another rank is gone or has given up, and nothing else.
    may_follow: bool,
    /// Of all failures.
    number: usize,
}

impl Spawn {
    fn start(&self, call: &Call) -> Result<()> {
        if self.num_ranks < 1 || self.num_ranks > 4096 {
            let given = self.num_ranks;
            return Err(Error::invalid(format!("World::spawn: {given} ranks; wanted 1 to 4096")));
        }
        let (reports, inbox) = mpsc::channel();
        // The threads that pass output on hold a sender of this for as long as they do.
        let (open, closed) = mpsc::channel::<()>();
        let mut ranks = self.start_ranks(call, &reports, &open)?;
        drop((reports, open));
        let failure = watch(&mut ranks, &inbox, call);
        drop(ranks);
        // What a rank has left behind may hold its output open.
        let _ = closed.recv_timeout(LEFT_BEHIND);
        failure.map_or(Ok(()), Err)
    }

    fn start_ranks(
        &self,
        call: &Call,
        reports: &Sender<(usize, Option<Result<()>>)>,
        open: &Sender<()>,
    ) -> Result<Vec<Rank>> {
        let system_error =
            |e: io::Error, what| Error::from(e).context(format_args!("World::spawn: {what}"));
        // The system chooses the port, and rank 0 inherits the socket: nobody can take it between.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .map_err(|e| system_error(e, "cannot listen on 127.0.0.1"))?;
        let port = listener
            .local_addr()
            .map_err(|e| system_error(e, "cannot listen on 127.0.0.1"))?
            .port();
        let mut listener = Some(listener);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let run = format!("{}-{:x}", process::id(), now.as_nanos());
        let program = env::current_exe().map_err(|e| system_error(e, "which program is this"))?;
        let size = self.num_ranks.to_string();
        let mut ranks = Vec::new();
        for rank in 0..self.num_ranks {
            let (here, there) =
                UnixStream::pair().map_err(|e| system_error(e, "cannot make a socket"))?;
            let mut command = Command::new(&program);
            match &self.arguments {
                Some(arguments) => command.args(arguments),
                None => command.args(env::args_os().skip(1)),
            };
            command
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", &size)
                .env("LOCAL_RANK", rank.to_string())
                .env("LOCAL_WORLD_SIZE", &size)
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .env("SHARDWEAVE_RUN_ID", &run)
                .env_remove("SHARDWEAVE_STORE_FILE")
                .env_remove("SHARDWEAVE_STORE_FD")
                .env(CALL, format!("{} {call}", process::id()))
                .env(PAST, past(&FAILED.lock().unwrap_or_else(PoisonError::into_inner)))
                .env(REPORT, there.as_raw_fd().to_string())
                .stdin(Stdio::null());
            if let Some(listener) = &listener {
                command.env("SHARDWEAVE_STORE_FD", listener.as_raw_fd().to_string());
            }
            if self.prefix_output {
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
            }
            let inherited = [Some(there.as_raw_fd()), listener.as_ref().map(|l| l.as_raw_fd())];
            let parent = process::id();
            let prepare = move || {
                system::end_with_parent(parent)?;
                inherited.iter().flatten().try_for_each(|fd| system::set_inherited(*fd, true))
            };
            // SAFETY: between fork and exec `prepare` makes system calls and nothing else: no
            // memory, no locks.
            unsafe { command.pre_exec(prepare) };
            let mut child = command.spawn().map_err(|e| {
                system_error(e, "cannot start").context(format_args!("rank {rank}")).of_rank(rank)
            })?;
            // From here on rank 0 alone holds it: if it dies, the others are refused.
            listener = None;
            let outputs = [
                child.stdout.take().map(|source| Box::new(source) as Box<dyn Read + Send>),
                child.stderr.take().map(|source| Box::new(source) as Box<dyn Read + Send>),
            ];
            ranks.push(Rank { child, report: None, ended: None, failure: None, killed: false });
            let prefix =
                format!("[{rank:>width$}] ", width = (self.num_ranks - 1).to_string().len());
            for (source, to_stderr) in outputs.into_iter().zip([false, true]) {
                if let Some(source) = source {
                    let (prefix, open) = (prefix.clone(), open.clone());
                    start_thread("output of a rank", move || {
                        pass_on(source, &prefix, to_stderr);
                        drop(open);
                    })?;
                }
            }
            let reports = reports.clone();
            start_thread("end of a rank", move || {
                reports.send((rank, Report::receive(here))).ok();
            })?;
        }
        Ok(ranks)
    }
}

fn start_thread(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = thread::Builder::new().name(name.to_owned()).spawn(body);
    thread
        .map(drop)
        .map_err(|e| Error::new(Code::ResourceExhausted, format!("World::spawn: no thread: {e}")))
}

/// Waits for all ranks, and gives the failure that came first.
fn watch(
    ranks: &mut [Rank],
    inbox: &Receiver<(usize, Option<Result<()>>)>,
    call: &Call,
) -> Option<Error> {
    let num_ranks = ranks.len();
    let mut num_failures = 0;
    let mut failed_at: Option<Instant> = None;
    let mut said = false;
    loop {
        match inbox.recv_timeout(POLL) {
            Ok((rank, report)) => ranks[rank].report = Some(report),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => thread::sleep(POLL),
        }
        for rank in ranks.iter_mut() {
            if rank.ended.is_none() {
                let status = match rank.child.try_wait() {
                    Ok(status) => status.map(Status::Known),
                    Err(_) => Some(Status::Unknown),
                };
                rank.ended = status.map(|status| (status, Instant::now()));
            }
            // What it has started, and left behind, may hold its socket open.
            if rank.ended.map_or(false, |(_, at)| at.elapsed() > LEFT_BEHIND) {
                rank.report.get_or_insert(None);
            }
            if rank.failure.is_none() && !rank.killed {
                if let Some((error, may_follow)) = rank.what_went_wrong(call) {
                    rank.failure = Some(Failure { error, may_follow, number: num_failures });
                    num_failures += 1;
                }
            }
        }
        if num_failures > 0 {
            failed_at.get_or_insert_with(Instant::now);
        }
        let patience_ends = failed_at.map_or(false, |at| at.elapsed() > NOTICE);
        let running = ranks.iter().any(|rank| !rank.is_done());
        let first = first_failure(ranks);
        if let Some((rank, failure)) = &first {
            let surely_first = !failure.may_follow || patience_ends || !running;
            if surely_first && !said {
                say(&format!("rank {rank} of {num_ranks} failed: {}", failure.error));
                said = true;
            }
        }
        if !running {
            return first.map(|(rank, failure)| {
                failure.error.context(format_args!("rank {rank}")).of_rank(rank)
            });
        }
        if patience_ends {
            for rank in ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
                rank.killed = true;
                rank.child.kill().ok();
            }
        }
    }
}

/// One that follows from no other, if there is one.
fn first_failure(ranks: &[Rank]) -> Option<(usize, Failure)> {
    let failures = ranks.iter().enumerate().filter_map(|(i, r)| Some((i, r.failure.clone()?)));
    failures.min_by_key(|(_, failure)| (failure.may_follow, failure.number))
}

impl Rank {
    /// Its process has ended, and what it wanted to say is here.
    fn is_done(&self) -> bool {
        self.ended.is_some() && (self.report.is_some() || self.killed)
    }

    /// The error, and whether it may follow from another rank's.
    fn what_went_wrong(&self, call: &Call) -> Option<(Error, bool)> {
        use Code::{Aborted, Cancelled, DeadlineExceeded, FailedPrecondition, Unavailable};
        match (self.report.as_ref()?, self.ended.map(|(status, _)| status)) {
            (Some(Err(error)), _) => {
                let code = error.code();
                let may_follow =
                    [Aborted, Cancelled, DeadlineExceeded, Unavailable].contains(&code);
                Some((error.clone(), may_follow))
            }
            (Some(Ok(())), Some(Status::Known(status))) if !status.success() => {
                Some((Error::new(Unavailable, format!("died after its body: {status}")), false))
            }
            (Some(Ok(())), _) => None,
            // It has closed its socket, and is about to end.
            (None, None) => None,
            (None, Some(Status::Known(status))) if status.success() => {
                let message = format!("ended before World::spawn at {call} had run its body");
                Some((Error::new(FailedPrecondition, message), false))
            }
            (None, Some(Status::Known(status))) => {
                Some((Error::new(Unavailable, format!("died: {status}")), false))
            }
            (None, Some(Status::Unknown)) => {
                let message = format!(
                    "ended before World::spawn at {call} had run its body; nobody can say how: \
                     SIGCHLD is ignored, or the program has waited for the process itself"
                );
                Some((Error::new(Unavailable, message), false))
            }
        }
    }
}

/// Copies whole lines, with `prefix` in front of each; those of several ranks do not mix.
fn pass_on(mut source: impl Read, prefix: &str, to_stderr: bool) {
    const MAX_LINE: usize = 1 << 16; // one that is longer is cut
    let write = |bytes: &[u8]| -> io::Result<()> {
        if to_stderr {
            io::stderr().lock().write_all(bytes)
        } else {
            let mut out = io::stdout().lock();
            out.write_all(bytes)?;
            out.flush()
        }
    };
    let mut buffer = vec![0; MAX_LINE];
    let mut line = prefix.as_bytes().to_vec();
    loop {
        let count = match source.read(&mut buffer) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => 0,
        };
        for byte in &buffer[..count] {
            line.push(*byte);
            if *byte != b'\n' && line.len() < MAX_LINE {
                continue;
            }
            if *byte != b'\n' {
                line.push(b'\n');
            }
            // Without a reader of ours the rank's output has none either: it shall notice.
            if write(&line).is_err() {
                return;
            }
            line.truncate(prefix.len());
        }
        if count == 0 {
            if line.len() > prefix.len() {
                line.push(b'\n');
                write(&line).ok();
            }
            return;
        }
    }
}

/// What the standard library has no words for.
mod system {
    use super::*;

    extern "C" {
        fn fcntl(fd: c_int, command: c_int, ...) -> c_int;
        fn prctl(option: c_int, ...) -> c_int;
    }

    /// Whether a descriptor stays open in what this process becomes or starts.
    pub(super) fn set_inherited(fd: RawFd, inherited: bool) -> io::Result<()> {
        const F_SETFD: c_int = 2;
        const FD_CLOEXEC: c_int = 1;
        // SAFETY: a system call without memory.
        check(unsafe { fcntl(fd, F_SETFD, if inherited { 0 } else { FD_CLOEXEC }) })
    }

    /// Called after fork: whatever ends the parent ends this process.
    pub(super) fn end_with_parent(parent: u32) -> io::Result<()> {
        const PR_SET_PDEATHSIG: c_int = 1;
        const SIGKILL: c_ulong = 9;
        // SAFETY: a system call without memory.
        check(unsafe { prctl(PR_SET_PDEATHSIG, SIGKILL) })?;
        if parent_id() == parent {
            return Ok(());
        }
        // It has ended before the call above.
        Err(io::Error::from_raw_os_error(3))
    }

    fn check(result: c_int) -> io::Result<()> {
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_of_past_calls_fits_into_a_variable() {
        let record =
            |message: &str| ("src/main.rs:7:5 #0\u{1f}13\u{1f}".to_owned(), message.into());
        let failed: Vec<(String, String)> = vec![record(&"\u{e9}".repeat(500)); 1000];
        assert_eq!(past(&failed[..1]), format!("{}{}{RECORD}", failed[0].0, failed[0].1));
        let all = past(&failed);
        assert!(all.len() <= 1 << 16, "{}", all.len());
        let records: Vec<&str> = all.split_terminator(RECORD).collect();
        assert_eq!(records.len(), 1000);
        assert!(records.iter().all(|record| record.ends_with('\u{e9}')), "something of each");
    }
}
