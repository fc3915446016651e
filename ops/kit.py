"""What an operator is: tensors and options by name on the way in, tensors by name on the way out, a kernel each way.

An operator is a subclass of `Op` with one instance; softmax.py is a short one. The kit knows none of them. It gives each

    NAME            what public functions call and an exported program holds; falls apart into the two below wherever it runs
    NAME_forward    what compiled graphs hold: opaque to torch.compile, so that eager and compiled code give the same bits
    NAME_backward   its gradients
    a short way     for eager calls that nobody watches (`torch_state.is_eager`): past the dispatcher, by one look into one memo
    gradients       of the first order; those of higher order are refused

All three have one schema. A call hands over the tensors that are there, without None, because not everything that rewrites
calls looks into lists of optional tensors, and one text with names, "given=x,mask scale=1.0 log=False". So an exported program
says what it asks for, and an operator that has got another option since still runs it, or names what it does not know.

Here i, b and o are Inputs, Backward and Options of an operator; records of tensors have None where there is none.
"""

from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from enum import Enum
from functools import cache, partial, reduce
from importlib import import_module
from math import gcd, prod
from operator import itemgetter, or_
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, library
from torch.autograd import forward_ad

from .tiling import H200, Device
from .torch_state import (
    apply_of,
    below_autograd,
    has_tangents,
    is_eager,
    kinds_of,
    known_to_inductor,
    start_of,
    triton_internals,
)

# Derived from the package's name, so that a copy of this folder in another tree registers operators of its own.
NAMESPACE = "prenorm_" + __package__.replace(".", "_")
try:
    LIBRARY = library.Library(NAMESPACE, "DEF")
except RuntimeError as error:
    raise ImportError(
        f"{__package__}: this process has operators called {NAMESPACE} already. Import the package once, give a copy a name "
        "that differs in more than dots and underscores, and restart the process after a reload."
    ) from error

Run = Callable[[tuple], tuple]  # of tensors in the order of one record: tensors in the order of another

MOST = 4096  # of what is remembered; beyond, all is forgotten and worked out anew
_memo: dict[Any, Any] = {}
recall = _memo.get


def remember(key: Any, value: Any) -> Any:
    if len(_memo) >= MOST:
        _memo.clear()
    _memo[key] = value
    return value


def memoised(make: Callable) -> Callable:
    """make, each of whose results is remembered."""
    own = object()

    def found(*arguments: Any) -> Any:
        key = own, *arguments
        return recall(key) or remember(key, make(*arguments))

    return found


def forget() -> None:
    """After `kernels.INTERPRET` changed."""
    _memo.clear()


class Output(NamedTuple):
    """Outputs of an operator that returns one tensor."""

    y: Tensor


