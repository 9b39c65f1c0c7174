package shardweave_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// Programs that call Spawn: this test program, once more.
const spawnTestEnv = "SHARDWEAVE_TEST_SPAWN"

// spawnMain prints what Spawn returns.
func spawnMain(mode string) int {
	ctx, cancel := context.WithTimeout(background, time.Minute)
	defer cancel()
	sum := func(w *sw.World) ([]int64, error) {
		sum := []int64{int64(w.Rank())}
		return sum, sw.AllReduce(ctx, w.Comm(), sum, sum, sw.Sum)
	}
	ranks := 3
	var body func(w *sw.World) error
	options := []sw.WorldOption{sw.WithBackend("gloo"), sw.WithTimeout(30 * time.Second)}
	switch mode {
	case "works":
		body = func(w *sw.World) error {
			total, err := sum(w)
			backend, _ := w.Comm().Backend()
			fmt.Printf("rank %d of %d, %d here, %s: %v\nhalf a line", w.Rank(), w.Size(), w.LocalRank(), backend, total)
			return err
		}
	case "no prefix":
		ranks, options = 1, append(options, sw.WithoutPrefix())
		body = func(*sw.World) error { fmt.Println("plain"); return nil }
	case "arguments":
		ranks, options = 1, append(options, sw.WithArgs("one", "two words"))
		body = func(*sw.World) error { fmt.Printf("%q\n", os.Args[1:]); return nil }
	case "again": // under a launcher
		first := sw.Spawn(ctx, ranks, func(w *sw.World) error { _, err := sum(w); return err }, options...)
		fmt.Println("before:", first)
		body = func(w *sw.World) error { fmt.Println("a body runs"); return nil }
	case "twice":
		// A rank of the second call passes over the first, which failed.
		first := sw.Spawn(ctx, 2, func(w *sw.World) error {
			if w.Rank() == 1 {
				return errors.New("no more paper")
			}
			return w.Comm().Barrier(ctx)
		}, options...)
		body = func(w *sw.World) error {
			fmt.Println("before:", first)
			if err := sw.Spawn(ctx, 2, func(*sw.World) error { return nil }); !errors.Is(err, sw.FailedPrecondition) {
				return fmt.Errorf("a rank that starts ranks: %v", err)
			}
			_, err := sum(w)
			return err
		}
	case "fails":
		body = func(w *sw.World) error {
			if w.Rank() == 1 {
				return fmt.Errorf("counting: %w", &sw.Error{Code: sw.OutOfRange, Message: "no more paper"})
			}
			return w.Comm().Barrier(ctx)
		}
	case "panics":
		body = func(w *sw.World) error {
			if w.Rank() == 2 {
				whatPanics()
			}
			return w.Comm().Barrier(ctx)
		}
	case "ends":
		body = func(w *sw.World) error {
			if w.Rank() == 2 {
				runtime.Goexit()
			}
			return w.Comm().Barrier(ctx)
		}
	case "exits":
		body = func(w *sw.World) error {
			if w.Rank() == 0 {
				os.Exit(7)
			}
			return w.Comm().Barrier(ctx)
		}
	case "exits with 0": // which is no success
		body = func(w *sw.World) error {
			if w.Rank() == 0 {
				os.Exit(0)
			}
			return w.Comm().Barrier(ctx)
		}
	case "does not come":
		if os.Getenv("RANK") != "" {
			return 0
		}
		ranks = 1
	case "ignores children": // so that there is nothing to wait for
		signal.Ignore(syscall.SIGCHLD)
		body = func(w *sw.World) error {
			_, err := sum(w)
			return err
		}
	case "ignores children that fail":
		signal.Ignore(syscall.SIGCHLD)
		body = func(w *sw.World) error {
			if w.Rank() == 1 {
				os.Exit(3)
			}
			return w.Comm().Barrier(ctx)
		}
	case "has children": // which are no ranks, and start some
		ranks = 2
		child := func() {
			out, err := spawning("no prefix").Output()
			fmt.Printf("%s%v\n", out, err)
		}
		if os.Getenv("RANK") == "1" {
			child()
		}
		body = func(w *sw.World) error {
			if w.Rank() == 0 {
				child()
			}
			return w.Comm().Barrier(ctx)
		}
	case "after many failures":
		ranks = 1
		failures := make([]error, 200)
		for i := range failures {
			if os.Getenv("SHARDWEAVE_SPAWN") == "" { // a rank gets these errors from the first process
				os.Setenv("RANK", strings.Repeat("no number ", 200))
				os.Setenv("WORLD_SIZE", "1")
			}
			failures[i] = sw.Spawn(ctx, 1, func(*sw.World) error { return nil })
		}
		if os.Getenv("SHARDWEAVE_SPAWN") == "" {
			os.Unsetenv("RANK")
			os.Unsetenv("WORLD_SIZE")
		}
		body = func(w *sw.World) error {
			for i, err := range failures {
				if err == nil || !strings.Contains(err.Error(), "RANK") || len(err.Error()) > 500 {
					return fmt.Errorf("failure %d: %v", i, err)
				}
			}
			return nil
		}
	case "remembers panics":
		ranks = 1
		first := sw.Spawn(ctx, 1, func(*sw.World) error { whatPanics(); return nil }, options...)
		body = func(w *sw.World) error { fmt.Println("before:", first); return nil }
	case "killed":
		body = func(w *sw.World) error {
			if err := w.Comm().Barrier(ctx); err != nil {
				return err
			}
			if w.Rank() == 1 {
				syscall.Kill(os.Getpid(), syscall.SIGKILL)
			}
			return w.Comm().Barrier(ctx)
		}
	case "hangs": // and hears nothing
		body = func(w *sw.World) error {
			if w.Rank() == 1 {
				return errors.New("no more paper")
			}
			select {}
		}
	case "canceled":
		short, stop := context.WithCancel(ctx)
		time.AfterFunc(2*time.Second, stop)
		defer stop()
		ctx = short
		body = func(w *sw.World) error { select {} }
	case "orphans":
		body = func(w *sw.World) error {
			fmt.Printf("pid %d\n", os.Getpid())
			time.Sleep(time.Minute)
			return nil
		}
	case "no ranks":
		ranks = 0
	}
	if body == nil {
		body = func(*sw.World) error { return nil }
	}
	start := time.Now()
	err := sw.Spawn(ctx, ranks, body, options...)
	fmt.Printf("after %v: %v\n", time.Since(start) < 40*time.Second, err)
	for code, name := range map[sw.Code]string{sw.OutOfRange: "out of range", sw.InvalidArgument: "invalid"} {
		if errors.Is(err, code) {
			fmt.Println("it is", name)
		}
	}
	if errors.Is(err, context.Canceled) {
		fmt.Println("it is canceled")
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		fmt.Println("it is", exit)
	}
	return 0
}

