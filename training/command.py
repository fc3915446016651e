"""What turns a command into a run, or into the runs of a sweep: refused configs, exit codes."""

import sys
from collections.abc import Callable

import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from configs import Config, ConfigError, command_line, machine, rules
from configs.command_line import Job
from configs.machine import Machine
from measure.environment import environment
from training import resume, tracking
from training.console import mute, show, take_any_encoding
from training.distributed import World, join
from training.facts import Summary, report
from training.interrupt import exit_on_signals
from training.metrics import NonFiniteError
from training.run import Run, open_run
from training.step import set_deterministic
from training.storage import StorageError, relative

Train = Callable[[Config, Run, Machine, World], Summary]


def main(train: Train) -> int:
    """Runs the command in sys.argv, with `train` for each run of it. Returns the exit code of the process.

    Returns:
        0: done. 1: NaN, or a full disk. 2: an error in the config. 128 plus the signal's number: a signal. For a sweep, the
        highest of its runs.
    """
    take_any_encoding()
    codes, world = [0], join()
    exit_on_signals()
    if "--version" in sys.argv[1:]:
        show(version())
        return 0
    try:
        asked = world.on_first(lambda: command_line.read(sys.argv[1:]))
        if isinstance(asked, str):
            if world.leads:
                print(asked, flush=True)
            asked = []
        for number, one in enumerate(asked):
            if one.swept and world.leads:
                show(f"[sweep] {number + 1}/{len(asked)}: {' '.join(one.overrides)}")
            codes.append(job(train, one, world) or 0)
    except ConfigError as error:
        codes.append(command_line.refuse(error) if world.leads else command_line.EXIT_CODE)
    except BrokenPipeError:  # of `--help | head`; a run itself goes on without its reader
        mute(sys.stdout)
    except KeyboardInterrupt:  # before the first step, from which on Interrupt handles it, or the second Ctrl-C
        codes.append(130)
    except SystemExit as end:
        if end.code == 1 or isinstance(end.code, str):
            raise  # an exception on this rank alone: it waits for nobody, and torchrun ends the other ranks
        codes.append(end.code or 0)
    world.leave(max(codes))
    return max(codes)


def version() -> str:
    facts = environment(torch.device("cpu"))
    return f"prenorm {facts['versions']['prenorm']}, git {facts['git']}, torch {facts['versions']['torch']}"


@record  # torchrun's report of a rank that failed then has the traceback
def job(train: Train, asked: Job, world: World) -> int:
    """Makes one run of the command. Returns its exit code, so that the next run of a sweep still starts."""
    cfg, folder, sweep = asked.cfg, asked.folder, asked.swept
    try:
        chosen = bool(cfg.folder) or (sweep and cfg.resume != "auto")  # a job of a sweep resumes in its own folder
        origin = world.on_first(lambda: resume.settle(cfg, folder, asked.overrides, chosen=chosen))
        if origin.finished:
            if world.leads:
                show(f"{relative(origin.folder)} has finished: step {origin.step} of {origin.cfg.train.steps}.")
            return 0
        with world.shared_errors():
            inspected = machine.inspect(origin.cfg.device)
            rules.check(origin.cfg, inspected)
            tracking.settle(origin.cfg.logging)
        group = folder.parent.name if sweep else None
        device = torch.device(inspected.device)
        set_deterministic(origin.cfg.deterministic)
        with open_run(origin, device, group, world) as run:
            summary = train(origin.cfg, run, inspected, world)
    except (NonFiniteError, StorageError) as error:
        if world.leads:
            show("\n".join([f"stopped: {error}", *getattr(error, "__notes__", ())]), sys.stderr)
            ErrorHandler().record_exception(error)
        if sweep and world.size > 1 and isinstance(error, StorageError):
            # the first rank may be the only one with the error: its next job would wait for ranks that still wait in this one
            raise SystemExit(1) from None
        return 1
    except torch.OutOfMemoryError as error:
        if world.size > 1:
            raise
        hint = "Lower train.batch_size or model.*, or raise train.accumulation (the same batch in smaller pieces)."
        show(f"out of memory: {str(error).splitlines()[0]}\n{hint}", sys.stderr)
        return 1
    except ConfigError as error:
        if not world.leads:
            return command_line.EXIT_CODE
        return command_line.refuse(ConfigError(f"{error}\n(in the job {' '.join(asked.overrides)})") if sweep else error)
    if world.leads:
        show(report(summary))
    return 0
