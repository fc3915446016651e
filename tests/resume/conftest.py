import pytest

from tests.resume.stops import AUTO, train_until


@pytest.fixture
def cut(tiny, tmp_path):
    """The folder of a run that died in step 14, and the command that resumes it; its checkpoints are of steps 6, 10 and 12."""
    command = [*tiny, *AUTO]
    return train_until(14, command, tmp_path / "run"), command
