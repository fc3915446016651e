"""Checks of numbers, of several keys together, and against the machine. They run once, before anything is built.

`check` is a pure function of a config and a `Machine`. Each message names the keys, what was given and what to change.
"""

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from math import isfinite
from operator import attrgetter

from configs import keys, schema
from configs.keys import ConfigError
from configs.machine import Machine
from configs.schema import Config

TOGETHER = (  # what has to hold of several keys
    "norm.placement=pre or model.block=sequential",
    "model.residual_scale!=deepnorm or norm.placement=post",
    "model.qk_norm=false or model.qk_norm_kind=layernorm,rmsnorm or model.qk_norm_kind=null and norm.kind=layernorm,rmsnorm",
    "train.graph=auto,true,false",
)


def check(cfg: Config, machine: Machine) -> None:
    """Passes a config that can run on `machine`.

    Raises:
        ConfigError: with every number out of range, or else with every other broken rule, one a line.
    """
    _raise_if(out_of_range(cfg))  # the other rules divide by these numbers
    _raise_if(_broken(cfg, machine))


def check_given(names: Iterable[str], cfgs: Sequence[Config]) -> None:
    """Raises ConfigError, one line a key, for keys that a command gives and that do nothing in any of its configs.

    Args:
        names: of the command's overrides. null is no value to give, and passes.
    """
    broken, known = [], keys.schema(type(cfgs[0]))
    for name in dict.fromkeys(names):
        if name in known and not any(keys.counts(name, cfg) or attrgetter(name)(cfg) is None for cfg in cfgs):
            only = keys.only(name, known[name])
            broken.append(f"{name} is read only with {only}; here {keys.here(only, cfgs[0])}. Leave it out.")
    _raise_if(broken)


def check_resumed(before: Config, cfg: Config, same_corpus: bool | None = None) -> list[str]:
    """Checks that a run with `cfg` goes on as if the run with `before` had not stopped.

    Args:
        same_corpus: whether both have the same tokens, wherever their text lies. None: the keys of data and tokenizer tell.

    Returns:
        The keys that change the numbers of the run, which resume_with_changes=true allows.

    Raises:
        ConfigError: there are such keys, one per line, and resume_with_changes=false.
    """
    if cfg.init_from not in (None, before.init_from):
        raise ConfigError(f"init_from={cfg.init_from}: a run that goes on has its weights already. Leave init_from out.")
    if cfg.optim.kind is not before.optim.kind:
        raise ConfigError(
            f"optim.kind={cfg.optim.kind}: the checkpoint has the state of {before.optim.kind}, which can't go on as "
            f"{cfg.optim.kind}. Leave the key out, or begin a new run from these weights with init_from=CHECKPOINT."
        )
    free = ["data.", "tokenizer."] if same_corpus else []
    free += ["train.steps"] if before.optim.schedule is schema.Schedule.constant else []  # its rates don't depend on them
    changed = {}
    for name in keys.affecting("weights", "results"):
        then, now = attrgetter(name)(before), attrgetter(name)(cfg)
        if then != now and not name.startswith(tuple(free)):
            changed[name] = f"{name}={keys.shown(now)}: the checkpoint was made with {name}={keys.shown(then)}."
    if same_corpus is False and not any(name.startswith(("data.", "tokenizer.")) for name in changed):
        changed["data"] = "data: the files have changed since the checkpoint was made, and the batches with them."
    if changed and not cfg.resume_with_changes:
        raise ConfigError(
            "\n".join(changed.values()) + "\nThe run would then give other numbers than the run that was stopped. "
            "resume=PATH without these keys goes on with the run's own; resume_with_changes=true accepts the changes."
        )
    return list(changed)


