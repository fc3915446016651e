"""A Hub that can't be reached: a port of this machine that nobody listens at."""

import subprocess
import sys
from pathlib import Path

import pytest

from data.tokenizer import char_tokenizer

ROOT = Path(__file__).parents[2]
# The Hub's libraries read the environment when they are imported, so this is for an interpreter of its own.
CODE = """
import logging, sys
from configs.schema import DataConfig, Source, TokenizerConfig
from data.documents import find_documents
from data.tokenizer import pretrained_tokenizer
from pathlib import Path

print(pretrained_tokenizer("owner/cached").vocab_size)
for load in (
    lambda: pretrained_tokenizer("owner/name"),
    lambda: find_documents(DataConfig(source=Source.hub, path="owner/name")).open(Path("scratch")),
):
    try:
        load()
    except FileNotFoundError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def unreachable(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    cached = folder / ".cache/huggingface/hub/models--owner--cached"  # as a download leaves it
    for name in ("refs", "snapshots/0123"):
        (cached / name).mkdir(parents=True)
    (cached / "refs/main").write_text("0123")
    char_tokenizer("abc").save(cached / "snapshots/0123/tokenizer.json")
    env = {"PATH": "", "PYTHONPATH": str(ROOT), "HOME": str(folder), "HF_ENDPOINT": "http://127.0.0.1:9"}
    return subprocess.run([sys.executable, "-c", CODE], cwd=folder, env=env, capture_output=True, text=True)


def test_a_hub_that_can_not_be_reached_is_asked_once(unreachable):
    assert "Retrying" not in unreachable.stderr and "Traceback" not in unreachable.stderr


def test_what_was_downloaded_before_is_used_all_the_same(unreachable):
    assert unreachable.stdout.splitlines()[0] == "4"


def test_the_message_says_what_could_not_be_reached_and_what_to_do(unreachable):
    _, tokenizer, documents = unreachable.stdout.splitlines()
    why = "http://127.0.0.1:9 does not answer ([Errno 111] Connection refused), and what it has is not in the cache here"
    assert tokenizer.startswith("tokenizer.pretrained=owner/name is neither a file here nor") and why in tokenizer
    assert documents.startswith(f"data.path=owner/name could not be read: {why}. Check the name, the network")
