package shardweave

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// WithoutPrefix is an option of Spawn: ranks write to where the program does, without "[2] " before each
// line.
func WithoutPrefix() WorldOption { return func(o *worldOptions) { o.noPrefix = true } }

// WithArgs is an option of Spawn: arguments of the ranks' processes, in place of the program's own. In a
// test they choose that test: "-test.run=^TestIt$".
func WithArgs(args ...string) WorldOption {
	return func(o *worldOptions) { o.args = append([]string{}, args...) }
}

// Spawn is RunRanks with ranks that are processes of this machine: copies of this program, with its
// arguments. Nobody needs a launcher:
//
//	func main() {
//		// What stands here, every process does.
//		err := sw.Spawn(context.Background(), 4, func(w *sw.World) error {
//			...
//		})
//		// What stands here, only the first process does.
//		if err != nil {
//			log.Fatal(err)
//		}
//	}
//
// A rank's process comes to this call as the first process did (earlier calls of Spawn return at once what
// they returned there, of an error the first line), joins the others, calls body, and ends: with its goroutine's body, without what is
// deferred in main. Ranks have no standard input; each line of their output begins with their number, "[2] ".
//
// If a rank fails, panics or is killed, the others' collectives fail, naming it; those that have not ended
// two seconds later are ended. The result is the failure that came first, with its rank. When ctx is done,
// all are ended, and the result is ctx's error too. Ranks end with this process, whatever ends it.
//
// In a process that a launcher has started (see [FromEnvironment]), which wants as many ranks, Spawn starts
// nothing: this is one of the ranks, and the result is its own. It can do so once: a launcher's ranks meet
// once, and a later call is FailedPrecondition.
func Spawn(ctx context.Context, ranks int, body func(*World) error, options ...WorldOption) error {
	call := thisSpawn()
	if err := usable(ctx); err != nil {
		return err
	}
	if body == nil {
		return noBody()
	}
	if ranks < 1 || ranks > maxSpawned {
		return invalid("argument 'ranks' is %d; wanted 1 to %d", ranks, maxSpawned)
	}
	rank, err := spawnedRank()
	switch {
	case err != nil:
		return err
	case rank == nil:
		err := launch(ctx, call, ranks, body, options)
		remember(call, err)
		return err
	case call == rank.Call:
		os.Exit(rank.run(ctx, body, options))
	case call.Nth <= rank.Calls[call.Site]:
		if text, failed := rank.Before[call.key()]; failed {
			return errors.New(text)
		}
		return nil
	}
	return notNow("this process is a rank that Spawn has started, which starts none itself")
}

const (
	maxSpawned = 4096
	spawnEnv   = "SHARDWEAVE_SPAWN"
	reportFd   = 3
	// Of the variable.
	maxSpawnText = 1 << 16
	storeFd      = 4
	// How long the others have after the first failure to end by themselves, and then when they are asked to.
	spawnNotice = 2 * time.Second
	spawnGrace  = 3 * time.Second
)

// spawnCall says which call of Spawn it is: a rank's process comes to the same one, also where it comes past others
// on its way, or past fewer than the first process did (WithArgs chooses one test of several).
type spawnCall struct {
	Site string // who has called whom, up to Spawn
	Nth  int    // of those from there, from 1
}

func (s spawnCall) key() string { return s.Site + " " + strconv.Itoa(s.Nth) }

var spawnCalls struct {
	mutex sync.Mutex
	calls map[string]int // by site
}

// thisSpawn counts the call that it is called in.
func thisSpawn() spawnCall {
	var pcs [64]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs[:])])
	hash := fnv.New64a()
	for more := true; more; {
		var frame runtime.Frame
		frame, more = frames.Next()
		fmt.Fprintf(hash, "%s:%d\n", frame.Function, frame.Line)
	}
	site := strconv.FormatUint(hash.Sum64(), 36)
	spawnCalls.mutex.Lock()
	defer spawnCalls.mutex.Unlock()
	if spawnCalls.calls == nil {
		spawnCalls.calls = map[string]int{}
	}
	spawnCalls.calls[site]++
	return spawnCall{site, spawnCalls.calls[site]}
}

