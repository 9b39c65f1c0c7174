package cshardweave

// #include "shim.h"
import "C"

import "unsafe"

// Factories of TensorCreate.
const (
	Empty = C.SWVGO_EMPTY
	Zeros = C.SWVGO_ZEROS
	Ones  = C.SWVGO_ONES
	Full  = C.SWVGO_FULL
	Rand  = C.SWVGO_RAND
	Randn = C.SWVGO_RANDN
)

// Device is swv_device.
type Device struct{ Kind, Index int32 }

func (d Device) c() C.swv_device {
	return C.swv_device{_type: C.swv_device_type(d.Kind), index: C.int32_t(d.Index)}
}

func TensorCreate(factory int32, value float64, sizes []int64, dtype int32, requiresGrad bool, device Device, m Mesh, l Layout) (Tensor, error) {
	var out Tensor
	err := result(C.swvgo_tensor_create(C.int32_t(factory), C.double(value), int64s(sizes), C.size_t(len(sizes)),
		C.swv_dtype(dtype), flag(requiresGrad), device.c(), m, l, &out))
	return out, err
}

func TensorFromData(data unsafe.Pointer, size int, sizes []int64, dtype int32, requiresGrad bool, device Device) (Tensor, error) {
	var out Tensor
	err := result(C.swvgo_tensor_from_data(bytes(data), C.size_t(size), int64s(sizes), C.size_t(len(sizes)),
		C.swv_dtype(dtype), flag(requiresGrad), device.c(), &out))
	return out, err
}

// TensorFromDLPack takes a DLManagedTensorVersioned over, also if it fails.
func TensorFromDLPack(managed, stream unsafe.Pointer) (Tensor, error) {
	var out Tensor
	err := result(C.swv_tensor_from_dlpack((*C.struct_DLManagedTensorVersioned)(managed), stream, &out))
	return out, err
}

// TensorToDLPack is a DLManagedTensorVersioned.
func TensorToDLPack(t Tensor, stream unsafe.Pointer) (unsafe.Pointer, error) {
	var out *C.struct_DLManagedTensorVersioned
	err := result(C.swv_tensor_to_dlpack(t, stream, &out))
	return unsafe.Pointer(out), err
}

func TensorShare(t Tensor) (Tensor, error) {
	var out Tensor
	err := result(C.swv_tensor_share(t, &out))
	return out, err
}

func TensorsFree(all []Tensor) {
	if len(all) > 0 {
		C.swvgo_tensors_free(&all[0], C.size_t(len(all)))
	}
}

func TensorIsSame(a, b Tensor) (bool, error) {
	var out C.swv_bool
	err := result(C.swv_tensor_is_same(a, b, &out))
	return out != 0, err
}

func TensorNumel(t Tensor) (int64, error) {
	var out C.int64_t
	err := result(C.swv_tensor_numel(t, &out))
	return int64(out), err
}

func TensorSizes(t Tensor) ([]int64, error) {
	return numbers(func(to *C.int64_t, capacity C.size_t, count *C.size_t) *C.swv_status {
		return C.swv_tensor_sizes(t, to, capacity, count)
	})
}

func TensorStrides(t Tensor) ([]int64, error) {
	return numbers(func(to *C.int64_t, capacity C.size_t, count *C.size_t) *C.swv_status {
		return C.swv_tensor_strides(t, to, capacity, count)
	})
}

func TensorDType(t Tensor) (int32, error) {
	var out C.swv_dtype
	err := result(C.swv_tensor_dtype(t, &out))
	return int32(out), err
}

func TensorDevice(t Tensor) (Device, error) {
	var out C.swv_device
	err := result(C.swv_tensor_device(t, &out))
	return Device{int32(out._type), int32(out.index)}, err
}

func TensorIsSharded(t Tensor) (bool, error) {
	var out C.swv_bool
	err := result(C.swv_tensor_is_sharded(t, &out))
	return out != 0, err
}

