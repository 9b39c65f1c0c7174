package cshardweave

// #include "shim.h"
import "C"

import "runtime/cgo"

type Adafactor struct{ LR, Beta2Decay, Eps1, Eps2, ClipThreshold, WeightDecay float64 }

func OptimizerCreateAdafactor(parameters []Tensor, o Adafactor) (Optimizer, error) {
	var out Optimizer
	err := result(C.swvgo_optimizer_create_adafactor(first(parameters), C.size_t(len(parameters)), C.double(o.LR),
		C.double(o.Beta2Decay), C.double(o.Eps1), C.double(o.Eps2), C.double(o.ClipThreshold), C.double(o.WeightDecay), &out))
	return out, err
}

// Muon: DType is a swv_dtype, LRScale a swv_muon_lr_scale.
type Muon struct {
	LR, WeightDecay, Momentum, A, B, C, Eps float64
	Nesterov                                bool
	Steps, DType, LRScale                   int32
}

func OptimizerCreateMuon(parameters []Tensor, o Muon) (Optimizer, error) {
	var out Optimizer
	err := result(C.swvgo_optimizer_create_muon(first(parameters), C.size_t(len(parameters)), C.double(o.LR),
		C.double(o.WeightDecay), C.double(o.Momentum), flag(o.Nesterov), C.int32_t(o.Steps), C.double(o.A), C.double(o.B),
		C.double(o.C), C.double(o.Eps), C.swv_dtype(o.DType), C.swv_muon_lr_scale(o.LRScale), &out))
	return out, err
}

func OptimizerCreateGroups(optimizers []Optimizer) (Optimizer, error) {
	var out Optimizer
	err := result(C.swv_optimizer_create_groups(first(optimizers), C.size_t(len(optimizers)), &out))
	return out, err
}

func OptimizerNumGroups(o Optimizer) (int, error) {
	var out C.size_t
	err := result(C.swv_optimizer_num_groups(o, &out))
	return int(out), err
}

func OptimizerGroupLR(o Optimizer, group int) (float64, error) {
	var out C.double
	err := result(C.swv_optimizer_group_lr(o, C.size_t(group), &out))
	return float64(out), err
}

func OptimizerSetGroupLR(o Optimizer, group int, lr float64) error {
	return result(C.swv_optimizer_set_group_lr(o, C.size_t(group), C.double(lr)))
}

// GradScaler is a handle.
type GradScaler = *C.swv_grad_scaler

func GradScalerCreate(initScale, growthFactor, backoffFactor float64, growthInterval int64) (GradScaler, error) {
	var out GradScaler
	err := result(C.swvgo_grad_scaler_create(C.double(initScale), C.double(growthFactor), C.double(backoffFactor),
		C.int64_t(growthInterval), &out))
	return out, err
}

func GradScalerFree(s GradScaler) { C.swv_grad_scaler_free(s) }

func GradScalerScale(s GradScaler, loss Tensor, mode int32) (Tensor, error) {
	var out Tensor
	err := result(C.swv_grad_scaler_scale(s, loss, C.swv_grad_mode(mode), &out))
	return out, err
}

func GradScalerUnscale(s GradScaler, parameters []Tensor) (bool, error) {
	var out C.swv_bool
	err := result(C.swv_grad_scaler_unscale(s, first(parameters), C.size_t(len(parameters)), &out))
	return out != 0, err
}

func GradScalerUpdate(s GradScaler) error { return result(C.swv_grad_scaler_update(s)) }

func GradScalerState(s GradScaler) (scale float64, tracker int64, err error) {
	var outScale C.double
	var outTracker C.int64_t
	err = result(C.swv_grad_scaler_state(s, &outScale, &outTracker))
	return float64(outScale), int64(outTracker), err
}

func GradScalerSetState(s GradScaler, scale float64, tracker int64) error {
	return result(C.swv_grad_scaler_set_state(s, C.double(scale), C.int64_t(tracker)))
}

// CapturedStep is a handle.
type CapturedStep = *C.swv_captured_step

// CapturedStepCreate calls step on the thread of the call, before it returns.
func CapturedStepCreate(m Mesh, parameters []Tensor, step func() error) (CapturedStep, error) {
	handle := cgo.NewHandle(step)
	defer handle.Delete()
	var out CapturedStep
	err := result(C.swvgo_captured_step_create(m, first(parameters), C.size_t(len(parameters)), C.uintptr_t(handle), &out))
	return out, err
}

//export swvgo_step
func swvgo_step(handle C.uintptr_t) *C.swv_status {
	return callback(cgo.Handle(handle).Value().(func() error))
}

func CapturedStepFree(s CapturedStep) { C.swv_captured_step_free(s) }

func CapturedStepReplay(s CapturedStep) error { return result(C.swv_captured_step_replay(s)) }

func CapturedStepReplays(s CapturedStep) (int64, error) {
	var out C.int64_t
	err := result(C.swv_captured_step_replays(s, &out))
	return int64(out), err
}
