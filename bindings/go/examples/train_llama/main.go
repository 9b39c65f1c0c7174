// Command train_llama goes on training a Llama that Hugging Face's transformers has saved, sharded over ranks that are
// goroutines or processes.
//
//	go run ./examples/train_llama --model=FOLDER          # with config.json and *.safetensors
//	go run ./examples/train_llama --mesh=dp=1,tp=4 --check  # a small one with random weights
//	go run ./examples/train_llama --save=run --save_every=10
//	go run ./examples/train_llama --resume=run --mesh=tp=2  # goes on, on any mesh
//
// With --save, SIGTERM and SIGUSR1 end it after the step that it is in, with a checkpoint of that: see sw.GracefulStop.
//
// The model is in model.go; here: the command line, and the training. Texts are taken byte by byte, as there is no
// tokenizer: what the example shows is the sharding. The examples in C++ and Rust take the same batches and steps, so that
// each goes on with what another one has saved.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
	"github.com/shardweave/shardweave/bindings/go/shardweave/safetensors"
)

const (
	exitFailed = 1
	exitUsage  = 2
)

// plan is tensor parallelism as in Megatron-LM: what reads a block's input is cut by its outputs, what writes its output
// by its inputs. Everything else is replicated.
const plan = `{"parameter": {
	"*.{q,k,v,gate,up}_proj.*": {"tp": "S(0)"},
	"*.{o,down}_proj.weight": {"tp": "S(1)"}
}}`

// settings is what the command line asks for.
type settings struct {
	model, mesh, backend, data string
	save, resume               string // directories of checkpoints; "": none
	steps, batch, seq          int64
	saveEvery                  int64 // steps; 0: only at the end
	lr                         float64
	seed                       uint64
	timeout                    time.Duration
	check, json                bool
	stop                       *sw.GracefulStop
}

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	s := settings{stop: &sw.GracefulStop{}}
	flags := flag.NewFlagSet("train_llama", flag.ContinueOnError)
	flags.StringVar(&s.model, "model", "", "a folder with config.json and *.safetensors; default: a small model with random weights")
	flags.StringVar(&s.mesh, "mesh", "dp=2,tp=2", "how the ranks are arranged: dp (data parallel) times tp (tensor parallel)")
	flags.StringVar(&s.backend, "backend", "", "inproc: ranks are goroutines; gloo: ranks are processes, started here; default: those of a launcher, else goroutines")
	flags.StringVar(&s.data, "data", "/usr/share/common-licenses/GPL-3", "the text to train on")
	flags.StringVar(&s.save, "save", "", "a directory, of all ranks, that gets a checkpoint after the last step")
	flags.Int64Var(&s.saveEvery, "save_every", 0, "with --save: also after so many steps, each time, beside training; 0: at the end only")
	flags.StringVar(&s.resume, "resume", "", "goes on from the newest checkpoint of this directory, on any --mesh")
	flags.Int64Var(&s.steps, "steps", 30, "training steps, with those of the run that --resume goes on with")
	flags.Int64Var(&s.batch, "batch", 8, "sequences per step, over all ranks")
	flags.Int64Var(&s.seq, "seq", 32, "bytes per sequence")
	flags.Float64Var(&s.lr, "lr", 1e-3, "the largest learning rate of AdamW")
	flags.Uint64Var(&s.seed, "seed", 1, "of random weights")
	flags.DurationVar(&s.timeout, "timeout", 2*time.Minute, "how long a rank waits for the others")
	flags.BoolVar(&s.check, "check", false, "train on one device too, and compare the loss of every step")
	flags.BoolVar(&s.json, "json", false, "end with one line of JSON on stdout; all else goes to stderr")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return 0
	} else if err != nil {
		return exitUsage // and told
	}
	dims, err := s.dims(flags.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "train_llama:", err)
		return exitUsage
	}
	ctx, end := s.stop.Context()
	defer end()
	if err := s.start(ctx, dims); err != nil {
		fmt.Fprintln(os.Stderr, "train_llama:", err)
		return exitFailed
	}
	return 0
}

// dims are the mesh's, dp and tp; one that was not named has size 1.
func (s *settings) dims(rest []string) ([]sw.MeshDim, error) {
	switch {
	case len(rest) > 0:
		return nil, fmt.Errorf("'%s': wanted flags only; --help lists them", rest[0])
	case s.steps < 1 || s.batch < 1 || s.seq < 1:
		return nil, fmt.Errorf("--steps=%d --batch=%d --seq=%d: wanted 1 or more", s.steps, s.batch, s.seq)
	case !(s.lr > 0) || math.IsInf(s.lr, 0) || s.timeout <= 0:
		return nil, fmt.Errorf("--lr=%g --timeout=%v: wanted numbers above 0", s.lr, s.timeout)
	case s.saveEvery < 0 || s.saveEvery > 0 && s.save == "":
		return nil, fmt.Errorf("--save_every=%d: wanted --save, too, and 0 or more", s.saveEvery)
	case s.backend != "" && s.backend != "inproc" && s.backend != "gloo":
		return nil, fmt.Errorf("--backend=%s: wanted inproc or gloo", s.backend)
	}
	dp, tp := 1, 1
	_, err := fmt.Sscanf(s.mesh+"\n", "dp=%d,tp=%d\n", &dp, &tp)
	if err != nil {
		if _, err = fmt.Sscanf(s.mesh+"\n", "tp=%d\n", &tp); err != nil {
			_, err = fmt.Sscanf(s.mesh+"\n", "dp=%d\n", &dp)
		}
	}
	if err != nil || dp < 1 || tp < 1 || dp > 4096 || tp > 4096/dp {
		return nil, fmt.Errorf("--mesh=%s: wanted dp=2,tp=2, or one of them, with 1 to 4096 ranks", s.mesh)
	}
	return []sw.MeshDim{sw.Dim("dp", dp), sw.Dim("tp", tp)}, nil
}

