"""Who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hosted_tinker"

FORBIDDEN = {
    "types.py": ["hosted_tinker", "torch", "pydantic", "fastapi"],
    "errors.py": ["hosted_tinker", "torch", "pydantic", "fastapi"],
    "wire": ["hosted_tinker.api", "hosted_tinker.store", "torch", "tinker", "fastapi"],
    "store": ["hosted_tinker.api", "hosted_tinker.wire", "torch", "fastapi"],
    "modeling": ["hosted_tinker.api", "hosted_tinker.wire", "hosted_tinker.store", "fastapi"],
    "training": [
        "hosted_tinker.api",
        "hosted_tinker.wire",
        "hosted_tinker.store",
        "hosted_tinker.sampling",
        "fastapi",
    ],
    "sampling": [
        "hosted_tinker.api",
        "hosted_tinker.wire",
        "hosted_tinker.store",
        "hosted_tinker.training",
        "fastapi",
    ],
    "replicas": [
        "hosted_tinker.api",
        "hosted_tinker.wire",
        "hosted_tinker.store",
        "torch",
        "fastapi",
    ],
    "openai_api": ["hosted_tinker.api", "hosted_tinker.wire", "hosted_tinker.store", "torch"],
    "api": ["torch", "transformers", "hosted_tinker.modeling", "hosted_tinker.training", "tinker"],
}


def imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
    return modules


@pytest.mark.parametrize("place", FORBIDDEN)
def test_layer_imports_nothing_above_it(place: str) -> None:
    root = PACKAGE / place
    paths = [root] if root.is_file() else sorted(root.rglob("*.py"))
    for path in paths:
        for module in imported_modules(path):
            for forbidden in FORBIDDEN[place]:
                below = module == forbidden or module.startswith(f"{forbidden}.")
                assert not below, f"{path} imports {module}"


def test_api_process_never_imports_torch() -> None:
    code = "import sys, hosted_tinker.serve; print([m for m in ('torch', 'transformers', 'tinker') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_broad_excepts_stand_at_the_process_boundaries_only() -> None:
    allowed = {
        "workers/main.py",
        "workers/sampling_lane.py",
        "workers/shared_device.py",
        "workers/training_lane.py",
        "training_scheduler.py",
        "sampling_scheduler.py",
    }
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None
            or (isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"})
        )
    }
    assert found <= allowed
