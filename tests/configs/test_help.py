"""What --help says of the keys."""

import re

import configs
from configs import command_line


def test_every_key_is_described_with_its_meaning_and_that_of_its_values():
    text = command_line.describe_keys()

    for key in configs.keys.schema().values():
        assert re.search(rf"^  {re.escape(key.name)}=.*  {re.escape(key.meaning)}$", text, re.MULTILINE)
        assert key.meaning, f"{key.name}: nothing stands beside it in schema.py"
        for value, meaning in key.choices.items():
            assert meaning, f"{key.name}={value}: nothing stands beside it in schema.py"
            assert re.search(rf"^ {{20,}}{value} +{re.escape(meaning)}$", text, re.MULTILINE)


def test_the_help_shows_what_a_plain_run_gets():
    plain = configs.compose_only([])
    given = dict(re.findall(r"^  ([\w.]+)=(.*?)(?:  |$)", command_line.describe_keys(), re.MULTILINE))

    assert float(given["optim.lr"]) == plain.optim.lr
    assert (given["optim.min_lr"], given["optim.warmup_steps"]) == ("null", "null")  # not what becomes of them
    assert given["sample.prompt"] == r"'\n'"
    typed = [f"{key}={value}" for key, value in given.items() if key != "sample.prompt"]
    assert configs.compose_only(typed) == plain  # all of them, and as they are typed
