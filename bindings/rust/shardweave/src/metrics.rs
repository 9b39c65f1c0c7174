//! The numbers of a run, step by step.

use std::ffi::CString;
use std::path::Path;

use crate::error::{Of, Result};
use crate::ffi::{c_path, c_text};

handle! {
    /// Writes a run's numbers, step by step, for people and programs: lines of JSON, or what
    /// TensorBoard shows. One rank writes, usually the first; any thread may.
    ///
    /// ```
    /// use shardweave::MetricsWriter;
    /// let path = std::env::temp_dir().join(format!("shardweave-{}.jsonl", std::process::id()));
    /// let log = MetricsWriter::json_lines(&path)?;
    /// log.write(10, &[("loss", 2.5), ("lr", 3e-4)])?;
    /// let text = std::fs::read_to_string(&path)?; // {"step":10,"time":1732461123.25,"loss":2.5,"lr":0.0003}
    /// assert!(text.contains("\"loss\":2.5"));
    /// # std::fs::remove_file(&path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    MetricsWriter, swv_metrics_writer, swv_metrics_writer_free
}

debug_by_name!(MetricsWriter);

// SAFETY: writers belong to no rank, and any thread may use and end them (shardweave.h, "Metrics").
unsafe impl Send for MetricsWriter {}
// SAFETY: as above; threads that write at once wait for each other.
unsafe impl Sync for MetricsWriter {}

impl MetricsWriter {
    /// A line for each step, which is in the file when [`MetricsWriter::write`] returns. Appends; of a
    /// file that a run has left in the middle of a line, this line goes. Steps that a run does again, after
    /// it was killed, stand there twice: the later line counts.
    pub fn json_lines(path: impl AsRef<Path>) -> Result<MetricsWriter> {
        let path = c_path(path.as_ref()).of("MetricsWriter::json_lines")?;
        create!(swv_metrics_writer_open_json_lines(path.as_ptr())).map(MetricsWriter)
    }

    /// A new file of events in `folder`, which is made if it is not there: TensorBoard draws a curve for
    /// each name. Values travel as `f32`. `first_step`: where a run goes on; what other files have from
    /// there on is shown no more. 0: from the beginning.
    pub fn events(folder: impl AsRef<Path>, first_step: i64) -> Result<MetricsWriter> {
        let folder = c_path(folder.as_ref()).of("MetricsWriter::events")?;
        create!(swv_metrics_writer_create_events(folder.as_ptr(), first_step)).map(MetricsWriter)
    }

    /// The numbers of a step. The system's error, then and ever after.
    pub fn write(&self, step: i64, metrics: &[(&str, f64)]) -> Result<()> {
        let names = metrics
            .iter()
            .map(|(name, _)| c_text(name, "the name"))
            .collect::<Result<Vec<CString>>>()
            .of("MetricsWriter::write")?;
        let names: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        let values: Vec<f64> = metrics.iter().map(|(_, value)| *value).collect();
        call!(swv_metrics_writer_write(
            self.as_ptr(),
            step,
            names.as_ptr(),
            values.as_ptr(),
            values.len(),
        ))
    }

    /// What was written is in the file. Dropping does it as well, and tells nobody if it fails.
    pub fn flush(&self) -> Result<()> {
        call!(swv_metrics_writer_flush(self.as_ptr()))
    }
}
