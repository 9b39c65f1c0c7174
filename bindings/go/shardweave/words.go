package shardweave

import (
	"regexp"
	"runtime"
	"strconv"
	"strings"
)

// The library's errors say which of C's functions and arguments were wrong. Here they get the names that
// they have in Go.

// inGo is the message without C's function at its front, for which newError has Go's.
func inGo(message string) string {
	if at := strings.Index(message, ": "); at > 0 && cFunction.FindString(message[:at]) == message[:at] {
		function := message[:at]
		message = message[at+2:]
		if argument := leadingArgument.FindStringSubmatch(message); argument != nil {
			message = goArgument(function, argument[1]) + message[len(argument[0]):]
		}
	}
	return cName.ReplaceAllStringFunc(message, goName)
}

var (
	cFunction       = regexp.MustCompile(`swv_[a-z0-9_]+`)
	cName           = regexp.MustCompile(`\b(swv_[a-z0-9_]+|SWV_[A-Z0-9_]+)`)
	inLists         = regexp.MustCompile(`\[[0-9]+\]`)
	leadingArgument = regexp.MustCompile(`^argument '([^']*)'`)
)

// goArgument is what an argument of a function of C is here: "argument 'sizes'", "WithBackend".
func goArgument(function, argument string) string {
	of := inLists.ReplaceAllString(argument, "[]")
	if name, there := arguments[function+" "+of]; there {
		return name
	}
	if name, there := arguments[of]; there {
		return name
	}
	return "argument '" + argument + "'"
}

// goName is what a function, a type or an enumerator of C is here: "Tensor.IsLeaf" for swv_tensor_is_leaf.
func goName(name string) string {
	if word, there := words[name]; there {
		return word
	}
	parts := strings.Split(strings.ToLower(name), "_")[1:]
	if len(parts) > 1 && name[0] == 'S' && nouns[parts[0]] {
		parts = parts[1:] // of an enumerator: NotFound for SWV_CODE_NOT_FOUND
	}
	for i, part := range parts {
		if word, there := spellings[part]; there {
			parts[i] = word
		} else if part != "" {
			parts[i] = strings.ToUpper(part[:1]) + part[1:]
		}
	}
	if len(parts) > 1 && methodsOf[parts[0]] && name[0] == 's' {
		return parts[0] + "." + strings.Join(parts[1:], "")
	}
	return strings.Join(parts, "")
}

// spellings of what is not just a word with a capital.
var spellings = map[string]string{"cpu": "CPU", "cuda": "CUDA", "dlpack": "DLPack", "dtype": "DType", "free": "Close",
	"json": "JSON", "lr": "LR"}

// nouns are what enumerators begin with.
var nouns = map[string]bool{"checks": true, "code": true, "collective": true, "device": true, "dtype": true, "mode": true,
	"placement": true, "reduce": true, "value": true}

// methodsOf are the nouns whose functions are methods.
var methodsOf = map[string]bool{"Checkpointer": true, "Comm": true, "Forward": true, "Layout": true, "Mesh": true, "Module": true, "Op": true, "Optimizer": true,
	"Plan": true, "State": true, "Tensor": true, "Trace": true, "World": true}

