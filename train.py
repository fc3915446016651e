"""Trains a GPT: config → data → model → step → log, in that order.

python train.py                                    Shakespeare on a CPU, under 3 minutes
python train.py norm.impl=torch model=gpt2 ...     `python train.py --help` lists groups and keys
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

import configs
import ops
from configs import Config, ConfigError, command_line, machine, rules
from configs.machine import Machine
from configs.schema import DropoutMasks, NormImpl
from data import Batches, Corpus, load_corpus
from model import GPT
from training import checkpoint
from training.checkpoint import TrainState
from training.clock import StepClock
from training.evaluation import Validation, evaluate
from training.hardware import peak_flops
from training.health import Health, NonFiniteError
from training.interrupt import Interrupt
from training.optimizer import adamw, set_learning_rate
from training.precision import Precision
from training.randomness import seed_micro_batch
from training.run import Run, open_run, relative
from training.schedule import learning_rate


@dataclass
class Summary:
    """What a finished run reached."""

    folder: Path
    steps: int
    final: Validation
    best: Validation
    step_ms: float | None  # median after warm-up
    sample: str


def train(cfg: Config, run: Run, on: Machine) -> Summary:
    """One training run, from a checked config to its last checkpoint.

    Raises:
        ConfigError: the data or the model refuse what the config asks for; nothing has been trained.
        NonFiniteError: the loss, the gradient or a weight became NaN or infinite; the last good checkpoint stands.
        SystemExit: Ctrl-C, after a checkpoint; 130.
    """
    # ---- data --------------------------------------------------------------------------------------------------------------
    precision = Precision.settle(cfg.train.precision, on)
    device = precision.device
    with command_line.as_config_errors():
        corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
        batches = Batches(corpus.train.tokens, context=cfg.model.context, batch_size=cfg.train.batch_size, seed=cfg.seed)
    corpus.tokenizer.save(run.folder / "tokenizer.json")

    # ---- model -------------------------------------------------------------------------------------------------------------
    torch.manual_seed(cfg.seed)  # the same initial weights for every norm.impl
    with command_line.as_config_errors():
        model = GPT(cfg.model, cfg.norm, corpus.tokenizer.vocab_size).to(device)
    state = TrainState(model, adamw(model, cfg.optim), precision.scaler())
    if cfg.resume:
        state.restore(checkpoint.read(Path(cfg.resume)))
        if state.step >= cfg.train.steps:
            raise ConfigError(f"resume={cfg.resume} is at step {state.step}: raise train.steps={cfg.train.steps} to go on.")
    forward = torch.compile(model, fullgraph=True) if cfg.train.compile else model

    def validate() -> Validation:
        batch_size = cfg.train.batch_size // cfg.train.accumulation
        # not the compiled model: it would compile again for evaluation, and once more for a last batch with fewer rows
        return evaluate(
            model, corpus.val, precision, context=cfg.model.context, batch_size=batch_size, batches=cfg.eval.batches
        )

    # ---- step → log --------------------------------------------------------------------------------------------------------
    run.start(
        facts(cfg, precision, corpus, model),
        train_bytes_per_token=corpus.train.bytes_per_token,
        val_bytes_per_token=corpus.val.bytes_per_token,
    )
    clock, health, peak = StepClock(device), Health(device), peak_flops(device, precision.dtype)
    batch_tokens = cfg.train.batch_size * cfg.model.context
    loss_sum, losses = torch.zeros((), device=device), 0  # since the last line of metrics; on the device until then

    def save(name: str = "last.pt") -> None:
        health.check_weights(model, state.step - 1)
        state.save(run.folder / name, cfg)

    try:
        with Interrupt() as interrupt:
            for step in run.progress(range(state.step, cfg.train.steps)):
                with clock.step():
                    loss, grad_norm = training_step(forward, state, batches[step], step, cfg, precision)
                state.step = done = step + 1
                health.watch(step, loss, grad_norm, scaled=state.scaler.is_enabled())
                loss_sum, losses = loss_sum + loss, losses + 1
                last = done == cfg.train.steps

                if last or due(done, cfg.logging.every):
                    health.check()
                    ms = clock.window_ms()
                    tokens_per_s = 1000 * batch_tokens / ms if ms else None
                    run.log(
                        done,
                        {
                            "train/loss": (loss_sum / losses).item(),
                            "train/grad_norm": grad_norm.item(),
                            "train/lr": learning_rate(step, cfg.train.steps, cfg.optim),
                            "perf/step_ms": ms,
                            "perf/tokens_per_s": tokens_per_s,
                            "perf/mfu": model.flops_per_token() * tokens_per_s / peak if peak and tokens_per_s else None,
                            "perf/peak_gb": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
                        },
                    )
                    loss_sum, losses = torch.zeros((), device=device), 0

                if last or due(done, cfg.eval.every):
                    with clock.paused():
                        health.check()
                        validation = validate()
                        run.log(done, {"val/loss": validation.loss, "val/bits_per_byte": validation.bits_per_byte})
                        if state.best is None or validation.loss < state.best.loss:
                            state.best = validation
                            save("best.pt")

                if last or interrupt.requested or due(done, cfg.checkpoint.every):
                    with clock.paused():
                        save()
                if interrupt.requested and not last:
                    run.say(f"stopped after step {done}; to go on: python train.py resume={relative(run.folder)}")
                    raise SystemExit(interrupt.exit_code)
    except NonFiniteError as error:
        raise NonFiniteError(describe(error, run, batches), error.step) from None

    assert state.best is not None  # the last step was evaluated
    text = sample(model, corpus, cfg, device)
    (run.folder / "sample.txt").write_text(text, encoding="utf-8")
    summary = Summary(run.folder, state.step, validation, state.best, clock.median_ms, text)
    run.finish({"final": vars(summary.final), "best": vars(summary.best), "median_step_ms": summary.step_ms, "sample": text})
    return summary


def training_step(
    forward: Callable[..., torch.Tensor],
    state: TrainState,
    batch: tuple[torch.Tensor, torch.Tensor],
    step: int,
    cfg: Config,
    precision: Precision,
    rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One update: the gradient of the mean loss over `batch`, gathered over micro-batches, clipped and applied.

    Returns:
        The mean loss in nats per token, and the gradient norm before clipping. Both stay on the device.
    """
    inputs, targets = (to_device(part, precision.device).chunk(cfg.train.accumulation) for part in batch)
    total = torch.zeros((), device=precision.device)
    for micro_batch, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        seeds = seed_micro_batch(cfg.seed, step, micro_batch, rank, sites=state.model.dropout_sites)
        with precision.autocast():
            loss = forward(x, y, seeds=to_device(seeds, precision.device))
        loss = loss / cfg.train.accumulation  # micro-batches are equal, so the mean of their means is the batch's
        state.scaler.scale(loss).backward()
        total += loss.detach()

    set_learning_rate(state.optimizer, learning_rate(step, cfg.train.steps, cfg.optim))
    state.scaler.unscale_(state.optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), cfg.optim.clip_norm or float("inf"))
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    return total, grad_norm


