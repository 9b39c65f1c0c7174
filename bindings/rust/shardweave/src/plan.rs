use std::fmt;
use std::ptr::NonNull;

use serde::de::{self, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use shardweave_sys as sys;

use crate::error::Result;
use crate::ffi::c_text;
use crate::layout::{NamedPlacements, Placement};

/// How the parameters and buffers of a module lie on a mesh: lines of a pattern and placements by
/// the names of mesh dimensions. The first line that matches a name counts; what no line matches is
/// replicated. In a pattern `*` stands for any characters, `?` for one, `{a,b}` for either.
///
/// ```
/// use shardweave::{ParameterPlan, Placement::*};
/// let plan = ParameterPlan::new()
///     .line("*.{q,k,v,up}.*", &[("tp", Shard(0))])
///     .line("*.{o,down}.weight", &[("tp", Shard(1))]);
/// let text =
///     r#"{"parameter":{"*.{q,k,v,up}.*":{"tp":"S(0)"},"*.{o,down}.weight":{"tp":"S(1)"}}}"#;
/// assert_eq!(serde_json::to_string(&plan).unwrap(), text);
/// assert_eq!(serde_json::from_str::<ParameterPlan>(text).unwrap(), plan);
/// ```
///
/// By serde it comes from any format that keeps the order of maps; the JSON is that of the C
/// interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParameterPlan {
    lines: Vec<(String, Vec<(String, Placement)>)>,
}

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
        let placements = placements.iter().map(|(dim, p)| (dim.as_ref().to_owned(), p.clone()));
        self.lines.push((pattern.into(), placements.collect()));
        self
    }

    /// The lines: patterns with placements by mesh dimension.
    pub fn lines(&self) -> impl Iterator<Item = (&str, &[(String, Placement)])> {
        self.lines.iter().map(|(pattern, placements)| (pattern.as_str(), placements.as_slice()))
    }

    pub(crate) fn to_handle(&self) -> Result<PlanHandle> {
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
}

/// As maps in the order of the lines.
struct AsMap<'a, V>(&'a [(String, V)]);

impl Serialize for AsMap<'_, Placement> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(dim, placement)| (dim, placement)))
    }
}

impl Serialize for AsMap<'_, Vec<(String, Placement)>> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(pattern, line)| (pattern, AsMap(line))))
    }
}

impl Serialize for ParameterPlan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1))?;
        map.serialize_entry("parameter", &AsMap(&self.lines))?;
        map.end()
    }
}

/// A map as a list, in the order of the text.
struct Entries<V>(Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Entries<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor<V>(std::marker::PhantomData<V>);

        impl<'de, V: Deserialize<'de>> Visitor<'de> for EntriesVisitor<V> {
            type Value = Entries<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map such as {\"*.weight\": {\"tp\": \"S(0)\"}}")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries<V>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(EntriesVisitor(std::marker::PhantomData))
    }
}

impl<'de> Deserialize<'de> for ParameterPlan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ParameterPlan, D::Error> {
        let mut plan = ParameterPlan::new();
        let sections = Entries::<Entries<Entries<Placement>>>::deserialize(deserializer)?;
        for (section, lines) in sections.0 {
            if section != "parameter" {
                return Err(de::Error::unknown_field(&section, &["parameter"]));
            }
            plan.lines.extend(lines.0.into_iter().map(|(pattern, line)| (pattern, line.0)));
        }
        Ok(plan)
    }
}
