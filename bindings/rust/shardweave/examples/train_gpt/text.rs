//! The text to train on, byte by byte, and the batches that are drawn from it: functions of the
//! text and the settings alone, so that all ranks draw the same without asking each other.

use std::fs;
use std::path::{Path, PathBuf};

use shardweave::{Code, Error, Result, Tensor};

use crate::settings::Settings;

const LICENCES: &str = "/usr/share/common-licenses";

pub struct Text(Vec<u8>);

impl Text {
    /// None: the licence texts of Debian.
    pub fn read(file: Option<&Path>) -> Result<Text> {
        let files = file.map_or_else(licence_files, |file| vec![file.to_owned()]);
        if files.is_empty() {
            return Err(Error::new(
                Code::NotFound,
                format!(
                    "no text to train on: there is nothing in {LICENCES}; name one by --data=FILE"
                ),
            ));
        }
        let mut bytes = Vec::new();
        for path in files {
            bytes.extend(fs::read(&path).map_err(|error| {
                Error::from(error).context(format!("--data={}", path.display()))
            })?);
        }
        if bytes.is_empty() {
            let file = file.unwrap_or_else(|| Path::new(LICENCES)).display();
            return Err(Error::new(
                Code::InvalidArgument,
                format!("--data={file}: the file is empty"),
            ));
        }
        Ok(Text(bytes))
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Tokens and targets, [batch, seq]; the targets are one byte further on.
    pub fn batch(&self, step: i64, settings: &Settings) -> Result<(Tensor, Tensor)> {
        let (batch, seq) = (settings.batch, settings.seq as usize);
        let starts = (self.0.len() - seq) as u64;
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for row in 0..batch {
            let at = random_at(settings.seed, (step * batch + row) as u64) % starts;
            let bytes = &self.0[at as usize..=at as usize + seq];
            tokens.extend(bytes[..seq].iter().map(|byte| i64::from(*byte)));
            targets.extend(bytes[1..].iter().map(|byte| i64::from(*byte)));
        }
        let sizes = [batch, settings.seq];
        Ok((Tensor::from_slice(&tokens, &sizes)?, Tensor::from_slice(&targets, &sizes)?))
    }
}

/// In the order of their names; links only repeat what is there already.
fn licence_files() -> Vec<PathBuf> {
    let entries = fs::read_dir(LICENCES).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries
        .filter(|entry| entry.file_type().map_or(false, |kind| kind.is_file()))
        .map(|entry| entry.path())
        .collect();
    files.sort();
    files
}

/// The bytes as numbers, [1, size].
pub fn to_tokens(bytes: &[u8]) -> Result<Tensor> {
    let tokens: Vec<i64> = bytes.iter().map(|byte| i64::from(*byte)).collect();
    Tensor::from_slice(&tokens, &[1, tokens.len() as i64])
}

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): number
/// `index` of a stream, without a state.
pub fn random_at(seed: u64, index: u64) -> u64 {
    fn mix(mut z: u64) -> u64 {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    mix(mix(seed).wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// In [0, 1).
pub fn uniform_at(seed: u64, index: u64) -> f64 {
    (random_at(seed, index) >> 11) as f64 * (-53f64).exp2()
}
