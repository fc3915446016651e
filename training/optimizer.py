"""The optimizer of a run: AdamW for all parameters, or Muon for the matrices of the blocks and AdamW for the rest."""

from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from configs.schema import OptimConfig, OptimKind
from model import GPT
from training.sharding import full_tensor, sharded_like


def make_optimizer(model: GPT, optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of `model`, whose parameters are on their devices and, under FSDP, already sharded.

    optim.kind=adamw   AdamW (arXiv:1711.05101); weight decay on matrices only: vectors (biases, norm weights) have none
    optim.kind=muon    Muon (https://kellerjordan.github.io/posts/muon) for the matrices of the blocks: their momentum is made
                       orthogonal before it is applied; those of queries, keys and values, of gate and value of a SwiGLU, each
                       by itself. AdamW for embeddings, head and vectors. An update of Muon is scaled to the size of AdamW's,
                       0.2·√max(rows, columns) (arXiv:2502.16982), so that both take optim.lr and optim.weight_decay.
    """
    match optim.kind:
        case OptimKind.adamw:
            return adamw(model, optim)
        case OptimKind.muon:
            matrices = [p for p in model.blocks.parameters() if p.requires_grad and p.ndim == 2]
            joined = model.joined()
            muon = Muon(
                [{"params": [p], "rows": joined.get(p, [p.shape[0]])} for p in matrices],
                lr=optim.lr,
                weight_decay=optim.weight_decay,
                momentum=optim.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
            return Chained(muon, adamw(model, optim, without=matrices))
        case _:
            assert_never(optim.kind)


def adamw(model: GPT, optim: OptimConfig, without: list[nn.Parameter] | None = None) -> torch.optim.AdamW:
    """AdamW of all parameters but those of `without`, in two groups: with weight decay and without."""
    others = {id(p) for p in without or []}
    decay, no_decay = ([p for p in group if id(p) not in others] for group in parameter_groups(model))
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


class Muon(torch.optim.Muon):
    """PyTorch's Muon of matrices that lie below each other in one parameter, as queries, keys and values do. A group's `rows`
    are those of each.

    The rate may also be a scalar tensor on the device of the parameters, for a CUDA graph of the step: an update is linear in
    the rate, so the step is made at rate 1, and the weights go that part of the way.

    The state is that of the whole parameters, as if they were one matrix: the momentum is taken before the matrices are apart.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "an optimizer that computes the loss again is not supported"
        groups, state = self.param_groups, self.state
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if "momentum_buffer" not in state[parameter]:
                        state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                    self._step(parameter, parameter.grad, state[parameter]["momentum_buffer"], group)
        self.param_groups, self.state = groups, state

    def _step(self, parameter: Tensor, grad: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
        """PyTorch's step of the parts of one parameter. A sharded one is gathered, as a part has rows on several ranks."""
        whole, grad, mean = full_tensor(parameter.detach()), full_tensor(grad), full_tensor(momentum)
        parts, rate = whole.split(group["rows"]), group["lr"]
        self.state = defaultdict(dict)
        for part, part_grad, part_mean in zip(parts, grad.split(group["rows"]), mean.split(group["rows"]), strict=True):
            part.grad, self.state[part]["momentum_buffer"] = part_grad, part_mean
        on_device = isinstance(rate, Tensor)
        before = whole.clone() if on_device else whole
        self.param_groups = [group | {"params": parts, "lr": 1.0 if on_device else rate}]
        super().step()
        if on_device:
            whole.copy_(before.lerp(whole, rate))
        for own, gathered in ((parameter, whole), (momentum, mean)):
            if hasattr(own, "full_tensor"):  # a DTensor; of others the parts are views
                own.copy_(sharded_like(gathered, own))


class Chained(torch.optim.Optimizer):
    """Optimizers of different parameters as one: one step, one list of groups, one state, one state_dict."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], defaults={})
        self.optimizers = optimizers
        self._share()

    # a gradient scaler then leaves `found_inf` and `grad_scale` here, where it would else wait for the device to skip a step
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "an optimizer that computes the loss again is not supported"
        found_inf = getattr(self, "found_inf", None)
        for optimizer in self.optimizers:
            if found_inf is None:
                optimizer.step()
            elif getattr(optimizer, "_step_supports_amp_scaling", False):
                vars(optimizer).update(grad_scale=None, found_inf=found_inf)  # clipping has unscaled the gradients
                optimizer.step()
                del vars(optimizer)["grad_scale"], vars(optimizer)["found_inf"]
            else:
                before = {id(tensor): tensor.clone() for tensor in self._tensors(optimizer)}
                optimizer.step()
                for tensor in self._tensors(optimizer):  # state that the step has made began as zeros
                    was = before.get(id(tensor), torch.zeros_like(tensor))
                    tensor.copy_(torch.where(found_inf > 0, was, tensor))

    def _tensors(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The parameters of one of them, and their state."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [*parameters, *(value for p in parameters for value in self.state[p].values())]

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def __getstate__(self) -> dict:  # of copies: the base class names what they take
        return super().__getstate__() | {"optimizers": self.optimizers}

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.state = self.state
            optimizer.param_groups = list(islice(groups, len(optimizer.param_groups)))
