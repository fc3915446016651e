"""Whatever watches or rewrites operator calls, torch.compile first, sees operators, and gets the bits of eager code."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode

from ops import (
    Norm,
    RMSNorm,
    dropout_mask,
    kit,
    norm_fn,
    rms_norm_fn,
    seeded_dropout,
    softmax_fn,
)
from ops.norm import NORM

from .cases import BF16, FP16, FP32, Case, Seen, describe, inputs, leaves, outputs_and_gradients

CASES = [
    *[Case(norm=norm, residual=None, bias=False, prenorm=False) for norm in (Norm.rmsnorm, Norm.derf)],
    Case(),
    Case(residual=None, residual_in_fp32=True, weight=BF16, dropout_p=0.2),
    Case(x=FP16, residual=BF16, x1=BF16, second=True, rowscale="learned", dropout_p=0.2, zero_centered=True, out=FP32),
    Case(x=FP32, weight=None, bias=False, rowscale="fixed"),
    Case(norm=Norm.rmsnorm, branch=Norm.layernorm, rowscale="learned", dropout_p=0.2, residual_scale=1.5),
    Case(norm=Norm.none, branch=Norm.derf, weight=None, bias=False, residual=BF16),  # y is r
]


def compiled(fn, device, **how):
    """A machine without a GPU may lack the compiler that inductor needs; the graph is captured all the same."""
    torch._dynamo.reset()
    how = {"backend": "inductor" if device.type == "cuda" else "aot_eager"} | how
    return torch.compile(fn, fullgraph=True, **how)


def site(x, w):
    return rms_norm_fn(x, w, None, x, prenorm=True)


def pair(device):
    return leaves(device, (4, 24), (24,))


@pytest.mark.parametrize("case", CASES, ids=describe)
def test_eager_code_operators_and_compiled_graphs_give_the_same_bits(case, device):
    """Trap: Python floats that reach a kernel as fp64 under torch.compile."""
    with Seen() as seen:
        expected = outputs_and_gradients(norm_fn, inputs(case, device), case)
    assert seen.names == ["norm_forward", "norm_backward"]
    for fn in (compiled(norm_fn, device), norm_fn, norm_fn):  # eagerly for the first time, and by a remembered plan
        found = outputs_and_gradients(fn, inputs(case, device), case)
        assert found.keys() == expected.keys()
        for name in expected:
            assert found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]), (fn, name)


def test_fake_tensors_go_through_the_operators_in_their_mode_and_outside_of_it(device):
    with FakeTensorMode():
        x, w = pair(device)
        y, r = site(x, w)
        (y.sum() + r.sum()).backward()
        # Where there is no GPU, of one that is not there.
        x = torch.empty(4, 24, device="cuda:0" if device.type == "cuda" else "cuda:1", dtype=BF16)
        z, _ = rms_norm_fn(x, None, None, x, dropout_p=0.1, prenorm=True)
    assert y.shape == r.shape == z.shape == (4, 24) and z.device == x.device
    assert site(*pair(device))[0].shape == y.shape


def test_a_view_of_the_other_sign_is_not_read_as_it_lies(device):
    z, w = torch.randn(4, 24, dtype=torch.complex64, device=device), torch.rand(24, device=device)
    expected = rms_norm_fn(-z.imag, w, None)
    for view in (z.conj().imag, torch._neg_view(z.imag.contiguous())):
        assert view.is_neg() and torch.equal(rms_norm_fn(view, w, None), expected)


def test_what_backward_needs_goes_through_saved_tensors_hooks(device):
    (x, w), packed = pair(device), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.cpu(), lambda t: t.to(device)):
        site(x, w)
    assert [tuple(t.shape) for t in packed] == [(4, 24), (24,), (4,)] and packed[1] is w  # r, weight, statistics


def test_a_compiled_graph_calls_operators_without_autograd_code_and_gets_only_what_it_uses(device):
    """Trap: on a small model a compiled step waits for the host, which pays for every call and every tensor returned."""
    found = {}

    def note(graph, example_inputs):
        for node in graph.graph.nodes:
            if getattr(node.target, "namespace", None) == kit.NAMESPACE:
                found[node.target] = [tuple(t.shape) for t in node.meta["val"]]
        return make_boxed_func(graph.forward)

    x, w = pair(device)
    fn = compiled(site, device, backend=aot_autograd(fw_compiler=note))
    y, r = fn(x, w)
    (y.sum() + r.sum()).backward()
    assert found == {
        NORM.forward_op: [(4, 24), (4, 24), (4,)],  # y, r, statistics
        NORM.backward_op: [(4, 24), (24,)],  # of x and residual, of weight
    }
    found.clear()
    with torch.no_grad():
        fn(x, w)
    assert found == {NORM.forward_op: [(4, 24), (4, 24)]}


def test_numbers_may_be_symbols_of_a_graph(device):
    torch._dynamo.reset()
    x, norm = torch.randn(4, 8, device=device), RMSNorm(8).to(device)
    compiled = torch.compile(norm, backend="aot_eager", dynamic=True, fullgraph=True)
    torch.testing.assert_close(compiled(x), norm(x))
    scaled = torch.compile(lambda x, scale: softmax_fn(x, scale), backend="aot_eager", fullgraph=True)
    for scale in (0.5, 0.6, 0.7):  # from the second on it is one
        torch.testing.assert_close(scaled(x, scale), torch.softmax(x * scale, -1))


def test_a_seed_may_be_a_tensor_or_an_int_that_changes_in_a_graph(device):
    def fn(x, seed):
        return seeded_dropout(x, 0.5, seed) * dropout_mask(seed, 4, 24, 0.5, device=device)

    (x, _), captured = pair(device), compiled(fn, device)
    for seed in (torch.tensor([1], device=device), 1, 2, 3):
        assert torch.equal(captured(x, seed), fn(x, seed))