// arguments are those of C whose names in Go differ, or which are a method's receiver.
var arguments = map[string]string{
	"collective": "the operation",
	"comm":       "the group",
	"forward":    "the forward",
	"layout":     "the layout",
	"mesh":       "the mesh",
	"module":     "the module",
	"op":         "the operator",
	"optimizer":  "the optimizer",
	"tensor":     "the tensor",
	"trace":      "the trace",
	"world":      "the world",

	"data": "argument 'data'", "num_bytes": "argument 'data'",
	"body": "argument 'body'", "num_ranks": "argument 'ranks'",
	"backend":                       "WithBackend",
	"options.backend":               "WithBackend",
	"options.network_interface":     "WithNetworkInterface",
	"options.timeout_ms":            "the timeout",
	"options.tag":                   "the tag",
	"rendezvous":                    "argument 'r'",
	"rendezvous.file":               "File",
	"rendezvous.host":               "Host",
	"rendezvous.port":               "Port",
	"rendezvous.run":                "Run",
	"options.mesh":                  "argument 'where'",
	"options.layout":                "the layout among the options",
	"options.dtype":                 "the dtype among the options",
	"options.device":                "the device among the options",
	"options.requires_grad":         "RequiresGrad",
	"options.source":                "argument 'source'",
	"options.nesterov":              "WithNesterov",
	"options.amsgrad":               "WithAMSGrad",
	"options.retain_graph":          "RetainGraph",
	"options.create_graph":          "CreateGraph",
	"options.allow_unused":          "AllowUnused",
	"gradient":                      "WithGradients",
	"grad_outputs":                  "WithGradients",
	"grad_layout":                   "argument 'grad'",
	"from":                          "the layout",
	"mesh_shape":                    "argument 'meshShape'",
	"max_norm":                      "argument 'max'",
	"norm_type":                     "WithNorm",
	"options.norm_type":             "WithNorm",
	"context":                       "the FunctionContext",
	"message_tag":                   "argument 'tag'",
	"requires_grad":                 "argument 'wanted'",
	"swv_optimizer_state index":     "argument 'parameter'",
	"swv_optimizer_set_state index": "argument 'parameter'",
	"swv_set_log user_data":         "argument 'log'",
	"swv_grad_scaler_set_state growth_tracker":              "argument 'tracker'",
	"swv_grad_sync_set_states names[]":                      "argument 'states'",
	"swv_grad_sync_set_states names":                        "argument 'states'",
	"swv_grad_sync_set_states tensors":                      "argument 'states'",
	"swv_grad_sync_set_states tensors[]":                    "argument 'states'",
	"swv_grad_sync_state index":                             "the index of a state",
	"config_json":                                           "argument 'config'",
	"allow_unknown":                                         "AllowUnknownKeys",
	"options.allow_unknown":                                 "AllowUnknownKeys",
	"options.ignored":                                       "what is transient",
	"options.ignored[]":                                     "what is transient",
	"options.max_file_bytes":                                "WithMaxFileBytes",
	"swv_module_save_pretrained options.dtype":              "WithSavedDType",
	"swv_mesh_join_batch mesh_dims":                         "argument 'meshDims'",
	"swv_mesh_join_batch mesh_dims[]":                       "argument 'meshDims'",
	"swv_mesh_join_batch tensors":                           "argument 'mine'",
	"swv_mesh_join_batch tensors[]":                         "argument 'mine'",
	"swv_module_broadcast_buffers mesh_dim":                 "argument 'meshDim'",
	"swv_module_distributed_data_parallel options.mesh_dim": "argument 'meshDim'",
	"swv_module_enable_2d_with_fsdp mesh_dim":               "argument 'meshDim'",
	"swv_module_pre_dp_transform mesh_dim":                  "argument 'meshDim'",
	"swv_optimizer_create_groups optimizers":                "argument 'groups'",
	"swv_optimizer_create_groups optimizers[]":              "argument 'groups'",
	"swv_module_buffer index":                               "the index of a buffer",
	"swv_module_buffer_is_persistent index":                 "the index of a buffer",
	"swv_module_parameter index":                            "the index of a parameter",
	"segment":                                               "argument 'f'",
	"patch":                                                 "argument 'f'",
	"links":                                                 "argument 'model'", "device": "argument 'model'",

	"swv_module_set_sharding sharding_json": "the ModuleSharding",
	"swv_plan_add_module mesh_dims":         "argument 'along'",
	"swv_plan_add_module mesh_dims[]":       "argument 'along'",
	"swv_plan_add_module styles":            "argument 'along'",
	"swv_plan_add_module styles[]":          "argument 'along'",

	"swv_plan_add plan":                "the plan",
	"swv_plan_add_forward plan":        "the plan",
	"swv_plan_add_forward_layout plan": "the plan",
	"swv_plan_add_layout plan":         "the plan",
	"swv_plan_add_module plan":         "the plan",
	"swv_plan_append plan":             "the plan",
	"swv_plan_resolve plan":            "the plan",
	"swv_plan_auto make":               "argument 'model'",
	"swv_plan_auto loss":               "the StepModel's Loss",
	"options.tp_mesh_dim":              "WithTPMeshDim",
	"options.memory_limit":             "WithMemoryLimit",
	"swv_forward_end outputs":          "what the function has returned",
	"swv_forward_end outputs[]":        "what the function has returned",
	"swv_mesh_enter_source source":     "the caller's line",
	"tp_mesh_dim":                      "argument 'tpMeshDim'",
	"swv_plan_to_json plan":            "the plan",
	"swv_layout_equal a":               "the layout",
	"swv_layout_equal b":               "argument 'other'",
	"swv_mesh_equal a":                 "the mesh",
	"swv_mesh_equal b":                 "argument 'other'",
	"swv_tensor_is_same a":             "the tensor",
	"swv_tensor_is_same b":             "argument 'other'",
	"swv_world_create_counting rank":   "argument 'number'",
	"num_outputs":                      "argument 'outputs'",
	"swv_mesh_find_dim name":           "argument 'dim'",
	"swv_mesh_slice names[]":           "argument 'names'",
	"swv_mesh_flatten names[]":         "argument 'names'",
	"new_name":                         "argument 'newName'",
	"dims[].name":                      "the name of a dimension",
	"names[]":                          "an argument's name",
	"counts":                           "argument 'counts'",
	"send_counts":                      "argument 'send'",
	"recv_counts":                      "argument 'recv'",
	"arguments":                        "argument 'args'",
	"arguments[].as.bools":             "an argument",
	"arguments[].as.device":            "a Device",
	"arguments[].as.dtype":             "a DType",
	"arguments[].as.floats":            "an argument",
	"arguments[].as.ints":              "an argument",
	"arguments[].as.string":            "a string",
	"arguments[].as.tensor":            "a tensor",
	"arguments[].as.tensors":           "an argument",
	"arguments[].as.tensors[]":         "a tensor of a list",
	"managed.shape":                    "the shape of argument 'managed'",
	"function.name":                    "argument 'name'",
	"swv_module_full_params rank":      "the place",
	"options_json":                     "argument 'options'",
	"styles_json":                      "argument 'styles'",
	"options.bucket_bytes":             "WithBucketBytes",
	"options.sync.bucket_bytes":        "WithBucketBytes",
	"options.sync.reduce_dtype":        "a type to reduce in",
	"options.power_sgd":                "WithPowerSGD",
	"options.sync.power_sgd":           "WithPowerSGD",
	"options.hook.name":                "the GradientHook's Name",
	"options.sync.hook.name":           "the GradientHook's Name",
	"options.mesh_dim":                 "WithMeshDim",
	"options.min_numel":                "WithMinNumel",
	"options.param_dtype":              "MixedPrecision.Param",
	"options.output_dtype":             "MixedPrecision.Output",
	"options.reduce_dtype":             "a type to reduce in",
	"options.units":                    "WithUnits",
	"options.units[]":                  "WithUnits",
	"options.unit_types":               "WithUnitTypes",
	"options.unit_types[]":             "WithUnitTypes",
	"options.tolerance":                "WithTolerance",
	"run_reference":                    "argument 'runReference'",
	"sync":                             "the GradSync",
	"scaler":                           "the GradScaler",
	"user_data":                        "the function",
	"checkpointer":                     "the checkpointer",
	"state":                            "the state",
	"options.keep_last":                "WithKeepLast",
	"options.copy_beside_training":     "WithCopyBesideTraining",
	"swv_state_set_value json":         "argument 'json'",
	"swv_safetensors_write names":      "the names of argument 'tensors'",
	"swv_safetensors_write names[]":    "the names of argument 'tensors'",
	"swv_safetensors_write tensors[]":  "argument 'tensors'",
	"file":                             "the token file",
	"writer":                           "the writer",
	"loader":                           "the loader",
	"swv_loader_create options.layout": "Spec",
	"swv_loader_create options.mesh":   "Mesh",
	"options.part":                     "Part",
	"plain_dtype":                      "argument 'plain'",
	"json":                             "argument 'position'",
	"fqn":                              "argument 'fqn'",
	"text":                             "the text",
	"placements[].placement":           "a placement",
	"placements[].mesh_dim":            "the name of a mesh dimension",

	"swv_captured_step_free step":                 "the CapturedStep",
	"swv_captured_step_replay step":               "the CapturedStep",
	"swv_captured_step_replays step":              "the CapturedStep",
	"swv_metrics_writer_create_events first_step": "argument 'firstStep'",
	"swv_metrics_writer_write names":              "the names of argument 'metrics'",
	"swv_metrics_writer_write names[]":            "the names of argument 'metrics'",
	"swv_metrics_writer_write values":             "argument 'metrics'",
}

