"""Two versions of somebody's model: do they compute the same, and which is faster?

    check_parity(before, after, batch)      what parity.py asks of a training run, of one forward and backward pass
    measure(before, after, batch)           what timing.py does with training steps, on forward and backward

Statistics, planted order of summation, blocks in turn and verdicts are those of the ablation. They stand here and not in `ops`,
which needs torch and triton alone.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ablation import turns, verdict
from ablation.compared import AGAIN, FUSED, TORCH, Comparison
from ablation.judgement import (
    FEW,
    GROSS_FEW,
    LEVEL,
    REFERENCE,
    REORDERED,
    Distances,
    Sums,
    judge_sign,
    judge_size,
    row_scales,
)
from ablation.order import in_another_order
from ablation.text import aligned, number
from ops import LayerNorm, RMSNorm
from ops.backend import runs_kernels
from ops.recognise import Formula, compute, may_be_a_norm, recognise
from training.clock import StepClock

Loss = Callable[[Any], Tensor]
SHOWN = 8  # rows of a table
NO_ROUNDING = 0.25  # of the output: bf16 comes to a few hundredths in deep models
ANOTHER_LOSS = 1.0  # of all gradients together: those of two losses that have nothing to do with each other are 1.4 apart


@dataclass(frozen=True)
class Row:
    """One quantity of a parity check."""

    name: str  # output, loss, gradient of a parameter, row scale of a norm
    error: float  # rms(model_b − reference) / rms(reference), the worst of the batches
    ratio: float  # that error over what two runs of model_a in its precision differ by; near 1 or below where all is well
    reordered: float  # the same of model_a with the sums of its norms in another order
    failure: str  # in words; empty if it holds


@dataclass(frozen=True)
class ParityCheck:
    rows: list[Row]  # the worst first
    precision: str
    verdict: str

    @property
    def holds(self) -> bool:
        return not any(row.failure for row in self.rows)

    def __str__(self) -> str:
        shown = [
            [row.name, f"{row.error:.1e}", f"{row.ratio:.2f} ×", f"{row.reordered:.2f} ×", "NO" if row.failure else "yes"]
            for row in self.rows[:SHOWN]
        ]
        header = [f"the {len(shown)} worst of {len(self.rows)}", "relative error", "of expected", "reordered", "holds"]
        return f"{aligned(header, shown)}\n{self.verdict}"


@dataclass(frozen=True)
class Timing:
    """Forward and backward of the two models."""

    a_ms: float  # median over cycles
    b_ms: float
    comparison: Comparison  # model_b with model_a
    control: Comparison  # model_a with itself
    verdict: str

    def __str__(self) -> str:
        return f"forward + backward: {number(self.a_ms)} ms → {number(self.b_ms)} ms; {self.verdict}"


def check_parity(
    model_a: nn.Module,
    model_b: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    autocast: torch.dtype | None = None,
    seed: int | None = None,
) -> ParityCheck:
    """Whether model_b, which has other norms, is model_a but for rounding.

    Compared with model_a in higher precision (fp64, or fp32 where the weights or autocast are bf16 or fp16), whose norms are
    computed from their formula: the output, the loss, every parameter's gradient, and the scale of every row that a norm puts
    out. What error may be expected is measured: model_a in its own precision, and once more with the sums of its norms in
    another order, as legitimate as the first. The statistic is that of `ablation/parity.py`, stated at its head, with batches
    in the place of seeds. In mean over the batches, an error of more than ten times what is expected fails: for a single
    number, such as the loss, rounding alone comes to that in one batch of 200. From 4 batches on, so does an error that is
    larger by a quarter with confidence; 8 see one of twice the size.

    Dropout is off: both models are in evaluation mode meanwhile, unless there is a seed. In bf16, mistakes below a rounding
    step are below what can be seen; check in fp32 too.

    Args:
        model_a: as it was. Four models' worth of memory is needed on its device.
        model_b: with the same parameters, by name and value; e.g. a deepcopy after `replace_norms`.
        batch: a mapping (keyword arguments), a tuple (arguments) or a tensor; or a list of such.
        loss: of the model's output, a scalar; by default its `loss`, a scalar in it, or else a fixed random projection of it.
        autocast: dtype of an autocast around both; None: no autocast.
        seed: compare in training mode, torch's generators seeded with it before each forward; for models that draw the same
            numbers in the same order, as those with drop path do, and those with dropout do not.

    Raises:
        TypeError: a model is no module.
        ValueError: the models differ in their parameters' names, shapes, values or requires_grad, or in the number of their
            outputs; or there is no batch; or model_a in higher precision has another output or other gradients, and so is no
            reference.
    """
    _check_modules("check_parity", model_a, model_b)
    _check_same_parameters(model_a, model_b)
    batches = batch if isinstance(batch, list) else [batch]
    if not batches:
        raise ValueError("check_parity: batch is an empty list, expected a batch or a list of batches")
    dtypes = {p.dtype for p in model_a.parameters()} | ({autocast} if autocast else set())
    wide = torch.float64 if dtypes <= {torch.float32, torch.float64} else torch.float32
    norms = _norms(model_a)
    arms: list[Callable[[Any], dict[str, Tensor]]] = []
    rows: dict[str, Tensor] = {}
    for name, model in (
        (REFERENCE, _exact(model_a, norms, wide)),
        (TORCH, model_a),
        (FUSED, model_b),
        (REORDERED, _reordered(model_a, norms)),
    ):
        sites = {site: module for site, module in model.named_modules() if site in norms}
        how = _How(loss or default_loss, seed, *((None, wide) if name == REFERENCE else (autocast, None)))
        arms.append(partial(_quantities, model, sites, how, rows))

    found: list[dict[str, Sums]] = []
    for one in batches:
        rows.clear()
        quantities = [run(one) for run in arms]
        _check_same_outputs(*quantities[1:3])
        _check_reference(quantities[0], quantities[1], "fp64" if wide is torch.float64 else "fp32")
        shared = [name for name in quantities[0] if all(name in other for other in quantities)]
        sums: dict[str, Sums] = {name: Sums() for name in shared}
        for name in shared:
            shapes = {tuple(other[name].shape) for other in quantities}
            if len(shapes) > 1:
                raise ValueError(f"check_parity: {name} has shape {' and '.join(map(str, sorted(shapes)))} in the two models")
            sums[name].add(*(other[name] for other in quantities))
        found.append(sums)
    precision = ", ".join(str(dtype).removeprefix("torch.") for dtype in sorted(dtypes, key=str))
    return _judged(found, precision, "fp64" if wide is torch.float64 else "fp32")


def measure(
    model_a: nn.Module,
    model_b: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    autocast: torch.dtype | None = None,
    cycles: int = 10,
    block_steps: int = 5,
    warmup_steps: int = 3,
) -> Timing:
    """Times forward and backward of both models, in short blocks that take turns, with model_a against itself as the control.

    The models run as they are, in training mode or not, compiled or not. Gradients are dropped after each step; those that
    were there before are there again afterwards.

    Args:
        batch, loss, autocast: as for `check_parity`.
        cycles, block_steps: each cycle gives each model two blocks of so many steps, after one that is not counted.
        warmup_steps: of each model, before.

    Raises:
        TypeError: a model is no module.
        ValueError: cycles or block_steps is less than 1, or the loss needs no gradient.
    """
    _check_modules("measure", model_a, model_b)
    for argument, count in (("cycles", cycles), ("block_steps", block_steps)):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"measure: {argument} must be a whole number of 1 or more, got {count}")
    models = {TORCH: model_a, AGAIN: model_a, FUSED: model_b}
    device = next(model_a.parameters()).device
    before = {p: p.grad for model in (model_a, model_b) for p in model.parameters()}
    criterion = loss or default_loss

    def step(model: nn.Module) -> None:
        with _autocast(device, autocast):
            value = criterion(_call(model, batch))
        if not value.requires_grad:
            raise ValueError("measure: the loss needs no gradient, and backward is timed too; unfreeze a parameter")
        value.backward()
        for p in model.parameters():
            p.grad = None

    def block(name: str, _: int) -> list[float]:
        clock = StepClock(device, warmup=turns.LEAD_IN)
        for _step in range(turns.LEAD_IN + block_steps):
            with clock.step():
                step(models[name])
        return list(clock.steps_ms)

    try:
        for p in before:
            p.grad = None  # else the first step would add to it
        for model in models.values():
            for _ in range(warmup_steps):
                step(model)
        blocks = turns.in_turn(block, cycles, seed=0)
    finally:
        for p, grad in before.items():
            p.grad = grad
    comparison, control = (turns.compare_blocks(blocks[TORCH], blocks[name]) for name in (FUSED, AGAIN))
    a_ms, b_ms = (median(turns.per_cycle(blocks[name])) for name in (TORCH, FUSED))
    words = verdict.verdict_of(comparison, control)
    return Timing(a_ms, b_ms, comparison, control, words if runs_kernels(device) else f"{words}. {verdict.NO_KERNEL}")


def default_loss(output: Any) -> Tensor:
    """The output's `loss`, a scalar in it, or a fixed random projection of its first tensor."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    tensors = _float_tensors(output)
    scalars = [t for t in tensors if t.dim() == 0]
    if scalars:
        return scalars[0]
    if not tensors:
        raise ValueError(f"loss: there is no float tensor in the model's output, a {type(output).__name__}; pass loss=")
    y = tensors[0]
    # In one dtype whatever the default is: drawn in fp64 they are other numbers, and the reference has another loss.
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(y.device)
    return (y.to(torch.promote_types(y.dtype, torch.float32)) * weights).sum() / math.sqrt(y.numel())


