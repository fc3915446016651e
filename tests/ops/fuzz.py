"""Calls made at random, whose results must be as near to the reference in fp64 as PyTorch's.

python -m tests.ops.fuzz --minutes 5 --seed 0         on the GPU if there is one; without, on the PyTorch reference
python -m tests.ops.fuzz --seed 0 --only 1234         one call again
"""

import argparse
import math
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ops

from .cases import BF16, FP16, FP32, OPTIONS, Case, oracle, ours, pytorch, unaligned
from .cases import inputs as case_inputs

DTYPES = (FP32, BF16, FP16)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "rows apart": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "columns apart": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "unaligned": unaligned,
    "one row for all": lambda t: t[:1].expand(t.shape) if t.dim() > 1 else t,
}


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


def attempt(seed: int, number: int, device: torch.device) -> str | None:
    """Call `number`, and what is wrong with it, or None."""
    draw = random.Random(f"{seed}:{number}")
    torch.manual_seed(number)
    case = random_case(draw, device)
    layouts = {name: draw.choice([*LAYOUTS]) for name in ("x", "residual", "x1")}
    try:
        problem = inaccuracy(case, device, layouts)
        if device.type == "cuda":
            torch.cuda.synchronize()  # so that what a kernel does to memory is told of its own call
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return problem and f"#{number} {case} {layouts}\n    {problem}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="start no call after them (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all calls (%(default)s)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="the number of a call to make again")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{ops.backend_for(device)} on {device}, seed {options.seed}")
    number, wrong, end = options.only or 0, 0, time.monotonic() + 60 * options.minutes
    while True:
        if problem := attempt(options.seed, number, device):
            print(problem, flush=True)
            wrong += 1
        number += 1
        if options.only is not None or time.monotonic() > end:
            break
    print(f"up to call {number - 1:,}: {wrong:,} wrong")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
