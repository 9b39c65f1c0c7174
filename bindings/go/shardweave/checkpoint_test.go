package shardweave_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
	"github.com/shardweave/shardweave/bindings/go/shardweave/nn"
)

// checkpointed is a net, its optimizer, and what a checkpoint has of both.
type checkpointed struct {
	net       *shardedNet
	mesh      *sw.Mesh
	optimizer *sw.Optimizer
	state     *sw.State
}

func newCheckpointed(w *sw.World, name string, zero bool) (*checkpointed, error) {
	net, mesh, err := distributedNet(w, name)
	if err != nil {
		return nil, err
	}
	parameters, err := net.Parameters()
	if err != nil {
		return nil, err
	}
	optimizer, err := sw.NewAdamW(sw.Tensors(parameters), 1e-2)
	if err == nil && zero {
		err = optimizer.UseZeRO(sw.ZeRO{})
	}
	if err != nil {
		return nil, err
	}
	state, err := sw.NewState(mesh)
	if err != nil {
		return nil, err
	}
	for _, err := range []error{state.AddModule("model.", net.Module), state.AddOptimizer("optimizer.", optimizer, net.Module),
		state.AddRandom("random", mesh), state.SetValue("epoch", "0")} {
		if err != nil {
			return nil, err
		}
	}
	return &checkpointed{net, mesh, optimizer, state}, nil
}

func (c *checkpointed) step(w *sw.World, number float64) (float64, error) {
	x := placed(counted(w, 4, 5).Mul(0.7).Add(number).Sin().To(sw.F32), c.mesh, sw.On{})
	y := c.net.Forward(x)
	loss := y.Mul(y).Sum()
	if err := loss.Backward(); err != nil {
		return 0, err
	}
	if err := c.net.FinishGradSync(); err != nil {
		return 0, err
	}
	if err := c.optimizer.Step(); err != nil {
		return 0, err
	}
	if err := c.optimizer.ZeroGrad(); err != nil {
		return 0, err
	}
	return loss.Item()
}

