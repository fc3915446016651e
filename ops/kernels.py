"""The Triton kernels of the norm: one forward, one backward, and the small sum that finishes the weight gradients.

Variants are constexpr flags and absent pointers: `None` is constexpr, so `if p_x1 is not None` costs nothing at run time.
Names: `p_` pointer, `b_` block in registers, `m_` mask, `ROWS` × `BLOCK_N` tile; LOOPED rows are wider than a tile.
All arithmetic is fp32.
"""

import triton
import triton.language as tl

from .dropout_kernels import keep_block


# A new batch size or dropout probability must not compile anything; nor must the next seed of a vector, every other of
# which lies on a 16-byte boundary.
@triton.jit(do_not_specialize=["M", "threshold"], do_not_specialize_on_alignment=["p_seed"])
def norm_forward_kernel(
    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_weight, p_bias, p_weight1, p_bias1, p_seed,
    p_y, p_y1, p_r, p_stats, p_mask, p_mask1,
    M, N, stride_x, stride_x1, stride_residual, stride_y, stride_y1, stride_r,
    eps, threshold, scale,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, LOOPED: tl.constexpr, EVEN_N: tl.constexpr,
    RESIDUAL_DTYPE: tl.constexpr, IS_RMS: tl.constexpr, DROPOUT: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """ROWS rows of

        z = dropout(x · rowscale) + dropout(x1 · rowscale1) + residual;   r = round(z)
        x̂ = (r − mean(r)) · rstd(r)  or  r · rstd(r);   y = x̂ · weight + bias;   y1 = x̂ · weight1 + bias1

    p_stats: fp32 [1, M] rstd for RMSNorm, [2, M] rstd and mean for LayerNorm.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = rows < M
    b_mean = tl.zeros([ROWS], tl.float32)

    if not LOOPED:
        cols = tl.arange(0, BLOCK_N)
        m = tile_mask(m_row, cols, N, EVEN_N)
        b_r = load_sum(
            p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_seed, p_mask, p_mask1, rows, cols, 0, m_row, m,
            N, stride_x, stride_x1, stride_residual, threshold, scale, BLOCK_N, RESIDUAL_DTYPE, DROPOUT,
        )  # fmt: skip
        if p_r is not None:
            tl.store(p_r + rows[:, None] * stride_r + cols[None, :], b_r, mask=m)
        b_centred = b_r
        if not IS_RMS:
            b_mean = tl.sum(b_r, 1) / N
            b_centred = b_r - b_mean[:, None]
            if not EVEN_N:
                b_centred = tl.where(m, b_centred, 0.0)
        b_rstd = tl.rsqrt(tl.sum(b_centred * b_centred, 1) / N + eps)
        store_affine(p_y, p_weight, p_bias, b_centred * b_rstd[:, None], rows, cols, m, N, stride_y, EVEN_N, ZERO_CENTERED)
        if p_y1 is not None:
            store_affine(
                p_y1, p_weight1, p_bias1, b_centred * b_rstd[:, None], rows, cols, m, N, stride_y1, EVEN_N, ZERO_CENTERED
            )
    else:
        # Two passes over the inputs. Nothing is written before the second, so residual_out may be the residual's own buffer.
        b_m2 = tl.zeros([ROWS], tl.float32)  # Σ (r − mean)²; for RMSNorm Σ r²
        for first_col in tl.range(0, N, BLOCK_N, num_stages=1):
            cols = first_col + tl.arange(0, BLOCK_N)
            m = tile_mask(m_row, cols, N, False)
            b_r = load_sum(
                p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_seed, None, None, rows, cols, first_col, m_row, m,
                N, stride_x, stride_x1, stride_residual, threshold, scale, BLOCK_N, RESIDUAL_DTYPE, DROPOUT,
            )  # fmt: skip
            if IS_RMS:
                b_m2 += tl.sum(b_r * b_r, 1)
            else:
                # Chan, Golub & LeVeque 1979: the moments of two sets together, without cancellation.
                count = tl.minimum(BLOCK_N, N - first_col).to(tl.float32)
                share = count / (first_col + count)
                b_block_mean = tl.sum(b_r, 1) / count
                b_centred = tl.where(m, b_r - b_block_mean[:, None], 0.0)
                b_delta = b_block_mean - b_mean
                b_m2 += tl.sum(b_centred * b_centred, 1) + b_delta * b_delta * (first_col * share)
                b_mean += b_delta * share
        b_rstd = tl.rsqrt(b_m2 / N + eps)
        for first_col in tl.range(0, N, BLOCK_N, num_stages=1):
            cols = first_col + tl.arange(0, BLOCK_N)
            m = tile_mask(m_row, cols, N, False)
            b_r = load_sum(
                p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_seed, p_mask, p_mask1, rows, cols, first_col, m_row, m,
                N, stride_x, stride_x1, stride_residual, threshold, scale, BLOCK_N, RESIDUAL_DTYPE, DROPOUT,
            )  # fmt: skip
            if p_r is not None:
                tl.store(p_r + rows[:, None] * stride_r + cols[None, :], b_r, mask=m)
            b_xhat = (b_r - b_mean[:, None]) * b_rstd[:, None]
            store_affine(p_y, p_weight, p_bias, b_xhat, rows, cols, m, N, stride_y, False, ZERO_CENTERED)
            if p_y1 is not None:
                store_affine(p_y1, p_weight1, p_bias1, b_xhat, rows, cols, m, N, stride_y1, False, ZERO_CENTERED)

    if p_stats is not None:
        tl.store(p_stats + rows, b_rstd, mask=m_row)
        if not IS_RMS:
            tl.store(p_stats + M + rows, b_mean, mask=m_row)


@triton.jit(do_not_specialize=["M", "tiles", "threshold"], do_not_specialize_on_alignment=["p_seed"])
def norm_backward_kernel(
    p_dy, p_dy1, p_dr, p_r, p_x, p_x1, p_weight, p_weight1, p_rowscale, p_rowscale1, p_stats, p_seed,
    p_dz, p_dx, p_dx1, p_drowscale, p_drowscale1, p_dweight, p_dbias, p_dweight1, p_dbias1,
    M, N, tiles, stride_dy, stride_dy1, stride_dr, stride_r, stride_x, stride_x1, stride_partial,
    threshold, scale,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, LOOPED: tl.constexpr, EVEN_N: tl.constexpr, STAGES: tl.constexpr,
    IS_RMS: tl.constexpr, DROPOUT: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """Persistent programs, each striding over tiles of ROWS rows. With g = dy · weight + dy1 · weight1:

        dz      = rstd · (g − x̂ · mean(g · x̂) − mean(g)) + dr           the last mean for LayerNorm only
        dx      = dropout(dz) · rowscale;   drowscale = Σ_cols dropout(dz) · x          likewise dx1, drowscale1
        dweight = Σ_rows dy · x̂;            dbias     = Σ_rows dy                       likewise dweight1, dbias1

    p_dz serves every input whose gradient is dz itself. The weight gradients are fp32 [programs, N], a partial sum each,
    rows stride_partial apart: finish_weight_gradients_kernel adds them up in a fixed order.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    # Where only the residual stream has a gradient, the norm has no part in it.
    UPSTREAM: tl.constexpr = (p_dy is not None) or (p_dy1 is not None)

    if not LOOPED:
        cols = tl.arange(0, BLOCK_N)
        b_weight = load_weight(p_weight, cols, N, EVEN_N, ZERO_CENTERED)
        b_weight1 = load_weight(p_weight1, cols, N, EVEN_N, ZERO_CENTERED)
        b_dweight = tl.zeros([ROWS, BLOCK_N], tl.float32)
        b_dbias = tl.zeros([ROWS, BLOCK_N], tl.float32)
        b_dweight1 = tl.zeros([ROWS, BLOCK_N], tl.float32)
        b_dbias1 = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for tile in tl.range(pid, tiles, programs, num_stages=STAGES):
            rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
            m_row = rows < M
            m = tile_mask(m_row, cols, N, EVEN_N)
            b_dz = load_tile(p_dr, rows, cols, m, stride_dr)
            if UPSTREAM:
                b_r = load_tile(p_r, rows, cols, m, stride_r)
                b_dy = load_tile(p_dy, rows, cols, m, stride_dy)
                b_dy1 = load_tile(p_dy1, rows, cols, m, stride_dy1)
                b_rstd, b_mean = load_stats(p_stats, rows, m_row, M, IS_RMS)
                b_xhat = normalise(b_r, b_mean, b_rstd, m, EVEN_N, IS_RMS)
                if p_dweight is not None:
                    b_dweight += b_dy * b_xhat
                if p_dbias is not None:
                    b_dbias += b_dy
                if p_dweight1 is not None:
                    b_dweight1 += b_dy1 * b_xhat
                if p_dbias1 is not None:
                    b_dbias1 += b_dy1
                b_g = weighted_sum(b_dy, b_weight, b_dy1, b_weight1, p_dy, p_dy1)
                b_c1 = tl.sum(b_g * b_xhat, 1) / N
                b_c2 = tl.zeros([ROWS], tl.float32)
                if not IS_RMS:
                    b_c2 = tl.sum(b_g, 1) / N
                b_dz += (b_g - b_xhat * b_c1[:, None] - b_c2[:, None]) * b_rstd[:, None]
            b_ds, b_ds1 = store_input_gradients(
                p_dz, p_dx, p_dx1, p_drowscale, p_drowscale1, p_x, p_x1, p_rowscale, p_rowscale1, p_seed, b_dz,
                rows, cols, 0, m_row, m, N, stride_x, stride_x1, threshold, scale, ROWS, BLOCK_N, DROPOUT,
            )  # fmt: skip
            store_rowscale_gradients(p_drowscale, p_drowscale1, b_ds, b_ds1, rows, m_row)
        m_col = cols < N
        partial = pid.to(tl.int64) * stride_partial + cols
        if p_dweight is not None:
            tl.store(p_dweight + partial, tl.sum(b_dweight, 0), mask=m_col)
        if p_dbias is not None:
            tl.store(p_dbias + partial, tl.sum(b_dbias, 0), mask=m_col)
        if p_dweight1 is not None:
            tl.store(p_dweight1 + partial, tl.sum(b_dweight1, 0), mask=m_col)
        if p_dbias1 is not None:
            tl.store(p_dbias1 + partial, tl.sum(b_dbias1, 0), mask=m_col)
    else:
        for tile in tl.range(pid, tiles, programs, num_stages=1):
            rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
            m_row = rows < M
            b_c1 = tl.zeros([ROWS], tl.float32)
            b_c2 = tl.zeros([ROWS], tl.float32)
            if UPSTREAM:
                b_rstd, b_mean = load_stats(p_stats, rows, m_row, M, IS_RMS)
                for first_col in tl.range(0, N, BLOCK_N, num_stages=1):
                    cols = first_col + tl.arange(0, BLOCK_N)
                    m = tile_mask(m_row, cols, N, False)
                    b_xhat = normalise(load_tile(p_r, rows, cols, m, stride_r), b_mean, b_rstd, m, False, IS_RMS)
                    b_weight = load_weight(p_weight, cols, N, False, ZERO_CENTERED)
                    b_weight1 = load_weight(p_weight1, cols, N, False, ZERO_CENTERED)
                    b_dy = load_tile(p_dy, rows, cols, m, stride_dy)
                    b_dy1 = load_tile(p_dy1, rows, cols, m, stride_dy1)
                    b_g = weighted_sum(b_dy, b_weight, b_dy1, b_weight1, p_dy, p_dy1)
                    b_c1 += tl.sum(b_g * b_xhat, 1) / N
                    if not IS_RMS:
                        b_c2 += tl.sum(b_g, 1) / N
            b_ds = tl.zeros([ROWS], tl.float32)
            b_ds1 = tl.zeros([ROWS], tl.float32)
            for first_col in tl.range(0, N, BLOCK_N, num_stages=1):
                cols = first_col + tl.arange(0, BLOCK_N)
                m = tile_mask(m_row, cols, N, False)
                b_dz = load_tile(p_dr, rows, cols, m, stride_dr)
                if UPSTREAM:
                    b_xhat = normalise(load_tile(p_r, rows, cols, m, stride_r), b_mean, b_rstd, m, False, IS_RMS)
                    b_weight = load_weight(p_weight, cols, N, False, ZERO_CENTERED)
                    b_weight1 = load_weight(p_weight1, cols, N, False, ZERO_CENTERED)
                    b_dy = load_tile(p_dy, rows, cols, m, stride_dy)
                    b_dy1 = load_tile(p_dy1, rows, cols, m, stride_dy1)
                    partial = pid.to(tl.int64) * stride_partial + cols
                    m_earlier = (cols < N) & (tile != pid)  # this program's first row finds nothing to add to
                    if p_dweight is not None:
                        accumulate(p_dweight + partial, tl.sum(b_dy * b_xhat, 0), cols < N, m_earlier)
                    if p_dbias is not None:
                        accumulate(p_dbias + partial, tl.sum(b_dy, 0), cols < N, m_earlier)
                    if p_dweight1 is not None:
                        accumulate(p_dweight1 + partial, tl.sum(b_dy1 * b_xhat, 0), cols < N, m_earlier)
                    if p_dbias1 is not None:
                        accumulate(p_dbias1 + partial, tl.sum(b_dy1, 0), cols < N, m_earlier)
                    b_g = weighted_sum(b_dy, b_weight, b_dy1, b_weight1, p_dy, p_dy1)
                    b_dz += (b_g - b_xhat * b_c1[:, None] - b_c2[:, None]) * b_rstd[:, None]
                b_block_ds, b_block_ds1 = store_input_gradients(
                    p_dz, p_dx, p_dx1, p_drowscale, p_drowscale1, p_x, p_x1, p_rowscale, p_rowscale1, p_seed, b_dz,
                    rows, cols, first_col, m_row, m, N, stride_x, stride_x1, threshold, scale, ROWS, BLOCK_N, DROPOUT,
                )  # fmt: skip
                b_ds += b_block_ds
                b_ds1 += b_block_ds1
            store_rowscale_gradients(p_drowscale, p_drowscale1, b_ds, b_ds1, rows, m_row)
            # A partial sum may be read back by another thread than wrote it.
            tl.debug_barrier()


@triton.jit(do_not_specialize=["PARTIALS"])
def finish_weight_gradients_kernel(
    p_partial, p_out, PARTIALS, WIDTH, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """out [WIDTH] = the sum over rows of partial [PARTIALS, WIDTH], in a fixed order."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_sum = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for first in tl.range(0, PARTIALS, BLOCK_P):
        rows = first + tl.arange(0, BLOCK_P)
        m = (rows < PARTIALS)[:, None] & (cols < WIDTH)[None, :]
        b_sum += tl.load(p_partial + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :], mask=m, other=0.0)
    tl.store(p_out + cols, tl.sum(b_sum, 0), mask=cols < WIDTH)


@triton.jit
def tile_mask(m_row, cols, N, EVEN_N: tl.constexpr):
    """int1 [ROWS, 1] where the tile is as wide as the row, else [ROWS, BLOCK_N]."""
    if EVEN_N:
        m = m_row[:, None]
    else:
        m = m_row[:, None] & (cols < N)[None, :]
    return m


@triton.jit
def load_tile(p, rows, cols, m, stride):
    """fp32 [ROWS, BLOCK_N]; zero where masked, and everywhere if there is nothing to load."""
    if p is not None:
        b = tl.load(p + rows[:, None] * stride + cols[None, :], mask=m, other=0.0).to(tl.float32)
    else:
        b = tl.zeros([rows.shape[0], cols.shape[0]], tl.float32)
    return b


@triton.jit
def load_weight(p_weight, cols, N, EVEN_N: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """fp32 [BLOCK_N]: weight + offset; an absent weight is 1."""
    if p_weight is not None:
        if EVEN_N:
            b = tl.load(p_weight + cols).to(tl.float32)
        else:
            b = tl.load(p_weight + cols, mask=cols < N, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            b += 1.0
    else:
        b = tl.full([cols.shape[0]], 1.0, tl.float32)
    return b


@triton.jit
def load_stats(p_stats, rows, m_row, M, IS_RMS: tl.constexpr):
    """rstd and mean, fp32 [ROWS]; the mean is 0 for RMSNorm."""
    b_rstd = tl.load(p_stats + rows, mask=m_row, other=0.0)
    if IS_RMS:
        b_mean = tl.zeros([rows.shape[0]], tl.float32)
    else:
        b_mean = tl.load(p_stats + M + rows, mask=m_row, other=0.0)
    return b_rstd, b_mean


@triton.jit
def normalise(b_r, b_mean, b_rstd, m, EVEN_N: tl.constexpr, IS_RMS: tl.constexpr):
    """x̂ = (r − mean) · rstd, zero in the columns past the row's end."""
    b_xhat = (b_r - b_mean[:, None]) * b_rstd[:, None]
    if not EVEN_N and not IS_RMS:
        b_xhat = tl.where(m, b_xhat, 0.0)  # a mean that overflows there would make 0 · ∞ in the sums over columns
    return b_xhat


@triton.jit
def load_sum(
    p_x, p_x1, p_residual, p_rowscale, p_rowscale1, p_seed, p_mask, p_mask1, rows, cols, first_col, m_row, m,
    N, stride_x, stride_x1, stride_residual, threshold, scale,
    BLOCK_N: tl.constexpr, RESIDUAL_DTYPE: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS, BLOCK_N]: dropout(x · rowscale) + dropout(x1 · rowscale1) + residual as the residual dtype rounds it."""
    # All loads are issued before the first use.
    b_z = load_tile(p_x, rows, cols, m, stride_x)
    if p_x1 is not None:
        b_z1 = load_tile(p_x1, rows, cols, m, stride_x1)
    if p_residual is not None:
        b_residual = load_tile(p_residual, rows, cols, m, stride_residual)
    b_z = scale_rows(b_z, p_rowscale, rows, m_row)
    if DROPOUT:
        m_keep = keep_block(tl.load(p_seed), rows, first_col, threshold, 0, BLOCK_N)
        b_z = tl.where(m_keep, b_z * scale, 0.0)
        if p_mask is not None:
            tl.store(p_mask + rows[:, None] * N + cols[None, :], m_keep, mask=m)
    if p_x1 is not None:
        b_z1 = scale_rows(b_z1, p_rowscale1, rows, m_row)
        if DROPOUT:
            m_keep1 = keep_block(tl.load(p_seed), rows, first_col, threshold, 1, BLOCK_N)
            b_z1 = tl.where(m_keep1, b_z1 * scale, 0.0)
            if p_mask1 is not None:
                tl.store(p_mask1 + rows[:, None] * N + cols[None, :], m_keep1, mask=m)
        b_z += b_z1
    if p_residual is not None:
        b_z += b_residual
    # Normalise the rounded value: backward and whoever reads the residual stream will see only that.
    return b_z.to(RESIDUAL_DTYPE).to(tl.float32)


@triton.jit
def scale_rows(b, p_rowscale, rows, m_row):
    if p_rowscale is not None:
        b = b * tl.load(p_rowscale + rows, mask=m_row, other=0.0).to(tl.float32)[:, None]
    return b


@triton.jit
def store_affine(
    p_y, p_weight, p_bias, b_xhat, rows, cols, m, N, stride_y, EVEN_N: tl.constexpr, ZERO_CENTERED: tl.constexpr
):  # fmt: skip
    """y = x̂ · (weight + offset) + bias."""
    b_y = b_xhat
    if p_weight is not None:
        b_y = b_y * load_weight(p_weight, cols, N, EVEN_N, ZERO_CENTERED)[None, :]
    if p_bias is not None:
        b_y = b_y + load_weight(p_bias, cols, N, EVEN_N, False)[None, :]
    tl.store(p_y + rows[:, None] * stride_y + cols[None, :], b_y, mask=m)


@triton.jit
def weighted_sum(b_dy, b_weight, b_dy1, b_weight1, p_dy, p_dy1):
    """g = dy · weight + dy1 · weight1; the pointers say which of them are there, at least one."""
    if p_dy is not None:
        b_g = b_dy * b_weight[None, :]
        if p_dy1 is not None:
            b_g += b_dy1 * b_weight1[None, :]
    else:
        b_g = b_dy1 * b_weight1[None, :]
    return b_g


@triton.jit
def store_input_gradients(
    p_dz, p_dx, p_dx1, p_drowscale, p_drowscale1, p_x, p_x1, p_rowscale, p_rowscale1, p_seed, b_dz,
    rows, cols, first_col, m_row, m, N, stride_x, stride_x1, threshold, scale,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Stores dz, dx, dx1 where they are wanted; returns these columns' share of drowscale and drowscale1, fp32 [ROWS]."""
    out = rows[:, None] * N + cols[None, :]
    if p_dz is not None:
        tl.store(p_dz + out, b_dz, mask=m)
    b_ds = tl.zeros([ROWS], tl.float32)
    if (p_dx is not None) or (p_drowscale is not None):
        b_dx = b_dz
        if DROPOUT:
            b_dx = tl.where(keep_block(tl.load(p_seed), rows, first_col, threshold, 0, BLOCK_N), b_dx * scale, 0.0)
        if p_drowscale is not None:
            b_ds = tl.sum(b_dx * load_tile(p_x, rows, cols, m, stride_x), 1)
        if p_dx is not None:
            tl.store(p_dx + out, scale_rows(b_dx, p_rowscale, rows, m_row), mask=m)
    b_ds1 = tl.zeros([ROWS], tl.float32)
    if (p_dx1 is not None) or (p_drowscale1 is not None):
        b_dx1 = b_dz
        if DROPOUT:
            b_dx1 = tl.where(keep_block(tl.load(p_seed), rows, first_col, threshold, 1, BLOCK_N), b_dx1 * scale, 0.0)
        if p_drowscale1 is not None:
            b_ds1 = tl.sum(b_dx1 * load_tile(p_x1, rows, cols, m, stride_x1), 1)
        if p_dx1 is not None:
            tl.store(p_dx1 + out, scale_rows(b_dx1, p_rowscale1, rows, m_row), mask=m)
    return b_ds, b_ds1


@triton.jit
def store_rowscale_gradients(p_drowscale, p_drowscale1, b_ds, b_ds1, rows, m_row):
    if p_drowscale is not None:
        tl.store(p_drowscale + rows, b_ds, mask=m_row)
    if p_drowscale1 is not None:
        tl.store(p_drowscale1 + rows, b_ds1, mask=m_row)


@triton.jit
def accumulate(p, b, m, m_earlier):
    """Adds to a partial sum in memory, or starts it where nothing was written earlier."""
    tl.store(p, tl.load(p, mask=m_earlier, other=0.0) + b, mask=m)
