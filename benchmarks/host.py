"""What one call costs the CPU: add+RMSNorm on tensors so small that the device never holds the host up.

python -m benchmarks.host

Eager calls, and beside them two compiled ones: `compile` is torch.compile of PyTorch's operations, `ours-compiled` of ours.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import command
from benchmarks.cases import CASES, Function, Shape, TensorSet, make_inputs
from benchmarks.command import Record
from benchmarks.providers import PROVIDERS, compiled
from measure import timing
from measure.progress import progress
from measure.tables import NOTHING, compact_markdown

SHAPE = Shape(CASES["add_rms"], "bf16", "bf16", 8, 64)
DIRECTIONS = ("forward", "forward+backward")
HEADER = ("CPU µs a call", "forward", "forward + backward")
# Calls between two synchronisations. Each launches at most a dozen kernels, and the driver queues about a thousand launches
# before it makes the host wait.
BATCH = 20


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    return command.parse(command.parser("host", __doc__.splitlines()[0], PROVIDERS), argv)


def both(function: Function, inputs: TensorSet) -> object:
    """Backward goes through torch.autograd.grad: no .grad to add to."""
    return torch.autograd.grad(function(*inputs.args), inputs.leaves, inputs.upstream)


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of(argv)
    device, names = options.device, command.importable(options.provider, PROVIDERS)
    results = command.open_results(options, names)
    with timing.side_stream(device), progress(len(DIRECTIONS), "host") as bar:
        functions = {name: function for name in names if (function := PROVIDERS[name](SHAPE)) is not None}
        if "ours" in functions:
            functions["ours-compiled"] = compiled(functions["ours"])
        (inputs,) = make_inputs(SHAPE, 1, device)
        for direction in DIRECTIONS:
            calls = {
                name: partial(function, *inputs.args) if direction == "forward" else partial(both, function, inputs)
                for name, function in functions.items()
            }
            # a batch of calls for each turn
            contenders = [timing.Contender(name, partial(list, [call] * BATCH)) for name, call in calls.items()]
            outcomes = timing.time_calls(contenders, device, rounds=4 * options.rounds, round_ms=0, of_host=True)
            cell: Record = {"case": SHAPE.case.name, "direction": direction, "residual_dtype": SHAPE.residual}
            cell |= {"M": SHAPE.rows, "N": SHAPE.width}
            results.add({**cell, "provider": name, **o.record(outcomes.get("ours"))} for name, o in outcomes.items())
            bar.update()
    print(markdown({"records": results.finish()}))


def markdown(file: dict[str, Any]) -> str:
    """Of each provider and direction the median CPU microseconds a call and, in brackets, 10th to 90th percentile."""
    found = {(record["provider"], record["direction"]): record for record in file["records"]}
    names = [name for name in dict.fromkeys(("ours", "ours-compiled", *PROVIDERS)) if any(name in key for key in found)]
    return compact_markdown(HEADER, [[name, *(_cell(found.get((name, of))) for of in DIRECTIONS)] for name in names])


def _cell(record: Record | None) -> str:
    if record is None:
        return NOTHING
    return "failed" if record.get("error") else f"{record['us']:.0f} ({record['p10']:.0f} to {record['p90']:.0f})"


if __name__ == "__main__":
    main()
