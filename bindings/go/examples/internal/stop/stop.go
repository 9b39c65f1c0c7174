// Package stop ends the examples in good order.
package stop

import (
	"context"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// Signals are how a run ends that is told to (SIGTERM, or SIGUSR1 as "#SBATCH --signal=USR1@120" asks for): if it saves, at the
// end of a step, on all ranks at the same one, so that no step is lost. What does not train yet, or saves nothing, gives up
// what it waits for; an interrupt (Ctrl-C) does so always. The process that has started ranks with --backend=gloo tells them,
// and ends them three seconds later: for a larger model a launcher starts them, with more time.
type Signals struct {
	isTraining, isAsked atomic.Bool
}

// Context is done when the run shall give up.
func (s *Signals) Context() (context.Context, context.CancelFunc) {
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

// Training says that steps begin, and whether a checkpoint is saved at the end.
func (s *Signals) Training(saves bool) { s.isTraining.Store(saves) }

// StepDone says whether to end here: all ranks call it after each step, and hear the same.
func (s *Signals) StepDone(w *sw.World) (bool, error) {
	return sw.AnyRank(context.Background(), w.Comm(), s.isAsked.Load())
}
