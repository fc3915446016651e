"""Which attention modules can turn queries and keys in one kernel: found by trial, and replaced in place.

    replace_rotary(model)       model.layers.0.self_attn: Qwen3Attention, rotary positions with q_norm and k_norm in one kernel
    restore_rotary(model)

A clone of a module runs its own forward on the CPU, with small matrices in place of its own and random weights, on angles from
the model's own module for them. Values and gradients of its rotary function are compared with ours there. What attention does
with them afterwards, perhaps on a GPU alone, does not matter.
"""

import inspect
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from .adopted import LeftAlone, Only, adopted_class, raised, replace, restore
from .attention import AdoptedAttention, Turn, norms_along, turning, with_names
from .lazy import settled
from .norms import AdoptedNorm
from .recognise import undisturbed
from .results import difference, floats_in, gradients
from .stand_ins import clone_of

_FUNCTIONS = re.compile("rotary|rope")
_PAIRS = ((False, "halves"), (True, "halves"), (True, "neighbours"), (False, "once"))  # interleaved, angles
_FP32, _BF16 = torch.float32, torch.bfloat16
# dtype, whether autocast is on, sequences with positions of their own, tokens
_CASES = ((_FP32, False, 2, 5), (_BF16, False, 1, 5), (_FP32, True, 2, 5), (_FP32, False, 2, 1))


def replace_rotary(model: nn.Module, *, only: Only = None) -> list[tuple[str, str]]:
    """Lets attention modules turn queries and keys, and norm them by head before, in one kernel each way, in place.

    Takes modules whose forward calls a function like `apply_rotary_pos_emb(q, k, cos, sin)` on `position_embeddings`, if ours
    gives the same values and gradients. A norm is computed along if it is replaced, and as long as nothing hooks it. Where the
    function gets what the kernel does not take, such as angles that need a gradient, the module's own runs.

    Args:
        model: any module, after `replace_norms`; before DDP, FSDP or torch.compile are put around it.
        only: a function of each module's name and module; what it returns False for is left alone.

    Returns:
        The name of each attention module, and what was done with it or why nothing was.
    """
    return replace(model, AdoptedAttention, partial(_trial_of, model), only)


def restore_rotary(model: nn.Module) -> list[str]:
    """Undoes `replace_rotary`; returns a line for each module.

    Raises:
        ValueError: since then another tool gave one yet another class or forward. Then nothing is restored.
    """
    return restore("restore_rotary", model, AdoptedAttention)