// spawned is what the first process tells a rank's.
type spawned struct {
	Starter int               // the first process: what a rank starts in its turn finds the same text, and another parent
	Port    int               // of the ranks' store
	Call    spawnCall         // which call of Spawn the rank is for
	Calls   map[string]int    // how many there were from each place, with this one
	Before  map[string]string // the errors of those before, by their keys
}

var spawnedHere struct {
	once      sync.Once
	rank      *spawned
	inherited bool // RANK and the like are those of the rank that has started this process, in some way
	err       error
}

// spawnedRank is nil if Spawn has not started this process.
func spawnedRank() (*spawned, error) {
	here := &spawnedHere
	here.once.Do(func() {
		text := os.Getenv(spawnEnv)
		if text == "" {
			return
		}
		rank := &spawned{}
		if err := json.Unmarshal([]byte(text), rank); err != nil || rank.Call.Nth < 1 {
			here.err = invalid("%s is '%s', which Spawn has not set", spawnEnv, text)
			return
		}
		if rank.Starter != os.Getppid() {
			here.inherited = os.Getenv("MASTER_PORT") == strconv.Itoa(rank.Port) // no launcher has started it since
			return
		}
		here.rank = rank
		syscall.CloseOnExec(reportFd)
	})
	return here.rank, here.err
}

// report is what a rank tells about the end of its body. Writes of this size to a pipe are in one piece, and
// the first failure is that of the rank that failed first: it writes before the others can notice.
type report struct {
	Rank    int
	Done    bool // without an error
	Ended   bool // the first process says so, behind all that the rank has said
	Text    string
	Code    Code
	Message string
}

const reportSize = 4096

func (r report) line() []byte {
	for {
		line, err := json.Marshal(r)
		if err == nil && len(line) < reportSize {
			return append(line, '\n')
		}
		r.Message = "" // text has it
		r.Text = strings.ToValidUTF8(r.Text[:len(r.Text)*3/4], "")
	}
}

// run is what a rank's process does, and its exit code.
func (s *spawned) run(ctx context.Context, body func(*World) error, options []WorldOption) (code int) {
	number, _ := strconv.Atoi(os.Getenv("RANK"))
	reports := os.NewFile(reportFd, "reports")
	tell := func(err error) {
		if err == nil {
			reports.Write(report{Rank: number, Done: true}.line())
			return
		}
		r := report{Rank: number, Text: err.Error()}
		var known *Error
		if errors.As(err, &known) {
			r.Code, r.Message = known.Code, known.Message
		}
		reports.Write(r.line())
	}
	w, err := FromEnvironment(ctx, options...)
	if err != nil {
		tell(err)
		return 1
	}
	ended := make(chan struct{}) // also of a body that ends its goroutine
	go func() {
		defer close(ended)
		runtime.LockOSThread()
		guard(w, body, func(err error, p *Panic) {
			if p != nil {
				code, err = 2, fmt.Errorf("%w\n\n%s", err, p.Stack)
			} else if err != nil {
				code = 1
			}
			tell(err)
			if err != nil {
				w.abort(fmt.Sprintf("rank %d failed: %v", number, firstLine(err)))
			}
			w.Close()
		})
	}()
	<-ended
	return code
}