# ---- arms --------------------------------------------------------------------------------------------------------------------


def _norms(model: nn.Module) -> dict[str, Formula | None]:
    """The norms of a model by name, with their formula; None for those that are fused already."""
    found: dict[str, Formula | None] = {}
    for name, module in model.named_modules():
        if isinstance(module, LayerNorm | RMSNorm):
            found[name] = getattr(module, "formula", None)
        elif may_be_a_norm(module) and isinstance(formula := recognise(module), Formula):
            found[name] = formula
    return found


def _exact(model: nn.Module, norms: Mapping[str, Formula | None], dtype: torch.dtype) -> nn.Module:
    """A copy in a wider dtype, whose norms, which may round to fp32 inside, are computed from their formula."""
    model = copy.deepcopy(model).to(dtype)
    for name, formula in norms.items():
        module = model.get_submodule(name)
        if formula is not None:
            _patch(module, partial(_by_formula, formula, dict(module.named_parameters(recurse=False))))
    return model


def _by_formula(formula: Formula, parameters: Mapping[str, Tensor], own: Callable, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return own(*args, **kwargs)
    return compute(formula, parameters, args[0]).to(args[0].dtype)


def _reordered(model: nn.Module, norms: Mapping[str, Formula | None]) -> nn.Module:
    """A copy whose norms sum in another order."""
    model = copy.deepcopy(model)
    for name in norms:
        module = model.get_submodule(name)
        _patch(module, partial(_in_another_order, module))
    return model


def _in_another_order(module: nn.Module, own: Callable, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return own(*args, **kwargs)

    def norm(rows: Tensor, order: Tensor) -> Tensor:
        clone = object.__new__(type(module))
        clone.__dict__.update(module.__dict__)
        weights = {name: p if p is None else p.index_select(0, order) for name, p in module._parameters.items()}
        clone.__dict__["_parameters"] = weights
        return type(module).forward(clone, rows)

    return in_another_order(norm, args[0])


def _patch(module: nn.Module, forward: Callable) -> None:
    """Puts forward(the module's own forward, its arguments …) in its place."""
    module.forward = partial(forward, module.forward)


@dataclass(frozen=True)
class _How:
    loss: Loss
    seed: int | None  # None: evaluation mode
    autocast: torch.dtype | None
    floats: torch.dtype | None  # what the floats of the batch become; None: they stay


def _quantities(
    model: nn.Module,
    sites: Mapping[str, nn.Module],
    how: "_How",
    rows: dict[str, Tensor],
    batch: Any,
) -> dict[str, Tensor]:
    """All that is compared, of one model and batch, by name. sites, rows: as for `row_scales`."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if how.floats is not None:
        batch = tree_map(lambda x: x.to(how.floats) if isinstance(x, Tensor) and x.is_floating_point() else x, batch)
    device = next(model.parameters()).device
    # A mask that forward makes should be in the reference's dtype too: torch's attention takes one in fp32 beside an fp64
    # query, and on CPUs computes nonsense. But what is drawn in another dtype is another number.
    default = how.floats if how.floats is not None and how.seed is None else torch.get_default_dtype()
    with (
        _default_dtype(default),
        _mode(model, how.seed, device),
        row_scales(sites, rows, how.autocast) as scales,
        _autocast(device, how.autocast),
    ):
        output = _call(model, batch)
        value = how.loss(output)
    reached = bool(parameters) and value.requires_grad
    gradients = (
        torch.autograd.grad(value, list(parameters.values()), allow_unused=True) if reached else [None] * len(parameters)
    )
    outputs = [t for t in _float_tensors(output) if t.dim() > 0]
    found = {f"output {i}" if len(outputs) > 1 else "output": t.detach() for i, t in enumerate(outputs)}
    found["loss"] = value.detach()
    # A parameter that the loss does not reach has a gradient of zeros, so that one which is lost in model_b is seen.
    found |= {
        f"gradient of {name}": torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(parameters.items(), gradients, strict=True)
    }
    return found | {f"row scale of {name}": scale for name, scale in scales.items()}


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _float_tensors(output: Any) -> list[Tensor]:
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


@contextmanager
def _mode(model: nn.Module, seed: int | None, device: torch.device) -> Iterator[None]:
    """Evaluation mode, or training mode with seeded generators; then modules and generators as they were."""
    training = {module: module.training for module in model.modules()}
    model.train(seed is not None)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            yield
        finally:
            for module, mode in training.items():
                module.training = mode


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def _check_modules(function: str, model_a: Any, model_b: Any) -> None:
    for argument, model in (("model_a", model_a), ("model_b", model_b)):
        if not isinstance(model, nn.Module):
            raise TypeError(f"{function}: {argument} must be a torch.nn.Module, got {type(model).__name__}")


def _check_same_outputs(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    outputs_a, outputs_b = ([name for name in quantities if name.startswith("output")] for quantities in (a, b))
    if outputs_a != outputs_b:
        raise ValueError(
            f"check_parity: model_a returns {len(outputs_a)} float tensors, model_b {len(outputs_b)}; they must return the same"
        )


def _check_reference(reference: Mapping[str, Tensor], own: Mapping[str, Tensor], exact: str) -> None:
    """A reference that computes something else makes every error look expected, and every norm right."""
    for name in (name for name in own if name.startswith("output") and name in reference):
        a, b = reference[name].double(), own[name].to(reference[name].device).double()
        error = float((b - a).norm() / a.norm().clamp_min(1e-300)) if a.shape == b.shape and a.isfinite().all() else 0.0
        if error > NO_ROUNDING:
            raise ValueError(
                f"check_parity: {name} of model_a is {error:.2g} away from that of its copy in {exact}, relative, which is "
                "more than rounding; make what forward computes follow the dtype of its input (a mask made in fp32, a cast), "
                "or draw its random numbers by seed="
            )
    names = [name for name in own if name.startswith("gradient of ") and name in reference]
    errors = [(own[name].to(reference[name].device).double() - reference[name].double()).norm() for name in names]
    sizes = [reference[name].double().norm() for name in names]
    away = math.hypot(*map(float, errors)) / max(math.hypot(*map(float, sizes)), 1e-300)
    if away > ANOTHER_LOSS:
        raise ValueError(
            f"check_parity: the gradients of model_a, all together, are {away:.2g} away from those of its copy in {exact}, "
            "relative, which is more than rounding; make what loss computes follow the dtype of the output, and draw no random "
            "numbers in it"
        )


def _check_same_parameters(model_a: nn.Module, model_b: nn.Module) -> None:
    a, b = dict(model_a.named_parameters()), dict(model_b.named_parameters())
    if a.keys() != b.keys():
        only = ", ".join(sorted(a.keys() ^ b.keys())[:5])
        raise ValueError(f"check_parity: the models must have parameters of the same names; only one of them has {only}")
    for name, p in a.items():
        if p.requires_grad != b[name].requires_grad:
            raise ValueError(f"check_parity: {name} requires a gradient in one model only; freeze it in both or in neither")
        if p.shape != b[name].shape or p.dtype != b[name].dtype or not torch.equal(p, b[name].to(p.device)):
            raise ValueError(f"check_parity: {name} differs between the models; load the state_dict of one into the other")


# ---- verdict -----------------------------------------------------------------------------------------------------------------


def _judged(batches: Sequence[Mapping[str, Sums]], precision: str, exact: str) -> ParityCheck:
    names = [name for name in batches[0] if all(name in sums for sums in batches)]
    level = LEVEL / (2 * len(names))
    rows = []
    for name in names:
        distances = [_no_luck(sums[name].distances()) for sums in batches]
        results = [judge_size(name, distances, level, exact), judge_sign(name, distances, level)]
        failed = [result.failure for result in results if not result.quantity.holds]
        size = results[0].quantity
        error = max(sums[name].error() for sums in batches)
        rows.append(Row(name, error, size.fused.median, size.reordered.median, failed[0] if failed else ""))
    rows.sort(key=lambda row: (not row.failure, -row.ratio / row.reordered))
    failures = [row for row in rows if row.failure]
    few = f", {len(batches)} batches" if len(batches) > 1 else ""
    if failures:
        words = f"Parity fails in {precision}{few}: {failures[0].failure}; {len(failures)} of {len(rows)} quantities fail."
    else:
        allowed = "by a t-test over the batches"
        if len(batches) <= FEW:
            allowed = f"a factor of {GROSS_FEW:.0f} allowed; {FEW + 1} batches are judged more sharply"
        words = (
            f"Parity holds in {precision}{few}: none of {len(rows)} quantities is farther from {exact} than rounding explains "
            f"({allowed})."
        )
    return ParityCheck(rows, precision, words)


def _no_luck(distances: Distances) -> Distances:
    """A reordered run that is nearer than expected is lucky, and no reason to expect more; a single number often is."""
    return replace(distances, reordered=max(distances.reordered, 1.0))
