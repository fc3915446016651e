"""The table of tiles: every width has one that the kernels and the GPU can run."""

from dataclasses import replace
from itertools import pairwise, product

import pytest

from ops import tiling
from ops.tiling import (
    FP32_WEIGHTS,
    H200,
    TABLE,
    Device,
    Tile,
    Work,
    backward_tile,
    bias_past_l1,
    fit,
    forward_tile,
    one_block,
    prefetch_distance,
    registers,
    row_blocks,
    staged_bytes,
)

DEVICES = {
    "H200": H200,
    "A100": Device(108, 166912, 2048, warp_size=32, cooperative=True, since_sm_90=False),
    "RTX 4090": Device(128, 101376, 1536, warp_size=32, cooperative=True, since_sm_90=False),
    "L40S": Device(142, 101376, 1536, warp_size=32, cooperative=True, since_sm_90=False),
    "L4": Device(58, 101376, 1536, warp_size=32, cooperative=True, since_sm_90=False),
    "B200": Device(148, 232448, 2048, warp_size=32, cooperative=True, since_sm_90=True),
    "MI300": Device(304, 65536, 2048, warp_size=64, cooperative=False, since_sm_90=False),
    "interpreter": replace(H200, multiprocessors=2, cooperative=False, since_sm_90=False),
}
WIDTHS = sorted(
    {*range(1, 71), *(2**k + d for k in range(7, 22) for d in (-1, 0, 1))}
    | {768, 1600, 3072, 5120, 6144, 12288, 20000, 40000, 100000}
)  # fmt: skip
TILE_OF = {"forward": forward_tile, "backward": backward_tile}


