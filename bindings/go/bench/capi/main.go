// Command capi measures what an operator costs in Go: microseconds of the calling thread, and what Go
// allocates, for the calls that //bench:capi measures in C++ and in C.
//
//	./bazelw run -c opt //bench:capi_go            # a table, over the same calls in C++
//	./bazelw run -c opt //bench:capi_go -- --json  # one line
//
// One rank, one thread. C++ and Go take turns, five times, each in a process of its own, for where its code and memory
// come to lie makes a tenth of a microsecond; the figures are the least of what calls take undisturbed, of the fastest
// tenth the slowest, as //bench:capi has it. Each call frees its result, by Close: the dearest way (a World.Scope is
// cheaper).
// What the garbage collector does on other threads is not in the figures.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"sort"
	"syscall"
	"testing"
	"unsafe"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

const boundUs = 0.7

type operator struct {
	Name          string   `json:"name"`
	GoUs          float64  `json:"go_us"`
	CppUs         *float64 `json:"cpp_us,omitempty"`
	OverheadUs    *float64 `json:"overhead_us,omitempty"`
	GoAllocations float64  `json:"go_allocations"` // one is the result
}

// cpu is microseconds of this thread.
func cpu() float64 {
	const threadClock = 3 // CLOCK_THREAD_CPUTIME_ID
	var now syscall.Timespec
	if _, _, errno := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, threadClock, uintptr(unsafe.Pointer(&now)), 0); errno != 0 {
		panic(errno)
	}
	return float64(now.Sec)*1e6 + float64(now.Nsec)/1e3
}

func measure(name string, call func() *sw.Tensor) operator {
	const batches, calls = 201, 300
	var times []float64
	for batch := -1; batch < batches; batch++ {
		start := cpu()
		for i := 0; i < calls; i++ {
			call().Close()
		}
		if batch >= 0 { // the first warms up
			times = append(times, (cpu()-start)/calls)
		}
	}
	sort.Float64s(times)
	result := call()
	if err := result.Err(); err != nil {
		panic(err)
	}
	result.Close()
	return operator{Name: name, GoUs: times[batches/10], GoAllocations: testing.AllocsPerRun(100, func() { call().Close() })}
}

func measureOn(what string, where sw.Place, options ...sw.TensorOption) []operator {
	x, y := sw.Randn(where, []int64{8, 8}, options...), sw.Randn(where, []int64{8, 8}, options...)
	z := sw.Randn(where, []int64{8}, options...)
	add, mm, addcmul := sw.MustFindOp("aten::add"), sw.MustFindOp("aten::mm"), sw.MustFindOp("aten::addcmul")
	list := []*sw.Tensor{x, y}
	return []operator{
		measure(what+"add", func() *sw.Tensor { return x.Add(y) }),
		measure(what+"add, all overloads", func() *sw.Tensor { return add.Tensor(where, x, y) }),
		measure(what+"mul by a number", func() *sw.Tensor { return x.Mul(2.0) }),
		measure(what+"mm", func() *sw.Tensor { return mm.Tensor(where, x, y) }),
		measure(what+"linear with bias", func() *sw.Tensor { return x.Linear(y, z) }),
		measure(what+"sum over a dimension", func() *sw.Tensor { return x.Sum(1) }),
		measure(what+"cat of two", func() *sw.Tensor { return sw.Cat(list, 0) }),
		measure(what+"addcmul, 4 arguments", func() *sw.Tensor { return addcmul.Tensor(where, x, x, y, 0.5) }),
	}
}

// round measures all operators in Go, in this process.
func round() ([]operator, error) {
	runtime.LockOSThread()
	if err := sw.SetNumThreads(1); err != nil {
		return nil, err
	}
	w, err := sw.Alone()
	if err != nil {
		return nil, err
	}
	defer w.Close()
	m, err := w.ParseMesh("x=1")
	if err != nil {
		return nil, err
	}
	var all []operator
	err = w.With(sw.NoGrad, func() error {
		all = append(measureOn("plain: ", w), measureOn("sharded: ", m, sw.MustParseLayout("[R]"))...)
		return nil
	})
	return all, err
}

// fromProcess is what a program prints of operators, as JSON.
func fromProcess(program string, arguments ...string) ([]operator, error) {
	text, err := exec.Command(program, arguments...).Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", program, err)
	}
	var report struct{ Operators []operator }
	err = json.Unmarshal(text, &report)
	return report.Operators, err
}

func least(a, b *float64) *float64 {
	if a == nil || b != nil && *b < *a {
		return b
	}
	return a
}

func run() error {
	asJSON := flag.Bool("json", false, "print one line of JSON")
	cpp := flag.String("cpp", "", "the program //bench:capi, to compare with")
	once := flag.Bool("once", false, "measure Go in this process, once")
	flag.Parse()
	var report struct {
		BoundUs         float64    `json:"bound_us"`
		Operators       []operator `json:"operators"`
		WorstOverheadUs *float64   `json:"worst_overhead_us,omitempty"`
	}
	report.BoundUs = boundUs
	if *once {
		var err error
		if report.Operators, err = round(); err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(report)
	}
	this, err := os.Executable()
	if err != nil {
		return err
	}
	const rounds = 5
	for i := 0; i < rounds; i++ {
		ours, err := fromProcess(this, "--once")
		if err != nil {
			return err
		}
		if i == 0 {
			report.Operators = ours
		}
		cppUs := map[string]*float64{}
		if *cpp != "" {
			theirs, err := fromProcess(*cpp, "--json")
			if err != nil {
				return err
			}
			for _, op := range theirs {
				cppUs[op.Name] = op.CppUs
			}
		}
		for k := range ours {
			op := &report.Operators[k]
			op.GoUs = math.Min(op.GoUs, ours[k].GoUs)
			us := cppUs[op.Name]
			if us == nil && *cpp != "" {
				return fmt.Errorf("%s has no '%s'", *cpp, op.Name)
			}
			op.CppUs = least(op.CppUs, us)
		}
	}
	if *cpp != "" {
		worst := math.Inf(-1)
		for i := range report.Operators {
			op := &report.Operators[i]
			over := op.GoUs - *op.CppUs
			op.OverheadUs, worst = &over, math.Max(worst, over)
		}
		report.WorstOverheadUs = &worst
	}
	if *asJSON {
		return json.NewEncoder(os.Stdout).Encode(report)
	}
	for _, op := range report.Operators {
		fmt.Printf("%-32s Go %7.3f us  allocations %v", op.Name, op.GoUs, op.GoAllocations)
		if op.CppUs != nil {
			fmt.Printf("  C++ %7.3f us  over %6.3f us", *op.CppUs, *op.OverheadUs)
		}
		fmt.Println()
	}
	if report.WorstOverheadUs != nil {
		fmt.Printf("worst: %.3f us (bound %.1f)\n", *report.WorstOverheadUs, boundUs)
	}
	return nil
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "capi:", err)
		os.Exit(1)
	}
}
