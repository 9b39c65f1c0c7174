use std::ffi::CString;
use std::fmt;
use std::path::PathBuf;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use shardweave_sys as sys;

use crate::comm::{rank_numbers, Comm, CommCounters};
use crate::dtype::Device;
use crate::error::{Code, Error, Of, Result};
use crate::ffi::{c_text, milliseconds, without_panics};
use crate::mesh::{Mesh, MeshDims};
use crate::spawn;

handle! {
    /// One rank's view of all ranks. Ranks are threads of one process ([`World::threads`]) or
    /// processes ([`World::spawn`], [`World::from_environment`], [`World::join`]).
    ///
    /// Belongs to its rank, as does all that is made from it (communicators, meshes, tensors,
    /// modules, optimizers): neither `Send` nor `Sync`. The library wants one thread at a time for
    /// all of them together, and Rust cannot hold two values to that: so they stay on the thread
    /// that they are on.
    World, swv_world, swv_world_free
}

/// Ranks that are threads, about to start. See [`World::threads`].
#[derive(Clone, Debug)]
pub struct Threads {
    num_ranks: usize,
    timeout: Option<Duration>,
}

/// How processes find each other. See [`World::processes`].
#[derive(Clone, Debug, Default)]
pub struct Processes {
    timeout: Option<Duration>,
    network_interface: Option<String>,
    backend: Option<String>,
    device: Option<Device>,
}

/// Where ranks meet, for a program that no launcher has started: see [`World::join`] and
/// [`Processes::join`].
///
/// ```
/// use shardweave::{MeetingPoint, Rendezvous, World};
///
/// # let directory = std::env::temp_dir().join(format!("shardweave_doc_{}", std::process::id()));
/// # std::fs::create_dir_all(&directory).unwrap();
/// // Each of the processes with its own number.
/// let at = MeetingPoint::File(directory.join("meeting"));
/// let world = World::join(&Rendezvous::new(0, 1, at).run("first"))?;
/// world.comm()?.barrier()?;
/// # std::fs::remove_dir_all(&directory).ok();
/// # Ok::<(), shardweave::Error>(())
/// ```
///
/// A file that a run has left behind is refused under the same run name, and serves under another:
/// a program that is started again takes a new one.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Rendezvous {
    /// Which one this process is.
    pub rank: usize,
    /// How many there are.
    pub world_size: usize,
    /// Where they meet.
    pub at: MeetingPoint,
    /// Among the ranks of this machine; None: to be found out.
    pub local_rank: Option<usize>,
    /// Names this start of the program, the same on all ranks; None: "run".
    pub run: Option<String>,
}

impl Rendezvous {
    /// This process's number, how many there are, and where they meet.
    pub fn new(rank: usize, world_size: usize, at: MeetingPoint) -> Rendezvous {
        Rendezvous { rank, world_size, at, local_rank: None, run: None }
    }

    /// Among the ranks of this machine.
    pub fn local_rank(mut self, local_rank: usize) -> Rendezvous {
        self.local_rank = Some(local_rank);
        self
    }

    /// Names this start of the program, the same on all ranks.
    pub fn run(mut self, name: impl Into<String>) -> Rendezvous {
        self.run = Some(name.into());
        self
    }
}

/// Where ranks meet.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum MeetingPoint {
    /// A path that all ranks can open and only this run uses.
    File(PathBuf),
    /// Where rank 0 serves a store, as the others reach it.
    Address {
        /// A name or an address.
        host: String,
        /// From 1.
        port: u16,
    },
}

/// A rank that no thread has taken yet. See [`World::local`].
pub struct Seat(World);

// SAFETY: the world of a seat is fresh: nothing has been made from it and no call is under way, and
// the header lets a rank be driven from any thread, one at a time. Whoever takes the seat is the
// only one.
unsafe impl Send for Seat {}

/// Ends a world from any thread. See [`World::aborter`].
pub struct Aborter(World);

// SAFETY: its only use is swv_world_abort, which the header lets any thread call at any time, and
// freeing the handle, which any thread may.
unsafe impl Send for Aborter {}
// SAFETY: the same.
unsafe impl Sync for Aborter {}

impl World {
    /// Ranks that are threads of this process.
    ///
    /// ```
    /// use shardweave::World;
    /// let ranks = World::threads(4).run(|world| Ok(world.rank()))?;
    /// assert_eq!(ranks, [0, 1, 2, 3]);
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn threads(num_ranks: usize) -> Threads {
        Threads { num_ranks, timeout: None }
    }

    /// Ranks that are processes, over Gloo or, between GPUs, NCCL.
    pub fn processes() -> Processes {
        Processes::default()
    }

