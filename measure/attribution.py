"""Where the GPU time of a step goes, by kind of work.

A kernel's name is not enough: in eager code a site's dropout, residual add and casts run the same elementwise kernels as
the rest of the model. So the ranges of host code that launched a kernel decide. Norm sites are marked while the profiler runs,
and a kernel of backward belongs to the forward operator that it differentiates. torch.compile fuses across these ranges, but
names its kernels after the operators in them; there the name decides.

    GEMM       matrix products, forward and backward; not the casts of their weights, nor the sums that are bias gradients
    attention  scaled_dot_product_attention, forward and backward; not its projections or copies around it
    norm       norm sites: dropout, drop path, residual add, norm and their casts; also the norms and the rotary positions of
               queries and keys, but not the split of a projection that has neither
    loss       log-softmax and likelihood, with the casts around them; the head's product is a GEMM
    optimizer  update, clipping, loss scaling
    other      embeddings, activations, copies to the GPU, and casts
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

GROUPS = ("GEMM", "attention", "norm", "loss", "optimizer", "other")
NORM_SITE = "prenorm norm site"  # the range around a site's forward
QUERY_KEY_SITE = "prenorm query and key site"  # stands around what torch.compile makes of a model that has such
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


class Launch(NamedTuple):
    """One run of a GPU kernel, copy or fill."""

    name: str
    us: float  # without what overlaps with earlier kernels
    within: tuple[str, ...] = ()  # the host's ranges around the launch (operators, marks, backward nodes), innermost first
    forward: tuple[str, ...] = ()  # launched by backward: the ranges around the forward operator that it differentiates


def profile_step(
    step: Callable[[], object],
    device: torch.device,
    marks: AbstractContextManager[object] | None,
    within: str,
    *,
    steps: int = 3,
    warmup: int = 2,
) -> list[Kernel]:
    """What a step launches on a GPU, and how long that runs.

    Args:
        step: one training step.
        marks: ranges NORM_SITE around the norm sites of the model, and LOSS_SITE around its loss. None where the step runs
            compiled: there, marks would make torch.compile start anew, and vanish in its kernels.
        within: the range around what torch.compile has made: NORM_SITE of a model that runs eager, QUERY_KEY_SITE of a compiled
            one that norms or turns queries and keys, or "".
        steps: profiled steps; results are their mean.
        warmup: steps before them, unmarked.
    """
    for _ in range(warmup):
        step()
    torch.cuda.synchronize(device)
    with marks or nullcontext(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize(device)
    launches = gpu_launches(list(profiler.events() or ()))
    return summed((with_mark(launch, within) for launch in launches), steps)


def with_mark(launch: Launch, within: str) -> Launch:
    """What torch.compile has made, within this: of a model that runs eager it makes norm sites and the loss alone."""
    return launch._replace(within=(*launch.within, within)) if within and launch.name.startswith("triton_") else launch


def summed(launches: Iterable[Launch], steps: int) -> list[Kernel]:
    """The launches of all steps by name and group, as the mean of a step, longest first."""
    members: dict[tuple[str, str], list[float]] = defaultdict(list)
    for launch in launches:
        members[launch.name, group_of(launch.name, launch.within, launch.forward)].append(launch.us)
    kernels = [Kernel(*key, sum(us) / 1000 / steps, len(us) / steps) for key, us in members.items()]
    return sorted(kernels, key=lambda kernel: -kernel.ms)


def shares(kernels: Sequence[Kernel]) -> list[Share]:
    """The time of a step by kind of work: one Share for each of GROUPS, in that order. They sum to the kernels' total."""
    members = {group: [kernel for kernel in kernels if kernel.group == group] for group in GROUPS}
    return [Share(group, sum(kernel.ms for kernel in of), launches(of)) for group, of in members.items()]


def launches(kernels: Iterable[Kernel]) -> int:
    """Kernels a step. Copies and fills that the driver does by itself are not among them, though their time is in `shares`."""
    return round(sum(kernel.launches for kernel in kernels if not kernel.name.startswith(("Memcpy", "Memset"))))


# --- which group ---

