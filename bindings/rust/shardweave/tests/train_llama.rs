//! Runs the example as users do, on a small checkpoint that is written here.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{json, Value};
use shardweave::Bf16;

struct Model {
    folder: PathBuf,
    config: Value,
    half: bool,
    scale: f32,
    /// What is written otherwise than the model wants it.
    change: fn(&str, Vec<usize>) -> Option<Vec<usize>>,
}

impl Model {
    fn new(name: &str) -> Model {
        let folder = env::temp_dir().join(format!("train_llama-{name}-{}", std::process::id()));
        let config = json!({
            "vocab_size": 259, "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 2,
            "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
            "rope_theta": 500.0, "max_position_embeddings": 64, "tie_word_embeddings": false,
        });
        Model { folder, config, half: false, scale: 1.0, change: |_, shape| Some(shape) }
    }

    /// Names and shapes as Hugging Face's LlamaForCausalLM has them, in two files.
    fn write(self) -> Model {
        fs::create_dir_all(&self.folder).unwrap();
        fs::write(self.folder.join("config.json"), self.config.to_string()).unwrap();
        let (dim, inner, kv) = (24, 44, 8);
        let mut shapes = vec![
            ("model.embed_tokens.weight".to_owned(), vec![259, dim]),
            ("model.norm.weight".to_owned(), vec![dim]),
        ];
        if self.config["tie_word_embeddings"] == false {
            shapes.push(("lm_head.weight".to_owned(), vec![259, dim]));
        }
        for layer in 0..2 {
            for (name, shape) in [
                ("input_layernorm", vec![dim]),
                ("self_attn.q_proj", vec![dim, dim]),
                ("self_attn.k_proj", vec![kv, dim]),
                ("self_attn.v_proj", vec![kv, dim]),
                ("self_attn.o_proj", vec![dim, dim]),
                ("post_attention_layernorm", vec![dim]),
                ("mlp.gate_proj", vec![inner, dim]),
                ("mlp.up_proj", vec![inner, dim]),
                ("mlp.down_proj", vec![dim, inner]),
            ] {
                shapes.push((format!("model.layers.{layer}.{name}.weight"), shape));
            }
        }
        let mut files = [Vec::new(), Vec::new()];
        let mut state = 1u64;
        for (i, (name, shape)) in shapes.into_iter().enumerate() {
            let shape = match (self.change)(&name, shape) {
                Some(shape) => shape,
                None => continue,
            };
            let mut bytes = Vec::new();
            for _ in 0..shape.iter().product() {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let uniform = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
                let is_norm = shape.len() == 1;
                let number = if is_norm { 1.0 + 0.1 * uniform } else { 0.3 * self.scale * uniform };
                match self.half {
                    true => bytes.extend(Bf16::from(number).to_bits().to_le_bytes()),
                    false => bytes.extend(number.to_le_bytes()),
                }
            }
            files[i % 2].push((name, shape, bytes));
        }
        let dtype = if self.half { Dtype::BF16 } else { Dtype::F32 };
        for (i, file) in files.iter().enumerate() {
            let views = file.iter().map(|(name, shape, bytes)| {
                (name.clone(), TensorView::new(dtype, shape.clone(), bytes).unwrap())
            });
            let bytes = safetensors::serialize(views, &None).unwrap();
            fs::write(self.folder.join(format!("model-{i}.safetensors")), bytes).unwrap();
        }
        self
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let test = env::current_exe().unwrap();
        let folder = test.parent().unwrap().parent().unwrap().to_owned();
        let mut command = Command::new(folder.join("examples/train_llama"));
        command.arg(format!("--model={}", self.folder.display())).stdin(Stdio::null());
        command.args(["--steps=4", "--batch=4", "--seq=9", "--json"]).args(arguments);
        // A text as any.
        command.arg(format!("--data={}", self.folder.join("config.json").display()));
        for name in ["RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"] {
            command.env_remove(name);
        }
        command
    }

    fn train(&self, arguments: &[&str]) -> Value {
        let output = self.command(arguments).output().unwrap();
        let (out, err) = texts(&output);
        assert!(output.status.success(), "{arguments:?}: {err}");
        assert_eq!(out.lines().count(), 1, "{out}");
        serde_json::from_str(&out).unwrap()
    }

    fn fails(&self, arguments: &[&str], wanted: &str) {
        let output = self.command(arguments).output().unwrap();
        let (_, err) = texts(&output);
        assert!(!output.status.success() && err.contains(wanted), "{wanted:?} is not in\n{err}");
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.folder).ok();
    }
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

fn number(value: &Value, name: &str) -> f64 {
    value[name].as_f64().unwrap_or_else(|| panic!("{name} of {value}"))
}

