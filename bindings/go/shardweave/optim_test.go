package shardweave_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// muonAndAdafactor is Muon in double precision for what has two dimensions, Adafactor for the rest.
func muonAndAdafactor(parameters []*sw.Tensor) (*sw.Optimizer, error) {
	var matrices, others []*sw.Tensor
	for _, p := range parameters {
		sizes, err := p.Sizes()
		if err != nil {
			return nil, err
		}
		if len(sizes) == 2 {
			matrices = append(matrices, p)
		} else {
			others = append(others, p)
		}
	}
	muon, err := sw.NewMuon(matrices, 1e-2, sw.WithIteration(2, [3]float64{3.4445, -4.775, 2.0315}), sw.WithIterationDType(sw.F64),
		sw.WithMuonMomentum(0.9, true), sw.WithMuonEps(1e-7), sw.WeightDecay(0.1), nil)
	if err != nil {
		return nil, err
	}
	adafactor, err := sw.NewAdafactor(others, 1e-2, sw.WithBeta2Decay(-0.7), sw.WithAdafactorEps(0, 1e-2), sw.WithClipThreshold(0.9),
		sw.WeightDecay(0.1), nil)
	if err != nil {
		return nil, err
	}
	return sw.NewOptimizerOfGroups(muon, adafactor)
}

func TestMuonAndAdafactor(t *testing.T) {
	w := alone(t)
	plain, err := newShardedNet(w)
	if err != nil {
		t.Fatal(err)
	}
	wantLosses, want, err := plain.trainWith(w, nil, muonAndAdafactor)
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []struct {
		mesh  string
		ranks int
		zero  bool
	}{{"dp=3", 3, true}, {"tp=2,dp=2", 4, false}, {"tp=2,dp=2", 4, true}} {
		run(t, at.ranks, func(w *sw.World) error {
			n, mesh, err := distributedNet(w, at.mesh)
			if err != nil {
				return err
			}
			losses, got, err := n.trainWith(w, mesh, func(p []*sw.Tensor) (*sw.Optimizer, error) {
				o, err := muonAndAdafactor(p)
				if err == nil && at.zero {
					err = o.UseZeRO(sw.ZeRO{MeshDim: "dp"})
				}
				return o, err
			})
			if err != nil {
				return err
			}
			if !within(losses, wantLosses, 1e-5) {
				return fmt.Errorf("%s: losses %v, wanted %v", at.mesh, losses, wantLosses)
			}
			for i := range got {
				if !within(got[i], want[i], 1e-4) {
					return fmt.Errorf("%s: parameter %d is %v, wanted %v", at.mesh, i, got[i], want[i])
				}
			}
			return nil
		})
	}
}

func TestGroups(t *testing.T) {
	w := alone(t)
	a, b := sw.Ones(w, []int64{2, 3}, sw.RequiresGrad), sw.Ones(w, []int64{3}, sw.RequiresGrad)
	muon := mustOf(sw.NewMuon([]*sw.Tensor{a}, 0.5, sw.WithRMSOfAdamW()))
	sgd := mustOf(sw.NewSGD([]*sw.Tensor{b}, 0.25))
	both := mustOf(sw.NewOptimizerOfGroups(muon, sgd))
	if n := mustOf(both.NumGroups()); n != 2 {
		t.Error(n)
	}
	s := mustOf(sw.NewScheduler(sw.LinearSchedule(1, 3, 0), both))
	for step, want := range []float64{0, 1, 0.5, 0} {
		if x, y := mustOf(both.GroupLR(0)), mustOf(both.GroupLR(1)); x != 0.5*want || y != 0.25*want {
			t.Error(step, x, y)
		}
		if err := s.Step(); err != nil {
			t.Error(err)
		}
	}
	if err := both.SetGroupLR(1, 2); err != nil || mustOf(both.GroupLR(1)) != 2 {
		t.Error(err)
	}
	if err := both.SetGroupLR(2, 2); !errors.Is(err, sw.OutOfRange) {
		t.Error(err)
	}
	if err := both.SetGroupLR(-1, 2); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
	if _, err := both.GroupLR(-1); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
	if _, err := sw.NewOptimizerOfGroups(); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
	if _, err := sw.NewOptimizerOfGroups(muon, muon); !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "wanted one group for each") {
		t.Error(err)
	}
	if _, err := sw.NewMuon([]*sw.Tensor{b}, 0.5); !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "Muon wants two dimensions") {
		t.Error(err)
	}
	if _, err := sw.NewMuon([]*sw.Tensor{a}, 0.5, sw.WithIteration(math.MaxInt, [3]float64{})); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
}

