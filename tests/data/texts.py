"""Text for small corpora."""

import random

NAMES = "the king queen night morning forest sea walks sings sleeps"
WORDS = [*"aio", "—", "!", "日本", "42", *NAMES.split(), "über", "naïve", "don't"]


def text_of(seed: int, words: int) -> str:
    """Lines of random words; the same for the same seed."""
    choose = random.Random(seed)
    lines: list[list[str]] = [[]]
    for _ in range(words):
        lines[-1].append(choose.choice(WORDS))
        if choose.random() < 0.2:
            lines.append([])
    return "\n".join(map(" ".join, lines))
