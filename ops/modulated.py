"""Norms that are modulated per sample (adaLN, adaLN-zero): gated add → norm → scale and shift, in one kernel each way."""

from collections import namedtuple
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import checks, kit
from .norm import bytes_of, empty_as, of_tile, vector_of
from .reference import NORMS, Norm
from .tiling import WHOLE_BACKWARD, Tile, Work, forward_tile, most_registers, sample_backward_tile


def modulated_norm_fn(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    is_rms_norm: bool = False,
    prenorm: bool = False,
    out_dtype: torch.dtype | None = None,
    zero_centered_scale: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """The site of DiT and other conditioned models (adaLN-zero, arXiv:2212.09748).

        r = residual + gate ⊙ x                                          in fp32, rounded to the stream's dtype
        y = (N(r) · weight + bias) ⊙ (1 + scale) + shift                 N: LayerNorm or RMSNorm

    Gradients of scale, shift, gate, weight and bias are summed up in fp32 and in a fixed order.

    Args:
        x: (..., N), bf16, fp16 or fp32 in any mix with the others; fp64 too where PyTorch's operations run. The output of
            attention or an MLP, or without residual and gate the stream itself. N is at most 8192 on kernels.
        scale, shift, gate: one row of N numbers a sample: (B, N) for x (B, tokens, N). In general some leading dimensions of x
            and then N, with or without ones between: (B, 1, N), (N,). Those of `projection.chunk(6, -1)` are read where they
            lie. None is 0, 0 and 1.
        residual: shape of x; the residual stream so far, in its own dtype.
        weight, bias: (N,), of the norm; None is 1 and 0.
        eps: added to the variance or the mean square.
        is_rms_norm: compute RMSNorm.
        prenorm: also return r, in the residual's dtype or x's. On kernels and without residual and gate it is x, or an alias of
            x if gradients are recorded: the gradients of y and r then meet in one kernel.
        out_dtype: of y; by default x's dtype.
        zero_centered_scale: 1 is added to scale. Without it scale is the whole factor.

    Returns:
        y, or (y, r).

    Raises:
        ValueError, TypeError: a shape, dtype, device or number that is not as above; before anything is launched.
    """
    request = (eps, is_rms_norm, prenorm, out_dtype, zero_centered_scale)
    y, r, *_ = modulated_norm.checked(_check, reference, (x, residual, scale, shift, gate, weight, bias), request)
    return (y, x if r is None else r) if prenorm else y


def gated_sum(x: Tensor, residual: Tensor, gate: Tensor) -> Tensor:
    """r of `modulated_norm_fn` alone, one kernel each way; its arguments and errors."""
    request = (0.0, False, True, None, True, False)
    return modulated_norm.checked(_check, reference, (x, residual, None, None, gate, None, None), request)[1]


class ModulatedNorm(nn.Module):
    """`modulated_norm_fn` with a norm's parameters, named as torch.nn.LayerNorm's.

    Args:
        hidden_size: N.
        eps, is_rms_norm: as there.
        elementwise_affine: whether there is a weight, and for LayerNorm a bias; DiT has none.
        device, dtype: of these.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, is_rms_norm: bool = False, elementwise_affine: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden_size = checks.as_size("ModulatedNorm", "hidden_size", hidden_size, 1)
        self.eps, self.is_rms_norm = checks.as_eps("ModulatedNorm", eps), is_rms_norm
        ones = torch.ones(self.hidden_size, device=device, dtype=dtype)
        self.weight = nn.Parameter(ones) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros_like(ones)) if elementwise_affine and not is_rms_norm else None

    def forward(
        self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, residual: Tensor | None = None,
        gate: Tensor | None = None, prenorm: bool = False, out_dtype: torch.dtype | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        return modulated_norm_fn(
            x, scale, shift, residual, gate, self.weight, self.bias,
            eps=self.eps, is_rms_norm=self.is_rms_norm, prenorm=prenorm, out_dtype=out_dtype,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, is_rms_norm={self.is_rms_norm}, affine={self.weight is not None}"


def _check(
    inputs: tuple, eps: Any, is_rms_norm: Any, prenorm: Any, out_dtype: Any, zero_centered_scale: Any, has_y: bool = True
) -> tuple[tuple, "Options", bool]:
    """The inputs, of which scale, shift and gate have x's dimensions and one shape, unless they had one but for ones; options;
    whether kernels run. has_y: else r alone is computed."""
    name, (x, residual, *vectors, weight, bias) = "modulated_norm_fn", inputs
    kernels, dtypes = checks.check_input(name, x, takes_fp64=True)
    N = x.shape[-1]
    checks.check_operands(name, x, dtypes, (x.shape,), checks.SHAPE_OF_X, residual=residual)
    checks.check_operands(name, x, dtypes, (x.shape[-1:],), checks.LAST_OF_X, weight=weight, bias=bias)
    expected = [(*x.shape[:leading], *[1] * (x.dim() - 1 - leading), N) for leading in range(x.dim())]
    found = []  # which of these each vector has
    for argument, t in zip(MODULATION, vectors, strict=True):
        if t is not None:
            checks.check_operand(name, argument, t, x, dtypes)
            shape = (*t.shape[:-1], *[1] * (x.dim() - t.dim()), *t.shape[-1:])
            fits = [leading for leading, accepted in enumerate(expected) if shape == accepted]
            if t.dim() == 0 or not fits:
                raise ValueError(
                    f"{name}: {argument} has shape {tuple(t.shape)}, expected the first dimensions of x {tuple(x.shape)}, "
                    "those that count samples, and its last"
                )
            found.append(fits[0])
    out_dtype = checks.as_out_dtype(name, out_dtype, x, dtypes)
    if kernels and N > MOST_COLUMNS:
        raise ValueError(f"{name}: x has rows of {N}, expected at most {MOST_COLUMNS} where kernels run")
    flags = checks.as_flags(name, is_rms_norm=is_rms_norm, prenorm=prenorm, zero_centered_scale=zero_centered_scale)
    norm = Norm.none if not has_y else Norm.rmsnorm if flags["is_rms_norm"] else Norm.layernorm
    # Else it is x. torch.compile loses the gradient of a view of x that an operator gives, if a view of that leaves its graph.
    as_view = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    returns_r = flags["prenorm"] and (residual is not None or vectors[2] is not None or as_view)
    o = Options(checks.as_eps(name, eps), norm, out_dtype, returns_r, float(flags["zero_centered_scale"]))
    if not kernels or len({*found}) > 1:
        own, most = iter(found), expected[max([0, *found])]
        vectors = [t if t is None else t.reshape(expected[next(own)]).expand(most) for t in vectors]
        inputs = x, residual, *vectors, weight, bias
    return inputs, o, kernels


# ---- operator ----------------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    x: Tensor  # (..., N)
    residual: Tensor | None  # shape of x
    scale: Tensor | None  # (..., N), a row for each sample, as are shift and gate
    shift: Tensor | None
    gate: Tensor | None
    weight: Tensor | None  # [N]
    bias: Tensor | None


class Options(NamedTuple):
    eps: float
    norm: Norm
    out_dtype: torch.dtype
    prenorm: bool
    scale_offset: float
    trains: bool = False  # of a forward that has a backward


class Outputs(NamedTuple):
    y: Tensor | None  # None of a gated sum alone
    r: Tensor | None = None
    stats: Tensor | None = None  # fp32: rstd of each row, and the mean if the norm centres


def reference(i: Any, o: Options) -> Outputs:
    """The same in PyTorch's own operations, in fp32, or in fp64 where one is fp64. i: as `_check` returns them."""
    wide = torch.float64 if any(t is not None and t.dtype == torch.float64 for t in i) else torch.float32
    x, residual, scale, shift, gate, weight, bias = (t if t is None else t.to(wide) for t in i)
    r: Any = x if gate is None else gate * x
    r = (r if residual is None else residual + r).to(_stream(i))
    if o.norm is Norm.none:
        return Outputs(None, r)
    y = NORMS[o.norm](r.to(wide), weight, bias, o.eps)
    y = y if scale is None else y * (o.scale_offset + scale)
    return Outputs((y if shift is None else y + shift).to(o.out_dtype), r)


class FusedModulatedNorm(kit.Op):
    name, Inputs, Options, Outputs = "modulated_norm", Inputs, Options, Outputs
    # x is there where dgate may be wanted.
    Backward = namedtuple("Backward", "dy dr x r stats scale shift gate weight bias")

    def written(self, given, o):
        has_y, stores_r = o.norm is not Norm.none, _adds(given) and (o.prenorm or o.trains)
        return [*["y"] * has_y, *["r"] * stores_r, *["stats"] * (has_y and o.trains)]

    def asked(self, given, o):
        return [*["y"] * (o.norm is not Norm.none), *["r"] * o.prenorm]

    def view(self, given, o):
        return (lambda i, outputs: (outputs[0], i[0].detach(), outputs[2])) if o.prenorm and not _adds(given) else None

    def outputs(self, i, o):
        x, residual, _, _, gate, _, _ = i
        stores_r = (residual is not None or gate is not None) and (o.prenorm or o.trains)
        stats = o.norm.statistics if o.trains else 0
        return Outputs(
            empty_as(x, o.out_dtype) if o.norm is not Norm.none else None,
            empty_as(x, _stream(i)) if stores_r else None,
            x.new_empty(x.numel() // x.shape[-1] * stats, dtype=torch.float32) if stats else None,
        )

    def training(self, of, o, needs):
        return o._replace(trains=True)

    def kept(self, of, o, needs):
        r, needs_gate = "x" if of.residual is None and of.gate is None else "r", needs[4]
        return super().kept(of, o, needs) | {"r": None if o.norm is Norm.none else r, "x": "x" if needs_gate else None}

    def wanted(self, of, o, needs, given):
        if "dy" not in given:  # r alone was used
            needs = (*needs[:2], False, False, needs[4], False, False)
        wanted, sources = super().wanted(of, o, needs, given)
        if of.gate is None and wanted.dx is not None and wanted.dx == wanted.dresidual:  # one gradient
            wanted, sources["x"] = wanted._replace(dx=None), "dresidual"
        return wanted, sources

    def gradients(self, b, o, wanted):
        like = (_stream_of(b), _stream_of(b), *b[-5:])
        return self.Gradients._make([d and empty_as(t, d) for t, d in zip(like, wanted, strict=True)])

    def start(self, i, o):
        kernels, facts, N = kit.kernels("modulated"), kit.device_facts(i.x.device), i.x.shape[-1]
        rows, vectors = i[:2], kit.present(i[2:])
        work = Work(vector_of(*rows, o.out_dtype), bytes_of(*rows), len(vectors), bytes_of(*vectors))
        tile = forward_tile(N, work, facts)
        if tile.rows == 2:  # four share what is read of their sample
            tile = replace(tile, rows=4, warps=2 * tile.warps, prefetch_programs=max(1, tile.prefetch_programs // 2))
        start, variant = _launches(i.x.device, o, N, work, tile, STREAM_DTYPE=kit.triton_dtype(_stream(i)))
        launch = start(kernels.modulated_forward_kernel, kernels.Pointers, num_warps=tile.warps)

        def run(i):
            x, residual, *modulation, weight, bias = i
            modulation, samples, steps = _rows(modulation)
            M = x.numel() // N
            tokens = M // max(1, samples)
            tiles = -(-tokens // tile.rows)
            outputs = self.outputs(i, o)
            tensors = (x, residual, *modulation, weight, bias, *outputs)
            launch(samples * tiles, tensors, M, tokens, tiles, tile.prefetch_programs, o.eps, *steps, variant)
            return outputs

        return run

    def start_backward(self, b, o, wanted):
        kernels, facts, N = kit.kernels("modulated"), kit.device_facts(_stream_of(b).device), _stream_of(b).shape[-1]
        sums = (
            bool(wanted.dscale or wanted.dweight),
            bool(wanted.dshift or wanted.dbias or (wanted.dscale and b.bias is not None)),
            bool(wanted.dgate),
        )
        rows, written = (b.dy, b.dr, b.x if wanted.dgate else None, b.r), wanted[:2]
        work = Work(vector_of(*rows, *written), bytes_of(*rows), sum(sums), written_bytes=bytes_of(*written))
        tile = sample_backward_tile(N, work, facts)
        start, variant = _launches(_stream_of(b).device, o, N, work, tile, STREAM_DTYPE=None, WANTED=sums)
        launch = start(
            kernels.modulated_backward_kernel, kernels.BackwardPointers, num_warps=tile.warps, maxnreg=most_registers(tile)
        )
        finish = [start(kernels.finish_modulated_kernel, kernels.FinishPointers, num_warps=4) for _ in FINISH]
        most_programs = facts.multiprocessors * tile.programs_per_sm

        def run(b):
            dy, dr, x, r, stats, *vectors, weight, bias = b
            stream = _stream_of(b)
            M = stream.numel() // N
            if M == 0:
                return kit.zeroed(self.gradients(b, o, wanted))
            found = [d and empty_as(t, d) for t, d in zip((stream, stream, *vectors), wanted[:-2], strict=True)]
            (scale, _, gate), samples, (scale_steps, _, gate_steps) = _rows(vectors)
            tokens = M // samples
            tiles = -(-tokens // tile.rows)
            each = -(-samples * tiles // most_programs)
            programs = -(-samples * tiles // each)
            partials = stream.new_empty((programs + samples - 1, sum(sums), N), dtype=torch.float32) if any(sums) else None
            x = x if wanted.dgate else None
            tensors = (dy, dr, x, r, stats, scale, gate, weight, *found[:2], partials)
            launch(programs, tensors, M, tokens, tiles, each, samples * tiles, scale_steps, gate_steps, variant)
            if partials is None:
                return (*found, None, None)
            of_samples = [d and stream.new_empty((samples, N), dtype=torch.float32) for d in wanted[-2:]]
            tensors = (partials, scale, weight, bias, *found[2:], *of_samples)
            how = programs > 16 * samples
            block_p, block_n = FINISH[how]
            finish[how](samples * -(-N // block_n), tensors, tiles, each, scale_steps, block_p, block_n, variant)
            totals = [t if t is None else t.sum(0).to(d) for t, d in zip(of_samples, wanted[-2:], strict=True)]
            return (*found, *totals)

        return run


modulated_norm = FusedModulatedNorm()

# ---- launch ------------------------------------------------------------------------------------------------------------------

MOST_COLUMNS = WHOLE_BACKWARD  # of whole rows; none is read twice
FINISH = ((8, 256), (64, 32))  # partial sums and columns at once: where few programs share a sample, and where many do
MODULATION = ("scale", "shift", "gate")


def _launches(device: torch.device, o: Options, N: int, work: Work, tile: Tile, **more: Any) -> tuple[Any, Any]:
    """What makes launchers of kernels, and the variant of the kernels."""
    early = kit.device_facts(device).since_sm_90
    variant = kit.kernels("modulated").ModulatedVariant(
        N, NORM=int(o.norm), BRANCH=False, BRANCH_NORM=int(Norm.none), RESIDUAL_SCALE=1.0, DROPOUT=False, OFFSET=0.0,
        SCALE_OFFSET=o.scale_offset, VECTOR=work.vector, STEP=gcd(8, N), EARLY_START=early, **of_tile(tile), **more,
    )  # fmt: skip
    return partial(kit.Launcher, device=device, strided=MODULATION, early=True), variant


def _rows(vectors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], int, list[int]]:
    """Scale, shift and gate as [samples, N]; how many samples there are; how many steps apart. Copied where columns do not lie
    side by side or samples no whole number of steps apart."""
    found, samples, steps = [*vectors], 1, [0, 0, 0]
    for place, t in enumerate(vectors):
        if t is not None:
            t = t if t.dim() == 2 else checks.as_rows(t)
            step, (distance, column) = gcd(8, t.shape[1]), t.stride()
            if column != 1 or distance % step:
                t = t.contiguous()
            found[place], samples, steps[place] = t, t.shape[0], t.stride(0) // step
    return found, samples, steps


def _adds(given: Collection[str]) -> bool:
    """Whether r is another tensor than x."""
    return "residual" in given or "gate" in given


def _stream_of(b: Sequence[Tensor | None]) -> Any:
    """Of Backward: r, or its gradient where no norm needs r."""
    return b[1] if b[3] is None else b[3]


def _stream(i: Any) -> torch.dtype:
    return i[0].dtype if i[1] is None else i[1].dtype
