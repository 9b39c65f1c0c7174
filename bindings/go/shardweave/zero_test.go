package shardweave_test

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// Optimizers of every kind, and a state that each has.
var zeroKinds = []struct {
	state string
	of    newOptimizer
}{
	{"max_exp_avg_sq", func(p []*sw.Tensor) (*sw.Optimizer, error) {
		return sw.NewAdam(p, 1e-2, sw.WeightDecay(0.1), sw.WithAMSGrad(), nil)
	}},
	{"exp_avg_sq", func(p []*sw.Tensor) (*sw.Optimizer, error) { return sw.NewAdamW(p, 1e-2, sw.WithBetas(0.8, 0.9)) }},
	{"exp_avg", func(p []*sw.Tensor) (*sw.Optimizer, error) {
		return sw.NewLion(p, 1e-3, sw.WithBetas(0.8, 0.9), sw.WeightDecay(0.1), nil)
	}},
	{"momentum_buffer", func(p []*sw.Tensor) (*sw.Optimizer, error) { return sw.NewSGD(p, 1e-2, sw.WithMomentum(0.9, 0)) }},
}

// distributed is the net with its blocks cut where the mesh has tp.
func distributedNet(w *sw.World, name string) (*shardedNet, *sw.Mesh, error) {
	mesh, err := w.ParseMesh(name)
	if err != nil {
		return nil, nil, err
	}
	n, err := newShardedNet(w)
	if err != nil {
		return nil, nil, err
	}
	plan := sw.NewPlan()
	if strings.Contains(name, "tp") {
		plan = plan.Add("blocks.*.up.*", sw.On{"tp": "S(0)"}).Add("blocks.*.down.weight", sw.On{"tp": "S(1)"})
	}
	return n, mesh, n.Distribute(mesh, plan, sw.SameEverywhere)
}

// An optimizer that is divided among ranks trains as one that is not.
func TestZeRO(t *testing.T) {
	for _, kind := range zeroKinds {
		w := alone(t)
		plain, err := newShardedNet(w)
		if err != nil {
			t.Fatal(err)
		}
		wantLosses, want, err := plain.trainWith(w, nil, kind.of)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range []struct {
			mesh  string
			ranks int
		}{{"dp=2", 2}, {"dp=3", 3}, {"tp=2,dp=2", 4}} {
			for stage := 0; stage <= 2; stage++ {
				place := fmt.Sprintf("%s, %s, stage %d", kind.state, at.mesh, stage)
				run(t, at.ranks, func(w *sw.World) error {
					n, mesh, err := distributedNet(w, at.mesh)
					if err != nil {
						return err
					}
					var kept, whole int64
					losses, got, err := n.trainWith(w, mesh, func(p []*sw.Tensor) (*sw.Optimizer, error) {
						o, err := kind.of(p)
						if err != nil {
							return nil, err
						}
						if err := o.UseZeRO(sw.ZeRO{MeshDim: "dp", Stage: stage, BucketBytes: 200}); err != nil {
							return nil, err
						}
						for i := range p {
							state, err := o.State(i, kind.state)
							if err != nil {
								return nil, err
							}
							its, err := state.Local().Len()
							if err != nil {
								return nil, err
							}
							all, err := p[i].Local().Len()
							if err != nil {
								return nil, err
							}
							kept, whole = kept+its, whole+all
						}
						return o, nil
					})
					if err != nil {
						return fmt.Errorf("%s: %w", place, err)
					}
					if kept >= whole {
						return fmt.Errorf("%s: keeps %d of %d", place, kept, whole)
					}
					if !within(losses, wantLosses, 1e-5) {
						return fmt.Errorf("%s: losses %v, wanted %v", place, losses, wantLosses)
					}
					for i := range got {
						if !within(got[i], want[i], 1e-4) {
							return fmt.Errorf("%s: parameter %d is %v, wanted %v", place, i, got[i], want[i])
						}
					}
					return nil
				})
			}
		}
	}
}

