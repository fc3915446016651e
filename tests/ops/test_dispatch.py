"""Whatever watches or rewrites operator calls, torch.compile first, sees operators, and gets the bits of eager code."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import library
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ops import (
    Norm,
    autograd,
    checks,
    dropout_mask,
    launch,
    layer_norm_fn,
    layer_norm_linear_fn,
    norm_fn,
    operators,
    rms_norm_fn,
    seeded_dropout,
)  # fmt: skip
from ops.records import BackwardInputs, BackwardOptions, Inputs, Options

from .cases import BF16, FP16, FP32, Case, describe, inputs, outputs_and_gradients

HOW = Options(1e-5, 0.25, Norm.layernorm, False, BF16, FP32, store_residual=True, store_stats=True, return_mask=True)
PLAIN = Options(1e-5, 0.0, Norm.rmsnorm, False, FP32, FP32, store_residual=False, store_stats=True, return_mask=False)
CASES = [
    *[Case(norm=norm, residual=None, bias=False, prenorm=False) for norm in Norm],
    Case(),
    Case(residual=None, residual_in_fp32=True, weight=BF16, dropout_p=0.2),
    Case(x=FP16, residual=BF16, x1=BF16, second=True, rowscale="learned", dropout_p=0.2, zero_centered=True, out=FP32),
    Case(x=FP32, weight=None, bias=False, rowscale="fixed"),
]


def compiled(fn, device, **how):
    """A machine without a GPU may lack the compiler that inductor needs; the graph is captured all the same."""
    torch._dynamo.reset()
    how = {"backend": "inductor" if device.type == "cuda" else "aot_eager"} | how
    return torch.compile(fn, fullgraph=True, **how)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == operators.NAMESPACE:
            self.names.append(func.name().split("::")[1])
        return func(*args, **(kwargs or {}))


def site(x, w, **how):
    return rms_norm_fn(x, w, None, x, prenorm=True, **how)


def pair(device, grad=True):
    return torch.randn(4, 24, device=device, requires_grad=grad), torch.rand(24, device=device, requires_grad=grad)


@pytest.mark.parametrize("case", CASES, ids=describe)
def test_eager_code_operators_and_compiled_graphs_give_the_same_bits(case, device):
    """Trap: Python floats that reach a kernel as fp64 under torch.compile."""
    with Seen() as seen:
        expected = outputs_and_gradients(norm_fn, inputs(case, device), case)
    assert seen.names == ["norm_forward", "norm_backward"]
    ways = {"compiled": outputs_and_gradients(compiled(norm_fn, device), inputs(case, device), case)}
    ways["eager"] = outputs_and_gradients(norm_fn, inputs(case, device), case)
    for way, found in ways.items():
        assert found.keys() == expected.keys()
        for name in expected:
            assert found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]), (way, name)


def test_modes_see_the_operators(device):
    x, w = pair(device)
    with Seen() as seen:
        y, r = site(x, w)
        site(x.detach(), w.detach(), out=torch.empty_like(x))
        (y.sum() + r.sum()).backward()
    assert seen.names == ["norm_forward", "norm_forward_out", "norm_backward"]
    functions = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            functions.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        site(*pair(device, grad=False))
    assert operators.norm in functions


def test_fake_tensors_and_graph_capture_see_the_operators(device):
    with FakeTensorMode():
        x, w = pair(device)
        y, r = site(x, w)
        (y.sum() + r.sum()).backward()
        assert y.shape == r.shape == (4, 24)
    assert site(x, w)[0].shape == (4, 24)  # outside its mode too
    graph = make_fx(lambda x, w: site(x, w))(*pair(device, grad=False)).graph
    assert operators.norm_forward in [node.target for node in graph.nodes]
    traced = torch.jit.trace(site, pair(device, grad=False), check_trace=False)
    assert f"{operators.NAMESPACE}::norm" in str(traced.graph)


def test_a_view_of_the_other_sign_or_of_nothing_is_not_read_as_it_lies(device):
    z, w = torch.randn(4, 24, dtype=torch.complex64, device=device), torch.rand(24, device=device)
    expected = rms_norm_fn(-z.imag, w, None)
    for view in (z.conj().imag, torch._neg_view(z.imag.contiguous())):
        assert view.is_neg() and torch.equal(rms_norm_fn(view, w, None), expected)
    assert not autograd.is_eager((torch._efficientzerotensor((2, 32), device=device),))


def test_what_backward_needs_goes_through_saved_tensors_hooks(device):
    x, w = pair(device)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t.cpu())[1], lambda t: t.to(device)):
        y, r = site(x, w)
    assert {(tuple(t.shape), t.dtype) for t in packed} == {((4, 24), FP32), ((24,), FP32), ((4, 2), FP32)}  # r, weight, stats
    assert any(t is w for t in packed)
    found = torch.autograd.grad(y.sin().sum() + r.cos().sum(), (x, w))
    y, r = site(x, w)
    assert all(map(torch.equal, found, torch.autograd.grad(y.sin().sum() + r.cos().sum(), (x, w))))


def test_without_gradients_nothing_is_kept_for_backward(device, monkeypatch):
    seen, original = [], launch.forward
    monkeypatch.setattr(launch, "forward", lambda inputs, how: seen.append(how) or original(inputs, how))
    x = torch.randn(4, 24, device=device, requires_grad=True)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert layer_norm_fn(x, None, None, x).requires_grad == grad
    assert [(how.store_residual, how.store_stats) for how in seen] == [(True, True), (False, False)]


def test_autograd_is_handed_only_outputs_that_were_asked_for(device):
    """Trap: each output of an autograd function costs the host, also one that is None."""
    x, w = pair(device)
    site(x, w)
    assert len(site(x, w)[0].grad_fn._input_metadata) == 2  # y, r
    _, y1, r = rms_norm_fn(x, w, None, x, weight1=w, prenorm=True)
    found = torch.autograd.grad(y1.sin().sum() + r.cos().sum(), (x, w))  # each gradient still finds its output
    y, r = site(x, w)
    torch.testing.assert_close(found, torch.autograd.grad(y.sin().sum() + r.cos().sum(), (x, w)))


@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (2, 0, 3)])
def test_gradients_have_the_shapes_of_their_inputs(leading, device):
    x, residual = (torch.randn(*leading, 24, device=device, requires_grad=True) for _ in range(2))
    scale = torch.rand(leading, device=device, requires_grad=True)
    w, b = (torch.rand(24, device=device, requires_grad=True) for _ in range(2))
    y, r = layer_norm_fn(x, w, b, residual, rowscale=scale, prenorm=True)
    (y.sum() + r.sum()).backward()
    assert all(t.grad.shape == t.shape for t in (x, residual, scale, w, b))


def test_options_that_change_nothing_checked_still_change_the_result(device, monkeypatch):
    x, w = torch.randn(4, 24, device=device), torch.rand(24, device=device)
    call = {"eps": 1e-5, "dropout_p": 0.5, "seed": torch.tensor([1], device=device), "prenorm": True}
    base = layer_norm_fn(x, w, None, x, **call)
    for change in ({"eps": 0.1}, {"dropout_p": 0.4}, {"seed": 2}, {"zero_centered_weight": True}, {"is_rms_norm": True}):
        assert not torch.equal(layer_norm_fn(x, w, None, x, **call | change)[0], base[0]), change
    assert len(layer_norm_fn(x, w, None, x, **call | {"return_dropout_mask": True})) == 4
    assert layer_norm_fn(x, w, None, x, **call | {"out_dtype": BF16})[0].dtype == BF16
    monkeypatch.setattr(checks, "make_plan", None)  # a call like an earlier one is not checked again
    assert all(map(torch.equal, layer_norm_fn(x, w, None, x, **call), base))


def test_forward_mode_differentiation_is_refused_not_ignored(device):
    x = torch.randn(2, 32, device=device)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"jvp|forward"):
        layer_norm_fn(forward_ad.make_dual(x, torch.ones_like(x)), None, None)


@pytest.mark.parametrize("name", ["norm", "norm_forward", "norm_forward_out", "norm_backward", "dropout", "dropout_mask"])
def test_opcheck(name, device):
    g = torch.Generator().manual_seed(0)
    shapes = [(4, 24)] * 3 + [(24,)] * 4 + [(4,)] * 2
    tensors = [torch.randn(shape, generator=g).to(device).requires_grad_(name == "norm") for shape in shapes]
    x, residual, x1, w, _, w1, _, scale, scale1 = tensors
    bf16, seed, stats = (
        x.detach().to(BF16).requires_grad_(name == "norm"),
        torch.tensor([3], device=device),
        torch.rand(4, 2, device=device),
    )
    how = BackwardOptions(0.25, Norm.layernorm, False, FP32, BF16, FP32, (True, True, False, True), FP32)
    encode = operators.encode
    given = Inputs(bf16, *tensors[1:], seed)
    backward = BackwardInputs(bf16, x1, residual, residual, bf16, x1, w, w1, scale, scale1, stats, seed)
    calls = {
        "norm_forward_out": [(torch.empty_like(bf16), torch.empty_like(residual), *encode(given, HOW))],
        "norm_backward": [encode(backward, how)],
        "dropout": [(x, seed, 0.25, 1)],
        "dropout_mask": [(seed, 4, 24, 0.25, 0)],
    }.get(name, [encode(given, HOW), encode(Inputs(x, *(None,) * 9), PLAIN)])
    for arguments in calls:
        library.opcheck(getattr(operators, name), arguments)


def test_a_compiled_graph_calls_operators_without_autograd_code_and_gets_only_what_it_uses(device):
    """Trap: on a small model a compiled step waits for the host, which pays for every call and every tensor returned."""
    found = {}

    def note(graph, example_inputs):
        for node in graph.graph.nodes:
            if getattr(node.target, "namespace", None) == operators.NAMESPACE:
                found[node.target] = [tuple(t.shape) for t in node.meta["val"]]
        return make_boxed_func(graph.forward)

    x, w = pair(device)
    fn = compiled(site, device, backend=aot_autograd(fw_compiler=note))
    y, r = fn(x, w)
    (y.sum() + r.sum()).backward()
    assert found == {
        operators.norm_forward: [(4, 24), (4, 24), (4, 2)],  # y, r, statistics
        operators.norm_backward: [(4, 24), (24,)],  # of x and residual, of weight
    }
    found.clear()
    with torch.no_grad():
        fn(x, w)
    assert found == {operators.norm_forward: [(4, 24), (4, 24)]}


def test_dynamic_shapes_compile_once(device):
    graphs = []
    note = lambda graph, _: graphs.append(graph) or graph.forward  # noqa: E731
    fn = compiled(lambda x, w: layer_norm_fn(x, w, None, x, prenorm=True)[0] * 2, device, dynamic=True, backend=note)
    w = torch.rand(24, device=device)
    for m in (3, 5, 9):
        x = torch.randn(m, 24, device=device)
        torch.testing.assert_close(fn(x, w), layer_norm_fn(x, w, None, x) * 2)
    assert len(graphs) == 1


def test_every_public_function_is_captured_without_a_graph_break(device):
    def fn(x, w, seed):
        y, r = layer_norm_fn(x, w, w, x, dropout_p=0.1, prenorm=True)
        z = layer_norm_linear_fn(y, w, None, torch.outer(w, w), None, r)
        return seeded_dropout(z, 0.1, seed) * dropout_mask(seed, 4, 24, 0.1)

    x, w = pair(device)
    compiled(fn, device)(x, w.detach(), torch.tensor([1], device=device)).sum().backward()
    assert torch.isfinite(x.grad).all()
    fn = compiled(lambda x, seed: seeded_dropout(x, 0.5, seed), device)
    for seed in (1, 2, 3):  # an int that changes
        assert torch.equal(fn(x, seed), seeded_dropout(x, 0.5, seed))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_masks_survive_activation_checkpointing(use_reentrant, device):
    x, w = pair(device)
    gradients = []
    for again in (False, True):
        torch.manual_seed(3)
        fn = lambda x: layer_norm_fn(x, w, None, x, dropout_p=0.5)  # noqa: E731
        y = checkpoint(fn, x, use_reentrant=use_reentrant) if again else fn(x)
        x.grad = w.grad = None
        y.sin().sum().backward()
        gradients.append((x.grad, w.grad))
    torch.testing.assert_close(*gradients)


@pytest.mark.gpu
def test_cuda_graph_replay_gives_the_bits_of_eager(device):
    x, w = (torch.randn(*shape, device=device, dtype=BF16, requires_grad=True) for shape in ((256, 768), (768,)))
    seed, g = torch.tensor([5], device=device), torch.randn(256, 768, device=device, dtype=BF16)

    def step():
        y, r = layer_norm_fn(x, w, w, x, dropout_p=0.1, prenorm=True, seed=seed)
        return (y, r, *torch.autograd.grad((y, r), (x, w), (g, g)))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # the third is prepared, forward and backward, and so is the one that is captured
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for value in (5, 6):
        seed.fill_(value)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
