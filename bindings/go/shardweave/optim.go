package shardweave

import (
	"runtime"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// AdafactorOption is an option of NewAdafactor.
type AdafactorOption interface{ adafactor(o *c.Adafactor) }

// MuonOption is an option of NewMuon.
type MuonOption interface{ muon(o *c.Muon) }

func (d WeightDecay) adafactor(o *c.Adafactor) { o.WeightDecay = float64(d) }
func (d WeightDecay) muon(o *c.Muon)           { o.WeightDecay = float64(d) }

type adafactorOption func(*c.Adafactor)

func (f adafactorOption) adafactor(o *c.Adafactor) { f(o) }

type muonOption func(*c.Muon)

func (f muonOption) muon(o *c.Muon) { f(o) }

// WithBeta2Decay is an option of Adafactor: means forget 1 - t ^ decay of themselves in step t; below 0, else -0.8.
func WithBeta2Decay(decay float64) AdafactorOption {
	return adafactorOption(func(o *c.Adafactor) { o.Beta2Decay = decay })
}

// WithAdafactorEps is an option of Adafactor: the smallest root of a mean square (0, and also else: the element type's
// epsilon), and the smallest root mean square of a parameter, by which steps are scaled (else 1e-3).
func WithAdafactorEps(eps1, eps2 float64) AdafactorOption {
	return adafactorOption(func(o *c.Adafactor) { o.Eps1, o.Eps2 = eps1, eps2 })
}

// WithClipThreshold is an option of Adafactor: the largest root mean square of an update before it is scaled; else 1.
func WithClipThreshold(threshold float64) AdafactorOption {
	return adafactorOption(func(o *c.Adafactor) { o.ClipThreshold = threshold })
}

// WithMuonMomentum is an option of Muon: how much of itself the momentum keeps, and whether it is Nesterov's; else 0.95 and
// true.
func WithMuonMomentum(momentum float64, nesterov bool) MuonOption {
	return muonOption(func(o *c.Muon) { o.Momentum, o.Nesterov = momentum, nesterov })
}

// WithIteration is an option of Muon: of the Newton-Schulz iteration X <- a X + (b A + c A A) X, where A = X Xᵀ, how many
// steps (else 5), and a, b, c.
func WithIteration(steps int, coefficients [3]float64) MuonOption {
	return muonOption(func(o *c.Muon) {
		if o.Steps = int32(steps); int(o.Steps) != steps {
			o.Steps = 0 // which is refused
		}
		o.A, o.B, o.C = coefficients[0], coefficients[1], coefficients[2]
	})
}

// WithIterationDType is an option of Muon: in which the iteration computes, and matrices travel: BF16 (else), F32, F64.
func WithIterationDType(d DType) MuonOption {
	return muonOption(func(o *c.Muon) { o.DType = int32(d) })
}

// WithMuonEps is an option of Muon: the smallest norm that a matrix is divided by; else 1e-7.
func WithMuonEps(eps float64) MuonOption { return muonOption(func(o *c.Muon) { o.Eps = eps }) }

// WithRMSOfAdamW is an option of Muon: multiplies the learning rate by 0.2 sqrt(max(rows, columns)), so that one of AdamW's
// fits, in place of sqrt(max(1, rows / columns)).
func WithRMSOfAdamW() MuonOption {
	return muonOption(func(o *c.Muon) { o.LRScale = c.MuonMatchRmsAdamW })
}

// NewAdafactor is Adafactor (Shazeer and Stern, 2018), with PyTorch's numbers: it keeps the squares of gradients as the means
// of rows and of columns. It shares the parameters, which may be distributed until the first step. Steps are collective over
// the meshes of parameters that are cut.
func NewAdafactor(parameters []*Tensor, lr float64, options ...AdafactorOption) (*Optimizer, error) {
	o := c.Adafactor{LR: lr, Beta2Decay: c.DefaultAdafactorBeta2Decay, Eps2: c.DefaultAdafactorEps2,
		ClipThreshold: c.DefaultAdafactorClipThreshold}
	for _, option := range options {
		if option != nil {
			option.adafactor(&o)
		}
	}
	return newOptimizer(parameters, func(handles []c.Tensor) (c.Optimizer, error) {
		return c.OptimizerCreateAdafactor(handles, o)
	})
}

// NewMuon is Muon (Jordan et al., 2024), with PyTorch's numbers: momentum of matrices that is made orthogonal, in steps that
// are collective over the meshes of parameters that are cut. It takes parameters of two dimensions alone;
// [NewOptimizerOfGroups] puts AdamW for the others beside it. It shares the parameters, which may be distributed until the
// first step.
func NewMuon(parameters []*Tensor, lr float64, options ...MuonOption) (*Optimizer, error) {
	o := c.Muon{LR: lr, WeightDecay: c.DefaultMuonWeightDecay, Momentum: c.DefaultMuonMomentum, Nesterov: true,
		A: c.DefaultMuonNsA, B: c.DefaultMuonNsB, C: c.DefaultMuonNsC, Eps: c.DefaultMuonEps, Steps: c.DefaultMuonNsSteps,
		DType: int32(BF16)}
	for _, option := range options {
		if option != nil {
			option.muon(&o)
		}
	}
	return newOptimizer(parameters, func(handles []c.Tensor) (c.Optimizer, error) {
		return c.OptimizerCreateMuon(handles, o)
	})
}

// NewOptimizerOfGroups is one optimizer of several: each becomes a group, with its options and its learning rate, and
// parameters are numbered group by group. The given ones are only read, have made no steps, and may be closed. A parameter is
// in one group. ([Optimizers] steps several that stay apart.)
func NewOptimizerOfGroups(groups ...*Optimizer) (*Optimizer, error) {
	if len(groups) == 0 {
		return nil, invalid("argument 'groups' is empty")
	}
	all := make([]used, len(groups))
	for i, group := range groups {
		all[i] = group
	}
	defer runtime.KeepAlive(groups)
	return ask(func(r *rank) (*Optimizer, error) {
		handles := make([]c.Optimizer, len(groups))
		for i, group := range groups {
			handles[i] = group.handle
		}
		handle, err := c.OptimizerCreateGroups(handles)
		if err != nil {
			return nil, err
		}
		return &Optimizer{thing: own(r, "optimizer", handle, c.OptimizerFree)}, nil
	}, all...)
}

// NumGroups is 1, but for one of NewOptimizerOfGroups.
func (o *Optimizer) NumGroups() (int, error) {
	return ask(func(*rank) (int, error) { return c.OptimizerNumGroups(o.handle) }, o)
}

// GroupLR is the learning rate of a group.
func (o *Optimizer) GroupLR(group int) (float64, error) {
	if group < 0 {
		return 0, invalid("argument 'group' is %d", group)
	}
	return ask(func(*rank) (float64, error) { return c.OptimizerGroupLR(o.handle, group) }, o)
}

// SetGroupLR sets the learning rate of a group.
func (o *Optimizer) SetGroupLR(group int, lr float64) error {
	if group < 0 {
		return invalid("argument 'group' is %d", group)
	}
	return do(func(*rank) error { return c.OptimizerSetGroupLR(o.handle, group, lr) }, o)
}

// GradScaler scales losses so that gradients of 16 bits do not vanish, and tells when they are not finite (Micikevicius et
// al., Mixed Precision Training, 2018): the numbers of torch.amp.GradScaler.
//
//	scaled, err := scaler.Scale(loss)
//	err = scaled.Backward()
//	err = model.FinishGradSync()
//	finite, err := scaler.Unscale(parameters) // the same on every rank
//	if finite {
//		err = optimizer.Step()
//	}
//	err = scaler.Update()
//
// All ranks call everything alike; their scales are then the same. See [World.NewGradScaler].
type GradScaler struct {
	_ noCopy
	*thing[c.GradScaler]
}

func (s *GradScaler) home() (*rank, error) {
	if s == nil || s.thing == nil {
		return nil, noThing("GradScaler")
	}
	return s.rank, nil
}

// GradScalerOption is an option of [World.NewGradScaler].
type GradScalerOption func(*gradScalerOptions)

type gradScalerOptions struct {
	scale, growth, backoff float64
	interval               int64
}

// WithScale is the scale of the first step; else 65536.
func WithScale(scale float64) GradScalerOption {
	return func(o *gradScalerOptions) { o.scale = scale }
}

// WithGrowth is what the scale grows by, above 1, after so many steps without a skip; else 2 and 2000.
func WithGrowth(factor float64, interval int64) GradScalerOption {
	return func(o *gradScalerOptions) { o.growth, o.interval = factor, interval }
}

// WithBackoff is what is left of the scale after a skip, above 0 and below 1; else 0.5.
func WithBackoff(factor float64) GradScalerOption {
	return func(o *gradScalerOptions) { o.backoff = factor }
}

// NewGradScaler is a [GradScaler] of this rank.
func (w *World) NewGradScaler(options ...GradScalerOption) (*GradScaler, error) {
	o := gradScalerOptions{c.DefaultGradScalerInitScale, c.DefaultGradScalerGrowthFactor, c.DefaultGradScalerBackoffFactor,
		c.DefaultGradScalerGrowthInterval}
	for _, option := range options {
		if option != nil {
			option(&o)
		}
	}
	return ask(func(r *rank) (*GradScaler, error) {
		handle, err := c.GradScalerCreate(o.scale, o.growth, o.backoff, o.interval)
		if err != nil {
			return nil, err
		}
		return &GradScaler{thing: own(r, "GradScaler", handle, c.GradScalerFree)}, nil
	}, w)
}

// Close ends the scaler.
func (s *GradScaler) Close() error {
	if s == nil {
		return nil
	}
	return s.thing.close()
}

// Scale is the loss times the scale.
func (s *GradScaler) Scale(loss *Tensor) (*Tensor, error) {
	defer runtime.KeepAlive(loss)
	return ask(func(r *rank) (*Tensor, error) {
		handle, err := c.GradScalerScale(s.handle, loss.handle, int32(r.mode))
		if err != nil {
			return nil, err
		}
		return r.tensor(handle), nil
	}, s, loss)
}

// Unscale divides the gradients of the parameters by the scale, and says whether all of them are finite, on all ranks.
// FailedPrecondition for a parameter that has been unscaled since the last Update, and for a gradient that is still to be
// synchronized. Collective.
func (s *GradScaler) Unscale(parameters []*Tensor) (bool, error) {
	all, err := required(parameters)
	if err != nil {
		return false, err
	}
	defer runtime.KeepAlive(parameters)
	return ask(func(*rank) (bool, error) {
		return c.GradScalerUnscale(s.handle, handlesOf(parameters))
	}, append(all, s)...)
}

// Update sets the scale of the next step: smaller if a gradient was not finite, larger after so many times in a row where all
// were. FailedPrecondition if nothing was unscaled.
func (s *GradScaler) Update() error {
	return do(func(*rank) error { return c.GradScalerUpdate(s.handle) }, s)
}

// State is the scale, and how many updates there were without a skip since it changed: to be saved.
func (s *GradScaler) State() (scale float64, tracker int64, err error) {
	err = do(func(*rank) (err error) {
		scale, tracker, err = c.GradScalerState(s.handle)
		return err
	}, s)
	return scale, tracker, err
}

// SetState goes on from what was saved.
func (s *GradScaler) SetState(scale float64, tracker int64) error {
	return do(func(*rank) error { return c.GradScalerSetState(s.handle, scale, tracker) }, s)
}
