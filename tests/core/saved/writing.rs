//! Writing a saved index: what the file system sees, also when a write fails.

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
#[cfg(unix)]
use std::path::Path;

use exactknn_core::saved::{BLOCK, Push, Saved, Tensor, write};
use exactknn_core::{Error, Monitor};

#[cfg(unix)]
use super::message;
use super::{Folder, save, small, texts};

#[test]
#[cfg(unix)]
fn errors_of_the_system_are_reported() {
    let folder = Folder::new();
    let code = |error: Error| match error {
        Error::File { code, .. } => code,
        other => panic!("not the system's: {other}"),
    };
    let missing = folder.file("missing");
    assert_eq!(message(Saved::open(&missing), &missing), "could not open it: No such file or directory");
    assert_eq!(code(Saved::open(&missing).expect_err("nothing there")), Some(2));
    let into_missing = missing.join("x");
    assert_eq!(
        message(save(&into_missing, Vec::new()), &into_missing),
        "could not make a file in its folder: No such file or directory"
    );
    assert_eq!(message(Saved::open(&folder.0), &folder.0), "could not open it: Is a directory");
    assert_eq!(message(save(&folder.0, Vec::new()), &folder.0), "could not write to it: Is a directory");
    let device = Path::new("/dev/null");
    assert_eq!(message(Saved::open(device), device), "wanted a regular file, found a device or pipe");
    assert_eq!(
        message(save(device, Vec::new()), device),
        "wanted a regular file or a free name, found a device or pipe"
    );
    let nameless = Path::new("");
    assert_eq!(message(save(nameless, Vec::new()), nameless), "wanted the name of a file, found none");
    assert_eq!(folder.names(), [""; 0]);
}

#[test]
#[cfg(unix)]
fn links_are_kept_and_followed_to_files_that_are_not_there_yet() {
    use std::os::unix::fs::symlink;

    let folder = Folder::new();
    let (first, second, end) = (folder.file("first"), folder.file("second"), folder.file("x"));
    symlink("second", &first).expect("a folder of our own");
    symlink(&end, &second).expect("a folder of our own");
    for _ in 0..2 {
        small(&first);
        assert!(fs::symlink_metadata(&end).expect("the file").is_file());
        assert_eq!(folder.names(), ["first", "second", "x"]);
        assert_eq!(fs::read_link(&first).expect("a link"), Path::new("second"));
        assert_eq!(fs::read_link(&second).expect("a link"), end);
    }
}

#[test]
#[cfg(unix)]
fn permissions_are_respected() {
    use std::os::unix::fs::PermissionsExt;

    let folder = Folder::new();
    let path = folder.file("x");
    small(&path);
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("our own");
    assert_eq!(fs::metadata(&path).expect("the file").permissions().mode() & 0o600, 0o600);
    mode(&path, 0o600);
    let inspecting = Tensor::new("n", &[1], |push: Push<'_, u8>| {
        let names = folder.names();
        assert_eq!(names.len(), 2, "a temporary file beside the old one");
        for name in names {
            assert_eq!(fs::metadata(folder.0.join(name)).expect("a file").permissions().mode() & 0o777, 0o600);
        }
        push(&[1])
    });
    save(&path, vec![inspecting]).expect("a folder of our own");
    assert_eq!(fs::metadata(&path).expect("the file").permissions().mode() & 0o777, 0o600);
    mode(&path, 0o444);
    assert_eq!(message(save(&path, Vec::new()), &path), "could not write to it: Permission denied");
    if fs::OpenOptions::new().write(true).open(&path).is_ok() {
        // The superuser ignores permissions.
        return;
    }
    mode(&path, 0o000);
    assert_eq!(message(Saved::open(&path), &path), "could not open it: Permission denied");
    mode(&folder.0, 0o555);
    let other = folder.file("y");
    let refusal = message(save(&other, Vec::new()), &other);
    mode(&folder.0, 0o755);
    assert_eq!(refusal, "could not make a file in its folder: Permission denied");
    assert_eq!(folder.names(), ["x"]);
}

