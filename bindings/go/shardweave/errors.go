package shardweave

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Code says what kind of error it is: the numbers of google.rpc.Code. It is an error itself, as a
// target for errors.Is.
type Code int32

// The codes of errors.
const (
	Canceled           Code = c.CodeCancelled
	Unknown            Code = c.CodeUnknown
	InvalidArgument    Code = c.CodeInvalidArgument
	DeadlineExceeded   Code = c.CodeDeadlineExceeded // a rank did not come in time; the message names it
	NotFound           Code = c.CodeNotFound
	AlreadyExists      Code = c.CodeAlreadyExists
	PermissionDenied   Code = c.CodePermissionDenied
	ResourceExhausted  Code = c.CodeResourceExhausted
	FailedPrecondition Code = c.CodeFailedPrecondition // also: ranks called different things
	Aborted            Code = c.CodeAborted            // a rank failed, or gave up
	OutOfRange         Code = c.CodeOutOfRange
	Unimplemented      Code = c.CodeUnimplemented
	Internal           Code = c.CodeInternal
	Unavailable        Code = c.CodeUnavailable // a rank is gone, a server does not answer
	DataLoss           Code = c.CodeDataLoss
	Unauthenticated    Code = c.CodeUnauthenticated
)

func (code Code) Error() string { return code.String() }

// String is "INVALID_ARGUMENT".
func (code Code) String() string { return c.CodeName(int32(code)) }

// Error is an error of the library. Its message begins with the function of this package that was called,
// and names the argument that was wrong.
type Error struct {
	Code    Code
	Message string
	rank    failedAt
	cause   error // what a function of the program has returned to the library, and Message tells
}

// failedAt is the rank whose error it is, from 1; 0: not known.
type failedAt int32

// RankOf is the rank of the world that failed, where err is another rank's error, or one of [RunRanks] or
// [Spawn]. known is false for this rank's own error, and where it is not known.
func RankOf(err error) (rank int, known bool) {
	var ranked interface{ failedRank() failedAt }
	if errors.As(err, &ranked) {
		rank = int(ranked.failedRank()) - 1
	} else {
		rank = -1
	}
	return rank, rank >= 0
}

func (e *Error) failedRank() failedAt     { return e.rank }
func (e *rankError) failedRank() failedAt { return failedAt(e.rank) + 1 }
func (p *Panic) failedRank() failedAt     { return failedAt(p.Rank) + 1 }

// rankError is the error with which a rank has ended.
type rankError struct {
	rank int
	err  error
}

func (e *rankError) Error() string { return fmt.Sprintf("rank %d: %v", e.rank, e.err) }
func (e *rankError) Unwrap() error { return e.err }

func (e *Error) Error() string { return e.Code.String() + ": " + e.Message }

// Unwrap is the error with which a function of the program that the library has called (a [Function], say) has made this
// call fail; nil where that is not so.
func (e *Error) Unwrap() error { return e.cause }

// Is says whether target is the error's code.
func (e *Error) Is(target error) bool {
	code, ok := target.(Code)
	return ok && code == e.Code
}

// public turns what the inner package returns into an *Error in the words of this package.
func public(err error) error {
	if inner, ok := err.(*c.Error); ok {
		outer := newError(Code(inner.Code), inGo(inner.Message))
		outer.rank = failedAt(inner.Rank) + 1
		return outer
	}
	return err
}

func newError(code Code, message string) *Error {
	if function := calledFunction(); function != "" {
		message = function + ": " + message
	}
	return &Error{Code: code, Message: message}
}

// private turns what a callback returns into what the inner package understands.
func private(err error) error {
	rank, _ := RankOf(err)
	if exact, ok := err.(*Error); ok {
		return &c.Error{Code: int32(exact.Code), Message: exact.Message, Rank: int32(rank)}
	}
	var outer *Error
	if errors.As(err, &outer) { // with what was said around it
		return &c.Error{Code: int32(outer.Code), Message: err.Error(), Rank: int32(rank)}
	}
	var code Code
	if errors.As(err, &code) {
		return &c.Error{Code: int32(code), Message: err.Error(), Rank: int32(rank)}
	}
	return err
}

