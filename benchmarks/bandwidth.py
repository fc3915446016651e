"""What norms, sites, rotary and losses share: GPU time with cold L2 of every library, as a share of the card's copy bandwidth.

A program says what there is to measure, as tasks. The loop, the records and the words of a cell are here.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks import command, report
from benchmarks.cases import DIRECTIONS, FORWARD
from benchmarks.command import Record
from benchmarks.providers import PROVIDERS
from measure import timing
from measure.progress import progress, show_current

ROUNDS = (9, 7)  # many cells in little time
BOTH = "both"  # the direction of what does forward and backward in one call


class Inputs(Protocol):
    """One set of tensors of a contender."""

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that get gradients."""

    @property
    def upstream(self) -> tuple[Tensor, ...]:
        """A gradient for each output."""


Function = Callable[..., Any]
Check = Callable[[Any, Function], None]  # of a set of inputs and a function; raises WrongResult


@dataclass(frozen=True)
class Cell:
    facts: Record  # which cell it is, as recorded: case, direction, dtypes and sizes
    bytes: int  # the fewest that any implementation must move
    contenders: Callable[[dict[str, Function], int, torch.device], list[timing.Contender]]  # on so many sets of inputs
    move_outputs: bool = True  # to another place in memory each round, which needs twice the memory


@dataclass(frozen=True)
class Task:
    """A case at one size. Its directions share the functions, and what torch.compile makes of them."""

    make: Callable[[str], Function | None]  # a provider's function; None where it does not offer the case
    cells: Sequence[Cell]

    def __str__(self) -> str:
        return report.cell_label(self.cells[0].facts)


def contender(
    name: str, function: Function, direction: str, sets: Sequence[Any], check: Check, overwrites_dy: bool = False
) -> timing.Contender:
    """One direction of a function of inputs, on all sets.

    Forward runs with gradients on, as in training: what backward needs is stored.

    Args:
        overwrites_dy: backward stores over the first upstream gradient. It gets its own, fresh each turn: the others would be
            timed on numbers that grow or vanish.
    """
    own: list[Tensor] = []

    def restore() -> None:
        for dy, inputs in zip(own, sets, strict=True):
            dy.copy_(inputs.upstream[0])

    def build() -> Sequence[timing.Call]:
        check(sets[0], function)
        if direction == FORWARD:
            return [partial(function, inputs) for inputs in sets]
        own.extend(i.upstream[0].clone() if overwrites_dy else i.upstream[0] for i in sets)
        return [
            partial(torch.autograd.grad, function(i), i.leaves, (dy, *i.upstream[1:]), retain_graph=True, allow_unused=True)
            for i, dy in zip(sets, own, strict=True)
        ]

    return timing.Contender(name, build, restore if overwrites_dy and direction != FORWARD else None)


def parser(program: str, description: str, known: Iterable[str] = PROVIDERS) -> argparse.ArgumentParser:
    """A parser with the options that these programs have; known: the names of the providers."""
    parser = command.parser(program, description, ROUNDS)
    parser.add_argument("--direction", nargs="+", choices=DIRECTIONS, help="(both)")
    command.add_providers(parser, known)
    return parser


def run(
    program: str,
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    argv: Sequence[str],
    names: Sequence[str],
    tasks: Sequence[Task],
    file: str | None = None,
) -> None:
    """Measures the tasks, records them and prints their table.

    Args:
        names: of the providers.
        file: name of the record, if it is not the program's.
    """
    device = command.pick_device(parser, options)
    results = command.open_results(program, options, device, list(names), argv, file=file)
    with timing.side_stream(device), progress(len(tasks), program) as bar:
        copy_gb_per_s = timing.copy_bandwidth(device, 2.0 if device.type == "cuda" else 0.01)
        timing.free_memory(device)
        for task in tasks:
            show_current(bar, str(task))
            for records in measure(task, options.direction, names, device, options.rounds, copy_gb_per_s):
                results.add(records)
            bar.update()
    records = results.finish()["records"]
    print(report.shares_text(records), report.behind_summary(records), sep="\n\n")
    for record in records:
        if record.get("error"):
            print(f"failed: {record['provider']}, {report.cell_label(record)}: {record['error']}")


def measure(
    task: Task,
    directions: Sequence[str] | None,
    names: Iterable[str],
    device: torch.device,
    rounds: int,
    copy_gb_per_s: float,
) -> Iterator[list[Record]]:
    """The records of each cell in turn; directions: None for all."""
    torch._dynamo.reset()
    functions, failed = {}, {}
    for name in names:
        try:
            if (made := task.make(name)) is not None:
                functions[name] = made
        except Exception as error:  # a library's failure is a result
            failed[name] = timing.Outcome(error=timing.describe(error))
    for cell in task.cells:
        if directions is not None and cell.facts["direction"] not in (*directions, BOTH):
            continue
        sets = timing.rotating_sets(cell.bytes, device)
        contenders = cell.contenders(functions, sets, device)
        outcomes = timing.measure(contenders, device, rounds=rounds, round_ms=1.0, move_outputs=cell.move_outputs) | failed
        del contenders
        timing.free_memory(device)
        yield [
            {
                **cell.facts,
                "provider": name,
                **record_of(outcome, outcomes.get("ours"), cell.bytes, copy_gb_per_s),
                "sets": sets,
            }
            for name, outcome in outcomes.items()
        ]


def record_of(outcome: timing.Outcome, ours: timing.Outcome | None, bytes_: int, copy_gb_per_s: float) -> Record:
    record: Record = {"bytes": bytes_, "copy_gb_per_s": round(copy_gb_per_s, 1), **outcome.record(ours)}
    if record["us"] is not None:
        gb_per_s = bytes_ / record["us"] / 1000
        record |= {"gb_per_s": round(gb_per_s, 1), "share": round(gb_per_s / copy_gb_per_s, 4)}
    return record
