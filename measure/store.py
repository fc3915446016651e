"""What a measurement finds, on disk while it runs: a line of JSON each, behind which `resume=auto` goes on.

The first line has the facts that all processes must agree in: configurations, card, versions; later ones may have those of a
part. `sum` of a line is the SHA-256 of it and of all lines before it, so that none can change, come twice or go unnoticed.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from measure.files import json_text, relative, replace_text
from measure.sources import STEP, modules_hash
from measure.tables import flat


class Store:
    """The lines of a file: those of an earlier process, if there are any, and those that `add` appends.

    Raises:
        ValueError: they are of something else than `facts`, or not as they were written.
        OSError: they can't be read.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self._path, self._text, self._sum = path, "", ""
        self.lines: list[dict[str, Any]] = []
        self._facts: dict[str, dict[str, Any]] = {}
        found = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        for number, text in enumerate(found.split("\n")[:-1], start=1):  # the last one was cut short by a crash, or is empty
            with suppress(ValueError, TypeError, AttributeError):
                line = json.loads(text)
                line.pop("sum", None)
                if self._append(line) == text and self._facts:
                    continue
            raise ValueError(
                f"{relative(path)}: line {number} is not as it was written. Delete it and all after it, to remake them."
            )
        self.agree(facts)

    def agree(self, facts: Mapping[str, Any], of: str = "") -> None:
        """Notes facts of the whole, or of a part, or compares them with those that an earlier process has noted.

        Raises:
            ValueError: they differ.
        """
        facts = flat(json.loads(json.dumps(facts)))
        if of not in self._facts:
            self.add({"of": of, "facts": facts})
        there = self._facts[of]
        if changed := [name for name in there | facts if there.get(name) != facts.get(name)]:
            pairs = "; ".join(f"{name}={_shown(facts.get(name))}, there {_shown(there.get(name))}" for name in changed[:4])
            what = f"{relative(self._path)}{f': {of}' if of else ''}"
            raise ValueError(f"{what} is of something else: {pairs}. Change it, or name another folder.")

    def add(self, line: Mapping[str, Any]) -> None:
        """Raises StorageError: the file can't be written."""
        self._append(dict(line))
        replace_text(self._path, self._text)

    def _append(self, line: dict[str, Any]) -> str:
        """The text of the line, which is then the last."""
        self._sum = sha256((self._sum + json_text(line)).encode()).hexdigest()[:16]
        text = json_text({"sum": self._sum} | line)
        self._text += f"{text}\n"
        if "facts" in line:
            self._facts[line["of"]] = line["facts"]
        else:
            self.lines.append(line)
        return text


def comparable(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What training steps have to agree in to be compared, of the facts of `measure.environment`: card, versions, code."""
    versions = {name: environment["versions"][name] for name in ("torch", "triton")}
    return {"card": (environment["gpu"] or {"name": "CPU"})["name"], "code": modules_hash(*STEP)} | versions


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
