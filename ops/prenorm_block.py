"""Prenorm blocks of somebody's model in the form that fuses dropout + add + norm, also across the border of two blocks.

As models are written                          As `fuse_prenorm_block` makes them

    def forward(self, x):                          def forward(self, pending):
        x = x + drop(attn(norm1(x)))                   y, stream = norm1(pending, prenorm=True)    # drop, add, norm: one kernel
        x = x + drop(mlp(norm2(x)))                    pending = Pending(attn(y), stream, p)
        return x                                       y, stream = norm2(pending, prenorm=True)    # drop, add, norm: one kernel
                                                       return Pending(mlp(y), stream, p)

The numbers are the same; the brackets are drawn elsewhere:

    written   │ Norm → Attention → Dropout → Add │ Norm → MLP → Dropout → Add │ Norm → …      │ … one residual branch
    fused     Norm → Attention │ Dropout → Add → Norm │ → MLP │ Dropout → Add → Norm │ → …    │ … one kernel

A block can't add its MLP's output itself, because the kernel that adds it is the next block's first norm. So it hands on both,
the output and the stream, as a Pending; the loop over blocks need not know. The first block gets a tensor, and the final norm,
a replaced one, takes a Pending and gives a tensor.
"""

from typing import Any, cast

from torch import Tensor, nn

from .adopt import AdoptedNorm, Pending, replace_norms
from .modules import LayerNorm, RMSNorm
from .swap import Swapped, swap, unswap
from .wiring import BY_HAND, BlockLayout, Wiring, check_drops_last, parts_of, wiring_of

GPT2_BLOCK = BlockLayout(
    "ln_1", "attn", "ln_2", "mlp", "attn.resid_dropout", "mlp.dropout"
)  # nanoGPT's, and transformers' GPT2Block
LLAMA_BLOCK = BlockLayout("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")  # and Mistral's, Qwen2's, Qwen3's


def fuse_prenorm_block(block: nn.Module, layout: BlockLayout, *, residual_in_fp32: bool = False) -> None:
    """Gives a block, or each of a stack, the (hidden, residual) form, in place. `restore_norms(model)` undoes it.

    Give it the whole stack: that a block is not fused behind one that is shows only when it is called. And `replace_norms` the
    final norm. Norms that are not replaced yet are. Arguments that a block gets beside x go where it hands them: to the mixer.
    How a block is wired is tried out with stand-ins for its parts, in evaluation and in training, so one that scales, clamps,
    drops or norms what it adds, or computes what it gives to its parts, is refused; so is a sublayer whose dropout does not
    come last, if it can be called with x, and None for the rest.

    Args:
        block: of the form that BlockLayout describes; its forward returns a tensor. Its dropouts are modules that nobody
            outside it uses, the embeddings for instance: they drop nothing themselves any more. Or an nn.ModuleList or
            nn.Sequential of such blocks, which are all fused, or none of them.
        layout: GPT2_BLOCK, LLAMA_BLOCK or one of your own.
        residual_in_fp32: keep the stream that begins in this block in fp32 (where x of the first block is no Pending).

    Raises:
        TypeError: block is no module, or layout no BlockLayout.
        ValueError: the block is of another form, has other parts too, or its norms are not ours to replace. It is as it was.
    """
    if not isinstance(block, nn.Module):
        raise TypeError(f"fuse_prenorm_block: block must be a torch.nn.Module, got {type(block).__name__}")
    if not isinstance(layout, BlockLayout):
        raise TypeError(
            f"fuse_prenorm_block: layout must be GPT2_BLOCK, LLAMA_BLOCK or a BlockLayout, got {type(layout).__name__}"
        )
    if type(block) in (nn.ModuleList, nn.Sequential):
        return _fuse_stack(cast(nn.ModuleList, block), layout, residual_in_fp32)
    name = f"fuse_prenorm_block({type(block).__name__})"
    if isinstance(block, FusedBlock):
        raise ValueError(f"{name}: block is fused already; restore_norms undoes it")
    parts = parts_of(name, block, layout)
    wiring = wiring_of(name, block, layout, parts)
    replaced = []
    try:
        for argument in ("norm1", "norm2"):
            sites = replace_norms(parts[argument], verbose=False)
            replaced += [parts[argument] for site in sites if site.fused]
            if isinstance(parts[argument], LayerNorm | RMSNorm) and not isinstance(parts[argument], AdoptedNorm):
                raise ValueError(
                    f"{name}: layout.{argument} is a {type(parts[argument]).__name__} of this package, which takes hidden and "
                    f"residual itself; {BY_HAND}"
                )
            if not isinstance(parts[argument], AdoptedNorm):
                raise ValueError(f"{name}: layout.{argument} can't be replaced: {sites[0].why if sites else 'it is no norm'}")
        width = cast(AdoptedNorm, parts["norm1"]).formula.width
        for argument, sublayer in (("dropout1", "mixer"), ("dropout2", "mlp")):
            if "." in (getattr(layout, argument) or "") and width is not None:
                check_drops_last(name, argument, parts[sublayer], parts[argument], width)
    except BaseException:
        for norm in replaced:
            unswap(cast(Swapped, norm))
        raise
    swap(block, FusedBlock, layout=layout, residual_in_fp32=residual_in_fp32, wiring=wiring)
    for dropout in {parts[argument] for argument in ("dropout1", "dropout2") if argument in parts}:
        swap(dropout, FusedDropout)


