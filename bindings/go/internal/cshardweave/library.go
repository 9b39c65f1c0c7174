package cshardweave

// #include "shim.h"
import "C"

import "runtime/cgo"

// GradSync is a handle.
type GradSync = *C.swv_grad_sync

// PlanFromZoo takes "" for the kind that the configuration says, and for no options.
func PlanFromZoo(kind, config string, m Mesh, options string) (Plan, error) {
	if err := checkText("an argument", kind, config, options); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Plan
	err := result(C.swv_plan_from_zoo(a.orNull(kind), a.text(config), m, a.orNull(options), &out))
	return out, err
}

// PlanFromStyles takes "" for the mesh dimension that the library chooses.
func PlanFromStyles(module Module, m Mesh, styles, tpMeshDim string) (Plan, error) {
	if err := checkText("an argument", styles, tpMeshDim); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Plan
	err := result(C.swv_plan_from_styles(module, m, a.text(styles), a.orNull(tpMeshDim), &out))
	return out, err
}

func ModuleShare(m Module) (Module, error) {
	var out Module
	err := result(C.swv_module_share(m, &out))
	return out, err
}

// DeferredInit is about the calling thread.
func DeferredInit() (Scope, error) {
	var out Scope
	err := result(C.swv_deferred_init(&out))
	return out, err
}

// ModuleMaterialize takes a name for each value.
func ModuleMaterialize(m Module, fqns []string, values []Tensor, seed uint64, hasSeed bool) error {
	if err := checkText("fqns[]", fqns...); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swvgo_module_materialize(m, a.list(fqns), first(values), C.size_t(len(values)), C.uint64_t(seed), flag(hasSeed)))
}

func TensorIsDeferred(t Tensor) (bool, error) {
	var out C.swv_bool
	err := result(C.swv_tensor_is_deferred(t, &out))
	return out != 0, err
}

// FullyShard is swv_fully_shard_options; MeshDim "" is the mesh's first.
type FullyShard struct {
	MeshDim          string
	Units, UnitTypes []string
	MinNumel         int64
	KeepForBackward  bool
	EqualSegments    bool
	ReshardRanks     int64
	// Of parameters as operators see them, of sums of gradients, of outputs; 0 is none.
	Param, Reduce, Output int32
	ComputeDevice         Device // the CPU: none
}

func ModuleFullyShard(m Module, mesh Mesh, source int64, o FullyShard) (table, json string, err error) {
	names := append(append([]string{}, o.Units...), o.UnitTypes...)
	if err := checkText("an option", append([]string{o.MeshDim}, names...)...); err != nil {
		return "", "", err
	}
	var a arena
	defer a.free()
	return report(func(text, json **C.swv_string) *C.swv_status {
		return C.swvgo_module_fully_shard(m, mesh, a.orNull(o.MeshDim), a.list(names), C.size_t(len(o.Units)), C.size_t(len(o.UnitTypes)),
			C.int64_t(o.MinNumel), rank32(source), flag(!o.KeepForBackward), C.swv_dtype(o.Param), C.swv_dtype(o.Reduce), C.swv_dtype(o.Output),
			flag(o.EqualSegments), C.int64_t(o.ReshardRanks), o.ComputeDevice.c(), text, json)
	})
}

func MeshReshard(m Mesh) error { return result(C.swv_mesh_reshard(m)) }

func MeshFullyShardNoSync(m Mesh) (Scope, error) {
	var out Scope
	err := result(C.swv_mesh_fully_shard_no_sync(m, &out))
	return out, err
}

// MeshFullyShardCounters: gathers, prefetches, wrong prefetches, reduce-scatters, gathered bytes, the most of these.
func MeshFullyShardCounters(m Mesh) ([6]int64, error) {
	var out [6]int64
	err := result(C.swvgo_mesh_fully_shard_counters(m, int64s(out[:])))
	return out, err
}

// ModuleFullParams takes -1 for every rank.
func ModuleFullParams(m Module, writeback bool, rank int64) (Scope, error) {
	var out Scope
	err := result(C.swv_module_full_params(m, flag(writeback), rank32(rank), &out))
	return out, err
}

// FullParamsGet is nil on a rank that has none.
func FullParamsGet(s Scope, fqn string) (Tensor, error) {
	if err := checkText("fqn", fqn); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Tensor
	err := result(C.swv_full_params_get(s, a.text(fqn), &out))
	return out, err
}

func FullParamsEnd(s Scope) error { return result(C.swv_full_params_end(s)) }

// GradSyncOptions: Reduce 0 is no type, PowerSGD.Rank 0 none, Hook nil none.
type GradSyncOptions struct {
	BucketBytes int64
	Reduce      int32
	Hook        GradientHook
	HookName    string
	PowerSGD    PowerSGD
}

