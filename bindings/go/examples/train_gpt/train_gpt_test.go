package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const asProgram = "TRAIN_GPT_TEST_IS_PROGRAM"

// The test program is the program too.
func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

// small is a training of a second; its sizes divide by nothing much.
var small = []string{"--steps=5", "--layers=2", "--dim=28", "--heads=4", "--batch=6", "--seq=11", "--sample=9"}

type program struct {
	*exec.Cmd
	out, err output
}

// output can be read while it is written.
type output struct {
	mutex sync.Mutex
	bytes bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	return o.bytes.Write(p)
}

func (o *output) String() string {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	return o.bytes.String()
}

// untilItTrains waits for the first step.
func (p *program) untilItTrains(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !strings.Contains(p.out.String(), "1/1000000"); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it does not train: %s, %s", &p.out, &p.err)
		}
	}
}

func start(t *testing.T, name string, args, env []string) *program {
	t.Helper()
	p := &program{Cmd: exec.Command(name, args...)}
	// Chosen here, or a rank says on stderr what it chooses, and in C++ the launcher does, in other words.
	p.Env = append([]string{asProgram + "=1", "OMP_NUM_THREADS=1"}, env...)
	for _, variable := range os.Environ() { // a launcher around this test says nothing about the ranks in it
		switch name := strings.SplitN(variable, "=", 2)[0]; name {
		case "RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "OMP_NUM_THREADS":
		default:
			p.Env = append(p.Env, variable)
		}
	}
	p.Stdout, p.Stderr = &p.out, &p.err
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	return p
}

func with(more ...string) []string { return append(append([]string(nil), small...), more...) }

type result struct {
	Ranks           int
	FirstLoss       float64  `json:"first_loss"`
	LastLoss        float64  `json:"last_loss"`
	TokensPerSecond float64  `json:"tokens_per_second"`
	MaxLossDiff     *float64 `json:"max_loss_diff"`
}

// trained is the line of JSON, which is all of stdout, and what was said on the way, without the speed.
func trained(t *testing.T, program string, args ...string) (result, string) {
	t.Helper()
	p := start(t, program, with(append(args, "--json")...), nil)
	if err := p.Wait(); err != nil {
		t.Fatalf("%v: %v\n%s", args, err, &p.err)
	}
	var r result
	if err := json.Unmarshal([]byte(p.out.String()), &r); err != nil {
		t.Fatalf("%v: %v: %s", args, err, &p.out)
	}
	// The table of collectives has a column more in C++: where in the program.
	text := p.err.String()
	for _, differs := range []string{`  \d+ tokens/s .*`, `\S+\.(?:cc|go):\d+`, ` +source`, `largest difference .*`, ` +(?:\n|$)`} {
		text = regexp.MustCompile(differs).ReplaceAllString(text, "\n")
	}
	return r, regexp.MustCompile(`\n+`).ReplaceAllString(text, "\n")
}

func TestTheLossesAreThoseOfCpp(t *testing.T) {
	cpp := os.Getenv("SHARDWEAVE_TRAIN_GPT")
	if cpp == "" {
		t.Skip("SHARDWEAVE_TRAIN_GPT does not name the C++ program; Bazel's test does")
	}
	for _, args := range [][]string{
		{"--mesh=dp=2,tp=2", "--check"},
		{"--mesh=tp=3", "--seed=7", "--lr=0.01"},
		{"--mesh=dp=1,tp=1", "--sample=0"},
		{"--mesh=dp=2", "--backend=gloo"},
		{"--parallel=zero2", "--check"},
		{"--parallel=fsdp", "--mesh=dp=3"},
		{"--parallel=fsdp+tp"},
		{"--parallel=hsdp"},
	} {
		want, wantText := trained(t, cpp, args...)
		got, text := trained(t, os.Args[0], args...)
		// The first step is the same to the last bit. Then the optimizers round differently.
		if got.FirstLoss != want.FirstLoss || math.Abs(got.LastLoss-want.LastLoss) > 1e-6*want.LastLoss || got.Ranks != want.Ranks {
			t.Errorf("%v: %+v, in C++ %+v", args, got, want)
		}
		if text != wantText { // layouts, the losses of all steps to three digits, traffic, the sample
			t.Errorf("%v:\n%s\nin C++:\n%s", args, text, wantText)
		}
	}
}

func TestSameLossesOnEveryMesh(t *testing.T) {
	for mesh, ranks := range map[string]int{"dp=2,tp=2": 4, "tp=2,dp=2": 4, "dp=1,tp=4": 4, "dp=3": 3, "tp=1": 1} {
		r, _ := trained(t, os.Args[0], "--check", "--mesh="+mesh)
		if r.Ranks != ranks || !(*r.MaxLossDiff <= 1e-5) || !(r.LastLoss < r.FirstLoss) || !(r.TokensPerSecond > 0) {
			t.Errorf("%s: %+v, %v", mesh, r, *r.MaxLossDiff)
		}
	}
}

