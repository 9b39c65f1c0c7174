package shardweave

import (
	"runtime"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Optimizer changes parameters by their gradients: this rank's parts, by LibTorch's fused kernels. Its
// state is sharded as the parameters are. SGD, Adam, AdamW and Lion communicate nothing, but for [Optimizer.UseZeRO]: call
// FinishGradSync before Step.
type Optimizer struct {
	_ noCopy
	*thing[c.Optimizer]
}

func (o *Optimizer) home() (*rank, error) {
	if o == nil || o.thing == nil {
		return nil, noThing("Optimizer")
	}
	return o.rank, nil
}

// SGDOption is an option of NewSGD.
type SGDOption interface{ sgd(o *c.SGD) }

// AdamOption is an option of NewAdam and NewAdamW.
type AdamOption interface{ adam(o *c.Adam) }

// LionOption is an option of NewLion.
type LionOption interface{ lion(o *c.Lion) }

// WeightDecay is an option of all optimizers: else 0.01 of AdamW, 0.1 of Muon, 0 of the others. AdamW, Lion, Adafactor and
// Muon take it off the parameter, SGD and Adam add it to the gradient.
type WeightDecay float64

func (d WeightDecay) sgd(o *c.SGD)   { o.WeightDecay = float64(d) }
func (d WeightDecay) adam(o *c.Adam) { o.WeightDecay = float64(d) }
func (d WeightDecay) lion(o *c.Lion) { o.WeightDecay = float64(d) }

// Betas is an option of Adam, AdamW and Lion: how fast the means of gradients, and of their squares, forget; else 0.9 and
// 0.999, of Lion 0.9 and 0.99.
type Betas [2]float64

func (b Betas) adam(o *c.Adam) { o.Beta1, o.Beta2 = b[0], b[1] }
func (b Betas) lion(o *c.Lion) { o.Beta1, o.Beta2 = b[0], b[1] }

type sgdOption func(*c.SGD)

func (f sgdOption) sgd(o *c.SGD) { f(o) }

type adamOption func(*c.Adam)

func (f adamOption) adam(o *c.Adam) { f(o) }

// WithMomentum is an option of SGD: how much of the last step each step repeats; else 0.
func WithMomentum(momentum, dampening float64) SGDOption {
	return sgdOption(func(o *c.SGD) { o.Momentum, o.Dampening = momentum, dampening })
}

// WithNesterov is an option of SGD with momentum: Nesterov's.
func WithNesterov() SGDOption { return sgdOption(func(o *c.SGD) { o.Nesterov = true }) }

// WithBetas is Betas.
func WithBetas(beta1, beta2 float64) Betas { return Betas{beta1, beta2} }

// WithEps is an option of Adam and AdamW: what divisors are larger by; else 1e-8.
func WithEps(eps float64) AdamOption { return adamOption(func(o *c.Adam) { o.Eps = eps }) }

// WithAMSGrad is an option of Adam and AdamW: steps by the largest mean of squares so far.
func WithAMSGrad() AdamOption { return adamOption(func(o *c.Adam) { o.AMSGrad = true }) }

// NewSGD is stochastic gradient descent, which shares the parameters. They may be distributed until the
// first step.
func NewSGD(parameters []*Tensor, lr float64, options ...SGDOption) (*Optimizer, error) {
	o := c.SGD{LR: lr}
	for _, option := range options {
		if option != nil {
			option.sgd(&o)
		}
	}
	return newOptimizer(parameters, func(handles []c.Tensor) (c.Optimizer, error) {
		return c.OptimizerCreateSGD(handles, o)
	})
}

// NewAdamW is AdamW (Loshchilov and Hutter, 2019), which shares the parameters. They may be distributed until the first
// step.
func NewAdamW(parameters []*Tensor, lr float64, options ...AdamOption) (*Optimizer, error) {
	return newAdam(parameters, c.Adam{LR: lr, Beta1: c.DefaultAdamWBeta1, Beta2: c.DefaultAdamWBeta2, Eps: c.DefaultAdamWEps,
		WeightDecay: c.DefaultAdamWWeightDecay}, options, c.OptimizerCreateAdamW)
}

// NewAdam is Adam (Kingma and Ba, 2015), which shares the parameters. They may be distributed until the first step.
func NewAdam(parameters []*Tensor, lr float64, options ...AdamOption) (*Optimizer, error) {
	return newAdam(parameters, c.Adam{LR: lr, Beta1: c.DefaultAdamBeta1, Beta2: c.DefaultAdamBeta2, Eps: c.DefaultAdamEps},
		options, c.OptimizerCreateAdam)
}

func newAdam(parameters []*Tensor, o c.Adam, options []AdamOption, create func([]c.Tensor, c.Adam) (c.Optimizer, error)) (*Optimizer, error) {
	for _, option := range options {
		if option != nil {
			option.adam(&o)
		}
	}
	return newOptimizer(parameters, func(handles []c.Tensor) (c.Optimizer, error) { return create(handles, o) })
}

// NewLion is Lion, which steps by the sign alone (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023), and
// shares the parameters. They may be distributed until the first step.
func NewLion(parameters []*Tensor, lr float64, options ...LionOption) (*Optimizer, error) {
	o := c.Lion{LR: lr, Beta1: c.DefaultLionBeta1, Beta2: c.DefaultLionBeta2}
	for _, option := range options {
		if option != nil {
			option.lion(&o)
		}
	}
	return newOptimizer(parameters, func(handles []c.Tensor) (c.Optimizer, error) {
		return c.OptimizerCreateLion(handles, o)
	})
}

func newOptimizer(parameters []*Tensor, create func([]c.Tensor) (c.Optimizer, error)) (*Optimizer, error) {
	all, err := required(parameters)
	if err != nil {
		return nil, err
	}
	defer runtime.KeepAlive(parameters)
	return ask(func(r *rank) (*Optimizer, error) {
		handle, err := create(handlesOf(parameters))
		if err != nil {
			return nil, err
		}
		return &Optimizer{thing: own(r, "optimizer", handle, c.OptimizerFree)}, nil
	}, all...)
}

// Close ends the optimizer and its state.
func (o *Optimizer) Close() error {
	if o == nil {
		return nil
	}
	return o.thing.close()
}

// ZeRO is how [Optimizer.UseZeRO] divides.
type ZeRO struct {
	MeshDim string // along which; "": the mesh's first
	// 1, and also 0: gradients are whole until FinishGradSync. 2: they leave in Backward, in buckets, and only a rank's
	// part of them stays.
	Stage       int
	BucketBytes int64 // of parameters that travel together, a larger one alone; 0: 25 MiB
}

// UseZeRO divides the optimizer's state and its work among the ranks along one mesh dimension (Rajbhandari et al., 2020),
// while parameters are whole on each, as in data parallelism. Before the first step or look at the state; parameters get
// other memory. From then on Step brings each rank the others' parts. Collective, and Step is.
func (o *Optimizer) UseZeRO(how ZeRO) error {
	stage, bytes := int32(c.DefaultZeroStage), int64(c.DefaultZeroBucketBytes)
	if how.Stage != 0 {
		stage = int32(how.Stage)
	}
	if int(stage) != how.Stage && how.Stage != 0 {
		return invalid("ZeRO.Stage is %d", how.Stage)
	}
	if how.BucketBytes != 0 {
		bytes = how.BucketBytes
	}
	return do(func(*rank) error { return c.OptimizerUseZeRO(o.handle, how.MeshDim, stage, bytes) }, o)
}

// Discard is called after a Backward in stage 2 of ZeRO that failed on this rank, at once, for others may wait in theirs
// for buckets that this rank owes them; and, when the ranks have agreed that it failed, on a communicator that is not the
// mesh's ([World.Comm]), on the others in place of FinishGradSync. What has left comes to nothing, and the next iteration is
// one as any. Gradients stay as they are, for the caller to zero. One that calls FinishGradSync instead gets NaN, or waits for
// what nobody sends. With several optimizers that use ZeRO in one backward the mesh is lost.
func (o *Optimizer) Discard() error {
	return do(func(*rank) error { return c.OptimizerDiscard(o.handle) }, o)
}

// NoSync calls body, in which Backward sends nothing in stage 2 of ZeRO either: gradients of several are summed up first.
// Calls nest.
func (o *Optimizer) NoSync(body func() error) (err error) {
	if body == nil {
		return noBody()
	}
	scope, err := ask(func(*rank) (c.Scope, error) { return c.OptimizerNoSync(o.handle) }, o)
	if err != nil {
		return err
	}
	defer o.rank.finallyOr(&err, func() { c.ScopeFree(scope) })
	return body()
}

// Step changes the parameters. Those without a gradient stay as they are.
func (o *Optimizer) Step() error {
	return do(func(*rank) error { return c.OptimizerStep(o.handle) }, o)
}

// ZeroGrad makes every gradient none.
func (o *Optimizer) ZeroGrad() error {
	return do(func(*rank) error { return c.OptimizerZeroGrad(o.handle) }, o)
}

// LR is the learning rate, of the first group.
func (o *Optimizer) LR() (float64, error) {
	return ask(func(*rank) (float64, error) { return c.OptimizerLR(o.handle) }, o)
}

// SetLR sets the learning rate of all groups.
func (o *Optimizer) SetLR(lr float64) error {
	return do(func(*rank) error { return c.OptimizerSetLR(o.handle, lr) }, o)
}

// State is the state of a parameter, by its index, laid out as it is: "step" (one F32 number); of Adam and AdamW "exp_avg",
// "exp_avg_sq", with AMSGrad "max_exp_avg_sq"; of Lion "exp_avg"; of SGD with momentum and of Muon "momentum_buffer"; of Adafactor
// "variance" or, from two dimensions on, "row_var" and "col_var", which are whole where a mean was taken. With ZeRO it is laid
// out as the rank's part is, in rows that are cut unevenly, and Full makes it whole. Before the first step it is zeros.
// Writing to it writes the state.
func (o *Optimizer) State(parameter int, name string) (*Tensor, error) {
	if parameter < 0 {
		return nil, invalid("argument 'parameter' is %d", parameter)
	}
	return ask(func(r *rank) (*Tensor, error) { return r.optional(c.OptimizerState(o.handle, parameter, name)) }, o)
}

// SetState copies a tensor over a state, to go on from what was saved: sharded as the parameter is, or in
// another layout; of a plain parameter, and for "step", plain. Collective if it is laid out in another way
// than the parameter.
func (o *Optimizer) SetState(parameter int, name string, t *Tensor) error {
	if parameter < 0 {
		return invalid("argument 'parameter' is %d", parameter)
	}
	defer runtime.KeepAlive(t)
	return do(func(*rank) error { return c.OptimizerSetState(o.handle, parameter, name, t.handle) }, o, t)
}
