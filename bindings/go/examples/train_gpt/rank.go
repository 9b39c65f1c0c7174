package main

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"math"
	"os"
	"runtime"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// rank is what one rank does, from the text to the sample; rank 0 tells about it.
type rank struct {
	world    *sw.World
	settings *settings
	activity string // for those who find out that it had to stop
	out      io.Writer
	terminal bool
}

// runRank's error begins with what the rank was doing.
func runRank(w *sw.World, s *settings) error {
	r := &rank{world: w, settings: s, out: io.Discard}
	if w.Rank() == 0 {
		file := os.Stdout
		if s.json {
			file = os.Stderr
		}
		info, err := file.Stat()
		r.out, r.terminal = file, err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	if err := r.run(); err != nil {
		return fmt.Errorf("%s: %w", r.activity, err)
	}
	return nil
}

func (r *rank) run() error {
	w, s := r.world, r.settings
	threads := runtime.NumCPU() / w.Size()
	if threads < 1 {
		threads = 1
	}
	r.activity = "starting"
	if err := sw.SetNumThreads(threads); err != nil {
		return err
	}
	r.activity = "reading the text"
	text, err := readText(s.data)
	if err != nil {
		return err
	}
	if int64(len(text)) <= s.seq {
		return fmt.Errorf("--seq=%d: the text has only %d bytes, wanted more than --seq", s.seq, len(text))
	}
	r.activity = "comparing settings with the other ranks"
	if err := r.checkSameEverywhere(text); err != nil {
		return err
	}
	r.activity = "making the mesh"
	mesh, err := w.Mesh(s.mesh...)
	if err != nil {
		return err
	}
	r.activity = "making the model"
	m, err := makeModel(w, s, mesh)
	if err != nil {
		return err
	}
	if err := printLayouts(m, mesh, r.out); err != nil {
		return err
	}

	done := r.progress("training", s.steps)
	communication, err := mesh.Trace()
	if err != nil {
		return err
	}
	r.activity = fmt.Sprintf("training step 1 of %d", s.steps)
	before, err := train(w, m, s, text, mesh, func(loss float64) error {
		done.step(loss)
		if int64(len(done.losses)) == s.steps {
			return nil
		}
		r.activity = fmt.Sprintf("training step %d of %d", len(done.losses)+1, s.steps)
		return communication.Clear()
	})
	if err != nil {
		return err
	}
	if s.resume != "" {
		fmt.Fprintf(r.out, "went on after step %d of %s\n", before, s.resume)
	}
	fmt.Fprintf(r.out, "collectives of one step, on rank 0:\n%v", communication)
	communication.Close()

	if made := int64(len(done.losses)); made < s.steps {
		fmt.Fprintf(r.out, "told to end: saved after step %d, --resume=%s goes on\n", before+made, s.save)
		return r.report(done, nil)
	}
	r.activity = "generating the sample"
	prompt, generated, err := sample(w, m, s, text, mesh)
	if err != nil {
		return err
	}
	printSample(prompt, generated, r.out)
	if w.Rank() != 0 {
		return nil
	}
	return r.finish(text, done, before)
}

// checkSameEverywhere: ranks that were started with different flags or files would train on, wrongly.
func (r *rank) checkSameEverywhere(text []byte) error {
	hash := fnv.New64a()
	fmt.Fprint(hash, r.settings)
	hash.Write(text)
	all := make([]uint64, r.world.Size())
	if err := sw.AllGather(r.world.Context(), r.world.Comm(), []uint64{hash.Sum64()}, all); err != nil {
		return err
	}
	for other, theirs := range all {
		if theirs != all[0] {
			return fmt.Errorf("ranks 0 and %d were started with different flags or texts; here: %v, %d bytes of text",
				other, r.settings, len(text))
		}
	}
	return nil
}

func (r *rank) progress(title string, steps int64) *progress {
	return newProgress(title, steps, r.settings.batch*r.settings.seq, r.out, r.terminal)
}

// finish is for rank 0, which needs the others no more.
func (r *rank) finish(text []byte, done *progress, before int64) error {
	var difference *float64
	if r.settings.check {
		r.activity = "training on one rank, to compare"
		unbroken := *r.settings
		unbroken.steps += before
		alone := r.progress("one rank", unbroken.steps)
		m, err := makeModel(r.world, &unbroken, nil)
		if err != nil {
			return err
		}
		defer m.Close()
		_, err = train(r.world, m, &unbroken, text, nil, func(loss float64) error {
			alone.step(loss)
			return nil
		})
		if err != nil {
			return err
		}
		largest := largestDifference(done.losses, alone.losses[before:])
		difference = &largest
		fmt.Fprintf(r.out, "largest difference between the losses of a step: %.6g\n", largest)
	}
	return r.report(done, difference)
}

// report is a line of JSON, of rank 0 and if it is asked for.
func (r *rank) report(done *progress, difference *float64) error {
	if !r.settings.json || r.world.Rank() != 0 {
		return nil
	}
	return json.NewEncoder(os.Stdout).Encode(struct {
		Ranks           int      `json:"ranks"`
		FirstLoss       float64  `json:"first_loss"`
		LastLoss        float64  `json:"last_loss"`
		TokensPerSecond float64  `json:"tokens_per_second"`
		MaxLossDiff     *float64 `json:"max_loss_diff"`
	}{r.world.Size(), done.losses[0], done.losses[len(done.losses)-1], done.tokensPerSecond(), difference})
}

// largestDifference is NaN if a loss is.
func largestDifference(a, b []float64) float64 {
	largest := 0.0
	for i := range a {
		if difference := math.Abs(a[i] - b[i]); !(difference <= largest) {
			largest = difference
		}
	}
	return largest
}
