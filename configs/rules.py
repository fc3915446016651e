"""Checks of numbers, of several keys together, and against the machine. They run once, before anything is built.

`check` is a pure function of a config and a `Machine`. Each message names the keys, what was given and what to change.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import inf
from operator import attrgetter

from configs import keys
from configs.keys import ConfigError
from configs.machine import Machine
from configs.schema import (
    COMPILE_MODES,
    CUDA_GRAPHS,
    Config,
    DataConfig,
    NormImpl,
    Parallel,
    Positions,
    Precision,
    Schedule,
    Source,
    TokenizerConfig,
    TokenizerKind,
    WandbMode,
)

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REPEATABLE = (":4096:8", ":16:8")  # values with which results repeat, as cuBLAS documents

# Keys that `python ablate.py` refuses, and why.
TAKEN_BY_ABLATE = {
    "norm.impl": "is what ablate.py compares. Leave it out.",
    "train.compile": "is part of what ablate.py compares. Use ablate.compile=true or ablate.compile=false.",
    "resume": "has no meaning for ablate.py. Use init_from=runs/NAME to compare the norms in the weights of a run.",
    "deterministic": "has no meaning for ablate.py, which measures the operators that a run has without it. Leave it out.",
    "profile": "has no meaning for ablate.py, which profiles each cell on a GPU by itself. Leave it out.",
}


def check(cfg: Config, machine: Machine) -> None:
    """Passes a config that can run on `machine`.

    Raises:
        ConfigError: with every broken rule, one a line.
    """
    rules = (
        _ranges(cfg),
        _model(cfg),
        _data(cfg),
        _training(cfg, machine.ranks),
        _parallel(cfg, machine),
        _device(cfg, machine),
    )
    _raise_if(chain(*rules))


def check_ablation(overrides: Sequence[str]) -> None:
    """Raises ConfigError, one line per override, for keys that `python ablate.py` sets itself or has no use for."""
    given = [(text, text.partition("=")[0].lstrip("+~")) for text in overrides]
    hydras = "ablate.py is no job of Hydra's. Use folder=PATH to name its folder, and leave Hydra's keys out."
    taken = [f"{text}: {key} {TAKEN_BY_ABLATE[key]}" for text, key in given if key in TAKEN_BY_ABLATE]
    _raise_if([*taken, *(f"{text}: {hydras}" for text, key in given if key.startswith("hydra"))])


def check_data(data: DataConfig, tokenizer: TokenizerConfig) -> None:
    """The part of `check` that a corpus needs, for data.load_corpus."""
    cfg = Config(data=data, tokenizer=tokenizer)
    _raise_if([*_ranges(cfg), *_data(cfg)])


def _raise_if(broken: Iterable[str]) -> None:
    if text := "\n".join(broken):
        raise ConfigError(text)


# Keys that may change when a run goes on. Any other key changes the numbers that the run gives.
FREE_ON_RESUME = {
    *("norm.impl", "norm.dropout_masks", "train.compile", "train.compile_mode", "train.compile_loss", "train.recompute"),
    *("device", "parallel", "deterministic"),
    *("data.processes", "data.cache_dir"),
    *("folder", "resume", "resume_with_changes", "profile"),
}
FREE_SECTIONS_ON_RESUME = {"eval", "checkpoint", "sample", "logging", "ablate"}


def check_resumed(before: Config, cfg: Config) -> list[str]:
    """Checks that a run with `cfg` goes on as if the run with `before` had not stopped.

    Returns:
        The keys that change the numbers of the run, which resume_with_changes=true allows.

    Raises:
        ConfigError: there are such keys, one per line, and resume_with_changes=false.
    """
    if cfg.init_from not in (None, before.init_from):
        raise ConfigError(
            f"init_from={cfg.init_from}: a run that goes on has its weights already. Leave out init_from, or resume."
        )
    changed = [
        (name, then, now)
        for name in keys.schema()
        if name not in FREE_ON_RESUME and name.partition(".")[0] not in FREE_SECTIONS_ON_RESUME
        if (then := attrgetter(name)(before)) != (now := attrgetter(name)(cfg))
        if name != "train.steps" or before.optim.schedule is not Schedule.constant  # its rates don't depend on them
    ]
    if changed and not cfg.resume_with_changes:
        differences = (
            f"{name}={keys.shown(now)}: the checkpoint was made with {name}={keys.shown(then)}." for name, then, now in changed
        )
        raise ConfigError(
            "\n".join(differences) + "\nThe run would then give other numbers than the run that was stopped. "
            "Leave these keys out, or accept the changes with resume_with_changes=true."
        )
    return [name for name, _, _ in changed]


def _ranges(cfg: Config) -> Iterator[str]:
    """Ranges of single numbers, as the schema has them."""
    for key in keys.schema().values():
        if message := key.refused(attrgetter(key.name)(cfg)):
            yield message


def _model(cfg: Config) -> Iterator[str]:
    model = cfg.model
    if min(model.heads, model.width, model.kv_heads or 1) < 1:
        return  # reported above
    if model.width % model.heads:
        whole = 8 * model.heads
        width = max(1, (model.width + whole // 2) // whole) * whole
        yield (
            f"model.heads={model.heads} does not divide model.width={model.width}. "
            f"Use model.heads={_nearest_heads(model.width, model.heads)} or model.width={width}."
        )
    elif model.positions is Positions.rotary and (model.width // model.heads) % 2:
        yield (
            f"model.positions=rotary rotates pairs of features, but a head has {model.width // model.heads} of them "
            f"(model.width={model.width}, model.heads={model.heads}). Use an even head width or model.positions=learned."
        )
    if model.kv_heads and model.heads % model.kv_heads:
        yield (
            f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}. "
            f"Use model.kv_heads={_nearest_divisor(model.heads, model.kv_heads)}, or null for as many as heads."
        )
    if cfg.tokenizer.kind is TokenizerKind.bpe and 1 <= (model.vocab_size or 0) < cfg.tokenizer.vocab_size:
        yield (
            f"model.vocab_size={model.vocab_size} is smaller than tokenizer.vocab_size={cfg.tokenizer.vocab_size}. "
            f"Use model.vocab_size=null, which takes the tokenizer's."
        )


def _data(cfg: Config) -> Iterator[str]:
    data, tokenizer = cfg.data, cfg.tokenizer
    if data.source is Source.text and not data.files:
        yield "data.source=text needs data.files: a list of paths or globs, such as data.files=[notes/*.txt]."
    if data.source is not Source.text and data.files:
        yield f"data.files is read only with data.source=text; here data.source={data.source}. Use data=text."
    if data.source is not Source.hub and data.path:
        yield f"data.path is read only with data.source=hub; here data.source={data.source}. Use data=hub."
    if data.source is Source.hub and not data.path:
        yield "data.source=hub needs data.path: owner/name on the Hub, or a local folder."
    if data.streaming and data.processes > 1:
        yield f"data.streaming=true reads with one process, data.processes={data.processes} given. Use data.processes=1."
    if tokenizer.kind is TokenizerKind.pretrained and not tokenizer.pretrained:
        yield "tokenizer.kind=pretrained needs tokenizer.pretrained: owner/name on the Hub, or the path of a tokenizer.json."
    if tokenizer.kind is TokenizerKind.bpe and tokenizer.vocab_size < 257:
        yield (
            f"tokenizer.vocab_size={tokenizer.vocab_size}: a byte-level BPE has 256 bytes and an end-of-document token before "
            f"its first merge. Use at least 257, or tokenizer=char."
        )


def _training(cfg: Config, ranks: int) -> Iterator[str]:
    train, optim = cfg.train, cfg.optim
    if min(train.batch_size, train.accumulation, ranks) >= 1 and train.batch_size % (train.accumulation * ranks):
        by = f"train.accumulation={train.accumulation}" + (f" × {ranks} ranks" if ranks > 1 else "")
        yield (
            f"train.batch_size={train.batch_size} can't be cut into equal micro-batches by {by}. "
            f"Use train.batch_size={_round_up(train.batch_size, train.accumulation * ranks)} or change train.accumulation."
        )
    mode = f"train.compile_mode={train.compile_mode}"
    if train.compile_mode not in COMPILE_MODES:
        yield f"{mode}: not a mode of torch.compile's that can be used here. Use {', '.join(COMPILE_MODES)}."
    elif train.compile_mode != "default" and not train.compile:
        yield (
            f"{mode} has no effect without compilation. Use train.compile=true with it; for ablate.py that is "
            "ablate.compile=true, for benchmarks.train_step --mode compiled."
        )
    elif train.compile_mode != "default" and cfg.parallel is Parallel.fsdp:
        yield f"{mode}: parallel=fsdp compiles part by part, in the default mode. Use train.compile_mode=default."
    if train.compile_mode.startswith("max-autotune") and cfg.deterministic:
        yield f"{mode} chooses kernels by measured speed, and deterministic=true needs the same bits. Use one of them."
    if train.compile_mode in CUDA_GRAPHS and ranks > 1:
        yield f"{mode} makes CUDA graphs, which are for a single process. Use another mode."
    if train.steps >= 1 and (optim.warmup_steps or 0) > train.steps:
        yield (
            f"optim.warmup_steps={optim.warmup_steps} is more than train.steps={train.steps}: the learning rate would never "
            f"reach optim.lr. Use optim.warmup_steps=null for a twentieth of the steps, or more steps."
        )
    if optim.schedule is not Schedule.constant and 0 < optim.lr < (optim.min_lr or 0) < inf:
        yield f"optim.min_lr={optim.min_lr:g} is more than optim.lr={optim.lr:g}. Use optim.min_lr=null for a tenth of it."
    if cfg.logging.without_key is WandbMode.online:
        yield "logging.without_key=online: W&B can't be online without a key. Use offline or disabled."
    if cfg.resume == "":
        yield "resume is empty. Use never, auto, or the path of a run or of a checkpoint."
    if cfg.init_from == "":
        yield "init_from is empty. Use null, the path of a run or of a checkpoint, or a model on the Hub, owner/name."
    if cfg.sample.tokens and not cfg.sample.prompt:
        yield 'sample.prompt is empty: the model needs a token to continue. Use sample.prompt="\\n", or sample.tokens=0.'


def _parallel(cfg: Config, machine: Machine) -> Iterator[str]:
    if cfg.parallel is not Parallel.auto and not machine.by_torchrun:
        yield (
            f"parallel={cfg.parallel}: this process is alone. Start several with torchrun --nproc-per-node=N train.py ..., or "
            "leave parallel out."
        )
    if machine.ranks > 1 and machine.device == "mps":
        yield f"device=mps: PyTorch has no collectives there, and torchrun has started {machine.ranks} ranks. Use device=cpu."
    elif cfg.parallel is Parallel.fsdp and machine.device == "mps":
        yield "parallel=fsdp: PyTorch has no collectives on mps, not even for one rank. Use device=cpu, or leave parallel out."
    if machine.device == "cuda" and machine.local_rank >= machine.gpus:
        yield (
            f"torchrun has started local rank {machine.local_rank}, counted from 0, and this node has {machine.gpus} GPUs: "
            f"each rank needs one of its own. Use --nproc-per-node={machine.gpus}, or device=cpu."
        )


def _device(cfg: Config, machine: Machine) -> Iterator[str]:
    device = machine.device
    if cfg.norm.impl is NormImpl.fused and device == "mps" and os.environ.get("TRITON_INTERPRET") != "1":
        yield "norm.impl=fused needs Triton on cuda or TRITON_INTERPRET=1; this run is on mps. Use norm.impl=torch."
    if cfg.norm.impl is NormImpl.fused and device == "cuda" and not machine.triton:
        yield "norm.impl=fused needs Triton, which can't be imported here. Install triton, or use norm.impl=torch."
    if cfg.train.precision is Precision.bf16 and device == "cuda" and not machine.bf16:
        yield "train.precision=bf16: this GPU has no bf16 arithmetic. Use train.precision=fp16 or fp32."
    if cfg.train.precision is Precision.fp16 and device != "cuda":
        yield f"train.precision=fp16 needs a CUDA device; this run is on {device}. Use train.precision=fp32 or bf16."
    if cfg.deterministic and device == "cuda" and (chosen := os.environ.get(CUBLAS_WORKSPACE)) not in (None, *REPEATABLE):
        yield (
            f"deterministic=true: the environment has {CUBLAS_WORKSPACE}={chosen}, with which cuBLAS does not repeat its "
            f"results. Unset it, or use {' or '.join(REPEATABLE)}."
        )
    if cfg.train.compile_mode in CUDA_GRAPHS and device != "cuda":
        yield f"train.compile_mode={cfg.train.compile_mode} needs a CUDA device; this run is on {device}. Use another mode."
    for key in ("compile", "compile_loss"):
        if getattr(cfg.train, key) and device == "cpu" and not machine.cpp_compiler:
            yield f"train.{key}=true needs a C++ compiler on the CPU (g++ or clang++; CXX may name it). Use train.{key}=false."


def _nearest_divisor(of: int, to: int) -> int:
    return min((n for n in range(1, of + 1) if of % n == 0), key=lambda n: (abs(n - to), n))


def _nearest_heads(width: int, heads: int) -> int:
    """A number of heads whose width is a multiple of 8, if there is one, as matrix products and rotary positions need it."""
    return _nearest_divisor(width // 8 if width % 8 == 0 else width, heads)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
