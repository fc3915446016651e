"""The learning rate as a function of the step."""

import math
from typing import assert_never

from configs.schema import OptimConfig, Schedule


def learning_rate(step: int, steps: int, optim: OptimConfig) -> float:
    """The learning rate of optimizer step `step`, counted from 0, in a run of `steps`. It is a pure function of the step.

        warm-up    lr · (step + 1) / warmup_steps                                    step < warmup_steps
        cosine     min_lr + (lr − min_lr) · ½(1 + cos πt)                            t from 0 after warm-up to 1 at `steps`
        wsd        lr, then lr + (min_lr − lr) · t over the last decay_fraction      t from 0 to 1 at `steps`
        constant   lr

    The last step has a t just below 1: only step `steps` would have min_lr. By default min_lr is a tenth of lr.
    """
    warmup_steps = steps // 20 if optim.warmup_steps is None else optim.warmup_steps
    if step < warmup_steps:
        return optim.lr * (step + 1) / warmup_steps
    min_lr = optim.lr / 10 if optim.min_lr is None else optim.min_lr
    match optim.schedule:
        case Schedule.constant:
            return optim.lr
        case Schedule.cosine:
            t = min((step - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
            return min_lr + (optim.lr - min_lr) * 0.5 * (1 + math.cos(math.pi * t))
        case Schedule.wsd:  # the decay may not begin before the warm-up has ended
            decay_from = max(steps - optim.decay_fraction * steps, warmup_steps)
            t = min(max(step - decay_from, 0.0) / max(steps - decay_from, 1), 1.0)
            return optim.lr + (min_lr - optim.lr) * t
        case _:
            assert_never(optim.schedule)
