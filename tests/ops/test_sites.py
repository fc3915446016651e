"""Prepared call sites: a call like an earlier one starts the same launches and gives the same bits; no other call is taken."""

from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ops import launch, layer_norm_fn, norm_fn, operators, prepared, rms_norm_fn, sites
from ops.kernels import INTERPRET

from . import cases
from .cases import BF16, FP32, KERNELS, Seen, arguments, describe, equal, inputs, leaves, outputs_and_gradients, unaligned

CASES = cases.pairwise(
    **cases.OPTIONS | {"zero_centered": [False, True], "residual_in_fp32": [False, True], "out": [None, FP32]}
)
WAYS = pytest.mark.parametrize("way", [nullcontext, Seen], ids=["eager", "operators"])


def noted(monkeypatch, module, **functions):
    """A list that grows with every call of these functions, by the name that each is given."""
    seen = []
    for name, function in functions.items():
        run = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *given, run=run, name=name: (seen.append(name), run(*given))[1])
    return seen


@pytest.fixture
def plain(monkeypatch):
    """Calls of operators: what takes no site."""
    return noted(monkeypatch, operators, forward="norm_of", backward="norm_backward_of")


@pytest.fixture
def launched(monkeypatch):
    """Launches that were not prepared."""
    return noted(monkeypatch, launch, forward="forward", backward="backward")


def without_sites():
    return mock.patch.object(prepared, "WORKS", False)


@pytest.fixture
def given(device):
    """x, residual, weight, bias."""
    return leaves(device, (4, 24), (4, 24), (24,), (24,))


def site(x, residual, w, b, **how):
    return layer_norm_fn(x, w, b, residual, **{"prenorm": True} | how)


def step(given, upstream=(1, 1), wanted=(0, 1, 2, 3), **how):
    """Outputs and gradients. upstream: tensors or factors for y and r, or None for no gradient there."""
    results = site(*given, **how)
    pairs = [(t, g) for t, g in zip(results, upstream, strict=True) if g is not None]
    upstream = [g if isinstance(g, torch.Tensor) else torch.full_like(t, g) for t, g in pairs]
    return *results, *torch.autograd.grad([t for t, _ in pairs], [given[i] for i in wanted], upstream, allow_unused=True)


def on_the_plain_path(plain, run, *given, **how):
    """What a fourth call takes the plain path for; all four give the same bits, the first of them without sites."""
    found = []
    for around in (without_sites, suppress, suppress, suppress):
        torch.manual_seed(0), plain.clear()
        with around():
            found.append(run(*given, **how))
    assert all(equal(found[0], other) for other in found), how
    return plain


@WAYS
@pytest.mark.parametrize("case", CASES, ids=describe)
def test_the_bits_are_the_same(case, way, device, plain, launched):
    seed = torch.tensor([2**40 + 3], device=device)
    with without_sites():
        expected = outputs_and_gradients(norm_fn, inputs(case, device), case, seed=seed)
    both = ["forward", "backward"]
    # Operators leave prepared launches. Eager code leaves sites, but a forward without one has a backward without one.
    for calls, launches in ((both, both), (["backward"], ["backward"]), ([], [])):
        plain.clear(), launched.clear()
        with way():
            found = outputs_and_gradients(norm_fn, inputs(case, device), case, seed=seed.clone())
        assert plain == (calls if way is nullcontext else both) and set(launched) <= {*launches}
        assert found.keys() == expected.keys()
        for name, t in expected.items():
            assert (found[name].dtype, found[name].shape) == (t.dtype, t.shape) and torch.equal(found[name], t), name


class Compiled:
    """Its `run` is Python code in front of `launch`, which is C in Triton. With scratch it allocates at each launch."""

    function, packed_metadata, profile_scratch_size = "function", "metadata", 0

    def __init__(self, scratch):
        self.run, self.runs, self.called, self.global_scratch_size = self, [], [], scratch
        self.launch = self.runs.append

    def __call__(self, *arguments):
        self.called.append(True)
        self.launch(arguments)


