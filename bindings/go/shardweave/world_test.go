package shardweave_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

func TestTheFirstFailureIsTold(t *testing.T) {
	mine := errors.New("no more paper")
	err := sw.RunRanks(background, 3, func(w *sw.World) error {
		if w.Rank() == 1 {
			return mine
		}
		return w.Comm().Barrier(background)
	})
	if !errors.Is(err, mine) || !strings.Contains(err.Error(), "rank 1") {
		t.Error(err)
	}
}

func TestOthersHearOfAFailure(t *testing.T) {
	err := sw.RunRanks(background, 2, func(w *sw.World) error {
		if w.Rank() == 1 {
			return errors.New("no more paper")
		}
		err := w.Comm().Barrier(background)
		if !errors.Is(err, sw.Aborted) && !errors.Is(err, sw.Unavailable) {
			return fmt.Errorf("barrier: %v", err)
		}
		if !strings.Contains(err.Error(), "1") {
			return fmt.Errorf("the rank is not named: %v", err)
		}
		return nil
	})
	if err == nil || !strings.Contains(err.Error(), "rank 1: no more paper") {
		t.Error(err)
	}
}

func TestPanicsGoOn(t *testing.T) {
	defer func() {
		p, is := recover().(*sw.Panic)
		if !is || p.Rank != 1 || p.Value != "oh" {
			t.Fatal(p)
		}
		// Where it happened, and in which rank.
		if text := p.Error(); !strings.HasPrefix(text, "rank 1: panic: oh\n") || !strings.Contains(text, "shardweave_test.whatPanics") {
			t.Error(text)
		}
	}()
	err := sw.RunRanks(background, 2, func(w *sw.World) error {
		if w.Rank() == 1 {
			whatPanics()
		}
		return w.Comm().Barrier(background)
	})
	t.Error("not reached", err)
}

//go:noinline
func whatPanics() { panic("oh") }

func TestGoroutinesThatEnd(t *testing.T) {
	err := sw.RunRanks(background, 2, func(w *sw.World) error {
		if w.Rank() == 0 {
			runtime.Goexit()
		}
		return w.Comm().Barrier(background)
	})
	if err == nil {
		t.Error("no error")
	}
}