def _fuse_stack(stack: nn.ModuleList, layout: BlockLayout, residual_in_fp32: bool) -> None:
    blocks = list(dict.fromkeys(stack))  # one that is there twice is one block
    if not blocks:
        raise ValueError(f"fuse_prenorm_block: {type(stack).__name__} has no blocks")
    before = {module for module in stack.modules() if isinstance(module, Swapped)}
    for i, block in enumerate(blocks):
        try:
            fuse_prenorm_block(block, layout, residual_in_fp32=residual_in_fp32)
        except ValueError as error:
            for module in stack.modules():
                if isinstance(module, Swapped) and module not in before:
                    unswap(module)
            raise ValueError(f"{error}. It is block {i} of {len(blocks)}, of which none is fused now") from error


class FusedBlock(Swapped):
    """A block that takes and gives a Pending."""

    layout: BlockLayout
    residual_in_fp32: bool
    wiring: Wiring

    def forward(self, *args: Any, **kwargs: Any) -> Pending:
        """Takes what the block's own forward takes; but x, the first, is a Pending in every block after the first."""
        layout, names = self.layout, self.wiring.names
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__}: forward takes {', '.join(names)} by position, got {len(args)} arguments")
        given = dict(zip(names, args, strict=False)) | kwargs
        x = given.pop(names[0])
        y, stream = self._normed(layout.norm1, x, residual_in_fp32=self.residual_in_fp32)
        hidden = getattr(self, layout.mixer)(y, **self.wiring.for_mixer(y, given))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden  # transformers' attention also returns its weights
        y, stream = self._normed(layout.norm2, Pending(hidden, stream, self._dropout_p(layout.dropout1)))
        return Pending(getattr(self, layout.mlp)(y), stream, self._dropout_p(layout.dropout2))

    def _normed(self, path: str, x: Any, **how: Any) -> tuple[Tensor, Tensor]:
        """y and the new stream. A hook on the norm may have put one tensor in their place, which might even unpack into two."""
        normed = getattr(self, path)(x, prenorm=True, **how)
        if not isinstance(normed, tuple) or len(normed) != 2:
            what = f"a tuple of {len(normed)}" if isinstance(normed, tuple) else f"a {type(normed).__name__}"
            raise TypeError(
                f"{type(self).__name__}: {path} gave {what}, expected (y, stream). A forward hook on it that returns something "
                "gets and returns both in a fused block"
            )
        return normed

    def _dropout_p(self, path: str | None) -> float:
        """What is to be dropped of a sublayer's output, as its dropout says now, whose own mode counts as it always did."""
        if path is None:
            return 0.0
        dropout = self.get_submodule(path)
        if isinstance(dropout, nn.Identity) or ("." in path and not isinstance(dropout, FusedDropout)):
            return 0.0  # put in its place since; inside a sublayer it is called there and does its own work
        if not isinstance(dropout, nn.Dropout):
            raise TypeError(f"{type(self).__name__}: {path} is a {type(dropout).__name__} now, expected an nn.Dropout")
        return dropout.p if dropout.training else 0.0


class FusedDropout(Swapped):
    """A dropout whose work a later norm does, with this p and in this mode."""

    p: float

    def forward(self, input: Tensor) -> Tensor:
        return input