func TensorToString(t Tensor) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_tensor_to_string(t, &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

// TensorValuesToString is TensorToString and the elements of the whole tensor.
func TensorValuesToString(t Tensor) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_tensor_values_to_string(t, &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

// TensorLocalBytes is about what this rank holds of the tensor, in bytes; 0 if that is not known.
func TensorLocalBytes(t Tensor) int64 { return int64(C.swvgo_tensor_local_bytes(t)) }

func TensorPicture(t Tensor) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_tensor_picture(t, &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

func TensorCopyToHost(t Tensor, data unsafe.Pointer, size int) error {
	return result(C.swvgo_tensor_copy_to_host(t, bytes(data), C.size_t(size)))
}

func TensorCopyFromHost(t Tensor, data unsafe.Pointer, size int) error {
	return result(C.swvgo_tensor_copy_from_host(t, bytes(data), C.size_t(size)))
}

func TensorDistribute(t Tensor, m Mesh, l Layout, source int64) (Tensor, error) {
	var out Tensor
	err := result(C.swvgo_tensor_distribute(t, m, l, rank32(source), &out))
	return out, err
}

// TensorFromLocal works the sizes out if they are nil.
func TensorFromLocal(t Tensor, m Mesh, l Layout, sizes []int64, mode int32) (Tensor, error) {
	var out Tensor
	var first *C.int64_t
	if sizes != nil {
		first = int64s(append(sizes[:len(sizes):len(sizes)], 0)) // not NULL for a scalar either
	}
	err := result(C.swv_tensor_from_local(t, m, l, first, C.size_t(len(sizes)), C.swv_grad_mode(mode), &out))
	return out, err
}

func TensorToLocal(t Tensor, gradLayout Layout, mode int32) (Tensor, error) {
	var out Tensor
	err := result(C.swv_tensor_to_local(t, gradLayout, C.swv_grad_mode(mode), &out))
	return out, err
}

func TensorRedistribute(t Tensor, l Layout, mode int32) (Tensor, error) {
	var out Tensor
	err := result(C.swv_tensor_redistribute(t, l, C.swv_grad_mode(mode), &out))
	return out, err
}

func TensorFullTensor(t Tensor, mode int32) (Tensor, error) {
	var out Tensor
	err := result(C.swv_tensor_full_tensor(t, C.swv_grad_mode(mode), &out))
	return out, err
}

func TensorLayout(t Tensor) (Layout, error) {
	var out Layout
	err := result(C.swv_tensor_layout(t, &out))
	return out, err
}

func TensorMesh(t Tensor) (Mesh, error) {
	var out Mesh
	err := result(C.swv_tensor_mesh(t, &out))
	return out, err
}

// ---- Autograd

func TensorRequiresGrad(t Tensor) (bool, error) {
	var out C.swv_bool
	err := result(C.swv_tensor_requires_grad(t, &out))
	return out != 0, err
}

func TensorSetRequiresGrad(t Tensor, requiresGrad bool) error {
	return result(C.swv_tensor_set_requires_grad(t, flag(requiresGrad)))
}

func TensorClearRequiresGrad(t Tensor) error { return result(C.swv_tensor_clear_requires_grad(t)) }

func TensorIsLeaf(t Tensor) (bool, error) {
	var out C.swv_bool
	err := result(C.swv_tensor_is_leaf(t, &out))
	return out != 0, err
}

func TensorDetach(t Tensor) (Tensor, error) {
	var out Tensor
	err := result(C.swv_tensor_detach(t, &out))
	return out, err
}

// TensorGrad is nil if there is none.
func TensorGrad(t Tensor) (Tensor, error) {
	var out Tensor
	err := result(C.swv_tensor_grad(t, &out))
	return out, err
}

func TensorSetGrad(t, grad Tensor) error { return result(C.swv_tensor_set_grad(t, grad)) }

func TensorBackward(t, gradient Tensor, retainGraph, createGraph bool) error {
	return result(C.swvgo_tensor_backward(t, gradient, flag(retainGraph), flag(createGraph)))
}

// Gradients: gradOutputs is nil, or as long as outputs.
func Gradients(outputs, inputs, gradOutputs []Tensor, retainGraph, createGraph, allowUnused bool) ([]Tensor, error) {
	all := append(append(append(make([]Tensor, 0, 1+len(outputs)+len(inputs)+len(gradOutputs)), outputs...), inputs...), gradOutputs...)
	grads := make([]Tensor, len(inputs)+1)
	err := result(C.swvgo_gradients(first(all), C.size_t(len(outputs)), C.size_t(len(inputs)),
		flag(gradOutputs != nil), flag(retainGraph), flag(createGraph), flag(allowUnused), &grads[0]))
	return grads[:len(inputs)], err
}

// ---- Modules, plans, optimizers

func ModuleCreate() (Module, error) {
	var out Module
	err := result(C.swv_module_create(&out))
	return out, err
}

func ModuleLoad(path string) (Module, error) {
	if err := checkText("path", path); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Module
	err := result(C.swv_module_load(a.text(path), &out))
	return out, err
}

// ModuleCreateByKind takes "" for no options.
func ModuleCreateByKind(kind, options string) (Module, error) {
	if err := checkText("kind", kind); err != nil {
		return nil, err
	}
	if err := checkText("options_json", options); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Module
	err := result(C.swv_module_create_by_kind(a.text(kind), a.orNull(options), &out))
	return out, err
}

func ModuleFree(m Module) { C.swv_module_free(m) }

func ModuleAddParameter(m Module, fqn string, t Tensor) error {
	if err := checkText("fqn", fqn); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_module_add_parameter(m, a.text(fqn), t))
}

func ModuleAddBuffer(m Module, fqn string, t Tensor) error {
	if err := checkText("fqn", fqn); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_module_add_buffer(m, a.text(fqn), t))
}

func ModuleAddChild(m Module, fqn string, child Module) error {
	if err := checkText("fqn", fqn); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_module_add_child(m, a.text(fqn), child))
}

