package shardweave_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

func TestMetricsOfARun(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run.jsonl")
	log := mustOf(sw.OpenJSONLines(path))
	var all sync.WaitGroup
	for i := 0; i < 4; i++ {
		all.Add(1)
		go func() {
			defer all.Done()
			if err := log.Write(10, sw.Metric{Name: "loss", Value: 2.5}, sw.Metric{Name: "lr", Value: 3e-4}); err != nil {
				t.Error(err)
			}
		}()
	}
	all.Wait()
	lines := bytes.Split(bytes.TrimSpace(mustOf(os.ReadFile(path))), []byte("\n"))
	if len(lines) != 4 {
		t.Fatalf("%d lines", len(lines))
	}
	var line struct {
		Step     int64
		Loss, LR float64
	}
	if err := json.Unmarshal(lines[3], &line); err != nil || line.Step != 10 || line.Loss != 2.5 || line.LR != 3e-4 {
		t.Errorf("%s: %v", lines[3], err)
	}
	err := log.Write(11, sw.Metric{Name: "step", Value: 1})
	if !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "MetricsWriter.Write: ") {
		t.Error(err)
	}
	if _, err := sw.OpenJSONLines("/dev/null/x"); !errors.Is(err, sw.FailedPrecondition) {
		t.Error(err)
	}

	folder := filepath.Join(t.TempDir(), "events")
	events := mustOf(sw.CreateEventFile(folder, 0))
	if err := events.Write(10, sw.Metric{Name: "loss", Value: 2.5}); err != nil {
		t.Fatal(err)
	}
	if err := events.Flush(); err != nil {
		t.Fatal(err)
	}
	files := mustOf(filepath.Glob(filepath.Join(folder, "*tfevents*")))
	if len(files) != 1 || !bytes.Contains(mustOf(os.ReadFile(files[0])), []byte("loss")) {
		t.Errorf("%v", files)
	}
}

func TestRanksEndTogether(t *testing.T) {
	ctx := context.Background()
	err := sw.RunRanks(ctx, 3, func(w *sw.World) error {
		for step := 0; ; step++ {
			ends, err := sw.AnyRank(ctx, w.Comm(), w.Rank() == 1 && step == 2)
			if err != nil || ends != (step == 2) {
				t.Errorf("rank %d, step %d: %v, %v", w.Rank(), step, ends, err)
			}
			if ends || err != nil {
				return err
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestGracefulStop(t *testing.T) {
	told := func() {
		if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
			t.Fatal(err)
		}
	}
	var stop sw.GracefulStop
	ctx, end := stop.Context()
	defer end()
	stop.Training(true)
	var ended [3]int
	err := sw.RunRanks(ctx, 3, func(w *sw.World) error {
		for step := 1; ; step++ {
			if w.Rank() == 2 && step == 2 {
				told()
			}
			ends, err := stop.StepDone(w)
			if ends || err != nil {
				ended[w.Rank()] = step
				return err
			}
			time.Sleep(time.Millisecond)
		}
	})
	if err != nil || ended[0] < 2 || ended[0] != ended[1] || ended[0] != ended[2] || ctx.Err() != nil {
		t.Errorf("%v, after steps %v, %v", err, ended, ctx.Err())
	}
	// Nothing is saved, so nothing is waited for.
	stop.Training(false)
	told()
	select {
	case <-ctx.Done():
	case <-time.After(time.Minute):
		t.Error("a run that saves nothing goes on")
	}
}