def why_no_graph(cfg: Config, machine: Machine) -> str:
    """Why a step of cfg can't be one CUDA graph on this machine; empty where it can."""
    train = cfg.train
    reasons = {
        "train.graph=false": train.graph is False,
        f"CUDA graphs are for CUDA devices; this run is on {machine.device}": machine.device != "cuda",
        "a graph is of one process; torchrun started this one": machine.by_torchrun,
        "train.recompute=true reads the state of torch's generator, from which this model draws dropout": train.recompute
        and schema.draws_from_torch(cfg.model, cfg.norm),
        "profile=true tells which operator launched a kernel, which a graph does not know": cfg.profile,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _raise_if(broken: Iterable[str]) -> None:
    if text := "\n".join(broken):
        raise ConfigError(text)


def out_of_range(cfg: Config) -> Iterator[str]:
    """What is wrong with values on their own, a line each."""
    holds = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
    for name, key in keys.schema(type(cfg)).items():
        value, limits = attrgetter(name)(cfg), key.metadata["limits"]
        if isinstance(value, float) and not isfinite(value):
            yield f"{name}={value}: must be finite."
        elif value is not None and not all(holds[word](value, limit) for word, limit in limits.items()):
            yield f"{name}={value}: must be {keys.limits(key)}."
        elif key.metadata["needed"] and not value and keys.counts(name, cfg):
            yield f"{keys.only(name, key)} needs {name}: {key.metadata['meaning']}."
        elif value == "None":
            yield f"{name}=None: null gives it no value."


def _broken(cfg: Config, machine: Machine) -> Iterator[str]:
    """Rules on several keys together, and on keys and the machine."""
    model, train, optim = cfg.model, cfg.train, cfg.optim
    yield from (f"{keys.here(words, cfg)}: needs {words}." for words in TOGETHER if not keys.holds(words, cfg))
    head_width, rest = divmod(model.width, model.heads)
    if rest:
        yield f"model.heads={model.heads} does not divide model.width={model.width}. Change one of them."
    elif model.positions is schema.Positions.rotary and head_width % 2:
        yield f"model.positions=rotary needs an even head width; model.width / model.heads is {head_width}. Change one of them."
    if model.kv_heads and model.heads % model.kv_heads:
        yield f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}. Change one of them, or use null."

    if train.batch_size % (train.accumulation * machine.ranks):
        by = f"train.accumulation={train.accumulation}" + (f" × {machine.ranks} ranks" if machine.ranks > 1 else "")
        yield f"train.batch_size={train.batch_size} can't be cut into equal micro-batches by {by}. Change one of them."
    if train.graph is True and (why := why_no_graph(cfg, machine)):
        yield f"train.graph=true: {why}. Use train.graph=auto."
    if (optim.warmup_steps or 0) > train.steps:
        yield f"optim.warmup_steps={optim.warmup_steps} is more than train.steps={train.steps}. Use null: a twentieth of them."
    if optim.schedule is not schema.Schedule.constant and optim.lr < (optim.min_lr or 0):
        yield f"optim.min_lr={optim.min_lr:g} is more than optim.lr={optim.lr:g}. Use optim.min_lr=null for a tenth of it."

    if cfg.parallel is not schema.Parallel.auto and not machine.by_torchrun:
        yield f"parallel={cfg.parallel} needs several processes: torchrun --nproc-per-node=N train.py ..., or leave it out."
    if cfg.norm.impl is schema.NormImpl.fused and machine.device == "mps" and os.environ.get("TRITON_INTERPRET") != "1":
        yield "norm.impl=fused needs Triton on cuda or TRITON_INTERPRET=1; this run is on mps. Use norm.impl=torch."
    yield from refused_by_library(cfg, machine)
    if train.precision is schema.Precision.bf16 and not machine.bf16:
        yield "train.precision=bf16: this GPU has no bf16 arithmetic. Use train.precision=fp16 or fp32."
    if train.precision is schema.Precision.fp16 and machine.device != "cuda":
        yield f"train.precision=fp16 needs a CUDA device; this run is on {machine.device}. Use train.precision=fp32 or bf16."


NO_DROPOUT = ("model.dropout=0", "model.drop_path=0", "model.block=sequential")
LIBRARIES = {  # the package to import, the name to install it by, and what its norms need
    schema.NormImpl.flash_attn: (
        *("flash_attn", "flash-attn", "norm.kind=layernorm,rmsnorm"),
        *("model.dropout=0 or norm.dropout_masks=native", "model.block=sequential or model.drop_path=0"),
    ),
    schema.NormImpl.liger: ("liger_kernel", "liger-kernel", "norm.kind=layernorm,rmsnorm", *NO_DROPOUT),
    schema.NormImpl.quack: ("quack", "quack-kernels", "norm.kind=rmsnorm", *NO_DROPOUT),  # its LayerNorm does not train
}


def refused_by_library(cfg: Config, machine: Machine) -> Iterator[str]:
    """Why norm.impl can't be used with this config here, if it is another library's: one line for each reason."""
    impl, other = cfg.norm.impl, "Use norm.impl=fused, torch or compiled."
    if impl not in LIBRARIES:
        return
    package, name, *needs = LIBRARIES[impl]
    if not is_installed(package):
        yield f"norm.impl={impl} needs the package {name}, which is not installed. Install it. {other}"
    if machine.device != "cuda":
        yield f"norm.impl={impl} needs a CUDA device; this run is on {machine.device}. {other}"
    for words in ("norm.placement=pre", "norm.weight=ones", *needs):
        if not keys.holds(words, cfg):
            yield f"norm.impl={impl} needs {words}; here {keys.here(words, cfg)}. {other}"


def is_installed(package: str) -> bool:
    return find_spec(package) is not None
