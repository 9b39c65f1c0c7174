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

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

const NAME: &str = "libshardweave.so";
/// What the loader looks for: the library's soname, of this version of the interface.
const SONAME: &str = "libshardweave.so.0.2";

fn main() {
    println!("cargo:rerun-if-env-changed=SHARDWEAVE_HOME");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    println!("cargo:rerun-if-env-changed=DOCS_RS");
    if env::var_os("DOCS_RS").is_some() {
        return; // documentation needs no library
    }
    let library = find().unwrap_or_else(|wanted| {
        eprintln!("shardweave-sys: {wanted}");
        std::process::exit(1);
    });
    println!("cargo:rerun-if-changed={}", library.display());
    let folder = link_folder(&library);
    println!("cargo:rustc-link-search=native={}", folder.display());
    println!("cargo:rustc-link-lib=dylib=shardweave");
    println!("cargo:libdir={}", folder.display());
    // Of this crate's own tests.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder.display());
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
             ./bazelw build //capi:libshardweave.so"
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
    lead(&library, &folder.join(SONAME));
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
