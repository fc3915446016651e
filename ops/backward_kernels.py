"""The backward kernel of the norm, and the small sum that finishes the weight gradients. Names as in `forward_kernels`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .input_gradient_kernels import draw_row, store_input_gradients, store_rowscale_gradients
from .row_kernels import (
    add_pairs,
    block_cols,
    block_count,
    block_width,
    collect,
    dot_rows,
    inside,
    load_row,
    load_vector,
    narrow_row,
    publish,
    row_sum,
    tile_rows,
    two_dots,
    widen_row,
)


@triton.jit(do_not_specialize=["M", "tiles", "threshold"], do_not_specialize_on_alignment=["p_seed"])
def norm_backward_kernel(
    p_dy, p_dy1, p_dr, p_r, p_x, p_x1, p_weight, p_weight1, p_rowscale, p_rowscale1, p_stats, p_seed,
    p_dz, p_dx, p_dx1, p_drowscale, p_drowscale1, p_dweight, p_dbias, p_dweight1, p_dbias1, p_board,
    M, N, tiles, stride_dy, stride_dy1, stride_dr, stride_r, stride_x, stride_x1, stride_partial,
    threshold, scale,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, SLICES: tl.constexpr, SLICES_POW2: tl.constexpr,
    LONG: tl.constexpr, LOOPED: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    HOLD: tl.constexpr, DRAWS_FIRST: tl.constexpr, PDL: tl.constexpr, SPAN: tl.constexpr,
    IS_RMS: tl.constexpr, DROPOUT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Persistent programs, each striding over tiles of ROWS rows. With g = dy · weight + dy1 · weight1:

        dz      = rstd · (g − x̂ · mean(g · x̂) − mean(g)) + dr           the last mean for LayerNorm only
        dx      = dropout(dz) · rowscale;   drowscale = Σ_cols dropout(dz) · x          likewise dx1, drowscale1
        dweight = Σ_rows dy · x̂;            dbias     = Σ_rows dy                       likewise dweight1, dbias1

    p_dz serves every input whose gradient is dz itself. The weight gradients are fp32 [groups, N], a partial sum each, rows
    stride_partial apart: finish_weight_gradients_kernel adds them up in a fixed order. A group is the SLICES programs that
    share a row; they exchange its two sums over the columns on p_board.
    """
    if PDL:
        # The sum over partials may take its place on the GPU now: it reads nothing before its own wait.
        gdc_launch_dependents()
    slice_id = tl.program_id(0) % SLICES
    group = tl.program_id(0) // SLICES
    groups = tl.num_programs(0) // SLICES
    partial = group.to(tl.int64) * stride_partial
    seed = 0
    if DROPOUT:
        seed = tl.load(p_seed)
    share = 1.0 / N
    # Where only the residual stream has a gradient, the norm has no part in it.
    UPSTREAM: tl.constexpr = (p_dy is not None) or (p_dy1 is not None)
    # Multiplied out, (r − mean) · rstd is an instruction less; where that loses digits, rounding r to 16 bits has lost more,
    # but for a row of one number throughout, whose x̂ is then a rounding and not 0. Whole rows in programs gain nothing by it.
    EXACT: tl.constexpr = SLICES == 1 or p_r.dtype.element_ty == tl.float32

    if not LOOPED:
        first_col = slice_id * BLOCK_N
        if HOLD:
            b_weight = load_vector(p_weight, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, 1.0, OFFSET)
        b_weight1 = load_vector(p_weight1, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, 1.0, OFFSET)
        b_dweight = zero_row(ROWS, BLOCK_N, TAIL_N, SPAN)
        b_dbias = zero_row(ROWS, BLOCK_N, TAIL_N, SPAN)
        b_dweight1 = zero_row(ROWS, BLOCK_N, TAIL_N, SPAN)
        b_dbias1 = zero_row(ROWS, BLOCK_N, TAIL_N, SPAN)
        if SLICES > 1:
            b_none = load_row(None, tl.arange(0, ROWS), None, 0, 0, N, BLOCK_N, 0, True, VECTOR)
            b_held_r = narrow_row(b_none, p_r.dtype.element_ty)
            b_held_dy = narrow_row(b_none, p_dy.dtype.element_ty)
        for tile in tl.range(group, tiles + (groups if SLICES > 1 else 0), groups, num_stages=STAGES):
            rows = tile_rows(tile, ROWS, LONG)
            m_row = rows < M
            # Of the tile that this round finishes. Not with a row scale, where rows with a scale of 0 need no draws.
            finished = rows - (groups * ROWS if SLICES > 1 else 0)
            DRAWN: tl.constexpr = DRAWS_FIRST and p_rowscale is None and p_dx is not None
            DRAWN1: tl.constexpr = DRAWS_FIRST and p_rowscale1 is None and p_dx1 is not None
            b_draws = draw_row(seed, finished, first_col, threshold, BLOCK_N, TAIL_N, VECTOR, 0, DRAWN)
            b_draws1 = draw_row(seed, finished, first_col, threshold, BLOCK_N, TAIL_N, VECTOR, 1, DRAWN1)
            if SLICES == 1:
                b_dz = load_row(p_dr, rows, m_row, stride_dr, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR)
            if UPSTREAM:
                b_r = load_row(p_r, rows, m_row, stride_r, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR)
                b_dy = load_row(p_dy, rows, m_row, stride_dy, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR)
                b_dy1 = load_row(p_dy1, rows, m_row, stride_dy1, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR)
                b_rstd, b_mean = load_stats(p_stats, rows, m_row, M, IS_RMS)
                b_xhat = normalise(b_r, b_mean, b_rstd, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, IS_RMS, EXACT)
                if p_dbias is not None:
                    b_dbias = add_rows(b_dbias, b_dy)
                if p_dbias1 is not None:
                    b_dbias1 = add_rows(b_dbias1, b_dy1)
                if p_dweight1 is not None:
                    b_dweight1 = add_product(b_dweight1, b_dy1, b_xhat)
                # Where g itself is wanted a round later, its sums are had from dy · x̂, which the weight gradients need too.
                # Not for RMSNorm, which has one sum less to gain by it and a tile that would spill.
                BY_PRODUCT: tl.constexpr = SLICES > 1 and not IS_RMS
                if BY_PRODUCT:
                    tl.static_assert(TAIL_N == 0, "a split row is one block in each program")
                    b_product = product(b_dy, b_xhat)
                    if p_dweight is not None:
                        b_dweight = add_rows(b_dweight, b_product)
                elif p_dweight is not None:
                    b_dweight = add_product(b_dweight, b_dy, b_xhat)
                if not HOLD:
                    b_weight = load_vector(p_weight, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR, 1.0, OFFSET)
                if BY_PRODUCT:
                    b_c1, b_c2 = tl.reduce((b_product[0] * b_weight[0], b_dy[0] * b_weight[0]), 1, add_pairs)
                else:
                    b_g = weighted_sum(b_dy, b_weight, b_dy1, b_weight1, p_dy is not None, p_dy1 is not None)
                    if IS_RMS:
                        b_c1 = dot_rows(b_g, b_xhat, SPAN)
                        b_c2 = tl.zeros([ROWS], tl.float32)
                    else:
                        b_c1, b_c2 = two_dots(b_g, b_xhat, SPAN)
                if SLICES == 1:
                    b_dz = add_norm_gradient(b_dz, b_g, b_xhat, -share * b_c1, -share * b_c2, b_rstd, p_dr is not None, IS_RMS)
                else:
                    # From here on rows and m_row are those of the tile before, whose sums have had the time to arrive.
                    publish(p_board, b_c1, b_c2, rows, m_row, slice_id, SLICES)
                    b_finish_r = widen_row(b_held_r)
                    b_finish_dy = widen_row(b_held_dy)
                    b_held_r = narrow_row(b_r, p_r.dtype.element_ty)
                    b_held_dy = narrow_row(b_dy, p_dy.dtype.element_ty)
                    rows -= groups * ROWS
                    m_row = (rows >= 0) & (rows < M)
                    b_dz = load_row(p_dr, rows, m_row, stride_dr, first_col, N, BLOCK_N, TAIL_N, EVEN_N, VECTOR)
                    b_rstd, b_mean = load_stats(p_stats, rows, m_row, M, IS_RMS)
                    b_c1s, b_c2s = collect(p_board, rows, m_row, SLICES, SLICES_POW2)
                    b_c1, b_c2 = tl.reduce((b_c1s, b_c2s), 1, add_pairs)
                    if IS_RMS:
                        b_c1 += b_c2  # a zero, but with both in use the compiler does not repeat the wait
                    b_g = weighted_sum(b_finish_dy, b_weight, b_dy1, b_weight1, True, False)
                    b_slope = -share * b_rstd * b_c1
                    b_offset = -share * b_c2
                    if EXACT:
                        b_finish_r = subtract(b_finish_r, b_mean, IS_RMS)
                    else:
                        b_offset -= b_slope * b_mean
                    b_dz = add_norm_gradient(b_dz, b_g, b_finish_r, b_slope, b_offset, b_rstd, p_dr is not None, IS_RMS)
            b_ds, b_ds1 = store_input_gradients(
                p_dz, p_dx, p_dx1, p_drowscale, p_drowscale1, p_x, p_x1, p_rowscale, p_rowscale1, seed, b_draws, b_draws1, b_dz,
                rows, m_row, first_col, N, stride_x, stride_x1, threshold, scale,
                ROWS, BLOCK_N, TAIL_N, EVEN_N, VECTOR, DROPOUT,
            )  # fmt: skip
            store_rowscale_gradients(p_drowscale, p_drowscale1, b_ds, b_ds1, rows, m_row)
        if p_dweight is not None:
            store_partial(p_dweight + partial, b_dweight, first_col, N, BLOCK_N, TAIL_N, VECTOR)
        if p_dbias is not None:
            store_partial(p_dbias + partial, b_dbias, first_col, N, BLOCK_N, TAIL_N, VECTOR)
        if p_dweight1 is not None:
            store_partial(p_dweight1 + partial, b_dweight1, first_col, N, BLOCK_N, TAIL_N, VECTOR)
        if p_dbias1 is not None:
            store_partial(p_dbias1 + partial, b_dbias1, first_col, N, BLOCK_N, TAIL_N, VECTOR)
    else:
        for tile in tl.range(group, tiles, groups, num_stages=1):
            rows = tile_rows(tile, ROWS, LONG)
            m_row = rows < M
            b_c1 = tl.zeros([ROWS], tl.float32)
            b_c2 = tl.zeros([ROWS], tl.float32)
            if UPSTREAM:
                b_rstd, b_mean = load_stats(p_stats, rows, m_row, M, IS_RMS)
                for first_col in tl.range(0, N, BLOCK_N, num_stages=1):
                    b_r = load_row(p_r, rows, m_row, stride_r, first_col, N, BLOCK_N, 0, False, VECTOR)
                    b_dy = load_row(p_dy, rows, m_row, stride_dy, first_col, N, BLOCK_N, 0, False, VECTOR)
                    b_dy1 = load_row(p_dy1, rows, m_row, stride_dy1, first_col, N, BLOCK_N, 0, False, VECTOR)
                    b_xhat = normalise(b_r, b_mean, b_rstd, first_col, N, BLOCK_N, 0, False, VECTOR, IS_RMS, EXACT)
                    b_weight = load_vector(p_weight, first_col, N, BLOCK_N, 0, False, VECTOR, 1.0, OFFSET)
                    b_weight1 = load_vector(p_weight1, first_col, N, BLOCK_N, 0, False, VECTOR, 1.0, OFFSET)
                    b_g = weighted_sum(b_dy, b_weight, b_dy1, b_weight1, p_dy is not None, p_dy1 is not None)
                    b_c1 += dot_rows(b_g, b_xhat, SPAN)
                    if not IS_RMS:
                        b_c2 += row_sum(b_g, SPAN)
            b_ds = tl.zeros([ROWS], tl.float32)
            b_ds1 = tl.zeros([ROWS], tl.float32)
            for first_col in tl.range(0, N, BLOCK_N, num_stages=1):
                b_dz = load_row(p_dr, rows, m_row, stride_dr, first_col, N, BLOCK_N, 0, False, VECTOR)
                if UPSTREAM:
                    b_r = load_row(p_r, rows, m_row, stride_r, first_col, N, BLOCK_N, 0, False, VECTOR)
                    b_dy = load_row(p_dy, rows, m_row, stride_dy, first_col, N, BLOCK_N, 0, False, VECTOR)
                    b_dy1 = load_row(p_dy1, rows, m_row, stride_dy1, first_col, N, BLOCK_N, 0, False, VECTOR)
                    b_xhat = normalise(b_r, b_mean, b_rstd, first_col, N, BLOCK_N, 0, False, VECTOR, IS_RMS, EXACT)
                    b_weight = load_vector(p_weight, first_col, N, BLOCK_N, 0, False, VECTOR, 1.0, OFFSET)
                    b_weight1 = load_vector(p_weight1, first_col, N, BLOCK_N, 0, False, VECTOR, 1.0, OFFSET)
                    first = tile == group  # this program's first rows find nothing to add to
                    if p_dweight is not None:
                        accumulate(p_dweight + partial, b_dy[0] * b_xhat[0], first_col, N, first)
                    if p_dbias is not None:
                        accumulate(p_dbias + partial, b_dy[0], first_col, N, first)
                    if p_dweight1 is not None:
                        accumulate(p_dweight1 + partial, b_dy1[0] * b_xhat[0], first_col, N, first)
                    if p_dbias1 is not None:
                        accumulate(p_dbias1 + partial, b_dy1[0], first_col, N, first)
                    b_g = weighted_sum(b_dy, b_weight, b_dy1, b_weight1, p_dy is not None, p_dy1 is not None)
                    b_dz = add_norm_gradient(b_dz, b_g, b_xhat, -share * b_c1, -share * b_c2, b_rstd, p_dr is not None, IS_RMS)
                b_block_ds, b_block_ds1 = store_input_gradients(
                    p_dz, p_dx, p_dx1, p_drowscale, p_drowscale1, p_x, p_x1, p_rowscale, p_rowscale1, seed, (), (), b_dz,
                    rows, m_row, first_col, N, stride_x, stride_x1, threshold, scale,
                    ROWS, BLOCK_N, 0, False, VECTOR, DROPOUT,
                )  # fmt: skip
                b_ds += b_block_ds
                b_ds1 += b_block_ds1
            store_rowscale_gradients(p_drowscale, p_drowscale1, b_ds, b_ds1, rows, m_row)
            # A partial sum may be read back by another thread than wrote it.
            tl.debug_barrier()


