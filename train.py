"""Trains a GPT: config → data → model → step → log, in that order.

python train.py                                    Shakespeare on a CPU, under 3 minutes
python train.py norm.impl=torch model=gpt2 ...     `python train.py --help` lists groups and keys
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

import configs
from configs import Config, ConfigError, command_line, machine, rules
from configs.machine import Machine
from data import Batches, load_corpus
from model import GPT
from training import checkpoint
from training.checkpoint import TrainState
from training.clock import StepClock
from training.evaluation import Validation, evaluate
from training.hardware import peak_flops
from training.health import Health, NonFiniteError
from training.interrupt import Interrupt
from training.optimizer import adamw
from training.precision import Precision
from training.report import Summary, describe, facts, report
from training.run import Run, open_run, relative
from training.sampling import continue_text, encode_prompt
from training.schedule import learning_rate
from training.step import training_step


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
        prompt = encode_prompt(corpus.tokenizer, cfg.sample.prompt) if cfg.sample.tokens else []  # now, not after training
    tokenizer = run.folder / "tokenizer.json"
    corpus.tokenizer.save(tokenizer)

    # ---- model -------------------------------------------------------------------------------------------------------------
    torch.manual_seed(cfg.seed)  # the same initial weights for every norm.impl
    with command_line.as_config_errors():
        model = GPT(cfg.model, cfg.norm, corpus.tokenizer.vocab_size).to(device)
    state = TrainState(model, adamw(model, cfg.optim), precision.scaler(), checkpoint.fingerprint(tokenizer))
    if cfg.resume:
        state.restore(checkpoint.read(Path(cfg.resume)))
        if state.step >= cfg.train.steps:
            raise ConfigError(f"resume={cfg.resume} is at step {state.step}: raise train.steps={cfg.train.steps} to go on.")
    forward: Callable[..., torch.Tensor] = model
    if cfg.train.compile:
        torch.compiler.reset()  # what earlier runs of a sweep compiled counts towards the limit of recompilations
        forward = torch.compile(model, fullgraph=True)

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
    clock, health, peak = StepClock(device), Health(device, state.scaler), peak_flops(device, precision.dtype)
    batch_tokens = cfg.train.batch_size * cfg.model.context
    loss_sum, losses = torch.zeros((), device=device), 0  # since the last line of metrics; on the device until then
    best: Validation | None = None  # of this folder: a resumed run begins anew, so that its best.pt is its own

    def save(name: str = "last.pt") -> None:
        health.check_weights(model, state.step)
        state.save(run.folder / name, cfg)

    try:
        with Interrupt() as interrupt:
            for step in run.progress(range(state.step, cfg.train.steps)):
                with clock.step():
                    loss, grad_norm = training_step(forward, state, batches[step], step, cfg, precision)
                state.step = done = step + 1
                health.watch(done, loss, grad_norm)
                loss_sum, losses = loss_sum + loss, losses + 1
                last = done == cfg.train.steps

                if last or due(done, cfg.logging.every):
                    health.check()
                    window = clock.window()
                    tokens_per_s = 1000 * batch_tokens / window.mean_ms if window else None
                    run.log(
                        done,
                        {
                            "train/loss": (loss_sum / losses).item(),
                            "train/grad_norm": grad_norm.item(),
                            "train/lr": learning_rate(step, cfg.train.steps, cfg.optim),
                            "perf/step_ms": window.median_ms if window else None,
                            "perf/tokens_per_s": tokens_per_s,
                            "perf/mfu": model.flops_per_token() * tokens_per_s / peak if peak and tokens_per_s else None,
                            "perf/peak_gb": clock.peak_gb,
                        },
                    )
                    loss_sum, losses = torch.zeros((), device=device), 0

                if last or due(done, cfg.eval.every):
                    with clock.paused():
                        health.check()
                        validation = validate()
                        health.check_validation(validation.loss, done)
                        run.log(done, {"val/loss": validation.loss, "val/bits_per_byte": validation.bits_per_byte})
                        if best is None or validation.loss < best.loss:
                            best = validation
                            save("best.pt")

                if last or interrupt.requested or due(done, cfg.checkpoint.every):
                    with clock.paused():
                        save()
                if interrupt.requested and not last:
                    run.say(f"stopped after step {done}; to go on: python train.py resume={relative(run.folder)}")
                    raise SystemExit(interrupt.exit_code)
    except NonFiniteError as error:
        raise NonFiniteError(describe(error, run, batches), error.step) from None

    assert best is not None  # the last step was evaluated
    run.finish({"final": vars(validation), "best": vars(best), "median_step_ms": clock.median_ms})
    try:
        text = continue_text(model, corpus.tokenizer, prompt, cfg.sample, cfg.seed, device) if prompt else ""
    except KeyboardInterrupt:  # all but the sample is kept
        raise SystemExit(130) from None
    run.keep_sample(text)
    return Summary(run.folder, validation, best, clock.median_ms, text)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def job(composed: DictConfig) -> int:
    """One run of the command: a whole run, or one of a sweep. Returns its exit code, so that those after it still start."""
    context = HydraConfig.get()
    folder, overrides, sweep = Path(context.runtime.output_dir), list(context.overrides.task), context.mode is RunMode.MULTIRUN
    try:
        cfg = configs.typed(composed)
        if cfg.resume:  # goes on with that run's config; the command line says what changes
            stored = checkpoint.read(Path(cfg.resume), mmap=True)["config"]
            cfg = configs.from_dict(stored, overrides)
            rules.check_resumed(configs.from_dict(stored), cfg)
        on = machine.inspect(cfg.device)
        rules.check(cfg, on)
        group = Path(context.sweep.dir).name if sweep else None
        with open_run(cfg, folder, torch.device(on.device), group) as run, unless_refused(run):
            summary = train(cfg, run, on)
    except NonFiniteError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except ConfigError as error:
        with suppress(OSError):  # Hydra made it before it called
            folder.rmdir()
        return command_line.refuse(error, overrides if sweep else None)
    print(report(summary), flush=True)
    return 0


@contextmanager
def unless_refused(run: Run) -> Iterator[None]:
    """Takes a run's folder away if it ends before it starts; what others put there stays."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt):
        if run.tracker is None:
            for name in ("config.yaml", "environment.json", "tokenizer.json"):
                (run.folder / name).unlink(missing_ok=True)
            with suppress(OSError):
                run.folder.rmdir()
        raise


def main() -> int:
    codes = [0]

    def run(composed: DictConfig) -> None:
        codes.append(job(composed))

    try:
        command_line.check(sys.argv[1:])
        command_line.register_resolvers(sys.argv[1:])
        hydra.main(version_base="1.3", config_path="configs", config_name="config")(run)()
    except KeyboardInterrupt:  # before the first step, which Interrupt watches, or a second one
        return 130
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
