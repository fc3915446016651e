"""Checks of numbers, of several keys together, and against the machine. They run once, before anything is built.

`check` is a pure function of a config and a `Machine`. Each message names the keys, what was given and what to change.
"""

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from operator import attrgetter

from configs import keys, schema
from configs.keys import ConfigError
from configs.machine import Machine
from configs.schema import Config

# Keys that `python ablate.py` refuses, and why.
TAKEN_BY_ABLATE = {
    "norm.impl": "is what ablate.py compares. Leave it out.",
    "train.compile": "is part of what ablate.py compares. Use ablate.compile=true or ablate.compile=false.",
    "resume": "has no meaning for ablate.py. Use init_from=runs/NAME to compare the norms in the weights of a run.",
    "deterministic": "has no meaning for ablate.py, which measures the operators that a run has without it. Leave it out.",
    "profile": "has no meaning for ablate.py, which profiles each cell on a GPU by itself. Leave it out.",
}
# Keys that may change when a run goes on. Any other key changes the numbers that the run gives.
FREE_ON_RESUME = {
    *("norm.impl", "norm.dropout_masks", "train.compile", "train.compile_mode", "train.recompute"),
    *("loss.impl", "loss.chunks"),
    *("device", "parallel", "deterministic"),
    *("data.processes", "data.cache_dir"),
    *("folder", "resume", "resume_with_changes", "profile"),
}
FREE_SECTIONS_ON_RESUME = {"eval", "checkpoint", "sample", "logging", "ablate"}


def check(cfg: Config, machine: Machine) -> None:
    """Passes a config that can run on `machine`.

    Raises:
        ConfigError: with every number out of range, or else with every other broken rule, one a line.
    """
    _raise_if(_out_of_range(cfg))  # the other rules divide by these numbers
    _raise_if(_broken(cfg, machine))


def check_ablation(overrides: Sequence[str]) -> None:
    """Raises ConfigError, one line per override, for keys that `python ablate.py` sets itself or has no use for."""
    given = [(text, text.partition("=")[0].lstrip("+")) for text in overrides]
    taken = [f"{text}: {key} {TAKEN_BY_ABLATE[key]}" for text, key in given if key in TAKEN_BY_ABLATE]
    _raise_if([*taken, *(f"{text}: is for train.py. Use folder=PATH." for text, key in given if key.startswith("hydra."))])


def check_resumed(before: Config, cfg: Config) -> list[str]:
    """Checks that a run with `cfg` goes on as if the run with `before` had not stopped.

    Returns:
        The keys that change the numbers of the run, which resume_with_changes=true allows.

    Raises:
        ConfigError: there are such keys, one per line, and resume_with_changes=false.
    """
    if cfg.init_from not in (None, before.init_from):
        raise ConfigError(f"init_from={cfg.init_from}: a run that goes on has its weights already. Leave init_from out.")
    changed = {}
    for name in keys.schema():
        then, now = attrgetter(name)(before), attrgetter(name)(cfg)
        free = name in FREE_ON_RESUME or name.partition(".")[0] in FREE_SECTIONS_ON_RESUME
        if name == "train.steps" and before.optim.schedule is schema.Schedule.constant:
            free = True  # its rates don't depend on them
        if then != now and not free:
            changed[name] = f"{name}={keys.shown(now)}: the checkpoint was made with {name}={keys.shown(then)}."
    if changed and not cfg.resume_with_changes:
        raise ConfigError(
            "\n".join(changed.values()) + "\nThe run would then give other numbers than the run that was stopped. "
            "Leave these keys out, or accept the changes with resume_with_changes=true."
        )
    return list(changed)


def _raise_if(broken: Iterable[str]) -> None:
    if text := "\n".join(broken):
        raise ConfigError(text)


def _out_of_range(cfg: Config) -> Iterator[str]:
    holds = {"at least": operator.ge, "more than": operator.gt, "at most": operator.le, "less than": operator.lt}
    for name, key in keys.schema().items():
        value, limits = attrgetter(name)(cfg), key.metadata["limits"]
        if isinstance(value, float) and not isfinite(value):
            yield f"{name}={value}: must be finite."
        elif value is not None and not all(holds[words](value, limit) for words, limit in limits.items()):
            yield f"{name}={value}: must be {' and '.join(f'{words} {limit}' for words, limit in limits.items())}."


