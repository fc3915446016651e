"""Trains a GPT: config → data → model → step → log, in that order.

python train.py                                    Shakespeare on a CPU, under 3 minutes
python train.py norm.impl=torch model=gpt2 ...     `python train.py --help` lists groups and keys
torchrun --nproc-per-node=8 train.py model=gpt2    the same on eight GPUs
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback where Ctrl-C comes during the imports, which take seconds

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from torch.distributed.elastic.multiprocessing.errors import record

import configs
from configs import Config, ConfigError, command_line, machine, rules
from configs.machine import Machine
from configs.schema import Parallel
from data import Batches, load_corpus
from model import GPT
from training import pretrained, resume, tracking
from training.checkpoint import TrainState
from training.clock import StepClock
from training.console import mute, show, take_any_encoding
from training.determinism import deterministic
from training.distributed import ALONE, World, join
from training.evaluation import Validation, evaluate
from training.hardware import peak_flops
from training.health import Health, NonFiniteError
from training.interrupt import Interrupt, Stopped, exit_on_signals
from training.optimizer import adamw
from training.precision import Precision
from training.profile import StepProfiler
from training.report import Summary, describe, facts, report
from training.run import Follower, Run, open_run
from training.sampling import continue_text, encode_prompt
from training.saver import Saver
from training.schedule import learning_rate
from training.sharding import shard
from training.step import compile_model, prepare, training_step
from training.storage import StorageError, go_on, relative


def train(cfg: Config, run: Run, on: Machine, world: World = ALONE) -> Summary:
    """One training run, from a checked config to its last checkpoint; every rank of it calls this.

    Raises:
        ConfigError: the data or the model refuse what the config asks for; nothing has been trained.
        NonFiniteError: the loss, the gradient or a weight became NaN or infinite; the last good checkpoint stands.
        StorageError: a checkpoint or a line of metrics can't be written; the last good checkpoint stands.
        SystemExit: Ctrl-C (130), SIGTERM (143), SIGHUP (129) or SIGUSR1 (138), after a checkpoint.
    """
    # ---- data --------------------------------------------------------------------------------------------------------------
    precision = Precision.settle(cfg.train.precision, on)
    cfg.train.precision = precision.wanted  # what is kept says what `auto` was, so that the run goes on with it elsewhere
    device = precision.device
    with world.agreed(), command_line.as_config_errors():
        corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
        batches = Batches(
            corpus.train.tokens,
            context=cfg.model.context,
            batch_size=cfg.train.batch_size,
            seed=cfg.seed,
            rank=world.rank,
            ranks=world.size,
        )
        prompt = encode_prompt(corpus.tokenizer, cfg.sample.prompt) if cfg.sample.tokens else []  # now, not after training

    # ---- model -------------------------------------------------------------------------------------------------------------
    torch.manual_seed(cfg.seed)  # the same initial weights for every norm.impl
    with world.agreed(), command_line.as_config_errors():
        model = GPT(cfg.model, cfg.norm, corpus.tokenizer.vocab_size)
        if cfg.init_from and not run.origin.stored:
            pretrained.load(model, cfg.init_from, corpus.tokenizer)
        prepare(model, cfg.train, on)
    if cfg.train.compile or model.compile_loss:
        torch.compiler.reset()  # what earlier runs of a sweep compiled counts towards the limit of recompilations
    sharded = cfg.parallel is Parallel.fsdp
    if sharded:
        shard(model, precision, world.size, compiled=cfg.train.compile)
    model = model.to(device)
    tokenizer = corpus.tokenizer.to_json()
    state = TrainState(model, adamw(model, cfg.optim), precision.scaler(), tokenizer, corpus.identity, leads=world.leads)
    if origin := run.origin.stored:
        with world.agreed():
            state.restore(origin, with_changes=cfg.resume_with_changes)
        if not run.origin.in_place:
            # in another folder: its best checkpoint is its own, and its first line of validation its first evaluation
            state.best, state.best_step, state.owes_validation = None, None, False
    forward: Callable[..., torch.Tensor] = model
    if cfg.train.compile and not sharded:
        forward = compile_model(model, cfg.train)
    forward = world.replicate(forward)

    def validate(before_batch: Callable[[], None]) -> Validation:
        # not the compiled model: it would compile again for evaluation, and once more for a last batch with fewer rows
        return evaluate(
            model,
            corpus.val,
            precision,
            context=cfg.model.context,
            batch_size=cfg.train.batch_size // cfg.train.accumulation // world.size,
            batches=cfg.eval.batches and cfg.eval.batches * world.size,
            world=world,
            before_batch=before_batch,
        )

    # ---- step → log --------------------------------------------------------------------------------------------------------
    with world.agreed():
        run.start(
            facts(run.origin, precision, corpus, model, world),
            tokenizer=tokenizer,
            train_bytes_per_token=corpus.train.bytes_per_token,
            val_bytes_per_token=corpus.val.bytes_per_token,
        )
    clock, health = StepClock(device), Health(device, state.scaler)
    peak = world.size * (peak_flops(device, precision.dtype) or 0)
    batch_tokens = cfg.train.batch_size * cfg.model.context
    state.loss_sum = state.loss_sum.to(device)  # since the last line of metrics; on the device until then

    marked = None if cfg.train.compile else model  # hooks would make torch.compile start anew
    profiler = StepProfiler(cfg.profile and world.leads, run.folder, clock, device, marked, run.say)

    def look(done: int) -> None:
        """Evaluates after step `done`; a signal cuts that short, and the run does it again when it goes on."""
        state.owes_validation = True
        with clock.paused():
            health.check()
            with suppress(Stopped), interrupt.at_once("Leaving this evaluation for later, then a checkpoint."):
                state.validation = validation = validate(interrupt.check)
                state.owes_validation = False
        if state.owes_validation:
            return
        health.check_validation(validation.loss, done)
        run.log(done, {"val/loss": validation.loss, "val/bits_per_byte": validation.bits_per_byte})
        if state.best is None or validation.loss < state.best.loss:
            state.best, state.best_step = validation, done

    try:
        with Interrupt(world) as interrupt, Saver(run.folder, cfg, world) as saver, profiler:
            if state.owes_validation:
                look(state.step)
            saver.point(state.best_step)  # of a run that goes on, whose newest checkpoint may have been damaged
            end = state.step if state.owes_validation else cfg.train.steps  # cut short again: no step after it
            for step in run.progress(range(state.step, end)):
                with profiler.step():
                    loss, grad_norm = training_step(forward, state, batches[step], step, cfg, precision, world)
                state.step = done = step + 1
                health.watch(done, loss, grad_norm)
                state.loss_sum, state.losses = state.loss_sum + loss, state.losses + 1
                last = done == cfg.train.steps

                if last or due(done, cfg.logging.every):
                    health.check()
                    window = clock.window()
                    tokens_per_s = 1000 * batch_tokens / window.mean_ms if window else None
                    run.log(
                        done,
                        {
                            "train/loss": (state.loss_sum / state.losses).item(),
                            "train/grad_norm": grad_norm.item(),
                            "train/lr": learning_rate(step, cfg.train.steps, cfg.optim),
                            "perf/step_ms": window.median_ms if window else None,
                            "perf/tokens_per_s": tokens_per_s,
                            "perf/mfu": model.flops_per_token() * tokens_per_s / peak if peak and tokens_per_s else None,
                            "perf/peak_gb": clock.peak_gb,
                        },
                    )
                    state.loss_sum, state.losses = torch.zeros((), device=device), 0

                if last or due(done, cfg.eval.every):
                    look(done)
                stopping, overdue = interrupt.wanted_or(saver.overdue)  # asked once: where the run stops, it has saved
                if last or stopping or overdue or due(done, cfg.checkpoint.every) or state.best_step == done:
                    with clock.paused():
                        health.check_weights(model, done)
                        run.sync()
                        saver.save(state)
                if stopping:
                    break
            if interrupt.requested and (state.owes_validation or state.step < cfg.train.steps):
                saver.wait()
                run.say(f"stopped after step {state.step}; to go on: {go_on(run.folder)}")
                raise Stopped(interrupt.exit_code)

            # ---- results -----------------------------------------------------------------------------------------------------
            saver.wait()
            assert state.validation is not None and state.best is not None  # the last step was evaluated
            results = {"final": vars(state.validation), "best": vars(state.best), "median_step_ms": clock.median_ms}
            interrupt.answer = "Stopping."
            run.finish(results)
            try:
                with interrupt.at_once(interrupt.answer), precision.autocast() if sharded else nullcontext():
                    wanted = prompt and (world.leads or sharded)  # sharded weights are gathered by all, in autocast's dtype
                    text = continue_text(model, corpus.tokenizer, prompt, cfg.sample, cfg.seed, device) if wanted else ""
            except Stopped:
                left = f" but the sample; to make it up: {go_on(run.folder)}" if prompt else ""
                run.say(f"stopped after the last step; all is kept{left}")
                raise
            if prompt:
                run.keep_sample(text)
    except NonFiniteError as error:
        raise NonFiniteError(describe(error, run, batches), error.step) from None
    return Summary(run.folder, state.validation, state.best, clock.median_ms, text)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@record  # torchrun's report of a rank that failed then has the traceback
def job(composed: DictConfig, world: World) -> int:
    """One run of the command: a whole run, or one of a sweep. Returns its exit code, so that those after it still start."""
    context = HydraConfig.get()
    os.chdir(context.runtime.cwd)  # also with hydra.job.chdir=true: paths on the command line and in hints are from there
    folder, overrides, sweep = Path(context.runtime.output_dir), list(context.overrides.task), context.mode is RunMode.MULTIRUN
    try:
        cfg = configs.from_dict(composed)
        chosen = command_line.chooses_folder(cfg, context.overrides.hydra)
        world.highest(0)  # on every rank Hydra has made the folder
        origin = world.first(lambda: resume.settle(cfg, folder, overrides, chosen=chosen))
        if origin.folder != folder and world.leads:
            with suppress(OSError):  # Hydra made it before it called
                folder.rmdir()
        if origin.finished:
            if world.leads:
                show(f"{relative(origin.folder)} has finished: step {origin.step} of {origin.cfg.train.steps}.")
            return 0
        with world.agreed():
            on = machine.inspect(origin.cfg.device)
            rules.check(origin.cfg, on)
            tracking.settle(origin.cfg.logging)
        group = Path(context.sweep.dir).name if sweep else None
        with (
            deterministic(origin.cfg.deterministic),
            open_run(origin, torch.device(on.device), group, world) as run,
            unless_refused(run),
        ):
            summary = train(origin.cfg, run, on, world)
    except (NonFiniteError, StorageError) as error:
        if world.leads:
            show(f"stopped: {error}", sys.stderr)
            machine.tell_torchrun(f"stopped: {error}")
        if sweep and world.size > 1 and isinstance(error, StorageError):
            # the first rank may be alone with it: the next job would wait for the others, which wait for it in this one
            raise SystemExit(1) from None
        return 1
    except ConfigError as error:
        if not world.leads:
            return command_line.EXIT_CODE
        with suppress(OSError):
            folder.rmdir()
        return command_line.refuse(error, overrides if sweep else None)
    if world.leads:
        show(report(summary))
    return 0


@contextmanager
def unless_refused(run: Run) -> Iterator[None]:
    """Takes a new run's folder away if it ends before it starts; what others put there stays."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt, Stopped):
        if run.tracker is None and not run.origin.in_place and not isinstance(run, Follower):
            for name in ("config.yaml", "environment.json", "run.json", ".lock", "tokenizer.json"):
                (run.folder / name).unlink(missing_ok=True)
            with suppress(OSError):
                run.folder.rmdir()
        raise


def main() -> int:
    take_any_encoding()
    codes, world = [0], join()

    def run(composed: DictConfig) -> None:
        try:
            codes.append(job(composed, world) or 0)
        except Exception:
            if world.size == 1:
                raise
            # of a sweep Hydra would start the next job, in which this rank would wait for others that wait for it in this one
            traceback.print_exc()
            raise SystemExit(1) from None

    exit_on_signals()
    try:
        world.first(lambda: command_line.check(sys.argv[1:]))
        command_line.register_resolvers(sys.argv[1:], started=world.first(command_line.now))
        hydra.main(version_base="1.3", config_path="configs", config_name="config")(run)()
    except BrokenPipeError:  # of --help | head: a run's own are passed over
        mute(sys.stdout)
    except KeyboardInterrupt:  # before the first step, which Interrupt watches, or a second one
        codes.append(130)
    except SystemExit as end:
        if end.code == 1 or isinstance(end.code, str):
            raise  # an exception, of this rank alone: it waits for nobody, and torchrun ends the others
        codes.append(end.code or 0)
    world.leave(max(codes))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