    /// Joins the ranks that tools/launch, torchrun, Slurm, Open MPI, PMI, PMIx, Kubernetes, or
    /// RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe. [`NotFound`](crate::Code::NotFound)
    /// if nothing has started this process as a rank. Collective.
    ///
    /// A program for launchers, which also runs without one:
    ///
    /// ```
    /// use shardweave::{Code, Result, World};
    ///
    /// fn train(world: &World) -> Result<()> {
    ///     world.comm()?.barrier()
    /// }
    ///
    /// fn main() -> Result<()> {
    ///     match World::from_environment() {
    ///         Ok(world) => train(&world).map_err(|error| {
    ///             world.abort(error.message()).ok(); // the others learn it from here
    ///             error
    ///         }),
    ///         Err(error) if error.code() == Code::NotFound => World::spawn(2).run(train),
    ///         Err(error) => Err(error),
    ///     }
    /// }
    /// ```
    pub fn from_environment() -> Result<World> {
        World::processes().from_environment()
    }

    /// Joins the ranks that the caller describes. Collective.
    pub fn join(rendezvous: &Rendezvous) -> Result<World> {
        World::processes().join(rendezvous)
    }

    /// Ranks of this process for threads that the caller has already: a seat for each. A rank whose
    /// world and all that was made from it have been dropped has left; others that wait for it get
    /// [`Unavailable`](crate::Code::Unavailable).
    pub fn local(num_ranks: usize) -> Result<Vec<Seat>> {
        World::seats(num_ranks, None)
    }

    fn seats(num_ranks: usize, timeout: Option<Duration>) -> Result<Vec<Seat>> {
        let number = count(num_ranks).of("World::local")?;
        let mut options = sys::SWV_WORLD_OPTIONS_INIT;
        options.timeout_ms = milliseconds(timeout);
        let mut worlds = vec![ptr::null_mut(); num_ranks];
        call!(swv_world_create_local(number, &options, worlds.as_mut_ptr()))?;
        Ok(worlds
            .into_iter()
            .map(|world| Seat(World(NonNull::new(world).expect("one for every rank"))))
            .collect())
    }

    /// One rank of a world of any size that is not there: communication is counted, nothing moves.
    pub fn counting(rank: usize, num_ranks: usize) -> Result<World> {
        create!(swv_world_create_counting(
            count(rank).of("World::counting")?,
            count(num_ranks).of("World::counting")?
        ))
        .map(World)
    }

    /// Which rank this is.
    pub fn rank(&self) -> usize {
        get!(swv_world_rank(self.as_ptr()) -> i32).expect("a live world has a rank") as usize
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        get!(swv_world_size(self.as_ptr()) -> i32).expect("a live world has a size") as usize
    }

    /// Which rank this is among those of this machine.
    pub fn local_rank(&self) -> usize {
        get!(swv_world_local_rank(self.as_ptr()) -> i32).expect("a live world has a local rank")
            as usize
    }

    /// The group of all ranks.
    pub fn comm(&self) -> Result<Comm> {
        create!(swv_world_comm(self.as_ptr())).map(Comm::from_handle)
    }

    /// All ranks as a grid, row-major: the last dimension varies fastest.
    pub fn device_mesh<N: AsRef<str>>(&self, dims: &[(N, i64)]) -> Result<Mesh> {
        let dims = MeshDims::new(dims).of("World::device_mesh")?;
        create!(swv_mesh_create(self.as_ptr(), dims.raw.as_ptr(), dims.raw.len()))
            .map(Mesh::from_handle)
    }

    /// The same from text: `dp=2,tp=4`.
    pub fn parse_mesh(&self, text: &str) -> Result<Mesh> {
        let text = c_text(text, "mesh").of("World::parse_mesh")?;
        create!(swv_mesh_parse(self.as_ptr(), text.as_ptr())).map(Mesh::from_handle)
    }

    /// A grid of some of the ranks, row-major; this rank is among them.
    pub fn device_mesh_of<N: AsRef<str>>(&self, dims: &[(N, i64)], ranks: &[i64]) -> Result<Mesh> {
        let dims = MeshDims::new(dims).of("World::device_mesh_of")?;
        let ranks = rank_numbers(ranks).of("World::device_mesh_of")?;
        create!(swv_mesh_create_from_ranks(
            self.as_ptr(),
            dims.raw.as_ptr(),
            dims.raw.len(),
            ranks.as_ptr(),
            ranks.len(),
        ))
        .map(Mesh::from_handle)
    }

    /// What all groups of this rank issued so far.
    pub fn counters(&self) -> Result<CommCounters> {
        CommCounters::get(|out, capacity, number| {
            // SAFETY: see the top of ffi.rs.
            unsafe { sys::swv_world_counters(self.as_ptr(), out, capacity, number) }
        })
    }

