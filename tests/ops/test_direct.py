"""Eager code goes to the kernels directly; whatever watches or rewrites operator calls gets to see the operators."""

from fractions import Fraction

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ops import direct, layer_norm_fn, registration, rms_norm_fn

from .cases import BF16, FP16, FP32, SEED, Case, arguments, describe, inputs, outputs_and_gradients

CASES = [
    Case(),
    Case(rms=True, bias=False),
    Case(rms=True, residual=None, bias=False, prenorm=False),
    Case(residual=None, residual_in_fp32=True, weight=BF16),
    Case(x=FP16, residual=BF16, x1=BF16, second=True, rowscale="learned", dropout_p=0.2, zero_centered=True, out=FP32),
    Case(x=FP32, weight=None, bias=False, rowscale="fixed"),
]


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))

    @property
    def names(self):
        return [op.name().split("::")[1] for op in self.operators if op.namespace == registration.NAMESPACE]


def site(x, w, **how):
    return rms_norm_fn(x, w, None, x, prenorm=True, **how)


def pair(device, grad=True):
    return torch.randn(4, 24, device=device, requires_grad=grad), torch.rand(24, device=device, requires_grad=grad)


@pytest.fixture
def no_operators(monkeypatch):
    """Eager code that reaches an operator fails."""

    def refuse(*flat):
        raise AssertionError("went through the dispatcher")

    for name in ("norm", "norm_forward", "norm_backward", "norm_forward_out"):
        monkeypatch.setattr(registration, name, refuse)


@pytest.mark.parametrize("case", CASES, ids=describe)
def test_the_direct_way_and_the_operators_give_the_same_bits(case, device, monkeypatch):
    with Seen() as seen:
        expected = outputs_and_gradients(layer_norm_fn, inputs(case, device), case, **arguments(case), seed=SEED)
    assert seen.names == ["norm_forward", "norm_backward"]
    for name in ("norm", "norm_forward", "norm_backward"):
        monkeypatch.setattr(registration, name, None)
    found = outputs_and_gradients(layer_norm_fn, inputs(case, device), case, **arguments(case), seed=SEED)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("grad", [False, True])
def test_plain_tensors_go_directly(grad, device, no_operators):
    x, w = pair(device, grad)
    y, r = site(x, w)
    y, r = site(torch.nn.Parameter(x.detach(), grad), torch.nn.Parameter(w.detach(), grad))
    if grad:
        (y.sum() + r.sum()).backward()
        assert x.grad is None  # the parameters' own
    out, stream = site(x.detach(), w.detach(), out=torch.empty_like(x), residual_out=torch.empty_like(x))
    assert torch.equal(out, y) and torch.equal(stream, r)


@pytest.mark.parametrize("grad", [False, True])
def test_a_dispatch_mode_sees_the_operators(grad, device):
    x, w = pair(device, grad)
    with Seen() as seen:
        y, r = site(x, w)
        site(x.detach(), w.detach(), out=torch.empty_like(x))
    assert seen.names == ["norm_forward", "norm_forward_out"]
    if grad:
        with Seen() as seen:  # one that is there in backward only
            (y.sum() + r.sum()).backward()
        assert seen.names == ["norm_backward"]


def test_a_torch_function_mode_sees_the_operators(device):
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        site(*pair(device, grad=False))
    assert registration.norm in seen


def test_fake_tensors_and_graph_capture_see_the_operators(device):
    with FakeTensorMode():
        y, r = site(*pair(device))
        (y.sum() + r.sum()).backward()
        assert y.shape == r.shape == (4, 24)
    graph = make_fx(lambda x, w: site(x, w))(*pair(device, grad=False)).graph
    assert registration.norm_forward in [node.target for node in graph.nodes]
    traced = torch.jit.trace(site, pair(device, grad=False), check_trace=False)
    assert f"{registration.NAMESPACE}::norm" in str(traced.graph)


def test_a_fake_tensor_outside_its_mode_is_not_plain(device):
    with FakeTensorMode():
        x, w = pair(device)
    assert not direct.is_eager((x,)) and direct.is_eager((None,))
    assert site(x, w)[0].shape == (4, 24)


def test_a_view_of_the_other_sign_is_not_read_as_it_lies(device):
    z, w = torch.randn(4, 24, dtype=torch.complex64, device=device), torch.rand(24, device=device)
    expected = rms_norm_fn(-z.imag, w, None)
    for view in (z.conj().imag, torch._neg_view(z.imag.contiguous())):
        assert view.is_neg() and torch.equal(rms_norm_fn(view, w, None), expected)


def test_functorch_wrappers_do_not_reach_a_kernel(device):
    x, w = torch.randn(2, 4, 24, device=device), torch.rand(24, device=device)
    assert torch.equal(torch.vmap(lambda x: site(x, w)[0])(x), site(x, w)[0])


def test_what_backward_needs_goes_through_saved_tensors_hooks(device):
    x, w = pair(device)
    packed = []

    def pack(t):
        packed.append(t)
        return t.cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(device)):
        y, r = site(x, w)
    kept = {(tuple(t.shape), t.dtype) for t in packed}
    assert kept == {((4, 24), FP32), ((24,), FP32), ((4, 1), FP32)}  # r, weight, rstd
    assert any(t is w for t in packed)
    found = torch.autograd.grad(y.sin().sum() + r.cos().sum(), (x, w))
    y, r = site(x, w)
    expected = torch.autograd.grad(y.sin().sum() + r.cos().sum(), (x, w))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_autograd_is_handed_only_outputs_that_were_asked_for(device):
    """Trap: each output of an autograd function costs the host, also one that is None."""
    x, w = pair(device)
    assert len(site(x, w)[0].grad_fn._input_metadata) == 2  # y, r
    y, y1, r = rms_norm_fn(x, w, None, x, weight1=w, prenorm=True)
    found = torch.autograd.grad(y1.sin().sum() + r.cos().sum(), (x, w))  # each gradient still finds its output
    y, r = site(x, w)
    torch.testing.assert_close(found, torch.autograd.grad(y.sin().sum() + r.cos().sum(), (x, w)))


