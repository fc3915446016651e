"""The forward kernel of the norm.

Variants are constexpr flags and absent pointers: `None` is constexpr, so `if p_x1 is not None` costs nothing at run time.
Names: `p_` pointer, `b_` block in registers, `m_` mask. All arithmetic is fp32.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait
from triton.language.target_info import is_cuda

from .conversion_kernels import PTX
from .forward_looped_kernels import looped_tile
from .forward_tile_kernels import begin_tile, finish_tile, load_weights
from .prefetch_kernels import bring_rows
from .row_kernels import multiples, signed, tile_rows, valid
from .split_forward_kernels import nothing_waits, split_forward_round


# A new batch size or dropout probability must not compile anything; nor must the next seed of a vector, every other of
# which lies on a 16-byte boundary.
@triton.jit(do_not_specialize=["M", "tiles", "threshold", "distance"], do_not_specialize_on_alignment=["p_seed"])
def norm_forward_kernel(
    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, p_seed,
    p_y, p_y1, p_r, p_stats, p_mask, p_mask1, p_board,
    M, N, tiles, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r,
    eps, threshold, scale, distance,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, SLICES: tl.constexpr, PARTS: tl.constexpr,
    LAG: tl.constexpr, RING: tl.constexpr, LONG: tl.constexpr, LOOPED: tl.constexpr, EVEN_N: tl.constexpr,
    MULTIPLE: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr, PERSISTENT: tl.constexpr, HOLD: tl.constexpr,
    EARLY: tl.constexpr, PACKED: tl.constexpr, ONE_PASS: tl.constexpr, PAST_L1: tl.constexpr, BIAS_PAST_L1: tl.constexpr,
    SPAN: tl.constexpr, EARLY_START: tl.constexpr, PREFETCH: tl.constexpr, AT_ONCE: tl.constexpr, IN_PLACE: tl.constexpr,
    RESIDUAL_DTYPE: tl.constexpr, IS_RMS: tl.constexpr, DROPOUT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Programs, each striding over tiles of ROWS rows, of

        z = dropout(x · rowscale) + dropout(x1 · rowscale1) + residual;   r = round(z)
        x̂ = (r − mean(r)) · rstd(r)  or  r · rstd(r);   y = x̂ · (weight + OFFSET) + bias;   y1 likewise with weight1, bias1

    p_stats: fp32 [M, 1] rstd for RMSNorm, [M, 2] rstd and mean for LayerNorm.
    PACKED: between its statistics and its output a row waits in RESIDUAL_DTYPE, in half the registers of fp32.
    ONE_PASS: LayerNorm's two statistics at once, where all threads hold as much of a row.
    PAST_L1: whole rows are read past L1; BIAS_PAST_L1: biases too.
    EARLY: a program of one tile asks for the weights ahead of the rows; HOLD: a persistent one, once for all tiles.
    EARLY_START: programs start when those of the kernel ahead have ended, or have let them, and wait for its memory themselves
    (programmatic dependent launch). This kernel lets nobody start before it has ended: to do so gained nothing in most cells
    and cost up to half in some.
    PREFETCH: a program of one tile begins by having the rows of the program `distance` behind it brought into L2; programs that
    share rows, those of the tile that they copy next. AT_ONCE: of each input in one piece; its rows lie behind each other.
    IN_PLACE: p_r is p_residual.
    p_board: where the SLICES programs that share a row exchange their sums; see `board_kernels`.
    """
    if EARLY_START:
        gdc_wait()  # for the kernel ahead, which has waited for the one ahead of it; nothing may be read or written above
    N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r = multiples(
        (N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r), MULTIPLE
    )
    slice_id = tl.program_id(0) % SLICES
    group = tl.program_id(0) // SLICES
    groups = tl.num_programs(0) // SLICES
    seed = 0
    if DROPOUT:
        seed = tl.load(p_seed)
    share = 1.0 / N  # of the squares; dividing them by N would hold each tile up between its sums and its output

    if not LOOPED:
        first_col = slice_id * BLOCK_N
        weights = ()
        if HOLD:
            weights = load_weights(
                p_weight, p_bias, p_weight1, p_bias1, p_y1, first_col, N,
                BLOCK_N, TAIL_N, EVEN_N, VECTOR, BIAS_PAST_L1, SPAN, ROWS, OFFSET,
            )  # fmt: skip
        if SLICES > 1:
            tl.static_assert(TAIL_N == 0, "a split row is one block in each program")
            waiting = nothing_waits(ROWS, BLOCK_N, LAG, RESIDUAL_DTYPE)
            for turn in tl.range(0, tl.cdiv(tiles - group, groups) + LAG, num_stages=STAGES):
                if PREFETCH:
                    columns = BLOCK_N if EVEN_N else tl.minimum(BLOCK_N, N - first_col)
                    bring_inputs(
                        p_x, p_x1, p_residual, p_rowscale, p_rowscale1, group + (turn + STAGES - 1) * groups, M,
                        stride_x, stride_x1, stride_residual, first_col, columns, ROWS,
                    )  # fmt: skip
                waiting = split_forward_round(
                    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, seed,
                    p_y, p_y1, p_r, p_stats, p_mask, p_mask1, p_board, weights, waiting,
                    turn, group, groups, slice_id, first_col,
                    M, N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r, eps, threshold, scale, share,
                    ROWS, BLOCK_N, SLICES, PARTS, LAG, RING, LONG, EVEN_N, VECTOR, SPAN, HOLD,
                    IN_PLACE, RESIDUAL_DTYPE, IS_RMS, DROPOUT, OFFSET,
                )  # fmt: skip
        elif PERSISTENT:
            for tile in tl.range(group, tiles, groups, num_stages=STAGES):
                whole_tile(
                    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, seed,
                    p_y, p_y1, p_r, p_stats, p_mask, p_mask1, weights, tile,
                    M, N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r, eps, threshold, scale, share,
                    ROWS, BLOCK_N, TAIL_N, LONG, EVEN_N, VECTOR, HOLD, EARLY, PACKED, ONE_PASS, PAST_L1, BIAS_PAST_L1, SPAN,
                    IN_PLACE, RESIDUAL_DTYPE, IS_RMS, DROPOUT, OFFSET,
                )  # fmt: skip
        else:
            if PREFETCH:
                bring_inputs(
                    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, group + distance, M,
                    stride_x, stride_x1, stride_residual, 0, N, ROWS, AT_ONCE,
                )  # fmt: skip
            # Not a loop of one: that would take a quarter more registers.
            whole_tile(
                p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, seed,
                p_y, p_y1, p_r, p_stats, p_mask, p_mask1, weights, group,
                M, N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r, eps, threshold, scale, share,
                ROWS, BLOCK_N, TAIL_N, LONG, EVEN_N, VECTOR, HOLD, EARLY, PACKED, ONE_PASS, PAST_L1, BIAS_PAST_L1, SPAN,
                IN_PLACE, RESIDUAL_DTYPE, IS_RMS, DROPOUT, OFFSET,
            )  # fmt: skip
    elif PERSISTENT:
        for tile in tl.range(group, tiles, groups, num_stages=1):
            looped_tile(
                p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, seed,
                p_y, p_y1, p_r, p_stats, p_mask, p_mask1, tile,
                M, N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r, eps, threshold, scale, share,
                ROWS, BLOCK_N, LONG, EVEN_N, VECTOR, SPAN, IN_PLACE, RESIDUAL_DTYPE, IS_RMS, DROPOUT, OFFSET,
            )  # fmt: skip
    else:
        looped_tile(
            p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, seed,
            p_y, p_y1, p_r, p_stats, p_mask, p_mask1, group,
            M, N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r, eps, threshold, scale, share,
            ROWS, BLOCK_N, LONG, EVEN_N, VECTOR, SPAN, IN_PLACE, RESIDUAL_DTYPE, IS_RMS, DROPOUT, OFFSET,
        )  # fmt: skip


