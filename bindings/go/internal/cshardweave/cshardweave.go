// Package cshardweave is shardweave.h as Go sees it: handles, and functions that return an error
// where C returns a status. It is the only package with cgo, and decides nothing: who owns a handle,
// and when it ends, is up to package shardweave.
//
// A handle is a pointer to C's memory; nil where the header says NULL. Slices and strings are read
// during the call only.
package cshardweave

// #cgo pkg-config: shardweave
// #cgo CFLAGS: -std=gnu11 -fno-plt
// #include "shim.h"
// #include <stdlib.h>
import "C"

import (
	"math"
	"strings"
	"time"
	"unsafe"
)

// Handles.
type (
	World     = *C.swv_world
	Comm      = *C.swv_comm
	Mesh      = *C.swv_mesh
	Scope     = *C.swv_scope
	Layout    = *C.swv_layout
	Tensor    = *C.swv_tensor
	Op        = *C.swv_op
	Context   = *C.swv_function_context
	Module    = *C.swv_module
	Forward   = *C.swv_forward
	Plan      = *C.swv_plan
	Optimizer = *C.swv_optimizer
	Trace     = *C.swv_trace
)

// Error is a status that was not NULL.
type Error struct {
	Code    int32
	Message string
	Rank    int32 // of the world, whose error it is; -1: this rank's own, or not known
}

func (e *Error) Error() string { return CodeName(e.Code) + ": " + e.Message }

// CodeName is the code's name in google.rpc.Code.
func CodeName(code int32) string { return C.GoString(C.swv_code_name(C.swv_code(code))) }

func result(status *C.swv_status) error {
	if status == nil {
		return nil
	}
	err := &Error{int32(C.swv_status_code(status)), C.GoString(C.swv_status_message(status)), int32(C.swv_status_rank(status))}
	C.swv_status_free(status)
	return err
}

// text takes the string over.
func text(s *C.swv_string) string {
	result := C.GoStringN(C.swv_string_data(s), C.int(C.swv_string_size(s)))
	C.swv_string_free(s)
	return result
}

// arena holds texts for the length of a call.
type arena []unsafe.Pointer

func (a *arena) text(s string) *C.char {
	p := C.CString(s)
	*a = append(*a, unsafe.Pointer(p))
	return p
}

// orNull is NULL for "".
func (a *arena) orNull(s string) *C.char {
	if s == "" {
		return nil
	}
	return a.text(s)
}

// list is the texts one behind the other, as the shims want them.
func (a *arena) list(all []string) *C.char {
	return a.text(strings.Join(all, "\x00") + "\x00")
}

func (a *arena) free() {
	for _, p := range *a {
		C.free(p)
	}
}

func checkText(what string, all ...string) error {
	for _, s := range all {
		if strings.IndexByte(s, 0) >= 0 {
			return invalid(what + " has a NUL in it")
		}
	}
	return nil
}

// first is where the elements of a slice begin; NULL if there are none.
func first[T any](s []T) *T {
	if len(s) == 0 {
		return nil
	}
	return &s[0]
}

func int64s(s []int64) *C.int64_t { return (*C.int64_t)(first(s)) }

func flag(b bool) C.swv_bool {
	if b {
		return 1
	}
	return 0
}

// millis is 0, the library's own, only for 0; what is negative the library refuses.
func millis(d time.Duration) C.int64_t {
	switch {
	case d > 0 && d < time.Millisecond:
		return 1
	case d < 0 && d > -time.Millisecond:
		return -1
	}
	return C.int64_t(d.Milliseconds())
}

// bytes is memory of Go's as cgo looks at it: by its type, which has no pointers, and not at all of the
// object that it lies in.
func bytes(p unsafe.Pointer) *C.char { return (*C.char)(p) }

func BuildInfo() string { return C.GoString(C.swv_build_info()) }

func LiveHandles() int64 { return int64(C.swv_live_handles()) }

