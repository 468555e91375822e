"""The house rules: what may import what, and where variants may be named."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

import depthjax
from depthjax.residuals import REGISTRY

PACKAGE = pathlib.Path(depthjax.__file__).parent

# Who may import whom: a room sees itself, the rooms listed, and nothing else of depthjax.
MAY_IMPORT = {
    "errors": set(),
    "kernels": set(),
    "residuals": {"kernels"},
    "layers": {"kernels"},
    "models": {"layers", "residuals", "kernels", "errors"},
    "data": {"errors"},
    "config": {"models", "residuals", "errors"},
    "parallel": {"config", "models", "residuals", "kernels", "errors"},
    "plan": {"parallel", "config", "data", "models", "residuals", "errors"},
    "probes": {"models", "residuals", "layers", "data", "kernels", "errors"},
    "interop": {"config", "data", "models", "residuals", "errors"},
    "train": {
        *("interop", "parallel", "plan", "config", "data", "models", "residuals", "kernels"),
        "errors",
    },
    "infer": {"models", "layers", "kernels", "errors"},
    "evals": {"data", "models", "infer", "errors"},
    "aot": {"train", "infer", "parallel", "plan", "config", "models", "residuals", "errors"},
    "report": {"plan", "data", "errors"},
    "overrides": {"config", "errors"},
    "cli_data": {"overrides", "data", "errors"},
    "cli_convert": {"overrides", "interop", "train", "config", "models", "residuals", "errors"},
    "cli_plan": {"aot", "overrides", "plan", "parallel", "config", "data", "errors"},
    "cli_cost": {"report", "aot", "plan", "overrides", "config", "models", "residuals", "errors"},
    "cli_eval": {"evals", "overrides", "train", "config", "data", "errors"},
    "cli_probe": {"probes", "report", "train", "overrides", "errors"},
    "cli_generate": {"infer", "overrides", "train", "data", "errors"},
    "cli": {
        *("parallel", "train", "plan", "config", "overrides", "errors", "cli_data", "cli_convert"),
        *("cli_eval", "cli_generate", "cli_plan", "cli_cost", "cli_probe"),
    },
    "__main__": {"cli"},
    "__init__": set(),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: pathlib.Path):
    """Absolute names of all modules that a file imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module
            if node.module == "depthjax":
                yield from (f"depthjax.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    rooms = {name.split(".")[1] for name in imports(path) if name.startswith("depthjax.")}
    rooms -= {"__version__", room(path)}
    assert rooms <= MAY_IMPORT[room(path)]


def test_residuals_import_with_jax_and_flax_alone():
    """Everything that jax and flax do not bring themselves is blocked."""
    code = """
import sys
import jax, flax.nnx
allowed = set(sys.modules)
class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in ("jax", "jaxlib", "flax", "numpy", "ml_dtypes"):
            return None
        if top == "depthjax" and (name + ".").startswith(
            ("depthjax.residuals.", "depthjax.kernels.")) or name == "depthjax":
            return None
        raise ImportError(f"depthjax.residuals must not import {name}")
sys.meta_path.insert(0, Block())
import depthjax.residuals
new = {name.partition(".")[0] for name in set(sys.modules) - allowed}
print(sorted(new - set(sys.stdlib_module_names)))
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(ast.literal_eval(result.stdout)) <= {"depthjax", "jax", "jaxlib", "flax", "numpy"}


def test_no_variant_is_named_outside_its_rooms():
    names = set(REGISTRY) | {type(make()).__name__ for make in REGISTRY.values()}
    names |= {r"attn_?res", "attention residuals", r"hyper-?connections?"}
    words = re.compile(rf"\b({'|'.join(names)})\b", re.IGNORECASE)
    for path in FILES:
        if room(path) in ("residuals", "interop", "kernels"):
            continue
        text = path.read_text()
        allowed = "PreLN" if room(path) == "config" else ""  # the default of a config
        found = {m[0] for m in words.finditer(text)} - {allowed}
        assert not found, f"{path} names {found}"


def test_files_and_functions_stay_small():
    """80 lines, 120 for the body of a Mosaic kernel, which is one schedule."""
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert len(path.read_text().splitlines()) <= 450, path
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                most = 120 if "mosaic" in str(path) and "kernel" in node.name else 80
                assert node.end_lineno - node.lineno < most, f"{path}: {node.name}"
