"""Prepared launches: straight code for a call like an earlier one, in place of working out anew what that one has shown.

On small tensors the GPU waits for Python: for allocations through the dispatcher, and for launches whose arguments are put
together anew. All of that follows from shapes, dtypes and options. So a first call leaves a function for its like: a guard, and
code that is written as text and compiled for this case alone. For the operator `norm_forward` of add + RMSNorm:

    def forward(x, residual, weight):
        if not (guard(x, residual, weight) and not observed() and current_device() == index): return None
        y = empty(y_size, y_stride, y_dtype)
        …                                          # r and stats too; the pointers; the launch
        return [y, r, stats]

The guard is PyTorch's TensorGuards, in C++: type, dispatch keys together with those of the thread (autocast, inference mode,
functorch, dispatch modes, jit.trace), dtype, device, requires_grad, sizes, strides, no tensor given twice. What it does not see
is asked besides: modes that want to see operators, a profiler's launch hooks, the current device, pointers off a 16-byte
boundary. Where any of that differs the function is not called, returns None or takes the plain launch: the same bits.
"""

from collections.abc import Callable, Hashable, Iterable
from copy import copy
from functools import cache, lru_cache, partial
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .records import BackwardInputs, BackwardOptions, Inputs, Options, empty_gradients, empty_outputs

Table = dict[Hashable, tuple[Callable, ...]]  # functions that return None where their guard fails
MOST, MOST_ALIKE = 512, 8  # keys, and functions of one key: new shapes must not fill memory, nor new strides prepare for ever


@cache
def launches() -> ModuleType:
    """`launch`, imported when the first kernel starts: it needs Triton, which a machine without a GPU may lack."""
    from . import launch

    return launch


_TABLES: list[Table] = []


def table() -> Table:
    _TABLES.append({})
    return _TABLES[-1]


def forget() -> None:
    """Empties all tables; for tests, which change what launches are made of."""
    for each in _TABLES:
        each.clear()


def remember(table: Table, key: Hashable, make: Callable[[], Callable | None]) -> None:
    """Adds what `make` returns; None counts too, so that a call which can't be prepared is not tried for ever."""
    alike = table.get(key, ())
    if WORKS and len(alike) < MOST_ALIKE and not launches().observed():
        if len(table) >= MOST:
            table.clear()
        table[key] = (make() or _nothing, *alike)


def _nothing(*_: Any) -> None: ...


def put_before_dispatcher(op: Any, table: Table) -> None:
    """Lets an operator look into its table first, in compiled graphs too: the dispatcher takes as long as a launch.

    op: takes tensors and a string, which with the shape of the first tensor are a key of the table.
    """
    if dispatch := getattr(op, "_op", None):
        op._op = partial(_prepared_or, dispatch, table)


def _prepared_or(dispatch: Callable, table: Table, tensors: list[Tensor], how: str) -> list[Tensor]:
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return dispatch(tensors, how)  # a mode wants to see the operator
    try:
        alike = table.get((how, tensors[0].shape), ())
    except (IndexError, TypeError):  # no tensors: an error; or a size without a number, while a graph is made
        return dispatch(tensors, how)
    for function in alike:
        if (found := function(*tensors)) is not None:
            return found
    return dispatch(tensors, how)


def forward(inputs: Inputs, options: Options) -> Callable | None:
    """A function of the tensors of `inputs` that returns the outputs that are asked for."""
    text = begin(tensors_of(inputs), forward_launchers(inputs, options))
    if text is None:
        return None
    made = ", ".join(text.forward(inputs, options))
    return text.function("forward", tensors_of(inputs), f"return [{made}]", guarded=True)


def backward(inputs: BackwardInputs, options: BackwardOptions) -> Callable | None:
    """A function of the tensors of `inputs` that returns the gradients that are asked for."""
    text = begin(tensors_of(inputs), backward_launchers(inputs, options))
    if text is None:
        return None
    made = ", ".join(text.backward(inputs, options))
    return text.function("backward", tensors_of(inputs), f"return [{made}]", guarded=True)


def tensors_of(record: Inputs | BackwardInputs) -> dict[str, Tensor]:
    return {name: t for name, t in record._asdict().items() if t is not None}


def forward_launchers(inputs: Inputs, options: Options) -> list:
    """Empty where nothing is to be prepared: some tensor is not read where it lies."""
    dense, dtypes, strides = launches()._dense(inputs)
    if _moved(inputs, dense):
        return []
    return [launches()._forward_launcher(options, inputs.x.shape, inputs.x.device, dtypes, strides)]


