"""python ablate.py: what it leaves behind, what it says, how it ends."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

import ablate
import model.norm
from ablation import records
from ablation.parity import ARMS
from measure.comparison import AGAIN, FUSED, TORCH
from tests.runs import raising, train_here
from training import attribution

SHORT = ["ablate.cycles=6", "ablate.block_steps=1", "ablate.warmup_steps=1", "ablate.parity_steps=2", "ablate.parity_seeds=2"]
TIMES = "ablate.parity_seeds=0"  # without parity


@pytest.fixture(scope="module")
def tiny(tiny):
    return [*tiny, *SHORT]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder that the program runs in; its run folder, once it has run."""
    monkeypatch.chdir(tmp_path)
    return lambda: next((tmp_path / "runs").iterdir())


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The folder of an ablation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("whole"))
        assert ablate.main(tiny) == 0
    return next((folder / "runs").iterdir())


@pytest.fixture
def measured(whole, monkeypatch):
    """Replaces the measurement of a cell by one that was made before."""
    (cell,) = records.load(whole).cells
    monkeypatch.setattr(ablate, "measure", lambda *_: cell)


def test_it_leaves_a_report_its_data_and_its_pictures_and_says_that_no_kernel_ran(whole):
    found = records.load(whole)
    (cell,), (parity,) = found.cells, found.parity
    assert cell.arms.keys() == {TORCH, AGAIN, FUSED} and cell.mode == "eager" and cell.overrides == {}
    assert parity.holds and parity.seeds == [1, 2]
    assert not found.kernels and found.command.startswith("python ablate.py data=text")
    report = (whole / "report.md").read_text(encoding="utf-8")
    assert "No kernel was measured" in report.splitlines()[0] and "NOT FINISHED" not in report
    assert cell.verdict.split(";")[0] in report.replace("\n", " ") and found.command in report
    assert len((whole / "steps.jsonl").read_text().splitlines()) == 3 * 12, "a line for each block"
    assert "Each arm has 12 blocks of 1 steps" in " ".join(report.split())
    assert {"speedup.png", "step_times.png", "parity.png"} <= {path.name for path in whole.iterdir()}


def test_several_values_of_a_key_are_cells_of_one_report_in_the_folder_that_was_named(tiny, tmp_path, here, capsys):
    (tmp_path / "reports" / "mine").mkdir(parents=True)
    (tmp_path / "reports" / "mine" / "config.yaml").touch()
    swept = ["norm.kind=layernorm,rmsnorm", "model.dropout=0.0", TIMES]
    assert ablate.main([*tiny, *swept, "folder=reports/mine"]) == 0
    found = records.load(tmp_path / "reports" / "mine_2")
    assert [cell.overrides for cell in found.cells] == [{"norm.kind": kind} for kind in ("layernorm", "rmsnorm")]
    said = capsys.readouterr().out
    assert "reports/mine has another run already, so this one is kept in reports/mine_2." in said
    assert "report: reports/mine_2/report.md" in said and not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """Summary of a run."""
    summary, _ = train_here(tiny, tmp_path_factory.mktemp("trained") / "run")
    return summary


