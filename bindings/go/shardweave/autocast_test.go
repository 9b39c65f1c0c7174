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