func TestAContextEndsWhatWaits(t *testing.T) {
	ctx, cancel := context.WithCancel(background)
	err := sw.RunRanks(ctx, 2, func(w *sw.World) error {
		if w.Rank() == 0 {
			time.AfterFunc(20*time.Millisecond, cancel)
			return w.Comm().Barrier(background)
		}
		<-ctx.Done()
		return nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := sw.RunRanks(ctx, 2, func(*sw.World) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestAContextOfACollective(t *testing.T) {
	start, given := time.Now(), make(chan struct{})
	err := sw.RunRanks(background, 2, func(w *sw.World) error {
		if w.Rank() == 1 {
			<-given
			if err := w.Comm().Barrier(background); err == nil {
				return errors.New("the group was not broken")
			}
			return nil
		}
		defer close(given)
		ctx, cancel := context.WithTimeout(background, 30*time.Millisecond)
		defer cancel()
		err := w.Comm().Barrier(ctx)
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, sw.DeadlineExceeded) || ctx.Err() == nil {
			return fmt.Errorf("barrier: %v", err)
		}
		var asError *sw.Error
		if !errors.As(err, &asError) {
			return fmt.Errorf("not an *Error: %v", err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if passed := time.Since(start); passed > 30*time.Second {
		t.Errorf("it took %v", passed)
	}
}

// What a context has ended is its error and the library's code, whichever was first at a deadline.
func TestErrorsOfContextsAreBoth(t *testing.T) {
	both := func(err error, canceled bool) error {
		words := "context deadline exceeded"
		if canceled {
			words = "context canceled"
		}
		if errors.Is(err, context.Canceled) != canceled || errors.Is(err, sw.Canceled) != canceled ||
			errors.Is(err, context.DeadlineExceeded) == canceled || errors.Is(err, sw.DeadlineExceeded) == canceled ||
			strings.Count(err.Error(), words+"; ") != 1 {
			return fmt.Errorf("canceled is %v: %w", canceled, err)
		}
		return nil
	}
	for i := 0; i < 20; i++ {
		canceled := i%2 == 1
		after := 5*time.Millisecond + time.Duration(i)*70*time.Microsecond // parts of milliseconds
		made := func() (context.Context, context.CancelFunc) {
			if !canceled {
				return context.WithTimeout(background, after)
			}
			ctx, cancel := context.WithCancel(background)
			time.AfterFunc(after, cancel)
			return ctx, cancel
		}
		given := make(chan struct{})
		run(t, 2, func(w *sw.World) error { // a context of the call
			if w.Rank() == 1 {
				<-given
				return nil
			}
			defer close(given)
			ctx, cancel := made()
			defer cancel()
			if err := both(w.Comm().Barrier(ctx), canceled); err != nil {
				return err
			}
			if err := w.Comm().Barrier(ctx); !errors.Is(err, ctx.Err()) || errors.Is(err, sw.Canceled) != canceled ||
				errors.Is(err, sw.DeadlineExceeded) == canceled {
				return fmt.Errorf("before the call: %w", err)
			}
			return nil
		})
		ctx, cancel := made() // and of the world
		err := sw.RunRanks(ctx, 2, func(w *sw.World) error {
			if w.Rank() == 1 {
				<-ctx.Done()
				return nil
			}
			if err := both(w.Comm().Barrier(background), canceled); err != nil {
				t.Error(err)
			}
			m, err := w.ParseMesh("x=2")
			if err != nil {
				return err
			}
			return sw.Ones(m, []int64{4}, sw.On{"x": "S(0)"}).Sum().Full().Err()
		})
		cancel()
		if !errors.Is(err, ctx.Err()) || errors.Is(err, sw.Canceled) != canceled ||
			errors.Is(err, sw.DeadlineExceeded) == canceled {
			t.Error(err)
		}
	}
}

// Bodies that succeed although their context has ended have succeeded.
func TestAContextThatEndsNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(background)
	defer cancel()
	if err := sw.RunRanks(ctx, 2, func(*sw.World) error { cancel(); return nil }); err != nil {
		t.Error(err)
	}
}

// A rank whose context is done before it calls tells the others, which wait for it.
func TestAContextThatIsDoneBefore(t *testing.T) {
	start := time.Now()
	err := sw.RunRanks(background, 2, func(w *sw.World) error {
		if w.Rank() == 1 {
			if err := w.Comm().Barrier(background); err == nil {
				return errors.New("the group was not broken")
			}
			return nil
		}
		ctx, cancel := context.WithCancel(background)
		cancel()
		if err := w.Comm().Barrier(ctx); !errors.Is(err, context.Canceled) {
			return fmt.Errorf("barrier: %v", err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if passed := time.Since(start); passed > 30*time.Second {
		t.Errorf("it took %v", passed)
	}
}

// Numbers may lie beside pointers.
func TestNumbersWithinAStruct(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		trainer := &struct {
			w     *sw.World
			stats [2]float64
		}{w, [2]float64{1, 2}}
		if err := sw.AllReduce(background, w.Comm(), trainer.stats[:], trainer.stats[:], sw.Sum); err != nil {
			return err
		}
		if trainer.stats != [2]float64{2, 4} {
			return fmt.Errorf("the sums are %v", trainer.stats)
		}
		x := sw.FromSlice(w, trainer.stats[:], []int64{2})
		if err := sw.CopyFrom(x, trainer.stats[:]); err != nil {
			return err
		}
		return x.Err()
	})
}

func TestOptionsOfWorlds(t *testing.T) {
	given := make(chan struct{})
	err := sw.RunRanks(background, 2, func(w *sw.World) error {
		if w.Rank() == 1 {
			<-given
			return nil
		}
		defer close(given)
		err := w.Comm().Barrier(background)
		if w.Comm().Health() == nil {
			return errors.New("the group is healthy")
		}
		return err
	}, sw.WithTimeout(30*time.Millisecond))
	if !errors.Is(err, sw.DeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	for _, below := range []time.Duration{-5, -time.Millisecond, -time.Second} {
		_, joined := sw.Join(background, sw.Rendezvous{WorldSize: 1, File: "x"}, sw.WithTimeout(below))
		ran := sw.RunRanks(background, 1, func(*sw.World) error { return nil }, sw.WithTimeout(below))
		for _, err := range []error{joined, ran} {
			if !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "WithTimeout is "+below.String()+";") {
				t.Errorf("a timeout of %v: %v", below, err)
			}
		}
	}
	if err := sw.RunRanks(background, 1, func(*sw.World) error { return nil }, sw.WithTimeout(0)); err != nil {
		t.Error(err)
	}
	for _, ranks := range []int{0, -1, 1 << 40, 1<<32 + 2} {
		if err := sw.RunRanks(background, ranks, func(*sw.World) error { return nil }); !errors.Is(err, sw.InvalidArgument) && !errors.Is(err, sw.ResourceExhausted) {
			t.Errorf("%d ranks: %v", ranks, err)
		}
	}
}

func TestCollectives(t *testing.T) {
	const n = 3
	run(t, n, func(w *sw.World) error {
		g, me := w.Comm(), int32(w.Rank())
		want := func(what string, got, want []int32, err error) error {
			if err != nil || !reflect.DeepEqual(got, want) {
				return fmt.Errorf("%s on rank %d: %v, %v, wanted %v", what, me, got, err, want)
			}
			return nil
		}
		out := make([]int32, 1)
		err := sw.AllReduce(background, g, []int32{me + 1}, out, sw.Sum)
		if err := want("all reduce", out, []int32{6}, err); err != nil {
			return err
		}
		out = make([]int32, n)
		err = sw.AllGather(background, g, []int32{me}, out)
		if err := want("all gather", out, []int32{0, 1, 2}, err); err != nil {
			return err
		}
		out = make([]int32, 3)
		mine := []int32{me, me}[:me]
		err = sw.AllGatherV(background, g, mine, out, []int64{0, 1, 2})
		if err := want("all gather v", out, []int32{1, 2, 2}, err); err != nil {
			return err
		}
		out = make([]int32, 1)
		err = sw.ReduceScatter(background, g, []int32{me, 10 * me, 100 * me}, out, sw.Max)
		if err := want("reduce scatter", out, []int32{[]int32{2, 20, 200}[me]}, err); err != nil {
			return err
		}
		out = make([]int32, me)
		err = sw.ReduceScatterV(background, g, []int32{1, 2, 3}, out, []int64{0, 1, 2}, sw.Sum)
		if err := want("reduce scatter v", out, [][]int32{{}, {3}, {6, 9}}[me], err); err != nil {
			return err
		}
		out = make([]int32, n)
		err = sw.AllToAll(background, g, []int32{10 * me, 10*me + 1, 10*me + 2}, out)
		if err := want("all to all", out, []int32{me, 10 + me, 20 + me}, err); err != nil {
			return err
		}
		send := [][]int64{{0, 1, 0}, {0, 0, 2}, {0, 0, 0}}[me]
		recv := [][]int64{{0, 0, 0}, {1, 0, 0}, {0, 2, 0}}[me]
		out = make([]int32, me)
		err = sw.AllToAllV(background, g, [][]int32{{7}, {8, 9}, nil}[me], send, out, recv)
		if err := want("all to all v", out, [][]int32{{}, {7}, {8, 9}}[me], err); err != nil {
			return err
		}
		if err := sw.AllToAllV(background, g, out, send, out, nil); !errors.Is(err, sw.InvalidArgument) {
			return fmt.Errorf("all to all v: %v", err)
		}
		out = []int32{me}
		err = sw.Broadcast(background, g, out, 2)
		if err := want("broadcast", out, []int32{2}, err); err != nil {
			return err
		}
		out = []int32{-1}
		root := out
		if me != 1 {
			root = nil
		}
		err = sw.Reduce(background, g, []int32{me + 2}, root, sw.Product, 1)
		if err := want("reduce", out, [][]int32{{-1}, {24}, {-1}}[me], err); err != nil {
			return err
		}
		root = nil
		if me == 0 {
			root = make([]int32, n)
		}
		err = sw.Gather(background, g, []int32{me}, root, 0)
		if err := want("gather", root, [][]int32{{0, 1, 2}, nil, nil}[me], err); err != nil {
			return err
		}
		out = make([]int32, 1)
		err = sw.Scatter(background, g, root, out, 0)
		if err := want("scatter", out, []int32{me}, err); err != nil {
			return err
		}
		switch me {
		case 0:
			err = sw.Send(background, g, []int32{42}, 1, 5)
		case 1:
			err = sw.Recv(background, g, out, 0, 5)
		}
		if err := want("send and recv", out, [][]int32{{0}, {42}, {2}}[me], err); err != nil {
			return err
		}
		// Groups.
		odd, err := g.Split(int(me%2), -int(me), "parity")
		if err != nil {
			return err
		}
		ranks, err := odd.WorldRanks()
		if want := [][]int64{{2, 0}, {1}}[me%2]; err != nil || !reflect.DeepEqual(ranks, want) {
			return fmt.Errorf("split: %v, %v, wanted %v", ranks, err, want)
		}
		name, err := odd.Name()
		if err != nil || !strings.Contains(name, "parity") {
			return fmt.Errorf("%q, %v", name, err)
		}
		if none, err := g.Split(map[bool]int{true: -1, false: 0}[me == 0], 0, "some"); err != nil || (none == nil) != (me == 0) {
			return fmt.Errorf("%v, %v", none, err)
		}
		if me != 0 {
			sub, err := g.Subgroup([]int64{2, 1}, "pair")
			if err != nil {
				return err
			}
			if rank, err := sub.Rank(); err != nil || rank != int(2-me) {
				return fmt.Errorf("subgroup: %v, %v", rank, err)
			}
			if size, err := sub.Size(); err != nil || size != 2 {
				return fmt.Errorf("subgroup: %v, %v", size, err)
			}
			if err := sub.Close(); err != nil {
				return err
			}
			if err := sub.Barrier(background); !errors.Is(err, sw.FailedPrecondition) {
				return fmt.Errorf("a closed group: %v", err)
			}
		}
		if backend, err := g.Backend(); err != nil || backend != "inproc" {
			return fmt.Errorf("%q, %v", backend, err)
		}
		counters, err := g.Counters()
		if err != nil || counters.Total().Calls < 12 || counters[0] != (sw.Counter{Calls: 1, Bytes: 4}) {
			return fmt.Errorf("%v, %v", counters, err)
		}
		record, err := w.FlightRecord()
		if err != nil || !strings.Contains(record, sw.OpKinds[8]) {
			return fmt.Errorf("%s, %v", record, err)
		}
		return g.Barrier(background)
	})
}

func TestRanksThatCallDifferentThings(t *testing.T) {
	wrong := make([]error, 2)
	sw.RunRanks(background, 2, func(w *sw.World) error {
		out := make([]float32, 1+w.Rank())
		wrong[w.Rank()] = sw.AllReduce(background, w.Comm(), out, out, sw.Sum)
		return nil
	})
	for rank, err := range wrong {
		if !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), "all_reduce") {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
}

func TestMeshesAndLayouts(t *testing.T) {
	run(t, 4, func(w *sw.World) error {
		m, err := w.Mesh(sw.Dim("dp", 2), sw.Dim("tp", 2))
		if err != nil {
			return err
		}
		if m.String() != "DeviceMesh(dp=2, tp=2)" {
			return fmt.Errorf("%v", m)
		}
		dims, err := m.Dims()
		if err != nil || !reflect.DeepEqual(dims, []sw.MeshDim{{Name: "dp", Size: 2}, {Name: "tp", Size: 2}}) {
			return fmt.Errorf("%v, %v", dims, err)
		}
		at, err := m.Coordinate()
		if err != nil || !reflect.DeepEqual(at, []int64{int64(w.Rank() / 2), int64(w.Rank() % 2)}) {
			return fmt.Errorf("%v, %v", at, err)
		}
		if ranks, err := m.Ranks(); err != nil || !reflect.DeepEqual(ranks, []int64{0, 1, 2, 3}) {
			return fmt.Errorf("%v, %v", ranks, err)
		}
		if err := m.Connect(); err != nil {
			return err
		}
		flat, err := m.Flatten("all", "dp", "tp")
		if err != nil {
			return err
		}
		square, err := flat.Unflatten("all", dims...)
		if err != nil {
			return err
		}
		if equal, err := square.Equal(m); err != nil || !equal {
			return fmt.Errorf("%v is not %v, %v", square, m, err)
		}
		tp, err := m.Slice("tp")
		if err != nil {
			return err
		}
		g, err := tp.Comm("tp")
		if err != nil {
			return err
		}
		if rank, err := g.Rank(); err != nil || rank != w.Rank()%2 {
			return fmt.Errorf("%v, %v", rank, err)
		}
		if _, err := m.Comm("pp"); !errors.Is(err, sw.NotFound) {
			return fmt.Errorf("%v", err)
		}
		turned, err := w.MeshOfRanks([]int64{3, 2, 1, 0}, sw.Dim("x", 4))
		if err != nil {
			return err
		}
		if at, err := turned.Coordinate(); err != nil || at[0] != int64(3-w.Rank()) {
			return fmt.Errorf("%v, %v", at, err)
		}
		layout, err := sw.ParseLayout("[S(0), R]")
		if err != nil || layout.String() != "[S(0), R]" {
			return fmt.Errorf("%v, %v", layout, err)
		}
		shape, offset, err := layout.LocalExtent([]int64{2, 2}, []int64{1, 0}, []int64{7, 5})
		if err != nil || !reflect.DeepEqual(shape, []int64{3, 5}) || !reflect.DeepEqual(offset, []int64{4, 0}) {
			return fmt.Errorf("%v, %v, %v", shape, offset, err)
		}
		bytes, steps, err := layout.PlanTo(sw.MustParseLayout("[R, R]"), []int64{2, 2}, []int64{7, 5}, sw.F32)
		if err != nil || bytes <= 0 || !strings.Contains(steps, "all_gather") {
			return fmt.Errorf("%v, %v, %v", bytes, steps, err)
		}
		if _, _, err := layout.LocalExtent([]int64{2, 2}, []int64{1}, []int64{7, 5}); !errors.Is(err, sw.InvalidArgument) {
			return err
		}
		// What is not asked for by name is told, forbidden and recorded.
		x := sw.Ones(m, []int64{4, 4}, sw.On{"dp": "S(0)"})
		y := sw.Ones(m, []int64{4, 4}, sw.On{"tp": "S(0)"})
		before, err := m.DispatchCounters()
		if err != nil {
			return err
		}
		err = m.ForbidCommunication(func() error { return x.Add(y).Err() })
		if !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), "add") {
			return fmt.Errorf("forbidden: %v", err)
		}
		if err := x.Add(y).Err(); err != nil {
			return err
		}
		after, err := m.DispatchCounters()
		if err != nil || after.Operators <= before.Operators || after.ImplicitRedistributions <= before.ImplicitRedistributions {
			return fmt.Errorf("%v, %v, %v", before, after, err)
		}
		return nil
	})
	for _, text := range []string{"[S(0)", "[X]", "[S(0), \x00]", ""} {
		if _, err := sw.ParseLayout(text); !errors.Is(err, sw.InvalidArgument) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestRulesOfTheHost(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("x=2")
		if err != nil {
			return err
		}
		name := "aten::bucketize.Tensor"
		if err := m.AddRule("aten::bucketise", "pointwise"); !errors.Is(err, sw.NotFound) || !strings.Contains(err.Error(), "Mesh.AddRule: argument 'name'") {
			return fmt.Errorf("%v", err)
		}
		if err := m.AddRule(name, "S(0), R -> S(0)", "S(0) -> R"); !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "argument 'ways[1]'") {
			return fmt.Errorf("%v", err)
		}
		if err := m.AddRule(name, "no\x00"); !errors.Is(err, sw.InvalidArgument) {
			return fmt.Errorf("%v", err)
		}
		if err := m.AddRule("aten::hypot", "S(0), S(0) -> S(0)"); err != nil {
			return err
		}
		if err := m.AddRule("aten::hypot", "pointwise"); !errors.Is(err, sw.AlreadyExists) {
			return fmt.Errorf("%v", err)
		}
		plain := counted(w, 7, 5)
		want, err := sw.DataAs[float64](plain.Apply("aten::hypot", plain))
		if err != nil {
			return err
		}
		for _, placement := range []string{"S(0)", "S(1)"} {
			x := plain.Distribute(m, sw.On{"x": placement}, sw.SameEverywhere)
			y := x.Apply("aten::hypot", x)
			layout, err := y.Layout()
			if err != nil {
				return err
			}
			// The library's own rule would leave columns where they are.
			if fmt.Sprint(layout) == "[S(1)]" {
				return fmt.Errorf("%v", layout)
			}
			if got, err := sw.DataAs[float64](y.Full()); err != nil || !near(got, want) {
				return fmt.Errorf("%v and %v, %v", got, want, err)
			}
		}
		return nil
	})
}

func TestCostModels(t *testing.T) {
	run(t, 4, func(w *sw.World) error {
		m, err := w.ParseMesh("dp=2,tp=2")
		if err != nil {
			return err
		}
		model, err := m.CostModel()
		if err != nil || len(model.Links) != 2 || model.Device.Flops != 5e10 {
			return fmt.Errorf("%+v, %v", model, err)
		}
		model.Links[1] = sw.LinkCost{Latency: 0, Bandwidth: 3e11}
		if err := m.SetCostModel(model); err != nil {
			return err
		}
		if got, err := m.CostModel(); err != nil || fmt.Sprint(got) != fmt.Sprint(model) {
			return fmt.Errorf("%+v, %v", got, err)
		}
		text := `{"links": {"dp": {"latency": 1e-6, "bandwidth": 7}, "tp": {"latency": 0, "bandwidth": 8}},
			"device": {"flops": 9, "bandwidth": 10}}`
		if err := m.SetCostModelFromJSON(text); err != nil {
			return err
		}
		other := model
		broken := text
		if w.Rank() == 3 {
			other.Device.Flops *= 2
			broken = "no\x00"
		}
		if err := m.SetCostModelFromJSON(broken); !errors.Is(err, sw.InvalidArgument) {
			return fmt.Errorf("%v", err)
		}
		if err := m.SetCostModel(other); !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "Mesh.SetCostModel: ranks 0 and 3 of ") {
			return fmt.Errorf("%v", err)
		}
		measured, err := m.MeasureCostModel()
		if err != nil {
			return err
		}
		if got, err := m.CostModel(); err != nil || got.Links[0].Bandwidth != 7 || got.Device.Flops != 9 {
			return fmt.Errorf("%+v, %v", got, err)
		}
		if err := m.SetCostModelFromJSON(measured); err != nil {
			return err
		}
		if got, err := m.CostModel(); err != nil || got.Links[0].Bandwidth < 1e5 || got.Device.Flops < 1e6 {
			return fmt.Errorf("%+v, %v", got, err)
		}
		return nil
	})
}

func TestTracesAndPictures(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("x=2")
		if err != nil {
			return err
		}
		trace, err := m.Trace()
		if err != nil {
			return err
		}
		x := sw.Ones(m, []int64{6, 2}, sw.On{"x": "S(0)"})
		err = m.Named("blocks.0.attn", func() error { return x.Redistribute(sw.On{"x": "R"}).Err() })
		if err != nil {
			return err
		}
		n, err := trace.Len()
		if err != nil || n != 1 {
			return fmt.Errorf("%v, %v", n, err)
		}
		if bytes, err := trace.Bytes(); err != nil || bytes <= 0 {
			return fmt.Errorf("%v, %v", bytes, err)
		}
		json, err := trace.MarshalJSON()
		if err != nil || !bytes.Contains(json, []byte("blocks.0.attn")) {
			return fmt.Errorf("%s, %v", json, err)
		}
		if !strings.Contains(trace.String(), "all_gather") {
			return fmt.Errorf("%v", trace)
		}
		if err := trace.Clear(); err != nil {
			return err
		}
		if n, err := trace.Len(); err != nil || n != 0 {
			return fmt.Errorf("%v, %v", n, err)
		}
		table, json2, err := sw.MustFindOp("aten::sum.dim_IntList").Explain(m, x, []int{0})
		if err != nil || !strings.Contains(table, "P(sum)") || !strings.Contains(json2, "{") {
			return fmt.Errorf("%s, %s, %v", table, json2, err)
		}
		picture, err := x.Picture()
		if err != nil || !strings.Contains(picture, "1") {
			return fmt.Errorf("%s, %v", picture, err)
		}
		same, err := sw.MustParseLayout("[S(0)]").Picture(m, []int64{6, 2})
		if err != nil || same == "" {
			return fmt.Errorf("%s, %v", same, err)
		}
		partial := x.Apply("aten::sum.dim_IntList", []int{0})
		for uses := int64(0); uses < 2; uses++ { // reduced for the first use, and there for the next
			if err := partial.Apply("aten::relu").Err(); err != nil {
				return err
			}
			if n, err := m.DispatchCounters(); err != nil || n.RememberedUses != uses || n.RememberedBytes != 2*4 {
				return fmt.Errorf("%+v, %v", n, err)
			}
		}
		return trace.Close()
	})
}

// A link takes 8 s and a second for 2 bytes, a rank does 4 flops and touches 16 bytes in a second.
func TestEachTermOfACostIsInTheJSON(t *testing.T) {
	type option struct {
		Inputs, Outputs              []string
		Seconds, Move, Compute, Owed float64
		GivesUp                      string `json:"gives_up"`
		Bytes                        int64
	}
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("tp=2")
		if err != nil {
			return err
		}
		err = m.SetCostModel(sw.CostModel{
			Links:  []sw.LinkCost{{Latency: 8, Bandwidth: 2}},
			Device: sw.DeviceCost{Flops: 4, Bandwidth: 16},
		})
		if err != nil {
			return err
		}
		x := sw.Ones(m, []int64{8, 4}, sw.On{"tp": "R"})
		weight := sw.Ones(m, []int64{4, 2}, sw.On{"tp": "S(0)"}, sw.RequiresGrad)
		_, text, err := sw.MustFindOp("aten::mm").Explain(m, x, weight)
		if err != nil {
			return err
		}
		var why struct {
			Dims []struct {
				Name       string
				Ranks      int64
				Chosen     int
				NotOffered []string `json:"not_offered"`
				Options    []option
			}
		}
		decoder := json.NewDecoder(strings.NewReader(text))
		if err := decoder.Decode(&why); err != nil || len(why.Dims) != 1 {
			return fmt.Errorf("%s: %v", text, err)
		}
		tp := why.Dims[0]
		if tp.Name != "tp" || tp.Ranks != 2 || tp.NotOffered == nil || len(tp.NotOffered) != 0 {
			return fmt.Errorf("%s", text)
		}
		for at, want := range map[int]option{
			tp.Chosen: {Inputs: []string{"S(1)", "S(0)"}, Outputs: []string{"P(sum)"}, Seconds: 45, Compute: 25, Owed: 20},
			0:         {Inputs: []string{"R", "R"}, Outputs: []string{"R"}, Seconds: 62, Move: 16, Compute: 46, GivesUp: "weight", Bytes: 16},
		} {
			got := tp.Options[at]
			// What moves nothing between ranks still counts 1e-7 s.
			got.Move, got.Seconds = math.Round(got.Move*1e6)/1e6, math.Round(got.Seconds*1e6)/1e6
			if !reflect.DeepEqual(got, want) {
				return fmt.Errorf("%+v, wanted %+v", got, want)
			}
		}
		return nil
	})
}

