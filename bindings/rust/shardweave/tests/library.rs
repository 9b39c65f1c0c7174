//! What happens where the library is missing, or is another one. Each case is a process of its own:
//! this test again, which says what it has got.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use shardweave::{
    build_info, live_handles, manual_seed, set_handle_checks, set_log, set_num_threads,
    HandleChecks, Layout, MeetingPoint, Op, Placement, Rendezvous, ScriptModule, SendTensor,
    Tensor, TensorOptions, World,
};

const TRIES: &str = "SHARDWEAVE_TEST_TRIES";

/// Everything of the crate that comes without a value that the library has made. Each may fail;
/// nothing may panic, abort or hang.
fn try_everything() -> Vec<String> {
    let mut errors = Vec::new();
    let mut expect = |what: &str, result: shardweave::Result<()>| match result {
        Ok(()) => panic!("{what} succeeded"),
        Err(error) => errors.push(error.to_string()),
    };
    let rendezvous =
        Rendezvous::new(0, 1, MeetingPoint::File(PathBuf::from("/proc/nowhere"))).run("first");
    expect("World::threads", World::threads(2).run(|_| Ok(())).map(drop));
    expect("World::local", World::local(2).map(drop));
    expect("World::counting", World::counting(0, 2).map(drop));
    expect("World::join", World::join(&rendezvous).map(drop));
    expect("World::from_environment", World::from_environment().map(drop));
    expect("Tensor::ones", Tensor::ones(&[2]).map(drop));
    expect("Tensor::from_slice", Tensor::from_slice(&[1.0f32], &[1]).map(drop));
    expect("SendTensor::from_slice", SendTensor::from_slice(&[1.0f32], &[1]).map(drop));
    expect("Tensor::arange", Tensor::arange(3).map(drop));
    expect("TensorOptions::rand", TensorOptions::new().rand(&[2]).map(drop));
    expect("Op::find", Op::find("aten::add").map(drop));
    expect("Layout::new", Layout::new(&[Placement::Replicate]).map(drop));
    expect("Layout::parse", Layout::parse("[R]").map(drop));
    expect("Layout::parse", "R".parse::<Placement>().map(drop));
    expect("ScriptModule::load", ScriptModule::load("/proc/nowhere").map(drop));
    expect("manual_seed", manual_seed(1));
    expect("set_num_threads", set_num_threads(1));
    expect("build_info", build_info().map(drop));
    expect("set_handle_checks", set_handle_checks(HandleChecks::Report));
    expect("set_log", set_log(Some(Box::new(|_| ()))));
    expect("set_log", set_log(None));
    assert_eq!(live_handles(), None);
    // What needs no library works.
    assert_eq!(
        (shardweave::DType::C128.size(), Placement::Shard(1).to_string()),
        (16, "S(1)".into())
    );
    errors
}

/// What a process says that finds its library in `folder`.
fn errors_with(folder: &Path, test: &str) -> String {
    let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(TRIES, "1")
        .env("SHARDWEAVE_HOME", folder)
        .env("LD_LIBRARY_PATH", format!("{}:{path}", folder.display()))
        .output()
        .unwrap();
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    out
}

/// In a process of its own: says the errors. True if this is one.
fn is_child() -> bool {
    if std::env::var_os(TRIES).is_none() {
        return false;
    }
    for error in try_everything() {
        println!("\nerror: {error}");
    }
    true
}

/// A library with these functions, of this version, that does nothing else.
fn stub(name: &str, version: i32, functions: &[&str]) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).unwrap();
    let mut text = format!("int swv_version(void) {{ return {version}; }}\n");
    for function in functions.iter().filter(|function| **function != "swv_version") {
        writeln!(text, "void {function}(void) {{ __builtin_trap(); }}").unwrap();
    }
    fs::write(folder.join("stub.c"), text).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let library = folder.join(soname());
    let status = Command::new(compiler)
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(format!("-Wl,-soname,{}", soname()))
        // With the symbol versions that programs ask for.
        .arg(concat!(
            "-Wl,--version-script=",
            env!("CARGO_MANIFEST_DIR"),
            "/../../../capi/shardweave.lds"
        ))
        .arg(folder.join("stub.c"))
        .status()
        .expect("there is a C compiler");
    assert!(status.success());
    folder
}

