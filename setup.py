"""What pyproject.toml can't say: prenorm.check, which is adoption/check.py and what it needs, under the package's own name.

In a checkout these modules are top-level packages, whose names belong to nobody: an installation must not have them.
"""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

MODULES = {  # of prenorm.check, and where they are in a checkout
    "check": "adoption", "models": "adoption", "rounding": "ablation", "comparison": "measure",
    "schedule": "measure", "statistics": "measure", "tables": "measure", "clock": "measure",
}  # fmt: skip
INIT = '''"""Does an adopted model compute what it did, and how fast? Needs numpy, scipy and tabulate: prenorm[check]."""

from .check import check_parity, measure

__all__ = ["check_parity", "measure"]
'''
_IMPORT = re.compile(rf"^from (?:adoption|ablation|measure)\.({'|'.join(MODULES)}) import", re.MULTILINE)


class BuildWithCheck(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / "prenorm" / "check"
        folder.mkdir(exist_ok=True)
        for module, package in MODULES.items():
            text = _IMPORT.sub(r"from .\1 import", Path(package, f"{module}.py").read_text(encoding="utf-8"))
            text = re.sub(r"^from ops\.", "from prenorm.", text, flags=re.MULTILINE)
            (folder / f"{module}.py").write_text(text, encoding="utf-8")
        (folder / "__init__.py").write_text(INIT, encoding="utf-8")


setup(cmdclass={"build_py": BuildWithCheck})
