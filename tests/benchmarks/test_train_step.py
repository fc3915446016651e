"""Ours beside nanoGPT's model: that the same is timed, what is recorded, and what is refused."""

import itertools
import statistics
from unittest.mock import Mock

import pytest
import torch

import model.norm
from benchmarks import contenders, train_step
from benchmarks.command import load
from tests.ablation import faults
from tests.benchmarks.peer import checkout
from tests.benchmarks.records import SMALL
from tests.runs import precision, raising
from training.attribution import GROUPS

SIZES = [*SMALL, "train.batch_size=2", "ablate.block_steps=2", "ablate.warmup_steps=2"]
QUICK = ["--dropout", "0", "--no-profile"]


@pytest.fixture
def run(tmp_path):
    """Runs the program on tiny sizes, with a nanoGPT unless that is None; gives its file of results."""

    def run(*arguments, device=("--device", "cpu"), peer=True, **nanogpt):
        peer = ["--nanogpt", str(checkout(tmp_path / "nanoGPT", **nanogpt))] if peer else []
        train_step.main([*device, "--rounds", "2", "--common", *SIZES, "--output", str(tmp_path), *peer, *arguments])
        return load(tmp_path / "train_step.json")

    return run


def test_every_contender_is_recorded_with_its_times_its_ratio_and_its_breakdown(run, tmp_path, capsys):
    file = run("--dropout", "0.1", "--ours", "model.residual_dtype=compute", "norm.impl=torch")
    names = ["ours", "ours, torch norms", "ours, model.residual_dtype=compute norm.impl=torch", "nanoGPT"]
    assert [(r["dropout"], r["contender"]) for r in file["records"]] == [(0.1, name) for name in names]
    for r in file["records"]:
        assert r["p10"] <= r["ms"] <= r["p90"] and r["steps"] == 2 * 2 * 2  # two blocks of two steps in each of two cycles
        assert r["tokens_per_s"] == pytest.approx(2 * 16 * 1000 / r["ms"], rel=1e-3, abs=0.05)  # one decimal
        assert r["mfu"] is None and r["peak_gb"] is None and r["idle_ms"] is None, "not on a CPU"
        assert tuple(r["breakdown_ms"]) == GROUPS and min(r["breakdown_ms"][g] for g in ("GEMM", "optimizer", "loss")) > 0
        assert (r["mode"], r["vocabulary"], r["batch_size"], r["precision"]) == ("eager", 64, 2, "fp32")
        assert [len(times) for times in r["blocks_ms"]] == [2] * 4
        assert statistics.median(itertools.chain(*r["blocks_ms"])) == pytest.approx(r["ms"], abs=1e-3)
        assert r.get("versus") == (None if r["contender"] == "nanoGPT" else "nanoGPT") and ("speedup" in r) == ("versus" in r)
        assert "speedup_95" not in r, "two rounds are too few for an interval"
    module = contenders.load_nanogpt(tmp_path / "nanoGPT")
    assert file["environment"]["versions"]["nanoGPT"] == contenders.fingerprint(module)
    assert (tmp_path / "train_step.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert all(name in printed for name in names) and "number of parameters" not in printed
    train_step.main(["--plot-only", "--output", str(tmp_path)])
    assert capsys.readouterr().out == printed


def test_all_contenders_learn_the_same_without_dropout(run):
    """Same weights, batches, learning rates, decay and clipping: the losses of the last step, ten steps on, are still equal."""
    records = run(*QUICK, activation="nn.GELU(approximate='tanh')")["records"]
    losses = [r["last_loss"] for r in records]
    assert len(losses) == 3 and max(losses) - min(losses) < 1e-4 * losses[0]
    assert all(r["first_loss"] - r["last_loss"] > 0.01 for r in records), "they learn"


@pytest.mark.parametrize(
    "change",
    [
        {"eps": "1e-6"},
        {"activation": "nn.ReLU()"},
        {"replaced": {"is_causal=True": "is_causal=False"}},
        {"replaced": {"self.transformer.wte.weight = self.lm_head.weight": "pass"}},
        {"replaced": {"nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias)": "nn.Linear(c.n_embd, 4 * c.n_embd, bias=False)"}},
    ],
)
def test_a_model_that_computes_something_else_is_not_timed(run, change, monkeypatch):
    monkeypatch.setattr(train_step, "measure_cell", lambda *_: pytest.fail("timed"))
    with pytest.raises(SystemExit, match=r"ours: nanoGPT's (model and ours differ|parameters are not those of ours)"):
        run(**change)


def test_a_step_whose_first_loss_is_off_ends_the_program(run, tmp_path, monkeypatch):
    monkeypatch.setattr(model.norm, "norm_fn", faults.wrong_eps(0.1))
    with pytest.raises(SystemExit, match=r"ours: its first loss is .* further from the others' than rounding explains"):
        run()
    assert not (tmp_path / "train_step.json").exists()


def test_without_a_checkout_ours_are_compared_and_a_contender_that_fails_is_a_record(run, monkeypatch, capsys):
    records = run("--dropout", "0", "0.1", "--no-profile", peer=False)["records"]
    pair = [("ours", "ours, torch norms"), ("ours, torch norms", None)]
    assert [(r["dropout"], r["contender"], r.get("versus")) for r in records] == [(p, *one) for p in (0.0, 0.1) for one in pair]
    assert "missing: nanoGPT (name a checkout of it by --nanogpt PATH)" in capsys.readouterr().err
    monkeypatch.setattr(model.norm, "norm_fn", raising(RuntimeError("no room")))
    ours, torch_norms = run(*QUICK, peer=False)["records"][:2]
    assert torch_norms["ms"] > 0 and ours["error"] == "RuntimeError: no room"
    assert "failed: ours: RuntimeError: no room" in capsys.readouterr().out


def test_contenders_take_the_same_batches_in_alternating_blocks(monkeypatch):
    told, block_of = [], Mock(wraps=train_step.block_of)
    monkeypatch.setattr(train_step, "block_of", block_of)
    _, options = train_step.options_of(["--device", "cpu", "--common", *SIZES])
    found = dict.fromkeys(("ours", "ours, torch norms"), contenders.config_of(options, 0.0))
    train_step.measure_cell(found, None, precision(torch.float32), "eager", 3, True, told.append)
    assert len(told) == train_step.work_of(2, 3, True)
    taken = [(call.args[0].name, call.args[2]) for call in block_of.call_args_list]
    ours, other = ([todo for who, todo in taken if who == name] for name in found)
    assert ours == other and [step for todo in ours for step in todo] == list(range(2 + 8 * (1 + 2))), "none twice"
    order = [name for name, _ in taken[2:]]
    assert all(order[i : i + 4] == order[i : i + 4][::-1] for i in range(0, len(order), 4))


REFUSED = [
    ("--ours train.batch_size=4", "train.batch_size is the same for all contenders"),
    ("--common train.compile=true", "compiled or not by --mode"),
    ("--common model.heads=3", "model.heads=3 does not divide"),
    ("--ours norm.kind=rmsnorm", "norm.kind is the same for all contenders"),
    ("--common norm.kind=rmsnorm", "ours: .*norm.kind=rmsnorm, the layout has layernorm"),
    ("--nanogpt nowhere", "there is no .*nowhere. Name the folder"),
    ("--nanogpt broken", "can't be imported: SyntaxError"),
    ("--nanogpt another", "has no GPT and no GPTConfig. Name the folder"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_overrides_and_checkouts_are_checked_before_anything_runs(tmp_path, arguments, message, monkeypatch):
    monkeypatch.setattr(train_step, "measure_cell", lambda *_: pytest.fail("timed"))
    monkeypatch.chdir(tmp_path)
    for name, text in (("broken", "def"), ("another", "x = 1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(text)
    peer = str(checkout(tmp_path / "nanoGPT"))
    with pytest.raises(SystemExit, match=message):
        train_step.main(["--device", "cpu", "--output", str(tmp_path), "--nanogpt", peer, *arguments.split()])


@pytest.mark.gpu
def test_on_a_gpu_memory_idle_time_and_launches_are_known(run):
    records = run("--mode", "eager", "--dropout", "0", device=())["records"]
    assert len(records) == 3 and {r["precision"] for r in records} <= {"bf16", "fp32"}
    assert all(0 < r["peak_gb"] < 1 and r["idle_ms"] >= 0 and r["launches"] > 50 for r in records)