func ModuleSetSharding(m Module, json string) error {
	if err := checkText("sharding_json", json); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_module_set_sharding(m, a.text(json)))
}

func ModuleChild(m Module, fqn string) (Module, error) {
	if err := checkText("fqn", fqn); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Module
	err := result(C.swv_module_child(m, a.text(fqn), &out))
	return out, err
}

func ModuleTrain(m Module, on bool) error { return result(C.swv_module_train(m, flag(on))) }

func ModuleIsTraining(m Module) (bool, error) {
	var out C.swv_bool
	err := result(C.swv_module_is_training(m, &out))
	return out != 0, err
}

func ModuleForward(m Module, fqn string) (Forward, error) {
	if err := checkText("fqn", fqn); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Forward
	err := result(C.swv_module_forward(m, a.text(fqn), &out))
	return out, err
}

func ForwardFree(f Forward) { C.swv_forward_free(f) }

// ForwardBegin gives the inputs as the plan wants them, and the scope of the run.
func ForwardBegin(f Forward, mode int32, inputs []Tensor) ([]Tensor, Scope, error) {
	out := make([]Tensor, len(inputs))
	var scope Scope
	err := result(C.swvgo_forward_begin(f, C.swv_grad_mode(mode), first(inputs), C.size_t(len(inputs)), first(out), &scope))
	return out, scope, err
}

func ForwardEnd(s Scope, outputs []Tensor) ([]Tensor, error) {
	out := make([]Tensor, len(outputs))
	err := result(C.swvgo_forward_end(s, first(outputs), C.size_t(len(outputs)), first(out)))
	return out, err
}

func ModuleNumParameters(m Module) (int, error) {
	var out C.size_t
	err := result(C.swv_module_num_parameters(m, &out))
	return int(out), err
}

func ModuleParameter(m Module, index int) (string, Tensor, error) {
	var fqn *C.swv_string
	var out Tensor
	if err := result(C.swv_module_parameter(m, C.size_t(index), &fqn, &out)); err != nil {
		return "", nil, err
	}
	return text(fqn), out, nil
}

