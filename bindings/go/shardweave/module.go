package shardweave

import (
	"runtime"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Module holds parameters and buffers by fully qualified name (FQN, "blocks.0.attn.q.weight"). Its
// forward is the host's own code, on the tensors that it registered; or that of a TorchScript file.
type Module struct {
	*rank
	handle c.Module
	err    error // the first of registering
}

func newModule(r *rank, handle c.Module) *Module {
	m := &Module{rank: r, handle: handle}
	r.own(m)
	return m
}

// NewModule is a module without parameters.
func (w *World) NewModule() (*Module, error) {
	if err := w.ready(); err != nil {
		return nil, err
	}
	handle, err := c.ModuleCreate()
	if err != nil {
		return nil, public(err)
	}
	return newModule(w.rank, handle), nil
}

// LoadModule reads a file that torch.jit.save or torch::jit::Module::save wrote; see [Module.Call].
func (w *World) LoadModule(path string) (*Module, error) {
	if err := w.ready(); err != nil {
		return nil, err
	}
	handle, err := c.ModuleLoad(path)
	if err != nil {
		return nil, public(err)
	}
	return newModule(w.rank, handle), nil
}

func (m *Module) release() {
	c.ModuleFree(m.handle)
	m.handle = nil
}

// Close ends the module; tensors that were registered stay.
func (m *Module) Close() error {
	if m.handle != nil {
		m.disown(m)
		m.release()
	}
	return nil
}

// Parameter registers a tensor, and returns it, out of any [World.Scope]. Module and caller share it:
// Distribute changes it where it stands. It is a leaf, and requires grad from now on. If it cannot be
// registered, the result carries the error, and so does the module.
func (m *Module) Parameter(fqn string, t *Tensor) *Tensor {
	return m.register(c.ModuleAddParameter, fqn, t)
}

// Buffer registers a tensor that is no parameter; otherwise as Parameter.
func (m *Module) Buffer(fqn string, t *Tensor) *Tensor { return m.register(c.ModuleAddBuffer, fqn, t) }

func (m *Module) register(add func(c.Module, string, c.Tensor) error, fqn string, t *Tensor) *Tensor {
	var err error
	switch {
	case t == nil:
		err = invalid("%s: the tensor is nil", fqn)
	case t.Err() != nil:
		err = t.Err()
	case t.rank != m.rank:
		err = errOtherRank
	default:
		err = t.use()
	}
	if err == nil {
		err = m.rank.error(add(m.handle, fqn, t.handle))
	}
	if err != nil {
		if m.err == nil {
			m.err = err
		}
		return m.failed(err)
	}
	return t.Keep()
}

// Err is the first error of Parameter and Buffer.
func (m *Module) Err() error { return m.err }

func (m *Module) use() error {
	if m.err != nil {
		return m.err
	}
	return m.ready()
}

// NamedTensor is a parameter or buffer, and its FQN.
type NamedTensor struct {
	Name string
	*Tensor
}

func (m *Module) list(number func(c.Module) (int, error), at func(c.Module, int) (string, c.Tensor, error)) ([]NamedTensor, error) {
	if err := m.use(); err != nil {
		return nil, err
	}
	n, err := number(m.handle)
	if err != nil {
		return nil, public(err)
	}
	all := make([]NamedTensor, n)
	for i := range all {
		name, handle, err := at(m.handle, i)
		if err != nil {
			return nil, public(err)
		}
		all[i] = NamedTensor{name, m.tensor(handle)}
	}
	return all, nil
}

// Parameters is all parameters: those of a module before those of its children, otherwise in the order
// of their registration.
func (m *Module) Parameters() ([]NamedTensor, error) {
	return m.list(c.ModuleNumParameters, c.ModuleParameter)
}

// Buffers is all buffers, in the same order.
func (m *Module) Buffers() ([]NamedTensor, error) { return m.list(c.ModuleNumBuffers, c.ModuleBuffer) }

// Tensors drops the names.
func Tensors(all []NamedTensor) []*Tensor {
	tensors := make([]*Tensor, len(all))
	for i := range all {
		tensors[i] = all[i].Tensor
	}
	return tensors
}

// Get is a parameter or buffer; NotFound suggests names that are nearly the same.
func (m *Module) Get(fqn string) *Tensor {
	if err := m.use(); err != nil {
		return m.failed(err)
	}
	return m.result(c.ModuleGet(m.handle, fqn))
}

// Call calls a method ("forward") of a module that was loaded. Arguments and results as [Op.Call].
func (m *Module) Call(method string, args ...any) ([]any, error) {
	if err := m.use(); err != nil {
		return nil, err
	}
	call, err := m.begin(args)
	if err != nil {
		return nil, err
	}
	defer call.Release()
	if err := call.ModuleCall(m.handle, method, int32(m.mode)); err != nil {
		return nil, m.rank.error(err)
	}
	return m.results(call), nil
}

// Distribute turns every parameter and buffer into a sharded tensor, in place; what no line of the plan
// matches is replicated, and with a nil plan everything is. A line that matches nothing is an error
// before anything changes. Collective, unless the source is SameEverywhere.
func (m *Module) Distribute(mesh *Mesh, plan *Plan, source Source) error {
	if err := m.use(); err != nil {
		return err
	}
	var handle c.Plan
	if plan != nil {
		if plan.err != nil {
			return plan.err
		}
		handle = plan.handle
	}
	err := c.ModuleDistribute(m.handle, mesh.handle, handle, int64(source))
	runtime.KeepAlive(plan)
	return m.rank.error(err)
}

// FinishGradSync brings every gradient into its parameter's layout, in buckets. Between Backward and
// the optimizer's step. Collective.
func (m *Module) FinishGradSync() error {
	if err := m.use(); err != nil {
		return err
	}
	return m.rank.error(c.ModuleFinishGradSync(m.handle))
}

// FinishGradSync is Module.FinishGradSync for parameters in no module.
func FinishGradSync(parameters []*Tensor) error {
	r, err := rankOf("FinishGradSync", parameters)
	if err != nil {
		return err
	}
	err = c.FinishGradSync(handlesOf(parameters))
	runtime.KeepAlive(parameters)
	return r.error(err)
}

// ClipOption is an option of ClipGradNorm.
type ClipOption func(*clipOptions)

type clipOptions struct {
	normType   float64
	onlyFinite bool
}

// WithNorm is the p of the p-norm, above 0; math.Inf(1) for the largest element; else 2.
func WithNorm(p float64) ClipOption { return func(o *clipOptions) { o.normType = p } }

// WithFiniteNorm makes a norm that is no finite number an error, OutOfRange, on every rank.
func WithFiniteNorm() ClipOption { return func(o *clipOptions) { o.onlyFinite = true } }

// ClipGradNorm multiplies all gradients by max / (norm + 1e-6) if their norm as one vector, wherever they
// lie, is above max. After FinishGradSync. It returns the norm before, the same on every rank.
// Collective.
func ClipGradNorm(parameters []*Tensor, max float64, options ...ClipOption) (norm float64, err error) {
	r, err := rankOf("ClipGradNorm", parameters)
	if err != nil {
		return 0, err
	}
	o := clipOptions{normType: 2}
	for _, option := range options {
		option(&o)
	}
	norm, err = c.ClipGradNorm(handlesOf(parameters), max, o.normType, o.onlyFinite)
	runtime.KeepAlive(parameters)
	return norm, r.error(err)
}

// ZeroGrad makes every gradient none.
func (m *Module) ZeroGrad() error {
	if err := m.use(); err != nil {
		return err
	}
	return m.rank.error(c.ModuleZeroGrad(m.handle))
}

// Plan says by FQN patterns how parameters and buffers lie; the first line that matches counts. In a
// pattern * stands for any characters, ? for one, {a,b} for either. It belongs to no rank.
type Plan struct {
	handle c.Plan
	err    error
}

func newPlan(handle c.Plan, err error) (*Plan, error) {
	if err != nil {
		return nil, public(err)
	}
	p := &Plan{handle: handle}
	runtime.SetFinalizer(p, func(p *Plan) { c.PlanFree(p.handle) })
	return p, nil
}

// NewPlan is a plan without lines.
func NewPlan() *Plan {
	p, err := newPlan(c.PlanCreate())
	if err != nil {
		return &Plan{err: err}
	}
	return p
}

// ParsePlan reads JSON, in the order of the text:
//
//	{"parameter": {"*.{q,k,v,up}.weight": {"tp": "S(0)"}, "*.{o,down}.weight": {"tp": "S(1)"}}}
func ParsePlan(json string) (*Plan, error) { return newPlan(c.PlanFromJSON(json)) }

// Add appends a line, and returns the plan. If that fails, Distribute tells. Not while another goroutine
// uses the plan.
func (p *Plan) Add(pattern string, placements On) *Plan {
	if p.err == nil {
		p.err = public(c.PlanAdd(p.handle, pattern, placements.pairs()))
		runtime.KeepAlive(p)
	}
	return p
}

// MarshalJSON is what ParsePlan reads.
func (p *Plan) MarshalJSON() ([]byte, error) {
	if p.err != nil {
		return nil, p.err
	}
	text, err := c.PlanToJSON(p.handle)
	runtime.KeepAlive(p)
	return []byte(text), public(err)
}
