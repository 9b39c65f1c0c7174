package shardweave

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// World is one rank's view of all ranks, and the owner of what this rank makes.
type World struct {
	_ noCopy
	*world
}

// world is what a World, and whoever copied it, means.
type world struct {
	*thing[c.World]
	size      int
	localRank int
	comm      *Comm
	stop      func()
}

func (w *World) home() (*rank, error) {
	if w == nil || w.world == nil {
		return nil, noThing("World")
	}
	return w.rank, nil
}

// WorldOption is an option of RunRanks, Spawn, FromEnvironment and Join.
type WorldOption func(*worldOptions)

type worldOptions struct {
	backend, networkInterface string
	timeout                   time.Duration
	device                    Device
	noPrefix                  bool // and what follows: of Spawn
	args                      []string
}

// WithTimeout is the deadline of the rendezvous and of every collective; else, and if d is 0, five minutes.
func WithTimeout(d time.Duration) WorldOption { return func(o *worldOptions) { o.timeout = d } }

// WithBackend chooses how processes communicate: "gloo", as without, or "nccl" between GPUs. (Ranks of RunRanks, which are
// goroutines, have "inproc".)
func WithBackend(name string) WorldOption { return func(o *worldOptions) { o.backend = name } }

// WithDevice names this process's GPU, as CUDA numbers those that are visible; else, and if it is the
// CPU, it has with backend "nccl" that of its local rank, with "gloo" none. A GPU's memory goes by way
// of the host with "gloo": slowly, but several processes may have one GPU.
func WithDevice(gpu Device) WorldOption { return func(o *worldOptions) { o.device = gpu } }

// WithNetworkInterface chooses the network; else loopback on one host, or what the host's name means.
func WithNetworkInterface(name string) WorldOption {
	return func(o *worldOptions) { o.networkInterface = name }
}

func worldOptionsOf(options []WorldOption) worldOptions {
	var o worldOptions
	for _, option := range options {
		if option != nil {
			option(&o)
		}
	}
	return o
}

// RunRanks calls body on ranks goroutines, each with its world, which is closed afterwards, and waits
// for all. If one fails, the others' collectives fail, naming it; the result is the failure that came
// first, with its rank. When ctx is done, collectives and operators on sharded tensors fail on all ranks, and a result
// that is an error is ctx's, too; it is nil if all bodies return nil nevertheless. Before the start ctx's error is the
// result, and no body is called. A panic of a body ends the others in the same way, and goes on here as a *[Panic].
func RunRanks(ctx context.Context, ranks int, body func(*World) error, options ...WorldOption) error {
	if err := usable(ctx); err != nil {
		return err
	}
	if err := int32s(ranks); err != nil {
		return err
	}
	if body == nil {
		return noBody()
	}
	o := worldOptionsOf(options)
	if o.device.Kind != CPU {
		return invalid("WithDevice(%v) is of ranks that are processes; tensors of goroutines say where they are", o.device)
	}
	if err := notNegative("WithTimeout", o.timeout); err != nil {
		return err
	}
	handles, err := c.WorldCreateLocal(int32(ranks), o.backend, o.timeout)
	if err != nil {
		return public(err)
	}
	worlds := make([]*World, len(handles))
	for number, handle := range handles {
		if worlds[number], err = newWorld(ctx, handle); err != nil {
			for _, w := range worlds[:number] {
				w.Close()
			}
			for _, handle := range handles[number+1:] {
				c.WorldFree(handle)
			}
			return err
		}
	}

	var wg sync.WaitGroup
	var mutex sync.Mutex
	var first error // and what came first of panics
	var panicked *Panic
	fail := func(w *World, err error, p *Panic) {
		if err == nil {
			return
		}
		err = &rankError{w.Rank(), err}
		mutex.Lock()
		if first == nil {
			first = err
		}
		if panicked == nil {
			panicked = p
		}
		mutex.Unlock()
		w.abort("failed: " + firstLine(err))
	}
	for _, w := range worlds {
		wg.Add(1)
		go func(w *World) {
			defer wg.Done()
			// LibTorch and OpenMP keep caches and threads of their own for every thread.
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			guard(w, body, func(err error, p *Panic) {
				fail(w, err, p)
				fail(w, w.Close(), nil)
			})
		}(w)
	}
	wg.Wait()
	if panicked != nil {
		panic(panicked)
	}
	return because(ctx, first)
}

// Panic is the panic of a rank, with which [RunRanks] panics.
type Panic struct {
	Rank  int
	Value any    // what the rank panicked with
	Stack []byte // where
}

func (p *Panic) Error() string {
	return fmt.Sprintf("rank %d: panic: %v\n\n%s", p.Rank, p.Value, p.Stack)
}

// Unwrap is the value, if it is an error.
func (p *Panic) Unwrap() error {
	err, _ := p.Value.(error)
	return err
}

