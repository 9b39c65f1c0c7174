use std::ffi::CString;
use std::marker::PhantomData;
use std::mem::{self, ManuallyDrop};
use std::ptr::{self, NonNull};
use std::time::Duration;

use shardweave_sys as sys;

use crate::dtype::ReduceOp;
use crate::element::Element;
use crate::error::{Error, Of, Result};
use crate::ffi::{c_text, check, milliseconds};
use crate::generated::OP_NAMES;

handle!(CommHandle, swv_comm, swv_comm_free);
handle!(Work, swv_work, swv_work_free);

/// A group of ranks that exchange bytes.
///
/// All ranks of the group call its functions, in the same order, except where it says otherwise.
/// Ranks that call different things all get
/// [`FailedPrecondition`](crate::Code::FailedPrecondition), which names both calls; a rank that
/// does not come is [`DeadlineExceeded`](crate::Code::DeadlineExceeded). An error that is not of
/// this rank's arguments alone breaks the group.
///
/// ```
/// use shardweave::{ReduceOp, World};
/// World::threads(3).run(|world| {
///     let comm = world.comm()?;
///     let mut data = [world.rank() as f32, 1.0];
///     comm.all_reduce(&mut data, ReduceOp::Sum)?;
///     assert_eq!(data, [3.0, 3.0]);
///     Ok(())
/// })?;
/// # Ok::<(), shardweave::Error>(())
/// ```
///
/// Belongs to its rank: neither `Send` nor `Sync`, because the order of its calls has to be the
/// same on all ranks, and one thread at a time may issue them.
pub struct Comm {
    handle: CommHandle,
    timeout_ms: i64,
    tag: CString,
}

/// Operations that a rank issued, and their bytes: of the larger of the two buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommCounter {
    /// How many.
    pub calls: i64,
    /// Together.
    pub bytes: i64,
}

impl std::ops::Sub for CommCounter {
    type Output = CommCounter;
    fn sub(self, other: CommCounter) -> CommCounter {
        CommCounter { calls: self.calls - other.calls, bytes: self.bytes - other.bytes }
    }
}

/// What a rank issued, by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommCounters {
    /// In the order of [`OP_NAMES`].
    pub by_op: Vec<CommCounter>,
}

impl CommCounters {
    pub(crate) fn get(
        fill: impl Fn(*mut sys::swv_comm_counter, usize, *mut usize) -> *mut sys::swv_status,
    ) -> Result<CommCounters> {
        let mut raw = [sys::swv_comm_counter { calls: 0, bytes: 0 }; OP_NAMES.len()];
        let mut count = 0;
        check(fill(raw.as_mut_ptr(), raw.len(), &mut count))?;
        let one = |c: &sys::swv_comm_counter| CommCounter { calls: c.calls, bytes: c.bytes };
        Ok(CommCounters { by_op: raw.iter().take(count).map(one).collect() })
    }

    /// By the name of the kind, "all_reduce"; nothing for a name that is none.
    pub fn of(&self, op: &str) -> CommCounter {
        let index = OP_NAMES.iter().position(|name| *name == op);
        index.and_then(|i| self.by_op.get(i)).copied().unwrap_or_default()
    }

    /// What came after `before`.
    pub fn since(&self, before: &CommCounters) -> CommCounters {
        let by_op = self.by_op.iter().zip(&before.by_op).map(|(now, then)| *now - *then);
        CommCounters { by_op: by_op.collect() }
    }

    /// All kinds together.
    pub fn total(&self) -> CommCounter {
        self.by_op.iter().fold(CommCounter::default(), |sum, c| CommCounter {
            calls: sum.calls + c.calls,
            bytes: sum.bytes + c.bytes,
        })
    }
}

