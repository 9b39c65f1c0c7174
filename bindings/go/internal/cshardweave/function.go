package cshardweave

// #include "shim.h"
// #include <stdlib.h>
import "C"

import (
	"fmt"
	"os"
	"runtime/cgo"
	"runtime/debug"
	"strings"
	"unsafe"
)

// Function is a function of the host. Tensors that come in are borrowed; those that go out are given
// away. Dropped is called once, from any goroutine.
type Function interface {
	Forward(ctx Context, mode int32, inputs, outputs []Tensor) error
	Backward(ctx Context, mode int32, gradOutputs, gradInputs []Tensor) error
	Dropped()
}

// Segment is a part of the host's forward; the same holds for its tensors, and for Dropped.
type Segment interface {
	Run(mode int32, inputs, outputs []Tensor) error
	Dropped()
}

// FunctionApply calls f.Forward during the call, and f.Backward whenever gradients pass.
func FunctionApply(f Function, name string, mode int32, inputs []Tensor, outputs int) ([]Tensor, error) {
	if err := checkText("name", name); err != nil {
		f.Dropped()
		return nil, err
	}
	var a arena
	defer a.free()
	out := make([]Tensor, outputs+1)
	err := result(C.swvgo_function_apply(C.uintptr_t(cgo.NewHandle(f)), a.text(name), C.swv_grad_mode(mode),
		first(inputs), C.size_t(len(inputs)), &out[0], C.size_t(outputs)))
	return out[:outputs], err
}

// Checkpoint calls s.Run during the call, and once more when gradients pass.
func Checkpoint(s Segment, name string, mode int32, inputs []Tensor, outputs int) ([]Tensor, error) {
	var a arena
	defer a.free()
	out := make([]Tensor, outputs+1)
	err := result(C.swvgo_checkpoint(C.uintptr_t(cgo.NewHandle(s)), a.text(name), C.swv_grad_mode(mode),
		first(inputs), C.size_t(len(inputs)), &out[0], C.size_t(outputs)))
	return out[:outputs], err
}

// Patch is a forward of the host's in place of the library's; the same holds for its tensors, and for Dropped. The
// module is borrowed, too.
type Patch interface {
	RunPatch(ctx Context, module Module, fqn string, mode int32, inputs, outputs []Tensor) error
	Dropped()
}

// ModulePatch lets p run from now on.
func ModulePatch(m Module, pattern string, p Patch) error {
	if err := checkText("pattern", pattern); err != nil {
		p.Dropped()
		return err
	}
	var a arena
	defer a.free()
	return result(C.swvgo_module_patch(m, a.text(pattern), C.uintptr_t(cgo.NewHandle(p))))
}

// ContextOriginal runs what a patch is in place of; an input may be nil.
func ContextOriginal(ctx Context, mode int32, inputs []Tensor, outputs int) ([]Tensor, error) {
	out := make([]Tensor, outputs+1)
	err := result(C.swvgo_function_context_original(ctx, C.swv_grad_mode(mode), first(inputs), C.size_t(len(inputs)),
		&out[0], C.size_t(outputs)))
	return out[:outputs], err
}

func ContextSave(ctx Context, tensors []Tensor) error {
	return result(C.swvgo_function_context_save(ctx, first(tensors), C.size_t(len(tensors))))
}

func ContextSaved(ctx Context, index int) (Tensor, error) {
	var out Tensor
	err := result(C.swv_function_context_saved(ctx, C.size_t(index), &out))
	return out, err
}

// Log takes lines, on any thread, also on several at once.
type Log func(line string)

// Dropped is called when nobody is in it any more.
func (Log) Dropped() {}

// SetLog says where the library speaks; nil: to stderr.
func SetLog(log Log) error {
	if log == nil {
		return result(C.swvgo_set_log(0))
	}
	return result(C.swvgo_set_log(C.uintptr_t(cgo.NewHandle(log))))
}

//export swvgo_log
func swvgo_log(handle C.uintptr_t, message *C.char) {
	line := C.GoString(message)
	defer func() {
		if p := recover(); p != nil {
			fmt.Fprintf(os.Stderr, "shardweave: %s\nshardweave: the function that SetLog was given panicked: %v\n", line, p)
		}
	}()
	cgo.Handle(handle).Value().(Log)(line)
}

