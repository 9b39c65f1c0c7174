//! What a training tells about itself, as text.

use std::io::Write;

use shardweave::{CommCounter, CommCounters, Mesh, Module, Result, OP_NAMES};

use crate::training::Sample;

/// How each parameter lies on the mesh; one line for those that all blocks have alike.
pub fn layouts(model: &impl Module, mesh: &Mesh, out: &mut dyn Write) -> Result<()> {
    writeln!(out, "{mesh}, S(d): cut along dimension d, R: replicated")?;
    let mut line = |name: &str, shape: &str, layout: &str, local: &str| {
        writeln!(out, "  {name:<22} {shape:<12} {layout:<14} {local}")
    };
    line("parameter", "shape", "placements", "on rank 0")?;
    let mut seen = Vec::new();
    for (name, tensor) in model.parameters() {
        let here = tensor.detach()?.to_local()?.sizes()?;
        let described = (
            without_numbers(&name),
            format!("{:?}", tensor.sizes()?),
            tensor.layout()?.to_string(),
            format!("{here:?}"),
        );
        if !seen.contains(&described) {
            line(&described.0, &described.1, &described.2, &described.3)?;
            seen.push(described);
        }
    }
    Ok(())
}

/// "blocks.3.q.weight" -> "blocks.*.q.weight".
fn without_numbers(name: &str) -> String {
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let parts: Vec<&str> =
        name.split('.').map(|part| if is_number(part) { "*" } else { part }).collect();
    parts.join(".")
}

/// The collectives of one step on one rank, and their bytes.
pub fn traffic(step: &CommCounters, out: &mut dyn Write) -> Result<()> {
    writeln!(out, "collectives of one step, on rank 0:")?;
    let mut line = |name: &str, counter: CommCounter| {
        writeln!(out, "  {name:<16} {:>5}  {}", counter.calls, format_bytes(counter.bytes))
    };
    for (name, counter) in OP_NAMES.iter().zip(&step.by_op) {
        if counter.calls > 0 {
            line(name, *counter)?;
        }
    }
    line("together", step.total())?;
    Ok(())
}

/// What was written as it continues the prompt; bytes that are no printable ASCII become '?'.
pub fn sample(sample: &Sample, out: &mut dyn Write) -> Result<()> {
    writeln!(
        out,
        "sample, after {} bytes of the text:\n{} ... {}",
        sample.prompt.len(),
        printable(&sample.prompt),
        printable(&sample.generated)
    )?;
    Ok(())
}

fn printable(bytes: &[u8]) -> String {
    let one = |byte: &u8| match byte {
        b'\n' | b'\t' | b' '..=b'~' => char::from(*byte),
        _ => '?',
    };
    bytes.iter().map(one).collect()
}

/// "817 B", "12.3 kB", "4.0 MB".
fn format_bytes(bytes: i64) -> String {
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1000.0;
    let mut units = ["kB", "MB", "GB", "TB"].iter();
    let mut unit = units.next();
    while value >= 999.95 && !units.as_slice().is_empty() {
        value /= 1000.0;
        unit = units.next();
    }
    format!("{value:.1} {}", unit.expect("not past the end"))
}
