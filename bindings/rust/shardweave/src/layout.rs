use std::fmt;
use std::str::FromStr;

use shardweave_sys as sys;

use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Of, Result};
use crate::ffi::c_text;
use crate::mesh::Mesh;

/// How a tensor lies along one dimension of a mesh. As text, and for serde: `R`, `S(0)`, `P(sum)`,
/// `S(1, sf=3)`, `S(0, sizes=[3,0,4])`.
///
/// ```
/// use shardweave::Placement::{self, *};
/// assert_eq!("S(0)".parse::<Placement>()?, Shard(0));
/// assert_eq!(RaggedShard { dim: 0, sizes: vec![3, 0, 4] }.to_string(), "S(0, sizes=[3,0,4])");
/// # Ok::<(), shardweave::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Placement {
    /// Every rank holds the whole tensor.
    Replicate,
    /// Cut along a tensor dimension: chunks of ceil(size / ranks), then the rest, then empty ones.
    /// `Shard(-1)` is the last dimension of whatever tensor it is used with.
    Shard(i32),
    /// Cut into `split_factor` chunks, each of which is cut over the ranks.
    StridedShard {
        /// The tensor dimension.
        dim: i32,
        /// How many chunks.
        split_factor: i64,
    },
    /// Cut with a number of elements for each rank.
    RaggedShard {
        /// The tensor dimension.
        dim: i32,
        /// Of each rank.
        sizes: Vec<i64>,
    },
    /// The tensor is the reduction of what the ranks hold.
    Partial(ReduceOp),
}

impl Placement {
    fn to_raw(&self) -> sys::swv_placement {
        let mut raw = sys::SWV_PLACEMENT_INIT;
        match self {
            Placement::Replicate => {}
            Placement::Shard(dim) => {
                raw.kind = sys::SWV_PLACEMENT_SHARD;
                raw.dim = *dim;
            }
            Placement::StridedShard { dim, split_factor } => {
                raw.kind = sys::SWV_PLACEMENT_STRIDED_SHARD;
                raw.dim = *dim;
                raw.split_factor = *split_factor;
            }
            Placement::RaggedShard { dim, sizes } => {
                raw.kind = sys::SWV_PLACEMENT_RAGGED_SHARD;
                raw.dim = *dim;
                raw.sizes = sizes.as_ptr();
                raw.num_sizes = sizes.len();
            }
            Placement::Partial(op) => {
                raw.kind = sys::SWV_PLACEMENT_PARTIAL;
                raw.reduce_op = *op as i32;
            }
        }
        raw
    }

    /// # Safety
    /// `raw` comes from a layout that still lives.
    unsafe fn from_raw(raw: &sys::swv_placement) -> Result<Placement> {
        Ok(match raw.kind {
            sys::SWV_PLACEMENT_REPLICATE => Placement::Replicate,
            sys::SWV_PLACEMENT_SHARD => Placement::Shard(raw.dim),
            sys::SWV_PLACEMENT_STRIDED_SHARD => {
                Placement::StridedShard { dim: raw.dim, split_factor: raw.split_factor }
            }
            sys::SWV_PLACEMENT_RAGGED_SHARD => Placement::RaggedShard {
                dim: raw.dim,
                sizes: if raw.num_sizes == 0 {
                    Vec::new()
                } else {
                    // SAFETY: the layout's own array.
                    unsafe { std::slice::from_raw_parts(raw.sizes, raw.num_sizes) }.to_vec()
                },
            },
            sys::SWV_PLACEMENT_PARTIAL => Placement::Partial(ReduceOp::from_number(raw.reduce_op)?),
            number => return Err(Error::newer_library("placement kind", number)),
        })
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Replicate => f.write_str("R"),
            Placement::Shard(dim) => write!(f, "S({dim})"),
            Placement::StridedShard { dim, split_factor } => {
                write!(f, "S({dim}, sf={split_factor})")
            }
            Placement::RaggedShard { dim, sizes } => {
                let sizes: Vec<String> = sizes.iter().map(i64::to_string).collect();
                write!(f, "S({dim}, sizes=[{}])", sizes.join(","))
            }
            Placement::Partial(op) => write!(f, "P({op})"),
        }
    }
}

