"""The keys of compare.py: those of train.py and a section of its own, which an option of the group study sets too."""

from dataclasses import dataclass, field
from typing import ClassVar

import configs
from configs import compose
from configs.schema import key


@dataclass
class CompareConfig:
    """A study: what it is about, its arms, and how they are compared."""

    claim: str | None = key(None, "what a study is about, for its report", "nothing")
    source: str | None = key(None, "who says so", "nothing")
    limits: str | None = key(None, "what the study can't say", "nothing")
    arguments: list[str] = key(list, "key=value of all arms, such as optim.lr=1e-3,3e-3", "nothing")
    arms: dict[str, list[str]] = key(dict, "key=value of each arm, by its name", "nothing")
    sizes: dict[str, list[str]] = key(dict, "key=value of each size of a ladder", "nothing")
    baseline: str | None = key(None, "the arm that the others are compared with; null: the first", "nothing")
    diverged: float = key(1.0, "nats above its arm's best loss that end a run, as NaN does", "nothing", above=0)
    fresh: int = key(8, "seeds at each arm's best rate, which had no part in its choice; 0: no verdict", "nothing", at_least=0)
    race_steps: int | None = key(None, "steps after which two rates go on; null: steps / 10; 0: all do", "nothing", at_least=0)
    equal_time: bool = key(False, "train slower arms again, to end when the fastest ends", "nothing", only="sizes={}")
    all_pairs: bool = key(False, "ask whether each pair of arms differs, not the baseline's alone", "nothing", only="sizes={}")
    timing_cycles: int | None = key(None, "timing cycles; null: 6, 0 on a CPU", "nothing", only="sizes={}", at_least=0)


@dataclass
class Config(configs.Config):
    program: ClassVar[str] = "compare"
    together: ClassVar[bool] = True
    compare: CompareConfig = field(default_factory=CompareConfig)


compose.register(Config)
