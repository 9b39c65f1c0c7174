package main

import (
	"fmt"
	"io"
	"math"
	"strings"
	"time"
)

// progress tells how far the training is: the loss of every step, the speed, and a bar. On a terminal one
// line is redrawn; elsewhere a line is printed for every tenth of the way.
type progress struct {
	title           string
	steps           int64
	tokensPerStep   int64
	out             io.Writer
	terminal        bool
	losses          []float64
	warmUp          int64 // steps that do not count for the speed: caches are still empty
	countedFrom, at time.Time
}

func newProgress(title string, steps, tokensPerStep int64, out io.Writer, terminal bool) *progress {
	warmUp := steps / 2
	if warmUp > 5 {
		warmUp = 5
	}
	return &progress{title: title, steps: steps, tokensPerStep: tokensPerStep, out: out, terminal: terminal,
		warmUp: warmUp, countedFrom: time.Now()}
}

func (p *progress) step(loss float64) {
	p.losses = append(p.losses, loss)
	p.at = time.Now()
	if int64(len(p.losses)) == p.warmUp {
		p.countedFrom = p.at
	}
	p.print()
}

func (p *progress) tokensPerSecond() float64 {
	steps := int64(len(p.losses))
	if steps > p.warmUp {
		steps -= p.warmUp
	}
	return float64(steps*p.tokensPerStep) / math.Max(p.at.Sub(p.countedFrom).Seconds(), 1e-9)
}

func (p *progress) print() {
	const width = 24
	done := int64(len(p.losses))
	tenth := p.steps / 10
	if tenth < 1 {
		tenth = 1
	}
	last := done == p.steps
	if !p.terminal && done%tenth != 0 && done != 1 && !last {
		return
	}
	filled := int(done * width / p.steps)
	bar := strings.Repeat("=", filled)
	if filled < width {
		bar += ">" + strings.Repeat(" ", width-filled-1)
	}
	line := fmt.Sprintf("%s [%s] %d/%d  loss %.3f", p.title, bar, done, p.steps, p.losses[done-1])
	if done > p.warmUp || p.steps <= 2 { // the very first steps say little about the rest
		speed := p.tokensPerSecond()
		left := float64((p.steps-done)*p.tokensPerStep) / speed
		line += fmt.Sprintf("  %.0f tokens/s  %s left", speed, formatSeconds(left))
	}
	if p.terminal {
		line = "\r\x1b[K" + line // clears what the line before has left on the right
	}
	if !p.terminal || last {
		line += "\n"
	}
	io.WriteString(p.out, line)
}

// formatSeconds is "0:07", "12:34", "1:02:03".
func formatSeconds(seconds float64) string {
	s := int64(math.Ceil(math.Min(math.Max(seconds, 0), 1e9)))
	if s >= 3600 {
		return fmt.Sprintf("%d:%02d:%02d", s/3600, s/60%60, s%60)
	}
	return fmt.Sprintf("%d:%02d", s/60, s%60)
}
