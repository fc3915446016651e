"""The Hugging Face Hub, asked once whether it answers."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def from_the_hub() -> Iterator[str]:
    """For what the Hub's libraries load in the block. They would retry for half a minute where the Hub can't be reached.

    Yields:
        Why it can't be reached, for a message; the libraries then look in their caches alone. Empty: it answers, or it was not
        asked, as HF_HUB_OFFLINE=1 already says so.
    """
    import datasets
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    offline, offline_datasets = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    problem = ""
    if not offline and not offline_datasets:
        try:
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except Exception as error:  # of the HTTP library that this version uses
            problem = f"{constants.ENDPOINT} does not answer ({error}), and what it has is not in the cache here"
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield problem
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = offline, offline_datasets
