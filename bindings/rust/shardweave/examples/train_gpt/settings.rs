//! What the command line asks for, checked.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{value_parser, Arg, ArgAction, ArgMatches, Command};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Inproc,
    Gloo,
}

/// What ranks along dp have of the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parallel {
    Ddp,
    /// A part of the optimizer's state; in stage 2 of the gradients, too.
    Zero {
        stage: i32,
    },
    Fsdp,
    /// Fully sharded in each of several replicas.
    Hsdp,
    FsdpAndTp,
}

const PARALLEL: [(&str, Parallel); 6] = [
    ("ddp", Parallel::Ddp),
    ("zero1", Parallel::Zero { stage: 1 }),
    ("zero2", Parallel::Zero { stage: 2 }),
    ("fsdp", Parallel::Fsdp),
    ("hsdp", Parallel::Hsdp),
    ("fsdp+tp", Parallel::FsdpAndTp),
];

impl Parallel {
    /// Parameters are whole only while they are used.
    pub fn is_fully_sharded(self) -> bool {
        matches!(self, Parallel::Fsdp | Parallel::Hsdp | Parallel::FsdpAndTp)
    }
}

#[derive(Clone, Debug)]
pub struct Settings {
    /// dp and tp, and with [`Parallel::Hsdp`] replicas; one that was not named has size 1.
    pub mesh: Vec<(String, i64)>,
    pub parallel: Parallel,
    /// None: whichever fits the environment.
    pub backend: Option<Backend>,
    /// None: the licence texts of Debian.
    pub data: Option<PathBuf>,
    /// A directory that gets a checkpoint at the end, and after every so many steps (0: not).
    pub save: Option<PathBuf>,
    pub save_every: i64,
    /// A directory from whose newest checkpoint the run goes on.
    pub resume: Option<PathBuf>,
    pub steps: i64,
    pub layers: i64,
    pub dim: i64,
    pub heads: i64,
    pub batch: i64,
    pub seq: i64,
    pub sample: i64,
    pub learning_rate: f64,
    pub seed: u64,
    pub timeout: Duration,
    pub check: bool,
    pub json: bool,
}

