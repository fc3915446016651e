"""What one call costs the CPU: add+RMSNorm on tensors so small that the device never holds the host up.

python -m benchmarks.host

`ours` is `rms_norm_fn`, and `torch` is PyTorch's two operators; `compile` and `ours-compiled` are torch.compile of these. The
libraries are called as the model calls them.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import command
from benchmarks.cases import CASES, EPS, Function, Shape, TensorSet, make_inputs
from benchmarks.command import Record
from benchmarks.providers import PROVIDERS, compiled
from measure import timing
from measure.tables import NOTHING, compact_markdown
from ops import rms_norm_fn

SHAPE = Shape(CASES["add_rms"], "bf16", "bf16", 8, 64)
FORWARD, WHOLE = DIRECTIONS = ("forward", "forward+backward")
# Calls between two synchronisations. Each launches at most a dozen kernels, and the driver queues about a thousand launches
# before it makes the host wait.
BATCH = 20


def ours(x: Tensor, residual: Tensor, weight: Tensor, *_: Any) -> Any:
    return rms_norm_fn(x, weight, None, residual=residual, prenorm=True, eps=EPS)


def plain(x: Tensor, residual: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    r = residual + x
    return F.rms_norm(r, weight.shape, weight, EPS), r


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    return command.parse(command.parser("host", __doc__, PROVIDERS, rounds=100), argv)


def both(function: Function, inputs: TensorSet) -> object:
    """Backward goes through torch.autograd.grad: no .grad to add to."""
    return torch.autograd.grad(function(*inputs.args), inputs.leaves, inputs.upstream)


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of(argv)
    device, names = options.device, command.importable(options.provider, PROVIDERS)
    results = command.open_results(options)
    with timing.side_stream(device):
        own: dict[str, Function] = {"ours": ours, "torch": plain, "compile": compiled(plain)}
        functions = {name: function for name in names if (function := own.get(name) or PROVIDERS[name](SHAPE)) is not None}
        if "ours" in functions:
            functions["ours-compiled"] = compiled(ours)
        (inputs,) = make_inputs(SHAPE, 1, device)
        for direction in DIRECTIONS:
            contenders = []
            for name, function in functions.items():
                call = partial(function, *inputs.args) if direction == FORWARD else partial(both, function, inputs)
                contenders.append(timing.Contender(name, partial(list, [call] * BATCH)))
            outcomes = timing.time_calls(contenders, device, rounds=options.rounds, round_ms=0, of_host=True)
            cell: Record = {"case": SHAPE.case.name, "direction": direction, "residual_dtype": SHAPE.residual}
            cell |= {"M": SHAPE.rows, "N": SHAPE.width}
            results.add({**cell, "provider": name, **o.record(outcomes.get("ours"))} for name, o in outcomes.items())
    print(markdown({"records": results.finish()}))


def markdown(file: dict[str, Any]) -> str:
    """Of each provider and direction the median CPU microseconds a call and, in brackets, 10th to 90th percentile."""
    cells = {
        (r["provider"], r["direction"]): "failed" if r.get("error") else f"{r['us']:.0f} ({r['p10']:.0f} to {r['p90']:.0f})"
        for r in file["records"]
    }
    names = [name for name in dict.fromkeys(("ours", "ours-compiled", *PROVIDERS)) if (name, FORWARD) in cells]
    rows = [[name, *(cells.get((name, direction), NOTHING) for direction in DIRECTIONS)] for name in names]
    return compact_markdown(("CPU µs a call", "forward", "forward + backward"), rows)


if __name__ == "__main__":
    main()
