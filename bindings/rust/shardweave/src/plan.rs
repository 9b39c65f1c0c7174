use std::fmt;
use std::ptr;
use std::ptr::NonNull;

use shardweave_sys as sys;

use crate::error::{Error, Of, Result};
use crate::ffi::{c_text, take_string};
use crate::layout::{Layout, NamedPlacements, Placement};
use crate::mesh::Mesh;
use crate::module::Module;
use crate::module_handle::handle_of;

/// Where everything in a module lies, by lines of a pattern and placements. Of lines that match a
/// name the most specific counts, in whatever order: an exact name, then patterns in which `*`
/// stands for any characters, `?` for one and `{a,b}` for either, by how many characters they have
/// besides, then `re:` and a regular expression. Lines of equal standing have to agree; what no
/// line matches is replicated.
///
/// ```
/// use shardweave::{ParameterPlan, Placement::*};
/// let plan = ParameterPlan::new()
///     .line("*.{q,k,v,up}.*", &[("tp", Shard(0))])
///     .line("*.{o,down}.weight", &[("tp", Shard(1))]);
/// let text =
///     r#"{"parameter":{"*.{q,k,v,up}.*":{"tp":"S(0)"},"*.{o,down}.weight":{"tp":"S(1)"}}}"#;
/// assert_eq!(ParameterPlan::from_json(text)?, plan);
/// # #[cfg(feature = "serde")] {
/// assert_eq!(serde_json::to_string(&plan).unwrap(), text);
/// assert_eq!(serde_json::from_str::<ParameterPlan>(text).unwrap(), plan);
/// # }
/// # Ok::<(), shardweave::Error>(())
/// ```
///
/// By serde (the feature of that name) it comes from any format that keeps the order of maps; the
/// JSON is that of the C interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParameterPlan {
    pub(crate) lines: Lines,
    pub(crate) forward: Lines,
    pub(crate) modules: ModuleLines,
}

type Lines = Vec<(String, PlanPlacements)>;
/// Patterns, mesh dimensions, and a style along each or "".
type ModuleLines = Vec<(String, Vec<(String, String)>)>;

/// Of a line of a [`ParameterPlan`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanPlacements {
    /// By the names of mesh dimensions.
    Named(Vec<(String, Placement)>),
    /// By position, one for each of the mesh's dimensions, and the order in which they cut: a
    /// layout's text, `[S(0)@1, S(0)@0]`.
    Layout(String),
}

handle! {
    /// The C interface's own.
    PlanHandle, swv_plan, swv_plan_free
}

/// How a module lies along a mesh dimension, whichever a plan names for it
/// ([`ParameterPlan::module`]): what [`Module::sharding`] says. What is not named is replicated.
///
/// ```
/// use shardweave::{Placement::*, Sharding};
/// let sharding = Sharding::new()
///     .parameter("up", Shard(0))
///     .parameter("down", Shard(1))
///     .forward("output", Replicate)
///     .style("experts") // what follows, where a plan asks for it
///     .parameter("{up,down}", Shard(-3));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// Parameters and forward by style; the first is that without one.
    styles: Vec<(String, [Answer; 2])>,
}

type Answer = Vec<(String, Placement)>;

impl Sharding {
    /// Everything replicated.
    pub fn new() -> Sharding {
        Sharding { styles: vec![(String::new(), <[Answer; 2]>::default())] }
    }

    /// A parameter or buffer, by its name in the module or a pattern.
    pub fn parameter(self, name: impl Into<String>, placement: Placement) -> Sharding {
        self.with(0, name.into(), placement)
    }

    /// An input or output: "input", "output.1".
    pub fn forward(self, value: impl Into<String>, placement: Placement) -> Sharding {
        self.with(1, value.into(), placement)
    }

    /// What follows is said of this style, which a plan names behind the mesh dimension.
    pub fn style(mut self, style: impl Into<String>) -> Sharding {
        self.styles.push((style.into(), <[Answer; 2]>::default()));
        self
    }