func SetHandleChecks(checks int32) error {
	return result(C.swv_set_handle_checks(C.swv_checks(checks)))
}

func DTypeSize(dtype int32) int { return int(C.swv_dtype_size(C.swv_dtype(dtype))) }

func DTypeName(dtype int32) string { return C.GoString(C.swv_dtype_name(C.swv_dtype(dtype))) }

func Seed(seed uint64) error { return result(C.swv_seed(C.uint64_t(seed))) }

func SetNumThreads(n int32) error { return result(C.swv_set_num_threads(C.int32_t(n))) }

// ---- Worlds

func WorldCreateLocal(ranks int32, backend string, timeout time.Duration) ([]World, error) {
	if err := checkText("an option", backend); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	worlds := []World{nil}
	if ranks > 1 {
		worlds = make([]World, ranks)
	}
	err := result(C.swvgo_world_create_local(C.int32_t(ranks), a.orNull(backend), millis(timeout), &worlds[0]))
	return worlds, err
}

func WorldFromEnvironment(backend, networkInterface string, timeout time.Duration, device Device) (World, error) {
	if err := checkText("an option", backend, networkInterface); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out World
	err := result(C.swvgo_world_from_environment(a.orNull(backend), a.orNull(networkInterface), millis(timeout), device.c(), &out))
	return out, err
}

type Rendezvous struct {
	Rank, WorldSize int32
	File, Host      string
	Port, LocalRank int32
	Run             string
}

func WorldJoin(r Rendezvous, backend, networkInterface string, timeout time.Duration, device Device) (World, error) {
	if err := checkText("a field", r.File, r.Host, r.Run, backend, networkInterface); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out World
	err := result(C.swvgo_world_join(C.int32_t(r.Rank), C.int32_t(r.WorldSize), a.orNull(r.File), a.orNull(r.Host),
		C.int32_t(r.Port), C.int32_t(r.LocalRank), a.orNull(r.Run), a.orNull(backend), a.orNull(networkInterface),
		millis(timeout), device.c(), &out))
	return out, err
}

func WorldCreateCounting(rank, ranks int32) (World, error) {
	var out World
	err := result(C.swv_world_create_counting(C.int32_t(rank), C.int32_t(ranks), &out))
	return out, err
}

func WorldFree(w World) { C.swv_world_free(w) }

func WorldRank(w World) (int32, error) {
	var out C.int32_t
	err := result(C.swv_world_rank(w, &out))
	return int32(out), err
}

func WorldSize(w World) (int32, error) {
	var out C.int32_t
	err := result(C.swv_world_size(w, &out))
	return int32(out), err
}

func WorldLocalRank(w World) (int32, error) {
	var out C.int32_t
	err := result(C.swv_world_local_rank(w, &out))
	return int32(out), err
}

func WorldComm(w World) (Comm, error) {
	var out Comm
	err := result(C.swv_world_comm(w, &out))
	return out, err
}

func WorldAbort(w World, reason string) error {
	var a arena
	defer a.free()
	return result(C.swv_world_abort(w, a.text(strings.ReplaceAll(reason, "\x00", "?"))))
}

