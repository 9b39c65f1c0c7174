package shardweave

import (
	"context"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// rank is what a world and all that is made from it share. Calls of the library are one behind the other:
// everything here is used between enter and leave, except for what says otherwise.
type rank struct {
	// What every call looks at, side by side: between operators as large as LibTorch's little else is left in the
	// processor's caches.
	busy      atomic.Bool // a call is under way
	closed    atomic.Bool // written in a call, read by anyone
	owedCalls atomic.Int32
	mode      GradMode // and what is cast
	untidy    bool     // leave has more to do than to leave
	scope     *scope   // the innermost; nil: none is open
	spare     *c.Call  // for the next call of an operator

	// Functions of the host that run now, within a call. What is closed meanwhile may be in use by that
	// call, and ends with it: late.
	callbacks int
	raised    []raisedError // in this call, the last one last
	begun     raisedError   // of a gradient hook's Begin, which comes out of a later call

	// Tensors in no scope. The garbage collector finds them by what else refers to them; so here is only
	// the handle, and the bytes that this rank holds of it.
	graves     *graves
	loose      []looseTensor
	idle       []*sentry // of slots of loose that are empty
	looseBytes int64
	collectAt  int64 // looseBytes at which garbage is collected
	unused     []int // slots of loose that are empty, and have no sentry

	held *heldMode // the innermost that a body runs under; nil: none

	// Meshes with traces, which hear where the user's code is; and what tells them in this call.
	traced  []*thing[c.Mesh]
	sources []c.Scope

	lent []any // what lasts and this call uses: the garbage collector leaves it alone until then
	late []c.Tensor

	// What has to be done before the next call: its goroutine came while another one was in a call.
	owing sync.Mutex
	owed  []func() // owedCalls of them

	things []closer        // meshes, modules, ...
	ctx    context.Context // of the world
	number int
}

type looseTensor struct {
	handle c.Tensor
	bytes  int64
}

// sentry stands in for a tensor in a slot of loose: the tensor alone refers to it, so the garbage collector
// finds both together. Setting a finalizer is dear; who closes a tensor gives its sentry to the next one.
type sentry struct {
	graves *graves // not the rank, which refers to those that are idle
	slot   int
}

// graves are where the garbage collector leaves what it has found. It runs beside the rank, so the rank itself
// frees that.
type graves struct {
	mutex  sync.Mutex
	found  []int // slots of loose
	number atomic.Int32
}

// raisedError is an error that a callback has returned, and the text by which the library's error tells it.
type raisedError struct {
	text string
	err  error
}

// used is what a call of the library uses of one rank: a *World, *Mesh, *Tensor, ...
type used interface {
	// home is whose it is. An error if it is nil, or carries one.
	home() (*rank, error)
	// alive is an error if it was closed. In a call.
	alive() error
}

// begin begins a call of the library, which r.leave ends, unless there is an error: everything that it uses
// belongs to one rank, is there, and no other goroutine is in a call of this rank. Every call that uses
// handles begins here, or in enter and r.handle. An error comes with a rank, too.
func begin(things ...used) (*rank, error) {
	var r *rank
	for _, thing := range things {
		if thing == nil {
			return nowhere, noThing("World or Mesh")
		}
		home, err := thing.home()
		if err != nil {
			return orNowhere(home), err
		}
		if r == nil {
			r = home
		}
		if home != r {
			return r, otherRank(r, home)
		}
	}
	if r == nil {
		return nowhere, noThing("World or Mesh")
	}
	if err := r.enter(); err != nil {
		return r, err
	}
	for _, thing := range things {
		if err := thing.alive(); err != nil {
			r.leave()
			return r, err
		}
	}
	return r, nil
}

// do is a call of the library that has nothing but an error.
func do(f func(r *rank) error, things ...used) error {
	r, err := begin(things...)
	if err != nil {
		return err
	}
	defer r.leave()
	return r.error(f(r))
}

// ask is a call of the library with a result that belongs to no rank.
func ask[T any](f func(r *rank) (T, error), things ...used) (T, error) {
	var result T
	r, err := begin(things...)
	if err != nil {
		return result, err
	}
	defer r.leave()
	result, err = f(r)
	return result, r.error(err)
}

func orNowhere(r *rank) *rank {
	if r == nil {
		return nowhere
	}
	return r
}

func otherRank(a, b *rank) error {
	if a.number != b.number {
		return invalid("what is used together belongs to several ranks of this process, %d and %d", a.number, b.number)
	}
	return invalid("what is used together belongs to several ranks (worlds of this process), each with the number %d", a.number)
}

// sayWhere tells the traces where this package was called. In a call, until its end.
func (r *rank) sayWhere() {
	place := callerOfPackage()
	for _, mesh := range r.traced {
		if mesh.alive() != nil {
			continue
		}
		if scope, err := c.MeshEnterSource(mesh.handle, place); err == nil { // a trace is worth no error
			r.sources = append(r.sources, scope)
			r.untidy = true
		}
	}
}

// endTraceOf forgets one trace of the mesh. In a call.
func (r *rank) endTraceOf(mesh *thing[c.Mesh]) {
	for i, other := range r.traced {
		if other == mesh {
			r.traced = append(r.traced[:i], r.traced[i+1:]...)
			return
		}
	}
}

// tidy ends what was for this call alone.
func (r *rank) tidy() {
	if r.callbacks == 0 {
		c.TensorsFree(r.late)
		r.late = r.late[:0]
	}
	for i := len(r.sources) - 1; i >= 0; i-- {
		c.ScopeFree(r.sources[i])
	}
	r.sources = r.sources[:0]
	for i := range r.lent {
		r.lent[i] = nil
	}
	r.lent = r.lent[:0]
	r.raised = nil
	r.untidy = len(r.late) > 0
}

func errBusy(r *rank) error {
	return notNow("another goroutine is in a call of rank %d: goroutines that share a rank take turns", r.number)
}

func errWorldClosed() error { return notNow("the world was closed") }

// ifOpen calls f in such a call.
func (r *rank) ifOpen(f func()) error {
	entered, err := r.enterIfOpen()
	if entered {
		defer r.leave()
		f()
	}
	return err
}

// atLast calls f in a call of its own, for what has to be done; it waits for its turn.
func (r *rank) atLast(f func()) {
	for !r.busy.CompareAndSwap(false, true) { // somebody who does not take turns
		runtime.Gosched()
	}
	defer r.leave()
	f()
}

// finally calls f, which has to be done, in a call of its own. While another goroutine is in a call it does not
// wait, which may take as long as a collective does: that is an error, and f is called before the next call.
func (r *rank) finally(f func()) error {
	if r.busy.CompareAndSwap(false, true) {
		defer r.leave()
		f()
		return nil
	}
	r.owing.Lock()
	if r.closed.Load() { // there is no next call
		r.owing.Unlock()
		r.atLast(f)
		return nil
	}
	r.owed = append(r.owed, f)
	r.owedCalls.Store(int32(len(r.owed)))
	r.owing.Unlock()
	return errBusy(r)
}

// finallyOr is finally, for defer: its error counts if there is no other.
func (r *rank) finallyOr(err *error, f func()) {
	if late := r.finally(f); *err == nil {
		*err = late
	}
}

// pay does what is owed. In a call.
func (r *rank) pay() {
	r.owing.Lock()
	owed := r.owed
	r.owed = nil
	r.owedCalls.Store(0)
	r.owing.Unlock()
	for _, f := range owed {
		f()
	}
}

// thing is a handle that ends by Close, or with the world. What users hold has only a pointer to it, so
// that a copy of theirs is the same thing.
type thing[H comparable] struct {
	rank   *rank
	what   string // "mesh"
	mutex  sync.Mutex
	handle H // nil: closed. Written in a call, with the mutex
	free   func(H)
}

type closer interface{ release() }

// lasting is an operator, a layout, a plan or a token file: it belongs to no rank, and is never closed. The garbage collector
// ends it when nobody uses it any more; so its handle comes by lend, in a call, or by with, and no other way.
type lasting[H comparable] struct {
	kept H
	err  error // of one that could not be made
}

func last[H comparable](handle H, free func(H)) *lasting[H] {
	l := &lasting[H]{kept: handle}
	runtime.SetFinalizer(l, func(l *lasting[H]) { free(l.kept) })
	return l
}

// check is an error if it was not made, or carries one.
func (l *lasting[H]) check() error {
	if l != nil {
		return l.err
	}
	var none H
	switch any(none).(type) {
	case c.Op:
		return noThing("Op")
	case c.Layout:
		return noThing("Layout")
	case c.TokenFile:
		return noThing("TokenFile")
	case c.MetricsWriter:
		return noThing("MetricsWriter")
	}
	return noThing("Plan")
}

// lend is the handle until the rank's call ends.
func (l *lasting[H]) lend(r *rank) (H, error) {
	if err := l.check(); err != nil {
		var none H
		return none, err
	}
	r.lent = append(r.lent, l)
	r.untidy = true
	return l.kept, nil
}

// permanent is an operator's handle, for a call: found has it as long as the program runs, so that it need not be lent.
func (op *Op) permanent() (c.Op, error) {
	if err := op.it().check(); err != nil {
		return nil, err
	}
	return op.kept, nil
}

// with is a call of the library that uses no rank.
func with[H comparable, T any](l *lasting[H], f func(handle H) (T, error)) (T, error) {
	if err := l.check(); err != nil {
		var none T
		return none, err
	}
	result, err := f(l.kept)
	runtime.KeepAlive(l)
	return result, public(err)
}

// own takes the handle over, until the world ends. In a call.
func own[H comparable](r *rank, what string, handle H, free func(H)) *thing[H] {
	t := &thing[H]{rank: r, what: what, handle: handle, free: free}
	if len(r.things) == cap(r.things) { // as many may have ended as there are: look before growing
		r.disown(nil)
	}
	r.things = append(r.things, t)
	return t
}

func (t *thing[H]) home() (*rank, error) {
	if t == nil {
		return nil, noThing("handle")
	}
	return t.rank, nil
}

func (t *thing[H]) alive() error {
	var none H
	if t.handle == none {
		return notNow("the %s was closed", t.what)
	}
	return nil
}

func (t *thing[H]) release() {
	var none H
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.handle != none {
		t.free(t.handle)
		t.handle = none
	}
}

// anytime calls f beside any call of the rank: the handle stays meanwhile.
func (t *thing[H]) anytime(f func(H) error) error {
	if t == nil {
		return noThing("handle")
	}
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if err := t.alive(); err != nil {
		return err
	}
	return public(f(t.handle))
}

func (t *thing[H]) close() error {
	if t == nil {
		return nil
	}
	return t.rank.ifOpen(func() {
		if t.alive() == nil {
			t.rank.disown(t)
			t.release()
		}
	})
}

func (r *rank) disown(thing closer) {
	kept := r.things[:0]
	for _, other := range r.things {
		if other != thing {
			kept = append(kept, other)
		}
	}
	for i := len(kept); i < len(r.things); i++ {
		r.things[i] = nil
	}
	r.things = kept
}

// scope is an open World.Scope.
type scope struct {
	outer   *scope
	tensors []*value
}

func (r *rank) openScope() *scope {
	s := &scope{outer: r.scope}
	r.scope = s
	return s
}

// closeScope ends the scope's tensors. Scopes end in the reverse order of their making.
func (r *rank) closeScope(s *scope) error {
	var err error
	if r.scope != s {
		err = notNow("scopes of one rank end in another order than they were opened: goroutines that share a rank take turns")
	}
	for at := &r.scope; *at != nil; at = &(*at).outer {
		if *at == s {
			*at = s.outer
			s.close()
			break
		}
	}
	return err
}

func (s *scope) close() {
	handles := make([]c.Tensor, 0, len(s.tensors))
	for _, v := range s.tensors {
		if v != nil && v.alive() == nil { // else it was kept, or closed
			handles = append(handles, v.handle)
			v.end()
		}
	}
	s.tensors = nil
	c.TensorsFree(handles)
}

// forget takes a tensor out of the scope in which it was made.
func (r *rank) forget(v *value) {
	for s := r.scope; s != nil; s = s.outer {
		for i := len(s.tensors) - 1; i >= 0; i-- {
			if s.tensors[i] == v {
				s.tensors[i] = nil
				return
			}
		}
	}
}

// keep takes a tensor out of its scope.
func (r *rank) keep(t *Tensor) {
	if t.sentry == nil {
		r.forget(t.value)
		r.loosen(t.value, c.TensorLocalBytes(t.handle))
	}
}

// tensor takes the handle over.
func (r *rank) tensor(handle c.Tensor) *Tensor {
	if r.scope != nil {
		return r.tensorOf(handle, 0)
	}
	return r.tensorOf(handle, c.TensorLocalBytes(handle))
}

// tensors takes the handles over; those that are nil give nil.
func (r *rank) tensors(handles []c.Tensor) []*Tensor {
	tensors := make([]*Tensor, len(handles))
	for i, handle := range handles {
		if handle != nil {
			tensors[i] = r.tensor(handle)
		}
	}
	return tensors
}

// stillAlive removes tensors that were kept or closed.
func stillAlive(tensors []*value) []*value {
	kept := tensors[:0]
	for _, v := range tensors {
		if v != nil && v.alive() == nil {
			kept = append(kept, v)
		}
	}
	for i := len(kept); i < len(tensors); i++ {
		tensors[i] = nil
	}
	return kept
}

// newSentry is the sentry of an empty slot that has none.
func (r *rank) newSentry() *sentry {
	s := &sentry{graves: r.graves}
	if last := len(r.unused) - 1; last >= 0 {
		s.slot = r.unused[last]
		r.unused = r.unused[:last]
	} else {
		s.slot = len(r.loose)
		r.loose = append(r.loose, looseTensor{})
	}
	runtime.SetFinalizer(s, (*sentry).bury)
	return s
}

// bury is called by the garbage collector's goroutine.
func (s *sentry) bury() {
	g := s.graves
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.found = append(g.found, s.slot)
	g.number.Store(int32(len(g.found)))
}

// freeBuried frees what the garbage collector has found.
func (r *rank) freeBuried() {
	g := r.graves
	g.mutex.Lock()
	found := g.found
	g.found = nil
	g.number.Store(0)
	g.mutex.Unlock()
	handles := make([]c.Tensor, len(found))
	for i, slot := range found {
		handles[i] = r.takeLoose(slot)
	}
	r.unused = append(r.unused, found...)
	c.TensorsFree(handles)
}

const leastCollect = 64 << 20

// collect collects garbage, because the collector does not see what tensors hold, and lets them hold twice
// as much as is left then: as Go does with its own memory.
func (r *rank) collect() {
	swept := make(chan struct{})
	runtime.SetFinalizer(&struct{ swept chan struct{} }{swept}, func(s *struct{ swept chan struct{} }) { close(s.swept) })
	runtime.GC()
	// Tensors are found on another goroutine, from now on.
	patience := time.NewTimer(20 * time.Millisecond)
	defer patience.Stop()
	select {
	case <-swept:
	case <-patience.C: // other finalizers take their time
	}
	for before := int32(-1); before != r.graves.number.Load(); time.Sleep(20 * time.Microsecond) {
		before = r.graves.number.Load()
	}
	r.freeBuried()
	r.collectAt = 2 * r.looseBytes
	if r.collectAt < leastCollect {
		r.collectAt = leastCollect
	}
}

// result takes over the handle that comes with no error.
func (r *rank) result(handle c.Tensor, err error) *Tensor {
	if err != nil {
		return r.failed(r.error(err))
	}
	return r.tensor(handle)
}

// error is an error of the inner package, as the user gets it.
func (r *rank) error(err error) error {
	outer := public(err)
	if inner, is := err.(*c.Error); is {
		outer.(*Error).cause = r.causeOf(inner.Message)
	}
	return because(r.ctx, outer)
}

// causeOf is the error of a callback that a message tells; nil: of none. The library knows errors by their texts, so it is
// looked for among those of this call alone. In a call.
func (r *rank) causeOf(message string) error {
	for i := len(r.raised) - 1; i >= 0; i-- {
		if one := r.raised[i]; one.text != "" && strings.Contains(message, one.text) {
			return one.err
		}
	}
	if r.begun.err != nil && strings.Contains(message, r.begun.text) {
		return r.begun.err
	}
	return nil
}

// failed is a tensor that carries the error. Anytime.
func (r *rank) failed(err error) *Tensor {
	v := &value{rank: r, failure: failures.add(err)}
	runtime.SetFinalizer(v, func(v *value) { failures.remove(v.failure) })
	return &Tensor{value: v}
}

// release ends all that the rank has, but not the world.
func (r *rank) release() {
	for ; r.scope != nil; r.scope = r.scope.outer {
		r.scope.close()
	}
	var handles []c.Tensor
	for _, loose := range r.loose {
		if loose.handle != nil {
			handles = append(handles, loose.handle)
		}
	}
	c.TensorsFree(handles)
	r.loose, r.idle, r.unused, r.begun = nil, nil, nil, raisedError{}
	for i := len(r.things) - 1; i >= 0; i-- {
		r.things[i].release()
	}
	r.things = nil
	r.owing.Lock()
	r.closed.Store(true)
	r.owing.Unlock()
	r.pay()
}

// callback calls a function of the host within a call of the library: its calls are calls of the rank.
func (r *rank) callback(mode GradMode, body func() error) (err error) {
	s := r.openScope()
	before := r.mode
	r.mode = mode
	r.callbacks++
	lent, raised := r.lent, r.raised // the call goes on
	r.lent, r.raised = nil, nil
	r.leave()
	defer func() {
		for !r.busy.CompareAndSwap(false, true) { // as atLast, but the call goes on
			runtime.Gosched()
		}
		r.callbacks--
		r.mode = before
		r.lent, r.raised = lent, raised
		if err != nil {
			r.raised = append(r.raised, raisedError{told(err), err})
		}
		r.untidy = true
		r.closeScope(s)
	}()
	return body()
}

// autocasts are the numbers that a mode may have added.
const autocasts GradMode = c.ModeAutocastF16 | c.ModeAutocastBF16

// recording is the mode of the rank with another GradMode.
func (r *rank) recording(mode GradMode) GradMode { return r.mode&autocasts | mode }

// heldMode is that of a body: the mode that was before it, and the one it is in.
type heldMode struct {
	before GradMode
	outer  *heldMode
}

// under calls body in another mode. The rank is entered, and left.
func (r *rank) under(mode GradMode, body func() error) (err error) {
	m := &heldMode{r.mode, r.held}
	r.mode, r.held = mode, m
	r.leave()
	defer func() {
		var late error
		busy := r.finally(func() { late = r.letGo(m) })
		if err == nil {
			err = busy
		}
		if err == nil {
			err = late
		}
	}()
	return body()
}

// letGo ends a body's mode. If it is not the innermost, those within go on, and find the mode of before it at their end.
func (r *rank) letGo(m *heldMode) error {
	if r.held == m {
		r.mode, r.held = m.before, m.outer
		return nil
	}
	for inner := r.held; inner != nil; inner = inner.outer {
		if inner.outer == m {
			*inner = *m
			break
		}
	}
	return notNow("modes (With, Autocast) of one rank end in another order than they began: goroutines that share a rank take turns")
}

// GradMode says whether operators are recorded for gradients.
type GradMode int32

// The modes of a rank; see World.With.
const (
	Grad      GradMode = c.ModeGrad      // if an input requires grad; how a rank starts
	NoGrad    GradMode = c.ModeNoGrad    // not
	Inference GradMode = c.ModeInference // not, ever: results cannot be used with Grad later
)

// nowhere is the rank of tensors that could not be made because nothing says whose they are.
var nowhere = newRank(context.Background(), -1)

func newRank(ctx context.Context, number int) *rank {
	return &rank{ctx: ctx, number: number, collectAt: leastCollect, graves: new(graves)}
}

// noCopy lets vet find copies of what is used by pointer.
type noCopy struct{}

func (*noCopy) Lock()   {}
func (*noCopy) Unlock() {}
