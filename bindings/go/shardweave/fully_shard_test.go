package shardweave_test

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
	"github.com/shardweave/shardweave/bindings/go/shardweave/nn"
)

type shardedBlock struct {
	Norm     *nn.LayerNorm
	Up, Down *nn.Linear
}

func (b *shardedBlock) Forward(x *sw.Tensor) *sw.Tensor {
	return x.Add(b.Down.Forward(b.Up.Forward(b.Norm.Forward(x)).Gelu()))
}

type shardedNet struct {
	*sw.Module
	Blocks []*shardedBlock
	Head   *nn.Linear
}

func (n *shardedNet) Forward(x *sw.Tensor) *sw.Tensor {
	for _, block := range n.Blocks {
		x = block.Forward(x)
	}
	return n.Head.Forward(x)
}

const shardedBlocks, shardedSteps = 3, 5

type newOptimizer func(parameters []*sw.Tensor) (*sw.Optimizer, error)

// newShardedNet has the same first values on every rank.
func newShardedNet(w *sw.World) (*shardedNet, error) {
	n := &shardedNet{}
	err := sw.Seeded(3, func() error {
		for i := 0; i < shardedBlocks; i++ {
			n.Blocks = append(n.Blocks, &shardedBlock{nn.NewLayerNorm(w, 5), nn.NewLinear(w, 5, 7), nn.NewLinear(w, 7, 5)})
		}
		n.Head = nn.NewLinear(w, 5, 3)
		_, err := w.ModuleOf(n)
		return err
	})
	return n, err
}

// train is the losses, and then the parameters one behind the other.
func (n *shardedNet) train(w *sw.World, mesh *sw.Mesh) (losses []float64, all [][]float64, err error) {
	return n.trainWith(w, mesh, func(parameters []*sw.Tensor) (*sw.Optimizer, error) { return sw.NewAdamW(parameters, 1e-2) })
}

func (n *shardedNet) trainWith(w *sw.World, mesh *sw.Mesh, of newOptimizer) (losses []float64, all [][]float64, err error) {
	parameters, err := n.Parameters()
	if err != nil {
		return nil, nil, err
	}
	optimizer, err := of(sw.Tensors(parameters))
	if err != nil {
		return nil, nil, err
	}
	defer optimizer.Close()
	rows := sw.On{"dp": "S(0)"} // which do not divide
	for step := 0; step < shardedSteps; step++ {
		x := placed(counted(w, 7, 5).Mul(0.7).Add(float64(step)).Sin().To(sw.F32), mesh, rows)
		y := placed(counted(w, 7, 3).Mul(0.3).Add(float64(step)).Cos().To(sw.F32), mesh, rows)
		loss := n.Forward(x).MSELoss(y)
		for _, next := range []func() error{func() error { return loss.Backward() }, n.FinishGradSync, optimizer.Step, optimizer.ZeroGrad} {
			if err := next(); err != nil {
				return nil, nil, fmt.Errorf("step %d: %w", step, err)
			}
		}
		value, err := loss.Item()
		if err != nil {
			return nil, nil, err
		}
		losses = append(losses, value)
	}
	err = w.With(sw.NoGrad, func() error {
		for _, p := range parameters {
			numbers, err := values(p.Tensor)
			if err != nil {
				return err
			}
			all = append(all, numbers)
		}
		return nil
	})
	return losses, all, err
}

