"""Cases for the operator, run three ways: ours, PyTorch's operations one by one in the same precision, the same in fp64.

The rule of tolerance, stated once: the error of ours against fp64 is at most twice that of PyTorch's unfused operations on the
same inputs in the same precision, plus a small absolute term.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from itertools import combinations, product
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ops import Norm, checks, dropout, dropout_mask, kit, norm_fn
from ops.philox import keep_scale
from ops.reference import NORMS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEED = 20_240_229_123_456_789
KERNELS = ("norm_forward_kernel", "norm_backward_kernel", "finish_weight_gradients_kernel")


@dataclass(frozen=True)
class Case:
    norm: Norm = Norm.layernorm
    x: torch.dtype = BF16
    residual: torch.dtype | None = FP32
    x1: torch.dtype | None = None
    second: bool = False  # weight1 and bias1
    weight: torch.dtype | None = FP32
    bias: bool = True
    rowscale: str = "none"  # none, fixed, learned
    dropout_p: float = 0.0
    branch: Norm | None = None  # with a weight, and where bias says so a bias; x1 is then left out
    residual_scale: float = 1.0
    zero_centered: bool = False
    prenorm: bool = True
    residual_in_fp32: bool = False
    out: torch.dtype | None = None
    uneven: bool = False  # rows differ in scale and mean
    m: int = 5
    n: int = 40


# In this order the few cases of `offline` meet every kind of tile with both norms, with and without dropout.
OPTIONS: dict[str, list] = {
    "second": [False, True], "x": [BF16, FP32], "x1": [None, BF16, FP32], "rowscale": ["none", "fixed", "learned"],
    "bias": [True, False], "dropout_p": [0.0, 0.1], "weight": [FP32, BF16, None], "residual": [None, BF16, FP32],
    "norm": list(Norm), "prenorm": [True, False],
}  # fmt: skip


def pairwise(**options: list) -> list[Case]:
    """Few cases in which every pair of values of every two options occurs together."""
    return [Case(**chosen) for chosen in covering(**options)]


def covering(**options: list) -> list[dict]:
    """A value for each option, so chosen that every two values of two options occur together (greedy covering array)."""
    names = list(options)
    uncovered = {
        ((a, i), (b, j))
        for a, b in combinations(range(len(names)), 2)
        for i, j in product(range(len(options[names[a]])), range(len(options[names[b]])))
    }
    cases = []
    while uncovered:
        chosen = dict(min(uncovered))
        for k in range(len(names)):
            if k not in chosen:
                chosen[k] = max(
                    range(len(options[names[k]])),
                    key=lambda v: (sum(tuple(sorted(((k, v), pair))) in uncovered for pair in chosen.items()), -v),
                )
        uncovered -= set(combinations(sorted(chosen.items()), 2))
        cases.append({names[k]: options[names[k]][v] for k, v in chosen.items()})
    return cases


def describe(case: Case) -> str:
    short = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
    values = [(f.name, getattr(case, f.name)) for f in fields(Case) if getattr(case, f.name) != f.default]
    said = [f"{name}={value.name if isinstance(value, Norm) else short.get(value, value)}" for name, value in values]
    return "-".join(said) or "default"


def inputs(case: Case, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(case.m * 1000 + case.n)

    def tensor(shape, dtype, scale=1.0, shift=0.0, grad=True):
        values = torch.randn(shape, generator=generator) * scale + shift
        return values.to(device, dtype).requires_grad_(grad)

    m, n = case.m, case.n
    scale, shift = 1.0, 0.3
    if case.uneven:
        scale, shift = torch.randn(2, m, 1, generator=generator).exp()
    tensors = {"x": tensor((m, n), case.x, scale, shift)}
    if case.residual is not None:
        tensors["residual"] = tensor((m, n), case.residual, 2.0 * scale)
    if case.x1 is not None and case.branch is None:
        tensors["x1"] = tensor((m, n), case.x1)
    for i in ("", "1") if case.second else ("",):
        if case.weight is not None:
            tensors[f"weight{i}"] = tensor(n, case.weight, 0.3, 0.0 if case.zero_centered else 1.0)
            tensors[f"weight{i}"].data[0] = -1.0 if case.zero_centered else 0.0  # x̂ can't be recovered from y there
        if case.bias:
            tensors[f"bias{i}"] = tensor(n, case.weight or FP32, 0.3)
    if case.branch is not None:
        if case.weight is not None:
            tensors["branch_weight"] = tensor(n, case.weight, 0.3, 0.0 if case.zero_centered else 1.0)
        if case.bias:
            tensors["branch_bias"] = tensor(n, case.weight or FP32, 0.3)
    for name, kind in (("scalars", case.norm), ("branch_scalars", case.branch)):
        if kind is not None and kind.scalars:
            tensors[name] = tensor(kind.scalars, case.weight or FP32, 0.1, 0.5)
    if case.rowscale != "none":
        for i in ("", "1") if "x1" in tensors else ("",):
            tensors[f"rowscale{i}"] = tensor(m, FP32, 0.5, 1.0, grad=case.rowscale == "learned")
    return tensors


def arguments(case: Case) -> dict:
    return {  # eps is so large that it must not be forgotten anywhere
        "norm": case.norm, "branch_norm": case.branch, "residual_scale": case.residual_scale,
        "eps": 0.1, "dropout_p": case.dropout_p, "prenorm": case.prenorm, "seed": SEED,
        "residual_in_fp32": case.residual_in_fp32, "zero_centered_weight": case.zero_centered, "out_dtype": case.out,
    }  # fmt: skip


@contextmanager
def reference_path():
    """Calls take the PyTorch reference, whatever the device."""
    kit.forget()
    with ExitStack() as stack:
        for module in (checks, dropout):
            stack.enter_context(mock.patch.object(module, "runs_kernels", return_value=False))
        yield
    kit.forget()


def unfused(
    norm, x, weight=None, bias=None, residual=None, x1=None, weight1=None, bias1=None, rowscale=None, rowscale1=None,
    scalars=None, branch_weight=None, branch_bias=None, branch_scalars=None, *,
    branch_norm=None, residual_scale=1.0, eps, dropout_p, prenorm, residual_in_fp32, zero_centered_weight, out_dtype, seed,
):  # fmt: skip
    """Mask, scale, add and norm as separate operations of PyTorch's, each rounding to the dtypes of the case."""

    def wide(t):
        return t.to(torch.promote_types(t.dtype, FP32))

    def branch(t, scale, stream):
        if scale is not None:
            t = (wide(t) * scale[:, None]).to(t.dtype)
        if dropout_p:
            with reference_path():
                keep = dropout_mask(seed, *t.shape, dropout_p, stream, t.device)
            t = t * keep * keep_scale(dropout_p)
        return t

    def normalised(kind, r, w, b, numbers):
        w, b, numbers = (None if t is None else wide(t) for t in (w, b, numbers))
        w = w + 1.0 if w is not None and zero_centered_weight else w
        return NORMS[kind](wide(r), w, b, eps, numbers)

    def affine(r, w, b):
        return normalised(norm, r, w, b, scalars).to(out_dtype or x.dtype)

    dtype = residual.dtype if residual is not None else torch.promote_types(x.dtype, FP32) if residual_in_fp32 else x.dtype
    if branch_norm is not None:
        x = normalised(branch_norm, x, branch_weight, branch_bias, branch_scalars).to(x.dtype)
    r = branch(x, rowscale, 0)
    r = r if x1 is None else r.to(torch.promote_types(r.dtype, x1.dtype)) + branch(x1, rowscale1, 1)
    r = (r if residual is None else r + (residual if residual_scale == 1.0 else residual * residual_scale)).to(dtype)
    results = [affine(r, weight, bias)]
    if weight1 is not None or bias1 is not None:
        results.append(affine(r, weight1, bias1))
    if prenorm:
        results.append(r)
    return results[0] if len(results) == 1 else tuple(results)