// PowerSGD is swv_power_sgd_options.
type PowerSGD struct {
	Rank, StartIteration      int64
	MinCompressionRate        float64
	Seed                      uint64
	NoErrorFeedback, NoWarmUp bool
}

// raw takes the hook over: the library drops it.
func (o GradSyncOptions) raw(a *arena) C.swvgo_grad_sync {
	raw := C.swvgo_grad_sync{bucket_bytes: C.int64_t(o.BucketBytes), reduce_dtype: C.swv_dtype(o.Reduce),
		rank: C.int64_t(o.PowerSGD.Rank), start_iteration: C.int64_t(o.PowerSGD.StartIteration),
		min_compression_rate: C.double(o.PowerSGD.MinCompressionRate), seed: C.uint64_t(o.PowerSGD.Seed),
		error_feedback: flag(!o.PowerSGD.NoErrorFeedback), warm_start: flag(!o.PowerSGD.NoWarmUp)}
	if o.Hook != nil {
		raw.hook = C.uintptr_t(cgo.NewHandle(o.Hook))
		raw.hook_name = a.text(o.HookName)
	}
	return raw
}

// checked drops the hook if the text is none.
func (o GradSyncOptions) checked(texts ...string) error {
	err := checkText("an option", append(texts, o.HookName)...)
	if err != nil && o.Hook != nil {
		o.Hook.Dropped()
	}
	return err
}

func GradSyncCreate(m Module, o GradSyncOptions) (GradSync, error) {
	if err := o.checked(); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out GradSync
	raw := o.raw(&a)
	err := result(C.swvgo_grad_sync_create(m, &raw, &out))
	return out, err
}

// ModuleDistributedDataParallel: meshDim "" is the mesh's first.
func ModuleDistributedDataParallel(m Module, mesh Mesh, meshDim string, source int64, o GradSyncOptions) (GradSync, error) {
	if err := o.checked(meshDim); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out GradSync
	raw := o.raw(&a)
	err := result(C.swvgo_module_distributed_data_parallel(m, mesh, a.orNull(meshDim), rank32(source), &raw, &out))
	return out, err
}

func ModulePreDPTransform(m Module, mesh Mesh, meshDim string, source int64) error {
	if err := checkText("meshDim", meshDim); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_module_pre_dp_transform(m, mesh, a.orNull(meshDim), rank32(source)))
}

func ModuleBroadcastBuffers(m Module, mesh Mesh, meshDim string) error {
	if err := checkText("meshDim", meshDim); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_module_broadcast_buffers(m, mesh, a.orNull(meshDim)))
}

func ModuleEnable2DWithFSDP(m Module, mesh Mesh, meshDim string) error {
	if err := checkText("meshDim", meshDim); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_module_enable_2d_with_fsdp(m, mesh, a.orNull(meshDim)))
}

// MeshJoinBatch gives no tensors once no rank has any.
func MeshJoinBatch(m Mesh, meshDims []string, mine []Tensor) (batch []Tensor, ranks int64, err error) {
	if err := checkText("a mesh dimension", meshDims...); err != nil {
		return nil, 0, err
	}
	var a arena
	defer a.free()
	var out [C.SWV_MAX_BATCH_TENSORS]Tensor
	var count C.size_t
	var with C.int64_t
	err = result(C.swvgo_mesh_join_batch(m, a.list(meshDims), C.size_t(len(meshDims)), first(mine), C.size_t(len(mine)),
		&out[0], &count, &with))
	return append([]Tensor(nil), out[:int(count)]...), int64(with), err
}

// GradSyncStates is what PowerSGD has learned.
func GradSyncStates(s GradSync) (names []string, tensors []Tensor, err error) {
	var count C.size_t
	if err := result(C.swv_grad_sync_num_states(s, &count)); err != nil {
		return nil, nil, err
	}
	for i := C.size_t(0); i < count; i++ {
		var name *C.swv_string
		var tensor Tensor
		if err := result(C.swv_grad_sync_state(s, i, &name, &tensor)); err != nil {
			TensorsFree(tensors)
			return nil, nil, err
		}
		names, tensors = append(names, text(name)), append(tensors, tensor)
	}
	return names, tensors, nil
}

func GradSyncSetStates(s GradSync, names []string, tensors []Tensor) error {
	if err := checkText("a name", names...); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swvgo_grad_sync_set_states(s, a.list(names), first(tensors), C.size_t(len(tensors))))
}

func GradSyncFree(s GradSync) { C.swv_grad_sync_free(s) }

func GradSyncNoSync(s GradSync) (Scope, error) {
	var out Scope
	err := result(C.swv_grad_sync_no_sync(s, &out))
	return out, err
}