/// An operation under way, with the memory that it works on.
///
/// Dropped before it is done, it waits; if the operation has failed so that its memory may still be
/// in use, that memory is never freed.
///
/// Belongs to its rank: neither `Send` nor `Sync`.
#[must_use = "nothing says whether the operation succeeded but wait()"]
pub struct Pending<T: Element> {
    work: Work,
    data: ManuallyDrop<Vec<T>>,
}

impl<T: Element> Pending<T> {
    /// Whether it is done; never blocks. True also if it failed.
    pub fn is_done(&self) -> Result<bool> {
        Ok(get!(swv_work_is_done(self.work.as_ptr()) -> i32)? == 1)
    }

    /// Waits until it is done or its deadline is over, and gives the memory back.
    pub fn wait(self) -> Result<Vec<T>> {
        let mut this = ManuallyDrop::new(self);
        let result = call!(swv_work_wait(this.work.as_ptr()));
        let done = this.is_done() == Ok(true);
        // SAFETY: `this` is not used after this line, and its own drop does not run.
        let (work, data) = unsafe { (ptr::read(&this.work), ManuallyDrop::take(&mut this.data)) };
        drop(work);
        match (result, done) {
            (Ok(()), _) => {
                let mut data = data;
                // SAFETY: the vector's own memory; the operation is over.
                unsafe { T::settle(data.as_mut_ptr(), data.len()) };
                Ok(data)
            }
            (Err(error), true) => Err(error),
            (Err(error), false) => {
                mem::forget(data); // in use for who knows how long
                Err(error)
            }
        }
    }
}

impl<T: Element> Drop for Pending<T> {
    fn drop(&mut self) {
        let waited = call!(swv_work_wait(self.work.as_ptr()));
        if waited.is_ok() || self.is_done() == Ok(true) {
            // SAFETY: nobody uses the memory any more, and nobody sees `data` after this.
            unsafe { ManuallyDrop::drop(&mut self.data) }
        }
    }
}

fn input<T: Element>(data: &[T]) -> sys::swv_buffer {
    buffer(data.as_ptr() as *mut T, data.len())
}

fn output<T: Element>(data: &mut [T]) -> Output<'_, T> {
    Output { raw: buffer(data.as_mut_ptr(), data.len()), _data: PhantomData }
}

/// Memory that a call writes to before it returns; what it has written is made values of `T` then,
/// also if the call has failed.
struct Output<'a, T: Element> {
    raw: sys::swv_buffer,
    _data: PhantomData<&'a mut [T]>,
}

impl<T: Element> Drop for Output<'_, T> {
    fn drop(&mut self) {
        // SAFETY: a slice that is borrowed mutably for as long as this lives; the call is over.
        unsafe { T::settle(self.raw.data.cast(), self.raw.count as usize) }
    }
}

fn buffer<T: Element>(data: *mut T, len: usize) -> sys::swv_buffer {
    sys::swv_buffer {
        data: data.cast(),
        count: len as i64,
        dtype: T::DTYPE as i32,
        ..sys::SWV_BUFFER_INIT
    }
}

/// Ranks as the C interface counts them.
pub(crate) fn rank_numbers(ranks: &[i64]) -> Result<Vec<i32>> {
    let number = |rank: &i64| {
        i32::try_from(*rank).map_err(|_| Error::invalid(format!("rank {rank} is no rank")))
    };
    ranks.iter().map(number).collect()
}

pub(crate) fn widened(ranks: Vec<i32>) -> Vec<i64> {
    ranks.into_iter().map(i64::from).collect()
}

fn rank_number(rank: usize) -> Result<i32> {
    i32::try_from(rank).map_err(|_| Error::invalid(format!("rank {rank} is no rank")))
}

impl Comm {
    pub(crate) fn from_handle(handle: NonNull<sys::swv_comm>) -> Comm {
        Comm { handle: CommHandle(handle), timeout_ms: 0, tag: CString::default() }
    }

    fn as_ptr(&self) -> *mut sys::swv_comm {
        self.handle.as_ptr()
    }

