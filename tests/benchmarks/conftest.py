"""What the tests of all programs here need."""

import json
from functools import cache

import pytest

from benchmarks import command


@pytest.fixture
def recorded(tmp_path, monkeypatch, capsys):
    """A function: what a program records with these arguments, and what it prints."""
    for name in ("SCRATCH", "FOLDER"):
        monkeypatch.setattr(command, name, tmp_path)
    monkeypatch.setattr(command.sources, "code", cache(command.sources.code))  # which is written with each cell

    def recorded(program, *arguments):
        program.main(arguments)
        (path,) = tmp_path.glob("*/*.json*")
        assert path.name == f"{program.__name__.removeprefix('benchmarks.')}.json"
        return json.loads(path.read_text()), capsys.readouterr().out

    return recorded
