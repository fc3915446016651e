"""Where the GPU time of a step goes, by kind of work.

A kernel's name is not enough: in eager code a site's dropout, residual add and casts run the same elementwise kernels as
the rest of the model. So the ranges of host code that launched a kernel decide. Norm sites are marked while the profiler runs,
and a kernel of backward belongs to the forward operator that it differentiates. torch.compile fuses across these ranges, but
names its kernels after the operators in them; there the name decides.

    GEMM       matrix products, forward and backward; not the casts of their weights, nor the sums that are bias gradients
    attention  scaled_dot_product_attention, forward and backward; not its projections or copies around it
    norm       norm sites: dropout, drop path, residual add, norm and their casts; also the norms and the rotary positions of
               queries and keys
    loss       log-softmax and likelihood, with the casts around them; the head's product is a GEMM
    optimizer  update, clipping, loss scaling
    other      embeddings, activations, copies to the GPU, and casts
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from model import loss as losses
from model.attention import QueryKeySite
from model.norm import NormSite

GROUPS = ("GEMM", "attention", "norm", "loss", "optimizer", "other")
NORM_SITE = "prenorm norm site"  # the range around a site's forward
LOSS_SITE = "prenorm loss"  # around PyTorch's loss where it runs eager


@dataclass(frozen=True)
class Share:
    """GPU time of a step that goes into one kind of work."""

    group: str  # GEMM, attention, norm, loss, optimizer, other
    ms: float
    launches: int


@dataclass(frozen=True)
class Kernel:
    """A GPU kernel, copy or fill by name, and the kind of work that its time was counted as."""

    name: str
    group: str  # as in Share
    ms: float  # a step, all launches together, without what overlaps with earlier kernels
    launches: float  # a step; a fraction where not all steps are alike


@dataclass(frozen=True)
class KernelTime:
    """A GPU kernel, copy or fill; on a CPU an operator. One entry for each place that launches it."""

    name: str
    us: float  # a step, all launches together; on a GPU without what overlaps with earlier kernels
    launches: float  # a step; a fraction where not all steps are alike
    within: tuple[str, ...] = ()  # the host's ranges around the launch (operators, marks, backward nodes), innermost first
    forward: tuple[str, ...] = ()  # launched by backward: the ranges around the forward operator that it differentiates


def profile_step(
    step: Callable[[], None], device: torch.device, model: nn.Module | None = None, *, steps: int = 3, warmup: int = 2
) -> list[KernelTime]:
    """What a step launches and how long that runs: GPU time on CUDA, elsewhere the self time of CPU operators.

    Args:
        step: one training step.
        model: the module whose norm sites are to be marked, by hooks for as long as the profiler runs. None where the step runs
            compiled: there, hooks would make torch.compile start anew, and marks vanish in its kernels.
        steps: profiled steps; results are their mean.
        warmup: steps before them, unmarked.
    """
    on_gpu = device.type == "cuda"
    for _ in range(warmup):
        step()
    if on_gpu:
        torch.cuda.synchronize(device)
    with marked_sites(model), profile(activities=activities(device)) as profiler:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    found = times(profiler, device, steps)
    return [_of_compiled_site(time) for time in found] if on_gpu and model is not None else found


def activities(device: torch.device) -> list[ProfilerActivity]:
    """What the profiler records there."""
    return [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")


def times(profiler: profile, device: torch.device, steps: int) -> list[KernelTime]:
    """What the profiled steps launched, as the mean of a step: GPU time on CUDA, else the self time of CPU operators."""
    return (device_times if device.type == "cuda" else host_times)(list(profiler.events() or ()), steps)


def _of_compiled_site(kernel: KernelTime) -> KernelTime:
    """Of a model that runs eager, torch.compile makes kernels for norm sites and the loss alone. Those of a site are marked."""
    if not kernel.name.startswith("triton_") or re.search(COMPILED_LOSS, kernel.name):
        return kernel
    return replace(kernel, within=(*kernel.within, NORM_SITE))


def shares(kernels: Iterable[KernelTime]) -> list[Share]:
    """The time of a step by kind of work: one Share for each of GROUPS, in that order. They sum to the kernels' total."""
    members: dict[str, list[KernelTime]] = defaultdict(list)
    for kernel in kernels:
        members[group_of(kernel)].append(kernel)
    return [Share(group, sum(k.us for k in members[group]) / 1000, launches(members[group])) for group in GROUPS]


