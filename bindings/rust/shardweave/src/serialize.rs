//! The feature `serde`: what plans are made of, as data of any format. What is one word there is its
//! text here, as `Display` writes and `FromStr` reads it.

use std::fmt;

use serde::de::{self, MapAccess, SeqAccess, Visitor};
use serde::ser::{SerializeMap, SerializeStruct};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::layout::{Layout, Placement, RedistributionPlan};
use crate::plan::{ParameterPlan, PlanPlacements};

macro_rules! as_text {
    ($($type:ty),*) => {
        $(impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$type, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        })*
    };
}
as_text!(DType, ReduceOp, Placement, Layout);

impl Serialize for RedistributionPlan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut plan = serializer.serialize_struct("RedistributionPlan", 2)?;
        plan.serialize_field("bytes", &self.bytes)?;
        plan.serialize_field("steps", &self.steps)?;
        plan.end()
    }
}

/// As maps in the order of the lines.
struct AsMap<'a, V>(&'a [(String, V)]);

impl Serialize for AsMap<'_, Placement> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(dim, placement)| (dim, placement)))
    }
}

impl Serialize for AsMap<'_, PlanPlacements> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(pattern, line)| (pattern, line)))
    }
}

/// A map by the names of mesh dimensions, or a layout's text.
impl Serialize for PlanPlacements {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            PlanPlacements::Named(named) => AsMap(named).serialize(serializer),
            PlanPlacements::Layout(text) => serializer.serialize_str(text),
        }
    }
}

/// Or a list, one for each mesh dimension.
impl<'de> Deserialize<'de> for PlanPlacements {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PlacementsVisitor;

        impl<'de> Visitor<'de> for PlacementsVisitor {
            type Value = PlanPlacements;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "placements such as {\"tp\": \"S(0)\"}, [\"R\", \"S(0)\"] or \"[R, S(0)]\"",
                )
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut named = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    named.push(entry);
                }
                Ok(PlanPlacements::Named(named))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut placements: Vec<Placement> = Vec::new();
                while let Some(placement) = list.next_element()? {
                    placements.push(placement);
                }
                let layout = Layout::new(&placements).map_err(de::Error::custom)?;
                Ok(PlanPlacements::Layout(layout.to_string()))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                let layout: Layout = text.parse().map_err(de::Error::custom)?;
                Ok(PlanPlacements::Layout(layout.to_string()))
            }
        }

        deserializer.deserialize_any(PlacementsVisitor)
    }
}

impl Serialize for ParameterPlan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let parts =
            1 + usize::from(!self.forward.is_empty()) + usize::from(!self.modules.is_empty());
        let mut map = serializer.serialize_map(Some(parts))?;
        map.serialize_entry("parameter", &AsMap(&self.lines))?;
        if !self.forward.is_empty() {
            map.serialize_entry("forward", &AsMap(&self.forward))?;
        }
        if !self.modules.is_empty() {
            map.serialize_entry("module", &AsMap(&self.modules))?;
        }
        map.end()
    }
}

/// Mesh dimensions with a style each; a list where none has one, as the C interface writes them.
impl Serialize for AsMap<'_, Vec<(String, String)>> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let along = self.0.iter().map(|(pattern, along)| (pattern, Along(along.clone())));
        serializer.collect_map(along)
    }
}

struct Along(Vec<(String, String)>);

impl Serialize for Along {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.iter().all(|(_, style)| style.is_empty()) {
            return serializer.collect_seq(self.0.iter().map(|(dim, _)| dim));
        }
        serializer.collect_map(self.0.iter().map(|(dim, style)| (dim, style)))
    }
}

impl<'de> Deserialize<'de> for Along {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AlongVisitor;

        impl<'de> Visitor<'de> for AlongVisitor {
            type Value = Along;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("mesh dimensions, \"tp\", [\"dp\", \"tp\"] or {\"tp\": \"a style\"}")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Along, A::Error> {
                let mut along = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    along.push(entry);
                }
                Ok(Along(along))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Along, A::Error> {
                let mut along = Vec::new();
                while let Some(dim) = list.next_element()? {
                    along.push((dim, String::new()));
                }
                Ok(Along(along))
            }

            fn visit_str<E: de::Error>(self, dim: &str) -> Result<Along, E> {
                Ok(Along(vec![(dim.to_owned(), String::new())]))
            }
        }

        deserializer.deserialize_any(AlongVisitor)
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
        struct PlanVisitor;

        impl<'de> Visitor<'de> for PlanVisitor {
            type Value = ParameterPlan;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map such as {\"parameter\": {\"*.weight\": {\"tp\": \"S(0)\"}}}")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ParameterPlan, A::Error> {
                const PARTS: &[&str] = &["parameter", "forward", "module"];
                let mut plan = ParameterPlan::new();
                while let Some(part) = map.next_key::<String>()? {
                    match part.as_str() {
                        "parameter" => plan.lines.extend(map.next_value::<Entries<_>>()?.0),
                        "forward" => plan.forward.extend(map.next_value::<Entries<_>>()?.0),
                        "module" => {
                            let lines = map.next_value::<Entries<Along>>()?.0;
                            plan.modules.extend(lines.into_iter().map(|(of, along)| (of, along.0)));
                        }
                        _ => return Err(de::Error::unknown_field(&part, PARTS)),
                    }
                }
                Ok(plan)
            }
        }

        deserializer.deserialize_map(PlanVisitor)
    }
}
