#!/usr/bin/env python3
"""Drives libshardweave.so with nothing but Python's standard library.

Four ranks, each a thread of Python, make a mesh and sharded tensors and call operators by name, forward and backward. Each
operator is called on plain tensors too; both have to give the same results and gradients.

    ctypes_test.py PATH/TO/libshardweave.so
"""

import ctypes as c
import random
import sys
import threading

RANKS = 4
GRAD, NO_GRAD = 0, 1
F32, I64 = 1, 10
NONE, TENSOR, BOOL, INT, FLOAT, STRING, TENSORS, INTS = 0, 2, 3, 4, 5, 7, 10, 12

lib = c.CDLL(sys.argv[1])


class List(c.Structure):
    _fields_ = [("data", c.c_void_p), ("size", c.c_size_t)]


class As(c.Union):
    _fields_ = [("tensor", c.c_void_p), ("integer", c.c_int64), ("number", c.c_double), ("list", List)]


class Value(c.Structure):
    """swv_value"""
    _fields_ = [("kind", c.c_int32), ("reserved", c.c_int32), ("as_", As)]


class MeshDim(c.Structure):
    """swv_mesh_dim"""
    _fields_ = [("name", c.c_char_p), ("size", c.c_int64)]


class TensorOptions(c.Structure):
    """swv_tensor_options"""
    _fields_ = [("struct_size", c.c_size_t), ("dtype", c.c_int32), ("requires_grad", c.c_int32),
                ("device_type", c.c_int32), ("device_index", c.c_int32), ("mesh", c.c_void_p), ("layout", c.c_void_p)]


for function in ("swv_status_message", "swv_code_name", "swv_string_data", "swv_build_info"):
    getattr(lib, function).restype = c.c_char_p
for function in ("swv_status_free", "swv_tensor_free", "swv_op_free", "swv_mesh_free", "swv_world_free", "swv_layout_free",
                 "swv_value_clear"):
    getattr(lib, function).restype = None
lib.swv_live_handles.restype = c.c_int64


class Failed(Exception):
    """A status."""


def call(name, *arguments):
    """Calls a function that returns a status; pointers that are not ctypes objects are passed as such."""
    function = getattr(lib, name)
    function.restype = c.c_void_p
    status = function(*[c.c_void_p(a) if isinstance(a, int) or a is None else a for a in arguments])
    if status:
        message = lib.swv_status_message(c.c_void_p(status)).decode()
        lib.swv_status_free(c.c_void_p(status))
        raise Failed(message)


def made(name, *arguments):
    """The handle that a function writes to its last argument."""
    out = c.c_void_p()
    call(name, *arguments, c.byref(out))
    return out.value


class Tensor:
    """Owns a swv_tensor."""

    def __init__(self, handle):
        self.handle = handle

    def __del__(self):
        lib.swv_tensor_free(c.c_void_p(self.handle))

    @staticmethod
    def from_list(values, sizes, dtype=F32):
        data = ((c.c_float if dtype == F32 else c.c_int64) * len(values))(*values)
        options = TensorOptions(c.sizeof(TensorOptions), dtype, 0, 0, 0, None, None)
        return Tensor(made("swv_tensor_from_data", c.cast(data, c.c_void_p), c.c_size_t(c.sizeof(data)),
                           (c.c_int64 * len(sizes))(*sizes), c.c_size_t(len(sizes)), c.byref(options)))

    def distribute(self, mesh, layout):
        parsed = made("swv_layout_parse", c.c_char_p(layout.encode()))
        try:
            return Tensor(made("swv_tensor_distribute", self.handle, mesh, parsed, None))
        finally:
            lib.swv_layout_free(c.c_void_p(parsed))

    def requires_grad(self):
        call("swv_tensor_set_requires_grad", self.handle, c.c_int32(1))
        return self

    def grad(self):
        handle = made("swv_tensor_grad", self.handle)
        return Tensor(handle) if handle else None

    def is_float(self):
        dtype = c.c_int32()
        call("swv_tensor_dtype", self.handle, c.byref(dtype))
        return dtype.value == F32

    def is_sharded(self):
        sharded = c.c_int32()
        call("swv_tensor_is_sharded", self.handle, c.byref(sharded))
        return sharded.value == 1

    def to_list(self):
        whole = Tensor(made("swv_tensor_full_tensor", self.handle, c.c_int32(NO_GRAD)))
        numel = c.c_int64()
        call("swv_tensor_numel", whole.handle, c.byref(numel))
        data = (c.c_float * numel.value)()
        call("swv_tensor_copy_to_host", whole.handle, c.cast(data, c.c_void_p), c.c_size_t(c.sizeof(data)))
        return list(data)