def by_name(kernels: Iterable[KernelTime]) -> list[Kernel]:
    """What `shares` sums up, longest first: one Kernel for each name and group, from all places that launch it."""
    members: dict[tuple[str, str], list[KernelTime]] = defaultdict(list)
    for kernel in kernels:
        members[kernel.name, group_of(kernel)].append(kernel)
    merged = [Kernel(*key, sum(k.us for k in of) / 1000, sum(k.launches for k in of)) for key, of in members.items()]
    return sorted(merged, key=lambda kernel: -kernel.ms)


def launches(kernels: Iterable[KernelTime]) -> int:
    """Kernels a step. Copies and fills that the driver does by itself are not among them, though their time is in `shares`."""
    return round(sum(kernel.launches for kernel in kernels if not kernel.name.startswith(("Memcpy", "Memset"))))


# --- which group ---


def _kernel(kernel: KernelTime) -> Sequence[str]:
    return (kernel.name,)


def _within(kernel: KernelTime) -> Sequence[str]:
    return kernel.within


def _site(kernel: KernelTime) -> Sequence[str]:
    return kernel.within + kernel.forward


def _within_loss(kernel: KernelTime) -> Sequence[str]:
    return kernel.within if any("::linear_cross_entropy" in name for name in kernel.within) else ()


def _summed_by_compiled_code(kernel: KernelTime) -> Sequence[str]:
    """The outermost range of compiled code around a sum that it calls as an operator."""
    compiled = ("CompiledFunction", "## Call CompiledFxGraph")
    return [name for name in kernel.within if name.startswith(compiled)] if kernel.within[:1] == ("aten::sum",) else ()


COMPILED_LOSS = r"^triton_(?!tem_|mm).*(nll_loss|log_softmax|softmax_online)"