def test_arms_begin_with_the_weights_of_a_run_and_the_report_says_so(tiny, here, trained, monkeypatch):
    timed, time_arms = [], ablate.timing.time_arms
    monkeypatch.setattr(ablate.timing, "time_arms", lambda arms, *rest: timed.extend(weights(arms)) or time_arms(arms, *rest))

    def weights(arms):
        return [arm.state.model.embedding.weight.detach().clone() for arm in arms.values()]

    assert ablate.main([*tiny, f"init_from={trained.folder}"]) == 0
    stored = load_file(trained.folder / "last" / "model.safetensors")["embedding.weight"]
    assert len(timed) == 3 and all(torch.equal(begun, stored) for begun in timed)
    found = records.load(here())
    for arm in ARMS:
        assert all(run[0] == pytest.approx(trained.final.loss, rel=0.1) for run in found.parity[0].losses[arm])
    assert any(f"begins with the weights of {trained.folder}" in note for note in found.notes)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["init_from=RUN", "norm.kind=layernorm,rmsnorm"], "norm.kind=rmsnorm: it has layernorm."),
        (["model.vocab_size=null,3"], "model.vocab_size is 3, less than the tokenizer's"),
        (["data.files=[nowhere/*.txt]"], "nowhere"),
    ],
)
def test_what_the_data_or_the_weights_refuse_of_any_cell_is_refused_before_the_first_is_measured(
    overrides, message, tiny, here, trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(ablate, "measure", lambda *_: pytest.fail("measured"))
    assert ablate.main([*tiny, *(override.replace("RUN", str(trained.folder)) for override in overrides)]) == 2
    assert message in capsys.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == []


def test_failing_parity_is_the_exit_code(tiny, here, measured, monkeypatch, capsys):
    real = model.norm.norm_fn
    monkeypatch.setattr(model.norm, "norm_fn", lambda *given, **named: real(*given, **{**named, "eps": 1e-2}))
    assert ablate.main(tiny) == 1
    assert "Parity FAILS" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("norm.impl=torch", "norm.impl=torch: norm.impl is what ablate.py compares"),
        ("train.compile=true", "Use ablate.compile=true"),
        ("resume=runs/x", "Use init_from=runs/NAME"),
        ("ablate.cycles=5", "ablate.cycles=5: must be at least 6"),
        ("ablate.cicles=3", "ablate.cycles"),
        ("-m", "an ablation sweeps without it"),
        ("folder=runs/a,runs/b", "folder=runs/a,runs/b: an ablation has one folder"),
        ("hydra.run.dir=x", "hydra.run.dir=x: ablate.py is no job of Hydra's. Use folder=PATH"),
        ("norm.kind=rmsnorm,layernorm,rmsnorm", "kind=rmsnorm comes twice in "),
    ],
)
def test_what_it_can_not_do_is_refused_before_anything_runs(override, message, tiny, here, tmp_path, capsys):
    assert ablate.main([*tiny, override]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("rank", "said"), [("0", "ablate.py is one process on one device"), ("1", "")])
def test_torchrun_is_refused_by_one_rank(rank, said, monkeypatch, capsys):
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": "0", "RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert ablate.main([]) == 2
    printed = capsys.readouterr().err
    assert said in printed and bool(printed) == bool(said)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("cells", [0, 1])
def test_a_signal_keeps_the_cells_that_were_measured_and_no_empty_folder(
    number, code, cells, tiny, here, measured, tmp_path, monkeypatch, capsys
):
    real, calls = ablate.measure, []

    def measure(*given):
        calls.append(1)
        if len(calls) > cells:
            os.kill(os.getpid(), number)
            pytest.fail("went on")
        return real(*given)

    monkeypatch.setattr(ablate, "measure", measure)
    assert ablate.main([*tiny, TIMES, "model.dropout=0.0,0.1"]) == code
    printed = capsys.readouterr().err
    if cells == 0:
        assert list((tmp_path / "runs").iterdir()) == []
        assert "stopped before the first cell was measured" in printed
    else:
        assert len(records.load(here()).cells) == 1
        assert "NOT FINISHED (1 of 2 parts)" in (here() / "report.md").read_text(encoding="utf-8").splitlines()[0]
        assert f"report so far: runs/{here().name}/report.md" in printed


def test_what_was_measured_before_memory_ran_out_is_kept(tiny, here, measured, monkeypatch, capsys):
    monkeypatch.setattr(ablate.parity, "parity", raising(torch.OutOfMemoryError("tried to allocate 100 GiB")))
    assert ablate.main(tiny) == ablate.OUT_OF_MEMORY
    assert "ablate.parity_seeds=0" in capsys.readouterr().err
    assert len(records.load(here()).cells) == 1
    text = (here() / "report.md").read_text(encoding="utf-8")
    assert "Out of memory" in text and "NOT FINISHED (1 of 2 parts)" in text.splitlines()[0]


