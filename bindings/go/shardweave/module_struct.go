package shardweave

import (
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"unicode"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// TrainingMode is what behaves differently in training and evaluation (nn.Dropout, say): what a struct that
// [World.ModuleOf] has registered holds of it, [Module.Train] sets.
type TrainingMode interface {
	// SetTraining says whether the model is trained.
	SetTraining(training bool)
}

// Sharder is a struct that says itself how it shards, for plans that name it ([Plan.AddModule]). [World.ModuleOf] asks.
type Sharder interface {
	// Sharding is the same on every rank.
	Sharding() ModuleSharding
}

// ModuleOf is a module of all tensors in a struct, to which plans apply:
//
//	type Block struct {
//		Norm *nn.LayerNorm                // norm.weight, norm.bias
//		Up   *nn.Linear    `sw:"up_proj"` // up_proj.weight, up_proj.bias
//	}
//
//	type Model struct {
//		*sw.Module            // set by ModuleOf: m.Parameters(), m.Distribute(...)
//		Blocks     []*Block   // blocks.0.norm.weight, ...
//		Scale      *sw.Tensor // scale
//		Mean       *sw.Tensor `sw:",buffer"`    // a buffer
//		Cache      *sw.Tensor `sw:",transient"` // a buffer that checkpoints do not have
//	}
//
//	m := &Model{...}
//	_, err := w.ModuleOf(m)
//
// A tensor's FQN is that of the fields that lead to it, with dots between: a field's name in lower case, with an
// underscore before each word (InputLayerNorm is "input_layer_norm", LMHead "lm_head"), or what its tag says;
// elements of slices have their index. What is embedded adds no name of its own, unless its tag does. "-" leaves a
// field out. "buffer" and "transient" hold for all that a field leads to. What is nil is skipped; fields that lead to
// no tensors (sizes, names, functions) are not looked at. A tensor that several fields lead to (tied weights) is one
// parameter with several names.
//
// Errors name the field: a tensor that could not be made, one without a capital letter that leads to tensors, a map
// of them, a struct within itself, two fields of one name. Nothing is registered then. As with [Module.Parameter],
// tensors leave their [World.Scope], and parameters require grad, but those that are frozen.
//
// The argument is a pointer to a struct, or what holds such (nn.Sequential).
func (w *World) ModuleOf(model any) (*Module, error) {
	return ask(func(r *rank) (*Module, error) {
		all := walk{under: map[visit]string{}, names: map[string]string{}}
		if err := all.model(model); err != nil {
			return nil, err
		}
		for _, f := range all.found { // before anything is registered
			handle, err := r.handle(f.tensor)
			if err == nil {
				var floating bool
				if floating, err = requiresGradOf(handle); err == nil && !floating && f.kind == parameter {
					err = invalid("its elements are no floating point numbers, so it is no parameter: tag it `sw:\",buffer\"`")
				}
			}
			if err != nil {
				return nil, f.because(err)
			}
		}
		handle, err := c.ModuleCreate()
		m, err := newModule(r, handle, err)
		if err != nil {
			return nil, err
		}
		m.modes, m.transient = all.modes, map[string]bool{}
		var switched []*Tensor // that require grad as parameters only
		undo := func(err error) error {
			for _, t := range switched {
				if off := c.TensorClearRequiresGrad(t.handle); off != nil {
					err = off
				}
			}
			r.disown(m.thing)
			m.release()
			return public(err)
		}
		for _, f := range all.found {
			required, err := c.TensorRequiresGrad(f.tensor.handle)
			add := c.ModuleAddParameter
			if f.kind != parameter {
				add = c.ModuleAddBuffer
			}
			if err == nil {
				err = add(m.handle, f.fqn, f.tensor.handle)
			}
			if err != nil {
				return nil, f.because(undo(err))
			}
			if f.kind == parameter && !required {
				switched = append(switched, f.tensor)
			}
			if f.kind == transient {
				m.transient[f.fqn] = true
			} else {
				m.names = append(m.names, f.fqn)
			}
		}
		for _, f := range all.shards {
			if !all.leadsTo(f.fqn) { // without tensors it is no module there
				continue
			}
			if err := m.setSharding(f.fqn, f.ModuleSharding); err != nil {
				return nil, foundTensor{path: f.path, fqn: f.fqn}.because(undo(err))
			}
		}
		for _, f := range all.found {
			r.keep(f.tensor)
		}
		for _, home := range all.homes {
			home.Set(reflect.ValueOf(m))
		}
		return m, nil
	}, w)
}

// requiresGradOf says whether gradients of such a tensor may be wanted.
func requiresGradOf(handle c.Tensor) (bool, error) {
	dtype, err := c.TensorDType(handle)
	switch DType(dtype) {
	case I8, I16, I32, I64, U8, U16, U32, U64, Bool:
		return false, err
	}
	return true, err
}

// part is what a module inside of another knows of a struct.
func (f *registered) part(fqn string) *registered {
	inner := &registered{transient: map[string]bool{}}
	for _, mode := range f.modes {
		if name, inside := within(fqn, mode.fqn); inside {
			inner.modes = append(inner.modes, foundMode{name, mode.TrainingMode})
		}
	}
	for full := range f.transient {
		if name, inside := within(fqn, full); inside {
			inner.transient[name] = true
		}
	}
	for _, full := range f.names {
		if name, inside := within(fqn, full); inside {
			inner.names = append(inner.names, name)
		}
	}
	return inner
}

// within is a name without what it begins with, and its dot.
func within(outer, fqn string) (string, bool) {
	if outer == "" {
		return fqn, true
	}
	return strings.TrimPrefix(fqn, outer+"."), strings.HasPrefix(fqn, outer+".")
}

// adopt is that a child has become a part.
func (f *registered) adopt(fqn string, child *registered) {
	for _, mode := range child.modes {
		f.modes = append(f.modes, foundMode{joinFQN(fqn, mode.fqn), mode.TrainingMode})
	}
	for name := range child.transient {
		if f.transient == nil {
			f.transient = map[string]bool{}
		}
		f.transient[joinFQN(fqn, name)] = true
	}
	for _, name := range child.names {
		f.names = append(f.names, joinFQN(fqn, name))
	}
}

// leadsTo says whether a tensor was found under a name.
func (k *walk) leadsTo(fqn string) bool {
	for _, f := range k.found {
		if _, inside := within(fqn, f.fqn); inside {
			return true
		}
	}
	return false
}

// walk finds the tensors of a struct.
type walk struct {
	under  map[visit]string // the pointers and slices that led here, and where they were met
	names  map[string]string
	found  []foundTensor
	modes  []foundMode
	shards []foundSharding
	homes  []reflect.Value // of the module
}

type visit struct {
	kind    reflect.Type
	pointer uintptr
}

type foundMode struct {
	fqn string
	TrainingMode
}

type foundSharding struct {
	path, fqn string
	ModuleSharding
}

type registration int

const (
	parameter registration = iota
	buffer
	transient
)

type foundTensor struct {
	path, fqn string // "Model.Blocks[0].Norm.Weight", "blocks.0.norm.weight"
	tensor    *Tensor
	kind      registration
}

// because says whose error it is.
func (f foundTensor) because(err error) error {
	code, message := InvalidArgument, err.Error()
	var own *Error
	if errors.As(err, &own) {
		code = own.Code
		message = strings.TrimPrefix(own.Message, "World.ModuleOf: ")
	}
	return newError(code, fmt.Sprintf("%s (%s): %s", f.path, f.fqn, message))
}

// reach is what a type leads to.
type reach int

const (
	noTensors reach = iota
	perhaps         // an interface, or a TrainingMode
	tensors
)

var (
	tensorType    = reflect.TypeOf(Tensor{})
	moduleType    = reflect.TypeOf(Module{})
	modulePointer = reflect.TypeOf((*Module)(nil))
	modeType      = reflect.TypeOf((*TrainingMode)(nil)).Elem()
	namedType     = reflect.TypeOf(NamedTensor{})
)

// reachOf is what a type leads to; not by way of those that are open, which are being looked at.
func reachOf(t reflect.Type, open map[reflect.Type]bool) reach {
	switch {
	case t == tensorType || t == moduleType:
		return tensors
	case t.Kind() == reflect.Interface:
		return perhaps
	case open[t] || t.Kind() == reflect.Struct && t.PkgPath() == tensorType.PkgPath() && t != namedType:
		return noTensors // (The other handles of this package have no tensors of the user's.)
	}
	if open == nil {
		open = map[reflect.Type]bool{}
	}
	open[t] = true // of any kind: type Tree map[string]Tree
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return reachOf(t.Elem(), open)
	case reflect.Struct:
	default:
		return noTensors
	}
	result := noTensors
	if reflect.PointerTo(t).Implements(modeType) {
		result = perhaps
	}
	for i := 0; i < t.NumField(); i++ {
		if of := reachOf(t.Field(i).Type, open); of > result {
			result = of
		}
	}
	return result
}

