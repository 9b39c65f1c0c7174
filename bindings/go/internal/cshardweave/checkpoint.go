package cshardweave

// #include "shim.h"
import "C"

import "time"

// Handles of checkpoints.
type (
	State        = *C.swv_state
	Checkpointer = *C.swv_checkpointer
)

// Load is how a checkpoint is loaded.
type Load struct{ AllowMissing, AllowUnexpected, Cast, Verify bool }

func StateCreate() (State, error) {
	var out State
	err := result(C.swv_state_create(&out))
	return out, err
}

func StateFree(s State) { C.swv_state_free(s) }

func StateAddTensor(s State, name string, t Tensor) error {
	if err := checkText("name", name); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_state_add_tensor(s, a.text(name), t))
}

func StateAddModule(s State, prefix string, m Module) error {
	if err := checkText("prefix", prefix); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_state_add_module(s, a.text(prefix), m))
}

func StateAddOptimizer(s State, prefix string, o Optimizer, m Module) error {
	if err := checkText("prefix", prefix); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_state_add_optimizer(s, a.text(prefix), o, m))
}

func StateAddRandom(s State, name string, m Mesh) error {
	if err := checkText("name", name); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_state_add_random(s, a.text(name), m))
}

func StateAddLoader(s State, name string, l Loader) error {
	if err := checkText("name", name); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_state_add_loader(s, a.text(name), l))
}

func StateSetValue(s State, name, json string) error {
	if err := checkText("a name or a value", name, json); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_state_set_value(s, a.text(name), a.text(json)))
}

func StateValue(s State, name string) (string, error) {
	if err := checkText("name", name); err != nil {
		return "", err
	}
	var a arena
	defer a.free()
	var out *C.swv_string
	if err := result(C.swv_state_value(s, a.text(name), &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

func StateLoad(s State, path string, m Mesh, o Load) (string, error) {
	if err := checkText("path", path); err != nil {
		return "", err
	}
	var a arena
	defer a.free()
	var out *C.swv_string
	if err := result(C.swvgo_state_load(s, a.text(path), m, flag(o.AllowMissing), flag(o.AllowUnexpected), flag(o.Cast),
		flag(o.Verify), &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

// CheckpointerCreate takes 0 for an hour.
func CheckpointerCreate(m Mesh, directory string, keepLast int64, timeout time.Duration, skipIfBusy, copyBesideTraining bool) (Checkpointer, error) {
	if err := checkText("directory", directory); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Checkpointer
	err := result(C.swvgo_checkpointer_create(m, a.text(directory), C.int64_t(keepLast), millis(timeout), flag(skipIfBusy), flag(copyBesideTraining), &out))
	return out, err
}

func CheckpointerFree(c Checkpointer) { C.swv_checkpointer_free(c) }

func CheckpointerOpen(c Checkpointer, done int64) error {
	return result(C.swv_checkpointer_open(c, C.int64_t(done)))
}

func CheckpointerSave(c Checkpointer, step int64, s State) error {
	return result(C.swv_checkpointer_save(c, C.int64_t(step), s))
}

func CheckpointerSaveAsync(c Checkpointer, step int64, s State) (bool, error) {
	var out C.swv_bool
	err := result(C.swv_checkpointer_save_async(c, C.int64_t(step), s, &out))
	return out != 0, err
}

func CheckpointerWaitForCopy(c Checkpointer) error {
	return result(C.swv_checkpointer_wait_for_copy(c))
}

func CheckpointerWait(c Checkpointer) error { return result(C.swv_checkpointer_wait(c)) }

func CheckpointerLoad(c Checkpointer, s State, o Load) (string, error) {
	var out *C.swv_string
	if err := result(C.swvgo_checkpointer_load(c, s, flag(o.AllowMissing), flag(o.AllowUnexpected), flag(o.Cast),
		flag(o.Verify), &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

func ListCheckpoints(directory string) ([]int64, error) {
	if err := checkText("directory", directory); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	path := a.text(directory)
	return numbers(func(to *C.int64_t, capacity C.size_t, count *C.size_t) *C.swv_status {
		return C.swv_list_checkpoints(path, to, capacity, count)
	})
}

func FindCheckpoint(path string) (string, error) {
	if err := checkText("path", path); err != nil {
		return "", err
	}
	var a arena
	defer a.free()
	var out *C.swv_string
	if err := result(C.swv_find_checkpoint(a.text(path), &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

func VerifyCheckpoint(path string) error {
	if err := checkText("path", path); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_verify_checkpoint(a.text(path)))
}

// SafetensorsWrite takes metadata as keys and values in turn.
func SafetensorsWrite(path string, names []string, tensors []Tensor, metadata []string) error {
	if err := checkText("path", path); err != nil {
		return err
	}
	if err := checkText("a name", names...); err != nil {
		return err
	}
	if err := checkText("the metadata", metadata...); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swvgo_safetensors_write(a.text(path), a.list(names), first(tensors), C.size_t(len(tensors)), a.list(metadata),
		C.size_t(len(metadata)/2)))
}
