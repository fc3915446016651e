"""python -m benchmarks.norms: what its options choose, what it records, and what it says."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks import bandwidth, norms, providers
from benchmarks.cases import CASES, MAX_ELEMENTS, MODEL_WIDTHS
from benchmarks.command import load
from tests.runs import raising

LN_64 = ["--case", "ln", "--width", "64"]


@pytest.fixture
def run(tmp_path, capfd, monkeypatch):
    """Runs the program on tiny sizes; gives its records, and what it printed."""
    monkeypatch.setattr(norms.timing, "copy_bandwidth", lambda *a: 10.0)

    def run(*arguments):
        norms.main(["--device", "cpu", "--rounds", "2", "--output", str(tmp_path), *arguments])
        return load(tmp_path / f"{parse(*arguments).name}.json")["records"], capfd.readouterr()

    return run


def parse(*arguments):
    return norms.options_of(arguments)[1]


def shapes(*arguments):
    return norms.shapes_of(parse(*arguments))


def test_the_sweep_is_every_case_and_stream_unless_options_choose_a_part():
    found = shapes()
    assert {(s.case.name, s.residual, s.weights) for s in found} == {
        (name, residual, "bf16") for name, case in CASES.items() for residual in (("bf16", "fp32") if case.add else (None,))
    }
    assert all(s.rows == min(32768, MAX_ELEMENTS // s.width) for s in found) and parse("--device", "cpu").rows == [64]
    assert len(shapes("--quick")) == 2 and parse("--quick").rounds == 7
    chosen = ["--quick", "--width", "512", "--case", "ln", "--rounds", "9"]
    assert [(s.case.name, s.width) for s in shapes(*chosen)] == [("ln", 512)] and parse(*chosen).rounds == 9
    capped = shapes("--case", "ln", "--width", "65536", "--rows", "32768", "16384", "1024")
    assert [(s.rows, s.asked_rows) for s in capped] == [(8192, 32768), (1024, 1024)], "equal ones are measured once"
    models = shapes("--models")
    assert {s.width for s in models} == set(MODEL_WIDTHS) and {s.weights for s in models} == {"fp32"}
    assert {(s.case.name, s.residual) for s in models} == {(n, r) for n, c in CASES.items() if c.add for r in ("bf16", "fp32")}


def test_random_shapes_depend_on_the_seed_alone_and_are_of_every_kind_within_bounds():
    assert norms.random_shapes(3, 40, 20)[:5] == norms.random_shapes(3, 5) != norms.random_shapes(4, 5)
    first = [(s.case.name, s.residual, s.weights, s.rows, s.width) for s in norms.random_shapes(1, 2, 1)]
    assert first == [
        ("add_ln", "fp32", "bf16", 6567, 11784), ("dropout_add_rms", "fp32", "fp32", 15708, 13032),
        ("add_ln", "fp32", "fp32", 14121, 456),
    ], "recorded results say the seed alone"  # fmt: skip
    for found, narrowest, least in ((norms.random_shapes(0, 400), 512, 2**26), (norms.random_shapes(0, 0, 400), 256, 2**22)):
        assert all(narrowest <= s.width <= 16384 and s.width % 8 == 0 and s.rows * s.width >= least for s in found)
        kinds = {(s.case.name, s.residual, s.weights) for s in found}
        streams = {True: ("bf16", "fp32"), False: (None,)}
        assert kinds == {(n, r, w) for n, c in CASES.items() for r in streams[c.add] for w in ("bf16", "fp32")}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--width", "0"], "0 is not positive"),
        (["--small", "--width", "64"], "leave --small out"),
        (["--random", "2", "--case", "ln", "--weight-dtype", "fp32"], "leave --case, --weight-dtype out"),
        (["--random", "1", "2", "3"], "one count or two"),
        (["--device", "cpu", "--before", "."], ". is not a copy of ops/"),
        pytest.param(["--quick"], "--device cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    ],
)
def test_wrong_options_are_refused_with_what_is_accepted(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        norms.main(arguments)
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_case_width_provider_residual_and_direction_choose_what_is_measured(run):
    selection = "--case ln dropout_add_rms --width 64 48 --residual fp32 --direction backward"
    records, _ = run(*selection.split(), "--provider", "ours", "ours-seeded", "torch")
    found = {(r["case"], r["direction"], r["residual_dtype"], r["M"], r["N"], r["provider"]) for r in records}
    chosen = {("ln", None, "ours"), ("ln", None, "torch")}
    chosen |= {("dropout_add_rms", "fp32", provider) for provider in ("ours", "ours-seeded", "torch")}
    assert found == {(case, "backward", dtype, 64, n, provider) for case, dtype, provider in chosen for n in (64, 48)}
    for record in records:
        assert record["p10"] <= record["us"] <= record["p90"] and record["sets"] >= 2
        assert record["share"] == pytest.approx(record["gb_per_s"] / 10.0, abs=0.01) and record["copy_gb_per_s"] == 10.0


def test_a_table_of_ours_the_others_and_another_revision_is_printed(run, tmp_path):
    ops = str(Path(providers.__file__).parents[1] / "ops")  # another revision, timed beside ours
    records, printed = run("--case", "rms", "--width", "64", "--provider", "ours", "torch", "--before", ops)
    assert {r["provider"] for r in records} == {"ours", "torch", "before"} and not any(r.get("error") for r in records)
    assert all(("times_ours" in r) == (r["provider"] != "ours") for r in records)
    header, line, *_ = printed.out.splitlines()
    assert "fastest other" in header and header.endswith("before / ours") and "RMS, forward 64×64" in line
    assert "more than 2% behind before:" in printed.out and [path.name for path in tmp_path.iterdir()] == ["norms.json"]


def test_each_selection_has_a_record_of_its_own(run, tmp_path):
    run(*LN_64, "--provider", "torch", "--direction", "forward")
    records, _ = run("--random", "1", "1", "--seed", "5", "--provider", "torch")
    assert len(records) == 4 and all(r["M"] <= 64 < r["asked_rows"] for r in records)
    assert {path.name for path in tmp_path.glob("*.json")} == {"norms.json", "norms_random.json"}
    assert load(tmp_path / "norms.json")["command"].endswith("--case ln --width 64 --provider torch --direction forward")


def test_a_provider_that_fails_is_told_of_where_warm_compiles_it_and_recorded_beside_the_others(run, monkeypatch):
    monkeypatch.setattr(providers, "pool", lambda processes, before: ThreadPoolExecutor(1))  # processes take seconds
    monkeypatch.setitem(providers.PROVIDERS, "torch", providers.Provider(lambda *of: raising(RuntimeError("no kernel"))))
    records, printed = run(*LN_64, "--provider", "ours", "torch", "--direction", "forward", "--warm", "2")
    assert "compiling in 2 processes: 100%" in printed.err
    assert "compiling torch, ln 64×64, bf16 weights: RuntimeError: no kernel" in printed.err
    found = [(r["provider"], r["us"] is None, r.get("error")) for r in records]
    assert found == [("ours", False, None), ("torch", True, "RuntimeError: no kernel")]
    assert "failed: torch, LN, forward 64×64: RuntimeError: no kernel" in printed.out


@pytest.mark.parametrize(("rounds", "told"), [(5, False), (6, True)])
def test_a_ratio_over_few_rounds_has_no_interval_to_call_it_faster_by(rounds, told):
    ours, peer = (norms.timing.Outcome(us=[us + 0.01 * i for i in range(rounds)]) for us in (10.0, 12.0))
    record = bandwidth.record_of(peer, ours, 1000, 4000.0)
    assert record["times_ours"] == pytest.approx(1.2, abs=0.01) and ("times_ours_95" in record) == told


def test_a_library_that_is_missing_is_told_and_refused_where_it_was_asked_for(run, monkeypatch, capfd):
    monkeypatch.setattr(norms.command.providers, "missing", lambda names: {"quack-kernels": "ImportError: no quack"})
    with pytest.raises(SystemExit, match="--provider"):
        run(*LN_64, "--provider", "quack-kernels")
    assert norms.command.importable(None, ["ours", "quack-kernels"]) == ["ours"]
    assert "missing: quack-kernels (ImportError: no quack)" in capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_every_case_is_measured_on_a_gpu(case, tmp_path):
    size = ["--rounds", "3", "--rows", "4096", "--width", "1024"]
    norms.main(["--output", str(tmp_path), *size, "--case", case, "--provider", "ours", "torch", "compile"])
    records = load(tmp_path / "norms.json")["records"]
    assert len(records) == (16 if CASES[case].add else 8)  # three providers and the bound
    assert [r for r in records if r.get("error")] == [] and all(r["share"] > 0 for r in records)