def sample(model: GPT, corpus: Corpus, cfg: Config, device: torch.device) -> str:
    """Text that goes on from cfg.sample.prompt."""
    if cfg.sample.tokens == 0:
        return ""
    generator = torch.Generator(device).manual_seed(cfg.seed)
    prompt = torch.tensor([corpus.tokenizer.encode(cfg.sample.prompt)], device=device)
    tokens = model.generate(prompt, cfg.sample.tokens, cfg.sample.temperature, cfg.sample.top_k, generator=generator)
    return corpus.tokenizer.decode(tokens[0].tolist())


def facts(cfg: Config, precision: Precision, corpus: Corpus, model: GPT) -> dict[str, str]:
    """What one wants to know about a run before it starts; printed, and kept in W&B's config."""
    device = precision.device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    if cfg.norm.impl is NormImpl.torch:
        norms = "PyTorch's own operators"
    elif device.type == "cpu" and ops.backend_for(device) == "PyTorch reference":
        norms = "the fused op's PyTorch reference: no kernel runs on this CPU"
    else:
        norms = ops.backend_for(device)
    masks = ", shared dropout masks" if cfg.norm.dropout_masks is DropoutMasks.shared else ""
    batch_tokens = cfg.train.batch_size * cfg.model.context
    epochs = cfg.train.steps * batch_tokens / len(corpus.train.tokens)
    sequences = f"{cfg.train.batch_size} × {cfg.model.context}"
    pieces = f", in {cfg.train.accumulation} micro-batches" if cfg.train.accumulation > 1 else ""
    return {
        "device": f"{device.type}, {hardware}",
        "precision": precision.name + (", compiled" if cfg.train.compile else ""),
        "norms": f"{cfg.norm.impl} {cfg.norm.kind}: {norms}{masks}",
        "model": f"{model.parameter_count():,} parameters, {cfg.model.layers} layers × {cfg.model.width}",
        "vocabulary": f"{corpus.tokenizer.vocab_size:,} ({cfg.tokenizer.kind}), {corpus.val.bytes_per_token:.2f} bytes a token",
        "data": f"{corpus.name}: {len(corpus.train.tokens):,} tokens to train on, {len(corpus.val.tokens):,} held out",
        "batch": f"{batch_tokens:,} tokens ({sequences}{pieces})",
        "steps": f"{cfg.train.steps:,} ({epochs:.2f} epochs)" + (f", resumed from {cfg.resume}" if cfg.resume else ""),
    }


