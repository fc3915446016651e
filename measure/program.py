"""How ablate.py and compare.py begin and end: help, signals, refused configs, exit codes."""

import sys
from collections.abc import Callable, Sequence

from configs import Config, ConfigError, command_line, machine
from training.interrupt import Stopped, exit_on_signals, show, take_any_encoding
from training.storage import StorageError


def run(
    name: str, arguments: Sequence[str], help_text: Callable[[], str], work: Callable[[], int], stopped: Callable[[], str]
) -> int:
    """Does the work of a program, or shows its help.

    Args:
        name: of the program, such as "ablate.py".
        stopped: what to say after a signal.

    Returns:
        The exit code: that of `work`; 1 for a full disk, 2 for a config that is refused, 128 plus its number for a signal.
    """
    take_any_encoding()
    if {"-h", "--help"} & set(arguments):
        show(help_text())
        return 0
    exit_on_signals()
    try:
        machine.refuse_ranks(name)
        return work()
    except ConfigError as error:
        return command_line.refuse(error)
    except StorageError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Stopped) as stop:
        print(stopped(), file=sys.stderr)
        return 130 if isinstance(stop, KeyboardInterrupt) else int(stop.code)  # type: ignore[arg-type]  # a number


def own_keys(section: str) -> str:
    """The keys of a section with their defaults, a line each, for help."""
    lines = command_line.describe_keys(Config()).splitlines()
    return "".join(f"{line}\n" for line in lines if line.strip().startswith(f"{section}."))
