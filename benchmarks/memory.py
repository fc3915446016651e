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

from benchmarks import command
from benchmarks.cases import CASES, Function, Shape, TensorSet, make_inputs
from benchmarks.providers import PROVIDERS, compiled
from measure import timing
from measure.schedule import no_garbage_collection
from measure.tables import NOTHING, compact_markdown

ROWS, WIDTH, BLOCKS = 32768, 4096, 8
HEADER = ("block", "stream", "rows × width", "provider", "MiB kept for backward, a block", "MiB at the peak, a block")
COMPARED = ("ours", "torch", "compile", "flash-attn")


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    return command.parse(command.parser("memory", __doc__, COMPARED), argv)


def chain(provider: str, shape: Shape) -> Function:
    """BLOCKS norms in a row. torch.compile gets the whole chain, as it gets a whole model."""
    block = PROVIDERS["torch" if provider == "compile" else provider](shape)
    assert block is not None

    def blocks(x: Tensor, r: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        for _ in range(BLOCKS):
            x, r = block(x, r, *parameters)
        return x, r

    return compiled(blocks) if provider == "compile" else blocks


def bytes_of(function: Function, inputs: TensorSet, device: torch.device) -> dict[str, int | None]:
    """Kept between forward and backward, and at the peak; of the second of two passes, which compiles nothing."""
    kept = peak = None
    for _ in range(2):
        with no_garbage_collection():  # else a tensor of somebody else's, freed on the way, would count as this chain's thrift
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            y, r = function(*inputs.args)
            if device.type == "cuda":
                kept = torch.cuda.memory_allocated(device) - before - y.nbytes
            grads = torch.autograd.grad((y, r), inputs.leaves, inputs.upstream)
            if device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(device) - before
            del y, r, grads
    return {"kept": kept, "peak": peak}


def main(argv: Sequence[str] | None = None) -> None:
    options = options_of(argv)
    device, names = options.device, command.importable(options.provider, COMPARED)
    results = command.open_results(options)
    with timing.side_stream(device):
        for case, stream, provider in product(("dropout_add_ln", "dropout_add_rms"), ("bf16", "fp32"), names):
            shape = Shape(CASES[case], stream, "bf16", command.rows_on(device, ROWS), WIDTH)
            cell = {"case": case, "residual_dtype": stream, "M": shape.rows, "N": WIDTH, "blocks": BLOCKS, "provider": provider}
            torch._dynamo.reset()
            (inputs,) = make_inputs(shape, 1, device)
            results.add([cell | bytes_of(chain(provider, shape), inputs, device)])
            del inputs
            timing.free_memory(device)
    print(markdown({"records": results.finish()}))


def markdown(file: dict[str, Any]) -> str:
    rows = []
    for r in file["records"]:
        mib = [NOTHING if r[what] is None else f"{r[what] / r['blocks'] / 2**20:.0f}" for what in ("kept", "peak")]
        rows.append([CASES[r["case"]].label, r["residual_dtype"], f"{r['M']} × {r['N']}", r["provider"], *mib])
    return compact_markdown(HEADER, rows)


if __name__ == "__main__":
    main()
