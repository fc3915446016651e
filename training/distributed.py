"""Several processes (ranks) that train one model: what they tell each other, and sharding (parallel=fsdp).

NCCL reduces tensors on a GPU. Decisions of the host (whether to stop, which folder, what went wrong) travel over gloo, and no
GPU waits for them.

With parallel=fsdp (FSDP2) each rank keeps a part of every weight, of its gradient and of its optimizer state. The linear layers
of neighbouring blocks are gathered together right before they compute and freed right after. They travel in the dtype that
autocast would cast them to. Embeddings, norms and head stay in fp32 and are gathered once a step. Gradients are reduced in
fp32. So losses equal those of parallel=ddp to rounding. Sharded parameters are DTensors outside of forward and backward, and
plain tensors inside. A checkpoint has them whole.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from configs import ConfigError
from configs.machine import by_torchrun
from model import GPT
from model.loss import TWO_PASSES
from training.precision import Precision
from training.storage import StorageError

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)  # the slowest rank may write a large checkpoint or compile
FAREWELL_S = 60.0  # for the first rank to print why the run ended; closing W&B may take as long
ENDED = "the first rank has ended"
# Of weights that are gathered together, at least. Each group costs the host about 4 ms a step (hooks, casts, collectives).
# GPT-2 124M on two H100s: kernels take 70 ms; the host needs 85 ms with one block a group, 55 with three.
GROUP_BYTES = 32 * 2**20


@dataclass(frozen=True)
class World:
    """This process among all ranks of a run. By default it is alone, and its methods do almost nothing.

    All ranks must call the same methods in the same order, except for `leave`.
    """

    rank: int = 0
    size: int = 1
    store: dist.Store | None = None  # shared by all ranks; None: torchrun did not start this process

    @property
    def leads(self) -> bool:
        """Whether this is the first rank, which writes files and prints."""
        return self.rank == 0

    def on_first(self, act: Callable[[], T]) -> T:
        """Calls `act` on the first rank only. Returns its result on every rank.

        Raises:
            ConfigError, StorageError, SystemExit: `act` raised it; every rank raises it. Another exception ends the first rank,
                and torchrun ends the others.
        """
        if self.size == 1:
            return act()
        result: list = [None, None]
        if self.leads:
            try:
                result[0] = act()
            except (ConfigError, StorageError, SystemExit) as error:
                result[1] = error
        dist.broadcast_object_list(result, src=0, device=torch.device("cpu"))
        if result[1] is not None:
            raise result[1]
        return result[0]

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """A ConfigError of the block on any rank is raised on every rank."""
        found = None
        try:
            yield
        except ConfigError as error:
            found = error
        if self.size > 1:
            everyone: list[ConfigError | None] = [None] * self.size
            dist.all_gather_object(everyone, found)
            found = next((error for error in everyone if error is not None), None)
        if found is not None:
            raise found

    def max(self, number: int) -> int:
        """The largest `number` of any rank."""
        largest = torch.tensor(number)
        if self.size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def replicate(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wraps `forward`, compiled or not, so that a backward pass leaves the mean gradient of all ranks.

        A compiled model is compiled before it is wrapped, so its graph has no breaks. PyTorch still splits the graph where a
        bucket of gradients is complete, so that reduction overlaps with backward.
        """
        if self.store is None or is_sharded(forward):  # FSDP reduces gradients by itself
            return forward
        assert isinstance(forward, nn.Module)
        return DistributedDataParallel(forward, gradient_as_bucket_view=True)

    def leave(self, exit_code: int) -> None:
        """Ends this rank. torchrun ends all ranks as soon as one has failed, so a rank that failed first waits until the first
        rank has printed why."""
        if self.store is None:
            return
        with suppress(dist.DistError):  # the store is torchrun's, which may have ended: SIGUSR1 ends it, for example
            if self.leads:
                self.store.set(ENDED, "")
            elif exit_code:
                until = time.monotonic() + FAREWELL_S
                while time.monotonic() < until and not self.store.check([ENDED]):
                    time.sleep(0.1)
        dist.destroy_process_group()


ALONE = World()


def join() -> World:
    """The place of this process among the ranks that torchrun started; ALONE without torchrun.

    Each rank gets the GPU of its number on its node.
    """
    if not by_torchrun():
        return ALONE
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank < gpus:  # else configs.rules refuses the config
        torch.cuda.set_device(local_rank)
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=TIMEOUT)))
    # torchrun keeps its store when it restarts the ranks: the prefix hides keys of earlier starts
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("ranks", store), rank=rank, world_size=size, timeout=TIMEOUT)
    return World(rank, size, store)


@contextmanager
def without_reduction(forward: Callable[..., Tensor]) -> Iterator[None]:
    """Within the block each rank sums its own gradients only. It is for all micro-batches but the last."""
    if isinstance(forward, DistributedDataParallel):
        with forward.no_sync():
            yield
        return
    sharded: Any = forward if is_sharded(forward) else None
    if sharded:
        sharded.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        if sharded:
            sharded.set_requires_gradient_sync(True)


# torch.distributed.fsdp and .tensor take seconds to import, so only a run that shards does.


def shard(model: GPT, precision: Precision, ranks: int, *, compiled: bool) -> None:
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
    return hasattr(
        model, "set_requires_gradient_sync"
    )  # a method of FSDPModule, which fully_shard makes a base of the model's class


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
        if keep:
            found[name] = gathered.to(
                "cpu", copy=True
            )  # copy: one rank's part is the whole tensor, which may be on the CPU already
    return found


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has, sharded as `like` is. Each rank takes its part without communication."""
    if not hasattr(like, "device_mesh"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


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