    /// An operation of this kind, with nothing but this value's deadline and tag.
    fn operation(&self, kind: i32) -> sys::swv_collective {
        sys::swv_collective {
            kind,
            timeout_ms: self.timeout_ms,
            tag: self.tag.as_ptr(),
            ..sys::SWV_COLLECTIVE_INIT
        }
    }

    /// Issues the operation and waits.
    fn run(&self, operation: &sys::swv_collective) -> Result<()> {
        call!(swv_comm_start(self.as_ptr(), operation, ptr::null_mut()))
    }

    fn check_counts(&self, what: &str, counts: &[i64]) -> Result<()> {
        let size = self.size()?;
        if counts.len() as i64 == size {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "Comm::all_to_all_v: argument '{what}' has {} numbers; wanted {size}, one for every rank \
             of the group",
            counts.len()
        )))
    }

    /// The same group with another deadline for what is called through this value.
    pub fn with_timeout(&self, timeout: Duration) -> Result<Comm> {
        Ok(Comm { timeout_ms: milliseconds(Some(timeout)), ..self.share()? })
    }

    /// The same group with a tag for what is called through this value; errors and records show it.
    pub fn with_tag(&self, tag: &str) -> Result<Comm> {
        Ok(Comm {
            tag: c_text(tag, "tag").of("Comm::with_tag")?,
            ..self.share().of("Comm::with_tag")?
        })
    }

    fn share(&self) -> Result<Comm> {
        let handle = CommHandle(create!(swv_comm_share(self.as_ptr()))?);
        Ok(Comm { handle, timeout_ms: self.timeout_ms, tag: self.tag.clone() })
    }

    /// This rank in the group.
    pub fn rank(&self) -> Result<i64> {
        Ok(i64::from(get!(swv_comm_rank(self.as_ptr()) -> i32)?))
    }

    /// How many ranks are in it.
    pub fn size(&self) -> Result<i64> {
        Ok(i64::from(get!(swv_comm_size(self.as_ptr()) -> i32)?))
    }

    /// Its name.
    pub fn name(&self) -> Result<String> {
        text!(swv_comm_name(self.as_ptr()))
    }

    /// What moves the bytes: "inproc", "gloo", ...
    pub fn backend(&self) -> Result<String> {
        text!(swv_comm_backend(self.as_ptr()))
    }

    /// The world rank of each of its ranks.
    pub fn world_ranks(&self) -> Result<Vec<i64>> {
        Ok(widened(list!(swv_comm_world_ranks(self.as_ptr()) -> i32)?))
    }

    /// What was issued through this group.
    pub fn counters(&self) -> Result<CommCounters> {
        CommCounters::get(|out, capacity, count| {
            // SAFETY: see the top of ffi.rs.
            unsafe { sys::swv_comm_counters(self.as_ptr(), out, capacity, count) }
        })
    }

    /// Whether any rank says yes; the same answer on all of them. At the end of a step it is how they agree
    /// to end, whichever of them a batch system has told to:
    ///
    /// ```
    /// use std::sync::atomic::{AtomicBool, Ordering};
    /// use shardweave::World;
    /// let told = AtomicBool::new(false); // signal_hook::flag::register(SIGTERM, ...)
    /// World::threads(2).run(|world| {
    ///     for step in 0.. {
    ///         // ... train
    ///         if step == 3 && world.rank() == 1 {
    ///             told.store(true, Ordering::Relaxed);
    ///         }
    ///         if world.comm()?.any_rank(told.load(Ordering::Relaxed))? {
    ///             break; // save, on all ranks at the same step
    ///         }
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn any_rank(&self, says: bool) -> Result<bool> {
        let mut word = [i32::from(says)];
        self.all_reduce(&mut word, ReduceOp::Max).of("Comm::any_rank")?;
        Ok(word[0] != 0)
    }

    /// Every element becomes the reduction of all ranks' ones.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let data = output(data);
        let mut all_reduce = self.operation(sys::SWV_COLLECTIVE_ALL_REDUCE);
        (all_reduce.in_, all_reduce.out, all_reduce.reduce_op) = (&data.raw, &data.raw, op as i32);
        self.run(&all_reduce)
    }

    /// `out` becomes all ranks' `data`, in rank order.
    pub fn all_gather<T: Element>(&self, data: &[T], out: &mut [T]) -> Result<()> {
        let (data, out) = (input(data), output(out));
        let mut all_gather = self.operation(sys::SWV_COLLECTIVE_ALL_GATHER);
        (all_gather.in_, all_gather.out) = (&data, &out.raw);
        self.run(&all_gather)
    }

    /// The same with `counts[r]` elements from rank r.
    pub fn all_gather_v<T: Element>(
        &self,
        data: &[T],
        out: &mut [T],
        counts: &[i64],
    ) -> Result<()> {
        let (data, out) = (input(data), output(out));
        let mut all_gather = self.operation(sys::SWV_COLLECTIVE_ALL_GATHER_V);
        (all_gather.in_, all_gather.out) = (&data, &out.raw);
        (all_gather.out_counts, all_gather.num_counts) = (counts.as_ptr(), counts.len());
        self.run(&all_gather)
    }

    /// `out` becomes this rank's part of the reduction of all ranks' `data`.
    pub fn reduce_scatter<T: Element>(
        &self,
        data: &[T],
        out: &mut [T],
        op: ReduceOp,
    ) -> Result<()> {
        let (data, out) = (input(data), output(out));
        let mut scatter = self.operation(sys::SWV_COLLECTIVE_REDUCE_SCATTER);
        (scatter.in_, scatter.out, scatter.reduce_op) = (&data, &out.raw, op as i32);
        self.run(&scatter)
    }

    /// The same with `counts[r]` elements for rank r.
    pub fn reduce_scatter_v<T: Element>(
        &self,
        data: &[T],
        out: &mut [T],
        counts: &[i64],
        op: ReduceOp,
    ) -> Result<()> {
        let (data, out) = (input(data), output(out));
        let mut scatter = self.operation(sys::SWV_COLLECTIVE_REDUCE_SCATTER_V);
        (scatter.in_, scatter.out, scatter.reduce_op) = (&data, &out.raw, op as i32);
        (scatter.in_counts, scatter.num_counts) = (counts.as_ptr(), counts.len());
        self.run(&scatter)
    }

    /// Part r of `data` goes to rank r, part r of `out` came from rank r.
    pub fn all_to_all<T: Element>(&self, data: &[T], out: &mut [T]) -> Result<()> {
        let (data, out) = (input(data), output(out));
        let mut all_to_all = self.operation(sys::SWV_COLLECTIVE_ALL_TO_ALL);
        (all_to_all.in_, all_to_all.out) = (&data, &out.raw);
        self.run(&all_to_all)
    }

    /// The same with parts of `send_counts[r]` and `recv_counts[r]` elements.
    pub fn all_to_all_v<T: Element>(
        &self,
        data: &[T],
        send_counts: &[i64],
        out: &mut [T],
        recv_counts: &[i64],
    ) -> Result<()> {
        self.check_counts("send_counts", send_counts).of("Comm::all_to_all_v")?;
        self.check_counts("recv_counts", recv_counts).of("Comm::all_to_all_v")?;
        let (data, out) = (input(data), output(out));
        let mut all_to_all = self.operation(sys::SWV_COLLECTIVE_ALL_TO_ALL_V);
        (all_to_all.in_, all_to_all.out) = (&data, &out.raw);
        (all_to_all.in_counts, all_to_all.out_counts) =
            (send_counts.as_ptr(), recv_counts.as_ptr());
        all_to_all.num_counts = send_counts.len();
        self.run(&all_to_all)
    }

    /// Every rank's data becomes the root's.
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        let data = output(data);
        let mut broadcast = self.operation(sys::SWV_COLLECTIVE_BROADCAST);
        (broadcast.out, broadcast.peer) = (&data.raw, rank_number(root).of("Comm::broadcast")?);
        self.run(&broadcast)
    }

    /// As [`all_reduce`](Comm::all_reduce), but only the root has an `out`.
    pub fn reduce<T: Element>(
        &self,
        data: &[T],
        out: Option<&mut [T]>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let (data, out) = (input(data), out.map(output));
        let mut reduce = self.operation(sys::SWV_COLLECTIVE_REDUCE);
        reduce.in_ = &data;
        reduce.out = out.as_ref().map_or(ptr::null(), |out| &out.raw);
        (reduce.reduce_op, reduce.peer) = (op as i32, rank_number(root).of("Comm::reduce")?);
        self.run(&reduce)
    }

    /// As [`all_gather`](Comm::all_gather), but only the root has an `out`.
    pub fn gather<T: Element>(&self, data: &[T], out: Option<&mut [T]>, root: usize) -> Result<()> {
        let (data, out) = (input(data), out.map(output));
        let mut gather = self.operation(sys::SWV_COLLECTIVE_GATHER);
        gather.in_ = &data;
        gather.out = out.as_ref().map_or(ptr::null(), |out| &out.raw);
        gather.peer = rank_number(root).of("Comm::gather")?;
        self.run(&gather)
    }

    /// Part r of the root's `data` goes to rank r; only the root has `data`.
    pub fn scatter<T: Element>(
        &self,
        data: Option<&[T]>,
        out: &mut [T],
        root: usize,
    ) -> Result<()> {
        let (data, out) = (data.map(input), output(out));
        let mut scatter = self.operation(sys::SWV_COLLECTIVE_SCATTER);
        scatter.in_ = data.as_ref().map_or(ptr::null(), |data| data);
        (scatter.out, scatter.peer) = (&out.raw, rank_number(root).of("Comm::scatter")?);
        self.run(&scatter)
    }

    /// To the [`recv`](Comm::recv) of `peer` with the same `message_tag`, in order. Only these two
    /// call. `peer` may be this rank if its recv has been started before.
    pub fn send<T: Element>(&self, data: &[T], peer: usize, message_tag: i32) -> Result<()> {
        let data = input(data);
        let mut send =
            self.message(sys::SWV_COLLECTIVE_SEND, peer, message_tag).of("Comm::send")?;
        send.in_ = &data;
        self.run(&send)
    }

    /// From the [`send`](Comm::send) of `peer`. Only these two call.
    pub fn recv<T: Element>(&self, data: &mut [T], peer: usize, message_tag: i32) -> Result<()> {
        let data = output(data);
        let mut recv =
            self.message(sys::SWV_COLLECTIVE_RECV, peer, message_tag).of("Comm::recv")?;
        recv.out = &data.raw;
        self.run(&recv)
    }

    fn message(&self, kind: i32, peer: usize, message_tag: i32) -> Result<sys::swv_collective> {
        let peer = rank_number(peer)?;
        Ok(sys::swv_collective { peer, message_tag, ..self.operation(kind) })
    }

    /// Done when all ranks have called it.
    pub fn barrier(&self) -> Result<()> {
        self.run(&self.operation(sys::SWV_COLLECTIVE_BARRIER))
    }

    /// [`all_reduce`](Comm::all_reduce) while this rank does something else.
    ///
    /// ```
    /// use shardweave::{ReduceOp, World};
    /// World::threads(2).run(|world| {
    ///     let pending = world.comm()?.start_all_reduce(vec![1i64; 1000], ReduceOp::Sum)?;
    ///     // ... something else ...
    ///     assert_eq!(pending.wait()?, [2; 1000]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn start_all_reduce<T: Element>(&self, data: Vec<T>, op: ReduceOp) -> Result<Pending<T>> {
        let mut all_reduce = self.operation(sys::SWV_COLLECTIVE_ALL_REDUCE);
        all_reduce.reduce_op = op as i32;
        self.start(data, |data| sys::swv_collective { in_: data, out: data, ..all_reduce })
            .of("Comm::start_all_reduce")
    }

    /// [`broadcast`](Comm::broadcast) while this rank does something else.
    pub fn start_broadcast<T: Element>(&self, data: Vec<T>, root: usize) -> Result<Pending<T>> {
        let mut broadcast = self.operation(sys::SWV_COLLECTIVE_BROADCAST);
        broadcast.peer = rank_number(root).of("Comm::start_broadcast")?;
        self.start(data, |data| sys::swv_collective { out: data, ..broadcast })
            .of("Comm::start_broadcast")
    }

    /// [`send`](Comm::send) while this rank does something else.
    pub fn start_send<T: Element>(
        &self,
        data: Vec<T>,
        peer: usize,
        message_tag: i32,
    ) -> Result<Pending<T>> {
        let send = self.message(sys::SWV_COLLECTIVE_SEND, peer, message_tag);
        let send = send.of("Comm::start_send")?;
        self.start(data, |data| sys::swv_collective { in_: data, ..send }).of("Comm::start_send")
    }

    /// [`recv`](Comm::recv) while this rank does something else.
    pub fn start_recv<T: Element>(
        &self,
        data: Vec<T>,
        peer: usize,
        message_tag: i32,
    ) -> Result<Pending<T>> {
        let recv = self.message(sys::SWV_COLLECTIVE_RECV, peer, message_tag);
        let recv = recv.of("Comm::start_recv")?;
        self.start(data, |data| sys::swv_collective { out: data, ..recv }).of("Comm::start_recv")
    }

    /// Issues an operation on memory that the result keeps until it is done.
    fn start<T: Element>(
        &self,
        mut data: Vec<T>,
        operation: impl FnOnce(&sys::swv_buffer) -> sys::swv_collective,
    ) -> Result<Pending<T>> {
        let raw = buffer(data.as_mut_ptr(), data.len());
        let work = Work(create!(swv_comm_start(self.as_ptr(), &operation(&raw)))?);
        Ok(Pending { work, data: ManuallyDrop::new(data) })
    }

    /// A new group per color, of the ranks that gave it, ordered by key, then by rank. A rank
    /// without a color is in none.
    pub fn split(&self, color: Option<u16>, key: i32, name: &str) -> Result<Option<Comm>> {
        let (color, name) = (color.map_or(-1, i32::from), c_text(name, "name").of("Comm::split")?);
        let handle = create_or_none!(swv_comm_split(self.as_ptr(), color, key, name.as_ptr()))?;
        Ok(handle.map(Comm::from_handle))
    }

    /// The group of `members`, ranks of this one in the order of the new one. Only they call.
    pub fn subgroup(&self, members: &[i64], name: &str) -> Result<Comm> {
        let name = c_text(name, "name").of("Comm::subgroup")?;
        let members = rank_numbers(members).of("Comm::subgroup")?;
        create!(swv_comm_subgroup(self.as_ptr(), members.as_ptr(), members.len(), name.as_ptr(),))
            .map(Comm::from_handle)
    }

    /// Breaks this group and those made from it, on all ranks where the backend can. Only one rank
    /// has to call.
    pub fn abort(&self, reason: &str) -> Result<()> {
        let reason = c_text(reason, "reason").of("Comm::abort")?;
        call!(swv_comm_abort(self.as_ptr(), reason.as_ptr()))
    }

    /// Success, or the error that broke the group.
    pub fn health(&self) -> Result<()> {
        call!(swv_comm_health(self.as_ptr()))
    }
}

debug_by_name!(Comm, Pending<T: Element>);