def value(x, keep):
    """x as a swv_value; what it points to is kept alive in `keep`."""
    if x is None:
        return Value(NONE)
    if isinstance(x, Tensor):
        return Value(TENSOR, 0, As(tensor=x.handle))
    if isinstance(x, bool):
        return Value(BOOL, 0, As(integer=int(x)))
    if isinstance(x, int):
        return Value(INT, 0, As(integer=x))
    if isinstance(x, float):
        return Value(FLOAT, 0, As(number=x))
    if isinstance(x, str):
        text = x.encode()
        keep.append(text)
        return Value(STRING, 0, As(list=List(c.cast(c.c_char_p(text), c.c_void_p), len(text))))
    if x and isinstance(x[0], Tensor):
        data = (c.c_void_p * len(x))(*[t.handle for t in x])
        keep.append(data)
        return Value(TENSORS, 0, As(list=List(c.cast(data, c.c_void_p), len(x))))
    data = (c.c_int64 * len(x))(*x)
    keep.append(data)
    return Value(INTS, 0, As(list=List(c.cast(data, c.c_void_p), len(x))))


ops = {}
ops_lock = threading.Lock()


def operator(name):
    with ops_lock:
        if name not in ops:
            ops[name] = made("swv_op_find", c.c_char_p(name.encode()))
        return ops[name]


def run(name, arguments, names=(), mode=GRAD):
    """Calls an operator; the results are a list of tensors."""
    keep = []
    values = (Value * len(arguments))(*[value(a, keep) for a in arguments])
    results, count = (Value * 8)(), c.c_size_t()
    call("swv_op_call_named", operator(name), c.c_int32(mode), values, c.c_size_t(len(arguments)),
         (c.c_char_p * len(names))(*[n.encode() for n in names]), c.c_size_t(len(names)), results, c.c_size_t(8),
         c.byref(count))
    tensors = []
    for result in results[:count.value]:
        if result.kind == TENSOR:
            tensors.append(Tensor(result.as_.tensor))
        elif result.kind == TENSORS:
            handles = c.cast(result.as_.list.data, c.POINTER(c.c_void_p))
            for i in range(result.as_.list.size):
                tensors.append(Tensor(handles[i]))
                handles[i] = None
            lib.swv_value_clear(c.byref(result))
    return tensors


# Inputs by name: (sizes, layout). All are floats between 0.5 and 1.5, but `i` and `j`: rows of x.
INPUTS = {
    "x": ([7, 5], "[S(0), R]"),
    "y": ([7, 5], "[S(0), S(1)]"),
    "z": ([7, 5], "[R, S(0)]"),
    "w": ([3, 5], "[R, S(0)]"),
    "b": ([3], "[R, S(0)]"),
    "m": ([5, 6], "[R, S(1)]"),
    "v": ([5], "[R, R]"),
    "p": ([2, 3, 4], "[S(1), R]"),
    "q": ([2, 4, 3], "[R, S(0)]"),
    "g": ([5], "[R, R]"),
    "e": ([11, 5], "[S(0), R]"),
}
INTEGERS = {"i": ([4], "[S(0), R]", [6, 0, 3, 3]), "t": ([7], "[S(0), R]", [0, 4, 2, 1, 3, 3, 0])}

