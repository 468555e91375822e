"""README.md's own variant, dropped into a copy of the package: the battery runs on it unasked."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_a_variant_is_one_file(tmp_path):
    shutil.copytree(ROOT / "depthjax", tmp_path / "depthjax")
    shutil.copytree(ROOT / "tests" / "contract", tmp_path / "tests" / "contract")
    for name in ("tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (source,) = [block for block in blocks if 'name = "rezero"' in block]
    (tmp_path / "depthjax" / "residuals" / "rezero.py").write_text(source)

    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/contract", "-k", "rezero"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    files = (ROOT / "tests" / "contract").glob("test_*.py")
    battery = "\n".join(file.read_text() for file in files)
    properties = len(re.findall(r"(?<!proof\n)^@every_(rule|form)$", battery, re.MULTILINE))
    assert f"{properties} passed" in result.stdout