# The first that matches decides.
Where = Callable[[KernelTime], Sequence[str]]
RULES: tuple[tuple[str, Where, str], ...] = (  # the group, the texts that are looked at, a pattern without case
    # Our kernels: eager code launches them past the dispatcher, so that no operator is around them.
    (
        "norm",
        _kernel,
        r"^(norm_(forward|backward)|finish_weight_gradients|dropout|rotary_(forward|backward)|finish_rotary_weights)_kernel",
    ),
    ("loss", _kernel, r"^(cross_entropy|cross_entropy_gradient|count_targets|sum_losses)_kernel"),
    # The operator of the head's product with its loss has matrix products inside.
    ("GEMM", _within_loss, r"^aten::(mm|addmm)$"),
    ("loss", _within, r"^prenorm_\w+::(linear_)?cross_entropy"),
    # Under torch.compile they run inside our operators, with the fills that these need.
    ("norm", _within, r"^prenorm_\w+::"),
    # Sites that are compiled alone; see `_of_compiled_site`.
    ("norm", lambda kernel: [f"{kernel.name[:7]} {name}" for name in kernel.within], rf"^triton_ {NORM_SITE}$"),
    # Inductor names a kernel after all operators fused into it, also those that it only feeds: its kernels are settled before
    # any other name is looked at. Embeddings or sums of bias gradients that share a kernel with a norm count as norm.
    # The loss's softmax may be named prepare_softmax_online alone; it is the only one, attention has kernels of its own.
    ("loss", _kernel, COMPILED_LOSS),
    # A bias gradient: the sum, over rows, of what a dropout's backward gives, made anew for it. It takes as long as the plain
    # triton_red_fused_sum_view_ that stands in its place with fused norms.
    ("other", _kernel, r"^triton_(red|per)_fused_(_to_copy_)?native_dropout_backward_sum_(view_)?\d+$"),
    ("norm", _kernel, r"^triton_(?!tem_|mm).*(layer_norm|rms_norm|rsqrt|native_dropout|bernoulli|inductor_random)"),
    # A cast alone: of the gradient that leaves a site of an fp32 stream, where no dropout's backward takes it in. Flattened to
    # rows for the matrix product behind it, hence the view; casts of weights have none. A fused site writes it by itself.
    ("norm", _kernel, r"^triton_poi_fused__to_copy_view_\d+$"),
    # The turn of queries and keys joins two halves, and its backward the gradients of queries, keys and values. So does that of
    # a gated MLP, with its activation in the name.
    ("norm", _kernel, r"^triton_(?!tem_|mm|.*(silu|sigmoid)).*_cat_"),
    ("other", _kernel, r"^triton_(?!tem_|mm)"),
    # Where inductor makes the gradients of a norm's input and of its weights in one kernel ("mix-order reduction"), it adds the
    # programs' partial sums of the latter up by an operator; it calls sum for nothing else.
    ("norm", _summed_by_compiled_code, r""),
    # Before GEMM: the math backend is made of matrix products, flash kernels have cutlass types in their names.
    ("attention", _site, r"^aten::_?(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)"),
    ("attention", _kernel, r"flash|fmha|sdpa|attention|cudnn::fusion"),
    # Matrix products by operator, for the kernels around one (split-K sums, fills). Not by forward's operator: the sum of a
    # bias gradient is launched by an addmm's backward and multiplies nothing.
    ("GEMM", _within, r"^aten::(mm|addmm|bmm|baddbmm|_addmm_activation|_scaled_mm)$"),
    ("GEMM", _kernel, r"gemm|gemv|nvjet|cutlass|cublas|splitk|xmma|^triton_(tem_|mm)"),
    # Everything else that a marked site or its backward launches: dropout, residual add, casts, the norm.
    ("norm", _site, rf"^{NORM_SITE}$"),
    ("loss", _site, rf"^{LOSS_SITE}$|^aten::_?(log_softmax|nll_loss|cross_entropy)"),
    # Clipping and unscaling count as optimizer, as where a step is split in forward, backward and optimizer.
    ("optimizer", _within, r"^(Optimizer\.|aten::(_foreach_|_amp_|_fused_adam|linalg_vector_norm))"),
    # What no range has claimed, for instance since nothing was marked: eager kernels by name.
    ("optimizer", _kernel, r"multi_tensor_apply|adam"),
    ("loss", _kernel, r"nll_loss|log_?softmax|cunn_softmax"),
    ("norm", _kernel, r"layer_?norm|rms_?norm|GammaBeta|fused_dropout|masked_scale"),
)


def group_of(kernel: KernelTime) -> str:
    """One of GROUPS."""
    for group, where, pattern in RULES:
        if any(re.search(pattern, text, re.IGNORECASE) for text in where(kernel)):
            return group
    return "other"


# --- what launched it ---


@contextmanager
def marked_sites(model: nn.Module | None) -> Iterator[None]:
    """A range named NORM_SITE around each forward of the model's norm sites, and LOSS_SITE around its loss."""
    if model is None:
        yield
        return
    own, open_ranges = losses.cross_entropy, list[record_function]()

    def marked_loss(*given: Any) -> Tensor:
        with record_function(LOSS_SITE):
            return own(*given)

    def enter(*_: Any) -> None:
        open_ranges.append(record_function(NORM_SITE))
        open_ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    hooks = []
    for site in (module for module in model.modules() if isinstance(module, NormSite | QueryKeySite)):
        hooks += [site.register_forward_pre_hook(enter), site.register_forward_hook(leave, always_call=True)]
    losses.cross_entropy = marked_loss  # type: ignore[assignment]
    try:
        yield
    finally:
        losses.cross_entropy = own
        for hook in hooks:
            hook.remove()


Place = tuple[tuple[str, ...], tuple[str, ...]]  # `within` and `forward` of a KernelTime


