"""One update of the weights, and what it is made of: optimizer, learning rate, random seeds, compilation."""

import hashlib
import math
import struct
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn

from configs import Config
from configs.schema import CUDA_GRAPHS, OptimConfig, Schedule, TrainConfig
from model import GPT
from model.loss import TWO_PASSES
from training.checkpoint import TrainState
from training.distributed import ALONE, World, full_tensor, without_reduction
from training.precision import Precision


def training_step(
    forward: Callable[..., torch.Tensor],
    state: TrainState,
    batch: tuple[torch.Tensor, torch.Tensor],
    step: int,
    cfg: Config,
    precision: Precision,
    world: World = ALONE,
    mark: Callable[[str], None] = lambda part: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes one update: the gradient of the mean loss over the batch of all ranks, summed over micro-batches, clipped, applied.

    Args:
        forward: the model, compiled or not. With several ranks: what `World.replicate` or `distributed.shard` returns.
        batch: the rows of this rank.
        mark: called with "forward", "backward" and "optimizer" where each of them ends, once for each micro-batch.

    Returns:
        The mean loss in nats per token, and the gradient norm before clipping. Both are the same on every rank and stay on the
        device.
    """
    inputs, targets = (to_device(part, precision.device).chunk(cfg.train.accumulation) for part in batch)
    total = torch.zeros((), device=precision.device)
    keeps_gradients = cfg.train.accumulation > 1 and makes_cuda_graphs(cfg.train)
    if keeps_gradients:
        allocate_gradients(state.model)
    for micro_batch, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        seeds = seed_micro_batch(cfg.seed, step, micro_batch, world.rank, state.model.dropout_sites, precision.device)
        last = micro_batch == cfg.train.accumulation - 1
        with nullcontext() if last else without_reduction(forward):
            with precision.autocast():
                loss = forward(x, y, seeds=to_device(seeds, precision.device))
            mark("forward")
            loss = loss / cfg.train.accumulation  # micro-batches are equal, so the mean of their means is the batch's
            state.scaler.scale(loss).backward()
        total += loss.detach()
        mark("backward")

    set_learning_rate(state.optimizer, learning_rate(step, cfg.train.steps, cfg.optim))
    state.scaler.unscale_(state.optimizer)
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]  # model.parameters() walks all modules
    grad_norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, cfg.optim.clip_norm or float("inf")))
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=not keeps_gradients)
    mark("optimizer")
    return world.sum(total) / world.size, grad_norm


def makes_cuda_graphs(train: TrainConfig) -> bool:
    return train.compile and train.compile_mode in CUDA_GRAPHS


def allocate_gradients(model: nn.Module) -> None:
    """Zeros where there is no gradient, for backward to add to. A CUDA graph returns each gradient in memory of its own, and
    the next micro-batch overwrites what is still there."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def learning_rate(step: int, steps: int, optim: OptimConfig) -> float:
    """The learning rate of optimizer step `step`, counted from 0, in a run of `steps`. It is a pure function of the step.

        warm-up    lr · (step + 1) / warmup_steps                                    step < warmup_steps
        cosine     min_lr + (lr − min_lr) · ½(1 + cos πt)                            t from 0 after warm-up to 1 at `steps`
        wsd        lr, then lr + (min_lr − lr) · t over the last decay_fraction      t from 0 to 1 at `steps`
        constant   lr

    The last step has a t just below 1: only step `steps` would have min_lr. By default min_lr is a tenth of lr.
    """
    warmup_steps = steps // 20 if optim.warmup_steps is None else optim.warmup_steps
    if step < warmup_steps:
        return optim.lr * (step + 1) / warmup_steps
    if optim.schedule is Schedule.constant:
        return optim.lr
    min_lr = optim.lr / 10 if optim.min_lr is None else optim.min_lr
    if optim.schedule is Schedule.cosine:
        t = min((step - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
        return min_lr + (optim.lr - min_lr) * 0.5 * (1 + math.cos(math.pi * t))
    # wsd: the decay may not begin before the warm-up has ended
    decay_from = max(steps - optim.decay_fraction * steps, warmup_steps)
    t = min(max(step - decay_from, 0.0) / max(steps - decay_from, 1), 1.0)
    return optim.lr + (min_lr - optim.lr) * t


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


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


def adamw(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: vectors (biases, norm weights) and everything in a norm have none."""
    decay, no_decay = parameter_groups(model)
    device = next(model.parameters()).device
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": optim.weight_decay}, {"params": no_decay, "weight_decay": 0.0}],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=device.type in ("cuda", "cpu", "mps"),  # one kernel for the whole update; these devices have it
    )


def parameter_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(with weight decay, without). The number of dimensions decides, not the class: a test by class would miss a norm that it
    does not know, and weights of the fused norms would decay where those of PyTorch's norms do not.
    """
    decay = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    no_decay = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    decayed = {id(p) for p in decay}
    for name, p in model.named_parameters():
        assert not ("norm" in name.lower() and id(p) in decayed), f"norm parameter {name} {tuple(p.shape)} would be decayed"
    return decay, no_decay


def compile_model(model: GPT, train: TrainConfig) -> Callable[..., torch.Tensor]:
    """The whole model through torch.compile, in one graph, in the mode train.compile_mode."""
    from torch._inductor import list_mode_options  # takes seconds to import, so only a run that compiles does it

    return torch.compile(model, fullgraph=True, options={**list_mode_options(train.compile_mode), **TWO_PASSES})


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device. For CUDA it goes through pinned memory, so that the host does not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
