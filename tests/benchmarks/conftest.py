"""What the tests of all programs here need."""

import json

import pytest


@pytest.fixture
def recorded(tmp_path, capsys):
    """A function: what a program records with these arguments, and what it prints."""

    def recorded(program, *arguments):
        program.main([*arguments, "--output", str(tmp_path)])
        name = program.__name__.removeprefix("benchmarks.")
        assert not (tmp_path / f"{name}.json.part").exists()
        return json.loads((tmp_path / f"{name}.json").read_text()), capsys.readouterr().out

    return recorded
