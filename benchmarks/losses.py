"""Softmax, log-softmax and cross-entropy of every library: GPU time with cold L2, as a share of this card's copy bandwidth.

Shares count the fewest bytes: softmax reads and writes each element once, its backward reads two and writes one; cross-entropy,
forward and backward in one call, reads each logit once and writes its gradient.

python -m benchmarks.losses                                everything that can be imported
python -m benchmarks.losses --case softmax --article       49152 rows of 32 to 32768 columns in fp16, as OneFlow measured
python -m benchmarks.losses --case cross_entropy --shape 32768x50304 --dtype bf16
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import command
from benchmarks.command import Record
from benchmarks.providers import compiled
from measure import timing
from measure.progress import progress, show_current
from measure.timing import Call, Contender
from ops import cross_entropy_fn, log_softmax_fn, softmax_fn

CELL = ("case", "direction", "dtype", "M", "N")
ROUNDS = (9, 5)
PROVIDERS = ("ours", "torch", "compile", "liger-kernel", "quack-kernels")
CASES = ("softmax", "log_softmax", "cross_entropy")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ARTICLE = [(49152, 2**power) for power in range(5, 16)]
SHAPES = {
    "cross_entropy": [(32768, 50304), (32768, 50257), (8192, 128256), (4096, 151936), (8192, 262144), (65536, 2048)],
    "softmax": ARTICLE,
    "log_softmax": ARTICLE,
}
Function = Callable[..., Tensor]


def functions_of(case: str, names: Sequence[str]) -> dict[str, Function]:
    """Those of the named providers that have the case: functions of x, or of logits and targets, which they may overwrite."""
    found = {name: _MAKE[case][name]() for name in names if name in _MAKE[case]}
    return {name: function for name, function in found.items() if function is not None}


def _torch_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


def _liger_loss() -> Function:
    apply = import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction.apply
    return lambda logits, targets: apply(logits, targets, None, -100)[0]


def _quack_loss() -> Function:
    return partial(import_module("quack.cross_entropy").cross_entropy, inplace_backward=True)


_MAKE: dict[str, dict[str, Callable[[], Function]]] = {
    "softmax": {
        "ours": lambda: softmax_fn,
        "torch": lambda: partial(torch.softmax, dim=-1),
        "compile": lambda: compiled(lambda x: torch.softmax(x, -1)),
        "liger-kernel": lambda: import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply,
        "quack-kernels": lambda: import_module("quack.softmax").softmax,
    },
    "log_softmax": {
        "ours": lambda: log_softmax_fn,
        "torch": lambda: partial(torch.log_softmax, dim=-1),
        "compile": lambda: compiled(lambda x: torch.log_softmax(x, -1)),
    },
    "cross_entropy": {
        "ours": lambda: partial(cross_entropy_fn, in_place=True),
        "torch": lambda: _torch_loss,
        "compile": lambda: compiled(_torch_loss),
        "liger-kernel": _liger_loss,
        "quack-kernels": _quack_loss,
    },
}


def loss_contender(name: str, function: Function, source: Tensor, logits: Tensor, targets: Tensor) -> Contender:
    """Forward and backward. A function that overwrites its logits finds them as they were at each turn."""

    def run() -> Tensor:
        leaf = logits.detach().requires_grad_()
        loss = function(leaf.view_as(leaf), targets)
        torch.autograd.grad(loss, leaf)
        return loss

    def build() -> Sequence[Call]:
        rows = min(64, len(logits))
        logits.copy_(source)
        leaf = logits[:rows].clone().requires_grad_()
        loss = function(leaf.view_as(leaf), targets[:rows])
        (gradient,) = torch.autograd.grad(loss, leaf)
        exact = source[:rows].double().requires_grad_()
        expected = F.cross_entropy(exact, targets[:rows])
        (wanted,) = torch.autograd.grad(expected, exact)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-2, atol=1e-2)
        assert (gradient.double() - wanted).norm() <= 0.02 * wanted.norm(), f"{name} has another gradient"
        return [run]

    return Contender(name, build, lambda: logits.copy_(source))


def softmax_contender(
    name: str, function: Function, log: bool, backward: bool, sets: Sequence[tuple[Tensor, Tensor]]
) -> Contender:
    def build() -> Sequence[Call]:
        x = sets[0][0]
        expected = (torch.log_softmax if log else torch.softmax)(x.detach()[:64].double(), -1)
        torch.testing.assert_close(function(x)[:64].double(), expected, rtol=2e-2, atol=2e-2)
        if not backward:
            return [partial(function, x) for x, _ in sets]
        return [partial(torch.autograd.grad, function(x), x, dy, retain_graph=True) for x, dy in sets]

    return Contender(name, build)


def measure(
    case: str, M: int, N: int, dtype: torch.dtype, names: Sequence[str], device: torch.device, rounds: int, copy: float
) -> list[Record]:
    torch._dynamo.reset()
    functions, records = functions_of(case, names), []
    for direction in ("both",) if case == "cross_entropy" else ("forward", "backward"):
        bytes_ = M * N * dtype.itemsize * (3 if direction == "backward" else 2)
        if case == "cross_entropy":
            source = torch.randn(M, N, device=device, dtype=dtype)
            logits, targets = source.clone(), torch.randint(N, (M,), device=device)
            contenders = [loss_contender(name, function, source, logits, targets) for name, function in functions.items()]
        else:
            count = timing.rotating_sets(bytes_, device)
            sets = [
                (torch.randn(M, N, device=device, dtype=dtype).requires_grad_(), torch.randn(M, N, device=device, dtype=dtype))
                for _ in range(count)
            ]
            contenders = [
                softmax_contender(name, function, case == "log_softmax", direction == "backward", sets)
                for name, function in functions.items()
            ]
        outcomes = timing.measure(contenders, device, rounds=rounds, round_ms=1.0)
        cell = {"case": case, "direction": direction, "dtype": str(dtype).removeprefix("torch."), "M": M, "N": N}
        for name, outcome in outcomes.items():
            record: Record = {**cell, "provider": name, "bytes": bytes_, **outcome.record(outcomes.get("ours"))}
            if record["us"] is not None:
                record["share"] = round(bytes_ / record["us"] / 1000 / copy, 4)
            records.append(record)
        del contenders
        timing.free_memory(device)
    return records


def line(records: Sequence[Record]) -> str:
    """The records of one cell."""
    first = records[0]
    times = ", ".join(
        f"{r['provider']} {r['us']:.1f} µs ({r['share']:.2f})"
        if r["us"] is not None
        else f"{r['provider']} failed: {r['error']}"
        for r in records
    )
    return f"{first['case']} {first['direction']} {first['M']} x {first['N']} {first['dtype']}: {times}"


def shape(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    return command.positive(rows), command.positive(columns)


def options_of(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = command.parser("losses", __doc__.splitlines()[0], ROUNDS)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="(all)")
    parser.add_argument("--shape", nargs="+", type=shape, metavar="MxN", help="rows and columns (those of the module's SHAPES)")
    parser.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), help="(bf16; fp16 with --article)")
    parser.add_argument("--article", action="store_true", help="OneFlow's range: 49152 rows of 32 to 32768 columns in fp16")
    command.add_providers(parser)
    options = command.parse(parser, argv, ROUNDS)
    options.dtype = options.dtype or (["fp16"] if options.article else ["bf16"])
    return parser, options


def shapes_of(case: str, options: argparse.Namespace) -> list[tuple[int, int]]:
    shapes = options.shape or (ARTICLE if options.article else SHAPES[case])
    shapes = shapes[:1] if options.quick else shapes
    return shapes if options.device == "cuda" else [(min(M, command.CPU_ROWS), min(N, 512)) for M, N in shapes]


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser, options = options_of(argv)
    device = command.pick_device(parser, options)
    names = command.importable(options.provider, PROVIDERS)
    results = command.open_results("losses", options, device, names, argv)
    todo = [(case, *at, DTYPES[dtype]) for case in options.case for at in shapes_of(case, options) for dtype in options.dtype]
    with timing.side_stream(device), progress(len(todo), "losses") as bar:
        copy = timing.copy_bandwidth(device, 2.0 if device.type == "cuda" else 0.01)
        timing.free_memory(device)
        for case, M, N, dtype in todo:
            show_current(bar, f"{case} {M} x {N}")
            results.add(measure(case, M, N, dtype, names, device, options.rounds, copy))
            bar.update()
    for records in by_cell(results.finish()["records"]):
        print(line(records))


def by_cell(records: Sequence[Record]) -> list[list[Record]]:
    cells: dict[tuple, list[Record]] = {}
    for record in records:
        cells.setdefault(tuple(record[key] for key in CELL), []).append(record)
    return list(cells.values())


if __name__ == "__main__":
    command.run(main)
