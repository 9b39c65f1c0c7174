package shardweave

import (
	"context"
	"errors"
	"time"
	"unsafe"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Comm is a group of ranks that exchange numbers. All ranks of it call its collectives, in the same
// order; ranks that call different things all get FailedPrecondition, which names both calls.
type Comm struct {
	_ noCopy
	*thing[c.Comm]
}

func newComm(r *rank, handle c.Comm) *Comm {
	return &Comm{thing: own(r, "group", handle, c.CommFree)}
}

func (g *Comm) home() (*rank, error) {
	if g == nil || g.thing == nil {
		return nil, noThing("Comm")
	}
	return g.rank, nil
}

// Close ends the group here.
func (g *Comm) Close() error {
	if g == nil {
		return nil
	}
	return g.thing.close()
}

// Rank is this rank's number in the group.
func (g *Comm) Rank() (int, error) {
	n, err := ask(func(*rank) (int32, error) { return c.CommRank(g.handle) }, g)
	return int(n), err
}

// Size is how many ranks are in the group.
func (g *Comm) Size() (int, error) {
	n, err := ask(func(*rank) (int32, error) { return c.CommSize(g.handle) }, g)
	return int(n), err
}

// Name is the group's name, as errors tell it.
func (g *Comm) Name() (string, error) {
	return ask(func(*rank) (string, error) { return c.CommName(g.handle) }, g)
}

// Backend is "inproc", "gloo", ...
func (g *Comm) Backend() (string, error) {
	return ask(func(*rank) (string, error) { return c.CommBackend(g.handle) }, g)
}

// WorldRanks is the world rank of each of its ranks.
func (g *Comm) WorldRanks() ([]int64, error) {
	return ask(func(*rank) ([]int64, error) { return c.CommWorldRanks(g.handle) }, g)
}

// Split makes a new group per color, of the ranks that gave it, ordered by key, then by rank. With a
// negative color the rank is in none, and gets nil. Collective.
func (g *Comm) Split(color, key int, name string) (*Comm, error) {
	if err := int32s(color, key); err != nil {
		return nil, err
	}
	return ask(func(r *rank) (*Comm, error) {
		handle, err := c.CommSplit(g.handle, int32(color), int32(key), name)
		if err != nil || handle == nil {
			return nil, err
		}
		return newComm(r, handle), nil
	}, g)
}

// Subgroup is the group of members, ranks of this one in the order of the new one. Only they call.
func (g *Comm) Subgroup(members []int64, name string) (*Comm, error) {
	return ask(func(r *rank) (*Comm, error) {
		handle, err := c.CommSubgroup(g.handle, members, name)
		if err != nil {
			return nil, err
		}
		return newComm(r, handle), nil
	}, g)
}

// Abort is World.Abort for this group and those made from it.
func (g *Comm) Abort(reason error) error {
	if _, err := g.home(); err != nil {
		return err
	}
	return g.anytime(func(handle c.Comm) error { return c.CommAbort(handle, reasonOf(reason)) })
}

// Health is nil, or the error that broke the group.
func (g *Comm) Health() error { return do(func(*rank) error { return c.CommHealth(g.handle) }, g) }

// Counters counts the operations of this group.
func (g *Comm) Counters() (Counters, error) {
	return ask(func(*rank) (Counters, error) { return countersOf(c.CommCounters(g.handle)) }, g)
}

// ReduceOp says how numbers of several ranks become one.
type ReduceOp int32

// Reductions.
const (
	Sum     ReduceOp = c.ReduceSum
	Avg     ReduceOp = c.ReduceAvg
	Min     ReduceOp = c.ReduceMin
	Max     ReduceOp = c.ReduceMax
	Product ReduceOp = c.ReduceProduct
)

// run waits for the operation. When ctx is done, the group is aborted on all ranks; ctx's deadline is
// the operation's.
func run[T Number](ctx context.Context, g *Comm, in, out []T, call c.Collective, more ...int) error {
	if err := int32s(more...); err != nil {
		return err
	}
	r, err := begin(g)
	if err != nil {
		return err
	}
	defer r.leave()
	if err := usable(ctx); err != nil {
		if ctx != nil { // the others, which may be there already, are told
			c.CommAbort(g.handle, err.Error())
		}
		return err
	}
	call.In, call.InCount = memory(in), int64(len(in))
	call.Out, call.OutCount = memory(out), int64(len(out))
	call.DType = int32(dtypeOf[T]())
	deadline, bounded := ctx.Deadline()
	if bounded {
		call.Timeout = time.Until(deadline)
		if call.Timeout < time.Millisecond { // 0 is the group's own
			call.Timeout = time.Millisecond
		}
	}
	stop := onDone(ctx, func() { c.CommAbort(g.handle, ctx.Err().Error()) })
	defer stop()
	err = r.error(c.CommRun(g.handle, &call))
	if bounded && errors.Is(err, DeadlineExceeded) && time.Until(deadline) < 2*time.Millisecond {
		select { // the library counts whole milliseconds, so it may be first
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond): // never done, whatever its Deadline says
		}
	}
	return because(ctx, err)
}

// memory is where the elements lie; nil if there are none.
func memory[T any](s []T) unsafe.Pointer {
	if len(s) == 0 {
		return nil
	}
	return unsafe.Pointer(&s[0])
}

