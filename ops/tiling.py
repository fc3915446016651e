"""Tile shapes: which launch a width gets. Plain data, importable and testable without a GPU or Triton.

The kernels work on tiles of `rows` × `block_n` elements, held in registers between their statistics and their output:

    one block     block_n is the power of two from the width up
    two blocks    a row as block_n + tail_n columns, where that idles fewer lanes: 768 = 512 + 256, 5120 = 4096 + 1024
    equal blocks  several of block_n columns each: 12288 = 3 · 4096 idles none, 65536 = 8 · 8192 needs fewer registers; the last
                  may reach past the row's end
    split         a row over `slices` programs of block_n columns each, which exchange their sums; needs a cooperative launch
    looped        block_n columns at a time, the row read twice: the fastest forward of some widths, where a row stays in cache
                  meanwhile, and the way of rows that are none of the above

`python -m benchmarks.tune` measures what TABLE holds and prints it anew for another GPU.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    rows: int  # rows in a tile
    block_n: int  # columns in a block: a power of two
    tail_n: int  # columns beside it: one narrower block, a power of two; or a multiple of block_n, so many blocks more; or 0
    slices: int  # programs that share a row
    warps: int
    stages: int  # tiles in flight, the one at work included; those to come wait in shared memory
    programs_per_sm: int  # persistent programs, each striding over tiles; 0: one program for each tile, no persistence
    # Persistent programs keep the weights from tile to tile, those of one tile ask for them before its rows (`early_weights`).
    # Else they are read for each tile: by forward behind its statistics, by backward with its rows. Looped ones hold none.
    hold_weights: bool
    # The most that a thread may have, 0 for what the compiler takes: it does not know that fewer let one more program run.
    # Left to it, a line more of source moved forward LN of 12288 columns from 80 to 115, three programs to two. And under each
    # bound it orders instructions otherwise, which alone was worth up to 3 points.
    max_registers: int = 0
    # Side by side in a thread, 4 or 8; 0 for as many as 16 bytes of the widest tensor hold. With 8 beside an fp32 stream the
    # tensors in bf16 are read 16 bytes at a time too, and the stream changes its layout on the way to memory, through shared
    # memory; and dropout has half as many calls to make.
    columns: int = 0
    # Backward makes a row's draws for dropout while the row is on its way, not behind its sums, where all warps wait for each
    # other. Up to 2 points of bandwidth; but they take registers meanwhile, and some tiles gain nothing or lose.
    draws_first: bool = False
    # Rounds of the loop over tiles between a split row's sums and their use, 1 or 2. With two, what others have to say is there
    # when it is asked for; but two tiles wait meanwhile, in registers.
    lag: int = 1
    # Forward takes LayerNorm's two statistics at once, where the row fills its blocks: the threads wait for each other once
    # instead of twice, for an instruction or two more an element. Worth it in eight entries of rows from 5120 columns.
    one_pass: bool = False
    # Forward reads rows past L1, which then keeps the weights from row to row. Up to 2 points where rows and weights together
    # are more than L1 holds; elsewhere half a point at most, won or lost.
    past_l1: bool = False
    # Backward, and forward of split rows, bring a tile into L2 just before it is copied into shared memory, or with one stage
    # just before it is read: a round begins by asking for what its end will copy, by one instruction a row. Up to 5 points;
    # elsewhere more may be lost.
    prefetch_l2: bool = False
    # A forward program of one tile begins by having the rows of a later program brought into L2: of the one that comes as many
    # programs later as this times the multiprocessors; 0 for none. 1 to 2 points, 6 in one entry. Too far ahead, it costs up to
    # a third of the bandwidth.
    prefetch_ahead: float = 0.0

    @property
    def width(self) -> int:
        return self.block_n * self.slices + self.tail_n

    @property
    def early_weights(self) -> bool:
        """Forward: programs of one tile ask for the weights first."""
        return self.hold_weights and self.programs_per_sm == 0

    def looped(self, n: int) -> bool:
        return self.width < n

    def forward_prefetches(self, n: int) -> bool:
        """Whether forward's programs have rows brought into L2, where rows have n columns."""
        if self.slices > 1:
            return self.prefetch_l2
        return self.prefetch_ahead > 0 and self.programs_per_sm == 0 and not self.looped(n)

    def asks_at_once(self, n: int) -> bool:
        """Whether forward asks for a tile's rows in one piece, where they lie behind each other.

        With the eight rows of RMSNorm 1024 that is worth half a percent. With four it gained nothing on 32768 rows, gained 3 %
        or lost 2 on few, and lost 2 to 18 % where LayerNorm of 768 columns has dropout.
        """
        return self.slices == 1 and self.rows >= 8 and self.forward_prefetches(n)


@dataclass(frozen=True)
class Work:
    """What a launch does to each column, as far as it decides the tile."""

    rms: bool
    residual: bool  # forward: a residual is added; backward: the residual stream has a gradient
    dropout: bool
    vector: int  # elements in 16 bytes of the widest tensor: 8 in bf16 and fp16, 4 where one is fp32
    loaded_bytes: int  # read for each element of a tile
    weight_bytes: int  # read for each column of a tile, unless it holds its weights, through shared memory
    splittable: bool  # whether the kernel can do this with a row split over programs
    multiple: int = 16  # the largest power of two up to 16 that divides columns and distances between rows
    light_weights: bool = True  # of 16 bits, which TABLE's tiles were measured with
    one_norm: bool = True  # forward: there is no second norm of the same rows

    @property
    def kind(self) -> tuple[str, str, int]:
        """As TABLE knows it: norm, work, vector."""
        norm = "rms" if self.rms else "ln"
        work = "dropout" if self.dropout else "add" if self.residual or self.vector == 4 else "norm"
        return norm, work, self.vector


@dataclass(frozen=True)
class Device:
    """What tiles are fitted to on another GPU than the one they were measured on.

    Not its bandwidth: an H200 moves 36 GB/s for each multiprocessor, an A100 half of that, an L40S, RTX 4090 or L4 less, for
    which as many bytes in flight are plenty. A B200 moves 54, and may want more stages: `python -m benchmarks.tune`.
    """

    multiprocessors: int
    shared_memory: int  # bytes that one program may have
    threads: int  # that one multiprocessor runs at a time
    warp_size: int
    cooperative: bool  # launches whose programs wait for each other; there is inline PTX in it, so NVIDIA only
    # NVIDIA of compute capability 9.0 or later: programmatic dependent launch, by which a kernel's programs take their places
    # while the kernel before still runs; and rows brought into L2 by one instruction.
    since_sm_90: bool


H200 = Device(multiprocessors=132, shared_memory=232448, threads=2048, warp_size=32, cooperative=True, since_sm_90=True)

REGISTERS = 65536  # of 32 bits in a multiprocessor, on every GPU that Triton compiles for
L1_BYTES = 192 * 1024  # of the 256 KB that an H200's multiprocessor has, the part that weights find free
MOST_WORDS_BY_WARP = 128  # of a row on the board where warps publish one by one: four loads for each that reads them
LOOPED = Tile(rows=1, block_n=4096, tail_n=0, slices=1, warps=8, stages=1, programs_per_sm=2, hold_weights=False)
MIN_BLOCK_N = 16  # one Philox call serves eight columns; below 16 a row of bf16 is less than a sector of memory in any case