# (operator, arguments); a string that is an input's name is that input.
CASES = [
    ("aten::add.Tensor", ["x", "y"]), ("aten::sub.Tensor", ["x", "z"]), ("aten::mul.Tensor", ["x", "y"]),
    ("aten::div.Tensor", ["x", "z"]), ("aten::add", ["x", 2]), ("aten::mul", ["y", 0.5]), ("aten::neg", ["x"]),
    ("aten::exp", ["x"]), ("aten::log", ["y"]), ("aten::sqrt", ["z"]), ("aten::rsqrt", ["x"]), ("aten::tanh", ["y"]),
    ("aten::sigmoid", ["x"]), ("aten::relu", ["x"]), ("aten::gelu", ["y"]), ("aten::silu", ["z"]), ("aten::sin", ["x"]),
    ("aten::cos", ["x"]), ("aten::abs", ["y"]), ("aten::pow.Tensor_Scalar", ["x", 3]), ("aten::pow.Tensor_Tensor", ["x", "y"]),
    ("aten::clamp", ["x", 0.7, 1.2]), ("aten::where.self", [None, "x", "z"]), ("aten::maximum", ["x", "y"]),
    ("aten::sum", ["x"]), ("aten::sum.dim_IntList", ["y", [0], True]), ("aten::mean.dim", ["x", [1]]), ("aten::mean", ["z"]),
    ("aten::amax", ["x", [1]]), ("aten::max.dim", ["y", 0]), ("aten::var.correction", ["x", [1]]), ("aten::prod", ["g"]),
    ("aten::cumsum", ["x", 1]), ("aten::norm.Scalar", ["x", 2]), ("aten::logsumexp", ["x", [1]]),
    ("aten::mm", ["x", "m"]), ("aten::matmul", ["x", "v"]), ("aten::bmm", ["p", "q"]), ("aten::linear", ["x", "w", "b"]),
    ("aten::addmm", ["b", "x", "wt"]), ("aten::t", ["x"]), ("aten::transpose.int", ["p", 0, 2]), ("aten::permute", ["p", [2, 0, 1]]),
    ("aten::view", ["p", [6, 4]]), ("aten::reshape", ["x", [5, 7]]), ("aten::unsqueeze", ["x", 1]), ("aten::expand", ["v", [3, 5]]),
    ("aten::slice.Tensor", ["x", 0, 1, 6]), ("aten::select.int", ["y", 1, 2]), ("aten::cat", [["x", "y", "z"], 1]),
    ("aten::stack", [["x", "y"]]), ("aten::split.Tensor", ["x", 3]), ("aten::index_select", ["x", 0, "i"]),
    ("aten::embedding", ["e", "i"]), ("aten::softmax.int", ["x", 1]), ("aten::log_softmax.int", ["z", 1]),
    ("aten::layer_norm", ["x", [5], "g", "v"]), ("aten::mse_loss", ["x", "y"]), ("aten::cross_entropy_loss", ["x", "t"]),
    ("aten::flip", ["x", [1]]),
]


def data_of(name):
    sizes = INPUTS[name][0]
    generator = random.Random(name)
    count = 1
    for size in sizes:
        count *= size
    return [generator.uniform(0.5, 1.5) for _ in range(count)]


def inputs_for(mesh):
    """All inputs, plain (mesh None) or sharded."""
    tensors = {}
    for name, (sizes, layout) in INPUTS.items():
        plain = Tensor.from_list(data_of(name), sizes)
        tensors[name] = (plain.distribute(mesh, layout) if mesh else plain).requires_grad()
    for name, (sizes, layout, values) in INTEGERS.items():
        plain = Tensor.from_list(values, sizes, I64)
        tensors[name] = plain.distribute(mesh, layout) if mesh else plain
    return tensors


