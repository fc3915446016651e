"""What holds for every operator. A new one has its call and the same in PyTorch's operations in CALLS."""

import gc
import weakref
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, library
from torch._dynamo.testing import CompileCounterWithBackend

from ops import (
    cross_entropy_fn,
    dropout_mask,
    gated_activation_fn,
    gated_rms_norm_fn,
    kit,
    layer_norm_fn,
    layer_norm_linear_fn,
    linear_cross_entropy_fn,
    log_softmax_fn,
    modulated_norm_fn,
    rms_norm_fn,
    rotary_qk_fn,
    rotary_qkv_fn,
    seeded_dropout,
    softmax_fn,
)

from .cases import BF16, FP32, Seen, unaligned


def targets(x: Tensor) -> Tensor:
    return torch.arange(x.shape[:-1].numel(), device=x.device).view(x.shape[:-1]) % 7


def angles(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    table = torch.outer(torch.arange(x.shape[dim], device=x.device), torch.arange(1, 9, device=x.device) / 8)
    return table.cos(), table.sin()


def rotary_qkv(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat(rotary_qkv_fn(x, *angles(x, -2), 2, 1, norm="rmsnorm", q_weight=w[:16], k_weight=w[:16]), -2)


def rotary_qk(x: Tensor, w: Tensor) -> Tensor:
    x = x.unflatten(-1, (4, 16))
    return torch.cat((*rotary_qk_fn(x[..., :2, :], x[..., 2:3, :], *angles(x, -3)), x[..., 3:, :] * w[:16]), -2)


def rotated(x: Tensor, w: Tensor, norm: bool) -> Tensor:
    x = x.unflatten(-1, (4, 16))
    (cos, sin), turns = angles(x, -3), x[..., :3, :]
    a, b = (F.rms_norm(turns, (16,), w[:16], 1e-6) if norm else turns).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((torch.cat((a * cos - b * sin, a * sin + b * cos), -1), x[..., 3:, :] * (1 if norm else w[:16])), -2)


# Of x [..., T, 64] and w [64]: ours, and the same in PyTorch's operations.
CALLS = {
    "softmax_fn": (lambda x, w: softmax_fn(x, 0.5, w), lambda x, w: (x * 0.5 + w).softmax(-1)),
    "log_softmax_fn": (lambda x, w: log_softmax_fn(x, 0.5, w), lambda x, w: (x * 0.5 + w).log_softmax(-1)),
    "cross_entropy_fn": (
        lambda x, w: cross_entropy_fn(x * w, targets(x), reduction="sum"),
        lambda x, w: F.cross_entropy((x * w).flatten(0, -2), targets(x).flatten(), reduction="sum"),
    ),
    "linear_cross_entropy_fn": (
        lambda x, w: linear_cross_entropy_fn(x, w.repeat(9, 1).tril(), targets(x), chunks=2),
        lambda x, w: F.cross_entropy((x @ w.repeat(9, 1).tril().mT).flatten(0, -2), targets(x).flatten()),
    ),
    "layer_norm_linear_fn": (
        lambda x, w: layer_norm_linear_fn(x, None, None, w.repeat(9, 1).tril(), None, x),
        lambda x, w: F.layer_norm(x + x, (64,), None, None, 1e-6) @ w.repeat(9, 1).tril().mT,
    ),
    "layer_norm_fn": (lambda x, w: layer_norm_fn(x, w, None), lambda x, w: F.layer_norm(x, (64,), w, None, 1e-6)),
    "rms_norm_fn": (lambda x, w: rms_norm_fn(x, w, None, x), lambda x, w: F.rms_norm(x + x, (64,), w, 1e-6)),
    "seeded_dropout": (
        lambda x, w: seeded_dropout(x * w, 0.5, 3),
        lambda x, w: x * w * 2 * dropout_mask(3, x.shape[:-1].numel(), 64, 0.5, device=x.device).view(x.shape),
    ),
    "gated_activation_fn": (lambda x, w: gated_activation_fn(x, x * w), lambda x, w: F.silu(x) * (x * w)),
    "modulated_norm_fn": (
        lambda x, w: modulated_norm_fn(x, x[..., 0, :], w, x, w, w),
        lambda x, w: F.layer_norm(x + w * x, (64,), w, None, 1e-6) * (1 + x[..., :1, :]) + w,
    ),
    "gated_rms_norm_fn": (
        lambda x, w: gated_rms_norm_fn(x, x.flip(-1), w, group_size=16),
        lambda x, w: F.rms_norm(x.unflatten(-1, (4, 16)), (16,), None, 1e-6).flatten(-2) * w * F.silu(x.flip(-1)),
    ),
    "rotary_qkv_fn": (rotary_qkv, lambda x, w: rotated(x, w, True)),
    "rotary_qk_fn": (rotary_qk, lambda x, w: rotated(x, w, False)),
}
TRANSFORMS = {
    "hessian": lambda f: torch.func.hessian(f),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(f, argnums=(0, 1)), in_dims=(0, None)),
    "jvp": lambda f: lambda x, w: torch.func.jvp(lambda x: f(x, w), (x,), (x.cos(),)),
}
every_call = pytest.mark.parametrize("name", CALLS)


def examples(device: torch.device, sequences: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sequences)
    return tuple(torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in ((sequences, 3, 64), (64,)))


@every_call
def test_compiled_code_gives_the_bits_of_eager_code_without_a_graph_break(name, device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")  # Inductor sums up what is around the operators in other orders
    ours, _ = CALLS[name]
    compiled, counts = torch.compile(ours, fullgraph=True, dynamic=True, backend=counter), []
    for sequences in (2, 5):
        tensors, found = examples(device, sequences), []
        for call in (ours, compiled):
            y = call(*tensors)
            with torch.no_grad():
                assert torch.equal(call(*tensors), y)
            found.append((y, *torch.autograd.grad(y, tensors, 2 * y.detach())))
        assert all(map(torch.equal, *found))
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]  # nothing is compiled again for another number of rows


@every_call
def test_gradients_of_gradients_are_refused_or_right(name, device):
    calls, tensors, refusal = CALLS[name], examples(device), f"{name}: its gradients can't be differentiated again"
    own = refusal.replace("norm_linear", "norm(_linear)?")  # a norm, whose gradients are its own, and a product

    def penalised(call: Callable[..., Tensor], of: int, by: int, inside: bool) -> tuple[Tensor, Tensor]:
        """A loss of the gradient of one tensor, beside what can be differentiated again, and the same or the other tensor."""
        given = [t * 1 for t in tensors] if inside else tensors
        y = call(*given)
        (gradient,) = torch.autograd.grad(y, given[of], y.detach(), create_graph=True)
        return y.square().mean() + gradient.square().sum(), given[by]

    for of, by, inside in product(range(2), range(2), (False, True)):
        (loss, t), (reference, same) = (penalised(call, of, by, inside) for call in calls)
        if name in ("seeded_dropout", "rotary_qk_fn"):  # linear
            torch.testing.assert_close(*torch.autograd.grad(loss, t), *torch.autograd.grad(reference, same))
            continue
        with pytest.raises(RuntimeError, match=own):
            torch.autograd.grad(loss, t, retain_graph=True)
        with pytest.raises(RuntimeError, match=own):
            loss.backward(inputs=None if inside else [t])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradients_of_gradients_are_refused_towards_a_stream_that_is_x(dtype, device):
    x, w = (t.detach().to(dtype).requires_grad_(t.dim() > 1) for t in examples(device))
    for y, r in (
        rms_norm_fn(x, w, None, prenorm=True, residual_in_fp32=True),
        modulated_norm_fn(x, w.expand(2, 64), prenorm=True),
    ):
        (gradient,) = torch.autograd.grad(y, x, y.detach(), create_graph=True)
        with pytest.raises(RuntimeError, match="can't be differentiated again"):
            torch.autograd.grad(gradient.square().sum() + r.square().sum(), r)


@every_call
def test_forward_mode_differentiation_is_refused_not_ignored(name, device):
    x, w = (t.detach() for t in examples(device))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"jvp|forward"):
        CALLS[name][0](torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), w)


