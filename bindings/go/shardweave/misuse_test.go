package shardweave_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"reflect"
	"sort"
	"strings"
	"sync"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// functions are all exported ones that use a rank's handles; instances of those with type parameters.
// TestEveryFunctionIsHere finds what is missing.
var functions = map[string]any{
	"AllGather": sw.AllGather[float32], "AllGatherV": sw.AllGatherV[float32], "AllReduce": sw.AllReduce[float32],
	"AllToAll": sw.AllToAll[float32], "AllToAllV": sw.AllToAllV[float32], "Broadcast": sw.Broadcast[float32],
	"Gather": sw.Gather[float32], "Recv": sw.Recv[float32], "Reduce": sw.Reduce[float32],
	"ReduceScatter": sw.ReduceScatter[float32], "ReduceScatterV": sw.ReduceScatterV[float32],
	"Scatter": sw.Scatter[float32], "Send": sw.Send[float32],
	"Apply": sw.Apply, "Cat": sw.Cat, "Checkpoint": sw.Checkpoint, "CheckpointSeveral": sw.CheckpointSeveral, "ClipGradNorm": sw.ClipGradNorm, "CopyFrom": sw.CopyFrom[float32],
	"Data": sw.Data[float32], "Empty": sw.Empty, "FinishGradSync": sw.FinishGradSync, "FromDLPack": nil,
	"FromLocal": sw.FromLocal, "FromSlice": sw.FromSlice[float32], "Full": sw.Full, "Gradients": sw.Gradients,
	"ItemOf": sw.ItemOf[float32], "NewAdamW": sw.NewAdamW, "NewSGD": sw.NewSGD, "Ones": sw.Ones, "Rand": sw.Rand,
	"Randn": sw.Randn, "Stack": sw.Stack, "Zeros": sw.Zeros,
}

// noHandles use none; or only make worlds.
var noHandles = map[string]bool{"Alone": true, "AllowUnused": true, "BFloat16Of": true, "BuildInfo": true,
	"Counting": true, "CreateGraph": true, "Dim": true, "FindOp": true, "Float16Of": true, "FromEnvironment": true, "FromRank": true, "Join": true,
	"LiveHandles": true, "MustFindOp": true, "MustParseLayout": true, "Named": true, "NewPlan": true,
	"ParseLayout": true, "ParsePlan": true, "RetainGraph": true, "RunRanks": true, "Seed": true, "SetNumThreads": true,
	"Spawn": true, "Tensors": true, "WithAMSGrad": true, "WithArgs": true, "WithoutPrefix": true, "WithBackend": true, "WithBetas": true, "WithEps": true,
	"WithFiniteNorm": true, "WithGradients": true, "WithMomentum": true, "WithNesterov": true,
	"WithNetworkInterface": true, "WithNorm": true, "WithTimeout": true}

// always are methods that work on what was closed.
var always = map[string]bool{"Close": true, "Err": true, "String": true, "Format": true,
	"World.Rank": true, "World.Size": true, "World.LocalRank": true, "World.Comm": true, "World.Context": true}

func TestEveryFunctionIsHere(t *testing.T) {
	packages, err := parser.ParseDir(token.NewFileSet(), ".",
		func(f fs.FileInfo) bool { return !strings.HasSuffix(f.Name(), "_test.go") }, 0)
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{}
	for _, file := range packages["shardweave"].Files {
		for _, declared := range file.Decls {
			if f, is := declared.(*ast.FuncDecl); is && f.Recv == nil && f.Name.IsExported() {
				there[f.Name.Name] = true
			}
		}
	}
	for name := range there {
		if _, tested := functions[name]; !tested && !noHandles[name] {
			t.Errorf("%s is neither among the functions that TestHandlesThatCannotBeUsed calls nor among those without handles", name)
		}
	}
	for name := range functions {
		if !there[name] {
			t.Errorf("there is no %s", name)
		}
	}
}