def evaluate(name, arguments, mesh):
    """(results, gradients) of one operator."""
    tensors = inputs_for(mesh)

    def resolve(a):
        if isinstance(a, str):
            return run("aten::t", [tensors["w"]])[0] if a == "wt" else tensors[a]
        if isinstance(a, list):
            return [resolve(e) for e in a]
        return a

    resolved = [resolve(a) for a in arguments]
    if name == "aten::where.self":
        resolved[0] = run("aten::gt.Tensor", [tensors["x"], tensors["z"]])[0]
    results = [r for r in run(name, resolved) if r.is_float()]
    if mesh:
        assert all(r.is_sharded() for r in results), name
    total = None
    for result in results:  # not the plain sum: of a softmax that is a constant
        term = run("aten::sum", [run("aten::mul.Tensor", [result, run("aten::sin", [result])[0]])[0]])[0]
        total = term if total is None else run("aten::add.Tensor", [total, term])[0]
    call("swv_tensor_backward", total.handle, None, None)
    grads = {n: t.grad() for n, t in tensors.items()}
    return [r.to_list() for r in results], {n: g.to_list() for n, g in grads.items() if g is not None}


def check_close(what, got, wanted):
    assert len(got) == len(wanted), f"{what}: {len(got)} elements instead of {len(wanted)}"
    for a, b in zip(got, wanted):
        assert abs(a - b) <= 2e-4 * (1 + abs(b)), f"{what}: {a} instead of {b}"


errors = []


def rank_main(rank, world, expected):
    try:
        dims = (MeshDim * 2)(MeshDim(b"dp", 2), MeshDim(b"tp", 2))
        mesh = made("swv_mesh_create", world, dims, c.c_size_t(2))
        for name, arguments in CASES:
            try:
                results, grads = evaluate(name, arguments, mesh)
                wanted_results, wanted_grads = expected[name, str(arguments)]
                assert len(results) == len(wanted_results), name
                for i, (got, wanted) in enumerate(zip(results, wanted_results)):
                    check_close(f"{name}: result {i}", got, wanted)
                assert grads.keys() == wanted_grads.keys(), f"{name}: gradients of {sorted(grads)}, not {sorted(wanted_grads)}"
                for input_name, wanted in wanted_grads.items():
                    check_close(f"{name}: gradient of {input_name}", grads[input_name], wanted)
            except (AssertionError, Failed) as error:
                raise AssertionError(f"{name} {arguments}: {error}") from error
        lib.swv_mesh_free(c.c_void_p(mesh))
    except BaseException as error:  # the others must not wait
        errors.append(f"rank {rank}: {error}")
        call("swv_world_abort", world, c.c_char_p(f"rank {rank}: {error}".encode()))
    finally:
        lib.swv_world_free(c.c_void_p(world))


def main():
    print(lib.swv_build_info().decode())
    call("swv_set_num_threads", c.c_int32(1))
    assert len({name for name, _ in CASES}) >= 50, len({name for name, _ in CASES})
    expected = {(name, str(arguments)): evaluate(name, arguments, None) for name, arguments in CASES}
    worlds = (c.c_void_p * RANKS)()
    call("swv_world_create_local", c.c_int32(RANKS), None, worlds)
    threads = [threading.Thread(target=rank_main, args=(r, worlds[r], expected)) for r in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handle in ops.values():
        lib.swv_op_free(c.c_void_p(handle))
    if errors:
        sys.exit("\n".join(errors))
    try:
        made("swv_op_find", c.c_char_p(b"aten::mul_tensor"))
        sys.exit("an operator that is not there was found")
    except Failed as error:
        assert "there is no operator 'aten::mul_tensor'" in str(error), error
    print(f"{len(CASES)} calls of {len({n for n, _ in CASES})} operators, forward and backward, on {RANKS} ranks: as on one")


if __name__ == "__main__":
    main()
