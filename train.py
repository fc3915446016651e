"""Trains a GPT: config → data → model → step → log, in that order.

python train.py                                    Shakespeare on a CPU, under 3 minutes
python train.py norm.impl=torch model=gpt2 ...     `python train.py --help` lists groups and keys
torchrun --nproc-per-node=8 train.py model=gpt2    the same on eight GPUs
"""

import math
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import assert_never

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds: Ctrl-C during them prints no traceback

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor

from configs import Config, command_line, keys
from configs.machine import Machine
from configs.schema import OptimConfig, Precision, Schedule
from data import Batches, load_corpus
from measure.clock import StepClock
from sample import continue_text, encode_prompt
from training import export
from training.build import build
from training.checkpoint import Saver, TrainState
from training.command import start
from training.distributed import ALONE, World, without_reduction
from training.interrupt import Interrupt, Stopped
from training.metrics import Metrics, quantities
from training.profile import UNTIMED, profiled
from training.run import Run, Summary
from training.sharding import full_tensor, is_sharded
from training.start import facts, job
from training.step import MixedPrecision, allocate_gradients, makes_cuda_graphs, seed_micro_batch, to_device


def train(cfg: Config, run: Run, machine: Machine, world: World = ALONE) -> Summary:
    """Makes one run, from a checked config to its last checkpoint. Every rank of the run calls it.

    Raises:
        ConfigError: the data or the model refuse what the config asks for; nothing has been trained.
        NonFiniteError: the loss, the gradient or a weight became NaN or infinite; the last good checkpoint stays.
        StorageError: a checkpoint or a line of metrics can't be written; the last good checkpoint stays.
        SystemExit: Ctrl-C (130), SIGTERM (143), SIGHUP (129) or SIGUSR1 (138), after a checkpoint.
    """
    # ---- data --------------------------------------------------------------------------------------------------------------
    precision = MixedPrecision.of(cfg.train.precision, machine)
    cfg.train.precision = Precision(str(precision))  # config.yaml says what `auto` became, so that a resumed run keeps it
    with world.shared_errors(), command_line.as_config_errors():
        corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
        batches = Batches(
            corpus.train.tokens,
            context=cfg.model.context,
            batch_size=cfg.train.batch_size,
            seed=cfg.seed,
            rank=world.rank,
            ranks=world.size,
        )
        # before training, so that a prompt that can't be encoded costs nothing
        prompt = encode_prompt(corpus.tokenizer, cfg.sample.prompt) if cfg.sample.tokens else []

    # ---- model -------------------------------------------------------------------------------------------------------------
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # PyTorch limits recompilations, and counts those of earlier runs of a sweep
    stored = run.origin.stored
    model, state, forward = build(
        cfg,
        precision,
        corpus.tokenizer.vocab_size,
        world,
        fill=lambda model: None if stored or not cfg.init_from else export.load(model, cfg.init_from, corpus.tokenizer),
        restore=lambda state: state.restore(stored, same_folder=run.origin.in_place) if stored else None,
        tokenizer=corpus.tokenizer.to_json(),
        corpus=corpus.identity,
    )

    # ---- step → log --------------------------------------------------------------------------------------------------------
    with world.shared_errors():
        sizes = quantities(cfg, corpus, model)
        run.start(facts(run.origin, precision, corpus, sizes, world), sizes, corpus.tokenizer)
    clock = StepClock(precision.device, warmup=UNTIMED if cfg.profile else 3)
    metrics = Metrics(state, cfg, corpus, precision, clock, world)
    saver = Saver(run.folder, cfg, world)
    with Interrupt(world) as interrupt:
        if state.owes_validation:
            run.log(state.step, metrics.validation(interrupt.check))
        steps = range(state.step, cfg.train.steps)
        for step in run.progress(profiled(run, steps) if cfg.profile else steps):
            with clock.step():
                loss, grad_norm = training_step(forward, state, batches[step], step, cfg, precision, world)
            state.step = done = step + 1
            metrics.add(loss, grad_norm)

            last = done == cfg.train.steps
            if last or due(done, cfg.logging.every):
                run.log(done, metrics.line())
            if last or due(done, cfg.eval.every):
                with suppress(Stopped):  # the poll below sees the signal too
                    run.log(done, metrics.validation(interrupt.check))
            stopping, overdue = interrupt.poll(saver.overdue)  # one message between the ranks
            if last or stopping or overdue or due(done, cfg.checkpoint.every) or state.best_step == done:
                with clock.paused():
                    metrics.health.check_weights(model)
                    saver.save(state)
            if stopping:
                raise Stopped(128 + stopping)

        # ---- results -------------------------------------------------------------------------------------------------------
        assert state.validation is not None and state.best is not None  # the last step was evaluated
        text, sharded = "", is_sharded(model)
        if prompt and (world.leads or sharded):
            # the ranks of a sharded model gather weights together, in the dtype of autocast
            with precision.autocast() if sharded else nullcontext():
                [text] = continue_text(model, corpus.tokenizer, prompt, cfg.sample, cfg.seed, precision.device)
        summary = Summary(run.folder, state.validation, state.best, clock.median_ms, text)
        return run.finish(summary, {"tokens": state.tokens} | sizes)


def training_step(
    forward: Callable[..., Tensor],
    state: TrainState,
    batch: tuple[Tensor, Tensor],
    step: int,
    cfg: Config,
    precision: MixedPrecision,
    world: World = ALONE,
) -> tuple[Tensor, Tensor]:
    """Makes one update: the gradient of the mean loss over the batch of all ranks, summed over micro-batches, clipped, applied.

    Args:
        forward: the model, compiled or not. With several ranks: what `World.replicate` returns.
        batch: the rows of this rank.

    Returns:
        The mean loss in nats per token, and the gradient norm before clipping. Both are the same on every rank and stay on the
        device.
    """
    inputs, targets = (to_device(part, precision.device).chunk(cfg.train.accumulation) for part in batch)
    total = torch.zeros((), device=precision.device)
    keeps_gradients = cfg.train.accumulation > 1 and makes_cuda_graphs(cfg.train)
    if keeps_gradients:
        allocate_gradients(state.model)
    for micro_batch, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        seeds = seed_micro_batch(cfg.seed, step, micro_batch, world.rank, state.model.dropout_sites, precision.device)
        last = micro_batch == cfg.train.accumulation - 1
        with nullcontext() if last else without_reduction(forward):
            with precision.autocast():
                loss = forward(x, y, seeds=to_device(seeds, precision.device))
            loss = loss / cfg.train.accumulation  # micro-batches are equal, so the mean of their means is the batch's
            state.scaler.scale(loss).backward()
        total += loss.detach()

    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(step, cfg.train.steps, cfg.optim)
    state.scaler.unscale_(state.optimizer)
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]  # model.parameters() walks all modules
    grad_norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, cfg.optim.clip_norm or float("inf")))
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=not keeps_gradients)
    return world.sum(total) / world.size, grad_norm


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


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@hydra.main(config_path=str(keys.FOLDER), config_name="train", version_base=None)
def task(composed: DictConfig) -> float | None:
    return job(train, composed)


def main(arguments: Sequence[str] | None = None) -> int:
    return start(task, arguments)


if __name__ == "__main__":
    sys.exit(main())