func TestCheckpoint(t *testing.T) {
	directory := filepath.Join(t.TempDir(), "run")
	var mutex sync.Mutex
	var wanted []float64
	if err := sw.RunRanks(background, 3, func(w *sw.World) error {
		c, err := newCheckpointed(w, "dp=3", true)
		if err != nil {
			return err
		}
		if _, err := c.step(w, 1); err != nil {
			return err
		}
		if err := c.state.SetValue("epoch", "[7]"); err != nil {
			return err
		}
		p, err := sw.NewCheckpointer(c.mesh, directory, sw.WithKeepLast(1), nil)
		if err != nil {
			return err
		}
		defer p.Close()
		if err := p.Open(0); err != nil {
			return err
		}
		another := mustOf(sw.NewCheckpointer(c.mesh, directory))
		defer another.Close()
		if err := another.Open(-1); !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), "Checkpointer.Open") {
			t.Error("a directory that is taken:", err)
		}
		if err := p.Save(1, c.state); err != nil {
			return err
		}
		if err := p.Open(0); !errors.Is(err, sw.FailedPrecondition) || p.Open(1) != nil {
			t.Error("a later step than were done:", err)
		}
		if saved, err := p.SaveAsync(2, c.state); err != nil || !saved {
			t.Errorf("SaveAsync: %v, %v", saved, err)
		}
		var losses []float64
		for _, number := range []float64{2, 3} {
			loss, err := c.step(w, number)
			if err != nil {
				return err
			}
			losses = append(losses, loss)
		}
		if err := p.Wait(); err != nil {
			return err
		}
		if err := p.Save(2, c.state); !errors.Is(err, sw.AlreadyExists) || !strings.Contains(err.Error(), "Checkpointer.Save") {
			t.Errorf("a step that is there: %v", err)
		}
		mutex.Lock()
		defer mutex.Unlock()
		wanted = losses
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := sw.VerifyCheckpoint(filepath.Join(directory, "step-000002")); err != nil {
		t.Error(err)
	}
	if err := sw.VerifyCheckpoint(filepath.Join(directory, "step-000003")); !errors.Is(err, sw.NotFound) {
		t.Errorf("no checkpoint: %v", err)
	}
	if err := sw.RunRanks(background, 4, func(w *sw.World) error {
		c, err := newCheckpointed(w, "dp=2,tp=2", false)
		if err != nil {
			return err
		}
		if _, err := c.step(w, 9); err != nil {
			return err
		}
		loaded, err := c.state.Load(directory, c.mesh, sw.WithVerification())
		if err != nil {
			return err
		}
		if epoch, err := c.state.Value("epoch"); err != nil || epoch != "[7]" || string(loaded.Values["epoch"]) != "[7]" {
			t.Errorf("epoch is %s: %v, %v", epoch, err, loaded)
		}
		if loaded.Step != 2 || len(loaded.Missing) != 0 || loaded.BytesRead != loaded.BytesKept {
			t.Errorf("loaded %+v", loaded)
		}
		for i, number := range []float64{2, 3} {
			loss, err := c.step(w, number)
			if err != nil {
				return err
			}
			if math.Abs(loss-wanted[i]) > 1e-4*math.Abs(wanted[i]) {
				t.Errorf("loss %v, wanted %v", loss, wanted[i])
			}
		}
		other, err := sw.NewState(c.mesh)
		if err != nil {
			return err
		}
		if err := other.AddTensor("x", sw.Ones(w, []int64{2})); err != nil {
			return err
		}
		p, err := sw.NewCheckpointer(c.mesh, directory)
		if err != nil {
			return err
		}
		if _, err := p.Load(other); !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "missing: x") {
			t.Errorf("another state: %v", err)
		}
		if _, err := other.Value("v"); !errors.Is(err, sw.NotFound) {
			t.Errorf("no value: %v", err)
		}
		return p.Close()
	}); err != nil {
		t.Fatal(err)
	}
	if err := (*sw.State)(nil).SetValue("v", "1"); err == nil {
		t.Error("a nil State")
	}
	if err := (*sw.Checkpointer)(nil).Wait(); err == nil {
		t.Error("a nil Checkpointer")
	}
}

// What is transient is in no checkpoint, a tied weight is there once, with its second name beside it; and nothing changes by
// it.
func TestWhatAStateHasOfAModule(t *testing.T) {
	type table struct {
		Angles *sw.Tensor `sw:",transient"`
		Mean   *sw.Tensor `sw:",buffer"`
	}
	type model struct {
		*sw.Module
		Tokens, Head  *nn.Linear
		Table, Shared *table
	}
	directory := filepath.Join(t.TempDir(), "run")
	run(t, 2, func(w *sw.World) error {
		m := &model{Tokens: nn.NewLinear(w, 3, 2, nn.NoBias), Table: &table{sw.Ones(w, []int64{4}), sw.Ones(w, []int64{2})}}
		m.Head, m.Shared = &nn.Linear{Weight: m.Tokens.Weight}, m.Table
		if _, err := w.ModuleOf(m); err != nil {
			return err
		}
		outer := mustOf(w.NewModule())
		if err := outer.AddChild("net", m.Module); err != nil {
			return err
		}
		mesh := mustOf(w.ParseMesh("dp=2"))
		if err := outer.Distribute(mesh, nil, sw.FromRank(0)); err != nil {
			return err
		}
		if err := m.Tokens.Weight.SetRequiresGrad(false); err != nil {
			return err
		}
		state := mustOf(sw.NewState(mesh))
		if err := state.AddModule("", outer); err != nil {
			return err
		}
		if err := state.AddModule("part.", mustOf(outer.Child("net.table"))); err != nil {
			return err
		}
		if requires, err := m.Tokens.Weight.RequiresGrad(); err != nil || requires {
			t.Errorf("a frozen parameter requires grad: %v, %v", requires, err)
		}
		p := mustOf(sw.NewCheckpointer(mesh, directory))
		defer p.Close()
		return p.Save(1, state)
	})
	text, err := os.ReadFile(filepath.Join(directory, "step-000001", "manifest.json"))
	var manifest struct {
		Tensors map[string]any
		Aliases map[string]string
	}
	if err == nil {
		err = json.Unmarshal(text, &manifest)
	}
	wanted := map[string]string{"net.head.weight": "net.tokens.weight", "net.shared.mean": "net.table.mean"}
	if err != nil || len(manifest.Tensors) != 3 || manifest.Tensors["part.mean"] == nil || !reflect.DeepEqual(manifest.Aliases, wanted) {
		t.Errorf("%v, %s", err, text)
	}
}