fn command() -> Command {
    let number = |name, least: i64, default, help| {
        Arg::new(name)
            .long(name)
            .value_parser(value_parser!(i64).range(least..))
            .default_value(default)
            .help(help)
    };
    Command::new("train_gpt")
        .args_override_self(true) // the last of two flags counts, as in C++ and in Go
        .about("Trains a byte-level GPT on a text, sharded over several ranks.")
        .arg(Arg::new("mesh").long("mesh").default_value("auto").help(
            "how the ranks are arranged: dp (data parallel) times tp (tensor parallel); one of \
             them may be left out; auto: dp=2,tp=2, with --parallel=fsdp dp=4, with hsdp \
             replicas=2,dp=2",
        ))
        .arg(
            Arg::new("parallel")
                .long("parallel")
                .value_parser(PossibleValuesParser::new(PARALLEL.map(|(name, _)| name)))
                .default_value("ddp")
                .help(
                    "what ranks along dp have of the parameters: ddp, all of them; zero1, all of \
                     them, and a part of the optimizer's state; zero2, a part of the gradients, \
                     too; fsdp, a part of all, whole only while a block runs; hsdp, the same in \
                     each of --mesh's replicas; fsdp+tp, a part of what tensor parallelism leaves",
                ),
        )
        .arg(
            Arg::new("backend")
                .long("backend")
                .value_parser(PossibleValuesParser::new(["inproc", "gloo"]))
                .help(
                    "inproc: ranks are threads of this process; gloo: ranks are processes, started \
                     here unless a launcher has done it; default: gloo under a launcher, else \
                     inproc",
                ),
        )
        .arg(
            Arg::new("data")
                .long("data")
                .value_parser(value_parser!(PathBuf))
                .help("the text to train on; default: the licence texts of Debian"),
        )
        .arg(number("steps", 1, "200", "training steps of this run"))
        .arg(number("layers", 1, "2", "transformer blocks"))
        .arg(number("dim", 1, "96", "features of a token"))
        .arg(number("heads", 1, "4", "attention heads; they divide --dim"))
        .arg(number("batch", 1, "32", "sequences per step, over all ranks"))
        .arg(number("seq", 1, "64", "bytes per sequence"))
        .arg(number("sample", 0, "200", "bytes to generate at the end"))
        .arg(
            Arg::new("lr")
                .long("lr")
                .value_parser(parse_learning_rate)
                .default_value("5e-3")
                .help("learning rate of AdamW"),
        )
        .arg(
            Arg::new("seed")
                .long("seed")
                .value_parser(value_parser!(u64))
                .default_value("1")
                .help("of the initial weights, the batches and the sample"),
        )
        .arg(Arg::new("save").long("save").value_parser(value_parser!(PathBuf)).help(
            "a directory, of all ranks, that gets a checkpoint after the last step; any --mesh and \
             --parallel goes on from it, in C++, Rust and Go",
        ))
        .arg(
            number(
                "save_every",
                0,
                "0",
                "with --save: also after so many steps, each time, beside training; 0: at the end \
                 only",
            ),
        )
        .arg(
            Arg::new("resume")
                .long("resume")
                .value_parser(value_parser!(PathBuf))
                .help("goes on from the newest checkpoint of this directory"),
        )
        .arg(
            Arg::new("timeout")
                .long("timeout")
                .value_parser(parse_duration)
                .default_value("2m")
                .help("how long a rank waits for the others"),
        )
        .arg(
            Arg::new("check")
                .long("check")
                .action(ArgAction::SetTrue)
                .help("train on one rank too, and compare the loss of every step"),
        )
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("end with one line of JSON on stdout; all else goes to stderr"),
        )
}

impl Settings {
    /// Bad flags end the process with a message.
    pub fn from_command_line() -> Settings {
        let mut command = command();
        let matches = command.get_matches_mut();
        let mut settings = Settings::from_matches(&matches);
        let mut refuse = |text: String| -> ! {
            command.error(clap::error::ErrorKind::ValueValidation, text).exit()
        };
        let parallel = settings.parallel;
        let mesh = match (matches.get_one::<String>("mesh").expect("has a default"), parallel) {
            (given, _) if given != "auto" => given.as_str(),
            (_, Parallel::Fsdp) => "dp=4",
            (_, Parallel::Hsdp) => "replicas=2,dp=2",
            _ => "dp=2,tp=2",
        };
        match parse_mesh(mesh, parallel == Parallel::Hsdp) {
            Ok(dims) => settings.mesh = dims,
            Err(why) => refuse(format!("--mesh={mesh}: {why}")),
        }
        let has_tp = settings.mesh.iter().any(|(name, size)| name == "tp" && *size > 1);
        if parallel == Parallel::Fsdp && has_tp {
            refuse(format!("--parallel=fsdp, --mesh={mesh}: wanted fsdp+tp, or a mesh without tp"));
        }
        if settings.save_every > 0 && settings.save.is_none() {
            refuse(format!("--save_every={}: wanted --save, too", settings.save_every));
        }
        if settings.dim % settings.heads != 0 {
            refuse(format!("--heads={} does not divide --dim={}", settings.heads, settings.dim));
        }
        settings
    }