// handles are one of each kind, of one rank.
type handles struct {
	world     *sw.World
	mesh      *sw.Mesh
	comm      *sw.Comm
	trace     *sw.Trace
	module    *sw.Module
	optimizer *sw.Optimizer
	context   *sw.FunctionContext
	tensor    *sw.Tensor
}

// keepContext is a function of the host that keeps what it must not.
type keepContext struct{ kept **sw.FunctionContext }

func (f keepContext) Forward(ctx *sw.FunctionContext, in []*sw.Tensor) ([]*sw.Tensor, error) {
	*f.kept = ctx
	return []*sw.Tensor{in[0].Mul(2)}, nil
}

func (f keepContext) Backward(ctx *sw.FunctionContext, grads []*sw.Tensor) ([]*sw.Tensor, error) {
	return grads, nil
}

func makeHandles(t *testing.T) *handles {
	t.Helper()
	w, err := sw.Alone()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	h := &handles{world: w, mesh: mustOf(w.ParseMesh("x=1")), comm: mustOf(w.Comm().Subgroup([]int64{0}, "g")), module: mustOf(w.NewModule())}
	h.trace = mustOf(h.mesh.Trace())
	h.tensor = sw.Ones(w, []int64{1}, sw.RequiresGrad)
	h.optimizer = mustOf(sw.NewSGD([]*sw.Tensor{h.module.Parameter("p", sw.Ones(w, []int64{1}))}, 0.1))
	if _, err := sw.Apply(keepContext{&h.context}, "f", 1, h.tensor); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *handles) close() {
	h.tensor.Close()
	h.optimizer.Close()
	h.module.Close()
	h.trace.Close()
	h.comm.Close()
	h.mesh.Close()
}

// of is the handle of a type, or an argument that means it; none if the type is no handle.
func (h *handles) of(kind reflect.Type) (reflect.Value, bool) {
	var value any
	switch kind {
	case reflect.TypeOf((*sw.World)(nil)):
		value = h.world
	case reflect.TypeOf((*sw.Mesh)(nil)):
		value = h.mesh
	case reflect.TypeOf((*sw.Comm)(nil)):
		value = h.comm
	case reflect.TypeOf((*sw.Trace)(nil)):
		value = h.trace
	case reflect.TypeOf((*sw.Module)(nil)):
		value = h.module
	case reflect.TypeOf((*sw.Optimizer)(nil)):
		value = h.optimizer
	case reflect.TypeOf((*sw.FunctionContext)(nil)):
		value = h.context
	case reflect.TypeOf((*sw.Tensor)(nil)):
		value = h.tensor
	case reflect.TypeOf([]*sw.Tensor(nil)):
		value = []*sw.Tensor{h.tensor}
	case reflect.TypeOf([]sw.GradOption(nil)):
		value = []sw.GradOption{sw.WithGradients(h.tensor)}
	case reflect.TypeOf([]any(nil)): // of an operator
		value = []any{h.tensor}
	case reflect.TypeOf((*any)(nil)).Elem(): // a tensor or a number
		return reflect.ValueOf(h.tensor), true
	case reflect.TypeOf((*sw.Place)(nil)).Elem():
		return reflect.ValueOf(h.mesh), true
	default:
		return reflect.Value{}, false
	}
	return reflect.ValueOf(value), true
}

// plain is an argument that is no handle.
func plain(kind reflect.Type) reflect.Value {
	switch kind.Kind() {
	case reflect.Func:
		return reflect.MakeFunc(kind, func([]reflect.Value) []reflect.Value {
			var results []reflect.Value
			for i := 0; i < kind.NumOut(); i++ {
				results = append(results, reflect.Zero(kind.Out(i)))
			}
			return results
		})
	case reflect.String:
		return reflect.ValueOf("p").Convert(kind)
	case reflect.Slice:
		if kind.Elem().Kind() == reflect.Int64 {
			return reflect.ValueOf([]int64{1})
		}
		if kind.Elem().Kind() == reflect.Float32 {
			return reflect.ValueOf([]float32{1})
		}
	case reflect.Interface:
		for _, value := range []any{background, errors.New("reason"), sw.Spec(sw.On{}), keepContext{new(*sw.FunctionContext)}} {
			if reflect.TypeOf(value).Implements(kind) && kind.NumMethod() > 0 {
				return reflect.ValueOf(value)
			}
		}
	}
	return reflect.Zero(kind)
}