def device_times(events: Sequence[FunctionEvent], steps: int) -> list[KernelTime]:
    """GPU time by kernel and place. All together, it is the time in which the GPU had something to do."""
    # The profiler draws ranges (ours, the optimizer's, torch.compile's) on the GPU's timeline too; there they span kernels that
    # are counted by themselves.
    ranges = {event.name for event in events if event.is_user_annotation} | {NORM_SITE, LOSS_SITE}
    ran = [event for event in events if event.device_type != DeviceType.CPU and event.name not in ranges]
    left: dict[tuple[str, float], list[float]] = defaultdict(list)  # what a kernel took alone, by what its launch knows of it
    for event, alone in _alone(ran):
        left[event.name, event.time_range.elapsed_us()].append(alone)
    place, launched = _places(events), []
    for event in events:
        # A driver call's number may by chance be an operator's, and then that operator's kernels are listed at the call again.
        if event.device_type != DeviceType.CPU or _DRIVER_CALL.match(event.name):
            continue
        for kernel in event.kernels:
            if same := left.get((kernel.name, kernel.duration)):
                launched.append((kernel.name, same.pop(0), place(event)))
    # Kernels that no operator has launched are in no operator's list, but they ran.
    launched += [(name, alone, ((), ())) for (name, _), rest in left.items() for alone in rest]
    return _summed(launched, steps)


def _alone(ran: Iterable[FunctionEvent]) -> Iterator[tuple[FunctionEvent, float]]:
    """Each kernel with the microseconds in which none that began before it still ran.

    With programmatic dependent launch a kernel begins to wait while the one before it ends: summed as they stand, both would
    count that time, which the norms' own kernels do and PyTorch's do not.
    """
    busy_until = -math.inf
    for event in sorted(ran, key=lambda event: event.time_range.start):
        yield event, max(0.0, event.time_range.end - max(event.time_range.start, busy_until))
        busy_until = max(busy_until, event.time_range.end)


_DRIVER_CALL = re.compile(r"(cu|cuda|hip)[A-Z]")  # cudaLaunchKernel, cuLaunchKernelEx, hipModuleLaunchKernel …


def host_times(events: Sequence[FunctionEvent], steps: int) -> list[KernelTime]:
    """The same of CPU operators, each with the time that is not its children's. Ranges count for nothing by themselves."""
    place = _places(events)
    ran = [e for e in events if e.device_type == DeviceType.CPU and not e.is_async and not e.is_user_annotation]
    return _summed([(event.name, event.self_cpu_time_total, place(event)) for event in ran], steps)


def _summed(launched: Iterable[tuple[str, float, Place]], steps: int) -> list[KernelTime]:
    """The launches (name, microseconds, place) of all steps by name and place, as the mean of a step, longest first."""
    found: dict[tuple[str, Place], list[float]] = defaultdict(list)
    for name, us, place in launched:
        found[name, place].append(us)
    kernels = [KernelTime(name, sum(us) / steps, len(us) / steps, *place) for (name, place), us in found.items()]
    return sorted(kernels, key=lambda kernel: -kernel.us)


def _places(events: Sequence[FunctionEvent]) -> Callable[[FunctionEvent], Place]:
    """A function that gives the place of what a CPU event launches.

    Autograd numbers its nodes as a forward thread makes them. The profiler notes the number on the node's backward, and on each
    forward operator the number that the next node will get (`sequence_nr`, read when the operator starts: ATen's
    Dispatcher::sequenceNumberForRunningRecordFunction). Several operators may carry one number, since many make no node; the
    last to start with it is the one that made the node.
    """
    makers: dict[tuple[int, int], FunctionEvent] = {}
    for event in events:
        if event.device_type == DeviceType.CPU and event.sequence_nr >= 0 and not event.fwd_thread:
            key = (event.thread, event.sequence_nr)
            if key not in makers or event.time_range.start >= makers[key].time_range.start:
                makers[key] = event

    def place(event: FunctionEvent) -> Place:
        within = tuple(_ancestors(event))
        nodes = ((e.fwd_thread, e.sequence_nr) for e in within if e.fwd_thread and e.sequence_nr >= 0)
        maker = makers.get(next(nodes, (0, -1)))
        return tuple(e.name for e in within), () if maker is None else tuple(e.name for e in _ancestors(maker))

    return place


def _ancestors(event: FunctionEvent | None) -> Iterator[FunctionEvent]:
    """The event and what is around it, outwards."""
    while event is not None:
        yield event
        event = event.cpu_parent
