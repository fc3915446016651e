"""deterministic=true: the same bits from the same command on the same machine, also on a GPU.

Our kernels and PyTorch's on the CPU give them anyway. On a GPU this is about cuBLAS, about sums that scatter, and about the
backward pass of attention, whose blocks add up in the order in which they finish. Under use_deterministic_algorithms, flash and
memory-efficient attention keep an order, cuDNN's is passed over, and an operator that can't keep one raises.

One GPU is meant: sums over several are NCCL's, which promises no order.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from configs.rules import CUBLAS_WORKSPACE, REPEATABLE


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Within the block, if `wanted`, operators give the same bits each time; afterwards all is as it was. Around all of a run,
    as cuBLAS reads its part when it is first used. An environment that asks cuBLAS for something else is kept: rules.check
    refuses it on a GPU.
    """
    if not wanted:
        yield
        return
    chosen = os.environ.get(CUBLAS_WORKSPACE)
    cudnn = torch.backends.cudnn
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.deterministic, cudnn.benchmark
    os.environ[CUBLAS_WORKSPACE] = chosen or REPEATABLE[0]
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        if chosen is None:
            del os.environ[CUBLAS_WORKSPACE]