// A forward in Go trains as on one rank when parameters are whole only while operators use them.
func TestFullyShard(t *testing.T) {
	w := alone(t)
	plain, err := newShardedNet(w)
	if err != nil {
		t.Fatal(err)
	}
	wantLosses, want, err := plain.train(w, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, ranks := range map[string]int{"dp=2": 2, "dp=3": 3, "tp=2,dp=2": 4} {
		for _, keep := range []bool{false, true} {
			run(t, ranks, func(w *sw.World) error {
				mesh, err := w.ParseMesh(name)
				if err != nil {
					return err
				}
				n, err := newShardedNet(w)
				if err != nil {
					return err
				}
				if strings.Contains(name, "tp") {
					plan := sw.NewPlan().Add("blocks.*.up.*", sw.On{"tp": "S(0)"}).Add("blocks.*.down.weight", sw.On{"tp": "S(1)"})
					if err := n.Distribute(mesh, plan, sw.SameEverywhere); err != nil {
						return err
					}
				}
				options := []sw.FullyShardOption{sw.WithMeshDim("dp"), nil, sw.WithUnits("blocks.*")}
				if keep {
					options = append(options, sw.WithoutReshard())
				}
				units, err := n.FullyShard(mesh, sw.SameEverywhere, options...)
				if err != nil {
					return err
				}
				kept, numel := int64(0), int64(0)
				for _, unit := range units {
					kept, numel = kept+unit.Kept, numel+unit.Numel
				}
				rest := units[len(units)-1]
				if rest.Module != "" {
					rest = units[0]
				}
				if len(units) != shardedBlocks+1 || kept >= numel || !reflect.DeepEqual(rest.Parameters, []string{"head.weight", "head.bias"}) {
					return fmt.Errorf("%s: units %+v", name, units)
				}
				losses, got, err := n.train(w, mesh)
				if err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
				if !within(losses, wantLosses, 1e-5) {
					return fmt.Errorf("%s: losses %v, wanted %v", name, losses, wantLosses)
				}
				for i := range got {
					if !within(got[i], want[i], 1e-4) {
						return fmt.Errorf("%s: parameter %d is %v, wanted %v", name, i, got[i], want[i])
					}
				}
				counters, err := mesh.FullyShardCounters()
				all := int64((shardedBlocks + 1) * shardedSteps)
				if err != nil || counters.Gathers < all || counters.Gathers > all != !keep || counters.ReduceScatters != all ||
					counters.Prefetches == 0 || counters.WrongPrefetches != 0 || counters.PeakGatheredBytes == 0 {
					return fmt.Errorf("%s, kept %v: %+v, %v", name, keep, counters, err)
				}
				return nil
			})
		}
	}
}

func TestFullyShardNoSync(t *testing.T) {
	backward := func(w *sw.World, n *shardedNet, mesh *sw.Mesh, step int) error {
		x := placed(counted(w, 7, 5).Mul(0.7).Add(float64(step)).Sin().To(sw.F32), mesh, sw.On{"dp": "S(0)"})
		return n.Forward(x).Square().Sum().Backward()
	}
	gradient := func(n *shardedNet) ([]float64, error) {
		grad, err := n.Head.Weight.Grad()
		if err != nil {
			return nil, err
		}
		return values(grad)
	}
	w := alone(t)
	plain, err := newShardedNet(w)
	if err != nil {
		t.Fatal(err)
	}
	for step := 0; step < 3; step++ {
		if err := backward(w, plain, nil, step); err != nil {
			t.Fatal(err)
		}
	}
	want, err := gradient(plain)
	if err != nil {
		t.Fatal(err)
	}
	run(t, 2, func(w *sw.World) error {
		mesh, err := w.ParseMesh("dp=2")
		if err != nil {
			return err
		}
		n, err := newShardedNet(w)
		if err != nil {
			return err
		}
		if err := mesh.FullyShardNoSync(func() error { return nil }); err == nil || !strings.Contains(err.Error(), "is fully sharded") {
			return fmt.Errorf("a mesh of no units: %v", err)
		}
		if _, err := n.FullyShard(mesh, sw.SameEverywhere, sw.WithUnits("blocks.*")); err != nil {
			return err
		}
		err = mesh.FullyShardNoSync(func() error {
			for step := 0; step < 2; step++ {
				if err := backward(w, n, mesh, step); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		if err := backward(w, n, mesh, 2); err != nil {
			return err
		}
		counters, err := mesh.FullyShardCounters()
		if err != nil || counters.ReduceScatters != shardedBlocks+1 {
			return fmt.Errorf("%+v, %v", counters, err)
		}
		got, err := gradient(n)
		if err != nil || !within(got, want, 1e-3) {
			return fmt.Errorf("%v, wanted %v: %v", got, want, err)
		}
		return nil
	})
}

func TestReshard(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		mesh, err := w.ParseMesh("dp=2")
		if err != nil {
			return err
		}
		n, err := newShardedNet(w)
		if err != nil {
			return err
		}
		if _, err := n.FullyShard(mesh, sw.SameEverywhere, sw.WithUnits("blocks.*")); err != nil {
			return err
		}
		x := placed(counted(w, 7, 5).Cos().To(sw.F32), mesh, sw.On{"dp": "S(0)"})
		if err := w.With(sw.NoGrad, func() error { return n.Forward(x).Err() }); err != nil {
			return err
		}
		for _, empty := range []bool{false, true} {
			counters, err := mesh.FullyShardCounters()
			if err != nil || (counters.GatheredBytes == 0) != empty {
				return fmt.Errorf("emptied %v: %+v, %v", empty, counters, err)
			}
			if err := mesh.Reshard(); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestFullyShardOfWhatCannotBe(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		mesh, err := w.ParseMesh("dp=2")
		if err != nil {
			return err
		}
		n, err := newShardedNet(w)
		if err != nil {
			return err
		}
		differs := []sw.FullyShardOption{nil}
		if w.Rank() == 0 {
			differs = []sw.FullyShardOption{sw.WithoutReshard()}
		}
		refused := func(what string, code sw.Code, words string, err error) error {
			if !errors.Is(err, code) || !strings.Contains(err.Error(), words) || strings.Contains(err.Error(), "swv_") || strings.Contains(err.Error(), "()") {
				return fmt.Errorf("%s: %v", what, err)
			}
			return nil
		}
		for _, c := range []struct {
			what    string
			code    sw.Code
			words   string
			source  sw.Source
			options []sw.FullyShardOption
		}{
			{"no such module", sw.NotFound, "'layers.*' matches no submodule", 0, []sw.FullyShardOption{sw.WithUnits("layers.*")}},
			{"no such type", sw.NotFound, "the type of units 'Block'", 0, []sw.FullyShardOption{sw.WithUnitTypes("Block")}},
			{"no such dimension", sw.NotFound, "tp", 0, []sw.FullyShardOption{sw.WithMeshDim("tp")}},
			{"a NUL", sw.InvalidArgument, "NUL", 0, []sw.FullyShardOption{sw.WithUnits("a\x00b")}},
			{"less than nothing", sw.InvalidArgument, "Module.FullyShard: WithMinNumel is -1", 0, []sw.FullyShardOption{sw.WithMinNumel(-1)}},
			{"no rank", sw.InvalidArgument, "argument 'source' is -2", -2, nil},
			{"ranks that differ", sw.InvalidArgument, "is not the same on ranks 0 and 1", 0, differs},
		} {
			units, err := n.FullyShard(mesh, c.source, c.options...)
			if err := refused(c.what, c.code, c.words, err); err != nil || units != nil {
				return fmt.Errorf("%w, %v", err, units)
			}
			if sharded, err := n.Head.Weight.IsSharded(); err != nil || sharded {
				return fmt.Errorf("%s: the head's weight is sharded: %v, %v", c.what, sharded, err)
			}
		}
		if _, err := n.FullyShard(mesh, sw.FromRank(0)); err != nil {
			return err
		}
		if err := refused("once more", sw.FailedPrecondition, "in units already", second(n.FullyShard(mesh, sw.FromRank(0)))); err != nil {
			return err
		}
		if err := refused("a plan", sw.FailedPrecondition, "is fully sharded already", n.Distribute(mesh, nil, sw.SameEverywhere)); err != nil {
			return err
		}
		module, err := kind(w, "Sequential", `{"layers": [{"kind": "Linear", "in_features": 5, "out_features": 4}]}`)
		if err != nil {
			return err
		}
		units, err := module.FullyShard(mesh, sw.SameEverywhere, sw.WithUnitTypes("Linear"))
		if err != nil || len(units) != 1 || units[0].Module != "0" || units[0].Numel != 24 {
			return fmt.Errorf("by type: %+v, %v", units, err)
		}
		return nil
	})
}

func TestFullParams(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		mesh, err := w.ParseMesh("dp=2")
		if err != nil {
			return err
		}
		n, err := newShardedNet(w)
		if err != nil {
			return err
		}
		gpu := sw.Device{Kind: sw.CUDA}
		x := sw.Ones(w, []int64{2})
		if there, err := sw.Data[float32](x.ToDevice(sw.Device{})); err != nil || len(there) != 2 || there[1] != 1 {
			t.Errorf("the device where it is: %v, %v", there, err)
		}
		if err := x.ToDevice(gpu).Err(); err == nil {
			t.Error("a GPU that is not there")
		}
		if _, err := n.FullyShard(mesh, sw.SameEverywhere, sw.WithComputeDevice(gpu)); !errors.Is(err, sw.InvalidArgument) ||
			!strings.Contains(err.Error(), "compute_device is cuda:0, and LibTorch has none here") {
			t.Errorf("a GPU that is not there: %v", err)
		}
		if _, err := n.FullyShard(mesh, sw.SameEverywhere, sw.WithUnits("blocks.*"), sw.WithEqualSegments(), sw.WithReshardAmong(1)); err != nil {
			return err
		}
		var kept sw.FullParams
		sum := func() (value float64, err error) {
			err = n.Module.FullParams(false, func(whole sw.FullParams) error {
				kept = whole
				if _, err := whole.Get("nothing"); !errors.Is(err, sw.NotFound) || !strings.Contains(err.Error(), "FullParams.Get: ") {
					t.Errorf("Get: %v", err)
				}
				weight, err := whole.Get("head.weight")
				if err != nil {
					return err
				}
				value, err = weight.Detach().Sum().Item()
				return err
			})
			return value, err
		}
		before, err := sum()
		if err != nil {
			return err
		}
		for _, ended := range []sw.FullParams{kept, nil} {
			if _, err := ended.Get("head.weight"); !errors.Is(err, sw.InvalidArgument) {
				t.Errorf("Get of what has ended: %v", err)
			}
		}
		if err := n.Module.FullParams(false, func(whole sw.FullParams) error {
			lent, own := mustOf(whole.Get("head.weight")), n.Module.Get("head.weight")
			return w.With(sw.NoGrad, func() error {
				if err := own.Apply("aten::mul_.Scalar", 2).Err(); !errors.Is(err, sw.FailedPrecondition) {
					t.Errorf("the parameter's own handle is written: %v", err)
				}
				return lent.Apply("aten::mul_.Scalar", 2).Err()
			})
		}); err != nil {
			return err
		}
		if after := mustOf(sum()); after != before {
			t.Errorf("without writeback the weight sums up to %v, before %v", after, before)
		}
		failed := errors.New("dropped")
		for _, drops := range []bool{true, false} {
			err = n.Module.FullParamsOn(0, true, func(whole sw.FullParams) error {
				weight, err := whole.Get("head.weight")
				if err != nil {
					return err
				}
				if weight != nil {
					if err := weight.Apply("aten::mul_.Scalar", 2).Err(); err != nil {
						return err
					}
				}
				if drops {
					return failed
				}
				return nil
			})
			if drops != errors.Is(err, failed) || (err != nil && !drops) {
				return fmt.Errorf("FullParamsOn: %w", err)
			}
			after, err := sum()
			if err != nil {
				return err
			}
			if (after == before) != drops || (!drops && after != 2*before) {
				t.Errorf("drops %v: the weight sums up to %v, before %v", drops, after, before)
			}
		}
		return nil
	})
}
