"""The programs that measure kernels, on tiny sizes: what their options choose, what they record, and what they say."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import activation, bandwidth, gated, host, losses, memory, modulated, norms, providers, rotary, sites
from benchmarks.bandwidth import WrongResult
from benchmarks.cases import CASES, MODEL_WIDTHS, MOST_ELEMENTS, SITES, Shape
from tests.runs import raising

CPU = ["--device", "cpu", "--rounds", "2"]
OURS = ["--provider", "ours", "torch"]
BOTH, STREAMS = ("forward", "backward"), ("bf16", "fp32")
HEADS = (3, 1, 16)


def test_models_are_cases_with_a_stream_at_the_widths_of_models(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shapes = norms.shapes_of(norms.options_of(["--models"]), CASES, norms.rows_of)
    assert {s.width for s in shapes} == set(MODEL_WIDTHS) and {s.weights for s in shapes} == {"fp32"}
    assert {(s.case.name, s.residual) for s in shapes} == {(n, r) for n, c in CASES.items() if c.add for r in STREAMS}
    assert all(s.rows == min(32768, MOST_ELEMENTS // s.width) for s in shapes)


@pytest.mark.parametrize(
    ("program", "chosen", "expected"),
    [
        (norms, "--case ln dropout_add_rms --width 64 --residual fp32", {("ln", None, 64), ("dropout_add_rms", "fp32", 64)}),
        (sites, "--width 64", {(case, stream, 64) for case, stream in product(SITES, STREAMS)}),
        (rotary, "", {(case, None, None) for case in rotary.CASES}),
        (activation, "", {(case, None, 160) for case in activation.CASES}),
        (modulated, "", {(case, None, 160) for case in modulated.CASES}),
        (gated, "", {(case, None, 160) for case in gated.CASES}),
        (losses, "--case softmax", {("softmax", None, 160)}),
    ],
)  # fmt: skip
def test_every_case_direction_and_provider_has_a_share_of_copy_bandwidth(program, chosen, expected, recorded, monkeypatch):
    monkeypatch.setattr(bandwidth.timing, "copy_bandwidth", lambda *of: 10.0)
    file, printed = recorded(program, *CPU, *chosen.split(), *OURS)
    cells = {(r["case"], r.get("residual_dtype"), r.get("N"), r["direction"], r["provider"]) for r in file["records"]}
    assert cells == {(*cell, direction, name) for cell in expected for direction in BOTH for name in ("ours", "torch")}
    for record in file["records"]:
        assert "error" not in record and record["p10"] <= record["us"] <= record["p90"] and record["sets"] >= 2
        assert record["share"] == pytest.approx(record["gb_per_s"] / 10.0, abs=0.01) and record["copy_gb_per_s"] == 10.0
        assert record["M"] == 64 and ("times_ours" in record) == (record["provider"] != "ours")
    assert printed.count("ours") >= len(file["records"]) / 2


def test_another_revision_is_timed_beside_ours_and_a_provider_that_fails_is_recorded(recorded, monkeypatch):
    pool = ThreadPoolExecutor(1)  # processes take seconds
    monkeypatch.setattr(providers, "ProcessPoolExecutor", lambda *of: pool)
    monkeypatch.setitem(providers.PROVIDERS, "torch", raising(RuntimeError("no kernel")))
    before = str(Path(providers.__file__).parents[1] / "ops")
    file, printed = recorded(norms, *CPU, "--case", "rms", "--width", "64", *OURS, "--warm", "2", "--before", before)
    del providers.PROVIDERS["before"]
    errors = {r["provider"]: r.get("error") for r in file["records"]}
    assert errors == {"ours": None, "before": None, "torch": "RuntimeError: no kernel"}
    assert {r["provider"] for r in file["records"] if "times_ours" in r} == {"before"}
    assert file["command"].endswith(f"--before {before}") and "RuntimeError: no kernel" in printed


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_every_case_is_measured_on_a_gpu(case, recorded, monkeypatch):
    monkeypatch.setattr(norms, "ROWS", 4096)
    chosen = ["--rounds", "3", "--width", "1024", "--case", case, "--provider", "ours", "torch", "compile"]
    records = recorded(norms, *chosen)[0]["records"]
    assert len(records) == (12 if CASES[case].add else 6)
    assert [r for r in records if r.get("error")] == [] and all(r["share"] > 0 for r in records)


def test_minimum_bytes_of_rotary_are_those_of_a_count_by_hand():
    # 4 heads of q and k with 16 features of 2 bytes: x and y; dq, dk, q and k, dx; and dv of one head, read and written
    assert rotary.minimum_bytes(True, 10, *HEADS) == {"forward": 10 * 64 * 4, "backward": 10 * (64 * 6 + 16 * 4)}
    assert rotary.minimum_bytes(False, 10, *HEADS)["backward"] == 10 * (64 * 4 + 16 * 4)


@pytest.mark.parametrize("case", rotary.CASES)
def test_a_wrong_result_of_rotary_is_found(case):
    task = rotary.task(case, 1, 64, *HEADS)
    right = task.make("ours")
    check = partial(bandwidth.check, task.reference, task.checked, *task.inputs(1, torch.device("cpu")))
    check(right, True)

    def without_turn(qkv, *others):
        q, _, v = right(qkv, *others)
        return q, qkv.unflatten(-1, (-1, 16))[..., 3:4, :], v

    with pytest.raises(WrongResult, match="output 1 is off"):
        check(without_turn, True)


def test_cross_entropy_is_both_directions_in_one_call_and_a_wrong_gradient_is_a_failure_of_its_library(recorded, monkeypatch):
    def wrong(logits, targets):
        return 2 * losses.torch_loss(logits, targets) - losses.torch_loss(logits.detach(), targets)

    monkeypatch.setattr(bandwidth, "compiled", lambda _: wrong)
    file, _ = recorded(losses, *CPU, "--case", "cross_entropy", *OURS, "compile")
    ours, plain, compiled = file["records"]
    assert ours["direction"] == "both" and ours["share"] > 0 and plain["times_ours"] > 0
    assert compiled["us"] is None and "WrongResult: gradient is off" in compiled["error"]


def test_host_times_both_directions_of_every_provider_and_of_ours_compiled(recorded, monkeypatch):
    monkeypatch.setattr(host, "compiled", lambda expression: expression)  # torch.compile takes seconds
    file, printed = recorded(host, *CPU, *OURS)
    expected = {(p, d) for p in ("ours", "ours-compiled", "torch") for d in ("forward", "forward+backward")}
    assert {(r["provider"], r["direction"]) for r in file["records"]} == expected
    assert all(r["p10"] <= r["us"] <= r["p90"] and (r["M"], r["N"]) == (8, 64) for r in file["records"])
    assert "ours-compiled" in printed and "forward + backward" in printed


def test_memory_covers_cases_streams_and_providers_and_hands_both_streams_from_block_to_block(recorded, monkeypatch):
    monkeypatch.setattr(memory, "BLOCKS", 2)
    monkeypatch.setattr(memory, "WIDTH", 32)
    file, printed = recorded(memory, *CPU[:2], *OURS)
    assert len(file["records"]) == 2 * 2 * 2 and "dropout+add+RMS" in printed
    assert all(r["blocks"] == 2 and r["M"] == 64 and r["kept"] is None for r in file["records"])
    shape = Shape(CASES["add_ln"], "fp32", "bf16", 4, 32)
    (inputs,) = memory.make_inputs(shape, 1, torch.device("cpu"))
    x, residual, weight, bias, *_ = inputs.args
    y, r = memory.chain("torch", shape)(*inputs.args)
    r1 = residual + x
    y1 = F.layer_norm(r1, (32,), weight.float(), bias.float(), 1e-5).bfloat16()
    assert torch.equal(r, r1 + y1) and y.dtype == torch.bfloat16


@pytest.mark.gpu
def test_fused_chain_keeps_less_than_torch_does():
    device, shape = torch.device("cuda", 0), Shape(CASES["dropout_add_ln"], "fp32", "bf16", 1024, 1024)
    (inputs,) = memory.make_inputs(shape, 1, device)
    ours, plain = (memory.bytes_of(memory.chain(provider, shape), inputs, device) for provider in ("ours", "torch"))
    assert 0 < ours["kept"] < plain["kept"] and ours["peak"] < plain["peak"]
