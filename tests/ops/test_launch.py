"""What a launch asks of Triton and the driver, by the device: an option that a backend does not know is an error there."""

from dataclasses import replace

import pytest
import torch

from ops import launch
from ops.records import BackwardInputs, BackwardOptions, Inputs, Options
from ops.tiling import H200

from .cases import BF16

DEVICES = {
    "H200": H200,
    "A100": replace(H200, multiprocessors=108, shared_memory=166912, since_sm_90=False),
    "MI300": replace(H200, multiprocessors=304, shared_memory=65536, warp_size=64, cooperative=False, since_sm_90=False),
}


@pytest.fixture
def on(monkeypatch):
    """A function: launches are made for this device; nothing is started."""

    def choose(name):
        monkeypatch.setattr(launch, "device_facts", lambda device: DEVICES[name])
        launch.forget()

    yield choose
    launch.forget()


def forward(n, strides=None):
    options = Options(
        eps=1e-5,
        dropout_p=0.0,
        zero_centered_weight=False,
        is_rms_norm=False,
        out_dtype=BF16,
        residual_dtype=BF16,
        store_residual=False,
        store_stats=True,
        return_mask=False,
    )
    return launch._forward(options, torch.Size((64, n)), torch.device("cpu"), dtypes(Inputs, "x", "weight"), strides, False)


def backward(n, wanted=(True, True, False, False), strides=None):
    options = BackwardOptions(
        dropout_p=0.0,
        zero_centered_weight=False,
        is_rms_norm=False,
        dz_dtype=BF16,
        dx_dtype=None,
        dx1_dtype=None,
        wanted=wanted,
        weight_dtype=BF16,
    )
    given = dtypes(BackwardInputs, "dy", "r", "weight")
    return launch._backward(options, torch.Size((64, n)), torch.device("cpu"), given, strides)


def dtypes(record, *present):
    return tuple(BF16 if name in present else None for name in record._fields)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [768, 16384, 65536])
def test_only_a_gpu_that_knows_them_is_asked_for_special_launches(n, device, on):
    on(device)
    made = backward(n)
    launches = {"forward": forward(n).start, "backward": made.gradients, "finish": made.finish}
    for name, launcher in launches.items():
        options = launcher.constants
        cooperative = options.get("SLICES", 1) > 1
        early = DEVICES[device].since_sm_90 and not cooperative
        assert (options.get("launch_pdl", False), options["EARLY_START"]) == (early, early), name
        assert ("launch_cooperative_grid" in options) == cooperative, name
        assert not cooperative or DEVICES[device].cooperative, name
        assert "maxnreg" not in options or DEVICES[device].warp_size == 32, name


@pytest.mark.parametrize("device", ["H200", "MI300"])
def test_a_threads_registers_are_bounded_as_the_tile_says(device, on):
    on(device)
    assert forward(4096).start.constants.get("maxnreg") == (80 if device == "H200" else None)


@pytest.mark.parametrize("device", ["H200", "A100"])
def test_backward_lets_the_next_kernel_begin_only_where_that_is_its_own_sum(device, on):
    on(device)
    assert backward(768).gradients.constants["EARLY_FINISH"] == DEVICES[device].since_sm_90
    assert not backward(768, wanted=(False, False, False, False)).gradients.constants["EARLY_FINISH"]


def test_many_partial_sums_of_few_columns_are_added_up_by_large_programs_no_more_than_there_are_multiprocessors(on):
    on("H200")
    finish = {n: backward(n).finish for n in (64, 128, 512, 768, 1024)}  # weight and bias: twice as many columns
    assert {n: (made.programs, made.constants["BLOCK_N"], made.constants["num_warps"]) for n, made in finish.items()} == {
        64: (16, 8, 4), 128: (32, 8, 16), 512: (128, 8, 16), 768: (96, 16, 16), 1024: (256, 8, 4),
    }  # fmt: skip


@pytest.mark.parametrize("n, multiple", [(768, 16), (1000, 8), (1500, 4), (50257, 1)])
def test_kernels_are_told_what_divides_the_width(n, multiple, on):
    on("H200")
    assert forward(n).start.constants["MULTIPLE"] == backward(n).gradients.constants["MULTIPLE"] == multiple


def test_kernels_are_told_what_divides_the_distances_between_rows_too(on):
    on("H200")
    strides = tuple(776 if name == "x" else 0 for name in Inputs._fields)
    assert forward(768, strides).start.constants["MULTIPLE"] == 8
    strides = tuple(770 if name == "dy" else 0 for name in BackwardInputs._fields)
    assert backward(768, strides=strides).gradients.constants["MULTIPLE"] == 2
