package shardweave_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"regexp"
	"sort"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// always are methods that work on what was closed.
var always = map[string]bool{"Close": true, "Err": true, "String": true, "Format": true, "Layout.Equal": true,
	"World.Rank": true, "World.Size": true, "World.LocalRank": true, "World.Comm": true, "World.Context": true,
	"Scheduler.At": true}

// handles are one of each kind, of one rank.
type handles struct {
	world     *sw.World
	mesh      *sw.Mesh
	comm      *sw.Comm
	trace     *sw.Trace
	module    *sw.Module
	forward   *sw.Forward
	gradSync  *sw.GradSync
	scaler    *sw.GradScaler
	captured  *sw.CapturedStep // none: without a GPU no function makes one
	optimizer *sw.Optimizer
	scheduler *sw.Scheduler
	context   *sw.FunctionContext
	tensor    *sw.Tensor
	// Of no rank.
	layout *sw.Layout
	plan   *sw.Plan
	op     *sw.Op

	tokenLoader  *sw.TokenLoader
	state        *sw.State
	checkpointer *sw.Checkpointer
	tokenFile    *sw.TokenFile     // of no rank
	metrics      *sw.MetricsWriter // of no rank
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
	return makeHandlesOf(alone(t))
}

func makeHandlesOf(w *sw.World) *handles {
	h := &handles{world: w, mesh: mustOf(w.MeshOfRanks([]int64{int64(w.Rank())}, sw.Dim("x", 1))),
		comm: mustOf(w.Comm().Subgroup([]int64{int64(w.Rank())}, "g")), module: mustOf(w.NewModule()),
		layout: sw.MustParseLayout("[R]"), plan: sw.NewPlan(), op: sw.MustFindOp("aten::neg")}
	h.trace = mustOf(h.mesh.Trace())
	h.forward = mustOf(h.module.Forward(""))
	h.gradSync = mustOf(h.module.GradSync())
	h.scaler = mustOf(w.NewGradScaler())
	h.tensor = sw.Ones(w, []int64{1}, sw.RequiresGrad)
	h.optimizer = mustOf(sw.NewSGD([]*sw.Tensor{h.module.Parameter("p", sw.Ones(w, []int64{1}))}, 0.1))
	h.scheduler = mustOf(sw.NewScheduler(sw.StepSchedule(1, 0.5), h.optimizer))
	mustOf(sw.Apply(keepContext{&h.context}, "f", 1, h.tensor))
	h.tokenFile = someTokens("misuse")
	h.metrics = mustOf(sw.OpenJSONLines(os.DevNull))
	h.tokenLoader = mustOf(w.TokenLoader([]*sw.TokenFile{h.tokenFile}, sw.TokenLoaderOptions{}))
	h.state = mustOf(sw.NewState(h.mesh))
	h.checkpointer = mustOf(sw.NewCheckpointer(h.mesh, nowhereToSave))
	return h
}

// nowhereToSave is a directory that cannot be made: nothing is left behind.
const nowhereToSave = "/dev/null/checkpoints"