// model walks what ModuleOf was given.
func (k *walk) model(model any) error {
	v := reflect.ValueOf(model)
	if !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return invalid("argument 'model' is nil; wanted a pointer to a struct")
	}
	inner := v.Type()
	for seen := map[reflect.Type]bool{}; inner.Kind() == reflect.Pointer && !seen[inner]; inner = inner.Elem() {
		seen[inner] = true // type P *P
	}
	if v.Kind() == reflect.Struct && reachesFields(v.Type()) && reachOf(v.Type(), nil) != noTensors {
		return invalid("argument 'model' is a struct, of type %T; wanted a pointer to it, &model", model)
	}
	if v.Kind() == reflect.Struct || inner.Kind() != reflect.Struct && inner.Kind() != reflect.Slice && inner.Kind() != reflect.Array ||
		inner == tensorType || inner.Kind() == reflect.Struct && reachOf(inner, nil) == noTensors {
		return invalid("argument 'model', of type %T, leads to no tensors; wanted a pointer to a struct with fields that are *Tensor, or lead to them", model)
	}
	path := inner.Name()
	if path == "" {
		path = "model"
	}
	if err := k.value(v, path, "", parameter); err != nil {
		return err
	}
	if len(k.found) == 0 {
		return invalid("argument 'model', of type %T, has no tensors: all fields that lead to them are nil", model)
	}
	return nil
}