    fn with(mut self, part: usize, name: String, placement: Placement) -> Sharding {
        let (_, last) = self.styles.last_mut().expect("there is the first");
        last[part].push((name, placement));
        self
    }

    pub(crate) fn to_json(&self) -> String {
        let answer = |answer: &Answer| {
            object(answer.iter().map(|(name, p)| (name.as_str(), quoted(&p.to_string()))))
        };
        let parts = |[parameter, forward]: &[Answer; 2]| {
            vec![("parameter", answer(parameter)), ("forward", answer(forward))]
        };
        let ((_, first), styles) = self.styles.split_first().expect("there is the first");
        let mut all = parts(first);
        if !styles.is_empty() {
            let styles = styles.iter().map(|(style, its)| (style.as_str(), object(parts(its))));
            all.push(("styles", object(styles)));
        }
        object(all)
    }
}

impl Default for Sharding {
    fn default() -> Sharding {
        Sharding::new()
    }
}

/// JSON.
fn object<'a>(entries: impl IntoIterator<Item = (&'a str, String)>) -> String {
    let entries = entries.into_iter().map(|(key, value)| format!("{}:{value}", quoted(key)));
    format!("{{{}}}", entries.collect::<Vec<_>>().join(","))
}

fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c < ' ' => quoted.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

impl ParameterPlan {
    /// Everything replicated.
    pub fn new() -> ParameterPlan {
        ParameterPlan::default()
    }

    /// With a further line: parameters and buffers with these names lie so. Along mesh dimensions
    /// that are not named they are replicated.
    pub fn line<N: AsRef<str>>(
        mut self,
        pattern: impl Into<String>,
        placements: &[(N, Placement)],
    ) -> ParameterPlan {
        self.lines.push((pattern.into(), named(placements)));
        self
    }

    /// The same by a [`Layout`] or its text, which says in which order mesh dimensions cut.
    ///
    /// ```
    /// let plan = shardweave::ParameterPlan::new().layout_line("embedding", "[S(0)@1, S(0)@0]");
    /// ```
    pub fn layout_line(
        mut self,
        pattern: impl Into<String>,
        layout: impl fmt::Display,
    ) -> ParameterPlan {
        self.lines.push((pattern.into(), PlanPlacements::Layout(layout.to_string())));
        self
    }

    /// With where the inputs or outputs of modules go, whenever the model runs: a pattern of
    /// modules' names, then `.input` or `.output` (the first of them), or with an index,
    /// `.input.1`. Along mesh dimensions that are not named a tensor stays as it is.
    ///
    /// A module is met in the operator that its `weight` takes part in, whoever calls it; one
    /// without a weight of its own, where it runs within a [`Forward`](crate::Forward).
    ///
    /// ```
    /// use shardweave::{ParameterPlan, Placement::*};
    /// let plan = ParameterPlan::new()
    ///     .line("*.{q,k,v}.weight", &[("tp", Shard(0))])
    ///     .line("*.o.weight", &[("tp", Shard(1))])
    ///     .forward("*.o.output", &[("tp", Replicate)]);
    /// ```
    pub fn forward<N: AsRef<str>>(
        mut self,
        pattern: impl Into<String>,
        placements: &[(N, Placement)],
    ) -> ParameterPlan {
        self.forward.push((pattern.into(), named(placements)));
        self
    }

    /// The same by a [`Layout`] or its text.
    pub fn forward_layout(
        mut self,
        pattern: impl Into<String>,
        layout: impl fmt::Display,
    ) -> ParameterPlan {
        self.forward.push((pattern.into(), PlanPlacements::Layout(layout.to_string())));
        self
    }

