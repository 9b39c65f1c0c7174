package shardweave

import (
	"sort"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Mesh names every rank by its coordinate in a grid with named dimensions. It is one rank's view.
type Mesh struct {
	_ noCopy
	*thing[c.Mesh]
	named map[string]*Layout // those that were asked for by On
}

func (m *Mesh) home() (*rank, error) {
	if m == nil || m.thing == nil {
		return nil, noThing("Mesh")
	}
	return m.rank, nil
}

// MeshDim is a dimension of a mesh.
type MeshDim struct {
	Name string
	Size int
}

// Dim is a dimension of a mesh: w.Mesh(Dim("dp", 2), Dim("tp", 4)).
func Dim(name string, size int) MeshDim { return MeshDim{name, size} }

func newMesh(r *rank) func(c.Mesh, error) (*Mesh, error) {
	return func(handle c.Mesh, err error) (*Mesh, error) {
		if err != nil {
			return nil, err
		}
		return &Mesh{thing: own(r, "mesh", handle, c.MeshFree), named: map[string]*Layout{}}, nil
	}
}

// Close ends the mesh; tensors that lie on it stay.
func (m *Mesh) Close() error {
	if m == nil {
		return nil
	}
	return m.thing.close()
}

func split(dims []MeshDim) (names []string, sizes []int64) {
	for _, dim := range dims {
		names, sizes = append(names, dim.Name), append(sizes, int64(dim.Size))
	}
	return names, sizes
}

// Mesh lays all ranks out row-major: the last dimension varies fastest.
func (w *World) Mesh(dims ...MeshDim) (*Mesh, error) { return w.MeshOfRanks(nil, dims...) }

// MeshOfRanks takes explicit world ranks, row-major, all distinct; this rank is among them.
func (w *World) MeshOfRanks(ranks []int64, dims ...MeshDim) (*Mesh, error) {
	names, sizes := split(dims)
	return ask(func(r *rank) (*Mesh, error) { return newMesh(r)(c.MeshCreate(w.handle, names, sizes, ranks)) }, w)
}

// ParseMesh reads "dp=2,tp=4".
func (w *World) ParseMesh(text string) (*Mesh, error) {
	return ask(func(r *rank) (*Mesh, error) { return newMesh(r)(c.MeshParse(w.handle, text)) }, w)
}

// Slice is the sub-mesh of the named dimensions, in that order, with this rank in it.
func (m *Mesh) Slice(names ...string) (*Mesh, error) {
	return ask(func(r *rank) (*Mesh, error) { return newMesh(r)(c.MeshSlice(m.handle, names)) }, m)
}

// Flatten merges neighbouring dimensions into one, all if none is named. newName "": joined by "_".
func (m *Mesh) Flatten(newName string, names ...string) (*Mesh, error) {
	return ask(func(r *rank) (*Mesh, error) { return newMesh(r)(c.MeshFlatten(m.handle, names, newName)) }, m)
}

// Unflatten splits one dimension into several, row-major.
func (m *Mesh) Unflatten(name string, dims ...MeshDim) (*Mesh, error) {
	names, sizes := split(dims)
	return ask(func(r *rank) (*Mesh, error) { return newMesh(r)(c.MeshUnflatten(m.handle, name, names, sizes)) }, m)
}

// Dims is the mesh's dimensions.
func (m *Mesh) Dims() ([]MeshDim, error) {
	return ask(func(*rank) ([]MeshDim, error) {
		sizes, err := c.MeshShape(m.handle)
		if err != nil {
			return nil, err
		}
		dims := make([]MeshDim, len(sizes))
		for i, size := range sizes {
			name, err := c.MeshDimName(m.handle, int32(i))
			if err != nil {
				return nil, err
			}
			dims[i] = Dim(name, int(size))
		}
		return dims, nil
	}, m)
}

// Coordinate is this rank's.
func (m *Mesh) Coordinate() ([]int64, error) {
	return ask(func(*rank) ([]int64, error) { return c.MeshCoordinate(m.handle) }, m)
}

// Ranks is all world ranks, row-major.
func (m *Mesh) Ranks() ([]int64, error) {
	return ask(func(*rank) ([]int64, error) { return c.MeshRanks(m.handle) }, m)
}

// Comm is this rank's group along a dimension; its rank in the group is its coordinate. Collective at
// first.
func (m *Mesh) Comm(dim string) (*Comm, error) {
	return ask(func(r *rank) (*Comm, error) {
		index, err := c.MeshFindDim(m.handle, dim)
		if err != nil {
			return nil, err
		}
		handle, err := c.MeshComm(m.handle, index)
		if err != nil {
			return nil, err
		}
		return newComm(r, handle), nil
	}, m)
}

// Connect makes the groups of all dimensions now. Collective.
func (m *Mesh) Connect() error {
	return do(func(*rank) error { return c.MeshConnect(m.handle) }, m)
}

// Equal says whether names, sizes and ranks are the same.
func (m *Mesh) Equal(other *Mesh) (bool, error) {
	return ask(func(*rank) (bool, error) { return c.MeshEqual(m.handle, other.handle) }, m, other)
}

// String is "DeviceMesh(dp=2, tp=2)".
func (m *Mesh) String() string {
	text, err := ask(func(*rank) (string, error) { return c.MeshToString(m.handle) }, m)
	if err != nil {
		return "Mesh(" + err.Error() + ")"
	}
	return text
}

// Seed says which numbers random operators on the mesh draw: the same for every layout and number of
// ranks. The same seed on every rank.
func (m *Mesh) Seed(seed uint64) error {
	return do(func(*rank) error { return c.MeshSeed(m.handle, seed) }, m)
}

// RandomState is the seed, and how many operators have drawn.
func (m *Mesh) RandomState() (seed, offset uint64, err error) {
	err = do(func(*rank) (err error) {
		seed, offset, err = c.MeshRandomState(m.handle)
		return err
	}, m)
	return seed, offset, err
}

// SetRandomState goes back to what RandomState was.
func (m *Mesh) SetRandomState(seed, offset uint64) error {
	return do(func(*rank) error { return c.MeshSetRandomState(m.handle, seed, offset) }, m)
}

// WithRandomState calls body, in which the mesh draws from that state; then it goes on where it was. What is
// computed a second time draws its numbers a second time.
func (m *Mesh) WithRandomState(seed, offset uint64, body func() error) (err error) {
	if body == nil {
		return noBody()
	}
	scope, err := ask(func(*rank) (c.Scope, error) { return c.MeshUseRandomState(m.handle, seed, offset) }, m)
	if err != nil {
		return err
	}
	defer m.rank.finallyOr(&err, func() { c.ScopeFree(scope) })
	return body()
}

// CostModel is what communication and computation cost, by which operators choose among the strategies of
// their sharding rules, and redistributions their steps.
type CostModel struct {
	Links  []LinkCost // one for each mesh dimension
	Device DeviceCost // of a rank
}

// LinkCost is what a collective along a mesh dimension costs.
type LinkCost struct {
	Latency   float64 // seconds per collective; 0 or more
	Bandwidth float64 // bytes per second and rank
}

// DeviceCost is what a rank computes.
type DeviceCost struct {
	Flops     float64 // multiplications and additions per second, in matrix products
	Bandwidth float64 // bytes per second that are read or written
}

// CostModel is what SetCostModel has set, or that of rank threads on a CPU.
func (m *Mesh) CostModel() (CostModel, error) {
	return ask(func(*rank) (CostModel, error) {
		var model CostModel
		sizes, err := c.MeshShape(m.handle)
		if err != nil {
			return model, err
		}
		links, device, err := c.MeshCostModel(m.handle, len(sizes))
		if err != nil {
			return model, err
		}
		for _, link := range links {
			model.Links = append(model.Links, LinkCost{link[0], link[1]})
		}
		model.Device = DeviceCost{device[0], device[1]}
		return model, nil
	}, m)
}

// AddRule says how an operator shards on this mesh: one of a library that the process has loaded
// (TORCH_LIBRARY), or one of LibTorch's, "mylib::swiglu" with all its overloads or "aten::add.Tensor".
// Each way says, along one mesh dimension, how the tensor arguments lie and how the results lie then,
// where nothing has to be sent: "S(0), R -> S(0)". "pointwise" alone: element by element. A derivative is
// an operator of its own, with a rule of its own. Every rank adds the same, before or between operators.
func (m *Mesh) AddRule(name string, ways ...string) error {
	return do(func(*rank) error { return c.MeshAddRule(m.handle, name, ways) }, m)
}

// SetCostModel sets it from now on, on this mesh; its slices have models of their own. What was decided
// before is forgotten. Collective, once: ranks that are not all given the same, or one of which is given
// what is none, all get an error and keep what they had.
func (m *Mesh) SetCostModel(model CostModel) error {
	var links [][2]float64
	for _, link := range model.Links {
		links = append(links, [2]float64{link.Latency, link.Bandwidth})
	}
	device := [2]float64{model.Device.Flops, model.Device.Bandwidth}
	return do(func(*rank) error { return c.MeshSetCostModel(m.handle, links, device) }, m)
}

// MeasureCostModel is what communication and computation cost here and now, the same text on every rank:
// links by collectives of a few bytes and of many, the device by a matrix product and a copy, medians of
// the slowest rank. Nothing is set by it: SetCostModelFromJSON takes the text, which a program keeps for
// the runs that follow. Of the host: its memory and its processor, whatever GPUs there are, whose costs are
// to be set. A second or two. Collective.
func (m *Mesh) MeasureCostModel() (string, error) {
	return ask(func(*rank) (string, error) { return c.MeshMeasureCostModel(m.handle) }, m)
}

// SetCostModelFromJSON is SetCostModel for what MeasureCostModel has measured.
func (m *Mesh) SetCostModelFromJSON(text string) error {
	return do(func(*rank) error { return c.MeshSetCostModelFromJSON(m.handle, text) }, m)
}

// ForbidCommunication calls body, in which operators on this mesh's tensors that would communicate by
// themselves fail with FailedPrecondition, naming operator and tensors.
func (m *Mesh) ForbidCommunication(body func() error) (err error) {
	if body == nil {
		return noBody()
	}
	scope, err := ask(func(*rank) (c.Scope, error) { return c.MeshForbidCommunication(m.handle) }, m)
	if err != nil {
		return err
	}
	defer m.rank.finallyOr(&err, func() { c.ScopeFree(scope) })
	return body()
}

// Named calls body; traces and errors say meanwhile that name runs: "blocks.0.attn".
func (m *Mesh) Named(name string, body func() error) (err error) {
	if body == nil {
		return noBody()
	}
	scope, err := ask(func(*rank) (c.Scope, error) { return c.MeshEnterModule(m.handle, name) }, m)
	if err != nil {
		return err
	}
	defer m.rank.finallyOr(&err, func() { c.ScopeFree(scope) })
	return body()
}

// DispatchCounters is what operators on the mesh's tensors did on this rank.
type DispatchCounters struct {
	Operators               int64
	CacheMisses             int64
	ImplicitRedistributions int64 // with communication, that nobody asked for by name
	GatheredOperators       int64 // calls of operators without a sharding rule
	RememberedUses          int64 // redistributions that an earlier one's result made needless
	RememberedBytes         int64 // that such results take up now
	UnshardedWeights        int64 // times that a weight that the user had cut was brought elsewhere
}

// DispatchCounters counts since the mesh was made.
func (m *Mesh) DispatchCounters() (DispatchCounters, error) {
	return ask(func(*rank) (DispatchCounters, error) {
		n, err := c.MeshDispatchCounters(m.handle)
		return DispatchCounters{n[0], n[1], n[2], n[3], n[4], n[5], n[6]}, err
	}, m)
}

// Trace is a record of communication: what moves, how far, and who wanted it.
type Trace struct {
	_ noCopy
	*thing[c.Trace]
}

func (t *Trace) home() (*rank, error) {
	if t == nil || t.thing == nil {
		return nil, noThing("Trace")
	}
	return t.rank, nil
}

// Trace records every collective that tensors of the mesh start until it is closed.
func (m *Mesh) Trace() (*Trace, error) {
	return ask(func(r *rank) (*Trace, error) {
		handle, err := c.TraceCreate(m.handle)
		if err != nil {
			return nil, err
		}
		r.traced = append(r.traced, m.thing)
		return &Trace{thing: own(r, "trace", handle, func(handle c.Trace) {
			r.endTraceOf(m.thing)
			c.TraceFree(handle)
		})}, nil
	}, m)
}

// Close ends the recording.
func (t *Trace) Close() error {
	if t == nil {
		return nil
	}
	return t.thing.close()
}

// Clear forgets what was recorded.
func (t *Trace) Clear() error { return do(func(*rank) error { return c.TraceClear(t.handle) }, t) }

// Len is how many events were recorded.
func (t *Trace) Len() (int, error) {
	return ask(func(*rank) (int, error) { return c.TraceNumEvents(t.handle) }, t)
}

// Bytes is what a rank sends, as planned.
func (t *Trace) Bytes() (int64, error) {
	return ask(func(*rank) (int64, error) { return c.TraceBytes(t.handle) }, t)
}

// String is a table.
func (t *Trace) String() string {
	text, err := ask(func(*rank) (string, error) { return c.TraceToString(t.handle) }, t)
	if err != nil {
		return "Trace(" + err.Error() + ")"
	}
	return text
}

// MarshalJSON is the record as JSON: what swv_trace_to_json in the C header shows. "source" is the line that
// called this package; "module" is that of the innermost [Mesh.Named] or [Forward.Run].
func (t *Trace) MarshalJSON() ([]byte, error) {
	text, err := ask(func(*rank) (string, error) { return c.TraceToJSON(t.handle) }, t)
	if err != nil {
		return nil, err
	}
	return []byte(text), nil
}

// Spec says how a tensor lies on a mesh: a *Layout, or an On.
type Spec interface {
	// on is the layout. In a call; known, which may be nil, keeps what was asked for before.
	on(mesh c.Mesh, known map[string]*Layout) (*Layout, error)
}

// orReplicated is what a nil Spec means.
func orReplicated(spec Spec) Spec {
	if spec == nil {
		return On{}
	}
	return spec
}

// Layout has a placement for each mesh dimension: "[S(0), R]" cuts tensor dimension 0 along mesh
// dimension 0 and replicates along mesh dimension 1. It never changes, and belongs to no rank.
type Layout struct {
	_ noCopy
	*lasting[c.Layout]
}

func newLayout(handle c.Layout, err error) (*Layout, error) {
	if err != nil {
		return nil, public(err)
	}
	return &Layout{lasting: last(handle, c.LayoutFree)}, nil
}

func (l *Layout) it() *lasting[c.Layout] {
	if l == nil {
		return nil
	}
	return l.lasting
}

// ParseLayout reads a text: R; S(dim); P(sum), P(avg), ...; strided S(1, sf=3); ragged
// S(0, sizes=[3,0,4]); cut order S(0)@1. An error says where the text is wrong.
func ParseLayout(text string) (*Layout, error) { return newLayout(c.LayoutParse(text)) }

// MustParseLayout is ParseLayout for texts in the program, which panics if it is wrong.
func MustParseLayout(text string) *Layout {
	l, err := ParseLayout(text)
	if err != nil {
		panic(err)
	}
	return l
}

func (l *Layout) on(c.Mesh, map[string]*Layout) (*Layout, error) { return l, l.it().check() }

// String is the text that ParseLayout reads.
func (l *Layout) String() string {
	text, err := with(l.it(), c.LayoutToString)
	if err != nil {
		return "Layout(" + err.Error() + ")"
	}
	return text
}

// PlacementKind is a kind of placements.
type PlacementKind int32

// Kinds of placements.
const (
	PlacementReplicate    PlacementKind = c.PlacementReplicate    // every rank holds the whole tensor
	PlacementShard        PlacementKind = c.PlacementShard        // chunks of ceil(size / ranks), then the rest, then empty ones
	PlacementStridedShard PlacementKind = c.PlacementStridedShard // SplitFactor chunks, each cut over the ranks
	PlacementRaggedShard  PlacementKind = c.PlacementRaggedShard  // Sizes[i] elements for rank i
	PlacementPartial      PlacementKind = c.PlacementPartial      // the tensor is the reduction of what the ranks hold
)

// Placement is how a tensor lies along one dimension of a mesh. Fields that the kind does not have are 0.
type Placement struct {
	Kind        PlacementKind
	Dim         int      // of shards; below 0: from the end
	SplitFactor int64    // of strided shards
	Sizes       []int64  // of ragged shards
	ReduceOp    ReduceOp // of partials
}

// Placements are those for each mesh dimension.
func (l *Layout) Placements() ([]Placement, error) {
	return with(l.it(), func(handle c.Layout) ([]Placement, error) {
		dims, err := c.LayoutMeshNDim(handle)
		if err != nil {
			return nil, err
		}
		placements := make([]Placement, dims)
		for i := range placements {
			p, err := c.LayoutPlacement(handle, int32(i))
			if err != nil {
				return nil, err
			}
			placements[i] = Placement{Kind: PlacementKind(p.Kind), Dim: int(p.Dim), Sizes: p.Sizes, ReduceOp: ReduceOp(p.ReduceOp)}
			if p.Kind == c.PlacementStridedShard {
				placements[i].SplitFactor = p.SplitFactor
			}
		}
		return placements, nil
	})
}

// Equal says whether two layouts are the same.
func (l *Layout) Equal(other *Layout) bool {
	equal, err := with(l.it(), func(a c.Layout) (bool, error) {
		return with(other.it(), func(b c.Layout) (bool, error) { return c.LayoutEqual(a, b) })
	})
	return err == nil && equal
}

// LocalExtent is what the rank at coordinate holds of a tensor: the shape of its part, and the global
// index of the first element. Arithmetic only.
func (l *Layout) LocalExtent(meshShape, coordinate, sizes []int64) (shape, offset []int64, err error) {
	offset, err = with(l.it(), func(handle c.Layout) (offset []int64, err error) {
		if len(meshShape) != len(coordinate) {
			return nil, invalid("the mesh has %d dimensions, the coordinate %d", len(meshShape), len(coordinate))
		}
		shape, offset, err = c.LayoutLocalExtent(handle, meshShape, coordinate, sizes)
		return offset, err
	})
	return shape, offset, err
}

// PlanTo is the cheapest steps to another layout, and the bytes that the busiest rank sends.
// Arithmetic only.
func (l *Layout) PlanTo(to *Layout, meshShape, sizes []int64, dtype DType) (bytes int64, steps string, err error) {
	steps, err = with(l.it(), func(from c.Layout) (string, error) {
		return with(to.it(), func(to c.Layout) (steps string, err error) {
			bytes, steps, err = c.LayoutPlan(from, to, meshShape, sizes, int32(dtype))
			return steps, err
		})
	})
	return bytes, steps, err
}

// Picture shows which rank holds which part of a tensor.
func (l *Layout) Picture(m *Mesh, sizes []int64) (string, error) {
	if err := l.it().check(); err != nil {
		return "", err
	}
	return ask(func(r *rank) (string, error) {
		handle, err := l.it().lend(r)
		if err != nil {
			return "", err
		}
		return c.LayoutPicture(handle, m.handle, sizes)
	}, m)
}

// On says how a tensor lies along named mesh dimensions: On{"dp": "S(0)"}. Along others it is
// replicated. It is a Spec, and an option of factories.
type On map[string]string

// pairs is the names and placements, in the order of the names.
func (o On) pairs() []string {
	names := make([]string, 0, len(o))
	for name := range o {
		names = append(names, name)
	}
	sort.Strings(names)
	all := make([]string, 0, 2*len(o))
	for _, name := range names {
		all = append(all, name, o[name])
	}
	return all
}

func (o On) on(mesh c.Mesh, known map[string]*Layout) (*Layout, error) {
	pairs := o.pairs()
	key := ""
	for _, text := range pairs {
		key += text + "\x00"
	}
	if l, there := known[key]; there {
		return l, nil
	}
	l, err := newLayout(c.LayoutCreateNamed(mesh, pairs))
	if err == nil && known != nil {
		known[key] = l
	}
	return l, err
}

// layoutOn is the spec's handle, until the rank's call ends; nil for no spec. In a call.
func (r *rank) layoutOn(spec Spec, m *Mesh) (c.Layout, error) {
	if spec == nil {
		return nil, nil
	}
	var mesh c.Mesh
	var known map[string]*Layout
	if m != nil {
		mesh, known = m.handle, m.named
	}
	l, err := spec.on(mesh, known)
	if err != nil {
		return nil, err
	}
	return l.it().lend(r)
}
