"""Paths in commands that no file can have: one line with the path and the reason, and exit code 2."""

import importlib
import sys

import pytest

from configs import ConfigError
from training.run import Start, open_run

LONG = "a" * 300
COMMANDS = """
train resume={}
train folder={}
train data=text data.files=[{}]
train tokenizer.kind=pretrained tokenizer.pretrained={}
train init_from={}
sample {}
compare folder={} resume=auto
ablate folder={} resume=auto
ablate ablate.nanogpt={} ablate.arms=[torch,fused,nanogpt]
training.export {} --format gpt2
"""


@pytest.mark.parametrize("line", COMMANDS.split("\n")[1:-1])
def test_a_path_that_no_file_can_have_is_one_message_and_code_2(line, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, *given = line.format(LONG).split()
    given = [*tiny, *given] if name in ("train", "ablate", "compare") else given
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    module = importlib.import_module(name)
    assert module.main(given) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and LONG in said and "File name too long" in said


def test_a_loop_of_links_is_a_folder_that_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="loop: File exists"), open_run(Start(None, tmp_path / "loop"), None):
        pass
