package shardweave_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"
	"unsafe"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// wrongArguments are values of the type that some function refuses.
func wrongArguments(h *handles, kind reflect.Type) []any {
	x := h.tensor
	wrongOn := []sw.On{{"q": "R"}, {"x": "S(9)"}, {"x": "P"}, {"x": "?"}, {"x\x00": "R"}, {"x": "S(0)\x00"}, {"\xff": "R"}}
	var all []any
	switch kind {
	case reflect.TypeOf(""):
		return []any{"", "a\x00b", "\xff", "[", "{", "aten::ad", strings.Repeat("x", 3000)}
	case reflect.TypeOf(0):
		return []any{-7, 99, 1 << 40, math.MinInt64}
	case reflect.TypeOf(int64(0)):
		return []any{int64(-7), int64(99), int64(math.MinInt64)}
	case reflect.TypeOf(0.0):
		return []any{math.NaN(), -1.0, math.Inf(1)}
	case reflect.TypeOf([]int64{}):
		return []any{[]int64(nil), []int64{-1}, []int64{1 << 62}, []int64{1 << 62, 1 << 62}, []int64{0}, []int64{99, 99}}
	case reflect.TypeOf([]int{}):
		return []any{[]int{-100}, []int{0, 0}, []int{1 << 40}}
	case reflect.TypeOf([]string{}):
		return []any{[]string{"q"}, []string{"x", "x"}, []string{"x\x00"}, []string{"\xff"}}
	case reflect.TypeOf([]sw.MeshDim{}):
		return []any{[]sw.MeshDim(nil), []sw.MeshDim{{Name: "", Size: 1}}, []sw.MeshDim{{Name: "x", Size: 0}}, []sw.MeshDim{{Name: "x", Size: -1}},
			[]sw.MeshDim{{Name: "x\x00", Size: 1}}, []sw.MeshDim{{Name: "x", Size: 1}, {Name: "x", Size: 1}}, []sw.MeshDim{{Name: "x", Size: 5}}, []sw.MeshDim{{Name: "\xff", Size: 1}}}
	case reflect.TypeOf([]float32{}):
		return []any{[]float32(nil), []float32{1, 2, 3}}
	case reflect.TypeOf(sw.DType(0)):
		return []any{sw.DType(99), sw.DType(-1), sw.DType(0)}
	case reflect.TypeOf(sw.Source(0)):
		return []any{sw.Source(-2), sw.Source(9)}
	case reflect.TypeOf(sw.ReduceOp(0)):
		return []any{sw.ReduceOp(99), sw.ReduceOp(-1)}
	case reflect.TypeOf(sw.GradMode(0)):
		return []any{sw.GradMode(9)}
	case reflect.TypeOf(sw.On{}):
		for _, on := range wrongOn {
			all = append(all, on)
		}
		return all
	case reflect.TypeOf((*sw.Spec)(nil)).Elem():
		for _, on := range wrongOn {
			all = append(all, on)
		}
		return append(all, sw.MustParseLayout("[R, R]"), sw.MustParseLayout("[S(5)]"), sw.MustParseLayout("[P(max)]"))
	case reflect.TypeOf((*sw.Layout)(nil)):
		return []any{sw.MustParseLayout("[R, R]"), sw.MustParseLayout("[S(5)]"), sw.MustParseLayout("[P(max)]")}
	case reflect.TypeOf([]sw.TensorOption{}):
		for _, on := range wrongOn {
			all = append(all, []sw.TensorOption{on})
		}
		return append(all, []sw.TensorOption{sw.DType(99)}, []sw.TensorOption{sw.I64, sw.RequiresGrad}, []sw.TensorOption{sw.MustParseLayout("[R, R]")}, []sw.TensorOption{sw.F8E4M3},
			[]sw.TensorOption{sw.Device{Kind: 9}}, []sw.TensorOption{sw.Device{Kind: sw.CUDA, Index: 99}}, []sw.TensorOption{sw.Device{Index: 1 << 40}})
	case reflect.TypeOf([]any{}):
		return []any{[]any{}, []any{struct{}{}}, []any{"x"}, []any{x, x, x}, []any{sw.Named("q", 1)}, []any{sw.DType(99)},
			[]any{sw.Device{Kind: 9}}, []any{"\xff"}, []any{x, sw.Device{Kind: 9}}, []any{x, "\xff"}, []any{x, []*sw.Tensor{nil}}, []any{x, sw.Default}}
	case reflect.TypeOf((*any)(nil)).Elem():
		return []any{struct{}{}, "x", sw.F32, []int64{1}}
	case reflect.TypeOf(unsafe.Pointer(nil)):
		return []any{unsafe.Pointer(nil)}
	case reflect.TypeOf(sw.ChecksOff):
		return []any{sw.HandleChecks(9), sw.HandleChecks(-1)}
	case reflect.TypeOf([]sw.SGDOption{}):
		return []any{[]sw.SGDOption{sw.WithMomentum(-1, 0)}, []sw.SGDOption{sw.WithNesterov()}, []sw.SGDOption{sw.WeightDecay(math.NaN())}}
	case reflect.TypeOf([]sw.AdamOption{}):
		return []any{[]sw.AdamOption{sw.WithBetas(2, 2)}, []sw.AdamOption{sw.WithEps(-1)}, []sw.AdamOption{sw.WeightDecay(-1)}}
	case reflect.TypeOf([]sw.LionOption{}):
		return []any{[]sw.LionOption{sw.WithBetas(2, 2)}, []sw.LionOption{sw.WeightDecay(-1)}}
	case reflect.TypeOf([]sw.AdafactorOption{}):
		return []any{[]sw.AdafactorOption{sw.WithClipThreshold(-1)}, []sw.AdafactorOption{sw.WithAdafactorEps(-1, 1e-3)}, []sw.AdafactorOption{sw.WeightDecay(-1)}}
	case reflect.TypeOf([]sw.MuonOption{}):
		return []any{[]sw.MuonOption{sw.WithMuonMomentum(-1, true)}, []sw.MuonOption{sw.WithIterationDType(sw.I64)}, []sw.MuonOption{sw.WithMuonEps(-1)},
			[]sw.MuonOption{sw.WithIteration(-1, [3]float64{1, 1, 1})}, []sw.MuonOption{sw.WeightDecay(-1)}}
	case reflect.TypeOf([]sw.GradScalerOption{}):
		return []any{[]sw.GradScalerOption{sw.WithScale(-1)}, []sw.GradScalerOption{sw.WithGrowth(0.5, 1)}, []sw.GradScalerOption{sw.WithGrowth(2, 0)}, []sw.GradScalerOption{sw.WithBackoff(1)}}
	case reflect.TypeOf([]sw.CheckpointerOption{}):
		return []any{[]sw.CheckpointerOption{sw.WithKeepLast(-1)}}
	case reflect.TypeOf([]sw.GradSyncOption{}):
		return []any{[]sw.GradSyncOption{sw.WithBucketBytes(-1)}, []sw.GradSyncOption{sw.WithPowerSGD(sw.PowerSGD{})}, []sw.GradSyncOption{sw.WithPowerSGD(sw.PowerSGD{Rank: 1, StartIteration: -1})},
			[]sw.GradSyncOption{sw.WithPowerSGD(sw.PowerSGD{Rank: 1, MinCompressionRate: -1})}}
	case reflect.TypeOf(map[string]*sw.Tensor{}):
		return []any{map[string]*sw.Tensor{"q": x}, map[string]*sw.Tensor{"q\x00": x}, map[string]*sw.Tensor{"\xff": x}}
	case reflect.TypeOf(sw.ZeRO{}):
		return []any{sw.ZeRO{Stage: 3}, sw.ZeRO{Stage: 1 << 40}, sw.ZeRO{BucketBytes: -1}, sw.ZeRO{MeshDim: "q"}, sw.ZeRO{MeshDim: "\x00"}}
	case reflect.TypeOf([]sw.ClipOption{}):
		return []any{[]sw.ClipOption{sw.WithNorm(-1)}, []sw.ClipOption{sw.WithNorm(math.NaN())}}
	case reflect.TypeOf([]sw.GradOption{}):
		return []any{[]sw.GradOption{sw.WithGradients(sw.Ones(h.world, []int64{5}))}, []sw.GradOption{sw.WithGradients(x, x, x)}, []sw.GradOption{sw.AllowUnused()}}
	case reflect.TypeOf(sw.Rendezvous{}):
		return []any{sw.Rendezvous{}, sw.Rendezvous{Rank: 5, WorldSize: 2, File: "/nonexistent/f"}, sw.Rendezvous{WorldSize: 2, File: "\x00"}, sw.Rendezvous{WorldSize: 2},
			sw.Rendezvous{WorldSize: 2, Host: "127.0.0.1", Port: 1 << 20}, sw.Rendezvous{WorldSize: 1 << 40, File: "/nonexistent/f"}}
	case reflect.TypeOf([]sw.WorldOption{}):
		return []any{[]sw.WorldOption{sw.WithBackend("q")}, []sw.WorldOption{sw.WithBackend("q\x00")}, []sw.WorldOption{sw.WithNetworkInterface("\xff")}}
	case reflect.TypeOf((*sw.Tensor)(nil)):
		for _, t := range oddTensors(h) {
			all = append(all, t)
		}
		return all
	case reflect.TypeOf([]*sw.Tensor{}):
		odd := oddTensors(h)
		for _, t := range odd {
			all = append(all, []*sw.Tensor{t})
		}
		return append(all, odd, []*sw.Tensor{x, odd[0]}, []*sw.Tensor{x, x})
	}
	return nil
}

