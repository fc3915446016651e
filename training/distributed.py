"""Several processes (ranks) that train one model: what they tell each other.

NCCL reduces tensors on a GPU. Decisions of the host (whether to stop, which folder, what went wrong) travel over gloo, and no
GPU waits for them.
"""

import os
import time
from collections.abc import Callable, Iterator
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
from measure.files import StorageError
from training.sharding import is_sharded

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)  # the slowest rank may write a large checkpoint or compile
FAREWELL_S = 60.0  # for the first rank to print why the run ended; closing W&B may take as long
ENDED = "the first rank has ended"


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
        if self.size == 1:
            return number
        largest = torch.tensor(number)
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
