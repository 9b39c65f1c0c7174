package shardweave

import (
	"encoding/json"
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
	modes     []foundMode           // of the struct that the module is of
	transient map[string]bool       // FQNs
	names     []string              // FQNs of what a struct leads to and is not transient, all of them
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
		return newModule(r, handle, err)
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
// Distribute changes it where it stands. It is a leaf, and requires grad from now on, unless
// [Tensor.SetRequiresGrad] has frozen it. If it cannot be registered, the result carries the error, and so does the module.
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

// ModuleSharding says how a module lies along a mesh dimension, whichever a plan names for it: its parameters and buffers,
// by name or pattern within it, and its inputs and outputs ("input", "output.1"). What is not named is replicated.
//
//	sw.ModuleSharding{Parameter: map[string]string{"up": "S(0)", "down": "S(1)"}, Forward: map[string]string{"output": "R"}}
type ModuleSharding struct {
	Parameter map[string]string         `json:"parameter,omitempty"`
	Forward   map[string]string         `json:"forward,omitempty"`
	Styles    map[string]ModuleSharding `json:"styles,omitempty"` // by what a plan may ask for besides; they have none themselves
}

// SetSharding says how the module shards, for plans that name it ([Plan.AddModule]): in place of what was said before, and
// the same on every rank. Of a struct [Sharder] says it.
func (m *Module) SetSharding(sharding ModuleSharding) error {
	return do(func(*rank) error { return m.setSharding("", sharding) }, m)
}

// setSharding is of the module of that name inside.
func (m *Module) setSharding(fqn string, sharding ModuleSharding) error {
	text, err := json.Marshal(sharding)
	if err != nil {
		return err
	}
	part, err := c.ModuleChild(m.handle, fqn)
	if err != nil {
		return err
	}
	defer c.ModuleFree(part)
	return c.ModuleSetSharding(part, string(text))
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

// isTransient says it of a buffer: the struct's tag, or the library of its own modules.
func (m *Module) isTransient(name string, buffer int) (bool, error) {
	if m.transient[name] {
		return true, nil
	}
	persistent, err := c.ModuleBufferIsPersistent(m.handle, buffer)
	return !persistent, err
}

func (m *Module) list(number func(c.Module) (int, error), at func(c.Module, int) (string, c.Tensor, error), areBuffers bool) ([]NamedTensor, error) {
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
			if areBuffers {
				if all[i].Transient, err = m.isTransient(name, i); err != nil {
					return nil, err
				}
			}
		}
		return all, nil
	}, m)
}

// Parameters is all parameters: those of a module before those of its children, otherwise in the order
// of their registration. One with several names (tied weights) is there once, by its first.
func (m *Module) Parameters() ([]NamedTensor, error) {
	return m.list(c.ModuleNumParameters, c.ModuleParameter, false)
}

// Buffers is all buffers, in the same order.
func (m *Module) Buffers() ([]NamedTensor, error) {
	return m.list(c.ModuleNumBuffers, c.ModuleBuffer, true)
}

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

// AddChild makes a module, with all that it has and will have, a part of this one, and of no other one.
// Its name is an FQN as any: "blocks.0".
func (m *Module) AddChild(fqn string, child *Module) error {
	return do(func(*rank) error {
		err := c.ModuleAddChild(m.handle, fqn, child.handle)
		if err == nil {
			m.adopt(fqn, child.registered)
		}
		return err
	}, m, child)
}

// Child is the module of this name inside of the module; "" is the module itself. NotFound suggests names
// that are nearly the same.
func (m *Module) Child(fqn string) (*Module, error) {
	return ask(func(r *rank) (*Module, error) {
		handle, err := c.ModuleChild(m.handle, fqn)
		child, err := newModule(r, handle, err)
		if err == nil {
			child.registered = m.part(fqn)
		}
		return child, err
	}, m)
}

// Train says whether the module and all modules in it are trained or evaluated: what dropout and batch norms
// of a file go by, what a struct holds that is a [TrainingMode], and a forward in Go may ask for.
func (m *Module) Train(on bool) error {
	if err := do(func(*rank) error { return c.ModuleTrain(m.handle, on) }, m); err != nil {
		return err
	}
	for _, mode := range m.modes { // in no call: the program's own may make some
		mode.SetTraining(on)
	}
	return nil
}

// IsTraining is what Train has said; at first it is true, and of a file as it was saved.
func (m *Module) IsTraining() (bool, error) {
	return ask(func(*rank) (bool, error) { return c.ModuleIsTraining(m.handle) }, m)
}

