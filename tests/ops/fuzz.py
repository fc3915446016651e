"""Calls made at random, right ones and wrong ones.

    python -m tests.ops.fuzz --minutes 5 --seed 0         on the GPU if there is one; without, on the PyTorch reference
    python -m tests.ops.fuzz --seed 0 --only 1234         one call again
    python -m tests.ops.fuzz --seed 0 --calls 5000        the first 5000 again: which calls they are, the seed says alone

`random_call` draws a call of a public function in which some arguments are not what they should be: another shape, dtype,
device, layout or type, a number out of range. Every call must work, forward and backward, or raise a ValueError or TypeError
that names the argument. `random_case` draws a right call, whose results must be as near to the reference in fp64 as PyTorch's.
"""

import argparse
import inspect
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ops

from .cases import BF16, FP16, FP32, OPTIONS, Case, oracle, ours, pytorch, unaligned
from .cases import inputs as case_inputs

DTYPES = (FP32, BF16, FP16)
NOT_TENSORS = (None, 0, 1.5, "x", [1.0], (), object())
NUMBERS = (0.0, 0.1, 0.5, 1.0, -0.1, 2, float("nan"), float("inf"), -float("inf"), 1e-45, True, "0.1", None, 1 << 70, [0.1])
FUNCTIONS = (
    ops.norm_fn, ops.layer_norm_fn, ops.rms_norm_fn, ops.layer_norm_linear_fn, ops.seeded_dropout, ops.dropout_mask,
    ops.LayerNorm, ops.RMSNorm,
)  # fmt: skip
ALWAYS = ("norm", "x", "weight", "bias", "norm_weight", "norm_bias", "linear_weight", "linear_bias")


class Outcome(StrEnum):
    worked = "worked"  # of a right call also: it is as accurate as PyTorch
    refused = "refused"  # by an error that names the argument
    wrong = "wrong"


@dataclass
class Call:
    function: Callable
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.function.__name__}({', '.join(f'{name}={_shown(value)}' for name, value in self.arguments.items())})"


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    strides = f"strides {value.stride()}" if value.layout == torch.strided else value.layout
    return f"{value.dtype} {tuple(value.shape)} {strides} {value.device}"


def random_call(draw: random.Random, device: torch.device) -> Call:
    function = draw.choice(FUNCTIONS)
    mistakes = draw.choice((0.0, 0.05, 0.2))  # the chance of each argument
    lead = tuple(draw.randint(0 if draw.random() < 0.1 else 1, 5) for _ in range(draw.randint(0, 3)))
    n = draw.choice((1, 2, 7, 8, 16, 33, 100))
    call = Call(function)
    for name in inspect.signature(function).parameters:
        if draw.random() < mistakes:
            call.arguments[name] = _odd(draw, device, lead, n)
        elif (name in ALWAYS or draw.random() < 0.4) and (value := _right(name, draw, device, lead, n)) is not ...:
            call.arguments[name] = value
    needed = {"seed": 3, "p": 0.5, "rows": 3, "cols": 8, "hidden_size": n, "norm": "rmsnorm"}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in needed and parameter.default is parameter.empty:
            call.arguments.setdefault(name, needed[name])
    return call


def _right(name: str, draw: random.Random, device: torch.device, lead: tuple[int, ...], n: int) -> Any:
    """A value for this argument; an ellipsis: leave it out."""
    some, tensor = draw.choice, partial(_tensor, draw, device)
    values: dict[str, Callable[[], Any]] = {
        "x": lambda: tensor((*lead, n), layouts=True),
        "out": lambda: torch.empty((*lead, n), device=device, dtype=some(DTYPES)) if draw.random() < 0.3 else ...,
        "weight": lambda: some((None, tensor((n,)))),
        "rowscale": lambda: some((None, tensor(lead), tensor((math.prod(lead),)))),
        "linear_weight": lambda: tensor((6, n)),
        "linear_bias": lambda: some((None, tensor((6,)))),
        "norm": lambda: some([kind for norm in ops.Norm for kind in (norm, norm.name)]),
        "branch_norm": lambda: some((None, *ops.Norm, *[norm.name for norm in ops.Norm])),
        "scalars": lambda: some((None, tensor((1,)), tensor((2,)))),
        "residual_scale": lambda: some((1.0, 0.5, 2)),
        "p": lambda: some((0.0, 0.1, 0.9999999)),
        "eps": lambda: some((0.0, 1e-5, 1)),
        "seed": lambda: some((0, -1, 1 << 80, torch.tensor([draw.getrandbits(62)], device=device))),
        "out_dtype": lambda: some((None, *DTYPES)),
        "size": lambda: some((1, 8, 33)),
        "stream": lambda: some((0, 1, 7)),
        "device": lambda: some((str(device), device)),
        "dtype": lambda: some(DTYPES),
    }
    alike = {"residual": "x", "residual_out": "out", "bias": "weight", "norm_weight": "weight", "norm_bias": "weight"}
    alike |= {"branch_weight": "weight", "branch_bias": "weight", "branch_scalars": "scalars"}
    alike |= {"dropout_p": "p", "rows": "size", "cols": "size", "hidden_size": "size"}
    name = name.removesuffix("1")
    return values.get(alike.get(name, name), lambda: draw.random() < 0.5)()  # the rest are flags


