"""What the programs of kernels share: GPU time with cold L2 of every library, as a share of the card's copy bandwidth.

A program says what there is to measure, as tasks. Its command, the loop, the check of results and the records are here.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import command, report
from benchmarks.cases import FORWARD, Function, TensorSet
from benchmarks.command import Record
from benchmarks.providers import as_tuple, compiled
from measure import timing
from measure.progress import progress, show_current

ROUNDS = 9  # many cells in little time
# ‖out − reference‖ / ‖reference‖. Rounding to bf16 gives 2e-3, twice for libraries that round between add and norm; a wrong
# mean, a forgotten weight or a missing gradient gives 5e-2 and more.
TOLERANCE = 2e-2
Functions = Mapping[str, Callable[..., Any]]  # by provider
OWN = ("ours", "torch", "compile")  # the providers that are always here


@dataclass(frozen=True)
class Task:
    """A case at one size. Its directions share the functions, and what torch.compile makes of them."""

    facts: Record  # what it is, as recorded: case, dtypes and sizes
    bytes: Mapping[str, int]  # by direction, the fewest that any implementation must move
    make: Callable[[str], Callable[..., Any] | None]  # a provider's function; None where it does not offer the case
    inputs: Callable[[int, torch.device], list[TensorSet]]  # so many sets
    reference: Callable[..., Any]  # of the outputs to be checked and the arguments, both in fp64 and of the first rows
    checked: int = 64  # rows
    move_outputs: bool = False  # to another place in memory each round, which needs twice the memory

    def contenders(self, direction: str, functions: Functions, sets: int, device: torch.device) -> list[timing.Contender]:
        """One direction of each function, on as many sets of inputs."""
        inputs = self.inputs(sets, device)
        return [timing.Contender(name, partial(self._calls, direction, of, inputs)) for name, of in functions.items()]

    def _calls(self, direction: str, function: Function, sets: Sequence[TensorSet]) -> Sequence[timing.Call]:
        """Forward runs with gradients on, as in training: what backward needs is stored."""
        check(self.reference, self.checked, sets[0], function, direction != FORWARD)
        if direction == FORWARD:
            return [partial(function, *inputs.args) for inputs in sets]
        options = {"retain_graph": True, "allow_unused": True}
        return [partial(torch.autograd.grad, function(*i.args), i.leaves, i.upstream, **options) for i in sets]


def by_provider(
    ours: Callable[..., Any], plain: Callable[..., Any], **libraries: Callable[[], Callable[..., Any]] | None
) -> Callable[[str], Callable[..., Any] | None]:
    """`Task.make` of ours, of PyTorch's operators as people write them, and of libraries, with _ for - in their names."""

    def make(provider: str) -> Callable[..., Any] | None:
        if provider in OWN:
            return {"ours": ours, "torch": plain}.get(provider) or compiled(plain)
        library = libraries.get(provider.replace("-", "_"))
        return library and library()

    return make


def parser(name: str, doc: str | None, cases: Iterable[str], known: Iterable[str]) -> argparse.ArgumentParser:
    """A parser with the options that these programs have; known: the names of the providers."""
    parser = command.parser(name, doc, known, ROUNDS)
    parser.add_argument("--case", nargs="+", choices=tuple(cases), metavar="CASE", help=f"of {', '.join(cases)} (all)")
    return parser


def program(
    name: str,
    doc: str | None,
    shapes: Mapping[str, Sequence[tuple[int, ...]]],
    task: Callable[..., Task],
    libraries: Sequence[str] = (),
    on_cpu: tuple[int, ...] = (command.CPU_ROWS, 160),
) -> tuple[Callable[..., argparse.Namespace], Callable[..., None]]:
    """A program's functions `options_of` and `main`, both of the words of a command, or of None for the command line.

    Args:
        shapes: by case.
        task: of a case and the numbers of a shape.
        libraries: that offer some of the cases.
        on_cpu: the shape of all cases there, where programs are tried.
    """
    known = (*OWN, *libraries)

    def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
        return command.parse(parser(name, doc, shapes, known), argv)

    def main(argv: Sequence[str] | None = None) -> None:
        options = options_of(argv)
        on_gpu = options.device.type == "cuda"
        with options.device:  # for tables that a task makes
            tasks = [task(case, *of) for case in options.case or shapes for of in (shapes[case] if on_gpu else [on_cpu])]
        run(options, command.importable(options.provider, known), tasks)

    return options_of, main