// failureOf is the error among the results, or of a tensor that is the result.
func failureOf(results []reflect.Value) (error, bool) {
	for i := len(results) - 1; i >= 0; i-- {
		switch r := results[i].Interface().(type) {
		case error:
			return r, true
		case *sw.Tensor:
			if r != nil {
				return r.Err(), true
			}
		}
	}
	for _, r := range results {
		if r.Type() == reflect.TypeOf((*error)(nil)).Elem() {
			return nil, true
		}
	}
	return nil, false
}

// Each handle of each exported function and method, one after the other: closed, of another world, of a
// world that was closed, nil, and what no function has made. SWV_CHECK_HANDLES=abort ends the program where
// memory that was freed would be read.
func TestHandlesThatCannotBeUsed(t *testing.T) {
	good, closed, other, ended := makeHandles(t), makeHandles(t), makeHandles(t), makeHandles(t)
	closed.world.Close()
	closed.context = good.context // whose call has returned
	closed.mesh, closed.comm, closed.module = mustOf(good.world.ParseMesh("x=1")), mustOf(good.world.Comm().Subgroup([]int64{0}, "h")), mustOf(good.world.NewModule())
	closed.trace, closed.tensor = mustOf(closed.mesh.Trace()), sw.Ones(good.world, []int64{1})
	closed.optimizer = mustOf(sw.NewSGD([]*sw.Tensor{sw.Ones(good.world, []int64{1}, sw.RequiresGrad)}, 0.1))
	closed.close()
	ended.world.Close()
	empty := &handles{new(sw.World), new(sw.Mesh), new(sw.Comm), new(sw.Trace), new(sw.Module), new(sw.Optimizer), new(sw.FunctionContext), new(sw.Tensor)}

	calls := map[string]reflect.Value{}
	for name, f := range functions {
		if f != nil {
			calls[name] = reflect.ValueOf(f)
		}
	}
	for _, receiver := range []any{good.world, good.mesh, good.comm, good.trace, good.module, good.optimizer, good.context, good.tensor, sw.MustFindOp("aten::neg"), sw.MustParseLayout("[R]")} {
		kind := reflect.TypeOf(receiver)
		for i := 0; i < kind.NumMethod(); i++ {
			if m := kind.Method(i); !always[m.Name] && !always[kind.Elem().Name()+"."+m.Name] {
				calls[kind.Elem().Name()+"."+m.Name] = m.Func
			}
		}
	}
	var names []string
	for name := range calls {
		names = append(names, name)
	}
	sort.Strings(names)
	tried := 0
	for _, name := range names {
		f := calls[name]
		kind := f.Type()
		for wrong := 0; wrong < kind.NumIn(); wrong++ {
			if _, is := good.of(kind.In(wrong)); !is {
				continue
			}
			for what, from := range map[string]*handles{"closed": closed, "of another world": other, "of a closed world": ended, "not made": empty, "nil": {}} {
				args, handlesIn := make([]reflect.Value, kind.NumIn()), 0
				for i := range args {
					source := good
					if i == wrong {
						source = from
					}
					value, is := source.of(kind.In(i))
					switch {
					case is:
						handlesIn++
						args[i] = value
					case kind.In(i) == reflect.TypeOf((*sw.Op)(nil)):
						args[i] = reflect.ValueOf(sw.MustFindOp("aten::neg"))
					case kind.In(i) == reflect.TypeOf((*sw.Layout)(nil)):
						args[i] = reflect.ValueOf(sw.MustParseLayout("[R]"))
					case name == "Tensor.Apply" && i == 1:
						args[i] = reflect.ValueOf("aten::neg")
					default:
						args[i] = plain(kind.In(i))
					}
				}
				if skipMisuse(name, what, kind, wrong, handlesIn) {
					continue
				}
				tried++
				err, tells := misused(f, args)
				for _, h := range []*handles{good, other} {
					if h.module.Err() != nil { // it tells from now on
						h.module = mustOf(h.world.NewModule())
					}
				}
				var asError *sw.Error
				switch where := fmt.Sprintf("%s, argument %d %s", name, wrong, what); {
				case !tells:
					t.Errorf("%s: there is no error among the results", where)
				case !errors.As(err, &asError):
					t.Errorf("%s: %v", where, err)
				case !errors.Is(err, sw.FailedPrecondition) && !errors.Is(err, sw.InvalidArgument):
					t.Errorf("%s: %v", where, err)
				case !strings.HasPrefix(asError.Message, name+": ") || strings.Contains(err.Error(), "swv_"):
					t.Errorf("%s: the words are not Go's: %v", where, err)
				case strings.HasPrefix(name, "FunctionContext.") && strings.Contains(err.Error(), "has returned"):
				case !strings.Contains(err.Error(), map[string]string{"closed": "closed", "of another world": "several ranks",
					"of a closed world": "", "not made": "was not made", "nil": "nil"}[what]):
					t.Errorf("%s: %v", where, err)
				}
			}
		}
	}
	if tried < 300 {
		t.Errorf("only %d calls were tried", tried)
	}
	// What is good still works.
	if err := good.tensor.Mul(2).Sum().Backward(); err != nil {
		t.Error(err)
	}
}