# The first that matches decides: the group, and a pattern without case for lines "kernel NAME", "within RANGE" for each range,
# innermost first, and then "forward RANGE" for each.
RULES = (
    # An activation of ours; it is counted with those of PyTorch.
    ("other", r"^(kernel activation(_backward)?_kernel|within prenorm_\w+::activation)"),
    # Our kernels: eager code launches them past the dispatcher, so that no operator is around them.
    ("norm", r"^kernel ((norm|rotary)_(forward|backward)|finish_weight_gradients|finish_rotary_weights|dropout)_kernel"),
    # From PyTorch 2.13 on F.rms_norm runs them where CuTe's packages are installed; names of CuTe's kernels begin with cutlass.
    ("norm", r"^kernel .*quack.*norm"),
    ("loss", r"^kernel (cross_entropy|cross_entropy_gradient|count_targets|sum_losses)_kernel"),
    # The operator of the head's product with its loss has matrix products inside.
    ("GEMM", r"^within aten::(mm|addmm)\n(within .*\n)*within .*::linear_cross_entropy"),
    ("loss", r"^within prenorm_\w+::(linear_)?cross_entropy"),
    # Under torch.compile they run inside our operators, with the fills that these need.
    ("norm", r"^within prenorm_\w+::"),
    # Inductor names a kernel after all operators fused into it, also those that it only feeds: its kernels are settled before
    # any other name is looked at. Embeddings or sums of bias gradients that share a kernel with a norm count as norm.
    # The loss's softmax may be named prepare_softmax_online alone; it is the only one, attention has kernels of its own.
    ("loss", r"^kernel triton_(?!tem_|mm).*(nll_loss|log_softmax|softmax_online)"),
    # Sites that are compiled alone; see `with_mark`.
    ("norm", rf"^kernel triton_.*\n(within .*\n)*within {NORM_SITE}$"),
    # A bias gradient: the sum, over rows, of what a dropout's backward gives, made anew for it. It takes as long as the plain
    # triton_red_fused_sum_view_ that stands in its place with fused norms.
    ("other", r"^kernel triton_(red|per)_fused_(_to_copy_)?native_dropout_backward_sum_(view_)?\d+$"),
    ("norm", r"^kernel triton_(?!tem_|mm).*(layer_norm|rms_norm|rsqrt|native_dropout|bernoulli|inductor_random)"),
    # A cast alone: of the gradient that leaves a site of an fp32 stream, where no dropout's backward takes it in. Flattened to
    # rows for the matrix product behind it, hence the view; casts of weights have none. A fused site writes it by itself.
    ("norm", r"^kernel triton_poi_fused__to_copy_view_\d+$"),
    # The turn of queries and keys joins two halves, and its backward the gradients of queries, keys and values. So does that of
    # a gated MLP, with its activation in the name. Where nothing is turned or normed, the split of the projection joins them.
    ("norm", rf"^kernel triton_(?!tem_|mm|.*(silu|sigmoid)).*_cat_.*\n(within .*\n)*within {QUERY_KEY_SITE}$"),
    ("other", r"^kernel triton_(?!tem_|mm)"),
    # Where inductor makes the gradients of a norm's input and of its weights in one kernel ("mix-order reduction"), it adds the
    # programs' partial sums of the latter up by an operator; it calls sum for nothing else.
    ("norm", r"^kernel .*\nwithin aten::sum\n(within .*\n)*within (CompiledFunction|## Call CompiledFxGraph)"),
    # Before GEMM: the math backend is made of matrix products, flash kernels have cutlass types in their names.
    ("attention", r"^(within|forward) aten::_?(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)"),
    ("attention", r"^kernel .*(flash|fmha|sdpa|attention|cudnn::fusion)"),
    # Matrix products by operator, for the kernels around one (split-K sums, fills). Not by forward's operator: the sum of a
    # bias gradient is launched by an addmm's backward and multiplies nothing.
    ("GEMM", r"^within aten::(mm|addmm|bmm|baddbmm|_addmm_activation|_scaled_mm)$"),
    ("GEMM", r"^kernel (.*(gemm|gemv|nvjet|cutlass|cublas|splitk|xmma)|triton_(tem_|mm))"),
    # Everything else that a marked site or its backward launches: dropout, residual add, casts, the norm.
    ("norm", rf"^(within|forward) {NORM_SITE}$"),
    ("loss", rf"^(within|forward) ({LOSS_SITE}$|aten::_?(log_softmax|nll_loss|cross_entropy))"),
    # Clipping and unscaling count as optimizer, as where a step is split in forward, backward and optimizer.
    ("optimizer", r"^within (Optimizer\.|aten::(_foreach_|_amp_|_fused_adam|linalg_vector_norm))"),
    # What no range has claimed, for instance since nothing was marked: eager kernels by name.
    ("optimizer", r"^kernel .*(multi_tensor_apply|adam)"),
    ("loss", r"^kernel .*(nll_loss|log_?softmax|cunn_softmax)"),
    ("norm", r"^kernel .*(layer_?norm|rms_?norm|GammaBeta|fused_dropout|masked_scale)"),
)