@pytest.mark.parametrize(
    ("compile", "device", "modes"),
    [("null", "cpu", ["eager"]), ("null", "cuda", ["eager", "compiled"]), ("true", "cpu", ["eager", "compiled"])],
)
def test_ablate_compile_chooses_the_cells(compile, device, modes, tiny, monkeypatch):
    monkeypatch.setattr(ablate.machine, "inspect", lambda _: ablate.machine.Machine(device))  # with a C++ compiler
    (variant,) = ablate.variants_of([*tiny, f"ablate.compile={compile}"])
    assert variant.modes == modes


def test_help_says_where_the_report_goes_and_lists_the_keys_that_are_refused(capsys):
    assert ablate.main(["--help"]) == 0
    text, _, refused = capsys.readouterr().out.partition("which are refused")
    assert "ablate.cycles=12" in text and "at least 6" in text and "train.batch_size" not in text
    assert "runs/TIME_ablation/" in refused and "folder=PATH" in refused
    listed = {line.split()[0] for line in refused.splitlines() if line.startswith("  ")}
    assert listed >= {"norm.impl", "resume", "train.compile"} and "folder" not in listed


def test_the_job_of_a_wandb_agent_keeps_its_report_and_logs_nothing_to_the_agents_run(
    tiny, here, measured, monkeypatch, capsys
):
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setattr("training.tracking.wandb.init", lambda **how: pytest.fail("started"))
    assert ablate.main([*tiny, TIMES, "logging.wandb=offline"]) == 0
    assert "W&B does not have all of it: ConfigError: an ablation is several runs" in capsys.readouterr().err
    assert (here() / "report.md").is_file()


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_timed_counted_and_attributed_eager_and_compiled(tiny, here, monkeypatch):
    profiles, real = [], ablate.profiled
    monkeypatch.setattr(
        ablate, "profiled", lambda arm, *given: profiles.append((arm.name, real(arm, *given))) or profiles[-1][1]
    )
    small = ["model.layers=1", "model.width=128", "model.context=128", "model.dropout=0.1", "ablate.parity_seeds=3"]
    assert ablate.main([*tiny, *small, "device=cuda", "ablate.block_steps=3", "ablate.warmup_steps=2"]) == 0

    found = records.load(here())
    eager, compiled = found.cells
    assert (eager.mode, compiled.mode) == ("eager", "compiled") and found.kernels and found.environment["gpu"]
    assert [one.holds for one in found.parity] == [True]
    for cell in found.cells:
        assert all(arm.peak_gb > 0 and arm.launches > 0 for arm in cell.arms.values())
        assert cell.arms[TORCH].launches == cell.arms[AGAIN].launches
        for shares in (cell.attribution.torch, cell.attribution.fused):
            assert tuple(share.group for share in shares) == attribution.GROUPS
            assert all(share.ms > 0 and share.launches > 0 for share in shares if share.group != "other")
        assert cell.attribution.bound >= 1 and cell.attribution.copy_gb_per_s > 10
        assert {name: len(states) for name, states in cell.gpu.items()} == {TORCH: 2, FUSED: 2}
    assert eager.arms[FUSED].launches < eager.arms[TORCH].launches > compiled.arms[TORCH].launches

    # Each norm site is one kernel forward and one backward, and PyTorch's arms run none of ours.
    for arm, kernels in profiles:
        for name in ("norm_forward_kernel", "norm_backward_kernel"):
            assert sum(k.launches for k in kernels if k.name == name) == pytest.approx(3 if arm == FUSED else 0), (arm, name)

    # What PyTorch's sites launch is known by the place that launched it: dropout, add and norm of each, and their backward.
    site, eager_torch = attribution.NORM_SITE, profiles[0][1]
    assert sum(k.launches for k in eager_torch if site in k.within) >= 3 * 3 - 1  # nothing to add to at the first
    assert sum(k.launches for k in eager_torch if site in k.forward) >= 3 * 2
    report = (here() / "report.md").read_text(encoding="utf-8")
    assert "no kernel was measured" not in report.lower() and "attribution.png" in report
