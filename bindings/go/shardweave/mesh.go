package shardweave

import (
	"runtime"
	"sort"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Mesh names every rank by its coordinate in a grid with named dimensions. It is one rank's view.
type Mesh struct {
	*rank
	handle c.Mesh
	named  map[string]*Layout // those that were asked for by On
}

// Dim is a dimension of a mesh.
type Dim struct {
	Name string
	Size int64
}

func newMesh(r *rank, handle c.Mesh, err error) (*Mesh, error) {
	if err != nil {
		return nil, public(err)
	}
	m := &Mesh{r, handle, map[string]*Layout{}}
	r.own(m)
	return m, nil
}

func (m *Mesh) release() {
	c.MeshFree(m.handle)
	m.handle = nil
}

// Close ends the mesh; tensors that lie on it stay.
func (m *Mesh) Close() error {
	if m.handle != nil {
		m.disown(m)
		m.release()
	}
	return nil
}

func split(dims []Dim) (names []string, sizes []int64) {
	for _, dim := range dims {
		names, sizes = append(names, dim.Name), append(sizes, dim.Size)
	}
	return names, sizes
}

// Mesh lays all ranks out row-major: the last dimension varies fastest.
func (w *World) Mesh(dims ...Dim) (*Mesh, error) { return w.MeshOfRanks(nil, dims...) }

// MeshOfRanks takes explicit world ranks, row-major, all distinct; this rank is among them.
func (w *World) MeshOfRanks(ranks []int64, dims ...Dim) (*Mesh, error) {
	if err := w.ready(); err != nil {
		return nil, err
	}
	names, sizes := split(dims)
	handle, err := c.MeshCreate(w.handle, names, sizes, ranks)
	return newMesh(w.rank, handle, err)
}

// ParseMesh reads "dp=2,tp=4".
func (w *World) ParseMesh(text string) (*Mesh, error) {
	if err := w.ready(); err != nil {
		return nil, err
	}
	handle, err := c.MeshParse(w.handle, text)
	return newMesh(w.rank, handle, err)
}

// Slice is the sub-mesh of the named dimensions, in that order, with this rank in it.
func (m *Mesh) Slice(names ...string) (*Mesh, error) {
	handle, err := c.MeshSlice(m.handle, names)
	return newMesh(m.rank, handle, err)
}

// Flatten merges neighbouring dimensions into one, all if none is named. newName "": joined by "_".
func (m *Mesh) Flatten(newName string, names ...string) (*Mesh, error) {
	handle, err := c.MeshFlatten(m.handle, names, newName)
	return newMesh(m.rank, handle, err)
}

// Unflatten splits one dimension into several, row-major.
func (m *Mesh) Unflatten(name string, dims ...Dim) (*Mesh, error) {
	names, sizes := split(dims)
	handle, err := c.MeshUnflatten(m.handle, name, names, sizes)
	return newMesh(m.rank, handle, err)
}

// Dims is the mesh's dimensions.
func (m *Mesh) Dims() ([]Dim, error) {
	sizes, err := c.MeshShape(m.handle)
	if err != nil {
		return nil, public(err)
	}
	dims := make([]Dim, len(sizes))
	for i, size := range sizes {
		name, err := c.MeshDimName(m.handle, int32(i))
		if err != nil {
			return nil, public(err)
		}
		dims[i] = Dim{name, size}
	}
	return dims, nil
}

// Coordinate is this rank's.
func (m *Mesh) Coordinate() ([]int64, error) {
	coordinate, err := c.MeshCoordinate(m.handle)
	return coordinate, public(err)
}

// Ranks is all world ranks, row-major.
func (m *Mesh) Ranks() ([]int64, error) {
	ranks, err := c.MeshRanks(m.handle)
	return ranks, public(err)
}

// Comm is this rank's group along a dimension; its rank in the group is its coordinate. Collective at
// first.
func (m *Mesh) Comm(dim string) (*Comm, error) {
	index, err := c.MeshFindDim(m.handle, dim)
	if err != nil {
		return nil, public(err)
	}
	handle, err := c.MeshComm(m.handle, index)
	if err != nil {
		return nil, public(err)
	}
	return newComm(m.rank, handle), nil
}

// Connect makes the groups of all dimensions now. Collective.
func (m *Mesh) Connect() error { return public(c.MeshConnect(m.handle)) }

// Equal says whether names, sizes and ranks are the same.
func (m *Mesh) Equal(other *Mesh) (bool, error) {
	equal, err := c.MeshEqual(m.handle, other.handle)
	return equal, public(err)
}

// String is "DeviceMesh(dp=2, tp=2)".
func (m *Mesh) String() string {
	text, err := c.MeshToString(m.handle)
	if err != nil {
		return public(err).Error()
	}
	return text
}

// Seed says which numbers random operators on the mesh draw: the same for every layout and number of
// ranks. The same seed on every rank.
func (m *Mesh) Seed(seed uint64) error { return public(c.MeshSeed(m.handle, seed)) }

// RandomState is the seed, and how many operators have drawn.
func (m *Mesh) RandomState() (seed, offset uint64, err error) {
	seed, offset, err = c.MeshRandomState(m.handle)
	return seed, offset, public(err)
}

// SetRandomState goes back to what RandomState was.
func (m *Mesh) SetRandomState(seed, offset uint64) error {
	return public(c.MeshSetRandomState(m.handle, seed, offset))
}

// ForbidCommunication calls body, in which operators on this mesh's tensors that would communicate by
// themselves fail with FailedPrecondition, naming operator and tensors.
func (m *Mesh) ForbidCommunication(body func() error) error {
	scope, err := c.MeshForbidCommunication(m.handle)
	if err != nil {
		return public(err)
	}
	defer c.StrictScopeFree(scope)
	return body()
}

// Named calls body; traces and errors say meanwhile that name runs: "blocks.0.attn".
func (m *Mesh) Named(name string, body func() error) error {
	scope, err := c.ModuleScopeCreate(m.handle, name)
	if err != nil {
		return public(err)
	}
	defer c.ModuleScopeFree(scope)
	return body()
}

// DispatchCounters is what operators on the mesh's tensors did on this rank.
type DispatchCounters struct {
	Operators               int64
	CacheMisses             int64
	ImplicitRedistributions int64 // with communication, that nobody asked for by name
	GatheredOperators       int64 // calls of operators without a sharding rule
}

// DispatchCounters counts since the mesh was made.
func (m *Mesh) DispatchCounters() (DispatchCounters, error) {
	n, err := c.MeshDispatchCounters(m.handle)
	return DispatchCounters{n[0], n[1], n[2], n[3]}, public(err)
}

// Trace is a record of communication: what moves, how far, and who wanted it.
type Trace struct {
	rank   *rank
	handle c.Trace
}

// Trace records every collective that tensors of the mesh start until it is closed.
func (m *Mesh) Trace() (*Trace, error) {
	handle, err := c.TraceCreate(m.handle)
	if err != nil {
		return nil, public(err)
	}
	t := &Trace{m.rank, handle}
	m.own(t)
	return t, nil
}

func (t *Trace) release() {
	c.TraceFree(t.handle)
	t.handle = nil
}

// Close ends the recording.
func (t *Trace) Close() error {
	if t.handle != nil {
		t.rank.disown(t)
		t.release()
	}
	return nil
}

// Clear forgets what was recorded.
func (t *Trace) Clear() error { return public(c.TraceClear(t.handle)) }

// Len is how many events were recorded.
func (t *Trace) Len() (int, error) {
	n, err := c.TraceNumEvents(t.handle)
	return n, public(err)
}

// Bytes is what a rank sends, as planned.
func (t *Trace) Bytes() (int64, error) {
	n, err := c.TraceBytes(t.handle)
	return n, public(err)
}

// String is a table.
func (t *Trace) String() string {
	text, err := c.TraceToString(t.handle)
	if err != nil {
		return public(err).Error()
	}
	return text
}

// MarshalJSON is the record as JSON.
func (t *Trace) MarshalJSON() ([]byte, error) {
	text, err := c.TraceToJSON(t.handle)
	return []byte(text), public(err)
}

// Spec says how a tensor lies on a mesh: a *Layout, or an On.
type Spec interface {
	on(m *Mesh) (*Layout, error)
}

// Layout has a placement for each mesh dimension: "[S(0), R]" cuts tensor dimension 0 along mesh
// dimension 0 and replicates along mesh dimension 1. It never changes, and belongs to no rank.
type Layout struct {
	handle c.Layout
}

func newLayout(handle c.Layout, err error) (*Layout, error) {
	if err != nil {
		return nil, public(err)
	}
	l := &Layout{handle}
	runtime.SetFinalizer(l, func(l *Layout) { c.LayoutFree(l.handle) })
	return l, nil
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

func (l *Layout) on(*Mesh) (*Layout, error) { return l, nil }

// String is the text that ParseLayout reads.
func (l *Layout) String() string {
	text, err := c.LayoutToString(l.handle)
	runtime.KeepAlive(l)
	if err != nil {
		return public(err).Error()
	}
	return text
}

// Equal says whether two layouts are the same.
func (l *Layout) Equal(other *Layout) bool {
	equal, err := c.LayoutEqual(l.handle, other.handle)
	runtime.KeepAlive(l)
	runtime.KeepAlive(other)
	return err == nil && equal
}

// LocalExtent is what the rank at coordinate holds of a tensor: the shape of its part, and the global
// index of the first element. Arithmetic only.
func (l *Layout) LocalExtent(meshShape, coordinate, sizes []int64) (shape, offset []int64, err error) {
	if len(meshShape) != len(coordinate) {
		return nil, nil, invalid("LocalExtent: the mesh has %d dimensions, the coordinate %d", len(meshShape), len(coordinate))
	}
	shape, offset, err = c.LayoutLocalExtent(l.handle, meshShape, coordinate, sizes)
	runtime.KeepAlive(l)
	return shape, offset, public(err)
}

// PlanTo is the cheapest steps to another layout, and the bytes that the busiest rank sends.
// Arithmetic only.
func (l *Layout) PlanTo(to *Layout, meshShape, sizes []int64, dtype DType) (bytes int64, steps string, err error) {
	bytes, steps, err = c.LayoutPlan(l.handle, to.handle, meshShape, sizes, int32(dtype))
	runtime.KeepAlive(l)
	runtime.KeepAlive(to)
	return bytes, steps, public(err)
}

// Picture shows which rank holds which part of a tensor.
func (l *Layout) Picture(m *Mesh, sizes []int64) (string, error) {
	text, err := c.LayoutPicture(l.handle, m.handle, sizes)
	runtime.KeepAlive(l)
	return text, public(err)
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

func (o On) on(m *Mesh) (*Layout, error) {
	pairs := o.pairs()
	key := ""
	for _, text := range pairs {
		key += text + "\x00"
	}
	if l, there := m.named[key]; there {
		return l, nil
	}
	l, err := newLayout(c.LayoutCreateNamed(m.handle, pairs))
	if err == nil {
		m.named[key] = l
	}
	return l, err
}

// layoutOn is the spec's handle; nil for no spec. The layout is to be kept alive.
func layoutOn(spec Spec, m *Mesh) (*Layout, c.Layout, error) {
	if spec == nil {
		return nil, nil, nil
	}
	l, err := spec.on(m)
	if err != nil {
		return nil, nil, err
	}
	return l, l.handle, nil
}