def outputs_and_gradients(fn, tensors: dict[str, Tensor], case: Case, **how) -> dict[str, Tensor]:
    for t in tensors.values():
        t.grad = None
    results = fn(**tensors, **arguments(case) | how)
    results = results if isinstance(results, tuple) else (results,)
    names = ["y", *["y1"] * ("weight1" in tensors or "bias1" in tensors), *["r"] * case.prenorm]
    generator = torch.Generator().manual_seed(7)
    # Rounded for the oracle too: a gradient that is one number has no other rows or columns in which errors even out.
    upstream = [torch.randn(r.shape, generator=generator).to(case.out or case.x).to(r) for r in results]
    torch.autograd.backward(results, upstream)
    found = dict(zip(names, (r.detach() for r in results), strict=True))
    found |= {f"d{name}": t.grad for name, t in tensors.items() if t.requires_grad}
    return found


ours, pytorch = partial(outputs_and_gradients, norm_fn), partial(outputs_and_gradients, unfused)


def oracle(tensors: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """The same in fp64, on inputs whose values are exactly those of the case."""
    doubles = {name: t.detach().double().requires_grad_(t.requires_grad) for name, t in tensors.items()}
    return pytorch(doubles, case, out_dtype=torch.float64)


def assert_as_accurate_as_pytorch(case: Case, device: torch.device, absolute: float = 2e-6) -> None:
    tensors = inputs(case, device)
    exact, mine, theirs = oracle(tensors, case), ours(tensors, case), pytorch(tensors, case)
    assert mine.keys() == exact.keys()

    def errors(found):
        return {name: ((found[name].double() - t).norm() / (t.norm() + 1e-30)).item() for name, t in exact.items()}

    mine_off, theirs_off = errors(mine), errors(theirs)
    for name, error in mine_off.items():
        assert mine[name].dtype == theirs[name].dtype, name
        # What remains of a sum over all elements, in which most cancels, is a matter of luck: PyTorch's largest error counts.
        allowed = 1.25 * max(theirs_off.values()) if name.endswith("scalars") else theirs_off[name]
        # The gradient of a scale is a sum in which most cancels, as the norm undoes a scale.
        absolute_here = 10 * absolute if name.startswith("drowscale") else absolute
        assert error <= 2 * allowed + absolute_here, f"{name}: error {error:.2e}, PyTorch's {allowed:.2e}"


def equal(a, b):
    return len(a) == len(b) and all(s is t or torch.equal(s, t) for s, t in zip(a, b, strict=True))


class Seen(TorchDispatchMode):
    """Notes our operators that it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == kit.NAMESPACE:
            self.names.append(func.name().split("::")[1])
        return func(*args, **(kwargs or {}))


def shapes(*rows, n):
    """Of all tensors that are inputs of norm_fn."""
    names = dict.fromkeys(("x", "residual", "x1"), (*rows, n)) | dict.fromkeys(("weight", "bias", "weight1", "bias1"), (n,))
    return names | dict.fromkeys(("rowscale", "rowscale1"), rows)


def leaves(device, *shapes, dtype=FP32):
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def unaligned(t):
    """The same elements, one past a boundary of 16 bytes."""
    return t.new_empty(t.numel() + 1)[1:].view_as(t).copy_(t)
