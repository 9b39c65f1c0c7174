package shardweave

import (
	"regexp"
	"runtime"
	"strings"
)

// The library's errors say which of C's functions and arguments were wrong. Here they get the names that
// they have in Go.

// inGo is the message without C's function at its front, for which newError has Go's.
func inGo(message string) string {
	if at := strings.Index(message, ": "); at > 0 && cFunction.FindString(message[:at]) == message[:at] {
		message = message[at+2:]
		if argument := leadingArgument.FindStringSubmatch(message); argument != nil {
			if name, there := arguments[argument[1]]; there {
				message = name + message[len(argument[0]):]
			}
		}
	}
	return cFunction.ReplaceAllStringFunc(message, func(name string) string {
		if word, there := words[name]; there {
			return word
		}
		return name
	})
}

var (
	cFunction       = regexp.MustCompile(`swv_[a-z0-9_]+`)
	leadingArgument = regexp.MustCompile(`^argument '([^']*)'`)
)

// arguments are those of C whose names in Go differ, or which are a method's receiver.
var arguments = map[string]string{
	"comm":      "the group",
	"layout":    "the layout",
	"mesh":      "the mesh",
	"module":    "the module",
	"op":        "the operator",
	"optimizer": "the optimizer",
	"tensor":    "the tensor",
	"trace":     "the trace",
	"world":     "the world",

	"data": "argument 'data'", "num_bytes": "argument 'data'",
	"body": "argument 'body'", "num_ranks": "argument 'ranks'",
	"backend":                   "WithBackend",
	"options.backend":           "WithBackend",
	"options.network_interface": "WithNetworkInterface",
	"options.timeout_ms":        "the timeout",
	"options.tag":               "the tag",
	"rendezvous":                "argument 'r'",
	"rendezvous.file":           "File",
	"rendezvous.host":           "Host",
	"rendezvous.port":           "Port",
	"rendezvous.run":            "Run",
	"options.mesh":              "argument 'where'",
	"options.layout":            "the layout among the options",
	"options.dtype":             "the dtype among the options",
	"options.requires_grad":     "RequiresGrad",
	"options.source":            "argument 'source'",
	"options.nesterov":          "WithNesterov",
	"options.amsgrad":           "WithAMSGrad",
	"options.retain_graph":      "RetainGraph",
	"options.create_graph":      "CreateGraph",
	"options.allow_unused":      "AllowUnused",
	"gradient":                  "WithGradients",
	"grad_outputs":              "WithGradients",
	"grad_layout":               "argument 'grad'",
	"index":                     "argument 'parameter'",
	"from":                      "the layout",
	"mesh_shape":                "argument 'meshShape'",
	"max_norm":                  "argument 'max'",
	"norm_type":                 "WithNorm",
	"options.norm_type":         "WithNorm",
	"new_name":                  "argument 'newName'",
	"dims[].name":               "the name of a dimension",
	"names[]":                   "an argument's name",
	"counts":                    "argument 'counts'",
	"send_counts":               "argument 'send'",
	"recv_counts":               "argument 'recv'",
	"arguments":                 "argument 'args'",
	"arguments[].as.bools":      "an argument",
	"arguments[].as.device":     "a Device",
	"arguments[].as.dtype":      "a DType",
	"arguments[].as.floats":     "an argument",
	"arguments[].as.ints":       "an argument",
	"arguments[].as.string":     "a string",
	"arguments[].as.tensor":     "a tensor",
	"arguments[].as.tensors":    "an argument",
	"arguments[].as.tensors[]":  "a tensor of a list",
	"managed.shape":             "the shape of argument 'managed'",
	"function.name":             "argument 'name'",
	"fqn":                       "argument 'fqn'",
	"text":                      "the text",
	"placements[].placement":    "a placement",
	"placements[].mesh_dim":     "the name of a mesh dimension",
}

// words are what of C is named in the middle of messages.
var words = map[string]string{
	"swv_checkpoint":              "Checkpoint",
	"swv_clip_grad_norm":          "ClipGradNorm",
	"swv_comm":                    "Comm",
	"swv_device_type":             "DeviceKind",
	"swv_dtype":                   "DType",
	"swv_finish_grad_sync":        "FinishGradSync",
	"swv_function_apply":          "Apply",
	"swv_function_context":        "FunctionContext",
	"swv_gradients":               "Gradients",
	"swv_layout":                  "Layout",
	"swv_mesh":                    "Mesh",
	"swv_mesh_seed":               "Mesh.Seed",
	"swv_mesh_set_cost_model":     "Mesh.SetCostModel",
	"swv_module":                  "Module",
	"swv_module_distribute":       "Module.Distribute",
	"swv_module_finish_grad_sync": "Module.FinishGradSync",
	"swv_module_zero_grad":        "Module.ZeroGrad",
	"swv_op":                      "Op",
	"swv_op_call":                 "Op.Call",
	"swv_op_kind":                 "kind of operation",
	"swv_optimizer":               "Optimizer",
	"swv_optimizer_set_state":     "Optimizer.SetState",
	"swv_optimizer_step":          "Optimizer.Step",
	"swv_placement_kind":          "kind of placement",
	"swv_plan":                    "Plan",
	"swv_random_scope_create":     "Mesh.WithRandomState",
	"swv_reduce_op":               "ReduceOp",
	"swv_seed":                    "Seed",
	"swv_status":                  "error",
	"swv_tensor":                  "Tensor",
	"swv_tensor_backward":         "Tensor.Backward",
	"swv_tensor_copy_from_host":   "CopyFrom",
	"swv_tensor_copy_to_host":     "Data",
	"swv_tensor_detach":           "Tensor.Detach",
	"swv_tensor_distribute":       "Tensor.Distribute",
	"swv_tensor_from_data":        "FromSlice",
	"swv_tensor_from_local":       "FromLocal",
	"swv_tensor_full_tensor":      "Tensor.Full",
	"swv_tensor_item":             "Tensor.Item",
	"swv_tensor_redistribute":     "Tensor.Redistribute",
	"swv_tensor_share":            "Tensor.Clone",
	"swv_tensor_to_local":         "Tensor.Local",
	"swv_trace":                   "Trace",
	"swv_value_kind":              "kind of value",
	"swv_world":                   "World",
	"swv_world_abort":             "World.Abort",
	"swv_world_from_environment":  "FromEnvironment",
	"swv_world_join":              "Join",
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