    /// With all lines of another one behind its own: plans of parts of a model.
    ///
    /// ```
    /// use shardweave::{ParameterPlan, World};
    /// let mesh = World::counting(0, 2)?.device_mesh(&[("tp", 2)])?;
    /// let config = r#"{"num_attention_heads": 8, "num_key_value_heads": 2}"#;
    /// let part = |kind: &str, options: &str| ParameterPlan::from_zoo(kind, config, &mesh, options);
    /// let plan = part("attention", r#"{"fqn": "layers.*.attn"}"#)?
    ///     .append(part("mlp", r#"{"fqn": "layers.*.mlp"}"#)?);
    /// assert!(plan.lines().any(|(pattern, _)| pattern == "layers.*.mlp.down_proj.weight"));
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn append(mut self, other: ParameterPlan) -> ParameterPlan {
        self.lines.extend(other.lines);
        self.forward.extend(other.forward);
        self.modules.extend(other.modules);
        self
    }

    /// With modules that say themselves how they shard ([`Module::sharding`]), and the mesh
    /// dimensions along which, each with one of the module's styles, or "".
    ///
    /// ```
    /// use shardweave::{Module, ParameterPlan, Placement::*, Sharding, Source, Tensor, World};
    ///
    /// #[derive(Module)]
    /// #[module(sharding = Mlp::rows)]
    /// struct Mlp {
    ///     up: Tensor,
    ///     down: Tensor,
    /// }
    ///
    /// impl Mlp {
    ///     fn rows(&self) -> Sharding {
    ///         Sharding::new().parameter("up", Shard(0)).parameter("down", Shard(1))
    ///     }
    /// }
    ///
    /// World::threads(2).run(|world| {
    ///     let mlp = Mlp { up: Tensor::ones(&[8, 3])?, down: Tensor::ones(&[2, 8])? };
    ///     let mesh = world.device_mesh(&[("tp", 2)])?;
    ///     let plan = ParameterPlan::new().module("", &[("tp", "")]);
    ///     mlp.distribute(&mesh, &plan, Source::Same)?;
    ///     assert_eq!(mlp.down.layout()?.to_string(), "[S(1)]");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn module(mut self, pattern: impl Into<String>, along: &[(&str, &str)]) -> ParameterPlan {
        let along = along.iter().map(|(dim, style)| ((*dim).to_owned(), (*style).to_owned()));
        self.modules.push((pattern.into(), along.collect()));
        self
    }

    /// The lines about parameters and buffers.
    pub fn lines(&self) -> impl Iterator<Item = (&str, &PlanPlacements)> {
        self.lines.iter().map(|(pattern, placements)| (pattern.as_str(), placements))
    }

    /// The lines about inputs and outputs of modules.
    pub fn forward_lines(&self) -> impl Iterator<Item = (&str, &PlanPlacements)> {
        self.forward.iter().map(|(pattern, placements)| (pattern.as_str(), placements))
    }

    /// From JSON; an error says on which line of the text. Placements are an object by the names of
    /// mesh dimensions, a list by position, or a layout's text.
    ///
    /// ```
    /// use shardweave::ParameterPlan;
    /// let plan = ParameterPlan::from_json(
    ///     r#"{"parameter": {"*.up": {"tp": "S(0)"}, "*.down": ["R", "S(1)"]},
    ///         "forward": {"*.norm.input": {"tp": "S(1)"}}}"#,
    /// )?;
    /// assert_eq!((plan.lines().count(), plan.forward_lines().count()), (2, 1));
    /// let error = ParameterPlan::from_json("{\n\"parameter\": 7}").unwrap_err();
    /// assert!(error.message().contains("line 2"), "{error}");
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn from_json(text: &str) -> Result<ParameterPlan> {
        let text = c_text(text, "text").of("ParameterPlan::from_json")?;
        let plan = PlanHandle(create!(swv_plan_from_json(text.as_ptr()))?);
        ParameterPlan::of_handle(&plan).of("ParameterPlan::from_json")
    }

    /// From the tensor-parallel plan of a Hugging Face model: its object
    /// (`{"layers.*.mlp.up_proj": "colwise"}`), or the configuration that has it as
    /// `base_model_tp_plan`. The module's parameters have the names that they have there.
    /// `tp_mesh_dim` is the mesh dimension, mostly "tp".
    ///
    /// ```
    /// use shardweave::{Members, Module, ParameterPlan, Tensor};
    /// struct Up(Tensor);
    /// impl Module for Up {
    ///     fn members(&self, members: &mut Members) {
    ///         members.parameter("up_proj.weight", &self.0);
    ///     }
    /// }
    /// let up = Up(Tensor::ones(&[4, 2])?);
    /// let plan = ParameterPlan::from_hugging_face(&up, r#"{"up_proj": "colwise"}"#, "tp")?;
    /// assert_eq!(plan.lines().count(), 1);
    /// let error = ParameterPlan::from_hugging_face(&up, r#"{"up_proj": "cowlise"}"#, "tp");
    /// assert!(error.unwrap_err().message().contains("cowlise"));
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn from_hugging_face<M: Module + ?Sized>(
        module: &M,
        text: &str,
        tp_mesh_dim: &str,
    ) -> Result<ParameterPlan> {
        const NAME: &str = "ParameterPlan::from_hugging_face";
        let (module, _) = handle_of(module).of(NAME)?;
        let text = c_text(text, "text").of(NAME)?;
        let dim = c_text(tp_mesh_dim, "tp_mesh_dim").of(NAME)?;
        let plan: NonNull<sys::swv_plan> =
            create!(swv_plan_from_hugging_face(module.as_ptr(), text.as_ptr(), dim.as_ptr()))?;
        ParameterPlan::of_handle(&PlanHandle(plan)).of(NAME)
    }

    /// The library's plan for one of its models, tensor parallelism as in Megatron-LM: `kind` is
    /// "gpt2", "llama", "mixtral" or "vit", `""` the configuration's `model_type`; `config` is a
    /// Hugging Face `config.json`. It fits any model with these names, a
    /// [`NativeModule`](crate::NativeModule) or one in Rust. `options` is a JSON object, or `""`:
    /// `mesh_dim` ("tp"), `sequence_parallel`, `shard_vocabulary`, and of mixtral
    /// `expert_parallel`; one that the model does not have is an error that lists them.
    ///
    /// `kind` may also be a part of models, "attention", "mlp" or "moe", for those that the library
    /// does not have: the option `fqn` says where it stands, and of `config` attention reads the
    /// numbers of heads. [`append`](ParameterPlan::append) puts plans together.
    ///
    /// ```
    /// use shardweave::{ParameterPlan, World};
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("tp", 2)])?;
    ///     let options = r#"{"sequence_parallel": true}"#;
    ///     let plan = ParameterPlan::from_zoo("llama", "{}", &mesh, options)?;
    ///     assert!(plan.lines().any(|(pattern, _)| pattern.contains("{q,k,v}_proj")));
    ///     let error = ParameterPlan::from_zoo("llama", "{}", &mesh, r#"{"expert_parallel": true}"#);
    ///     assert!(error.unwrap_err().message().contains("is no option of llama's plan"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn from_zoo(kind: &str, config: &str, mesh: &Mesh, options: &str) -> Result<ParameterPlan> {
        const NAME: &str = "ParameterPlan::from_zoo";
        let kind = c_text(kind, "kind").of(NAME)?;
        let config = c_text(config, "config").of(NAME)?;
        let options = c_text(options, "options").of(NAME)?;
        let plan: NonNull<sys::swv_plan> = create!(swv_plan_from_zoo(
            kind.as_ptr(),
            config.as_ptr(),
            mesh.as_ptr(),
            options.as_ptr()
        ))?;
        ParameterPlan::of_handle(&PlanHandle(plan)).of(NAME)
    }

    /// From what modules are, in place of where each parameter lies: a JSON object of patterns of
    /// modules, each with a style (`colwise`, `rowwise`, `pairwise`, `sequence`, `prepare_input`,
    /// `prepare_output`) by its name or as an object with its options. `tp_mesh_dim` None: the
    /// mesh's only dimension, or "tp" of several.
    ///
    /// ```
    /// use shardweave::{nn, ParameterPlan, World};
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("tp", 2)])?;
    ///     let mlp = nn::Sequential::new().with(nn::Linear::new(3, 8)?).with(nn::Linear::new(8, 3)?);
    ///     let plan = ParameterPlan::from_styles(
    ///         &mlp,
    ///         &mesh,
    ///         r#"{"0": "colwise", "1": {"style": "rowwise", "output": "R"}}"#,
    ///         None,
    ///     )?;
    ///     assert_eq!(plan.lines().count(), 3);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn from_styles<M: Module + ?Sized>(
        module: &M,
        mesh: &Mesh,
        styles: &str,
        tp_mesh_dim: Option<&str>,
    ) -> Result<ParameterPlan> {
        const NAME: &str = "ParameterPlan::from_styles";
        let (module, _forwards) = handle_of(module).of(NAME)?;
        let styles = c_text(styles, "styles").of(NAME)?;
        let dim = tp_mesh_dim.map(|dim| c_text(dim, "tp_mesh_dim")).transpose().of(NAME)?;
        let plan: NonNull<sys::swv_plan> = create!(swv_plan_from_styles(
            module.as_ptr(),
            mesh.as_ptr(),
            styles.as_ptr(),
            dim.as_ref().map_or(ptr::null(), |dim| dim.as_ptr()),
        ))?;
        ParameterPlan::of_handle(&PlanHandle(plan)).of(NAME)
    }

    /// What [`Module::distribute`] would do with this plan, or its error; nothing is changed or
    /// sent.
    ///
    /// ```
    /// # use shardweave::{Members, Module, ParameterPlan, Placement::*, Tensor, World};
    /// # struct Up(Tensor);
    /// # impl Module for Up {
    /// #     fn members(&self, members: &mut Members) {
    /// #         members.parameter("up", &self.0);
    /// #     }
    /// # }
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("tp", 2)])?;
    ///     let up = Up(Tensor::ones(&[5, 2])?);
    ///     let plan = ParameterPlan::new().line("up", &[("tp", Shard(0))]);
    ///     println!("{}", plan.resolve(&up, &mesh)?);
    ///     assert!(plan.resolve(&up, &mesh)?.json.contains(r#""local_shape":[3,2]"#));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn resolve<M: Module + ?Sized>(&self, module: &M, mesh: &Mesh) -> Result<ResolvedPlan> {
        let (module, _forwards) = handle_of(module).of("ParameterPlan::resolve")?;
        let plan = self.to_handle().of("ParameterPlan::resolve")?;
        let (mut table, mut json) = (ptr::null_mut(), ptr::null_mut());
        call!(swv_plan_resolve(
            plan.as_ptr(),
            module.as_ptr(),
            mesh.as_ptr(),
            &mut table,
            &mut json,
        ))?;
        let text = |string| take_string(NonNull::new(string).expect("it was asked for"));
        Ok(ResolvedPlan { table: text(table), json: text(json) })
    }

    pub(crate) fn to_handle(&self) -> Result<PlanHandle> {
        let plan = PlanHandle(create!(swv_plan_create())?);
        for (pattern, placements) in &self.lines {
            let pattern = c_text(pattern, "pattern").of("ParameterPlan::line")?;
            match placements {
                PlanPlacements::Named(named) => {
                    let named = NamedPlacements::new(named).of("ParameterPlan::line")?;
                    let (all, count) = (named.raw.as_ptr(), named.raw.len());
                    call!(swv_plan_add(plan.as_ptr(), pattern.as_ptr(), all, count))?;
                }
                PlanPlacements::Layout(text) => {
                    let layout = Layout::parse(text).of("ParameterPlan::layout_line")?;
                    call!(swv_plan_add_layout(plan.as_ptr(), pattern.as_ptr(), layout.as_ptr()))?;
                }
            }
        }
        for (pattern, placements) in &self.forward {
            let pattern = c_text(pattern, "pattern").of("ParameterPlan::forward")?;
            match placements {
                PlanPlacements::Named(named) => {
                    let named = NamedPlacements::new(named).of("ParameterPlan::forward")?;
                    let (all, count) = (named.raw.as_ptr(), named.raw.len());
                    call!(swv_plan_add_forward(plan.as_ptr(), pattern.as_ptr(), all, count))?;
                }
                PlanPlacements::Layout(text) => {
                    let layout = Layout::parse(text).of("ParameterPlan::forward_layout")?;
                    call!(swv_plan_add_forward_layout(
                        plan.as_ptr(),
                        pattern.as_ptr(),
                        layout.as_ptr()
                    ))?;
                }
            }
        }
        for (pattern, along) in &self.modules {
            const NAME: &str = "ParameterPlan::module";
            let pattern = c_text(pattern, "pattern").of(NAME)?;
            let texts = |which: fn(&(String, String)) -> &String, name| {
                let texts = along.iter().map(|pair| c_text(which(pair), name));
                texts.collect::<Result<Vec<_>>>().of(NAME)
            };
            let (dims, styles) = (texts(|pair| &pair.0, "along")?, texts(|pair| &pair.1, "along")?);
            let dims: Vec<_> = dims.iter().map(|text| text.as_ptr()).collect();
            let styles: Vec<_> = styles.iter().map(|text| text.as_ptr()).collect();
            call!(swv_plan_add_module(
                plan.as_ptr(),
                pattern.as_ptr(),
                dims.as_ptr(),
                styles.as_ptr(),
                along.len(),
            ))?;
        }
        Ok(plan)
    }

    pub(crate) fn of_handle(plan: &PlanHandle) -> Result<ParameterPlan> {
        let text = text!(swv_plan_to_json(plan.as_ptr()))?;
        read_plan(&text).ok_or_else(|| Error::invalid(format!("plan: {text} is not known here")))
    }
}

