"""The dtype of matrix products, and whether the same command gives the same bits on a GPU."""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import assert_never

import torch

from configs.machine import Machine
from configs.schema import Precision


@dataclass(frozen=True)
class MixedPrecision:
    """Parameters and optimizer state are always fp32; matrix products run in `dtype`, whose name is `str` of this."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, wanted: Precision, machine: Machine) -> "MixedPrecision":
        """What `wanted` means on this machine. auto: bf16 on a GPU that has it, else fp32."""
        match wanted:
            case Precision.auto:
                dtype = torch.bfloat16 if machine.device == "cuda" and machine.bf16 else torch.float32
            case Precision.bf16:
                dtype = torch.bfloat16
            case Precision.fp16:
                dtype = torch.float16
            case Precision.fp32:
                dtype = torch.float32
            case _:
                assert_never(wanted)
        return cls(torch.device(machine.device), dtype)

    def __str__(self) -> str:
        return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[self.dtype]

    def autocast(self) -> AbstractContextManager:
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Scales fp16 losses so that gradients do not underflow. For other dtypes it is disabled and changes nothing."""
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)


def set_deterministic(wanted: bool) -> None:
    """If `wanted`, the same command on the same machine gives the same bits from here on.

    Our kernels, and PyTorch's on the CPU, do so without it. On a GPU the setting is for cuBLAS, for sums that scatter, and for
    the backward pass of attention, whose blocks are summed in the order in which they finish. An operator that has no
    deterministic version raises. It holds on one GPU only: NCCL, which sums over several, promises no order.
    """
    if wanted:  # cuBLAS reads it when it is first used; PyTorch refuses values that are not deterministic
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.deterministic = wanted
