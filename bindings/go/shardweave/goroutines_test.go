package shardweave_test

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// A goroutine that calls while another one is in a call hears of it at once, whatever it calls.
func TestTwoGoroutinesInOneRank(t *testing.T) {
	waiting, told := make(chan struct{}), make(chan struct{})
	run(t, 2, func(w *sw.World) error {
		x := sw.Ones(w, []int64{2})
		if w.Rank() == 1 {
			<-told
			return w.Comm().Barrier(background)
		}
		go func() {
			defer close(told)
			<-waiting
			for len(mustOf(w.FlightRecord())) < 3 || !strings.Contains(mustOf(w.FlightRecord()), "barrier") { // which anyone may ask for
				time.Sleep(time.Millisecond)
			}
			start := time.Now()
			_, mesh := w.ParseMesh("x=2")
			_, sizes := x.Sizes()
			for what, err := range map[string]error{
				"an operator": x.Add(1).Err(), "a mesh": mesh, "sizes": sizes, "a factory": sw.Ones(w, nil).Err(),
				"a scope": w.Scope(func() error { return nil }), "a mode": w.With(sw.NoGrad, func() error { return nil }),
				"the end of a tensor": x.Close(), "the end of the world": w.Close(), "a collective": w.Comm().Barrier(background),
			} {
				if !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), "another goroutine is in a call of rank 0") {
					t.Errorf("%s: %v", what, err)
				}
			}
			if passed := time.Since(start); passed > time.Second {
				t.Errorf("it took %v", passed)
			}
		}()
		close(waiting)
		if err := w.Comm().Barrier(background); err != nil {
			return err
		}
		<-told
		return x.Add(1).Err() // and nothing is broken
	})
}

// besides are functions that may be called while another goroutine is in a call of the rank: they use none,
// or are documented so. (Those without handles are others.)
var besides = map[string]bool{"Comm.Abort": true, "World.Abort": true, "World.FlightRecord": true, "Module.Err": true, "Tensor.Err": true,
	"World.Comm": true, "World.Context": true, "World.LocalRank": true, "World.Rank": true, "World.Size": true,
	"Scheduler.At": true, "Layout.Equal": true, "Layout.LocalExtent": true, "Layout.PlanTo": true, "Layout.String": true, "Op.Schema": true,
	"Plan.Add": true, "Plan.AddForward": true, "Plan.MarshalJSON": true}

// The same of every function and method that uses a rank.
func TestEveryFunctionBesideAnotherGoroutine(t *testing.T) {
	waiting, told := make(chan struct{}), make(chan struct{})
	run(t, 2, func(w *sw.World) error {
		h := makeHandlesOf(w)
		if w.Rank() == 1 {
			<-told
			return w.Comm().Barrier(background)
		}
		go func() {
			defer close(told)
			<-waiting
			for !strings.Contains(mustOf(w.FlightRecord()), "barrier") {
				time.Sleep(time.Millisecond)
			}
			tried := 0
			for name, f := range h.calls() {
				args, ofRanks := argumentsOf(name, f.Type(), h, -1, nil)
				if ofRanks == 0 || besides[name] || strings.HasPrefix(name, "CapturedStep.") { // of which there is none here
					continue
				}
				tried++
				start := time.Now()
				err, tells := misused(f, args)
				if passed := time.Since(start); passed > 10*time.Second { // of the five minutes that the barrier would wait
					t.Errorf("%s took %v", name, passed)
				}
				if strings.HasSuffix(name, ".String") {
					err, tells = errors.New(f.Call(args)[0].String()), true
				}
				if !tells || err == nil || !strings.Contains(err.Error(), "FAILED_PRECONDITION: "+name+": another goroutine is in a call of rank 0") {
					t.Errorf("%s: %v", name, err)
				}
			}
			if tried < 120 {
				t.Errorf("only %d functions were tried", tried)
			}
		}()
		close(waiting)
		if err := w.Comm().Barrier(background); err != nil {
			return err
		}
		<-told
		if err := h.module.Err(); !errors.Is(err, sw.FailedPrecondition) { // it lacks what was to be registered
			return fmt.Errorf("the module: %v", err)
		}
		return h.tensor.Add(1).Err() // and nothing is broken
	})
}

// An error of one goroutine is not a race with what another one asks (the race detector looks).
func TestErrorsOfModulesFromSeveralGoroutines(t *testing.T) {
	w := alone(t)
	m := mustOf(w.NewModule())
	var wg sync.WaitGroup
	for i := 0; i < 4; i++ {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for k := 0; k < 100; k++ {
				m.Parameter("p", nil)
				if err := m.Err(); !errors.Is(err, sw.InvalidArgument) && !errors.Is(err, sw.FailedPrecondition) {
					t.Error(err)
				}
			}
		}()
	}
	wg.Wait()
}

func TestScopesOfTwoGoroutines(t *testing.T) {
	w := alone(t)
	open, ended := make(chan struct{}), make(chan error)
	outer := w.Scope(func() error {
		go func() {
			ended <- w.Scope(func() error {
				close(open)
				<-ended
				return nil
			})
		}()
		<-open
		return nil
	})
	if !errors.Is(outer, sw.FailedPrecondition) || !strings.Contains(outer.Error(), "take turns") {
		t.Error(outer)
	}
	ended <- nil
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := sw.Ones(w, nil).Err(); err != nil {
		t.Error(err)
	}
}