@triton.jit
def load_stats(p_stats, rows, m_row, M, IS_RMS: tl.constexpr):
    """rstd and mean, fp32 [ROWS]; no mean for RMSNorm."""
    b_rstd = tl.load(p_stats + rows, mask=m_row, other=0.0)
    b_mean = tl.zeros([rows.shape[0]], tl.float32)
    if not IS_RMS:
        b_mean = tl.load(p_stats + M + rows, mask=m_row, other=0.0)
    return b_rstd, b_mean


@triton.jit
def normalise(
    b_r, b_mean, b_rstd, first_col, N,
    BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, EVEN_N: tl.constexpr, VECTOR: tl.constexpr, IS_RMS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """x̂ = (r − mean) · rstd, zero in the columns past the row's end.

    Not EXACT it is r · rstd − mean · rstd; past the end, where dy is zero, that is −mean · rstd, finite unless it overflows.
    """
    b_xhat = ()
    for i in tl.static_range(block_count(BLOCK_N, TAIL_N)):
        if IS_RMS:
            b = b_r[i] * b_rstd[:, None]
        else:
            if EXACT:
                b = (b_r[i] - b_mean[:, None]) * b_rstd[:, None]
                if not inside(i, BLOCK_N, TAIL_N, EVEN_N):
                    # A mean that overflows there would make 0 · ∞ in the sums over columns.
                    b = tl.where((block_cols(i, first_col, BLOCK_N, TAIL_N, VECTOR) < N)[None, :], b, 0.0)
            else:
                b = b_r[i] * b_rstd[:, None] - (b_mean * b_rstd)[:, None]
        b_xhat += (b,)
    return b_xhat


@triton.jit
def weighted_sum(b_dy, b_weight, b_dy1, b_weight1, HAS_DY: tl.constexpr, HAS_DY1: tl.constexpr):
    """g = dy · weight + dy1 · weight1, of which at least one is there."""
    b_g = ()
    for i in tl.static_range(len(b_dy)):
        if HAS_DY and HAS_DY1:
            b = b_dy[i] * b_weight[i] + b_dy1[i] * b_weight1[i]
        elif HAS_DY:
            b = b_dy[i] * b_weight[i]
        else:
            b = b_dy1[i] * b_weight1[i]
        b_g += (b,)
    return b_g


@triton.jit
def subtract(b_r, b_mean, IS_RMS: tl.constexpr):
    """r − mean, whatever it is past the row's end; r for RMSNorm."""
    b_centred = ()
    for i in tl.static_range(len(b_r)):
        b_centred += (b_r[i] if IS_RMS else b_r[i] - b_mean[:, None],)
    return b_centred


@triton.jit
def add_norm_gradient(b_dz, b_g, b_base, b_slope, b_offset, b_rstd, HAS_DZ: tl.constexpr, IS_RMS: tl.constexpr):
    """dz + rstd · (g − x̂ · c1 − c2), as dz + rstd · (g + base · slope + offset).

    base is x̂, slope −c1 and offset, for LayerNorm alone, −c2. Or base is r − mean and slope −rstd · c1. Or base is r itself
    and offset −c2 − slope · mean.
    """
    b_sum = ()
    for i in tl.static_range(len(b_dz)):
        if HAS_DZ or IS_RMS:
            # Multiplied out this would be as many instructions, and three tiles would spill.
            b = b_g[i] + b_base[i] * b_slope[:, None]
            if not IS_RMS:
                b += b_offset[:, None]
            b = b_dz[i] + b * b_rstd[:, None]
        else:
            # Multiplied out, each product has its sum: an instruction less.
            b = b_base[i] * (b_slope * b_rstd)[:, None] + (b_offset * b_rstd)[:, None]
            b += b_g[i] * b_rstd[:, None]
        b_sum += (b,)
    return b_sum


@triton.jit
def zero_row(ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, SPAN: tl.constexpr):
    """Where weight gradients are summed: fp32 blocks [width] from SPAN columns on, where a thread holds all rows of its
    columns and can add them at once, else [ROWS, width]."""
    b_row = ()
    for i in tl.static_range(block_count(BLOCK_N, TAIL_N)):
        if block_width(i, BLOCK_N, TAIL_N) >= SPAN:
            b_row += (tl.zeros([block_width(i, BLOCK_N, TAIL_N)], tl.float32),)
        else:
            b_row += (tl.zeros([ROWS, block_width(i, BLOCK_N, TAIL_N)], tl.float32),)
    return b_row


@triton.jit
def add_rows(b_row, b_other):
    b_sum = ()
    for i in tl.static_range(len(b_row)):
        b_sum += (b_row[i] + (tl.sum(b_other[i], 0) if len(b_row[i].shape) == 1 else b_other[i]),)
    return b_sum


@triton.jit
def product(b_row, b_other):
    """row · other, block by block."""
    b_product = ()
    for i in tl.static_range(len(b_row)):
        b_product += (b_row[i] * b_other[i],)
    return b_product


@triton.jit
def add_product(b_row, b_factor, b_other):
    b_sum = ()
    for i in tl.static_range(len(b_row)):
        b = b_factor[i] * b_other[i]
        b_sum += (b_row[i] + (tl.sum(b, 0) if len(b_row[i].shape) == 1 else b),)
    return b_sum


@triton.jit
def store_partial(p, b_row, first_col, N, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, VECTOR: tl.constexpr):
    """Stores the sum over the rows of a tile."""
    for i in tl.static_range(block_count(BLOCK_N, TAIL_N)):
        cols = block_cols(i, first_col, BLOCK_N, TAIL_N, VECTOR)
        b = b_row[i] if len(b_row[i].shape) == 1 else tl.sum(b_row[i], 0)
        tl.store(p + cols, b, mask=cols < N)


@triton.jit
def accumulate(p, b, first_col, N, first):
    """Adds the sum over the rows of a tile to a partial sum in memory, or starts it where there is none yet."""
    cols = first_col + tl.arange(0, b.shape[1])
    b_earlier = tl.load(p + cols, mask=(cols < N) & (first == 0), other=0.0)
    tl.store(p + cols, b_earlier + tl.sum(b, 0), mask=cols < N)


@triton.jit(do_not_specialize=["PARTIALS"])
def finish_weight_gradients_kernel(
    p_partial, p_out, PARTIALS, WIDTH, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out [WIDTH] = the sum over rows of partial [PARTIALS, WIDTH], in a fixed order."""
    if PDL:
        gdc_wait()  # for all programs of backward; this kernel lets nobody begin early, so what follows it comes after both
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_sum = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for first in tl.range(0, PARTIALS, BLOCK_P):
        rows = first + tl.arange(0, BLOCK_P)
        m = (rows < PARTIALS)[:, None] & (cols < WIDTH)[None, :]
        b_sum += tl.load(p_partial + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :], mask=m, other=0.0)
    tl.store(p_out + cols, tl.sum(b_sum, 0), mask=cols < WIDTH)
