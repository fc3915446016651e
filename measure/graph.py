"""A CUDA graph of work on the current stream."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def aside(stream: torch.cuda.Stream) -> Iterator[None]:
    """The block's work on the GPU is on this stream, behind what was queued before; what follows is behind it."""
    around = torch.cuda.current_stream()
    stream.wait_stream(around)
    with torch.cuda.stream(stream):
        yield
    around.wait_stream(stream)


def captured(act: Callable[[], object], pool: Any) -> Callable[[], None]:
    """Records what `act` launches, without running it. Returns what replays it.

    `act` has run before, on this stream, so that kernels are compiled and lazily made state is there. What it reads and writes
    are tensors that stay where they are.

    Args:
        pool: memory of graphs that do not run at the same time, nor read what another leaves in it.

    Raises:
        RuntimeError: something in `act` can't be captured. A torch.OutOfMemoryError is one too.
    """
    graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.clone_state()
    try:
        # thread_local: W&B, a reader of tokens and NCCL's watchdog may call CUDA meanwhile
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            act()
    except BaseException:
        generator.graphsafe_set_state(state)  # a capture that fails leaves the generator believing that it goes on
        raise
    return graph.replay


@contextmanager
def waits() -> Iterator[list[str]]:
    """Within the block PyTorch tells of each operation that waits for the GPU, which no graph can hold. Asked before a capture,
    because one that fails may break what follows. The list has their places, once the block has ended."""
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # says that it is a prototype
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for one in caught:
        if "called a synchronizing CUDA operation" in str(one.message):
            found.append(f"{one.filename}:{one.lineno}")
        elif "ynchronization debug mode" not in str(one.message):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