def describe(error: NonFiniteError, run: Run, batches: Batches) -> str:
    """The message of a run that stopped on NaN: where, on which text, and what to go back to."""
    at = batches.position(error.step)
    good = [relative(path) for path in (run.folder / "last.pt", run.folder / "best.pt") if path.is_file()]
    return (
        f"{error}. Batch: epoch {at.epoch}, window {at.window} of {at.windows}, first token {at.offsets[0]:,}.\n"
        f"Last good checkpoint: {good[0] if good else 'none (checkpoint.every and eval.every write some)'}.\n"
        "A lower optim.lr, a longer optim.warmup_steps or train.precision=fp32 may help."
    )


def report(summary: Summary) -> str:
    """The end of a run, in a few lines."""
    final, best = summary.final, summary.best
    lines = {
        "validation": f"{final.bits_per_byte:.4f} bits per byte, loss {final.loss:.4f} (best {best.bits_per_byte:.4f})",
        "step time": f"{summary.step_ms:.1f} ms (median)" if summary.step_ms else "only warm-up steps were run",
        "loss curve": relative(summary.folder / "loss.png"),
        "more text": f"python sample.py {relative(summary.folder)}",
    }
    text = f"\n{summary.sample.strip()}\n" if summary.sample else ""
    return text + "\n" + "\n".join(f"  {name:<10}  {value}" for name, value in lines.items())


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On CUDA through pinned memory, so that the copy waits for nothing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


failed: list[int] = []  # exit codes of a sweep's runs that stopped; the others go on


def job(composed: DictConfig) -> None:
    """One run of the command: a whole run, or one of a sweep."""
    context = HydraConfig.get()
    with command_line.user_errors():
        cfg = configs.typed(composed)
        if cfg.resume:  # goes on with that run's config; the command line says what changes
            stored = checkpoint.read(Path(cfg.resume), mmap=True)["config"]
            cfg = configs.from_dict(stored, list(context.overrides.task))
        on = machine.inspect(cfg.device)
        rules.check(cfg, on)
        group = Path(context.sweep.dir).name if context.mode is RunMode.MULTIRUN else None
        try:
            with open_run(cfg, Path(context.runtime.output_dir), torch.device(on.device), group) as run:
                summary = train(cfg, run, on)
        except NonFiniteError as error:
            print(f"stopped: {error}", file=sys.stderr)
            failed.append(1)
            return
        print(report(summary), flush=True)


def main() -> int:
    command_line.register_resolvers()
    command_line.check(sys.argv[1:])
    hydra.main(version_base="1.3", config_path="configs", config_name="config")(job)()
    return max(failed, default=0)


if __name__ == "__main__":
    sys.exit(main())