def forward_tile(n: int, work: Work, device: Device = H200) -> Tile:
    """The forward launch for rows of n features."""
    return _tile("forward", n, work, device)


def backward_tile(n: int, work: Work, device: Device = H200) -> Tile:
    """The backward launch for rows of n features."""
    return _tile("backward", n, work, device)


def _tile(direction: str, n: int, work: Work, device: Device) -> Tile:
    up_to, tile, measured = _entry(direction, n, work)
    bounded = tile.max_registers > 0  # by its entry: `fit` may take the bound away
    tile = fit(over(n, up_to, tile, work.vector), work, device)
    # A bound was measured at its entry's width: between two, masks may take more registers than it leaves. So does other work,
    # where forward asks for its weights first or loops, and in backward.
    if not (measured and n == up_to):
        if tile.early_weights:
            # With weights in fp32, asking first was faster in 36 of 48 entries of 256 to 4096 columns that had no bound, and
            # slower in five; of narrower and wider ones it was slower in 13 of 22, by up to 22 %.
            early = work.one_norm and (work.light_weights or (not bounded and 128 < n <= 4096))
            tile = replace(tile, hold_weights=early, max_registers=0)
        elif direction == "backward" or tile.looped(n):
            tile = replace(tile, max_registers=0)
    if tile.slices > 1:
        resident = device.multiprocessors * tile.programs_per_sm
        if not (work.splittable and device.cooperative) or tile.slices > resident:
            return fit(LOOPED, work, device)
    return tile


def _entry(direction: str, n: int, work: Work) -> tuple[int, Tile, bool]:
    """The entry that n columns fall under: its width, its tile for weights like these, and whether that was measured with work
    like this: not if its weights were lighter, nor in backward with a second upstream gradient or a learned row scale."""
    entries = TABLE[direction, *work.kind]
    up_to, tile = next((entry for entry in entries if n <= entry[0]), entries[-1])
    if direction == "forward":
        own = FP32_WEIGHTS.get((*work.kind, up_to)) if work.one_norm and not work.light_weights else None
        return (up_to, own, True) if own else (up_to, tile, work.one_norm and work.light_weights)
    if tile.slices > 1 and work.dropout and work.vector == 8 and not work.light_weights:
        # Held in fp32, weights had Triton 3.6 spill 400 to 700 bytes a thread; read again with each tile they spill none.
        tile = replace(tile, hold_weights=False)
    return up_to, tile, work.splittable


