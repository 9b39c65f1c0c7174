"""One rank: runs the cases of one operator on plain tensors and on DTensors, and tells how they compare: values,
gradients and, of operators that have them in PyTorch's words (supports_gradgrad), second gradients.

A case is an operator in one of its forms, on one sample, with a layout for each tensor among the arguments:

    for number, case in enumerate(cases(op, mesh=[2, 2], budget=Budget())):
        outcome = run(case)      # Outcome("right") or Outcome("wrong", "output 0: ...")

Cases are a function of the operator, the mesh and the budget: every rank, and a second try, gets the same.
"""

import collections
import dataclasses
import itertools
import json
import random
import warnings
import zlib

import numpy
import torch
from torch.utils._pytree import tree_flatten, tree_map

ours = torch.ops.shardweave_test

# What an operator leaves in memory that it does not fill is nobody's business.
UNINITIALIZED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
    "resize_", "resize_as_",
}


@dataclasses.dataclass(frozen=True)
class Budget:
    """How many cases to make of one operator."""

    cases: int = 48  # of the main dtype; each of the others gets a quarter
    samples: int = 12


# What came of a case. `second` is "compared" where second gradients were, "none" where there are gradients but one
# device cannot differentiate them again.
Outcome = collections.namedtuple("Outcome", "kind details second", defaults=("", ""))


@dataclasses.dataclass
class Reference:
    """What one device gives."""

    error: Exception = None
    outputs: list = None
    gradients: list = None
    cotangents: list = None
    second_cotangents: list = None  # one per gradient; None for one that cannot be differentiated again
    second_gradients: list = None  # of the leaves, then of the cotangents
    repeatable: bool = True


class Sample:
    """One SampleInput as a tree whose tensors are replaced at will."""

    def __init__(self, op, sample, dtype, number):
        self.op, self.dtype, self.number = op, dtype, number
        self.tree = (sample.input, list(sample.args), dict(sample.kwargs))
        self.process = sample.output_process_fn_grad
        self.broadcasts_input = sample.broadcasts_input
        self.tensors = []
        for leaf in tree_flatten(self.tree)[0]:
            if isinstance(leaf, torch.Tensor) and not any(leaf is t for t in self.tensors):
                self.tensors.append(leaf)
        self.references = {}

    def dense(self):
        return all(t.layout == torch.strided and not t.is_quantized for t in self.tensors)

    def tolerance(self):
        """Of second gradients: cov() of doubles is given weights in single precision, whose sums it divides by."""
        return max((TOLERANCES[t.dtype] for t in self.tensors if t.dtype in TOLERANCES), default=0)

    def arguments(self, replacements):
        def replace(leaf):
            for old, new in zip(self.tensors, replacements):
                if leaf is old:
                    return new
            return leaf

        return tree_map(replace, self.tree)

    def plain(self, gradients):
        """Fresh leaves, contiguous like every DTensor that is distributed."""
        return [leaf(t, t.detach().resolve_conj().resolve_neg().contiguous().clone(), gradients)
                for t in self.tensors]

    def sharded(self, layouts, gradients):
        return [leaf(t, distribute(t.detach(), layout), gradients)
                for t, layout in zip(self.tensors, layouts)]

    def reference(self, form):
        if form not in self.references:
            self.references[form] = self._reference(form)
        return self.references[form]

    def _reference(self, form):
        try:
            first = self._plain_run(form, 1, True)
            drops = "dropout" in self.op.full_name or "dropout_p" in self.tree[2]
            few = sum(torch.as_tensor(o).numel() for o in first.outputs) < 8
            seeds = range(2, 20 if drops or few else 3)
            others = [self._plain_run(form, seed, False) for seed in seeds]
        except Exception as error:
            return Reference(error=error)
        first.repeatable = self.op.name not in UNINITIALIZED and all(
            difference(a, b) is None
            for other in others for a, b in zip(first.outputs, other.outputs))
        return first

    def _plain_run(self, form, seed, gradients):
        torch.manual_seed(seed)
        leaves = self.plain(form != "out")
        out = None
        if form == "out":
            outputs = call(self, "function", self.plain(False), None)
            # Of numbers that change with the seed: what an operator leaves unwritten (fft.ihfftn of one
            # dimension does) is then not repeatable.
            out = tree_map(lambda t: torch.full_like(t, seed % 2) if tensor(t) else t, outputs)
        outputs = call(self, form, leaves, out)
        result = Reference(outputs=flat(outputs))
        if gradients and form != "out":
            self._differentiate(result, outputs, needing_gradient(leaves))
        result.outputs = [detached(o) for o in result.outputs]
        return result

    def _differentiate(self, result, outputs, leaves):
        """What cannot be differentiated on one device has nothing to compare with."""
        outputs = differentiable(self, outputs) if leaves else []
        if not outputs:
            return
        cotangents = [w.requires_grad_() for w in weights_of(outputs, 7)]
        try:
            result.gradients = gradients_of(outputs, leaves, cotangents, retain_graph=True)
        except Exception:
            return
        result.cotangents = cotangents
        if not self.op.supports_gradgrad:
            return
        try:
            first = gradients_of(outputs, leaves, cotangents, create_graph=True)
            weights = weights_of(first, 8)
            result.second_gradients = gradients_of(first, leaves + cotangents, weights)
        except Exception:
            return
        result.second_cotangents = weights


