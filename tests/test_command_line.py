"""train.py and sample.py as a user starts them."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from io import BytesIO, TextIOWrapper

import pytest
import wandb

import sample
import train
from tests.resume.stops import in_step
from tests.runs import ROOT, environment, logged, newest, read_json, run_folders, train_here
from training import checkpoint


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """The folder of a run of 8 steps."""
    return train_here([*tiny, "train.steps=8"], tmp_path_factory.mktemp("trained") / "run")[0].folder


def test_a_sweep_is_a_run_for_each_combination_in_its_folder_and_in_one_wandb_group_but_for_jobs_that_are_refused(
    tiny, here, own_wandb, monkeypatch, capfd
):
    monkeypatch.setenv("WANDB_RUN_ID", "shared")
    swept = ["sample.prompt=ROMEO,the", "-m", "norm.impl=fused,torch"]  # options may stand between overrides
    assert train.main([*tiny, "logging.wandb=offline", "train.steps=8", *swept]) == 2
    wandb.teardown()  # writes its logs
    said = capfd.readouterr()
    assert "sample.prompt: tokenizer.kind=char has no token for 'E' (U+0045)" in said.err and "Traceback" not in said.err
    assert "Error executing job with overrides: ['data=text'" in said.err and "[sweep] 1: data=text" in said.out
    folders = run_folders(here)
    assert [folder.name for folder in folders] == [
        f"{i}_norm.impl-{of}_sample.prompt-the" for i, of in ((2, "fused"), (3, "torch"))
    ]
    [parent] = {folder.parent for folder in folders}
    assert parent.parent == here / "runs" and re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_sweep", parent.name)
    kept = ("metrics.jsonl", "checkpoints/step_00000008/state.json", "loss.png")
    assert all((folder / name).is_file() for folder in folders for name in kept)
    lines = zip(*[(folder / "config.yaml").read_text().splitlines() for folder in folders], strict=True)
    assert {line[0].strip().split(":")[0] for line in lines if len(set(line)) > 1} == {"impl"}
    logs = [log for folder in folders for log in folder.glob("wandb/offline-run-*/run-*.wandb")]
    assert len({log.name for log in logs} - {"run-shared.wandb"}) == 2
    assert all(parent.name.encode() in log.read_bytes() for log in logs)
    assert "-m" in shlex.split(read_json(folders[0] / "environment.json")["command"])


def test_a_signal_before_the_first_step_leaves_nothing_and_has_its_exit_code(tiny, here, monkeypatch):
    monkeypatch.setattr(train, "load_corpus", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert train.main(tiny) == 130
    assert list((here / "runs").iterdir()) == []


def test_ctrl_c_ends_with_130_a_checkpoint_and_the_command_to_go_on_and_a_changed_run_has_a_new_folder(tiny, here, capsys):
    """In a folder whose name needs quotes."""
    with in_step(4, lambda _: signal.raise_signal(signal.SIGINT)):
        assert train.main([*tiny, "logging.every=1", "eval.every=0", 'folder="runs/a b (1)"']) == 130
    assert checkpoint.read(here / "runs/a b (1)").step == logged(here / "runs/a b (1)") == 4
    said = capsys.readouterr().out
    _, name, resume = shlex.split(said[said.index("python train.py ") :].splitlines()[0])
    changed = [resume, "train.steps=8"]
    assert name == "train.py" and train.main(changed) == 2
    assert "made with train.steps=30" in capsys.readouterr().err
    assert train.main([*changed, "resume_with_changes=true"]) == 0
    said = capsys.readouterr().out
    [resumed] = here.glob("runs/*_resumed_*")
    assert logged(resumed) == 8 and "goes on from runs/a b (1)/checkpoints/step_" in said
    said = next(line.split(maxsplit=2)[2] for line in said.splitlines() if "more text" in line)
    assert shlex.split(said) == ["python", "sample.py", str(resumed.relative_to(here))]


def test_help_is_printed_without_running_anything_in_any_encoding(here, monkeypatch):
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(BytesIO(), "ascii"))
    assert train.main(["--help"]) == 0
    sys.stdout.seek(0)
    printed = sys.stdout.read()
    for part in ("python train.py norm.impl=torch", "experiment: gpt2_124m, shakespeare,", "norm.impl=fused", "optim.lr=0.004"):
        assert part in printed
    assert r"4 \xd7 width" in printed  # ASCII has no ×
    assert list(here.iterdir()) == []


PLUGIN = """
from hydra.plugins.search_path_plugin import SearchPathPlugin
class Mine(SearchPathPlugin):
    manipulate_search_path = lambda self, path: path.append("mine", "file://{}")
