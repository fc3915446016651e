import sys

import pytest
import torch

from benchmarks import memory, norms, providers, warm
from benchmarks.cases import CASES, MAX_ELEMENTS
from benchmarks.results import ResultsError, load

SMALL = ["--device", "cpu", "--rounds", "2", "--rows", "32"]


@pytest.fixture
def run(tmp_path, capfd, monkeypatch):
    """Runs the program on tiny sizes; gives its records, and what it printed."""
    monkeypatch.setattr(norms.timing, "copy_bandwidth", lambda *a: 10.0)

    def run(*arguments):
        norms.main([*SMALL, "--output", str(tmp_path), *arguments])
        return load(tmp_path / "norms.json")["records"], capfd.readouterr()

    return run


def parse(*arguments):
    return norms.options_of(arguments)[1]


def test_tensors_are_small_by_default_where_a_cpu_has_to_do_with_them():
    assert parse().rows == [32768] and parse("--device", "cpu").rows == [64]
    assert parse("--device", "cpu", "--rows", "3").rows == [3]
    assert memory.options_of([])[1].rows == 32768 and memory.options_of(["--device", "cpu"])[1].rows == 64


def cells(records):
    return {(r["case"], r["direction"], r["residual_dtype"], r["M"], r["N"], r["provider"]) for r in records}