func TestSameLossesHoweverParametersAreKept(t *testing.T) {
	for _, args := range [][]string{{"--parallel=zero1"}, {"--parallel=zero2", "--mesh=dp=3"}, {"--parallel=fsdp"}, {"--parallel=fsdp", "--mesh=dp=2", "--backend=gloo"},
		{"--parallel=fsdp+tp", "--mesh=tp=2,dp=3"}, {"--parallel=hsdp"}, {"--parallel=hsdp", "--mesh=replicas=2,dp=2,tp=2"}} {
		r, _ := trained(t, os.Args[0], append([]string{"--check"}, args...)...)
		if !(*r.MaxLossDiff <= 1e-5) || !(r.LastLoss < r.FirstLoss) {
			t.Errorf("%v: %+v, %v", args, r, *r.MaxLossDiff)
		}
	}
}

// aRunMoves: begun by one program under one mesh, gone on with by the other under another. The losses are those of a run that was
// never broken off, which --check makes on one rank.
func aRunMoves(t *testing.T, first, second string) {
	t.Helper()
	for _, way := range [][2][]string{{{"--mesh=dp=2,tp=2"}, {"--parallel=fsdp", "--mesh=dp=3"}},
		{{"--parallel=zero2", "--mesh=dp=3"}, {"--parallel=fsdp+tp"}}} {
		directory := filepath.Join(t.TempDir(), "run")
		trained(t, first, append(way[0], "--save="+directory, "--save_every=2", "--steps=3")...)
		if _, err := os.Stat(filepath.Join(directory, "step-000002", "manifest.json")); err != nil {
			t.Error(err)
		}
		r, _ := trained(t, second, append(way[1], "--check", "--resume="+directory)...)
		if !(*r.MaxLossDiff <= 1e-5) || !(r.LastLoss < r.FirstLoss) {
			t.Errorf("%v: %+v, %v", way, r, *r.MaxLossDiff)
		}
	}
}

func TestARunGoesOnFromACheckpoint(t *testing.T) { aRunMoves(t, os.Args[0], os.Args[0]) }

func TestARunGoesOnInAnotherLanguage(t *testing.T) {
	cpp := os.Getenv("SHARDWEAVE_TRAIN_GPT")
	if cpp == "" {
		t.Skip("SHARDWEAVE_TRAIN_GPT does not name the C++ program; Bazel's test does")
	}
	aRunMoves(t, cpp, os.Args[0])
	aRunMoves(t, os.Args[0], cpp)
}

func TestProcesses(t *testing.T) {
	goroutines, _ := trained(t, os.Args[0], "--mesh=dp=1,tp=2", "--backend=inproc")
	processes, _ := trained(t, os.Args[0], "--mesh=dp=1,tp=2", "--backend=gloo")
	if math.Abs(goroutines.LastLoss-processes.LastLoss) > 1e-5 || processes.Ranks != 2 {
		t.Errorf("%+v and %+v", goroutines, processes)
	}
}