@triton.jit
def bring_inputs(
    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, tile, M, stride_x, stride_x1, stride_residual, first_col, columns,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr = False,
):  # fmt: skip
    """Has `columns` columns of a tile brought into L2, unless it isn't there.

    Of an input with scales nothing: a row whose scale is 0 is not read.
    """
    if p_rowscale is None:
        bring_rows(p_x, tile, M, stride_x, first_col, columns, ROWS, AT_ONCE)
    if p_rowscale1 is None:
        bring_rows(p_x1, tile, M, stride_x1, first_col, columns, ROWS, AT_ONCE)
    bring_rows(p_residual, tile, M, stride_residual, first_col, columns, ROWS, AT_ONCE)


@triton.jit
def whole_tile(
    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, seed,
    p_y, p_y1, p_r, p_stats, p_mask, p_mask1, weights, tile,
    M, N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r, eps, threshold, scale, share,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, LONG: tl.constexpr, EVEN_N: tl.constexpr,
    VECTOR: tl.constexpr, HOLD: tl.constexpr, EARLY: tl.constexpr, PACKED: tl.constexpr, ONE_PASS: tl.constexpr,
    PAST_L1: tl.constexpr, BIAS_PAST_L1: tl.constexpr, SPAN: tl.constexpr, IN_PLACE: tl.constexpr, RESIDUAL_DTYPE: tl.constexpr,
    IS_RMS: tl.constexpr, DROPOUT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """A tile of rows that this program has to itself."""
    if PACKED and ROWS == 1:
        tile, stride_x, stride_x1, stride_residual = signed(tile), signed(stride_x), signed(stride_x1), signed(stride_residual)
        stride_y, stride_y1, stride_r = signed(stride_y), signed(stride_y1), signed(stride_r)
    rows = tile_rows(tile, ROWS, LONG)
    m_row = valid(rows, M, ROWS == 1)
    if EARLY:
        weights = load_weights(
            p_weight, p_bias, p_weight1, p_bias1, p_y1, 0, N,
            BLOCK_N, TAIL_N, EVEN_N, VECTOR, BIAS_PAST_L1, SPAN, ROWS, OFFSET,
        )  # fmt: skip
        keep_order()
    b_r, b_mean, b_centred, b_m2 = begin_tile(
        p_x, p_x1, p_residual, p_rowscale, p_rowscale1, seed, p_r, p_mask, p_mask1, rows, m_row,
        N, stride_x, stride_x1, stride_residual, stride_r, threshold, scale,
        ROWS, BLOCK_N, TAIL_N, EVEN_N, VECTOR, PACKED, ONE_PASS, PAST_L1, SPAN, IN_PLACE, RESIDUAL_DTYPE, IS_RMS, DROPOUT,
    )  # fmt: skip
    # Always so, but it keeps the loads of weights in a loop over tiles from being prefetched with the next rows: they would
    # take shared memory from them, and all tiles find them in L1.
    if tile >= 0:
        finish_tile(
            p_y, p_y1, p_stats, p_weight, p_bias, p_weight1, p_bias1, weights, b_r if PACKED else b_centred, b_mean,
            tl.rsqrt(b_m2 * share + eps), rows, m_row, True, 0, N, stride_y, stride_y1,
            BLOCK_N, TAIL_N, EVEN_N, VECTOR, SPAN, HOLD or EARLY, PACKED, BIAS_PAST_L1, IS_RMS, OFFSET,
        )  # fmt: skip


@triton.jit
def keep_order():
    """Loads above it are issued before those below: else ptxas puts off what is used late, behind what waits for the rows.

    bar.warp.sync orders the memory of a warp, all of whose lanes must come here; arithmetic may still move across it. The mov
    is there because an instruction has to return something. Other compilers are left to themselves.
    """
    if PTX and is_cuda():
        nothing = tl.full([], 0, tl.int32)
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [nothing], dtype=tl.int32, is_pure=False, pack=1
        )
