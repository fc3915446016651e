"""deterministic=true: the same bits from the same command on the same machine, also on a GPU.

Our kernels and PyTorch's on the CPU give them anyway. On a GPU this is about cuBLAS, about sums that scatter, and about the
backward pass of attention, whose blocks add up in the order in which they finish. Under use_deterministic_algorithms, flash and
memory-efficient attention keep an order, cuDNN's is passed over, and an operator that can't keep one raises.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from configs import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REPEATABLE = (":4096:8", ":16:8")  # buffers as cuBLAS documents them for results that repeat; the first costs 24 MB, not speed


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Within the block, if `wanted`, operators give the same bits each time; afterwards all is as it was. Around all of a run,
    as cuBLAS reads its part when it is first used.

    Raises:
        ConfigError: the environment asks cuBLAS for something else.
    """
    if not wanted:
        yield
        return
    chosen = os.environ.get(WORKSPACE)
    if chosen not in (None, *REPEATABLE):
        raise ConfigError(
            f"deterministic=true: the environment has {WORKSPACE}={chosen}, with which cuBLAS does not repeat its results. "
            f"Unset it, or use {' or '.join(REPEATABLE)}."
        )
    cudnn = torch.backends.cudnn
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.deterministic, cudnn.benchmark
    os.environ[WORKSPACE] = chosen or REPEATABLE[0]
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        if chosen is None:
            del os.environ[WORKSPACE]