func firstLine(err error) string { return strings.SplitN(err.Error(), "\n", 2)[0] }

// guard calls ended with the error of the body, however it ends; a panic is an error too.
func guard(w *World, body func(*World) error, ended func(error, *Panic)) {
	var err error
	returned := false
	defer func() {
		if returned {
			ended(err, nil)
		} else if value := recover(); value != nil {
			ended(fmt.Errorf("panic: %v", value), &Panic{w.Rank(), value, debug.Stack()})
		} else { // runtime.Goexit, as testing.T.FailNow calls it
			ended(errors.New("the goroutine ended"), nil)
		}
	}()
	err = body(w)
	returned = true
}

// FromEnvironment joins the ranks that torchrun, Slurm, Open MPI, PMI, PMIx, Kubernetes, or RANK,
// WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe. The error is NotFound if nothing has started this
// process. When ctx is done, now or later, the world is aborted.
func FromEnvironment(ctx context.Context, options ...WorldOption) (*World, error) {
	o := worldOptionsOf(options)
	return join(ctx, o, func(timeout time.Duration) (c.World, error) {
		return c.WorldFromEnvironment(o.backend, o.networkInterface, timeout, o.device.inner())
	})
}

// Rendezvous describes ranks that nothing else does.
type Rendezvous struct {
	Rank, WorldSize int
	File            string // a path that all ranks can open and only this run uses; or "" and
	Host            string // where rank 0 serves a store, as the others reach it
	Port            int
	Run             string // names this start of the program, the same on all ranks; "": "run"
}

// Join joins the ranks that the caller describes. ctx as in FromEnvironment.
func Join(ctx context.Context, r Rendezvous, options ...WorldOption) (*World, error) {
	o := worldOptionsOf(options)
	if err := int32s(r.Rank, r.WorldSize, r.Port); err != nil {
		return nil, err
	}
	inner := c.Rendezvous{Rank: int32(r.Rank), WorldSize: int32(r.WorldSize), File: r.File, Host: r.Host,
		Port: int32(r.Port), LocalRank: -1, Run: r.Run}
	return join(ctx, o, func(timeout time.Duration) (c.World, error) {
		return c.WorldJoin(inner, o.backend, o.networkInterface, timeout, o.device.inner())
	})
}

// join gives up waiting when ctx is done; the rendezvous itself then ends at its deadline.
func join(ctx context.Context, o worldOptions, rendezvous func(time.Duration) (c.World, error)) (*World, error) {
	if err := usable(ctx); err != nil {
		return nil, err
	}
	if err := notNegative("WithTimeout", o.timeout); err != nil {
		return nil, err
	}
	type joined struct {
		handle c.World
		err    error
	}
	done := make(chan joined, 1)
	go func() {
		handle, err := rendezvous(o.timeout)
		done <- joined{handle, err}
	}()
	select {
	case j := <-done:
		if j.err != nil {
			return nil, public(j.err)
		}
		return newWorld(ctx, j.handle)
	case <-ctx.Done():
		go func() {
			if j := <-done; j.err == nil {
				c.WorldFree(j.handle)
			}
		}()
		return nil, doneOf(ctx)
	}
}

// Alone is a world of one rank.
func Alone() (*World, error) {
	handles, err := c.WorldCreateLocal(1, "", 0)
	if err != nil {
		return nil, public(err)
	}
	return newWorld(context.Background(), handles[0])
}

// Counting is one rank of a world of any size that is not there: communication is counted, nothing
// moves.
func Counting(number, ranks int) (*World, error) {
	if err := int32s(number, ranks); err != nil {
		return nil, err
	}
	handle, err := c.WorldCreateCounting(int32(number), int32(ranks))
	if err != nil {
		return nil, public(err)
	}
	return newWorld(context.Background(), handle)
}

// newWorld takes the handle over.
func newWorld(ctx context.Context, handle c.World) (*World, error) {
	number, err1 := c.WorldRank(handle)
	size, err2 := c.WorldSize(handle)
	localRank, err3 := c.WorldLocalRank(handle)
	comm, err4 := c.WorldComm(handle)
	for _, err := range []error{err1, err2, err3, err4} {
		if err != nil {
			c.CommFree(comm)
			c.WorldFree(handle)
			return nil, public(err)
		}
	}
	r := newRank(ctx, int(number))
	w := &World{world: &world{
		thing: &thing[c.World]{rank: r, what: "world", handle: handle, free: c.WorldFree},
		size:  int(size), localRank: int(localRank), comm: newComm(r, comm)}}
	w.stop = onDone(ctx, func() { w.abort(ctx.Err().Error()) })
	return w, nil
}

