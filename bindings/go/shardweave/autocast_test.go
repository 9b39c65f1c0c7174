package shardweave_test

import (
	"errors"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// What is cast is what the innermost Autocast says, whatever is recorded, on a mesh too; a segment has it in both runs.
func TestAutocastNestsAndEnds(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		mesh, err := w.ParseMesh("x=2")
		if err != nil {
			return err
		}
		whole := sw.Ones(w, []int64{4, 4})
		for _, x := range []*sw.Tensor{whole, whole.Distribute(mesh, sw.MustParseLayout("[S(0)]"), sw.FromRank(0))} {
			if err := x.SetRequiresGrad(true); err != nil {
				return err
			}
			wants := func(wanted sw.DType) {
				t.Helper()
				if got, err := x.MatMul(x).DType(); got != wanted || err != nil {
					t.Errorf("a product is of %v, wanted %v: %v", got, wanted, err)
				}
			}
			within := func(dtype sw.DType, body func()) {
				t.Helper()
				if err := w.Autocast(dtype, func() error { body(); return nil }); err != nil {
					t.Error(err)
				}
			}
			wants(sw.F32)
			within(sw.BF16, func() {
				wants(sw.BF16)
				within(sw.F32, func() { wants(sw.F32) })
				within(sw.F16, func() { wants(sw.F16) })
				if err := w.With(sw.NoGrad, func() error { wants(sw.BF16); return nil }); err != nil {
					t.Error(err)
				}
				wants(sw.BF16)
			})
			err := w.With(sw.NoGrad, func() error {
				return w.Autocast(sw.BF16, func() error {
					if grad, err := x.MatMul(x).RequiresGrad(); grad || err != nil {
						t.Errorf("a product is recorded: %v", err)
					}
					return errors.New("inside")
				})
			})
			if err == nil || err.Error() != "inside" {
				t.Errorf("got %v", err)
			}
			wants(sw.F32)

			var seen []sw.DType
			var y *sw.Tensor
			within(sw.BF16, func() {
				y = sw.Checkpoint(func(in []*sw.Tensor) *sw.Tensor {
					product := in[0].MatMul(in[0])
					dtype, err := product.DType()
					if err != nil {
						t.Error(err)
					}
					seen = append(seen, dtype)
					return product
				}, x)
			})
			if err := y.Sum().Backward(); err != nil {
				t.Error(err)
			}
			if len(seen) != 2 || seen[0] != sw.BF16 || seen[1] != sw.BF16 {
				t.Errorf("a segment has seen %v", seen)
			}
		}
		err = w.Autocast(sw.F64, func() error { return nil })
		if !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "'dtype' is") {
			t.Errorf("got %v", err)
		}
		return nil
	})
}

// Two goroutines of a rank whose modes overlap hear of it, and the rank has its own mode at their end.
func TestModesThatDoNotNest(t *testing.T) {
	run(t, 1, func(w *sw.World) error {
		x := sw.Ones(w, []int64{2, 2})
		if err := x.SetRequiresGrad(true); err != nil {
			return err
		}
		begun, ended := make(chan struct{}), make(chan struct{})
		within := make(chan error)
		go func() {
			<-begun
			within <- w.Autocast(sw.BF16, func() error {
				close(ended)
				<-begun
				dtype, err := x.MatMul(x).DType()
				if err == nil && dtype != sw.BF16 {
					t.Errorf("the inner mode was lost: %v", dtype)
				}
				return err
			})
		}()
		err := w.With(sw.NoGrad, func() error {
			begun <- struct{}{}
			<-ended
			return nil
		})
		if !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), "in another order than they began") {
			t.Errorf("got %v", err)
		}
		begun <- struct{}{}
		if err := <-within; err != nil {
			t.Errorf("the one that ended last: %v", err)
		}
		product := x.MatMul(x)
		dtype, err := product.DType()
		if err != nil || dtype != sw.F32 {
			t.Errorf("got %v, %v", dtype, err)
		}
		return product.Sum().Backward() // recorded, as before
	})
}
