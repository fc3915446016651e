"""The operators as PyTorch's dispatcher and torch.compile see them."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import library
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from ops import dropout_mask, launch, layer_norm_fn, layer_norm_linear_fn, registration, rms_norm_fn, seeded_dropout
from ops.records import BackwardOptions, Options, packed, unpacked

from .cases import BF16, FP32, SEED, Case, arguments, describe, inputs, outputs_and_gradients

HOW = Options(1e-5, 0.25, False, False, BF16, FP32, store_residual=True, store_stats=True, return_mask=True)
COMPILED = [
    Case(),
    Case(rms=True, residual=None, prenorm=False, bias=False),
    Case(x1=BF16, second=True, rowscale="learned", dropout_p=0.2, zero_centered=True),
    Case(residual=BF16, dropout_p=0.2, weight=None),
]


def backend(device: torch.device) -> str:
    """A machine without a GPU may lack the compiler that inductor needs; the graph is captured all the same."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def args(device, grad=True):
    g = torch.Generator().manual_seed(0)

    def t(*shape, dtype=FP32):
        return torch.randn(*shape, generator=g).to(device, dtype).requires_grad_(grad)

    seed = torch.tensor([3], device=device)
    return (t(4, 24, dtype=BF16), t(4, 24), t(4, 24), t(24), t(24), t(24), t(24), t(4), t(4), seed)


@pytest.mark.parametrize("grad", [True, False])
def test_opcheck_norm(grad, device):
    op = registration.norm if grad else registration.norm_forward
    full = args(device, grad)
    library.opcheck(op, (*full, *packed(HOW)))
    plain = Options(1e-5, 0.0, False, True, FP32, FP32, store_residual=False, store_stats=True, return_mask=False)
    library.opcheck(op, (full[1], *(None,) * 9, *packed(plain)))


def test_opcheck_norm_forward_out(device):
    y, r = torch.empty(4, 24, device=device, dtype=BF16), torch.empty(4, 24, device=device)
    library.opcheck(registration.norm_forward_out, (y, r, *args(device, grad=False), *packed(HOW)))


def test_opcheck_norm_backward(device):
    x, residual, x1, w, _, w1, _, rowscale, rowscale1, seed = args(device, grad=False)
    stats = torch.rand(4, 2, device=device)
    how = packed(BackwardOptions(0.25, False, False, FP32, BF16, FP32, (True, True, False, True), FP32))
    library.opcheck(
        registration.norm_backward, (x, x1, residual, residual, x, x1, w, w1, rowscale, rowscale1, stats, seed, *how)
    )


def test_opcheck_dropout(device):
    x, *_, seed = args(device)
    library.opcheck(registration.dropout, (x, seed, 0.25, 1))
    library.opcheck(registration.dropout_mask, (seed, 4, 24, 0.25, 0))


@pytest.mark.parametrize(
    "options",
    [
        HOW,
        Options(1 / 3, 0.1, True, True, FP32, BF16, store_residual=False, store_stats=False, return_mask=False),
        BackwardOptions(0.1, False, True, None, BF16, None, (False, True, False, True), FP32),
    ],
    ids=["all", "few", "backward"],
)
def test_operators_get_the_options_that_they_were_sent(options):
    sent = packed(options)
    assert sum(isinstance(value, str) for value in sent) == 1 and len(sent) <= 3
    assert unpacked(type(options), *sent) == options


def test_a_compiled_graph_calls_operators_without_autograd_code_and_gets_only_what_it_uses(device):
    """Trap: on a small model a compiled step waits for the host, which pays for every call and every tensor returned."""
    found = {}

    def note(graph, example_inputs):
        for node in graph.graph.nodes:
            if getattr(node.target, "namespace", None) == registration.NAMESPACE:
                found[node.target] = [tuple(t.shape) for t in node.meta["val"]]
        return make_boxed_func(graph.forward)

    x, w = torch.randn(4, 24, device=device, requires_grad=True), torch.rand(24, device=device, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w: rms_norm_fn(x, w, None, x, prenorm=True), fullgraph=True, backend=aot_autograd(fw_compiler=note)
    )
    y, r = compiled(x, w)
    (y.sum() + r.sum()).backward()
    assert found == {
        registration.norm_forward: [(4, 24), (4, 24), (4, 1)],  # y, r, rstd
        registration.norm_backward: [(4, 24), (24,)],  # of x and residual, of weight
    }
    found.clear()
    with torch.no_grad():
        compiled(x, w)
    assert found == {registration.norm_forward: [(4, 24), (4, 24)]}


