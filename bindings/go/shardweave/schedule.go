package shardweave

import (
	"fmt"
	"math"
)

// Schedule is by what the learning rate is multiplied in a step; the first step is 0. One of the program's own is a
// function like any other.
type Schedule func(step int64) float64

// CosineSchedule rises from 0 to 1 in the first warmup steps, and falls along half a cosine to least at step steps, one
// behind the last: get_cosine_schedule_with_warmup of transformers, if least is 0. Later steps stay at least.
func CosineSchedule(warmup, steps int64, least float64) Schedule {
	return warmedUp(warmup, steps, func(done float64) float64 {
		return least + (1-least)*0.5*(1+math.Cos(math.Pi*done))
	})
}

// LinearSchedule rises from 0 to 1 in the first warmup steps, and falls in a line to least at step steps:
// get_linear_schedule_with_warmup of transformers, if least is 0. Later steps stay at least.
func LinearSchedule(warmup, steps int64, least float64) Schedule {
	return warmedUp(warmup, steps, func(done float64) float64 { return 1 - (1-least)*done })
}

// warmedUp has fall for what is done, from 0 to 1, of the steps behind the warmup.
func warmedUp(warmup, steps int64, fall func(done float64) float64) Schedule {
	return func(step int64) float64 {
		switch {
		case step < 0:
			step = 0
			fallthrough
		case step < warmup:
			if warmup <= 0 {
				return fall(0)
			}
			return float64(step) / float64(warmup)
		case step >= steps || steps <= warmup:
			return fall(1)
		}
		return fall(float64(step-warmup) / float64(steps-warmup))
	}
}

// WSDSchedule rises from 0 to 1 in the first warmup steps, stays there, and falls in a line to least in the last decay of all
// steps (warm-up, stable, decay: Hu et al., MiniCPM, 2024). Later steps stay at least.
func WSDSchedule(warmup, steps, decay int64, least float64) Schedule {
	begin := steps - decay
	if begin < warmup {
		begin = warmup
	}
	return func(step int64) float64 {
		if step < 0 {
			step = 0
		}
		switch {
		case step < warmup:
			return float64(step) / float64(warmup)
		case step >= steps:
			return least
		case step < begin:
			return 1
		}
		return 1 - (1-least)*float64(step-begin)/float64(steps-begin)
	}
}

// StepSchedule multiplies by factor after every so many steps: StepLR of torch.
func StepSchedule(every int64, factor float64) Schedule {
	return func(step int64) float64 {
		if every < 1 || step < 0 {
			return 1
		}
		return math.Pow(factor, float64(step/every))
	}
}

// Scheduler sets the learning rates of optimizers, each group's to the one that it had at first, times what its [Schedule]
// says of the step. It belongs to the rank of its optimizers.
type Scheduler struct {
	_ noCopy
	*scheduled
}

// scheduled is what a Scheduler, and whoever copied it, means.
type scheduled struct {
	optimizers []*Optimizer
	base       [][]float64 // of each one's groups
	schedule   Schedule
	step       int64
}

// NewScheduler sets the learning rates for step 0. Call its Step after every step of the optimizers.
func NewScheduler(schedule Schedule, optimizers ...*Optimizer) (*Scheduler, error) {
	if schedule == nil {
		return nil, invalid("argument 'schedule' is nil")
	}
	if len(optimizers) == 0 {
		return nil, invalid("argument 'optimizers' is empty")
	}
	s := &Scheduler{scheduled: &scheduled{optimizers: append([]*Optimizer(nil), optimizers...), schedule: schedule}}
	for _, o := range optimizers {
		groups, err := o.NumGroups()
		if err != nil {
			return nil, err
		}
		base := make([]float64, groups)
		for group := range base {
			if base[group], err = o.GroupLR(group); err != nil {
				return nil, err
			}
		}
		s.base = append(s.base, base)
	}
	return s, s.SetStep(0)
}

// Step goes on to the learning rates of the next step.
func (s *Scheduler) Step() error {
	if s == nil || s.scheduled == nil {
		return noThing("Scheduler")
	}
	return s.SetStep(s.step + 1)
}

// SetStep goes on from a step, as after a checkpoint.
func (s *Scheduler) SetStep(step int64) error {
	switch {
	case s == nil || s.scheduled == nil:
		return noThing("Scheduler")
	case step < 0:
		return invalid("argument 'step' is %d; wanted 0 or more", step)
	}
	factor := s.schedule(step)
	if !(factor >= 0) || math.IsInf(factor, 0) {
		return newError(OutOfRange, fmt.Sprintf("the schedule says %v for step %d; wanted a factor of 0 or more", factor, step))
	}
	for i, o := range s.optimizers {
		for group, lr := range s.base[i] {
			if err := o.SetGroupLR(group, lr*factor); err != nil {
				return err
			}
		}
	}
	s.step = step
	return nil
}

// At is the step that the learning rates are of.
func (s *Scheduler) At() int64 {
	if s == nil || s.scheduled == nil {
		return 0
	}
	return s.step
}

// Optimizers are several that step together: groups of parameters with options of their own. [NewOptimizerOfGroups] makes one
// optimizer of them, which ZeRO, checkpoints and schedules then take as one.
//
//	decayed, err := sw.NewAdamW(matrices, 3e-4, sw.WeightDecay(0.1))
//	...
//	others, err := sw.NewAdamW(vectors, 3e-4, sw.WeightDecay(0))
//	...
//	all := sw.Optimizers{decayed, others}
type Optimizers []*Optimizer

// Step is Optimizer.Step of each.
func (all Optimizers) Step() error { return all.each((*Optimizer).Step) }

// ZeroGrad is Optimizer.ZeroGrad of each.
func (all Optimizers) ZeroGrad() error { return all.each((*Optimizer).ZeroGrad) }

// Close is Optimizer.Close of each, also of those behind one that fails; the error is the first.
func (all Optimizers) Close() error {
	var first error
	for _, o := range all {
		if err := o.Close(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

func (all Optimizers) each(f func(*Optimizer) error) error {
	for _, o := range all {
		if err := f(o); err != nil {
			return err
		}
	}
	return nil
}
