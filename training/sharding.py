"""Sharding of a model (parallel=fsdp, FSDP2): each rank keeps a part of every weight, of its gradient and optimizer state.

The linear layers of neighbouring blocks are gathered together right before they compute and freed right after. They travel in
the dtype that autocast would cast them to. Embeddings, norms and head stay in fp32 and are gathered once a step. Gradients are
reduced in fp32. So losses equal those of parallel=ddp to rounding. Sharded parameters are DTensors outside of forward and
backward, and plain tensors inside. A checkpoint has them whole.

torch.distributed.fsdp and .tensor take seconds to import, so only a run that shards does.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from model import GPT
from model.loss import TWO_PASSES
from training.precision import MixedPrecision

T = TypeVar("T")

# Of weights that are gathered together, at least. Each group costs the host about 4 ms a step (hooks, casts, collectives).
# GPT-2 124M on two H100s: kernels take 70 ms; the host needs 85 ms with one block a group, 55 with three.
GROUP_BYTES = 32 * 2**20


def shard(model: GPT, precision: MixedPrecision, ranks: int, *, compiled: bool) -> None:
    """Shards `model` over all ranks, in place, on their devices, before its optimizer is made. All ranks call it together.

    A sharded model runs under `precision.autocast()` only.

    Args:
        model: the same weights on every rank. They may be on the CPU, so that no device has to hold all of them.
        compiled: compile each block, because a graph of the whole model can't hold the gathering of weights.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import init_device_mesh

    # the warning is about changing a linear layer's output in place, which our blocks do not do
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(precision.device.type, (ranks,))
    if compiled:
        _compile_parts(model)  # before fully_shard adds the hooks that gather weights
    # autocast casts activations
    as_they_are = MixedPrecisionPolicy(cast_forward_inputs=False)
    as_computed = MixedPrecisionPolicy(precision.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    linear = {p for layer in model.blocks.modules() if isinstance(layer, nn.Linear) for p in layer.parameters()}
    fully_shard(model, mesh=mesh, mp_policy=as_they_are, ignored_params=linear)  # first, as it takes the blocks' norms
    groups = _groups(model.blocks, linear, precision.dtype.itemsize)
    for blocks in groups:
        norms = {p for block in blocks for p in block.parameters()} - linear
        last = blocks is groups[-1]  # backward begins with it
        fully_shard(blocks, mesh=mesh, mp_policy=as_computed, ignored_params=norms, reshard_after_forward=not last)


def _compile_parts(model: GPT) -> None:
    """Compiles the embedding, each block, and what follows the blocks up to the loss: a graph each.

    Only training runs the graphs. Evaluation runs eagerly, because each new shape would be compiled again.
    """
    # blocks share their code, which is compiled again for the first block and for each rate of drop path
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * model.dropout_sites)
    for owner, method in [(model, "embed"), *((block, "forward") for block in model.blocks), (model, "predict")]:
        setattr(owner, method, _compiled_in_training(model, getattr(owner, method)))


def _compiled_in_training(model: GPT, eager: Callable[..., T]) -> Callable[..., T]:
    compiled = torch.compile(eager, fullgraph=True, options=TWO_PASSES)
    return lambda *inputs: (compiled if model.training else eager)(*inputs)


def _groups(blocks: Iterable[nn.Module], linear: set[nn.Parameter], itemsize: int) -> list[list[nn.Module]]:
    """Neighbouring blocks, as many as it takes until their linear layers have GROUP_BYTES."""
    groups: list[list[nn.Module]] = []
    held = GROUP_BYTES
    for block in blocks:
        if held >= GROUP_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(block)
        held += itemsize * sum(p.numel() for p in block.parameters() if p in linear)
    return groups


def is_sharded(model: object) -> bool:
    # a method of FSDPModule, which fully_shard makes a base of the model's class
    return hasattr(model, "set_requires_gradient_sync")


@contextmanager
def forward_only(model: nn.Module) -> Iterator[None]:
    """Goes around forward passes without backward. All ranks must make equally many passes.

    Afterwards a sharded model's parameters are sharded again, which otherwise backward does.
    """
    yield
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]


def full_tensor(tensor: Tensor) -> Tensor:
    """`tensor`, gathered if it is sharded. All ranks call it together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # a DTensor


def gather_to_host(tensors: dict[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Copies of sharded tensors, gathered one at a time, in host memory. All ranks call it together.

    Args:
        keep: whether this rank gets the copies.
    """
    found = {}
    for name, tensor in tensors.items():
        gathered = full_tensor(tensor)
        if keep:  # copy: one rank's part is the whole tensor, which may be on the CPU already
            found[name] = gathered.to("cpu", copy=True)
    return found


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has, sharded as `like` is. Each rank takes its part without communication."""
    if not hasattr(like, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
