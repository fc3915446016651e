"""Kinds of work: by the names of kernels, by the places that launch them, and of a whole step in CPU operators."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from ablation.arms import build_arm
from ablation.config import Config
from ablation.gpu_time import marked_sites
from configs.schema import LossImpl, NormKind
from data import Batches
from measure import attribution
from measure.attribution import LOSS_SITE, NORM_SITE, Kernel, Launch, gpu_launches, group_of, shares, summed
from model import loss as losses
from model.loss import cross_entropy
from tests.runs import config, precision

VOCABULARY = 64
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
SUM = "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float> >"
NAMES = [
    ("norm", "triton_red_fused__to_copy_add_native_layer_norm_native_dropout_3"),
    ("norm", "triton_poi_fused__to_copy_view_2"),
    ("norm", "kernel_cutlass_kernel_torch_vendorquackrmsnormRMSNorm_object_at__tensorptrbf16gmemalign16o768_0"),
    ("norm", "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_view_4"),
    ("norm", "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 32u, 8u, 64u>(long)"),
    ("norm", "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>(...)"),
    ("GEMM", "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN"),
    ("GEMM", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off__5x_cublas"),
    ("GEMM", "triton_tem_fused_addmm_5"),
    ("attention", "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, cutlass::bfloat16_t>>"),
    ("attention", "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128, 64, 128>(...)"),
    ("loss", "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, LogSoftMaxForwardEpilogue>"),
    ("loss", "triton_red_fused__to_copy_prepare_softmax_online_view_33"),
    ("loss", "cross_entropy_kernel"),
    (
        "optimizer",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float>>",
    ),
    ("other", "triton_poi_fused_cat_fill_mul_sigmoid_silu_sub_view_8"),  # of a gated MLP
    ("other", "triton_red_fused__to_copy_native_dropout_backward_sum_view_2"),  # a bias gradient, dropout's backward made anew
    ("other", "Memcpy HtoD (Pinned -> Device)"),
]
PLACES = [
    ("norm", ELEMENTWISE, ("aten::fill_", "prenorm_ops::norm_forward"), ()),
    ("other", ELEMENTWISE, ("aten::copy_", "aten::to", "aten::linear"), ()),
    ("other", ELEMENTWISE, ("aten::sum", "AddmmBackward0"), ("aten::addmm", "aten::linear")),
    ("GEMM", ELEMENTWISE, ("aten::fill_", "aten::mm", "MmBackward0"), ("aten::mm",)),
    ("attention", ELEMENTWISE, ("aten::bmm", "BmmBackward0"), ("aten::bmm", "aten::scaled_dot_product_attention")),
    ("loss", ELEMENTWISE, ("aten::copy_", "ToCopyBackward0"), ("aten::to", "aten::log_softmax")),
    # partial sums of a norm's weight gradients, which compiled code adds up; of a bias; and a mean
    ("norm", SUM, ("aten::sum", "## Call CompiledFxGraph fxyz ##", "CompiledFunctionBackward"), ()),
    ("other", SUM, ("aten::sum", "AddmmBackward0"), ()),
    ("other", SUM, ("aten::mean", "CompiledFunction"), ()),
    ("GEMM", "nvjet_tst_128x256", ("aten::mm", "aten::linear", "prenorm_ops::linear_cross_entropy_forward"), ()),
    ("loss", SUM, ("aten::sum", "prenorm_ops::linear_cross_entropy_forward"), ()),
]


def test_a_kernels_name_and_place_give_its_group():
    for group, name, within, forward in [*PLACES, *((group, name, (), ()) for group, name in NAMES)]:
        assert group_of(name, within, forward) == group, (name, within)
    launches = [Launch(SUM, us, within) for us, (_, _, within, _) in zip((30, 20, 12), PLACES[6:9], strict=True)]
    assert summed(2 * launches, 2) == [Kernel(SUM, "other", 0.032, 2), Kernel(SUM, "norm", 0.03, 1)], "one line for each kind"
    # In a model that runs eager, what torch.compile makes are sites, whose names may tell nothing, and the loss.
    compiled = [Launch("triton_poi_fused_add_0", 1.0), Launch("triton_red_fused_nll_loss_1", 1.0), Launch(ELEMENTWISE, 1.0)]
    assert [group_of(*launch[:1]) for launch in compiled] == ["other", "loss", "other"], "of a model that is compiled whole"
    marked = [attribution.with_mark(launch, NORM_SITE) for launch in compiled]
    assert [group_of(m.name, m.within) for m in marked] == ["norm", "loss", "other"]
    # The gradients of queries, keys and values are joined by their turn, or by the split of a projection alone.
    joined = Launch("triton_poi_fused__scaled_dot_product_flash_attention_cat_mul_transpose_6", 1.0)
    turned = attribution.with_mark(joined, attribution.QUERY_KEY_SITE)
    assert [group_of(j.name, j.within) for j in (joined, turned)] == ["other", "norm"]


@pytest.fixture(scope="module")
def operators():
    """A function: the CPU operators of a training step, as if each was a GPU kernel."""

    def of(cfg, dtype):
        tokens = torch.randint(VOCABULARY, (9 * cfg.model.context,)).numpy()
        batches = Batches(tokens, context=cfg.model.context, batch_size=2, seed=0)
        arm = build_arm("torch", Config(**vars(cfg)), precision(dtype), SimpleNamespace(vocab_size=VOCABULARY), batches)
        arm.step(0)
        with marked_sites(arm.state.model), profile(activities=[ProfilerActivity.CPU]) as profiler:
            arm.step(1)
        assert not any("forward" in vars(module) for module in arm.state.model.modules()), "the marks are gone"
        assert losses.cross_entropy is cross_entropy, "the mark of the loss too"
        events = [e for e in profiler.events() if e.device_type == DeviceType.CPU and not e.is_async]
        place = attribution.places(events)
        return [Launch(e.name, e.self_cpu_time_total, *place(e)) for e in events if not e.is_user_annotation]

    return of


@pytest.mark.parametrize(("kind", "dtype"), [(NormKind.layernorm, torch.bfloat16), (NormKind.rmsnorm, torch.float32)])
def test_all_operators_of_a_step_are_in_their_groups_in_forward_and_backward_and_sum_to_the_total(operators, dtype, kind):
    cfg, sites = config(attention_dropout=0.0), 5
    cfg.norm.kind, cfg.loss.impl = kind, LossImpl.torch
    launches = operators(cfg, dtype)

    def groups(found):
        return [group_of(launch.name, launch.within, launch.forward) for launch in found]

    def named(*names):
        return [launch for launch in launches if launch.name in names]

    wanted = {"GEMM": ["addmm"], "optimizer": ["_fused_adamw_"], "other": ["gelu_backward", "embedding_dense_backward"]}
    wanted["loss"] = ["_log_softmax", "_log_softmax_backward_data", "nll_loss_backward"]
    for group, name in ((group, name) for group, names in wanted.items() for name in names):
        assert set(groups(named(f"aten::{name}"))) == {group}, name
    casts = [launch for launch in named("aten::copy_") if LOSS_SITE in launch.within + launch.forward]
    assert set(groups(casts)) == ({"loss"} if dtype == torch.bfloat16 else set()), "of logits and of their gradient"
    assert groups(named("aten::bernoulli_")) == ["norm"] * sites
    split = [
        launch for launch in launches if launch.name == "aten::cat" and launch.within[-1].endswith("SplitWithSizesBackward0")
    ]
    assert groups(split) == ["other"] * (sites // 2), "the gradients of queries, keys and values, where nothing turns them"
    # The positions are added outside a site, and CPU attention may add; each site but the first adds its residual.
    adds = [launch for launch in named("aten::add") if NORM_SITE in launch.within and "aten::layer_norm" not in launch.within]
    assert set(groups(adds)) == {"norm"} and len(adds) >= sites - 1
    dropouts = [launch for launch in named("MulBackward0") if {NORM_SITE, "aten::dropout"} <= set(launch.forward)]
    assert groups(dropouts) == ["norm"] * sites
    if kind == NormKind.layernorm:
        for name in ("aten::native_layer_norm", "aten::native_layer_norm_backward"):
            assert groups(named(name)) == ["norm"] * sites
        # what backward adds up: the gradients of the stream, which the final norm has none of
        sums = [launch for launch in named("aten::add", "aten::add_") if "NativeLayerNormBackward0" in launch.within[-1]]
        assert groups(sums) == ["norm"] * (sites - 1)
    table = shares(summed(launches, steps=1))
    assert tuple(share.group for share in table) == attribution.GROUPS and all(share.ms > 0 for share in table)
    assert sum(share.ms for share in table) == pytest.approx(sum(launch.us for launch in launches) / 1000)
    assert sum(share.launches for share in table) == len(launches)


def test_the_names_of_our_kernels_are_the_ones_in_the_rules():
    pytest.importorskip("triton")
    from ops.kernels import backward, dropout, forward, rotary, weight_gradients

    ours = [rotary.rotary_forward_kernel, rotary.rotary_backward_kernel, rotary.finish_rotary_weights_kernel]
    ours += [forward.norm_forward_kernel, backward.norm_backward_kernel, weight_gradients.finish_weight_gradients_kernel]
    assert {group_of(kernel.fn.__name__) for kernel in (*ours, dropout.dropout_kernel)} == {"norm"}


def event(id_, name, start, end, parent=None, *, device=DeviceType.CPU, thread=1, annotation=False, **more) -> FunctionEvent:
    more |= {"device_type": device, "is_user_annotation": annotation, "use_device": "cuda"}
    made = FunctionEvent(id_, name, thread, start, end, **more)
    if parent is not None:
        parent.append_cpu_child(made)
        made.set_cpu_parent(parent)
    return made


def test_gpu_kernels_go_by_what_launched_them_and_none_is_lost_or_counted_twice():
    site = event(1, NORM_SITE, 0, 100, annotation=True)
    drop = event(2, "aten::native_dropout", 10, 20, site, sequence_nr=7)
    early = event(6, "aten::empty", -9, -8, sequence_nr=7)  # which makes no node: the next operator gets its number
    late = event(3, "aten::add", 110, 120, sequence_nr=8)
    node = event(4, "NativeDropoutBackward0", 200, 220, thread=2, fwd_thread=1, sequence_nr=7)
    back = event(5, "aten::native_dropout_backward", 205, 215, node, thread=2)
    launched = [
        (drop, ELEMENTWISE, 500, 530),
        (late, ELEMENTWISE, 540, 545),
        (back, ELEMENTWISE, 600, 640),
        (None, "norm_forward_kernel", 700, 711),  # ours: no operator around it
        (None, "Memcpy HtoD (Pinned -> Device)", 720, 722),
    ]
    events = [early, site, drop, late, node, back]
    for launcher, name, start, end in launched:
        events.append(event(0, name, start, end, device=DeviceType.CUDA))
        if launcher is not None:
            launcher.append_kernel(name, 0, end - start)
    events.append(event(0, NORM_SITE, 500, 530, device=DeviceType.CUDA, annotation=True))  # the range on the GPU's timeline
    site.append_kernel(NORM_SITE, 0, 30)
    call = event(3, "cuLaunchKernelEx", 30, 31, site)  # numbered like `late`, so the profiler lists its kernels here too
    call.append_kernel(ELEMENTWISE, 0, 5)
    events.insert(0, call)
    for name in ("Optimizer.step#AdamW.step", NORM_SITE):  # ranges of the host, whether or not they are flagged as such there
        events.append(event(0, name, 0, 5, annotation=True))
        events += [event(0, name, 500, 640, device=DeviceType.CUDA, annotation=flag) for flag in (True, False)]
    launches = gpu_launches(events)
    found = {share.group: (share.ms, share.launches) for share in shares(summed(launches, steps=1))}
    assert found["norm"] == (pytest.approx((30 + 40 + 11) / 1000), 3)
    assert found["other"] == (pytest.approx((5 + 2) / 1000), 1)
    assert sum(launch.us for launch in launches) == pytest.approx(88)


def test_time_in_which_a_kernel_waits_for_the_one_before_it_is_counted_once():
    """Programmatic dependent launch: the sum over programs takes its place while backward still runs."""
    node = event(1, "NormBackward", 0, 50)
    ran = {
        "norm_backward_kernel": (100, 160),
        "finish_weight_gradients_kernel": (140, 165),  # of which it works for 5
        "nvjet_tst_192x192": (165, 265),
        "Memcpy HtoD (Pinned -> Device)": (200, 220),  # of another stream
    }
    events = [node, *(event(0, name, start, end, device=DeviceType.CUDA) for name, (start, end) in ran.items())]
    for name in ("finish_weight_gradients_kernel", "norm_backward_kernel"):
        node.append_kernel(name, 0, ran[name][1] - ran[name][0])
    found = {launch.name: (launch.us, len(launch.within)) for launch in gpu_launches(events)}
    assert found == dict(zip(ran, [(60, 1), (5, 1), (100, 0), (0, 0)], strict=True))