fn named<N: AsRef<str>>(placements: &[(N, Placement)]) -> PlanPlacements {
    let named = placements.iter().map(|(dim, p)| (dim.as_ref().to_owned(), p.clone()));
    PlanPlacements::Named(named.collect())
}

/// What a plan comes to: every parameter and buffer, where it lies and which line decided; every
/// input and output that it speaks of.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResolvedPlan {
    /// For people.
    pub table: String,
    /// For programs.
    pub json: String,
}

/// The table.
impl fmt::Display for ResolvedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.table)
    }
}

/// Plans as swv_plan_to_json writes them: objects in each other, and strings.
struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn eat(&mut self, token: char) -> Option<()> {
        self.rest = self.rest.strip_prefix(token)?;
        Some(())
    }

    fn string(&mut self) -> Option<String> {
        self.eat('"')?;
        let mut text = String::new();
        loop {
            let c = self.rest.chars().next()?;
            self.eat(c)?;
            match c {
                '"' => return Some(text),
                '\\' => {
                    let escaped = self.rest.chars().next()?;
                    self.eat(escaped)?;
                    text.push(match escaped {
                        'b' => '\u{8}',
                        'f' => '\u{c}',
                        'n' => '\n',
                        'r' => '\r',
                        't' => '\t',
                        'u' => {
                            let digits = self.rest.get(..4)?;
                            self.rest = &self.rest[4..];
                            char::from_u32(u32::from_str_radix(digits, 16).ok()?)?
                        }
                        other => other,
                    });
                }
                c => text.push(c),
            }
        }
    }

    /// `value` reads what stands at a key.
    fn object<V>(
        &mut self,
        value: impl Fn(&mut Self, &str) -> Option<V>,
    ) -> Option<Vec<(String, V)>> {
        let mut entries = Vec::new();
        self.eat('{')?;
        if self.eat('}').is_some() {
            return Some(entries);
        }
        loop {
            let key = self.string()?;
            self.eat(':')?;
            let its = value(self, &key)?;
            entries.push((key, its));
            if self.eat('}').is_some() {
                return Some(entries);
            }
            self.eat(',')?;
        }
    }

    /// `["tp"]`, or `{"tp": "experts"}`.
    fn along(&mut self) -> Option<Vec<(String, String)>> {
        if self.rest.starts_with('{') {
            return self.object(|reader, _| reader.string());
        }
        let mut dims = Vec::new();
        self.eat('[')?;
        while self.eat(']').is_none() {
            if !dims.is_empty() {
                self.eat(',')?;
            }
            dims.push((self.string()?, String::new()));
        }
        Some(dims)
    }

    fn placements(&mut self) -> Option<PlanPlacements> {
        if self.rest.starts_with('"') {
            return self.string().map(PlanPlacements::Layout);
        }
        self.object(|reader, _| reader.string()?.parse().ok()).map(PlanPlacements::Named)
    }
}