#[test]
fn a_failed_write_leaves_the_old_file_and_no_other() {
    let folder = Folder::new();
    let path = folder.file("x");
    small(&path);
    let old = fs::read(&path).expect("the file");
    let big = vec![1u8; 2 * BLOCK + 5];
    let unchanged = || {
        assert_eq!(folder.names(), ["x"]);
        assert!(fs::read(&path).expect("the file") == old);
    };

    let error = Error::BadThreads { given: "0".into(), origin: "" };
    let failing = Tensor::new("n", &[big.len()], |push: Push<'_, u8>| {
        push(&big[..BLOCK + 3])?;
        assert_eq!(folder.names().len(), 2, "a temporary file beside the old one");
        Err(error.clone())
    });
    assert_eq!(save(&path, vec![failing]), Err(error.clone()));
    unchanged();

    let panicking = Tensor::new("n", &[big.len()], |push: Push<'_, u8>| {
        push(&big[..BLOCK + 3])?;
        panic!("a bug")
    });
    assert!(catch_unwind(AssertUnwindSafe(|| save(&path, vec![panicking]))).is_err());
    unchanged();

    for given in [big.len() - 1, big.len() + 1, 0] {
        let wrong = vec![1u8; given];
        let outcome = save(&path, vec![Tensor::of_slice("n", &[big.len()], &wrong)]);
        assert!(matches!(outcome, Err(Error::Panic(_))), "{outcome:?}");
        unchanged();
    }

    let monitor = Monitor::new();
    let cancelling = Tensor::new("n", &[big.len()], |push: Push<'_, u8>| {
        push(&big[..BLOCK])?;
        monitor.cancel();
        push(&big[BLOCK..])
    });
    assert_eq!(write(&path, &BTreeMap::new(), vec![cancelling], &monitor), Err(Error::Cancelled));
    unchanged();
}

#[test]
fn reserved_and_duplicate_names_are_refused_before_writing() {
    let folder = Folder::new();
    let path = folder.file("x");
    let one = |name: &str| Tensor::of_slice(name, &[1], &[1u8]);
    for tensors in [vec![one("checksums")], vec![one("__metadata__")], vec![one("a"), one("b"), one("a")]] {
        assert!(matches!(save(&path, tensors), Err(Error::Panic(_))));
    }
    let huge = Tensor::of_slice::<u8>("n", &[usize::MAX, 2], &[]);
    assert!(matches!(save(&path, vec![huge]), Err(Error::Panic(_))));
    let halves = ["a", "b", "c"].map(|name| Tensor::of_slice::<u8>(name, &[usize::MAX / 2], &[]));
    assert!(matches!(save(&path, halves.into()), Err(Error::Panic(_))));
    for key in ["checksum", "format", "format_version", "exactknn_version"] {
        let outcome = write(&path, &texts(&[(key, "x")]), Vec::new(), &Monitor::new());
        assert!(matches!(outcome, Err(Error::Panic(_))), "{outcome:?}");
    }
    assert_eq!(folder.names(), [""; 0]);
}

#[test]
fn an_open_file_may_be_replaced() {
    let folder = Folder::new();
    let path = folder.file("x");
    save(&path, vec![Tensor::of_slice("n", &[3], &[1u8, 2, 3])]).expect("a good folder");
    let old = Saved::open(&path).expect("a good file").tensor::<u8>("n").expect("bytes");
    save(&path, vec![Tensor::of_slice("n", &[2], &[4u8, 5])]).expect("a good folder");
    let new = Saved::open(&path).expect("a good file").tensor::<u8>("n").expect("bytes");
    // A tensor outlives the index that it came from, and can be sent to other threads.
    let old = std::thread::spawn(move || old.clone()).join().expect("no panic");
    assert_eq!((old.range(0..3), new.range(0..2)), (Ok(&[1u8, 2, 3][..]), Ok(&[4u8, 5][..])));
}

#[test]
#[cfg(unix)]
fn a_link_is_followed() {
    let folder = Folder::new();
    let (path, link) = (folder.file("x"), folder.file("link"));
    small(&path);
    std::os::unix::fs::symlink(&path, &link).expect("a link");
    save(&link, vec![Tensor::of_slice("n", &[2], &[4u8, 5])]).expect("a good folder");
    assert!(fs::symlink_metadata(&link).expect("the link").is_symlink());
    assert_eq!(Saved::open(&path).expect("a good file").tensor::<u8>("n").expect("bytes").range(0..2), Ok(&[4, 5][..]));
}