def tensor(value):
    return isinstance(value, torch.Tensor)


def detached(value):
    return value.detach() if tensor(value) else value


def flat(outputs):
    return tree_flatten(outputs)[0]


def whole(t):
    return ours.full_tensor(t.detach()) if ours.is_dtensor(t) else t


def leaf(original, value, gradients):
    return value.requires_grad_() if gradients and original.requires_grad else value


def distribute(t, layout):
    return ours.distribute(t.resolve_conj().resolve_neg().contiguous(), layout)


def call(sample, form, leaves, out):
    """The operator's results; in place, the changed tensor as well."""
    first, args, kwargs = sample.arguments(leaves)
    if form == "function":
        return sample.op.op(first, *args, **kwargs)
    if form == "inplace":
        changed = tree_map(lambda t: t.clone() if tensor(t) else t, first)
        result = sample.op.inplace_variant(changed, *args, **kwargs)
        return result, changed
    sample.op.op(first, *args, **kwargs, out=out)
    return out


def needing_gradient(tensors):
    return [x for x in tensors if x.requires_grad]


def differentiable(sample, outputs):
    if sample.process is not None:
        outputs = sample.process(outputs)
    return needing_gradient(filter(tensor, flat(outputs)))


def weights_of(tensors, seed):
    """Random numbers for each that can be differentiated, None for the others."""
    generator = torch.Generator().manual_seed(seed)

    def weight(t):
        if t is None or not t.requires_grad:
            return None
        kind = torch.complex128 if t.is_complex() else torch.float64
        return torch.randn(t.shape, generator=generator, dtype=kind).to(t.dtype)

    return [weight(t) for t in tensors]


def gradients_of(outputs, leaves, weights, **graph):
    """Of those outputs that have a weight."""
    of = [(o, w) for o, w in zip(outputs, weights) if w is not None]
    return torch.autograd.grad([o for o, _ in of], leaves, [w for _, w in of], allow_unused=True, **graph)


# --- comparison ------------------------------------------------------------------------------------

TOLERANCES = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-4,
              torch.complex64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


def difference(expected, actual, coarsest=0):
    """None, or what is different. `coarsest`: the tolerance of the coarsest number that it is made of."""
    if not tensor(expected):
        if tensor(actual):
            return "a tensor, wanted %r" % (expected,)
        if expected == actual or (expected != expected and actual != actual):
            return None
        if isinstance(expected, (float, complex)) and abs(expected - actual) <= 1e-7 * abs(expected):
            return None
        return "%r, wanted %r" % (actual, expected)
    if not tensor(actual):
        return "%r, wanted a tensor" % (actual,)
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return "%s %s, wanted %s %s" % (
            actual.dtype, list(actual.shape), expected.dtype, list(expected.shape))
    if expected.layout != actual.layout:
        return "%s, wanted %s" % (actual.layout, expected.layout)
    if expected.layout != torch.strided:
        expected, actual = expected.to_dense(), actual.to_dense()
    if expected.dtype not in TOLERANCES:
        wrong = int((expected != actual).sum())
        return "%d of %d elements" % (wrong, expected.numel()) if wrong else None
    expected, actual = expected.detach(), actual.detach()
    finite = expected.abs()[expected.isfinite()]
    tolerance = max(TOLERANCES[expected.dtype], coarsest)
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    close = torch.isclose(actual, expected, tolerance, tolerance * scale, equal_nan=True)
    wrong = int((~close).sum())
    if not wrong:
        return None
    worst = (actual - expected).abs()[~close].max()
    return "%d of %d elements, by up to %.3g" % (wrong, expected.numel(), float(worst))


# --- cases -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    sample: Sample
    form: str
    layouts: list  # one per tensor
    out_layout: str  # of outputs of out=, and of the cotangents
    second_layout: str  # of the cotangents of the gradients

    def __str__(self):
        shapes = ", ".join("%s%s" % (list(t.shape), layout)
                           for t, layout in zip(self.sample.tensors, self.layouts))
        return "%s %s sample %d: %s" % (
            str(self.sample.dtype)[6:], self.form, self.sample.number, shapes)


