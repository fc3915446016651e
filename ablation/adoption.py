"""Two versions of somebody's model: do they compute the same, and which is faster?

    check_parity(before, after, batch)      compares one forward and backward pass, as parity.py compares training runs
    measure(before, after, batch)           times forward and backward, as timing.py times training steps

Statistics, the other order of summation, alternating blocks and conclusions are those of the ablation. They are here and not in
`ops`, because `ops` needs torch and triton alone.
"""

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ablation.adopted_models import (
    How,
    Loss,
    autocasting,
    call,
    check_autocast,
    check_before_and_after,
    check_not_compiled,
    check_same_parameters,
    default_loss,
    device_of,
    float_tensors,
    results_of,
    scalar,
)
from ablation.rounding import (
    FEW,
    GROSS_FEW,
    LEVEL,
    REFERENCE,
    REORDERED,
    Distances,
    Sums,
    exact_copy,
    norms_of,
    reordered_copy,
    sign_test,
    size_test,
)
from measure.clock import StepClock
from measure.comparison import AGAIN, FUSED, NO_KERNEL, TORCH, Comparison, compare_blocks, conclusion, cycle_times
from measure.schedule import LEAD_IN, run_blocks
from measure.statistics import LEAST_SAMPLES
from measure.tables import aligned, interval_text, number
from ops.kernels import runs_kernels

SHOWN = 8  # rows of a table
_ROUTES = (
    " The model routes tokens by top_k: where two scores are nearly equal, rounding alone sends a token to another expert. "
    'Check it in float32, and with transformers after model.set_experts_implementation("eager") of both.'
)
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
        header = [f"the {len(shown)} worst of {len(self.rows)}", "relative error", "error ratio", "reordered", "holds"]
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
        # In pairs, as the ratio is: two medians over cycles may contradict it.
        apart = interval_text(self.comparison.difference_ms)
        return f"forward + backward: {number(self.a_ms)} ms of model_a; model_b {apart} ms beside it; {self.verdict}"


