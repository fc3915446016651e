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

import inspect
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from .adopt import AdoptedNorm, Pending, replace_norms
from .swap import Swapped, swap


@dataclass(frozen=True)
class BlockLayout:
    """What a block calls its parts: x + dropout1(mixer(norm1(x))), then x + dropout2(mlp(norm2(x)))."""

    norm1: str
    mixer: str  # attention, or what is in its place
    norm2: str
    mlp: str
    dropout1: str | None = None  # the nn.Dropout that mixer's output goes through last; dotted where it is inside
    dropout2: str | None = None  # and mlp's


GPT2_BLOCK = BlockLayout(
    "ln_1", "attn", "ln_2", "mlp", "attn.resid_dropout", "mlp.dropout"
)  # nanoGPT's, and transformers' GPT2Block
LLAMA_BLOCK = BlockLayout("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")  # and Mistral's, Qwen2's, Qwen3's


def fuse_prenorm_block(block: nn.Module, layout: BlockLayout, *, residual_in_fp32: bool = False) -> None:
    """Gives a block the (hidden, residual) form, in place. `restore_norms(model)` undoes it.

    Do it to all blocks of a stack, and `replace_norms` to the final norm. Norms that are not replaced yet are. Arguments that
    the block gets beside x go to the mixer. How the block is wired is tried out with stand-ins for its parts, so one that
    scales, clips or norms what it adds is refused. That its dropouts come last inside mixer and mlp can't be seen from here:
    it is taken from the layout, as is that they do nothing else.

    Args:
        block: of the form that BlockLayout describes; its forward returns a tensor.
        layout: GPT2_BLOCK, LLAMA_BLOCK or one of your own.
        residual_in_fp32: keep the stream that begins in this block in fp32 (where x of the first block is no Pending).

    Raises:
        ValueError: the block is of another form, has other parts too, or its norms are not ours to replace.
    """
    name = f"fuse_prenorm_block({type(block).__name__})"
    if isinstance(block, FusedBlock):
        raise ValueError(f"{name}: block is fused already; restore_norms undoes it")
    parts = {
        field.name: _part(name, block, field.name, path) for field in fields(layout) if (path := getattr(layout, field.name))
    }
    _check_no_more_parts(name, block, layout)
    for argument in ("dropout1", "dropout2"):
        if argument in parts and type(parts[argument]) is not nn.Dropout:
            raise ValueError(f"{name}: layout.{argument} is a {type(parts[argument]).__name__}, expected an nn.Dropout")
    _check_wiring(name, block, layout)
    for argument in ("norm1", "norm2"):
        sites = replace_norms(parts[argument], verbose=False)
        if not isinstance(parts[argument], AdoptedNorm):
            raise ValueError(f"{name}: layout.{argument} can't be replaced: {sites[0].why if sites else 'it is no norm'}")

    own = list(inspect.signature(type(block).forward).parameters.values())[1:]
    names = tuple(p.name for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    swap(block, FusedBlock, layout=layout, residual_in_fp32=residual_in_fp32, argument_names=names)
    for dropout in {parts[argument] for argument in ("dropout1", "dropout2") if argument in parts}:
        swap(dropout, FusedDropout)


class FusedBlock(Swapped):
    """A block that takes and gives a Pending."""

    layout: BlockLayout
    residual_in_fp32: bool
    argument_names: tuple[str, ...]  # of the block's own forward

    def forward(self, *args: Any, **kwargs: Any) -> Pending:
        """Takes what the block's own forward takes; but x, the first, is a Pending in every block after the first."""
        layout = self.layout
        x, *rest = args or (kwargs.pop(self.argument_names[0]),)
        kwargs |= dict(zip(self.argument_names[1:], rest, strict=False))
        y, stream = getattr(self, layout.norm1)(x, prenorm=True, residual_in_fp32=self.residual_in_fp32)
        hidden = getattr(self, layout.mixer)(y, **kwargs)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden  # transformers' attention also returns its weights
        y, stream = getattr(self, layout.norm2)(Pending(hidden, stream, self._dropout_p(layout.dropout1)), prenorm=True)
        return Pending(getattr(self, layout.mlp)(y), stream, self._dropout_p(layout.dropout2))

    def _dropout_p(self, path: str | None) -> float:
        return cast(nn.Dropout, self.get_submodule(path)).p if path is not None and self.training else 0.0


class FusedDropout(Swapped):
    """A dropout whose work a later norm does. Its p is read there."""

    def forward(self, input: Tensor) -> Tensor:
        return input


def _part(name: str, block: nn.Module, argument: str, path: str) -> nn.Module:
    try:
        return block.get_submodule(path)
    except AttributeError:
        children = ", ".join(child for child, _ in block.named_children())
        raise ValueError(f"{name}: block has no {path!r}, layout.{argument}; its parts are {children}") from None


def _check_no_more_parts(name: str, block: nn.Module, layout: BlockLayout) -> None:
    known = {str(path).split(".")[0] for path in vars(layout).values()}
    more = [child for child, module in block.named_children() if child not in known and type(module) is not nn.Identity]
    more += [parameter for parameter, _ in block.named_parameters(recurse=False)]
    if more:
        raise ValueError(
            f"{name}: block also has {', '.join(more)}, of which layout says nothing; rewrite such a block by hand, "
            "after the listing at the head of prenorm_block.py"
        )


def _check_wiring(name: str, block: nn.Module, layout: BlockLayout) -> None:
    """Runs the block's own forward with simple functions in place of its parts, and compares."""
    norm1, mixer, norm2, mlp = (_StandIn(phase) for phase in (0.1, 0.2, 0.3, 0.4))
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    expected = x + 0.5 ** ("." not in (layout.dropout1 or ".")) * mixer(norm1(x))
    expected = expected + 0.5 ** ("." not in (layout.dropout2 or ".")) * mlp(norm2(expected))
    problem = ""
    for mixer.returns_tuple in (False, True):
        clone = object.__new__(type(block))
        clone.__dict__.update(block.__dict__)
        stand_ins: dict[str, nn.Module] = {layout.norm1: norm1, layout.mixer: mixer, layout.norm2: norm2, layout.mlp: mlp}
        stand_ins |= {path: _Half() for path in (layout.dropout1, layout.dropout2) if path and "." not in path}
        clone.__dict__ |= {"_modules": {**block._modules, **stand_ins}, "training": False}
        try:
            with torch.no_grad():
                found = type(block).forward(clone, x)
        except Exception as error:  # whatever their code raises
            problem = problem or f"trying it with stand-ins for its parts raised {type(error).__name__}: {error}"
            continue
        if not isinstance(found, Tensor):
            problem = f"it returns a {type(found).__name__}, expected a tensor"
        elif found.shape == x.shape and torch.allclose(found, expected, atol=1e-5):
            return
        else:
            problem = "it does not compute x + mixer(norm1(x)), then x + mlp(norm2(x)), of stand-ins for its parts"
    raise ValueError(f"{name}: {problem}; rewrite such a block by hand, after the listing at the head of prenorm_block.py")


class _StandIn(nn.Module):
    def __init__(self, phase: float) -> None:
        super().__init__()
        self.phase, self.returns_tuple = phase, False

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        y = torch.sin((kwargs["hidden_states"] if x is None else x) + self.phase)
        return (y, None) if self.returns_tuple else y


class _Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x
