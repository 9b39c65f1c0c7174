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
	mesh                                           []sw.MeshDim // replicas, if parallel is hsdp, dp and tp; one that was not named has size 1
	parallel                                       string       // one of parallels
	backend                                        string       // "": whichever fits the environment
	data                                           string       // "": readText's default
	save, resume                                   string       // directories of checkpoints; "": none
	saveEvery                                      int64        // steps; 0: only at the end
	steps, layers, dim, heads, batch, seq, sampled int64
	lr                                             float64
	seed                                           uint64
	timeout                                        time.Duration
	check, json                                    bool
	stop                                           *sw.GracefulStop
}

// parallels are what ranks along dp may have of the parameters.
var parallels = []string{"ddp", "zero1", "zero2", "fsdp", "hsdp", "fsdp+tp"}

// fullySharded is whether they have a part of them.
func (s *settings) fullySharded() bool {
	return s.parallel == "hsdp" || strings.HasPrefix(s.parallel, "fsdp")
}

// zeroStage is 0 without ZeRO.
func (s *settings) zeroStage() int { return map[string]int{"zero1": 1, "zero2": 2}[s.parallel] }

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
	return fmt.Sprintf("mesh %v, parallel %s, steps %d, layers %d, dim %d, heads %d, batch %d, seq %d, lr %g, seed %d, sample %d, save %s %d, resume %s",
		s.mesh, s.parallel, s.steps, s.layers, s.dim, s.heads, s.batch, s.seq, s.lr, s.seed, s.sampled, s.save, s.saveEvery, s.resume)
}

// parseSettings reads flags. Errors name the flag, its value and what was wanted.
func parseSettings(args []string) (*settings, error) {
	s := &settings{stop: &sw.GracefulStop{}}
	flags := flag.NewFlagSet("train_gpt", flag.ContinueOnError)
	mesh := flags.String("mesh", "auto", "how the ranks are arranged: dp (data parallel) times tp (tensor parallel); one of them may be left out; auto: dp=2,tp=2, with --parallel=fsdp dp=4, with hsdp replicas=2,dp=2")
	flags.StringVar(&s.parallel, "parallel", "ddp", "what ranks along dp have of the parameters: ddp, all of them; zero1, all of them, and a part of the optimizer's state; zero2, a part of the gradients, too; fsdp, a part of all, whole only while a block runs; hsdp, the same in each of --mesh's replicas; fsdp+tp, a part of what tensor parallelism leaves")
	flags.StringVar(&s.backend, "backend", "", "inproc: ranks are goroutines of this process; gloo: ranks are processes, started here unless the environment says that a launcher has done it; default: gloo under a launcher, else inproc")
	flags.StringVar(&s.data, "data", "", "the text to train on; default: the licence texts of Debian")
	flags.Int64Var(&s.steps, "steps", 200, "training steps of this run")
	flags.Int64Var(&s.layers, "layers", 2, "transformer blocks")
	flags.Int64Var(&s.dim, "dim", 96, "features of a token")
	flags.Int64Var(&s.heads, "heads", 4, "attention heads; they divide --dim")
	flags.Int64Var(&s.batch, "batch", 32, "sequences per step, over all ranks")
	flags.Int64Var(&s.seq, "seq", 64, "bytes per sequence")
	flags.Float64Var(&s.lr, "lr", 5e-3, "learning rate of AdamW")
	flags.Uint64Var(&s.seed, "seed", 1, "of the initial weights, the batches and the sample")
	flags.Int64Var(&s.sampled, "sample", 200, "bytes to generate at the end")
	flags.StringVar(&s.save, "save", "", "a directory, of all ranks, that gets a checkpoint after the last step; any --mesh and --parallel goes on from it, in C++, Rust and Go")
	flags.Int64Var(&s.saveEvery, "save_every", 0, "with --save: also after so many steps, each time, beside training; 0: at the end only")
	flags.StringVar(&s.resume, "resume", "", "goes on from the newest checkpoint of this directory")
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
	known := false
	for _, parallel := range parallels {
		known = known || parallel == s.parallel
	}
	if !known {
		return nil, fmt.Errorf("--parallel=%s: wanted one of %s", s.parallel, strings.Join(parallels, ", "))
	}
	if *mesh == "auto" {
		*mesh = "dp=2,tp=2"
		if other, is := map[string]string{"fsdp": "dp=4", "hsdp": "replicas=2,dp=2"}[s.parallel]; is {
			*mesh = other
		}
	}
	if s.mesh, err = parseMesh(*mesh, s.parallel == "hsdp"); err != nil {
		return nil, fmt.Errorf("--mesh=%s: %w", *mesh, err)
	}
	for _, dim := range s.mesh {
		if s.parallel == "fsdp" && dim.Name == "tp" && dim.Size > 1 {
			return nil, fmt.Errorf("--parallel=fsdp, --mesh=%s: wanted fsdp+tp, or a mesh without tp", *mesh)
		}
	}
	for _, least := range []struct {
		flag         string
		value, least int64
	}{{"steps", s.steps, 1}, {"layers", s.layers, 1}, {"dim", s.dim, 1}, {"heads", s.heads, 1},
		{"batch", s.batch, 1}, {"seq", s.seq, 1}, {"sample", s.sampled, 0},
		{"save_every", s.saveEvery, 0}} {
		if least.value < least.least {
			return nil, fmt.Errorf("--%s=%d: wanted %d or more", least.flag, least.value, least.least)
		}
	}
	switch {
	case s.saveEvery > 0 && s.save == "":
		return nil, fmt.Errorf("--save_every=%d: wanted --save, too", s.saveEvery)
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

// parseMesh reads "dp=2,tp=2", either one alone, in either order, and perhaps replicas.
func parseMesh(text string, withReplicas bool) ([]sw.MeshDim, error) {
	wanted := "dp (data parallel) and tp (tensor parallel)"
	if withReplicas {
		wanted = "replicas, " + wanted
	}
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
		case name != "dp" && name != "tp" && !(name == "replicas" && withReplicas):
			return nil, fmt.Errorf("wanted %s, not '%s'", wanted, name)
		case has[name]:
			return nil, fmt.Errorf("'%s' is there twice", name)
		case size > most || ranks*size > most:
			return nil, fmt.Errorf("wanted %d ranks at most", most)
		}
		dims, ranks, has[name] = append(dims, sw.Dim(name, size)), ranks*size, true
	}
	if withReplicas && !has["replicas"] {
		dims = append([]sw.MeshDim{sw.Dim("replicas", 1)}, dims...)
	}
	if !has["dp"] {
		dims = append([]sw.MeshDim{sw.Dim("dp", 1)}, dims...)
	}
	if !has["tp"] {
		dims = append(dims, sw.Dim("tp", 1))
	}
	return dims, nil
}
