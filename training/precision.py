"""The arithmetic of a run: autocast, loss scaling for fp16, and operators that give the same bits each time."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from configs import schema
from configs.machine import Machine

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True)
class Precision:
    """Parameters and optimizer state are always fp32; matrix products run in `dtype`."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def settle(cls, wanted: schema.Precision, machine: Machine) -> "Precision":
        """The precision that `wanted` means on this machine. auto: bf16 on a GPU that has it, else fp32."""
        if wanted is schema.Precision.auto:
            wanted = schema.Precision.bf16 if machine.device == "cuda" and machine.bf16 else schema.Precision.fp32
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[wanted.value]
        return cls(torch.device(machine.device), dtype)

    @property
    def wanted(self) -> schema.Precision:
        """As `settle` takes it."""
        return schema.Precision(self.name)

    @property
    def name(self) -> str:
        return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[self.dtype]

    def __str__(self) -> str:
        return self.name

    def autocast(self) -> AbstractContextManager:
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Scales fp16 losses so that gradients do not underflow. For other dtypes it is disabled and changes nothing."""
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """If `wanted`, the same command on the same machine gives the same bits within the block. Afterwards all settings are back.

    Our kernels, and PyTorch's on the CPU, do so without it. On a GPU the setting is for cuBLAS, for sums that scatter, and for
    the backward pass of attention, whose blocks are summed in the order in which they finish. An operator that has no
    deterministic version raises. It holds on one GPU only: NCCL, which sums over several, promises no order.

    It goes around the whole run, because cuBLAS reads its environment variable when it is first used. A variable that is set
    already stays: PyTorch refuses values that are not deterministic.
    """
    if not wanted:
        yield
        return
    chosen = os.environ.get(CUBLAS_WORKSPACE)
    cudnn = torch.backends.cudnn
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.deterministic, cudnn.benchmark
    os.environ[CUBLAS_WORKSPACE] = chosen or ":4096:8"
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        if chosen is None:
            del os.environ[CUBLAS_WORKSPACE]
