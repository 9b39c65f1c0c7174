package main

import sw "github.com/shardweave/shardweave/bindings/go/shardweave"

// Tensor parallelism as in Megatron-LM (Shoeybi et al., 2019): q, k, v and up are cut by their outputs, o
// and down by their inputs, so that a block needs one reduction after attention and one after the MLP.
// Everything else is replicated.
const plan = `{"parameter": {
	"*.{q,k,v,up}.*": {"tp": "S(0)"},
	"*.{o,down}.weight": {"tp": "S(1)"}
}}`

// makeModel makes the same weights on every mesh; without a mesh (nil) they are plain tensors.
func makeModel(w *sw.World, s *settings, mesh *sw.Mesh) (*gpt, error) {
	m, err := newGPT(w, s)
	if err != nil || mesh == nil {
		return m, err
	}
	p, err := sw.ParsePlan(plan)
	if err != nil {
		return nil, err
	}
	// Every rank makes the same weights and batches, so that none has to be sent.
	if err := m.Distribute(mesh, p, sw.SameEverywhere); err != nil || !s.fullySharded() {
		return m, err
	}
	// A unit for each block, and one for the rest: whole while it is used, forward and backward.
	_, err = m.FullyShard(mesh, sw.SameEverywhere, sw.WithMeshDim("dp"), sw.WithUnits("blocks.*"))
	return m, err
}

// checkpoints are what a run saves, and goes on from. The zero one has none.
type checkpoints struct {
	state        *sw.State
	checkpointer *sw.Checkpointer // nil: nothing is saved
	every, end   int64
	stop         *sw.GracefulStop
}

// newCheckpoints goes on, and says after which step.
func newCheckpoints(m *gpt, optimizer *sw.Optimizer, s *settings, mesh *sw.Mesh) (c *checkpoints, before int64, err error) {
	c = &checkpoints{every: s.saveEvery, stop: s.stop}
	if c.state, err = sw.NewState(mesh); err != nil {
		return nil, 0, err
	}
	// What a run needs to go on; the text's batches follow from the step.
	for _, err := range []error{c.state.AddModule("model.", m.Module), c.state.AddOptimizer("optimizer.", optimizer, m.Module),
		c.state.AddRandom("random", mesh)} {
		if err != nil {
			return nil, 0, err
		}
	}
	if s.resume != "" {
		loaded, err := c.state.Load(s.resume, mesh)
		if err != nil {
			return nil, 0, err
		}
		before = loaded.Step
	}
	if s.save != "" {
		if c.checkpointer, err = sw.NewCheckpointer(mesh, s.save); err != nil {
			return nil, 0, err
		}
		if err := c.checkpointer.Open(before); err != nil { // or hours later there is nowhere to save
			return nil, 0, err
		}
	}
	c.end = before + s.steps
	return c, before, nil
}

// stepDone saves beside training, and at the end, which it tells of.
func (c *checkpoints) stepDone(w *sw.World, done int64) (ends bool, err error) {
	if c.checkpointer == nil {
		return false, nil
	}
	if ends, err = c.stop.StepDone(w); err != nil {
		return false, err
	}
	switch {
	case ends || done == c.end:
		err = c.checkpointer.Save(done, c.state)
	case c.every > 0 && done%c.every == 0:
		_, err = c.checkpointer.SaveAsync(done, c.state)
	}
	return ends, err
}

func (c *checkpoints) Close() {
	c.checkpointer.Close()
	c.state.Close()
}

// train makes s.steps steps, and calls stepDone with the loss of each. Before is how many were made by a run that this one
// goes on from. Without a mesh nothing is saved, nor gone on from. Told to end, a run that saves makes fewer.
func train(w *sw.World, m *gpt, s *settings, text []byte, mesh *sw.Mesh, stepDone func(loss float64) error) (before int64, err error) {
	if mesh != nil && s.parallel == "ddp" {
		// Gradients leave in buckets while Backward goes on, as long as this lives.
		ddp, err := m.DistributedDataParallel(mesh, "dp", sw.SameEverywhere)
		if err != nil {
			return 0, err
		}
		defer ddp.Close()
	}
	parameters, err := m.Parameters()
	if err != nil {
		return 0, err
	}
	optimizer, err := sw.NewAdamW(sw.Tensors(parameters), s.lr)
	if err != nil {
		return 0, err
	}
	defer optimizer.Close()
	if mesh != nil && s.zeroStage() > 0 {
		if err := optimizer.UseZeRO(sw.ZeRO{MeshDim: "dp", Stage: s.zeroStage()}); err != nil {
			return 0, err
		}
	}
	saved := &checkpoints{}
	if mesh != nil {
		if saved, before, err = newCheckpoints(m, optimizer, s, mesh); err != nil {
			return 0, err
		}
		defer saved.Close()
	}
	rows := sw.On{"dp": "S(0)"}
	if s.parallel == "hsdp" {
		rows["replicas"] = "S(0)"
	}
	s.stop.Training(saved.checkpointer != nil)
	for step := before; step < before+s.steps; step++ {
		var loss float64
		err := w.Scope(func() error { // whose tensors end with it
			batch := func(numbers []int64) *sw.Tensor {
				t := sw.FromSlice(w, numbers, []int64{s.batch, s.seq})
				if mesh == nil {
					return t
				}
				// Each row of the mesh gets its share of the sequences.
				return t.Distribute(mesh, rows, sw.SameEverywhere)
			}
			tokens, targets := batchOf(text, s, step)
			l := m.loss(batch(tokens), batch(targets))
			if err := l.Backward(); err != nil {
				return err
			}
			for _, next := range []func() error{m.FinishGradSync, optimizer.Step, optimizer.ZeroGrad} {
				if err := next(); err != nil {
					return err
				}
			}
			loss, err = l.Item()
			return err
		})
		if err != nil {
			return 0, err
		}
		if err := stepDone(loss); err != nil {
			return 0, err
		}
		if ends, err := saved.stepDone(w, step+1); err != nil || ends {
			return before, err
		}
	}
	return before, nil
}

// sample is bytes that the model writes, and those of the text that it was given to begin with.
func sample(w *sw.World, m *gpt, s *settings, text []byte, mesh *sw.Mesh) (prompt, generated []byte, err error) {
	const temperature = 0.7
	seed := s.seed + 1 // not the numbers that the batches come from
	start := randomAt(seed, uint64(s.sampled)) % (uint64(len(text)) - uint64(s.seq))
	prompt = text[start : start+uint64(s.seq)]
	all := append([]byte(nil), prompt...)
	for i := int64(0); i < s.sampled; i++ {
		err := w.Scope(func() error {
			return w.With(sw.NoGrad, func() error {
				tokens := sw.FromSlice(w, toTokens(all[int64(len(all))-s.seq:]), []int64{1, s.seq})
				if mesh != nil {
					tokens = tokens.Distribute(mesh, nil, sw.SameEverywhere)
				}
				scores := m.forward(tokens).Index(sw.All, -1).Full()
				sums := scores.Div(temperature).Softmax(-1).CumSum(-1)
				next, err := sums.Lt(uniformAt(seed, uint64(i))).Sum().Item()
				if next > vocabulary-1 {
					next = vocabulary - 1
				}
				all = append(all, byte(next))
				return err
			})
		})
		if err != nil {
			return nil, nil, err
		}
	}
	return prompt, all[s.seq:], nil
}
