"""What counts as step time."""

from time import sleep

import pytest
import torch

from training.clock import PartClock, StepClock


class FakeTime:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def pass_ms(self, ms):
        self.now += ms / 1000


@pytest.fixture
def time():
    return FakeTime()


@pytest.fixture
def clock(time):
    return StepClock(torch.device("cpu"), warmup=0, now=time)


def step(clock, time, ms):
    with clock.step():
        time.pass_ms(ms)


def test_evaluation_and_logging_between_steps_are_not_step_time(clock, time):
    for _ in range(3):
        step(clock, time, 10)
        with clock.paused():
            time.pass_ms(5000)
        time.pass_ms(700)
    assert clock.steps_ms == pytest.approx([10, 10, 10])


def test_warm_up_steps_are_not_counted(time):
    clock = StepClock(torch.device("cpu"), warmup=2, now=time)
    for ms in (9000, 500):
        step(clock, time, ms)
    assert clock.window() is None and clock.median_ms is None
    for ms in (10, 12):
        step(clock, time, ms)
    assert clock.steps_ms == pytest.approx([10, 12])


def test_a_window_is_the_median_and_the_mean_of_the_steps_since_the_last(clock, time):
    for ms in (10, 11, 99):
        step(clock, time, ms)
    first = clock.window()
    for ms in (20, 22, 21):
        step(clock, time, ms)
    second = clock.window()
    assert (first.median_ms, second.median_ms) == (pytest.approx(11), pytest.approx(21))
    assert (first.mean_ms, second.mean_ms) == (pytest.approx(40), pytest.approx(21))
    assert clock.window() is None
    assert clock.median_ms == pytest.approx(20.5)


def test_a_pause_inside_a_step_is_a_mistake(clock):
    with pytest.raises(AssertionError, match="would count as step time"), clock.step(), clock.paused():
        pass


def test_a_step_cut_short_is_not_counted(clock, time):
    with pytest.raises(KeyError), clock.step():
        time.pass_ms(3)
        raise KeyError
    step(clock, time, 10)
    assert clock.steps_ms == pytest.approx([10])


def test_the_peak_of_memory_is_that_of_the_steps_of_this_run(monkeypatch, clock):
    peak = [40.0]  # GiB of an earlier run of the process
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak[0] * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: peak.__setitem__(0, 1.0))
    on_gpu = StepClock(torch.device("cuda"))
    peak[0] = 5.0
    with on_gpu.paused():
        peak[0] = 30.0  # evaluation
    assert on_gpu.peak_gb == 5.0 and clock.peak_gb is None
    peak[0] = 7.0
    assert on_gpu.peak_gb == 7.0


@pytest.mark.gpu
def test_cuda_steps_are_timed_by_events_without_counting_what_lies_between():
    device = torch.device("cuda")
    clock, x = StepClock(device, warmup=2), torch.randn(4096, 4096, device=device)
    for _ in range(6):
        with clock.step():
            x @ x
        for _ in range(50):
            x @ x
    one = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    one[0].record()
    for _ in range(50):
        x @ x
    one[1].record()
    torch.cuda.synchronize()
    assert clock.median_ms < one[0].elapsed_time(one[1]) / 5
    assert len(clock.steps_ms) == 4


def test_parts_of_a_step_are_told_apart_and_added_up_over_micro_batches():
    time = iter([0.0, 0.001, 0.003, 0.006, 0.010, 0.015])
    clock = PartClock(torch.device("cpu"), now=lambda: next(time))
    with clock.step():
        for part in ("forward", "backward", "forward", "backward", "optimizer"):
            clock.mark(part)
    assert clock.read() == {
        "forward": pytest.approx([1 + 3]),
        "backward": pytest.approx([2 + 4]),
        "optimizer": pytest.approx([5]),
    }


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
def test_a_step_waits_for_what_an_accelerator_has_queued(device, monkeypatch):
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    clock = StepClock(torch.device(device), warmup=0)
    with clock.step():
        pass
    assert waited == ([] if device == "cpu" else [torch.device(device)] * 2)


@pytest.mark.gpu
def test_a_step_queued_behind_a_wait_takes_the_time_of_its_kernels_alone():
    device, x = torch.device("cuda"), torch.rand(1 << 22, device="cuda")
    clock = StepClock(device, gpu_time=True)
    for _ in range(10):
        with clock.step():
            for _ in range(5):
                x.mul_(1.0)
            sleep(0.02)  # the CPU
            x.mul_(1.0)
    assert clock.gpu_ms < 5 and clock.median_ms > 20
