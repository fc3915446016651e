"""What the rules need to know about the machine: the device that a run will use and what it can do."""

import importlib.util
import os
import shutil
from dataclasses import dataclass

import torch

from configs.keys import ConfigError
from configs.schema import Device


@dataclass(frozen=True)
class Machine:
    device: str  # cuda, mps or cpu
    bf16: bool = True  # has bf16 arithmetic, as far as is known
    triton: bool = True  # can be imported
    cpp_compiler: bool = True  # is there; torch.compile needs it on the CPU
    gpus: int = 1  # on this node, for this process to use
    ranks: int = 1  # processes that train together
    local_rank: int = 0  # of this process on its node
    by_torchrun: bool = False  # torchrun started this process

    @property
    def compiles_loss(self) -> bool:
        """The value of train.compile_loss=null. A machine with a C++ compiler is taken to have a C compiler."""
        return self.device == "cuda" and self.triton and self.cpp_compiler


def inspect(device: Device) -> Machine:
    """The machine as `device` asks for it.

    Raises:
        ConfigError: the device that was asked for is not there.
    """
    name = device.value
    if device is Device.auto:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: PyTorch sees no CUDA device here. Use device=cpu or device=auto.")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device=mps: PyTorch sees no MPS device here. Use device=cpu or device=auto.")
    return Machine(
        device=name,
        bf16=_computes_bf16(name),
        triton=importlib.util.find_spec("triton") is not None,
        cpp_compiler=any(shutil.which(cc) for cc in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if cc),
        gpus=torch.cuda.device_count() if name == "cuda" else 0,
        ranks=int(os.environ.get("WORLD_SIZE", "1")) if by_torchrun() else 1,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")) if by_torchrun() else 0,
        by_torchrun=by_torchrun(),
    )


def _computes_bf16(device: str) -> bool:
    """GPUs before Ampere and CPUs without bf16 instructions emulate bf16, which is slower than fp32."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Some versions of torch can't tell.
    known: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)() if device == "cpu" else {}
    return any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) or not known


def refuse_ranks(program: str) -> None:
    """Raises ConfigError: torchrun has started a program that is one process."""
    if by_torchrun():
        raise ConfigError(
            f"torchrun: {program} is one process on one device, and each of {os.environ.get('WORLD_SIZE', '1')} ranks would do "
            f"all of its work anew. Start it without torchrun: python {program} ..."
        )


def by_torchrun() -> bool:
    """Whether torchrun started this process. WORLD_SIZE alone does not tell, as other launchers set it too."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "LOCAL_RANK" in os.environ