    /// The last operations of every group of this rank, as JSON.
    pub fn flight_record(&self) -> Result<String> {
        text!(swv_world_flight_record(self.as_ptr()))
    }

    /// Something that breaks all groups of this world from any thread: pending and later operations
    /// fail with [`Aborted`](crate::Code::Aborted). It counts as made from this world.
    pub fn aborter(&self) -> Aborter {
        Aborter(self.clone())
    }

    /// Tells the other ranks that this one gives up, and why: their operations fail with
    /// [`Aborted`](crate::Code::Aborted). [`Threads::run`] does it for a body that fails.
    pub fn abort(&self, reason: &str) -> Result<()> {
        let reason = c_text(reason, "reason").of("World::abort")?;
        call!(swv_world_abort(self.as_ptr(), reason.as_ptr()))
    }
}

/// A second handle to the same rank's world.
impl Clone for World {
    fn clone(&self) -> World {
        World(create!(swv_world_share(self.as_ptr())).expect("a live handle can be shared"))
    }
}

/// "rank 2 of 4".
impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank(), self.size())
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "World({self})")
    }
}

impl Threads {
    /// How long a rank waits for the others; five minutes unless this is called.
    pub fn timeout(mut self, timeout: Duration) -> Threads {
        self.timeout = Some(timeout);
        self
    }

    /// Runs `body` on a thread per rank, waits for all, and gives what they returned, in the order
    /// of the ranks. The threads are called as their ranks are, "rank 2 of 4".
    ///
    /// If one fails or panics, the others' collectives fail, naming it; the result is the failure
    /// that came first, with its rank in the message. While others still run, that failure is
    /// written to stderr at once: they may be busy for long, or hang.
    ///
    /// ```
    /// use shardweave::{Code, Error, World};
    /// let error = World::threads(2)
    ///     .run(|world| match world.rank() {
    ///         1 => Err(Error::new(Code::DataLoss, "the dog ate it")),
    ///         _ => world.comm()?.barrier(), // fails too: nobody waits for rank 1
    ///     })
    ///     .unwrap_err();
    /// assert_eq!(error.code(), Code::DataLoss);
    /// assert!(error.message().contains("rank 1") && error.message().contains("ate it"));
    /// ```
    pub fn run<T, F>(&self, body: F) -> Result<Vec<T>>
    where
        F: Fn(&World) -> Result<T> + Sync,
        T: Send,
    {
        let seats = World::seats(self.num_ranks, self.timeout).of("World::threads")?;
        let run = Run { running: AtomicUsize::new(seats.len()), first_failure: Mutex::default() };
        let results = thread::scope(|scope| {
            let mut threads = Vec::with_capacity(seats.len());
            for (rank, seat) in seats.into_iter().enumerate() {
                let world = seat.0.clone();
                let (run, body) = (&run, &body);
                let name = format!("rank {rank} of {}", self.num_ranks);
                let thread = thread::Builder::new()
                    .name(name)
                    .spawn_scoped(scope, move || run.rank(seat.take(), body));
                match thread {
                    Ok(thread) => threads.push(thread),
                    Err(error) => {
                        let error = Error::new(Code::ResourceExhausted, error.to_string());
                        run.failed(&world, error.context("no thread"));
                        break; // the other seats end here
                    }
                }
            }
            threads.into_iter().map(|thread| thread.join().unwrap_or(None)).collect()
        });
        let mut first = run.first_failure.lock().unwrap_or_else(PoisonError::into_inner);
        match first.take() {
            Some(error) => Err(error),
            None => Ok(Option::expect(results, "no rank failed")),
        }
    }
}

/// What the threads of a run share.
struct Run {
    running: AtomicUsize,
    first_failure: Mutex<Option<Error>>,
}

impl Run {
    /// What one thread does.
    fn rank<T>(&self, world: World, body: &(impl Fn(&World) -> Result<T> + Sync)) -> Option<T> {
        let result = without_panics(|| body(&world));
        self.running.fetch_sub(1, Ordering::AcqRel);
        result.map_err(|error| self.failed(&world, error)).ok()
    }

    /// Tells the user if this is the first failure, and the other ranks.
    fn failed(&self, world: &World, error: Error) {
        let error = Error::new(error.code(), error.message().replace('\0', "\\0"));
        let rank = world.rank();
        let mut first = self.first_failure.lock().unwrap_or_else(PoisonError::into_inner);
        if first.is_none() {
            if self.running.load(Ordering::Acquire) > 0 {
                say(&format!("{world} failed: {error}"));
            }
            *first = Some(error.clone().context(format_args!("rank {rank}")).of_rank(rank));
        }
        drop(first);
        // It fails only if they know already.
        world.abort(&format!("rank {rank} failed: {error}")).ok();
    }
}