func spawning(mode string, env ...string) *exec.Cmd {
	program := exec.Command(os.Args[0], "-argument")
	program.Env = append(append(os.Environ(), spawnTestEnv+"="+mode), env...)
	return program
}

func sorted(text string) []string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	sort.Strings(lines)
	return lines
}

// Two tests that spawn ranks of their own, as a program's tests do: in one process here.
const spawnTestsEnv = "SHARDWEAVE_TEST_SPAWN_IN_TESTS"

func spawnInTest(t *testing.T, say string) {
	if os.Getenv(spawnTestsEnv) == "" {
		t.Skip("for TestSpawnInTests")
	}
	for i := 0; i < 2; i++ {
		if err := sw.Spawn(background, 2, func(w *sw.World) error {
			fmt.Printf("%s: %d of %d, %d\n", say, w.Rank(), w.Size(), i)
			return nil
		}, sw.WithArgs("-test.run=^"+t.Name()+"$"), sw.WithoutPrefix()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSpawnInFirstTest(t *testing.T)  { spawnInTest(t, "first") }
func TestSpawnInSecondTest(t *testing.T) { spawnInTest(t, "second") }

func TestSpawnInTests(t *testing.T) {
	program := exec.Command(os.Args[0], "-test.run=^(TestSpawnInFirstTest|TestSpawnInSecondTest)$", "-test.count=1")
	program.Env = append(os.Environ(), spawnTestsEnv+"=1")
	out, err := program.CombinedOutput()
	if err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
	for _, test := range []string{"first", "second"} {
		for rank := 0; rank < 2; rank++ {
			for i := 0; i < 2; i++ {
				if want := fmt.Sprintf("%s: %d of 2, %d\n", test, rank, i); strings.Count(string(out), want) != 1 {
					t.Errorf("%q is there %d times in\n%s", want, strings.Count(string(out), want), out)
				}
			}
		}
	}
}

func TestSpawn(t *testing.T) {
	for mode, want := range map[string][]string{
		"works": {"[0] half a line", "[0] rank 0 of 3, 0 here, gloo: [3]", "[1] half a line", "[1] rank 1 of 3, 1 here, gloo: [3]",
			"[2] half a line", "[2] rank 2 of 3, 2 here, gloo: [3]", "after true: <nil>"},
		"no prefix": {"after true: <nil>", "plain"},
		"arguments": {`[0] ["one" "two words"]`, "after true: <nil>"},
		"twice": {"[0] before: rank 1: no more paper", "[1] before: rank 1: no more paper", "[2] before: rank 1: no more paper",
			"after true: <nil>"},
		"fails":            {"after true: rank 1: counting: OUT_OF_RANGE: no more paper", "it is out of range"},
		"ends":             {"after true: rank 2: the goroutine ended"},
		"exits":            {"after true: rank 0: the process (pid #) ended with exit status 7", "it is exit status 7"},
		"exits with 0":     {"after true: rank 0: FAILED_PRECONDITION: Spawn: the process (pid #) ended with exit status 0 before the body had returned"},
		"does not come":    {"after true: rank 0: FAILED_PRECONDITION: Spawn: the process (pid #) ended with exit status 0 before the body had returned"},
		"ignores children": {"after true: <nil>"},
		"ignores children that fail": {"after true: rank 1: FAILED_PRECONDITION: Spawn: the process (pid #) ended with an unknown status " +
			"(wait: no child processes) before the body had returned"},
		"has children":        {"[0] <nil>", "[0] after true: <nil>", "[0] plain", "[1] <nil>", "[1] after true: <nil>", "[1] plain", "after true: <nil>"},
		"after many failures": {"after true: <nil>"},
		"remembers panics":    {"[0] before: rank 0: panic: oh", "after true: <nil>"},
		"killed":              {"after true: rank 1: the process (pid #) was killed by signal 9 (killed)", "it is signal: killed"},
		"hangs":               {"after true: rank 1: no more paper"},
		"canceled":            {"after true: context canceled", "it is canceled"},
		"no ranks":            {"after true: INVALID_ARGUMENT: Spawn: argument 'ranks' is 0; wanted 1 to 4096", "it is invalid"},
	} {
		mode, want := mode, want
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			out, err := spawning(mode).Output()
			got := sorted(strings.ReplaceAll(string(out), "pid "+between(string(out), "pid ", ")"), "pid #"))
			for i := range got {
				got[i] = strings.Replace(got[i], "(waitid: ", "(wait: ", 1) // a newer Go
			}
			if err != nil || strings.Join(got, "\n") != strings.Join(want, "\n") {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

// between is the text between two others, or "".
func between(text, before, after string) string {
	_, text, found := strings.Cut(text, before)
	if text, _, ends := strings.Cut(text, after); found && ends {
		return text
	}
	return "nothing"
}

func TestSpawnTellsPanics(t *testing.T) {
	out, err := spawning("panics").Output()
	if text := string(out); err != nil || !strings.Contains(text, "after true: rank 2: panic: oh\n") || !strings.Contains(text, "shardweave_test.whatPanics") {
		t.Errorf("%v: %s", err, out)
	}
}

func TestSpawnUnderALauncher(t *testing.T) {
	for _, c := range []struct {
		mode string
		size int
		want string
	}{
		{"works", 3, "rank %[1]d of 3, %[1]d here, gloo: [3]\nhalf a lineafter true: <nil>\n"},
		{"works", 2, "argument 'ranks' is 3, but a launcher has started 2\n"}, // one rank may hear of it from the other
		{"again", 3, "before: <nil>\nafter true: FAILED_PRECONDITION: Spawn: a launcher has started this process, and its ranks have met"},
	} {
		port := strconv.Itoa(mustOf(freePort()))
		programs, outs := make([]*exec.Cmd, c.size), make([]bytes.Buffer, c.size)
		for rank := range programs {
			programs[rank] = spawning(c.mode, "RANK="+strconv.Itoa(rank), "LOCAL_RANK="+strconv.Itoa(rank),
				"WORLD_SIZE="+strconv.Itoa(c.size), "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port)
			programs[rank].Stdout = &outs[rank]
			if err := programs[rank].Start(); err != nil {
				t.Fatal(err)
			}
		}
		for rank, program := range programs {
			want := c.want
			if strings.Contains(want, "%") {
				want = fmt.Sprintf(want, rank)
			}
			if err := program.Wait(); err != nil || !strings.Contains(outs[rank].String(), want) {
				t.Errorf("%s, %d: %v: %s", c.mode, c.size, err, &outs[rank])
			}
		}
	}
}

// Ranks end with the program that has started them, though it is killed.
func TestNoRankIsLeft(t *testing.T) {
	program := spawning("orphans")
	out := mustOf(program.StdoutPipe())
	if err := program.Start(); err != nil {
		t.Fatal(err)
	}
	var text []byte
	for strings.Count(string(text), "\n") < 3 {
		buffer := make([]byte, 256)
		n, err := out.Read(buffer)
		if err != nil {
			t.Fatal(err)
		}
		text = append(text, buffer[:n]...)
	}
	program.Process.Kill()
	program.Wait()
	for _, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
		pid := mustOf(strconv.Atoi(line[strings.LastIndex(line, " ")+1:]))
		for end := time.Now().Add(10 * time.Second); syscall.Kill(pid, 0) == nil && !isZombie(pid); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				syscall.Kill(pid, syscall.SIGKILL)
				t.Fatalf("%s is left", line)
			}
		}
	}
}

// isZombie: whoever has it now may not wait for it.
func isZombie(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

// A program that runs as four processes. (As an example of a test it does not run: a test program that starts
// itself would begin with all of its tests.)
func ExampleSpawn() {
	err := sw.Spawn(context.Background(), 4, func(w *sw.World) error {
		mesh, err := w.ParseMesh("dp=4")
		if err != nil {
			return err
		}
		x := sw.Ones(mesh, []int64{8, 6}, sw.On{"dp": "S(0)"})
		sum, err := x.Sum().Item()
		fmt.Println(w.Rank(), "of", w.Size(), "has", x, sum)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}