def check_parity(
    model_a: nn.Module,
    model_b: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    autocast: torch.dtype | None = None,
    seed: int | None = None,
) -> ParityCheck:
    """Whether model_b, which has other norms, computes the same as model_a up to rounding.

    The reference is model_a in higher precision: fp64, or fp32 if the weights or autocast are bf16 or fp16. Its norms are
    computed from their formula. Compared are the output, the loss, every parameter's gradient, and the scale of every row of a
    norm's output. The expected error is measured: from model_a in its own precision, and from model_a with the sums of its
    norms in another order. `ablation/parity.py` states the statistic; here batches take the place of seeds. The check fails if
    the mean error over the batches is more than ten times the expected one. (For a single number, such as the loss, rounding
    alone does that in one batch of 200.) With 4 batches or more it also fails if a t-test shows that the error is larger by
    more than a quarter. 8 batches find an error of twice the size.

    Both models are in evaluation mode, without dropout, unless there is a seed. bf16 hides mistakes that are smaller than a
    rounding step, so check in fp32 too.

    Args:
        model_a: as it was, none of its norms fused; e.g. a deepcopy made ahead of `replace_norms`. Four models' worth of memory
            is needed on its device.
        model_b: with the same parameters, by name and value, and something in it replaced, by `replace_norms` or by hand.
            Neither is compiled.
        batch: a mapping (keyword arguments), a tuple (arguments) or a tensor; or a list of such.
        loss: of the model's output, a scalar; by default its `loss`, a scalar in it, or else a fixed random projection of it.
        autocast: dtype of an autocast around both; None: no autocast.
        seed: compare in training mode, torch's generators seeded with it before each forward; for models that draw the same
            numbers in the same order, as those with drop path do, and those with dropout do not.

    Raises:
        TypeError: a model is no module, or loss no function.
        ValueError: the models are not one before and after: both are the same object, norms of model_a are fused, or nothing
            is replaced in model_b; or one is compiled; or they differ in their parameters' names, shapes, values or
            requires_grad, or in the number of their outputs; or there is no batch; or model_a in higher precision has another
            output or other gradients, and so is no reference; or autocast has no such dtype, or loss gives no scalar.
    """
    check_before_and_after("check_parity", model_a, model_b)
    check_not_compiled(model_a, model_b)
    check_same_parameters(model_a, model_b)
    check_autocast("check_parity", autocast)
    batches = batch if isinstance(batch, list) else [batch]
    if not batches:
        raise ValueError("check_parity: batch is an empty list, expected a batch or a list of batches")
    dtypes = {p.dtype for p in model_a.parameters()} or {t.dtype for t in float_tensors(batches)}
    dtypes |= {autocast} if autocast else set()
    wide = torch.float64 if dtypes <= {torch.float32, torch.float64} else torch.float32
    norms, loss = norms_of(model_a), default_loss() if loss is None else scalar("check_parity", loss)
    arms: list[Callable[[Any], dict[str, Tensor]]] = []
    rows: dict[str, Tensor] = {}
    for name, model in (
        (REFERENCE, exact_copy(model_a, norms, wide)),
        (TORCH, model_a),
        (FUSED, model_b),
        (REORDERED, reordered_copy(model_a, norms)),
    ):
        sites = {site: module for site, module in model.named_modules() if site in norms}
        how = How(loss, seed, *((None, wide) if name == REFERENCE else (autocast, None)))
        arms.append(partial(results_of, model, sites, how, rows))

    found: list[dict[str, Sums]] = []
    for one in batches:
        rows.clear()
        quantities = [_of_reference(arms[0], one, wide), *(run(one) for run in arms[1:])]
        _check_same_outputs(*quantities[1:3])
        _check_reference(model_a, quantities[0], quantities[1], "fp64" if wide is torch.float64 else "fp32")
        shared = [name for name in quantities[0] if all(name in other for other in quantities)]
        sums: dict[str, Sums] = {name: Sums() for name in shared}
        for name in shared:
            shapes = {tuple(other[name].shape) for other in quantities}
            if len(shapes) > 1:
                raise ValueError(f"check_parity: {name} has shape {' and '.join(map(str, sorted(shapes)))} in the two models")
            sums[name].add(*(other[name] for other in quantities))
        found.append(sums)
    precision = ", ".join(str(dtype).removeprefix("torch.") for dtype in sorted(dtypes, key=str))
    check = _judged(found, precision, "fp64" if wide is torch.float64 else "fp32")
    if not check.holds and any(getattr(module, "top_k", None) for module in model_a.modules()):
        check = replace(check, verdict=check.verdict + _ROUTES)
    return check


def measure(
    model_a: nn.Module,
    model_b: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    autocast: torch.dtype | None = None,
    cycles: int = 12,
    block_steps: int = 5,
    warmup_steps: int = 3,
) -> Timing:
    """Times forward and backward of both models in short alternating blocks. The control is model_a against itself.

    The models run as they are, in training mode or not, compiled or not. Gradients are dropped after each step; those that
    were there before are there again afterwards.

    Args:
        model_a, model_b, batch, loss, autocast: as for `check_parity`, but that models may be compiled and their parameters
            differ.
        cycles, block_steps: each cycle gives each model two blocks of so many steps, after one that is not counted. At least 6
            cycles: of one, two equal models would be called different every other time; of two, one time in six.
        warmup_steps: of each model, before.

    Raises:
        TypeError: a model is no module, or loss no function.
        ValueError: the models are not one before and after, as for `check_parity`; or cycles is less than 6 or block_steps
            less than 1, or autocast has no such dtype, or the loss is no scalar or needs no gradient.
    """
    check_before_and_after("measure", model_a, model_b)
    for argument, count, least in (("cycles", cycles, LEAST_SAMPLES), ("block_steps", block_steps, 1)):
        if not isinstance(count, int) or count < least:
            raise ValueError(f"measure: {argument} must be a whole number of {least} or more, got {count}")
    models = {TORCH: model_a, AGAIN: model_a, FUSED: model_b}
    device = device_of(model_a, batch)
    before = {p: p.grad for model in (model_a, model_b) for p in model.parameters()}
    check_autocast("measure", autocast)
    criterion = default_loss() if loss is None else scalar("measure", loss)

    def step(model: nn.Module) -> None:
        with autocasting(device, autocast):
            value = criterion(call(model, batch))
        if not value.requires_grad:
            raise ValueError("measure: the loss needs no gradient, and backward is timed too; unfreeze a parameter")
        value.backward()
        for p in model.parameters():
            p.grad = None

    def block(name: str, _: int) -> list[float]:
        clock = StepClock(device, warmup=LEAD_IN)
        for _step in range(LEAD_IN + block_steps):
            with clock.step():
                step(models[name])
        return list(clock.steps_ms)

    try:
        for p in before:
            p.grad = None  # else the first step would add to it
        for model in models.values():
            for _ in range(warmup_steps):
                step(model)
        blocks = run_blocks(block, list(models), cycles, seed=0)
    finally:
        for p, grad in before.items():
            p.grad = grad
    comparison, control = (compare_blocks(blocks[TORCH], blocks[name]) for name in (FUSED, AGAIN))
    a_ms, b_ms = (median(cycle_times(blocks[name])) for name in (TORCH, FUSED))
    words = conclusion("model_b", {"model_a": comparison}, control)
    return Timing(a_ms, b_ms, comparison, control, words if runs_kernels(device) else f"{words}. {NO_KERNEL}")


