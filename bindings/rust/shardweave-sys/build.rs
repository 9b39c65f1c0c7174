//! Finds libshardweave.so. In this order:
//!
//! 1. `SHARDWEAVE_HOME`: a prefix that `./bazelw run //tools:install` has filled, or any folder
//!    with libshardweave.so in it;
//! 2. pkg-config;
//! 3. the `bazel-bin` of the checkout that this crate is in.
//!
//! The library is linked to from a folder of its own in the build's output: Cargo puts that on the
//! loader's path for `cargo run` and `cargo test`, so that programs find it there without settings.
//! Crates that depend on this one get that folder as `DEP_SHARDWEAVE_LIBDIR`.
//!
//! With the feature `load-dynamic` nothing is looked for here: this script writes the functions as
//! calls through a table, which `src/dynamic.rs` fills when the program runs.

use std::env;
use std::fmt::Write;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{exit, Command};

#[path = "src/version.rs"]
mod version;

const NAME: &str = "libshardweave.so";
const BINDINGS: &str = include_str!("src/bindings.rs");
/// What this script calls itself with, to ask a library for its version.
const ASK: &str = "--version-of";

fn main() {
    let mut arguments = env::args_os().skip(1);
    if arguments.next().map_or(false, |argument| argument == ASK) {
        return say_version(&PathBuf::from(arguments.next().expect("a path follows")));
    }
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src");
    if env::var_os("CARGO_FEATURE_LOAD_DYNAMIC").is_some() {
        let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by Cargo"));
        return fs::write(out.join("bindings.rs"), through_a_table())
            .expect("OUT_DIR can be written");
    }
    println!("cargo:rerun-if-env-changed=SHARDWEAVE_HOME");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    println!("cargo:rerun-if-env-changed=DOCS_RS");
    if env::var_os("DOCS_RS").is_some() {
        return; // documentation needs no library
    }
    let library = find().unwrap_or_else(|wanted| fail(&wanted));
    println!("cargo:rerun-if-changed={}", library.display());
    check_version(&library);
    let folder = link_folder(&library);
    println!("cargo:rustc-link-search=native={}", folder.display());
    println!("cargo:rustc-link-lib=dylib=shardweave");
    println!("cargo:libdir={}", folder.display());
    // Of this crate's own tests.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder.display());
}

fn fail(what: &str) -> ! {
    eprintln!("shardweave-sys: {what}");
    exit(1)
}

fn find() -> Result<PathBuf, String> {
    if let Some(home) = env::var_os("SHARDWEAVE_HOME") {
        let home = PathBuf::from(home);
        return [home.join("lib").join(NAME), home.join(NAME)]
            .into_iter()
            .find(|path| path.exists())
            .ok_or(format!(
                "SHARDWEAVE_HOME is '{}'; wanted a folder with lib/{NAME} or {NAME} in it",
                home.display()
            ));
    }
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("set by Cargo"));
    let built = manifest.join("../../../bazel-bin/capi").join(NAME);
    pkg_config().or_else(|| built.exists().then_some(built)).ok_or(format!(
        "there is no {NAME}. Install it (./bazelw run //tools:install -- --prefix=DIR) and set \
             SHARDWEAVE_HOME=DIR or PKG_CONFIG_PATH=DIR/lib/pkgconfig; or, in a checkout, \
             ./bazelw build //capi:libshardweave.so; or take the feature load-dynamic, which looks \
             for it when the program runs"
    ))
}

fn pkg_config() -> Option<PathBuf> {
    let output = Command::new("pkg-config")
        .args(["--variable=libdir", "shardweave"])
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let library = Path::new(String::from_utf8(output.stdout).ok()?.trim()).join(NAME);
    library.exists().then_some(library)
}

// --- The version ----------------------------------------------------------------------------------

/// A number of bindings.rs.
fn declared(name: &str) -> i32 {
    let line = format!("pub const {name}: i32 = ");
    let number = BINDINGS.split(&line).nth(1).and_then(|rest| rest.split(';').next());
    number.and_then(|number| number.parse().ok()).expect("bindings.rs has its version")
}

/// Of a library that can be loaded here; others (for another machine, or with a sanitizer's
/// runtime) are compared when the program first uses them.
fn check_version(library: &Path) {
    if env::var_os("HOST") != env::var_os("TARGET") {
        return;
    }
    // In a process of its own: to load a library is to run it.
    let asked = env::current_exe().and_then(|this| {
        Command::new(this).arg(ASK).arg(library).env_remove("LD_PRELOAD").output()
    });
    let answer = asked.map_err(|error| error.to_string()).and_then(|output| {
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        text.parse::<i32>().map_err(|_| String::from_utf8_lossy(&output.stderr).trim().to_owned())
    });
    match answer {
        Ok(number) => {
            let place = library.display().to_string();
            if let Some(what) = version::mismatch(declared("SWV_VERSION"), number, &place) {
                fail(&what);
            }
        }
        Err(error) => {
            let error = error.lines().next().unwrap_or("it said nothing").to_owned();
            println!("cargo:warning={} cannot be asked for its version: {error}", library.display())
        }
    }
}