func TestCheckpointDirectories(t *testing.T) {
	directory := filepath.Join(t.TempDir(), "run")
	if _, err := sw.ListCheckpoints(directory); !errors.Is(err, sw.NotFound) || !strings.Contains(err.Error(), "ListCheckpoints: ") {
		t.Error(err)
	}
	if _, err := sw.FindCheckpoint(directory); !errors.Is(err, sw.NotFound) {
		t.Error(err)
	}
	run(t, 2, func(w *sw.World) error {
		mesh := mustOf(w.ParseMesh("dp=2"))
		if _, err := sw.NewCheckpointer(mesh, directory, sw.WithWriteTimeout(-5)); !errors.Is(err, sw.InvalidArgument) ||
			!strings.Contains(err.Error(), "WithWriteTimeout is -5ns") {
			return fmt.Errorf("a timeout below 0: %w", err)
		}
		state, p := mustOf(sw.NewState(mesh)), mustOf(sw.NewCheckpointer(mesh, directory, sw.WithKeepLast(3), sw.WithSkipIfBusy(), sw.WithWriteTimeout(time.Minute)))
		defer p.Close()
		if err := state.SetValue("v", "1"); err != nil {
			return err
		}
		for _, step := range []int64{5, 7, 20, 100} {
			if err := p.Save(step, state); err != nil {
				return err
			}
		}
		return nil
	})
	if steps, err := sw.ListCheckpoints(directory); err != nil || fmt.Sprint(steps) != "[7 20 100]" {
		t.Error(steps, err)
	}
	if path, err := sw.FindCheckpoint(directory); err != nil || path != filepath.Join(directory, "step-000100") {
		t.Error(path, err)
	}
}

func TestWhatIsWrittenToBeforeItsCopyIsNotSaved(t *testing.T) {
	directory := filepath.Join(t.TempDir(), "run")
	run(t, 2, func(w *sw.World) error {
		mesh := mustOf(w.ParseMesh("dp=2"))
		state, p := mustOf(sw.NewState(mesh)), mustOf(sw.NewCheckpointer(mesh, directory, sw.WithCopyBesideTraining()))
		defer p.Close()
		x := sw.Ones(mesh, []int64{4}, sw.On{"dp": "S(0)"}, sw.RequiresGrad)
		write := func(value int) error {
			return w.With(sw.NoGrad, func() error { return x.Apply("aten::fill_.Scalar", value).Err() })
		}
		if err := errors.Join(x.Err(), state.AddTensor("x", x)); err != nil {
			return err
		}
		saved := func(step int64) error {
			_, err := p.SaveAsync(step, state)
			return err
		}
		if err := errors.Join(saved(1), write(2)); err != nil {
			return err
		}
		if err := p.Wait(); !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), "'x' was written to after save_async()") {
			return fmt.Errorf("a write before the copy: %w", err)
		}
		if err := errors.Join(saved(2), p.WaitForCopy(), write(3), p.Wait()); err != nil {
			return err
		}
		if _, err := p.Load(state); err != nil {
			return err
		}
		if got, err := sw.Data[float32](x.Full()); err != nil || got[0] != 2 || got[3] != 2 {
			return fmt.Errorf("%v: %w", got, err)
		}
		return nil
	})
	if steps, err := sw.ListCheckpoints(directory); err != nil || fmt.Sprint(steps) != "[2]" {
		t.Error(steps, err)
	}
}

