package shardweave

import (
	"context"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
)

// GracefulStop is how a run ends that is told to: SIGTERM, or SIGUSR1 as Slurm's "--signal=USR1@120" asks for, ends a training
// after the step that it is in, on all ranks at the same one, so that a checkpoint loses nothing. What does not train yet, or
// saves nothing, gives up what it waits for; an interrupt (Ctrl-C) does so always. The zero one is ready to use: one for a
// process, whose goroutines share it. Any goroutine calls any of it.
//
//	var stop sw.GracefulStop
//	ctx, end := stop.Context()
//	defer end()
//	w, err := sw.FromEnvironment(ctx)
//	...
//	stop.Training(true)
//	for step := int64(1); ; step++ {
//		train(step)
//		if ends, err := stop.StepDone(w); err != nil || ends {
//			...
//		}
//	}
//
// A launcher that ends the ranks, as Spawn does three seconds after it has told them, has to leave them time for a step and a
// checkpoint.
type GracefulStop struct {
	isTraining, isAsked atomic.Bool
}

// Context is done when the run shall give up. The signals are the process's as before once the CancelFunc was called.
func (s *GracefulStop) Context() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGUSR1)
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case got := <-signals:
				if got == os.Interrupt || !s.isTraining.Load() { // the process that has started the ranks never trains
					cancel()
					return
				}
				s.isAsked.Store(true)
			}
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		cancel()
	}
}

// Training says that steps begin, and whether a checkpoint is saved at the end. Without one SIGTERM and SIGUSR1 still give up.
func (s *GracefulStop) Training(saves bool) { s.isTraining.Store(saves) }

// StepDone says whether to end here: all ranks of w call it after each step, and hear the same (a collective of four bytes).
func (s *GracefulStop) StepDone(w *World) (bool, error) {
	return AnyRank(context.Background(), w.Comm(), s.isAsked.Load())
}
