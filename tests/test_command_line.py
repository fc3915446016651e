"""train.py and sample.py as a user starts them."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from filelock import FileLock

import sample
from tests.forks import Command
from tests.runs import ROOT, environment, finish, read_json, run_folders, start, train_here
from training import checkpoint


def train(arguments, cwd):
    return Command(arguments, cwd).finish()


@pytest.fixture(scope="module")
def sweep(tiny, tmp_path_factory):
    """Four runs of one command, and the folder it was started in."""
    cwd = tmp_path_factory.mktemp("sweep")
    done = train(["-m", "norm.impl=fused,torch", "seed=1,2", *tiny, "logging.wandb=offline", "train.steps=8"], cwd)
    assert done.returncode == 0, done.stderr
    return cwd


def test_a_sweep_is_as_many_runs_as_combinations_each_in_its_folder(sweep):
    folders = run_folders(sweep)

    assert [folder.name for folder in folders] == [
        "0_norm.impl-fused_seed-1",
        "1_norm.impl-fused_seed-2",
        "2_norm.impl-torch_seed-1",
        "3_norm.impl-torch_seed-2",
    ]
    assert len({folder.parent for folder in folders}) == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_sweep", folders[0].parent.name)
    assert all((folder / name).is_file() for folder in folders for name in ("metrics.jsonl", "last/state.json", "loss.png"))


def test_each_run_of_a_sweep_is_a_wandb_run_of_its_own_in_the_sweeps_group(sweep):
    folders = run_folders(sweep)
    logs = [list(folder.glob("wandb/offline-run-*/run-*.wandb")) for folder in folders]

    assert [len(found) for found in logs] == [1, 1, 1, 1]
    assert len({found[0].name for found in logs}) == 4
    assert all(folders[0].parent.name.encode() in found[0].read_bytes() for found in logs)


def test_runs_of_a_sweep_differ_in_what_was_swept_and_in_nothing_else(sweep):
    configs = [(folder / "config.yaml").read_text().splitlines() for folder in run_folders(sweep)]
    differing = {line.strip().split(":")[0] for lines in zip(*configs, strict=True) for line in lines if len(set(lines)) > 1}

    assert differing == {"impl", "seed"}


def test_nothing_is_written_outside_runs(sweep):
    assert {path.name for path in sweep.iterdir()} == {"runs"}


def test_a_mistake_is_one_message_code_2_and_no_folder(tiny, tmp_path):
    done = train(["+norm.fusd=1"], tmp_path)

    assert done.returncode == 2
    assert done.stderr.startswith("error: norm.fusd: no such key. Did you mean norm.impl=fused?")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_missing_data_is_one_message_and_code_2(tiny, tmp_path):
    done = train([*tiny, f"data.files=[{tmp_path}/none.txt]"], tmp_path)

    assert done.returncode == 2
    assert "none.txt" in done.stderr and "Traceback" not in done.stderr
    assert run_folders(tmp_path) == [] and list((tmp_path / "runs").iterdir()) == []


def test_a_data_set_of_ones_own_gives_the_run_its_name(tiny, tmp_path):
    rows = [json.dumps({"text": f"the king sees {i} mornings and the queen {i} nights"}) for i in range(100)]
    (tmp_path / "stories").mkdir()
    (tmp_path / "stories" / "train.jsonl").write_text("\n".join(rows))
    done = train(["data=hub", "data.path=stories", *tiny[2:], "train.steps=3"], tmp_path)

    assert done.returncode == 0, done.stderr
    [folder] = run_folders(tmp_path)
    assert folder.name.endswith("_stories_tiny_fused")
    assert re.search(r"^  data +stories: ", done.stdout, re.MULTILINE)
    assert "  name: stories\n" in (folder / "config.yaml").read_text()


def test_a_prompt_that_can_not_be_encoded_is_refused_before_training(tiny, tmp_path):
    done = train([*tiny, "sample.prompt=ROMEO"], tmp_path)

    assert done.returncode == 2
    assert "error: sample.prompt: tokenizer.kind=char has no token for 'E' (U+0045)" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_job_that_is_refused_lets_the_rest_of_the_sweep_run(tiny, tmp_path):
    text = tiny[1].removeprefix("data.files=")
    steps = ["train.steps=2", "optim.warmup_steps=1"]
    done = train(["-m", *tiny, f"data.files={text},[{tmp_path}/none.txt],{text}", *steps], tmp_path)

    assert done.returncode == 2
    assert "none.txt" in done.stderr and "(in the job " in done.stderr and "Traceback" not in done.stderr
    assert [folder.name[:2] for folder in run_folders(tmp_path)] == ["0_", "2_"]
    assert all((folder / "last/state.json").is_file() for folder in run_folders(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_before_the_first_step_leaves_nothing_and_has_its_exit_code(tiny, tmp_path, number):
    cache, command = tmp_path / "cache", [*tiny, "train.steps=3", f"data.cache_dir={tmp_path / 'cache'}"]
    train_here(command, tmp_path / "first")
    [built] = cache.glob("text-*")
    shutil.rmtree(built)
    with FileLock(cache / f".{built.name.rpartition('-')[2]}.lock"):  # as if another process built it: the run waits
        process = Command(command, tmp_path)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline and not list(tmp_path.glob("runs/*/environment.json")):
            time.sleep(0.05)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(number)
        done = process.finish()

    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_that_stops_on_nan_ends_with_code_1_and_its_wandb_run_closed(tiny, tmp_path):
    done = train([*tiny, "logging.wandb=offline", "optim.lr=1e38", "optim.warmup_steps=0", "optim.min_lr=0"], tmp_path)

    assert done.returncode == 1
    assert re.search(r"stopped: .* at step \d+\. Batch: epoch 0, window \d+", done.stderr)
    assert "Traceback" not in done.stderr
    [folder] = run_folders(tmp_path)
    assert len(list(folder.glob("wandb/offline-run-*/run-*.wandb"))) == 1
    assert not (folder / "checkpoints").exists()


@pytest.fixture(scope="module")
def interrupted(tiny, tmp_path_factory):
    """A long run that was stopped with Ctrl-C."""
    cwd = tmp_path_factory.mktemp("interrupted")
    process = Command([*tiny, "logging.wandb=offline", "train.steps=100000", "logging.every=1", "eval.every=0"], cwd)
    deadline = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < deadline:
        if any(len(path.read_text().splitlines()) > 3 for path in cwd.glob("runs/*/metrics.jsonl")):
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.05)
    return cwd, process.finish()


def test_ctrl_c_ends_with_130_a_checkpoint_and_the_command_to_go_on(interrupted):
    cwd, done = interrupted
    [folder] = run_folders(cwd)

    assert done.returncode == 130, done.stderr
    assert "Ctrl-C again quits at once" in done.stderr and "Traceback" not in done.stderr
    assert f"python train.py resume={folder.relative_to(cwd)}" in done.stdout
    assert checkpoint.read(folder).step == json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert len(list(folder.glob("wandb/offline-run-*/run-*.wandb"))) == 1


def test_resuming_needs_nothing_but_the_folder_and_what_changes(interrupted):
    cwd, _ = interrupted
    [folder] = run_folders(cwd)
    step = checkpoint.read(folder).step
    changes = [f"train.steps={step + 4}", "logging.wandb=disabled"]

    refused = train([f"resume={folder}", *changes], cwd)
    assert refused.returncode == 2 and "made with train.steps=100000" in refused.stderr
    done = train([f"resume={folder}", *changes, "resume_with_changes=true"], cwd)

    assert done.returncode == 0, done.stderr
    resumed = next(path for path in run_folders(cwd) if path != folder)
    lines = [json.loads(line) for line in (resumed / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [step + n for n in (1, 2, 3, 4)]
    assert f"goes on from {folder.relative_to(cwd)}/checkpoints/step_" in done.stdout and f"resumed from {step}" in done.stdout
    assert "_resumed_" in resumed.name
    assert read_json(resumed / "summary.json")["final"]["loss"] > 0


def test_what_a_run_says_to_type_can_be_typed(tiny, tmp_path):
    """In a folder whose name needs quotes, and from where Hydra would have changed the folder."""
    chdir = "hydra.job.chdir=true"
    done = train([*tiny, "train.steps=4", 'folder="runs/a b (1)"', chdir], tmp_path)
    assert done.returncode == 0, done.stderr
    said = next(line.split(maxsplit=2)[2] for line in done.stdout.splitlines() if "more text" in line)
    assert shlex.split(said) == ["python", "sample.py", "runs/a b (1)"]

    refused = train(['resume="runs/a b (1)/last"', chdir], tmp_path)
    assert refused.returncode == 2
    program, *arguments = shlex.split(next(line for line in refused.stderr.splitlines() if "python train.py" in line))[1:]
    assert program == "train.py" and "runs/a b (1)" in arguments[0]
    again = train(arguments, tmp_path)
    assert again.returncode == 0, again.stderr


def test_a_run_that_can_not_be_resumed_leaves_no_folder(sweep, tmp_path):
    done = train([f"resume={run_folders(sweep)[0]}"], tmp_path)

    assert done.returncode == 2
    assert "is at step 8: raise train.steps=8 to go on" in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_sample_reads_nothing_of_the_optimizers_state(sweep, tmp_path):
    shutil.copytree(run_folders(sweep)[0] / "last", tmp_path / "copy")
    (tmp_path / "copy" / "training.safetensors").write_bytes(b"")

    assert sample.sample(tmp_path / "copy", "the ", 1, 1.0, None, seed=1).startswith("the ")


def test_the_command_is_kept_as_a_shell_would_take_it(sweep):
    command = read_json(run_folders(sweep)[0] / "environment.json")["command"]

    assert shlex.split(command)[:3] == ["train.py", "-m", "norm.impl=fused,torch"]
    assert shlex.quote(next(word for word in shlex.split(command) if word.startswith("data.files="))) in command


def test_a_sample_is_the_prompt_and_more_and_depends_on_the_seed_alone(sweep, capsys):
    folder = run_folders(sweep)[0]

    one, again = (sample.sample(folder, "the ", 20, 1.0, None, seed=1) for _ in range(2))
    assert sample.main([str(folder), "--prompt=the ", "--tokens=20", "--temperature=1", "--top-k=null"]) == 0
    assert capsys.readouterr().out == one + "\n"
    other = sample.sample(folder / "best", "the ", 20, 1.0, None, seed=2)

    assert one == again != other
    assert one.startswith("the ") and len(one) == 24


def test_a_sample_that_can_not_be_written_is_one_message_and_code_1(sweep, capsys, monkeypatch):
    full = open("/dev/full", "w")  # noqa: PTH123, SIM115
    monkeypatch.setattr(sys, "stdout", full)

    assert sample.main([str(run_folders(sweep)[0]), "--prompt=the ", "--tokens=2"]) == 1
    assert capsys.readouterr().err == "stopped: standard output can't be written: No space left on device.\n"
    full.close()  # with what was still in its buffer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/none"], "no such file or folder"),
        (["{folder}", "--prompt", "日本"], "--prompt: "),
        (["{folder}", "--prompt", ""], "--prompt has no tokens"),
    ],
)
def test_sampling_mistakes_are_one_message_and_code_2(sweep, capsys, arguments, message):
    folder = str(run_folders(sweep)[0])

    code = sample.main([argument.format(folder=folder) for argument in arguments])

    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--top-k", "0", "--top-k must be at least 1, or null to sample from all tokens, got 0"),
        ("--top-k", "many", "--top-k: invalid whole number or null value: 'many'"),
        ("--temperature", "nan", "--temperature must be finite, got nan"),
        ("--temperature", "-1", "--temperature must be at least 0, got -1.0"),
        ("--seed", str(2**64), "--seed must be at least -2**63 and less than 2**64"),
    ],
)
def test_numbers_that_no_sample_can_be_drawn_with_are_refused_before_anything_is_read(capsys, option, value, message):
    with pytest.raises(SystemExit, match="2"):
        sample.main(["nowhere", f"{option}={value}"])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("sweep", [False, True])
def test_what_a_library_logs_is_heard_once_and_sweep_is_said_by_nothing_but_a_sweep(tmp_path, sweep):
    (tmp_path / "job.py").write_text(
        "import logging, sys\n"
        "import hydra\n"
        "from configs import command_line, keys\n"
        "library = logging.getLogger('library')\n"
        "library.addHandler(logging.StreamHandler())\n"  # of its own, as those of Hugging Face have
        "command_line.register_resolvers(sys.argv[1:])\n"
        "main = hydra.main(version_base='1.3', config_path=str(keys.FOLDER), config_name='config')\n"
        "main(lambda cfg: library.warning('slow network'))()\n"
    )
    command = [sys.executable, str(tmp_path / "job.py"), *(["-m", "seed=1,2"] if sweep else [])]
    given = environment(tmp_path) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["slow network"] * (2 if sweep else 1)
    said = ["[sweep] Launching 2 jobs locally", "[sweep] \t#0 : seed=1", "[sweep] \t#1 : seed=2"]
    assert done.stdout.splitlines() == (said if sweep else [])


def test_the_help_of_sample_shows_the_default_prompt(capsys):
    with pytest.raises(SystemExit, match="0"):
        sample.main(["--help"])
    assert r"go on from (default: '\n')" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("program", ["train.py", "ablate.py", "sample.py"])
def test_ctrl_c_while_the_program_is_being_imported_is_no_traceback(tmp_path, program):
    command = [sys.executable, "-X", "importtime", str(ROOT / program), "runs/none"]  # a line on stderr for each import
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "torch." in line:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)

    assert process.returncode == -signal.SIGINT and "Traceback" not in err


def test_a_terminal_that_lacks_a_character_gets_another_way_to_write_it(tiny, tmp_path):
    arguments, given = [*tiny, "train.steps=2", "optim.warmup_steps=1", "folder=run"], environment(tmp_path)
    for program in (["train.py", *arguments], ["sample.py", "run", "--tokens=3"], ["ablate.py", "--help"]):
        command = [sys.executable, str(ROOT / program[0]), *program[1:]]
        done = subprocess.run(
            command, cwd=tmp_path, env=given | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        if program[0] == "train.py":
            assert r"2 layers \xd7 32" in done.stdout


def test_help_names_commands_groups_and_keys(tmp_path):
    done = finish(start(["--help"], tmp_path))  # by an interpreter of its own

    assert done.returncode == 0, done.stderr
    for part in (
        "python train.py norm.impl=torch",
        "experiment: gpt2_124m, shakespeare, shakespeare_char",
        "norm.impl=fused",
        "optim.lr=0.004",  # as model=tiny has it
        "seed=1",
    ):
        assert part in done.stdout


def test_cfg_job_prints_the_config_of_a_run_without_running_it(tmp_path):
    done = train(["model=gpt2", "norm.kind=rmsnorm", "--cfg", "job"], tmp_path)

    assert done.returncode == 0, done.stderr
    assert "layers: 12" in done.stdout and "kind: rmsnorm" in done.stdout
    assert list(tmp_path.iterdir()) == []