def test_default_sweep_is_every_case_width_stream_and_provider():
    options = parse()
    shapes = norms.shapes(options)
    assert {s.case.name for s in shapes} == set(CASES)
    assert {s.width for s in shapes} == {768, 1024, 1600, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536}
    assert {s.residual for s in shapes if s.case.add} == {"bf16", "fp32"}
    assert {s.residual for s in shapes if not s.case.add} == {None}
    assert options.provider == list(providers.PROVIDERS) and options.direction == ["forward", "backward"]
    assert options.rounds == 25
    assert all(s.rows * s.width <= MAX_ELEMENTS and s.rows == min(32768, MAX_ELEMENTS // s.width) for s in shapes)


def test_quick_is_a_small_part_but_what_is_asked_for_stays():
    options = parse("--quick")
    assert len(norms.shapes(options)) == 2 and options.rounds == 7
    options = parse("--quick", "--width", "512", "--case", "ln", "--rounds", "9")
    assert [(s.case.name, s.width) for s in norms.shapes(options)] == [("ln", 512)] and options.rounds == 9


def test_small_widths():
    assert {s.width for s in norms.shapes(parse("--small"))} == {32, 64, 128, 256, 512}


def test_rows_that_the_cap_makes_equal_are_measured_once():
    options = parse("--case", "ln", "--width", "65536", "--rows", "32768", "16384", "1024")
    assert [(s.rows, s.asked_rows) for s in norms.shapes(options)] == [(8192, 32768), (1024, 1024)]


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
        (["--small", "--width", "64"], "give one"),
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
    expected = {("ln", "backward", None, 32, n, p) for n in (64, 48) for p in ("ours", "torch")}
    expected |= {("dropout_add_rms", "backward", "fp32", 32, n, p) for n in (64, 48) for p in ("ours", "ours-seeded", "torch")}
    assert cells(records) == expected
    for record in records:
        assert record["p10"] <= record["us"] <= record["p90"]
        assert record["share"] == pytest.approx(record["gb_per_s"] / 10.0, abs=0.01)
        assert record["copy_gb_per_s"] == 10.0 and record["sets"] >= 2
    assert all(("times_ours" in record) == (record["provider"] != "ours") for record in records)


def test_table_and_plots_are_made(run, tmp_path):
    _, printed = run("--case", "rms", "--width", "64", "--provider", "ours", "torch")
    assert "RMS, forward, M=32" in printed.out and "best peer" in printed.out
    assert {p.name for p in tmp_path.iterdir()} == {"norms.json", "norms_forward.png", "norms_backward.png"}


def test_plot_only_measures_nothing(run, tmp_path, monkeypatch, capfd):
    run("--case", "rms", "--width", "64", "--provider", "ours")
    (tmp_path / "norms_forward.png").unlink()
    monkeypatch.setattr(norms, "measure_shape", None)
    norms.main(["--plot-only", "--output", str(tmp_path)])
    assert (tmp_path / "norms_forward.png").exists() and "RMS, forward" in capfd.readouterr().out


def test_weight_dtype_is_part_of_the_cell(run):
    run("--case", "ln", "--width", "64", "--provider", "ours")
    records, _ = run("--case", "ln", "--width", "64", "--provider", "ours", "--weight-dtype", "fp32")
    assert sorted(r["weight_dtype"] for r in records) == ["bf16", "bf16", "fp32", "fp32"]


def test_invocations_add_up_and_fresh_starts_over(run):
    run("--case", "ln", "--width", "64", "--provider", "torch")
    records, _ = run("--case", "ln", "--width", "48", "--provider", "torch")
    assert {r["N"] for r in records} == {48, 64}
    records, _ = run("--case", "ln", "--width", "32", "--provider", "torch", "--fresh")
    assert {r["N"] for r in records} == {32}


def test_missing_measures_only_what_the_file_lacks(run, monkeypatch):
    run("--case", "ln", "--width", "64", "--provider", "torch", "--direction", "forward")
    measured = []
    original = norms.measure_shape

    def spy(shape, setting, directions, *rest):
        measured.append((shape.width, list(directions)))
        return original(shape, setting, directions, *rest)

    monkeypatch.setattr(norms, "measure_shape", spy)
    run("--case", "ln", "--width", "64", "48", "--provider", "torch", "--missing")
    assert measured == [(64, ["backward"]), (48, ["forward", "backward"])]


def test_after_the_minutes_no_cell_is_started_and_what_is_left_is_told(run, monkeypatch):
    monkeypatch.setattr(norms.command.Budget, "spent", property(lambda self: True))
    with pytest.raises(ResultsError, match="not there"):  # nothing was measured
        run("--case", "ln", "--width", "64", "48", "--provider", "torch", "--minutes", "1")


def test_warm_starts_processes_that_compile_every_shape_between_them(run, monkeypatch):
    shares = []
    original = warm.subprocess.Popen

    def stand_in(command, **more):
        """A process that prints its lines without the seconds of imports."""
        if "benchmarks.norms" not in command:
            return original(command, **more)
        _, options = norms.options_of(command[3:])
        mine = norms.shapes(options)[options.compile_only]
        shares.extend(shape.case.name for shape in mine)
        return original([sys.executable, "-c", f"print({len(mine)} * 'done\\n', end='')"], **more)

    monkeypatch.setattr(warm.subprocess, "Popen", stand_in)
    records, printed = run("--case", *CASES, "--residual", "bf16", "--width", "64", "--provider", "torch", "--warm", "4")
    assert sorted(shares) == sorted(CASES)
    assert "compiling in 4 processes: 100%" in printed.err and "failed" not in printed.err
    assert len(records) == 2 * len(CASES)


def test_compiling_process_that_fails_is_told_and_survived(run, monkeypatch):
    original = warm.subprocess.Popen
    failing = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(
        warm.subprocess,
        "Popen",
        lambda command, **more: original(failing if "benchmarks.norms" in command else command, **more),
    )
    records, printed = run("--case", "ln", "--width", "64", "--provider", "torch", "--warm", "2")
    assert "2 of 2 compiling processes failed" in printed.err
    assert len(records) == 2


def test_compile_only_runs_its_share_both_ways_and_records_nothing(run, tmp_path, monkeypatch, capfd):
    ran = []

    def note(case, setting):
        function = providers.plain_torch(case, setting)
        return lambda inputs: ran.append(case.name) or function(inputs)

    monkeypatch.setitem(providers.PROVIDERS, "torch", providers.Provider(note))
    arguments = ["--case", "ln", "rms", "add_ln", "--residual", "bf16", "--width", "64", "--provider", "torch"]
    norms.main([*SMALL, "--output", str(tmp_path), *arguments, "--compile-only", "1/2"])
    assert ran == ["rms"] and len(capfd.readouterr().out.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_failure_while_compiling_ahead_is_told_and_survived(capfd):
    def broken(inputs):
        raise RuntimeError("no kernel")

    warm.run_once({"torch": broken}, None)
    assert "compiling torch: RuntimeError: no kernel" in capfd.readouterr().err


def test_minutes_run_out_by_the_clock(monkeypatch):
    clock = iter([0.0, 59.0, 61.0])
    monkeypatch.setattr(norms.command.time, "monotonic", lambda: next(clock))
    budget = norms.command.Budget(1.0)
    assert not budget.spent and budget.spent
    assert not norms.command.Budget(None).spent


def test_failing_provider_is_recorded_and_told(run, monkeypatch):
    def broken(case, setting):
        def function(inputs):
            raise RuntimeError("no kernel for this width")

        return function

    monkeypatch.setitem(providers.PROVIDERS, "torch", providers.Provider(broken))
    records, printed = run("--case", "ln", "--width", "64", "--provider", "ours", "torch", "--direction", "forward")
    (record,) = [r for r in records if r["provider"] == "torch"]
    assert record["us"] is None and record["error"] == "RuntimeError: no kernel for this width"
    assert "failed: torch, ln forward  32×64: RuntimeError: no kernel for this width" in printed.out
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


def test_libraries_missing_from_all_are_told_and_left_out(monkeypatch, capsys):
    monkeypatch.setattr(norms.command.providers, "missing", lambda names: {"apex": "ImportError: no apex"})
    assert norms.command.importable(["ours", "apex"], optional=True) == ["ours"]
    assert "missing: apex (ImportError: no apex)" in capsys.readouterr().err


def test_results_of_other_code_are_refused(run, tmp_path, monkeypatch):
    run("--case", "ln", "--width", "64", "--provider", "torch")
    path = tmp_path / "norms.json"
    path.write_text(path.read_text().replace('"torch": "', '"torch": "0.'))
    with pytest.raises(SystemExit, match=r"recorded elsewhere.*--fresh"):
        run("--case", "ln", "--width", "48", "--provider", "torch")


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
