from time import sleep

import pytest
import torch

from measure import timing
from measure.timing import Contender, rotating_sets, time_calls
from tests.runs import no_space

CPU = torch.device("cpu")


def test_contenders_take_turns_in_every_round_over_all_sets():
    log = []

    def contender(name):
        return Contender(name, lambda: [lambda s=s: log.append((name, s)) for s in range(3)])

    outcomes = time_calls([contender("a"), contender("b")], CPU, rounds=12, round_ms=1e-9)
    assert [len(outcomes[name].us) for name in "ab"] == [12, 12]
    turns = [log[i : i + 3] for i in range(len(log) % 3, len(log), 3)][-24:]
    assert all([s for _, s in turn] == [0, 1, 2] for turn in turns), "each turn goes through the sets in order"
    names = [turn[0][0] for turn in turns]
    assert {tuple(names[i : i + 2]) for i in range(0, 24, 2)} == {("a", "b"), ("b", "a")}, "both in every round, in any order"


def test_a_sample_is_the_time_of_one_call_and_a_failure_is_a_result():
    outcomes = time_calls([Contender("a", lambda: [lambda: sleep(0.002)] * 3), Contender("b", no_space)], CPU, rounds=3)
    assert 2000 <= min(outcomes["a"].us) < 5000
    assert outcomes["b"].record(outcomes["a"]) == {"us": None, "error": "OSError: [Errno 28] No space left on device"}


def test_inputs_that_calls_overwrite_are_restored_before_each_turn():
    x = torch.ones(1)
    contender = Contender("doubles", lambda: [lambda: x.mul_(2)], before=lambda: x.fill_(1))
    time_calls([contender], CPU, rounds=50, round_ms=1e-9)
    assert x.item() <= 2


def test_sets_together_are_several_times_l2(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"L2_cache_size": 60_000_000}))
    assert [rotating_sets(nbytes, torch.device("cuda")) for nbytes in (50_000_000, 1)] == [5, 512]


def test_copy_bandwidth_counts_bytes_read_and_written(monkeypatch):
    outcomes = {"add": timing.Outcome([10.0] * 3), "copy": timing.Outcome([8.0] * 3)}
    monkeypatch.setattr(timing, "time_calls", lambda *a, **k: outcomes)
    assert timing.copy_bandwidth(CPU, gigabytes=1e-3) == pytest.approx(2e6 / 8e-6 / 1e9)


@pytest.mark.gpu
def test_on_a_gpu_forward_and_backward_are_timed_and_outputs_lie_elsewhere_in_every_round():
    device, places = torch.device("cuda", 0), []
    with timing.side_stream(device):
        x = torch.randn(1 << 24, device=device, requires_grad=True)
        y, dy = x.sin(), torch.ones_like(x)

        def forward():
            y = x.sin()
            if torch.cuda.is_current_stream_capturing():
                places.append(y.data_ptr())
            return y

        backward = Contender("backward", lambda: [lambda: torch.autograd.grad(y, x, dy, retain_graph=True)])
        outcomes = time_calls([Contender("forward", lambda: [forward]), backward], device, rounds=8, move_outputs=True)
    assert all(len(one.us) == 8 and one.error is None and min(one.us) > 1 for one in outcomes.values()), outcomes
    assert len(set(places[1:])) > 4


@pytest.mark.gpu
def test_a_call_that_waits_for_the_device_is_timed_and_breaks_no_capture_after_it():
    device = torch.device("cuda", 0)
    with timing.side_stream(device):
        x = torch.randn(1 << 20, device=device)
        waits = Contender("waits", lambda: [lambda: x.sum().item()])
        outcomes = time_calls([waits, Contender("ours", lambda: [lambda: x.sum()])], device, rounds=8)
    assert [(one.error, one.waits, len(one.us)) for one in outcomes.values()] == [(None, True, 8), (None, False, 8)]
    assert outcomes["waits"].record(outcomes["ours"])["waits"] is True