impl FromStr for Placement {
    type Err = Error;

    fn from_str(text: &str) -> Result<Placement> {
        let layout = Layout::parse(&format!("[{text}]"))?;
        match layout.placements()?.as_slice() {
            [placement] => Ok(placement.clone()),
            all => Err(Error::invalid(format!(
                "Placement::from_str: '{text}' is {} placements; wanted one",
                all.len()
            ))),
        }
    }
}

handle! {
    /// How a tensor lies on a mesh: a placement for each mesh dimension. A layout never changes.
    ///
    /// ```
    /// use shardweave::{Layout, Placement::*};
    /// let layout = Layout::new(&[Shard(0), Replicate])?;
    /// assert_eq!(layout, Layout::parse("[S(0), R]")?);
    /// // What the rank at (1, 0) of a 2x2 mesh holds of a 7x5 tensor: shape and offset.
    /// let extent = layout.local_extent(&[2, 2], &[1, 0], &[7, 5])?;
    /// assert_eq!((extent.shape, extent.offset), (vec![3, 5], vec![4, 0]));
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    ///
    /// As text, and for serde: `[S(0), R]`.
    Layout, swv_layout, swv_layout_free
}

// SAFETY: the header says that layouts belong to no rank and may be used by several threads at
// once; they never change, and handles may be freed from any thread.
unsafe impl Send for Layout {}
// SAFETY: the same.
unsafe impl Sync for Layout {}

/// What one rank holds of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LocalExtent {
    /// Of its part.
    pub shape: Vec<i64>,
    /// The global index of its part's first element.
    pub offset: Vec<i64>,
}

/// The cheapest way from one layout to another.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedistributionPlan {
    /// That the busiest rank sends.
    pub bytes: i64,
    /// The steps, as text.
    pub steps: String,
}

impl Layout {
    /// A placement for each mesh dimension, in the mesh's order.
    pub fn new(placements: &[Placement]) -> Result<Layout> {
        Layout::with_order(placements, &[])
    }

    /// The same where several mesh dimensions shard one tensor dimension and do not cut in their
    /// own order: `order` is a permutation of the mesh dimensions, the one that cuts first in
    /// front.
    pub fn with_order(placements: &[Placement], order: &[i32]) -> Result<Layout> {
        let raw: Vec<_> = placements.iter().map(Placement::to_raw).collect();
        create!(swv_layout_create(raw.as_ptr(), raw.len(), order.as_ptr(), order.len())).map(Layout)
    }

    /// From text: `[S(0), R]`, `[S(0)@1, S(0)@0]`. An error says where the text is wrong.
    pub fn parse(text: &str) -> Result<Layout> {
        let text = c_text(text, "layout").of("Layout::parse")?;
        create!(swv_layout_parse(text.as_ptr())).map(Layout)
    }

    /// By names of mesh dimensions; those that are not named are replicated.
    pub fn named<N: AsRef<str>>(mesh: &Mesh, placements: &[(N, Placement)]) -> Result<Layout> {
        let texts = NamedPlacements::new(placements).of("Layout::named")?;
        create!(swv_layout_create_named(mesh.as_ptr(), texts.raw.as_ptr(), texts.raw.len()))
            .map(Layout)
    }

    /// For each mesh dimension.
    pub fn placements(&self) -> Result<Vec<Placement>> {
        let dims = get!(swv_layout_mesh_ndim(self.as_ptr()) -> i32)?;
        (0..dims)
            .map(|dim| {
                let mut raw = Placement::Replicate.to_raw();
                call!(swv_layout_placement(self.as_ptr(), dim, &mut raw))?;
                // SAFETY: this layout lives.
                unsafe { Placement::from_raw(&raw) }
            })
            .collect::<Result<_>>()
            .of("Layout::placements")
    }

