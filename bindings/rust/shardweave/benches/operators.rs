//! What an operator costs through this crate over the same call through the C interface, in
//! microseconds, and what it allocates on the way in.
//!
//!     cargo bench --bench operators               # a table
//!     cargo bench --bench operators -- --json     # one line
//!
//! The operators and their names are those of `./bazelw run //bench:capi`, which says what the C
//! interface costs over C++. With that one's line of JSON in a file, `--capi=FILE` adds the two up:
//! what Rust costs over C++. `./bazelw run -c opt //bench:capi_rust` does all that.
//!
//! Both kinds of calls alternate in one run; the figure is the difference of the medians. Time is
//! the thread's own: a machine that is busy with other things matters less. One rank, one thread.

#![warn(unsafe_op_in_unsafe_fn)]

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use shardweave::{args, no_grad, Arg, DispatchCounters, Op, Result, Tensor, TensorOptions, World};
use shardweave_sys as sys;

/// What Rust may add to a call, with what C adds, over C++.
const BOUND_US: f64 = 0.3;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: the system's, and a number.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, memory: Memory) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller says.
        unsafe { System.alloc(memory) }
    }

    unsafe fn dealloc(&self, data: *mut u8, memory: Memory) {
        // SAFETY: as the caller says.
        unsafe { System.dealloc(data, memory) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[repr(C)]
struct Timespec {
    seconds: i64,
    nanoseconds: i64,
}

extern "C" {
    fn clock_gettime(clock: i32, time: *mut Timespec) -> i32;
}

/// Of this thread.
fn cpu_seconds() -> f64 {
    const CLOCK_THREAD_CPUTIME_ID: i32 = 3;
    let mut now = Timespec { seconds: 0, nanoseconds: 0 };
    // SAFETY: writes to `now`.
    unsafe { clock_gettime(CLOCK_THREAD_CPUTIME_ID, &mut now) };
    now.seconds as f64 + 1e-9 * now.nanoseconds as f64
}

const BATCHES: usize = 201;
const CALLS: usize = 300;

/// In microseconds per call.
fn batch(body: &mut dyn FnMut()) -> f64 {
    let start = cpu_seconds();
    for _ in 0..CALLS {
        body();
    }
    (cpu_seconds() - start) / CALLS as f64 * 1e6
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Row {
    name: String,
    c_us: f64,
    rust_us: f64,
    allocations: u64,
}

impl Row {
    fn overhead_us(&self) -> f64 {
        self.rust_us - self.c_us
    }
}

fn compare(name: String, c: &mut dyn FnMut(), rust: &mut dyn FnMut()) -> Row {
    batch(c);
    batch(rust);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    rust();
    let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
    let (mut c_us, mut rust_us) = (Vec::new(), Vec::new());
    for _ in 0..BATCHES {
        c_us.push(batch(c));
        rust_us.push(batch(rust));
    }
    Row { name, c_us: median(c_us), rust_us: median(rust_us), allocations }
}

/// The call as a C program makes it: arguments that stand ready, and a result that is freed.
fn c_call(name: &str, arguments: &[Arg<'_>]) -> impl FnMut() {
    let name = std::ffi::CString::new(name).expect("no NUL");
    // An Arg is a swv_value and nothing else.
    let values: Vec<sys::swv_value> =
        // SAFETY: as said; what they point to outlives the benchmark of them.
        unsafe { std::slice::from_raw_parts(arguments.as_ptr().cast(), arguments.len()) }.to_vec();
    let mut op = ptr::null_mut();
    // SAFETY: the operator lives as long as the program.
    assert!(unsafe { sys::swv_op_find(name.as_ptr(), &mut op) }.is_null());
    move || {
        let mut result = sys::SWV_NONE;
        // SAFETY: the operator has one result, a tensor.
        unsafe {
            let status = sys::swv_op_call(
                op,
                sys::SWV_MODE_NO_GRAD,
                values.as_ptr(),
                values.len(),
                &mut result,
                1,
                ptr::null_mut(),
            );
            assert!(status.is_null());
            sys::swv_tensor_free(result.as_.tensor);
        }
    }
}

fn compare_on(what: &str, x: &Tensor, y: &Tensor, bias: &Tensor) -> Result<Vec<Row>> {
    let pair = [x.clone(), y.clone()];
    let mut rows = Vec::new();
    macro_rules! row {
        ($name:literal, $op:literal, $arguments:expr, $call:expr) => {{
            let mut rust = || drop($call.expect("it fits"));
            let mut c = c_call($op, $arguments);
            rows.push(compare(format!("{what}{}", $name), &mut c, &mut rust));
        }};
    }
    let (add, mm, addcmul) =
        (Op::find("aten::add")?, Op::find("aten::mm")?, Op::find("aten::addcmul")?);
    row!("add", "aten::add.Tensor", args![x, y], x + y);
    row!("add, all overloads", "aten::add", args![x, y], add.call::<Tensor>(args![x, y]));
    row!("mul by a number", "aten::mul.Scalar", args![x, 2.0], x * 2.0);
    row!("mm", "aten::mm", args![x, y], mm.call::<Tensor>(args![x, y]));
    row!("linear with bias", "aten::linear", args![x, y, bias], x.linear(y, Some(bias)));
    row!("sum over a dimension", "aten::sum.dim_IntList", args![x, &[1]], x.sum_dims(&[1], false));
    row!("cat of two", "aten::cat", args![&pair], Tensor::cat(&pair, 0));
    row!(
        "addcmul, 4 arguments",
        "aten::addcmul",
        args![x, x, y, 0.5],
        addcmul.call::<Tensor>(args![x, x, y, 0.5])
    );
    Ok(rows)
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let json = arguments.iter().any(|argument| argument == "--json");
    let capi = arguments.iter().find_map(|argument| argument.strip_prefix("--capi="));
    let c_over_cpp = capi.map(|file| {
        let text = std::fs::read_to_string(file).expect("the file of --capi can be read");
        serde_json::from_str::<serde_json::Value>(&text).expect("it is the JSON of bench:capi")
    });
    let c_over_cpp = |name: &str| -> Option<f64> {
        let rows = c_over_cpp.as_ref()?["operators"].as_array()?;
        rows.iter().find(|row| row["name"] == name)?["overhead_us"].as_f64()
    };

    shardweave::set_num_threads(1)?;
    let seat = World::local(1)?.remove(0);
    let world = seat.take();
    let mesh = world.device_mesh(&[("x", 1)])?;
    let mut rows = Vec::new();
    for sharded in [false, true] {
        let make = |sizes: &[i64]| match sharded {
            true => TensorOptions::new().on(&mesh, "[R]")?.randn(sizes),
            false => Tensor::randn(sizes),
        };
        let (x, y, bias) = (make(&[8, 8])?, make(&[8, 8])?, make(&[8])?);
        let what = if sharded { "sharded: " } else { "plain: " };
        rows.extend(no_grad(|| compare_on(what, &x, &y, &bias))?);
    }
    assert_ne!(mesh.dispatch_counters()?, DispatchCounters::default(), "they were sharded");

    let worst = rows
        .iter()
        .map(|row| row.overhead_us() + c_over_cpp(&row.name).unwrap_or(0.0))
        .fold(f64::MIN, f64::max);
    if json {
        let operators: Vec<_> = rows
            .iter()
            .map(|row| {
                serde_json::json!({
                    "name": row.name,
                    "c_us": row.c_us,
                    "rust_us": row.rust_us,
                    "overhead_us": row.overhead_us(),
                    "c_over_cpp_us": c_over_cpp(&row.name),
                    "rust_allocations": row.allocations,
                })
            })
            .collect();
        let line = serde_json::json!({
            "bound_us": BOUND_US,
            "operators": operators,
            "worst_overhead_us": worst,
        });
        println!("{line}");
        return Ok(());
    }
    for row in &rows {
        println!(
            "{:<30} C {:7.3} us  Rust {:7.3} us  over {:6.3} us  allocations {}",
            row.name,
            row.c_us,
            row.rust_us,
            row.overhead_us(),
            row.allocations
        );
    }
    println!(
        "worst, {}: {worst:.3} us (bound {BOUND_US})",
        if capi.is_some() { "over C++" } else { "over C" }
    );
    Ok(())
}