// skipMisuse: what is no misuse.
func skipMisuse(name, what string, kind reflect.Type, wrong, handlesIn int) bool {
	if handlesIn == 1 && what == "of another world" {
		return true // there is nothing that it does not belong to
	}
	if strings.HasPrefix(name, "FunctionContext.") && wrong > 0 {
		return true // see TestWhatAFunctionSaves
	}
	switch kind.In(wrong) {
	case reflect.TypeOf((*sw.Tensor)(nil)): // a nil tensor is none
		return what == "nil" && (name == "Tensor.SetGrad" && wrong == 1 || name == "Tensor.Linear" || name == "Tensor.LayerNorm" ||
			wrong > 0 && isOperator(name))
	case reflect.TypeOf((*any)(nil)).Elem(), reflect.TypeOf([]any(nil)):
		return what == "nil"
	case reflect.TypeOf([]sw.GradOption(nil)):
		return what == "nil"
	case reflect.TypeOf([]*sw.Tensor(nil)):
		return what == "nil" && (name == "Cat" || name == "Stack")
	}
	return false
}

func isOperator(name string) bool {
	switch strings.TrimPrefix(name, "Tensor.") {
	case "MatMul", "Embedding", "CrossEntropy", "Attention":
		return true
	}
	return false
}

// misused is what comes of the call; a panic is no error.
func misused(f reflect.Value, args []reflect.Value) (err error, tells bool) {
	defer func() {
		if p := recover(); p != nil {
			err, tells = fmt.Errorf("panic: %v", p), true
		}
	}()
	if f.Type().IsVariadic() {
		return failureOf(f.CallSlice(args))
	}
	return failureOf(f.Call(args))
}

// saves calls Save with tensors that cannot be used, within Forward.
type saves struct {
	wrong []*sw.Tensor
	errs  *[]error
}

func (f saves) Forward(ctx *sw.FunctionContext, in []*sw.Tensor) ([]*sw.Tensor, error) {
	for _, t := range f.wrong {
		*f.errs = append(*f.errs, ctx.Save(in[0], t))
	}
	return []*sw.Tensor{in[0].Mul(2)}, ctx.Save(in[0])
}

func (f saves) Backward(ctx *sw.FunctionContext, grads []*sw.Tensor) ([]*sw.Tensor, error) {
	return grads, ctx.Saved(0).Err()
}