/// To stderr, if there is one.
pub(crate) fn say(text: &str) {
    without_panics(|| {
        eprintln!("{text}");
        Ok(())
    })
    .ok();
}

impl Processes {
    /// How long a rank waits for the others; five minutes unless this is called.
    pub fn timeout(mut self, timeout: Duration) -> Processes {
        self.timeout = Some(timeout);
        self
    }

    /// Over which interface this machine is reached. Without: loopback if all ranks are on one
    /// host, else by the host's name.
    pub fn network_interface(mut self, name: impl Into<String>) -> Processes {
        self.network_interface = Some(name.into());
        self
    }

    /// How processes communicate: "gloo", as without, or "nccl" between GPUs.
    pub fn backend(mut self, name: impl Into<String>) -> Processes {
        self.backend = Some(name.into());
        self
    }

    /// This process's GPU, as CUDA numbers those that are visible. Without: with backend "nccl" that
    /// of the local rank, with "gloo" none. With "gloo" a GPU's memory goes by way of the host:
    /// slowly, but several processes may have one GPU.
    pub fn device(mut self, gpu: Device) -> Processes {
        self.device = Some(gpu);
        self
    }

    /// See [`World::from_environment`].
    #[allow(clippy::wrong_self_convention)] // a builder's last word
    pub fn from_environment(&self) -> Result<World> {
        if spawn::is_on_its_way() {
            return Err(Error::new(
                Code::NotFound,
                "World::from_environment: World::spawn has started this process, which has not \
                 come to that call yet",
            ));
        }
        self.with_options("World::from_environment", |options| {
            create!(swv_world_from_environment(options))
        })
    }

    /// See [`World::join`].
    pub fn join(&self, rendezvous: &Rendezvous) -> Result<World> {
        let place: CString;
        let run = rendezvous
            .run
            .as_deref()
            .map(|name| c_text(name, "run"))
            .transpose()
            .of("World::join")?;
        let mut raw = sys::SWV_RENDEZVOUS_INIT;
        raw.run = run.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
        raw.rank = count(rendezvous.rank).of("World::join")?;
        raw.world_size = count(rendezvous.world_size).of("World::join")?;
        if let Some(local_rank) = rendezvous.local_rank {
            raw.local_rank = count(local_rank).of("World::join")?;
        }
        match &rendezvous.at {
            MeetingPoint::File(path) => {
                let path = path
                    .to_str()
                    .ok_or_else(|| Error::invalid(format!("path {path:?} is not UTF-8")))
                    .of("World::join")?;
                place = c_text(path, "path").of("World::join")?;
                raw.file = place.as_ptr();
            }
            MeetingPoint::Address { host, port } => {
                place = c_text(host, "host").of("World::join")?;
                raw.host = place.as_ptr();
                raw.port = i32::from(*port);
            }
        }
        self.with_options("World::join", |options| create!(swv_world_join(&raw, options)))
    }

    fn with_options(
        &self,
        caller: &str,
        make: impl FnOnce(*const sys::swv_world_options) -> Result<NonNull<sys::swv_world>>,
    ) -> Result<World> {
        let interface = self
            .network_interface
            .as_deref()
            .map(|name| c_text(name, "network interface"))
            .transpose()
            .of(caller)?;
        let backend =
            self.backend.as_deref().map(|name| c_text(name, "backend")).transpose().of(caller)?;
        let mut options = sys::SWV_WORLD_OPTIONS_INIT;
        options.timeout_ms = milliseconds(self.timeout);
        if let Some(backend) = &backend {
            options.backend = backend.as_ptr();
        }
        if let Some(gpu) = self.device {
            options.device = gpu.to_raw();
        }
        if let Some(interface) = &interface {
            options.network_interface = interface.as_ptr();
        }
        make(&options).map(World)
    }
}

impl Seat {
    /// This thread is the rank from now on.
    ///
    /// ```
    /// use shardweave::World;
    /// let threads: Vec<_> = World::local(2)?
    ///     .into_iter()
    ///     .map(|seat| std::thread::spawn(|| seat.take().comm()?.barrier()))
    ///     .collect();
    /// for thread in threads {
    ///     thread.join().unwrap()?;
    /// }
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn take(self) -> World {
        self.0
    }
}

impl Aborter {
    /// Breaks all groups of the world.
    pub fn abort(&self, reason: &str) -> Result<()> {
        self.0.abort(reason)
    }
}

pub(crate) fn count(number: usize) -> Result<i32> {
    i32::try_from(number).map_err(|_| {
        Error::invalid(format!("number {number} is too large; wanted at most {}", i32::MAX))
    })
}

debug_by_name!(Aborter, Seat);
