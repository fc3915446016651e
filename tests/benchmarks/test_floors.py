import pytest

from benchmarks import norms

from .records import norm


@pytest.mark.parametrize(
    "direction, rows, width, least",
    [
        ("forward", 2**17, 512, 0.83), ("forward", 2**17, 1592, 0.90), ("forward", 2**17, 1600, 0.93),
        ("backward", 2**17, 1016, 0.78), ("backward", 2**12, 16384, 0.90), ("backward", 2**11, 32768, 0.80),
        ("forward", 2**16, 1016, 0.0), ("forward", 2**20, 504, 0.0),
    ],
)  # fmt: skip
def test_floors(direction, rows, width, least):
    assert norms.floor(direction, rows, width) == least


def test_summary_names_cells_under_the_floor_and_those_behind():
    def cell(n, ours, peer, interval, **more):
        return [
            norm("rms", n, "ours", ours, m=2**17, **more),
            norm("rms", n, "torch", peer, m=2**17, times_ours=0.97, times_ours_95=interval, **more),
        ]

    records = [
        *cell(1024, 0.89, 0.9, [0.96, 0.99]), *cell(2048, 0.94, 0.96, [0.95, 0.97], weights="fp32"),
        norm("rms", 2048, "before", 0.9, m=2**17, weights="fp32", times_ours_95=[1.0, 1.1]),
        norm("rms", 2048, "ours", 0.1, m=64),
    ]  # fmt: skip
    assert norms.floors_summary(records).splitlines() == [
        "under the floor: 1 of 2 cells of 2^26 elements or more",
        "  RMS, forward 131072×1024: 0.89, floor 0.90",
        "more than 2% behind the fastest other: 1 of 3 cells",
        "  RMS, fp32 weights, forward 131072×2048: torch 0.970 (0.950 to 0.970)",
        "more than 2% behind before: 0 of 3 cells",
    ]
