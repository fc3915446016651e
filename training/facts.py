"""What a run prints: the facts before its first step, and its results."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import torch

import ops
from configs.schema import DropoutMasks, NormImpl, NormWeight, Placement
from data import Corpus
from model import GPT
from training.checkpoint import Validation
from training.distributed import ALONE, World
from training.resume import Start
from training.sharding import is_sharded
from training.step import MixedPrecision
from training.storage import relative

OPERATORS = {
    NormImpl.torch: "PyTorch's own operators",
    NormImpl.compiled: "PyTorch's own operators, each site under torch.compile",
    NormImpl.flash_attn: "FlashAttention's Triton kernels",
    NormImpl.liger: "Liger-Kernel's kernels",
    NormImpl.quack: "quack's kernels",
}


@dataclass
class Summary:
    """What a finished run reached."""

    folder: Path
    final: Validation
    best: Validation
    step_ms: float | None  # median after warm-up
    sample: str


def facts(
    origin: Start, precision: MixedPrecision, corpus: Corpus, model: GPT, sizes: dict[str, float], world: World = ALONE
) -> dict[str, str]:
    """The facts about a run that it prints before its first step and keeps in W&B's config; `sizes` are its `quantities`."""
    cfg, device = origin.cfg, precision.device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    if cfg.norm.impl is NormImpl.compiled and cfg.train.compile:
        norms = "as norm.impl=torch, since the whole model is compiled"
    elif cfg.norm.impl is not NormImpl.fused:
        norms = OPERATORS[cfg.norm.impl]
    elif device.type == "cpu" and ops.backend_for(device) == "PyTorch reference":
        norms = "PyTorch reference of the fused op (no kernel on this CPU)"
    else:
        norms = ops.backend_for(device)
    masks = ", shared dropout masks" if cfg.norm.dropout_masks is DropoutMasks.shared else ""
    epochs = cfg.train.steps * sizes["tokens_per_step"] / sizes["train_tokens"]
    sequences = f"{cfg.train.batch_size} × {cfg.model.context}"
    splits = (corpus.train, corpus.val)
    share = sum(split.lost for split in splits) / sum(split.bytes + split.lost for split in splits)
    lost = f"; the tokenizer has no token for {share:.2%} of the text, which bits per byte leaves out" if share else ""
    compiled = ""
    if cfg.train.compile:
        compiled = ", compiled" + ("" if cfg.train.compile_mode == "default" else f" ({cfg.train.compile_mode})")
    placed = "" if cfg.norm.placement is Placement.pre else f", {cfg.norm.placement}"
    placed += "" if cfg.norm.weight is NormWeight.ones else f", weight {cfg.norm.weight}"
    pieces = f", in {cfg.train.accumulation} micro-batches" if cfg.train.accumulation > 1 else ""
    begins = f", with the weights of {cfg.init_from}" if cfg.init_from and not origin.stored else ""
    ranks = {"ranks": f"{world.size} × this device, {'fsdp' if is_sharded(model) else 'ddp'}"} if world.store else {}
    return {
        "device": f"{device.type}, {hardware}",
        **ranks,
        "precision": str(precision) + compiled + (", deterministic" if cfg.deterministic else ""),
        "norms": f"{cfg.norm.impl} {cfg.norm.kind}{placed}: {norms}{masks}",
        "loss": f"{cfg.loss.impl}" + (f", {cfg.loss.chunks} chunks" if cfg.loss.chunks > 1 else ""),
        "model": f"{sizes['parameters']:,} parameters, {cfg.model.size}" + begins,
        "vocabulary": f"{sizes['vocabulary']:,} ({cfg.tokenizer.kind}), {sizes['train_bytes_per_token']:.2f} bytes a token",
        "data": f"{corpus.name}: {sizes['train_tokens']:,} tokens to train on, {sizes['val_tokens']:,} held out" + lost,
        "batch": f"{sizes['tokens_per_step']:,} tokens ({sequences}{pieces})",
        "steps": f"{cfg.train.steps:,} ({epochs:.2f} epochs)" + (f", resumed from {origin.step:,}" if origin.stored else ""),
    }


def report(summary: Summary) -> str:
    """What a finished run prints."""
    final, best, picture = summary.final, summary.best, summary.folder / "loss.png"
    lines = {
        "validation": f"{final.bits_per_byte:.4f} bits per byte, loss {final.loss:.4f} (best {best.bits_per_byte:.4f})",
        "step time": f"{summary.step_ms:.1f} ms (median)" if summary.step_ms else "only warm-up steps were run",
        **({"loss curve": relative(picture)} if picture.is_file() else {}),  # a run of few steps has none
        "more text": shlex.join(["python", "sample.py", relative(summary.folder)]),
    }
    text = f"\n{summary.sample.strip()}\n" if summary.sample else ""
    return text + "\n" + "\n".join(f"  {name:<10}  {value}" for name, value in lines.items())
