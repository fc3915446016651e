"""The programs that measure kernels, on tiny sizes: what their options choose, what they record, and what they say."""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from benchmarks import bandwidth, command, host, losses, memory, norms, providers, rotary, sites
from benchmarks.bandwidth import WrongResult
from benchmarks.cases import CASES, MODEL_WIDTHS, MOST_ELEMENTS, SITES
from tests.runs import raising

CPU = ["--device", "cpu", "--rounds", "2"]
LN_64 = [*CPU, "--case", "ln", "--width", "64", "--direction", "forward"]
OURS = ["--provider", "ours", "torch"]
BOTH = ("forward", "backward")


@pytest.fixture
def no_compiler(monkeypatch):
    """torch.compile left out: it takes seconds a width."""
    monkeypatch.setattr(host, "compiled", lambda expression: expression)


@pytest.fixture
def shapes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return lambda *arguments: norms.shapes_of(norms.options_of(arguments))


def cells(file, *names):
    return {tuple(record[name] for name in names) for record in file["records"]}


# ---- norms and sites --------------------------------------------------------------------------------------------------------


def test_the_sweep_is_every_case_and_stream_unless_options_choose_a_part(shapes):
    found = shapes()
    streams = {True: ("bf16", "fp32"), False: (None,)}
    assert {(s.case.name, s.residual, s.weights) for s in found} == {
        (n, r, "bf16") for n, c in CASES.items() for r in streams[c.add]
    }
    assert all(s.rows == min(32768, MOST_ELEMENTS // s.width) for s in found) and len(shapes("--quick")) == 2
    assert [(s.case.name, s.width, s.rows) for s in shapes("--quick", "--width", "512", "--case", "ln", "--rows", "8")] == [
        ("ln", 512, 8)
    ]
    models = shapes("--models")
    assert {s.width for s in models} == set(MODEL_WIDTHS) and {s.weights for s in models} == {"fp32"}
    assert {(s.case.name, s.residual) for s in models} == {(n, r) for n, c in CASES.items() if c.add for r in ("bf16", "fp32")}


def test_random_shapes_depend_on_the_seed_alone_and_are_of_every_kind_within_bounds():
    assert norms.random_shapes(3, 40)[:5] == norms.random_shapes(3, 5) != norms.random_shapes(4, 5)
    found = norms.random_shapes(0, 400)
    assert all(256 <= s.width <= 16384 and s.width % 8 == 0 and s.rows * s.width >= 2**21 for s in found)
    streams = {True: ("bf16", "fp32"), False: (None,)}
    kinds = {(n, r, w) for n, c in CASES.items() for r in streams[c.add] for w in ("bf16", "fp32")}
    assert {(s.case.name, s.residual, s.weights) for s in found} == kinds


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "cpu", "--width", "0"], "0 is not positive"),
        (["--device", "cpu", "--random", "2", "--case", "ln"], "leave --case, "),
        (["--device", "cpu", "--before", "."], ". is not a copy of ops/"),
        pytest.param(["--quick"], "--device cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    ],
)
def test_wrong_options_are_refused_with_what_is_accepted(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        norms.main(arguments)
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_case_width_provider_residual_and_direction_choose_what_is_measured(recorded, monkeypatch):
    monkeypatch.setattr(bandwidth.timing, "copy_bandwidth", lambda *of: 10.0)
    chosen = "--case ln dropout_add_rms --width 64 48 --residual fp32 --direction backward"
    file, _ = recorded(norms, *CPU, *chosen.split(), *OURS)
    assert cells(file, "case", "direction", "residual_dtype", "M", "N", "provider") == {
        (case, "backward", dtype, 64, n, provider)
        for case, dtype in (("ln", None), ("dropout_add_rms", "fp32"))
        for n in (64, 48)
        for provider in ("ours", "torch")
    }
    for record in file["records"]:
        assert record["p10"] <= record["us"] <= record["p90"] and record["sets"] >= 2
        assert record["share"] == pytest.approx(record["gb_per_s"] / 10.0, abs=0.01) and record["copy_gb_per_s"] == 10.0


def test_a_table_of_ours_the_others_and_another_revision_is_printed(recorded):
    ops = str(Path(providers.__file__).parents[1] / "ops")  # another revision, timed beside ours
    file, printed = recorded(norms, *CPU, "--case", "rms", "--width", "64", *OURS, "--before", ops)
    assert {r["provider"] for r in file["records"]} == {"ours", "torch", "before"}
    assert not any(r.get("error") for r in file["records"]) and len(file["environment"]["versions"]["before"]) == 12
    assert all(("times_ours" in r) == (r["provider"] != "ours") for r in file["records"])
    header, line, *_ = printed.splitlines()
    assert "fastest other" in header and header.endswith("before / ours") and "RMS, forward 64×64" in line
    assert file["command"].endswith(f"--before {ops}")


def test_a_provider_that_fails_is_recorded_beside_the_others_also_where_warm_compiles_it(recorded, monkeypatch):
    pool = ThreadPoolExecutor(1)  # processes take seconds
    monkeypatch.setattr(providers, "ProcessPoolExecutor", lambda *of: pool)
    monkeypatch.setitem(providers.PROVIDERS, "torch", raising(RuntimeError("no kernel")))
    file, printed = recorded(norms, *LN_64, *OURS, "--warm", "2")
    found = [(r["provider"], r["us"] is None, r.get("error")) for r in file["records"]]
    assert found == [("ours", False, None), ("torch", True, "RuntimeError: no kernel")]
    assert "failed: torch, LN, forward 64×64: RuntimeError: no kernel" in printed


@pytest.mark.parametrize(("rounds", "told"), [(5, False), (6, True)])
def test_a_ratio_over_few_rounds_has_no_interval_to_call_it_faster_by(rounds, told):
    ours, peer = (bandwidth.timing.Outcome(us=[us + 0.01 * i for i in range(rounds)]) for us in (10.0, 12.0))
    record = bandwidth.record_of(peer, ours, 1000, 4000.0)
    assert record["times_ours"] == pytest.approx(1.2, abs=0.01) and ("times_ours_95" in record) == told


def test_a_library_that_is_missing_is_told_and_refused_where_it_was_asked_for(monkeypatch, capsys):
    errors = [ImportError("no quack"), RuntimeError("no CUDA device\nfound"), ImportError("no quack")]
    monkeypatch.setattr(command, "import_module", Mock(side_effect=errors))
    assert command.importable(None, ["quack-kernels", "liger-kernel"]) == []
    said = capsys.readouterr().err
    assert said == "missing: quack-kernels (ImportError: no quack)\nmissing: liger-kernel (RuntimeError: no CUDA device\n"
    with pytest.raises(SystemExit, match=r"--provider: .* quack-kernels .ImportError"):
        norms.main([*LN_64, "--provider", "quack-kernels"])


def test_sites_have_shares_for_each_case_stream_and_direction(recorded):
    file, printed = recorded(sites, *CPU, "--width", "64", *OURS)
    assert [r for r in file["records"] if r.get("error") or not r["share"] > 0] == []
    streams = [(case, direction, stream) for case in SITES for direction in BOTH for stream in ("bf16", "fp32")]
    assert cells(file, "case", "direction", "residual_dtype") == set(streams)
    assert "norm+add+norm, fp32 stream, fp32 weights, backward 64×64" in printed


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_every_case_is_measured_on_a_gpu(case, recorded):
    size = ["--rounds", "3", "--rows", "4096", "--width", "1024"]
    records = recorded(norms, *size, "--case", case, "--provider", "ours", "torch", "compile")[0]["records"]
    assert len(records) == (16 if CASES[case].add else 8)  # three providers and the bound
    assert [r for r in records if r.get("error")] == [] and all(r["share"] > 0 for r in records)


# ---- rotary positions and losses --------------------------------------------------------------------------------------------


SHAPE = rotary.Shape(3, 1, 16)


def test_rotary_has_shares_and_ratios_for_each_direction(recorded):
    file, printed = recorded(rotary, *CPU, "--heads", "3/1x16", *OURS)
    expected = {(c, d, name) for c in rotary.NORMS for d in BOTH for name in ("ours", "torch")}
    assert cells(file, "case", "direction", "provider") == expected
    assert all(r["share"] > 0 and (r["heads"], r["kv_heads"], r["D"], r["M"]) == (*SHAPE, 64) for r in file["records"])
    assert "RMS+rotary, backward 64×3/1 × 16" in printed
    for text in ("32x128", "8/4x15", "0/1x16"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not like 32/8x128"):
            rotary.shape_of(text)


def test_minimum_bytes_of_rotary_are_those_of_a_count_by_hand():
    # 4 heads of q and k with 16 features of 2 bytes: x and y; dq, dk, q and k, dx; and dv of one head, read and written
    assert rotary.minimum_bytes("rms_rotary", "forward", SHAPE, 10) == 10 * 64 * 4
    assert rotary.minimum_bytes("rms_rotary", "backward", SHAPE, 10) == 10 * (64 * 6 + 16 * 4)
    assert rotary.minimum_bytes("rotary", "backward", SHAPE, 10) == 10 * (64 * 4 + 16 * 4)


@pytest.mark.parametrize("case", rotary.NORMS)
def test_a_wrong_result_of_rotary_is_found(case):
    (inputs,) = rotary.make_inputs(case, SHAPE, 64, 1, torch.device("cpu"))
    right = rotary.ours(case, SHAPE)
    rotary.check(case, SHAPE, True, inputs, right)

    def without_turn(qkv, *others):
        q, _, v = right(qkv, *others)
        return q, qkv.unflatten(-1, (-1, 16))[..., 3:4, :], v

    def without_gradient(qkv, *others):
        return tuple(t.detach() + 0 * qkv.sum() + 0 * t for t in right(qkv, *others))

    with pytest.raises(WrongResult, match="output 1 is off"):
        rotary.check(case, SHAPE, False, inputs, without_turn)
    with pytest.raises(WrongResult, match="gradient 0 is off"):
        rotary.check(case, SHAPE, True, inputs, without_gradient)


def test_losses_records_every_case_and_a_wrong_gradient_is_a_failure_of_its_library(recorded, monkeypatch):
    def wrong(logits, targets):
        return 2 * losses.torch_loss(logits, targets) - losses.torch_loss(logits.detach(), targets)

    monkeypatch.setitem(losses.MAKERS["cross_entropy"], "compile", lambda: wrong)
    file, printed = recorded(losses, *CPU, "--quick", *OURS)
    assert "cross-entropy, bf16, both 64×512" in printed
    assert cells(file, "case", "direction") == {
        *((case, direction) for case in ("softmax", "log_softmax") for direction in BOTH),
        ("cross_entropy", "both"),
    }
    assert all(r["us"] > 0 and r["share"] > 0 and "error" not in r for r in file["records"]) and len(file["records"]) == 10
    file, _ = recorded(losses, *CPU, "--quick", "--case", "cross_entropy", "--provider", "compile")
    (record,) = file["records"]
    assert record["us"] is None and "WrongResult: gradient is off" in record["error"]


# ---- host and memory --------------------------------------------------------------------------------------------------------


def test_host_times_both_directions_of_every_provider_and_of_ours_compiled(recorded, no_compiler):
    file, printed = recorded(host, *CPU, *OURS)
    expected = {(p, d) for p in ("ours", "ours-compiled", "torch") for d in ("forward", "forward+backward")}
    assert cells(file, "provider", "direction") == expected
    assert all(r["p10"] <= r["us"] <= r["p90"] and (r["M"], r["N"]) == (8, 64) for r in file["records"])
    assert "ours-compiled" in printed and "forward + backward" in printed


def test_memory_covers_cases_streams_and_providers(recorded):
    file, printed = recorded(memory, *CPU, "--rows", "16", "--width", "32", *OURS)
    assert len(file["records"]) == 2 * 2 * 2
    for r in file["records"]:
        assert r["blocks"] == 8 and r["M"] == 16 and r["kept"] is None and "error" not in r, "not on a CPU"
    assert "dropout+add+RMS" in printed and "No bytes: PyTorch counts those of a GPU alone." in printed


def test_chain_hands_both_streams_from_block_to_block(monkeypatch):
    monkeypatch.setattr(memory, "BLOCKS", 2)
    shape = memory.Shape(CASES["add_ln"], "fp32", "bf16", 4, 32)
    (inputs,) = memory.make_inputs(shape, 1, torch.device("cpu"))
    x, residual, weight, bias, *_ = inputs.args
    y, r = memory.chain("torch", shape)(*inputs.args)
    r1 = residual + x
    y1 = F.layer_norm(r1, (32,), weight.float(), bias.float(), 1e-5).bfloat16()
    assert torch.equal(r, r1 + y1) and y.dtype == torch.bfloat16


@pytest.mark.gpu
def test_fused_chain_keeps_less_than_torch_does():
    device, shape = torch.device("cuda", 0), memory.Shape(CASES["dropout_add_ln"], "fp32", "bf16", 1024, 1024)
    (inputs,) = memory.make_inputs(shape, 1, device)
    ours, plain = (memory.measure(memory.chain(provider, shape), inputs, device) for provider in ("ours", "torch"))
    assert 0 < ours["kept"] < plain["kept"] and ours["peak"] < plain["peak"]