@cache
def group_of(name: str, within: tuple[str, ...] = (), forward: tuple[str, ...] = ()) -> str:
    """One of GROUPS."""
    lines = "\n".join([f"kernel {name}", *(f"within {of}" for of in within), *(f"forward {of}" for of in forward)])
    return next((group for group, pattern in RULES if re.search(pattern, lines, re.IGNORECASE | re.MULTILINE)), "other")


# --- what launched it ---


def gpu_launches(events: Sequence[FunctionEvent]) -> list[Launch]:
    """What ran on the GPU, and from where. All together, it is the time in which the GPU had something to do."""
    # The profiler draws ranges (ours, the optimizer's, torch.compile's) on the GPU's timeline too; there they span kernels that
    # are counted by themselves.
    ranges = {event.name for event in events if event.is_user_annotation} | {NORM_SITE, LOSS_SITE}
    ran = [event for event in events if event.device_type != DeviceType.CPU and event.name not in ranges]
    # Each kernel counts for the time in which none that began before it still ran. With programmatic dependent launch a kernel
    # begins to wait while the one before it ends: summed as they stand, both would count that time, which the norms' own
    # kernels do and PyTorch's do not.
    left: dict[tuple[str, float], list[float]] = defaultdict(list)  # that time, by what a kernel's launch knows of it
    busy_until = -math.inf
    for event in sorted(ran, key=lambda event: event.time_range.start):
        alone = max(0.0, event.time_range.end - max(event.time_range.start, busy_until))
        busy_until = max(busy_until, event.time_range.end)
        left[event.name, event.time_range.elapsed_us()].append(alone)
    place, found = places(events), list[Launch]()
    for event in events:
        # A driver call's number may by chance be an operator's, and then that operator's kernels are listed at the call again.
        if event.device_type != DeviceType.CPU or _DRIVER_CALL.match(event.name):
            continue
        for kernel in event.kernels:
            if same := left.get((kernel.name, kernel.duration)):
                found.append(Launch(kernel.name, same.pop(0), *place(event)))
    # Kernels that no operator has launched are in no operator's list, but they ran.
    return found + [Launch(name, alone) for (name, _), rest in left.items() for alone in rest]


_DRIVER_CALL = re.compile(r"(cu|cuda|hip)[A-Z]")  # cudaLaunchKernel, cuLaunchKernelEx, hipModuleLaunchKernel …


def places(events: Sequence[FunctionEvent]) -> Callable[[FunctionEvent], tuple[tuple[str, ...], tuple[str, ...]]]:
    """A function that gives `within` and `forward` of what a CPU event launches.

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

    def place(event: FunctionEvent) -> tuple[tuple[str, ...], tuple[str, ...]]:
        within = list(_ancestors(event))
        nodes = ((e.fwd_thread, e.sequence_nr) for e in within if e.fwd_thread and e.sequence_nr >= 0)
        maker = makers.get(next(nodes, (0, -1)))
        return tuple(e.name for e in within), tuple(e.name for e in _ancestors(maker))

    return place


def _ancestors(event: FunctionEvent | None) -> Iterator[FunctionEvent]:
    """The event and what is around it, outwards."""
    while event is not None:
        yield event
        event = event.cpu_parent