// A run on three ranks, and one on two, read the same batches.
func TestALoaderGoesOnWhereItWas(t *testing.T) {
	directory, file := filepath.Join(t.TempDir(), "run"), someTokens("loader")
	var mutex sync.Mutex
	var wanted []float64
	run(t, 3, func(w *sw.World) error { return loaderRun(w, directory, file, true, &mutex, &wanted) })
	run(t, 2, func(w *sw.World) error { return loaderRun(w, directory, file, false, &mutex, &wanted) })
}

func loaderRun(w *sw.World, directory string, file *sw.TokenFile, isFirst bool, mutex *sync.Mutex, wanted *[]float64) error {
	mesh, err := w.Mesh(sw.Dim("dp", w.Size()))
	if err != nil {
		return err
	}
	loader, err := w.TokenLoader([]*sw.TokenFile{file}, sw.TokenLoaderOptions{Seq: 3, Batch: 6, Seed: 5, Mesh: mesh, Spec: sw.On{"dp": "S(0)"}})
	if err != nil {
		return err
	}
	state, err := sw.NewState(mesh)
	if err != nil {
		return err
	}
	if err := state.AddLoader("loader", loader); err != nil {
		return err
	}
	p, err := sw.NewCheckpointer(mesh, directory)
	if err != nil {
		return err
	}
	defer p.Close()
	if isFirst {
		if _, err := loader.Next(background); err != nil {
			return err
		}
		if err := p.Save(1, state); err != nil {
			return err
		}
	} else if _, err := p.Load(state); err != nil {
		return err
	}
	batch, err := loader.Next(background)
	if err != nil {
		return err
	}
	tokens, err := whole(batch.Tokens.To(sw.F64))
	if err != nil {
		return err
	}
	mutex.Lock()
	defer mutex.Unlock()
	if isFirst {
		*wanted = tokens
	} else if !near(tokens, *wanted) {
		return fmt.Errorf("batch %v, wanted %v", tokens, *wanted)
	}
	return nil
}

func TestWriteSafetensors(t *testing.T) {
	w, path := alone(t), filepath.Join(t.TempDir(), "a.safetensors")
	a, b := sw.FromSlice(w, []float32{1, 2, 3, 4, 5, 6}, []int64{2, 3}), sw.Ones(w, nil, sw.BF16)
	tensors := []sw.NamedTensor{{Name: "b", Tensor: b}, {Name: "a", Tensor: a}}
	if err := sw.WriteSafetensors(path, tensors, map[string]string{"format": "pt"}); err != nil {
		t.Fatal(err)
	}
	if err := sw.WriteSafetensors(path, tensors, nil); !errors.Is(err, sw.AlreadyExists) || !strings.Contains(err.Error(), "WriteSafetensors: ") {
		t.Error(err)
	}
	text, err := os.ReadFile(path)
	if err != nil || !strings.Contains(string(text), `"format":"pt"`) || !strings.Contains(string(text), `"BF16"`) {
		t.Errorf("%q, %v", text, err)
	}
	for _, wrong := range []struct {
		tensors []sw.NamedTensor
		words   string
	}{{nil, "nil"}, {[]sw.NamedTensor{{Name: "a"}}, "nil"}, {[]sw.NamedTensor{{Name: "a\x00", Tensor: a}}, "NUL"},
		{[]sw.NamedTensor{{Name: "a", Tensor: a}, {Name: "a", Tensor: b}}, "a"}} {
		if err := sw.WriteSafetensors(path+"2", wrong.tensors, nil); !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), wrong.words) {
			t.Errorf("%v: %v", wrong.tensors, err)
		}
	}
	if err := sw.WriteSafetensors(path+"3", tensors, map[string]string{"a\x00": "b"}); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
}
