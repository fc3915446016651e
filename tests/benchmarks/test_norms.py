from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch

from benchmarks import memory, norms, providers
from benchmarks.cases import CASES, Shape
from benchmarks.command import ResultsError, load

SMALL = ["--device", "cpu", "--rounds", "2"]


@pytest.fixture
def run(tmp_path, capfd, monkeypatch):
    """Runs the program on tiny sizes; gives its records, and what it printed."""
    monkeypatch.setattr(norms.timing, "copy_bandwidth", lambda *a: 10.0)

    def run(*arguments):
        norms.main([*SMALL, "--output", str(tmp_path), *arguments])
        name = norms.options_of([*SMALL, *arguments])[1].name
        return load(tmp_path / f"{name}.json")["records"], capfd.readouterr()

    return run


def parse(*arguments):
    return norms.options_of(arguments)[1]


def test_tensors_are_small_by_default_where_a_cpu_has_to_do_with_them():
    assert parse().rows == [32768] and parse("--device", "cpu").rows == [64]
    assert parse("--device", "cpu", "--rows", "3").rows == [3]
    assert memory.options_of([])[1].rows == 32768 and memory.options_of(["--device", "cpu"])[1].rows == 64


def cells(records):
    return {(r["case"], r["direction"], r["residual_dtype"], r["M"], r["N"], r["provider"]) for r in records}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--width", "0"], "0 is not positive"),
        (["--width", "-3"], "not positive"),
        (["--width", "many"], "invalid"),
        (["--rows", "0"], "0 is not positive"),
        (["--rounds", "0"], "0 is not positive"),
        (["--minutes", "0"], "0.0 is not positive"),
        (["--provider", "tensorflow"], "choose from"),
        (["--case", "groupnorm"], "choose from"),
        (["--direction", "sideways"], "choose from"),
        (["--residual", "fp64"], "choose from"),
        (["--weight-dtype", "fp16"], "choose from"),
        (["--device", "tpu"], "choose from"),
        (["--small", "--width", "64"], "leave --small out"),
        (["--random", "2", "--case", "ln", "--weight-dtype", "fp32"], "leave --case, --weight-dtype out"),
        (["--random", "1", "2", "3"], "one count or two"),
        (["--device", "cpu", "--before", "."], ". is not a copy of ops/"),
        (["--missing", "--fresh"], "give one"),
        (["--renew", "--fresh"], "give one"),
        (["--renew", "--plot-only", "--output", "."], "measures nothing"),
        (["--plot-only"], "--output"),
    ],
)
def test_wrong_options_are_refused_with_what_is_accepted(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        norms.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_program_says_what_to_do(capsys):
    with pytest.raises(SystemExit):
        norms.main(["--quick"])
    assert "--device cpu" in capsys.readouterr().err


def test_case_width_provider_residual_and_direction_choose_what_is_measured(run):
    records, _ = run(
        "--case", "ln", "dropout_add_rms", "--width", "64", "48", "--provider", "ours", "ours-seeded", "torch",
        "--residual", "fp32", "--direction", "backward",
    )  # fmt: skip
    expected = {("ln", "backward", None, 64, n, p) for n in (64, 48) for p in ("ours", "torch")}
    expected |= {("dropout_add_rms", "backward", "fp32", 64, n, p) for n in (64, 48) for p in ("ours", "ours-seeded", "torch")}
    assert cells(records) == expected
    for record in records:
        assert record["p10"] <= record["us"] <= record["p90"]
        assert record["share"] == pytest.approx(record["gb_per_s"] / 10.0, abs=0.01)
        assert record["copy_gb_per_s"] == 10.0 and record["sets"] >= 2
    assert all(("times_ours" in record) == (record["provider"] != "ours") for record in records)


def test_table_and_plots_are_made(run, tmp_path):
    _, printed = run("--case", "rms", "--width", "64", "--provider", "ours", "torch")
    assert "RMS, forward 64×64" in printed.out and "fastest other" in printed.out and "under the floor: 0" in printed.out
    assert {p.name for p in tmp_path.iterdir()} == {"norms.json", "norms_forward.png", "norms_backward.png"}


def test_plot_only_measures_nothing(run, tmp_path, monkeypatch, capfd):
    run("--case", "rms", "--width", "64", "--provider", "ours")
    (tmp_path / "norms_forward.png").unlink()
    monkeypatch.setattr(norms, "measure_shape", None)
    norms.main(["--plot-only", "--output", str(tmp_path)])
    assert (tmp_path / "norms_forward.png").exists() and "RMS, forward 64×64" in capfd.readouterr().out


def test_missing_measures_only_what_the_file_lacks(run, monkeypatch):
    run("--case", "ln", "--width", "64", "--provider", "torch", "--direction", "forward")
    measured = []
    original = norms.measure_shape

    def spy(shape, directions, *rest):
        measured.append((shape.width, list(directions)))
        return original(shape, directions, *rest)

    monkeypatch.setattr(norms, "measure_shape", spy)
    run("--case", "ln", "--width", "64", "48", "--provider", "torch", "--missing")
    assert measured == [(64, ["backward"]), (48, ["forward", "backward"])]


def test_after_the_minutes_no_cell_is_started_and_what_is_left_is_told(run, monkeypatch):
    monkeypatch.setattr(norms.command.Budget, "spent", property(lambda self: True))
    with pytest.raises(ResultsError, match="not there"):  # nothing was measured
        run("--case", "ln", "--width", "64", "48", "--provider", "torch", "--minutes", "1")


def test_each_selection_has_a_file_of_its_own(run, tmp_path):
    records, _ = run("--random", "1", "1", "--seed", "5", "--provider", "torch")
    assert len(records) == 4 and all(r["M"] <= 64 < r["asked_rows"] for r in records)
    run("--models", "--case", "rms", "--width", "64", "--provider", "torch")
    assert {path.name for path in tmp_path.iterdir()} == {"norms_random.json", "norms_models.json"}


def test_another_revision_is_timed_beside_ours(run):
    records, printed = run(
        "--case", "ln", "--width", "64", "--provider", "ours", "--before", str(Path(providers.__file__).parents[1] / "ops")
    )
    assert {r["provider"] for r in records} == {"ours", "before"} and not any(r.get("error") for r in records)
    assert all("times_ours" in r for r in records if r["provider"] == "before")
    header, line = printed.out.splitlines()[:2]
    assert header.endswith("before / ours") and "LN, forward 64×64" in line and " –  " in line, "before is no peer"


@pytest.fixture
def threads(monkeypatch):
    """Jobs of --warm run here instead of in processes, which take seconds to start."""
    monkeypatch.setattr(providers, "pool", lambda processes, before: ThreadPoolExecutor(1))


def test_warm_compiles_every_shape_and_provider_first(run, monkeypatch, threads):
    ran = []
    original = providers.compile_one
    monkeypatch.setattr(
        providers, "compile_one", lambda s, name, d: ran.append((s.case.name, s.width, name)) or original(s, name, d)
    )
    arguments = ["--case", "ln", "add_ln", "--residual", "bf16", "--width", "32", "64", "--provider", "ours-seeded", "torch"]
    records, printed = run(*arguments, "--warm", "4")
    assert ran == [(case, width, "torch") for width in (64, 32) for case in ("ln", "add_ln")], "wide ones first"
    assert "compiling in 4 processes: 100%" in printed.err and len(records) == 8


def test_failures_while_compiling_ahead_are_told_and_survived(run, monkeypatch, threads):
    monkeypatch.setitem(providers.PROVIDERS, "torch", providers.Provider(lambda *of: broken))
    arguments = ["--case", "ln", "--width", "64", "--provider", "torch", "--warm", "2"]
    assert "compiling torch, ln 64×64, bf16 weights: RuntimeError: no kernel" in run(*arguments)[1].err

    def died(*of):
        raise BrokenProcessPool("a process died.")

    monkeypatch.setattr(providers, "compile_one", died)
    assert "BrokenProcessPool: a process died. The rest is compiled when measured" in run(*arguments)[1].err


def broken(inputs):
    raise RuntimeError("no kernel")


def test_processes_compile(capfd):
    shape = Shape(CASES["ln"], None, "bf16", 16, 16, 16)
    providers.compile_in_processes([shape], ["torch"], torch.device("cpu"), 1, None)
    assert capfd.readouterr().err.count("100%") == 1


def test_failing_provider_is_recorded_and_told(run, monkeypatch):
    def broken(case, setting):
        def function(inputs):
            raise RuntimeError("no kernel for this width")

        return function

    monkeypatch.setitem(providers.PROVIDERS, "torch", providers.Provider(broken))
    records, printed = run("--case", "ln", "--width", "64", "--provider", "ours", "torch", "--direction", "forward")
    (record,) = [r for r in records if r["provider"] == "torch"]
    assert record["us"] is None and record["error"] == "RuntimeError: no kernel for this width"
    assert "failed: torch, LN, forward 64×64: RuntimeError: no kernel for this width" in printed.out
    assert any(r["provider"] == "ours" and r["us"] for r in records)


@pytest.mark.parametrize(("rounds", "told"), [(5, False), (6, True)])
def test_a_ratio_over_few_rounds_has_no_interval_to_call_it_faster_by(rounds, told):
    ours, peer = (norms.timing.Outcome(us=[us + 0.01 * i for i in range(rounds)]) for us in (10.0, 12.0))
    record = norms.record_of(peer, ours, 1000, 4000.0)
    assert record["times_ours"] == pytest.approx(1.2, abs=0.01) and ("times_ours_95" in record) == told


def test_library_asked_for_by_name_must_be_there(run, monkeypatch):
    monkeypatch.setattr(norms.command.providers, "missing", lambda names: {"apex": "ImportError: no apex"})
    with pytest.raises(SystemExit, match="--provider"):
        run("--case", "ln", "--width", "64", "--provider", "apex")


def test_cells_of_another_revision_are_renewed_where_that_is_asked_for(run, monkeypatch):
    def at(revision):
        git = {"revision": revision, "dirty": False}
        monkeypatch.setattr(norms.command, "environment", lambda *of: facts(*of) | {"git": git})

    facts = norms.command.environment
    at("abc")
    before, _ = run("--case", "ln", "--width", "64", "48", "--provider", "ours", "torch")
    at("def")
    with pytest.raises(SystemExit, match=r"git revision abc there, def here.*--renew"):
        run("--case", "ln", "--width", "48", "--provider", "ours", "torch")
    records, _ = run("--case", "ln", "--width", "48", "--provider", "ours", "torch", "--renew")
    assert {(r["N"], r.get("revision")) for r in records} == {(64, "abc"), (48, None)}
    assert len(records) == len(before)
    records, printed = run(
        "--case", "ln", "--width", "64", "48", "--provider", "ours", "torch", "--missing", "--renew", "--minutes", "1e-9"
    )
    assert "1 of 1 shapes not started" in printed.out and "go on with --missing --renew" in printed.out
    records, _ = run("--case", "ln", "--width", "64", "48", "--provider", "ours", "torch", "--missing", "--renew")
    assert not [r for r in records if "revision" in r]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_every_case_is_measured_on_a_gpu(case, tmp_path):
    norms.main(
        ["--output", str(tmp_path), "--rounds", "3", "--rows", "4096", "--width", "1024", "--case", case,
         "--provider", "ours", "torch", "compile"]
    )  # fmt: skip
    records = load(tmp_path / "norms.json")["records"]
    assert len(records) == (16 if CASES[case].add else 8)  # three providers and the bound
    assert [r for r in records if r.get("error")] == []
    assert all(r["share"] > 0 for r in records)