def dtypes_of(op):
    """The main one first."""
    known = op.dtypes
    wide = [torch.float64, torch.float32, torch.bfloat16]
    floats = [d for d in wide if d in known][:1]
    others = [d for d in (torch.complex128, torch.int64, torch.bool) if d in known]
    return floats + others


def placements_of(t, partial):
    return (["R"] + ["S(%d)" % d for d in range(t.dim())]
            + (["P"] if partial and (t.is_floating_point() or t.is_complex()) else []))


def layouts_of(sample, mesh, count, seed):
    """Lists of a layout per tensor: all cut by the first dimension, by the last one, all Partial; then mixed."""
    def fit(t, wanted):
        options = placements_of(t, True)
        return "[%s]" % ", ".join(p if p in options else "R" for p in wanted(t))

    dims = len(mesh)
    patterns = [
        lambda t: ["S(0)"] * dims,
        lambda t: ["S(%d)" % (t.dim() - 1)] * dims,
        lambda t: ["P"] * dims,
    ]
    chosen = []
    for pattern in patterns[:count]:
        layouts = [fit(t, pattern) for t in sample.tensors]
        if layouts not in chosen:
            chosen.append(layouts)
    mix = random.Random(seed)
    for _ in range(4 * count):
        if len(chosen) >= count:
            break
        layouts = ["[%s]" % ", ".join(mix.choice(placements_of(t, True)) for _ in mesh)
                   for t in sample.tensors]
        if layouts not in chosen:
            chosen.append(layouts)
    return chosen


def samples_of(op, dtype, limit):
    torch.manual_seed(11)
    numpy.random.seed(11)
    random.seed(11)
    gradients = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    all_samples = list(op.sample_inputs("cpu", dtype, requires_grad=gradients))
    if len(all_samples) > limit:
        step = (len(all_samples) - 1) / (limit - 1)
        all_samples = [all_samples[round(i * step)] for i in range(limit)]
    return [Sample(op, s, dtype, n) for n, s in enumerate(all_samples)]


def forms_of(op, sample):
    yield "function"
    if op.inplace_variant is not None and not sample.broadcasts_input:
        yield "inplace"
    if op.supports_out and "out" not in sample.tree[2]:
        yield "out"


