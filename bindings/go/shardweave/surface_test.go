package shardweave_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// surface is what the package exports, read from its source: what is added later is there too.
type surface struct {
	functions map[string]*ast.FuncDecl // "Ones", "Tensor.Add"
	types     map[string]ast.Expr
}

func readSurface(t *testing.T) surface {
	t.Helper()
	packages, err := parser.ParseDir(token.NewFileSet(), ".",
		func(f fs.FileInfo) bool { return !strings.HasSuffix(f.Name(), "_test.go") }, 0)
	if err != nil {
		t.Fatal(err)
	}
	s := surface{map[string]*ast.FuncDecl{}, map[string]ast.Expr{}}
	for _, file := range packages["shardweave"].Files {
		for _, declared := range file.Decls {
			switch d := declared.(type) {
			case *ast.FuncDecl:
				name := d.Name.Name
				if d.Recv != nil {
					name = receiverOf(d) + "." + name
				}
				if d.Name.IsExported() && ast.IsExported(name) {
					s.functions[name] = d
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					if kind, is := spec.(*ast.TypeSpec); is && kind.Name.IsExported() {
						s.types[kind.Name.Name] = kind.Type
					}
				}
			}
		}
	}
	return s
}

// receiverOf is the type whose method it is.
func receiverOf(f *ast.FuncDecl) string {
	kind := f.Recv.List[0].Type
	if star, is := kind.(*ast.StarExpr); is {
		kind = star.X
	}
	if generic, is := kind.(*ast.IndexExpr); is {
		kind = generic.X
	}
	return kind.(*ast.Ident).Name
}

// parameters of a function, by name.
func parameters(f *ast.FuncDecl) map[string]bool {
	all := map[string]bool{}
	for _, field := range f.Type.Params.List {
		for _, name := range field.Names {
			all[name.Name] = true
		}
	}
	return all
}

// handleTypes are the exported types that stand for something of the library: they have fields that are not
// exported, and no others.
func (s surface) handleTypes() map[string]*ast.StructType {
	all := map[string]*ast.StructType{}
	for name, kind := range s.types {
		structure, is := kind.(*ast.StructType)
		if !is || name == "GracefulStop" { // which is Go's own
			continue
		}
		if len(structure.Fields.List) > 0 && len(structure.Fields.List[0].Names) > 0 && structure.Fields.List[0].Names[0].IsExported() {
			continue // Error
		}
		for _, field := range structure.Fields.List {
			hidden := len(field.Names) > 0 && !field.Names[0].IsExported()
			if embedded, is := field.Type.(*ast.StarExpr); is && len(field.Names) == 0 {
				switch of := embedded.X.(type) {
				case *ast.Ident:
					hidden = !of.IsExported()
				case *ast.IndexExpr:
					hidden = !of.X.(*ast.Ident).IsExported()
				}
			}
			if hidden {
				all[name] = structure
			}
		}
	}
	return all
}

// receivers are one of each type of handles.
func (h *handles) receivers() map[string]any {
	return map[string]any{"World": h.world, "Mesh": h.mesh, "Comm": h.comm, "Trace": h.trace, "Module": h.module, "Forward": h.forward,
		"GradSync": h.gradSync, "GradScaler": h.scaler, "CapturedStep": h.captured, "Optimizer": h.optimizer, "Scheduler": h.scheduler, "FunctionContext": h.context, "Tensor": h.tensor, "Layout": h.layout, "Plan": h.plan, "Op": h.op,
		"TokenFile": h.tokenFile, "TokenLoader": h.tokenLoader, "State": h.state, "Checkpointer": h.checkpointer,
		"MetricsWriter": h.metrics}
}