fn say_version(library: &Path) {
    use std::ffi::{CStr, CString};
    use std::os::raw::{c_char, c_int, c_void};
    use std::os::unix::ffi::OsStrExt;

    #[link(name = "dl")]
    extern "C" {
        fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
        fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
        fn dlerror() -> *const c_char;
    }
    const RTLD_LAZY: c_int = 1;
    let path = CString::new(library.as_os_str().as_bytes()).expect("a path has no NUL");
    // SAFETY: texts that end with NUL; a function that has no arguments, in every version.
    unsafe {
        let handle = dlopen(path.as_ptr(), RTLD_LAZY);
        if handle.is_null() {
            fail(&CStr::from_ptr(dlerror()).to_string_lossy());
        }
        let function = dlsym(handle, "swv_version\0".as_ptr().cast());
        if function.is_null() {
            fail("it has no swv_version");
        }
        let version: extern "C" fn() -> i32 = std::mem::transmute(function);
        println!("{}", version());
    }
}

// --- Without a library ----------------------------------------------------------------------------

/// bindings.rs, with a body for each function that calls what the table has in its place.
fn through_a_table() -> String {
    const START: &str = "extern \"C\" {\n";
    let mut names = Vec::new();
    let mut text = String::new();
    let mut blocks = BINDINGS.split(START);
    text += blocks.next().expect("something comes first");
    for block in blocks {
        let (declaration, rest) = block.split_once("\n}\n").expect("a block has an end");
        let (attributes, signature) =
            declaration.split_once("pub fn ").expect("a block declares a function");
        let (name, signature) = signature.split_once('(').expect("with parameters");
        let (parameters, result) = signature.rsplit_once(')').expect("which end");
        let result = result.trim().trim_end_matches(';');
        let (mut types, mut arguments) = (String::new(), String::new());
        for parameter in parameters.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let (argument, kind) = parameter.split_once(": ").expect("a name and a type");
            write!(types, "{kind}, ").expect("memory suffices");
            write!(arguments, "{argument}, ").expect("memory suffices");
        }
        let index = names.len();
        write!(
            text,
            "{attributes}#[inline]\npub unsafe extern \"C\" fn {name}({parameters}) {result} {{\n\
             let there: unsafe extern \"C\" fn({types}) {result} =\n\
             ::std::mem::transmute(crate::dynamic::function({index}));\n\
             there({arguments})\n}}\n{rest}"
        )
        .expect("memory suffices");
        names.push(name);
    }
    writeln!(text, "pub(crate) const NUM_FUNCTIONS: usize = {};", names.len())
        .expect("memory suffices");
    text += "/// Each ends with NUL.\npub(crate) static FUNCTIONS: [&str; NUM_FUNCTIONS] = [\n";
    for name in names {
        writeln!(text, "\"{name}\\0\",").expect("memory suffices");
    }
    text + "];\n"
}

// --- With one -------------------------------------------------------------------------------------

/// A folder with the library under both its names. The library finds what it needs by its own
/// place ($ORIGIN): beside it in `shardweave` if it is installed, in `../_solib_...` if Bazel has
/// built it; so these are led to as well.
fn link_folder(library: &Path) -> PathBuf {
    let library = fs::canonicalize(library).expect("it was there a moment ago");
    let origin = library.parent().expect("a file is in a folder");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by Cargo"));
    let folder = out.join("lib");
    fs::create_dir_all(&folder).expect("OUT_DIR can be written");
    lead(&library, &folder.join(NAME));
    lead(&library, &folder.join(version::soname(declared("SWV_VERSION"))));
    if origin.join("shardweave").is_dir() {
        lead(&origin.join("shardweave"), &folder.join("shardweave"));
    }
    for entry in origin.join("..").read_dir().into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("_solib_") {
            lead(&entry.path(), &out.join(entry.file_name()));
        }
    }
    folder
}

fn lead(to: &Path, link: &Path) {
    if link.symlink_metadata().is_ok() {
        fs::remove_file(link).expect("OUT_DIR can be written");
    }
    let to = fs::canonicalize(to).expect("it was there a moment ago");
    symlink(to, link).expect("OUT_DIR can be written");
}