// value walks what may be read and written: nothing behind a field that is not exported.
func (k *walk) value(v reflect.Value, path, fqn string, kind registration) error {
	if reachOf(v.Type(), nil) == noTensors {
		return nil
	}
	switch v.Kind() {
	case reflect.Interface:
		if v.IsNil() {
			return nil
		}
		return k.value(v.Elem(), path, fqn, kind)
	case reflect.Pointer:
		if v.IsNil() {
			return nil
		}
		switch v.Type() {
		case reflect.PointerTo(tensorType):
			return k.tensor(v.Interface().(*Tensor), path, fqn, kind)
		case modulePointer:
			return invalid("%s is a module of its own, whose tensors would not be found: ModuleOf sets the *Module that the outermost struct embeds; tag others `sw:\"-\"`", path)
		}
		leave, err := k.enter(v, path)
		if err != nil {
			return err
		}
		defer leave()
		return k.value(v.Elem(), path, fqn, kind)
	case reflect.Struct:
		if v.Type() == tensorType || v.Type() == moduleType {
			return invalid("%s is a %s; wanted a pointer to one", path, v.Type().Name())
		}
		if v.CanAddr() && v.Addr().CanInterface() {
			if mode, is := v.Addr().Interface().(TrainingMode); is {
				k.modes = append(k.modes, foundMode{fqn, mode})
			}
			if sharder, is := v.Addr().Interface().(Sharder); is {
				k.shards = append(k.shards, foundSharding{path, fqn, sharder.Sharding()})
			}
		}
		return k.fields(v, path, fqn, kind)
	case reflect.Slice, reflect.Array:
		if v.Kind() == reflect.Slice && v.Len() > 0 {
			leave, err := k.enter(v, path)
			if err != nil {
				return err
			}
			defer leave()
		}
		for i := 0; i < v.Len(); i++ {
			number := strconv.Itoa(i)
			if err := k.value(v.Index(i), path+"["+number+"]", joinFQN(fqn, number), kind); err != nil {
				return err
			}
		}
	case reflect.Map:
		for at := v.MapRange(); at.Next(); {
			inner := at.Value()
			if inner.Kind() == reflect.Interface {
				inner = inner.Elem()
			}
			if inner.IsValid() && reachOf(inner.Type(), nil) == tensors {
				return invalid("%s is a map, which has no order, so ranks would register its tensors in different ones; wanted a slice or a struct", path)
			}
		}
	}
	return nil
}