func TestManyGoroutinesWithoutTurns(t *testing.T) {
	w := alone(t)
	x := sw.Ones(w, []int64{3})
	var wg sync.WaitGroup
	for i := 0; i < 8; i++ {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for k := 0; k < 200; k++ {
				y := x.Add(1)
				if err := y.Err(); err != nil && !errors.Is(err, sw.FailedPrecondition) {
					t.Error(err)
				}
				y.Close()
				x.Sizes()
				w.Scope(func() error { return x.Mul(2).Err() })
			}
		}()
	}
	wg.Wait()
	for w.Scope(func() error { return nil }) != nil {
	}
	if sum, err := x.Sum().Item(); err != nil || sum != 3 {
		t.Error(sum, err)
	}
}

// resident is the process' memory, in bytes.
func resident() int64 {
	statm := string(mustOf(os.ReadFile("/proc/self/statm")))
	return mustOf(strconv.ParseInt(strings.Fields(statm)[1], 10, 64)) * int64(os.Getpagesize())
}

// Tensors press on the garbage collector by what they hold, not by what Go sees of them.
func TestMemoryOutsideOfScopes(t *testing.T) {
	for _, sharded := range []bool{false, true} {
		run(t, 2, func(w *sw.World) error {
			var where sw.Place = w
			size := int64(1 << 20) // 4 MiB
			if sharded {
				m, err := w.ParseMesh("x=2")
				if err != nil {
					return err
				}
				where, size = m, 2<<20
			}
			spec := []sw.TensorOption{sw.On{"x": "S(0)"}}
			if !sharded {
				spec = nil
			}
			kept := sw.Ones(where, []int64{size}, spec...)
			before, peak, handles := resident(), int64(0), int64(0)
			for i := 0; i < 500; i++ {
				y := sw.Ones(where, []int64{size}, spec...).Add(1)
				if err := y.Err(); err != nil {
					return err
				}
				if now := resident() - before; now > peak {
					peak = now
				}
				if now := sw.LiveHandles(); now > handles {
					handles = now
				}
			}
			if peak > 1<<30 || handles > 300 { // of 8.4 GB, 2,000 handles
				return fmt.Errorf("sharded: %v; %d MB, %d handles", sharded, peak>>20, handles)
			}
			return kept.Err()
		})
		runtime.GC()
	}
}

// What is alive is not collected again and again.
func TestCollectingIsRareWhereThereIsNoGarbage(t *testing.T) {
	w := alone(t)
	var all []*sw.Tensor
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for i := 0; i < 400; i++ { // 400 MB
		all = append(all, sw.Ones(w, []int64{1 << 18}))
	}
	runtime.ReadMemStats(&after)
	if n := after.NumForcedGC - before.NumForcedGC; n > 4 {
		t.Errorf("garbage was collected %d times", n)
	}
	for _, x := range all {
		if err := x.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// What ends beside another goroutine's call does not wait for that: it says so, and is done before the next call.
func TestBodiesThatEndBesideAnotherGoroutine(t *testing.T) {
	waits := map[string]func(*sw.World, *sw.Mesh, func() error) error{
		"With":                func(w *sw.World, m *sw.Mesh, body func() error) error { return w.With(sw.NoGrad, body) },
		"Scope":               func(w *sw.World, m *sw.Mesh, body func() error) error { return w.Scope(body) },
		"Named":               func(w *sw.World, m *sw.Mesh, body func() error) error { return m.Named("block", body) },
		"ForbidCommunication": func(w *sw.World, m *sw.Mesh, body func() error) error { return m.ForbidCommunication(body) },
	}
	for _, name := range sortedKeys(waits) {
		checkLeaks(t, func() {
			told := make(chan struct{})
			err := sw.RunRanks(background, 2, func(w *sw.World) error {
				m, err := w.ParseMesh("x=2")
				if err != nil {
					return err
				}
				if err := m.Connect(); err != nil {
					return err
				}
				if w.Rank() == 1 {
					<-told
					return w.Comm().Barrier(background)
				}
				ended := make(chan error)
				err = waits[name](w, m, func() error {
					go func() { ended <- w.Comm().Barrier(background) }()
					for !strings.Contains(mustOf(w.FlightRecord()), "barrier") {
						time.Sleep(time.Millisecond)
					}
					return nil
				})
				close(told)
				if err := <-ended; err != nil {
					return fmt.Errorf("the barrier: %w", err)
				}
				if !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), name+": another goroutine is in a call of rank 0") {
					return fmt.Errorf("%s has ended with %v", name, err)
				}
				x := sw.Ones(w, []int64{2}, sw.RequiresGrad).Mul(2)
				if requires, err := x.RequiresGrad(); err != nil || !requires {
					return fmt.Errorf("the mode is still another one: %v, %v", requires, err)
				}
				return nil
			}, sw.WithTimeout(10*time.Second))
			if err != nil {
				t.Error(err)
			}
		})
	}
}