// callback runs what must not panic across the border.
func callback(f func() error) (status *C.swv_status) {
	code, message, rank, failed, returned := C.swv_code(C.SWV_CODE_UNKNOWN), "", int32(-1), true, false
	defer func() {
		if p := recover(); p != nil {
			code, message = C.SWV_CODE_INTERNAL, fmt.Sprintf("panic: %v\n\n%s", p, debug.Stack())
		} else if !returned {
			// Goexit cannot be stopped, and the library's own frames would go without their destructors.
			fmt.Fprintf(os.Stderr, "shardweave: runtime.Goexit (testing's FailNow, Fatal) within a function that the library "+
				"calls; return an error from it\n\n%s", debug.Stack())
			os.Exit(2)
		}
		if failed {
			text := C.CString(strings.ReplaceAll(message, "\x00", "?"))
			defer C.free(unsafe.Pointer(text))
			status = C.swv_status_new_of_rank(code, text, C.int32_t(rank))
		}
	}()
	err := f()
	returned = true
	switch err := err.(type) {
	case nil:
		failed = false
	case *Error:
		code, message, rank = C.swv_code(err.Code), err.Message, err.Rank
	default:
		message = err.Error()
	}
	return nil
}

//export swvgo_forward
func swvgo_forward(handle C.uintptr_t, ctx *C.swv_function_context, mode C.swv_grad_mode, inputs **C.swv_tensor,
	numInputs C.size_t, outputs **C.swv_tensor, numOutputs C.size_t) *C.swv_status {
	return callback(func() error {
		return cgo.Handle(handle).Value().(Function).Forward(ctx, int32(mode), unsafe.Slice(inputs, int(numInputs)),
			unsafe.Slice(outputs, int(numOutputs)))
	})
}

//export swvgo_backward
func swvgo_backward(handle C.uintptr_t, ctx *C.swv_function_context, mode C.swv_grad_mode, gradOutputs **C.swv_tensor,
	numOutputs C.size_t, gradInputs **C.swv_tensor, numInputs C.size_t) *C.swv_status {
	return callback(func() error {
		return cgo.Handle(handle).Value().(Function).Backward(ctx, int32(mode), unsafe.Slice(gradOutputs, int(numOutputs)),
			unsafe.Slice(gradInputs, int(numInputs)))
	})
}

//export swvgo_run_segment
func swvgo_run_segment(handle C.uintptr_t, mode C.swv_grad_mode, inputs **C.swv_tensor, numInputs C.size_t,
	outputs **C.swv_tensor, numOutputs C.size_t) *C.swv_status {
	return callback(func() error {
		return cgo.Handle(handle).Value().(Segment).Run(int32(mode), unsafe.Slice(inputs, int(numInputs)),
			unsafe.Slice(outputs, int(numOutputs)))
	})
}

//export swvgo_run_patch
func swvgo_run_patch(handle C.uintptr_t, ctx *C.swv_function_context, module *C.swv_module, fqn *C.char,
	mode C.swv_grad_mode, inputs **C.swv_tensor, numInputs C.size_t, outputs **C.swv_tensor, numOutputs C.size_t) *C.swv_status {
	return callback(func() error {
		return cgo.Handle(handle).Value().(Patch).RunPatch(ctx, module, C.GoString(fqn), int32(mode),
			unsafe.Slice(inputs, int(numInputs)), unsafe.Slice(outputs, int(numOutputs)))
	})
}

//export swvgo_drop
func swvgo_drop(handle C.uintptr_t) {
	h := cgo.Handle(handle)
	f := h.Value().(interface{ Dropped() })
	h.Delete()
	f.Dropped()
}

// GradientBucket is what a GradientHook gets: borrowed handles.
type GradientBucket struct {
	Index      int64
	Flat       Tensor
	Gradients  []Tensor
	Parameters []string
	Comm       Comm
	Discarded  bool
}

// GradientHook is a hook of the host; Dropped as for the others.
type GradientHook interface {
	Bucket(finish bool, bucket GradientBucket) error
	Dropped()
}

//export swvgo_gradient_hook
func swvgo_gradient_hook(handle C.uintptr_t, finish C.int, bucket *C.swv_gradient_bucket) *C.swv_status {
	return callback(func() error {
		b := GradientBucket{Index: int64(bucket.index), Flat: bucket.flat, Comm: bucket.comm, Discarded: bucket.is_discarded != 0}
		n := int(bucket.num_gradients)
		b.Gradients = append(b.Gradients, unsafe.Slice(bucket.gradients, n)...)
		for _, name := range unsafe.Slice(bucket.parameters, n) {
			b.Parameters = append(b.Parameters, C.GoString(name))
		}
		return cgo.Handle(handle).Value().(GradientHook).Bucket(finish != 0, b)
	})
}