// enter is that what a pointer or a slice leads to is walked until leave.
func (k *walk) enter(v reflect.Value, path string) (leave func(), err error) {
	here := visit{v.Type(), v.Pointer()}
	if before, there := k.under[here]; there {
		return nil, invalid("%s leads back to %s", path, before)
	}
	k.under[here] = path
	return func() { delete(k.under, here) }, nil
}

func (k *walk) fields(v reflect.Value, path, fqn string, kind registration) error {
	for i := 0; i < v.NumField(); i++ {
		field, inner := v.Type().Field(i), v.Field(i)
		path := path + "." + field.Name
		name, of, err := tagOf(field, kind)
		if err != nil {
			return invalid("%s: %v", path, err)
		}
		if name == "-" {
			continue
		}
		if field.Type == modulePointer && field.Anonymous && len(k.under) == 1 && fqn == "" && inner.CanSet() {
			if !inner.IsNil() {
				return newError(AlreadyExists, path+" is set: the struct is that of a module already")
			}
			k.homes = append(k.homes, inner)
			continue
		}
		if !field.IsExported() && !(field.Anonymous && reachesFields(field.Type)) {
			if reachOf(field.Type, nil) == tensors && !isNothing(inner) {
				return invalid("%s leads to tensors, but is not exported: begin its name with a capital letter, or tag it `sw:\"-\"`", path)
			}
			continue
		}
		under := fqn
		if name == "" && !(field.Anonymous && reachesFields(field.Type)) {
			name = snake(field.Name)
		}
		if name != "" {
			under = joinFQN(fqn, name)
		}
		if err := k.value(inner, path, under, of); err != nil {
			return err
		}
	}
	return nil
}

// reachesFields says whether what is embedded is a struct of the user's, whose fields are the outer one's too.
func reachesFields(t reflect.Type) bool {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return t.Kind() == reflect.Struct && t != tensorType && t != moduleType
}

// isNothing says whether a field that may not be read leads nowhere.
func isNothing(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Slice, reflect.Map:
		return v.Len() == 0
	}
	return v.IsZero()
}

func (k *walk) tensor(t *Tensor, path, fqn string, kind registration) error {
	if before, there := k.names[fqn]; there {
		return newError(AlreadyExists, fmt.Sprintf("%s and %s are both %s: tag one of them", before, path, fqn))
	}
	k.names[fqn] = path
	k.found = append(k.found, foundTensor{path, fqn, t, kind})
	return nil
}

// tagOf is the name that a field's tag says, "-" or nothing, and how its tensors are registered.
func tagOf(field reflect.StructField, kind registration) (string, registration, error) {
	tag, there := field.Tag.Lookup("sw")
	if !there {
		return "", kind, nil
	}
	parts := strings.Split(tag, ",")
	for _, option := range parts[1:] {
		switch option {
		case "buffer":
			if kind == parameter {
				kind = buffer
			}
		case "transient":
			kind = transient
		default:
			return "", kind, fmt.Errorf("its tag %q has the option '%s'; there are 'buffer' and 'transient'", tag, option)
		}
	}
	name := parts[0]
	if name == "-" && len(parts) == 1 || name == "" {
		return name, kind, nil
	}
	for _, part := range strings.Split(name, ".") {
		if part == "" || strings.ContainsAny(part, " \t\n*?[]{}") || part == "-" {
			return "", kind, fmt.Errorf("its tag %q is no name; wanted one such as q_proj, or several with dots between", tag)
		}
	}
	return name, kind, nil
}

func joinFQN(fqn, name string) string {
	if fqn == "" {
		return name
	}
	return fqn + "." + name
}

// snake makes "input_layer_norm" of "InputLayerNorm", "lm_head" of "LMHead", "conv2d" of "Conv2d".
func snake(name string) string {
	var b strings.Builder
	letters := []rune(name)
	for i, letter := range letters {
		if i > 0 && unicode.IsUpper(letter) && letters[i-1] != '_' &&
			(!unicode.IsUpper(letters[i-1]) || i+1 < len(letters) && unicode.IsLower(letters[i+1])) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(letter))
	}
	return b.String()
}