// functions are all exported ones; instances of those with type parameters. TestEveryFunctionIsHere finds
// what is missing.
var functions = map[string]any{
	"AllGather": sw.AllGather[float32], "AllGatherV": sw.AllGatherV[float32], "AllReduce": sw.AllReduce[float32],
	"AnyRank": sw.AnyRank, "AllToAll": sw.AllToAll[float32], "AllToAllV": sw.AllToAllV[float32], "Broadcast": sw.Broadcast[float32],
	"Gather": sw.Gather[float32], "Recv": sw.Recv[float32], "Reduce": sw.Reduce[float32],
	"ReduceScatter": sw.ReduceScatter[float32], "ReduceScatterV": sw.ReduceScatterV[float32],
	"Scatter": sw.Scatter[float32], "Send": sw.Send[float32],
	"Apply": sw.Apply, "CaptureStep": sw.CaptureStep, "Cat": sw.Cat, "Checkpoint": sw.Checkpoint, "CheckpointSeveral": sw.CheckpointSeveral, "ClipGradNorm": sw.ClipGradNorm, "ClipGradValue": sw.ClipGradValue, "CopyFrom": sw.CopyFrom[float32],
	"Data": sw.Data[float32], "DataAs": sw.DataAs[float32], "Empty": sw.Empty, "FinishGradSync": sw.FinishGradSync, "FromDLPack": sw.FromDLPack, "FromDLPackOn": sw.FromDLPackOn,
	"FromLocal": sw.FromLocal, "FromSlice": sw.FromSlice[float32], "Full": sw.Full, "Gradients": sw.Gradients,
	"ItemOf": sw.ItemOf[float32], "NewAdafactor": sw.NewAdafactor, "NewAdam": sw.NewAdam, "NewAdamW": sw.NewAdamW, "NewLion": sw.NewLion, "NewMuon": sw.NewMuon, "NewOptimizerOfGroups": sw.NewOptimizerOfGroups, "NewScheduler": sw.NewScheduler, "NewSGD": sw.NewSGD, "Ones": sw.Ones, "Rand": sw.Rand,
	"NewCheckpointer": sw.NewCheckpointer, "NewState": sw.NewState, "WriteSafetensors": sw.WriteSafetensors,
	"Randn": sw.Randn, "Scalar": sw.Scalar[float32], "Stack": sw.Stack, "Zeros": sw.Zeros,
	// Those without handles.
	"Counting": sw.Counting, "DeferredInit": sw.DeferredInit, "FindOp": sw.FindOp, "FromEnvironment": sw.FromEnvironment, "Join": sw.Join,
	"CreateEventFile": sw.CreateEventFile, "OpenJSONLines": sw.OpenJSONLines, "OpenTokenFile": sw.OpenTokenFile, "ParseLayout": sw.ParseLayout, "ParsePlan": sw.ParsePlan, "ReadPretrainedConfig": sw.ReadPretrainedConfig, "RunRanks": sw.RunRanks, "Seed": sw.Seed, "Seeded": sw.Seeded,
	"FindCheckpoint": sw.FindCheckpoint, "ListCheckpoints": sw.ListCheckpoints, "VerifyCheckpoint": sw.VerifyCheckpoint,
	"SetHandleChecks": sw.SetHandleChecks, "SetLog": sw.SetLog, "SetNumThreads": sw.SetNumThreads, "Spawn": sw.Spawn,
}

