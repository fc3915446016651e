import os
import subprocess
import sys

from tests.runs import ROOT


def test_the_network_is_looked_at_where_nothing_else_has_imported_the_library_of_the_hub():
    check = "from data.hub import go_offline_without_network as check; check(); from huggingface_hub import constants as c;"
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}  # where nobody listens
    for proxy in ("http_proxy", "https_proxy", "all_proxy"):
        env = {name: value for name, value in env.items() if name.lower() != proxy}
    done = subprocess.run([sys.executable, "-c", f"{check} print(c.HF_HUB_OFFLINE)"], cwd=ROOT, env=env, capture_output=True)
    assert done.stdout.split() == [b"True"], done.stderr.decode()