func GradSyncDiscard(s GradSync) error { return result(C.swv_grad_sync_discard(s)) }

func GradSyncCounts(s GradSync) (buckets, leftInBackward int64, err error) {
	var all, left C.int64_t
	err = result(C.swv_grad_sync_counts(s, &all, &left))
	return int64(all), int64(left), err
}

// report is a table and JSON, of a function that gives both.
func report(f func(text, json **C.swv_string) *C.swv_status) (table, json string, err error) {
	var outText, outJSON *C.swv_string
	if err := result(f(&outText, &outJSON)); err != nil {
		return "", "", err
	}
	return text(outText), text(outJSON), nil
}

func ModuleDump(m Module) (table, json string, err error) {
	return report(func(text, json **C.swv_string) *C.swv_status { return C.swv_module_dump(m, text, json) })
}

// Run runs a model, or its reference; the tensor is given away, and may be nil.
type Run func(reference bool) (Tensor, error)

// running lends a Run to C for the length of f; 0 for none.
func running(run Run, f func(handle C.uintptr_t)) {
	if run == nil {
		f(0)
		return
	}
	handle := cgo.NewHandle(run)
	defer handle.Delete()
	f(C.uintptr_t(handle))
}

//export swvgo_run
func swvgo_run(handle C.uintptr_t, reference C.swv_bool, out **C.swv_tensor) *C.swv_status {
	return callback(func() (err error) {
		*out, err = cgo.Handle(handle).Value().(Run)(reference != 0)
		return err
	})
}

// ModuleMemory runs nothing if run is nil.
func ModuleMemory(m Module, run Run) (table, json string, err error) {
	running(run, func(handle C.uintptr_t) {
		table, json, err = report(func(text, json **C.swv_string) *C.swv_status {
			return C.swvgo_module_memory(m, handle, text, json)
		})
	})
	return table, json, err
}

func ModuleListCommunication(m Module, run Run) (table, json string, err error) {
	running(run, func(handle C.uintptr_t) {
		table, json, err = report(func(text, json **C.swv_string) *C.swv_status {
			return C.swvgo_module_list_communication(m, handle, text, json)
		})
	})
	return table, json, err
}

// Verify is swv_verify_options.
type Verify struct {
	Tolerance               float64
	ForwardOnly, CopyValues bool
}

// ModuleVerify runs both modules by run.
func ModuleVerify(m, reference Module, run Run, o Verify) (same bool, table, json string, err error) {
	var out C.swv_bool
	running(run, func(handle C.uintptr_t) {
		table, json, err = report(func(text, json **C.swv_string) *C.swv_status {
			return C.swvgo_module_verify(m, reference, handle, C.double(o.Tolerance), flag(o.ForwardOnly), flag(o.CopyValues), &out, text, json)
		})
	})
	return out != 0, table, json, err
}

// StepModel is a model for PlanAuto.
type StepModel struct {
	Make func() (Module, error)          // the module is given away
	Loss func(mesh Mesh) (Tensor, error) // of the last one; the tensor is given away, the mesh is lent
}

//export swvgo_make_model
func swvgo_make_model(handle C.uintptr_t, out **C.swv_module) *C.swv_status {
	return callback(func() (err error) {
		*out, err = cgo.Handle(handle).Value().(StepModel).Make()
		return err
	})
}

//export swvgo_model_loss
func swvgo_model_loss(handle C.uintptr_t, mesh *C.swv_mesh, out **C.swv_tensor) *C.swv_status {
	return callback(func() (err error) {
		*out, err = cgo.Handle(handle).Value().(StepModel).Loss(mesh)
		return err
	})
}

// PlanAutoOptions is swv_plan_auto_options; TPMeshDim "" is the mesh's only dimension, or "tp".
type PlanAutoOptions struct {
	TPMeshDim                                           string
	MemoryLimit, OptimizerStates, Heads, MaxEvaluations int64
	SequenceDim                                         int32
}

func PlanAuto(m Mesh, model StepModel, o PlanAutoOptions) (plan Plan, table, json string, err error) {
	if err := checkText("an option", o.TPMeshDim); err != nil {
		return nil, "", "", err
	}
	var a arena
	defer a.free()
	handle := cgo.NewHandle(model)
	defer handle.Delete()
	table, json, err = report(func(text, json **C.swv_string) *C.swv_status {
		return C.swvgo_plan_auto(m, C.uintptr_t(handle), a.orNull(o.TPMeshDim), C.int64_t(o.MemoryLimit), C.int64_t(o.OptimizerStates),
			C.int64_t(o.Heads), C.int64_t(o.MaxEvaluations), C.int32_t(o.SequenceDim), &plan, text, json)
	})
	return plan, table, json, err
}