func TestWhatAFunctionSaves(t *testing.T) {
	good, other, ended := makeHandles(t), makeHandles(t), makeHandles(t)
	ended.world.Close()
	closed := sw.Ones(good.world, []int64{1})
	closed.Close()
	var errs []error
	f := saves{[]*sw.Tensor{closed, other.tensor, ended.tensor, nil, {}}, &errs}
	out, err := sw.Apply(f, "saves", 1, good.tensor)
	if err != nil {
		t.Fatal(err)
	}
	if err := out[0].Backward(); err != nil {
		t.Error(err)
	}
	for i, err := range errs {
		if !errors.Is(err, sw.FailedPrecondition) && !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "FunctionContext.Save: ") {
			t.Errorf("%d: %v", i, err)
		}
	}
	if len(errs) != 5 {
		t.Error(errs)
	}
	// Outputs of another rank are no outputs.
	if _, err := sw.Apply(returns{other.tensor}, "returns", 1, good.tensor); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
}

type returns struct{ t *sw.Tensor }

func (f returns) Forward(*sw.FunctionContext, []*sw.Tensor) ([]*sw.Tensor, error) {
	return []*sw.Tensor{f.t}, nil
}

func (f returns) Backward(*sw.FunctionContext, []*sw.Tensor) ([]*sw.Tensor, error) {
	return nil, nil
}

// closes closes, within a call, what the call uses, and what it must not.
type closes struct {
	t        **sw.Tensor
	w        *sw.World
	unclosed *error
}

func (f closes) Forward(ctx *sw.FunctionContext, in []*sw.Tensor) ([]*sw.Tensor, error) {
	return []*sw.Tensor{in[0].Mul(2)}, nil
}

func (f closes) Backward(ctx *sw.FunctionContext, grads []*sw.Tensor) ([]*sw.Tensor, error) {
	(*f.t).Close()
	*f.unclosed = f.w.Close()
	return []*sw.Tensor{grads[0].Mul(2)}, nil
}

func TestClosingWithinACall(t *testing.T) {
	w := alone(t)
	x := sw.Ones(w, []int64{1}, sw.RequiresGrad)
	var y *sw.Tensor
	var unclosed error
	before := sw.LiveHandles()
	y = mustOf(sw.Apply(closes{&y, w, &unclosed}, "closes", 1, x))[0]
	if err := y.Backward(); err != nil {
		t.Error(err)
	}
	if got := mustOf(mustOf(x.Grad()).Item()); got != 2 {
		t.Error(got)
	}
	if !errors.Is(unclosed, sw.FailedPrecondition) || w.Comm().Health() != nil {
		t.Error(unclosed)
	}
	if err := y.Err(); !errors.Is(err, sw.FailedPrecondition) || sw.LiveHandles() > before+1 { // the gradient
		t.Error(err, sw.LiveHandles()-before)
	}
}

func TestNamedArguments(t *testing.T) {
	w := alone(t)
	x := sw.Ones(w, []int64{2, 3})
	topk, sum := sw.MustFindOp("aten::topk"), sw.MustFindOp("aten::sum.dim_IntList")
	first := func(_ any, err error) error { return err }
	third := func(_, _ any, err error) error { return err }
	module := mustOf(w.NewModule())
	for what, c := range map[string]struct {
		err  error
		part string
	}{
		"twice named":    {first(topk.Call(w, x, 2, sw.Named("sorted", sw.Named("largest", true)))), "'sorted' is itself Named 'largest'"},
		"twice, inside":  {sum.Tensor(w, x, sw.Named("dim", sw.Named("dim", []int{0}))).Err(), "is itself Named"},
		"in order after": {first(topk.Call(w, x, sw.Named("k", 2), 1)), "behind one that is Named"},
		"none after":     {first(topk.Call(w, x, sw.Named("k", 2), nil)), "behind one that is Named"},
		"tensor":         {x.Apply("aten::add.Tensor", sw.Named("other", x), x).Err(), "behind one that is Named"},
		"a module":       {first(module.Call("forward", sw.Named("x", x))), "in order"},
		"explained":      {third(sum.Explain(w, x, sw.Named("dim", []int{0}))), "in order"},
		"NUL":            {first(topk.Call(w, x, sw.Named("k\x00", 2))), "NUL"},
		"no such name":   {first(topk.Call(w, x, sw.Named("q", 2))), "aten::topk: has no argument 'q'; did you mean 'k'?; its schemas are:\naten::topk"},
		"nearly a name":  {sum.Tensor(w, x, sw.Named("keepdims", true)).Err(), "aten::sum.dim_IntList: has no argument 'keepdims'; did you mean 'keepdim'?"},
	} {
		if !errors.Is(c.err, sw.InvalidArgument) || !strings.Contains(c.err.Error(), c.part) {
			t.Errorf("%s: %v", what, c.err)
		}
	}
	if _, err := topk.Call(w, x, sw.Named("k", 2), sw.Named("dim", -1)); err != nil {
		t.Error(err)
	}
}

