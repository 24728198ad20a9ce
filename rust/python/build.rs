//! Records how the module is built, for `build_info()`.

use std::env;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let rustc = env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = Command::new(rustc)
        .arg("--version")
        .output()
        .ok()
        .and_then(|output| String::from_utf8(output.stdout).ok())
        .map_or_else(|| "unknown".to_owned(), |text| text.trim().to_owned());
    println!("cargo::rustc-env=EXACTKNN_RUSTC={version}");
    println!("cargo::rustc-env=EXACTKNN_TARGET={}", env::var("TARGET").unwrap_or_else(|_| "unknown".into()));
}