enum Part {
    Lines(Lines),
    Modules(ModuleLines),
}

fn read_plan(text: &str) -> Option<ParameterPlan> {
    let mut reader = Reader { rest: text };
    let mut plan = ParameterPlan::new();
    let parts = reader.object(|reader, part| match part {
        "module" => reader.object(|reader, _| reader.along()).map(Part::Modules),
        _ => reader.object(|reader, _| reader.placements()).map(Part::Lines),
    })?;
    for (part, lines) in parts {
        match (part.as_str(), lines) {
            ("parameter", Part::Lines(lines)) => plan.lines = lines,
            ("forward", Part::Lines(lines)) => plan.forward = lines,
            (_, Part::Modules(lines)) => plan.modules = lines,
            _ => return None,
        }
    }
    reader.rest.is_empty().then_some(plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_as_c_writes_them() {
        assert_eq!(read_plan(r#"{"parameter":{}}"#), Some(ParameterPlan::new()));
        // What a placement is the library says; cargo_test.sh also runs this where there is none.
        if cfg!(feature = "load-dynamic") && "R".parse::<Placement>().is_err() {
            return;
        }
        let plan = ParameterPlan::new()
            .line("a\"b\\\u{1}ü\n", &[("tp", Placement::Shard(0)), ("dp", Placement::Replicate)])
            .layout_line("*", "[S(0)@1, S(0)@0]")
            .forward::<&str>("*.input", &[]);
        let text = concat!(
            r#"{"parameter":{"a\"b\\\u0001ü\n":{"tp":"S(0)","dp":"R"},"*":"[S(0)@1, S(0)@0]"},"#,
            r#""forward":{"*.input":{}}}"#
        );
        assert_eq!(read_plan(text), Some(plan));
        for end in 0..text.len() {
            if text.is_char_boundary(end) {
                assert_eq!(read_plan(&text[..end]), None, "{}", &text[..end]);
            }
        }
        let plan = ParameterPlan::new()
            .module("*.mlp", &[("dp", ""), ("tp", "")])
            .module("*.moe", &[("tp", "R")]);
        let text = r#"{"parameter":{},"module":{"*.mlp":["dp","tp"],"*.moe":{"tp":"R"}}}"#;
        assert_eq!(read_plan(text), Some(plan));
        assert_eq!(read_plan(r#"{"module":{"*.mlp":["dp" "tp"]}}"#), None);
        assert_eq!(read_plan(r#"{"parameter":{"*.mlp":["dp"]}}"#), None);
        assert_eq!(read_plan(r#"{"more":{}}"#), None);
        assert_eq!(read_plan(r#"{"parameter":{"a":{"tp":"X"}}}"#), None);
    }
}
