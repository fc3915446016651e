"""Small corpora. No test here may use the network."""

from pathlib import Path

import pytest
from hypothesis import settings

from tests.data.texts import text_of

settings.register_profile("data", deadline=None)  # a busy machine is not a failure
settings.load_profile("data")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """The Hub's libraries refuse at once instead of trying."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A folder of ten text files of different sizes."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_bytes(text_of(i, 60 + 20 * i).encode())
    return folder
