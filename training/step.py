"""What a training step uses: random seeds, copies to the device, compilation."""

import hashlib
import struct
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from configs.schema import CUDA_GRAPHS, TrainConfig
from model import GPT
from model.loss import TWO_PASSES


def makes_cuda_graphs(train: TrainConfig) -> bool:
    return train.compile and train.compile_mode in CUDA_GRAPHS


def allocate_gradients(model: nn.Module) -> None:
    """Zeros where there is no gradient, for backward to add to. A CUDA graph returns each gradient in memory of its own, and
    the next micro-batch overwrites what is still there."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


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


def compile_model(model: GPT, train: TrainConfig) -> Callable[..., torch.Tensor]:
    """The whole model through torch.compile, in one graph, in the mode train.compile_mode."""
    from torch._inductor import list_mode_options  # takes seconds to import, so only a run that compiles does it

    return torch.compile(model, fullgraph=True, options={**list_mode_options(train.compile_mode), **TWO_PASSES})


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device. For CUDA it goes through pinned memory, so that the host does not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