def works(direction: str) -> list[Work]:
    """From the least to the most that a launch can read, all of it in the widest dtype."""
    tensors = {"forward": (1, 3), "backward": (2, 6)}[direction]
    return [
        Work(rms, residual, dropout, vector, count * 16 // vector, weights, splittable)
        for rms, residual, dropout, splittable in product((False, True), repeat=4)
        for vector in (8, 4)
        for count in tensors
        for weights in ((0,) if direction == "forward" else (0, 2, 4))
    ]


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@pytest.fixture(scope="module", params=product(DEVICES, TILE_OF), ids="-".join)
def launches(request):
    """(n, work, device, tile) for every width and every kind of work."""
    name, direction = request.param
    device = DEVICES[name]
    return [(n, work, device, TILE_OF[direction](n, work, device)) for work in works(direction) for n in WIDTHS]


def test_all_blocks_of_a_row_but_the_last_are_full(launches):
    for n, _, _, tile in launches:
        if tile.slices == 1 and not tile.looped(n):
            last = min(tile.tail_n, tile.block_n) or tile.block_n
            assert tile.width - last < n or tile.tail_n == 0, (n, tile)  # the kernel takes all blocks but the last to be full
        else:
            assert tile.tail_n == 0 and (tile.slices - 1) * tile.block_n < n, (n, tile)  # no slice without a column


def test_tiles_are_shapes_that_triton_and_philox_take(launches):
    for n, _, _, tile in launches:
        assert is_power_of_two(tile.rows) and is_power_of_two(tile.warps), (n, tile)
        assert is_power_of_two(tile.block_n) and tile.block_n >= tiling.MIN_BLOCK_N, (n, tile)
        more = tile.tail_n % tile.block_n  # a narrower block; other tails are blocks of the same width
        assert more == 0 or (tile.tail_n < tile.block_n and is_power_of_two(more) and more >= tiling.MIN_BLOCK_N), (n, tile)
        assert tile.rows * tile.block_n <= 2**20, "Triton's limit on a tensor"


def test_tiles_fit_the_shared_memory_and_threads_of_the_gpu(launches):
    for n, work, device, tile in launches:
        programs = max(1, tile.programs_per_sm)
        assert tile.stages >= 1
        assert tile.stages == 1 or programs * staged_bytes(tile, work, device) <= device.shared_memory, (n, tile)
        assert programs * tile.warps * device.warp_size <= device.threads, (n, tile)
        assert tile.warps * device.warp_size <= 1024, (n, tile)


def test_split_rows_wait_for_nobody_who_is_not_running(launches):
    for n, work, device, tile in launches:
        if tile.slices > 1:
            assert work.splittable and device.cooperative, (n, tile)
            assert tile.slices <= device.multiprocessors * tile.programs_per_sm, (n, tile)
            threads = tile.warps * 32 * tile.programs_per_sm
            assert (registers(tile) or 255) * threads <= tiling.REGISTERS, (n, tile)


@pytest.mark.parametrize("name", DEVICES)
def test_backward_is_persistent_on_every_gpu(name):
    """Each program keeps one partial sum of the weight gradients: one for each tile would be as large as the input."""
    for work in works("backward"):
        for n in WIDTHS:
            assert backward_tile(n, work, DEVICES[name]).programs_per_sm >= 1


def test_table_has_every_kind_of_work_in_both_directions():
    kinds = {(direction, *work.kind) for direction in TILE_OF for work in works(direction)}
    assert set(TABLE) == kinds


@pytest.mark.parametrize("key", TABLE, ids=lambda key: "-".join(map(str, key)))
def test_entries_are_sorted_and_as_wide_as_they_say(key):
    widths = [up_to for up_to, _ in TABLE[key]]
    assert widths == sorted(set(widths))
    assert TABLE[key][-1][1].slices > 1, "rows beyond the table would become ever longer rows of one program"
    for up_to, tile in TABLE[key]:
        assert not tile.prefetch_l2 or tile.slices > 1 or (key[0] == "backward" and not tile.looped(up_to)), (up_to, tile)
        asks = key[0] == "forward" and tile.slices == 1 and tile.forward_prefetches(up_to)
        assert not tile.prefetch_ahead or asks, (up_to, tile)
        if tile.slices == 1:
            equal = tile.tail_n > 0 == tile.tail_n % tile.block_n and up_to <= tile.width < up_to + tile.block_n
            looped = tile.looped(up_to) and tile.tail_n == 0 and not tile.hold_weights
            assert not tile.past_l1 or (key[0] == "forward" and not tile.looped(up_to)), (up_to, tile)
            assert equal or looped or (tile.block_n, tile.tail_n) in (row_blocks(up_to), (one_block(up_to), 0)), (up_to, tile)
        else:
            assert tile.tail_n == 0 and tile.slices == -(-up_to // tile.block_n), (up_to, tile)
            assert tile.programs_per_sm > 0 and (tile.hold_weights or key[0] == "backward"), (up_to, tile)
            assert not tile.past_l1, (up_to, tile)


@pytest.mark.parametrize("key", TABLE, ids=lambda key: "-".join(map(str, key)))
def test_on_the_gpu_it_was_measured_on_the_table_is_taken_as_it_is(key):
    """For the work it was measured with: an input and a residual, or two gradients and r; weights in bf16."""
    direction, norm, kind, vector = key
    size = 16 // vector
    loaded = {"forward": 2 + size * (kind != "norm"), "backward": 2 + size + size * (kind != "norm")}[direction]
    weights = {"forward": 0, "backward": 2}[direction]
    work = Work(norm == "rms", kind != "norm", kind == "dropout", vector, loaded, weights, True)
    for up_to, tile in TABLE[key]:
        assert TILE_OF[direction](up_to, work) == tile, up_to


def test_weights_are_asked_for_first_as_it_was_measured_and_without_the_bound_on_registers_in_rows_that_need_masks():
    measured = dict(TABLE["forward", "ln", "norm", 8])[768]
    assert measured.early_weights and measured.max_registers > 0
    work = Work(rms=False, residual=False, dropout=False, vector=8, loaded_bytes=2, weight_bytes=0, splittable=True)
    assert forward_tile(768, work) == measured
    assert (forward_tile(700, work).early_weights, forward_tile(700, work).max_registers) == (True, 0)
    for n in (700, 768):
        heavy = forward_tile(n, replace(work, light_weights=False))
        assert (heavy.early_weights, heavy.max_registers) == (False, 0)


def test_weights_in_fp32_are_asked_for_first_by_tiles_without_a_bound_of_middling_width():
    work = Work(rms=True, residual=True, dropout=True, vector=8, loaded_bytes=4, weight_bytes=0, splittable=True)
    widths = (128, 129, 512, 700, 768, 4096, 8192)
    tiles = [forward_tile(n, work) for n in widths]
    assert all(tile.early_weights and tile.max_registers == 0 for tile in tiles)
    heavy, two = replace(work, light_weights=False), replace(work, one_norm=False)
    assert [n for n in widths if forward_tile(n, heavy).early_weights] == [129, 512, 700, 768, 4096]
    plain = replace(work, residual=False, dropout=False, loaded_bytes=2)
    assert [forward_tile(4097, replace(plain, light_weights=light)).early_weights for light in (True, False)] == [True, False]
    assert not any(forward_tile(n, w).early_weights for n in widths for w in (two, replace(two, light_weights=False)))


def test_split_rows_of_backward_with_dropout_hold_weights_of_16_bits_alone():
    work = Work(rms=True, residual=True, dropout=True, vector=8, loaded_bytes=6, weight_bytes=2, splittable=True)
    tile, heavy = (backward_tile(12288, replace(work, light_weights=light)) for light in (True, False))
    assert tile.slices > 1 and tile.hold_weights
    assert heavy == replace(tile, hold_weights=False)
    assert all(backward_tile(4096, replace(work, light_weights=light)).hold_weights for light in (True, False))
    other = replace(work, dropout=False, light_weights=False)
    assert backward_tile(65536, other).hold_weights, "there they spill nothing to speak of"


@pytest.mark.parametrize("key", FP32_WEIGHTS, ids=str)
def test_weights_in_fp32_have_a_tile_of_their_own_where_that_was_measured(key):
    norm, kind, vector, width = key
    measured = dict(TABLE["forward", norm, kind, vector])[width]
    work = Work(norm == "rms", kind != "norm", kind == "dropout", vector, 2 if kind == "norm" else 2 + 16 // vector, 0, True)
    heavy = replace(work, light_weights=False)
    assert forward_tile(width, heavy) == FP32_WEIGHTS[key] != forward_tile(width, work) == measured
    assert [forward_tile(width - 8, heavy).rows, forward_tile(width - 8, heavy).warps] == [
        FP32_WEIGHTS[key].rows, FP32_WEIGHTS[key].warps,
    ]  # fmt: skip
    two = forward_tile(width, replace(heavy, one_norm=False))
    assert (two.rows, two.block_n, two.early_weights) == (measured.rows, measured.block_n, False)


def test_a_bound_counts_for_weights_in_fp32_also_where_a_gpu_takes_it_away():
    heavy = Work(False, False, False, vector=8, loaded_bytes=2, weight_bytes=0, splittable=True, light_weights=False)
    assert dict(TABLE["forward", "ln", "norm", 8])[768].max_registers > 0
    assert not forward_tile(768, heavy, DEVICES["MI300"]).early_weights


def test_rows_that_are_not_copied_ahead_are_not_brought_into_l2_either():
    work = Work(rms=True, residual=True, dropout=True, vector=8, loaded_bytes=6, weight_bytes=2, splittable=True)
    wide = replace(work, vector=4, loaded_bytes=10)
    assert [backward_tile(4096, replace(work, multiple=multiple)).prefetch_l2 for multiple in (16, 2, 1)] == [True, True, False]
    assert backward_tile(5120, replace(wide, multiple=1)).prefetch_l2


@pytest.mark.parametrize("name", DEVICES)
def test_rows_are_brought_into_l2_only_by_gpus_that_can(name):
    for direction, tile_of in TILE_OF.items():
        tiles = [tile_of(n, work, DEVICES[name]) for work in works(direction) for n in WIDTHS]
        found = {field: any(getattr(tile, field) for tile in tiles) for field in ("prefetch_l2", "prefetch_ahead")}
        assert found["prefetch_l2"] == DEVICES[name].since_sm_90, direction
        assert found["prefetch_ahead"] == (DEVICES[name].since_sm_90 and direction == "forward"), direction


def test_forward_brings_no_rows_where_all_programs_may_run_at_once():
    tile = Tile(1, 1024, 0, 1, 4, 1, 0, True, prefetch_ahead=0.5)
    work = Work(rms=True, residual=False, dropout=False, vector=8, loaded_bytes=2, weight_bytes=0, splittable=True)
    at_once = 132 * 16
    assert [prefetch_distance(tile, n, work, H200) for n in (1, at_once, at_once + 1, 32768)] == [1, at_once, 66, 66]


@pytest.mark.parametrize(
    ("residual", "vector", "loaded_bytes", "distance"),
    [
        (False, 8, 2, 132), (False, 8, 4, 66), (True, 8, 4, 132), (True, 8, 6, 88),
        (True, 4, 6, 132), (True, 4, 8, 99), (False, 4, 4, 132),
    ],
)  # fmt: skip
def test_forward_brings_fewer_rows_where_they_are_wider_than_those_that_were_measured(residual, vector, loaded_bytes, distance):
    """With a second input or one in fp32: what is on its way through L2 is as much as it was then, or less."""
    tile = Tile(1, 1024, 0, 1, 4, 1, 0, True, prefetch_ahead=1.0)
    assert prefetch_distance(tile, 32768, Work(True, residual, False, vector, loaded_bytes, 0, True), H200) == distance


def test_forward_asks_in_one_piece_only_in_programs_of_eight_whole_rows_that_ask_ahead():
    tile = Tile(8, 1024, 0, 1, 8, 1, 0, True, prefetch_ahead=1.0)
    assert tile.asks_at_once(1024) and replace(tile, rows=16).asks_at_once(1024)
    assert not replace(tile, rows=4).asks_at_once(1024)
    assert not tile.asks_at_once(1025), "it loops"
    assert not replace(tile, prefetch_ahead=0.0).asks_at_once(1024)
    assert not replace(tile, programs_per_sm=2).asks_at_once(1024)
    assert not replace(tile, slices=2, programs_per_sm=2, prefetch_l2=True).asks_at_once(2048)


def test_forward_asks_ahead_only_in_programs_of_one_tile_that_hold_whole_rows():
    tile = Tile(1, 1024, 0, 1, 4, 1, 0, True, prefetch_ahead=1.0)
    assert tile.forward_prefetches(1024)
    assert not tile.forward_prefetches(1025), "it loops"
    assert not replace(tile, programs_per_sm=2).forward_prefetches(1024)
    assert not replace(tile, prefetch_ahead=0.0, prefetch_l2=True).forward_prefetches(1024)
    split = replace(tile, slices=2, programs_per_sm=2)
    assert [replace(split, prefetch_l2=yes).forward_prefetches(2048) for yes in (True, False)] == [True, False]


def test_backward_has_no_bound_on_registers_between_two_entries():
    work = Work(rms=False, residual=False, dropout=False, vector=8, loaded_bytes=4, weight_bytes=2, splittable=True)
    assert backward_tile(4096, work) == (measured := dict(TABLE["backward", "ln", "norm", 8])[4096])
    assert measured.max_registers > 0
    assert [backward_tile(n, work).max_registers for n in (1280, 1500, 4000)] == [0, 0, 0]


def test_biases_are_read_past_l1_with_the_rows_where_weights_are_more_than_it_keeps():
    tile = Tile(1, 16384, 49152, 1, 32, 1, 0, False, past_l1=True)
    assert [size for size in (2, 4, 8) if bias_past_l1(tile, 32768, size)] == [8]
    assert [size for size in (2, 4, 8) if bias_past_l1(tile, 65536, size)] == [4, 8]
    assert not bias_past_l1(replace(tile, past_l1=False), 65536, 8)


@pytest.mark.parametrize(
    ("n", "blocks"),
    [
        (1, (16, 0)), (16, (16, 0)), (17, (32, 0)), (500, (512, 0)), (513, (512, 16)), (600, (512, 128)), (768, (512, 256)),
        (769, (1024, 0)), (1024, (1024, 0)), (1600, (2048, 0)), (3072, (2048, 1024)), (5120, (4096, 1024)), (8193, (8192, 16)),
    ],
)  # fmt: skip
def test_a_row_is_two_blocks_where_they_idle_fewer_lanes(n, blocks):
    assert row_blocks(n) == blocks


@pytest.mark.parametrize("key", TABLE, ids=lambda key: "-".join(map(str, key)))
def test_a_width_between_two_entries_takes_two_blocks_unless_the_wider_entry_found_other_ones_faster(key):
    entries, loaded = TABLE[key], 2
    for (below, _), (up_to, entry) in pairwise(entries):
        between = (below + up_to) // 2 // 16 * 16 + 16  # 1312 is 1024 + 512 although 1600 is 2048
        tile = TILE_OF[key[0]](between, Work(key[1] == "rms", key[2] != "norm", key[2] == "dropout", key[3], loaded, 0, True))
        if entry.looped(up_to):
            assert tile == replace(entry, max_registers=0)
        elif entry.tail_n >= entry.block_n:
            assert (tile.block_n, tile.tail_n) == (entry.block_n, (-(-between // entry.block_n) - 1) * entry.block_n)
        elif entry.slices == 1:
            one_was_faster = entry.tail_n == 0 and row_blocks(up_to)[1] > 0
            block_n, tail_n = (entry.block_n, 0) if one_was_faster else row_blocks(between)
            if tail_n:
                least = 32 * entry.warps * (entry.columns or key[3])
                tail_n = max(tail_n, min(least, entry.tail_n) if block_n == entry.block_n else least)
            expected = (block_n, tail_n) if tail_n < block_n else (2 * block_n, 0)
            assert (tile.block_n, tile.tail_n) == expected, (between, tile)
        assert tile.rows == entry.rows and tile.warps == entry.warps


def test_a_tail_between_two_entries_has_columns_for_every_thread():
    work = Work(False, False, False, 8, 2, 0, True)
    tiles = {n: forward_tile(n, work) for n in (8704, 9728, 2560, 4608)}
    assert {n: (tile.block_n, tile.tail_n) for n, tile in tiles.items()} == {
        8704: (8192, 2048), 9728: (8192, 2048), 2560: (1024, 2 * 1024), 4608: (4096, 1024),
    }  # fmt: skip


def test_a_tail_between_two_entries_may_be_as_narrow_as_that_of_the_entry():
    """It was measured so: 4096 columns, half of what 32 warps hold side by side."""

    def blocks(tile):
        return tile.block_n, tile.tail_n

    rms = Work(True, False, False, vector=8, loaded_bytes=4, weight_bytes=2, splittable=True)
    assert blocks(backward_tile(10240, rms)) == blocks(backward_tile(12272, rms)) == (8192, 4096)
    rms_dropout = Work(True, True, True, vector=8, loaded_bytes=4, weight_bytes=0, splittable=True)
    assert blocks(forward_tile(10240, rms_dropout)) == (8192, 4096)
    assert blocks(forward_tile(640, rms_dropout)) == (512, 256)
    ln_add = Work(False, True, False, vector=8, loaded_bytes=4, weight_bytes=0, splittable=True)
    assert blocks(forward_tile(4608, ln_add)) == (4096, 1024)
    ln_dropout = Work(False, True, True, vector=4, loaded_bytes=10, weight_bytes=2, splittable=True)
    assert blocks(backward_tile(4608, ln_dropout)) == (4096, 1024)


def test_what_divides_a_width_decides_what_is_staged():
    tile = Tile(1, 2048, 0, 1, 8, 4, 1, True)
    in_bf16 = Work(False, True, False, vector=8, loaded_bytes=6, weight_bytes=2, splittable=True)
    staged = {multiple: staged_bytes(tile, replace(in_bf16, multiple=multiple), H200) for multiple in (16, 8, 4, 2, 1)}
    whole, row = 3 * 2048 * 6 + 2048, 4 * 2048
    # Eight columns a thread, and less than that at a time from memory: the row changes its layout. Elements of 16 bits at odd
    # places are not copied ahead at all.
    assert staged == {16: whole, 8: whole, 4: whole + row, 2: whole + row, 1: 2048 + row}
    in_fp32 = replace(in_bf16, vector=4, loaded_bytes=10)
    staged = {multiple: staged_bytes(tile, replace(in_fp32, multiple=multiple), H200) for multiple in (16, 4, 2, 1)}
    whole = 3 * 2048 * 10 + 2048
    assert staged == {16: whole, 4: whole, 2: whole + row, 1: whole + row}


def test_a_row_that_changes_its_layout_on_the_way_to_memory_is_counted_beside_the_tiles_in_flight():
    tile = Tile(1, 2048, 0, 1, 8, 4, 1, True)
    work = Work(False, True, False, vector=4, loaded_bytes=10, weight_bytes=2, splittable=True)
    staged = staged_bytes(tile, work, H200)
    assert staged == 3 * 2048 * 10 + 2048
    assert staged_bytes(replace(tile, columns=8), work, H200) == staged + 4 * 2048
    # 16 warps with four columns a thread span 2048, twice the tail: half of them hold it once more.
    narrow = replace(tile, block_n=4096, tail_n=1024)
    assert staged_bytes(replace(narrow, warps=16), work, H200) == staged_bytes(narrow, work, H200) + 4 * 5120


def test_bounds_on_registers_hold_for_the_work_and_the_width_they_were_measured_with():
    backward = Work(False, False, False, vector=8, loaded_bytes=4, weight_bytes=2, splittable=True)
    assert backward_tile(4096, backward).max_registers > 0
    assert backward_tile(4096, replace(backward, splittable=False)).max_registers == 0
    assert backward_tile(4090, backward).max_registers == 0
    looped = Work(True, False, False, vector=8, loaded_bytes=2, weight_bytes=0, splittable=True)
    assert forward_tile(12288, looped).looped(12288) and forward_tile(12288, looped).max_registers > 0
    assert forward_tile(12288, replace(looped, light_weights=False)).max_registers == 0
    assert forward_tile(12280, looped).max_registers == 0


def test_a_smaller_gpu_gets_fewer_programs_and_stages_before_it_gets_neither():
    tile = Tile(rows=2, block_n=4096, tail_n=0, slices=1, warps=16, stages=4, programs_per_sm=4, hold_weights=True)
    work = Work(False, True, False, 8, 8, 8, True)
    assert fit(tile, work, H200) == replace(tile, stages=1)
    assert fit(replace(tile, programs_per_sm=1), work, H200).stages == 4
    assert fit(tile, work, replace(H200, threads=1536)).programs_per_sm == 3
    assert fit(tile, work, replace(H200, warp_size=64)).warps == 8
    assert fit(replace(tile, warps=1), work, replace(H200, warp_size=64)).warps == 1


def test_registers_are_bounded_where_they_were_measured_and_on_amd_left_to_its_compiler():
    work = Work(False, False, False, 8, 2, 0, True)
    tile = forward_tile(4096, work)
    assert registers(tile) == tile.max_registers > 0
    assert registers(fit(tile, work, replace(H200, warp_size=64))) is None
