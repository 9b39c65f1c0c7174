// Command train_gpt trains a byte-level GPT on a text, sharded over ranks that are goroutines or
// processes.
//
//	go run ./examples/train_gpt
//	go run ./examples/train_gpt --mesh=dp=1,tp=4 --backend=gloo --data=book.txt --check
//
// It is the C++ example (examples/train_gpt in the repository) in Go: the same flags, weights, batches
// and losses. Here: the command line and the backends. The model is in model.go, how it is sharded and
// trained in training.go.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

const (
	exitFailed = 1
	exitUsage  = 2
)

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	s, err := parseSettings(args)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		return fail("train_gpt", err, exitUsage)
	}
	ctx, end := s.stop.Context()
	defer end()
	switch s.backend {
	case "inproc":
		return runGoroutines(ctx, s)
	case "gloo":
		return runProcesses(ctx, s)
	}
	w, err := sw.FromEnvironment(ctx, sw.WithTimeout(s.timeout))
	switch {
	case err == nil:
		defer w.Close()
		return runProcess(w, s)
	case !errors.Is(err, sw.NotFound):
		return fail("train_gpt, joining the other ranks", err, exitFailed)
	default:
		return runGoroutines(ctx, s)
	}
}

func fail(who string, err error, code int) int {
	fmt.Fprintf(os.Stderr, "%s: %v\n", who, err)
	return code
}

// runGoroutines makes each rank a goroutine of this process.
func runGoroutines(ctx context.Context, s *settings) int {
	err := sw.RunRanks(ctx, s.ranks(), func(w *sw.World) error { return runRank(w, s) }, sw.WithTimeout(s.timeout))
	if err != nil {
		return fail("train_gpt", err, exitFailed)
	}
	return 0
}

// runProcesses makes each rank a process of this machine.
func runProcesses(ctx context.Context, s *settings) int {
	body := func(w *sw.World) error { return runRank(w, s) }
	if err := sw.Spawn(ctx, s.ranks(), body, sw.WithTimeout(s.timeout), sw.WithoutPrefix()); err != nil {
		return fail("train_gpt", err, exitFailed)
	}
	return 0
}

// runProcess is one rank, which a launcher has started.
func runProcess(w *sw.World, s *settings) int {
	who := fmt.Sprintf("train_gpt, rank %d of %d", w.Rank(), w.Size())
	if s.ranks() != w.Size() {
		return fail(who, fmt.Errorf("--mesh has %d ranks, but %d were started", s.ranks(), w.Size()), exitUsage)
	}
	if err := runRank(w, s); err != nil {
		w.Abort(err)
		return fail(who, err, exitFailed)
	}
	return 0
}
