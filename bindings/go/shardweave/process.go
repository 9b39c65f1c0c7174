package shardweave

import (
	"sync"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// What holds in the whole process: where the library speaks, checks of handles, random numbers, threads.

// SetLog says where the library speaks while no call fails (who is waited for, which operator gathers), in the
// whole process from now on; nil, as without this call: to stderr, with "shardweave: " in front.
//
// log gets one line, without an end of line, on any thread, on several at once. It calls nothing of this
// package: what it calls may want to say something, too. What it panics with is written to stderr.
func SetLog(log func(line string)) error { return public(c.SetLog(log)) }

// HandleChecks says whether the library looks every handle up before it uses it; see [SetHandleChecks].
type HandleChecks int32

// Whether handles are looked up.
const (
	ChecksOff    HandleChecks = c.ChecksOff    // not; only the kind is looked at
	ChecksReport HandleChecks = c.ChecksReport // what was freed, or never was one, is an error; as SWV_CHECK_HANDLES=1
	ChecksAbort  HandleChecks = c.ChecksAbort  // it ends the process there; as SWV_CHECK_HANDLES=abort
)

// SetHandleChecks says whether handles are looked up, from now on, in the whole process. This package gets its own
// right; this is for programs that use the C interface besides, and for [LiveHandles]. Of a handle that was made
// without checks only the kind is looked at.
func SetHandleChecks(checks HandleChecks) error { return public(c.SetHandleChecks(int32(checks))) }

// Seed seeds the generator that plain tensors are drawn from: one for the process, whatever the rank.
func Seed(seed uint64) error { return public(c.Seed(seed)) }

// seeding lets one goroutine at a time draw from the process's generator.
var seeding sync.Mutex

// Seeded calls body, in which plain tensors are drawn from the process's generator with this seed, while no other
// goroutine is in a Seeded: ranks that are goroutines draw the same numbers in it. body calls nothing collective, for
// which it would wait forever, and no Seeded.
func Seeded(seed uint64, body func() error) error {
	if body == nil {
		return noBody()
	}
	seeding.Lock()
	defer seeding.Unlock()
	if err := Seed(seed); err != nil {
		return err
	}
	return body()
}

// SetNumThreads says how many threads one operator may use, everywhere in the process.
func SetNumThreads(n int) error {
	if err := int32s(n); err != nil {
		return err
	}
	return public(c.SetNumThreads(int32(n)))
}

// BuildInfo is "0.4.0; LibTorch 2.11.0; backends inproc, gloo, counting".
func BuildInfo() string { return c.BuildInfo() }

// LiveHandles is how many objects of the library there are of those that were made with checks
// ([SetHandleChecks]); -1 without checks. For tests that look for leaks.
func LiveHandles() int64 { return c.LiveHandles() }