    /// What the rank at `coordinate` holds of a tensor with these sizes. Arithmetic only.
    pub fn local_extent(
        &self,
        mesh_shape: &[i64],
        coordinate: &[i64],
        sizes: &[i64],
    ) -> Result<LocalExtent> {
        if mesh_shape.len() != coordinate.len() {
            return Err(Error::invalid(format!(
                "Layout::local_extent: argument 'coordinate' is {coordinate:?}, with {} dimensions; \
                 wanted {}, as mesh_shape \
                 {mesh_shape:?}",
                coordinate.len(),
                mesh_shape.len()
            )));
        }
        let mut extent = LocalExtent { shape: vec![0; sizes.len()], offset: vec![0; sizes.len()] };
        call!(swv_layout_local_extent(
            self.as_ptr(),
            mesh_shape.as_ptr(),
            coordinate.as_ptr(),
            mesh_shape.len(),
            sizes.as_ptr(),
            sizes.len(),
            extent.shape.as_mut_ptr(),
            extent.offset.as_mut_ptr(),
        ))?;
        Ok(extent)
    }

    /// How a tensor gets from this layout to `to`. Arithmetic only.
    pub fn plan_to(
        &self,
        to: &Layout,
        mesh_shape: &[i64],
        sizes: &[i64],
        dtype: DType,
    ) -> Result<RedistributionPlan> {
        let mut bytes = 0;
        let steps = text!(swv_layout_plan(
            self.as_ptr(),
            to.as_ptr(),
            mesh_shape.as_ptr(),
            mesh_shape.len(),
            sizes.as_ptr(),
            sizes.len(),
            dtype as i32,
            &mut bytes,
        ))?;
        Ok(RedistributionPlan { bytes, steps })
    }

    /// Which rank holds which part of a tensor with these sizes, as a picture of characters.
    pub fn picture(&self, mesh: &Mesh, sizes: &[i64]) -> Result<String> {
        text!(swv_layout_picture(self.as_ptr(), mesh.as_ptr(), sizes.as_ptr(), sizes.len()))
    }
}

impl PartialEq for Layout {
    fn eq(&self, other: &Layout) -> bool {
        get!(swv_layout_equal(self.as_ptr(), other.as_ptr()) -> i32) == Ok(1)
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&text!(swv_layout_to_string(self.as_ptr())).map_err(|_| fmt::Error)?)
    }
}

impl FromStr for Layout {
    type Err = Error;

    /// [`Layout::parse`].
    fn from_str(text: &str) -> Result<Layout> {
        Layout::parse(text)
    }
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Layout({self})")
    }
}

/// What says how a tensor lies on a mesh: a [`Layout`], its text, or placements by the names of
/// mesh dimensions, where those that are not named are replicated.
///
/// ```
/// use shardweave::{IntoLayout, Placement::*, World};
/// World::threads(4).run(|world| {
///     let mesh = world.device_mesh(&[("dp", 2), ("tp", 2)])?;
///     let layout = [("tp", Shard(0))].into_layout(&mesh)?;
///     assert_eq!(layout, "[R, S(0)]".into_layout(&mesh)?);
///     Ok(())
/// })?;
/// # Ok::<(), shardweave::Error>(())
/// ```
pub trait IntoLayout {
    /// The layout on this mesh.
    fn into_layout(self, mesh: &Mesh) -> Result<Layout>;
}

