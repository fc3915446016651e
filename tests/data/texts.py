"""Text for small corpora."""

import random

LETTERS = [*"aio", "—", "!", "日本", "42"]
WORDS = [*LETTERS, *"the king queen night morning forest sea walks sings sleeps über naïve don't".split()]


def text_of(seed: int, words: int) -> str:
    """Lines of random words; the same for the same seed."""
    choose = random.Random(seed)
    lines, line = [], []
    for _ in range(words):
        line.append(choose.choice(WORDS))
        if choose.random() < 0.2:
            lines.append(" ".join(line))
            line = []
    return "\n".join([*lines, " ".join(line)])
