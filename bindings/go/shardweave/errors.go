package shardweave

import (
	"errors"
	"fmt"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Code says what kind of error it is: the numbers of google.rpc.Code. It is an error itself, as a
// target for errors.Is.
type Code int32

// The codes of errors.
const (
	Canceled           Code = 1
	Unknown            Code = 2
	InvalidArgument    Code = 3
	DeadlineExceeded   Code = 4 // a rank did not come in time; the message names it
	NotFound           Code = 5
	AlreadyExists      Code = 6
	PermissionDenied   Code = 7
	ResourceExhausted  Code = 8
	FailedPrecondition Code = 9  // also: ranks called different things
	Aborted            Code = 10 // a rank failed, or gave up
	OutOfRange         Code = 11
	Unimplemented      Code = 12
	Internal           Code = 13
	Unavailable        Code = 14 // a rank is gone, a server does not answer
	DataLoss           Code = 15
	Unauthenticated    Code = 16
)

func (code Code) Error() string { return code.String() }

// String is "INVALID_ARGUMENT".
func (code Code) String() string { return c.CodeName(int32(code)) }

// Error is an error of the library. Its message begins with the function that failed, as C calls it,
// and names the argument that was wrong.
type Error struct {
	Code    Code
	Message string
}

func (e *Error) Error() string { return e.Code.String() + ": " + e.Message }

// Is says whether target is the error's code.
func (e *Error) Is(target error) bool {
	code, ok := target.(Code)
	return ok && code == e.Code
}

// public turns what the inner package returns into an *Error.
func public(err error) error {
	if inner, ok := err.(*c.Error); ok {
		return &Error{Code(inner.Code), inner.Message}
	}
	return err
}

// private turns what a callback returns into what the inner package understands.
func private(err error) error {
	var outer *Error
	if errors.As(err, &outer) {
		return &c.Error{Code: int32(outer.Code), Message: outer.Message}
	}
	var code Code
	if errors.As(err, &code) {
		return &c.Error{Code: int32(code), Message: err.Error()}
	}
	return err
}

func invalid(format string, args ...any) error {
	return &Error{InvalidArgument, fmt.Sprintf(format, args...)}
}

var errClosed = &Error{FailedPrecondition, "the tensor was closed, by Close, or with its scope or world"}
