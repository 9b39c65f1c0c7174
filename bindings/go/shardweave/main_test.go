package shardweave_test

import (
	"context"
	"math"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

func TestMain(m *testing.M) {
	if err := sw.SetHandleChecks(sw.ChecksAbort); err != nil {
		panic(err)
	}
	if os.Getenv(processEnv) != "" {
		os.Exit(processMain())
	}
	if mode := os.Getenv(spawnTestEnv); mode != "" {
		os.Exit(spawnMain(mode))
	}
	os.Exit(m.Run())
}

var background = context.Background()

// run runs ranks, which must succeed.
func run(t *testing.T, ranks int, body func(*sw.World) error) {
	t.Helper()
	if err := sw.RunRanks(background, ranks, body); err != nil {
		t.Fatal(err)
	}
}

// alone is a world of one rank, until the test ends.
func alone(t testing.TB) *sw.World {
	t.Helper()
	w, err := sw.Alone()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

// numbers is 0.1, 0.2, ...
func numbers(n int64) []float64 {
	all := make([]float64, n)
	for i := range all {
		all[i] = 0.1 * float64(i+1)
	}
	return all
}

// checkLeaks fails if the body leaves handles. It runs twice: operators are looked up once, and kept.
func checkLeaks(t *testing.T, body func()) {
	t.Helper()
	body()
	before := settledHandles()
	body()
	for i := 0; i < 200 && sw.LiveHandles() > before; i++ {
		runtime.GC() // layouts and plans are garbage
		time.Sleep(time.Millisecond)
	}
	if now := sw.LiveHandles(); now > before {
		t.Errorf("%d handles are left", now-before)
	}
}

// collectGarbage waits for what ends garbage.
func collectGarbage() {
	swept := make(chan struct{})
	runtime.SetFinalizer(&[]byte{0}, func(*[]byte) { close(swept) })
	runtime.GC()
	<-swept
	time.Sleep(time.Millisecond)
}

// settledHandles is how many handles live when the garbage of the tests before is gone: what ends a closed
// world's garbage may run at any time.
func settledHandles() int64 {
	now, since := sw.LiveHandles(), 0
	for since < 3 {
		collectGarbage()
		last := now
		if now = sw.LiveHandles(); now == last {
			since++
		} else {
			since = 0
		}
	}
	return now
}

// mustOf panics on an error.
func mustOf[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func near(a, b []float64) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !(math.Abs(a[i]-b[i]) <= 1e-9*(1+math.Abs(b[i]))) {
			return false
		}
	}
	return true
}

// freePort was free a moment ago.
func freePort() (int, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port, nil
}

// whole is all elements, on every rank.
func whole(t *sw.Tensor) ([]float64, error) { return sw.Data[float64](t.Full()) }
