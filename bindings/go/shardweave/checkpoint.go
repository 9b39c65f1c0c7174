package shardweave

import (
	"encoding/json"
	"time"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// State is what a checkpoint saves and brings back, by name: tensors, and values (JSON). It has handles, not copies, and
// keeps them alive: made once, it saves what is there at each save. All ranks add the same.
//
//	state, err := sw.NewState(mesh)
//	err = state.AddModule("model.", model)                     // "model.h.0.attn.q.weight", ...
//	err = state.AddOptimizer("optimizer.", optimizer, model)   // "optimizer.h.0.attn.q.weight.exp_avg", ...
//	err = state.SetValue("epoch", "3")                         // JSON
//	checkpointer, err := sw.NewCheckpointer(mesh, "run", sw.WithKeepLast(3))
//	loaded, err := checkpointer.Load(state)                    // the newest, in place, saved on any mesh
//	_, err = checkpointer.SaveAsync(100, state)                // run/step-000100, beside training
//	err = checkpointer.Wait()
type State struct {
	_ noCopy
	*thing[c.State]
}

func (s *State) home() (*rank, error) {
	if s == nil || s.thing == nil {
		return nil, noThing("State")
	}
	return s.rank, nil
}

// NewState has nothing in it yet. It belongs to the mesh's rank.
func NewState(mesh *Mesh) (*State, error) {
	return ask(func(r *rank) (*State, error) {
		handle, err := c.StateCreate()
		if err != nil {
			return nil, err
		}
		return &State{thing: own(r, "state", handle, c.StateFree)}, nil
	}, mesh)
}

// Close ends the state, not what was added.
func (s *State) Close() error {
	if s == nil {
		return nil
	}
	return s.thing.close()
}

// AddModule adds parameters and buffers by FQN behind the prefix, tied ones once, and nothing that is transient
// ([World.ModuleOf]). The module is distributed already.
func (s *State) AddModule(prefix string, module *Module) error {
	return do(func(*rank) error {
		if len(module.transient) == 0 {
			return c.StateAddModule(s.handle, prefix, module.handle)
		}
		kept, err := module.withoutTransients()
		if err != nil {
			return err
		}
		defer c.ModuleFree(kept)
		return c.StateAddModule(s.handle, prefix, kept)
	}, s, module)
}

// withoutTransients has the same tensors under the same names, but what is transient; all of them are buffers: a parameter
// would require grad from now on, and one that is frozen would not stay so.
func (m *Module) withoutTransients() (c.Module, error) {
	kept, err := c.ModuleCreate()
	if err != nil {
		return nil, err
	}
	there := map[string]bool{}
	add := func(name string, handle c.Tensor, err error) error {
		if err != nil {
			return err
		}
		defer c.TensorFree(handle)
		if m.transient[name] || there[name] {
			return nil
		}
		there[name] = true
		return c.ModuleAddBuffer(kept, name, handle)
	}
	all := func() error {
		for _, list := range []struct {
			number     func(c.Module) (int, error)
			at         func(c.Module, int) (string, c.Tensor, error)
			areBuffers bool
		}{{c.ModuleNumParameters, c.ModuleParameter, false}, {c.ModuleNumBuffers, c.ModuleBuffer, true}} {
			n, err := list.number(m.handle)
			for i := 0; i < n && err == nil; i++ {
				name, handle, failed := list.at(m.handle, i)
				if failed == nil && list.areBuffers {
					var transient bool
					transient, err = m.isTransient(name, i)
					there[name] = there[name] || transient
				}
				if failed = add(name, handle, failed); err == nil {
					err = failed
				}
			}
			if err != nil {
				return err
			}
		}
		for _, name := range m.names { // the second ones of tied weights
			if !there[name] {
				handle, err := c.ModuleGet(m.handle, name)
				if err := add(name, handle, err); err != nil {
					return err
				}
			}
		}
		return nil
	}
	if err := all(); err != nil {
		c.ModuleFree(kept)
		return nil, err
	}
	return kept, nil
}

// AddOptimizer adds the optimizer's state of each parameter by the parameter's FQN in the module, behind the prefix. UseZeRO
// comes before.
func (s *State) AddOptimizer(prefix string, optimizer *Optimizer, module *Module) error {
	return do(func(*rank) error { return c.StateAddOptimizer(s.handle, prefix, optimizer.handle, module.handle) }, s, optimizer, module)
}

// AddTensor adds one that is sharded in any layout without Partial, or plain: then all ranks have it alike.
func (s *State) AddTensor(name string, tensor *Tensor) error {
	return do(func(*rank) error { return c.StateAddTensor(s.handle, name, tensor.handle) }, s, tensor)
}

// AddRandom adds where the mesh stands in its random numbers, as a value of this name.
func (s *State) AddRandom(name string, mesh *Mesh) error {
	return do(func(*rank) error { return c.StateAddRandom(s.handle, name, mesh.handle) }, s, mesh)
}

// AddLoader adds where the loader stands, as a value of this name: it goes on there once loaded, on any number of ranks.
func (s *State) AddLoader(name string, loader *TokenLoader) error {
	return do(func(*rank) error { return c.StateAddLoader(s.handle, name, loader.handle) }, s, loader)
}

// SetValue sets a value of the program's own, JSON, the same on all ranks. Loading replaces it, and wants it to be there. What
// a checkpoint has beyond the values that are set is in Loaded's Values, and not kept for the next checkpoint.
func (s *State) SetValue(name, json string) error {
	return do(func(*rank) error { return c.StateSetValue(s.handle, name, json) }, s)
}

// Value is the JSON of a value.
func (s *State) Value(name string) (string, error) {
	return ask(func(*rank) (string, error) { return c.StateValue(s.handle, name) }, s)
}

// Loaded is what Load has done.
type Loaded struct {
	Path       string                     `json:"path"`
	Step       int64                      `json:"step"`
	Missing    []string                   `json:"missing"`    // with AllowMissing
	Unexpected []string                   `json:"unexpected"` // with AllowUnexpected
	Values     map[string]json.RawMessage `json:"values"`     // all of the checkpoint's
	BytesRead  int64                      `json:"bytes_read"` // of tensors, by this rank
	BytesKept  int64                      `json:"bytes_kept"`
}

// LoadOption is an option of Load: what is no error.
type LoadOption func(*c.Load)

// AllowMissing leaves what the checkpoint has not as it is.
func AllowMissing() LoadOption { return func(o *c.Load) { o.AllowMissing = true } }

// AllowUnexpected leaves out what the state has not.
func AllowUnexpected() LoadOption { return func(o *c.Load) { o.AllowUnexpected = true } }

// WithCast converts another floating-point type.
func WithCast() LoadOption { return func(o *c.Load) { o.Cast = true } }

// WithVerification compares every byte of every file with its checksum first; else every byte that is loaded is, while it is.
func WithVerification() LoadOption { return func(o *c.Load) { o.Verify = true } }

func loadOptions(options []LoadOption) c.Load {
	var o c.Load
	for _, option := range options {
		if option != nil {
			option(&o)
		}
	}
	return o
}

func loaded(text string, err error) (Loaded, error) {
	var result Loaded
	if err == nil {
		err = json.Unmarshal([]byte(text), &result)
	}
	return result, err
}

// Load loads a checkpoint in place, or the newest one of a directory, on any mesh. Errors leave everything as it was, and
// are the same on all ranks; NotFound where there is no checkpoint. Collective.
func (s *State) Load(path string, mesh *Mesh, options ...LoadOption) (Loaded, error) {
	return loaded(ask(func(*rank) (string, error) {
		return c.StateLoad(s.handle, path, mesh.handle, loadOptions(options))
	}, s, mesh))
}

// Checkpointer saves into one directory, which all ranks share, and loads from it. From Open or the first save on the
// directory is this one's.
type Checkpointer struct {
	_ noCopy
	*thing[c.Checkpointer]
}

func (p *Checkpointer) home() (*rank, error) {
	if p == nil || p.thing == nil {
		return nil, noThing("Checkpointer")
	}
	return p.rank, nil
}

type checkpointerOptions struct {
	keepLast   int64
	timeout    time.Duration
	skipIfBusy bool
	beside     bool
}

// CheckpointerOption is an option of NewCheckpointer.
type CheckpointerOption func(*checkpointerOptions)

// WithKeepLast is how many checkpoints stay, after a new one is there; else all.
func WithKeepLast(checkpoints int) CheckpointerOption {
	return func(o *checkpointerOptions) { o.keepLast = int64(checkpoints) }
}

// WithWriteTimeout is how long ranks wait for the slowest to write its part; else, and if it is 0, an hour.
func WithWriteTimeout(timeout time.Duration) CheckpointerOption {
	return func(o *checkpointerOptions) { o.timeout = timeout }
}

// WithSkipIfBusy has SaveAsync save nothing while a save is under way; else it waits.
func WithSkipIfBusy() CheckpointerOption { return func(o *checkpointerOptions) { o.skipIfBusy = true } }

// WithCopyBesideTraining has SaveAsync copy parameters, and what optimizers keep of them, beside the forward and backward
// that follow, if they are DTensors in the CPU's memory: WaitForCopy is called before they are written to. Else they are copied
// before it returns.
func WithCopyBesideTraining() CheckpointerOption {
	return func(o *checkpointerOptions) { o.beside = true }
}

// NewCheckpointer touches no file: that is for Open, or the first save.
func NewCheckpointer(mesh *Mesh, directory string, options ...CheckpointerOption) (*Checkpointer, error) {
	var o checkpointerOptions
	for _, option := range options {
		if option != nil {
			option(&o)
		}
	}
	if err := notNegative("WithWriteTimeout", o.timeout); err != nil {
		return nil, err
	}
	return ask(func(r *rank) (*Checkpointer, error) {
		handle, err := c.CheckpointerCreate(mesh.handle, directory, o.keepLast, o.timeout, o.skipIfBusy, o.beside)
		if err != nil {
			return nil, err
		}
		return &Checkpointer{thing: own(r, "checkpointer", handle, c.CheckpointerFree)}, nil
	}, mesh)
}

// Close waits for what is under way.
func (p *Checkpointer) Close() error {
	if p == nil {
		return nil
	}
	return p.thing.close()
}

// Open makes the directory, if it is not there, and takes it, as the first save does: a run hears at its beginning that
// another one saves there (FailedPrecondition), or that it may not write there. done is how many steps are: a checkpoint
// of a later one is an error then, too; -1: who resumes from this directory, before Load. DataLoss if what would be the
// newest checkpoint has no manifest. Collective.
func (p *Checkpointer) Open(done int64) error {
	return do(func(*rank) error { return c.CheckpointerOpen(p.handle, done) }, p)
}

// Save returns when the directory has step-000100. An error of a SaveAsync before it is a warning on stderr. Collective.
func (p *Checkpointer) Save(step int64, state *State) error {
	return do(func(*rank) error { return c.CheckpointerSave(p.handle, step, state.handle) }, p, state)
}

// SaveAsync returns when this rank's part is copied, and writes it beside training; whether it was not skipped. An error of
// it comes out of the next call that is not Save. Collective.
func (p *Checkpointer) SaveAsync(step int64, state *State) (bool, error) {
	return ask(func(*rank) (bool, error) { return c.CheckpointerSaveAsync(p.handle, step, state.handle) }, p, state)
}

// WaitForCopy returns, WithCopyBesideTraining, when the copy of the save that is under way is there. Called in each step
// before parameters are written to, as by Optimizer.Step, it costs nothing where nothing is under way. Nothing is on the disk
// before all ranks have called it, or another method of their Checkpointer. A save whose tensors were written to before it fails with FailedPrecondition, which comes out where its other errors do. Every other call does
// it, too.
func (p *Checkpointer) WaitForCopy() error {
	return do(func(*rank) error { return c.CheckpointerWaitForCopy(p.handle) }, p)
}

// Wait returns when what is under way is on the disk; WithCopyBesideTraining it waits for the other ranks to ask for their
// copies, too, so that none calls it alone before they do.
func (p *Checkpointer) Wait() error {
	return do(func(*rank) error { return c.CheckpointerWait(p.handle) }, p)
}

// Load loads the newest checkpoint of the directory, in place; NotFound if it has none. Collective.
func (p *Checkpointer) Load(state *State, options ...LoadOption) (Loaded, error) {
	return loaded(ask(func(*rank) (string, error) {
		return c.CheckpointerLoad(p.handle, state.handle, loadOptions(options))
	}, p, state))
}

// ListCheckpoints are the steps of a directory's checkpoints, ascending. For one process alone, as the next two.
func ListCheckpoints(directory string) ([]int64, error) {
	steps, err := c.ListCheckpoints(directory)
	return steps, public(err)
}

// FindCheckpoint is the checkpoint that Load would load: the path itself, or its newest. DataLoss if the directory of a
// higher step has files of a checkpoint and no manifest.
func FindCheckpoint(path string) (string, error) {
	found, err := c.FindCheckpoint(path)
	return found, public(err)
}

// VerifyCheckpoint reads all of what FindCheckpoint finds: sizes, headers, checksums.
func VerifyCheckpoint(path string) error { return public(c.VerifyCheckpoint(path)) }

// WriteSafetensors writes plain tensors by their names to a file that is not there yet, with texts about them; it is on the
// disk when this returns. One rank does it alone. Package safetensors reads such files.
func WriteSafetensors(path string, tensors []NamedTensor, metadata map[string]string) error {
	things, names, words := []used{}, []string{}, []string{}
	for _, t := range tensors {
		things, names = append(things, t.Tensor), append(names, t.Name)
	}
	for key, value := range metadata {
		words = append(words, key, value)
	}
	return do(func(*rank) error {
		handles := make([]c.Tensor, len(tensors))
		for i, t := range tensors {
			handles[i] = t.handle
		}
		return c.SafetensorsWrite(path, names, handles, words)
	}, things...)
}
