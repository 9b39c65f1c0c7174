package shardweave

import (
	"encoding/json"
	"math"
	"runtime"
	"sort"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// ModuleByKind is a module of the library's, in training mode, whose forward [Module.Call] runs: a layer of LibTorch's
// ("Linear", "TransformerEncoderLayer", "Sequential", ...) with the options of PyTorch's C++,
// {"in_features": 4, "out_features": 8}; or a model ("gpt2", "llama", "mixtral", "vit"), whose options are the
// configuration of a Hugging Face one and whose forward gives logits. options is a JSON object, or "" for none. Its parts
// are there by [Module.Child], and run by Call, too; nothing is added to them. Parameters are drawn as PyTorch draws them,
// from the process ([Seeded]); [Module.Distribute] sends those of one rank to all. An error lists the kinds that there
// are, or the options of the kind.
func (w *World) ModuleByKind(kind, options string) (*Module, error) {
	return ask(func(r *rank) (*Module, error) {
		handle, err := c.ModuleCreateByKind(kind, options)
		return newModule(r, handle, err)
	}, w)
}

// ZooPlan is the library's plan for its models, tensor parallelism as in Megatron-LM, also for a model that is written
// otherwise with the same names. kind and config are those of [World.ModuleByKind]; kind "" is the configuration's
// "model_type". options is a JSON object, or "" for none:
//
//	"mesh_dim": "tp"             along which; other dimensions replicate
//	"sequence_parallel": false   activations between attention and MLP lie along the sequence
//	"shard_vocabulary": true     embedding, head and logits are cut by the vocabulary; not of vit
//	"expert_parallel": false     whole experts on every rank, in place of parts; of mixtral
//
// kind may also be a part of models, "attention", "mlp" or "moe", for those that the library does not have: the option
// "fqn" is a pattern that says where it stands, and of config attention reads the numbers of heads. [Plan.Append] puts
// plans together.
//
// Heads that do not divide are an error. Nothing is sent.
func (m *Mesh) ZooPlan(kind, config, options string) (*Plan, error) {
	return ask(func(*rank) (*Plan, error) { return newPlan(c.PlanFromZoo(kind, config, m.handle, options)) }, m)
}

// StylesPlan makes a plan of what modules are, in place of where each parameter lies. styles is a JSON object: patterns
// of modules, each with a style by its name, or an object with its options.
//
//	{"layers.*.mlp":  "pairwise",
//	 "layers.*.attn": {"style": "sequence", "sequence_dim": 1, "heads": 8},
//	 "embedding":     {"style": "rowwise", "output": "S(1)"},
//	 "layers.*":      {"style": "prepare_input", "input": ["S(1)", null], "mask": "R"}}
//
// colwise and rowwise take "input" and "output", pairwise "output" and "heads", sequence "sequence_dim" and "heads",
// prepare_input "input" and arguments by name, prepare_output "output". {"style": "pairwise"} is the style of the whole.
// tpMeshDim "" is the mesh's only dimension, or "tp" of several. Nothing is sent.
func (m *Module) StylesPlan(mesh *Mesh, styles, tpMeshDim string) (*Plan, error) {
	return ask(func(*rank) (*Plan, error) {
		return newPlan(c.PlanFromStyles(m.handle, mesh.handle, styles, tpMeshDim))
	}, m, mesh)
}

// StepModel is a model for [Mesh.AutoPlan], and what a step of it minimises.
type StepModel struct {
	Module *Module // which no plan has been applied to
	// Loss is a number, on the mesh that Module lies on by then, whose other ranks are not there. It brings the batch there
	// as a real step does, and calls no Backward.
	Loss func(on *Mesh) *Tensor
}

// AutoPlanOption is an option of [Mesh.AutoPlan].
type AutoPlanOption func(*c.PlanAutoOptions)

// WithTPMeshDim says along which mesh dimension modules may be cut; else the only one, or "tp" of several.
func WithTPMeshDim(name string) AutoPlanOption {
	return func(o *c.PlanAutoOptions) { o.TPMeshDim = name }
}

// WithMemoryLimit says how many bytes a rank has; else as many as it takes.
func WithMemoryLimit(bytes int64) AutoPlanOption {
	return func(o *c.PlanAutoOptions) { o.MemoryLimit = bytes }
}

// WithOptimizerStates says how many numbers the optimizer keeps for each parameter; else 2, as Adam.
func WithOptimizerStates(numbers int64) AutoPlanOption {
	return func(o *c.PlanAutoOptions) { o.OptimizerStates = numbers }
}

// WithHeads says how many heads attentions have.
func WithHeads(heads int64) AutoPlanOption {
	return func(o *c.PlanAutoOptions) { o.Heads = heads }
}

// WithMaxEvaluations says how many plans are measured at most, each about a step of one rank; else 120.
func WithMaxEvaluations(plans int64) AutoPlanOption {
	return func(o *c.PlanAutoOptions) { o.MaxEvaluations = plans }
}

// WithSequenceDim says which dimension of the activations is the sequence; else 1.
func WithSequenceDim(dim int32) AutoPlanOption {
	return func(o *c.PlanAutoOptions) { o.SequenceDim = dim }
}

// AutoPlan searches for a plan: which modules are worth cutting on the mesh, and how, by its [CostModel]. Every plan that
// is looked at is measured: model makes the same model every time, in deferred initialisation, without memory (what
// FromSlice makes has its own), and one rank's part of a step really runs, on the CPU. The module is closed when the next
// one is made. The table says what each choice costs, and what the next best was; so does the JSON:
//
//	{"plan": {"parameter", "forward"}, "cost": {"seconds", "bytes_sent", "memory", ...}, "evaluations": 31, "finished": true,
//	 "groups": [{"modules": "h.*.attn", "count": 2, "chosen": "PairwiseParallel", "choices": [{"style", "cost", "obstacle"}]}]}
//
// NotFound for a mesh without the dimension, ResourceExhausted if no plan keeps the memory limit, FailedPrecondition for a
// step that reads values. Local; every rank finds the same.
func (m *Mesh) AutoPlan(model func() (StepModel, error), options ...AutoPlanOption) (plan *Plan, table, json string, err error) {
	if model == nil {
		return nil, "", "", invalid("argument 'model' is nil")
	}
	o := c.PlanAutoOptions{OptimizerStates: c.DefaultPlanAutoOptimizerStates, MaxEvaluations: c.DefaultPlanAutoMaxEvaluations,
		SequenceDim: c.DefaultPlanAutoSequenceDim}
	for _, option := range options {
		if option != nil {
			option(&o)
		}
	}
	var last StepModel
	err = do(func(r *rank) error {
		found, text, explained, err := c.PlanAuto(m.handle, r.stepModel(model, &last, m), o)
		if err != nil {
			return err
		}
		table, json = text, explained
		plan, err = newPlan(found, nil)
		return err
	}, m)
	if closed := last.Module.Close(); err == nil {
		err = closed
	}
	return plan, table, json, err
}

// stepModel is what the inner package calls of model; last is the one that was made last.
func (r *rank) stepModel(model func() (StepModel, error), last *StepModel, of *Mesh) c.StepModel {
	return c.StepModel{
		Make: func() (out c.Module, err error) {
			err = r.callback(r.recording(Grad), func() error {
				if err := last.Module.Close(); err != nil {
					return err
				}
				made, err := model()
				if err != nil {
					return err
				}
				if made.Module == nil || made.Loss == nil {
					return invalid("the StepModel has no Module or no Loss")
				}
				*last = made
				if home, err := made.Module.home(); err == nil && home != r {
					return otherRank(r, home)
				}
				return do(func(*rank) (err error) {
					out, err = c.ModuleShare(made.Module.handle)
					return err
				}, made.Module)
			})
			return out, private(err)
		},
		Loss: func(mesh c.Mesh) (out c.Tensor, err error) {
			err = r.callback(r.recording(Grad), func() error {
				on, err := ask(func(r *rank) (*Mesh, error) { return newMesh(r)(c.MeshShare(mesh)) }, of)
				if err != nil {
					return err
				}
				defer on.Close()
				out, err = r.given(last.Loss(on))
				return err
			})
			return out, private(err)
		},
	}
}

// given is a tensor that a function of the program has returned to the library; nil is none.
func (r *rank) given(result *Tensor) (out c.Tensor, err error) {
	if result == nil {
		return nil, nil
	}
	defer runtime.KeepAlive(result)
	if home, err := result.home(); err == nil && home != r {
		return nil, otherRank(r, home)
	}
	err = do(func(*rank) (err error) {
		out, err = c.TensorShare(result.handle)
		return err
	}, result)
	return out, err
}

// DeferredInit calls body, in which this goroutine makes tensors and modules without memory, for models that are larger
// than a machine:
//
//	err := sw.DeferredInit(func() (err error) { model, err = w.ModuleByKind("llama", config); return err })
//	err = model.Distribute(mesh, plan, sw.SameEverywhere)
//	err = model.Materialize() // each rank draws its parts, and nothing else
//
// Modules by their kinds, tensors that are filled (Zeros and the like), what operators make without tensors among their
// arguments: these have shape and type. What operators do to them is recorded, in body and after it, and done by
// [Module.Materialize]; what needs values before is FailedPrecondition and names the tensor. FromSlice, FromDLPack and
// LoadModule make what they make at once. The goroutine keeps its thread meanwhile; what body starts on others is not
// deferred. Calls nest.
func DeferredInit(body func() error) error {
	if body == nil {
		return noBody()
	}
	runtime.LockOSThread() // whose, and not a rank's, the scope is
	defer runtime.UnlockOSThread()
	scope, err := c.DeferredInit()
	if err != nil {
		return public(err)
	}
	defer c.ScopeFree(scope)
	return body()
}

// MaterializeOption is an option of [Module.Materialize].
type MaterializeOption func(*materializeOptions)

type materializeOptions struct {
	seed    uint64
	hasSeed bool
	values  map[string]*Tensor
}

// WithSeed draws random numbers by this seed, whatever the mesh and its ranks. Without it sharded tensors draw from their
// mesh ([Mesh.Seed]), which goes on, and plain ones from the process ([Seed]).
func WithSeed(seed uint64) MaterializeOption {
	return func(o *materializeOptions) { o.seed, o.hasSeed = seed, true }
}

// WithValues takes values by FQN, in place of what was recorded: whole plain tensors, the same on all ranks, of which each
// copies its part; or sharded ones on the same mesh, in any layout.
func WithValues(values map[string]*Tensor) MaterializeOption {
	return func(o *materializeOptions) { o.values = values }
}

// Materialize gives values to the parameters and buffers of the module, a whole or a part, that have none; what has values
// is left alone. They are, bit by bit, the parts of what the same calls make on one rank. Before anything is changed:
// NotFound for a value with a name that the module does not have, FailedPrecondition for one that has values already,
// InvalidArgument for one of another shape, and for ranks that have recorded different things. Collective.
func (m *Module) Materialize(options ...MaterializeOption) error {
	var o materializeOptions
	for _, option := range options {
		if option != nil {
			option(&o)
		}
	}
	names := make([]string, 0, len(o.values))
	for name := range o.values {
		names = append(names, name)
	}
	sort.Strings(names)
	all, values := []used{m}, make([]*Tensor, len(names))
	for i, name := range names {
		values[i] = o.values[name]
		all = append(all, values[i])
	}
	defer runtime.KeepAlive(values)
	return do(func(*rank) error {
		return c.ModuleMaterialize(m.handle, names, handlesOf(values), o.seed, o.hasSeed)
	}, all...)
}

// IsDeferred says whether the tensor has no values yet; see [DeferredInit].
func (t *Tensor) IsDeferred() (bool, error) { return get(t, c.TensorIsDeferred) }

// FullyShardOption is an option of [Module.FullyShard].
type FullyShardOption func(*c.FullyShard)

// WithMeshDim says along which mesh dimension parameters are cut; else the mesh's first.
func WithMeshDim(name string) FullyShardOption {
	return func(o *c.FullyShard) { o.MeshDim = name }
}

// WithUnits says by patterns of modules' FQNs what is a unit, "blocks.*"; of modules within each other a pattern takes the
// outermost that it matches, and another may name units in those. What is in no other unit is one with the module itself.
func WithUnits(patterns ...string) FullyShardOption {
	return func(o *c.FullyShard) { o.Units = append(o.Units, patterns...) }
}

// WithUnitTypes says the same by type, of modules of the library's ([World.ModuleByKind]): "Linear".
func WithUnitTypes(names ...string) FullyShardOption {
	return func(o *c.FullyShard) { o.UnitTypes = append(o.UnitTypes, names...) }
}

// WithMinNumel says that modules with fewer elements belong to the unit around them; without patterns and types every
// module is a unit that has so many outside of units within it.
func WithMinNumel(elements int64) FullyShardOption {
	return func(o *c.FullyShard) { o.MinNumel = elements }
}

// WithoutReshard keeps for Backward what the forward has gathered: more memory, fewer collectives.
func WithoutReshard() FullyShardOption { return func(o *c.FullyShard) { o.KeepForBackward = true } }

// WithReshardAmong leaves a unit divided among so many neighbours after forward, from whom Backward gathers it: a divisor of
// the ranks along the mesh dimension.
func WithReshardAmong(ranks int64) FullyShardOption {
	return func(o *c.FullyShard) { o.ReshardRanks = ranks }
}

// WithEqualSegments makes ranks keep as much as each other, with gaps between parameters, for backends whose collectives want
// that; see [FullyShardUnit].
func WithEqualSegments() FullyShardOption {
	return func(o *c.FullyShard) { o.EqualSegments = true }
}

// WithComputeDevice is CPU offload: parameters rest on the CPU, as gradients and optimizers' states do, and operators see
// them on this device, a unit at a time. Buffers and numbers move to it; inputs belong on it.
func WithComputeDevice(device Device) FullyShardOption {
	return func(o *c.FullyShard) { o.ComputeDevice = device.inner() }
}

// MixedPrecision is types of elements: F16, BF16, F32 or F64, or 0.
type MixedPrecision struct {
	// What operators see of parameters, as units are gathered; 0: as they rest. What an operator takes beside them or views of
	// them is cast, too, but buffers and numbers.
	Param  DType
	Reduce DType // in what gradients are summed over ranks; 0: as operators see the parameters
	Output DType // of what operators give that take parameters and an input; 0: as it comes
}

// WithMixedPrecision says in what operators work and gradients are summed. What rests, its gradient, and so what optimizers
// work on, keeps its type.
func WithMixedPrecision(types MixedPrecision) FullyShardOption {
	return func(o *c.FullyShard) {
		o.Param, o.Reduce, o.Output = int32(types.Param), int32(types.Reduce), int32(types.Output)
	}
}

// FullyShardUnit is what became a unit.
type FullyShardUnit struct {
	Module     string   // FQN; "" is the module that was given
	Parameters []string // FQNs
	Numel      int64    // elements of this rank's whole parameters (with tensor parallelism its part)
	Kept       int64    // elements that this rank keeps
	Padding    int64    // elements of gaps, of all ranks together, which travel, too
}

// FullyShard fully shards the parameters that are in no unit yet, in place: along one mesh dimension each rank keeps a
// part of them, of their gradients and of the optimizer's state. A unit of them is whole only while operators use it, in
// whatever forward; the next one is gathered ahead. Gradients come to where the parameters rest during Backward.
//
//	units, err := m.FullyShard(mesh, sw.FromRank(0), sw.WithUnits("blocks.*")) // and one for the rest
//	optimizer, err := sw.NewAdamW(sw.Tensors(parameters), 1e-3)                // of this rank's parts
//
// Along other mesh dimensions parameters stay as they are: [Module.Distribute] comes first. Numbers (tensors without
// dimensions) stay replicated, and need FinishGradSync. Modules that are units within others may be given first, one by
// one. A pattern or type that matches no module, a parameter that is cut along the dimension already, a unit with fewer
// elements than ranks, and ranks that differ are errors before anything changes. Collective.
//
// A Backward that fails on one rank leaves the others waiting in a reduce-scatter, until their deadline, and the mesh is
// lost: units have nothing like [GradSync.Discard]. Let the rank return its error from the body of [RunRanks] or [Spawn],
// or call [World.Abort], and all end at once.
func (m *Module) FullyShard(mesh *Mesh, source Source, options ...FullyShardOption) ([]FullyShardUnit, error) {
	var o c.FullyShard
	for _, option := range options {
		if option != nil {
			option(&o)
		}
	}
	return ask(func(*rank) (units []FullyShardUnit, err error) {
		_, text, err := c.ModuleFullyShard(m.handle, mesh.handle, int64(source), o)
		if err == nil {
			err = json.Unmarshal([]byte(text), &units)
		}
		return units, err
	}, m, mesh)
}

// Reshard empties what is whole of fully sharded modules on the mesh: what evaluation used last stays so until another
// unit is touched. It sends nothing, but waits for what is under way.
func (m *Mesh) Reshard() error {
	return do(func(*rank) error { return c.MeshReshard(m.handle) }, m)
}

// FullyShardNoSync calls body, in which Backward leaves the gradients of fully sharded parameters as they are: sums that
// are still to be reduced, whole on each rank, which take memory as in a model that is not sharded. The next Backward
// outside sends them with its own, one reduce-scatter for a unit; FinishGradSync sends what is left, and [Optimizer.Step]
// refuses it. A parameter that had its gradient before has it reduced in each Backward, as without; so has what rests on
// the CPU (WithComputeDevice). Calls nest; all ranks have them around the same backwards, and zero gradients alike. It fails where nothing on the mesh is fully sharded.
func (m *Mesh) FullyShardNoSync(body func() error) (err error) {
	if body == nil {
		return noBody()
	}
	scope, err := ask(func(*rank) (c.Scope, error) { return c.MeshFullyShardNoSync(m.handle) }, m)
	if err != nil {
		return err
	}
	defer m.rank.finallyOr(&err, func() { c.ScopeFree(scope) })
	return body()
}

// FullyShardCounters is what fully sharded modules on a mesh did on this rank; the same on all ranks but for the bytes.
type FullyShardCounters struct {
	Gathers           int64 // of units
	Prefetches        int64 // of these, begun before the unit was touched
	WrongPrefetches   int64 // then another one was touched
	ReduceScatters    int64
	GatheredBytes     int64 // that units which are whole take up now
	PeakGatheredBytes int64
}

// FullyShardCounters counts since the mesh was made.
func (m *Mesh) FullyShardCounters() (FullyShardCounters, error) {
	return ask(func(*rank) (FullyShardCounters, error) {
		n, err := c.MeshFullyShardCounters(m.handle)
		return FullyShardCounters{n[0], n[1], n[2], n[3], n[4], n[5]}, err
	}, m)
}

// FullParams is what [Module.FullParams] and [Module.FullParamsOn] lend: fully sharded parameters that are whole.
type FullParams func(fqn string) (*Tensor, error)

// Get is a plain tensor, of the parameter with this name in the outermost module that was sharded; nil on a rank that has
// none. What it holds is the parameter's until the body ends, and nobody's afterwards.
func (p FullParams) Get(fqn string) (*Tensor, error) {
	if p == nil {
		return nil, noThing("FullParams")
	}
	return p(fqn)
}

// FullParams calls body while fully sharded parameters of the module are whole on every rank, along the mesh dimension that
// cuts them. With writeback what body wrote is kept, of each rank its part, so all write the same; if it fails, nothing is.
// Without, operators that write parameters by the module's own handles fail, and what is written to a tensor that Get gives
// is dropped. Operators on whole parameters that record gradients fail, too. Collective.
func (m *Module) FullParams(writeback bool, body func(whole FullParams) error) error {
	return m.fullParams(writeback, -1, body)
}

// FullParamsOn is the same of one rank, a place along the mesh dimension: it alone has plain copies, and the parameters
// rest as ever. Collective.
func (m *Module) FullParamsOn(at int, writeback bool, body func(whole FullParams) error) error {
	if at < 0 || at > math.MaxInt32 {
		return invalid("at is %d; wanted a place along the mesh dimension", at)
	}
	return m.fullParams(writeback, int64(at), body)
}

func (m *Module) fullParams(writeback bool, at int64, body func(whole FullParams) error) (err error) {
	if body == nil {
		return noBody()
	}
	scope, err := ask(func(*rank) (c.Scope, error) { return c.ModuleFullParams(m.handle, writeback, at) }, m)
	if err != nil {
		return err
	}
	lent := scope
	defer m.rank.finallyOr(&err, func() {
		lent = nil
		c.ScopeFree(scope)
	})
	whole := func(fqn string) (*Tensor, error) {
		return ask(func(r *rank) (*Tensor, error) {
			if lent == nil {
				return nil, invalid("the scope has ended")
			}
			handle, err := c.FullParamsGet(lent, fqn)
			if err != nil || handle == nil {
				return nil, err
			}
			return r.tensor(handle), nil
		}, m)
	}
	if err := body(whole); err != nil {
		return err
	}
	return do(func(*rank) error { return c.FullParamsEnd(scope) }, m)
}

// GradSync lets gradients of a module's sharded parameters leave, in buckets, while Backward goes on;
// [Module.FinishGradSync] sends the rest, and waits for all. See [Module.GradSync].
type GradSync struct {
	_ noCopy
	*thing[c.GradSync]
}

func (s *GradSync) home() (*rank, error) {
	if s == nil || s.thing == nil {
		return nil, noThing("GradSync")
	}
	return s.rank, nil
}

// GradSyncOption is an option of [Module.GradSync] and [Module.DistributedDataParallel].
type GradSyncOption func(*c.GradSyncOptions)

// WithBucketBytes says how much a bucket holds, as it travels, 1 or more; else 25 MiB.
func WithBucketBytes(bytes int64) GradSyncOption {
	return func(o *c.GradSyncOptions) { o.BucketBytes = bytes }
}

// WithReduceDType says in what gradients of F16, BF16, F32 and F64 travel and are summed up: one of these. BF16 halves the
// bytes of F32, and keeps eight bits of each rank's part and of each partial sum. What arrives has the gradient's own type.
func WithReduceDType(d DType) GradSyncOption {
	return func(o *c.GradSyncOptions) { o.Reduce = int32(d) }
}

// GradSync begins a [GradSync] of the module's parameters, after Distribute. All ranks make it alike. The first iteration
// shows in which order gradients come, and sends at its end. FailedPrecondition if a parameter is in another one that was
// not closed. After a Backward that failed, on any rank, all ranks call [GradSync.Discard]. Collective with a hook or PowerSGD.
func (m *Module) GradSync(options ...GradSyncOption) (*GradSync, error) {
	return ask(func(r *rank) (*GradSync, error) {
		handle, err := c.GradSyncCreate(m.handle, gradSyncOptions(r, options))
		if err != nil {
			return nil, err
		}
		return &GradSync{thing: own(r, "GradSync", handle, c.GradSyncFree)}, nil
	}, m)
}

// Close waits for what is under way, and leaves gradients as they are.
func (s *GradSync) Close() error {
	if s == nil {
		return nil
	}
	return s.thing.close()
}

// NoSync calls body, in which Backward sends nothing: gradients of several are summed up first. Calls nest.
func (s *GradSync) NoSync(body func() error) (err error) {
	if body == nil {
		return noBody()
	}
	scope, err := ask(func(*rank) (c.Scope, error) { return c.GradSyncNoSync(s.handle) }, s)
	if err != nil {
		return err
	}
	defer s.rank.finallyOr(&err, func() { c.ScopeFree(scope) })
	return body()
}

// Discard is called in place of FinishGradSync after a Backward that failed on some rank: what has left in it comes to
// nothing, and the next iteration is one as any. Gradients stay as they are, for the caller to zero. The ranks agree that
// it failed on a communicator that is not the mesh's, where something may be under way ([World.Comm]); one that calls
// FinishGradSync instead gets NaN. Collective.
func (s *GradSync) Discard() error {
	return do(func(*rank) error { return c.GradSyncDiscard(s.handle) }, s)
}

// Counts is how many buckets there are, 0 before the first iteration's end; and how many have left in Backward, before
// FinishGradSync, in all iterations.
func (s *GradSync) Counts() (buckets, leftInBackward int64, err error) {
	err = do(func(*rank) (err error) {
		buckets, leftInBackward, err = c.GradSyncCounts(s.handle)
		return err
	}, s)
	return buckets, leftInBackward, err
}

// Dump is what a module is and how it lies: a tree of its modules with their tensors, shapes, parts, placements and bytes,
// and which line of a plan decided. As a table, and as JSON.
func (m *Module) Dump() (table, json string, err error) {
	err = do(func(*rank) (err error) {
		table, json, err = c.ModuleDump(m.handle)
		return err
	}, m)
	return table, json, err
}

// running is what the inner package calls of functions that run a module, and a reference.
func (r *rank) running(mode GradMode, run, reference func() *Tensor) c.Run {
	return func(ofReference bool) (out c.Tensor, err error) {
		body := run
		if ofReference {
			body = reference
		}
		err = r.callback(mode, func() (err error) {
			out, err = r.given(body())
			return err
		})
		return out, private(err)
	}
}

// Memory is this rank's memory by modules, in bytes: of parameters, buffers and gradients, as they are; and, if run is not
// nil, of activations: run is called once, with gradients, and what is still in memory when it has returned counts for the
// module whose operator has made it. As a table, and as JSON:
//
//	[{"module": "", "parameters": 1320, "buffers": 0, "gradients": 0, "activations": 4608}]
//
// run runs the model, its forward or a whole step, and may return nil; its tensors are closed when it returns. Collective
// if run is.
func (m *Module) Memory(run func() *Tensor) (table, json string, err error) {
	err = do(func(r *rank) (err error) {
		var runs c.Run
		if run != nil {
			runs = r.running(r.recording(Grad), run, nil)
		}
		table, json, err = c.ModuleMemory(m.handle, runs)
		return err
	}, m)
	return table, json, err
}

// ListCommunication is every collective of one run, in order, with the module that needs it: as a table, and as JSON,
// {"bytes", "events"} with events as [Trace.MarshalJSON] has them. FailedPrecondition if nothing in the module is sharded.
// run as of [Module.Memory]. Collective as run is.
func (m *Module) ListCommunication(run func() *Tensor) (table, json string, err error) {
	if run == nil {
		return "", "", invalid("argument 'run' is nil")
	}
	err = do(func(r *rank) (err error) {
		table, json, err = c.ModuleListCommunication(m.handle, r.running(r.mode, run, nil))
		return err
	}, m)
	return table, json, err
}

// VerifyOption is an option of [Module.Verify].
type VerifyOption func(*c.Verify)

// WithTolerance is what the largest difference of a tensor may be, over its largest element; else by its type, of F32 1e-4.
func WithTolerance(tolerance float64) VerifyOption {
	return func(o *c.Verify) { o.Tolerance = tolerance }
}

// WithoutBackward compares no gradients.
func WithoutBackward() VerifyOption { return func(o *c.Verify) { o.ForwardOnly = true } }

// WithCopiedValues gives the reference the module's values first.
func WithCopiedValues() VerifyOption { return func(o *c.Verify) { o.CopyValues = true } }

// Verify says whether a sharded module is still right: it runs it, and a plain one with the same modules and values, and
// compares parameters, what every operator gives, and gradients. The table and the JSON say where they differ first, by
// module, rank and index:
//
//	{"ok": false, "difference": {"kind": "output", ...}, "parameters", "outputs", "gradients", "not_met"}
//
// Each run returns its module's result, which is differentiated; run as of [Module.Memory]. Gradients and buffers of both
// stay as they were. No dropout: it draws other numbers on sharded tensors. An error of run is a difference, one of
// runReference is Verify's. All ranks get the same answer. Collective.
func (m *Module) Verify(run func() *Tensor, reference *Module, runReference func() *Tensor, options ...VerifyOption) (same bool, table, json string, err error) {
	if run == nil || runReference == nil {
		return false, "", "", invalid("argument 'run' or 'runReference' is nil")
	}
	var o c.Verify
	for _, option := range options {
		if option != nil {
			option(&o)
		}
	}
	err = do(func(r *rank) (err error) {
		same, table, json, err = c.ModuleVerify(m.handle, reference.handle, r.running(r.recording(Grad), run, runReference), o)
		return err
	}, m, reference)
	return same, table, json, err
}
