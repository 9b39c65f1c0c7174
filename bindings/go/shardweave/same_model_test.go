package shardweave_test

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
	"github.com/shardweave/shardweave/bindings/go/shardweave/nn"
)

// The model, the plan and the losses that all languages share (tests/same_model/README.md), written down in Go.
const (
	sameVocabulary = 13
	sameDim        = 24
	sameHeads      = 12
	sameLayers     = 2
	sameLength     = 6
	sameBatch      = 5
)

type sameBlock struct {
	Norm1      *nn.LayerNorm
	Q, K, V, O *nn.Linear
	Norm2      *nn.LayerNorm
	Up, Down   *nn.Linear
}

func newSameBlock(w *sw.World) *sameBlock {
	square := func() *nn.Linear { return nn.NewLinear(w, sameDim, sameDim) }
	return &sameBlock{
		Norm1: nn.NewLayerNorm(w, sameDim), Q: square(), K: square(), V: square(), O: square(),
		Norm2: nn.NewLayerNorm(w, sameDim), Up: nn.NewLinear(w, sameDim, 4*sameDim), Down: nn.NewLinear(w, 4*sameDim, sameDim),
	}
}

func (b *sameBlock) forward(x *sw.Tensor) *sw.Tensor {
	n := b.Norm1.Forward(x)
	heads := func(l *nn.Linear) *sw.Tensor {
		return l.Forward(n).View(sameBatch, sameLength, sameHeads, sameDim/sameHeads).Transpose(1, 2)
	}
	mixed := heads(b.Q).Attention(heads(b.K), heads(b.V), true)
	y := x.Add(b.O.Forward(mixed.Transpose(1, 2).Reshape(sameBatch, sameLength, sameDim)))
	return y.Add(b.Down.Forward(b.Up.Forward(b.Norm2.Forward(y)).Gelu()))
}

type sameGPT struct {
	*sw.Module
	Embedding, Positions *nn.Embedding
	Blocks               []*sameBlock
	Norm                 *nn.LayerNorm
	Head                 *nn.Linear
}

// newSameGPT has the values of the README, which come from no generator.
func newSameGPT(w *sw.World) (*sameGPT, error) {
	m := &sameGPT{Embedding: nn.NewEmbedding(w, sameVocabulary, sameDim), Positions: nn.NewEmbedding(w, sameLength, sameDim),
		Norm: nn.NewLayerNorm(w, sameDim), Head: nn.NewLinear(w, sameDim, sameVocabulary, nn.NoBias)}
	for i := 0; i < sameLayers; i++ {
		m.Blocks = append(m.Blocks, newSameBlock(w))
	}
	if _, err := w.ModuleOf(m); err != nil {
		return nil, err
	}
	parameters, err := m.Parameters()
	if err != nil {
		return nil, err
	}
	for p, parameter := range parameters {
		sizes, err := parameter.Sizes()
		if err != nil {
			return nil, err
		}
		count, above := uint32(1), float32(0)
		for _, size := range sizes {
			count *= uint32(size)
		}
		if strings.Contains(parameter.Name, "norm") && strings.HasSuffix(parameter.Name, "weight") {
			above = 1
		}
		values := make([]float32, count)
		for i := range values {
			mixed := uint32(i)*2654435761 + uint32(p)*2246822519 + 374761393
			bits := (mixed ^ (mixed >> 15)) * 2246822519
			values[i] = float32(bits>>8)/33554432 - 0.25 + above
		}
		if err := parameter.Detach().Apply("aten::copy_", sw.FromSlice(w, values, sizes)).Err(); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *sameGPT) loss(tokens, targets *sw.Tensor) *sw.Tensor {
	x := m.Embedding.Forward(tokens).Add(m.Positions.Weight)
	for _, b := range m.Blocks {
		x = b.forward(x)
	}
	return m.Head.Forward(m.Norm.Forward(x)).View(-1, sameVocabulary).CrossEntropy(targets.View(-1))
}

// sameTokens is what the model reads, or, one token further on, what is to come out of it.
func sameTokens(shift int64) []int64 {
	var tokens []int64
	for b := int64(0); b < sameBatch; b++ {
		for t := shift; t < shift+sameLength; t++ {
			tokens = append(tokens, (5*b+3*t+b*t)%sameVocabulary)
		}
	}
	return tokens
}

func trainSameGPT(w *sw.World, mesh string, plan []byte, steps int) ([]float64, error) {
	onMesh, err := w.ParseMesh(mesh)
	if err != nil {
		return nil, err
	}
	m, err := newSameGPT(w)
	if err != nil {
		return nil, err
	}
	p, err := sw.ParsePlan(string(plan))
	if err != nil {
		return nil, err
	}
	if err := m.Distribute(onMesh, p, sw.SameEverywhere); err != nil {
		return nil, err
	}
	rows := sw.On{}
	if strings.HasPrefix(mesh, "dp=") {
		rows["dp"] = "S(0)"
	}
	batch := func(shift int64) *sw.Tensor {
		return sw.FromSlice(w, sameTokens(shift), []int64{sameBatch, sameLength}).Distribute(onMesh, rows, sw.SameEverywhere)
	}
	tokens, targets := batch(0), batch(1)
	parameters, err := m.Parameters()
	if err != nil {
		return nil, err
	}
	optimizer, err := sw.NewAdamW(sw.Tensors(parameters), 0.01)
	if err != nil {
		return nil, err
	}
	defer optimizer.Close()
	var losses []float64
	for step := 0; step < steps; step++ {
		err := w.Scope(func() error {
			loss := m.loss(tokens, targets)
			for _, next := range []func() error{func() error { return loss.Backward() }, m.FinishGradSync, optimizer.Step, optimizer.ZeroGrad} {
				if err := next(); err != nil {
					return err
				}
			}
			number, err := loss.Item()
			losses = append(losses, number)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return losses, nil
}

func TestTheLossesAreThoseOfEveryLanguage(t *testing.T) {
	folder := os.Getenv("SHARDWEAVE_SAME_MODEL")
	if folder == "" {
		t.Skip("SHARDWEAVE_SAME_MODEL does not name the folder tests/same_model; Bazel's test does")
	}
	plan := mustOf(os.ReadFile(filepath.Join(folder, "plan.json")))
	var wanted struct{ Losses []float64 }
	if err := json.Unmarshal(mustOf(os.ReadFile(filepath.Join(folder, "losses.json"))), &wanted); err != nil || len(wanted.Losses) != 20 {
		t.Fatal(len(wanted.Losses), err)
	}
	for mesh, ranks := range map[string]int{"tp=1": 1, "tp=2": 2, "tp=4": 4, "dp=2,tp=2": 4, "tp=3": 3} {
		run(t, ranks, func(w *sw.World) error {
			losses, err := trainSameGPT(w, mesh, plan, len(wanted.Losses))
			if err != nil {
				return fmt.Errorf("%s: %w", mesh, err)
			}
			for step, loss := range losses {
				if want := wanted.Losses[step]; !(math.Abs(loss-want) <= 1e-5*want) {
					t.Errorf("%s, step %d: %v, wanted %v", mesh, step+1, loss, want)
				}
			}
			return nil
		})
	}
}