    fn from_matches(matches: &ArgMatches) -> Settings {
        fn get<T: Clone + Send + Sync + 'static>(matches: &ArgMatches, name: &str) -> T {
            matches.get_one::<T>(name).expect("has a default").clone()
        }
        Settings {
            mesh: Vec::new(), // depends on the next
            parallel: {
                let name: String = get(matches, "parallel");
                PARALLEL.iter().find(|(other, _)| *other == name).expect("is one of them").1
            },
            backend: matches.get_one::<String>("backend").map(|backend| match backend.as_str() {
                "gloo" => Backend::Gloo,
                _ => Backend::Inproc,
            }),
            data: matches.get_one::<PathBuf>("data").cloned(),
            save: matches.get_one::<PathBuf>("save").cloned(),
            save_every: get(matches, "save_every"),
            resume: matches.get_one::<PathBuf>("resume").cloned(),
            steps: get(matches, "steps"),
            layers: get(matches, "layers"),
            dim: get(matches, "dim"),
            heads: get(matches, "heads"),
            batch: get(matches, "batch"),
            seq: get(matches, "seq"),
            sample: get(matches, "sample"),
            learning_rate: get(matches, "lr"),
            seed: get(matches, "seed"),
            timeout: get(matches, "timeout"),
            check: matches.get_flag("check"),
            json: matches.get_flag("json"),
        }
    }

    pub fn num_ranks(&self) -> usize {
        self.mesh.iter().map(|(_, size)| *size as usize).product()
    }

    /// All that has to be the same on every rank.
    pub fn to_text(&self) -> String {
        let mesh: Vec<String> =
            self.mesh.iter().map(|(name, size)| format!("{name}={size}")).collect();
        format!(
            "mesh {}, parallel {:?}, steps {}, layers {}, dim {}, heads {}, batch {}, seq {}, lr {}, seed {}, \
             sample {}, save {:?} {}, resume {:?}",
            mesh.join(","),
            self.parallel,
            self.steps,
            self.layers,
            self.dim,
            self.heads,
            self.batch,
            self.seq,
            self.learning_rate,
            self.seed,
            self.sample,
            self.save,
            self.save_every,
            self.resume
        )
    }
}

/// "dp=2,tp=2", either one alone, in either order; perhaps replicas too.
fn parse_mesh(text: &str, with_replicas: bool) -> Result<Vec<(String, i64)>, String> {
    const MAX_RANKS: i64 = 4096;
    let mut dims = Vec::new();
    for part in text.split(',') {
        let (name, size) = part.split_once('=').ok_or("wanted such as dp=2,tp=2")?;
        if name != "dp" && name != "tp" && !(with_replicas && name == "replicas") {
            return Err(format!(
                "wanted {}dp (data parallel) and tp (tensor parallel), not '{name}'",
                if with_replicas { "replicas, " } else { "" }
            ));
        }
        if dims.iter().any(|(other, _)| other == name) {
            return Err(format!("{name} is there twice"));
        }
        match size.parse() {
            Ok(size @ 1..=MAX_RANKS) => dims.push((name.to_owned(), size)),
            _ => return Err(format!("{name}={size}: wanted a size from 1 to {MAX_RANKS}")),
        }
    }
    if dims.iter().map(|(_, size)| size).product::<i64>() > MAX_RANKS {
        return Err(format!("wanted {MAX_RANKS} ranks at most"));
    }
    if with_replicas && !dims.iter().any(|(name, _)| name == "replicas") {
        dims.insert(0, ("replicas".to_owned(), 1));
    }
    if !dims.iter().any(|(name, _)| name == "dp") {
        dims.insert(0, ("dp".to_owned(), 1));
    }
    if !dims.iter().any(|(name, _)| name == "tp") {
        dims.push(("tp".to_owned(), 1));
    }
    Ok(dims)
}

fn parse_learning_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate.is_finite() => Ok(rate),
        _ => Err("wanted a number above 0".to_owned()),
    }
}

/// "500ms", "30s", "2m", "1h".
fn parse_duration(text: &str) -> Result<Duration, String> {
    let unit = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let factor = match &text[unit..] {
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err("wanted a time such as 30s".to_owned()),
    };
    match text[..unit].parse::<f64>() {
        Ok(number) if number > 0.0 && number < 1e9 => Ok(Duration::from_secs_f64(number * factor)),
        _ => Err("wanted a time above 0, such as 30s".to_owned()),
    }
}
