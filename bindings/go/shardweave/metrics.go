package shardweave

import (
	"context"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Metric is a number of a step.
type Metric struct {
	Name  string
	Value float64
}

// MetricsWriter writes a run's numbers, step by step, for people and programs; one rank does, usually the first. It belongs to no
// rank, several goroutines may use it, and it is never closed: the garbage collector ends it, after [MetricsWriter.Flush]
// has said that all is in the file.
//
//	log, err := sw.OpenJSONLines("run.jsonl")
//	err = log.Write(10, sw.Metric{Name: "loss", Value: 2.5}) // {"step":10,"time":1732461123.25,"loss":2.5}
type MetricsWriter struct {
	_ noCopy
	*lasting[c.MetricsWriter]
}

func (m *MetricsWriter) it() *lasting[c.MetricsWriter] {
	if m == nil {
		return nil
	}
	return m.lasting
}

// OpenJSONLines writes a line of JSON for each step, which is in the file when Write returns. It appends; of a file that a run
// has left in the middle of a line, this line goes. A run that goes on at an earlier step writes steps again: of these the last
// counts.
func OpenJSONLines(path string) (*MetricsWriter, error) {
	handle, err := c.MetricsWriterOpenJSONLines(path)
	if err != nil {
		return nil, public(err)
	}
	return &MetricsWriter{lasting: last(handle, c.MetricsWriterFree)}, nil
}

// CreateEventFile begins a new file in folder, which is made if it is not there: TensorBoard draws a curve for each name.
// Values travel as float32. firstStep is where a run goes on: what other files have from there on is shown no more. 0: from the
// beginning.
func CreateEventFile(folder string, firstStep int64) (*MetricsWriter, error) {
	handle, err := c.MetricsWriterCreateEvents(folder, firstStep)
	if err != nil {
		return nil, public(err)
	}
	return &MetricsWriter{lasting: last(handle, c.MetricsWriterFree)}, nil
}

// Write is the system's error, then and ever after. InvalidArgument for lines of JSON with a metric that is called "step" or
// "time", or as another one.
func (m *MetricsWriter) Write(step int64, metrics ...Metric) error {
	names, values := make([]string, len(metrics)), make([]float64, len(metrics))
	for i, metric := range metrics {
		names[i], values[i] = metric.Name, metric.Value
	}
	_, err := with(m.it(), func(handle c.MetricsWriter) (struct{}, error) {
		return struct{}{}, c.MetricsWriterWrite(handle, step, names, values)
	})
	return err
}

// Flush returns when what was written is in the file.
func (m *MetricsWriter) Flush() error {
	_, err := with(m.it(), func(handle c.MetricsWriter) (struct{}, error) {
		return struct{}{}, c.MetricsWriterFlush(handle)
	})
	return err
}

// AnyRank says whether any rank says yes; the same answer on all of them. At the end of a step it is how they agree to end,
// whichever of them a batch system has told to:
//
//	signals := make(chan os.Signal, 1)
//	signal.Notify(signals, syscall.SIGTERM, syscall.SIGUSR1)
//	...
//	ends, err := sw.AnyRank(ctx, w.Comm(), len(signals) > 0)
//	if err != nil {
//		return err
//	}
//	if ends {
//		break // save, on all ranks at the same step
//	}
func AnyRank(ctx context.Context, g *Comm, says bool) (bool, error) {
	word := []int32{0}
	if says {
		word[0] = 1
	}
	err := AllReduce(ctx, g, word, word, Max)
	return word[0] != 0, err
}
