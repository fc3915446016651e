"""Peak bytes of a chain of dropout+add+norm blocks, forward and backward: fused against PyTorch's own operators.

python -m benchmarks.memory

Each block's normalised output is the next block's x, so nothing but the blocks takes memory. Counted from what is allocated
before forward: `kept` is what stands when forward has returned, without its output y, which the next sublayer has anyway;
`peak` is the most that ever stood until backward has returned. PyTorch counts no bytes of a CPU: there both are missing.
"""

import argparse
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks import command, report
from benchmarks.cases import CASES, Function, Shape, TensorSet, make_inputs
from benchmarks.command import Record
from benchmarks.providers import PROVIDERS, compiled, plain_torch
from measure import timing
from measure.progress import progress, show_current
from measure.schedule import no_garbage_collection
from measure.tables import NOTHING, compact_markdown

ROWS, WIDTHS, BLOCKS = 32768, (768, 4096), 8
HEADER = ("block", "stream", "rows × width", "provider", "MiB kept for backward, a block", "MiB at the peak, a block")
COMPARED = ("ours", "torch", "compile", "flash-attn")


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    return command.parse(command.parser("memory", __doc__.splitlines()[0], COMPARED), argv)


def chain(provider: str, shape: Shape) -> Function:
    """BLOCKS norms in a row. torch.compile gets the whole chain, as it gets a whole model."""
    block = plain_torch(shape) if provider == "compile" else PROVIDERS[provider](shape)
    assert block is not None

    def blocks(x: Tensor, r: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        for _ in range(BLOCKS):
            x, r = block(x, r, *parameters)
        return x, r

    return compiled(blocks) if provider == "compile" else blocks


def bytes_of(function: Function, inputs: TensorSet, device: torch.device) -> dict[str, int | None]:
    """Kept between forward and backward, and at the peak; of the second of two passes, which compiles nothing."""
    for _ in range(2):
        with no_garbage_collection():  # else a tensor of somebody else's, freed on the way, would count as this chain's thrift
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            before = allocated(device)
            y, r = function(*inputs.args)
            kept = allocated(device) - before - y.nbytes
            grads = torch.autograd.grad((y, r), inputs.leaves, inputs.upstream)
            peak = (torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0) - before
            del y, r, grads
    return {"kept": kept, "peak": peak} if device.type == "cuda" else {"kept": None, "peak": None}


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of(argv)
    device, names = options.device, command.importable(options.provider, COMPARED)
    results = command.open_results(options, names)
    shapes = [
        Shape(CASES[case], stream, "bf16", command.rows_on(device, ROWS), width)
        for width in WIDTHS[: 1 if options.quick else None]
        for case in ("dropout_add_ln", "dropout_add_rms")
        for stream in ("bf16", "fp32")
    ]
    with timing.side_stream(device), progress(len(shapes) * len(names), "memory") as bar:
        for shape, provider in product(shapes, names):
            cell: Record = {"case": shape.case.name, "residual_dtype": shape.residual, "M": shape.rows, "N": shape.width}
            cell |= {"blocks": BLOCKS, "provider": provider}
            show_current(bar, f"{report.cell_label(cell)}, {provider}")
            torch._dynamo.reset()
            try:
                (inputs,) = make_inputs(shape, 1, device)
                results.add([{**cell, **bytes_of(chain(provider, shape), inputs, device)}])
            except Exception as error:  # a library's failure is a result
                results.add([{**cell, "error": timing.describe(error)}])
            inputs = None  # type: ignore[assignment]
            timing.free_memory(device)
            bar.update()
    print(markdown({"records": results.finish()}))


def markdown(file: dict[str, Any]) -> str:
    """Of the widest rows."""
    widest = max(record["N"] for record in file["records"])
    rows = [
        [CASES[r["case"]].label, r["residual_dtype"], f"{r['M']} × {r['N']}", r["provider"], _mib(r, "kept"), _mib(r, "peak")]
        for r in file["records"]
        if r["N"] == widest
    ]
    return compact_markdown(HEADER, rows)


def _mib(record: Record, field: str) -> str:
    if record.get("error"):
        return "failed"
    return NOTHING if record[field] is None else f"{record[field] / record['blocks'] / 2**20:.0f}"


if __name__ == "__main__":
    main()
