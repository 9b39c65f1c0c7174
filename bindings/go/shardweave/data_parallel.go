package shardweave

import (
	"runtime"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// GradientBucket is gradients on their way, for a [GradientHook]: this rank's summands, one after the other. Its tensors
// and its group are closed when the hook returns.
type GradientBucket struct {
	Index      int64     // of those of this iteration, in the order in which they began
	Flat       *Tensor   // plain, one-dimensional; what it has in the end, written in place, is what arrives
	Gradients  []*Tensor // views of it, with the shapes of this rank's parts
	Parameters []string  // their names; "" where there is none
	Comm       *Comm     // the ranks whose summands are to be summed up
	Discarded  bool      // [GradSync.Discard]: nothing comes of it
}

// GradientHook reduces buckets of gradients in place of an all-reduce: see [WithGradientHook]. Begin is called when a bucket
// is full, in Backward mostly, and Finish of all buckets in FinishGradSync, after Begin of all: each rank issues the same
// operations in the same order. In the first iteration all gradients come at the end, in other buckets than later. For
// gradients of F16, BF16, F32 and F64 that an all-reduce would sum; others travel as without it. An error or a panic comes
// out of FinishGradSync, on all ranks of the mesh, which is lost then: on the hook's own rank as of a [Function], on others
// as Aborted, with the text.
type GradientHook interface {
	// Name, with what the hook does, options and all: the ranks compare it.
	Name() string
	// Begin starts what has to happen to a bucket that is full, or does it.
	Begin(bucket *GradientBucket) error
	// Finish leaves in the bucket's Flat what arrives.
	Finish(bucket *GradientBucket) error
}

// PowerSGD (Vogels et al., 2019) lets gradients that are matrices travel as two thin ones, of Rank columns, in two
// collectives for a bucket; what is lost is added to the next gradient. See [WithPowerSGD].
type PowerSGD struct {
	Rank               int64   // 1 or more
	StartIteration     int64   // so many times a gradient travels whole before
	MinCompressionRate float64 // a matrix that would not become so much smaller travels whole; 0 is 2
	Seed               uint64
	NoErrorFeedback    bool
	NoWarmStart        bool // each step begins with new numbers
}

// WithGradientHook has a hook reduce buckets. It is called on the rank's own goroutine.
func WithGradientHook(hook GradientHook) GradSyncOption {
	return func(o *c.GradSyncOptions) {
		if hook != nil {
			o.Hook, o.HookName = &hookOfRank{hook: hook}, hook.Name()
		}
	}
}

// WithPowerSGD compresses gradients. Not together with a hook.
func WithPowerSGD(p PowerSGD) GradSyncOption {
	return func(o *c.GradSyncOptions) {
		if p.MinCompressionRate == 0 {
			p.MinCompressionRate = 2
		}
		o.PowerSGD = c.PowerSGD{Rank: p.Rank, StartIteration: p.StartIteration, MinCompressionRate: p.MinCompressionRate,
			Seed: p.Seed, NoErrorFeedback: p.NoErrorFeedback, NoWarmUp: p.NoWarmStart}
		if p.Rank == 0 {
			o.PowerSGD.Rank = -1 // which is refused
		}
	}
}

func gradSyncOptions(r *rank, options []GradSyncOption) c.GradSyncOptions {
	o := c.GradSyncOptions{BucketBytes: c.DefaultGradSyncBucketBytes}
	for _, option := range options {
		if option != nil {
			option(&o)
		}
	}
	if h, ok := o.Hook.(*hookOfRank); ok {
		o.Hook = &hookOfRank{hook: h.hook, rank: r} // an option may be given twice
	}
	return o
}

// hookOfRank is what the inner package calls.
type hookOfRank struct {
	rank *rank
	hook GradientHook
}

func (h *hookOfRank) Dropped() {}

func (h *hookOfRank) Bucket(finish bool, b c.GradientBucket) error {
	r := h.rank
	borrowed := append([]c.Tensor{b.Flat}, b.Gradients...)
	handles := make([]c.Tensor, len(borrowed))
	for i, tensor := range borrowed {
		handle, err := c.TensorShare(tensor)
		if err != nil {
			c.TensorsFree(handles)
			return err
		}
		handles[i] = handle
	}
	err := r.callback(NoGrad, func() error {
		bucket := &GradientBucket{Index: b.Index, Parameters: b.Parameters, Discarded: b.Discarded}
		r.atLast(func() {
			tensors := r.tensors(handles)
			bucket.Flat, bucket.Gradients = tensors[0], tensors[1:]
			bucket.Comm = &Comm{thing: own(r, "group", b.Comm, func(c.Comm) {})} // borrowed
		})
		defer r.atLast(func() {
			r.disown(bucket.Comm.thing)
			bucket.Comm.thing.release()
		})
		if finish {
			return h.hook.Finish(bucket)
		}
		return h.hook.Begin(bucket)
	})
	if err != nil && !finish {
		r.begun = raisedError{".begin: " + told(err), err}
	}
	return private(err)
}

// DistributedDataParallel is data parallelism: parameters and buffers that are plain become replicated over the mesh, in
// place, and gradients leave in buckets while Backward goes on, until the [GradSync] is closed.
//
//	ddp, err := model.DistributedDataParallel(mesh, "dp", sw.FromRank(0))
//	...
//	err = loss.Backward()
//	err = model.FinishGradSync()
//	err = optimizer.Step()
//
// A loss is that of all ranks' input, and nothing is divided by the number of ranks. meshDim, "" is the mesh's first, is one
// along which no parameter may be cut; what tensor parallelism has cut on the same mesh ([Module.Distribute], before this)
// stays so. A parameter that is cut along it, on another mesh, fully sharded or in another GradSync, and ranks that differ,
// are errors on all ranks before anything changes. Collective.
func (m *Module) DistributedDataParallel(mesh *Mesh, meshDim string, source Source, options ...GradSyncOption) (*GradSync, error) {
	return ask(func(r *rank) (*GradSync, error) {
		handle, err := c.ModuleDistributedDataParallel(m.handle, mesh.handle, meshDim, int64(source), gradSyncOptions(r, options))
		if err != nil {
			return nil, err
		}
		return &GradSync{thing: own(r, "GradSync", handle, c.GradSyncFree)}, nil
	}, m, mesh)
}

// PreDPTransform is the half of DistributedDataParallel that is not about gradients, for a [GradSync] of one's own.
// Collective.
func (m *Module) PreDPTransform(mesh *Mesh, meshDim string, source Source) error {
	return do(func(*rank) error { return c.ModulePreDPTransform(m.handle, mesh.handle, meshDim, int64(source)) }, m, mesh)
}

// BroadcastBuffers gives every rank the buffers of the first one along the dimension, "" is the mesh's first: for what a
// program writes of its own on each rank. Collective.
func (m *Module) BroadcastBuffers(mesh *Mesh, meshDim string) error {
	return do(func(*rank) error { return c.ModuleBroadcastBuffers(m.handle, mesh.handle, meshDim) }, m, mesh)
}

// Enable2DWithFSDP says, between Distribute and FullyShard, whether the module is tensor parallel on this mesh and whole
// along the dimension, "" is the mesh's first. The wrong order is an error on all ranks. Collective.
func (m *Module) Enable2DWithFSDP(mesh *Mesh, meshDim string) error {
	return do(func(*rank) error { return c.ModuleEnable2DWithFSDP(m.handle, mesh.handle, meshDim) }, m, mesh)
}

// JoinBatch is for ranks with different numbers of batches, at the end of an epoch: of each rank's rows of the tensors of a
// batch, plain, it makes one tensor each, cut between rows as ranks have brought them. A rank that has no more gives none,
// and takes part without rows, so that losses and gradients are those of one device on all rows that there are. No tensors
// come once no rank has any. ranks is how many had input. meshDims is along which ranks have input of their own; nil is the
// mesh's first. At most eight tensors. Ranks that differ in their number, types or rows' shapes, and numbers, are errors on
// all ranks. Collective.
func (m *Mesh) JoinBatch(meshDims []string, mine ...*Tensor) (batch []*Tensor, ranks int64, err error) {
	all := []used{m}
	for _, t := range mine { // none is an answer, too
		all = append(all, t)
	}
	defer runtime.KeepAlive(mine)
	batch, err = ask(func(r *rank) ([]*Tensor, error) {
		handles, n, err := c.MeshJoinBatch(m.handle, meshDims, handlesOf(mine))
		if err != nil {
			return nil, err
		}
		ranks = n
		return r.tensors(handles), nil
	}, all...)
	return batch, ranks, err
}

// States is what PowerSGD has learned on this rank, by name ("weight.error", ".q", ".iteration"): copies. Each rank keeps
// its own, for [GradSync.SetStates] when it resumes. Under a [GradScaler] every ".error" is in units of its scale: where
// Update has changed that, they are to be set to as many times what they were.
func (s *GradSync) States() (map[string]*Tensor, error) {
	return ask(func(r *rank) (map[string]*Tensor, error) {
		names, handles, err := c.GradSyncStates(s.handle)
		if err != nil {
			return nil, err
		}
		states := map[string]*Tensor{}
		for i, tensor := range r.tensors(handles) {
			states[names[i]] = tensor
		}
		return states, nil
	}, s)
}

// SetStates sets all of it, in place of what there was.
func (s *GradSync) SetStates(states map[string]*Tensor) error {
	var names []string
	var tensors []*Tensor
	all := []used{s}
	for name, tensor := range states {
		names, tensors, all = append(names, name), append(tensors, tensor), append(all, tensor)
	}
	defer runtime.KeepAlive(tensors)
	return do(func(*rank) error { return c.GradSyncSetStates(s.handle, names, handlesOf(tensors)) }, all...)
}
