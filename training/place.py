"""The folder of a program that measures: named as Hydra's sweeps are, locked, and gone on with by the same command."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig

from configs import Config, ConfigError
from measure.files import relative
from training import storage
from training.command import NO_FOLDER, names_folder
from training.interrupt import Stopped, show

OUT_OF_MEMORY = 3  # exit code


@contextmanager
def place(cfg: Config, less_memory: str) -> Iterator[Path]:
    """The folder of the program of a config, locked: hydra.sweep.dir, which is a new one, or with
    resume=auto that of an earlier process. Says how to go on if a signal or a lack of memory ends the block.

    Args:
        less_memory: what the program needs less memory with.

    Raises:
        ConfigError: the folder can't be used.
    """
    program = f"{cfg.program}.py"
    if cfg.resume not in ("never", "auto"):
        goes_on = f"{program} goes on with folder={cfg.resume} resume=auto and the same arguments"
        raise ConfigError(f"resume={cfg.resume}: {goes_on}. For the weights of a run: init_from=PATH.")
    if (resumes := cfg.resume == "auto") and not names_folder(cfg):
        raise ConfigError(NO_FOLDER)
    wanted = Path(HydraConfig.get().sweep.dir)
    with storage.claim(wanted, program, resumes=resumes) as folder:
        if folder != wanted:
            show(f"{relative(wanted)} has another run already, so this one is kept in {relative(folder)}.")
        goes_on = f"What is finished is kept. To go on, add folder={relative(folder)} resume=auto to the command."
        try:
            yield folder
        except (KeyboardInterrupt, Stopped):
            show(f"stopped. {goes_on}", sys.stderr)
            raise
        except torch.OutOfMemoryError as error:
            show(f"out of memory: {str(error).splitlines()[0]}\n{less_memory}\n{goes_on}", sys.stderr)
            raise SystemExit(OUT_OF_MEMORY) from None
