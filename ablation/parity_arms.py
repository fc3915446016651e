"""The four arms of the parity protocol, and the gradients that their steps gather."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ablation.arms import Arm, build, check_same, check_same_weights, load_initial_weights
from ablation.rounding import (
    REFERENCE,
    REORDERED,
    in_another_order,
)
from configs import Config
from configs.schema import DropoutMasks, NormImpl, ResidualDtype
from data import Tokenizer
from measure.comparison import FUSED, TORCH
from model.norm import How, Normalise, PreNorm
from ops import seeded_dropout
from training.precision import Precision

ARMS = (REFERENCE, TORCH, FUSED, REORDERED)
FP16_SCALE = 1024.0  # torch's default of 65536 overflows first, and the arms would skip steps that the reference takes


def four_arms(cfg: Config, precision: Precision, tokenizer: Tokenizer) -> list[Arm]:
    """In the order of ARMS."""
    # On MPS there is no fp64, neither for the reference nor for differences, so there the reference runs on the CPU.
    exact = Precision(torch.device("cpu") if precision.device.type == "mps" else precision.device, torch.float32)
    wide = copy.deepcopy(cfg)
    wide.model = replace(cfg.model, residual_dtype=ResidualDtype.fp32)
    vocab_size = tokenizer.vocab_size
    torch_arm = build(TORCH, cfg, NormImpl.torch, precision, vocab_size, masks=DropoutMasks.shared)
    load_initial_weights(torch_arm, tokenizer)
    arms = [
        build(REFERENCE, wide, NormImpl.torch, exact, vocab_size, masks=DropoutMasks.shared, like=torch_arm),
        torch_arm,
        build(FUSED, cfg, NormImpl.fused, precision, vocab_size, masks=DropoutMasks.shared, like=torch_arm),
        build(REORDERED, cfg, NormImpl.torch, precision, vocab_size, masks=DropoutMasks.shared, like=torch_arm),
    ]
    check_same(arms[1:])
    if exact.device == precision.device:  # the reference also keeps its residual stream in fp32
        check_same_weights(arms)
    if precision.dtype is torch.float32:
        double(arms[0].state.model)
    if precision.dtype is torch.float16:
        for arm in arms[1:]:
            arm.state.scaler = torch.amp.GradScaler(precision.device.type, init_scale=FP16_SCALE)
    reorder(arms[3].state.model)
    return arms


@contextmanager
def unclipped_gradients(arm: Arm) -> Iterator[dict[str, Tensor]]:
    """The gradients of the training step inside, by parameter name, before it clips them and sets them to None."""
    gradients: dict[str, Tensor] = {}
    scale = arm.state.scaler.get_scale()  # a power of two: dividing by it rounds nothing

    def keep(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradients[name] = parameter.grad / scale  # with accumulation the last micro-batch's call has the sum, and overwrites

    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: keep(name, parameter))
        for name, parameter in arm.state.model.named_parameters()
    ]
    try:
        yield gradients
    finally:
        for hook in hooks:
            hook.remove()


def norm_sites(model: nn.Module) -> dict[str, PreNorm]:
    return {name: site for name, site in model.named_modules() if isinstance(site, PreNorm)}


def reorder(model: nn.Module) -> None:
    """Makes the norm sites of `model` sum their rows, and the gradients of their weights, in another order.

    A norm does not depend on the order of a row's features, nor of the rows; its rounding does. So this changes what PyTorch's
    norms give exactly as much as any other correct program for them may.
    """
    for site in norm_sites(model).values():
        site._norm = partial(_reordered, site._norm)


def _reordered(norm: Normalise, r: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
    def in_order(rows: Tensor, order: Tensor) -> Tensor:
        return norm(rows, weight.index_select(0, order), None if bias is None else bias.index_select(0, order), how)

    return in_another_order(in_order, r)


def double(model: nn.Module) -> None:
    """Weights and arithmetic in fp64, with the masks of the fp32 arms."""
    model.double()
    for site in norm_sites(model).values():
        site._drop = _drop_double


def _drop_double(x: Tensor, rowscale: Tensor | None, seed: Tensor | None, stream: int, how: How) -> Tensor:
    """`model.norm.drop` in fp64, with the mask and the factor 1/(1-p) of the fp32 arms: the mask kernel has no fp64."""
    if rowscale is not None:
        x = x * rowscale[..., None]
    if how.dropout:
        assert seed is not None  # masks are shared
        x = x * seeded_dropout(torch.ones(x.shape, device=x.device), how.dropout, seed, stream)
    return x