// oddTensors are ones that some functions refuse: of another shape or type, sharded, that nothing is recorded of.
func oddTensors(h *handles) []*sw.Tensor {
	return []*sw.Tensor{sw.Ones(h.world, []int64{2, 3}), sw.Ones(h.world, []int64{1}, sw.I64), sw.Ones(h.world, []int64{1}, sw.Bool), sw.Ones(h.world, []int64{0}),
		sw.Ones(h.mesh, []int64{2}, sw.On{"x": "S(0)"}), sw.Ones(h.mesh, []int64{2}, sw.On{"x": "S(0)"}).Sum(), sw.Ones(h.world, nil, sw.C64),
		sw.Ones(h.world, []int64{2}, sw.RequiresGrad).Mul(2)}
}

// goodStrings are texts that functions accept, or else nothing behind the text is looked at.
var goodStrings = map[string]string{"Tensor.Apply": "aten::neg", "FindOp": "aten::neg", "Mesh.Comm": "x", "Mesh.Unflatten": "x", "World.ParseMesh": "x=1",
	"ParseLayout": "[R]", "ParsePlan": "{}", "Optimizer.State": "momentum_buffer", "Optimizer.SetState": "momentum_buffer"}

// harmful are what a test cannot call with anything: they end or break what others use, or start processes.
var harmful = map[string]bool{"Spawn": true, "World.Abort": true, "Comm.Abort": true, "SetNumThreads": true,
	"WriteSafetensors": true, "CreateEventFile": true, "OpenJSONLines": true}

