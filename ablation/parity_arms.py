"""The arms of the parity protocol, and the gradients that their steps gather."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import assert_never

import torch
from torch import Tensor, nn

from ablation.arms import Arm, build_arm, check_same
from ablation.config import Config, Switch
from ablation.rounding import ORDERS, REFERENCE, REORDERED, in_another_order, shuffled
from configs.schema import DropoutMasks, NormImpl
from data import Batches, Tokenizer
from measure.comparison import TORCH
from model import loss as losses
from model.attention import QueryKeySite
from model.mlp import MLP
from model.norm import NormSite
from model.sites import How, Normalise, normalise, torch_site
from ops import seeded_dropout
from training.precision import MixedPrecision

ORDER_NAMES = [f"{REORDERED} {number}" for number in range(ORDERS)]
FP16_SCALE = 1024.0  # torch's default of 65536 overflows first, and the arms would skip steps that the reference takes


def parity_arms(
    cfg: Config, precision: MixedPrecision, tokenizer: Tokenizer, batches: Batches, tested: Sequence[str]
) -> dict[str, Arm]:
    """The reference, torch, the tested values of the switch, and torch in other orders of sums."""
    cfg = copy.deepcopy(cfg)
    if cfg.ablate.switch is not Switch.norm:
        cfg.norm.impl = NormImpl.torch  # in all arms, since kernels have no fp64
    # On MPS there is no fp64, neither for the reference nor for differences, so there the reference runs on the CPU.
    exact = MixedPrecision(torch.device("cpu") if precision.device.type == "mps" else precision.device, torch.float32)
    own = partial(build_arm, precision=precision, tokenizer=tokenizer, batches=batches, masks=DropoutMasks.shared)
    like = own(TORCH, cfg)
    reference = own(REFERENCE, cfg, precision=exact, value=TORCH, like=like)
    reordered = [own(name, cfg, value=TORCH, like=like) for name in ORDER_NAMES]
    others = [like, *(own(name, cfg, like=like) for name in tested), *reordered]
    check_same(others)
    if precision.dtype is torch.float32:
        double(reference.state.model)
    if precision.dtype is torch.float16:
        for arm in others:
            arm.state.scaler = torch.amp.GradScaler(precision.device.type, init_scale=FP16_SCALE)
    for number, arm in enumerate(reordered):
        reorder(arm, number)
    return {arm.name: arm for arm in (reference, *others)}


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


def norm_sites(model: nn.Module) -> dict[str, NormSite]:
    return {name: site for name, site in model.named_modules() if isinstance(site, NormSite)}


def row_sites(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose first output's rows are as long as their norm makes them.

    Fused norms of queries and keys are no modules of their own. Turned queries stand for both: a turn keeps a row's length.
    """
    outer = {name: site for name, site in norm_sites(model).items() if not name.endswith(("query_norm", "key_norm"))}
    if len(outer) == len(norm_sites(model)):
        return {**outer}
    return outer | {name: site for name, site in model.named_modules() if isinstance(site, QueryKeySite)}


def reorder(arm: Arm, number: int) -> None:
    """Makes what is compared sum in another order: the norm sites their rows and the gradients of their weights, the loss the
    exponentials of a row and the losses of rows, or the MLPs the gradients of their weights and biases.

    A norm does not depend on the order of a row's features, nor of the rows; its rounding does. So this changes what PyTorch's
    norms give exactly as much as any other correct program for them may. The same holds of the loss and its logits.
    """
    match arm.cfg.ablate.switch:
        case Switch.norm:
            for site in norm_sites(arm.state.model).values():
                site.compute = partial(torch_site, norm=partial(_reordered, normalise, number))  # type: ignore[method-assign]
        case Switch.loss:
            arm.update.forward = partial(_with_reordered_loss, arm.update.forward, number)
        case Switch.mlp:
            for module in arm.state.model.modules():
                if isinstance(module, MLP):
                    module.forward = partial(_with_reordered_rows, module.forward, number)  # type: ignore[method-assign]
        case _:
            assert_never(arm.cfg.ablate.switch)


def _with_reordered_loss(forward: Callable[..., Tensor], number: int, *args: Tensor, **kwargs: Tensor) -> Tensor:
    own = losses.cross_entropy
    losses.cross_entropy = partial(_reordered_loss, own, number)
    try:
        return forward(*args, **kwargs)
    finally:
        losses.cross_entropy = own


def _reordered_loss(
    loss: Callable[..., Tensor], number: int, logits: Tensor, targets: Tensor, softcap: float | None, z_loss: float
) -> Tensor:
    row_order, column_order = (shuffled(n, logits.device, number) for n in logits.shape)
    moved = torch.where(targets < 0, targets, column_order.argsort()[targets.clamp_min(0)])  # below 0: it does not count
    shuffled_logits = logits.index_select(0, row_order).index_select(1, column_order)
    return loss(shuffled_logits, moved[row_order], softcap, z_loss)


def _reordered(
    norm: Normalise, number: int, r: Tensor, weight: Tensor | None, bias: Tensor | None, how: How, scalars: Tensor | None = None
) -> Tensor:
    def in_order(rows: Tensor, order: Tensor) -> Tensor:
        weights = [None if t is None else t.index_select(0, order) for t in (weight, bias)]
        return norm(rows, *weights, how, scalars)

    return in_another_order(in_order, r, number)


def _with_reordered_rows(forward: Callable[[Tensor], Tensor], number: int, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    order = shuffled(rows.shape[0], x.device, number)
    return forward(rows[order])[order.argsort()].view(x.shape)


def double(model: nn.Module) -> None:
    """Weights and arithmetic in fp64, with the masks of the fp32 arms."""
    model.double()
    for site in norm_sites(model).values():
        site.compute = partial(torch_site, drop=_drop_double)  # type: ignore[method-assign]


def _drop_double(x: Tensor, rowscale: Tensor | None, seed: Tensor | None, stream: int, how: How) -> Tensor:
    """`model.sites.drop` in fp64, with the mask and the factor 1/(1-p) of the fp32 arms: the mask kernel has no fp64."""
    if rowscale is not None:
        x = x * rowscale[..., None]
    if how.dropout:
        assert seed is not None  # masks are shared
        x = x * seeded_dropout(torch.ones(x.shape, device=x.device), how.dropout, seed, stream)
    return x
