package shardweave_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

func TestGradSync(t *testing.T) {
	const options = `{"layers": [{"kind": "Linear", "in_features": 5, "out_features": 7}, {"kind": "GELU"}, {"kind": "Linear", "in_features": 7, "out_features": 3}]}`
	var want [][]float64
	onMeshes(t, []string{"tp=2", "dp=2,tp=2"}, func(w *sw.World, m *sw.Mesh, batch sw.On) error {
		module, err := kind(w, "Sequential", options)
		if err != nil {
			return err
		}
		defer module.Close()
		var sync *sw.GradSync
		if m != nil {
			if w.Size() == 2 {
				batch = sw.On{"tp": "S(0)"} // data parallel
			}
			if err := module.Distribute(m, nil, sw.SameEverywhere); err != nil {
				return err
			}
			if sync, err = module.GradSync(sw.WithBucketBytes(100)); err != nil {
				return err
			}
			if _, err := module.GradSync(); !errors.Is(err, sw.FailedPrecondition) {
				return fmt.Errorf("a second one: %v", err)
			}
		}
		backward := func(scale float64) error {
			results, err := module.Call("forward", placed(counted(w, 4, 5).Mul(scale).Cos().To(sw.F32), m, batch))
			if err != nil {
				return err
			}
			return results[0].(*sw.Tensor).Square().Sum().Backward()
		}
		var left int64
		var got [][]float64
		for step := 0; step < 4; step++ {
			if err := module.ZeroGrad(); err != nil {
				return err
			}
			first := func() error { return backward(1) }
			if step == 0 { // in which order and how often gradients come: once
				err = nil
			} else if sync != nil {
				err = sync.NoSync(func() error { return sync.NoSync(first) })
				if _, now, wrong := sync.Counts(); err == nil && (wrong != nil || now != left) {
					err = fmt.Errorf("step %d: %d buckets have left meanwhile: %v", step, now-left, wrong)
				}
			} else {
				err = first()
			}
			if err != nil {
				return err
			}
			if err := backward(2); err != nil {
				return err
			}
			if err := module.FinishGradSync(); err != nil {
				return err
			}
			if _, got, err = gradients(module); err != nil {
				return err
			}
			if m == nil {
				want = got
				continue
			}
			for i := range got {
				if step > 0 && !within(got[i], want[i], 1e-5) {
					return fmt.Errorf("step %d: gradient %d is %v, wanted %v", step, i, got[i], want[i])
				}
			}
			buckets, inBackward, err := sync.Counts()
			if err != nil || buckets < 2 || inBackward != buckets*int64(step) {
				return fmt.Errorf("step %d: %d buckets, %d have left in backward: %v", step, buckets, inBackward, err)
			}
			left = inBackward
		}
		if m == nil {
			return nil
		}
		if err := sync.NoSync(nil); !errors.Is(err, sw.InvalidArgument) {
			return fmt.Errorf("no body: %v", err)
		}
		if err := sync.Close(); err != nil {
			return err
		}
		if err := sync.NoSync(func() error { return nil }); !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), "GradSync.NoSync: the GradSync was closed") {
			return fmt.Errorf("closed: %v", err)
		}
		if again, err := module.GradSync(sw.WithBucketBytes(0)); !errors.Is(err, sw.InvalidArgument) {
			return fmt.Errorf("buckets of nothing: %v, %v", again, err)
		}
		return second(module.GradSync()) // which ends with the world
	})
}

// passes is what it is given; its backward fails where it shall.
type passes struct{ fails bool }

func (p passes) Forward(_ *sw.FunctionContext, in []*sw.Tensor) ([]*sw.Tensor, error) {
	return []*sw.Tensor{in[0].Mul(1)}, nil
}

func (p passes) Backward(_ *sw.FunctionContext, grads []*sw.Tensor) ([]*sw.Tensor, error) {
	if p.fails {
		return nil, errors.New("this rank's")
	}
	return grads, nil
}

// On rank 1 Backward fails when the last layer's gradients have left.
func TestGradSyncDiscardsWhatFailed(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("dp=2")
		if err != nil {
			return err
		}
		module, err := w.NewModule()
		if err != nil {
			return err
		}
		first := module.Parameter("first", sw.FromSlice(w, someNumbers(35, 0), []int64{7, 5}))
		last := module.Parameter("last", sw.FromSlice(w, someNumbers(21, 1), []int64{3, 7}))
		if err := module.Distribute(m, nil, sw.SameEverywhere); err != nil {
			return err
		}
		x := sw.FromSlice(w, someNumbers(20, 2), []int64{4, 5}).Distribute(m, sw.On{"dp": "S(0)"}, sw.SameEverywhere)
		backward := func(fails bool) error {
			middle, err := sw.Apply(passes{fails}, "passes", 1, x.Linear(first, nil))
			if err != nil {
				return err
			}
			return middle[0].Linear(last, nil).Square().Sum().Backward()
		}
		var want [][]float64
		finished := func() error {
			if err := backward(false); err != nil {
				return err
			}
			if err := module.FinishGradSync(); err != nil {
				return err
			}
			_, got, err := gradients(module)
			if err != nil {
				return err
			}
			if want == nil {
				want = got
			}
			for i := range got {
				if !within(got[i], want[i], 1e-9) {
					return fmt.Errorf("gradient %d is %v, wanted %v", i, got[i], want[i])
				}
			}
			return module.ZeroGrad()
		}
		if err := finished(); err != nil {
			return err
		}
		sync, err := module.GradSync(sw.WithBucketBytes(1))
		if err != nil {
			return err
		}
		for i := 0; i < 3; i++ {
			if err := finished(); err != nil {
				return err
			}
			failed := []int64{0}
			if err := backward(w.Rank() == 1); err != nil {
				failed[0] = 1
			}
			if failed[0] != int64(w.Rank()) {
				return fmt.Errorf("backward: %v", failed)
			}
			if err := sw.AllReduce(background, w.Comm(), failed, failed, sw.Max); err != nil || failed[0] != 1 {
				return fmt.Errorf("%v: %w", failed, err)
			}
			if err := sync.Discard(); err != nil {
				return err
			}
			if err := module.ZeroGrad(); err != nil {
				return err
			}
		}
		if err := finished(); err != nil {
			return err
		}
		// Of two, each in a bucket: one on rank 1, where it failed.
		_, left, err := sync.Counts()
		if wanted := int64(2*3 + 3*(2-w.Rank())); err != nil || left != wanted {
			return fmt.Errorf("%d have left, wanted %d: %v", left, wanted, err)
		}
		return nil
	})
}
