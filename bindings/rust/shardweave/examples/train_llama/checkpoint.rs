//! A folder of safetensors files, in this process' memory only as far as it is read.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::Path;

use memmap2::Mmap;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::SafeTensors;
use shardweave::{Bf16, Code, Element, Error, Module, Result, Tensor, F16};

pub struct Checkpoint(Vec<(String, Mmap)>);

fn wrong(file: &str, error: impl std::fmt::Display) -> Error {
    Error::new(Code::DataLoss, format!("{file}: {error}"))
}

impl Checkpoint {
    pub fn open(folder: &Path) -> Result<Checkpoint> {
        let of = |error: std::io::Error| Error::from(error).context(folder.display());
        let mut files = Vec::new();
        for entry in fs::read_dir(folder).map_err(of)? {
            let path = entry.map_err(of)?.path();
            if path.extension().map_or(false, |extension| extension == "safetensors") {
                let file = File::open(&path).map_err(of)?;
                // SAFETY: nobody writes to the file meanwhile.
                let map = unsafe { Mmap::map(&file) }.map_err(of)?;
                files.push((path.display().to_string(), map));
            }
        }
        if files.is_empty() {
            let what = format!("there is no *.safetensors in {}", folder.display());
            return Err(Error::new(Code::NotFound, what));
        }
        files.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(Checkpoint(files))
    }

    /// Copies all of it into the model, name by name: each rank what it holds.
    pub fn load_into(&self, model: &impl Module) -> Result<()> {
        let mut files = Vec::new();
        for (file, map) in &self.0 {
            files.push(SafeTensors::deserialize(map).map_err(|error| wrong(file, error))?);
        }
        let mut tensors: HashMap<String, (&str, TensorView<'_>)> = HashMap::new();
        for ((file, _), parts) in self.0.iter().zip(&files) {
            let named = parts.tensors().into_iter();
            tensors.extend(named.map(|(name, view)| (name, (file.as_str(), view))));
        }
        model.load(&mut |name| match tensors.remove(name) {
            Some((file, view)) => to_tensor(&view).map_err(|error| error.context(file)),
            None => Err(Error::new(Code::NotFound, "it is in no file of the checkpoint")),
        })?;
        // Tables that older files have, and the second name of a tied head, are the model's own.
        tensors
            .retain(|name, _| !name.ends_with("rotary_emb.inv_freq") && name != "lm_head.weight");
        match tensors.keys().min() {
            None => Ok(()),
            Some(name) => Err(Error::new(
                Code::InvalidArgument,
                format!("the checkpoint has '{name}', which the model has not"),
            )),
        }
    }
}

fn to_tensor(view: &TensorView<'_>) -> Result<Tensor> {
    let sizes: Vec<i64> = view.shape().iter().map(|size| *size as i64).collect();
    // The file's numbers are little-endian, and lie anywhere.
    fn numbers<T: Element, const SIZE: usize>(
        view: &TensorView<'_>,
        sizes: &[i64],
        convert: fn([u8; SIZE]) -> T,
    ) -> Result<Tensor> {
        let bytes = view.data().chunks_exact(SIZE);
        let numbers: Vec<T> =
            bytes.map(|bytes| convert(bytes.try_into().expect("of this size"))).collect();
        Tensor::from_slice(&numbers, sizes)
    }
    match view.dtype() {
        Dtype::F64 => numbers(view, &sizes, f64::from_le_bytes),
        Dtype::F32 => numbers(view, &sizes, f32::from_le_bytes),
        Dtype::F16 => numbers(view, &sizes, |bytes| F16::from_bits(u16::from_le_bytes(bytes))),
        Dtype::BF16 => numbers(view, &sizes, |bytes| Bf16::from_bits(u16::from_le_bytes(bytes))),
        other => Err(Error::new(Code::Unimplemented, format!("a tensor of {other:?}"))),
    }
}