@pytest.mark.parametrize(
    "name", sorted(CALLS.keys() - {"cross_entropy_fn", "linear_cross_entropy_fn"})
)  # F.cross_entropy can't
def test_vmap_over_no_sample_gives_none(name, device):
    x, w = (t.detach() for t in examples(device))
    found = torch.func.vmap(CALLS[name][0], in_dims=(0, None))(x[:0], w)
    assert found.shape == (0, *CALLS[name][0](x[0], w).shape)


def test_a_loss_and_its_gradients_of_meta_tensors_have_the_shapes():
    hidden, weight = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((2, 3, 8), (5, 8)))
    loss = linear_cross_entropy_fn(hidden, weight, torch.empty(2, 3, device="meta", dtype=torch.int64), chunks=2)
    loss.backward()
    assert loss.shape == () and (hidden.grad.shape, weight.grad.shape) == (hidden.shape, weight.shape)


@every_call
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func_differentiates_and_maps(name, transform, device):
    x, w = (t.detach() for t in examples(device))
    found, expected = (TRANSFORMS[transform](lambda x, w, f=f: f(x, w).sin().sum())(x, w) for f in CALLS[name])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Recorded(Seen):
    """Notes the arguments of our operators too."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == kit.NAMESPACE:
            self.calls.append((func, ([t.detach().clone() for t in args[0]], args[1])))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"layer_norm_linear_fn"}))  # which has the operator of the norms
def test_opcheck(name, device):
    tensors = examples(device)
    with Recorded() as seen:
        y = CALLS[name][0](*tensors)
        torch.autograd.grad(y, tensors, torch.ones_like(y))
    assert [func.name().split("_")[-1] for func, _ in seen.calls] == ["forward", "backward"]
    for func, arguments in seen.calls:
        library.opcheck(func, arguments, test_utils=("test_schema", "test_faketensor"))  # that they compile is seen above
    (forward, (given, text)), _ = seen.calls
    op = getattr(torch.ops, kit.NAMESPACE).__getattr__(forward.name().split("::")[1].removesuffix("_forward")).default
    library.opcheck(op, ([t.requires_grad_(t.is_floating_point() and t.shape != (3, 8)) for t in given], text))


def test_every_operator_is_among_these_calls(device):
    names = set()
    for ours, _ in CALLS.values():
        with Seen() as seen:
            ours(*examples(device))
        names |= {name.removesuffix("_forward") for name in seen.names}
    assert names == {op.name for op in kit.Op.__subclasses__()}


@every_call
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_values_and_gradients_are_those_of_fp64_for_any_rows_dtype_strides_and_frozen_inputs(name, device, data):
    ours, theirs = CALLS[name]
    dtype, apart, frozen = data.draw(st.tuples(st.sampled_from([FP32, BF16]), st.booleans(), st.sampled_from([None, 0, 1])))
    x, w = (t.detach().to(dtype) for t in examples(device, data.draw(st.integers(0 if "linear" not in name else 1, 3))))
    x = x.repeat_interleave(2, dim=-1)[..., ::2] if apart else x
    found, exact = [], []
    for fn, wide, results in ((ours, dtype, found), (theirs, torch.float64, exact)):
        tensors = [t.to(wide).requires_grad_(i != frozen) for i, t in enumerate((x, w))]
        y = fn(*tensors)
        leaves = [t for t in tensors if t.requires_grad]
        upstream = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).to(dtype).to(y.dtype)
        results += [y, *torch.autograd.grad(y, leaves, upstream)]
    for t, expected in zip(found, exact, strict=True):
        error = (t.double() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert t.shape == expected.shape and (error <= {FP32: 2e-5, BF16: 3e-2}[dtype] or not expected.any())


@pytest.mark.parametrize("name", ["gated_activation_fn", "gated_rms_norm_fn", "modulated_norm_fn"])
def test_fp64_is_computed_by_pytorch(name, device):
    tensors = [t.detach().double() for t in examples(device)]
    found, expected = (call(*tensors) for call in CALLS[name])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# The same numbers, with others between them, off a boundary of 16 bytes, and some of them with the other sign in memory.
ELSEWHERE = [
    lambda t: torch.stack((t, t), -1)[..., 0],
    lambda t: unaligned(t) if t.numel() else t,
    lambda t: torch._neg_view(-t) if t.dim() > 2 and t.is_floating_point() else t,
]


@every_call
def test_what_hooks_bring_back_for_backward_may_lie_elsewhere(name, device):
    found = []
    for unpack in (lambda t: t, *ELSEWHERE):
        tensors = examples(device)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = CALLS[name][0](*tensors)
        found.append(torch.autograd.grad(y, tensors, y.detach()))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)


@every_call
def test_what_is_remembered_of_a_call_holds_no_tensor(name, device):
    tensors = examples(device)
    y = CALLS[name][0](*tensors)
    gradients = torch.autograd.grad(y, tensors, torch.ones_like(y))
    alive = [weakref.ref(t) for t in (*tensors, y, *gradients)]
    del tensors, y, gradients
    torch.ones((), device=device, requires_grad=True).sin().backward()  # a GPU's thread holds its last node until the next one
    gc.collect()
    assert not any(t() is not None for t in alive)
