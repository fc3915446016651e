"""Ablations made up for tests: true speed-ups are known, noise is seeded."""

import itertools
from dataclasses import replace

import numpy as np

from ablation.records import Ablation, ArmTimes, Attribution, Cell, Kernel, Parity, Share
from ablation.rounding import Distances, Quantity
from measure.comparison import AGAIN, FUSED, TORCH, TWIN, compare_all, is_twin
from measure.statistics import Interval

ENVIRONMENT = {
    "git": {"revision": "e14034200f29d3b5f6a1c9a90f6cc2d6c8b44d1e", "dirty": True},
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "wandb": None},
    "gpu": {"name": "NVIDIA H200", "memory_gb": 139.8, "power_limit_w": 700.0},
}
# Overrides of a real one that takes a second.
SHORT = ["ablate.arms=[torch,fused]", "ablate.cycles=6", "ablate.block_steps=1", "ablate.warmup_steps=1"]
SHORT += ["ablate.parity_steps=2", "ablate.parity_seeds=2"]
SWEPT = ({"model.dropout": "0.1"}, {"model.dropout": "0.0"})
SHARES = {"GEMM": 0.47, "attention": 0.13, "norm": 0.26, "loss": 0.06, "optimizer": 0.04, "other": 0.04}


def ablation(overrides=SWEPT, modes=("eager", "compiled"), compiled=1.07, kernels=True, parity=True) -> Ablation:
    """As on a GPU, or with kernels=False on a CPU. `compiled` is the speed-up in that mode, `parity` says whether it holds."""
    speedups = {"eager": 1.2, "compiled": compiled, "graph": 1.3, "compiled graph": 1.05}
    product = enumerate(itertools.product(overrides, modes))
    cells = [cell(of, mode, speedups[mode], kernels, seed) for seed, (of, mode) in product]
    environment = ENVIRONMENT if kernels else ENVIRONMENT | {"gpu": None}
    parities = [parity_of(of, parity) for of in overrides]
    command = "python ablate.py model=gpt2 model.dropout=0.0,0.1"
    code = {"modules": {"measure/gone.py": "0"}, "kernels": {}, "backward": "one thread"}
    return Ablation(cells, parities, environment, command, "norm:\n  kind: layernorm\n", kernels, ["A note."], code)


def cell(overrides: dict[str, str], mode: str, speedup: float, kernels: bool, seed: int, arms=None) -> Cell:
    """`speedup` is that of fused over torch; that of compiled sites is half of it."""
    draw = np.random.default_rng(seed)
    torch_ms = {"eager": 131.7, "compiled": 104.2, "graph": 52.0, "compiled graph": 44.0}[mode]
    drift = np.repeat(draw.normal(1, 0.004, 12), 2)  # of a cycle
    gains = {TORCH: 1.0, AGAIN: 1.0, "compiled": (1 + speedup) / 2, FUSED: speedup, FUSED + TWIN: speedup}
    names = arms or ([TORCH, AGAIN, FUSED, FUSED + TWIN] if "compiled" in mode else list(gains))
    blocks = {name: [list(torch_ms / gains[name] * at * (1 + draw.gamma(2, 0.002, 20))) for at in drift] for name in names}
    times = {}
    for name, of in blocks.items():
        peak_gb, launches = (31.2, 1432) if name in (FUSED, FUSED + TWIN) else (39.7, 1874)
        on_gpu = (peak_gb, launches) if kernels else (None, None)
        times[name] = ArmTimes(of, *on_gpu)
    profile = attribution({name: torch_ms / gains[name] for name in names if not is_twin(name)}) if kernels else None
    return Cell(overrides, mode, 32768, times, FUSED, compare_all(blocks), profile)


def attribution(steps_ms: dict[str, float]) -> Attribution:
    torch = [Share(group, 0.95 * share * steps_ms[TORCH], 200) for group, share in SHARES.items()]
    shares = {}
    for name, ms in steps_ms.items():
        saved = steps_ms[TORCH] - ms
        shares[name] = [replace(s, ms=s.ms - saved, launches=98) if s.group == "norm" else s for s in torch]
    kernels = {name: [Kernel(f"{s.group}_kernel", s.group, s.ms, s.launches) for s in of] for name, of in shares.items()}
    limits = {name: 1.25 * ms / steps_ms[TORCH] for name, ms in steps_ms.items() if name != FUSED}
    return Attribution(shares, 40_000_000_000, 4100.0, limits, dict.fromkeys(limits, 0.83), kernels)


def parity_of(overrides: dict[str, str], holds: bool = True) -> Parity:
    far = 1.02 if holds else 7.4
    names = ("loss", "gradient norm", "gradient of block 0", "row scale of the final norm", "parameters")
    return Parity(
        overrides=overrides,
        arm=FUSED,
        precision="bf16",
        seeds=[1, 2, 3],
        steps=60,
        quantities=[Quantity(name, Interval(far, far - 0.08, far + 0.09), Interval(0.99, 0.93, 1.06), holds) for name in names],
        holds=holds,
        verdict="Parity holds: as far as others." if holds else "Parity fails: the loss is 7.4 × as far as expected.",
        distances={name: [Distances(far, 0.99, -0.01, 0.02)] * 3 for name in names},
    )