// Close ends the world and all that was made from it: this rank has left, and ranks that wait for it
// get Unavailable. Closing twice is allowed.
func (w *World) Close() error {
	if _, err := w.home(); err != nil {
		return nil
	}
	r := w.rank
	closing, ended := error(nil), false
	if err := r.ifOpen(func() {
		if r.callbacks > 0 {
			closing = notNow("a function of the host is running in a call of rank %d", r.number)
			return
		}
		r.release()
		ended = true
	}); err != nil {
		return err
	}
	if ended {
		w.stop() // before the handle goes: it may be in use there
		w.release()
	}
	return closing
}

// Rank is this rank's number, from 0. (Of a world that is nil, or was not made, -1; Size is 0 then.)
func (w *World) Rank() int {
	if _, err := w.home(); err != nil {
		return -1
	}
	return w.rank.number
}

// Size is how many ranks there are.
func (w *World) Size() int {
	if _, err := w.home(); err != nil {
		return 0
	}
	return w.size
}

// LocalRank is this rank's number among those of this machine.
func (w *World) LocalRank() int {
	if _, err := w.home(); err != nil {
		return -1
	}
	return w.localRank
}

// Comm is the group of all ranks. It ends with the world.
func (w *World) Comm() *Comm {
	if _, err := w.home(); err != nil {
		return nil // whose methods say so
	}
	return w.comm
}

// Context is the one that the world was made with.
func (w *World) Context() context.Context {
	if _, err := w.home(); err != nil {
		return context.Background()
	}
	return w.rank.ctx
}

// Abort breaks all groups of the world, on all ranks where the backend can: pending and later
// operations fail with Aborted and the reason. From any goroutine.
func (w *World) Abort(reason error) error {
	if _, err := w.home(); err != nil {
		return err
	}
	return w.abort(reasonOf(reason))
}

func (w *World) abort(reason string) error {
	return w.anytime(func(handle c.World) error { return c.WorldAbort(handle, reason) })
}

// reasonOf is the text of an error that may be nil.
func reasonOf(reason error) string {
	if reason == nil {
		return "no reason was given"
	}
	return reason.Error()
}

// Scope calls body, and closes all tensors that this rank makes meanwhile, except those that were
// kept. Scopes nest.
func (w *World) Scope(body func() error) (err error) {
	if body == nil {
		return noBody()
	}
	r, err := begin(w)
	if err != nil {
		return err
	}
	s := r.openScope()
	r.leave()
	defer func() {
		var late error
		if unended := r.ifOpen(func() { late = r.closeScope(s) }); unended != nil { // else the world has closed it
			late = unended
		}
		if err == nil {
			err = late
		}
	}()
	return body()
}

// With calls body with another mode: NoGrad for what is not to be recorded for gradients.
func (w *World) With(mode GradMode, body func() error) (err error) {
	if body == nil {
		return noBody()
	}
	if mode < Grad || mode > Inference {
		return invalid("argument 'mode' is %d; wanted Grad, NoGrad or Inference", mode)
	}
	r, err := begin(w)
	if err != nil {
		return err
	}
	return r.under(r.recording(mode), body)
}

// Autocast calls body under LibTorch's autocast, whose lists say which operators see what: products, convolutions and attention
// see floating-point tensors but F64 cast to dtype (weights too, at each use), most losses see 32 bits (on GPUs softmax, norms
// and sums, too); forms that write into a tensor cast nothing. BF16, F16, or F32 for no casts inside of another Autocast.
//
//	err := world.Autocast(sw.BF16, func() error {
//		loss = model.Loss(x)
//		return nil
//	})
//	loss.Backward()
//
// Backward belongs outside: an operator goes back in the types that it had, and a parameter's gradient has the parameter's.
func (w *World) Autocast(dtype DType, body func() error) (err error) {
	if body == nil {
		return noBody()
	}
	r, err := begin(w)
	if err != nil {
		return err
	}
	var casting GradMode
	switch dtype {
	case F32:
	case F16:
		casting = c.ModeAutocastF16
	case BF16:
		casting = c.ModeAutocastBF16
	default:
		r.leave()
		return invalid("argument 'dtype' is %v; wanted BF16 or F16, or F32 for no casts", dtype)
	}
	return r.under(r.mode&^autocasts|casting, body)
}

// FlightRecord is the last operations of every group of this rank, as JSON. From any goroutine, also
// while something hangs.
func (w *World) FlightRecord() (record string, err error) {
	if _, err := w.home(); err != nil {
		return "", err
	}
	err = w.anytime(func(handle c.World) (err error) {
		record, err = c.WorldFlightRecord(handle)
		return err
	})
	return record, err
}

// Counters counts the operations of all groups of this rank.
func (w *World) Counters() (Counters, error) {
	return ask(func(*rank) (Counters, error) { return countersOf(c.WorldCounters(w.handle)) }, w)
}
