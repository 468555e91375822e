"""The README's Python runs as it stands, and its commands name what exists."""

import pathlib
import re

from depthjax.config import load_config, residual_named
from depthjax.models import shape_of

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_python_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        names: dict = {}
        exec(compile(block, "README.md", "exec"), names)
        assert names["y"].shape == (2, 10, 64)


def test_commands_name_what_exists():
    for path in set(re.findall(r"configs/\w+\.py", README)):
        load_config(str(ROOT / path)).check()
    for name in re.findall(r"--model\.residual (\w+)", README):
        residual_named(name)
    for name in re.findall(r"--model\.shape (\S+)", README):
        shape_of(name)
    for path in re.findall(r"`(?:pytest )?((?:depthjax|tests)/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path
