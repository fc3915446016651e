"""Prepared call sites: an eager call like an earlier one skips what that one has worked out. A reader may skip this file:
without it and its two call places in `functional` every call takes the plain path, which gives the same bits.

On small tensors the GPU waits for Python: for checks, for allocations through the dispatcher, for launches whose arguments are
put together anew. All of that follows from shapes, dtypes and options. So a call on the plain path leaves a site for its like:
a guard, and straight code that is written as text and compiled for this case alone. For add + RMSNorm:

    def call(x, residual, x1, weight, …, seed):              def forward(ctx, x, residual, weight):
        if guard(x, residual, weight) and not observed():        y = empty(y_size, y_stride, y_dtype)
            return apply(x, residual, weight)                    …  r and stats too; their pointers; the launch
                                                                 ctx.save_for_backward(r, weight, stats)
                                                                 return y, r

The first backward of a site takes the plain path too, and leaves code for its like: those where the same upstream gradients are
there and the same gradients are wanted.

    found by    all that is no tensor, x's shape, which tensors are there, grad mode. All layers of a model share one site.
    guarded by  PyTorch's TensorGuards, in C++: type, dispatch keys together with those of the thread (autocast, inference mode,
                functorch, dispatch modes, jit.trace), dtype, device, requires_grad, sizes, strides, no tensor given twice.
    besides     what those do not see: Dynamo's tracing, torch-function modes, forward-mode AD, a profiler's launch hooks, the
                current device, pointers off a 16-byte boundary, and in backward grad mode (create_graph).

Whatever else a call is takes the plain path, errors among it. What is saved for backward is what the plain path saves, in the
same order, because checkpointing compares them; it is guarded when it comes back, because hooks may bring other tensors.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import backend
from .autograd import is_eager, known_job, norm_gradients
from .backend import launches
from .checks import Plan
from .philox import draw_seed
from .records import BackwardInputs, Inputs, Options, empty_gradients, empty_outputs

Table = dict[tuple, tuple[Callable, ...]]  # functions that return None where their guard fails
MOST, MOST_ALIKE = 512, 4  # keys, and functions of one key: a stream of new calls must neither fill memory nor prepare for ever
SITES: Table = {}


def results(given: tuple, request: tuple) -> Any:
    """What norm_fn returns, or None: nothing is prepared. given: its tensors, the fields of Inputs; request: the rest."""
    if not WORKS or torch._C._len_torch_function_stack() or forward_ad._current_level >= 0:
        return None
    try:
        alike = SITES.get(_key(given, request), ())
    except (AttributeError, TypeError):  # x is no tensor, or something has no hash: the checks have more to say
        return None
    for call in alike:
        found = call(*given)
        if found is not None:
            return found
    return None


def prepare(given: tuple, request: tuple, plan: Plan) -> None:
    """Makes a site for calls like this one, which is eager and has run on kernels."""
    if WORKS:
        _remember(SITES, _key(given, request), lambda: _call(given, request[4], plan))


def _key(given: tuple, request: tuple) -> tuple:
    x, residual, x1, weight, bias, weight1, bias1, rowscale, rowscale1, seed = given
    return (
        request, type(request[1]), type(request[2]),  # 0.5 and Fraction(1, 2) are equal; the checks accept one of them
        x.shape, residual is None, x1 is None, weight is None, bias is None, weight1 is None, bias1 is None,
        rowscale is None, rowscale1 is None, type(seed), torch.is_grad_enabled(),
    )  # fmt: skip


def _remember(table: Table, key: tuple, make: Callable[[], Callable | None]) -> None:
    alike = table.get(key, ())
    if len(alike) < MOST_ALIKE and (made := make()) is not None:
        if len(table) >= MOST:
            table.clear()
        table[key] = (made, *alike)


def _call(given: tuple, prenorm: bool, plan: Plan) -> Callable | None:
    tensors = {name: t for name, t in zip(Inputs._fields, given, strict=True) if isinstance(t, Tensor)}
    if not _usual([*tensors.values()]) or (plan.drops and isinstance(given[9], int)):
        return None
    training = torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
    dtypes: Any = Inputs(*plan.dtypes)  # type: ignore[arg-type]
    options = plan.training if training else plan.inference
    x, launch = tensors["x"], launches()
    launcher = launch._forward_launcher(options, x.shape, x.device, dtypes, None)
    if (text := _text(tensors, tensors, x, launcher)) is None:
        return None
    made = text.allocate(empty_outputs(Inputs(*_on_meta(given)), options)._asdict())
    taken = [name for name in tensors if name != "seed"] + ["seed"] * plan.drops
    text.launch("launch", launcher, launch.forward_kernels.Pointers, {*taken, *made}, ["seed" if plan.drops else None])
    returned: list[str] = [name for name in ("y", "y1", "r") if name in made and (name != "r" or prenorm)]
    if training:
        text.names["apply"] = _with_gradients(text, tensors, options, plan, taken, returned)
    else:
        text.names["apply"] = text.function("forward", taken, f"return {', '.join(returned)}")
    text.names |= {"draw_seed": draw_seed, "device": x.device}
    drawn = {"seed": "draw_seed(device, True)"} if given[9] is None else {}
    value = f"apply({', '.join([drawn.get(name, name) for name in taken])})"
    if prenorm and plan.r_is_x:
        value = f"(*{value}, x)" if len(returned) > 1 else f"({value}, x)"
    return text.function("call", Inputs._fields, f"if {text.guard}: return {value}")


def _with_gradients(text: "_Text", tensors, options: Options, plan: Plan, taken: list[str], returned: list[str]) -> Callable:
    """`apply` of an autograd function that takes and returns what has these names."""
    adds = "residual" in tensors or "x1" in tensors or plan.drops or "rowscale" in tensors
    scaled = [x for x, scale in (("x", "rowscale"), ("x1", "rowscale1")) if scale in tensors and tensors[scale].requires_grad]
    kept = ["r", *scaled, *[name for name in BackwardInputs._fields[6:] if name in taken or name == "stats"]]
    saved = ", ".join(["r" if adds else "x", *kept[1:]])
    end = (f"ctx.save_for_backward({saved})", "ctx.set_materialize_grads(False)", f"return {', '.join(returned)}")
    upstream, table = [f"d{name}" for name in returned], Table()

    class FusedNorm(torch.autograd.Function):
        forward = staticmethod(text.function("forward", ["ctx", *taken], *end))

        @staticmethod
        def backward(ctx, a, b=None, c=None):
            saved, plain = ctx.saved_tensors, torch.compiler.is_compiling() or torch.is_grad_enabled()
            key = (ctx.needs_input_grad, a is None, b is None, c is None, a is b)
            if not plain and forward_ad._current_level < 0:
                for run in table.get(key, ()):
                    gradients = run(a, b, c, *saved)
                    if gradients is not None:
                        return gradients
            given: Any = dict(zip((*upstream, *kept), (*(a, b, c)[: len(upstream)], *saved), strict=True))
            inputs = BackwardInputs(*map(given.get, BackwardInputs._fields))
            needs = tuple([name in taken and ctx.needs_input_grad[taken.index(name)] for name in Inputs._fields])
            gradients = norm_gradients(inputs, options, plan.dtypes, needs)
            given_any = a is not None or b is not None or c is not None
            if given_any and not plain and is_eager(inputs):
                job = known_job(options, plan.dtypes, needs, inputs.dy is not None, inputs.dy1 is not None)
                _remember(table, key, lambda: _backward(inputs, job, (*upstream, "_1", "_2")[:3], kept, taken, a is b))
            return tuple([gradients[Inputs._fields.index(name)] for name in taken])

    return super(torch.autograd.Function, FusedNorm).apply  # without the Python code of `apply`, which is for functorch


def _backward(inputs: BackwardInputs, job, upstream, kept: list[str], taken: list[str], same: bool) -> Callable | None:
    """A function of upstream gradients, of which the first two may be the same, and saved tensors."""
    tensors = {name: t for name, t in inputs._asdict().items() if t is not None}
    guarded = [name for name in tensors if not (same and name == upstream[1])]
    if not _usual([tensors[name] for name in guarded]):
        return None
    r, launch = inputs.r, launches()
    how = launch._backward_launch(job.options, r.shape, r.device, launch._dense(inputs)[1], None)
    if how.words or (text := _text(tensors, guarded, r, how.gradients, *[how.finish] * bool(job.casts))) is None:
        return None
    text.lines = [f"if not ({text.guard}): return None"]
    partials = {"partials": torch.empty(how.partials, device="meta")} if job.casts else {}
    made = text.allocate(empty_gradients(BackwardInputs(*_on_meta(inputs)), job.options)._asdict() | partials)
    seed = ["seed" if "seed" in tensors else None]
    text.launch("launch", how.gradients, launch.backward_kernels.Pointers, {*tensors, *made}, seed, "return None")
    if job.casts:
        text.launch("finish", how.finish, None, ["partials", "weights"], [])
    found = {x: f"d{x}" for x in ("x", "x1") if f"d{x}" in made}
    takes = {"x": job.x_takes_dz, "residual": job.residual_takes_dz, "x1": job.x1_takes_dz}
    found |= {name: "dz" for name in takes if takes[name]}
    found |= {scale: f"d{scale}.to({scale}.dtype).view({scale}.shape)" for scale in Inputs._fields[7:9] if f"d{scale}" in made}
    for row, (i, dtype) in enumerate(job.casts):
        text.names[f"dtype{i}"] = dtype
        value = "weights" if len(job.casts) == 1 else f"weights[{row}]"
        found[Inputs._fields[3 + i]] = value if dtype == job.options.weight_dtype else f"{value}.to(dtype{i})"
    gradients = ", ".join([found.get(name, "None") for name in taken])
    return text.function("backward", [*upstream, *kept], f"return ({gradients},)")


def _usual(tensors: list[Tensor]) -> bool:
    """Whether they have elements, lie densely, and none is there twice."""
    return tensors[0].numel() > 0 and len({*map(id, tensors)}) == len(tensors) and all(t.is_contiguous() for t in tensors)


def _text(tensors: dict[str, Tensor], guarded: Iterable[str], x: Tensor, *launchers) -> "_Text | None":
    """None where its guard fails now, or a launch does not know its kernel yet, because of pointers off a 16-byte boundary."""
    there = {name: tensors[name] for name in guarded}
    empty = getattr(_guards, f"_empty_strided_{x.device.type}", None)
    if empty is None or not (backend.INTERPRET or all(launcher.compiled for launcher in launchers)):
        return None
    names = {
        "guard": _tensor_guard([*there.values()]),
        "observed": launches()._observed,
        "empty": empty,
        "index": x.device.index,
    }
    guard = f"guard({', '.join(there)}) and not observed()"
    if x.is_cuda:  # allocations and launches are on the current device
        names["current_device"] = torch._C._cuda_getDevice
        guard += " and current_device() == index"
    return _Text(guard, names) if eval(guard, names | there) else None


class _Text:
    """A function in the making: its lines, and the values of the names in them."""

    def __init__(self, guard: str, names: dict[str, Any]) -> None:
        self.guard, self.names, self.lines = guard, names, list[str]()

    def allocate(self, record: dict[str, Tensor | None]) -> list[str]:
        made = {name: t for name, t in record.items() if t is not None}
        for name, t in made.items():
            self.names |= {f"{name}_size": tuple(t.shape), f"{name}_stride": t.stride(), f"{name}_dtype": t.dtype}
            self.lines.append(f"{name} = empty({name}_size, {name}_stride, {name}_dtype)")
        return list(made)

    def launch(self, which: str, launcher, record, there, seed: list[str | None], otherwise: str = "") -> None:
        """What Launcher.__call__ does. record: of the tensors, a tuple if None; otherwise: for pointers off a boundary."""
        tensors = [name if name in there else None for name in record._fields] if record else there
        given = [name for name in tensors if name]
        plain = f"{which}({', '.join([f'{which}_record({_list(tensors)})', *map(str, seed)])})"
        self.names |= {which: launcher, f"{which}_record": record or (lambda *tensors: tensors)}
        self.lines += [f"p_{name} = {name}.data_ptr()" for name in given]
        self.lines.append(f"if ({' | '.join([f'p_{name}' for name in given])}) % 16: {otherwise or plain}")
        if launcher.compiled is not None:
            rest = {f"{which}_{i}": value for i, value in enumerate(launcher.rest)}
            pointers, seed = _list([name and f"p_{name}" for name in tensors]), [s and f"{s}.data_ptr()" for s in seed]
            self.names |= {"stream": launches().driver.active.get_current_stream, f"{which}_run": launcher.run, **rest}
            self.names |= {f"{which}_function": launcher.function, f"{which}_metadata": launcher.metadata}
            how = f"{launcher.programs}, 1, 1, stream(index), {which}_function, {which}_metadata, None, None, None"
            plain = f"{which}_run({', '.join([how, f'({pointers},)', *map(str, seed), *rest])})"
        self.lines.append(f"else: {plain}")

    def function(self, name: str, parameters: Iterable[str], *lines: str) -> Callable:
        """The lines so far and these; the next function begins anew."""
        exec(_compiled("\n    ".join([f"def {name}({', '.join(parameters)}):", *self.lines, *lines])), self.names)
        self.lines = []
        return self.names[name]


def _list(names: list[str | None]) -> str:
    return ", ".join(map(str, names))


@lru_cache(maxsize=1024)
def _compiled(text: str) -> CodeType:
    """Sites that differ in shapes and dtypes alone have the same text."""
    return compile(text, "<prepared call site>", "exec")


def _on_meta(tensors: Iterable) -> list:
    """Without memory, to see what would be allocated."""
    return [torch.empty_like(t, device="meta") if isinstance(t, Tensor) else None for t in tensors]


def _tensor_guard(tensors: list[Tensor]) -> Callable[..., bool]:
    sizes, strides = [[*t.shape] for t in tensors], [[*t.stride()] for t in tensors]
    return _guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _works() -> bool:
    """Whether PyTorch's unpromised names do what sites rely on."""
    x, w = torch.empty(2, 3), torch.nn.Parameter(torch.empty(3))
    guard = _tensor_guard([x, w])
    others: list = [(other, w) for other in (x.double(), x[:1], torch.empty(3, 2).mT, x.clone().requires_grad_(), x.to("meta"))]
    others += [(x, w.detach()), (x, w.detach().requires_grad_()), (x, x), (x, None)]
    made = _guards._empty_strided_cpu((2, 3), (3, 1), torch.half)
    as_asked = (made.shape, made.stride(), made.dtype) == ((2, 3), (3, 1), torch.half)
    return as_asked and guard(x.clone(), w) and not any(guard(*other) for other in others) and not _tensor_guard([x, x])(x, x)


try:
    _guards: Any = torch._C._dynamo.guards
    WORKS = _works()
except (AttributeError, TypeError, RuntimeError):
    WORKS = False