def _of_reference(run: Callable[[Any], dict[str, Tensor]], batch: Any, wide: torch.dtype) -> dict[str, Tensor]:
    try:
        return run(batch)
    except Exception as error:
        name = str(wide).removeprefix("torch.")
        narrower = "; or check copies in bfloat16, whose reference is float32" if wide is torch.float64 else ""
        error.add_note(
            f"check_parity: its reference, a copy of model_a in {name}, raised this; what model_a computes has to follow the "
            f"dtype of its weights and to run in {name}{narrower}"
        )
        raise


# ---- checks ------------------------------------------------------------------------------------------------------------------


def _check_same_outputs(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    outputs_a, outputs_b = ([name for name in quantities if name.startswith("output")] for quantities in (a, b))
    if outputs_a != outputs_b:
        raise ValueError(
            f"check_parity: model_a returns {len(outputs_a)} float tensors, model_b {len(outputs_b)}; they must return the same"
        )


def _shared(model: nn.Module) -> str:
    """Says so if there are functions in the model that copy.deepcopy does not copy, and that hold its own modules."""
    own = set(model.modules())
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if cell != _EMPTY_CELL]
            if any(
                isinstance(held, nn.Module) and held in own for held in (*cells, *(getattr(value, "__defaults__", None) or ()))
            ):
                return (
                    f"; or is it {name or 'model_a'}.{attribute}? copy.deepcopy copies no function, so in each copy of the "
                    "model that one still runs the modules of the first"
                )
    return ""


_EMPTY_CELL = types.CellType()


def _check_reference(model: nn.Module, reference: Mapping[str, Tensor], own: Mapping[str, Tensor], exact: str) -> None:
    """Refuses a reference that computes something else: beside it every error would look expected."""
    for name in (name for name in own if name.startswith("output") and name in reference):
        a, b = reference[name].double(), own[name].to(reference[name].device).double()
        error = float((b - a).norm() / a.norm().clamp_min(1e-300)) if a.shape == b.shape and a.isfinite().all() else 0.0
        if error > NO_ROUNDING:
            raise ValueError(
                f"check_parity: {name} of model_a is {error:.2g} away from that of its copy in {exact}, relative, which is "
                "more than rounding; make what forward computes follow the dtype of its input (a mask made in fp32, a cast), "
                f"or draw its random numbers by seed={_shared(model)}"
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


# ---- verdict -----------------------------------------------------------------------------------------------------------------


def _judged(batches: Sequence[Mapping[str, Sums]], precision: str, exact: str) -> ParityCheck:
    names = [name for name in batches[0] if all(name in sums for sums in batches)]
    level = LEVEL / (2 * len(names))
    rows = []
    for name in names:
        distances = [_no_luck(sums[name].distances()) for sums in batches]
        results = [size_test(name, distances, level, exact), sign_test(name, distances, level, over="batches")]
        failed = [result.failure for result in results if not result.quantity.holds]
        size = results[0].quantity
        error = max(sums[name].errors().tested for sums in batches)
        rows.append(Row(name, error, size.tested.median, size.reordered.median, failed[0] if failed else ""))
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
    """Takes a lucky reordered run as an average one: a single number is often nearer to the reference than expected."""
    return replace(distances, reordered=max(distances.reordered, 1.0))