func (h *handles) close() {
	h.checkpointer.Close()
	h.state.Close()
	h.tokenLoader.Close()
	h.tensor.Close()
	h.optimizer.Close()
	h.forward.Close()
	h.gradSync.Close()
	h.scaler.Close()
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
	case reflect.TypeOf((*sw.Forward)(nil)):
		value = h.forward
	case reflect.TypeOf((*sw.GradSync)(nil)):
		value = h.gradSync
	case reflect.TypeOf((*sw.GradScaler)(nil)):
		value = h.scaler
	case reflect.TypeOf((*sw.CapturedStep)(nil)):
		value = h.captured
	case reflect.TypeOf((*sw.Optimizer)(nil)):
		value = h.optimizer
	case reflect.TypeOf((*sw.Scheduler)(nil)):
		value = h.scheduler
	case reflect.TypeOf([]*sw.Optimizer(nil)):
		value = []*sw.Optimizer{h.optimizer}
	case reflect.TypeOf((*sw.FunctionContext)(nil)):
		value = h.context
	case reflect.TypeOf((*sw.Tensor)(nil)):
		value = h.tensor
	case reflect.TypeOf([]*sw.Tensor(nil)):
		value = []*sw.Tensor{h.tensor}
	case reflect.TypeOf(map[string]*sw.Tensor(nil)):
		value = map[string]*sw.Tensor{"p": h.tensor}
	case reflect.TypeOf([]sw.GradOption(nil)):
		value = []sw.GradOption{sw.WithGradients(h.tensor)}
	case reflect.TypeOf([]any(nil)): // of an operator
		value = []any{h.tensor}
	case reflect.TypeOf((*any)(nil)).Elem(): // a tensor or a number
		return reflect.ValueOf(h.tensor), true
	case reflect.TypeOf((*sw.Place)(nil)).Elem():
		return reflect.ValueOf(h.mesh), true
	case reflect.TypeOf((*sw.Layout)(nil)):
		value = h.layout
	case reflect.TypeOf((*sw.Plan)(nil)):
		value = h.plan
	case reflect.TypeOf((*sw.Op)(nil)):
		value = h.op
	case reflect.TypeOf((*sw.TokenLoader)(nil)):
		value = h.tokenLoader
	case reflect.TypeOf((*sw.State)(nil)):
		value = h.state
	case reflect.TypeOf((*sw.Checkpointer)(nil)):
		value = h.checkpointer
	case reflect.TypeOf([]sw.NamedTensor(nil)):
		value = []sw.NamedTensor{{Name: "p", Tensor: h.tensor}}
	case reflect.TypeOf((*sw.TokenFile)(nil)):
		value = h.tokenFile
	case reflect.TypeOf((*sw.MetricsWriter)(nil)):
		value = h.metrics
	case reflect.TypeOf([]*sw.TokenFile(nil)):
		value = []*sw.TokenFile{h.tokenFile}
	case reflect.TypeOf((*sw.Spec)(nil)).Elem():
		return reflect.ValueOf(h.layout), true
	case reflect.TypeOf([]sw.TensorOption(nil)):
		value = []sw.TensorOption{h.layout}
	default:
		return reflect.Value{}, false
	}
	return reflect.ValueOf(value), true
}

// ofNoRank says whether what the type means belongs to no rank, and is never closed.
func ofNoRank(kind reflect.Type) bool {
	switch kind {
	case reflect.TypeOf((*sw.Layout)(nil)), reflect.TypeOf((*sw.Plan)(nil)), reflect.TypeOf((*sw.Op)(nil)),
		reflect.TypeOf((*sw.Spec)(nil)).Elem(), reflect.TypeOf([]sw.TensorOption(nil)), reflect.TypeOf((*sw.TokenFile)(nil)), reflect.TypeOf([]*sw.TokenFile(nil)), reflect.TypeOf((*sw.MetricsWriter)(nil)):
		return true
	}
	return false
}

// plain is an argument that is no handle.
func plain(name string, kind reflect.Type) reflect.Value {
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
		if name == "Tensor.Apply" {
			return reflect.ValueOf("aten::neg")
		}
		return reflect.ValueOf("p").Convert(kind)
	case reflect.Slice:
		if kind.Elem().Kind() == reflect.Int64 {
			return reflect.ValueOf([]int64{1})
		}
		if kind.Elem().Kind() == reflect.Float32 {
			return reflect.ValueOf([]float32{1})
		}
	case reflect.Interface:
		for _, value := range []any{background, errors.New("reason"), keepContext{new(*sw.FunctionContext)}} {
			if reflect.TypeOf(value).Implements(kind) && kind.NumMethod() > 0 {
				return reflect.ValueOf(value)
			}
		}
	}
	return reflect.Zero(kind)
}