def run(options: argparse.Namespace, names: Sequence[str], tasks: Sequence[Task]) -> None:
    """Measures the tasks, records them and prints their table. names: of the providers."""
    device, results = options.device, command.open_results(options)
    with timing.side_stream(device), progress(len(tasks), results.path.stem) as bar:
        copy_gb_per_s = timing.copy_bandwidth(device, 2.0 if device.type == "cuda" else 0.01)
        timing.free_memory(device)
        for task in tasks:
            show_current(bar, " ".join(map(str, task.facts.values())))
            measure(task, names, device, options.rounds, copy_gb_per_s, results)
            bar.update()
    print(report.text(results.finish()))


def measure(
    task: Task, names: Iterable[str], device: torch.device, rounds: int, copy_gb_per_s: float, results: command.Results
) -> None:
    """Adds the records of each direction in turn."""
    torch._dynamo.reset()
    functions, failed = {}, {}
    for name in names:
        try:
            if (made := task.make(name)) is not None:
                functions[name] = made
        except Exception as error:  # a library's failure is a result
            failed[name] = timing.Outcome(error=timing.describe(error))
    for direction, least in task.bytes.items():
        sets = timing.rotating_sets(least, device)
        contenders = task.contenders(direction, functions, sets, device)
        outcomes = timing.time_calls(contenders, device, rounds=rounds, round_ms=1.0, move_outputs=task.move_outputs) | failed
        del contenders
        timing.free_memory(device)
        cell = {"case": task.facts["case"], "direction": direction, **task.facts}
        cell |= {"bytes": least, "copy_gb_per_s": round(copy_gb_per_s, 1), "sets": sets}
        records = [cell | {"provider": name} | outcome.record(outcomes.get("ours")) for name, outcome in outcomes.items()]
        for record in records:
            if record["us"] is not None:
                gb_per_s = least / record["us"] / 1000
                record |= {"gb_per_s": round(gb_per_s, 1), "share": round(gb_per_s / copy_gb_per_s, 4)}
        results.add(records)


# ---- is the result right? ---------------------------------------------------------------------------------------------------


class WrongResult(ValueError):
    """The contender is fast at something else."""


def check(reference: Function, rows: int, inputs: TensorSet, function: Function, backward: bool) -> None:
    """Compares the first rows with a reference in fp64: the whole of it would not fit. Raises WrongResult.

    Gradients of parameters, which are sums over all rows, must be finite.

    Args:
        reference: of the outputs to be checked and the arguments, both in fp64 and of the first rows.
        rows: of the first dimension, in whatever has as many dimensions as the first argument.
    """
    x = inputs.args[0]
    assert x is not None

    def exact(t: Tensor) -> Tensor:
        return (t.detach()[:rows] if t.dim() == x.dim() else t.detach()).double().requires_grad_(t.requires_grad)

    args = [None if t is None else exact(t) for t in inputs.args]  # before the call, which may write in place
    outputs = as_tuple(function(*inputs.args))
    if (found := [(t.shape, t.dtype) for t in outputs]) != (right := [(t.shape, t.dtype) for t in inputs.upstream]):
        raise WrongResult(f"the outputs are {found}, expected {right}")
    expected = as_tuple(reference([t.detach()[:rows].double() for t in outputs], *args))
    for at, (out, wanted) in enumerate(zip(outputs, expected, strict=True)):
        near(f"output {at}", out[:rows], wanted)
    if not backward:
        return
    upstream = [t.clone() for t in inputs.upstream]  # a backward may overwrite it
    gradients = torch.autograd.grad(outputs, inputs.leaves, upstream, allow_unused=True)
    leaves = [t for t in args if t is not None and t.requires_grad]
    exactly = torch.autograd.grad(expected, leaves, [t[:rows].double() for t in inputs.upstream])
    for at, (leaf, gradient, wanted) in enumerate(zip(inputs.leaves, gradients, exactly, strict=True)):
        if gradient is None or gradient.shape != leaf.shape or not gradient[:rows].isfinite().all():
            raise WrongResult(f"gradient {at}, of an input of shape {tuple(leaf.shape)}, is missing, misshapen or not finite")
        if leaf.dim() == x.dim():
            near(f"gradient {at}", gradient[:rows], wanted)


def near(name: str, out: Tensor, reference: Tensor) -> None:
    """Raises WrongResult."""
    out, reference = out.detach().double(), reference.detach().double()
    error = ((out - reference).norm() / reference.norm()).item()
    if not error <= TOLERANCE:
        raise WrongResult(f"{name} is off by {error:.1e} of its norm, at most {TOLERANCE:.0e} is rounding")