// words are what of C has a name of its own here; goName works out the others.
var words = map[string]string{
	"SWV_CHECK_HANDLES": "SWV_CHECK_HANDLES", // of the environment

	"SWV_MODE_AUTOCAST_BF16": "BF16", // of Autocast
	"SWV_MODE_AUTOCAST_F16":  "F16",

	"SWV_CHECKS_ABORT":  "ChecksAbort",
	"SWV_CHECKS_OFF":    "ChecksOff",
	"SWV_CHECKS_REPORT": "ChecksReport",

	// Functions.
	"swv_comm_all_gather":             "AllGather",
	"swv_comm_all_gather_v":           "AllGatherV",
	"swv_comm_all_reduce":             "AllReduce",
	"swv_comm_all_to_all":             "AllToAll",
	"swv_comm_all_to_all_v":           "AllToAllV",
	"swv_comm_broadcast":              "Broadcast",
	"swv_comm_gather":                 "Gather",
	"swv_comm_recv":                   "Recv",
	"swv_comm_reduce":                 "Reduce",
	"swv_comm_reduce_scatter":         "ReduceScatter",
	"swv_comm_reduce_scatter_v":       "ReduceScatterV",
	"swv_comm_scatter":                "Scatter",
	"swv_comm_send":                   "Send",
	"swv_comm_start":                  "a collective",
	"swv_dtype_name":                  "DType.String",
	"swv_dtype_size":                  "DType.Size",
	"swv_function_apply":              "Apply",
	"swv_function_context_save":       "FunctionContext.Save",
	"swv_function_context_saved":      "FunctionContext.Saved",
	"swv_layout_create_named":         "On",
	"swv_layout_mesh_ndim":            "Layout.Placements",
	"swv_layout_parse":                "ParseLayout",
	"swv_layout_placement":            "Layout.Placements",
	"swv_layout_plan":                 "Layout.PlanTo",
	"swv_layout_to_string":            "Layout.String",
	"swv_mesh_create":                 "World.Mesh",
	"swv_mesh_create_from_ranks":      "World.MeshOfRanks",
	"swv_mesh_dim_name":               "Mesh.Dims",
	"swv_mesh_enter_module":           "Mesh.Named",
	"swv_mesh_enter_source":           "Mesh.Trace",
	"swv_forward_begin":               "Forward.Run",
	"swv_forward_end":                 "Forward.Run",
	"swv_module_call_named":           "Module.Call",
	"swv_plan_add_forward_layout":     "Plan.AddForward",
	"swv_plan_add_layout":             "Plan.Add",
	"swv_plan_from_hugging_face":      "Module.HuggingFacePlan",
	"swv_mesh_find_dim":               "Mesh.Comm",
	"swv_mesh_parse":                  "World.ParseMesh",
	"swv_mesh_shape":                  "Mesh.Dims",
	"swv_mesh_to_string":              "Mesh.String",
	"swv_mesh_use_random_state":       "Mesh.WithRandomState",
	"swv_module_add_buffer":           "Module.Buffer",
	"swv_module_add_parameter":        "Module.Parameter",
	"swv_tensor_clear_requires_grad":  "World.ModuleOf",
	"swv_module_create":               "World.NewModule",
	"swv_module_create_by_kind":       "World.ModuleByKind",
	"swv_deferred_init":               "DeferredInit",
	"swv_full_params_end":             "Module.FullParams",
	"swv_full_params_get":             "FullParams.Get",
	"swv_captured_step_create":        "CaptureStep",
	"swv_captured_step_free":          "CapturedStep.Close",
	"swv_captured_step_replay":        "CapturedStep.Replay",
	"swv_captured_step_replays":       "CapturedStep.Replays",
	"swv_grad_scaler_create":          "World.NewGradScaler",
	"swv_grad_scaler_free":            "GradScaler.Close",
	"swv_grad_scaler_scale":           "GradScaler.Scale",
	"swv_grad_scaler_set_state":       "GradScaler.SetState",
	"swv_grad_scaler_state":           "GradScaler.State",
	"swv_grad_scaler_unscale":         "GradScaler.Unscale",
	"swv_grad_scaler_update":          "GradScaler.Update",
	"swv_grad_sync_counts":            "GradSync.Counts",
	"swv_grad_sync_create":            "Module.GradSync",
	"swv_grad_sync_discard":           "GradSync.Discard",
	"swv_grad_sync_free":              "GradSync.Close",
	"swv_grad_sync_no_sync":           "GradSync.NoSync",
	"swv_mesh_share":                  "Mesh.AutoPlan",
	"swv_module_share":                "Mesh.AutoPlan",
	"swv_plan_auto":                   "Mesh.AutoPlan",
	"swv_plan_from_styles":            "Module.StylesPlan",
	"swv_plan_from_zoo":               "Mesh.ZooPlan",
	"swv_run_fn":                      "function",
	"swv_module_load":                 "World.LoadModule",
	"swv_module_buffer":               "Module.Buffers",
	"swv_module_buffer_is_persistent": "Module.Buffers",
	"swv_module_parameter":            "Module.Parameters",
	"swv_module_num_buffers":          "Module.Buffers",
	"swv_module_num_parameters":       "Module.Parameters",
	"swv_op_call_named":               "Op.Call",
	"swv_op_find":                     "FindOp",
	"swv_op_free":                     "Op",
	"swv_layout_free":                 "Layout",
	"swv_optimizer_create_adam":       "NewAdam",
	"swv_optimizer_create_adamw":      "NewAdamW",
	"swv_optimizer_create_lion":       "NewLion",
	"swv_optimizer_create_adafactor":  "NewAdafactor",
	"swv_optimizer_create_muon":       "NewMuon",
	"swv_optimizer_create_groups":     "NewOptimizerOfGroups",
	"swv_optimizer_group_lr":          "Optimizer.GroupLR",
	"swv_optimizer_set_group_lr":      "Optimizer.SetGroupLR",
	"swv_optimizer_use_zero":          "Optimizer.UseZeRO",
	"swv_optimizer_create_sgd":        "NewSGD",
	"swv_plan_create":                 "NewPlan",
	"swv_plan_free":                   "Plan",
	"swv_plan_from_json":              "ParsePlan",
	"swv_plan_to_json":                "Plan.MarshalJSON",
	"swv_scope_free":                  "the end of a scope",
	"swv_tensor_copy_from_host":       "CopyFrom",
	"swv_tensor_copy_to_host":         "Data",
	"swv_tensor_dtype":                "Tensor.DType",
	"swv_tensor_empty":                "Empty",
	"swv_tensor_from_data":            "FromSlice",
	"swv_tensor_from_dlpack":          "FromDLPack",
	"swv_tensor_from_local":           "FromLocal",
	"swv_tensor_full":                 "Full",
	"swv_tensor_full_tensor":          "Tensor.Full",
	"swv_tensor_ndim":                 "Tensor.Sizes",
	"swv_tensor_numel":                "Tensor.Len",
	"swv_tensor_ones":                 "Ones",
	"swv_tensor_rand":                 "Rand",
	"swv_tensor_randn":                "Randn",
	"swv_tensor_share":                "Tensor.Clone",
	"swv_tensor_to_local":             "Tensor.Local",
	"swv_tensor_to_string":            "Tensor.String",
	"swv_tensor_values_to_string":     "Tensor.ValuesString",
	"swv_tensor_zeros":                "Zeros",
	"swv_trace_create":                "Mesh.Trace",
	"swv_trace_num_events":            "Trace.Len",
	"swv_trace_to_json":               "Trace.MarshalJSON",
	"swv_trace_to_string":             "Trace.String",
	"swv_world_create_counting":       "Counting",
	"swv_world_create_local":          "RunRanks",
	"swv_world_from_environment":      "FromEnvironment",
	"swv_world_join":                  "Join",

	"swv_grad_sync_num_states":           "GradSync.States",
	"swv_grad_sync_set_states":           "GradSync.SetStates",
	"swv_grad_sync_state":                "GradSync.States",
	"swv_module_enable_2d_with_fsdp":     "Module.Enable2DWithFSDP",
	"swv_module_pre_dp_transform":        "Module.PreDPTransform",
	"swv_loader_create":                  "World.TokenLoader",
	"swv_loader_free":                    "TokenLoader.Close",
	"swv_loader_next":                    "TokenLoader.Next",
	"swv_loader_num_samples":             "TokenLoader.NumSamples",
	"swv_loader_position":                "TokenLoader.Position",
	"swv_loader_set_position":            "TokenLoader.SetPosition",
	"swv_token_file_dtype":               "TokenFile.DType",
	"swv_token_file_free":                "TokenFile",
	"swv_token_file_num_tokens":          "TokenFile.NumTokens",
	"swv_token_file_open":                "OpenTokenFile",
	"swv_token_file_read":                "TokenFile.Read",
	"swv_token_file_vocab_size":          "TokenFile.VocabSize",
	"swv_metrics_writer_create_events":   "CreateEventFile",
	"swv_metrics_writer_flush":           "MetricsWriter.Flush",
	"swv_metrics_writer_free":            "MetricsWriter",
	"swv_metrics_writer_open_json_lines": "OpenJSONLines",
	"swv_metrics_writer_write":           "MetricsWriter.Write",
	"swv_state_create":                   "NewState",
	"swv_safetensors_write":              "WriteSafetensors",
	"swv_checkpointer_create":            "NewCheckpointer",
	"swv_function_context_original":      "PatchCall.Forward",

	// Types.
	"swv_buffer":          "slice",
	"swv_checks":          "HandleChecks",
	"swv_comm_counter":    "Counter",
	"swv_loader":          "TokenLoader",
	"swv_token_file":      "TokenFile",
	"swv_metrics_writer":  "MetricsWriter",
	"swv_device_type":     "DeviceKind",
	"swv_collective_kind": "kind of operation",
	"swv_placement":       "Placement",
	"swv_placement_kind":  "PlacementKind",
	"swv_random_state":    "Mesh.RandomState",
	"swv_status":          "error",
	"swv_scope":           "scope",
	"swv_string":          "string",
	"swv_value":           "value",
	"swv_value_kind":      "kind of value",
}

