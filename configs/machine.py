"""What the rules need to know about the machine: the device that a run will use and what it can do."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.keys import ConfigError
from configs.schema import DeviceKind


@dataclass(frozen=True)
class Machine:
    device: str  # cuda, mps or cpu
    bf16: bool = True  # has bf16 arithmetic; not asked of a CPU
    ranks: int = 1  # processes that train together
    by_torchrun: bool = False  # torchrun started this process


def inspect(device: DeviceKind) -> Machine:
    """The machine as `device` asks for it.

    Raises:
        ConfigError: that device is not there, or this rank of torchrun has no GPU of its own.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = next(name for name in there if there[name]) if device is DeviceKind.auto else device.value
    if not there[name]:
        raise ConfigError(f"device={name}: PyTorch sees no such device here. Use device=cpu or device=auto.")
    if name == "cuda" and by_torchrun() and int(os.environ["LOCAL_RANK"]) >= (gpus := torch.cuda.device_count()):
        raise ConfigError(f"torchrun: this node has {gpus} GPUs, one for each rank. Use --nproc-per-node={gpus} or device=cpu.")
    bf16 = name != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    ranks = int(os.environ["WORLD_SIZE"]) if by_torchrun() else 1
    return Machine(name, bf16, ranks, by_torchrun())


def expanded(path: str) -> Path:
    """A path with the home folder for ~. A ~name without a home stays, where Path.expanduser raises."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def by_torchrun() -> bool:
    """Whether torchrun started this process. WORLD_SIZE alone does not tell, as other launchers set it too."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "LOCAL_RANK" in os.environ