// AllReduce makes out[i] the reduction of all ranks' in[i]. in and out may be the same.
//
// This and the other collectives wait until the operation is done. When ctx is done before, the group
// is broken: an operation that one rank has left cannot be taken back. Here errors.Is is true of ctx.Err() then, and of
// [DeadlineExceeded] or [Canceled].
func AllReduce[T Number](ctx context.Context, g *Comm, in, out []T, op ReduceOp) error {
	return run(ctx, g, in, out, c.Collective{Kind: c.CollectiveAllReduce, HasIn: true, HasOut: true, Reduce: int32(op)})
}

// AllGather makes out all ranks' in, in rank order.
func AllGather[T Number](ctx context.Context, g *Comm, in, out []T) error {
	return run(ctx, g, in, out, c.Collective{Kind: c.CollectiveAllGather, HasIn: true, HasOut: true})
}

// AllGatherV is AllGather with counts[r] elements from rank r.
func AllGatherV[T Number](ctx context.Context, g *Comm, in, out []T, counts []int64) error {
	return run(ctx, g, in, out, c.Collective{Kind: c.CollectiveAllGatherV, HasIn: true, HasOut: true, OutCounts: counts})
}

// ReduceScatter makes out this rank's part of the reduction of all ranks' in.
func ReduceScatter[T Number](ctx context.Context, g *Comm, in, out []T, op ReduceOp) error {
	return run(ctx, g, in, out, c.Collective{Kind: c.CollectiveReduceScatter, HasIn: true, HasOut: true, Reduce: int32(op)})
}

// ReduceScatterV is ReduceScatter with counts[r] elements for rank r.
func ReduceScatterV[T Number](ctx context.Context, g *Comm, in, out []T, counts []int64, op ReduceOp) error {
	return run(ctx, g, in, out, c.Collective{Kind: c.CollectiveReduceScatterV, HasIn: true, HasOut: true, InCounts: counts, Reduce: int32(op)})
}

// AllToAll sends part r of in to rank r; part r of out came from rank r.
func AllToAll[T Number](ctx context.Context, g *Comm, in, out []T) error {
	return run(ctx, g, in, out, c.Collective{Kind: c.CollectiveAllToAll, HasIn: true, HasOut: true})
}

// AllToAllV is AllToAll with parts of send[r] and recv[r] elements.
func AllToAllV[T Number](ctx context.Context, g *Comm, in []T, send []int64, out []T, recv []int64) error {
	if len(send) != len(recv) {
		return invalid("there are %d send counts and %d recv counts", len(send), len(recv))
	}
	return run(ctx, g, in, out, c.Collective{Kind: c.CollectiveAllToAllV, HasIn: true, HasOut: true, InCounts: send, OutCounts: recv})
}

// Broadcast makes every rank's data the root's.
func Broadcast[T Number](ctx context.Context, g *Comm, data []T, root int) error {
	return run(ctx, g, nil, data, c.Collective{Kind: c.CollectiveBroadcast, HasOut: true, Root: int32(root)}, root)
}

// Reduce is AllReduce where only the root has an out; elsewhere it may be nil.
func Reduce[T Number](ctx context.Context, g *Comm, in, out []T, op ReduceOp, root int) error {
	return run(ctx, g, in, out, c.Collective{Kind: c.CollectiveReduce, HasIn: true, HasOut: out != nil, Reduce: int32(op), Root: int32(root)}, root)
}

// Gather is AllGather where only the root has an out; elsewhere it may be nil.
func Gather[T Number](ctx context.Context, g *Comm, in, out []T, root int) error {
	return run(ctx, g, in, out, c.Collective{Kind: c.CollectiveGather, HasIn: true, HasOut: out != nil, Root: int32(root)}, root)
}

// Scatter sends part r of the root's in to rank r; elsewhere in may be nil.
func Scatter[T Number](ctx context.Context, g *Comm, in, out []T, root int) error {
	return run(ctx, g, in, out, c.Collective{Kind: c.CollectiveScatter, HasIn: in != nil, HasOut: true, Root: int32(root)}, root)
}

// Send sends to a Recv of peer with the same tag, in order.
func Send[T Number](ctx context.Context, g *Comm, data []T, peer, tag int) error {
	return run(ctx, g, data, nil, c.Collective{Kind: c.CollectiveSend, HasIn: true, Root: int32(peer), Reduce: int32(tag)}, peer, tag)
}

// Recv receives what peer sends with the same tag.
func Recv[T Number](ctx context.Context, g *Comm, data []T, peer, tag int) error {
	return run(ctx, g, nil, data, c.Collective{Kind: c.CollectiveRecv, HasOut: true, Root: int32(peer), Reduce: int32(tag)}, peer, tag)
}

// Barrier waits until all ranks have called it.
func (g *Comm) Barrier(ctx context.Context) error {
	return run[uint8](ctx, g, nil, nil, c.Collective{Kind: c.CollectiveBarrier})
}

// Counter counts operations, and their bytes: of the larger of the two buffers.
type Counter struct{ Calls, Bytes int64 }

// Counters counts the operations of each kind.
type Counters [c.NumOpKinds]Counter

// OpKinds names what Counters counts, in its order.
var OpKinds = c.CollectiveNames

// Minus is what has happened since before.
func (a Counters) Minus(before Counters) Counters {
	for i, b := range before {
		a[i].Calls -= b.Calls
		a[i].Bytes -= b.Bytes
	}
	return a
}

// Total adds the kinds up.
func (a Counters) Total() Counter {
	var sum Counter
	for _, counter := range a {
		sum.Calls += counter.Calls
		sum.Bytes += counter.Bytes
	}
	return sum
}

func countersOf(all []c.Counter, err error) (Counters, error) {
	var out Counters
	for i, counter := range all {
		out[i] = Counter(counter)
	}
	return out, err
}