def test_gradients_from_two_calls_share_nothing(device):
    """Launches are remembered, memory is not."""
    x, w = pair(device)
    first, again = (torch.autograd.grad(site(x, w)[0].sin().sum(), (x, w)) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (0,), (2, 0, 3)])
def test_gradients_have_the_shapes_of_their_inputs(leading, device, no_operators):
    x, residual = (torch.randn(*leading, 24, device=device, requires_grad=True) for _ in range(2))
    scale = torch.rand(leading, device=device, requires_grad=True)
    w, b = (torch.rand(24, device=device, requires_grad=True) for _ in range(2))
    y, r = layer_norm_fn(x, w, b, residual, rowscale=scale, prenorm=True)
    (y.sum() + r.sum()).backward()
    for t in (x, residual, scale, w, b):
        assert t.grad.shape == t.shape


def test_a_call_like_an_earlier_one_is_not_checked_again(device, monkeypatch):
    from ops import plan

    x, w = pair(device)
    site(x, w)
    monkeypatch.setattr(plan, "make_plan", None)
    site(torch.randn_like(x), w)


X, W, ROW = (4, 6, 8), (8,), (4, 6)


def good(device):
    shapes = dict.fromkeys(("x", "residual", "x1"), X) | dict.fromkeys(("weight", "bias", "weight1", "bias1"), W)
    shapes |= dict.fromkeys(("rowscale", "rowscale1"), ROW)
    tensors = {name: torch.ones(shape, device=device) for name, shape in shapes.items()}
    buffers = {name: torch.empty(X, device=device) for name in ("out", "residual_out")}
    return tensors | buffers | {"seed": torch.tensor([1], device=device), "dropout_p": 0.5, "eps": 0.5}


def bad_values(name, value):
    if isinstance(value, float):
        yield from (-1.0, "0.5", None, [0.5], Fraction(1, 2), torch.tensor(0.5))
        if name == "dropout_p":
            yield 1.0
        return
    yield from (3.5, [1.0], value[:0], value.to(torch.int32), value.to("meta"), value.unsqueeze(0).expand(2, *value.shape))
    if name == "seed":
        yield from (True, value.double(), value.repeat(2))
    else:
        yield from (3, value.to(torch.complex64), value[..., :-1])
    if name in ("out", "residual_out"):
        yield from (value.clone().requires_grad_(), value.mT.contiguous().mT, value.to(BF16))


@pytest.mark.parametrize("name", good(torch.device("cpu")))
def test_a_bad_call_does_not_pass_because_a_good_one_did(name, device):
    accepted = good(device)
    layer_norm_fn(**accepted, out_dtype=FP32)
    for value in bad_values(name, accepted[name]):
        messages = []
        for _ in range(2):  # nor because a bad one came before it
            with pytest.raises((ValueError, TypeError)) as error:
                layer_norm_fn(**accepted | {name: value}, out_dtype=FP32)
            messages.append(str(error.value))
        assert messages[0] == messages[1] and messages[0].startswith("layer_norm_fn: ") and name in messages[0], value
        layer_norm_fn(**accepted, out_dtype=FP32)
    with pytest.raises(ValueError, match="rowscale1 was given without x1"):
        layer_norm_fn(**{k: v for k, v in accepted.items() if k != "x1"}, out_dtype=FP32)
    with pytest.raises(ValueError, match=r"out_dtype is torch\.int8"):
        layer_norm_fn(**accepted, out_dtype=torch.int8)


def test_options_that_change_nothing_checked_still_change_the_result(device):
    x, w = torch.randn(4, 24, device=device), torch.rand(24, device=device)
    call = {"eps": 1e-5, "dropout_p": 0.5, "seed": 1, "prenorm": True}
    base = layer_norm_fn(x, w, None, x, **call)
    for change in ({"eps": 0.1}, {"dropout_p": 0.4}, {"seed": 2}, {"zero_centered_weight": True}, {"is_rms_norm": True}):
        assert not torch.equal(layer_norm_fn(x, w, None, x, **call | change)[0], base[0]), change
    assert len(layer_norm_fn(x, w, None, x, **call | {"return_dropout_mask": True})) == 4
    assert layer_norm_fn(x, w, None, x, **call | {"out_dtype": BF16})[0].dtype == BF16
    assert isinstance(layer_norm_fn(x, w, None, x, **call | {"prenorm": False}), torch.Tensor)
    assert all(torch.equal(a, b) for a, b in zip(layer_norm_fn(x, w, None, x, **call), base, strict=True))


def test_forward_mode_differentiation_is_refused_not_ignored(device):
    from torch.autograd import forward_ad

    x = torch.randn(2, 32, device=device)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"jvp|forward"):
        layer_norm_fn(forward_ad.make_dual(x, torch.ones_like(x)), None, None)


def test_a_zero_tensor_is_not_taken_for_memory(device):
    zeros = torch._efficientzerotensor((2, 32), device=device)
    assert not direct.is_eager((zeros,))