def _broken(cfg: Config, machine: Machine) -> Iterator[str]:
    """Rules on several keys together, and on keys and the machine."""
    model, data, tokenizer, train, optim = cfg.model, cfg.data, cfg.tokenizer, cfg.train, cfg.optim

    head_width, rest = divmod(model.width, model.heads)
    if rest:
        yield f"model.heads={model.heads} does not divide model.width={model.width}. Change one of them."
    elif model.positions is schema.Positions.rotary and head_width % 2:
        yield f"model.positions=rotary needs an even head width; model.width / model.heads is {head_width}. Change one of them."
    if model.kv_heads and model.heads % model.kv_heads:
        yield f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}. Change one of them, or use null."

    if cfg.loss.chunks > 1 and cfg.loss.impl is not schema.LossImpl.fused:
        yield f"loss.chunks={cfg.loss.chunks} needs loss.impl=fused; here loss.impl={cfg.loss.impl}. Change one of them."

    if data.source is schema.Source.text and not data.files:
        yield "data.source=text needs data.files: a list of paths or globs, such as data.files=[notes/*.txt]."
    if data.source is not schema.Source.text and data.files:
        yield f"data.files is read only with data.source=text; here data.source={data.source}. Use data=text."
    if data.source is schema.Source.hub and not data.path:
        yield "data.source=hub needs data.path: owner/name on the Hub, or a local folder."
    if data.source is not schema.Source.hub and data.path:
        yield f"data.path is read only with data.source=hub; here data.source={data.source}. Use data=hub."
    if tokenizer.kind is schema.TokenizerKind.pretrained and not tokenizer.pretrained:
        yield "tokenizer.kind=pretrained needs tokenizer.pretrained: owner/name on the Hub, or the path of a tokenizer.json."

    if train.batch_size % (train.accumulation * machine.ranks):
        by = f"train.accumulation={train.accumulation}" + (f" × {machine.ranks} ranks" if machine.ranks > 1 else "")
        yield f"train.batch_size={train.batch_size} can't be cut into equal micro-batches by {by}. Change one of them."
    mode = f"train.compile_mode={train.compile_mode}"
    if train.compile_mode not in schema.COMPILE_MODES:
        yield f"{mode}: no mode that can be used here. Use {', '.join(schema.COMPILE_MODES)}."
    elif train.compile_mode != "default" and (not train.compile or cfg.parallel is schema.Parallel.fsdp):
        yield f"{mode} needs train.compile=true (for ablate.py ablate.compile=true), and has no effect with parallel=fsdp."
    if train.compile_mode in schema.CUDA_GRAPHS and (machine.ranks > 1 or machine.device != "cuda"):
        yield f"{mode} makes CUDA graphs, which are for a single process on a CUDA device. Use another mode."
    if train.compile_mode.startswith("max-autotune") and cfg.deterministic:
        yield f"{mode} chooses kernels by measured speed, and deterministic=true needs the same bits. Use one of them."
    if (optim.warmup_steps or 0) > train.steps:
        yield f"optim.warmup_steps={optim.warmup_steps} is more than train.steps={train.steps}. Use null: a twentieth of them."
    if optim.schedule is not schema.Schedule.constant and optim.lr < (optim.min_lr or 0):
        yield f"optim.min_lr={optim.min_lr:g} is more than optim.lr={optim.lr:g}. Use optim.min_lr=null for a tenth of it."

    if cfg.parallel is not schema.Parallel.auto and not machine.by_torchrun:
        yield f"parallel={cfg.parallel} needs several processes: torchrun --nproc-per-node=N train.py ..., or leave it out."
    if cfg.norm.impl is schema.NormImpl.fused and machine.device == "mps" and os.environ.get("TRITON_INTERPRET") != "1":
        yield "norm.impl=fused needs Triton on cuda or TRITON_INTERPRET=1; this run is on mps. Use norm.impl=torch."
    if train.precision is schema.Precision.bf16 and not machine.bf16:
        yield "train.precision=bf16: this GPU has no bf16 arithmetic. Use train.precision=fp16 or fp32."
    if train.precision is schema.Precision.fp16 and machine.device != "cuda":
        yield f"train.precision=fp16 needs a CUDA device; this run is on {machine.device}. Use train.precision=fp32 or bf16."
