"""Prenorm blocks of somebody's model in the form that fuses dropout + add + norm, also across the border of two blocks.

As models are written                          As `fuse_prenorm_block` makes them

    def forward(self, x):                          def forward(self, pending):
        x = x + drop(attn(norm1(x)))                   y, stream = norm1(pending, prenorm=True)    # drop, add, norm: one kernel
        x = x + drop(mlp(norm2(x)))                    pending = Pending(attn(y), stream, p)
        return x                                       y, stream = norm2(pending, prenorm=True)    # drop, add, norm: one kernel
                                                       return Pending(mlp(y), stream, p)

A block can't add its MLP's output itself, because the kernel that adds it is the next block's first norm. So it hands on both,
the output and the stream, as a Pending; the loop over blocks need not know. The first block gets a tensor, and the final norm,
a replaced one, takes a Pending and gives a tensor.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..modules import MODULES
from .norms import AdoptedNorm, Pending, Swapped, replace_norms, swap, unswap
from .wiring import BY_HAND, BlockLayout, Wiring, parts_of, wiring_of

# nanoGPT's, and transformers' GPT-2; Llama's, Mistral's, Qwen2's and Qwen3's
GPT2_BLOCK = BlockLayout("ln_1", "attn", "ln_2", "mlp", "attn.resid_dropout", "mlp.dropout")
LLAMA_BLOCK = BlockLayout("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


def fuse_prenorm_block(block: nn.Module, layout: BlockLayout, *, residual_in_fp32: bool = False) -> None:
    """Gives a block, or each of a stack, the (hidden, residual) form, in place. `restore_norms(model)` undoes it.

    Give it the whole stack of blocks: a block that is not fused behind one that is fails when it is called. And give
    `replace_norms` the final norm; the blocks' own norms are replaced here. Arguments that the block gets beside x go where it
    hands them: to the mixer. The block's own forward is tried with stand-ins for its parts, in evaluation and in training. A
    block that scales, clamps, drops or norms what it adds, or computes what it gives to its parts, is refused; so is a sublayer
    whose dropout does not come last, if it can be called with x, and None for the rest.

    Args:
        block: of the form that BlockLayout describes; its forward returns a tensor. Its dropouts no longer drop anything
            themselves, so nothing outside the block may use them, the embeddings for instance. Or an nn.ModuleList or
            nn.Sequential of such blocks: all are fused, or none.
        layout: GPT2_BLOCK, LLAMA_BLOCK or one of your own.
        residual_in_fp32: keep the stream in fp32 if it begins in this block, that is, if its x is a tensor.

    Raises:
        TypeError: block is no module, or layout no BlockLayout.
        ValueError: the block has another form or more parts, or its norms can't be replaced. It stays as it was.
    """
    if not isinstance(block, nn.Module):
        raise TypeError(f"fuse_prenorm_block: block must be a torch.nn.Module, got {type(block).__name__}")
    if not isinstance(layout, BlockLayout):
        raise TypeError(f"fuse_prenorm_block: layout must be a BlockLayout, such as LLAMA_BLOCK, got {type(layout).__name__}")
    if isinstance(block, nn.ModuleList | nn.Sequential) and type(block) in (nn.ModuleList, nn.Sequential):
        return _fuse_stack(block, layout, residual_in_fp32)
    name = f"fuse_prenorm_block({type(block).__name__})"
    if isinstance(block, FusedBlock):
        raise ValueError(f"{name}: block is fused already; restore_norms undoes it")
    parts = parts_of(name, block, layout)
    wiring = wiring_of(name, block, layout, parts)
    for field, sublayer in (("dropout1", "mixer"), ("dropout2", "mlp")):
        if "." in (getattr(layout, field) or ""):
            _check_drops_last(f"{name}: layout.{field}", parts[sublayer], parts[field], parts["norm1"])
    replaced: list[Swapped] = []
    for field in ("norm1", "norm2"):
        norm = parts[field]
        sites = replace_norms(norm, verbose=False)
        if isinstance(norm, AdoptedNorm):
            replaced += [norm for site in sites if site.fused]
            continue
        for other in replaced:
            unswap(other)
        why = sites[0].why if sites else "it is no norm"
        if isinstance(norm, tuple(MODULES.values())):
            why = f"it is a {type(norm).__name__} of this package, whose forward takes x and residual; {BY_HAND}"
        raise ValueError(f"{name}: layout.{field} can't be replaced: {why}")
    swap(block, FusedBlock, layout=layout, residual_in_fp32=residual_in_fp32, wiring=wiring)
    for dropout in {parts[field] for field in ("dropout1", "dropout2") if field in parts}:
        swap(dropout, FusedDropout)


def _fuse_stack(stack: nn.ModuleList | nn.Sequential, layout: BlockLayout, residual_in_fp32: bool) -> None:
    blocks = list(dict.fromkeys(stack))  # one that is there twice is one block
    if not blocks:
        raise ValueError(f"fuse_prenorm_block: {type(stack).__name__} has no blocks")
    before = {module for module in stack.modules() if isinstance(module, Swapped)}
    for i, block in enumerate(blocks):
        try:
            fuse_prenorm_block(block, layout, residual_in_fp32=residual_in_fp32)
        except ValueError as error:
            for module in {module for module in stack.modules() if isinstance(module, Swapped)} - before:
                unswap(module)
            raise ValueError(f"{error}. It is block {i} of {len(blocks)}, and all stay as they were") from error


def _check_drops_last(name: str, sublayer: nn.Module, dropout: nn.Module, norm: nn.Module) -> None:
    """Raises if the dropout inside a sublayer, which gets what `norm` gives, is not the last thing that happens there.

    A sublayer that can't be tried with None for what it needs beside x, a mask for instance, is not checked.
    """
    marks: list[Tensor] = []

    def mark(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        marks.append(torch.randn_like(output))
        return marks[-1]

    weight = next(sublayer.parameters(), torch.empty(0))
    buffers = [(buffer, buffer.clone()) for buffer in sublayer.buffers()]  # running statistics, a cache
    handle = dropout.register_forward_hook(mark)
    cuda = [weight.device] if weight.device.type == "cuda" else []
    try:
        width = next(norm.parameters()).numel()
        more = list(inspect.signature(type(sublayer).forward).parameters.values())[2:]
        needed = {p.name: None for p in more if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        with torch.no_grad(), torch.random.fork_rng(devices=cuda), torch.compiler.set_stance("force_eager"):
            y = type(sublayer).forward(sublayer, torch.randn(1, 2, width, dtype=weight.dtype, device=weight.device), **needed)
            y = y[0] if isinstance(y, tuple) else y
            led_elsewhere = needed and not marks  # by None
            last = led_elsewhere or (len(marks) == 1 and torch.equal(y.flatten(), marks[0].flatten()))
    except Exception:  # without what it needs, its code may raise anything; so does a norm without weights, which has no width
        return
    finally:
        handle.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    if not last:
        raise ValueError(f"{name} is not the last that happens in its sublayer, so no norm can do its work")


class FusedBlock(Swapped):
    """A block that gives a Pending and takes what its own forward takes, but as x, after the first block, a Pending."""

    layout: BlockLayout
    residual_in_fp32: bool
    wiring: Wiring

    def forward(self, *args: Any, **kwargs: Any) -> Pending:
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
            raise TypeError(
                f"{type(self).__name__}: {path} gave a {type(normed).__name__}, expected (y, stream). A forward hook on it "
                "that returns something gets and returns both in a fused block"
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

    def forward(self, input: Tensor) -> Tensor:
        return input
