package shardweave

import (
	"runtime"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Optimizer changes parameters by their gradients: this rank's parts, by LibTorch's fused kernels. Its
// state is sharded as the parameters are. It communicates nothing: call FinishGradSync before Step.
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

// AdamWOption is an option of NewAdamW.
type AdamWOption interface{ adamW(o *c.AdamW) }

// WeightDecay is an option of both optimizers: else 0 of SGD, 0.01 of AdamW.
type WeightDecay float64

func (d WeightDecay) sgd(o *c.SGD)     { o.WeightDecay = float64(d) }
func (d WeightDecay) adamW(o *c.AdamW) { o.WeightDecay = float64(d) }

type sgdOption func(*c.SGD)

func (f sgdOption) sgd(o *c.SGD) { f(o) }

type adamWOption func(*c.AdamW)

func (f adamWOption) adamW(o *c.AdamW) { f(o) }

// WithMomentum is an option of SGD: how much of the last step each step repeats; else 0.
func WithMomentum(momentum, dampening float64) SGDOption {
	return sgdOption(func(o *c.SGD) { o.Momentum, o.Dampening = momentum, dampening })
}

// WithNesterov is an option of SGD with momentum: Nesterov's.
func WithNesterov() SGDOption { return sgdOption(func(o *c.SGD) { o.Nesterov = true }) }

// WithBetas is an option of AdamW: how fast the means of gradients and of their squares forget; else 0.9
// and 0.999.
func WithBetas(beta1, beta2 float64) AdamWOption {
	return adamWOption(func(o *c.AdamW) { o.Beta1, o.Beta2 = beta1, beta2 })
}

// WithEps is an option of AdamW: what divisors are larger by; else 1e-8.
func WithEps(eps float64) AdamWOption { return adamWOption(func(o *c.AdamW) { o.Eps = eps }) }

// WithAMSGrad is an option of AdamW: steps by the largest mean of squares so far.
func WithAMSGrad() AdamWOption { return adamWOption(func(o *c.AdamW) { o.AMSGrad = true }) }

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

// NewAdamW is AdamW, which shares the parameters. They may be distributed until the first step.
func NewAdamW(parameters []*Tensor, lr float64, options ...AdamWOption) (*Optimizer, error) {
	o := c.AdamW{LR: lr, Beta1: c.DefaultAdamWBeta1, Beta2: c.DefaultAdamWBeta2, Eps: c.DefaultAdamWEps,
		WeightDecay: c.DefaultAdamWWeightDecay}
	for _, option := range options {
		if option != nil {
			option.adamW(&o)
		}
	}
	return newOptimizer(parameters, func(handles []c.Tensor) (c.Optimizer, error) {
		return c.OptimizerCreateAdamW(handles, o)
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

// Step changes the parameters. Those without a gradient stay as they are.
func (o *Optimizer) Step() error {
	return do(func(*rank) error { return c.OptimizerStep(o.handle) }, o)
}

// ZeroGrad makes every gradient none.
func (o *Optimizer) ZeroGrad() error {
	return do(func(*rank) error { return c.OptimizerZeroGrad(o.handle) }, o)
}

// LR is the learning rate.
func (o *Optimizer) LR() (float64, error) {
	return ask(func(*rank) (float64, error) { return c.OptimizerLR(o.handle) }, o)
}

// SetLR sets the learning rate.
func (o *Optimizer) SetLR(lr float64) error {
	return do(func(*rank) error { return c.OptimizerSetLR(o.handle, lr) }, o)
}

// State is the state of a parameter, by its index, laid out as it is: of AdamW "step" (one F32 number),
// "exp_avg", "exp_avg_sq", with AMSGrad "max_exp_avg_sq"; of SGD with momentum "momentum_buffer". Before
// the first step it is zeros. Writing to it writes the state.
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