def backward_launchers(inputs: BackwardInputs, options: BackwardOptions) -> list:
    """As `forward_launchers`; empty, too, where programs share a row: their board of sums needs more than a launch."""
    how = _backward_launch(inputs, options)
    if how.words or _moved(inputs, launches()._dense(inputs)[0]):
        return []
    return [how.gradients, how.finish] if True in options.wanted else [how.gradients]


def _moved(record: Inputs | BackwardInputs, dense: Inputs | BackwardInputs) -> bool:
    return any(t is not d and t.data_ptr() != d.data_ptr() for t, d in zip(record, dense, strict=True))  # type: ignore


def begin(tensors: dict[str, Tensor], launchers: list) -> "Text | None":
    """A function of these tensors, the first of which has rows.

    None where nothing is prepared: there are no elements; the guard fails now; or a launch does not know its kernel yet, as it
    has seen only pointers off a 16-byte boundary.
    """
    like = next(iter(tensors.values()))
    empty = getattr(_guards, f"_empty_strided_{like.device.type}", None)
    if empty is None or not launchers or not (kernels.INTERPRET or all(launcher.compiled for launcher in launchers)):
        return None
    if like.numel() == 0:
        return None
    first: dict[int, str] = {}  # the guard knows no tensor that is given twice
    twice = {name: first[id(t)] for name, t in tensors.items() if first.setdefault(id(t), name) != name}
    guarded = [name for name in tensors if name not in twice]
    conditions = [f"{name} is {same}" for name, same in twice.items()]
    conditions += [f"guard({', '.join(guarded)})", "not observed()"]
    names = {"guard": _tensor_guard([tensors[name] for name in guarded]), "observed": launches().observed}
    names |= {"empty": empty, "index": like.device.index}
    if like.is_cuda:  # allocations and launches are on the current device
        names["current_device"] = torch._C._cuda_getDevice
        conditions.append("current_device() == index")
    guard = " and ".join(conditions)
    return Text(guard, names, launchers) if eval(guard, names | tensors) else None


class Text:
    """A function in the making: its lines, and the values of the names in them."""

    def __init__(self, guard: str, names: dict[str, Any], launchers: list) -> None:
        self.guard, self.names, self.launchers, self.lines = guard, names, launchers, list[str]()

    def forward(self, inputs: Inputs, options: Options) -> list[str]:
        """What `launch.forward` does. The names of the outputs."""
        made = self.allocate(empty_outputs(Inputs(*_on_meta(inputs)), options)._asdict())
        self.launch(0, launches().forward_kernels.Pointers, {*tensors_of(inputs), *made}, inputs.seed is not None)
        return made

    def backward(self, inputs: BackwardInputs, options: BackwardOptions) -> list[str]:
        """What `launch.backward` does, where no programs share a row. The names of the gradients."""
        self.lines.append("if stats.data_ptr() % 8: return None")  # they are read as words of 8 bytes
        made = self.allocate(empty_gradients(BackwardInputs(*_on_meta(inputs)), options)._asdict())
        there, records = {*tensors_of(inputs), *made}, launches().backward_kernels
        if "weights" in made:
            partials = torch.empty(_backward_launch(inputs, options).partials, dtype=torch.float32, device="meta")
            there |= {*self.allocate({"partials": partials})}
        self.launch(0, records.Pointers, there, inputs.seed is not None)
        if "weights" in made:
            self.launch(1, records.Sums, there, None)
        return made

    def allocate(self, record: dict[str, Tensor | None]) -> list[str]:
        made = {name: t for name, t in record.items() if t is not None}
        for name, t in made.items():
            self.names |= {f"{name}_size": tuple(t.shape), f"{name}_stride": t.stride(), f"{name}_dtype": t.dtype}
            self.lines.append(f"{name} = empty({name}_size, {name}_stride, {name}_dtype)")
        return list(made)

    def launch(self, which: int, record: Any, there: set[str], seeded: bool | None) -> None:
        """What `Launcher.__call__` does. record: of the kernel's tensors; seeded: whether there is a seed, None if the kernel
        takes none. Pointers off a 16-byte boundary get a plain launch."""
        launcher, at = self.launchers[which], f"launch{which}"
        tensors = [name if name in there else None for name in record._fields]
        given = [name for name in tensors if name]
        seed = [] if seeded is None else ["seed" if seeded else None]
        plain = prepared = f"{at}({', '.join([f'{at}_record({_list(tensors)})', *map(str, seed)])})"
        self.names |= {at: launcher, f"{at}_record": record}
        if (kernel := launcher.compiled) is not None:
            grid, stream, no_hooks = (launcher.programs, 1, 1), _Code("stream(index)"), (None, None, None)
            pointers = tuple([name and _Code(f"p_{name}") for name in tensors])
            seeds = [name and _Code(f"{name}.data_ptr()") for name in seed]
            metadata = (kernel.function, kernel.packed_metadata, *no_hooks)  # `observed` has looked for hooks
            run, arguments = _behind(kernel.run, (*grid, stream, *metadata, pointers, *seeds, *launcher.rest))
            self.names |= {"stream": launches().stream_getter(), f"{at}_run": run}
            prepared = f"{at}_run{self._written(at, arguments)}"
        self.lines += [f"p_{name} = {name}.data_ptr()" for name in given]
        self.lines.append(f"if ({' | '.join([f'p_{name}' for name in given])}) % 16: {plain}")
        self.lines.append(f"else: {prepared}")

    def _written(self, name: str, value: Any) -> str:
        """The value in the text, or a name for it."""
        if isinstance(value, tuple) and any(isinstance(each, _Code | tuple) for each in value):
            return f"({''.join([self._written(f'{name}_{i}', each) + ', ' for i, each in enumerate(value)])})"
        if value is None or isinstance(value, _Code):
            return str(value)
        self.names[name] = value
        return name

    def function(self, name: str, parameters: Iterable[str], *lines: str, guarded: bool = False) -> Callable:
        """The lines so far and these, and before them the guard; the next function begins anew."""
        guard = [f"if not ({self.guard}): return None"] * guarded
        exec(_compiled("\n    ".join([f"def {name}({', '.join(parameters)}):", *guard, *self.lines, *lines])), self.names)
        self.lines = []
        return self.names[name]


