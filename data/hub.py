"""The Hugging Face Hub where there is no network."""

import os
import socket
import sys
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies


def go_offline_without_network() -> None:
    """Makes the Hub's libraries use their cache at once where the Hub can't be reached. They would try for half a minute."""
    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    with suppress(OSError):
        if not getproxies():  # else only the proxy knows
            socket.create_connection((hub.hostname or "", hub.port or 443), timeout=5).close()
        return
    os.environ["HF_HUB_OFFLINE"] = "1"  # of what is imported later
    constants.HF_HUB_OFFLINE = True
    if datasets := sys.modules.get("datasets"):
        datasets.config.HF_HUB_OFFLINE = True
