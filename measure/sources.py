"""Which code a process ran, and what of it has changed since: what makes a record old.

A module counts by its syntax tree, so comments, docstrings and layout don't; all modules of the project count that the process
had imported, but for those that say what was measured (PRESENTING). A YAML file of which a config was composed counts by its
values. The PTX of the Triton kernels that ran says what of them a change has changed, once they have run again.
"""

import ast
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

ROOT = Path(__file__).parent.parent
PRESENTING = ("plots", "report", "tables", "tracking")  # names of modules that measure nothing
# What runs or times a training step: its modules, imported yet or not.
STEP = ("ablate.py", "ablation", "compare.py", "configs", "data", "measure", "model", "ops", "study", "training")
Code = dict[str, Any]
_yaml: set[str] = set()  # YAML files, by path


def code() -> Code:
    """What this process has run so far: the hashes of its modules and YAML files by path, those of its kernels by name, one for
    each variant, and whether backward runs in the caller's thread."""
    paths = {path for path, _ in _modules() if Path(path).stem not in PRESENTING} | _yaml
    return {
        "modules": {path: _as_first_seen(path) for path in sorted(paths)},
        "kernels": _kernels(),
        "backward": "several threads" if torch._C._is_multithreading_enabled() else "one thread",
    }


def note_yaml(files: Iterable[Path]) -> None:
    """Notes YAML files as read by this process, those that are there and of the project."""
    for file in files:
        if file.is_relative_to(ROOT) and file.is_file():
            path = file.relative_to(ROOT).as_posix()
            _as_first_seen(path)
            _yaml.add(path)


def together(codes: Sequence[Code]) -> Code:
    """What several processes ran.

    Raises:
        ValueError: they ran different code.
    """
    modules: dict[str, str] = {}
    kernels: dict[str, set[str]] = {}
    for one in codes:
        if differ := [path for path, of in one["modules"].items() if modules.get(path, of) != of]:
            raise ValueError(f"{_listed(differ)} changed while this was measured. Measure all of it anew.")
        modules |= one["modules"]
        for name, hashes in one["kernels"].items():
            kernels.setdefault(name, set()).update(hashes)
    backward = " and ".join(sorted({one["backward"] for one in codes}))
    return {"modules": modules, "kernels": {name: sorted(of) for name, of in kernels.items()}, "backward": backward}


def changes(record: Mapping[str, Any]) -> str | None:
    """What makes a record with `code` old, a clause; None where nothing does."""
    if not record.get("code"):
        return "it does not say which code was measured"
    modules = record["code"]["modules"]
    changed = [path for path, of in modules.items() if not (ROOT / path).is_file() or _hash_of(ROOT / path) != of]
    return f"{_listed(changed)} {'has' if len(changed) == 1 else 'have'} changed" if changed else None


def other_kernels(record: Mapping[str, Any], earlier: Mapping[str, Any]) -> list[str]:
    """The kernels that two records have in common and whose PTX differs, or its variants."""
    one, other = (of.get("code", {}).get("kernels", {}) for of in (record, earlier))
    return [name for name in one if name in other and one[name] != other[name]]


def other_versions(record: Mapping[str, Any], versions: Mapping[str, str], are: str) -> list[str]:
    """Of the packages that a record was measured with, those that differ, a clause each.

    Args:
        versions: of packages, that it should have; builds of one version are one.
        are: what these versions are, for a message: "pinned", "installed".
    """
    measured = record["environment"]["versions"]
    differ = [name for name, of in versions.items() if measured.get(name, of).partition("+")[0] != of.partition("+")[0]]
    return [f"{name} {measured[name]} was measured, {versions[name]} is {are}" for name in differ]


def modules_hash(*names: str) -> str:
    """Of modules and folders of them, imported or not: processes whose measurements belong together have the same."""
    found = {path for name in names for path in ((ROOT / name).rglob("*.py") if (ROOT / name).is_dir() else [ROOT / name])}
    files = sorted(path for path in found if path.stem not in PRESENTING)
    return _short("".join(f"{path.relative_to(ROOT).as_posix()} {_hash_of(path)}\n" for path in files))


def _listed(names: Sequence[str], most: int = 4) -> str:
    """a, b and c; a, b, c, d and 3 others"""
    named = [*names[:most], *([f"{len(names) - most} other{'s' * (len(names) > most + 1)}"] if len(names) > most else [])]
    return " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))


def _modules() -> Iterator[tuple[str, Any]]:
    """The project's modules that this process has imported, by path."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and Path(file).is_relative_to(ROOT):
            parts = Path(file).relative_to(ROOT).parts
            if parts[0] != "tests" and not any(part.startswith(".") or part == "site-packages" for part in parts):
                yield "/".join(parts), module


# ---- modules -----------------------------------------------------------------------------------------------------------------


@cache
def _as_first_seen(path: str) -> str:
    """Of a module that is loaded: its file may change while the process runs."""
    return _hash_of(ROOT / path)


def _hash_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return _short(repr(yaml.safe_load(text))) if path.suffix == ".yaml" else tree_hash(text)


@cache
def tree_hash(source: str) -> str:
    """Of the syntax tree, without comments, docstrings and places; the same in every version of Python."""
    return _short(repr(_plain(ast.parse(source))))


def _plain(node: Any) -> Any:
    """A tree as tuples, without what is empty, as fields are that a newer Python has added."""
    if isinstance(node, list):
        return tuple(_plain(one) for one in node if not _is_text(one))
    if isinstance(node, ast.JoinedStr):
        return ("JoinedStr", *_parts(node.values))
    if isinstance(node, ast.AST):
        fields = ((name, _plain(value)) for name, value in ast.iter_fields(node))
        return (type(node).__name__, *(field for field in fields if field[1] not in (None, ())))
    return node


def _is_text(node: Any) -> bool:
    """A docstring, or another statement that is a string."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _parts(values: Iterable[ast.expr]) -> list[Any]:
    """Of an f-string, its texts joined: Python's versions cut them in other places."""
    found: list[Any] = []
    for value in values:
        part = value.value if isinstance(value, ast.Constant) else _plain(value)
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part != "":
            found.append(part)
    return found


# ---- kernels -----------------------------------------------------------------------------------------------------------------


def _kernels() -> dict[str, list[str]]:
    """Of each of the project's kernels that ran here, the hashes of its variants. Triton keeps what it compiled or loaded with
    the function; in its interpreter there is nothing."""
    found: dict[str, set[str]] = {}
    kind: Any = getattr(sys.modules.get("triton"), "JITFunction", ())
    for _, module in _modules():
        for function in (value for value in vars(module).values() if isinstance(value, kind)):
            caches = [cache[0] for cache in getattr(function, "device_caches", {}).values()]
            hashes = {ptx_hash(of.asm["ptx"]) for cache in caches for of in cache.values() if "ptx" in getattr(of, "asm", ())}
            if hashes:
                found.setdefault(function.__name__, set()).update(hashes)
    return {name: sorted(hashes) for name, hashes in sorted(found.items())}


@cache
def ptx_hash(ptx: str) -> str:
    """Of the instructions, without the kernel's name, comments and where in the source they come from."""
    code = ptx.partition(".section")[0]
    name = re.search(r"\.entry\s+(\w+)", code)
    lines = re.sub(r"//.*", "", code.replace(name[1], "kernel") if name else code).splitlines()
    left = [line.strip() for line in lines if line.strip() and not re.match(r"\s*(\.loc|\.file|\$L__tmp)", line)]
    return _short("\n".join(left))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