// infallible say yes to whatever a good handle gets here.
var infallible = map[string]bool{"Layout.Placements": true, "MetricsWriter.Write": true, "Seed": true}

// LibTorch's own words are passed on as they are.
var ofLibTorch = regexp.MustCompile(`aten::[\w.]+: |you can only change requires_grad flags`)

// Errors of the library speak Go: every function, with every argument wrong in turn. They begin with the
// function that was called, and name arguments that it has.
func TestErrorsOfWrongArguments(t *testing.T) {
	w := alone(t)
	s := readSurface(t)
	failed, leading := map[string]int{}, regexp.MustCompile(`^([\w.]+): argument '([^']*)'`)
	first := makeHandlesOf(w)
	defer first.close()
	for _, name := range sortedKeys(first.calls()) {
		if harmful[name] || isAlways(name) {
			continue
		}
		h := makeHandlesOf(w)
		f := h.calls()[name]
		kind := f.Type()
		call := func(at int, wrong any) {
			args, _ := argumentsOf(name, kind, h, -1, nil)
			for i := range args {
				switch kind.In(i) {
				case reflect.TypeOf((*sw.Comm)(nil)): // which may break
					args[i] = reflect.ValueOf(mustOf(w.Comm().Subgroup([]int64{0}, "g")))
				case reflect.TypeOf((*context.Context)(nil)).Elem():
					ctx, cancel := context.WithTimeout(background, 300*time.Millisecond)
					defer cancel()
					args[i] = reflect.ValueOf(ctx)
				case reflect.TypeOf(""):
					if good, there := goodStrings[name]; there {
						args[i] = reflect.ValueOf(good)
					}
				}
			}
			if name == "RunRanks" || name == "Counting" {
				args[1] = reflect.ValueOf(1)
			}
			if name == "Gradients" || name == "Tensor.Backward" {
				args[0] = reflect.ValueOf(map[string]any{"Gradients": []*sw.Tensor{h.tensor.Mul(2)}, "Tensor.Backward": h.tensor.Mul(2)}[name])
			}
			args[at] = reflect.ValueOf(wrong)
			where := fmt.Sprintf("%s, argument %d is %.40q", name, at, fmt.Sprint(wrong))
			err, tells := misused(f, args)
			if h.module.Err() != nil {
				h.module = mustOf(w.NewModule())
			}
			if !tells || err == nil {
				return
			}
			failed[name]++
			var asError *sw.Error
			if !errors.As(err, &asError) {
				if !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%s: %v", where, err)
				}
				return
			}
			if !strings.HasPrefix(asError.Message, name+": ") || strings.Contains(strings.ToLower(asError.Message), "swv") {
				t.Errorf("%s: the words are not Go's: %v", where, err)
			}
			if named := leading.FindStringSubmatch(asError.Message); named != nil && !parameters(s.functions[name])[strings.SplitN(named[2], "[", 2)[0]] {
				t.Errorf("%s: the function has no such argument: %v", where, err)
			}
			if found := ofCPP.FindString(strings.ReplaceAll(asError.Message, "DeviceMesh()", "")); found != "" && !ofLibTorch.MatchString(asError.Message) {
				t.Errorf("%s: %q is not of Go: %v", where, found, err)
			}
		}
		for at := 0; at < kind.NumIn(); at++ {
			for _, wrong := range wrongArguments(h, kind.In(at)) {
				call(at, wrong)
			}
		}
		if kind.NumIn() > 0 && failed[name] == 0 && !infallible[name] && canFail(kind) {
			t.Errorf("%s has accepted everything", name)
		}
		h.close() // each open trace costs every call after it
	}
	total := 0
	for _, n := range failed {
		total += n
	}
	if total < 900 || len(failed) < 110 {
		t.Errorf("only %d errors of %d functions", total, len(failed))
	}
}

// canFail says whether a function has arguments that it may refuse, other than handles.
func canFail(kind reflect.Type) bool {
	for i := 0; i < kind.NumIn(); i++ {
		switch kind.In(i) {
		case reflect.TypeOf((*sw.Tensor)(nil)), reflect.TypeOf([]*sw.Tensor{}), reflect.TypeOf(0.0):
		default:
			if len(wrongArguments(&handles{}, kind.In(i))) > 0 {
				return true
			}
		}
	}
	return false
}