func ModuleNumBuffers(m Module) (int, error) {
	var out C.size_t
	err := result(C.swv_module_num_buffers(m, &out))
	return int(out), err
}

func ModuleBuffer(m Module, index int) (string, Tensor, error) {
	var fqn *C.swv_string
	var out Tensor
	if err := result(C.swv_module_buffer(m, C.size_t(index), &fqn, &out)); err != nil {
		return "", nil, err
	}
	return text(fqn), out, nil
}

func ModuleBufferIsPersistent(m Module, index int) (bool, error) {
	var out C.swv_bool
	err := result(C.swv_module_buffer_is_persistent(m, C.size_t(index), &out))
	return out == 1, err
}

func ModuleGet(m Module, fqn string) (Tensor, error) {
	if err := checkText("fqn", fqn); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Tensor
	err := result(C.swv_module_get(m, a.text(fqn), &out))
	return out, err
}

func ModuleDistribute(m Module, mesh Mesh, p Plan, source int64) error {
	return result(C.swvgo_module_distribute(m, mesh, p, rank32(source)))
}

func ModuleFinishGradSync(m Module) error { return result(C.swv_module_finish_grad_sync(m)) }

func FinishGradSync(parameters []Tensor) error {
	return result(C.swvgo_finish_grad_sync(first(parameters), C.size_t(len(parameters))))
}

func ClipGradNorm(parameters []Tensor, max, normType float64, errorIfNonfinite bool) (float64, error) {
	var out C.double
	err := result(C.swvgo_clip_grad_norm(first(parameters), C.size_t(len(parameters)), C.double(max),
		C.double(normType), flag(errorIfNonfinite), &out))
	return float64(out), err
}

func ModuleZeroGrad(m Module) error { return result(C.swv_module_zero_grad(m)) }

func PlanCreate() (Plan, error) {
	var out Plan
	err := result(C.swv_plan_create(&out))
	return out, err
}

func PlanFromJSON(description string) (Plan, error) {
	if err := checkText("json", description); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Plan
	err := result(C.swv_plan_from_json(a.text(description), &out))
	return out, err
}

func PlanFromHuggingFace(m Module, description, tpMeshDim string) (Plan, error) {
	if err := checkText("an argument", description, tpMeshDim); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Plan
	err := result(C.swv_plan_from_hugging_face(m, a.text(description), a.text(tpMeshDim), &out))
	return out, err
}

// PlanResolve is what the plan says of a module, as a table and as JSON.
func PlanResolve(p Plan, m Module, mesh Mesh) (table, json string, err error) {
	var outText, outJSON *C.swv_string
	if err := result(C.swv_plan_resolve(p, m, mesh, &outText, &outJSON)); err != nil {
		return "", "", err
	}
	return text(outText), text(outJSON), nil
}

func PlanToJSON(p Plan) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_plan_to_json(p, &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

// PlanAdd takes mesh dimension, placement, mesh dimension, ...
func PlanAdd(p Plan, pattern string, pairs []string) error {
	if err := checkText("the line", append([]string{pattern}, pairs...)...); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swvgo_plan_add(p, a.text(pattern), a.list(pairs), C.size_t(len(pairs)/2)))
}

// PlanAddForward is PlanAdd for inputs and outputs.
func PlanAddForward(p Plan, pattern string, pairs []string) error {
	if err := checkText("the line", append([]string{pattern}, pairs...)...); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swvgo_plan_add_forward(p, a.text(pattern), a.list(pairs), C.size_t(len(pairs)/2)))
}

// PlanAddModule has pairs of a mesh dimension and a style, or "".
func PlanAddModule(p Plan, pattern string, pairs []string) error {
	if err := checkText("the line", append([]string{pattern}, pairs...)...); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swvgo_plan_add_module(p, a.text(pattern), a.list(pairs), C.size_t(len(pairs)/2)))
}

func PlanAppend(p, other Plan) error { return result(C.swv_plan_append(p, other)) }

