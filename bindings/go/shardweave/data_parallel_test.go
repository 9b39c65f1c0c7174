package shardweave_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// sumHook does what an all-reduce does.
type sumHook struct {
	w               *sw.World
	begun, finished int
	fails           bool
	failsAt         int // the Begin of that number
}

var (
	errToday = errors.New("no more today")
	errBegin = errors.New("not even begun")
)

func (h *sumHook) Name() string { return "sum" }
func (h *sumHook) Begin(bucket *sw.GradientBucket) error {
	if h.begun++; h.begun == h.failsAt {
		return errBegin
	}
	return nil
}
func (h *sumHook) Finish(bucket *sw.GradientBucket) error {
	h.finished++
	if h.fails {
		return errToday
	}
	sums, err := sw.Data[float32](bucket.Flat)
	if err != nil {
		return err
	}
	if err := sw.AllReduce(background, bucket.Comm, sums, sums, sw.Sum); err != nil {
		return err
	}
	return sw.CopyFrom(bucket.Flat, sums)
}

func TestDataParallel(t *testing.T) {
	run(t, 3, func(w *sw.World) error {
		m, err := w.ParseMesh("dp=3")
		if err != nil {
			return err
		}
		for _, way := range []string{"plain", "hook", "PowerSGD", "failing"} {
			module, err := kind(w, "Linear", `{"in_features": 9, "out_features": 8}`)
			if err != nil {
				return err
			}
			defer module.Close()
			hook := &sumHook{w: w, fails: way == "failing" && w.Rank() == 1}
			var options []sw.GradSyncOption
			switch way {
			case "hook", "failing":
				options = append(options, sw.WithGradientHook(hook))
			case "PowerSGD":
				options = append(options, sw.WithPowerSGD(sw.PowerSGD{Rank: 1}))
			}
			ddp, err := module.DistributedDataParallel(m, "", sw.FromRank(0), options...)
			if err != nil {
				return err
			}
			for step := 0; step < 3; step++ {
				var rows []*sw.Tensor
				if step <= w.Rank() {
					rows = append(rows, sw.Ones(w, []int64{2, 9}))
				}
				batch, ranks, err := m.JoinBatch(nil, rows...)
				if err != nil {
					return err
				}
				if ranks != int64(3-step) || len(batch) != 1 {
					t.Error(ranks, len(batch))
				}
				y, err := module.Call("forward", batch[0])
				if err != nil {
					return err
				}
				if err := y[0].(*sw.Tensor).Sum().Backward(); err != nil {
					return err
				}
				err = module.FinishGradSync()
				if way == "failing" {
					part := "the gradient hook 'sum' failed"
					if hook.fails {
						part = "sum.finish: no more today"
					}
					if err == nil || hook.fails == errors.Is(err, sw.Aborted) || hook.fails != errors.Is(err, errToday) ||
						!strings.Contains(err.Error(), part) {
						t.Error(hook.fails, err)
					}
					return nil
				}
				if err != nil {
					return err
				}
				_, grads, err := gradients(module)
				if err != nil {
					return err
				}
				if want := float64(2 * (3 - step)); way != "PowerSGD" && (grads[0][0] != want || grads[0][71] != want) {
					t.Error(way, step, grads[0], want)
				}
				if err := module.ZeroGrad(); err != nil {
					return err
				}
			}
			if way == "hook" && (hook.begun < 3 || hook.begun != hook.finished) {
				t.Error(hook.begun, hook.finished)
			}
			if way == "PowerSGD" {
				states, err := ddp.States()
				if err != nil {
					return err
				}
				// Of the bias there is nothing: a sum's gradient, all ones, is the same on all ranks, and does not travel.
				if states["weight.error"] == nil || states["weight.q"] == nil || states["weight.iteration"] == nil || len(states) != 3 {
					t.Error(states)
				}
				if err := ddp.SetStates(states); err != nil {
					return err
				}
			}
			if err := module.BroadcastBuffers(m, "dp"); err != nil {
				return err
			}
			if err := module.Enable2DWithFSDP(m, ""); !errors.Is(err, sw.FailedPrecondition) {
				t.Error(err)
			}
			if err := ddp.Close(); err != nil {
				return err
			}
			if err := module.PreDPTransform(m, "pp", sw.FromRank(0)); !errors.Is(err, sw.NotFound) {
				t.Error(err)
			}
		}
		return nil
	})
}

// What a hook returns during Backward comes out of FinishGradSync, and is still the program's.
func TestAGradientHookThatFailsInBackward(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("dp=2")
		if err != nil {
			return err
		}
		module, err := kind(w, "Linear", `{"in_features": 9, "out_features": 8}`)
		if err != nil {
			return err
		}
		hook := &sumHook{w: w}
		if _, err := module.DistributedDataParallel(m, "", sw.FromRank(0), sw.WithGradientHook(hook)); err != nil {
			return err
		}
		for step := 0; ; step++ {
			if step == 2 && w.Rank() == 1 {
				hook.failsAt = hook.begun + 1
			}
			begun := hook.begun
			x := sw.FromSlice(w, numbers(18), []int64{2, 9}).To(sw.F32).Distribute(m, sw.On{"dp": "S(0)"}, sw.SameEverywhere)
			y, err := module.Call("forward", x)
			if err != nil {
				return err
			}
			if err := y[0].(*sw.Tensor).Square().Sum().Backward(); err != nil {
				return fmt.Errorf("step %d, Backward: %w", step, err)
			}
			inBackward := hook.begun > begun
			err = module.FinishGradSync()
			if step < 2 && err == nil {
				if err := module.ZeroGrad(); err != nil {
					return err
				}
				continue
			}
			if failed := w.Rank() == 1; step != 2 || failed != errors.Is(err, errBegin) || failed && !inBackward {
				t.Error(step, failed, inBackward, err)
			}
			return nil
		}
	})
}