def _forward(module: nn.Module) -> Any:
    """Its class's forward without decorators, if that is written in Python."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    forward = inspect.unwrap(type(module).forward)
    return forward if isinstance(forward, FunctionType) else None


def _parameters(module: nn.Module) -> list[str]:
    forward = _forward(module)
    return [] if forward is None else [*inspect.signature(forward).parameters][1:]


# ---- trial ------------------------------------------------------------------------------------------------------------------


def _trial_of(model: nn.Module, module: nn.Module) -> Callable[[], Turn | str] | None:
    forward = _forward(module)
    names = () if forward is None else forward.__code__.co_names
    functions = [name for name in names if _FUNCTIONS.search(name) and callable(forward.__globals__.get(name))]
    return partial(_tried, module, functions, model) if functions else None


def _tried(attention: nn.Module, functions: list[str], model: nn.Module) -> Turn | str:
    if "position_embeddings" not in _parameters(attention):
        return "its forward takes no position_embeddings"
    angles = [module for module in model.modules() if _parameters(module)[:2] == ["x", "position_ids"]]
    why = "" if angles else "no module of the model gives cos and sin for x and position_ids"
    norms = tuple(name for name, part in attention.named_children() if isinstance(part, AdoptedNorm))
    with undisturbed(torch.device("cpu")), torch.enable_grad():
        for source, function, (interleaved, layout), along in product(angles, functions, _PAIRS, dict.fromkeys((norms, ()))):
            try:
                return _turn(attention, source, Turn(function, interleaved, layout, False, along))
            except LeftAlone as reason:
                why = why or str(reason)
            except Exception as error:  # anybody's code
                why = why or f"trying it {raised(error)}"
    return why


def _turn(attention: nn.Module, angles: nn.Module, turn: Turn) -> Turn:
    """turn, with those of its norms that the kernel can compute along.

    Raises:
        LeftAlone: attention turns its queries and keys in another way.
    """
    torch.default_generator.manual_seed(0)
    clone, angles = _clone(attention), _clone(angles)
    kinds: Any = [{"layer_type": kind} for kind in getattr(angles, "layer_types", ())]
    kinds = kinds if "layer_type" in _parameters(angles) else [{}]
    found = angles(torch.zeros(1, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 1), **kinds[0])
    if not isinstance(found, tuple) or len(found) != 2:
        raise LeftAlone(f"{type(angles).__name__} gives no pair of cos and sin")
    turn = turn._replace(fp32_angles=found[0].dtype == torch.float32)
    for case, kind in product(_CASES, kinds):
        clone.__class__ = adopted_class(AdoptedAttention, type(attention), turn, type(attention).forward)  # type: ignore[arg-type]
        turn = turn._replace(norms=_compared(clone, turn, partial(angles, **kind), *case))
    return turn


def _compared(
    attention: Any, turn: Turn, angles: Callable, dtype: torch.dtype, autocast: bool, sequences: int, tokens: int
) -> tuple[str, ...]:
    """The names of the norms that ours computes along, if it computes the same in this case."""
    attention.to(dtype)
    own: Any = attention._own.forward
    function, ours = own.__globals__[turn.function], turning(turn, _refuse)
    width = next(part.in_features for part in attention.modules() if isinstance(part, nn.Linear))
    x = (3.0 * torch.randn(2, tokens, width)).to(dtype).requires_grad_()
    leaves = {"x": x, **dict(attention.named_parameters())}
    along: set[tuple[str, ...]] = set()

    def both(q: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
        results = list[dict[str, Tensor]]()
        for outputs in (function(settled(q), settled(k), *args, **kwargs), ours(q, k, *args, **kwargs)):
            found = floats_in(outputs, "it")
            found |= gradients(found, leaves, retain_graph=True)
            results.append({name: t.float() if autocast else t for name, t in found.items()})
        if difference(results[0], results[1], _BF16 if autocast else dtype):
            raise LeftAlone(f"{turn.function} computes something else than rotary_qk_fn")
        names = {part: name for name, part in attention.named_children()}
        along.add(() if norms_along(q, k) is None else tuple(names[t.parts["branch_norm"]] for t in (q, k)))
        return results[0]["it[0]"], results[0]["it[1]"]

    with torch.no_grad():
        position_embeddings = angles(x, torch.randint(20, (sequences, tokens)))
    _, _, *others = inspect.signature(own).parameters.values()
    given = {p.name: None for p in others if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            with_names(own, {turn.function: both}, turn.norms)(
                attention, x, **given | {"position_embeddings": position_embeddings}
            )
    except Exception as error:  # what attention does later does not matter
        if isinstance(error, LeftAlone) or not along:
            raise
    if len(along) != 1:
        raise LeftAlone(f"its forward {'has several kinds of' if along else 'makes no'} calls of {turn.function} in a trial")
    return along.pop()


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise LeftAlone("it turns tensors that rotary_qk_fn does not take")


def _clone(module: nn.Module) -> Any:
    """With small matrices and random weights."""

    def small(path: str, part: nn.Module) -> Any:
        inside, out = getattr(part, "in_features", None), getattr(part, "out_features", None)
        if isinstance(inside, int) and isinstance(out, int):
            return nn.Sequential(nn.Linear(inside, 8), nn.Linear(8, out))
        return None

    return clone_of(module, lambda p: torch.randn(p.shape), small)
