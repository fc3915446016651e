"""Eager calls go past the dispatcher and give the same bits; a watched call goes through it."""

import io
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

import ops
from ops import kit, layer_norm_fn, modulated_norm_fn, rms_norm_fn
from ops.norm import NORM, plan_of
from ops.records import Inputs

from .cases import BF16, Seen, equal, leaves


@pytest.fixture
def dispatched(monkeypatch):
    """A list that grows with every call that goes through the dispatcher."""
    seen = []
    for name, function in {"forward": "op", "backward": "backward_op"}.items():
        run = getattr(NORM, function)
        monkeypatch.setattr(NORM, function, lambda *a, run=run, name=name, **k: (seen.append(name), run(*a, **k))[1])
    return seen


@pytest.fixture
def given(device):
    """x, residual, weight, bias."""
    return leaves(device, (4, 24), (4, 24), (24,), (24,))


def site(x, residual, w, b, **options):
    return layer_norm_fn(x, w, b, residual, **{"prenorm": True} | options)


def step(given, upstream=(1, 1), wanted=(0, 1, 2, 3), **options):
    """Outputs and gradients. upstream: tensors or factors for y and r, or None for no gradient there."""
    results = site(*given, **options)
    pairs = [(t, g) for t, g in zip(results, upstream, strict=True) if g is not None]
    upstream = [g if isinstance(g, torch.Tensor) else torch.full_like(t, g) for t, g in pairs]
    return *results, *torch.autograd.grad([t for t, _ in pairs], [given[i] for i in wanted], upstream, allow_unused=True)


def same_through_the_dispatcher(dispatched, run, *given, **options):
    """What run returns is the same, bit for bit, eagerly, eagerly again, and with the dispatcher."""
    found = []
    for around in (nullcontext, nullcontext, Seen):
        torch.manual_seed(0), dispatched.clear()
        with around():
            found.append(run(*given, **options))
        assert bool(dispatched) == (around is Seen), dispatched
    return equal(found[0], found[1]) and equal(found[0], found[2])


@contextmanager
def launch_hook():
    hook, hooks = (lambda metadata: None), kit.internals().knobs.runtime.launch_enter_hook
    hooks.add(hook)
    yield
    hooks.remove(hook)


@pytest.mark.parametrize("around", [Seen, BaseTorchFunctionMode, forward_ad.dual_level])
def test_a_watched_call_goes_through_the_dispatcher(around, given, dispatched):
    expected = step(given)
    y, r = site(*given)
    dispatched.clear()
    with around():
        assert equal(site(*given), (y, r)) and dispatched == ["forward"]
        if around is Seen:  # torch.autograd.grad takes a function mode off
            found = torch.autograd.grad((y, r), given, (torch.ones_like(y), torch.ones_like(r)), retain_graph=True)
            assert dispatched[-1] == "backward" and equal(found, expected[2:])
    dispatched.clear()
    assert equal(step(given), expected) and not dispatched


