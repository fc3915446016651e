"""The processes of benchmarks.scaling. torchrun starts this module; its ranks stay, and train a fresh model whenever asked."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import configs
from configs import Config, machine
from configs.schema import Parallel
from data import Batches
from measure.clock import StepClock
from measure.environment import ROOT
from measure.schedule import no_garbage_collection
from measure.timing import describe, free_memory
from train import training_step
from training.build import build
from training.distributed import ALONE, World, join
from training.precision import Precision

# Keys of the store in which ranks and the program that started them meet. An empty turn is the end.
JOINED, FAILED, TURN, ANSWER = "joined", "failed", "turn {}", "answer {}"
HOST = "127.0.0.1"


def measure(cfg: Config, steps: int, world: World) -> dict[str, Any]:
    """Milliseconds of each of the last `steps` steps, and the peak GiB of any rank (None except on CUDA).

    A step is train.py's, from the copy of the batch to the cleared gradients. The times are this rank's: ranks wait for one
    another in every step, so they are the slowest's.

    Args:
        cfg: train.steps are made. parallel is ddp, fsdp, or auto, which here is a model that nothing is wrapped around.
        world: ALONE for such a model.
    """
    on = machine.inspect(cfg.device)
    precision = Precision.settle(cfg.train.precision, on)
    if cfg.train.compile:
        torch.compiler.reset()  # the models of earlier turns count towards the limit of recompilations; a loss alone does not
    assert cfg.model.vocab_size is not None
    _, state, forward = build(cfg, precision, cfg.model.vocab_size, world, draw_on=precision.device)
    batches = Batches(
        tokens_of(cfg, world.size),
        context=cfg.model.context,
        batch_size=cfg.train.batch_size,
        seed=cfg.seed,
        rank=world.rank,
        ranks=world.size,
    )
    clock = StepClock(precision.device, warmup=cfg.train.steps - steps)
    drawn = [batches[step] for step in range(cfg.train.steps)]
    with no_garbage_collection():
        for step, batch in enumerate(drawn):
            with clock.step():
                training_step(forward, state, batch, step, cfg, precision, world)
    times = [round(ms, 4) for ms in clock.steps_ms]
    peak = None if clock.peak_gb is None else world.max(round(clock.peak_gb * 2**30)) / 2**30
    return {"steps_ms": times, "peak_gb": peak}


def tokens_of(cfg: Config, ranks: int) -> np.ndarray:
    """Tokens for any number of ranks. They are drawn once, because drawing takes time and their values do not matter."""
    assert cfg.model.vocab_size is not None
    return _tokens(cfg.model.vocab_size, cfg.model.context, cfg.train.batch_size // ranks, cfg.seed)


@cache
def _tokens(vocab_size: int, context: int, batch_size: int, seed: int) -> np.ndarray:
    """Random tokens, the frequent ones as frequent as words are (Mandelbrot's law): the gradient of the embedding takes longer
    where rows repeat."""
    weights = 1 / (np.arange(vocab_size) + 2.7)
    count = 64 * batch_size * context + 1  # then they come again in another order
    return np.random.default_rng(seed).choice(vocab_size, size=count, p=weights / weights.sum())


@cache
def _composed(overrides: tuple[str, ...]) -> Config:
    return configs.compose_only(overrides)  # the program that started this one has checked it


def take_turns(store: dist.Store) -> World:
    """Answers one turn after the other, until an empty one."""
    world = join()
    if world.leads:
        store.set(JOINED, "")
    number = 0
    while asked := store.get(TURN.format(number)):  # waits for it, without work
        turn = json.loads(asked)
        cfg = _composed(tuple(turn["overrides"]))
        answer = measure(cfg, turn["steps"], ALONE if cfg.parallel is Parallel.auto else world)
        free_memory(torch.device(machine.inspect(cfg.device).device))
        if world.leads:
            store.set(ANSWER.format(number), json.dumps(answer))
        number += 1
    return world


def main(argv: Sequence[str] | None = None) -> None:
    (port,) = sys.argv[1:] if argv is None else argv
    store = dist.TCPStore(HOST, int(port), is_master=False, timeout=timedelta(days=1))
    try:
        world = take_turns(store)
    except Exception as error:
        # the first to fail; the others then fail because they wait for it
        store.compare_set(FAILED, "", f"rank {os.environ['RANK']}: {describe(error)}")
        raise
    world.leave(0)


# ---- the program's side -----------------------------------------------------------------------------------------------------


MODULE = "benchmarks.scaling_ranks"
REPORTS_S = 5.0  # for torchrun to report which rank failed first, once one has
ENDS_S = 45.0  # for torchrun to end its ranks, which it kills after 30 s
TAIL = 6  # lines of what a job wrote, for an error
# Of torchrun's report of a failure: facts of the machine, and lines that only rule off.
NOISE = ("time ", "host ", "error_file:", "====", "----", "[W", "[E")
SIGNAL = re.compile(r"Signal \d+ \((?!SIGTERM)(\w+)\) received by PID")  # in that report; it ends all others by SIGTERM


class JobError(RuntimeError):
    """A job did not start, or ended before it answered; the text says why."""


class Job:
    """`ranks` processes that torchrun starts. While they wait for a turn they take no GPU time, and little of its memory.

    Args:
        timeout_s: seconds for all ranks to have joined, and then for each turn.
        program: the module that each rank runs.
    """

    def __init__(self, ranks: int, timeout_s: float, program: str = MODULE) -> None:
        self.ranks, self.timeout_s, self._program = ranks, timeout_s, program
        self._process: subprocess.Popen[bytes] | None = None
        self._joined = self._idle = False

    def start(self) -> None:
        """Starts the processes, and does not wait for them."""
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._turns, self._joined, self._idle = 0, False, False
        self._written = tempfile.TemporaryFile()  # noqa: SIM115  closed in end()
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}", "-m", self._program]
        self._process = subprocess.Popen(
            [sys.executable, *torchrun, str(self._store.port)],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **os.environ},  # torchrun's own choice, but only where there are several ranks
            stdin=subprocess.DEVNULL,
            stdout=self._written,
            stderr=self._written,
            start_new_session=True,  # so that a torchrun that has to be killed takes its ranks with it
        )

    def join(self) -> None:
        """Waits until all ranks have joined; starts them if they do not run. Raises JobError."""
        if self._process is None:
            self.start()
        if not self._joined:
            self._await(JOINED)
            self._joined = self._idle = True

    def turn(self, overrides: Sequence[str], steps: int) -> dict[str, Any]:
        """The result of `measure` for these overrides. Raises JobError, after which the processes have ended."""
        self.join()
        number, self._idle = self._turns, False
        self._turns += 1
        self._store.set(TURN.format(number), json.dumps({"overrides": list(overrides), "steps": steps}))
        answer = self._await(ANSWER.format(number))
        self._idle = True
        return json.loads(answer)

    def dismiss(self) -> None:
        """Tells the processes to end, also in the middle of a turn."""
        if self._process is None:
            return
        if self._idle:
            self._store.set(TURN.format(self._turns), "")
        else:
            self._process.terminate()

    def end(self) -> None:
        """Waits until the processes have ended, after `dismiss`."""
        if self._process is None:
            return
        for insist in (self._process.terminate, partial(os.killpg, self._process.pid, signal.SIGKILL)):
            try:
                self._process.wait(ENDS_S)
            except subprocess.TimeoutExpired:
                insist()
        self._process.wait()
        self._written.close()
        self._process = None

    def _await(self, key: str) -> bytes:
        assert self._process is not None
        until = time.monotonic() + self.timeout_s
        while not self._store.check([key]):
            error = None
            if self._store.check([FAILED]):
                error = self._failure()
            elif self._process.poll() is not None:
                error = f"torchrun ended with {self._process.returncode}: {self._tail()}"
            elif time.monotonic() > until:
                error = f"no answer in {self.timeout_s:g} s (--timeout); last written: {self._tail() or 'nothing'}"
            if error is not None:
                self._process.terminate()
                self.end()
                raise JobError(error)
            time.sleep(0.02)
        return self._store.get(key)

    def _failure(self) -> str:
        """The error of the first rank that raised, and the signal if another rank was killed by one."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REPORTS_S)
        killed = SIGNAL.search(self._log())
        return self._store.get(FAILED).decode() + (f" (a rank was ended by {killed[1]})" if killed else "")

    def _tail(self) -> str:
        lines = [line.strip() for line in self._log().splitlines()]
        return " ".join([line for line in lines if line and not line.startswith(NOISE)][-TAIL:])[-600:]

    def _log(self) -> str:
        written = self._written.fileno()  # its position is the ranks' too, so it stays
        return os.pread(written, os.fstat(written).st_size, 0).decode(errors="replace")


if __name__ == "__main__":
    main()
