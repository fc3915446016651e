import torch

from measure.timing import Contender, measure

CPU = torch.device("cpu")


def test_contenders_take_turns_in_every_round_over_all_sets():
    log = []

    def contender(name):
        return Contender(name, lambda: [lambda s=s: log.append((name, s)) for s in range(3)])

    outcomes = measure([contender("a"), contender("b")], CPU, rounds=4, round_ms=1e-9)

    assert [len(outcomes[name].us) for name in "ab"] == [4, 4]
    turns = [log[i : i + 3] for i in range(len(log) % 3, len(log), 3)][-8:]
    assert all(found.error is None and len(found.us) == 8 and min(found.us) > 1 for found in outcomes.values()), outcomes
    assert len(set(places[1:])) > 4