// In stage 2 gradients leave in backward, but not where they are to be summed up first.
func TestZeRONoSync(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		n, mesh, err := distributedNet(w, "dp=2")
		if err != nil {
			return err
		}
		parameters, err := n.Parameters()
		if err != nil {
			return err
		}
		o, err := sw.NewAdamW(sw.Tensors(parameters), 1e-2)
		if err != nil {
			return err
		}
		nothing := func() error { return nil }
		if err := o.NoSync(nothing); !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), "Optimizer.NoSync: the optimizer does not use ZeRO") {
			return fmt.Errorf("without ZeRO: %v", err)
		}
		if err := o.UseZeRO(sw.ZeRO{Stage: 2}); err != nil {
			return err
		}
		if err := o.UseZeRO(sw.ZeRO{}); !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), "Optimizer.UseZeRO: the optimizer uses ZeRO already") {
			return fmt.Errorf("twice: %v", err)
		}
		if err := o.NoSync(nil); !errors.Is(err, sw.InvalidArgument) {
			return fmt.Errorf("no body: %v", err)
		}
		sent := func() (int, error) {
			x := placed(counted(w, 7, 5).Sin().To(sw.F32), mesh, sw.On{"dp": "S(0)"})
			loss := n.Forward(x).Sum()
			trace, err := mesh.Trace()
			if err != nil {
				return 0, err
			}
			defer trace.Close()
			if err := loss.Backward(); err != nil {
				return 0, err
			}
			return trace.Len()
		}
		if _, err := sent(); err != nil { // shows in which order gradients come
			return err
		}
		if err := n.FinishGradSync(); err != nil {
			return err
		}
		if err := o.ZeroGrad(); err != nil { // or each parameter's gradient would be brought to the part that is there
			return err
		}
		if err := o.Discard(); err != nil { // nothing has left
			return err
		}
		var counts []int
		count := func() error {
			number, err := sent()
			counts = append(counts, number)
			return err
		}
		if err := o.NoSync(func() error { return o.NoSync(count) }); err != nil {
			return err
		}
		if err := count(); err != nil {
			return err
		}
		if len(counts) != 2 || counts[0] != 0 || counts[1] == 0 {
			return fmt.Errorf("collectives in backward: %v", counts)
		}
		state, err := o.State(0, "exp_avg")
		if err != nil {
			return err
		}
		if sizes, err := state.Full().Sizes(); err != nil || !reflect.DeepEqual(sizes, []int64{5}) {
			return fmt.Errorf("a state of %v, wanted that of a norm's weight: %v", sizes, err)
		}
		return n.FinishGradSync()
	})
}

// Operators work in fewer bits; what rests keeps its type.
func TestMixedPrecision(t *testing.T) {
	w := alone(t)
	plain, err := newShardedNet(w)
	if err != nil {
		t.Fatal(err)
	}
	exact, _, err := plain.train(w, nil)
	if err != nil {
		t.Fatal(err)
	}
	run(t, 2, func(w *sw.World) error {
		mesh, err := w.ParseMesh("dp=2")
		if err != nil {
			return err
		}
		fully, err := newShardedNet(w)
		if err != nil {
			return err
		}
		if _, err := fully.FullyShard(mesh, sw.SameEverywhere, sw.WithMixedPrecision(sw.MixedPrecision{Param: sw.I64})); !errors.Is(err, sw.InvalidArgument) ||
			!strings.Contains(err.Error(), "Module.FullyShard: param_dtype is Long") {
			return fmt.Errorf("I64: %v", err)
		}
		types := sw.MixedPrecision{Param: sw.BF16, Reduce: sw.F32, Output: sw.F32}
		if _, err := fully.FullyShard(mesh, sw.SameEverywhere, sw.WithUnits("blocks.*"), sw.WithMixedPrecision(types)); err != nil {
			return err
		}
		synced, mesh2, err := distributedNet(w, "dp=2")
		if err != nil {
			return err
		}
		sync, err := synced.GradSync(sw.WithReduceDType(sw.BF16))
		if err != nil {
			return err
		}
		defer sync.Close()
		for _, how := range []struct {
			net  *shardedNet
			mesh *sw.Mesh
		}{{fully, mesh}, {synced, mesh2}} {
			trace, err := how.mesh.Trace()
			if err != nil {
				return err
			}
			losses, _, err := how.net.train(w, how.mesh)
			if err != nil {
				return err
			}
			sent, err := trace.MarshalJSON()
			if err != nil {
				return err
			}
			if err := trace.Close(); err != nil {
				return err
			}
			if !strings.Contains(string(sent), `"dtype":"BFloat16"`) || !within(losses, exact, 0.03) || reflect.DeepEqual(losses, exact) {
				return fmt.Errorf("losses %v, exact %v, sent %s", losses, exact, sent)
			}
			parameters, err := how.net.Parameters()
			if err != nil {
				return err
			}
			for _, p := range parameters {
				if d, err := p.DType(); err != nil || d != sw.F32 {
					return fmt.Errorf("%s is %v: %v", p.Name, d, err)
				}
			}
		}
		return nil
	})
}
