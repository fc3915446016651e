"""What the tests of all programs here need."""

import pytest

from benchmarks.command import load


@pytest.fixture
def recorded(tmp_path, capsys):
    """A function: what a program records with these arguments, and what it prints."""

    def recorded(program, *arguments):
        program.main([*arguments, "--output", str(tmp_path)])
        name = program.__name__.removeprefix("benchmarks.")
        assert not (tmp_path / f"{name}.json.part").exists()
        return load(tmp_path / f"{name}.json"), capsys.readouterr().out

    return recorded
