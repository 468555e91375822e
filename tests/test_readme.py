"""The README's Python runs as it stands, and its commands name what exists."""

import pathlib
import re

from depthjax.config import load_config, residual_named
from depthjax.models import shape_of

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run_examples() -> list[dict]:
    """What each Python block of the README defines."""
    found = []
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        names: dict = {"__name__": "readme"}
        exec(compile(block, "README.md", "exec"), names)
        found.append(names)
    return found


def test_python_examples_run():
    results = [names["y"] for names in run_examples() if "y" in names]
    assert [y.shape for y in results] == 3 * [(2, 10, 64)]


def test_commands_name_what_exists():
    run_examples()  # one of which adds a variant
    for path in set(re.findall(r"configs/\w+\.py", README)):
        load_config(str(ROOT / path)).check()
    for name in re.findall(r"--model\.residual (\w+)", README):
        residual_named(name)
    for name in set(re.findall(r"--model\.shape (\S+)", README)) - {"custom"}:
        shape_of(name)
    for path in re.findall(r"`(?:pytest )?((?:depthjax|tests)/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path