func PlanAddLayout(p Plan, pattern string, l Layout) error {
	if err := checkText("pattern", pattern); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_plan_add_layout(p, a.text(pattern), l))
}

func PlanAddForwardLayout(p Plan, pattern string, l Layout) error {
	if err := checkText("pattern", pattern); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_plan_add_forward_layout(p, a.text(pattern), l))
}

func PlanFree(p Plan) { C.swv_plan_free(p) }

type SGD struct {
	LR, Momentum, Dampening, WeightDecay float64
	Nesterov                             bool
}

func OptimizerCreateSGD(parameters []Tensor, o SGD) (Optimizer, error) {
	var out Optimizer
	err := result(C.swvgo_optimizer_create_sgd(first(parameters), C.size_t(len(parameters)), C.double(o.LR),
		C.double(o.Momentum), C.double(o.Dampening), C.double(o.WeightDecay), flag(o.Nesterov), &out))
	return out, err
}

// Adam is of Adam and AdamW.
type Adam struct {
	LR, Beta1, Beta2, Eps, WeightDecay float64
	AMSGrad                            bool
}

func OptimizerCreateAdam(parameters []Tensor, o Adam) (Optimizer, error) {
	var out Optimizer
	err := result(C.swvgo_optimizer_create_adam(first(parameters), C.size_t(len(parameters)), C.double(o.LR),
		C.double(o.Beta1), C.double(o.Beta2), C.double(o.Eps), C.double(o.WeightDecay), flag(o.AMSGrad), &out))
	return out, err
}

func OptimizerCreateAdamW(parameters []Tensor, o Adam) (Optimizer, error) {
	var out Optimizer
	err := result(C.swvgo_optimizer_create_adamw(first(parameters), C.size_t(len(parameters)), C.double(o.LR),
		C.double(o.Beta1), C.double(o.Beta2), C.double(o.Eps), C.double(o.WeightDecay), flag(o.AMSGrad), &out))
	return out, err
}

type Lion struct{ LR, Beta1, Beta2, WeightDecay float64 }

func OptimizerCreateLion(parameters []Tensor, o Lion) (Optimizer, error) {
	var out Optimizer
	err := result(C.swvgo_optimizer_create_lion(first(parameters), C.size_t(len(parameters)), C.double(o.LR),
		C.double(o.Beta1), C.double(o.Beta2), C.double(o.WeightDecay), &out))
	return out, err
}

func OptimizerUseZeRO(o Optimizer, meshDim string, stage int32, bucketBytes int64) error {
	if err := checkText("ZeRO.MeshDim", meshDim); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swvgo_optimizer_use_zero(o, a.orNull(meshDim), C.int32_t(stage), C.int64_t(bucketBytes)))
}

func OptimizerDiscard(o Optimizer) error { return result(C.swv_optimizer_discard(o)) }

func OptimizerNoSync(o Optimizer) (Scope, error) {
	var out Scope
	err := result(C.swv_optimizer_no_sync(o, &out))
	return out, err
}

func OptimizerFree(o Optimizer) { C.swv_optimizer_free(o) }

func OptimizerStep(o Optimizer) error { return result(C.swv_optimizer_step(o)) }

func OptimizerZeroGrad(o Optimizer) error { return result(C.swv_optimizer_zero_grad(o)) }

func OptimizerLR(o Optimizer) (float64, error) {
	var out C.double
	err := result(C.swv_optimizer_lr(o, &out))
	return float64(out), err
}

func OptimizerSetLR(o Optimizer, lr float64) error {
	return result(C.swv_optimizer_set_lr(o, C.double(lr)))
}

// OptimizerState may be nil.
func OptimizerState(o Optimizer, index int, name string) (Tensor, error) {
	if err := checkText("name", name); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Tensor
	err := result(C.swv_optimizer_state(o, C.size_t(index), a.text(name), &out))
	return out, err
}

func OptimizerSetState(o Optimizer, index int, name string, t Tensor) error {
	if err := checkText("name", name); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_optimizer_set_state(o, C.size_t(index), a.text(name), t))
}
