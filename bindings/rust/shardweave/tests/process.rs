//! What holds in the whole process: a test alone in its process, because others would hear of it.

use std::io::Write;
use std::process::Command;
use std::sync::{Arc, Mutex};

use shardweave::{
    args, live_handles, set_handle_checks, set_log, Code, Device, Error, HandleChecks,
    MeetingPoint, Op, Rendezvous, Tensor, TensorOptions, World,
};

/// Makes the library say something: this operator has no sharding rule, so it gathers.
fn gather() {
    World::threads(1)
        .run(|world| {
            let mesh = world.device_mesh(&[("x", 1)])?;
            let x = TensorOptions::new().on(&mesh, "[S(0)]")?.ones(&[3, 3])?;
            let _: (Tensor, Tensor) = Op::find("aten::_aminmax")?.call(args![&x])?;
            Ok(())
        })
        .unwrap();
}
const TOLD: &str = "aten::_aminmax has no sharding rule";

fn log_goes_where_it_is_wanted() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&lines);
    set_log(Some(Box::new(move |line| to.lock().unwrap().push(line.to_owned())))).unwrap();
    assert_eq!(Arc::strong_count(&lines), 2);
    gather();
    let told = lines.lock().unwrap().iter().filter(|line| line.starts_with(TOLD)).count();
    assert_eq!(told, 1, "{lines:?}");
    assert!(!lines.lock().unwrap().iter().any(|line| line.contains('\n')), "{lines:?}");
    // What was set before ends, and hears no more. Panics stay on this side, and the line is not lost.
    let before = lines.lock().unwrap().len();
    set_log(Some(Box::new(|_| panic!("in the log")))).unwrap();
    assert_eq!(Arc::strong_count(&lines), 1, "it was dropped");
    gather();
    set_log(None).unwrap();
    assert_eq!(lines.lock().unwrap().len(), before);
    std::io::stderr().flush().unwrap();
    eprintln!("---");
    gather(); // to stderr
}

fn checks_are_switched() {
    assert_eq!(live_handles(), None);
    set_handle_checks(HandleChecks::Report).unwrap();
    let before = live_handles().expect("handles are counted");
    let x = Tensor::ones(&[2]).unwrap();
    assert_eq!(live_handles(), Some(before + 1));
    set_handle_checks(HandleChecks::Off).unwrap();
    assert_eq!(live_handles(), None);
    drop(x);
}

fn errors_have_their_rank() {
    let heard = Mutex::new(Vec::new());
    let error = World::threads(3)
        .run(|world| {
            if world.rank() == 1 {
                return Err(Error::new(Code::DataLoss, "gone bad"));
            }
            let error = world.comm()?.barrier().unwrap_err();
            heard.lock().unwrap().push(error.clone().context("in front").rank());
            Err::<(), _>(error)
        })
        .unwrap_err();
    assert_eq!((error.code(), error.rank()), (Code::DataLoss, Some(1)));
    assert_eq!(*heard.lock().unwrap(), [Some(1), Some(1)]);
    assert_eq!(Tensor::ones(&[-1]).unwrap_err().rank(), None); // of this rank alone
}

/// Where there is no driver: over NCCL, and by way of the host.
fn devices_are_looked_for() {
    std::env::set_var("SHARDWEAVE_CUDA_DRIVER_LIBRARY", "/no/libcuda.so.1");
    for (backend, wanted) in [
        ("gloo", "by way of the host: no NVIDIA driver"),
        ("nccl", "backend nccl: no NVIDIA driver"),
    ] {
        let file = format!("shardweave_devices_{}_{backend}", std::process::id());
        let at = MeetingPoint::File(std::env::temp_dir().join(file));
        let alone = Rendezvous::new(0, 1, at);
        let processes = World::processes().backend(backend).device(Device::Cuda(0));
        let error = processes.join(&alone).unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.message().contains(wanted), "{error}");
    }
}

#[test]
fn what_holds_in_the_process() {
    const CHILD: &str = "SHARDWEAVE_TEST_PROCESS";
    if std::env::var_os(CHILD).is_some() {
        checks_are_switched();
        errors_have_their_rank();
        devices_are_looked_for();
        log_goes_where_it_is_wanted();
        return;
    }
    let mut again = Command::new(std::env::current_exe().unwrap());
    let again = again.env(CHILD, "1").env_remove("SWV_CHECK_HANDLES").arg("--nocapture");
    let output = again.output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{err}", String::from_utf8_lossy(&output.stdout));
    let (logged, plain) = err.split_once("---\n").expect("a line between");
    let panicked = "shardweave: the function that set_log was given panicked: in the log";
    assert_eq!(logged.matches(panicked).count(), logged.matches("panicked at").count(), "{err}");
    assert_eq!(logged.matches(&format!("shardweave: {TOLD}")).count(), 1, "{err}");
    assert_eq!(plain.matches(&format!("shardweave: {TOLD}")).count(), 1, "{err}");
}