class Kernel:
    """Triton's side, played by the test: notes the calls that go through it."""

    def __init__(self, scratch):
        self.compiled, self.calls = Compiled(scratch), []

    def __getitem__(self, grid):
        return lambda *arguments, **options: (self.calls.append((grid, arguments, options)), self.compiled)[1]


@pytest.mark.skipif(not INTERPRET, reason="tensors on the CPU run kernels in the interpreter only")
@WAYS
@pytest.mark.parametrize("case", CASES, ids=describe)
def test_the_same_kernels_start_with_the_same_arguments(case, way, monkeypatch, launched):
    tensors, seed = inputs(case, torch.device("cpu")), torch.tensor([2**40 + 3])
    played = [Kernel(scratch) for scratch in (0, 128, 0)]
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: "stream")))
    monkeypatch.setattr(launch, "CompiledKernel", Compiled)
    for name, by in zip(KERNELS, played, strict=True):
        monkeypatch.setattr(launch, name, by)

    def launches():
        """What Triton's launch, and the compiled kernel itself, were given last: programs and arguments of each kernel."""
        results = norm_fn(**tensors, **arguments(case) | {"seed": seed})
        results = results if isinstance(results, tuple) else (results,)
        upstream = [torch.ones_like(t) for t in results]
        torch.autograd.grad(results, [t for t in tensors.values() if t.requires_grad], upstream)
        pointers = {t.data_ptr(): i for i, t in enumerate((seed, *tensors.values(), *results, *upstream))}

        def owners(value):  # in place of tensors and pointers
            value = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if isinstance(value, tuple):
                return tuple(map(owners, value))
            return pointers.get(value, "made on the way") if isinstance(value, int) and value > 2**32 else value

        by_triton = [owners((*by.calls[-1][0], *by.calls[-1][1])) if by.calls else None for by in played]
        by_us = [owners((run[0], *run[9:])) if (run := (by.compiled.runs or [None])[-1]) else None for by in played]
        return by_triton, by_us

    with without_sites():
        expected, none = launches()
    with way():
        launches(), launches(), launched.clear(), [by.compiled.called.clear() for by in played]
        assert launches()[1] == expected and not launched and expected[0] and expected[1] and none == [None] * 3
        assert [bool(by.compiled.called) for by in played] == [False, True, False]  # Python in front of the launch


@contextmanager
def launch_hook():
    hook, hooks = (lambda metadata: None), launch.knobs.runtime.launch_enter_hook
    hooks.add(hook)
    yield
    hooks.remove(hook)


