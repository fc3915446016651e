"""Several processes that train one model: the ranks that torchrun starts, and what they tell each other.

Tensors on a GPU are reduced over NCCL. Whether to stop, where the run is kept, what went wrong: those stay on the host, over
gloo, and no GPU waits for them.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from configs import ConfigError
from configs.machine import by_torchrun
from training.sharding import is_sharded
from training.storage import StorageError

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)  # for the slowest rank, which may write a large checkpoint or compile
FAREWELL_S = 60.0  # for the first rank to say why the run ended; W&B may take as long
ENDED = "the first rank has ended"


@dataclass(frozen=True)
class World:
    """This process among all that train together; by default it is alone, and every method then does next to nothing.

    All ranks must call the same methods in the same order, but for `leave`.
    """

    rank: int = 0
    size: int = 1
    store: dist.Store | None = None  # of all ranks

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes files and talks to the user."""
        return self.rank == 0

    def first(self, act: Callable[[], T]) -> T:
        """What `act` returns on the first rank, which alone calls it, on every rank.

        Raises:
            ConfigError, StorageError, SystemExit: on every rank, where `act` raises them. With another exception the first rank
                ends, and torchrun the others.
        """
        if self.size == 1:
            return act()
        told: list = [None, None]
        if self.leads:
            try:
                told[0] = act()
            except (ConfigError, StorageError, SystemExit) as error:
                told[1] = error
        dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
        if told[1] is not None:
            raise told[1]
        return told[0]

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Within the block, a ConfigError on any rank is one on every rank."""
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

    def highest(self, number: int) -> int:
        """The largest `number` of any rank."""
        if self.size == 1:
            return number
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` added up over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def replicate(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`forward`, compiled or not, so that a backward pass leaves the mean gradient of all ranks.

        Compiled before it is wrapped: the graph is then whole, and PyTorch still cuts it where a bucket of gradients is
        complete, so that they travel while backward goes on.
        """
        if self.store is None or is_sharded(forward):  # which does it by itself
            return forward
        assert isinstance(forward, nn.Module)
        return DistributedDataParallel(forward, gradient_as_bucket_view=True)

    def leave(self, exit_code: int) -> None:
        """Ends this rank's part. What goes wrong is the first rank's to say, so that the others wait for it: torchrun ends all
        as soon as one has failed."""
        if self.store is None:
            return
        with suppress(dist.DistError):  # torchrun has the store, and may be gone: SIGUSR1 ends it, for one
            if self.leads:
                self.store.set(ENDED, "")
            elif exit_code:
                until = time.monotonic() + FAREWELL_S
                while time.monotonic() < until and not self.store.check([ENDED]):
                    time.sleep(0.1)
        dist.destroy_process_group()


ALONE = World()


def join() -> World:
    """This process's place among those that torchrun started; ALONE if it did not.

    Each rank gets the GPU of its number on its node.
    """
    if not by_torchrun():
        return ALONE
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank < gpus:  # else the rules say what is wrong
        torch.cuda.set_device(local_rank)
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=TIMEOUT)))
    # torchrun's store outlives a restart, and has what the ranks before it wrote
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("ranks", store), rank=rank, world_size=size, timeout=TIMEOUT)
    return World(rank, size, store)


def gradients_stay(forward: Callable[..., Tensor]) -> AbstractContextManager:
    """Within the block, gradients are added up on each rank alone: of all micro-batches but the last."""
    if is_sharded(forward):
        return _unreduced(forward)
    return forward.no_sync() if isinstance(forward, DistributedDataParallel) else nullcontext()


@contextmanager
def _unreduced(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
