//! Lets this crate's own tests and examples find the library when they are started without Cargo.
//! Tells crates that depend on this one where the library is: `DEP_SHARDWEAVE_RUST_LIBDIR`.

fn main() {
    println!("cargo:rerun-if-env-changed=DEP_SHARDWEAVE_LIBDIR");
    if let Ok(folder) = std::env::var("DEP_SHARDWEAVE_LIBDIR") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
        println!("cargo:libdir={folder}");
    }
}
