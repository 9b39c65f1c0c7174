package shardweave_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

const told = "aten::_aminmax has no sharding rule"

// gather makes the library say so.
func gather(t *testing.T) {
	t.Helper()
	w := alone(t)
	x := sw.Ones(mustOf(w.ParseMesh("x=1")), []int64{3, 3}, sw.On{"x": "S(0)"})
	if _, err := sw.MustFindOp("aten::_aminmax").Call(w, x); err != nil {
		t.Fatal(err)
	}
}

// toStderr is what the process writes there meanwhile, whoever writes it.
func toStderr(t *testing.T, body func()) string {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	before, err := syscall.Dup(2)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Dup3(int(w.Fd()), 2, 0); err != nil {
		t.Fatal(err)
	}
	text := make(chan string)
	go func() {
		all, _ := io.ReadAll(r)
		text <- string(all)
	}()
	func() {
		defer func() {
			syscall.Dup3(before, 2, 0)
			syscall.Close(before)
			w.Close()
		}()
		body()
	}()
	return <-text
}

func TestLog(t *testing.T) {
	defer sw.SetLog(nil)
	var mutex sync.Mutex
	var lines []string
	set := func(log func(string)) {
		t.Helper()
		if err := sw.SetLog(log); err != nil {
			t.Fatal(err)
		}
	}
	set(func(line string) {
		mutex.Lock()
		defer mutex.Unlock()
		lines = append(lines, line)
	})
	if text := toStderr(t, func() { gather(t) }); text != "" {
		t.Errorf("to stderr all the same: %q", text)
	}
	heard := 0
	for _, line := range lines {
		if strings.HasPrefix(line, told) {
			heard++
		}
		if strings.Contains(line, "\n") {
			t.Errorf("more than a line: %q", line)
		}
	}
	if heard != 1 {
		t.Errorf("%q", lines)
	}
	// What was set before hears no more. Panics stay on this side, and the line is not lost.
	before := len(lines)
	set(func(string) { panic("in the log") })
	text := toStderr(t, func() { gather(t) })
	if len(lines) != before || strings.Count(text, "shardweave: "+told) != 1 || !strings.Contains(text, "shardweave: the function that SetLog was given panicked: in the log\n") {
		t.Errorf("%q, %q", lines[before:], text)
	}
	set(nil)
	if text := toStderr(t, func() { gather(t) }); strings.Count(text, "shardweave: "+told) != 1 {
		t.Errorf("%q", text)
	}
}

func TestHandleChecks(t *testing.T) {
	set := func(checks sw.HandleChecks) {
		t.Helper()
		if err := sw.SetHandleChecks(checks); err != nil {
			t.Fatal(err)
		}
	}
	defer set(sw.ChecksAbort) // of TestMain
	if sw.LiveHandles() < 0 {
		t.Error("a test before has switched them off")
	}
	set(sw.ChecksReport)
	before := settledHandles()
	w, err := sw.Alone()
	if err != nil {
		t.Fatal(err)
	}
	if sw.LiveHandles() <= before {
		t.Errorf("%d handles, as before", sw.LiveHandles())
	}
	set(sw.ChecksOff)
	if now := sw.LiveHandles(); now != -1 {
		t.Errorf("%d handles, without checks", now)
	}
	w.Close() // leaves the table all the same
	set(sw.ChecksReport)
	if now := sw.LiveHandles(); now > before {
		t.Errorf("%d handles are left", now-before)
	}
	if err := sw.SetHandleChecks(7); err == nil || err.Error() != "INVALID_ARGUMENT: SetHandleChecks: argument 'checks' is 7; wanted a HandleChecks, 0 to 2" {
		t.Error(err)
	}
}

func TestErrorsHaveTheirRank(t *testing.T) {
	var heard sync.Map
	err := sw.RunRanks(background, 3, func(w *sw.World) error {
		if w.Rank() == 1 {
			return &sw.Error{Code: sw.DataLoss, Message: "gone bad"}
		}
		err := w.Comm().Barrier(background)
		rank, known := sw.RankOf(fmt.Errorf("in front: %w", err))
		heard.Store(w.Rank(), [2]any{rank, known})
		return err
	})
	if rank, known := sw.RankOf(err); !errors.Is(err, sw.DataLoss) || rank != 1 || !known || err.Error() != "rank 1: DATA_LOSS: gone bad" {
		t.Error(rank, known, err)
	}
	for _, number := range []int{0, 2} {
		if got, _ := heard.Load(number); got != [2]any{1, true} {
			t.Errorf("rank %d has heard of %v", number, got)
		}
	}
	own := sw.Ones(alone(t), []int64{-1}).Err()
	for _, err := range []error{own, &sw.Error{Code: sw.Aborted}, errors.New("none of ours"), nil} {
		if rank, known := sw.RankOf(err); known || rank != -1 {
			t.Errorf("%v is of rank %d", err, rank)
		}
	}
	func() {
		defer func() {
			if rank, known := sw.RankOf(recover().(*sw.Panic)); rank != 2 || !known {
				t.Error(rank, known)
			}
		}()
		sw.RunRanks(background, 3, func(w *sw.World) error {
			if w.Rank() == 2 {
				panic("at the disco")
			}
			return w.Comm().Barrier(background)
		})
	}()
}