def _odd(draw: random.Random, device: torch.device, lead: tuple[int, ...], n: int) -> Any:
    """Something that may be right by accident."""
    shapes = ((), (n,), (n + 1,), (*lead, n), (*lead, n, 1), (*lead, n + 1), (1, n), (0,), lead, (3, 1), (1,))
    dtypes = (torch.int64, torch.bool, torch.float64, torch.complex64, torch.uint8, torch.int32)
    odd_tensors: tuple[Callable[[], Any], ...] = (
        lambda: _tensor(draw, device, draw.choice(shapes), layouts=True),
        lambda: torch.zeros(draw.choice(shapes), device=device, dtype=draw.choice(dtypes)),
        lambda: torch.zeros((*lead, n), device="meta"),
        lambda: torch.zeros((*lead, n)).to("cpu"),
        lambda: torch.eye(n, device=device).to_sparse(),
        lambda: torch.zeros((2, n)).numpy() if draw.random() < 0.5 else torch.float16,
    )
    return draw.choice((lambda: draw.choice(NOT_TENSORS), lambda: draw.choice(NUMBERS), *odd_tensors))()


def _tensor(draw: random.Random, device: torch.device, shape: tuple[int, ...], layouts: bool = False) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw.getrandbits(32)))
    values = values.to(device, draw.choice(DTYPES))
    if layouts and values.dim():
        values = LAYOUTS[draw.choice([*LAYOUTS])](values)
    return values.detach().requires_grad_(draw.random() < 0.5)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "rows apart": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "columns apart": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "unaligned": unaligned,
    "one row for all": lambda t: t[:1].expand(t.shape) if t.dim() > 1 else t,
}


def tried(call: Call) -> tuple[Outcome, str]:
    """How the call went, and what is wrong with that."""
    try:
        result = call.function(**call.arguments)
        if isinstance(result, torch.nn.Module):
            return Outcome.worked, ""
    except (ValueError, TypeError) as error:
        if any(name in str(error) for name in inspect.signature(call.function).parameters):
            return Outcome.refused, ""
        return Outcome.wrong, f"{type(error).__name__} that names no argument: {error}"
    except Exception as error:
        return Outcome.wrong, f"{type(error).__name__}: {error}"
    try:
        outputs = [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, Tensor)]
        total = sum(t.float().sum() for t in outputs if t.requires_grad)
        if isinstance(total, Tensor):
            total.backward()
        for name, value in call.arguments.items():
            if isinstance(value, Tensor) and value.is_leaf and value.grad is not None and value.grad.shape != value.shape:
                return Outcome.wrong, f"the gradient of {name} has shape {tuple(value.grad.shape)}"
    except Exception as error:
        return Outcome.wrong, f"backward: {type(error).__name__}: {error}"
    return Outcome.worked, ""


def random_case(draw: random.Random, device: torch.device) -> Case:
    options: dict[str, Any] = OPTIONS | dict.fromkeys(("residual", "weight", "out"), (None, *DTYPES))
    options |= {"x": DTYPES, "x1": (None, None, *DTYPES), "dropout_p": (0.0, 0.0, 0.1, 0.5)}
    options |= dict.fromkeys(("zero_centered", "residual_in_fp32"), (False, True))
    options |= {"m": (1, 2, 5, 33, 300), "n": (4, 16, 40, 128, 255, 768, 1024, 2304, 4100, 12_288, 16_392)}
    if device.type == "cpu":  # the interpreter is slow
        options |= {"m": (1, 2, 5, 9), "n": (4, 16, 40, 128, 150, 255)}
    return Case(**{name: draw.choice(values) for name, values in options.items()})


