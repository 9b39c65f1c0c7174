use std::ptr::NonNull;

use shardweave_sys as sys;

use crate::error::Result;
use crate::ffi::c_text;
use crate::layout::{NamedPlacements, Placement};

/// How the parameters and buffers of a module lie on a mesh: lines of a pattern and placements by
/// the names of mesh dimensions. Of lines that match a name the most specific counts, in whatever
/// order: an exact name, then patterns in which `*` stands for any characters, `?` for one and
/// `{a,b}` for either, by how many characters they have besides, then `re:` and a regular
/// expression. Lines of equal standing have to agree; what no line matches is replicated.
///
/// ```
/// use shardweave::{ParameterPlan, Placement::*};
/// let plan = ParameterPlan::new()
///     .line("*.{q,k,v,up}.*", &[("tp", Shard(0))])
///     .line("*.{o,down}.weight", &[("tp", Shard(1))]);
/// # #[cfg(feature = "serde")] {
/// let text =
///     r#"{"parameter":{"*.{q,k,v,up}.*":{"tp":"S(0)"},"*.{o,down}.weight":{"tp":"S(1)"}}}"#;
/// assert_eq!(serde_json::to_string(&plan).unwrap(), text);
/// assert_eq!(serde_json::from_str::<ParameterPlan>(text).unwrap(), plan);
/// # }
/// ```
///
/// By serde (the feature of that name) it comes from any format that keeps the order of maps; the JSON is that of the C
/// interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParameterPlan {
    pub(crate) lines: Lines,
    pub(crate) forward: Lines,
}

type Lines = Vec<(String, Vec<(String, Placement)>)>;

handle! {
    /// The C interface's own.
    PlanHandle, swv_plan, swv_plan_free
}

impl ParameterPlan {
    /// Everything replicated.
    pub fn new() -> ParameterPlan {
        ParameterPlan::default()
    }

    /// With a further line.
    pub fn line<N: AsRef<str>>(
        mut self,
        pattern: impl Into<String>,
        placements: &[(N, Placement)],
    ) -> ParameterPlan {
        self.lines.push((pattern.into(), owned(placements)));
        self
    }

    /// With where the inputs or outputs of modules go, whenever the model runs: a pattern of modules'
    /// names, then `.input` or `.output` (the first of them), or with an index, `.input.1`. Along mesh
    /// dimensions that are not named a tensor stays as it is.
    ///
    /// A module is met in the operator that its `weight` takes part in, whoever calls it; one without
    /// a weight of its own is an error of [`Module::distribute`](crate::Module::distribute).
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
        self.forward.push((pattern.into(), owned(placements)));
        self
    }

    /// The lines: patterns with placements by mesh dimension.
    pub fn lines(&self) -> impl Iterator<Item = (&str, &[(String, Placement)])> {
        self.lines.iter().map(|(pattern, placements)| (pattern.as_str(), placements.as_slice()))
    }

    pub(crate) fn to_handle(&self) -> Result<PlanHandle> {
        if !self.forward.is_empty() {
            let text = c_text(&self.json(), "plan")?;
            let handle: NonNull<sys::swv_plan> = create!(swv_plan_from_json(text.as_ptr()))?;
            return Ok(PlanHandle(handle));
        }
        let handle: NonNull<sys::swv_plan> = create!(swv_plan_create())?;
        let plan = PlanHandle(handle);
        for (pattern, placements) in &self.lines {
            let pattern = c_text(pattern, "pattern")?;
            let named = NamedPlacements::new(placements)?;
            call!(swv_plan_add(
                plan.as_ptr(),
                pattern.as_ptr(),
                named.raw.as_ptr(),
                named.raw.len()
            ))?;
        }
        Ok(plan)
    }

    /// For the C interface, which takes lines of `forward` as JSON alone.
    fn json(&self) -> String {
        fn map<T>(entries: &[(String, T)], value: impl Fn(&T) -> String) -> String {
            let entries: Vec<String> =
                entries.iter().map(|(key, v)| format!("{}:{}", quoted(key), value(v))).collect();
            format!("{{{}}}", entries.join(","))
        }
        let lines = |lines: &Lines| map(lines, |line| map(line, |p| quoted(&p.to_string())));
        format!("{{\"parameter\":{},\"forward\":{}}}", lines(&self.lines), lines(&self.forward))
    }
}

fn owned<N: AsRef<str>>(placements: &[(N, Placement)]) -> Vec<(String, Placement)> {
    placements.iter().map(|(dim, p)| (dim.as_ref().to_owned(), p.clone())).collect()
}

/// As a JSON string.
fn quoted(text: &str) -> String {
    let mut result = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => result.extend(['\\', c]),
            c if c < ' ' => result.push_str(&format!("\\u{:04x}", c as u32)),
            c => result.push(c),
        }
    }
    result.push('"');
    result
}