// remoteError is an error of another process.
type remoteError struct {
	text  string
	inner *Error // nil: it was no *Error
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error {
	if e.inner == nil {
		return nil
	}
	return e.inner
}

// spawnResults are the errors of calls in the first process.
var spawnResults struct {
	mutex sync.Mutex
	errs  map[string]string // the first line: a stack is of no use to other processes
}

func remember(call spawnCall, err error) {
	if err == nil {
		return
	}
	spawnResults.mutex.Lock()
	defer spawnResults.mutex.Unlock()
	if spawnResults.errs == nil {
		spawnResults.errs = map[string]string{}
	}
	spawnResults.errs[call.key()] = firstLine(err)
}

// text is s, with the errors so far, as a variable takes it. Linux has a limit of 128 KiB: the more failures
// there are, the less is told of each.
func (s spawned) text() (string, error) {
	spawnResults.mutex.Lock()
	defer spawnResults.mutex.Unlock()
	spawnCalls.mutex.Lock()
	defer spawnCalls.mutex.Unlock()
	s.Calls = spawnCalls.calls
	for limit := 2000; ; limit /= 2 {
		s.Before = map[string]string{}
		for call, text := range spawnResults.errs {
			if len(text) > limit {
				text = strings.ToValidUTF8(text[:limit], "") + "..."
			}
			s.Before[call] = text
		}
		text, err := json.Marshal(s)
		if err != nil || len(text) < maxSpawnText || limit == 0 {
			return string(text), err
		}
	}
}

// launched: a launcher has started this process, and its ranks have met.
var launched atomic.Bool

// launch is Spawn in the process that starts the others.
func launch(ctx context.Context, call spawnCall, ranks int, body func(*World) error, options []WorldOption) error {
	if launched.Load() {
		return notNow("a launcher has started this process, and its ranks have met in an earlier call; wanted one call " +
			"with all that they do, or FromEnvironment")
	}
	if !spawnedHere.inherited {
		switch w, err := FromEnvironment(ctx, options...); {
		case err == nil: // a launcher has
			launched.Store(true)
			return runLaunched(w, ranks, body)
		case !errors.Is(err, NotFound):
			return err
		}
	}
	l := &launcher{ctx: ctx, ranks: ranks, options: worldOptionsOf(options), failed: make(chan struct{}), gone: map[int]bool{}}
	// Children end with the thread that started them.
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		result <- l.run(call)
	}()
	return <-result
}

// runLaunched is one rank, which somebody else has started.
func runLaunched(w *World, ranks int, body func(*World) error) (err error) {
	if w.Size() != ranks {
		err := invalid("argument 'ranks' is %d, but a launcher has started %d", ranks, w.Size())
		w.Abort(err)
		w.Close()
		return err
	}
	var panicked *Panic
	guard(w, body, func(failure error, p *Panic) {
		if err, panicked = failure, p; err != nil {
			err = &rankError{w.Rank(), err}
			w.abort("failed: " + firstLine(err))
		}
		w.Close()
	})
	if panicked != nil {
		panic(panicked)
	}
	return err
}

// launcher starts ranks and sees them to their end.
type launcher struct {
	ctx     context.Context
	ranks   int
	options worldOptions

	processes []*exec.Cmd
	output    sync.Mutex
	copies    sync.WaitGroup
	pipes     []*os.File

	mutex    sync.Mutex
	failures []failedRank // in the order in which they were noticed
	failed   chan struct{}
	ending   bool         // who ends now was asked to
	gone     map[int]bool // there is no process with this pid any more, or another one
}

type failedRank struct {
	rank     int
	err      error
	reported bool
	follows  bool // it may be because of another rank's
}

func (l *launcher) fail(f failedRank) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if l.ending && !f.reported {
		return
	}
	if l.failures = append(l.failures, f); len(l.failures) == 1 {
		close(l.failed)
	}
}

