"""Two versions of somebody's model: do they compute the same, and which is faster?

    check_parity(before, after, batch)      compares one forward and backward pass, as parity.py compares training runs
    measure(before, after, batch)           times forward and backward, as timing.py times training steps

Statistics, the other order of summation, alternating blocks and conclusions are those of the ablation. They are here and not in
`ops`, because `ops` needs torch and triton alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ablation.rounding import FEW, GROSS_FEW, LEVEL, Sums, sign_test, size_test
from adoption.models import (
    Loss,
    autocasting,
    call,
    check_before_and_after,
    check_comparable,
    default_loss,
    device_of,
    exact_copy,
    fused_norms,
    left_out,
    norms_of,
    norms_of_attention,
    reordered_copy,
    results_of,
)
from measure.clock import StepClock
from measure.comparison import AGAIN, FUSED, NO_KERNEL, TORCH, Comparison, compare_blocks, conclusion, cycle_times
from measure.schedule import LEAD_IN, run_blocks
from measure.statistics import LEAST_SAMPLES
from measure.tables import aligned, interval_text, number
from ops.kernels import runs_kernels

SHOWN = 8  # rows of a table
SAME_BITS = " model_b gives the same bits as model_a: is anything replaced in it?"
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
        return f"forward + backward: {number(self.a_ms)} ms of model_a; model_b takes {apart} ms more; {self.verdict}"


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

    The reference is model_a in higher precision: fp64, or fp32 if the weights or autocast are bf16 or fp16, or if the model
    refuses fp64. Its norms are computed from their formula. Compared are the output, the loss, every parameter's gradient, and
    the scale of every row of a norm's output. The expected error is measured: from model_a in its own precision, and from
    model_a with the sums of its norms in another order. `ablation/parity.py` states the statistic; here batches take the place
    of seeds. The check fails if the mean error over the batches is more than ten times the expected one. (For a single number,
    such as the loss, rounding alone does that in one batch of 200.) With 4 batches or more it also fails if a t-test shows
    that the error is larger by more than a quarter. 8 batches find an error of twice the size.

    Both models are in evaluation mode, without dropout, unless there is a seed. bf16 hides mistakes that are smaller than a
    rounding step, so check in fp32 too.

    Args:
        model_a: as it was, none of its norms fused; e.g. a deepcopy made ahead of `adopt`. Four models' worth of memory is
            needed on its device.
        model_b: with the same parameters, by name and value, and something in it replaced. Neither is compiled.
        batch: a mapping (keyword arguments), a tuple (arguments) or a tensor; or a list of such, all different.
        loss: of the model's output, a scalar; by default its `loss`, a scalar in it, or else a fixed random projection of it.
        autocast: dtype of an autocast around both; None: no autocast.
        seed: compare in training mode, torch's generators seeded with it before each forward; for models that draw the same
            numbers in the same order, as those with drop path do, and those with dropout do not.

    Raises:
        ValueError: the models are not one before and after; or one is compiled; or a batch comes twice; or model_a in higher
            precision has another output or other gradients, and so is no reference.
    """
    check_before_and_after("check_parity", model_a, model_b)
    check_comparable(model_a, model_b)
    batches = batch if isinstance(batch, list) else [batch]
    if len({id(one) for one in batches}) < len(batches):
        raise ValueError("check_parity: batch is a list that has a batch twice; a t-test takes them for draws, so give others")
    dtypes = {p.dtype for p in model_a.parameters()} | ({autocast} if autocast else set())
    wide, exact = (torch.float64, "fp64") if dtypes <= {torch.float32, torch.float64} else (torch.float32, "fp32")
    norms = norms_of(model_a)
    reference, reordered = exact_copy(model_a, norms, wide), reordered_copy(model_a, norms)
    judged: list[dict[str, Sums]] = []
    refused = ""
    same_bits = not fused_norms(model_b)  # which without kernels may compute as model_a does
    run = partial(results_of, loss=loss or default_loss, seed=seed)
    seen = [name for name in norms if name not in norms_of_attention(model_b)]
    for one in batches:
        rows: dict[str, Tensor] = {}
        try:
            a = run(reference, one, rows=rows, norms=norms, floats=wide)
        except Exception as error:  # an assertion on dtypes, a function that takes no fp64
            if wide == torch.float32 or torch.float64 in dtypes:
                error.add_note(f"check_parity: its reference, a copy of model_a in {exact}, raised this")
                raise
            why = (str(error).splitlines() or [""])[0]
            refused = f" The reference is in fp32 too: in fp64, a copy of model_a raised {type(error).__name__}: {why}"
            wide, exact, reference, rows = torch.float32, "fp32", exact_copy(model_a, norms, torch.float32), {}
            a = run(reference, one, rows=rows, norms=norms, floats=wide)
        runs = ((model_a, norms), (model_b, seen), (reordered, norms))
        b, c, d = (run(model, one, rows=rows, norms=names, autocast=autocast) for model, names in runs)
        shapes = [[tuple(t.shape) for name, t in found.items() if name.startswith("output")] for found in (b, c)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"check_parity: model_a returns float tensors of shapes {shapes[0]}, model_b {shapes[1]}")
        _check_reference(a, b, exact)
        sums = {name: Sums() for name in a if name in b and name in c and name in d}
        for name, of in sums.items():
            of.add(a[name], b[name], c[name], d[name])
            same_bits = same_bits and torch.equal(b[name], c[name])
        judged.append(sums)
    check = _judged(judged, ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)), exact)
    said = left_out(model_a, batches[0], has_loss="loss" in a)
    return replace(check, verdict=check.verdict + SAME_BITS * same_bits + refused + said)