// Call calls a method ("forward") of a module that was loaded. Arguments, the last of them [Named], and
// results as [Op.Call].
func (m *Module) Call(method string, args ...any) ([]any, error) {
	return ask(func(r *rank) ([]any, error) {
		call, err := r.arguments(args)
		if err != nil {
			return nil, err
		}
		defer r.done(call)
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

// Plan says where everything lies, by lines of a pattern and placements. Its first part ([Plan.Add]) speaks
// of parameters and buffers. Of lines that match a name the most specific counts, in whatever order: an
// exact name, then patterns in which * stands for any characters, ? for one and {a,b} for either, by how
// many characters they have besides, then "re:" and a regular expression. Lines of equal standing have to
// agree. It belongs to no rank.
//
// Its second part ([Plan.AddForward]) says where inputs and outputs of modules go whenever they run. The
// pattern is a module's, then ".input" or ".output" (the first of them), or with an index, ".input.1". A
// module is met in the operators that its weight takes part in, whoever calls them; one without a weight of
// its own, where it runs by its [Forward].
//
// Its third part ([Plan.AddModule]) names modules that say themselves how they shard.
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

// ParsePlan reads JSON. Placements are by the names of mesh dimensions, or by position, a list or a
// layout's text:
//
//	{"parameter": {"*.{q,k,v,up}.weight": {"tp": "S(0)"}, "*.{o,down}.weight": "[R, S(1)]"},
//	 "forward": {"*.norm.input": {"tp": "S(1)"}, "*.o.output": ["R", "R"]},
//	 "module": {"*.mlp": "tp", "*.moe": {"tp": "experts"}}}
func ParsePlan(json string) (*Plan, error) { return newPlan(c.PlanFromJSON(json)) }

// HuggingFacePlan is the tensor-parallel plan of a Hugging Face model: text is its object
// ({"layers.*.mlp.up_proj": "colwise"}), or the configuration that has it as base_model_tp_plan. The
// module's parameters have the names that they have there; tpMeshDim is the mesh dimension, mostly "tp".
func (m *Module) HuggingFacePlan(text, tpMeshDim string) (*Plan, error) {
	return ask(func(*rank) (*Plan, error) {
		return newPlan(c.PlanFromHuggingFace(m.handle, text, tpMeshDim))
	}, m)
}

// Resolve is what Module.Distribute would do with the plan, or its error, as a table and as JSON. Nothing is
// changed or sent.
func (p *Plan) Resolve(module *Module, mesh *Mesh) (table, json string, err error) {
	if err := p.it().check(); err != nil {
		return "", "", err
	}
	err = do(func(r *rank) error {
		handle, err := p.it().lend(r)
		if err != nil {
			return err
		}
		table, json, err = c.PlanResolve(handle, module.handle, mesh.handle)
		return err
	}, module, mesh)
	return table, json, err
}

// Add appends a line about parameters and buffers, and returns the plan. Along mesh dimensions that an On
// does not name they are replicated; a *Layout also says in which order mesh dimensions cut. If that fails,
// Distribute tells. Not while another goroutine uses the plan.
func (p *Plan) Add(pattern string, placements Spec) *Plan {
	return p.add(pattern, placements, c.PlanAdd, c.PlanAddLayout)
}

// AddForward appends a line about inputs or outputs of modules: AddForward("*.o.output", On{"tp": "R"}).
// Along mesh dimensions that an On does not name they stay as they are. Otherwise as Add.
func (p *Plan) AddForward(pattern string, placements Spec) *Plan {
	return p.add(pattern, placements, c.PlanAddForward, c.PlanAddForwardLayout)
}

// AddModule appends a line about modules that say themselves how they shard ([Sharder], [Module.SetSharding]), and the mesh
// dimensions along which, each with one of the module's styles, or "": AddModule("blocks.*.mlp", map[string]string{"tp": ""}).
// Otherwise as Add.
func (p *Plan) AddModule(pattern string, along map[string]string) *Plan {
	return p.append(func(handle c.Plan) error { return c.PlanAddModule(handle, pattern, On(along).pairs()) })
}

// Append appends all lines of another plan: of another part of the model, say. Otherwise as Add.
func (p *Plan) Append(other *Plan) *Plan {
	return p.append(func(handle c.Plan) error {
		_, err := with(other.it(), func(more c.Plan) (struct{}, error) { return struct{}{}, c.PlanAppend(handle, more) })
		return err
	})
}

func (p *Plan) add(pattern string, placements Spec, named func(c.Plan, string, []string) error,
	byPosition func(c.Plan, string, c.Layout) error) *Plan {
	return p.append(func(handle c.Plan) error {
		layout, is := placements.(*Layout)
		if !is {
			on, _ := placements.(On) // nil: everything is replicated, or stays
			return named(handle, pattern, on.pairs())
		}
		_, err := with(layout.it(), func(l c.Layout) (struct{}, error) {
			return struct{}{}, byPosition(handle, pattern, l)
		})
		return err
	})
}

// append keeps the error for later.
func (p *Plan) append(line func(c.Plan) error) *Plan {
	_, err := with(p.it(), func(handle c.Plan) (struct{}, error) { return struct{}{}, line(handle) })
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