// byHand starts two ranks, as a user does in two shells; args differ.
func byHand(t *testing.T, first, second []string) (a, b *program) {
	t.Helper()
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	env := func(rank int) []string {
		return []string{"RANK=" + strconv.Itoa(rank), "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + strconv.Itoa(port)}
	}
	return start(t, os.Args[0], first, env(0)), start(t, os.Args[0], second, env(1))
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

func TestRanksThatWereStartedDifferently(t *testing.T) {
	a, b := byHand(t, with("--mesh=dp=2"), with("--mesh=dp=2", "--lr=0.1"))
	for rank, p := range []*program{a, b} {
		err := p.Wait()
		// One rank may hear of it from the other.
		want := fmt.Sprintf("train_gpt, rank %d of 2: comparing settings with the other ranks: ", rank)
		if err == nil || p.ProcessState.ExitCode() != exitFailed || !strings.Contains(p.err.String(), want) ||
			!strings.Contains(p.err.String(), "ranks 0 and 1 were started with different flags") {
			t.Errorf("rank %d: %v, %s", rank, err, &p.err)
		}
	}
}

func TestAMeshOfAnotherSize(t *testing.T) {
	a, b := byHand(t, with("--mesh=dp=4"), with("--mesh=dp=4"))
	for _, p := range []*program{a, b} {
		p.Wait()
		if p.ProcessState.ExitCode() != exitUsage || !strings.Contains(p.err.String(), "--mesh has 4 ranks, but 2 were started") {
			t.Errorf("%d, %s", p.ProcessState.ExitCode(), &p.err)
		}
	}
}

func TestARankThatIsKilled(t *testing.T) {
	long := with("--mesh=dp=2", "--steps=1000000", "--timeout=20s")
	a, b := byHand(t, long, long)
	a.untilItTrains(t)
	b.Process.Signal(syscall.SIGKILL)
	b.Wait()
	err := a.Wait()
	if err == nil || a.ProcessState.ExitCode() != exitFailed || !strings.Contains(a.err.String(), "train_gpt, rank 0 of 2: training step ") {
		t.Errorf("%v, %s", err, &a.err)
	}
}

func TestAskedToEnd(t *testing.T) {
	p := start(t, os.Args[0], with("--steps=1000000"), nil)
	p.untilItTrains(t)
	p.Process.Signal(syscall.SIGTERM)
	err := p.Wait()
	if err == nil || p.ProcessState.ExitCode() != exitFailed || !strings.Contains(p.err.String(), "context canceled") {
		t.Errorf("%v, %s", err, &p.err)
	}
}

// With a checkpoint of the step that it was in, from which it goes on as if nobody had told it.
func TestAskedToEndItSaves(t *testing.T) {
	for _, backend := range []string{"inproc", "gloo"} {
		directory := filepath.Join(t.TempDir(), "run")
		p := start(t, os.Args[0], with("--steps=1000000", "--mesh=dp=2", "--backend="+backend, "--save="+directory), nil)
		p.untilItTrains(t)
		p.Process.Signal(syscall.SIGTERM)
		code := 0
		if backend == "gloo" { // the process that has started the ranks was told to end
			code = exitFailed
		}
		p.Wait()
		if p.ProcessState.ExitCode() != code || !strings.Contains(p.out.String(), "told to end: saved after step ") {
			t.Errorf("%s: %d, %s, %s", backend, p.ProcessState.ExitCode(), &p.out, &p.err)
			continue
		}
		if r, _ := trained(t, os.Args[0], "--steps=2", "--mesh=dp=3", "--check", "--resume="+directory); !(*r.MaxLossDiff <= 1e-4) {
			t.Errorf("%s: %+v, %v", backend, r, *r.MaxLossDiff)
		}
	}
}

func TestBadFlags(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		arg, want string
		code      int
	}{
		{"--steps=0", "--steps=0: wanted 1 or more", exitUsage},
		{"--heads=5", "--heads=5 does not divide --dim=28", exitUsage},
		{"--lr=NaN", "--lr=NaN: wanted a number above 0", exitUsage},
		{"--timeout=-1s", "--timeout=-1s: wanted a time above 0", exitUsage},
		{"--backend=nccl", "--backend=nccl: wanted inproc or gloo", exitUsage},
		{"--mesh=dp=0", "'dp=0': wanted a name and a size", exitUsage},
		{"--mesh=pp=2", "not 'pp'", exitUsage},
		{"--mesh=dp=2,dp=2", "'dp' is there twice", exitUsage},
		{"--save_every=2", "--save_every=2: wanted --save, too", exitUsage},
		{"--resume=/dev/null/run", "State.Load: ", exitFailed},
		{"--save=/dev/null/run", "Checkpointer.Open: ", exitFailed},
		{"--parallel=pp", "--parallel=pp: wanted one of ddp, zero1, zero2, fsdp, hsdp, fsdp+tp", exitUsage},
		{"--mesh=replicas=2,dp=2", "not 'replicas'", exitUsage},
		{"--mesh=dp=100000", "4096 ranks at most", exitUsage},
		{"more", "'more': wanted flags only", exitUsage},
		{"--nonsense", "nonsense", exitUsage},
		{"--data=/nonexistent", "reading the text: --data=/nonexistent: ", exitFailed},
		{"--data=" + empty, "the file is empty", exitFailed},
		{"--seq=10000000", "wanted more than --seq", exitFailed},
	} {
		p := start(t, os.Args[0], with(c.arg), nil)
		p.Wait()
		if p.ProcessState.ExitCode() != c.code || !strings.Contains(p.err.String(), c.want) {
			t.Errorf("%s: %d, %s", c.arg, p.ProcessState.ExitCode(), &p.err)
		}
	}
}

func TestFormats(t *testing.T) {
	for seconds, want := range map[float64]string{-1: "0:00", 6.2: "0:07", 754: "12:34", 3723: "1:02:03"} {
		if got := formatSeconds(seconds); got != want {
			t.Errorf("%v: %s, wanted %s", seconds, got, want)
		}
	}
}
