"""The kernel that norms are held against: it moves what they must move."""

import subprocess
import sys

import pytest
import torch

from benchmarks import kernels
from benchmarks.cases import CASES, DIRECTIONS, Setting, make_inputs, minimum_bytes

STREAMS = [torch.bfloat16, torch.float32]


def one_set(case, stream, device="cpu"):
    setting = Setting(residual_dtype=stream if case.add else None)
    (inputs,) = make_inputs(case, setting, 8, 64, 1, torch.device(device))
    return inputs


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", CASES)
def test_it_moves_the_fewest_bytes_that_a_norm_must_move(name, direction, stream):
    case = CASES[name]
    read, written = kernels.tensors_moved(case, direction, one_set(case, stream))
    residual_bytes = stream.itemsize if case.add else None
    assert sum(t.nbytes for t in (*read, *written)) == minimum_bytes(case, direction, 8, 64, residual_bytes=residual_bytes)


@pytest.mark.gpu
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", CASES)
def test_it_reads_and_writes_every_element(name, direction, stream):
    case = CASES[name]
    inputs = one_set(case, stream, "cuda")
    read, written = kernels.tensors_moved(case, direction, inputs)
    total = sum(t.float() for t in read)
    outputs = kernels.move(case, direction, inputs)
    assert [t.dtype for t in outputs] == [t.dtype for t in written]
    for output in outputs:
        torch.testing.assert_close(output, total.to(output.dtype))


def test_what_needs_no_kernel_needs_no_triton():
    """Tables of recorded results are made on any machine."""
    code = "import sys; sys.modules['triton'] = None; import benchmarks.readme, benchmarks.norms, benchmarks.train_step"
    subprocess.run([sys.executable, "-c", code], check=True)