@pytest.mark.parametrize("around", [launch_hook, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", BF16)])
def test_other_states_give_the_same_bits(around, given):
    expected, _ = site(*given), step(given)
    with around():
        assert equal(site(*given), expected)


OTHERS = {
    "dtype": lambda x, residual, w, b: (x.bfloat16(), residual, w, b),
    "rows": lambda x, residual, w, b: (x[:2], residual[:2], w, b),
    "strides": lambda x, residual, w, b: (x, residual.mT.contiguous().mT, w, b),
    "requires_grad": lambda x, residual, w, b: (x, residual, w, b.detach()),
    "given twice": lambda x, residual, w, b: (x, x, w, b),
    "less": lambda x, residual, w, b: (x, residual, w, None),
    "as many others": lambda x, residual, w, b: (x, residual, None, w),
}
OPTIONS = [
    {"eps": 0.1}, {"prenorm": False}, {"dropout_p": 0.5, "seed": 3}, {"zero_centered_weight": True}, {"out_dtype": BF16},
    {"return_dropout_mask": True}, {"is_rms_norm": True}, {"out": torch.empty(4, 24)}, {"residual_out": torch.empty(4, 24)},
    {"prenorm": False, "residual_out": torch.empty(4, 24)},
]  # fmt: skip


def returned(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("other", [*OTHERS.values(), *OPTIONS], ids=[*OTHERS, *[next(iter(how)) for how in OPTIONS]])
def test_a_call_does_not_depend_on_the_calls_before(other, given):
    tensors, options = (given, other) if isinstance(other, dict) else (other(*given), {})
    options = {name: v.to(given[0].device) if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    one, two = (given, {}), (tensors, options)
    buffers = [options[name] for name in ("out", "residual_out") if name in options]
    for first, then in ((one, two), (two, one)):
        written = buffers if then is two else []
        kit.forget()
        expected = site(*then[0], **then[1])
        expected = [t.clone() for t in (*returned(expected), *written) if t is not None]
        kit.forget()
        site(*first[0], **first[1])
        for buffer in buffers:
            buffer.fill_(torch.nan)
        found = site(*then[0], **then[1])
        assert equal([t for t in (*returned(found), *written) if t is not None], expected)


def test_a_new_number_of_rows_makes_nothing_new(device):
    """Trap: batches that are padded to their longest sequence have a new shape at every step."""
    w = torch.rand(16, device=device)
    rms_norm_fn(torch.rand(3, 7, 16, device=device), w, None)
    remembered = len(kit._memo)
    for rows in range(1, 1001):
        x = torch.rand(rows, 16, device=device)
        if rows < 4:
            assert equal((rms_norm_fn(x, w, None),), (torch.cat([rms_norm_fn(row, w, None)[None] for row in x]),))
        operands = Inputs(x, *[None] * (len(Inputs._fields) - 1))._replace(weight=w)[:-1]
        plan_of(operands, (ops.Norm.rmsnorm, ops.Norm.none, 1.0, 1e-6, 0.0, *[False] * 6, None))
    assert len(kit._memo) == remembered


def test_what_is_remembered_does_not_fill_memory(device, monkeypatch):
    monkeypatch.setattr(kit, "MOST", 2)
    x = {n: torch.rand(3, n, device=device) for n in (16, 24, 32)}
    for n in (16, 24, 16, 32, 16):
        assert torch.equal(rms_norm_fn(x[n], None, None), rms_norm_fn(x[n].clone(), None, None)) and len(kit._memo) <= 2


def test_traces_see_operators(given):
    given = [t.detach() for t in given]
    assert "norm_forward" in str(make_fx(lambda *given: site(*given))(*given).graph)
    assert "::norm" in str(torch.jit.trace(site, given, check_trace=False).graph)


def test_vmap_in_a_compiled_graph_maps_the_operator(given):
    x, *rest = given = [t.detach() for t in given]
    for samples in (2, 0):
        compiled = torch.compile(torch.func.vmap(lambda x: site(x, *rest)), fullgraph=True, backend="aot_eager")
        assert equal(compiled(x.expand(samples, 4, 24)), [t.expand(samples, 4, 24) for t in site(*given)])


class Site(torch.nn.Module):
    def forward(self, x, residual, w, b):
        return site(x, residual, w, b)


def test_an_exported_program_says_what_it_asks_for_by_name_and_runs_in_another_process(given, tmp_path):
    given = [t.detach() for t in given]
    rows = {0: torch.export.Dim("rows", max=64)}
    program = torch.export.export(Site(), tuple(given), dynamic_shapes=(rows, rows, None, None))
    (call,) = [node for node in program.graph.nodes if getattr(node.target, "namespace", "") == kit.NAMESPACE]
    file = io.BytesIO()
    torch.export.save(program, file)
    (tmp_path / "program.pt2").write_bytes(file.getvalue())
    torch.save(given, tmp_path / "given.pt")
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); import ops; given = torch.load('given.pt');"
        "program = torch.export.load('program.pt2').module(); x, residual, w, b = given;"
        "print(all(torch.equal(*pair) for rows in (4, 3) for pair in zip(program(x[:rows], residual[:rows], w, b),"
        " ops.layer_norm_fn(x[:rows], w, b, residual[:rows], prenorm=True))))"
    )
    root = str(Path(ops.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code, root], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr

    tensors, text = call.args
    assert text.startswith("given=x,residual,weight,bias eps=1e-06 dropout_p=0.0 norm=layernorm ")
    call.args = (tensors, text.removesuffix(" passes_residual=False"))  # which has a default
    assert equal(program.module()(*given), site(*given))
    for wrong, message in (
        (text + " later=3", "asks for later=3 that this one does not know, and lacks nothing"),
        (text.replace("eps=1e-06 ", ""), "asks for nothing that this one does not know, and lacks eps"),
        (text.replace("layernorm", "batchnorm"), "asks for norm=batchnorm that"),
        (text.replace("eps=1e-06 ", "eps1e-06 "), "asks for eps1e-06= that this one does not know, and lacks eps"),
        (text.replace("1e-06", "1e-"), "asks for eps=1e- that"),
        (text.replace("out_dtype=float32", "out_dtype=nn"), "asks for out_dtype=nn that"),
        (text.replace("=False", "=Fals"), "asks for branch=Fals, zero_centered_weight=Fals"),
        (text.replace("given=x,residual,weight,bias ", ""), "asks for nothing that this one does not know, and lacks given"),
        (text.replace("residual,", "resid,"), "asks for resid that"),
    ):
        call.args = (tensors, wrong)
        with pytest.raises(RuntimeError, match=message):
            program.module()(*given)


def test_backward_by_its_upstream_gradients_and_by_those_that_are_wanted(given, dispatched):
    g = torch.rand(8, 24, device=given[0].device)
    columns_apart = g.mT.reshape(8, 24).mT.contiguous().mT[:4]
    pairs = ((1, None), (None, 1), (g[:4], g[4:]), (g[:4], g[:4]), (g[:1].expand(4, 24), g[4:]), (g[4:], g[::2]))
    for upstream in (*pairs, (columns_apart, g[4:])):
        assert same_through_the_dispatcher(dispatched, step, given, upstream=upstream), upstream
    for wanted in ((0,), (2,), (1, 3), (0, 1, 2, 3)):
        assert same_through_the_dispatcher(dispatched, step, given, wanted=wanted), wanted


def test_seeds_are_drawn_anew_and_follow_the_generator(given):
    def twice():
        torch.manual_seed(5)
        return [step(given, dropout_p=0.5)[0] for _ in range(2)]

    first, again = twice(), twice()
    assert equal(first, again) and not torch.equal(*first)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_draws_the_masks_again(use_reentrant, given):
    torch.manual_seed(3)
    expected = step(given, dropout_p=0.5)
    for _ in range(2):
        torch.manual_seed(3)
        results = checkpoint(lambda *given: site(*given, dropout_p=0.5), *given, use_reentrant=use_reentrant)
        for t in given:
            t.grad = None
        torch.autograd.backward(results, [torch.ones_like(t) for t in results])  # reentrant ones know no torch.autograd.grad
        assert equal([t.grad for t in given], expected[2:])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_than_the_current_device(given):
    expected = step(given)
    with torch.cuda.device(1):
        assert equal(step(given), expected)


@pytest.mark.parametrize(
    "of", [lambda x: rms_norm_fn(x, None, None, prenorm=True), lambda x: modulated_norm_fn(x, prenorm=True)]
)
def test_a_view_of_the_stream_has_its_gradient_as_an_output_of_a_compiled_graph(of, device):
    torch._dynamo.reset()
    x, dy, dr = torch.randn(3, 4, 48, device=device)

    def both(x):
        y, r = of(x)
        return y, r.view(2, 2, 48)

    found = []
    for call in (torch.compile(both, backend="aot_eager"), both):
        leaf = x.clone().requires_grad_()
        y, r = call(leaf * 1.5)
        ((y * dy).sum() + (r.flatten(0, 1) * dr).sum()).backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found)
