"""A check that the Hugging Face Hub answers."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def from_the_hub() -> Iterator[str]:
    """Asks the Hub once before the block. If it does not answer, the Hub's libraries use their caches alone in the block.

    Without this the libraries would retry for half a minute.

    Yields:
        Why the Hub can't be reached, for a message. Empty: it answers, or HF_HUB_OFFLINE=1 forbids to ask.
    """
    import datasets
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    offline, offline_datasets = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    problem = ""
    if not offline and not offline_datasets:
        try:
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except Exception as error:  # its type depends on the HTTP library
            problem = f"{constants.ENDPOINT} does not answer ({error}), and what it has is not in the cache here"
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield problem
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = offline, offline_datasets
