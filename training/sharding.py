"""Sharded ranks, parallel=fsdp: each keeps a part of every weight, of its gradient and of its optimizer state (FSDP2).

The linear layers of a block are gathered together right before they compute and freed right after. They travel in the dtype
that autocast would cast them to; with model.qk_norm in fp32, for the norms among them. Embeddings, norms and head stay in fp32
and are gathered once a step. Gradients are reduced in fp32. So the numbers are those of parallel=ddp to rounding.

Sharded parameters are DTensors outside of forward and backward and plain tensors within. A checkpoint has them whole, see
checkpoint.py.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from model import GPT
from model.attention import Attention
from model.mlp import MLP
from training.precision import Precision

# torch.distributed.fsdp and .tensor take seconds to import, so only a run that shards does.


def shard(model: GPT, precision: Precision, ranks: int, *, compiled: bool) -> None:
    """Shards `model` over all ranks, in place and on their devices; before its optimizer is made. All ranks call it together.

    From then on it runs under `precision.autocast()` alone.

    Args:
        model: the same weights on every rank. They may be on the CPU: no device has to hold them all at once.
        compiled: compile the parts of the blocks too. Not the model: no graph can hold the gathering of weights.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import init_device_mesh

    # about changes in place of what a linear layer returns, of which our blocks make none
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(precision.device.type, (ranks,))
    if compiled:
        _compile_parts(model)  # before the hooks that gather are put around them
    # autocast is on, and casts activations as ever
    as_they_are = MixedPrecisionPolicy(cast_forward_inputs=False)
    as_computed = MixedPrecisionPolicy(precision.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, Attention) and isinstance(mlp, MLP)
        # norms of queries and keys stand among the linear layers, and autocast would leave their weights in fp32
        policy = as_computed if attention.query_norm is None else as_they_are
        # one group: recomputation in backward takes a block as a whole, and finds all of it gathered
        fully_shard([attention, mlp], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=as_they_are)


def is_sharded(model: object) -> bool:
    return hasattr(model, "set_requires_gradient_sync")  # of FSDPModule, which fully_shard makes a base of its class


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Around forward passes without backward. A sharded model is run eagerly there, as each new shape would be compiled again,
    and afterwards has its parameters sharded again, which otherwise backward does. All ranks must run as many passes.
    """
    if not is_sharded(model):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]


def whole(tensor: Tensor) -> Tensor:
    """`tensor`; gathered if it is sharded, which all ranks do together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # a DTensor


def collect(tensors: dict[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Copies of sharded tensors, whole and in host memory.

    All ranks call it together, and no device holds more than one of them whole at a time.

    Args:
        keep: on this rank; the others get none.
    """
    found = {}
    for name, tensor in tensors.items():
        gathered = whole(tensor)
        if keep:
            found[name] = gathered.to("cpu", copy=True)  # a single rank's part is the whole, and a CPU's is there already
    return found


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor that each rank has, sharded as `like` is; each rank takes its part, and none talks to another."""
    if not hasattr(like, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def _compile_parts(model: GPT) -> None:
    """Compiles norm sites, attentions and MLPs, whose names stay what they are."""
    # norm sites share their code, which is compiled for each rate of drop path anew
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * model.dropout_sites)
    parts = [part for block in model.blocks for part in block.children()]
    for part in [*parts, model.final_norm]:
        part.forward = torch.compile(part.forward, fullgraph=True)