fn soname() -> String {
    let version = shardweave_sys::SWV_VERSION;
    format!("libshardweave.so.{}.{}", version / 1_000_000, version / 1000 % 1000)
}

/// All that bindings.rs declares.
fn functions() -> Vec<&'static str> {
    let names = shardweave_sys::DECLARATIONS
        .split("    pub fn ")
        .skip(1)
        .map(|rest| rest.split('(').next().unwrap());
    let names: Vec<_> = names.collect();
    assert!(names.len() > 150, "{names:?}");
    names
}

/// The functions that were called: the errors' first words.
fn callers(out: &str) -> Vec<&str> {
    out.lines().filter_map(|line| line.strip_prefix("error: ")?.split(": ").next()).collect()
}

const CALLERS: [&str; 21] = [
    "World::threads",
    "World::local",
    "World::counting",
    "World::join",
    "World::from_environment",
    "Tensor::ones",
    "Tensor::from_slice",
    "SendTensor::from_slice",
    "Tensor::arange",
    "Tensor::rand",
    "Op::find",
    "Layout::new",
    "Layout::parse",
    "Layout::parse",
    "ScriptModule::load",
    "manual_seed",
    "set_num_threads",
    "build_info",
    "set_handle_checks",
    "set_log",
    "set_log",
];

#[test]
fn a_library_of_another_version() {
    if is_child() {
        return;
    }
    let version = shardweave_sys::SWV_VERSION + 1000; // the next minor one
    let out = errors_with(&stub("other", version, &functions()), "a_library_of_another_version");
    assert_eq!(callers(&out), CALLERS, "{out}");
    let wanted = format!(
        "is of version 0.{}.0; this crate declares version 0.{}.{}: wanted 0.{}.x (FailedPrecondition)",
        version / 1000 % 1000,
        version / 1000 % 1000 - 1,
        version % 1000,
        version / 1000 % 1000 - 1,
    );
    assert_eq!(out.matches(&wanted).count(), CALLERS.len(), "{wanted}\n{out}");
}

#[cfg(feature = "load-dynamic")]
#[test]
fn no_library() {
    if is_child() {
        return;
    }
    let out = errors_with(Path::new("/proc/nowhere"), "no_library");
    assert_eq!(callers(&out), CALLERS, "{out}");
    let wanted = format!(
        "SHARDWEAVE_HOME is '/proc/nowhere'; wanted a folder with lib/{} or libshardweave.so in it \
         (FailedPrecondition)",
        soname()
    );
    assert_eq!(out.matches(&wanted).count(), CALLERS.len(), "{out}");
}

#[cfg(feature = "load-dynamic")]
#[test]
fn a_library_that_lacks_a_function() {
    if is_child() {
        return;
    }
    let (version, mut functions) = (shardweave_sys::SWV_VERSION, functions());
    functions.retain(|name| *name != "swv_tensor_ones" && *name != "swv_mesh_create");
    let folder = stub("lacks", version, &functions);
    let out = errors_with(&folder, "a_library_that_lacks_a_function");
    assert_eq!(callers(&out), CALLERS, "{out}");
    let wanted = "lacks swv_mesh_create and 1 more (FailedPrecondition)";
    assert_eq!(out.matches(wanted).count(), CALLERS.len(), "{out}");
}

#[cfg(feature = "load-dynamic")]
#[test]
fn a_file_that_is_no_library() {
    if is_child() {
        return;
    }
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("text");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("libshardweave.so"), "not one\n").unwrap();
    let out = errors_with(&folder, "a_file_that_is_no_library");
    assert_eq!(callers(&out), CALLERS, "{out}");
    let wanted = format!("cannot load {}: {}/libshardweave.so: ", soname(), folder.display());
    assert_eq!(out.matches(&wanted).count(), CALLERS.len(), "{out}");
}
