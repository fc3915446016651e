"""Which code a record is of, and what makes it old."""

import ast
import shutil
import sys
from importlib import import_module

import pytest

import configs
from measure import sources
from measure.sources import ROOT, changes, code, tree_hash
from study.config import Config as Study

VERSIONS = {"torch": "2.11.0", "triton": "3.6.0"}
SLEEP = "import time; time.sleep(0.001)"
MEASURED = [*ROOT.glob("ops/**/*.py"), *ROOT.glob("model/*.py"), ROOT / "training/step.py"]


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """A function: what is said of a record of this process when a change was made to a file, which is then taken back."""
    for path in MEASURED:
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
        import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    made = code()
    modules = {name: of for name, of in made["modules"].items() if (tmp_path / name).is_file()}
    monkeypatch.setattr(sources, "ROOT", tmp_path)

    def changed(name, change):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(change(text))
        found = changes({"code": made | {"modules": modules}})
        (tmp_path / name).write_text(text)
        return found

    return changed


def slowed(text):
    """With a call appended to its last function, or to the module where it has none."""
    tree, lines = ast.parse(text), text.splitlines()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.lineno < node.body[0].lineno]
    if not functions:
        return f"{text}\n{SLEEP}\n"
    first = functions[-1].body[0]
    lines.insert(first.lineno - 1, " " * first.col_offset + SLEEP)
    return "\n".join(lines)


def commented(text):
    return f"# another comment\n{text}".replace('"""', '"""Another docstring. ', 1)


def test_a_slow_down_in_any_file_that_a_step_runs_makes_a_record_old_and_a_comment_or_docstring_does_not(changed):
    for path in MEASURED:
        name = path.relative_to(ROOT).as_posix()
        assert changed(name, slowed) == f"{name} has changed"
        assert changed(name, commented) is None
    assert changed("ops/norm.py", lambda text: text.replace("\n\n\n", "\n\n")) is None


def test_a_record_names_what_has_changed_and_the_versions_that_are_not_those_asked_for():
    record = {"code": {"modules": {"ops/gone.py": "1", **dict.fromkeys(map(str, range(5)), "2")}}}
    record |= {"environment": {"versions": VERSIONS | {"torch": "2.11.0+cu130"}}}
    words = "ops/gone.py, 0, 1, 2 and 2 others have changed"
    pins = VERSIONS | {"transformers": "5.23.0"}
    assert changes(record) == words
    assert sources.other_versions(record, pins, "pinned") == [], "of a package that it did not have"
    assert sources.other_versions(record, {"torch": "2.13.0"}, "pinned") == [
        "torch 2.11.0+cu130 was measured, 2.13.0 is pinned"
    ]
    assert changes({"environment": {"versions": {}}}) == "it does not say which code was measured"


def test_code_has_the_imported_modules_but_for_tests_and_those_that_say_what_was_measured():
    import measure.tables  # noqa: F401

    found = code()["modules"]
    assert found["measure/sources.py"] == tree_hash((ROOT / "measure/sources.py").read_text())
    assert "measure/tables.py" not in found and not [path for path in found if path.startswith(("tests", ".", "/"))]
    assert code()["backward"] in ("one thread", "several threads")


def test_several_processes_have_run_one_code_or_are_no_record():
    one, other = ({"modules": {name: "1"}, "kernels": {"k": [name]}, "backward": "one thread"} for name in "ab")
    both = {"modules": {"a": "1", "b": "1"}, "kernels": {"k": ["a", "b"]}, "backward": "one thread"}
    assert sources.together([one, other, one]) == both
    with pytest.raises(ValueError, match=r"^a changed while this was measured\. Measure all of it anew\.$"):
        sources.together([one, other, one | {"modules": {"a": "2"}}])


def test_the_yaml_files_of_a_config_count_by_their_values(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    configs.compose_only(["model=gpt2", "experiment=shakespeare_char", "study=overview"], Study)
    modules = {name: of for name, of in code()["modules"].items() if name.endswith(".yaml")}
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    for name in ("compare", "config", "model/gpt2", "data/shakespeare", "experiment/shakespeare_char", "study/overview"):
        path = tmp_path / "configs" / f"{name}.yaml"
        text = path.read_text()
        path.write_text(f"# why\n{text}")
        assert changes({"code": {"modules": modules}}) is None
        path.write_text(f"{text}\nanother: 1\n")
        assert changes({"code": {"modules": modules}}) == f"configs/{name}.yaml has changed"
        path.write_text(text)


def test_processes_agree_in_what_makes_and_times_a_step_and_not_in_what_tells_of_it(tmp_path, monkeypatch):
    for name in sources.STEP:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1") if name.endswith(".py") else (tmp_path / name).mkdir(exist_ok=True)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    hashes = [sources.modules_hash(*sources.STEP)]
    for name in ("training/tracking.py", "measure/plots.py", "training/step.py", "measure/schedule.py"):
        (tmp_path / name).write_text("x = 2")
        hashes.append(sources.modules_hash(*sources.STEP))
    assert hashes[0] == hashes[1] == hashes[2] and len(set(hashes)) == 3


def test_trees_differ_by_what_runs():
    same = ('def f(x):\n    return f"a{x}b"', '"""Doc."""\n\ndef f( x ):  # why\n    "Doc."\n    return f\'a\' f"{x}" "b"')
    others = ("def f(x):\n    return f'a{x}c'", "def f(x):\n    return x", "def f(x, y):\n    return f'a{x}b'", "")
    assert len({tree_hash(source) for source in same}) == 1
    assert len({tree_hash(source) for source in (*same, *others, "x = 0", "x = None", "x = False")}) == 8


PTX = """//
.version 8.7
.target sm_90a
	// .globl	first_kernel
.visible .entry first_kernel(
	.param .u64 .ptr .global first_kernel_param_0
)
{
	.loc	1 3 0
$L__tmp1:
	ld.param.u64 	%rd1, [first_kernel_param_0];
	ret;  // why
}
	.file	1 "/somewhere/first.py"
	.section	.debug_abbrev
"""


def test_a_kernel_counts_by_its_instructions_alone():
    same = PTX.replace("first", "second").replace("1 3 0", "1 4 7").replace("// why", "").replace("tmp1", "tmp2")
    assert sources.ptx_hash(PTX) == sources.ptx_hash(same) != sources.ptx_hash(PTX.replace("ret", "trap"))


def test_the_kernels_that_ran_are_named_with_the_hash_of_each_variant(monkeypatch):
    pytest.importorskip("triton")
    from ops.kernels import forward

    class Function:  # as Triton's: by device a tuple that begins with what was compiled, by key
        __name__ = "norm_forward_kernel"
        device_caches = {0: ({1: compiled(PTX), 2: compiled(PTX.replace("ret", "trap")), 3: compiled(PTX)}, {}), 1: ({},)}  # noqa: RUF012

    monkeypatch.setattr(sys.modules["triton"], "JITFunction", Function)
    monkeypatch.setattr(forward, "norm_forward_kernel", Function())
    assert code()["kernels"] == {
        "norm_forward_kernel": sorted({sources.ptx_hash(PTX), sources.ptx_hash(PTX.replace("ret", "trap"))})
    }


def test_what_was_compiled_otherwise_is_named_of_the_kernels_that_two_records_share():
    one, other = ({"code": {"kernels": {name: ["1"], "both": ["1"], "of each": [name]}}} for name in "ab")
    assert sources.other_kernels(one, other) == ["of each"] and sources.other_kernels(one, {}) == []


def compiled(ptx):
    return type("CompiledKernel", (), {"asm": {"ptx": ptx}})()