func WorldFlightRecord(w World) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_world_flight_record(w, &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

// Counter is swv_comm_counter.
type Counter struct{ Calls, Bytes int64 }

// NumOpKinds is how many numbers swv_collective_kind has.
const NumOpKinds = len(CollectiveNames)

func counters(fill func(*C.swv_comm_counter, *C.size_t) *C.swv_status) ([]Counter, error) {
	var all [NumOpKinds]C.swv_comm_counter
	var count C.size_t
	if err := result(fill(&all[0], &count)); err != nil {
		return nil, err
	}
	var out []Counter
	for i := 0; i < len(all) && i < int(count); i++ {
		out = append(out, Counter{int64(all[i].calls), int64(all[i].bytes)})
	}
	return out, nil
}

func WorldCounters(w World) ([]Counter, error) {
	return counters(func(to *C.swv_comm_counter, count *C.size_t) *C.swv_status {
		return C.swv_world_counters(w, to, C.size_t(NumOpKinds), count)
	})
}

// ---- Communicators

func CommFree(c Comm) { C.swv_comm_free(c) }

func CommRank(c Comm) (int32, error) {
	var out C.int32_t
	err := result(C.swv_comm_rank(c, &out))
	return int32(out), err
}

func CommSize(c Comm) (int32, error) {
	var out C.int32_t
	err := result(C.swv_comm_size(c, &out))
	return int32(out), err
}

func CommName(c Comm) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_comm_name(c, &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

func CommBackend(c Comm) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_comm_backend(c, &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

func CommWorldRanks(c Comm) ([]int64, error) {
	return ranks(func(to *C.int32_t, capacity C.size_t, count *C.size_t) *C.swv_status {
		return C.swv_comm_world_ranks(c, to, capacity, count)
	})
}

func CommSplit(c Comm, color, key int32, name string) (Comm, error) {
	if err := checkText("name", name); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Comm
	err := result(C.swv_comm_split(c, C.int32_t(color), C.int32_t(key), a.text(name), &out))
	return out, err
}

func CommSubgroup(c Comm, members []int64, name string) (Comm, error) {
	if err := checkText("name", name); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Comm
	err := result(C.swv_comm_subgroup(c, first(rank32s(members)), C.size_t(len(members)), a.text(name), &out))
	return out, err
}

func CommAbort(c Comm, reason string) error {
	var a arena
	defer a.free()
	return result(C.swv_comm_abort(c, a.text(strings.ReplaceAll(reason, "\x00", "?"))))
}

func CommHealth(c Comm) error { return result(C.swv_comm_health(c)) }

func CommCounters(c Comm) ([]Counter, error) {
	return counters(func(to *C.swv_comm_counter, count *C.size_t) *C.swv_status {
		return C.swv_comm_counters(c, to, C.size_t(NumOpKinds), count)
	})
}

// Collective is one operation that waits. Of the fields only those count that the operation has.
type Collective struct {
	Kind                int32
	In, Out             unsafe.Pointer // nil also for no elements
	InCount, OutCount   int64
	HasIn, HasOut       bool // false: NULL
	DType               int32
	InCounts, OutCounts []int64
	Reduce              int32 // or the message's tag
	Root                int32 // or the peer
	Timeout             time.Duration
	Tag                 string
}

func CommRun(c Comm, call *Collective) error {
	if err := checkText("the tag", call.Tag); err != nil {
		return err
	}
	var a arena
	defer a.free()
	counts := len(call.InCounts)
	if counts < len(call.OutCounts) {
		counts = len(call.OutCounts)
	}
	return result(C.swvgo_collective(c, C.swv_collective_kind(call.Kind), bytes(call.In), C.int64_t(call.InCount), bytes(call.Out),
		C.int64_t(call.OutCount), C.swv_dtype(call.DType), int64s(call.InCounts), int64s(call.OutCounts),
		C.size_t(counts), C.int32_t(call.Reduce), C.int32_t(call.Root),
		flag(call.HasIn), flag(call.HasOut), millis(call.Timeout), a.orNull(call.Tag)))
}

// ---- Meshes

// list asks for an array; twice if it is long.
func list[T any](get func(to *T, capacity C.size_t, count *C.size_t) *C.swv_status) ([]T, error) {
	all := make([]T, 8)
	for {
		var count C.size_t
		if err := result(get(first(all), C.size_t(len(all)), &count)); err != nil {
			return nil, err
		}
		if int(count) <= len(all) {
			return all[:count], nil
		}
		all = make([]T, count)
	}
}

func numbers(get func(to *C.int64_t, capacity C.size_t, count *C.size_t) *C.swv_status) ([]int64, error) {
	all, err := list(get)
	return *(*[]int64)(unsafe.Pointer(&all)), err
}

// ranks are numbers that C counts with 32 bits.
func ranks(get func(to *C.int32_t, capacity C.size_t, count *C.size_t) *C.swv_status) ([]int64, error) {
	all, err := list(get)
	if err != nil {
		return nil, err
	}
	wide := make([]int64, len(all))
	for i, rank := range all {
		wide[i] = int64(rank)
	}
	return wide, nil
}

// rank32s are ranks as C counts them; what is no rank in 32 bits is none there either.
func rank32s(all []int64) []C.int32_t {
	narrow := make([]C.int32_t, len(all))
	for i, rank := range all {
		narrow[i] = rank32(rank)
	}
	return narrow
}

func rank32(rank int64) C.int32_t {
	if int64(int32(rank)) != rank {
		return math.MinInt32
	}
	return C.int32_t(rank)
}

func MeshCreate(w World, names []string, sizes, ranks []int64) (Mesh, error) {
	if err := checkText("a name", names...); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Mesh
	err := result(C.swvgo_mesh_create(w, a.list(names), int64s(sizes), C.size_t(len(sizes)), first(rank32s(ranks)),
		C.size_t(len(ranks)), &out))
	return out, err
}

func MeshParse(w World, description string) (Mesh, error) {
	if err := checkText("text", description); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Mesh
	err := result(C.swv_mesh_parse(w, a.text(description), &out))
	return out, err
}

func MeshFree(m Mesh) { C.swv_mesh_free(m) }

func MeshShare(m Mesh) (Mesh, error) {
	var out Mesh
	err := result(C.swv_mesh_share(m, &out))
	return out, err
}

func MeshSlice(m Mesh, names []string) (Mesh, error) {
	if err := checkText("a name", names...); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Mesh
	err := result(C.swvgo_mesh_slice(m, a.list(names), C.size_t(len(names)), &out))
	return out, err
}

func MeshFlatten(m Mesh, names []string, newName string) (Mesh, error) {
	if err := checkText("a name", append([]string{newName}, names...)...); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Mesh
	err := result(C.swvgo_mesh_flatten(m, a.list(names), C.size_t(len(names)), a.orNull(newName), &out))
	return out, err
}

func MeshUnflatten(m Mesh, name string, names []string, sizes []int64) (Mesh, error) {
	if err := checkText("a name", append([]string{name}, names...)...); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Mesh
	err := result(C.swvgo_mesh_unflatten(m, a.text(name), a.list(names), int64s(sizes), C.size_t(len(sizes)), &out))
	return out, err
}

func MeshShape(m Mesh) ([]int64, error) {
	return numbers(func(to *C.int64_t, capacity C.size_t, count *C.size_t) *C.swv_status {
		return C.swv_mesh_shape(m, to, capacity, count)
	})
}

func MeshCoordinate(m Mesh) ([]int64, error) {
	return numbers(func(to *C.int64_t, capacity C.size_t, count *C.size_t) *C.swv_status {
		return C.swv_mesh_coordinate(m, to, capacity, count)
	})
}

func MeshRanks(m Mesh) ([]int64, error) {
	return ranks(func(to *C.int32_t, capacity C.size_t, count *C.size_t) *C.swv_status {
		return C.swv_mesh_ranks(m, to, capacity, count)
	})
}

func MeshDimName(m Mesh, dim int32) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_mesh_dim_name(m, C.int32_t(dim), &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

func MeshFindDim(m Mesh, name string) (int32, error) {
	if err := checkText("dim", name); err != nil {
		return 0, err
	}
	var a arena
	defer a.free()
	var out C.int32_t
	err := result(C.swv_mesh_find_dim(m, a.text(name), &out))
	return int32(out), err
}

func MeshComm(m Mesh, dim int32) (Comm, error) {
	var out Comm
	err := result(C.swv_mesh_comm(m, C.int32_t(dim), &out))
	return out, err
}

func MeshConnect(m Mesh) error { return result(C.swv_mesh_connect(m)) }

func MeshToString(m Mesh) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_mesh_to_string(m, &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

func MeshEqual(a, b Mesh) (bool, error) {
	var out C.swv_bool
	err := result(C.swv_mesh_equal(a, b, &out))
	return out != 0, err
}

func MeshForbidCommunication(m Mesh) (Scope, error) {
	var out Scope
	err := result(C.swv_mesh_forbid_communication(m, &out))
	return out, err
}

func ScopeFree(s Scope) { C.swv_scope_free(s) }

func MeshSeed(m Mesh, seed uint64) error { return result(C.swv_mesh_seed(m, C.uint64_t(seed))) }

func MeshRandomState(m Mesh) (seed, offset uint64, err error) {
	var state [2]C.uint64_t
	err = result(C.swvgo_mesh_random_state(m, &state[0]))
	return uint64(state[0]), uint64(state[1]), err
}

func MeshSetRandomState(m Mesh, seed, offset uint64) error {
	return result(C.swvgo_mesh_set_random_state(m, C.uint64_t(seed), C.uint64_t(offset)))
}

func MeshUseRandomState(m Mesh, seed, offset uint64) (Scope, error) {
	var out Scope
	err := result(C.swvgo_mesh_use_random_state(m, C.uint64_t(seed), C.uint64_t(offset), &out))
	return out, err
}

// MeshDispatchCounters: operators, cache misses, implicit redistributions, gathered operators, remembered
// uses, remembered bytes, unsharded weights.
func MeshDispatchCounters(m Mesh) ([7]int64, error) {
	var out [7]int64
	err := result(C.swvgo_mesh_dispatch_counters(m, int64s(out[:])))
	return out, err
}

// MeshCostModel: latency and bandwidth of each of so many dimensions; flops and bandwidth of the device.
func MeshCostModel(m Mesh, dims int) (links [][2]float64, device [2]float64, err error) {
	raw := make([]C.swv_link_cost, dims+1)
	var cost [2]C.double
	err = result(C.swvgo_mesh_cost_model(m, &raw[0], C.size_t(dims), &cost[0]))
	for _, link := range raw[:dims] {
		links = append(links, [2]float64{float64(link.latency), float64(link.bandwidth)})
	}
	return links, [2]float64{float64(cost[0]), float64(cost[1])}, err
}

// MeshMeasureCostModel: JSON.
func MeshMeasureCostModel(m Mesh) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_mesh_measure_cost_model(m, &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

func MeshAddRule(m Mesh, name string, ways []string) error {
	if err := checkText("the operator's name", name); err != nil {
		return err
	}
	if err := checkText("a way", ways...); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swvgo_mesh_add_rule(m, a.text(name), a.list(ways), C.size_t(len(ways))))
}

func MeshSetCostModel(m Mesh, links [][2]float64, device [2]float64) error {
	raw := make([]C.swv_link_cost, len(links)+1)
	for i, link := range links {
		raw[i] = C.swv_link_cost{latency: C.double(link[0]), bandwidth: C.double(link[1])}
	}
	return result(C.swvgo_mesh_set_cost_model(m, &raw[0], C.size_t(len(links)), C.double(device[0]), C.double(device[1])))
}

// MeshSetCostModelFromJSON lets the library refuse text with a NUL: the other ranks hear of it then.
func MeshSetCostModelFromJSON(m Mesh, json string) error {
	if strings.IndexByte(json, 0) >= 0 {
		json = ""
	}
	var a arena
	defer a.free()
	return result(C.swv_mesh_set_cost_model_from_json(m, a.text(json)))
}

// ---- Layouts

func LayoutParse(description string) (Layout, error) {
	if err := checkText("text", description); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Layout
	err := result(C.swv_layout_parse(a.text(description), &out))
	return out, err
}

// LayoutCreateNamed takes mesh dimension, placement, mesh dimension, ...
func LayoutCreateNamed(m Mesh, pairs []string) (Layout, error) {
	if err := checkText("the layout", pairs...); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Layout
	err := result(C.swvgo_layout_create_named(m, a.list(pairs), C.size_t(len(pairs)/2), &out))
	return out, err
}

func LayoutFree(l Layout) { C.swv_layout_free(l) }

func LayoutToString(l Layout) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_layout_to_string(l, &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

func LayoutMeshNDim(l Layout) (int32, error) {
	var out C.int32_t
	err := result(C.swv_layout_mesh_ndim(l, &out))
	return int32(out), err
}

// Placement is swv_placement.
type Placement struct {
	Kind, Dim, ReduceOp int32
	SplitFactor         int64
	Sizes               []int64
}

func LayoutPlacement(l Layout, meshDim int32) (Placement, error) {
	p := C.swvgo_placement()
	if err := result(C.swv_layout_placement(l, C.int32_t(meshDim), &p)); err != nil {
		return Placement{}, err
	}
	out := Placement{int32(p.kind), int32(p.dim), int32(p.reduce_op), int64(p.split_factor), nil}
	for _, size := range unsafe.Slice(p.sizes, int(p.num_sizes)) {
		out.Sizes = append(out.Sizes, int64(size))
	}
	return out, nil
}

func LayoutEqual(a, b Layout) (bool, error) {
	var out C.swv_bool
	err := result(C.swv_layout_equal(a, b, &out))
	return out != 0, err
}

func LayoutLocalExtent(l Layout, meshShape, coordinate, sizes []int64) (shape, offset []int64, err error) {
	shape, offset = make([]int64, len(sizes)), make([]int64, len(sizes))
	err = result(C.swv_layout_local_extent(l, int64s(meshShape), int64s(coordinate), C.size_t(len(meshShape)),
		int64s(sizes), C.size_t(len(sizes)), int64s(shape), int64s(offset)))
	return shape, offset, err
}

func LayoutPlan(from, to Layout, meshShape, sizes []int64, dtype int32) (bytes int64, steps string, err error) {
	var out *C.swv_string
	var count C.int64_t
	if err := result(C.swv_layout_plan(from, to, int64s(meshShape), C.size_t(len(meshShape)), int64s(sizes),
		C.size_t(len(sizes)), C.swv_dtype(dtype), &count, &out)); err != nil {
		return 0, "", err
	}
	return int64(count), text(out), nil
}

func LayoutPicture(l Layout, m Mesh, sizes []int64) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_layout_picture(l, m, int64s(sizes), C.size_t(len(sizes)), &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

// ---- Traces and scopes

func TraceCreate(m Mesh) (Trace, error) {
	var out Trace
	err := result(C.swv_trace_create(m, &out))
	return out, err
}

func TraceFree(t Trace) { C.swv_trace_free(t) }

func TraceClear(t Trace) error { return result(C.swv_trace_clear(t)) }

func TraceNumEvents(t Trace) (int, error) {
	var out C.size_t
	err := result(C.swv_trace_num_events(t, &out))
	return int(out), err
}

func TraceBytes(t Trace) (int64, error) {
	var out C.int64_t
	err := result(C.swv_trace_bytes(t, &out))
	return int64(out), err
}

func TraceToString(t Trace) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_trace_to_string(t, &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

func TraceToJSON(t Trace) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_trace_to_json(t, &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

func MeshEnterSource(m Mesh, source string) (Scope, error) {
	if err := checkText("source", source); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Scope
	err := result(C.swv_mesh_enter_source(m, a.text(source), &out))
	return out, err
}

func MeshEnterModule(m Mesh, name string) (Scope, error) {
	if err := checkText("name", name); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Scope
	err := result(C.swv_mesh_enter_module(m, a.text(name), &out))
	return out, err
}