// packagePrefix is "github.com/.../shardweave.".
var packagePrefix = func() string {
	pc, _, _, _ := runtime.Caller(0)
	name := runtime.FuncForPC(pc).Name()
	return name[:strings.LastIndex(name, "/")+1] + "shardweave."
}()

// calledFunction is the function or method of this package that its user has called: "Tensor.Add". Errors
// are made on the goroutine of that call.
func calledFunction() string {
	var pcs [48]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs[:])])
	name := ""
	for more := true; more; {
		var frame runtime.Frame
		frame, more = frames.Next()
		if !strings.HasPrefix(frame.Function, packagePrefix) {
			break
		}
		name = frame.Function[len(packagePrefix):]
	}
	return functionName(name)
}

// callerOfPackage is the line that has called this package: "model.go:53". Slow.
func callerOfPackage() string {
	var pcs [48]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs[:])])
	for more := true; more; {
		var frame runtime.Frame
		if frame, more = frames.Next(); !strings.HasPrefix(frame.Function, packagePrefix) {
			return frame.File + ":" + strconv.Itoa(frame.Line)
		}
	}
	return ""
}

// functionName makes "Tensor.Add" of "(*Tensor).Add.func1", and "Data" of "Data[...]".
func functionName(name string) string {
	if at := strings.IndexByte(name, '['); at >= 0 {
		name = name[:at]
	}
	parts := strings.Split(name, ".")
	kept := 1
	if strings.HasPrefix(name, "(") || len(parts) > 1 && !strings.HasPrefix(parts[1], "func") {
		kept = 2
	}
	if len(parts) > kept {
		parts = parts[:kept]
	}
	return strings.NewReplacer("(", "", "*", "", ")", "").Replace(strings.Join(parts, "."))
}
