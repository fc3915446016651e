"""Which part may import which: parts stand on floors, and nothing imports upwards, in a circle, or a program."""

import ast
from graphlib import TopologicalSorter

from tests.runs import ROOT

FLOORS = (
    {"ops", "measure"},
    {"configs"},
    {"data", "model", "hydra_plugins"},
    {"training"},
    {"ablation", "study"},
    {"benchmarks"},
    {"adoption"},
    {"examples"},
    {"train", "sample", "ablate", "compare"},
)
FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts}


def modules():
    files = [ROOT / f"{part}.py" for part in FLOORS[-1]]
    files += [file for part in FLOOR.keys() - FLOORS[-1] for file in (ROOT / part).rglob("*.py")]
    return {
        file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): file for file in files
    }


MODULES = modules()


def imported(module, source):
    """The modules of the project that a module's text names in an import, wherever that stands in it."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{base}.{name}" if f"{base}.{name}" in MODULES else base for name in names]
        found |= {name for name in names if name in MODULES}
    return found - {module}


def test_each_part_imports_from_its_own_floor_or_below_and_no_program_and_no_module_itself_by_way_of_others():
    graph = {module: imported(module, file.read_text(encoding="utf-8")) for module, file in MODULES.items()}
    for module, others in graph.items():
        part = module.partition(".")[0]
        for other in others:
            its = other.partition(".")[0]
            assert its == part or FLOOR[its] < FLOOR[part], f"{module} imports {other}"
    assert {*TopologicalSorter(graph).static_order()} == {*MODULES}, "it raises CycleError, with the circle"
