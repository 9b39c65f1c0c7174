package main

import (
	"flag"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// settings is what the command line asks for, checked.
type settings struct {
	mesh                                           []sw.MeshDim // dp and tp; one that was not named has size 1
	backend                                        string       // "": whichever fits the environment
	data                                           string       // "": readText's default
	steps, layers, dim, heads, batch, seq, sampled int64
	lr                                             float64
	seed                                           uint64
	timeout                                        time.Duration
	check, json                                    bool
}

// ranks is how many there are.
func (s *settings) ranks() int {
	ranks := 1
	for _, d := range s.mesh {
		ranks *= d.Size
	}
	return ranks
}

// String is all that has to be the same on every rank.
func (s *settings) String() string {
	return fmt.Sprintf("mesh %v, steps %d, layers %d, dim %d, heads %d, batch %d, seq %d, lr %g, seed %d, sample %d",
		s.mesh, s.steps, s.layers, s.dim, s.heads, s.batch, s.seq, s.lr, s.seed, s.sampled)
}

// parseSettings reads flags. Errors name the flag, its value and what was wanted.
func parseSettings(args []string) (*settings, error) {
	s := &settings{}
	flags := flag.NewFlagSet("train_gpt", flag.ContinueOnError)
	mesh := flags.String("mesh", "dp=2,tp=2", "how the ranks are arranged: dp (data parallel) times tp (tensor parallel); one of them may be left out")
	flags.StringVar(&s.backend, "backend", "", "inproc: ranks are goroutines of this process; gloo: ranks are processes, started here unless the environment says that a launcher has done it; default: gloo under a launcher, else inproc")
	flags.StringVar(&s.data, "data", "", "the text to train on; default: the licence texts of Debian")
	flags.Int64Var(&s.steps, "steps", 200, "training steps")
	flags.Int64Var(&s.layers, "layers", 2, "transformer blocks")
	flags.Int64Var(&s.dim, "dim", 96, "features of a token")
	flags.Int64Var(&s.heads, "heads", 4, "attention heads; they divide --dim")
	flags.Int64Var(&s.batch, "batch", 32, "sequences per step, over all ranks")
	flags.Int64Var(&s.seq, "seq", 64, "bytes per sequence")
	flags.Float64Var(&s.lr, "lr", 5e-3, "learning rate of AdamW")
	flags.Uint64Var(&s.seed, "seed", 1, "of the initial weights, the batches and the sample")
	flags.Int64Var(&s.sampled, "sample", 200, "bytes to generate at the end")
	flags.DurationVar(&s.timeout, "timeout", 2*time.Minute, "how long a rank waits for the others")
	flags.BoolVar(&s.check, "check", false, "train on one rank too, and compare the loss of every step")
	flags.BoolVar(&s.json, "json", false, "end with one line of JSON on stdout; all else goes to stderr")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	if flags.NArg() > 0 {
		return nil, fmt.Errorf("'%s': wanted flags only; --help lists them", flags.Arg(0))
	}
	var err error
	if s.mesh, err = parseMesh(*mesh); err != nil {
		return nil, fmt.Errorf("--mesh=%s: %w", *mesh, err)
	}
	for _, least := range []struct {
		flag         string
		value, least int64
	}{{"steps", s.steps, 1}, {"layers", s.layers, 1}, {"dim", s.dim, 1}, {"heads", s.heads, 1},
		{"batch", s.batch, 1}, {"seq", s.seq, 1}, {"sample", s.sampled, 0}} {
		if least.value < least.least {
			return nil, fmt.Errorf("--%s=%d: wanted %d or more", least.flag, least.value, least.least)
		}
	}
	switch {
	case s.dim%s.heads != 0:
		return nil, fmt.Errorf("--heads=%d does not divide --dim=%d", s.heads, s.dim)
	case !(s.lr > 0) || math.IsInf(s.lr, 0):
		return nil, fmt.Errorf("--lr=%g: wanted a number above 0", s.lr)
	case s.timeout <= 0:
		return nil, fmt.Errorf("--timeout=%v: wanted a time above 0, such as 30s", s.timeout)
	case s.backend != "" && s.backend != "inproc" && s.backend != "gloo":
		return nil, fmt.Errorf("--backend=%s: wanted inproc or gloo", s.backend)
	}
	return s, nil
}

// parseMesh reads "dp=2,tp=2", either one alone, in either order.
func parseMesh(text string) ([]sw.MeshDim, error) {
	const most = 4096
	var dims []sw.MeshDim
	ranks, has := 1, map[string]bool{}
	for _, part := range strings.Split(text, ",") {
		name, number := part, ""
		if i := strings.IndexByte(part, '='); i >= 0 {
			name, number = part[:i], part[i+1:]
		}
		size, err := strconv.Atoi(number)
		switch {
		case err != nil || size < 1:
			return nil, fmt.Errorf("'%s': wanted a name and a size of 1 or more, as dp=2", part)
		case name != "dp" && name != "tp":
			return nil, fmt.Errorf("wanted dp (data parallel) and tp (tensor parallel), not '%s'", name)
		case has[name]:
			return nil, fmt.Errorf("'%s' is there twice", name)
		case size > most || ranks*size > most:
			return nil, fmt.Errorf("wanted %d ranks at most", most)
		}
		dims, ranks, has[name] = append(dims, sw.Dim(name, size)), ranks*size, true
	}
	if !has["dp"] {
		dims = append([]sw.MeshDim{sw.Dim("dp", 1)}, dims...)
	}
	if !has["tp"] {
		dims = append(dims, sw.Dim("tp", 1))
	}
	return dims, nil
}