// start runs the ranks, or is the one that a launcher has started.
func (s *settings) start(ctx context.Context, dims []sw.MeshDim) error {
	ranks := dims[0].Size * dims[1].Size
	body := func(w *sw.World) error { return s.rank(w, dims) }
	switch s.backend {
	case "inproc":
		return sw.RunRanks(ctx, ranks, body, sw.WithTimeout(s.timeout))
	case "gloo":
		return sw.Spawn(ctx, ranks, body, sw.WithTimeout(s.timeout), sw.WithoutPrefix())
	}
	w, err := sw.FromEnvironment(ctx, sw.WithTimeout(s.timeout))
	if errors.Is(err, sw.NotFound) {
		return sw.RunRanks(ctx, ranks, body, sw.WithTimeout(s.timeout))
	}
	if err != nil {
		return err
	}
	defer w.Close()
	if err := body(w); err != nil {
		w.Abort(err)
		return err
	}
	return nil
}

// rank is what one rank does.
func (s *settings) rank(w *sw.World, dims []sw.MeshDim) error {
	if err := sw.SetNumThreads(1); err != nil {
		return err
	}
	text, err := os.ReadFile(s.data)
	if err != nil {
		return fmt.Errorf("--data: %w", err)
	}
	if int64(len(text)) <= s.seq {
		return fmt.Errorf("--data=%s has %d bytes; wanted more than --seq=%d", s.data, len(text), s.seq)
	}
	mesh, err := w.Mesh(dims...)
	if err != nil {
		return err
	}
	began := time.Now()
	before, losses, err := s.train(w, mesh, text)
	if err != nil || w.Rank() != 0 {
		return err
	}
	result := map[string]any{"ranks": w.Size(), "first_loss": losses[0], "last_loss": losses[len(losses)-1],
		"tokens_per_second": float64(int64(len(losses))*s.batch*s.seq) / time.Since(began).Seconds()}
	if s.check && before+int64(len(losses)) == s.steps { // told to end, it does
		_, alone, err := s.train(w, nil, text)
		if err != nil {
			return err
		}
		largest := 0.0
		for i := range losses {
			largest = math.Max(largest, math.Abs(losses[i]-alone[before+int64(i)])) // NaN if one is
		}
		fmt.Fprintf(os.Stderr, "largest difference between the losses of a step: %.6g\n", largest)
		result["max_loss_diff"] = largest
	}
	if s.json {
		return json.NewEncoder(os.Stdout).Encode(result)
	}
	return nil
}

// checkpoints are what a run saves, and goes on from. The zero one has none.
type checkpoints struct {
	state        *sw.State
	checkpointer *sw.Checkpointer // nil: nothing is saved
}

// newCheckpoints goes on, and says after which step.
func (s *settings) newCheckpoints(m *llama, optimizer *sw.Optimizer, mesh *sw.Mesh) (c checkpoints, before int64, err error) {
	if c.state, err = sw.NewState(mesh); err != nil {
		return c, 0, err
	}
	// What a run needs to go on; batches and learning rates follow from the step.
	for _, err := range []error{c.state.AddModule("model.", m.Module), c.state.AddOptimizer("optimizer.", optimizer, m.Module),
		c.state.AddRandom("random", mesh)} {
		if err != nil {
			return c, 0, err
		}
	}
	if s.resume != "" {
		loaded, err := c.state.Load(s.resume, mesh)
		if err != nil {
			return c, 0, err
		}
		before = loaded.Step
	}
	if s.save != "" {
		if c.checkpointer, err = sw.NewCheckpointer(mesh, s.save); err == nil {
			err = c.checkpointer.Open(before) // or hours later there is nowhere to save
		}
	}
	return c, before, err
}

// stepDone saves beside training, and at the end, which it tells of.
func (c checkpoints) stepDone(w *sw.World, done int64, s *settings) (ends bool, err error) {
	if c.checkpointer == nil {
		return false, nil
	}
	if ends, err = s.stop.StepDone(w); err != nil {
		return false, err
	}
	switch {
	case ends || done == s.steps:
		err = c.checkpointer.Save(done, c.state)
	case s.saveEvery > 0 && done%s.saveEvery == 0:
		_, err = c.checkpointer.SaveAsync(done, c.state)
	}
	return ends, err
}

