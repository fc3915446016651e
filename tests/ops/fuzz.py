"""Calls made at random.

    python -m tests.ops.fuzz --minutes 5 --seed 0         on the GPU if there is one; without, on the PyTorch reference

In a call some arguments are not what they should be: another shape, dtype, device, layout or type, a number out of range. Every
call must work, forward and backward, or raise a ValueError or TypeError that names the argument.
"""

import argparse
import inspect
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ops

from .cases import BF16, FP16, FP32, unaligned

DTYPES = (FP32, BF16, FP16)
NOT_TENSORS = (None, 0, 1.5, "x", [1.0], (), object())
NUMBERS = (0.0, 0.1, 0.5, 1.0, -0.1, 2, float("nan"), float("inf"), -float("inf"), 1e-45, True, "0.1", None, 1 << 70, [0.1])
FUNCTIONS = (
    ops.norm_fn, ops.layer_norm_fn, ops.rms_norm_fn, ops.layer_norm_linear_fn, ops.seeded_dropout, ops.dropout_mask,
    ops.LayerNorm, ops.RMSNorm,
)  # fmt: skip
ALWAYS = ("norm", "x", "weight", "bias", "norm_weight", "norm_bias", "linear_weight", "linear_bias")


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


def problem(call: Call) -> str | None:
    """What is wrong with how the call went. An error that names an argument is right."""
    try:
        result = call.function(**call.arguments)
    except (ValueError, TypeError) as error:
        names = inspect.signature(call.function).parameters
        return None if any(name in str(error) for name in names) else f"{type(error).__name__} that names no argument: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    try:
        outputs = [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, Tensor)]
        total = sum(t.float().sum() for t in outputs if t.requires_grad)
        if isinstance(total, Tensor):
            total.backward()
    except Exception as error:
        return f"backward: {type(error).__name__}: {error}"
    for name, value in call.arguments.items():
        if isinstance(value, Tensor) and value.is_leaf and value.grad is not None and value.grad.shape != value.shape:
            return f"the gradient of {name} has shape {tuple(value.grad.shape)}"
    return None


def wrong(seed: int, number: int, device: torch.device) -> str | None:
    """Call `number` and what is wrong with how it went."""
    torch.manual_seed(number)
    call = random_call(random.Random(f"{seed}:{number}"), device)
    found = problem(call)
    if device.type == "cuda":
        torch.cuda.synchronize()  # so that what a kernel does to memory is told of its own call
    return found and f"#{number} {call}\n    {found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="start no call after them (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all calls (%(default)s)")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{ops.backend_for(device)} on {device}, seed {options.seed}")
    end, number, mistakes = time.monotonic() + 60 * options.minutes, 0, 0
    while time.monotonic() < end:
        if found := wrong(options.seed, number, device):
            mistakes += 1
            print(found, flush=True)
        number += 1
    print(f"{number:,} calls, {mistakes:,} wrong")
    raise SystemExit(mistakes > 0)


if __name__ == "__main__":
    main()
