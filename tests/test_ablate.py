"""python ablate.py: what it leaves behind, what it says, how it ends."""

import json
import math
import os
import re
import signal

import pytest
import torch
from safetensors.torch import load_file

import ablate
import model.loss
import model.norm
from configs import ConfigError
from measure import attribution
from measure.comparison import AGAIN, FUSED, TORCH, TWIN
from tests.ablation import faults, results
from tests.ablation.peer import checkout
from tests.runs import newest, train_here
from training import storage
from training.place import OUT_OF_MEMORY

TIMES = "ablate.parity_seeds=0"  # without parity


@pytest.fixture(scope="module")
def tiny(tiny):
    return [*tiny, *results.SHORT]


FUSED_AGAIN, COMPILED = FUSED + TWIN, ["compiled", "compiled" + TWIN]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder that the program runs in; its run folder, once it has run."""
    monkeypatch.chdir(tmp_path)
    return lambda: next((tmp_path / "runs").iterdir())


@pytest.fixture
def measured(monkeypatch):
    """Replaces the measurement of a cell."""

    def measure(work, mode, *_):
        return results.cell(work.variant.overrides, mode, 1.0, kernels=False, seed=0, arms=[TORCH, AGAIN, FUSED, FUSED_AGAIN])

    monkeypatch.setattr(ablate, "time_cell", measure)


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """Summary of a run."""
    own = [key for key in tiny if not key.startswith("ablate.")]
    summary, _ = train_here(own, tmp_path_factory.mktemp("trained") / "run")
    return summary


def test_it_leaves_a_report_data_and_pictures_of_arms_with_the_weights_of_a_run(tiny, here, trained, monkeypatch, ablations):
    begun, time_arms = [], ablate.timing.time_arms

    def timed(arms, *rest, **named):
        begun.extend(arm.state.model.embedding.weight.detach().clone() for arm in arms.values())
        return time_arms(arms, *rest, **named)

    monkeypatch.setattr(ablate.timing, "time_arms", timed)
    assert ablate.main([*tiny, f"init_from={trained.folder}"]) == 0
    stored = load_file(newest(trained.folder) / "model.safetensors")["embedding.weight"]
    assert len(begun) == 4 and all(torch.equal(weight, stored) for weight in begun)
    whole, found = here(), ablations[-1]
    (cell,), (parity,) = found.cells, found.parity
    assert [arm.first_loss for arm in cell.arms.values()] == pytest.approx([trained.final.loss] * 4, rel=0.1)
    assert any(f"begins with the weights of {trained.folder}" in note for note in found.notes)
    assert cell.arms.keys() == {TORCH, AGAIN, FUSED, FUSED_AGAIN} and cell.mode == "eager" and cell.overrides == {}
    assert parity.holds and parity.seeds == [1, 2]
    report = (whole / "report.md").read_text(encoding="utf-8")
    assert "No kernel was measured" in report.splitlines()[0] and "NOT FINISHED" not in report
    assert cell.verdict.split(";")[0] in " ".join(report.split()) and found.command in report
    _, *lines, end = map(json.loads, (whole / "cycles.jsonl").read_text().splitlines())
    assert [list(cycle["blocks_ms"]) for cycle in lines[:6]] == [list(cell.arms)] * 6 and end["exit_code"] == 0
    assert [line["parity"]["seed"] for line in lines[6:]] == parity.seeds
    assert {"speedup.png", "parity.png"} <= {path.name for path in whole.iterdir()}


def test_several_values_of_a_key_are_cells_of_one_report_in_the_folder_that_was_named(
    tiny, tmp_path, here, measured, capsys, ablations
):
    with storage.claim(tmp_path / "reports" / "mine", "train.py"):
        pass
    swept = ["norm.kind=layernorm,rmsnorm", "model.dropout=0.0", TIMES]
    assert ablate.main([*tiny, *swept, "folder=reports/mine"]) == 0
    found = ablations[-1]
    assert [cell.overrides for cell in found.cells] == [{"norm.kind": kind} for kind in ("layernorm", "rmsnorm")]
    said = capsys.readouterr().out
    assert "reports/mine has another run already, so this one is kept in reports/mine_2." in said
    assert "report: reports/mine_2/report.md" in said and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("norm.impl=torch", "norm.impl is what ablate.py compares. Use ablate.arms=[torch,compiled,fused]"),
        ("train.compile=true train.graph=true", "train.compile is compared too. Use ablate.compile=true.\ntrain.graph is"),
        ("deterministic=true profile=true", "deterministic would change the operators. Leave it out.\nprofile is done by"),
        ("ablate.arms=[torch,fuse]", "fuse is none of fused, torch, compiled, flash_attn, liger, quack, nanogpt. Did you mean"),
        ("ablate.switch=loss loss.impl=torch", "loss.impl is what ablate.py compares."),
        ("ablate.switch=mlp", "mlp.impl is read only with model.activation=swiglu; here model.activation=gelu."),
        ("ablate.arms=[torch]", "needs torch, the control, and another value of norm.impl"),
        ("ablate.arms=[torch,fused,liger]", "liger can't take part in this configuration. norm.impl=liger needs"),
        ("ablate.arms=[torch,fused,nanogpt]", "ablate.nanogpt=null: give both, or neither"),
        ("resume=runs/a", "ablate.py goes on with folder=runs/a resume=auto"),
        ("resume=auto", "resume=auto goes on in the folder that the command names: add"),
        ("folder=runs/a,runs/b", "folder: ablate.py has one. Give it one value."),
        ("logging.wandb=offline", "an ablation is several runs, a W&B agent's job is one."),
        ("init_from=RUN norm.kind=layernorm,rmsnorm", "norm.kind=rmsnorm: it has layernorm."),  # of the second cell
        ("model.vocab_size=null,3", "model.vocab_size is 3, less than the tokenizer's"),
        ("data.files=[nowhere/*.txt]", "nowhere"),
    ],
)
def test_what_it_can_not_do_is_refused_before_anything_runs(
    overrides, message, tiny, here, trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")  # of an agent; nothing to a run without W&B
    monkeypatch.setattr(ablate, "time_cell", lambda *_: pytest.fail("measured"))
    assert ablate.main([*tiny, *overrides.replace("RUN", str(trained.folder)).split()]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "runs").exists()


def no_memory(*_):
    raise torch.OutOfMemoryError("tried to allocate 100 GiB")


@pytest.mark.parametrize(
    ("fails", "code", "said"),
    [
        (lambda *_: os.kill(os.getpid(), signal.SIGTERM), 143, "To go on, add folder=runs/"),
        (no_memory, OUT_OF_MEMORY, "ablate.parity_seeds=0"),
    ],
)
def test_a_signal_and_a_lack_of_memory_keep_what_was_measured(
    fails, code, said, tiny, here, measured, monkeypatch, capsys, ablations
):
    cells = iter([ablate.time_cell, fails])
    monkeypatch.setattr(ablate, "time_cell", lambda *given: next(cells)(*given))
    assert ablate.main([*tiny, TIMES, "model.dropout=0.0,0.1"]) == code
    assert len(ablations[-1].cells) == 1 and said in capsys.readouterr().err
    assert "NOT FINISHED (1 of 2 parts)" in (here() / "report.md").read_text(encoding="utf-8").splitlines()[0]


def test_the_loss_may_be_what_is_compared_and_a_failing_parity_is_the_exit_code(tiny, here, monkeypatch, ablations):
    monkeypatch.setattr(model.loss, "linear_cross_entropy_fn", faults.loss_gradient_off)
    assert ablate.main([*tiny, "ablate.switch=loss", "norm.impl=torch", "norm.kind=rmsnorm"]) == 1
    found = ablations[-1]
    (cell,), (parity,) = found.cells, found.parity
    assert cell.arms.keys() == {TORCH, AGAIN, FUSED, FUSED_AGAIN} and parity.arm == FUSED and not parity.holds
    assert any("Compared: loss.impl. All arms have norm.impl=torch." in note for note in found.notes)
    assert "parity FAILS" in (here() / "report.md").read_text(encoding="utf-8")


def test_an_ablation_that_is_stopped_in_a_cell_goes_on_behind_its_last_cycle(tiny, here, monkeypatch, capsys, ablations):
    """Four arms: four warm-ups of two calls, then eight blocks a cycle. The first cycle of a process is not counted."""
    runs, run = [], ablate.timing.run

    def stopping_at(call):
        def one(arm, steps, clock):
            runs.append((arm.name, steps.start))
            if len(runs) == call:
                os.kill(os.getpid(), signal.SIGINT)
            return run(arm, steps, clock)

        runs.clear()
        monkeypatch.setattr(ablate.timing, "run", one)

    command = [*tiny, TIMES]
    stopping_at(2 * 4 + 8 * 5 + 2)
    assert ablate.main(command) == 130
    folder = here()
    assert f"add folder=runs/{folder.name} resume=auto" in capsys.readouterr().err and not ablations
    _, *kept = [json.loads(line) for line in (folder / "cycles.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(kept) == 4
    with storage.claim(folder, "ablate.py", resumes=True):  # as another process
        assert ablate.main([*command, f"folder={folder}", "resume=auto"]) == 2
    assert "another process is at work there" in capsys.readouterr().err
    for other, why in (("model.dropout=0.2", "model.dropout=0.2, there 0.0"), ("ablate.cycles=9", "ablate.cycles=9, there 6")):
        assert ablate.main([*command, f"folder={folder}", "resume=auto", other]) == 2 and why in capsys.readouterr().err

    stopping_at(None)
    assert ablate.main([*command, f"folder={folder}", "resume=auto"]) == 0
    begun = [start for _, start in runs[8:]]  # after the warm-ups, which come again
    assert begun == [1 + 2 * cycle for cycle in (4, 5, 6) for _ in range(8)]
    for name, arm in ablations[-1].cells[0].arms.items():
        assert len(arm.blocks_ms) == 12, "two blocks in each of six cycles"
        assert arm.blocks_ms[:8] == [block for cycle in kept for block in cycle["blocks_ms"][name]]
        assert not set(map(tuple, arm.blocks_ms[8:])) & set(map(tuple, arm.blocks_ms[:8])), "the fourth was not counted again"
    report = " ".join((folder / "report.md").read_text(encoding="utf-8").split())
    assert "Cycles of an earlier process, which was stopped: 4 of eager." in report and "NOT FINISHED" not in report
    capsys.readouterr()
    assert ablate.main([*command, f"folder={folder}", "resume=auto"]) == 0 and len(ablations) == 1
    assert capsys.readouterr().out == f"runs/{folder.name} has finished: runs/{folder.name}/report.md\n"


def test_seeds_of_parity_are_kept_and_not_made_again(tiny, here, measured, monkeypatch, ablations):
    made, run_seed = [], ablate.run_seed

    def stopping(cfg, seed, *rest):
        made.append(seed)
        if len(made) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        run = run_seed(cfg, seed, *rest)
        run.losses[TORCH][1] = math.inf
        return run

    monkeypatch.setattr(ablate, "run_seed", stopping)
    assert ablate.main(tiny) == 130
    assert ablate.main([*tiny, f"folder={here()}", "resume=auto"]) == 1
    (found,) = ablations[-1].parity
    assert made == [1, 2, 2] and found.seeds == [1, 2] and found.holds is None
    assert "can't be judged: the loss of torch is" in found.verdict
    assert {len(of) for of in found.distances.values()} == {2}


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_timed_counted_and_attributed_in_every_cell(tiny, here, ablations):
    small = ["model.layers=1", "model.width=128", "model.context=128", "model.dropout=0.1", "device=cuda"]
    short = ["ablate.arms=[torch,compiled,fused]", "ablate.parity_seeds=3", "ablate.block_steps=3", "ablate.warmup_steps=2"]
    assert ablate.main([*tiny, *small, *short]) == 0
    found = ablations[-1]
    eager, compiled, *graphs = found.cells
    assert (
        [cell.mode for cell in found.cells] == ["eager", "compiled", "graph", "compiled graph"]
        and found.kernels
        and found.environment["gpu"]
    )
    assert [(one.arm, one.holds) for one in found.parity] == [("compiled", True), (FUSED, True)]
    assert list(eager.arms) == [TORCH, *COMPILED, FUSED, FUSED_AGAIN]
    assert list(compiled.arms) == [TORCH, AGAIN, FUSED, FUSED_AGAIN]
    for cell in found.cells:
        assert all(arm.launches > 0 and (cell in graphs or arm.peak_gb > 0) for arm in cell.arms.values())
        assert cell not in graphs or cell.steps_ms[FUSED] < eager.steps_ms[FUSED]
        for shares in cell.attribution.shares.values():
            assert tuple(share.group for share in shares) == attribution.GROUPS
            assert all(share.ms > 0 and share.launches > 0 for share in shares if share.group != "other")
        assert all(limit >= 1 for limit in cell.attribution.limits.values()) and cell.attribution.copy_gb_per_s > 10
        # Each norm site is one kernel forward and one backward, and PyTorch's arms run none of ours.
        for arm, kernels in cell.attribution.kernels.items():
            for name in ("norm_forward_kernel", "norm_backward_kernel"):
                assert sum(k.launches for k in kernels if k.name == name) == pytest.approx(3 if arm == FUSED else 0), name
    assert eager.arms[FUSED].launches < eager.arms[TORCH].launches > compiled.arms[TORCH].launches
    # What PyTorch's sites launch is known by the place that launched it: dropout, add (not at the first) and norm of each, and
    # their backward.
    assert sum(k.launches for k in eager.attribution.kernels[TORCH] if k.group == "norm") >= 3 * 3 - 1 + 3 * 2
    sites = [k for k in eager.attribution.kernels["compiled"] if k.name.startswith("triton_")]
    assert sites and {k.group for k in sites} <= {"norm", "loss"}, "sites that are compiled alone"
    assert "attribution.png" in (here() / "report.md").read_text(encoding="utf-8")


def test_compiled_sites_and_nanogpt_are_arms_with_their_pairs_and_a_verdict_on_the_fastest_opponent(
    tiny, here, tmp_path, monkeypatch, ablations
):
    monkeypatch.setattr("model.norm.compiled_alone", lambda site: site)  # the compiler takes half a minute
    arms = ["ablate.arms=[torch,compiled,fused,nanogpt]", f"ablate.nanogpt={checkout(tmp_path / 'nanoGPT')}", "tokenizer=char"]
    sizes = ["model.dropout=0.0", TIMES]
    assert ablate.main([*tiny, *arms, *sizes]) == 0
    (cell,) = ablations[-1].cells
    assert list(cell.arms) == [TORCH, *COMPILED, "nanogpt", FUSED, FUSED_AGAIN] and set(cell.opponents) == {TORCH, "compiled"}
    assert {(base, arm) for base, of in cell.pairs.items() for arm in of} == {
        *((TORCH, arm) for arm in ("compiled", "nanogpt", FUSED)),
        *(("compiled", arm) for arm in (COMPILED[1], "nanogpt", FUSED)),
        ("nanogpt", FUSED),
        (FUSED, FUSED_AGAIN),
    }
    assert f"{cell.opponents[0]}, the fastest other arm" in cell.verdict
    losses = [arm.first_loss for arm in cell.arms.values()]
    assert max(losses) - min(losses) < 1e-4 * losses[0], "the same weights and batch"


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        ("EPS", "1e-6", []),
        ("is_causal=True", "is_causal=False", []),
        ("self.transformer.wte.weight = self.lm_head.weight", "pass", []),
        ("EPS", "1e-5", ["model=llama", "model.kv_heads=null"]),  # ours is of another architecture
        ("EPS", "1e-5", ["norm.kind=rmsnorm"]),
    ],
)
def test_a_nanogpt_that_computes_something_else_is_not_timed(old, new, keys, tiny, here, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablate, "time_cell", lambda *_: pytest.fail("measured"))
    arms = ["ablate.arms=[torch,fused,nanogpt]", f"ablate.nanogpt={checkout(tmp_path / 'nanoGPT', {old: new})}"]
    assert ablate.main([*keys, *tiny, *arms]) == 2
    assert re.search(r"nanoGPT's (model and ours differ|parameters are not those of ours)", capsys.readouterr().err)


@pytest.fixture
def gpu(monkeypatch):
    """Makes configurations those of a machine with a GPU and all libraries."""
    monkeypatch.setattr(ablate.machine, "inspect", lambda _: ablate.machine.Machine("cuda"))
    monkeypatch.setattr(ablate.rules, "is_installed", lambda package: True)


def test_a_gpu_has_compiled_cells_too_in_which_compiled_sites_are_torch_and_left_out(tiny, gpu):
    def variant(*more):
        return ablate.variants_of([*tiny, *more])[0]

    assert variant("ablate.compile=false", "ablate.graph=false").modes == ["eager"]
    assert variant("ablate.eager=false").modes == ["compiled", "compiled graph"]
    with pytest.raises(ConfigError, match=r"ablate\.eager=false: leaves nothing to time.*ablate\.compile=true"):
        variant("ablate.eager=false", "ablate.compile=false")
    three = variant("ablate.arms=[torch,compiled,fused]")
    assert three.modes == ["eager", "compiled", "graph", "compiled graph"]
    for mode in three.modes:
        assert three.arms(mode) == [TORCH, *(COMPILED if mode in ("eager", "graph") else [AGAIN]), FUSED, FUSED_AGAIN]
    two = variant("ablate.arms=[torch,compiled]")
    assert two.modes == ["eager", "graph"] and two.subject == "compiled"


def test_a_library_that_can_not_do_one_of_the_configurations_is_left_out_there_alone(tiny, gpu):
    arms = ["ablate.arms=[torch,liger,flash_attn,fused]", "norm.kind=rmsnorm", "model.dropout=0.0,0.1"]
    without, dropping = ablate.variants_of([*tiny, *arms])
    assert without.refused == {} and without.arms("eager") == [TORCH, AGAIN, "liger", "flash_attn", FUSED, FUSED_AGAIN]
    assert dropping.arms("eager") == [TORCH, AGAIN, "flash_attn", FUSED, FUSED_AGAIN]
    assert "model.dropout" in dropping.refused["liger"]
    assert without.tested == ["liger", "flash_attn", FUSED] and dropping.tested == [FUSED], "flash-attn draws its own masks"
    with pytest.raises(ConfigError, match=r"liger can't take part.*sandwich"):
        ablate.variants_of([*tiny, *arms, "norm.placement=sandwich"])
