"""One update of the weights."""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from configs import Config
from configs.machine import Machine
from configs.schema import TrainConfig
from model import GPT
from model.loss import TWO_PASSES
from training.checkpoint import TrainState
from training.distributed import ALONE, World, gradients_stay
from training.optimizer import set_learning_rate
from training.precision import Precision
from training.randomness import seed_micro_batch
from training.schedule import learning_rate
from training.sharding import whole


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
    """One update: the gradient of the mean loss over the batch of all ranks, gathered over micro-batches, clipped and applied.

    Args:
        forward: the model, compiled or not; as `World.replicate` or `sharding.shard` leave it where there are several ranks.
        batch: this rank's share.
        mark: told "forward", "backward" and "optimizer" where each of these ends, once for each micro-batch.

    Returns:
        The mean loss in nats per token, and the gradient norm before clipping; the same on every rank. Both stay on the device.
    """
    inputs, targets = (to_device(part, precision.device).chunk(cfg.train.accumulation) for part in batch)
    total = torch.zeros((), device=precision.device)
    for micro_batch, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        seeds = seed_micro_batch(cfg.seed, step, micro_batch, world.rank, sites=state.model.dropout_sites)
        last = micro_batch == cfg.train.accumulation - 1
        with nullcontext() if last else gradients_stay(forward):
            with precision.autocast():
                loss = forward(x, y, seeds=to_device(seeds, precision.device))
            mark("forward")
            loss = loss / cfg.train.accumulation  # micro-batches are equal, so the mean of their means is the batch's
            state.scaler.scale(loss).backward()
        total += loss.detach()
        mark("backward")

    set_learning_rate(state.optimizer, learning_rate(step, cfg.train.steps, cfg.optim))
    state.scaler.unscale_(state.optimizer)
    grad_norm = whole(torch.nn.utils.clip_grad_norm_(state.model.parameters(), cfg.optim.clip_norm or float("inf")))
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    mark("optimizer")
    return world.sum(total) / world.size, grad_norm


def prepare(model: GPT, train: TrainConfig, machine: Machine) -> None:
    """Tells the model how to run where the config leaves it a choice."""
    model.recompute = train.recompute
    model.compile_loss = machine.compiles_loss if train.compile_loss is None else train.compile_loss


def compile_model(model: GPT, train: TrainConfig) -> Callable[..., torch.Tensor]:
    """The whole model through torch.compile, in one graph, as train.compile_mode says."""
    from torch._inductor import list_mode_options  # takes seconds to import, so only a run that compiles does

    return torch.compile(model, fullgraph=True, options={**list_mode_options(train.compile_mode), **TWO_PASSES})


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On CUDA through pinned memory, so that the copy waits for nothing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