// told is the text of what a callback returns, as the library hears it.
func told(err error) string {
	text := err.Error()
	if inner, is := private(err).(*c.Error); is {
		text = inner.Message
	}
	return strings.ReplaceAll(text, "\x00", "?")
}

// because tells too that ctx is done, if it is.
func because(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil {
		return err
	}
	if before, is := err.(*doneError); is && errors.Is(before.done, ctx.Err()) {
		return err
	}
	return &doneError{ctx.Err(), err}
}

// doneError is an error that came because a context was done; it is both.
type doneError struct{ done, err error } // err is nil where nothing had begun

func (e *doneError) Error() string {
	if e.err == nil {
		return e.done.Error()
	}
	return e.done.Error() + "; " + e.err.Error()
}

// Is says it of the context's error, and of the code that means the same: whether the library or the context was first
// at a deadline is chance.
func (e *doneError) Is(target error) bool {
	return errors.Is(e.done, target) ||
		target == DeadlineExceeded && errors.Is(e.done, context.DeadlineExceeded) ||
		target == Canceled && errors.Is(e.done, context.Canceled)
}

func (e *doneError) Unwrap() error { return e.err }

// doneOf is the error of a context that is done; nil: it is not.
func doneOf(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return &doneError{done: err}
	}
	return nil
}

// onDone calls f when ctx is done, until stop is called; stop waits for an f that has begun.
func onDone(ctx context.Context, f func()) (stop func()) {
	if ctx.Done() == nil {
		return func() {}
	}
	stopped, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case <-ctx.Done():
			f()
		case <-stopped:
		}
	}()
	return func() {
		close(stopped)
		<-ended
	}
}

// usable is an error if the context is none, or is done.
func usable(ctx context.Context) error {
	if ctx == nil {
		return invalid("argument 'ctx' is nil; context.Background() is one that is never done")
	}
	return doneOf(ctx)
}

// noBody is the error of a function that is nil where one is to be called.
func noBody() error { return invalid("argument 'body' is nil") }

// int32s says whether numbers are in the range that the library has.
func int32s(numbers ...int) error {
	for _, n := range numbers {
		if n != int(int32(n)) {
			return invalid("%d is beyond 32 bits", n)
		}
	}
	return nil
}

// notNegative is an error of an option whose time is below 0, as it was given: the library knows milliseconds.
func notNegative(option string, d time.Duration) error {
	if d < 0 {
		return invalid("%s is %v; wanted 0, for the default, or more", option, d)
	}
	return nil
}

func invalid(format string, args ...any) error {
	return newError(InvalidArgument, fmt.Sprintf(format, args...))
}

func notNow(format string, args ...any) error {
	return newError(FailedPrecondition, fmt.Sprintf(format, args...))
}

func errTensorClosed() error {
	return notNow("the tensor was closed, by Close, or with its scope or world")
}

// noThing is the error of a nil pointer, and of what no function of this package has made.
func noThing(what string) error {
	return invalid("a %s is nil, or was not made by a function of this package", what)
}

// failure is the number of the error that a tensor carries. A number, because the compiler thinks that
// whatever an operator is called with escapes to the heap if an error, a pointer, is read out of it.
type failure uint64

// failures are the errors of the tensors that there are. 0 is no error.
var failures = failureTable{errs: map[failure]error{}}

type failureTable struct {
	mutex sync.Mutex
	last  failure
	errs  map[failure]error
}

func (f *failureTable) add(err error) failure {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.last++
	f.errs[f.last] = err
	return f.last
}

func (f *failureTable) of(number failure) error {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	return f.errs[number]
}

func (f *failureTable) remove(number failure) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	delete(f.errs, number)
}