OTHER_STATES = [lambda: torch.autocast("cpu" if INTERPRET else "cuda", BF16), torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("around", [Seen, BaseTorchFunctionMode, forward_ad.dual_level, launch_hook, *OTHER_STATES])
def test_under_what_it_was_not_made_for_a_call_takes_the_plain_path(around, given, plain):
    expected, _ = step(given), step(given)
    y, r = site(*given)
    before = dict(sites.SITES)
    plain.clear()
    with around():
        assert equal(site(*given), (y, r)) and plain == ["forward"]
        if torch.is_grad_enabled() and around is not BaseTorchFunctionMode:  # torch.autograd.grad takes that off
            found = torch.autograd.grad((y, r), given, (torch.ones_like(y), torch.ones_like(r)), retain_graph=True)
            assert plain == ["forward", "backward"] and equal(found, expected[2:])
    assert around in OTHER_STATES or before == sites.SITES  # the others have sites of their own
    plain.clear()
    assert equal(step(given), expected) and not plain


OTHERS = {
    "dtype": lambda x, residual, w, b: (x.bfloat16(), residual, w, b),
    "shape": lambda x, residual, w, b: (x[:2], residual[:2], w, b),
    "strides": lambda x, residual, w, b: (x, residual.mT.contiguous().mT, w, b),
    "requires_grad": lambda x, residual, w, b: (x, residual, w, b.detach()),
    "class": lambda x, residual, w, b: (x, residual, torch.nn.Parameter(w), b),
    "given twice": lambda x, residual, w, b: (x, x, w, b),
    "less": lambda x, residual, w, b: (x, residual, w, None),
    "as many others": lambda x, residual, w, b: (x, residual, None, w),
    "negative": lambda x, residual, w, b: (torch._neg_view(x), residual, w, b),
}
HOW = [
    {"eps": 0.1}, {"prenorm": False}, {"dropout_p": 0.5, "seed": 3}, {"zero_centered_weight": True}, {"out_dtype": BF16},
    {"return_dropout_mask": True}, {"is_rms_norm": True}, {"out": torch.empty(4, 24)}, {"residual_out": torch.empty(4, 24)},
]  # fmt: skip


@pytest.mark.parametrize("other", [*OTHERS.values(), *HOW], ids=[*OTHERS, *[next(iter(how)) for how in HOW]])
def test_other_tensors_and_options_take_the_plain_path(other, given, plain):
    tensors, how = (given, other) if isinstance(other, dict) else (other(*given), {})
    how = {name: value.to(given[0].device) if isinstance(value, torch.Tensor) else value for name, value in how.items()}
    one, two = ((given, {}), (tensors, how))
    for first, then in ((one, two), (two, one)):
        prepared.forget()
        with without_sites():
            expected = site(*then[0], **then[1])
        site(*first[0], **first[1]), plain.clear()
        for _ in range(2):
            found = site(*then[0], **then[1])
            assert equal(*[t if isinstance(t, tuple) else (t,) for t in (found, expected)])
            assert plain[:1] == ["forward"]


def test_an_operator_like_an_earlier_one_does_without_the_dispatcher(given):
    """Trap: the dispatcher takes as long as a prepared launch, and a compiled graph of a small model waits for it."""
    compiled = torch.compile(site, fullgraph=True, backend="aot_eager")

    def operators_seen():
        with torch.profiler.profile() as profile:
            torch.autograd.grad([t.sum() for t in compiled(*given)], given)
        return {event.name.partition("::")[2] for event in profile.events()} & {"norm_forward", "norm_backward"}

    assert operators_seen() and operators_seen() and not operators_seen()  # the first call is made while the graph is
    with without_sites():
        prepared.forget()
        assert len(operators_seen()) == 2


def test_an_operator_without_autograd_code_warns_each_time_that_gradients_are_asked_for(given):
    run = torch.fx.Interpreter(make_fx(lambda *given: site(*given))(*[t.detach() for t in given])).run
    for _ in range(3):
        with pytest.warns(UserWarning, match="autograd kernel was not registered"):
            run(*given)[0].sum().backward()


@pytest.mark.parametrize("passes_on", [True, False])
def test_what_is_behind_a_launcher_is_called_only_where_the_launcher_calls_it(passes_on):
    class Launcher(SimpleNamespace):
        def __call__(self, *given):
            return self.launch(1) if passes_on else None

    launcher = Launcher(global_scratch_size=0, profile_scratch_size=0, launch=print)
    assert prepared._behind(launcher, (2, 3)) == ((print, (1,)) if passes_on else (launcher, (2, 3)))


def test_transforms_and_graph_capture_see_operators(given):
    x, *rest = given = [t.detach() for t in given]
    expected = site(*given)
    assert torch.equal(torch.func.vmap(lambda x: site(x, *rest)[0])(x.expand(2, 4, 24)), expected[0].expand(2, 4, 24))
    assert torch.func.grad(lambda x: site(x, *rest)[0].sum())(x).isfinite().all()
    assert "norm_forward" in str(make_fx(lambda *given: site(*given))(*given).graph)
    assert "::norm" in str(torch.jit.trace(site, given, check_trace=False).graph)
    graphs = []
    compiled = torch.compile(site, fullgraph=True, backend=lambda graph, _: graphs.append(str(graph.graph)) or graph.forward)
    assert equal(compiled(*given), expected) and "norm" in graphs[0]


def test_backward_by_its_upstream_gradients_and_by_those_that_are_wanted(given, plain):
    g = torch.rand(8, 24, device=given[0].device)
    repeated, apart = g[:1].expand(4, 24), g[::2]
    for upstream in ((1, None), (None, 1), (g[:4], g[4:]), (g[:4], g[:4]), (g[4:],) * 2, (repeated, g[4:]), (g[4:], apart)):
        assert on_the_plain_path(plain, step, given, upstream=upstream) == [], upstream
    columns_apart = g.mT.reshape(8, 24).mT.contiguous().mT[:4]
    assert on_the_plain_path(plain, step, given, upstream=(columns_apart, g[4:])) == ["backward"]
    prepared.forget()
    for wanted in ((0,), (2,), (1, 3), (0, 1, 2, 3)):
        assert on_the_plain_path(plain, step, given, wanted=wanted) == [], wanted


def test_a_graph_is_used_twice_and_a_site_twice_in_a_graph(given, plain):
    def chain():
        y, r = site(*site(*given), *given[2:])
        loss = y.sin().sum() + r.cos().sum()
        return [*torch.autograd.grad(loss, given, retain_graph=True), *torch.autograd.grad(loss, given)]

    assert on_the_plain_path(plain, chain) == [] and equal(chain()[:4], chain()[4:])


@pytest.mark.parametrize("bring", [torch.clone, unaligned, lambda t: torch.stack((t, t), -1)[..., 0]])
def test_hooks_on_saved_tensors_may_bring_others(bring, given, plain):
    step(given), step(given)
    upstream = torch.ones_like(given[0]), torch.ones_like(given[0])
    found = []
    for around in (without_sites, suppress):
        with around(), saved_tensors_hooks(lambda t: t.detach(), bring):
            y, r = site(*given)
            plain.clear()
            found.append(torch.autograd.grad((y, r), given, upstream))
    assert equal(*found) and plain == ([] if bring is torch.clone else ["backward"])


def test_unaligned_inputs_and_seeds_give_the_same_bits(given, plain):
    seeds = torch.tensor([1, 2], device=given[0].device)
    for tensors in (given, [unaligned(t.detach()).requires_grad_() for t in given]):
        for seed in seeds:
            on_the_plain_path(plain, step, tensors, dropout_p=0.5, seed=seed)


def test_prepared_launches_do_not_depend_on_the_default_dtype(given, plain):
    torch.set_default_dtype(BF16)
    try:
        assert on_the_plain_path(plain, step, given) == []
    finally:
        torch.set_default_dtype(FP32)


def test_seeds_are_drawn_as_on_the_plain_path(given, plain):
    assert on_the_plain_path(plain, lambda: [*step(given, dropout_p=0.5), *step(given, dropout_p=0.5)]) == []
    assert not torch.equal(step(given, dropout_p=0.5)[0], step(given, dropout_p=0.5)[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_draws_the_masks_again_and_compares_a_plain_forward_with_a_prepared_one(use_reentrant, given):
    torch.manual_seed(3)
    expected = step(given, dropout_p=0.5)
    prepared.forget()
    for _ in range(3):
        torch.manual_seed(3)
        results = checkpoint(lambda *given: site(*given, dropout_p=0.5), *given, use_reentrant=use_reentrant)
        for t in given:
            t.grad = None
        torch.autograd.backward(results, [torch.ones_like(t) for t in results])  # reentrant ones know no torch.autograd.grad
        assert equal([t.grad for t in given], expected[2:])


def test_new_shapes_and_dtypes_do_not_fill_memory(device, monkeypatch):
    monkeypatch.setattr(prepared, "MOST", 2)
    for rows in (1, 2, 3):
        x = torch.rand(rows, 16, device=device)
        for t in (x, x.half(), x.bfloat16()):
            for weight in (x[0].clone(), x[0].half()):
                rms_norm_fn(t, weight, None)
        assert len(sites.SITES) <= 2 and all(len(alike) <= prepared.MOST_ALIKE for alike in sites.SITES.values())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_than_the_current_device_take_the_plain_path(given, plain):
    expected, _ = step(given), step(given)
    plain.clear()
    with torch.cuda.device(1):
        assert equal(step(given), expected) and plain[:1] == ["forward"]