func (c checkpoints) Close() {
	c.checkpointer.Close()
	c.state.Close()
}

// train has the loss of every step, after the one that a run goes on from; on one device if there is no mesh: then nothing is
// saved, nor gone on from.
func (s *settings) train(w *sw.World, mesh *sw.Mesh, text []byte) (before int64, losses []float64, err error) {
	m, err := s.load(w)
	if err != nil {
		return 0, nil, err
	}
	defer m.Close()
	if mesh != nil {
		p, err := sw.ParsePlan(plan)
		if err != nil {
			return 0, nil, err
		}
		if err := m.Distribute(mesh, p, sw.SameEverywhere); err != nil {
			return 0, nil, err
		}
	}
	parameters, err := m.Parameters()
	if err != nil {
		return 0, nil, err
	}
	optimizer, err := sw.NewAdamW(sw.Tensors(parameters), s.lr)
	if err != nil {
		return 0, nil, err
	}
	defer optimizer.Close()
	scheduler, err := sw.NewScheduler(sw.CosineSchedule(s.steps/10, s.steps, 0.1), optimizer)
	if err != nil {
		return 0, nil, err
	}
	var saved checkpoints
	if mesh != nil {
		if saved, before, err = s.newCheckpoints(m, optimizer, mesh); err != nil {
			return 0, nil, err
		}
		defer saved.Close()
	}
	if before >= s.steps {
		return 0, nil, fmt.Errorf("--steps=%d: wanted more than %d, as --resume has", s.steps, before)
	}
	if err := scheduler.SetStep(before); err != nil {
		return 0, nil, err
	}
	s.stop.Training(saved.checkpointer != nil)
	for step := before; step < s.steps; step++ {
		err := w.Scope(func() error { // whose tensors end with it
			tokens, targets := s.batchOf(w, mesh, text, step, m.config.VocabSize)
			loss := m.loss(tokens, targets)
			if err := loss.Backward(); err != nil {
				return err
			}
			if err := m.FinishGradSync(); err != nil { // nothing to do on one device
				return err
			}
			if _, err := sw.ClipGradNorm(sw.Tensors(parameters), 1); err != nil {
				return err
			}
			for _, next := range []func() error{optimizer.Step, optimizer.ZeroGrad, scheduler.Step} {
				if err := next(); err != nil {
					return err
				}
			}
			value, err := loss.Item()
			losses = append(losses, value)
			return err
		})
		ends := false
		if err == nil {
			ends, err = saved.stepDone(w, step+1, s)
		}
		if err != nil {
			return 0, nil, fmt.Errorf("training step %d of %d: %w", step+1, s.steps, err)
		}
		if w.Rank() == 0 && (step%10 == 0 || step == s.steps-1) {
			fmt.Fprintf(os.Stderr, "step %d/%d  loss %.4f\n", step+1, s.steps, losses[len(losses)-1])
		}
		if ends {
			if w.Rank() == 0 {
				fmt.Fprintf(os.Stderr, "told to end: saved after step %d, --resume=%s goes on\n", step+1, s.save)
			}
			break
		}
	}
	return before, losses, nil
}

// load makes the model, with the weights of the files, or random ones: the same on every rank.
func (s *settings) load(w *sw.World) (m *llama, err error) {
	c := small
	if s.model != "" {
		if c, err = readConfig(filepath.Join(s.model, "config.json")); err != nil {
			return nil, err
		}
	}
	if c.MaxPositions < s.seq {
		return nil, fmt.Errorf("--seq=%d: the model is for %d positions at most", s.seq, c.MaxPositions)
	}
	if err := sw.Seeded(s.seed, func() error { m, err = newLlama(w, c, s.seq); return err }); err != nil || s.model == "" {
		return m, err
	}
	files, err := filepath.Glob(filepath.Join(s.model, "*.safetensors"))
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("--model=%s: there are no *.safetensors", s.model)
	}
	if err == nil {
		err = safetensors.Load(w, m.Module, files...)
	}
	return m, err
}

// batchOf is the sequences of a step, which the rows of the mesh share, and what follows each byte.
func (s *settings) batchOf(w *sw.World, mesh *sw.Mesh, text []byte, step, vocabulary int64) (tokens, targets *sw.Tensor) {
	batch := func(shift int64) *sw.Tensor {
		var all []int64
		for row := int64(0); row < s.batch; row++ {
			at := (step*s.batch+row)*s.seq%(int64(len(text))-s.seq) + shift
			for _, b := range text[at : at+s.seq] {
				all = append(all, int64(b)%vocabulary)
			}
		}
		t := sw.FromSlice(w, all, []int64{s.batch, s.seq})
		if mesh == nil {
			return t
		}
		return t.Distribute(mesh, sw.On{"dp": "S(0)"}, sw.SameEverywhere)
	}
	return batch(0), batch(1)
}
