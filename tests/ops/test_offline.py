"""What the compiler makes of the kernels for a GPU, on a machine without one."""

import json
import os
import subprocess
import sys

import pytest

from .offline import OTHER_ROWS, chosen_cases, describe


@pytest.fixture(scope="module")
def launches():
    """What compiling every launch of the cases found."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.offline", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_launch_compiles_in_both_directions(launches):
    assert [launch for launch in launches if "error" in launch] == []
    found = {(launch["case"], launch["kernel"]) for launch in launches}
    for kernel in ("norm_forward_kernel", "norm_backward_kernel"):
        assert {(describe(case), kernel) for case in chosen_cases(False, [])} <= found
    tiles = [launch["tile"] for launch in launches if launch["tile"]]
    assert any(tile["looped"] for tile in tiles) and any(launch["cooperative"] for launch in launches)


def test_a_new_number_of_rows_or_dropout_probability_compiles_nothing(launches):
    """Trap: Triton specialises an integer that is 1 or a multiple of 16, in a tuple even if it is told not to."""
    for kernel in ("norm_forward_kernel", "norm_backward_kernel", "finish_weight_gradients_kernel"):
        found = [launch for launch in launches if launch["kernel"] == kernel and launch["case"] in map(describe, OTHER_ROWS)]
        assert len(found) == len(OTHER_ROWS) and len({launch["compilation"] for launch in found}) == 1, kernel


def test_no_launch_needs_more_than_a_multiprocessor_has(launches):
    """Trap: too many registers for so many threads, which the driver refuses when the kernel starts."""
    assert [launch for launch in launches if launch["resident"] < 1] == []


def test_all_programs_that_wait_for_each_other_are_resident(launches):
    together = [launch for launch in launches if launch["cooperative"]]
    assert [launch for launch in together if launch["resident"] < launch["tile"]["programs_per_sm"]] == []


def test_none_of_them_spills_registers_to_speak_of(launches):
    assert [launch for launch in launches if launch["spilled"] > 64] == []


def test_what_starts_early_touches_no_memory_before_it_has_waited(launches):
    assert {launch["starts_early"] for launch in launches} == {True, False}
    for launch in launches:
        assert launch["before_waiting"] == ([] if launch["starts_early"] else None), launch
