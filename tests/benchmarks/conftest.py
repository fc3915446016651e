"""What the tests of all programs here need."""

import pytest

from benchmarks.command import load


@pytest.fixture
def recorded(tmp_path, capsys):
    """A function: what a program records with these arguments, and what it prints, then and by --plot-only."""

    def recorded(program, *arguments):
        program.main([*arguments, "--output", str(tmp_path)])
        printed = capsys.readouterr().out
        program.main(["--plot-only", "--output", str(tmp_path)])
        assert printed.startswith(capsys.readouterr().out)  # memory says once that no GPU is here
        name = program.__name__.removeprefix("benchmarks.")
        return load(tmp_path / f"{name}.json"), printed

    return recorded
