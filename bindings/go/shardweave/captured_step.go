package shardweave

import (
	"runtime"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// CapturedStep is a step on a GPU that is captured once and replayed: the GPU runs its kernels and collectives again, and the
// host does nothing for each of them (a CUDA graph).
//
//	for i := 0; i < 3; i++ {
//		err = train() // as ever: what is made at first use is there
//	}
//	step, err := sw.CaptureStep(mesh, parameters, train)
//	for batches.Next(words) { // copied into inputs, which are where they were
//		err = step.Replay()
//		if n++; n%100 == 0 {
//			fmt.Println(loss.Item()) // and so are results
//		}
//	}
//
// All shapes are those of the capture, and so is what the host decides in the step (branches, numbers that it computes): the
// next batch and a schedule's learning rate come between replays, never in the step, and ZeroGrad before Backward, in it.
// Between replays anything may be called: it finds the weights as the last one has left them. Read anew in each replay: steps and learning rates of an [Optimizer] (SGD, Adam, AdamW), and random numbers go on as if the step
// had been called (where the library has kernels for them: --config=cuda). Functions of Go, traces and counters see the step
// once. No number of it may be wanted by the host ([Tensor.Item], [ClipGradNorm], a [GradScaler]): that is an error.
//
// What the step allocates stays the graph's until Close: its results and the gradients hold the numbers of the last replay,
// and may not be used after it. Tensors that the step only reads (inputs, weights) must stay where they are, and open. See
// [CaptureStep].
type CapturedStep struct {
	_ noCopy
	*thing[c.CapturedStep]
}

func (s *CapturedStep) home() (*rank, error) {
	if s == nil || s.thing == nil {
		return nil, noThing("CapturedStep")
	}
	return s.rank, nil
}

// CaptureStep calls step once, on this goroutine, which keeps its thread meanwhile; what step starts on others is not
// captured. Nothing of it runs: the first [CapturedStep.Replay] is the first time. Its tensors are closed when it returns, but
// for those that it has kept ([Tensor.Keep]): a loss that is to be read. parameters are those that the step has gradients for;
// without Backward, a tensor that it reads. The first one's GPU is the step's.
//
// FailedPrecondition: LibTorch has no CUDA here, the backend is not NCCL (one rank needs none), something is being captured
// already, the step wants a number on the host, or random numbers without kernels. InvalidArgument: a parameter is on the CPU
// or on another GPU; a rank has captured another step. Unimplemented: a step of another optimizer. An error of step comes out
// with its code, a panic as an error; the mesh can be used as before. Collective: all ranks of the mesh capture the same step.
func CaptureStep(mesh *Mesh, parameters []*Tensor, step func() error) (*CapturedStep, error) {
	if step == nil {
		return nil, invalid("argument 'step' is nil")
	}
	all := []used{mesh}
	for _, parameter := range parameters {
		all = append(all, parameter)
	}
	defer runtime.KeepAlive(parameters)
	return ask(func(r *rank) (*CapturedStep, error) {
		handle, err := c.CapturedStepCreate(mesh.handle, handlesOf(parameters), func() error {
			return private(r.callback(r.mode, step))
		})
		if err != nil {
			return nil, err
		}
		return &CapturedStep{thing: own(r, "captured step", handle, c.CapturedStepFree)}, nil
	}, all...)
}

// Close waits for the last replay, and ends what the step has allocated.
func (s *CapturedStep) Close() error {
	if s == nil {
		return nil
	}
	return s.thing.close()
}

// Replay runs the step on the GPU, behind what is there; the host does not wait. All ranks replay it equally often: a rank
// that does not is an error on the others. Collective.
func (s *CapturedStep) Replay() error {
	return do(func(*rank) error { return c.CapturedStepReplay(s.handle) }, s)
}

// Replays says how often, so far.
func (s *CapturedStep) Replays() (int64, error) {
	return ask(func(*rank) (int64, error) { return c.CapturedStepReplays(s.handle) }, s)
}
