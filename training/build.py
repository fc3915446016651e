"""A model that is ready to train: weights, state, and the forward that the config asks for. All programs build theirs here."""

from collections.abc import Callable
from typing import NamedTuple, assert_never

import torch
from torch import Tensor, nn

from configs import Config, as_config_errors
from configs.schema import Parallel
from model import GPT
from model.loss import TWO_PASSES
from training.checkpoint import TrainState
from training.distributed import ALONE, World
from training.optimizer import make_optimizer
from training.precision import MixedPrecision
from training.sharding import shard


class Built(NamedTuple):
    model: GPT
    state: TrainState
    forward: Callable[..., Tensor]  # what `training_step` calls: the model, compiled or wrapped for several ranks or neither


def build(
    cfg: Config,
    precision: MixedPrecision,
    vocab_size: int,
    world: World = ALONE,
    *,
    fill: Callable[[GPT], object] = lambda model: None,
    restore: Callable[[TrainState], object] = lambda state: None,
    tokenizer: str = "",
    corpus: str = "",
    draw_on: str | torch.device = "cpu",
) -> Built:
    """Builds the model of cfg with its optimizer. All ranks call it together.

    The initial weights depend on cfg.seed, cfg.model and `draw_on` alone, not on cfg.norm.impl.

    Args:
        vocab_size: of the tokenizer.
        fill: called with the fresh model, whose weights are whole and where they were drawn; may replace them.
        restore: called with the state, before forward is compiled and wrapped; may load a checkpoint.
        tokenizer, corpus: for checkpoints; see TrainState.
        draw_on: the device that draws initial weights. A CPU gives the same ones on every machine, a GPU is faster; "meta"
            leaves drawing to `fill`, which gets tensors without values on precision.device.

    Raises:
        ConfigError: options of the model that do not fit together, or what `fill` or `restore` refuse.
    """
    torch.manual_seed(cfg.seed)
    with world.shared_errors(), as_config_errors():
        with torch.device(draw_on):
            model = GPT(cfg.model, cfg.norm, vocab_size, cfg.loss, cfg.mlp)
        if torch.device(draw_on).type == "meta":
            model.to_empty(device=precision.device)
        fill(model)
    model.recompute = cfg.train.recompute
    if sharded := is_fsdp(cfg.parallel):
        shard(model, precision, world.size, compiled=cfg.train.compile)
    model = model.to(precision.device)
    state = TrainState(model, make_optimizer(model, cfg.optim), precision.scaler(), tokenizer, corpus, leads=world.leads)
    with world.shared_errors():
        restore(state)
    forward: Callable[..., Tensor] = model
    if cfg.train.compile and not sharded:
        forward = compile_model(model)
    return Built(model, state, world.replicate(forward))


def is_fsdp(parallel: Parallel) -> bool:
    match parallel:
        case Parallel.fsdp:
            return True
        case Parallel.auto | Parallel.ddp:
            return False
        case _:
            assert_never(parallel)


def compile_model(model: GPT) -> Callable[..., Tensor]:
    """The whole model through torch.compile, in one graph."""
    return torch.compile(model, fullgraph=True, options=TWO_PASSES)


@torch.no_grad()
def copy_values(source: nn.Module, target: nn.Module) -> None:
    """Copies parameters and buffers, also those that a state_dict leaves out.

    Raises:
        AssertionError: their names differ.
    """
    for kind in ("named_parameters", "named_buffers"):
        values, places = (dict(getattr(model, kind)()) for model in (source, target))
        assert values.keys() == places.keys(), f"different {kind.removeprefix('named_')}"
        for name, place in places.items():
            place.copy_(values[name])