def inaccuracy(case: Case, device: torch.device, layouts: dict[str, str]) -> str | None:
    """What of a right call is farther from fp64 than twice what PyTorch's operations are, and a little.

    The little: a unit in its last place, and what chance does to the rounding of few numbers. Left out is drowscale of rows
    whose factor is next to nothing: a norm divides by it, so that two such rows carry the whole error, and PyTorch's is luck.
    """
    tensors = {}
    for name, t in case_inputs(case, device).items():
        tensors[name] = LAYOUTS[layouts.get(name, "contiguous")](t.detach()).requires_grad_(t.requires_grad)
    exact, mine, theirs = oracle(tensors, case), ours(tensors, case), pytorch(tensors, case)
    coarsest = max(torch.finfo(t.dtype).eps for t in (*tensors.values(), *mine.values()))
    for name in exact:
        if mine[name].dtype != theirs[name].dtype:
            return f"{name} is {mine[name].dtype}, expected {theirs[name].dtype}"
        expected, *found = (results[name].detach().double() for results in (exact, mine, theirs))
        if "rowscale" in name:
            judged = tensors[name.removeprefix("d")].abs() > 0.2
            expected, *found = (t.flatten()[judged] for t in (expected, *found))
            if not judged.any():
                continue
        # A gradient may be a small difference of large numbers: beside the upstream gradient, about 1, and drowscale, which
        # a norm makes next to nothing, beside a sum of N such.
        natural = (0.3 * math.sqrt(case.n) if "rowscale" in name else 0.1) * math.sqrt(expected.numel())
        scale = max(expected.norm().item(), natural)
        error, allowed = ((t - expected).norm().item() / scale for t in found)
        chance = 4 * coarsest / math.sqrt(expected.numel())
        if not error <= 2 * allowed + torch.finfo(mine[name].dtype).eps + chance:
            return f"{name}: error {error:.2e}, PyTorch's {allowed:.2e}"
    return None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="start no call after them (%(default)s)")
    parser.add_argument("--calls", type=int, help="so many calls, however long they take")
    parser.add_argument("--seed", type=int, default=0, help="of all calls (%(default)s)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="the number of a call to make again")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.only is not None:
        outcome, what = attempt(options.seed, options.only, device)
        print(f"{outcome}: {what}")
        raise SystemExit(outcome is Outcome.wrong)
    print(f"{ops.backend_for(device)} on {device}, seed {options.seed}")
    counts: Counter[Outcome] = Counter()
    number, end = 0, time.monotonic() + 60 * options.minutes
    while number < options.calls if options.calls is not None else time.monotonic() < end:
        outcome, what = attempt(options.seed, number, device)
        counts[outcome] += 1
        if outcome is Outcome.wrong:
            print(f"#{number} {what}", flush=True)
        number += 1

    print(f"{number:,} calls: {', '.join(f'{counts[outcome]:,} {outcome}' for outcome in Outcome)}")
    raise SystemExit(counts[Outcome.wrong] > 0)


def attempt(seed: int, number: int, device: torch.device) -> tuple[Outcome, str]:
    """How call `number` went, and the call and what was wrong with it.

    Every fourth is a right one, compared with the reference.
    """
    draw = random.Random(f"{seed}:{number}")
    torch.manual_seed(number)
    if number % 4:
        call = random_call(draw, device)
        outcome, problem = tried(call)
        what = str(call)
    else:
        case = random_case(draw, device)
        layouts = {name: draw.choice([*LAYOUTS]) for name in ("x", "residual", "x1")}
        problem = inaccuracy(case, device, layouts) or ""
        outcome = Outcome.wrong if problem else Outcome.worked
        what = f"{case} {layouts}"
    if device.type == "cuda":
        torch.cuda.synchronize()  # so that what a kernel does to memory is told of its own call
    return outcome, f"{what}\n    {problem}" if problem else what


if __name__ == "__main__":
    main()
