"""One torchrun of benchmarks.scaling: ranks that stay, and are given turns."""

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
from functools import partial
from typing import Any

import torch.distributed as dist

from benchmarks.scaling_rank import ANSWER, FAILED, HOST, JOINED, TURN
from training.environment import ROOT

PROGRAM = "benchmarks.scaling_rank"
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

    def __init__(self, ranks: int, timeout_s: float, program: str = PROGRAM) -> None:
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
        """What `scaling_rank.measure` says of these overrides. Raises JobError; the processes are then gone."""
        self.join()
        number, self._idle = self._turns, False
        self._turns += 1
        self._store.set(TURN.format(number), json.dumps({"overrides": list(overrides), "steps": steps}))
        answer = self._await(ANSWER.format(number))
        self._idle = True
        return json.loads(answer)

    def dismiss(self) -> None:
        """Tells the processes to end, in the middle of a turn or not."""
        if self._process is None:
            return
        if self._idle:
            self._store.set(TURN.format(self._turns), "")
        else:
            self._process.terminate()

    def end(self) -> None:
        """Waits until the processes, which were told to end, have done so."""
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
        """What the first rank that raised has told; and if it did so because another was killed, that."""
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