def _check_reference(reference: Mapping[str, Tensor], own: Mapping[str, Tensor], exact: str) -> None:
    """Refuses a reference that computes something else: beside it every error would look expected."""
    for kind, accepted in (("output", NO_ROUNDING), ("gradient of ", ANOTHER_LOSS)):
        pairs = [(own[name].to(a.device).double(), a.double()) for name, a in reference.items() if name.startswith(kind)]
        size = math.hypot(*(float(a.norm()) for _, a in pairs))
        error = math.hypot(*(float((b - a).norm()) for b, a in pairs)) / max(size, 1e-300)
        if error > accepted:
            raise ValueError(
                f"check_parity: the {kind.split()[0]}s of model_a are {error:.2g} away from those of its copy in {exact}, "
                "relative, which is more than rounding; make what forward and loss compute follow the dtype of their input (a "
                "mask made in fp32, a cast), and draw random numbers by seed=. A function that is an attribute of model_a and "
                "holds its modules is not copied by copy.deepcopy: the copy runs the modules of the first through it"
            )


def _judged(batches: Sequence[Mapping[str, Sums]], precision: str, exact: str) -> ParityCheck:
    names = [name for name in batches[0] if all(name in sums for sums in batches)]
    level = LEVEL / (2 * len(names))
    rows = []
    for name in names:
        distances = [sums[name].distances() for sums in batches]
        # A lucky reordered run counts as an average one: a single number is often nearer to the reference than expected.
        distances = [replace(one, reordered=max(one.reordered, 1.0)) for one in distances]
        size, sign = size_test(name, distances, level, exact), sign_test(name, distances, level, over="batches")
        error = max(sums[name].errors()[1] for sums in batches)
        rows.append(Row(name, error, size.tested.median, size.reordered.median, size.failure or sign.failure))
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
    return ParityCheck(rows, words)


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
        ValueError: the models are not one before and after, as for `check_parity`; or cycles is less than 6.
    """
    check_before_and_after("measure", model_a, model_b)
    if cycles < LEAST_SAMPLES:
        raise ValueError(f"measure: cycles must be {LEAST_SAMPLES} or more, got {cycles}")
    device, criterion = device_of(model_a, batch), loss or default_loss
    before = {p: p.grad for model in (model_a, model_b) for p in model.parameters()}

    def step(model: nn.Module) -> None:
        with autocasting(device, autocast):
            value = criterion(call(model, batch))
        value.backward()
        for p in model.parameters():
            p.grad = None

    steps = {name: partial(step, model) for name, model in ((TORCH, model_a), (AGAIN, model_a), (FUSED, model_b))}
    try:
        for p in before:
            p.grad = None  # else the first step would add to it
        for one in steps.values():
            for _ in range(warmup_steps):
                one()
        blocks = alternating_blocks(steps, device, cycles, block_steps)
    finally:
        for p, grad in before.items():
            p.grad = grad
    comparison, control = (compare_blocks(blocks[TORCH], blocks[name]) for name in (FUSED, AGAIN))
    a_ms, b_ms = (median(cycle_times(blocks[name])) for name in (TORCH, FUSED))
    words = conclusion("model_b", {"model_a": comparison}, control)
    return Timing(a_ms, b_ms, comparison, control, words if runs_kernels(device) else f"{words}. {NO_KERNEL}")


def alternating_blocks(
    steps: Mapping[str, Callable[[], Any]], device: torch.device, cycles: int, block_steps: int
) -> dict[str, list[list[float]]]:
    """The times in ms of so many steps of each arm in each of its blocks, by name."""

    def block(name: str, _: int) -> list[float]:
        return StepClock(device, warmup=LEAD_IN).times(lambda _: steps[name](), range(LEAD_IN + block_steps))

    return run_blocks(block, list(steps), cycles, seed=0)