def over(n: int, up_to: int, tile: Tile, vector: int) -> Tile:
    """A tile measured at up_to columns, over the blocks of a row of n."""
    if n == up_to or tile.looped(up_to):
        return tile
    if tile.slices > 1:
        return replace(tile, slices=-(-n // tile.block_n))
    if tile.tail_n >= tile.block_n:
        return replace(tile, tail_n=(-(-n // tile.block_n) - 1) * tile.block_n)
    # Where one block was the faster for a width that would have made two, so it is for those below.
    block_n, tail_n = row_blocks(n) if (tile.block_n, tile.tail_n) == row_blocks(up_to) else (tile.block_n, 0)
    if tail_n:
        # Threads that find no columns of their own in a tail hold, load and sum others' once more: with 8 warps, 8704 = 8192 +
        # 512 was read at 2590 GB/s where 9728 = 8192 + 2048 was at 3590 (H200, LN forward, 4096 rows). So a tail is as wide as
        # all threads are side by side, or as the measured one.
        least = min(block_n, tile.warps * 32 * (tile.columns or vector))
        tail_n = max(tail_n, min(least, tile.tail_n) if block_n == tile.block_n else least)
    return replace(tile, block_n=block_n, tail_n=tail_n) if tail_n < block_n else replace(tile, block_n=2 * block_n, tail_n=0)


def one_block(n: int) -> int:
    return max(MIN_BLOCK_N, 1 << (n - 1).bit_length())


def row_blocks(n: int) -> tuple[int, int]:
    """block_n and tail_n for a row of n columns in registers: two unlike blocks where they idle fewer lanes than one.

    Those were not measured below 512 columns.
    """
    whole = one_block(n)
    head = whole // 2
    tail = max(MIN_BLOCK_N, 1 << (n - head - 1).bit_length()) if n > head else 0
    return (head, tail) if n >= 512 and head + tail < whole else (whole, 0)


def fit(tile: Tile, work: Work, device: Device) -> Tile:
    """The tile with what another GPU has less of than the one it was measured on: shared memory, threads, wide warps."""
    if device.warp_size == 64:
        tile = replace(tile, warps=max(1, tile.warps // 2), max_registers=0)
    threads = tile.warps * device.warp_size
    programs = min(tile.programs_per_sm, device.threads // threads)
    tile = replace(tile, programs_per_sm=programs)
    if not (device.since_sm_90 and staged(work)):
        tile = replace(tile, prefetch_l2=False)
    if not device.since_sm_90:
        tile = replace(tile, prefetch_ahead=0.0)
    while tile.stages > 1 and max(1, programs) * staged_bytes(tile, work, device) > device.shared_memory:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def staged(work: Work) -> bool:
    """Whether tiles to come wait in shared memory: four bytes are the least that a GPU copies ahead, so not rows of 16-bit
    elements that lie at odd places. Beside an fp32 stream its own rows do."""
    return work.vector == 4 or work.multiple > 1


def staged_bytes(tile: Tile, work: Work, device: Device) -> int:
    """Shared memory of one program, or more: the tiles in flight, 2 KB for reductions (256 bytes were the most seen), and a row
    in fp32 where one may change its layout on the way from or to memory: that is held besides (0.8 of it was the most seen, and
    1.3 at odd widths in bf16, which stage nothing)."""
    columns = tile.block_n + tile.tail_n
    loaded = tile.rows * work.loaded_bytes + (0 if tile.hold_weights else work.weight_bytes)
    ahead = tile.stages - 1 if staged(work) else 0
    side_by_side = tile.columns or work.vector
    converts = side_by_side > min(work.vector, work.multiple) or 0 < tile.tail_n < min(tile.block_n, span(tile, work, device))
    return ahead * columns * loaded + 2048 + (4 * tile.rows * columns if converts else 0)


def span(tile: Tile, work: Work, device: Device) -> int:
    """The columns that all threads hold side by side: a wider block repeats itself over them."""
    return device.warp_size * tile.warps * (tile.columns or work.vector)


def parts(tile: Tile, work: Work, device: Device) -> int:
    """How many sums of a split row each of its programs publishes: one for each warp that lies along its block.

    So no warp waits for the others of its program. But each has all the words of a row to read: where they would be more than
    `MOST_WORDS_BY_WARP`, a program sums up first and publishes one.
    """
    warps = max(1, min(tile.warps, tile.warps * tile.block_n // span(tile, work, device)))
    return warps if tile.slices * warps <= MOST_WORDS_BY_WARP else 1


def ring(tile: Tile) -> int:
    """Rounds after which programs that share rows write a place of their board again: 2 + 2 · lag or more, a power of two."""
    return 4 * tile.lag


def prefetch_distance(tile: Tile, programs: int, work: Work, device: Device) -> int:
    """How many programs later those rows are read that forward has brought into L2.

    In proportion fewer where an element of the rows has more bytes than when its tile was measured. `programs`, and so no row
    that is there, where all programs may run at once, as far as threads go.
    """
    at_once = device.multiprocessors * (device.threads // (tile.warps * device.warp_size))
    measured_bytes = 2 if work.kind[1] == "norm" else 2 + 16 // work.vector  # of x in bf16 and a residual
    share = min(1.0, measured_bytes / work.loaded_bytes)
    return round(tile.prefetch_ahead * device.multiprocessors * share) if programs > at_once else programs


def packed(tile: Tile, itemsize: int, device: Device) -> bool:
    """Whether forward holds a row as it is stored rather than in fp32: where a thread has too much of it.

    With 64 elements a thread RMSNorm took 78 registers instead of 96, and with several blocks 64 (sm_90, Triton 3.6). With 32
    the second conversion gained nothing.
    """
    elements = tile.rows * (tile.block_n + tile.tail_n)
    return itemsize == 2 and tile.slices == 1 and elements > 32 * tile.warps * device.warp_size


def bias_past_l1(tile: Tile, n: int, weight_bytes: int) -> bool:
    """Whether forward reads the bias past L1 too: where weights and biases of n columns are more than it keeps.

    Read in turn, none of them would be there when the next row comes. weight_bytes: of all of them, a column.
    """
    return tile.past_l1 and n * weight_bytes > L1_BYTES


def registers(tile: Tile) -> int | None:
    """The most registers that a thread may have, also if all programs that share rows are to be resident; None: no bound."""
    if tile.slices == 1:
        return tile.max_registers or None
    most = REGISTERS // (tile.warps * 32 * tile.programs_per_sm) // 8 * 8
    return most if most < 255 else None


# The tile of every row up to a width, by direction, norm, kind of work and vector. A row between two widths takes the wider
# one's rows, warps, stages, programs and prefetching over blocks of its own.
# Measured on an H200 with 32768 rows (2^29 elements at most), weights in bf16, seeds given; the comment is the share of copy
# bandwidth of the best of many candidates in short measurements, so a little flattering, and not all on one machine: two may
# be a point or two apart. Entries without a share were not measured: wider rows than those fit into no program's registers.
# Forward rows of up to 1024 columns, but LN's of 1024, and add+LN's of 2048 were also measured 4096 and 1024 at a time, which
# decides among tiles within a point.
#    up to, Tile(rows, block_n, tail_n, slices, warps, stages, programs_per_sm, hold_weights, max_registers, columns, …)
TABLE: dict[tuple[str, str, str, int], tuple[tuple[int, Tile], ...]] = {
    ("forward", "ln", "norm", 8): (
        (32, Tile(64, 32, 0, 1, 4, 1, 0, False)),  # 0.40
        (64, Tile(32, 64, 0, 1, 8, 1, 0, False)),  # 0.56
        (128, Tile(8, 128, 0, 1, 1, 1, 0, True)),  # 0.71
        (256, Tile(8, 256, 0, 1, 4, 1, 0, True)),  # 0.80
        (512, Tile(4, 512, 0, 1, 2, 1, 0, True)),  # 0.86
        (768, Tile(4, 256, 512, 1, 4, 1, 0, True, 64)),  # 0.91
        (1024, Tile(4, 128, 896, 1, 4, 1, 0, True)),  # 0.92
        (1600, Tile(2, 1024, 1024, 1, 4, 1, 0, True, 64, prefetch_ahead=2.0)),  # 0.94
        (2048, Tile(1, 512, 1536, 1, 2, 1, 0, True, 80)),  # 0.95
        (4096, Tile(1, 1024, 3072, 1, 4, 1, 0, True, 80, past_l1=True, prefetch_ahead=2.0)),  # 0.97
        (5120, Tile(1, 4096, 1024, 1, 4, 1, 0, False, 80, past_l1=True, prefetch_ahead=3.0)),  # 0.97
        (8192, Tile(1, 4096, 4096, 1, 4, 1, 0, True, 128, past_l1=True, prefetch_ahead=0.5)),  # 0.98
        (12288, Tile(1, 8192, 4096, 1, 8, 1, 0, False, past_l1=True, prefetch_ahead=2.0)),  # 0.99
        (16384, Tile(1, 4096, 12288, 1, 16, 1, 0, False, one_pass=True, prefetch_ahead=2.0)),  # 0.99
        (32768, Tile(1, 8192, 24576, 1, 16, 1, 0, False, prefetch_ahead=1.0)),  # 0.98
        (65536, Tile(1, 16384, 49152, 1, 32, 1, 0, False, 64, one_pass=True, past_l1=True, prefetch_ahead=0.5)),  # 0.97
        (262144, Tile(1, 1024, 0, 256, 1, 3, 12, True, lag=2)),  # 0.78
    ),
    ("forward", "rms", "norm", 8): (
        (32, Tile(128, 32, 0, 1, 8, 1, 0, False)),  # 0.43
        (64, Tile(16, 64, 0, 1, 4, 1, 0, False)),  # 0.59
        (128, Tile(8, 128, 0, 1, 1, 1, 0, False)),  # 0.74
        (256, Tile(16, 256, 0, 1, 8, 1, 0, False)),  # 0.81
        (512, Tile(8, 512, 0, 1, 8, 1, 0, True)),  # 0.89
        (768, Tile(8, 256, 512, 1, 8, 1, 0, True)),  # 0.92
        (1024, Tile(8, 256, 768, 1, 8, 1, 0, True, prefetch_ahead=1.0)),  # 0.92
        (1600, Tile(1, 1024, 1024, 1, 4, 1, 0, True, prefetch_ahead=3.0)),  # 0.94
        (2048, Tile(1, 2048, 0, 1, 4, 1, 0, True, prefetch_ahead=1.0)),  # 0.96
        (4096, Tile(1, 2048, 0, 1, 8, 1, 0, False)),  # 0.98
        (5120, Tile(1, 1024, 4096, 1, 4, 1, 0, True, prefetch_ahead=1.0)),  # 0.98
        (8192, Tile(1, 4096, 0, 1, 16, 1, 0, False)),  # 1.00
        (12288, Tile(1, 4096, 0, 1, 8, 1, 0, False, 64)),  # 0.99
        (16384, Tile(1, 4096, 0, 1, 16, 1, 0, False, 56)),  # 0.99
        (32768, Tile(1, 8192, 0, 1, 32, 1, 0, False)),  # 1.00
        (65536, Tile(1, 16384, 49152, 1, 32, 1, 0, False, 64, past_l1=True, prefetch_ahead=0.5)),  # 0.99
        (262144, Tile(1, 1024, 0, 256, 1, 3, 12, True, lag=2)),  # 0.83
    ),
    ("forward", "ln", "add", 8): (
        (32, Tile(16, 32, 0, 1, 1, 1, 0, True)),  # 0.56
        (64, Tile(16, 64, 0, 1, 4, 1, 0, False)),  # 0.72
        (128, Tile(16, 128, 0, 1, 4, 1, 0, True)),  # 0.79
        (256, Tile(8, 256, 0, 1, 8, 1, 0, True)),  # 0.87
        (512, Tile(4, 256, 256, 1, 4, 1, 0, True)),  # 0.91
        (768, Tile(4, 256, 512, 1, 4, 1, 0, True, prefetch_ahead=1.0)),  # 0.93
        (1024, Tile(2, 1024, 0, 1, 2, 1, 0, True, prefetch_ahead=1.0)),  # 0.95
        (1600, Tile(1, 1024, 1024, 1, 4, 1, 0, True, prefetch_ahead=2.0)),  # 0.96
        (2048, Tile(1, 512, 1536, 1, 2, 1, 0, True, prefetch_ahead=0.5)),  # 0.98
        (4096, Tile(1, 2048, 0, 1, 8, 1, 0, False)),  # 0.98
        (5120, Tile(1, 4096, 1024, 1, 8, 1, 0, False, prefetch_ahead=1.0)),  # 0.99
        (8192, Tile(1, 4096, 0, 1, 16, 1, 0, False)),  # 0.98
        (10240, Tile(1, 8192, 2048, 1, 16, 1, 0, False, prefetch_ahead=1.0)),  # 0.99
        (12288, Tile(2, 8192, 4096, 1, 32, 1, 0, False, prefetch_ahead=0.5)),  # 0.99
        (16384, Tile(2, 4096, 12288, 1, 32, 1, 0, False, past_l1=True, prefetch_ahead=0.5)),  # 0.98
        (32768, Tile(1, 16384, 16384, 1, 32, 1, 0, False, 64, past_l1=True, prefetch_ahead=0.5)),  # 0.99
        (65536, Tile(1, 16384, 49152, 1, 32, 1, 0, False, 64, one_pass=True)),  # 0.96
        (262144, Tile(1, 1024, 0, 256, 1, 3, 12, True, lag=2)),  # 0.93
    ),
    ("forward", "rms", "add", 8): (
        (32, Tile(16, 32, 0, 1, 1, 1, 0, False)),  # 0.57
        (64, Tile(8, 64, 0, 1, 1, 1, 0, True)),  # 0.73
        (128, Tile(8, 128, 0, 1, 1, 1, 0, True)),  # 0.81
        (256, Tile(8, 256, 0, 1, 8, 1, 0, True)),  # 0.87
        (512, Tile(4, 512, 0, 1, 8, 1, 0, True)),  # 0.91
        (768, Tile(4, 256, 512, 1, 4, 1, 0, True, prefetch_ahead=1.0)),  # 0.94
        (1024, Tile(2, 1024, 0, 1, 2, 1, 0, True, prefetch_ahead=1.0)),  # 0.95
        (1600, Tile(1, 2048, 0, 1, 8, 1, 0, True, prefetch_ahead=2.0)),  # 0.96
        (2048, Tile(1, 1024, 0, 1, 8, 1, 0, False)),  # 0.98
        (4096, Tile(1, 2048, 0, 1, 16, 1, 0, False)),  # 1.00
        (5120, Tile(1, 2048, 0, 1, 8, 1, 0, False, 40)),  # 0.99
        (8192, Tile(1, 2048, 0, 1, 16, 1, 0, False, 56)),  # 0.99
        (12288, Tile(1, 4096, 0, 1, 16, 1, 0, False, 56)),  # 0.98
        (16384, Tile(1, 4096, 0, 1, 32, 1, 0, False)),  # 1.00
        (32768, Tile(1, 16384, 16384, 1, 32, 1, 0, False, prefetch_ahead=0.5)),  # 0.99
        (65536, Tile(1, 16384, 49152, 1, 32, 1, 0, False, 64, prefetch_ahead=0.5)),  # 0.96
        (262144, Tile(1, 2048, 0, 128, 2, 3, 6, True, lag=2)),
    ),
    ("forward", "ln", "add", 4): (
        (32, Tile(8, 32, 0, 1, 1, 1, 0, True)),  # 0.65
        (64, Tile(16, 64, 0, 1, 4, 1, 0, False)),  # 0.79
        (128, Tile(8, 128, 0, 1, 4, 1, 0, False)),  # 0.83
        (256, Tile(4, 128, 128, 1, 2, 1, 0, True)),  # 0.90
        (512, Tile(1, 128, 384, 1, 1, 1, 0, True)),  # 0.93
        (768, Tile(1, 128, 640, 1, 1, 1, 0, True, prefetch_ahead=1.0)),  # 0.94
        (1024, Tile(1, 128, 896, 1, 1, 1, 0, True, prefetch_ahead=2.0)),  # 0.96
        (1600, Tile(1, 2048, 0, 1, 4, 1, 0, True, prefetch_ahead=1.0)),  # 0.97
        (2048, Tile(1, 1024, 0, 1, 8, 1, 0, False)),  # 0.99
        (4096, Tile(1, 1024, 0, 1, 8, 1, 0, False, 48)),  # 0.99
        (5120, Tile(1, 1024, 0, 1, 8, 1, 0, False, 56)),  # 0.98
        (8192, Tile(1, 4096, 0, 1, 16, 1, 0, False)),  # 0.99
        (12288, Tile(1, 16384, 0, 1, 16, 1, 0, False, prefetch_ahead=0.75)),  # 0.99
        (16384, Tile(1, 8192, 0, 1, 8, 1, 0, False)),  # 0.98
        (32768, Tile(1, 32768, 0, 1, 16, 1, 0, False, prefetch_ahead=0.5)),  # 0.98
        (65536, Tile(2, 1024, 0, 64, 4, 3, 3, True, lag=2, prefetch_l2=True)),  # 0.94
        (262144, Tile(1, 2048, 0, 128, 2, 3, 4, True, lag=2)),
    ),
    ("forward", "rms", "add", 4): (
        (32, Tile(64, 32, 0, 1, 8, 1, 0, True)),  # 0.67
        (64, Tile(64, 64, 0, 1, 8, 1, 0, False)),  # 0.81
        (128, Tile(8, 128, 0, 1, 4, 1, 0, True)),  # 0.85
        (256, Tile(2, 256, 0, 1, 1, 1, 0, True)),  # 0.90
        (512, Tile(2, 512, 0, 1, 4, 1, 0, True)),  # 0.93
        (768, Tile(2, 1024, 0, 1, 4, 1, 0, True, prefetch_ahead=1.0)),  # 0.95
        (1024, Tile(1, 1024, 0, 1, 8, 1, 0, True, prefetch_ahead=2.0)),  # 0.97
        (1600, Tile(1, 1024, 0, 1, 8, 1, 0, False)),  # 0.98
        (2048, Tile(1, 1024, 0, 1, 8, 1, 0, False, 48)),  # 0.99
        (4096, Tile(1, 2048, 0, 1, 16, 1, 0, False, 36)),  # 1.00
        (5120, Tile(1, 2048, 0, 1, 16, 1, 0, False)),  # 0.99
        (8192, Tile(1, 4096, 0, 1, 32, 1, 0, False)),  # 1.00
        (12288, Tile(1, 4096, 0, 1, 32, 1, 0, False)),  # 0.99
        (16384, Tile(1, 4096, 0, 1, 32, 1, 0, False, 56)),  # 1.01
        (32768, Tile(1, 8192, 24576, 1, 16, 1, 0, False)),  # 0.98
        (65536, Tile(4, 1024, 0, 64, 4, 2, 2, True, prefetch_l2=True)),  # 0.96
        (262144, Tile(1, 2048, 0, 128, 2, 3, 4, True, lag=2)),
    ),
    ("forward", "ln", "dropout", 8): (
        (32, Tile(64, 32, 0, 1, 8, 1, 0, False)),  # 0.56
        (64, Tile(32, 64, 0, 1, 4, 1, 0, True)),  # 0.72
        (128, Tile(8, 128, 0, 1, 4, 1, 0, False)),  # 0.77
        (256, Tile(8, 256, 0, 1, 4, 1, 0, True)),  # 0.85
        (512, Tile(4, 256, 256, 1, 4, 1, 0, True)),  # 0.91
        (768, Tile(4, 256, 512, 1, 4, 1, 0, True, prefetch_ahead=1.0)),  # 0.93
        (1024, Tile(2, 1024, 0, 1, 4, 1, 0, True, prefetch_ahead=1.0)),  # 0.95
        (1600, Tile(1, 1024, 1024, 1, 4, 1, 0, True, prefetch_ahead=2.0)),  # 0.95
        (2048, Tile(1, 2048, 0, 1, 8, 1, 0, False, prefetch_ahead=3.0)),  # 0.97
        (4096, Tile(2, 1024, 3072, 1, 8, 1, 0, True, prefetch_ahead=0.5)),  # 0.97
        (5120, Tile(1, 1024, 4096, 1, 8, 1, 0, False, one_pass=True, prefetch_ahead=1.0)),  # 0.98
        (8192, Tile(1, 4096, 4096, 1, 8, 1, 0, True, prefetch_ahead=0.75)),  # 0.99
        (12288, Tile(1, 4096, 8192, 1, 32, 1, 0, False, prefetch_ahead=0.5)),  # 0.99
        (16384, Tile(1, 16384, 0, 1, 32, 1, 0, False, 64, prefetch_ahead=1.0)),  # 0.99
        (24576, Tile(1, 16384, 8192, 1, 32, 1, 0, False, prefetch_ahead=0.75)),  # 0.99
        (32768, Tile(1, 16384, 16384, 1, 32, 1, 0, False, 64, one_pass=True, past_l1=True, prefetch_ahead=0.5)),  # 0.99
        (65536, Tile(1, 16384, 49152, 1, 32, 1, 0, False, 64, one_pass=True, past_l1=True)),  # 0.92
        (262144, Tile(1, 4096, 0, 64, 4, 3, 3, True)),
    ),
    ("forward", "rms", "dropout", 8): (
        (32, Tile(64, 32, 0, 1, 8, 1, 0, False)),  # 0.57
        (64, Tile(32, 64, 0, 1, 8, 1, 0, True)),  # 0.74
        (128, Tile(8, 128, 0, 1, 4, 1, 0, True)),  # 0.80
        (256, Tile(8, 256, 0, 1, 8, 1, 0, True)),  # 0.86
        (512, Tile(1, 256, 256, 1, 1, 1, 0, True)),  # 0.90
        (768, Tile(2, 512, 256, 1, 4, 1, 0, True, prefetch_ahead=1.0)),  # 0.93
        (1024, Tile(2, 512, 512, 1, 4, 1, 0, True, prefetch_ahead=0.5)),  # 0.95
        (1280, Tile(1, 2048, 0, 1, 4, 1, 0, True, prefetch_ahead=2.0)),  # 0.96
        (1600, Tile(1, 2048, 0, 1, 8, 1, 0, True, prefetch_ahead=3.0)),  # 0.96
        (2048, Tile(1, 2048, 0, 1, 4, 1, 0, True, prefetch_ahead=1.0)),  # 0.98
        (3072, Tile(1, 1024, 2048, 1, 4, 1, 0, True, prefetch_ahead=0.5)),  # 0.98
        (4096, Tile(2, 4096, 0, 1, 32, 1, 0, True, prefetch_ahead=0.5)),  # 0.98
        (5120, Tile(1, 8192, 0, 1, 16, 1, 0, False, 40, prefetch_ahead=2.0)),  # 0.98
        (8192, Tile(1, 4096, 4096, 1, 16, 1, 0, True, prefetch_ahead=0.5)),  # 0.99
        (12288, Tile(1, 8192, 4096, 1, 32, 1, 0, False, prefetch_ahead=1.0)),  # 0.99
        (16384, Tile(1, 8192, 8192, 1, 32, 1, 0, True, prefetch_ahead=0.5)),  # 1.00
        (24576, Tile(1, 16384, 8192, 1, 32, 1, 0, False, prefetch_ahead=0.75)),  # 0.99
        (32768, Tile(1, 16384, 16384, 1, 32, 1, 0, False, prefetch_ahead=0.5)),  # 0.99
        (65536, Tile(2, 2048, 0, 32, 4, 3, 2, True, prefetch_l2=True)),  # 0.95
        (262144, Tile(1, 2048, 0, 128, 2, 3, 6, True, lag=2)),
    ),
    ("forward", "ln", "dropout", 4): (
        (32, Tile(32, 32, 0, 1, 4, 1, 0, True)),  # 0.60
        (64, Tile(8, 64, 0, 1, 1, 1, 0, True)),  # 0.78
        (128, Tile(16, 128, 0, 1, 8, 1, 0, True)),  # 0.81
        (256, Tile(2, 128, 128, 1, 1, 1, 0, True)),  # 0.89
        (512, Tile(1, 128, 384, 1, 1, 1, 0, True)),  # 0.93
        (768, Tile(1, 256, 512, 1, 1, 1, 0, True, 96, prefetch_ahead=1.0)),  # 0.95
        (1024, Tile(1, 1024, 0, 1, 4, 1, 0, False, prefetch_ahead=3.0)),  # 0.95
        (1600, Tile(1, 2048, 0, 1, 8, 1, 0, False, 112, prefetch_ahead=4.0)),  # 0.97
        (2048, Tile(1, 512, 1536, 1, 2, 1, 0, True, 0, 8, prefetch_ahead=0.5)),  # 0.97
        (4096, Tile(1, 2048, 2048, 1, 8, 1, 0, False, 0, 8)),  # 0.97
        (5120, Tile(1, 4096, 4096, 1, 16, 1, 0, False, prefetch_ahead=2.0)),  # 0.99
        (8192, Tile(1, 1024, 7168, 1, 8, 1, 0, False, 0, 8, one_pass=True, past_l1=True, prefetch_ahead=0.5)),  # 0.99
        (12288, Tile(1, 8192, 4096, 1, 32, 1, 0, True, 80, prefetch_ahead=0.5)),  # 1.00
        (16384, Tile(1, 4096, 12288, 1, 32, 1, 0, True, one_pass=True, prefetch_ahead=0.5)),  # 0.99
        (32768, Tile(1, 32768, 0, 1, 32, 1, 0, False, past_l1=True, prefetch_ahead=0.5)),  # 0.98
        (65536, Tile(2, 2048, 0, 32, 4, 4, 2, True, prefetch_l2=True)),  # 0.94
        (262144, Tile(1, 2048, 0, 128, 2, 3, 4, True, lag=2)),
    ),
    ("forward", "rms", "dropout", 4): (
        (32, Tile(8, 32, 0, 1, 1, 1, 0, True)),  # 0.66
        (64, Tile(8, 64, 0, 1, 1, 1, 0, True)),  # 0.79
        (128, Tile(4, 128, 0, 1, 1, 1, 0, True)),  # 0.84
        (256, Tile(2, 128, 128, 1, 1, 1, 0, True)),  # 0.89
        (512, Tile(1, 128, 384, 1, 1, 1, 0, True)),  # 0.93
        (768, Tile(1, 128, 640, 1, 1, 1, 0, True, prefetch_ahead=0.5)),  # 0.94
        (1024, Tile(1, 1024, 0, 1, 4, 1, 0, True, prefetch_ahead=1.0)),  # 0.96
        (1600, Tile(1, 2048, 0, 1, 8, 1, 0, True, prefetch_ahead=1.0)),  # 0.97
        (2048, Tile(1, 2048, 0, 1, 2, 1, 0, True)),  # 0.96
        (4096, Tile(1, 1024, 3072, 1, 4, 1, 0, False, 0, 8)),  # 0.97
        (5120, Tile(1, 8192, 0, 1, 16, 1, 0, True, 64, prefetch_ahead=0.75)),  # 0.99
        (8192, Tile(1, 8192, 0, 1, 16, 1, 0, False, 56, 8, past_l1=True, prefetch_ahead=1.0)),  # 0.99
        (12288, Tile(1, 2048, 10240, 1, 32, 1, 0, True, prefetch_ahead=0.5)),  # 0.98
        (16384, Tile(1, 4096, 12288, 1, 32, 1, 0, False, 56, prefetch_ahead=0.5)),  # 0.99
        (32768, Tile(1, 32768, 0, 1, 32, 1, 0, False, past_l1=True, prefetch_ahead=0.5)),  # 0.98
        (65536, Tile(4, 1024, 0, 64, 4, 3, 2, True, prefetch_l2=True)),  # 0.96
        (262144, Tile(1, 2048, 0, 128, 2, 3, 4, True, lag=2)),
    ),
    ("backward", "ln", "norm", 8): (
        (32, Tile(32, 32, 0, 1, 4, 4, 2, True)),  # 0.23
        (64, Tile(32, 64, 0, 1, 4, 4, 2, True)),  # 0.35
        (128, Tile(4, 128, 0, 1, 1, 2, 16, True)),  # 0.38
        (256, Tile(4, 256, 0, 1, 1, 3, 8, True)),  # 0.71
        (512, Tile(4, 512, 0, 1, 2, 3, 4, True)),  # 0.81
        (768, Tile(1, 1024, 0, 1, 2, 6, 4, True, 224)),  # 0.87
        (1024, Tile(4, 1024, 0, 1, 4, 3, 2, True)),  # 0.90
        (1600, Tile(1, 2048, 0, 1, 4, 6, 2, True)),  # 0.93
        (2048, Tile(2, 2048, 0, 1, 8, 5, 1, True)),  # 0.96
        (4096, Tile(1, 4096, 0, 1, 8, 6, 1, True, 144)),  # 0.98
        (5120, Tile(1, 4096, 1024, 1, 4, 4, 1, True, prefetch_l2=True)),  # 0.97
        (8192, Tile(1, 8192, 0, 1, 8, 3, 1, True, prefetch_l2=True)),  # 0.98
        (12288, Tile(1, 8192, 4096, 1, 16, 3, 1, False)),  # 0.94
        (16384, Tile(1, 1024, 0, 16, 1, 3, 8, True, lag=2, prefetch_l2=True)),  # 0.93
        (32768, Tile(2, 1024, 0, 32, 2, 3, 4, True, lag=2, prefetch_l2=True)),  # 0.96
        (65536, Tile(2, 1024, 0, 64, 2, 3, 4, True, lag=2, prefetch_l2=True)),  # 0.94
        (262144, Tile(1, 2048, 0, 128, 2, 3, 4, True)),
    ),
    ("backward", "rms", "norm", 8): (
        (32, Tile(64, 32, 0, 1, 4, 3, 2, True)),  # 0.26
        (64, Tile(32, 64, 0, 1, 4, 4, 2, True)),  # 0.40
        (128, Tile(4, 128, 0, 1, 1, 2, 16, True)),  # 0.41
        (256, Tile(1, 256, 0, 1, 1, 6, 8, True)),  # 0.73
        (512, Tile(4, 512, 0, 1, 2, 3, 4, True)),  # 0.82
        (768, Tile(2, 1024, 0, 1, 4, 4, 3, True)),  # 0.88
        (1024, Tile(1, 1024, 0, 1, 2, 4, 4, True)),  # 0.91
        (1600, Tile(4, 2048, 0, 1, 8, 4, 1, False)),  # 0.93
        (2048, Tile(1, 2048, 0, 1, 4, 4, 2, True, 128)),  # 0.95
        (4096, Tile(1, 4096, 0, 1, 16, 5, 1, True, 64)),  # 0.99
        (5120, Tile(1, 8192, 0, 1, 8, 5, 1, True)),  # 0.99
        (8192, Tile(1, 8192, 0, 1, 16, 3, 1, True, prefetch_l2=True)),  # 0.99
        (12288, Tile(1, 8192, 4096, 1, 32, 3, 1, False)),  # 0.98
        (16384, Tile(2, 2048, 0, 8, 4, 3, 3, False)),  # 0.95
        (32768, Tile(2, 2048, 0, 16, 4, 3, 3, True)),  # 0.96
        (65536, Tile(2, 2048, 0, 32, 4, 3, 3, True)),  # 0.96
        (262144, Tile(1, 2048, 0, 128, 2, 3, 4, True, lag=2)),
    ),
    ("backward", "ln", "add", 8): (
        (32, Tile(32, 32, 0, 1, 4, 4, 2, True)),  # 0.29
        (64, Tile(32, 64, 0, 1, 4, 3, 2, True)),  # 0.42
        (128, Tile(4, 128, 0, 1, 1, 2, 16, True)),  # 0.47
        (256, Tile(2, 256, 0, 1, 1, 3, 8, True)),  # 0.77
        (512, Tile(1, 512, 0, 1, 2, 6, 4, True)),  # 0.85
        (768, Tile(1, 1024, 0, 1, 2, 4, 4, True)),  # 0.90
        (1024, Tile(2, 1024, 0, 1, 4, 4, 2, True)),  # 0.94
        (1600, Tile(1, 2048, 0, 1, 4, 4, 2, True)),  # 0.96
        (2048, Tile(2, 2048, 0, 1, 8, 4, 1, True)),  # 0.98
        (4096, Tile(1, 4096, 0, 1, 8, 4, 1, True)),  # 0.99
        (5120, Tile(1, 8192, 0, 1, 16, 4, 1, True)),  # 1.00
        (8192, Tile(1, 8192, 0, 1, 32, 3, 1, False)),  # 0.99
        (12288, Tile(2, 1024, 0, 12, 2, 3, 4, True, lag=2)),  # 0.97
        (16384, Tile(1, 2048, 0, 8, 2, 3, 4, True)),  # 0.97
        (32768, Tile(1, 2048, 0, 16, 2, 3, 4, True)),  # 0.98
        (65536, Tile(2, 1024, 0, 64, 2, 3, 4, True, lag=2)),  # 0.98
        (262144, Tile(1, 2048, 0, 128, 2, 3, 4, True)),
    ),
    ("backward", "rms", "add", 8): (
        (32, Tile(32, 32, 0, 1, 4, 4, 2, True)),  # 0.33
        (64, Tile(32, 64, 0, 1, 4, 3, 2, True)),  # 0.47
        (128, Tile(8, 128, 0, 1, 2, 2, 8, True)),  # 0.51
        (256, Tile(2, 256, 0, 1, 1, 3, 8, True)),  # 0.78
        (512, Tile(2, 512, 0, 1, 2, 3, 4, True)),  # 0.87
        (768, Tile(1, 1024, 0, 1, 2, 4, 4, True)),  # 0.91
        (1024, Tile(2, 1024, 0, 1, 2, 4, 2, True)),  # 0.94
        (1600, Tile(2, 2048, 0, 1, 4, 3, 2, True)),  # 0.97
        (2048, Tile(1, 2048, 0, 1, 8, 6, 1, True)),  # 0.99
        (4096, Tile(1, 4096, 0, 1, 4, 4, 1, True)),  # 0.99
        (5120, Tile(1, 8192, 0, 1, 16, 4, 1, False)),  # 0.99
        (8192, Tile(2, 8192, 0, 1, 16, 2, 1, False)),  # 0.99
        (12288, Tile(1, 8192, 4096, 1, 16, 3, 1, False)),  # 0.98
        (16384, Tile(1, 4096, 0, 4, 4, 3, 2, True)),  # 0.99
        (32768, Tile(1, 4096, 0, 8, 4, 3, 2, True)),  # 0.99
        (65536, Tile(1, 2048, 0, 32, 2, 3, 4, True)),  # 0.99
        (262144, Tile(1, 2048, 0, 128, 2, 3, 4, True)),
    ),
    ("backward", "ln", "add", 4): (
        (32, Tile(32, 32, 0, 1, 4, 4, 2, True)),  # 0.47
        (64, Tile(32, 64, 0, 1, 4, 3, 1, True)),  # 0.58
        (128, Tile(2, 128, 0, 1, 1, 2, 16, True)),  # 0.67
        (256, Tile(1, 256, 0, 1, 1, 3, 8, True)),  # 0.86
        (512, Tile(2, 512, 0, 1, 4, 4, 2, True)),  # 0.91
        (768, Tile(2, 1024, 0, 1, 4, 3, 2, False)),  # 0.94
        (1024, Tile(2, 1024, 0, 1, 8, 4, 1, True)),  # 0.95
        (1600, Tile(1, 2048, 0, 1, 4, 5, 1, True, 0, 8)),  # 0.96
        (2048, Tile(1, 2048, 0, 1, 8, 4, 1, True, prefetch_l2=True)),  # 0.98
        (4096, Tile(2, 4096, 0, 1, 16, 1, 1, False)),  # 0.97
        (5120, Tile(1, 4096, 1024, 1, 8, 2, 1, True, prefetch_l2=True)),  # 0.99
        (8192, Tile(1, 8192, 0, 1, 32, 1, 1, True, prefetch_l2=True)),  # 0.98
        (12288, Tile(2, 1024, 0, 12, 4, 3, 3, True, lag=2)),  # 0.96
        (16384, Tile(2, 1024, 0, 16, 4, 3, 2, True, lag=2, prefetch_l2=True)),  # 0.97
        (32768, Tile(2, 1024, 0, 32, 4, 4, 3, True, lag=2)),  # 0.97
        (65536, Tile(2, 1024, 0, 64, 2, 2, 4, True)),  # 0.98
        (262144, Tile(1, 2048, 0, 128, 4, 3, 3, True)),
    ),
    ("backward", "rms", "add", 4): (
        (32, Tile(32, 32, 0, 1, 4, 4, 2, True)),  # 0.50
        (64, Tile(16, 64, 0, 1, 4, 3, 2, True)),  # 0.64
        (128, Tile(4, 128, 0, 1, 1, 2, 8, True)),  # 0.68
        (256, Tile(1, 256, 0, 1, 1, 3, 8, True)),  # 0.86
        (512, Tile(1, 512, 0, 1, 4, 2, 8, True)),  # 0.89
        (768, Tile(1, 1024, 0, 1, 4, 4, 2, True)),  # 0.95
        (1024, Tile(1, 1024, 0, 1, 4, 3, 2, True)),  # 0.93
        (1600, Tile(1, 2048, 0, 1, 8, 5, 1, True, 0, 8)),  # 0.97
        (2048, Tile(1, 2048, 0, 1, 8, 3, 1, True, prefetch_l2=True)),  # 0.98
        (4096, Tile(1, 4096, 0, 1, 8, 2, 1, True, prefetch_l2=True)),  # 0.98
        (5120, Tile(1, 4096, 1024, 1, 8, 2, 1, True, prefetch_l2=True)),  # 1.00
        (8192, Tile(1, 8192, 0, 1, 32, 1, 1, True, prefetch_l2=True)),  # 0.97
        (12288, Tile(2, 1024, 0, 12, 4, 4, 3, True, lag=2)),  # 0.96
        (16384, Tile(2, 1024, 0, 16, 4, 3, 2, True, lag=2, prefetch_l2=True)),  # 0.98
        (32768, Tile(2, 1024, 0, 32, 4, 3, 2, True, prefetch_l2=True)),  # 0.98
        (65536, Tile(1, 2048, 0, 32, 4, 3, 2, True, prefetch_l2=True)),  # 0.98
        (262144, Tile(1, 2048, 0, 128, 4, 3, 2, True, lag=2)),
    ),
    ("backward", "ln", "dropout", 8): (
        (32, Tile(32, 32, 0, 1, 4, 4, 2, True)),  # 0.34
        (64, Tile(32, 64, 0, 1, 4, 3, 2, True)),  # 0.46
        (128, Tile(16, 128, 0, 1, 8, 3, 2, True)),  # 0.50
        (256, Tile(2, 256, 0, 1, 1, 3, 8, True, draws_first=True)),  # 0.79
        (512, Tile(2, 512, 0, 1, 2, 3, 4, True, draws_first=True)),  # 0.86
        (768, Tile(2, 1024, 0, 1, 4, 5, 2, True, draws_first=True)),  # 0.90
        (1024, Tile(1, 1024, 0, 1, 4, 6, 2, True, draws_first=True)),  # 0.93
        (1600, Tile(1, 2048, 0, 1, 4, 4, 2, True, 136, draws_first=True)),  # 0.94
        (2048, Tile(1, 2048, 0, 1, 4, 3, 2, True, 136, draws_first=True)),  # 0.95
        (4096, Tile(1, 4096, 0, 1, 16, 4, 1, True, draws_first=True)),  # 0.96
        (5120, Tile(1, 8192, 0, 1, 8, 3, 1, True, prefetch_l2=True)),  # 0.96
        (8192, Tile(1, 8192, 0, 1, 32, 3, 1, True, draws_first=True, prefetch_l2=True)),  # 0.98
        (12288, Tile(2, 2048, 0, 6, 4, 3, 2, True, draws_first=True)),  # 0.95
        (16384, Tile(2, 2048, 0, 8, 4, 3, 2, True, draws_first=True)),  # 0.95
        (32768, Tile(2, 1024, 0, 32, 2, 4, 4, True, draws_first=True)),  # 0.95
        (65536, Tile(2, 1024, 0, 64, 2, 3, 4, True, draws_first=True, prefetch_l2=True)),  # 0.96
        (262144, Tile(1, 2048, 0, 128, 4, 3, 3, True, draws_first=True)),
    ),
    ("backward", "rms", "dropout", 8): (
        (32, Tile(32, 32, 0, 1, 4, 4, 2, True)),  # 0.37
        (64, Tile(32, 64, 0, 1, 4, 3, 2, True)),  # 0.50
        (128, Tile(16, 128, 0, 1, 8, 3, 2, True)),  # 0.59
        (256, Tile(2, 256, 0, 1, 1, 3, 8, True, draws_first=True)),  # 0.79
        (512, Tile(2, 512, 0, 1, 2, 3, 4, True, draws_first=True)),  # 0.88
        (768, Tile(2, 1024, 0, 1, 4, 4, 2, True, 160, draws_first=True)),  # 0.91
        (1024, Tile(1, 1024, 0, 1, 4, 5, 2, True)),  # 0.93
        (1600, Tile(2, 2048, 0, 1, 8, 5, 1, True, 160, draws_first=True)),  # 0.95
        (2048, Tile(1, 2048, 0, 1, 8, 6, 1, True, draws_first=True)),  # 0.96
        (4096, Tile(1, 4096, 0, 1, 16, 3, 1, True, draws_first=True, prefetch_l2=True)),  # 0.98
        (5120, Tile(1, 4096, 1024, 1, 8, 3, 1, False, draws_first=True, prefetch_l2=True)),  # 0.99
        (8192, Tile(1, 8192, 0, 1, 16, 2, 1, True, draws_first=True, prefetch_l2=True)),  # 0.98
        (12288, Tile(2, 2048, 0, 6, 4, 3, 2, True, draws_first=True)),  # 0.96
        (16384, Tile(2, 2048, 0, 8, 4, 3, 2, True, draws_first=True)),  # 0.96
        (32768, Tile(2, 1024, 0, 32, 2, 4, 4, True, draws_first=True, lag=2)),  # 0.96
        (65536, Tile(2, 2048, 0, 32, 4, 3, 2, True, draws_first=True, prefetch_l2=True)),  # 0.97
        (262144, Tile(1, 2048, 0, 128, 2, 3, 4, True, draws_first=True)),
    ),
    ("backward", "ln", "dropout", 4): (
        (32, Tile(32, 32, 0, 1, 4, 4, 2, True)),  # 0.46
        (64, Tile(32, 64, 0, 1, 4, 3, 2, False)),  # 0.55
        (128, Tile(2, 128, 0, 1, 1, 2, 16, True)),  # 0.64
        (256, Tile(1, 256, 0, 1, 1, 3, 8, True, draws_first=True)),  # 0.85
        (512, Tile(2, 512, 0, 1, 4, 4, 2, True, draws_first=True)),  # 0.91
        (768, Tile(2, 1024, 0, 1, 4, 3, 2, True)),  # 0.94
        (1024, Tile(2, 1024, 0, 1, 4, 4, 1, True, 0, 8, draws_first=True)),  # 0.94
        (1600, Tile(2, 2048, 0, 1, 16, 4, 1, True, 80, draws_first=True)),  # 0.97
        (2048, Tile(1, 2048, 0, 1, 4, 4, 1, False, 0, 8, draws_first=True)),  # 0.97
        (4096, Tile(2, 4096, 0, 1, 16, 1, 1, False)),  # 0.96
        (5120, Tile(1, 4096, 1024, 1, 8, 2, 1, True, draws_first=True, prefetch_l2=True)),  # 0.98
        (8192, Tile(1, 8192, 0, 1, 32, 1, 1, False, draws_first=True, prefetch_l2=True)),  # 0.98
        (12288, Tile(2, 1024, 0, 12, 4, 3, 3, True, lag=2)),  # 0.96
        (16384, Tile(2, 1024, 0, 16, 4, 3, 3, True, lag=2)),  # 0.96
        (32768, Tile(2, 1024, 0, 32, 4, 3, 3, True, lag=2)),  # 0.97
        (65536, Tile(2, 1024, 0, 64, 2, 3, 4, True)),  # 0.97
        (262144, Tile(1, 2048, 0, 128, 4, 3, 3, True)),
    ),
    ("backward", "rms", "dropout", 4): (
        (32, Tile(32, 32, 0, 1, 4, 4, 2, True)),  # 0.47
        (64, Tile(32, 64, 0, 1, 4, 3, 2, True)),  # 0.60
        (128, Tile(2, 128, 0, 1, 1, 2, 16, True)),  # 0.66
        (256, Tile(1, 256, 0, 1, 1, 3, 8, True, draws_first=True)),  # 0.85
        (512, Tile(2, 512, 0, 1, 4, 4, 2, True, draws_first=True)),  # 0.92
        (768, Tile(2, 1024, 0, 1, 8, 5, 1, True, 160, draws_first=True)),  # 0.96
        (1024, Tile(1, 1024, 0, 1, 1, 4, 2, False, draws_first=True)),  # 0.95
        (1600, Tile(2, 2048, 0, 1, 8, 3, 1, True)),  # 0.97
        (2048, Tile(1, 2048, 0, 1, 8, 4, 1, True, draws_first=True, prefetch_l2=True)),  # 0.97
        (4096, Tile(2, 4096, 0, 1, 16, 1, 1, False, 112)),  # 0.96
        (5120, Tile(1, 4096, 1024, 1, 8, 2, 1, True, draws_first=True, prefetch_l2=True)),  # 0.99
        (8192, Tile(1, 8192, 0, 1, 32, 1, 1, False, draws_first=True, prefetch_l2=True)),  # 0.98
        (12288, Tile(2, 1024, 0, 12, 4, 4, 3, True, lag=2)),  # 0.96
        (16384, Tile(2, 1024, 0, 16, 4, 3, 3, True, lag=2)),  # 0.97
        (32768, Tile(2, 1024, 0, 32, 4, 3, 3, True, lag=2)),  # 0.97
        (65536, Tile(2, 1024, 0, 64, 4, 3, 3, True, lag=2)),  # 0.98
        (262144, Tile(1, 2048, 0, 128, 4, 3, 3, True)),
    ),
}

# Forward with weights in fp32, by norm, kind of work, vector and width: where another tile than TABLE's, as `_tile` has it for
# such weights, was faster by 2 % or more; the comment has the shares of both. `python -m benchmarks.tune --weight-dtype fp32`
# looks for more.
FP32_WEIGHTS: dict[tuple[str, str, int, int], Tile] = {
    ("ln", "norm", 8, 1024): Tile(4, 1024, 0, 1, 4, 1, 0, True),  # 0.89, 0.83
    ("ln", "norm", 8, 2048): Tile(2, 2048, 0, 1, 2, 1, 0, True),  # 0.94, 0.92
    ("ln", "norm", 8, 32768): Tile(1, 4096, 28672, 1, 16, 1, 0, False, 64, prefetch_ahead=1.0),  # 0.91, 0.80
    ("rms", "norm", 8, 1600): Tile(1, 1024, 1024, 1, 4, 1, 0, False),  # 0.92, 0.89
    ("ln", "add", 4, 32768): Tile(1, 16384, 16384, 1, 32, 1, 0, False, past_l1=True),  # 0.96, 0.67
    ("ln", "dropout", 8, 1600): Tile(1, 1024, 1024, 1, 4, 1, 0, False),  # 0.94, 0.92
    ("ln", "dropout", 4, 768): Tile(1, 256, 512, 1, 1, 1, 0, False),  # 0.92, 0.90
    ("ln", "dropout", 4, 12288): Tile(1, 8192, 4096, 1, 32, 1, 0, False, 80),  # 0.98, 0.94
    ("ln", "dropout", 4, 32768): Tile(1, 32768, 0, 1, 32, 1, 0, False, past_l1=True),  # 0.83, 0.74
    ("rms", "dropout", 4, 5120): Tile(1, 4096, 4096, 1, 16, 1, 0, False, prefetch_ahead=2.0),  # 0.99, 0.91
}
