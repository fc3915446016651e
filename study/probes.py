"""What a loss does not tell: the size of the residual stream along the depth, saturation, attention logits, spikes."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.attention import QueryKeySite
from model.norm import NormSite
from ops import Norm
from study.engine import Engine

ROWS = 4  # of the validation set
SATURATED = 0.95  # of |tanh| or |erf|
SPIKE_WINDOW, SPIKE_SIGMAS = 20, 5.0


@torch.no_grad()
def probe(engine: Engine) -> dict[str, list[float]]:
    """Figures of the model as it is, one for each norm site in the order of depth; outside the graph, in evaluation.

    rms, most     of the stream that the site returns or, at the last one, of its output
    logit         largest |q·k| / √head_width that attention sees, one for each layer
    saturated     share of the site's outputs N(r) above SATURATED; of pointwise kinds
    """
    found: dict[str, list[Tensor]] = {"rms": [], "most": [], "logit": [], "saturated": []}

    def site(module: NormSite, inputs: Any, outputs: Any) -> None:
        if module.width != engine.cfg.model.width:  # of queries or keys
            return
        stream = (outputs[-1] if isinstance(outputs, tuple) else outputs).float()
        found["rms"].append(stream.square().mean().sqrt())
        found["most"].append(stream.abs().max())
        kind, scalars = module.kind, module.scalars
        if kind in (Norm.dyt, Norm.derf) and isinstance(outputs, tuple) and scalars is not None:
            bent = (scalars[0] * stream).tanh() if kind is Norm.dyt else (scalars[0] * stream + scalars[1]).erf()
            found["saturated"].append((bent.abs() > SATURATED).float().mean())

    def attention(module: QueryKeySite, inputs: Any, outputs: Any) -> None:
        q, k, _ = (part.transpose(1, 2).float() for part in outputs)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        found["logit"].append((q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).tril().abs().max())

    hooks = [m.register_forward_hook(site) for m in engine.model.modules() if isinstance(m, NormSite)]
    hooks += [m.register_forward_hook(attention) for m in engine.model.modules() if isinstance(m, QueryKeySite)]
    engine.model.eval()
    try:
        with engine.precision.autocast():
            engine.model(engine.evaluation.first()[:ROWS])
    finally:
        engine.model.train()
        for hook in hooks:
            hook.remove()
    return {name: [round(value, 4) for value in torch.stack(of).tolist()] for name, of in found.items() if of}


def spikes(losses: np.ndarray, warmup: int) -> int:
    """How often a training loss after warm-up lies more than SPIKE_SIGMAS standard deviations above the mean of the
    SPIKE_WINDOW losses before it. Neighbouring steps count once."""
    count, last = 0, -SPIKE_WINDOW
    for step in range(max(warmup, SPIKE_WINDOW), len(losses)):
        before = losses[step - SPIKE_WINDOW : step]
        if losses[step] > before.mean() + SPIKE_SIGMAS * before.std() and step - last >= SPIKE_WINDOW:
            count, last = count + 1, step
    return count