// Every rank hears that there is no GPU; nothing is called.
func TestCaptureStep(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		mesh, err := w.ParseMesh("dp=2")
		if err != nil {
			return err
		}
		p := sw.Ones(mesh, []int64{3}, sw.RequiresGrad)
		for _, parameters := range [][]*sw.Tensor{{p}, nil} {
			step, err := sw.CaptureStep(mesh, parameters, func() error { panic("called") })
			wanted := "CaptureStep: a step is captured on a GPU, and LibTorch has no CUDA here: a tensor on a GPU, which loads it, comes first"
			var asError *sw.Error
			if !errors.Is(err, sw.FailedPrecondition) || !errors.As(err, &asError) || asError.Message != wanted || step != nil {
				return fmt.Errorf("%v, %v", step, err)
			}
		}
		for _, wrong := range []func() (*sw.CapturedStep, error){
			func() (*sw.CapturedStep, error) { return sw.CaptureStep(nil, nil, func() error { return nil }) },
			func() (*sw.CapturedStep, error) { return sw.CaptureStep(mesh, nil, nil) },
			func() (*sw.CapturedStep, error) {
				return sw.CaptureStep(mesh, []*sw.Tensor{p, nil}, func() error { return nil })
			},
		} {
			if _, err := wrong(); !errors.Is(err, sw.InvalidArgument) {
				return fmt.Errorf("what is nil: %v", err)
			}
		}
		return nil
	})
}

// A step is skipped on all ranks or on none.
func TestGradScaler(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		mesh, err := w.ParseMesh("dp=2")
		if err != nil {
			return err
		}
		scaler, err := w.NewGradScaler(sw.WithScale(4), sw.WithGrowth(2, 1), sw.WithBackoff(0.25), nil)
		if err != nil {
			return err
		}
		if err := scaler.Update(); !errors.Is(err, sw.FailedPrecondition) {
			return fmt.Errorf("nothing was unscaled: %v", err)
		}
		p := sw.Ones(mesh, []int64{3}, sw.RequiresGrad)
		for step, scale := range []float64{8, 2, 4} {
			value := 1.0
			if step == 1 && w.Rank() == 1 {
				value = math.Inf(1)
			}
			if err := p.SetGrad(sw.FromLocal(sw.Full(w, []int64{3}, value), mesh, sw.On{"dp": "R"}, nil)); err != nil {
				return err
			}
			finite, err := scaler.Unscale([]*sw.Tensor{p})
			if err != nil || finite != (step != 1) {
				return fmt.Errorf("step %d: %v, %v", step, finite, err)
			}
			if _, err := scaler.Unscale([]*sw.Tensor{p}); !errors.Is(err, sw.FailedPrecondition) {
				return fmt.Errorf("twice: %v", err)
			}
			if err := scaler.Update(); err != nil {
				return err
			}
			if got, tracker, err := scaler.State(); err != nil || got != scale || tracker != 0 {
				return fmt.Errorf("step %d: %v, %d, %v", step, got, tracker, err)
			}
		}
		if _, err := scaler.Unscale(nil); !errors.Is(err, sw.InvalidArgument) {
			return fmt.Errorf("no parameters: %v", err)
		}
		if err := scaler.SetState(-1, 0); !errors.Is(err, sw.InvalidArgument) {
			return fmt.Errorf("a scale below 0: %v", err)
		}
		if err := scaler.SetState(16, 3); err != nil {
			return err
		}
		scaled, err := scaler.Scale(sw.Full(w, nil, 0.5))
		if err != nil {
			return err
		}
		if x, err := scaled.Item(); err != nil || x != 8 {
			return fmt.Errorf("scaled: %v, %v", x, err)
		}
		return scaler.Close()
	})
}
