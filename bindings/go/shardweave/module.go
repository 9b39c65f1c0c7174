package shardweave

import (
	"runtime"
	"sync/atomic"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Module holds parameters and buffers by fully qualified name (FQN, "blocks.0.attn.q.weight"). Its
// forward is the host's own code, on the tensors that it registered; or that of a TorchScript file.
type Module struct {
	_ noCopy
	*thing[c.Module]
	*registered
}

// registered is what a module and its copies know of what was registered.
type registered struct {
	failed    atomic.Pointer[error] // the first error. Anytime: goroutines that take no turns fail too
	loaded    bool                  // from a file
	modes     []TrainingMode        // of the struct that the module is of
	transient map[string]bool       // FQNs
}

func (f *registered) fail(err error) { f.failed.CompareAndSwap(nil, &err) }

func (f *registered) failure() error {
	if first := f.failed.Load(); first != nil {
		return *first
	}
	return nil
}

func (m *Module) home() (*rank, error) {
	if m == nil || m.thing == nil {
		return nil, noThing("Module")
	}
	return m.rank, nil
}

func newModule(r *rank, handle c.Module, err error) (*Module, error) {
	if err != nil {
		return nil, err
	}
	return &Module{thing: own(r, "module", handle, c.ModuleFree), registered: &registered{}}, nil
}

// NewModule is a module without parameters.
func (w *World) NewModule() (*Module, error) {
	return ask(func(r *rank) (*Module, error) {
		handle, err := c.ModuleCreate()
		return newModule(r, handle, err)
	}, w)
}

// LoadModule reads a file that torch.jit.save or torch::jit::Module::save wrote; see [Module.Call].
func (w *World) LoadModule(path string) (*Module, error) {
	return ask(func(r *rank) (*Module, error) {
		handle, err := c.ModuleLoad(path)
		m, err := newModule(r, handle, err)
		if err == nil {
			m.loaded = true
		}
		return m, err
	}, w)
}

// Close ends the module; tensors that were registered stay.
func (m *Module) Close() error {
	if m == nil {
		return nil
	}
	return m.thing.close()
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
	r, err := begin(m, t)
	if err == nil {
		defer r.leave()
		if err = r.error(add(m.handle, fqn, t.handle)); err == nil {
			r.keep(t)
			return t
		}
	}
	if home, nothing := m.home(); nothing == nil {
		r = home
		m.fail(err)
	}
	return r.failed(err)
}

// Err is the first error of Parameter and Buffer.
func (m *Module) Err() error {
	if _, err := m.home(); err != nil {
		return err
	}
	return m.failure()
}

// alive is also that nothing has failed before.
func (m *Module) alive() error {
	if err := m.thing.alive(); err != nil {
		return err
	}
	return m.failure()
}

// NamedTensor is a parameter or buffer, and its FQN.
type NamedTensor struct {
	Name string
	*Tensor
	Transient bool // a buffer that checkpoints do not have; see [World.ModuleOf]
}

func (m *Module) list(number func(c.Module) (int, error), at func(c.Module, int) (string, c.Tensor, error)) ([]NamedTensor, error) {
	return ask(func(r *rank) ([]NamedTensor, error) {
		n, err := number(m.handle)
		if err != nil {
			return nil, err
		}
		all := make([]NamedTensor, n)
		for i := range all {
			name, handle, err := at(m.handle, i)
			if err != nil {
				return nil, err
			}
			all[i] = NamedTensor{name, r.tensor(handle), m.transient[name]}
		}
		return all, nil
	}, m)
}

// Parameters is all parameters: those of a module before those of its children, otherwise in the order
// of their registration. One with several names (tied weights) is there once, by its first.
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
	r, err := begin(m)
	if err != nil {
		return r.failed(err)
	}
	defer r.leave()
	return r.result(c.ModuleGet(m.handle, fqn))
}

// Call calls a method ("forward") of a module that was loaded. Arguments, in their order, and results as
// [Op.Call].
func (m *Module) Call(method string, args ...any) ([]any, error) {
	return ask(func(r *rank) ([]any, error) {
		call, err := r.arguments(args)
		if err != nil {
			return nil, err
		}
		defer call.Release()
		if err := call.ModuleCall(m.handle, method, int32(r.mode)); err != nil {
			return nil, err
		}
		return r.results(call), nil
	}, m)
}