def test_an_operator_without_gradients_says_so():
    x = torch.randn(4, 24, requires_grad=True)
    how = Options(1e-5, 0.0, False, True, FP32, FP32, store_residual=False, store_stats=False, return_mask=False)
    (y,) = registration.norm_forward(x, *(None,) * 9, *packed(how))
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        y.sum().backward()
    assert x.grad is None


@pytest.mark.parametrize("case", COMPILED, ids=describe)
def test_eager_equals_compiled_bit_for_bit(case, device):
    torch._dynamo.reset()
    compiled = torch.compile(layer_norm_fn, fullgraph=True, backend=backend(device))
    eager, found = (
        outputs_and_gradients(fn, inputs(case, device), case, **arguments(case), seed=SEED) for fn in (layer_norm_fn, compiled)
    )
    assert found.keys() == eager.keys()
    for name in eager:
        assert torch.equal(found[name], eager[name]), name


def test_dynamic_shapes_compile_once(device):
    torch._dynamo.reset()
    graphs = []

    def counting(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    fn = torch.compile(
        lambda x, w: layer_norm_fn(x, w, None, x, prenorm=True)[0] * 2, fullgraph=True, dynamic=True, backend=counting
    )
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

    torch._dynamo.reset()
    x, w, seed = (
        torch.randn(4, 24, device=device, requires_grad=True),
        torch.rand(24, device=device),
        torch.tensor([1], device=device),
    )
    compiled = torch.compile(fn, fullgraph=True, backend=backend(device))
    compiled(x, w, seed).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize(("grad", "stored"), [(True, (True, True)), (False, (False, False))])
def test_without_gradients_nothing_is_kept_for_backward(grad, stored, device, monkeypatch):
    seen = []
    original = launch.norm_forward
    monkeypatch.setattr(launch, "norm_forward", lambda *records: (seen.append(records[1]), original(*records)))
    x = torch.randn(4, 24, device=device, requires_grad=True)
    with torch.set_grad_enabled(grad):
        y = layer_norm_fn(x, None, None, x)
    assert (seen[0].r is not None, seen[0].stats is not None) == stored
    assert y.requires_grad == grad


def test_compiled_with_an_int_seed_that_changes(device):
    torch._dynamo.reset()
    fn = torch.compile(lambda x, seed: seeded_dropout(x, 0.5, seed), fullgraph=True, backend=backend(device))
    x = torch.randn(4, 24, device=device)
    for seed in (1, 2, 3):
        assert torch.equal(fn(x, seed), seeded_dropout(x, 0.5, seed))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_masks_survive_activation_checkpointing(use_reentrant, device):
    x, w = torch.randn(8, 24, device=device, requires_grad=True), torch.rand(24, device=device, requires_grad=True)

    def site(x):
        return layer_norm_fn(x, w, None, x, dropout_p=0.5)

    grads = []
    for run in (site, lambda x: checkpoint(site, x, use_reentrant=use_reentrant)):
        torch.manual_seed(3)
        grads.append(torch.autograd.grad(run(x).sin().sum(), (x, w)) if not use_reentrant else backward(run, x, w))
    for expected, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


def backward(run, x, w):
    """Gradients by backward(), which reentrant checkpointing needs."""
    x.grad = w.grad = None
    run(x).sin().sum().backward()
    return x.grad.clone(), w.grad.clone()


@pytest.mark.parametrize("linear", [False, True])
def test_second_derivatives_are_refused(linear, device):
    x, w = torch.randn(4, 24, device=device, requires_grad=True), torch.rand(24, device=device, requires_grad=True)
    matrix = torch.randn(3, 24, device=device, requires_grad=True)
    y = layer_norm_linear_fn(x, w, None, matrix, None) if linear else layer_norm_fn(x, w, None, x)
    (grad,) = torch.autograd.grad(y.sin().sum(), matrix if linear else x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"can't be differentiated again"):
        grad.square().sum().backward()


@pytest.mark.gpu
def test_cuda_graph_replay_gives_the_bits_of_eager(device):
    x, w = (
        torch.randn(256, 768, device=device, dtype=BF16, requires_grad=True),
        torch.rand(768, device=device, requires_grad=True),
    )
    seed, g = torch.tensor([5], device=device), torch.randn(256, 768, device=device, dtype=BF16)

    def step():
        y, r = layer_norm_fn(x, w, w, x, dropout_p=0.1, prenorm=True, seed=seed)
        return (y, r, *torch.autograd.grad((y, r), (x, w), (g, g)))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for value in (5, 6):
        seed.fill_(value)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
