"""What a training step uses: the dtype of its matrix products, random seeds, copies to the device."""

import hashlib
import os
import struct
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import torch
from torch import nn

from configs.machine import Machine
from configs.schema import CUDA_GRAPHS, Precision, TrainConfig


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


def seed_micro_batch(seed: int, step: int, micro_batch: int, rank: int, sites: int, device: torch.device) -> torch.Tensor:
    """Seeds everything random in one forward pass, and returns the seeds of its dropout sites.

    The seeds are a pure function of the arguments, so evaluation, logging and restarts can't shift them. Torch's own generators
    are seeded too: dropout on attention weights and norm.dropout_masks=native draw from them.

    Args:
        sites: how many dropout sites the model has.
        device: whose current generator is seeded besides the CPU's.

    Returns:
        int64 [sites] on the CPU, not negative: the same for every norm implementation.
    """
    bits = hashlib.shake_128(struct.pack("<4q", seed, step, micro_batch, rank)).digest(8 * (sites + 1))
    words = (np.frombuffer(bits, dtype="<u8") >> np.uint64(1)).astype(np.int64)
    # torch.manual_seed would also store, at every step, a call and its stack trace for each kind of device that is not there.
    torch.default_generator.manual_seed(int(words[0]))
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(int(words[0]))
    return torch.from_numpy(words[1:].copy())


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device. For CUDA it goes through pinned memory, so that the host does not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def makes_cuda_graphs(train: TrainConfig) -> bool:
    return train.compile and train.compile_mode in CUDA_GRAPHS


def allocate_gradients(model: nn.Module) -> None:
    """Zeros where there is no gradient, for backward to add to. A CUDA graph returns each gradient in memory of its own, and
    the next micro-batch overwrites what is still there."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
