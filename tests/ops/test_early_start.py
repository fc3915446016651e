"""Kernels that start before the end of the one ahead of them is reported: they must wait for it before they touch memory."""

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ops import kit, layer_norm_fn, rms_norm_fn

from .cases import BF16, equal

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])]


@triton.jit
def hasty_copy_kernel(p_source, p_out, elements, BLOCK: tl.constexpr):
    """Lets the next kernel begin before it has written anything, as a kernel may."""
    gdc_launch_dependents()
    for first in tl.range(tl.program_id(0) * BLOCK, elements, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(p_out + at, tl.load(p_source + at, at < elements), at < elements)


def hasty_copy(out, source):
    hasty_copy_kernel[(64,)](source, out, source.numel(), BLOCK=1024)


@pytest.fixture(autouse=True)
def only_where_kernels_start_early(device):
    if not kit.device_facts(device).since_sm_90:
        pytest.skip("needs programmatic dependent launch, which GPUs of compute capability 9.0 and later have")


@pytest.fixture
def sources(device):
    """100 MB each: what reads or writes one takes longer than a launch."""
    tensors = [torch.randn(65536, 768, device=device, dtype=BF16) for _ in range(2)]
    torch.cuda.synchronize()  # some tests use them on a stream of their own
    return tensors


def check(step, captured, before, expected):
    """Many times: step, or a graph of it, gives expected[0] and [1] in turn after before(0) and (1)."""
    run = step
    if captured:
        step()  # compiles, which a capture does not allow
        torch.cuda.synchronize()
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=here if here != torch.cuda.default_stream() else torch.cuda.Stream()):
            outputs = step()
        run = lambda: (graph.replay(), outputs)[1]  # noqa: E731
    for turn in range(20):
        before(turn % 2)
        torch.cuda.synchronize()
        assert equal(run(), expected[turn % 2]), turn


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("ahead", [hasty_copy, torch.Tensor.copy_])
def test_a_norm_reads_what_was_written_just_before_it(ahead, dropout_p, captured, sources, device):
    weight, seed = torch.rand(768, device=device, dtype=BF16), torch.tensor([7], device=device)
    source, x, residual = sources[0].clone(), torch.empty_like(sources[0]), sources[1]

    def normed(x):
        return (layer_norm_fn(x, weight, weight, residual, dropout_p=dropout_p, seed=seed),)

    def step():
        ahead(x, source)
        return normed(x)

    def before(turn):
        source.copy_(sources[turn])
        x.fill_(torch.nan)

    check(step, captured, before, [normed(s) for s in sources])


def test_backward_reads_what_was_written_just_before_it(captured, sources, device):
    """It lets the sum of its weight gradients begin before it has waited itself."""
    x, weight = torch.randn_like(sources[0], requires_grad=True), torch.rand(768, device=device, requires_grad=True)
    source, dy = sources[0].clone(), torch.empty_like(sources[0])
    torch.cuda.synchronize()

    def step():
        hasty_copy(dy, source)
        return torch.autograd.grad(y, (x, weight), dy, retain_graph=True)

    def before(turn):
        source.copy_(sources[turn])
        dy.fill_(torch.nan)

    with torch.cuda.stream(torch.cuda.Stream(device)):
        y = rms_norm_fn(x, weight, None)
        check(step, captured, before, [torch.autograd.grad(y, (x, weight), s, retain_graph=True) for s in sources])


def test_a_norm_leaves_alone_what_is_still_being_read(captured, sources, device):
    weight, copy = torch.rand(768, device=device, dtype=BF16), torch.empty_like(sources[0])
    expected = rms_norm_fn(sources[0], weight, None)

    def step():
        y = rms_norm_fn(sources[0], weight, None)
        address = y.data_ptr()
        hasty_copy(copy, y)
        del y
        y = rms_norm_fn(sources[1], weight, None)
        assert y.data_ptr() == address  # the allocator hands out the memory again, which is still being read
        return (copy,)

    check(step, captured, lambda turn: copy.fill_(torch.nan), [(expected,)] * 2)