class Op:
    """An operator. What `start` and `start_backward` return is kept and called again for other tensors of the same kinds: the
    same ones there, on the same devices, of the same dtypes, and with the same `width`. The number of rows is no part of it."""

    name: str
    Inputs: Any  # NamedTuple of tensors; the first is always there
    Options: Any  # NamedTuple of float, int, bool, torch.dtype and enums, with which all is said that is no tensor
    Outputs: Any = Output  # NamedTuple of tensors
    # NamedTuple: the gradients "dX" of those outputs X that have one, first, then inputs and outputs that backward needs; by
    # default a field "dX" for each output X, then Inputs.
    Backward: Any = None
    Gradients: Any = None  # NamedTuple; by default a field "dX" for each input X
    materialize = False  # whether backward gets zeros as the gradient of an output that nobody used, instead of None

    def function(self, given: Collection[str], o: Any) -> str:
        """The public function, for messages."""
        return f"{self.name}_fn"

    def width(self, tensors: tuple) -> Any:
        """What `start` looks at of shapes and strides of Inputs, and `start_backward` of those of Backward."""
        for t in tensors:
            if t is not None:
                return t.shape[-1]

    def outputs(self, i: Any, o: Any) -> Any:
        """Outputs, allocated: all that forward writes. By default one like the first input, in o.out_dtype if there is that."""
        return Output(i[0].new_empty(i[0].shape, dtype=getattr(o, "out_dtype", None)))

    def start(self, i: Any, o: Any) -> Run:
        """Forward for tensors of the kinds of i, from Inputs to Outputs."""
        raise NotImplementedError

    def gradients(self, b: Any, o: Any, wanted: Any) -> Any:
        """Gradients, allocated; by default of inputs with which Backward ends. wanted: dtypes in their places, None where
        nobody wants one."""
        inputs = b[-len(wanted) :]
        return self.Gradients(*[dtype and t.new_empty(t.shape, dtype=dtype) for t, dtype in zip(inputs, wanted, strict=True)])

    def start_backward(self, b: Any, o: Any, wanted: Any) -> Run:
        """Backward for tensors of the kinds of b, from Backward to Gradients."""
        raise NotImplementedError

    # ---- what an operator may say besides ----

    def written(self, given: Collection[str], o: Any) -> Sequence[str]:
        """The outputs that forward writes. given: the inputs that there are."""
        return self.Outputs._fields

    def asked(self, given: Collection[str], o: Any) -> Sequence[str]:
        """The outputs that a caller gets."""
        return self.written(given, o)

    def view(self, given: Collection[str], o: Any) -> Callable[[tuple, tuple], tuple] | None:
        """Of Inputs and what was written of Outputs, the outputs with those that are views of inputs."""

    def training(self, of: Any, o: Any, needs: tuple[bool, ...]) -> Any:
        """The options of a forward whose inputs `needs` have a gradient; of: dtypes of the inputs."""
        return o

    def kept(self, of: Any, o: Any, needs: tuple[bool, ...]) -> dict[str, str | None]:
        """For fields of Backward the inputs and outputs that are kept for them, None for nothing; o: of `training`."""
        return {name: name for name in self.Backward._fields[self.upstream :]}

    def wanted(self, of: Any, o: Any, needs: tuple[bool, ...], given: Collection[str]) -> tuple[Any, dict[str, str]]:
        """The gradients that backward computes, as `gradients` has them, and which of its results, or of its inputs, is that of
        an input. given: fields of Backward that are there."""
        wanted = [dtype if need else None for dtype, need in zip(of, needs, strict=True)]
        return self.Gradients._make(wanted), {name: f"d{name}" for name in of._fields}

    def again(self, b: Any, o: Any) -> tuple | None:
        """Gradients that can be differentiated again, of a linear operator; None: refused."""

    # ---- the machinery ----

    def __init__(self) -> None:
        upstream, downstream = ([f"d{name}" for name in record._fields] for record in (self.Outputs, self.Inputs))
        self.Backward = self.Backward or namedtuple("Backward", (*upstream, *self.Inputs._fields))
        self.Gradients = self.Gradients or namedtuple("Gradients", downstream)
        self.upstream = len({*upstream} & {*self.Backward._fields})
        self.recorded: Any = type(type(self).__name__, (Recorded,), {})  # for the name of its node in autograd's graph
        self.apply = apply_of(self.recorded)
        LIBRARY.define(f"{self.name}{SCHEMA}", tags=torch.Tag.pt2_compliant_tag)
        LIBRARY.impl(self.name, self._composite, "CompositeImplicitAutograd")
        self.op = _operator(self.name)
        self.forward_op = self._opaque("forward", self.Inputs, self.start, self.outputs)
        self.backward_op = self._opaque("backward", self.Backward, self.start_backward, self.gradients)
        for op in (self.op, self.forward_op, self.backward_op):
            library.register_vmap(op, partial(_one_by_one, op), lib=LIBRARY)

    def __call__(self, inputs: tuple, o: Any) -> tuple:
        """The fields of Outputs, None where not asked for, with gradients. inputs: checked, and where kernels run."""
        kinds = kinds_of(inputs) if is_eager(()) else None
        return self.dispatch(inputs, o) if kinds is None else self._eager(inputs, o, kinds)

    def checked(self, check: Callable[..., tuple], reference: Callable[..., tuple], inputs: tuple, request: tuple) -> tuple:
        """The same of what a user gives. An eager call like an earlier one is not checked again, if kernels ran and its inputs
        were right as they came.

        check: of inputs and *request, looks at devices, dtypes and shapes of tensors alone; gives the inputs as the operator
            takes them, the options, and whether kernels run. Else `reference` does, of these inputs and options.
        """
        kinds, key = kinds_of(inputs) if is_eager(()) else None, None
        if kinds is not None and _HASHED.issuperset(map(type, request)):
            shapes = tuple([None if t is None else t.shape for t in inputs])
            key = check, kinds, shapes, torch.is_grad_enabled(), request, *map(type, request)  # types, as True is equal to 1.0
            o = recall(key)
            if o is not None:
                return self._eager(inputs, o, kinds)
        fitting, o, kernels = check(inputs, *request)
        if not kernels:
            return reference(fitting, o)
        if key is not None and fitting is inputs:
            remember(key, o)
        return self(fitting, o)

    def _eager(self, inputs: tuple, o: Any, kinds: tuple) -> tuple:
        needs = tuple([t is not None and t.requires_grad for t in inputs]) if torch.is_grad_enabled() else ()
        key = self, o, kinds, self.width(inputs), needs
        call = recall(key) or remember(key, Call(self, o, inputs, needs))
        return call(inputs)

    def dispatch(self, inputs: tuple, o: Any) -> tuple:
        """The same through PyTorch's dispatcher."""
        given = [name for name, t in zip(self.Inputs._fields, inputs, strict=True) if t is not None]
        found = self.op(present(inputs), encode(given, o))
        return fill(self.Outputs, self.asked(given, o), found)

    def _composite(self, tensors: list[Tensor], text: str) -> list[Tensor]:
        given, (o,), _ = self._parsed(self.Inputs, text)
        i = fill(self.Inputs, given, tensors)
        call = Call(self, o, i, tuple([t is not None and _matters(t) for t in i]), eager=False)
        return [*call.asked(call(i))]

    def _run(self, record: Any, start: Callable, tensors: list[Tensor], text: str) -> list[Tensor]:
        """One of the opaque operators, which PyTorch hands plain tensors."""
        _, options, complete = self._parsed(record, text)
        there = complete((*tensors, None))
        key = self, record, text, dtypes_of(tensors), tensors[0].device, self.width(there)
        run = recall(key) or remember(key, start(record._make(there), *options))
        return present(run(there))

    def _fake(self, record: Any, empty: Callable, tensors: list[Tensor], text: str) -> list[Tensor]:
        """What it returns, without a value."""
        known_to_inductor(self.forward_op, self.backward_op)
        given, options, _ = self._parsed(record, text)
        return present(empty(fill(record, given, tensors), *options))

    def _opaque(self, what: str, record: Any, start: Callable, empty: Callable) -> Any:
        name = f"{self.name}_{what}"
        LIBRARY.define(name + SCHEMA, tags=torch.Tag.pt2_compliant_tag)
        for key in ("CPU", "CUDA"):  # custom_op takes 170 µs more a call (25 arguments, H200)
            LIBRARY.impl(name, partial(self._run, record, start), key)
        library.register_fake(f"{NAMESPACE}::{name}", partial(self._fake, record, empty), lib=LIBRARY)
        return _operator(name)

    @memoised
    def _parsed(self, record: Any, text: str) -> tuple[list[str], tuple, Callable[[tuple], tuple]]:
        """Of what `encode` made: the names of the tensors; the options, and what is wanted of Gradients if it says so; a
        function of the tensors, with None behind them, that puts them in the places of the record."""
        said = dict([word.partition("=")[::2] for word in text.split(" ")])
        given = [name for name in said.get("given", "").split(",") if name]
        kinds = self.Options.__annotations__ | {"given": str}
        if record is self.Backward:
            kinds |= dict.fromkeys(self.Gradients._fields, torch.dtype)
        values = {name: _value(kinds.get(name), word) for name, word in said.items()}
        unknown = [
            *[f"{name}={said[name]}" for name, value in values.items() if value is None],
            *({*given} - {*record._fields}),
        ]
        missing = {"given", *self.Options._fields} - said.keys() - self.Options._field_defaults.keys()
        if unknown or missing:
            raise RuntimeError(
                f"{NAMESPACE}::{self.name}: this program was exported by another version, or is damaged. It asks for "
                f"{', '.join(unknown) or 'nothing'} that this one does not know, and lacks {', '.join(missing) or 'nothing'}; "
                f"export it again. It says: {text}"
            )
        o = self.Options(**{name: values[name] for name in self.Options._fields if name in values})
        wanted = [self.Gradients(*map(values.get, self.Gradients._fields))] if record is self.Backward else []
        return given, (o, *wanted), picker(record._fields, given)