def _backward_launch(inputs: BackwardInputs, options: BackwardOptions) -> Any:
    _, dtypes, strides = launches()._dense(inputs)
    return launches()._backward_launch(options, inputs.r.shape, inputs.r.device, dtypes, strides)


def _list(names: list[str | None]) -> str:
    return ", ".join(map(str, names))


class _Code(str):
    """Text that computes an argument, in the place of that argument."""


def _behind(run: Callable, arguments: tuple) -> tuple[Callable, tuple]:
    """What Triton's launcher calls, and with which arguments: its Python code takes half a microsecond of every launch.

    A copy of the launcher tells, so that nothing here depends on the arguments of Triton's C function. A launcher that may
    allocate at each launch, or that starts its kernel in another way, is called as it is.
    """
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1) or not hasattr(run, "launch"):
        return run, arguments
    passed: list[tuple] = []
    twin: Any = copy(run)
    twin.launch = lambda *given: passed.append(given)
    twin(*arguments)
    return (run.launch, passed[0]) if len(passed) == 1 else (run, arguments)


@lru_cache(maxsize=1024)
def _compiled(text: str) -> CodeType:
    """Functions that differ in shapes and dtypes alone have the same text."""
    return compile(text, "<prepared launch>", "exec")


def _on_meta(tensors: Iterable) -> list:
    """Without memory, to see what would be allocated."""
    return [torch.empty_like(t, device="meta") if isinstance(t, Tensor) else None for t in tensors]


def _tensor_guard(tensors: list[Tensor]) -> Callable[..., bool]:
    sizes, strides = [[*t.shape] for t in tensors], [[*t.stride()] for t in tensors]
    return _guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _works() -> bool:
    """Whether PyTorch's unpromised names do what is relied on."""
    x = torch.empty(2, 3, dtype=torch.float32, device="cpu")
    w = torch.nn.Parameter(x[0].clone())
    guard = _tensor_guard([x, w])
    others: list = [(other, w) for other in (x.double(), x[:1], x.mT.contiguous().mT, x.clone().requires_grad_(), x.to("meta"))]
    others += [(x, w.detach()), (x, w.detach().requires_grad_()), (x, x), (x, None)]
    made = _guards._empty_strided_cpu((2, 3), (3, 1), torch.half)
    as_asked = (made.shape, made.stride(), made.dtype) == ((2, 3), (3, 1), torch.half)
    return as_asked and guard(x.clone(), w) and not any(guard(*other) for other in others) and not _tensor_guard([x, x])(x, x)


try:
    _guards: Any = torch._C._dynamo.guards
    WORKS = _works()
except (AttributeError, TypeError, RuntimeError):
    WORKS = False
