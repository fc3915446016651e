"""host and memory on tiny sizes."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks import host, memory, providers

CPU = ["--device", "cpu", "--rounds", "2"]


@pytest.fixture
def no_compiler(monkeypatch):
    """torch.compile left out: it takes seconds a width."""
    monkeypatch.setattr(providers, "compiled", lambda expression: expression)


def test_host_times_both_directions_of_every_provider_and_of_ours_compiled(tmp_path, recorded, no_compiler):
    file, printed = recorded(host, *CPU, "--provider", "ours", "torch")
    expected = {(p, d) for p in ("ours", "ours-compiled", "torch") for d in ("forward", "forward+backward")}
    assert {(r["provider"], r["direction"]) for r in file["records"]} == expected
    assert all(r["p10"] <= r["us"] <= r["p90"] and (r["M"], r["N"]) == (8, 64) for r in file["records"])
    assert host.plot(file, tmp_path).exists() and "ours-compiled" in printed and "forward + backward" in printed


def test_memory_covers_cases_streams_and_providers(recorded, tmp_path):
    file, printed = recorded(memory, *CPU, "--rows", "16", "--width", "32", "--blocks", "2", "--provider", "ours", "torch")
    assert len(file["records"]) == 2 * 2 * 2
    for r in file["records"]:
        assert r["blocks"] == 2 and r["M"] == 16 and r["kept"] is None and "error" not in r, "not on a CPU"
    assert memory.plot(file, tmp_path) is None, "without bytes there is nothing to draw"
    assert "dropout+add+RMS" in printed and "No bytes: PyTorch counts those of a GPU alone." in printed


def test_chain_hands_both_streams_from_block_to_block():
    case = memory.CASES["add_ln"]
    setting = memory.Setting(residual_dtype=torch.float32)
    (i,) = memory.make_inputs(case, setting, 4, 32, 1, torch.device("cpu"))
    y, r = memory.chain("torch", case, setting, 2)(i)
    r1 = i.residual + i.x
    y1 = F.layer_norm(r1, (32,), i.weight.float(), i.bias.float(), 1e-5).bfloat16()
    assert torch.equal(r, r1 + y1) and y.dtype == torch.bfloat16


@pytest.mark.gpu
def test_fused_chain_keeps_less_than_torch_does():
    device, case = torch.device("cuda", 0), memory.CASES["dropout_add_ln"]
    setting = memory.Setting(residual_dtype=torch.float32)
    (inputs,) = memory.make_inputs(case, setting, 1024, 1024, 1, device)
    ours, plain = (memory.measure(memory.chain(p, case, setting, 4), inputs, device) for p in ("ours", "torch"))
    assert 0 < ours["kept"] < plain["kept"] and ours["peak"] < plain["peak"]
