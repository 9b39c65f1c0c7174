//! The numbers of a run, and its end on all ranks.

use shardweave::{Code, MetricsWriter, World};

#[test]
fn metrics_are_lines_and_events() {
    let folder = std::env::temp_dir().join(format!("shardweave-metrics-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir(&folder).unwrap();
    let path = folder.join("run.jsonl");
    for step in 0..3 {
        let log = MetricsWriter::json_lines(&path).unwrap(); // appends
        log.write(step, &[("loss", 2.5), ("lr", f64::NAN)]).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().count(), 3);
    assert!(text.ends_with("\"loss\":2.5,\"lr\":\"NaN\"}\n"), "{text}");

    let log = MetricsWriter::json_lines(&path).unwrap();
    World::threads(2).run(|world| log.write(world.rank() as i64, &[])).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 5);

    let events = MetricsWriter::events(folder.join("events"), 0).unwrap();
    events.write(10, &[("loss", 2.5)]).unwrap();
    events.flush().unwrap();
    let file = std::fs::read_dir(folder.join("events")).unwrap().next().unwrap().unwrap();
    let bytes = std::fs::read(file.path()).unwrap();
    assert!(bytes.windows(4).any(|window| window == b"loss"));
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn what_is_wrong_is_said() {
    let error = MetricsWriter::json_lines("/dev/null/x").unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().starts_with("MetricsWriter::json_lines: "), "{error}");
    let error = MetricsWriter::events("a\0b", 0).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    let log = MetricsWriter::json_lines("/dev/full").unwrap();
    let error = log.write(1, &[("step", 1.0)]).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    for _ in 0..2 {
        let error = log.write(1, &[("loss", 1.0)]).unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted);
        assert!(error.message().starts_with("MetricsWriter::write: "), "{error}");
    }
}

#[test]
fn ranks_end_together() {
    World::threads(3)
        .run(|world| {
            let comm = world.comm()?;
            for step in 0..5 {
                let ends = comm.any_rank(world.rank() == 1 && step == 3)?;
                assert_eq!(ends, step == 3);
                if ends {
                    return Ok(());
                }
            }
            panic!("no end")
        })
        .unwrap();
}