"""


def test_a_run_writes_only_to_its_folder_and_its_cache_needs_no_home_and_takes_an_installed_packages_options(
    tiny, tmp_path, tmp_path_factory
):
    package = tmp_path_factory.mktemp("package")
    for name, text in {
        "hydra_plugins/mine.py": PLUGIN.format(package),
        "experiment/mine.yaml": "# @package _global_\noptim: {beta1: 0.5}\n",
    }.items():
        (package / name).parent.mkdir()
        (package / name).write_text(text)
    own = [f"data.cache_dir={tmp_path}/own", "train.steps=3", "folder=run", "tokenizer=bpe", "tokenizer.vocab_size=280"]
    notebook = "module://matplotlib_inline.backend_inline"  # which is no backend outside of a notebook
    given = environment(tmp_path, HOME="/proc/none", XDG_CACHE_HOME="", MPLBACKEND=notebook, PYTHONPATH=f"{ROOT}:{package}")
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", "experiment=mine", *tiny, *own],
        cwd=tmp_path,
        env=given,
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stderr.split("\n") if line.strip() and "writing tokens" not in line]  # a bar after 3 s
    assert (done.returncode, said) == (0, [])
    assert {path.name for path in tmp_path.iterdir()} == {"own", "run"}
    assert "beta1: 0.5" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize("name", ["train.py", "ablate.py", "compare.py", "sample.py"])
def test_ctrl_c_while_the_program_is_being_imported_is_no_traceback(tmp_path, name):
    command = [sys.executable, "-X", "importtime", str(ROOT / name), "runs/none"]  # a line on stderr for each import
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
    next(line for line in process.stderr if "torch." in line)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == -signal.SIGINT and "Traceback" not in err


def test_a_sample_is_the_prompt_and_more_and_depends_on_the_seed_alone(trained, capsys, tmp_path):
    shutil.copytree(newest(trained), tmp_path / "copy")
    (tmp_path / "copy" / "training.safetensors").write_bytes(b"")  # a sample needs no state of the optimizer
    said = ["--prompt=the ", "--tokens=20", "--temperature=1", "--top-k=null"]
    printed = []
    for place, *more in ((trained, "--seed=1"), (tmp_path / "copy", "--seed=1"), (trained / "last", "--seed=2")):
        assert sample.main([str(place), *said, *more]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2] and re.fullmatch(r"the [\s\S]{20}\n", printed[0])
    assert sample.main([str(trained), *said, "--samples=3"]) == 0
    texts = capsys.readouterr().out.removesuffix("\n").split(sample.SEPARATOR)
    assert len({*texts}) == 3 and texts[0].startswith("the ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/none"], "no checkpoint there"),
        (["{folder}", "--prompt=日本"], "--prompt: "),
        (["nowhere", "--top-k=0"], "--top-k=0: must be at least 1."),
        (["nowhere", "--temperature=nan"], "--temperature=nan: must be finite."),
        (["nowhere", "--samples=0"], "--samples: must be at least 1."),
    ],
)
def test_sampling_mistakes_are_one_message_and_code_2(trained, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):  # argparse's, or what the program makes of the code
        sys.exit(sample.main([argument.format(folder=trained) for argument in arguments]))
    assert message in capsys.readouterr().err


def test_a_sample_for_a_full_disk_is_one_message_and_code_1(capsys, monkeypatch):
    monkeypatch.setattr(sample, "sample", lambda *_: ["×"])
    with open("/dev/full", "w") as full, suppress(OSError):  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        assert sample.main(["run"]) == 1
    assert capsys.readouterr().err == "stopped: standard output can't be written: No space left on device.\n"