// arguments of a call: those at `wrong` (or none: -1) are from, all others good ones. ofRanks is how many
// belong to a rank.
func argumentsOf(name string, kind reflect.Type, good *handles, wrong int, from *handles) (args []reflect.Value, ofRanks int) {
	args = make([]reflect.Value, kind.NumIn())
	for i := range args {
		source := good
		if i == wrong {
			source = from
		}
		value, is := source.of(kind.In(i))
		switch {
		case is && (name == "FromSlice" || name == "Scalar") && ofNoRank(kind.In(i)): // which have no layout
			args[i] = reflect.Zero(kind.In(i))
		case is && name == "World.ModuleOf" && source.tensor != nil && kind.In(i) == reflect.TypeOf((*any)(nil)).Elem():
			args[i] = reflect.ValueOf(&struct{ T *sw.Tensor }{source.tensor})
			ofRanks++
		case is:
			args[i] = value
			if !ofNoRank(kind.In(i)) {
				ofRanks++
			}
		default:
			args[i] = plain(name, kind.In(i))
		}
	}
	return args, ofRanks
}

// failureOf is the error among the results, or of a tensor or plan that is the result.
func failureOf(results []reflect.Value) (error, bool) {
	for i := len(results) - 1; i >= 0; i-- {
		switch r := results[i].Interface().(type) {
		case error:
			return r, true
		case *sw.Tensor:
			if r != nil {
				return r.Err(), true
			}
		case *sw.Plan:
			if r != nil {
				_, err := r.MarshalJSON()
				return err, true
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

func isAlways(name string) bool { return always[name] || always[name[strings.Index(name, ".")+1:]] }

// Each handle of each exported function and method, one after the other: closed, of another rank, of another
// world, of a world that was closed, nil, and what no function has made. ChecksAbort (TestMain) ends the
// program where memory that was freed would be read.
func TestHandlesThatCannotBeUsed(t *testing.T) {
	good, closed, other, ended := makeHandles(t), makeHandles(t), makeHandles(t), makeHandles(t)
	closed.world.Close()
	closed.context = good.context // whose call has returned
	closed.mesh, closed.comm, closed.module = mustOf(good.world.ParseMesh("x=1")), mustOf(good.world.Comm().Subgroup([]int64{0}, "h")), mustOf(good.world.NewModule())
	closed.forward = mustOf(closed.module.Forward(""))
	closed.gradSync = mustOf(closed.module.GradSync())
	closed.scaler = mustOf(good.world.NewGradScaler())
	closed.tokenLoader = mustOf(good.world.TokenLoader([]*sw.TokenFile{good.tokenFile}, sw.TokenLoaderOptions{}))
	closed.state = mustOf(sw.NewState(closed.mesh))
	closed.checkpointer = mustOf(sw.NewCheckpointer(closed.mesh, nowhereToSave))
	closed.trace, closed.tensor = mustOf(closed.mesh.Trace()), sw.Ones(good.world, []int64{1})
	closed.optimizer = mustOf(sw.NewSGD([]*sw.Tensor{sw.Ones(good.world, []int64{1}, sw.RequiresGrad)}, 0.1))
	closed.scheduler = mustOf(sw.NewScheduler(sw.StepSchedule(1, 0.5), closed.optimizer))
	closed.close()
	ended.world.Close()
	one := mustOf(sw.Counting(1, 2))
	defer one.Close()
	rankOne := makeHandlesOf(one)
	empty := &handles{new(sw.World), new(sw.Mesh), new(sw.Comm), new(sw.Trace), new(sw.Module), new(sw.Forward), new(sw.GradSync), new(sw.GradScaler), new(sw.CapturedStep), new(sw.Optimizer), new(sw.Scheduler), new(sw.FunctionContext), new(sw.Tensor),
		new(sw.Layout), new(sw.Plan), new(sw.Op), new(sw.TokenLoader), new(sw.State), new(sw.Checkpointer), new(sw.TokenFile), new(sw.MetricsWriter)}
	wrongs := map[string]*handles{"closed": closed, "of another world": other, "of rank 1": rankOne, "of a closed world": ended, "not made": empty, "nil": {}}
	words := map[string]string{"closed": "closed", "of another world": "several ranks (worlds of this process), each with the number 0",
		"of rank 1": "several ranks of this process, ", "of a closed world": "", "not made": "was not made", "nil": "nil"}

	calls := good.calls()
	tried := map[string]int{}
	for _, name := range sortedKeys(calls) {
		f := calls[name]
		kind := f.Type()
		for wrong := 0; wrong < kind.NumIn(); wrong++ {
			if _, is := good.of(kind.In(wrong)); !is {
				continue
			}
			for what, from := range wrongs {
				args, ofRanks := argumentsOf(name, kind, good, wrong, from)
				if skipMisuse(name, what, kind, wrong, ofRanks) {
					continue
				}
				tried[what]++
				where := fmt.Sprintf("%s, argument %d %s", name, wrong, what)
				err, tells := misused(f, args)
				for _, h := range []*handles{good, other, rankOne} {
					if h.module.Err() != nil { // it tells from now on
						h.module = mustOf(h.world.NewModule())
					}
					if _, err := h.plan.MarshalJSON(); err != nil { // and so does a plan
						h.plan = sw.NewPlan()
					}
				}
				if isAlways(name) {
					if err != nil && strings.HasPrefix(err.Error(), "panic") {
						t.Errorf("%s: %v", where, err)
					}
					continue
				}
				var asError *sw.Error
				switch {
				case !tells:
					t.Errorf("%s: there is no error among the results", where)
				case !errors.As(err, &asError):
					t.Errorf("%s: %v", where, err)
				case !errors.Is(err, sw.FailedPrecondition) && !errors.Is(err, sw.InvalidArgument):
					t.Errorf("%s: %v", where, err)
				case !strings.HasPrefix(asError.Message, name+": ") || strings.Contains(err.Error(), "swv_"):
					t.Errorf("%s: the words are not Go's: %v", where, err)
				case strings.HasPrefix(name, "FunctionContext.") && strings.Contains(err.Error(), "has returned"):
				case !strings.Contains(err.Error(), words[what]):
					t.Errorf("%s: %v", where, err)
				}
			}
		}
	}
	for what, least := range map[string]int{"closed": 150, "of another world": 60, "of rank 1": 60, "of a closed world": 150, "not made": 180, "nil": 150} {
		if tried[what] < least {
			t.Errorf("only %d calls with what is %s were tried", tried[what], what)
		}
	}
	for what, from := range wrongs {
		for kind, handle := range from.receivers() {
			if text := fmt.Sprintf("%v %+v %s", handle, handle, handle); strings.Contains(text, "PANIC") || strings.Contains(text, "%!") && kind == "Tensor" {
				t.Errorf("a %s %s as text: %s", kind, what, text)
			}
		}
	}
	// What is good still works.
	if err := good.tensor.Mul(2).Sum().Backward(); err != nil {
		t.Error(err)
	}
}

func sortedKeys[T any](all map[string]T) []string {
	var names []string
	for name := range all {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// What is nil and is no handle (contexts, functions, options, places) is an error too, or has a meaning.
func TestNilArguments(t *testing.T) {
	good := makeHandles(t)
	fine := map[string]bool{ // what nil means there is documented
		"Comm.Abort": true, "World.Abort": true, // no reason
		"SetLog": true, "Module.Memory": true, // to stderr; nothing runs
		"Tensor.Add": true, "Tensor.Sub": true, "Tensor.Mul": true, "Tensor.Div": true, "Tensor.Lt": true, "Tensor.Gt": true, "Tensor.Eq": true, // none
		"Tensor.Ge": true, "Tensor.Le": true, "Tensor.Ne": true, "Tensor.Remainder": true,
	}
	tried := 0
	calls := good.calls()
	for _, name := range sortedKeys(calls) {
		f := calls[name]
		kind := f.Type()
		for at := 0; at < kind.NumIn(); at++ {
			in := kind.In(at)
			args, _ := argumentsOf(name, kind, good, -1, nil)
			option := in.Kind() == reflect.Slice && (in.Elem().Kind() == reflect.Interface || in.Elem().Kind() == reflect.Func)
			switch {
			case option: // one that is nil
				args[at] = reflect.MakeSlice(in, 1, 1)
			case in.Kind() == reflect.Interface || in.Kind() == reflect.Func:
				args[at] = reflect.Zero(in)
			default:
				continue
			}
			if name == "Comm.Abort" || name == "World.Abort" { // breaks what others use
				args[0] = reflect.ValueOf(map[string]any{"Comm.Abort": mustOf(good.comm.Subgroup([]int64{0}, "a")), "World.Abort": alone(t)}[name])
			}
			if in.Kind() == reflect.Func && (name == "RunRanks" || name == "Spawn") {
				args[1] = reflect.ValueOf(1) // rank: what comes first is told first
			}
			tried++
			where := fmt.Sprintf("%s, argument %d nil", name, at)
			err, tells := misused(f, args)
			if err != nil && strings.HasPrefix(err.Error(), "panic") {
				t.Errorf("%s: %v", where, err)
			}
			mayBeNil := option || fine[name] || isAlways(name) || in == reflect.TypeOf((*sw.Spec)(nil)).Elem()
			if !mayBeNil && (!tells || !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), name+": ") || !strings.Contains(err.Error(), "nil")) {
				t.Errorf("%s: %v", where, err)
			}
		}
	}
	if tried < 60 {
		t.Errorf("only %d calls were tried", tried)
	}
	for what, err := range map[string]error{
		"a mode":  good.world.With(sw.GradMode(3), func() error { return nil }),
		"outputs": second(sw.Apply(keepContext{new(*sw.FunctionContext)}, "f", 1<<50, good.tensor)),
	} {
		if !errors.Is(err, sw.InvalidArgument) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// skipMisuse: what is no misuse.
func skipMisuse(name, what string, kind reflect.Type, wrong, ofRanks int) bool {
	in := kind.In(wrong)
	if (what == "of another world" || what == "of rank 1") && ofRanks == 1 {
		return true // there is nothing that it does not belong to
	}
	if ofNoRank(in) && what != "nil" && what != "not made" {
		return true
	}
	if in == reflect.TypeOf((*sw.CapturedStep)(nil)) && what != "nil" && what != "not made" {
		return true // there is none
	}
	if (name == "FromSlice" || name == "Scalar") && ofNoRank(in) {
		return true // see argumentsOf
	}
	if strings.HasPrefix(name, "FunctionContext.") && wrong > 0 {
		return true // see TestWhatAFunctionSaves
	}
	if what != "nil" {
		return false
	}
	switch in {
	case reflect.TypeOf((*sw.Tensor)(nil)): // a nil tensor is none
		return name == "Tensor.SetGrad" && wrong == 1 || name == "Tensor.Linear" || name == "Tensor.LayerNorm" ||
			wrong > 0 && isOperator(name)
	case reflect.TypeOf((*sw.Plan)(nil)): // everything is replicated
		return name == "Module.Distribute"
	case reflect.TypeOf((*sw.Layout)(nil)): // as the tensor
		return name == "Tensor.LocalWithGrad"
	case reflect.TypeOf((*any)(nil)).Elem(), reflect.TypeOf([]any(nil)), reflect.TypeOf([]sw.GradOption(nil)):
		return true
	case reflect.TypeOf([]*sw.Tensor(nil)):
		return name == "Cat" || name == "Stack"
	}
	return false
}

var generatedOperators = func() map[string]bool {
	text, err := os.ReadFile("operators.go")
	if err != nil {
		panic(err)
	}
	all := map[string]bool{"Tensor.Attention": true}
	for _, method := range regexp.MustCompile(`(?m)^func \(t \*Tensor\) (\w+)`).FindAllStringSubmatch(string(text), -1) {
		all["Tensor."+method[1]] = true
	}
	return all
}()

func isOperator(name string) bool { return generatedOperators[name] }

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
	before := settledHandles()
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
		"a module":       {first(module.Call("forward", sw.Named("x", x))), "was not loaded"},
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

// go vet finds copies of all kinds of handles.
func TestVetFindsCopies(t *testing.T) {
	out, err := exec.Command("go", "vet", "./testdata/copies").CombinedOutput()
	if err == nil {
		t.Fatal("go vet finds nothing")
	}
	for name := range readSurface(t).handleTypes() {
		if !regexp.MustCompile(`assignment copies lock value to v: \S*shardweave\.` + name + ` contains`).Match(out) {
			t.Errorf("go vet finds no copy of a %s (or testdata/copies has none)", name)
		}
	}
	if t.Failed() {
		t.Logf("%s", out)
	}
}

// What copies mean is what was copied.
func TestCopiesAreTheSameThing(t *testing.T) {
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