func TestAClosedMeshMakesNothing(t *testing.T) {
	w := alone(t)
	m := mustOf(w.ParseMesh("x=1"))
	x := sw.Ones(m, []int64{2}, sw.On{"x": "S(0)"})
	m.Close()
	if z := sw.Zeros(m, []int64{2}); !errors.Is(z.Err(), sw.FailedPrecondition) || !strings.Contains(z.Err().Error(), "Zeros: the mesh was closed") {
		t.Error(z)
	}
	if z := sw.Zeros(m, []int64{2}, sw.On{"x": "S(0)"}); !errors.Is(z.Err(), sw.FailedPrecondition) {
		t.Error(z)
	}
	if sum, err := x.Sum().Item(); err != nil || sum != 2 {
		t.Error(sum, err)
	}
}

// Copies, which go vet finds, mean what was copied.
func TestCopiesAreTheSameThing(t *testing.T) {
	for _, value := range []any{sw.Tensor{}, sw.World{}, sw.Mesh{}, sw.Comm{}, sw.Module{}, sw.Optimizer{}, sw.Trace{}, sw.FunctionContext{},
		sw.Layout{}, sw.Plan{}, sw.Op{}} {
		kind := reflect.TypeOf(value)
		if !reflect.PointerTo(kind.Field(0).Type).Implements(reflect.TypeOf((*sync.Locker)(nil)).Elem()) { // what vet looks for
			t.Errorf("vet finds no copies of a %v", kind)
		}
	}
	checkLeaks(t, func() {
		w := alone(t)
		m := mustOf(w.ParseMesh("x=1"))
		g := mustOf(w.Comm().Subgroup([]int64{0}, "g"))
		module := mustOf(w.NewModule())
		x := sw.Ones(w, []int64{2})
		layout, plan, op := sw.MustParseLayout("[S(0)]"), sw.NewPlan(), copyOf(sw.MustFindOp("aten::neg"))
		x2, m2, g2, module2, layout2, plan2, w2 := copyOf(x), copyOf(m), copyOf(g), copyOf(module), copyOf(layout), copyOf(plan), copyOf(w)
		layout, plan = nil, nil
		for i := 0; i < 3; i++ { // ends layouts and plans that only the originals mean
			collectGarbage()
		}
		if got := layout2.String(); got != "[S(0)]" {
			t.Error(got)
		}
		if _, err := plan2.Add("*", sw.On{"x": "R"}).MarshalJSON(); err != nil {
			t.Error(err)
		}
		if sum, err := x2.Sum().Item(); err != nil || sum != 2 {
			t.Error(sum, err)
		}
		if err := op.Tensor(w2, x2).Err(); err != nil {
			t.Error(err)
		}
		x2.Close()
		if err := x.Err(); !errors.Is(err, sw.FailedPrecondition) {
			t.Error(err)
		}
		m2.Close()
		if err := sw.Ones(m, []int64{1}).Err(); !errors.Is(err, sw.FailedPrecondition) {
			t.Error(err)
		}
		g2.Close()
		module2.Close()
		for _, close := range []func() error{x.Close, m.Close, g.Close, module.Close, w2.Close, w.Close} {
			if err := close(); err != nil {
				t.Error(err)
			}
		}
	})
}

// copyOf is what no program should do.
func copyOf[T any](p *T) *T {
	q := new(T)
	reflect.ValueOf(q).Elem().Set(reflect.ValueOf(p).Elem())
	return q
}
