"""Peak bytes of a chain of dropout+add+norm blocks, forward and backward: fused against PyTorch's own operators.

python -m benchmarks.memory

Each block's normalised output is the next block's x, so nothing but the blocks takes memory. Counted from what is allocated
before forward: `kept` is what stands when forward has returned, without its output y, which the next sublayer has anyway;
`peak` is the most that ever stood until backward has returned.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import command, report
from benchmarks.cases import CASES, DTYPES, Case, Inputs, Setting, make_inputs
from benchmarks.command import Record
from benchmarks.providers import PROVIDERS, compiled, torch_expression
from measure import timing
from measure.progress import progress, show_current
from measure.schedule import no_garbage_collection
from measure.tables import NOTHING, aligned, compact_markdown

ROWS = 32768
HEADER = ("block", "stream", "rows × width", "provider", "MiB kept for backward, a block", "MiB at the peak, a block")
MEMORY_CASES = ("dropout_add_ln", "dropout_add_rms")
Chain = Callable[[Inputs], tuple[Tensor, Tensor]]


def options_of(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = command.parser("memory", __doc__.splitlines()[0])
    parser.add_argument(
        "--case", nargs="+", choices=MEMORY_CASES, default=list(MEMORY_CASES), metavar="CASE",
        help=f"of {', '.join(MEMORY_CASES)} (both)",
    )  # fmt: skip
    parser.add_argument("--residual", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"], help="stream (both)")
    parser.add_argument("--rows", type=command.positive, help=f"rows ({ROWS}, {command.CPU_ROWS} on the CPU)")
    parser.add_argument("--width", nargs="+", type=command.positive, metavar="N", help="(768 4096; 768 with --quick)")
    parser.add_argument("--blocks", type=command.positive, default=8, help="length of the chain (%(default)s)")
    command.add_providers(parser)
    options = command.parse(parser, argv)
    options.rows = options.rows or command.rows_on(options.device, ROWS)
    options.width = options.width or ([768] if options.quick else [768, 4096])
    return parser, options


def chain(provider: str, case: Case, setting: Setting, blocks: int) -> Chain | None:
    """`blocks` norms in a row. torch.compile gets the whole chain, as it gets a whole model."""
    if provider == "compile":
        expression = torch_expression(case, setting)

        def all_blocks(x: Tensor, r: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            for _ in range(blocks):
                x, r = expression(x, r, weight, bias)
            return x, r

        whole = compiled(all_blocks)
        return lambda i: whole(i.x, i.residual, i.weight, i.bias)

    function = PROVIDERS[provider].make(case, setting)
    if function is None:
        return None

    def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
        for _ in range(blocks):
            y, r = function(inputs)
            inputs = replace(inputs, x=y, residual=r)
        return y, r

    return run


def measure(run: Chain, inputs: Inputs, device: torch.device) -> dict[str, int | None]:
    """Bytes kept between forward and backward, and at the peak; the second of two passes, which compiles nothing."""
    for _ in range(2):
        with no_garbage_collection():  # else a tensor of somebody else's, freed on the way, would count as this chain's thrift
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            before = allocated(device)
            y, r = run(inputs)
            kept = allocated(device) - before - y.nbytes
            grads = torch.autograd.grad((y, r), inputs.leaves, inputs.upstream)
            peak = (torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0) - before
            del y, r, grads
    return {"kept": kept, "peak": peak} if device.type == "cuda" else {"kept": None, "peak": None}  # the CPU does not count


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser, options = options_of(argv)
    device = command.pick_device(parser, options)
    names = command.importable(options.provider, ("ours", "torch", "compile", "flash-attn"))
    results = command.open_results("memory", options, device, names, argv)
    cells = [(c, r, n, p) for n in options.width for c in options.case for r in options.residual for p in names]
    with timing.side_stream(device), progress(len(cells), "memory") as bar:
        for case, residual, width, provider in cells:
            show_current(bar, f"{case} {residual} {width} {provider}")
            torch._dynamo.reset()
            setting = Setting(residual_dtype=DTYPES[residual])
            cell: Record = {"case": case, "residual_dtype": residual, "M": options.rows, "N": width, "blocks": options.blocks}
            try:
                run = chain(provider, CASES[case], setting, options.blocks)
                if run is not None:
                    (inputs,) = make_inputs(CASES[case], setting, options.rows, width, 1, device)
                    results.add([{**cell, "provider": provider, **measure(run, inputs, device)}])
            except Exception as error:  # a library's failure is a result
                results.add([{**cell, "provider": provider, "error": timing.describe(error)}])
            run = inputs = None  # type: ignore[assignment]
            timing.free_memory(device)
            bar.update()
    show(results.finish()["records"])
    if device.type == "cpu":
        print("No bytes: PyTorch counts those of a GPU alone. This shows that the program runs.")


def show(records: Sequence[Record]) -> None:
    print(aligned(HEADER, memory_rows(records)))
    for record in records:
        if record.get("error"):
            print(f"failed: {record['provider']}, {record['case']} {record['residual_dtype']}: {record['error']}")


def memory_rows(records: Sequence[Record]) -> list[list[str]]:
    """Case, stream, shape, provider: MiB at the peak, and kept between forward and backward, a block."""
    return [
        [
            CASES[record["case"]].label,
            record["residual_dtype"],
            f"{record['M']} × {record['N']}",
            record["provider"],
            _mib_a_block(record, "kept"),
            _mib_a_block(record, "peak"),
        ]
        for record in records
    ]


def _mib_a_block(record: Record, field: str) -> str:
    if record.get("error"):
        return "failed"
    return NOTHING if record[field] is None else f"{record[field] / record['blocks'] / 2**20:.0f}"


def markdown(file: dict[str, Any]) -> str:
    """The table of the docs: the widest rows."""
    widest = max(record["N"] for record in file["records"])
    chosen = [r for r in file["records"] if r["N"] == widest]
    return compact_markdown(HEADER, memory_rows(chosen))


def plot(file: dict[str, Any], folder: Path) -> Path | None:
    """memory.png: MiB a block, a line of panels for each chain; None without records."""
    records = [record for record in file["records"] if record.get("peak") is not None]
    if not records:
        return None
    chains = list(dict.fromkeys((record["M"], record["N"], record["blocks"]) for record in records))
    groups = list(dict.fromkeys((record["case"], record["residual_dtype"]) for record in records))
    figure, grid = report.bar_panels(len(chains), 2, len(groups))
    for line, (rows, width, blocks) in zip(grid, chains, strict=True):
        for axes, field, title in zip(line, ("kept", "peak"), ("kept for backward", "at the peak"), strict=True):
            values: dict[str, dict[str, float]] = {report.label(*group): {} for group in groups}
            for r in records:
                if (r["M"], r["N"], r["blocks"]) == (rows, width, blocks):
                    values[report.label(r["case"], r["residual_dtype"])][r["provider"]] = r[field] / blocks / 2**20
            report.draw_bars(axes, values, {})
            axes.set_title(f"{blocks} blocks of {rows} × {width}, {title}", loc="left", fontsize=10)
            axes.set_xlabel("MiB a block")
    path = folder / "memory.png"
    report.finish(figure, list(grid.flat), "memory of chains of fused blocks and others, x in bf16", file, path)
    return path


if __name__ == "__main__":
    command.run(main)
