"""The arithmetic of a run: autocast, and loss scaling where fp16 needs it."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from configs import schema
from configs.machine import Machine


@dataclass(frozen=True)
class Precision:
    """Parameters and optimizer state are always fp32; `dtype` is what matrix products run in."""

    device: torch.device
    dtype: torch.dtype
    emulated: bool = False  # the device has no arithmetic in that dtype: it is slower than fp32

    @classmethod
    def settle(cls, wanted: schema.Precision, machine: Machine) -> "Precision":
        if wanted is schema.Precision.auto:
            wanted = schema.Precision.bf16 if machine.device == "cuda" and machine.bf16 else schema.Precision.fp32
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[wanted.value]
        return cls(torch.device(machine.device), dtype, dtype is torch.bfloat16 and not machine.bf16)

    @property
    def wanted(self) -> schema.Precision:
        """As `settle` takes it."""
        return schema.Precision(self.name)

    @property
    def name(self) -> str:
        return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[self.dtype]

    def __str__(self) -> str:
        slow = ", emulated: this CPU has no bf16 arithmetic, train.precision=fp32 is faster"
        return self.name + slow * self.emulated

    def autocast(self) -> AbstractContextManager:
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Scales fp16 losses out of underflow; for the other dtypes each of its methods passes its argument through."""
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)