impl IntoLayout for Layout {
    fn into_layout(self, _: &Mesh) -> Result<Layout> {
        Ok(self)
    }
}
impl IntoLayout for &Layout {
    fn into_layout(self, _: &Mesh) -> Result<Layout> {
        create!(swv_layout_parse(c_text(&self.to_string(), "layout")?.as_ptr())).map(Layout)
    }
}
impl IntoLayout for &str {
    fn into_layout(self, _: &Mesh) -> Result<Layout> {
        Layout::parse(self)
    }
}
impl<N: AsRef<str>> IntoLayout for &[(N, Placement)] {
    fn into_layout(self, mesh: &Mesh) -> Result<Layout> {
        Layout::named(mesh, self)
    }
}
impl<N: AsRef<str>, const COUNT: usize> IntoLayout for [(N, Placement); COUNT] {
    fn into_layout(self, mesh: &Mesh) -> Result<Layout> {
        Layout::named(mesh, &self)
    }
}
impl<N: AsRef<str>, const COUNT: usize> IntoLayout for &[(N, Placement); COUNT] {
    fn into_layout(self, mesh: &Mesh) -> Result<Layout> {
        Layout::named(mesh, self)
    }
}
impl<N: AsRef<str>> IntoLayout for Vec<(N, Placement)> {
    fn into_layout(self, mesh: &Mesh) -> Result<Layout> {
        Layout::named(mesh, &self)
    }
}
impl<N: AsRef<str>> IntoLayout for &Vec<(N, Placement)> {
    fn into_layout(self, mesh: &Mesh) -> Result<Layout> {
        Layout::named(mesh, self)
    }
}

/// Placements by mesh dimension as the C interface takes them, with the texts that they point to.
pub(crate) struct NamedPlacements {
    pub(crate) raw: Vec<sys::swv_named_placement>,
    _texts: Vec<[std::ffi::CString; 2]>,
}

impl NamedPlacements {
    pub(crate) fn new<N: AsRef<str>>(placements: &[(N, Placement)]) -> Result<NamedPlacements> {
        let texts = placements
            .iter()
            .map(|(name, placement)| {
                Ok([
                    c_text(name.as_ref(), "mesh dimension")?,
                    c_text(&placement.to_string(), "placement")?,
                ])
            })
            .collect::<Result<Vec<_>>>()?;
        let raw = texts
            .iter()
            .map(|[name, placement]| sys::swv_named_placement {
                mesh_dim: name.as_ptr(),
                placement: placement.as_ptr(),
            })
            .collect();
        Ok(NamedPlacements { raw, _texts: texts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    /// Nothing is taken for replicated that is not.
    #[test]
    fn a_placement_of_a_newer_library_is_an_error() {
        let kind = |kind, reduce_op| {
            let raw = sys::swv_placement { kind, reduce_op, ..Placement::Replicate.to_raw() };
            // SAFETY: without sizes, there is nothing that has to live.
            unsafe { Placement::from_raw(&raw) }
        };
        assert_eq!(kind(sys::SWV_PLACEMENT_REPLICATE, 0), Ok(Placement::Replicate));
        assert_eq!(kind(sys::SWV_PLACEMENT_PARTIAL, 3), Ok(Placement::Partial(ReduceOp::Max)));
        for (error, what) in [
            (kind(77, 0), "placement kind 77"),
            (kind(sys::SWV_PLACEMENT_PARTIAL, 77), "reduction 77"),
        ] {
            let error = error.unwrap_err();
            assert_eq!(error.code(), Code::Unimplemented);
            assert!(error.message().contains(what), "{error}");
        }
    }

    /// There and back, for every kind.
    #[test]
    fn placements_as_c_has_them() {
        let all = [
            Placement::Replicate,
            Placement::Shard(-1),
            Placement::StridedShard { dim: 1, split_factor: 3 },
            Placement::RaggedShard { dim: 0, sizes: vec![3, 0, 4] },
            Placement::RaggedShard { dim: 2, sizes: vec![] },
            Placement::Partial(ReduceOp::Product),
        ];
        let texts =
            ["R", "S(-1)", "S(1, sf=3)", "S(0, sizes=[3,0,4])", "S(2, sizes=[])", "P(product)"];
        for (placement, text) in all.iter().zip(texts) {
            // SAFETY: the sizes are those of `placement`, which lives.
            assert_eq!(unsafe { Placement::from_raw(&placement.to_raw()) }.as_ref(), Ok(placement));
            assert_eq!(placement.to_string(), text);
        }
    }
}
