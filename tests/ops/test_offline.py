"""What the compiler makes of the kernels for a GPU, on a machine without one."""

import json
import os
import subprocess
import sys

import pytest

from ops.tiling import Work, forward_tile

from .cases import FP32, describe
from .offline import CASES


@pytest.fixture(scope="module")
def launches():
    """What compiling every launch of the cases found, in order."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.offline"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_class_of_tile_compiles_in_both_directions(launches):
    compiled = {(launch["case"], launch["kernel"]) for launch in launches}
    kernels = ("norm_forward_kernel", "norm_backward_kernel", "finish_weight_gradients_kernel")
    assert compiled == {(describe(case), kernel) for case in CASES for kernel in kernels}


def test_none_of_them_spills_registers(launches):
    assert [launch for launch in launches if launch["spilled"]] == []


def test_what_starts_early_touches_no_memory_before_it_has_waited(launches):
    assert {launch["early_start"] for launch in launches} == {True, False}
    for launch in launches:
        assert launch["before_waiting"] == ([] if launch["early_start"] else None), launch


def test_weights_that_a_tile_asks_for_first_are_not_put_off_behind_the_statistics(launches):
    """The compiler would, to save registers: up to four points of bandwidth."""
    forward = [launch for launch in launches if launch["kernel"] == "norm_forward_kernel"]
    early = [launch for launch in forward if launch["early_weights"]]
    with_heavy_weights = {describe(case) for case in CASES if case.weight == FP32}
    assert len(early) > 2 and with_heavy_weights.isdisjoint(launch["case"] for launch in early)
    assert [launch for launch in early if launch["behind_sums"] != []] == []
    assert any(launch["behind_sums"] for launch in forward)


def test_backward_has_the_shared_memory_that_tiles_are_fitted_by(launches):
    """Counted too low, a tile would be too much for a GPU that has less of it."""
    backward = [launch for launch in launches if launch["kernel"] == "norm_backward_kernel"]
    assert [launch for launch in backward if launch["shared"] > launch["staged"]] == []
    # Nor so high that stages are taken away for nothing.
    assert [launch for launch in backward if launch["staged"] > 1.5 * launch["shared"] + 2048] == []


def test_no_element_is_read_or_written_by_itself_unless_the_width_is_odd(launches):
    """Rows of 1000 columns would be, as Triton knows of a width whether 16 divides it, and no more."""
    assert any(case.n % 16 == 8 for case in CASES) and any(case.n % 8 == 4 for case in CASES)
    odd = {describe(case) for case in CASES if case.n % 2}
    # A thread that sums weight gradients has one column of them to write, at any width.
    norms = [launch for launch in launches if launch["kernel"] != "finish_weight_gradients_kernel"]
    found = [launch for launch in norms if launch["two_bytes"]]
    assert {launch["case"] for launch in found} == odd


def test_rows_are_read_past_l1_where_the_tile_says_so_and_biases_only_where_weights_are_more_than_it_keeps(launches):
    reads = {(*launch["past_l1"], launch["reads_past_l1"]) for launch in launches}
    work = Work(rms=False, residual=False, dropout=False, vector=8, loaded_bytes=2, weight_bytes=0, splittable=True)
    *rows, rows_and_bias = (n // 8 // (32 * forward_tile(n, work).warps) for n in (8192, 12288, 65536))  # 16 bytes at a time
    assert reads == {(False, False, 0), *((True, False, count) for count in rows), (True, True, 2 * rows_and_bias)}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rows_are_brought_into_l2_where_the_tile_says_so(direction, launches):
    """One instruction for each row of a tile and each tensor that is read with it, or one for all of its rows."""
    assert {launch["prefetch"] > 0 for launch in launches if launch["kernel"] == f"norm_{direction}_kernel"} == {False, True}
    assert [launch for launch in launches if launch["prefetches"] != launch["prefetch"]] == []
    assert any(launch["at_once"] for launch in launches)


def test_the_stream_of_split_rows_is_stored_so_that_it_leaves_the_caches_first_and_nothing_else_is(launches):
    streams = {describe(case) for case in CASES if case.residual is not None}
    forward = [launch for launch in launches if launch["kernel"] == "norm_forward_kernel" and launch["splits"]]
    passing = [launch for launch in launches if launch["passing_stores"]]
    assert passing and passing == [launch for launch in forward if launch["case"] in streams]