#[test]
fn the_same_losses_on_every_mesh() {
    let model = Model::new("meshes").write();
    let alone = model.train(&["--mesh=dp=1"]);
    for (mesh, ranks) in [("dp=2,tp=2", 4), ("tp=2", 2), ("tp=3", 3), ("dp=3", 3)] {
        let result = model.train(&["--check", &format!("--mesh={mesh}")]);
        assert_eq!(result["ranks"], ranks);
        assert!(number(&result, "max_loss_diff") <= 1e-5, "{mesh}: {result}");
        assert!((number(&result, "first_loss") - number(&alone, "first_loss")).abs() <= 1e-5);
        assert!(number(&result, "last_loss") < number(&result, "first_loss"), "{mesh}: {result}");
    }
    let processes = model.train(&["--check", "--mesh=tp=2", "--backend=gloo"]);
    assert_eq!(processes["ranks"], 2);
    assert!(number(&processes, "max_loss_diff") <= 1e-5, "{processes}");
}

/// With the losses that the run without a break has, on other meshes; what was saved beside training,
/// too.
#[test]
fn a_run_goes_on() {
    let model = Model::new("goes_on").write();
    let run = model.folder.join("run");
    let (save, resume) =
        (format!("--save={}", run.display()), format!("--resume={}", run.display()));
    let whole = model.train(&["--mesh=dp=2,tp=2", "--save_every=2", &save]);
    assert!(run.join("step-000004/manifest.json").exists());
    model.fails(&["--mesh=tp=2", &resume], "--steps=4; wanted more than 4, as --resume has");
    fs::remove_dir_all(run.join("step-000004")).unwrap();
    for mesh in ["--mesh=tp=3", "--mesh=dp=1", "--mesh=dp=2,tp=2"] {
        let rest = model.train(&[mesh, "--check", &resume]);
        assert!(number(&rest, "max_loss_diff") <= 1e-5, "{mesh}: {rest}");
        assert!((number(&rest, "last_loss") - number(&whole, "last_loss")).abs() <= 1e-5);
        assert!(number(&rest, "first_loss") < number(&whole, "first_loss"), "{mesh}: {rest}");
    }
    model.fails(&["--save_every=2"], "--save");
    model.fails(&["--resume=/proc/nowhere"], "State::load: ");
    model.fails(&["--save=/proc/nowhere/run"], "Checkpointer::open: ");
}

/// What is in the file is what the model computes with.
#[test]
fn the_file_decides() {
    let of = |model: &Model| number(&model.train(&["--mesh=tp=2", "--steps=1"]), "first_loss");
    let mut zeros = Model::new("zeros");
    zeros.scale = 0.0;
    let loss = of(&zeros.write()); // all scores are 0, whatever the norms are
    assert!((loss - 259f64.ln()).abs() < 1e-5, "{loss}");
    let full = of(&Model::new("full").write());
    let mut half = Model::new("half");
    half.half = true;
    let half = of(&half.write());
    assert!(full != loss && full != half && (full - half).abs() < 0.05, "{full} {half}");
    let mut tied = Model::new("tied");
    tied.config["tie_word_embeddings"] = true.into();
    tied.config["rope_scaling"] = json!({"rope_type": "llama3", "factor": 4.0});
    let result = tied.write().train(&["--check", "--mesh=tp=2"]);
    assert!(number(&result, "max_loss_diff") <= 1e-5, "{result}");
}

#[test]
fn bad_input() {
    let mut missing = Model::new("missing");
    missing.change = |name, shape| (!name.ends_with("1.mlp.up_proj.weight")).then_some(shape);
    let wanted =
        "'model.layers.1.mlp.up_proj.weight': it is in no file of the checkpoint (NotFound)";
    missing.write().fails(&["--mesh=tp=2"], wanted);
    let mut other = Model::new("other");
    other.change = |name, shape| Some(if name == "model.norm.weight" { vec![25] } else { shape });
    other.write().fails(&["--mesh=tp=2"], "'model.norm.weight' is [24]; the tensor for it is [25]");
    let mut more = Model::new("more");
    more.config["num_hidden_layers"] = 1.into();
    more.write().fails(&[], "the checkpoint has 'model.layers.1.");
    let mut yarn = Model::new("yarn");
    yarn.config["rope_scaling"] = json!({"rope_type": "longrope"});
    yarn.write().fails(&[], "rope_type 'longrope'; wanted default, linear or llama3");
    let mut heads = Model::new("heads");
    heads.config["num_key_value_heads"] = 4.into();
    heads.write().fails(&[], "6 heads, 4 of keys and values");
    let model = Model::new("flags").write();
    model.fails(&["--mesh=pp=2"], "wanted dp=RANKS,tp=RANKS");
    model.fails(&["--seq=65"], "--seq=65: the model is for 64 positions at most");
    fs::write(model.folder.join("model-1.safetensors"), b"not one").unwrap();
    model.fails(&[], "model-1.safetensors: ");
    fs::remove_file(model.folder.join("config.json")).unwrap();
    model.fails(&[], "config.json: No such file");
    let nowhere = Model::new("nowhere"); // not written
    nowhere.fails(&["--backend=gloo"], "config.json: No such file");
}