_HASHED = frozenset((bool, int, float, str, torch.dtype, type(None)))
SCHEMA = "(Tensor[] tensors, str options) -> Tensor[]"


def encode(given: Iterable[str], o: Any, wanted: Any = None) -> str:
    """The text of a call: the tensors that are there, of Gradients the wanted ones with their dtypes, the options."""
    said = [pair for record in (wanted, o) if record is not None for pair in zip(record._fields, record, strict=True)]
    return " ".join([f"given={','.join(given)}", *[f"{name}={_word(value)}" for name, value in said if value is not None]])


def _word(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Enum):
        return value.name
    if torch.compiler.is_dynamo_compiling() and not isinstance(value, bool):
        (value,) = {value}  # a number that the graph has as a symbol becomes a constant of the graph
    return repr(value)


def _value(kind: Any, word: str) -> Any:
    """What `_word` was given, of this kind of value; None if it is none, or the option is unknown and has no kind."""
    named = _NAMED.get(kind, getattr(kind, "__members__", None))
    try:
        return kind(word) if named is None else named.get(word)
    except ValueError:
        return None


_NAMED: dict[Any, dict[str, Any]] = {
    torch.dtype: {_word(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    bool: {"True": True, "False": False},
    None: {},
}


def _operator(name: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _matters(t: Tensor) -> bool:
    """Whether a gradient or a tangent is asked for; a Function has no formula for tangents, and says so."""
    return (torch.is_grad_enabled() and t.requires_grad) or (has_tangents() and forward_ad.unpack_dual(t).tangent is not None)


def _one_by_one(op, info, in_dims, tensors, text):
    """vmap: a call for each sample, or of zeros where there is none, for the shapes of what it returns. PyTorch does that by
    itself for operators that return no lists."""
    given = [*zip(tensors, in_dims[0], strict=True)]
    if info.batch_size == 0:
        given = [(t if dim is None else t.sum(dim, dtype=t.dtype), None) for t, dim in given]
    samples = [op([t if dim is None else t.select(dim, i) for t, dim in given], text) for i in range(max(1, info.batch_size))]
    outputs = [torch.stack(same)[: info.batch_size] for same in zip(*samples, strict=True)]
    return outputs, [0] * len(outputs)


# ---- gradients ---------------------------------------------------------------------------------------------------------------


class Call:
    """A call with all that follows from its options and the kinds of its inputs: a function from Inputs to Outputs."""

    def __init__(self, op: Op, o: Any, i: tuple, needs: tuple[bool, ...], eager: bool = True) -> None:
        """needs: which inputs need a gradient; eager: else through the dispatcher."""
        self.op, self.given, self.materialize = op, names_of(op.Inputs._make(i)), op.materialize
        fields, asked = op.Outputs._fields, op.asked(self.given, o)
        self.asked = picker(asked, fields)
        self.records = True in needs
        if self.records:
            self.apply = op.apply if eager else op.recorded.apply
            self.of = of = op.Inputs._make(dtypes_of(i))
            o = op.training(of, o, needs)
            self.there = picker(self.given, op.Inputs._fields)
            have = {*self.given, *op.written(self.given, o)}
            kept = {field: source for field, source in op.kept(of, o, needs).items() if source in have}
            self.keep = picker([*kept.values()], (*op.Inputs._fields, *fields))
            constants = [name for name in asked if f"d{name}" not in op.Backward._fields]
            # Gradients that are differentiated again must lead to whatever they depend on. Where one of the inputs is not kept,
            # or an output may be one that is, as r may be x, autograd sees an output that is kept, asked for or not; who has
            # not asked does not get it.
            gone = {name for name, need in zip(of._fields, needs, strict=True) if need} - {*kept.values()}
            seen = {*asked} - {*constants}
            links = [name for name in kept.values() if name in fields] if gone or len(seen) > 1 else []
            tracked = asked if seen & {*links} else [*asked, *links[:1]]
            self.tracked = picker(tracked, fields)
            self.complete = picker([name if name in asked else None for name in fields], tracked)
            self.fields = (*[f"d{name}" for name in tracked], *kept)
            self.backward = picker(op.Backward._fields, self.fields)
            self.constants = picker(constants, fields) if constants else None
        self.o, self.function = o, op.function(self.given, o)
        self.view = op.view(self.given, o)
        if eager:
            self.run = op.start(op.Inputs._make(i), o)
        else:
            written, text = op.written(self.given, o), encode(self.given, o)
            self.run = lambda i: fill(op.Outputs, written, below_autograd(op.forward_op, present(i), text))

    def __call__(self, i: tuple) -> tuple:
        if self.records:
            return self.complete((*self.apply(self, i, *self.there(i)), None))
        outputs = self.run(i)
        return outputs if self.view is None else self.view(i, outputs)

    def gradients(self, needs: tuple[bool, ...], there: tuple) -> tuple:
        """Of the inputs that there are, those that autograd needs. there: the upstream gradients, and what was kept."""
        # On a GPU backward has a thread of its own, and hooks on saved tensors may bring any tensors.
        kinds, b = kinds_of(there) if is_eager(()) else None, self.backward((*there, None))
        if kinds is None:
            run, pick = self._backward(needs, b, eager=False)
        else:
            key = self, needs, kinds, self.op.width(b)
            run, pick = recall(key) or remember(key, self._backward(needs, b, eager=True))
        return pick((*run(b), *b, None))

    def _backward(self, needs: tuple[bool, ...], b: tuple, eager: bool) -> tuple[Run, Run]:
        """From Backward to Gradients, and from both, one behind the other, to what `gradients` returns."""
        op, o, needed = self.op, self.o, {name for name, need in zip(self.given, needs, strict=True) if need}
        b = op.Backward._make(b)
        given = names_of(b)
        wanted, sources = op.wanted(self.of, o, tuple([name in needed for name in op.Inputs._fields]), given)
        names = [sources[name] if name in needed else None for name in self.given]
        pick = picker(names, (*op.Gradients._fields, *op.Backward._fields))
        if eager:
            return op.start_backward(b, o, wanted), pick
        written, text = names_of(wanted), encode(given, o, wanted)
        return lambda b: fill(op.Gradients, written, op.backward_op(present(b), text)), pick


def refused(function: str, there: tuple, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The same gradients with a history, whatever they were computed from: a backward that raises.

    PyTorch's `once_differentiable` refuses only where the upstream gradient has a graph of its own. Where that is a constant,
    as of `y.sum()`, a gradient penalty would silently lack what follows from x and the weights.

    Args:
        function: the public one, for the message.
        there: what they were computed from, each with its own history: `torch.autograd.grad` goes the ways to its inputs alone.
    """
    of = (torch.zeros((), device="cpu", requires_grad=True), *there)
    return _Refused.apply(function, len(of), *of, *gradients)


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.name = name
        return tuple([None if gradient is None else gradient.detach() for gradient in tensors[count:]])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{ctx.name}: its gradients can't be differentiated again. torch.func's transforms (grad, jvp, hessian) run the "
            "PyTorch reference, which can; so can a model's own modules (restore_norms, restore_mlps and others give them back)"
        )


class Recorded(torch.autograd.Function):
    """A call whose inputs need gradients: of the call, Inputs, and again those of them that there are, for autograd to see."""

    @staticmethod
    def forward(ctx, call: Call, i: tuple, *_):
        outputs = call.run(i)
        ctx.save_for_backward(*call.keep((*i, *outputs)))
        ctx.call = call
        ctx.set_materialize_grads(call.materialize)
        if call.constants is not None:
            ctx.mark_non_differentiable(*call.constants(outputs))
        if call.view is not None:
            outputs = call.view(i, outputs)
        return call.tracked(outputs)

    @staticmethod
    def backward(ctx, *upstream):
        for t in upstream:
            if t is not None:
                break
        else:  # those who used the outputs have given no gradient
            return (None,) * len(ctx.needs_input_grad)
        call, there, needs = ctx.call, (*upstream, *ctx.saved_tensors), ctx.needs_input_grad[2:]
        if not torch.is_grad_enabled():
            return None, None, *call.gradients(needs, there)
        gradients = call.op.again(call.backward((*there, None)), call.o)
        if gradients is None:
            with torch.no_grad():
                gradients = call.gradients(needs, there)
            gradients = refused(call.function, there, gradients)
        return None, None, *gradients


# ---- records -----------------------------------------------------------------------------------------------------------------


def dtypes_of(record: Iterable[Tensor | None]) -> tuple[torch.dtype | None, ...]:
    return tuple([None if t is None else t.dtype for t in record])


def present(record: Iterable[Tensor | None]) -> list[Tensor]:
    return [t for t in record if t is not None]


def names_of(record: Any) -> list[str]:
    """The fields of a record that are not None."""
    return [name for name, value in zip(record._fields, record, strict=True) if value is not None]


def fill(record: Any, names: Iterable[str], values: Iterable[Any]) -> Any:
    """A record of this class with these fields; the others are None."""
    return record(**dict.fromkeys(record._fields) | dict(zip(names, values, strict=True)))


def zeroed(record: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of no rows: those of weights have elements."""
    return tuple([t if t is None else t.zero_() for t in record])


def picker(names: Sequence[str | None], among: Sequence[str]) -> Callable[[tuple], tuple]:
    """A function of a tuple of what `among` names, with None behind it, that returns what has these names, in this order; None
    where `among` lacks the name."""
    places = [among.index(name) if name in among else len(among) for name in names]
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda values: (values[places[0]],)) if places else (lambda values: ())  # itemgetter of one place gives no tuple


# ---- launches ----------------------------------------------------------------------------------------------------------------


@cache
def kernels(name: str) -> Any:
    """A module of kernels, imported when its first one is about to start: without a GPU, Triton may be missing."""
    return import_module(f".kernels.{name}", __package__)


def triton_dtype(dtype: torch.dtype) -> Any:
    return getattr(import_module("triton.language"), str(dtype).removeprefix("torch."))


internals = cache(triton_internals)  # Triton is imported when the first kernel is about to start


def distances(t: Tensor | None, inner: int) -> tuple[bool, int, int]:
    """Whether two numbers of elements tell where the rows of t (..., N) lie; and these, or else those of a copy: from a block
    of `inner` rows to the next one, and from row to row in a block, 0 where that is one row."""
    if t is None:
        return True, 0, 0
    *shape, N = t.shape
    lies, block, row = t.is_contiguous(), inner * N, N
    if not lies and (N == 1 or t.stride(-1) == 1):
        with suppress(RuntimeError):
            block, row, _ = t.view(prod(shape) // inner, inner, N).stride()
            lies = True
    return lies, block, row * (inner > 1)


def steps(tensors: Iterable[Tensor | None], inner: int = 1) -> list[int]:
    """What kernels are compiled for: the power of two up to 8 that divides the distances of each."""
    return [gcd(*distances(t, inner)[1:], 8) for t in tensors]


def placed(tensors: Iterable[Tensor | None], inner: int = 1) -> tuple[list[Tensor | None], list[int]]:
    """Tensors whose rows lie at two distances, copied where they do not; and these, in steps of each."""
    found: list[Tensor | None] = []
    numbers = []
    for t in tensors:
        lies, *apart = distances(t, inner)
        step = gcd(*apart, 8)
        found.append(t if lies or t is None else t.contiguous())
        numbers += [distance // step for distance in apart]
    return found, numbers


class Launcher:
    """A kernel and the options of its launch, for one set of tensor dtypes (or absences) on one device.

    All that a compiled variant depends on from call to call is whether each pointer is 16-byte aligned: numbers are not
    specialised. So the variant for aligned pointers is kept and started without Triton's look at each argument, which takes
    longer than the launch.
    """

    def __init__(
        self, kernel: Any, record: type, device: torch.device, strided: Sequence[str] = (), programs_y: int = 1,
        early: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        """record: NamedTuple of the kernel's tensors; strided: those whose strides the kernel is told; programs_y: the grid's
        second dimension; early: programmatic dependent launch, on GPUs that know it; options: None for what the launch does
        without."""
        self.kernel, self.record, self.strided, self.programs_y = kernel, cast(Any, record), strided, programs_y
        options["launch_pdl"] = (early and device_facts(device).since_sm_90) or None
        self.options = {name: value for name, value in options.items() if value is not None}
        self.index = device.index if device.type == "cuda" else None
        self.may_be_elsewhere = self.index is not None and torch.cuda.device_count() > 1
        self.internals = internals()
        self.runtime: Any = self.internals.knobs.runtime if self.internals else None
        in_use = self.internals.driver.active if self.internals and self.index is not None else None
        self.current_stream: Callable = in_use.get_current_stream if in_use else int
        self.again: tuple[Callable[..., None], tuple] | None = None  # `start_of` the variant for aligned pointers
        self.there: Callable[[tuple], tuple]  # the tensors that are not None
        self.dense: Callable[[tuple], tuple]  # of those, the ones that must be contiguous
        self.places: Callable[[tuple], tuple]  # their pointers, with None behind them, in the places of the record

    def __call__(self, programs: int, tensors: tuple[Tensor | None, ...], *rest: Any) -> None:
        """Starts the kernel on the current stream of its device.

        tensors: the fields of the record, copied where they are neither contiguous nor strided, as kernels read rows that lie
        next to each other; rest: the arguments behind them.
        """
        if programs == 0:
            return
        # Triton launches on the current device, which need not be the tensors'.
        if self.may_be_elsewhere and self.index != torch.cuda.current_device():
            with torch.cuda.device(self.index):
                return self(programs, tensors, *rest)
        if self.again is not None:
            (run, known), runtime, there = self.again, self.runtime, self.there(tensors)
            pointers = tuple(map(Tensor.data_ptr, there))
            enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
            observed = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)  # a profiler hears of launches
            if not observed and reduce(or_, pointers) % 16 == 0 and all(map(Tensor.is_contiguous, self.dense(there))):
                stream = self.current_stream(self.index)
                run(programs, self.programs_y, 1, stream, *known, self.places((*pointers, None)), *rest)
                return
        named = zip(self.record._fields, tensors, strict=True)
        tensors = tuple([t if t is None or name in self.strided else t.contiguous() for name, t in named])
        compiled = self.kernel[(programs, self.programs_y)](self.record(*tensors), *rest, **self.options)
        is_known = self.internals and isinstance(compiled, self.internals.CompiledKernel)
        if is_known and all(t is None or t.data_ptr() % 16 == 0 for t in tensors):
            fields, names = self.record._fields, names_of(self.record(*tensors))
            dense = [name for name in names if name not in self.strided]
            self.there, self.places = picker(names, fields), picker(fields, names)
            self.dense = tuple if dense == names else picker(dense, names)
            self.again = start_of(compiled)


@cache
def device_facts(device: torch.device) -> Device:
    """Cached: asking the driver costs more than a launch."""
    if device.type != "cuda":
        # The interpreter: two multiprocessors, so that partial sums are really summed; its programs run one after another.
        return H200._replace(multiprocessors=2, cooperative=False, since_sm_90=False)
    facts = torch.cuda.get_device_properties(device)
    return Device(
        multiprocessors=facts.multi_processor_count,
        shared_memory=getattr(facts, "shared_memory_per_block_optin", 0) or facts.shared_memory_per_block,
        bandwidth=2000 * facts.memory_clock_rate * facts.memory_bus_width / 8,  # kHz, two transfers a clock; bits
        warp_size=facts.warp_size,
        cooperative=torch.version.hip is None,
        since_sm_90=torch.version.hip is None and facts.major >= 9,
    )