// Distribute turns every parameter and buffer into a sharded tensor, in place; what no line of the plan
// matches is replicated, and with a nil plan everything is. A line that matches nothing, or that more
// specific ones leave nothing to decide, and lines that place one tensor differently are errors before
// anything changes. Collective.
func (m *Module) Distribute(mesh *Mesh, plan *Plan, source Source) error {
	return do(func(r *rank) (err error) {
		var handle c.Plan
		if plan != nil {
			if handle, err = plan.it().lend(r); err != nil {
				return err
			}
		}
		return c.ModuleDistribute(m.handle, mesh.handle, handle, int64(source))
	}, m, mesh)
}

// FinishGradSync brings every gradient into its parameter's layout, in buckets. Between Backward and
// the optimizer's step. Collective.
func (m *Module) FinishGradSync() error {
	return do(func(*rank) error { return c.ModuleFinishGradSync(m.handle) }, m)
}

// FinishGradSync is Module.FinishGradSync for parameters in no module.
func FinishGradSync(parameters []*Tensor) error {
	all, err := required(parameters)
	if err != nil {
		return err
	}
	defer runtime.KeepAlive(parameters)
	return do(func(*rank) error { return c.FinishGradSync(handlesOf(parameters)) }, all...)
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
// lie, is above max, which is 0 or more. After FinishGradSync. It returns the norm before, the same on every rank.
// Collective.
func ClipGradNorm(parameters []*Tensor, max float64, options ...ClipOption) (norm float64, err error) {
	all, err := required(parameters)
	if err != nil {
		return 0, err
	}
	o := clipOptions{normType: 2}
	for _, option := range options {
		if option != nil {
			option(&o)
		}
	}
	defer runtime.KeepAlive(parameters)
	return ask(func(*rank) (float64, error) {
		return c.ClipGradNorm(handlesOf(parameters), max, o.normType, o.onlyFinite)
	}, all...)
}

// ClipGradValue makes every element of every gradient one from -max to max; max is 0 or more. After FinishGradSync.
func ClipGradValue(parameters []*Tensor, max float64) error {
	if _, err := required(parameters); err != nil {
		return err
	}
	if !(max >= 0) {
		return invalid("argument 'max' is %v; wanted 0 or more", max)
	}
	for _, p := range parameters {
		grad, err := p.Grad()
		if err != nil {
			return err
		}
		if grad == nil {
			continue
		}
		err = grad.call(&opClampIn, grad, -max, max).Err()
		grad.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// ZeroGrad makes every gradient none.
func (m *Module) ZeroGrad() error {
	return do(func(*rank) error { return c.ModuleZeroGrad(m.handle) }, m)
}

// Plan says by FQN patterns how parameters and buffers lie. Of lines that match a name the most
// specific counts, in whatever order: an exact name, then patterns in which * stands for any
// characters, ? for one and {a,b} for either, by how many characters they have besides, then "re:" and
// a regular expression. Lines of equal standing have to agree. It belongs to no rank.
//
// A plan from JSON (ParsePlan) may have a second part, "forward": where inputs and outputs of modules
// go whenever they run, {"*.o.output": {"tp": "R"}}. The pattern is a module's, then ".input" or
// ".output" (the first of them), or with an index, ".input.1". A module is met in the operators that
// its weight takes part in, whoever calls them.
type Plan struct {
	_ noCopy
	*lasting[c.Plan]
}

func newPlan(handle c.Plan, err error) (*Plan, error) {
	if err != nil {
		return nil, public(err)
	}
	return &Plan{lasting: last(handle, c.PlanFree)}, nil
}

func (p *Plan) it() *lasting[c.Plan] {
	if p == nil {
		return nil
	}
	return p.lasting
}

// NewPlan is a plan without lines.
func NewPlan() *Plan {
	p, err := newPlan(c.PlanCreate())
	if err != nil {
		return &Plan{lasting: &lasting[c.Plan]{err: err}}
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
	_, err := with(p.it(), func(handle c.Plan) (struct{}, error) {
		return struct{}{}, c.PlanAdd(handle, pattern, placements.pairs())
	})
	if p.it() == nil {
		return &Plan{lasting: &lasting[c.Plan]{err: err}}
	}
	p.err = err
	return p
}

// MarshalJSON is what ParsePlan reads.
func (p *Plan) MarshalJSON() ([]byte, error) {
	text, err := with(p.it(), c.PlanToJSON)
	if err != nil {
		return nil, err
	}
	return []byte(text), nil
}