func (l *launcher) run(call spawnCall) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	// The port is bound before any rank starts, and rank 0 inherits the socket: nobody can take it in between.
	store, port, err := listenOnLoopback()
	if err != nil {
		return fmt.Errorf("Spawn: listening on 127.0.0.1: %w", err)
	}
	defer store.Close()
	reports, reporter, err := os.Pipe()
	if err != nil {
		return err
	}
	defer reports.Close()
	defer reporter.Close()
	wanted, err := spawned{Starter: os.Getpid(), Port: port, Call: call}.text()
	if err != nil {
		return err
	}
	run := fmt.Sprintf("%d-%x", os.Getpid(), rand.New(rand.NewSource(time.Now().UnixNano())).Uint64())
	args := l.options.args
	if args == nil {
		args = os.Args[1:]
	}
	var running sync.WaitGroup
	for number := 0; number < l.ranks && err == nil; number++ {
		command := exec.Command(program, args...)
		command.ExtraFiles = []*os.File{reporter}
		own := []string{"RANK=" + strconv.Itoa(number), "WORLD_SIZE=" + strconv.Itoa(l.ranks),
			"LOCAL_RANK=" + strconv.Itoa(number), "LOCAL_WORLD_SIZE=" + strconv.Itoa(l.ranks),
			"MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + strconv.Itoa(port), "SHARDWEAVE_RUN_ID=" + run,
			"SHARDWEAVE_STORE_FILE=", "SHARDWEAVE_STORE_FD=", spawnEnv + "=" + wanted}
		if number == 0 {
			command.ExtraFiles = append(command.ExtraFiles, store)
			own[8] += strconv.Itoa(storeFd)
		}
		command.Env = append(os.Environ(), own...) // of two with one name the last counts
		// No rank outlives this process.
		command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err = l.start(command, number); err == nil {
			l.processes = append(l.processes, command)
			running.Add(1)
			go func(number int) {
				defer running.Done()
				l.wait(command, number, reporter)
			}(number)
		}
	}
	store.Close() // if rank 0 ends, the others are refused and do not wait
	if err != nil {
		l.signal(syscall.SIGKILL)
	}
	told := make(chan struct{})
	go func() {
		defer close(told)
		l.read(reports)
	}()
	ended := make(chan struct{})
	go func() {
		running.Wait()
		reporter.Close()
		close(ended)
	}()
	l.untilEnded(ended)
	// Ranks have ended; what they have started themselves may still hold the pipes.
	closing := time.AfterFunc(time.Second, func() {
		reports.Close()
		for _, pipe := range l.pipes {
			pipe.Close()
		}
	})
	<-told
	l.copies.Wait()
	closing.Stop()
	if err != nil {
		return fmt.Errorf("Spawn: starting rank %d: %w", len(l.processes), err)
	}
	return l.result()
}

// listenOnLoopback is a socket, which blocks, as C wants it; on a port that the system chose.
func listenOnLoopback() (*os.File, int, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, 0, err
	}
	socket := os.NewFile(uintptr(fd), "store")
	if err = syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err == nil {
		err = syscall.Listen(fd, syscall.SOMAXCONN)
	}
	var address syscall.Sockaddr
	if err == nil {
		address, err = syscall.Getsockname(fd)
	}
	if err != nil {
		socket.Close()
		return nil, 0, err
	}
	return socket, address.(*syscall.SockaddrInet4).Port, nil
}

// start starts a rank, and passes on what it writes.
func (l *launcher) start(command *exec.Cmd, number int) error {
	if l.options.noPrefix {
		command.Stdout, command.Stderr = os.Stdout, os.Stderr
		return command.Start()
	}
	width := len(strconv.Itoa(l.ranks - 1))
	prefix := []byte(fmt.Sprintf("[%*d] ", width, number))
	var ours []*os.File
	for _, stream := range []struct {
		to   *os.File
		from *io.Writer
	}{{os.Stdout, &command.Stdout}, {os.Stderr, &command.Stderr}} {
		reader, writer, err := os.Pipe()
		if err != nil {
			return err
		}
		ours = append(ours, writer)
		l.pipes = append(l.pipes, reader)
		*stream.from = writer
		l.copies.Add(1)
		go func(to *os.File) {
			defer l.copies.Done()
			l.copyLines(to, reader, prefix)
		}(stream.to)
	}
	err := command.Start()
	for _, writer := range ours {
		writer.Close()
	}
	return err
}