func TestAWeightThatAPlanCutIsNotGatheredUnseen(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		module, err := w.NewModule()
		if err != nil {
			return err
		}
		weight := module.Parameter("up.weight", sw.Ones(w, []int64{6, 4}))
		m, err := w.ParseMesh("dp=2")
		if err != nil {
			return err
		}
		plan, err := sw.ParsePlan(`{"parameter": {"up.weight": {"dp": "S(0)"}}}`)
		if err != nil {
			return err
		}
		if err := module.Distribute(m, plan, sw.SameEverywhere); err != nil {
			return err
		}
		x := sw.Ones(m, []int64{5, 4}, sw.On{"dp": "S(0)"})
		err = m.ForbidCommunication(func() error { return x.Linear(weight, nil).Err() })
		if !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), "(the weight 'up.weight')") {
			return fmt.Errorf("forbidden: %v", err)
		}
		for _, want := range []int64{0, 1} {
			if n, err := m.DispatchCounters(); err != nil || n.UnshardedWeights != want {
				return fmt.Errorf("%+v, %v", n, err)
			}
			if err := x.Linear(weight, nil).Err(); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestCounting(t *testing.T) {
	w, err := sw.Counting(5, 64)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if w.Rank() != 5 || w.Size() != 64 {
		t.Error(w.Rank(), w.Size())
	}
	m, err := w.ParseMesh("x=64")
	if err != nil {
		t.Fatal(err)
	}
	if err := sw.Ones(m, []int64{128}, sw.On{"x": "S(0)"}).Redistribute(sw.On{}).Err(); err != nil {
		t.Fatal(err)
	}
	counters, err := w.Counters()
	if err != nil || counters.Total().Calls == 0 {
		t.Error(counters, err)
	}
}

// ---- Ranks that are processes: this test program, once more.

const processEnv = "SHARDWEAVE_TEST_PROCESS"

func processMain() int {
	ctx, cancel := context.WithTimeout(background, time.Minute)
	defer cancel()
	err := func() error {
		var w *sw.World
		var err error
		if file := os.Getenv("SHARDWEAVE_TEST_FILE"); file != "" {
			rank, _ := strconv.Atoi(os.Getenv("SHARDWEAVE_TEST_RANK"))
			w, err = sw.Join(ctx, sw.Rendezvous{Rank: rank, WorldSize: 2, File: file}, sw.WithTimeout(30*time.Second))
		} else {
			w, err = sw.FromEnvironment(ctx, sw.WithBackend("gloo"), sw.WithTimeout(30*time.Second))
		}
		if err != nil {
			return err
		}
		defer w.Close()
		m, err := w.ParseMesh("x=2")
		if err != nil {
			return err
		}
		x := sw.Ones(m, []int64{7, 5}, sw.On{"x": "S(0)"}, sw.F64, sw.RequiresGrad)
		if err := x.Mul(x).Sum().Backward(); err != nil {
			return err
		}
		grad, err := x.Grad()
		if err != nil {
			return err
		}
		sum, err := grad.Sum().Item()
		if err != nil {
			return err
		}
		backend, err := w.Comm().Backend()
		if err != nil {
			return err
		}
		fmt.Printf("%s %d of %d: %v\n", backend, w.Rank(), w.Size(), sum)
		return w.Comm().Barrier(ctx)
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func processes(t *testing.T, env func(rank int) []string) {
	t.Helper()
	commands, outputs := make([]*exec.Cmd, 2), make([]bytes.Buffer, 2)
	for rank := range commands {
		commands[rank] = exec.Command(os.Args[0])
		// Chosen here, or a rank says on stderr what it chooses.
		commands[rank].Env = append(append(os.Environ(), processEnv+"=1", "OMP_NUM_THREADS=1"), env(rank)...)
		commands[rank].Stdout, commands[rank].Stderr = &outputs[rank], &outputs[rank]
		if err := commands[rank].Start(); err != nil {
			t.Fatal(err)
		}
	}
	for rank, command := range commands {
		err := command.Wait()
		if want := fmt.Sprintf("gloo %d of 2: 70\n", rank); err != nil || outputs[rank].String() != want {
			t.Errorf("rank %d: %v, %q, wanted %q", rank, err, outputs[rank].String(), want)
		}
	}
}

func TestProcessesByAFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "store")
	processes(t, func(rank int) []string {
		return []string{"SHARDWEAVE_TEST_FILE=" + file, "SHARDWEAVE_TEST_RANK=" + strconv.Itoa(rank)}
	})
}

func TestProcessesByTheEnvironment(t *testing.T) {
	port := strconv.Itoa(mustOf(freePort()))
	processes(t, func(rank int) []string {
		return []string{"RANK=" + strconv.Itoa(rank), "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + port}
	})
}

func TestNothingHasStartedThisProcess(t *testing.T) {
	if _, err := sw.FromEnvironment(background); !errors.Is(err, sw.NotFound) {
		t.Error(err)
	}
}

func TestARendezvousThatNobodyElseComesTo(t *testing.T) {
	ctx, cancel := context.WithTimeout(background, 50*time.Millisecond)
	defer cancel()
	_, err := sw.Join(ctx, sw.Rendezvous{Rank: 0, WorldSize: 2, File: filepath.Join(t.TempDir(), "store")},
		sw.WithTimeout(500*time.Millisecond))
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	_, err = sw.Join(background, sw.Rendezvous{Rank: 2, WorldSize: 2, File: "x"})
	if !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
}

// A GPU where there is no driver: by way of the host, and over NCCL.
func TestDevicesThatAreNotThere(t *testing.T) {
	t.Setenv("SHARDWEAVE_CUDA_DRIVER_LIBRARY", "/no/libcuda.so.1")
	for backend, wanted := range map[string]string{"gloo": "by way of the host: no NVIDIA driver", "nccl": "backend nccl: no NVIDIA driver"} {
		one := sw.Rendezvous{WorldSize: 1, File: filepath.Join(t.TempDir(), "meeting")}
		for _, option := range []sw.WorldOption{sw.WithBackend("nccl"), sw.WithDevice(sw.Device{Kind: sw.CUDA})} {
			if err := sw.RunRanks(background, 1, func(*sw.World) error { return nil }, option); !errors.Is(err, sw.InvalidArgument) {
				t.Errorf("RunRanks with what is of processes: %v", err)
			}
		}
		_, err := sw.Join(background, one, sw.WithBackend(backend), sw.WithDevice(sw.Device{Kind: sw.CUDA}))
		if !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), wanted) {
			t.Errorf("%s: %v", backend, err)
		}
	}
}