// cannotFail are functions that return no error; those that panic in place of one have their twin above.
var cannotFail = map[string]bool{"Alone": true, "AllowUnused": true, "BFloat16Of": true, "BuildInfo": true,
	"CosineSchedule": true, "CreateGraph": true, "Dim": true, "Failed": true, "Float16Of": true, "From": true, "FromRank": true, "LinearSchedule": true, "LiveHandles": true, "MustFindOp": true,
	"MustParseLayout": true, "Named": true, "NewPlan": true, "Range": true, "RankOf": true, "RetainGraph": true, "StepSchedule": true, "Tensors": true,
	"To":                  true,
	"AllowMissingWeights": true, "AllowUnexpectedWeights": true, "AllowUnknownKeys": true, "WithMaxFileBytes": true, "WithSavedDType": true,
	"AllowMissing": true, "AllowUnexpected": true, "WithCast": true, "WithCopyBesideTraining": true, "WithKeepLast": true, "WithSkipIfBusy": true, "WithVerification": true, "WithWriteTimeout": true,
	"WSDSchedule": true, "WithAdafactorEps": true, "WithBackoff": true, "WithBeta2Decay": true, "WithClipThreshold": true, "WithGradientHook": true,
	"WithGrowth": true, "WithIteration": true, "WithIterationDType": true, "WithMuonEps": true, "WithMuonMomentum": true, "WithPowerSGD": true,
	"WithRMSOfAdamW": true, "WithScale": true,
	"WithAMSGrad": true, "WithArgs": true, "WithBackend": true, "WithBetas": true, "WithBucketBytes": true, "WithComputeDevice": true, "WithCopiedValues": true, "WithDevice": true, "WithEps": true, "WithEqualSegments": true,
	"WithFiniteNorm": true, "WithGradients": true, "WithHeads": true, "WithMaxEvaluations": true, "WithMemoryLimit": true, "WithMeshDim": true, "WithMinNumel": true, "WithMixedPrecision": true, "WithReduceDType": true, "WithReshardAmong": true, "WithMomentum": true, "WithNesterov": true,
	"WithNetworkInterface": true, "WithNorm": true, "WithOptimizerStates": true, "WithSequenceDim": true, "WithTPMeshDim": true, "WithSeed": true, "WithTimeout": true, "WithTolerance": true, "WithUnitTypes": true, "WithUnits": true, "WithValues": true,
	"WithoutBackward": true, "WithoutPrefix": true, "WithoutReshard": true}

func TestEveryFunctionIsHere(t *testing.T) {
	s := readSurface(t)
	for name, f := range s.functions {
		if _, tested := functions[name]; f.Recv == nil && !tested && !cannotFail[name] {
			t.Errorf("%s is neither among the functions that these tests call nor among those that cannot fail", name)
		}
	}
	for name := range functions {
		if s.functions[name] == nil {
			t.Errorf("there is no %s", name)
		}
	}
	kinds := new(handles).receivers()
	for name := range s.handleTypes() {
		if kinds[name] == nil {
			t.Errorf("none of the handles that these tests use is a %s", name)
		}
	}
	if len(s.functions) < 150 || len(s.handleTypes()) < 11 {
		t.Errorf("only %d functions and %d kinds of handles were found", len(s.functions), len(s.handleTypes()))
	}
}

// Operators, layouts and plans end when the garbage collector finds that nobody uses them: only the helpers that
// see to that have their handles.
func TestLastingHandlesAreLent(t *testing.T) {
	s := readSurface(t)
	for _, name := range []string{"Layout", "MetricsWriter", "Op", "Plan", "TokenFile"} {
		lasts := false
		for _, field := range s.handleTypes()[name].Fields.List {
			if embedded, is := field.Type.(*ast.StarExpr); is && len(field.Names) == 0 {
				of, generic := embedded.X.(*ast.IndexExpr)
				lasts = lasts || generic && of.X.(*ast.Ident).Name == "lasting"
			}
		}
		if !lasts {
			t.Errorf("%s has its handle in a way of its own", name)
		}
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if file != "rank.go" && !strings.HasSuffix(file, "_test.go") && regexp.MustCompile(`\.kept\b`).Match(text) {
			t.Errorf("%s takes the handle of what lasts by itself", file)
		}
	}
}

// calls are all functions, and all methods of handles.
func (h *handles) calls() map[string]reflect.Value {
	all := map[string]reflect.Value{}
	for name, f := range functions {
		all[name] = reflect.ValueOf(f)
	}
	for name, receiver := range h.receivers() {
		kind := reflect.TypeOf(receiver)
		for i := 0; i < kind.NumMethod(); i++ {
			all[name+"."+kind.Method(i).Name] = kind.Method(i).Func
		}
	}
	delete(all, "Tensor.Format") // for fmt, which has the rest of its arguments
	return all
}