def cases(op, mesh, budget):
    for k, dtype in enumerate(dtypes_of(op)):
        limit = budget.cases if k == 0 else max(4, budget.cases // 4)
        samples = samples_of(op, dtype, min(budget.samples, limit))
        samples = [s for s in samples if s.tensors and s.dense()]
        if not samples:
            continue
        each = max(2, limit // len(samples))
        for sample in samples:
            for form in forms_of(op, sample):
                seed = zlib.crc32(repr((op.full_name, k, sample.number, form)).encode())
                count = each if form == "function" else max(1, each // 3)
                for n, layouts in enumerate(layouts_of(sample, mesh, count, seed)):
                    out = ["R", "S(0)", "P"]
                    yield Case(sample, form, layouts, out[(n + seed) % 3], out[(n + seed // 3) % 3])


def out_layout(t, placement, mesh):
    options = placements_of(t, True)
    return "[%s]" % ", ".join([placement if placement in options else "R"] * len(mesh))


def run(case, mesh):
    """The Outcome; None if one device cannot do it either and it is no case."""
    sample, form = case.sample, case.form
    expected = sample.reference(form)
    if expected.error is not None and form != "function":
        return None
    torch.manual_seed(1)
    try:
        leaves = sample.sharded(case.layouts, form != "out")
        out = None
        if form == "out":
            sharded_out = [distribute(torch.zeros_like(o), out_layout(o, case.out_layout, mesh))
                           if tensor(o) else o for o in expected.outputs]
            structure = tree_flatten(call(sample, "function", sample.plain(False), None))[1]
            out = torch.utils._pytree.tree_unflatten(sharded_out, structure)
        outputs = call(sample, form, leaves, out)
    except Exception as error:
        if expected.error is not None:
            return Outcome("right")
        return Outcome("error", text_of(error))
    if expected.error is not None:
        return Outcome("wrong", "no error; one device says: " + text_of(expected.error))
    # All collectives first: ranks that see different numbers still do the same.
    try:
        actual = flat(outputs)
        gathered = [whole(o) if tensor(o) else o for o in actual]
    except Exception as error:
        return Outcome("error", "the result cannot be gathered: " + text_of(error))
    gradients, again, failed = differentiate(case, mesh, expected, outputs, leaves)
    found = differences(expected, actual, gathered)
    if found is not None:
        return Outcome("wrong", found)
    if expected.gradients is None:
        return Outcome("right")
    second = "none" if expected.second_gradients is None else ""
    if gradients is None:
        return Outcome("gradient error", text_of(failed), second)
    if not expected.repeatable:
        return Outcome("right" if failed is None else "second gradient error",
                       text_of(failed) if failed else "", second)
    found = gradient_differences(expected.gradients, gradients)
    if found is not None:
        return Outcome("wrong gradient", found, second)
    if failed is not None:
        return Outcome("second gradient error", text_of(failed), second)
    if again is None:
        return Outcome("right", "", second)
    first, again = again
    found = gradient_differences(expected.gradients, first)
    if found is not None:
        return Outcome("wrong second gradient", "with create_graph, %s" % found, "compared")
    found = gradient_differences(expected.second_gradients, again, sample.tolerance())
    if found is not None:
        return Outcome("wrong second gradient", "of %d leaves, then of cotangents: %s" % (
            len(expected.gradients), found), "compared")
    return Outcome("right", "", "compared")


def differentiate(case, mesh, expected, outputs, leaves):
    """(gradients, (gradients with create_graph, second gradients), what was raised): None where there is none."""
    gradients = again = None
    if expected.gradients is None:
        return gradients, again, None
    try:
        leaves = needing_gradient(leaves)
        outputs = differentiable(case.sample, outputs)
        cotangents = [distribute(c.detach(), out_layout(c, case.out_layout, mesh)).requires_grad_()
                      for c in expected.cotangents]
        if len(outputs) != len(cotangents):
            raise AssertionError("%d differentiable results, wanted %d" % (len(outputs), len(cotangents)))
        found = gradients_of(outputs, leaves, cotangents, retain_graph=True)
        gradients = [g if g is None else whole(g) for g in found]
        if expected.second_gradients is None:
            return gradients, again, None
        found = gradients_of(outputs, leaves, cotangents, create_graph=True)
        first = [g if g is None else whole(g) for g in found]
        weights = []
        for k, (g, w) in enumerate(zip(found, expected.second_cotangents)):
            if w is not None and (g is None or not g.requires_grad):
                raise AssertionError("gradient %d cannot be differentiated" % k)
            spread = w is not None and ours.is_dtensor(g)
            weights.append(distribute(w, out_layout(w, case.second_layout, mesh)) if spread else w)
        found = gradients_of(found, leaves + cotangents, weights)
        again = first, [g if g is None else whole(g) for g in found]
    except Exception as error:
        return gradients, again, error
    return gradients, again, None


def differences(expected, actual, gathered):
    if len(actual) != len(expected.outputs):
        return "%d results, wanted %d" % (len(actual), len(expected.outputs))
    # (A plain tensor, as LibTorch makes of nothing here and there, is right if it is on all ranks.)
    for k, (want, got) in enumerate(zip(expected.outputs, gathered)):
        found = None
        if expected.repeatable or not tensor(want) or not tensor(got):
            found = difference(want, got)
        elif (got.shape, got.dtype) != (want.shape, want.dtype):
            found = "another shape or dtype"
        if found is not None:
            return "output %d: %s" % (k, found)
    return None


def gradient_differences(expected, gradients, coarsest=0):
    # (A plain tensor is right too: some formulas make a new one, of zeros for instance; finish_grad_sync takes it.)
    for k, (want, got) in enumerate(zip(expected, gradients)):
        if got is None:
            if want is not None and bool(want.any()):
                return "gradient %d: none" % k
            continue
        found = difference(torch.zeros_like(got) if want is None else want, got, coarsest)
        if found is not None:
            return "gradient %d: %s" % (k, found)
    return None


def text_of(error):
    return ("%s: %s" % (type(error).__name__, error)).strip()[:600]


def main(op, mesh, rank, world_size, store, first, budget, timeout, report):
    """Runs the cases from number `first` on; tells about each by report(json)."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ours.join(store, rank, world_size, mesh, timeout)

    def tell(*what):
        report(json.dumps(what))

    number = 0
    for number, case in enumerate(itertools.islice(cases(op, mesh, budget), first, None), first):
        tell("start", number, str(case), case.form, case.sample.dtype == torch.float64)
        gathered = ours.gathered_operators()
        outcome = run(case, mesh)
        gathered = ours.gathered_operators() > gathered
        tell("end", number, outcome, gathered)
        try:
            everyone = ours.gather_numbers([number, outcome is not None and "error" in outcome[0]])
        except Exception as error:
            tell("apart", number, text_of(error))
            return
        if len(set(everyone[1::2])) > 1:  # perhaps one rank is still owed an answer by another
            tell("apart", number, "an error on some ranks only")
            return
    tell("done")
