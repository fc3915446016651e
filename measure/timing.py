"""How long calls take on the device: CUDA graphs over rotating inputs, with the contenders interleaved.

On a GPU each contender is captured into a CUDA graph that calls it once on every set of inputs. The host's cost is then not
timed, and no set of inputs is still in L2 when it is used again. Outputs stay alive until the capture ends, so they rotate too.
Contenders run one after the other, in an order that is shuffled every round. A sample is the time of one call in one round.
A call that waits for the device in its middle, as `.item()` does, fits no graph: it is timed as it is, waits included.

The place of a kernel's tensors in memory changes its time by up to 6 % at some widths. So a comparison can capture again for
every round, with all outputs at other addresses. The intervals then hold for any place.

Without a GPU a clock times the same calls. That is for trying the programs, not for numbers.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from measure.graph import captured, waits
from measure.statistics import LEAST_SAMPLES, paired_ratio, spread

MOST_SETS = 512  # in a graph: below 0.5 MB a set, sets are not cold, and launches are what is timed

Call = Callable[[], Any]


@dataclass(frozen=True)
class Contender:
    name: str
    build: Callable[[], Sequence[Call]]  # one call for each set of inputs; whatever fails here is the contender's failure
    before: Call | None = None  # run before each turn, untimed: restores inputs that the calls overwrite


@dataclass
class Outcome:
    """The samples of a contender, one a round, or its error."""

    us: list[float] = field(default_factory=list)  # microseconds a call
    error: str | None = None
    waits: bool = False  # each call waits for the device, so that its time has the host's part

    def record(self, ours: "Outcome | None") -> dict[str, Any]:
        """Median and spread; `times_ours` is this time over ours of the same round, above 1 where ours is faster.

        Its interval is `times_ours_95`; fewer rounds than LEAST_SAMPLES have none.
        """
        if self.error is not None:
            return {"us": None, "error": self.error}
        times = spread(self.us)
        record: dict[str, Any] = {"us": round(times.median, 3), "p10": round(times.p10, 3), "p90": round(times.p90, 3)}
        if self.waits:
            record["waits"] = True
        if ours is not None and ours is not self and ours.us:
            ratio = paired_ratio(self.us, ours.us)
            record["times_ours"] = round(ratio.median, 4)
            if len(ours.us) >= LEAST_SAMPLES:
                record["times_ours_95"] = [round(ratio.low, 4), round(ratio.high, 4)]
        return record


def time_calls(
    contenders: Sequence[Contender],
    device: torch.device,
    *,
    rounds: int = 25,
    round_ms: float = 2.0,
    move_outputs: bool = False,
    of_host: bool = False,
) -> dict[str, Outcome]:
    """Times the contenders against each other.

    Args:
        round_ms: a contender's turn lasts about this long, at least one pass over all sets of inputs.
        move_outputs: put the outputs of all contenders elsewhere in memory for each round.
        of_host: time the host, which launches without waiting, and not the device.
    """
    timer = _Timer(device, graphs=device.type == "cuda" and not of_host)
    outcomes = {contender.name: Outcome() for contender in contenders}
    # Calls are held until the end: a graph of backward reads what forward, outside it, has saved.
    held: dict[str, Sequence[Call]] = {}
    passes: dict[str, Call] = {}  # over all sets of inputs
    for contender in contenders:
        outcome = outcomes[contender.name]
        try:
            held[contender.name], passes[contender.name], outcome.waits = _warmed(contender, timer)
        except Exception as error:  # a library's failure is a result, not the end of the sweep
            outcome.error = describe(error)
    repeats = {name: max(1, math.ceil(round_ms / max(timer.time_ms(one, 1), 1e-6))) for name, one in passes.items()}
    order, draw = [contender for contender in contenders if contender.name in passes], random.Random(0)
    for round_ in range(-1, rounds):  # one round before the first brings clocks and caches to where they stay
        if move_outputs:
            last = passes  # held until the new ones have memory, which is then another
            with timer.elsewhere(draw.randrange(1, 64)):
                passes = {one.name: timer.captured(held[one.name])[0] for one in order}
            del last
        draw.shuffle(order)
        for contender in order:
            name = contender.name
            if contender.before is not None:
                contender.before()
            elapsed = timer.time_ms(passes[name], repeats[name])
            if round_ >= 0:
                outcomes[name].us.append(1000 * elapsed / (repeats[name] * len(held[name])))
    return outcomes


def _warmed(contender: Contender, timer: "_Timer") -> tuple[Sequence[Call], Call, bool]:
    """Its calls, and what the timer captured of them. A function of its own, so that after a failure nothing holds on to the
    contender's tensors."""
    calls = contender.build()
    for call in (calls[0], *calls):  # compiles and tunes; a second call of the same, because some libraries tune then
        call()
    return calls, *timer.captured(calls)


def copy_bandwidth(device: torch.device, gigabytes: float = 2.0, rounds: int = 15) -> float:
    """GB/s (10^9 bytes, read plus written) of an elementwise copy of `gigabytes`: the better of two ways to write one."""
    x = torch.randn(int(gigabytes * 1e9) // 2, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    contenders = [
        Contender("add", lambda: [lambda: torch.add(x, 1, out=y)]),
        Contender("copy", lambda: [lambda: y.copy_(x)]),
    ]
    outcomes = time_calls(contenders, device, rounds=rounds, round_ms=5.0)
    best = min(median(outcome.us) for outcome in outcomes.values())
    return 2 * x.nbytes / best / 1000


def rotating_sets(bytes_per_set: int, device: torch.device) -> int:
    """The number of sets of inputs and outputs that fill L2 four times, so that no set is in L2 when it is used again."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return min(MOST_SETS, max(2, math.ceil(4 * l2 / bytes_per_set)))


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """A stream that can be captured. Warm-ups run on it too, because autograd runs backward on the stream of forward."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def free_memory(device: torch.device) -> None:
    """Frees the CUDA graphs, tensors and autograd graphs of a cell before the next cell allocates."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def allocated_gb(device: torch.device) -> float:
    """GiB of tensors on a GPU, 0 elsewhere."""
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def describe(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


class _Timer:
    """Times CUDA graphs of the calls by events, or the calls themselves by a clock."""

    def __init__(self, device: torch.device, graphs: bool) -> None:
        self.device, self.graphs = device, graphs
        self._pool: Any = None  # of all graphs: they reuse its memory, since none reads what another wrote

    @contextmanager
    def elsewhere(self, blocks: int) -> Iterator[None]:
        """What is captured meanwhile gets new memory, behind so many blocks of 12 MiB that nobody uses."""
        taken = []
        if self.graphs:
            torch.cuda.empty_cache()
            self._pool = None
            # In small blocks, because a large one would leave the gap in which the outputs were before the last.
            taken = [torch.empty(6 << 21, dtype=torch.uint8, device=self.device) for _ in range(blocks)]
        yield
        del taken

    def captured(self, calls: Sequence[Call]) -> tuple[Call, bool]:
        """All calls in one, and whether each waits for the device, so that no graph can hold them."""

        def run() -> None:
            for call in calls:
                call()

        if not self.graphs:
            return run, False
        with waits() as found:
            calls[0]()
        if found:
            return run, True
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self.device)
        replay = captured(lambda: [call() for call in calls], self._pool)  # a list, so that no two outputs have one place
        replay()
        torch.cuda.synchronize(self.device)
        return replay, False

    def time_ms(self, run: Call, repeats: int) -> float:
        if not self.graphs:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # else the queue of earlier launches may be full
            began = time.perf_counter()
            for _ in range(repeats):
                run()
            return 1000 * (time.perf_counter() - began)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)