func (l *launcher) copyLines(to io.Writer, from io.ReadCloser, prefix []byte) {
	defer from.Close()
	lines := bufio.NewReaderSize(from, 1<<16)
	for {
		line, err := lines.ReadSlice('\n') // or as much as there is room for
		if len(line) > 0 {
			whole := append(append([]byte{}, prefix...), line...)
			if !bytes.HasSuffix(whole, []byte{'\n'}) {
				whole = append(whole, '\n')
			}
			l.output.Lock()
			to.Write(whole)
			l.output.Unlock()
		}
		if err != nil && err != bufio.ErrBufferFull {
			return
		}
	}
}

func (l *launcher) wait(command *exec.Cmd, number int, reporter io.Writer) {
	err := command.Wait()
	status := "with exit status 0"
	if err != nil {
		if state := command.ProcessState; state != nil {
			what := "ended with " + err.Error() // "exit status 3"
			if status, is := state.Sys().(syscall.WaitStatus); is && status.Signaled() {
				what = fmt.Sprintf("was killed by signal %d (%v)", int(status.Signal()), status.Signal())
			}
			l.fail(failedRank{rank: number, err: fmt.Errorf("the process (pid %d) %s%w", command.Process.Pid, what, silent{err})})
			return
		}
		// Somebody else has waited for it, or SIGCHLD is ignored. What it has told is the result.
		status = fmt.Sprintf("with an unknown status (%v)", err)
	}
	l.mutex.Lock()
	l.gone[number] = true
	l.mutex.Unlock()
	reporter.Write(report{Rank: number, Ended: true, Code: FailedPrecondition,
		Message: fmt.Sprintf("Spawn: the process (pid %d) ended %s before the body had returned", command.Process.Pid, status)}.line())
}

// silent is an error that another one's text has already.
type silent struct{ error }

func (silent) Error() string   { return "" }
func (s silent) Unwrap() error { return s.error }

// read collects what ranks tell.
func (l *launcher) read(reports io.Reader) {
	told := map[int]bool{}
	lines := bufio.NewScanner(reports)
	lines.Buffer(nil, 2*reportSize)
	for lines.Scan() {
		var r report
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			continue
		}
		if r.Ended {
			if !told[r.Rank] {
				l.fail(failedRank{rank: r.Rank, err: &Error{Code: r.Code, Message: r.Message}})
			}
			continue
		}
		if told[r.Rank] = true; r.Done {
			continue
		}
		failed := failedRank{rank: r.Rank, reported: true, follows: r.Code == Unavailable || r.Code == Aborted || r.Code == DeadlineExceeded}
		remote := &remoteError{text: r.Text}
		if r.Code != 0 {
			remote.inner = &Error{Code: r.Code, Message: r.Message}
		}
		failed.err = remote
		l.fail(failed)
	}
}

func (l *launcher) signal(s syscall.Signal) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.ending = true
	for number, command := range l.processes {
		if !l.gone[number] {
			command.Process.Signal(s)
		}
	}
}

// untilEnded waits; after a failure, or when the context is done, not for long.
func (l *launcher) untilEnded(ended <-chan struct{}) {
	within := func(d time.Duration) bool {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-ended:
			return true
		case <-timer.C:
			return false
		}
	}
	select {
	case <-ended:
		return
	case <-l.ctx.Done():
	case <-l.failed:
		if within(spawnNotice) {
			return
		}
	}
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		l.signal(s)
		if within(spawnGrace) {
			return
		}
	}
	<-ended
}

// result is the failure that came first; of a rank that was left alone only if there is no other.
func (l *launcher) result() error {
	if len(l.failures) == 0 {
		return doneOf(l.ctx)
	}
	told := map[int]bool{} // with an exit that says less
	for _, f := range l.failures {
		told[f.rank] = told[f.rank] || f.reported
	}
	var first *failedRank
	for i := range l.failures {
		f := &l.failures[i]
		if f.reported || !told[f.rank] {
			if first == nil || first.follows && !f.follows {
				first = f
			}
		}
	}
	return because(l.ctx, &rankError{first.rank, first.err})
}
