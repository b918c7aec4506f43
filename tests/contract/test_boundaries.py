"""Which module may import which: the packages never each other, and inside a package only what stands to the left."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
SOURCES = {name: PACKAGES / name.replace("_", "-") / "src" / name for name in ("pico_train", "pico_analyze")}
ORDER = {
    "pico_train": [
        "words",
        "errors",
        "strict_yaml",
        "config",
        "suite",
        "launch",
        "ranks",
        "sharding",
        "hardware",
        "heap",
        "data",
        "schedule",
        "model",
        "flops",
        "kernels",
        "timing",
        "objectives",
        "compile",
        "muon",
        "optim",
        "state",
        "capture",
        "metrics_log",
        "checkpoint",
        "listing",
        "noise_scale",
        "stopping",
        "estimate",
        "memory",
        "doctor",
        "evaluation",
        "loop",
        "logs",
        "tracker_loggers",
        "trackers",
        "record",
        "run",
        "cli",
    ],
    "pico_analyze": [
        "words",
        "progress",
        "strict_yaml",
        "config",
        "device",
        "checkpoint",
        "plugins",
        "components",
        "metrics",
        "results",
        "targets",
        "plan",
        "measure",
        "spread",
        "cluster",
        "analysis",
        "plots",
        "run",
        "cli",
    ],
}


def imported(source: str) -> set[str]:
    """The dotted names that a module imports anywhere outside ``if TYPE_CHECKING``."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def trespasses(package: str, room: str, source: str) -> list[str]:
    """The imports of ``source``, a module of ``package`` in ``room``, that go to the other package or to the right."""
    order, [other] = ORDER[package], set(ORDER) - {package}
    found = []
    for name in sorted(imported(source)):
        first, _, rest = name.partition(".")
        target = rest.split(".")[0]
        to_the_right = first == package and target in order and order.index(target) > order.index(room)
        if first == other or to_the_right:
            found.append(name)
    return found


def modules(package: str) -> list[tuple[str, Path]]:
    root = SOURCES[package]
    return [(path.relative_to(root).parts[0].removesuffix(".py"), path) for path in sorted(root.rglob("*.py"))]


@pytest.mark.parametrize("package", SOURCES)
def test_imports_go_one_way(package: str) -> None:
    rooms = modules(package)
    assert {room for room, _ in rooms} - {"__init__"} == set(ORDER[package])
    for room, path in rooms:
        if room != "__init__":  # the front door of the package, which nothing inside imports
            assert trespasses(package, room, path.read_text(encoding="utf-8")) == [], path


def test_the_check_itself_finds_trespasses() -> None:
    assert trespasses("pico_train", "data", "from pico_train.model.decoder import PicoDecoder") != []
    assert trespasses("pico_train", "data", "def f():\n  import pico_train.loop") != []
    assert trespasses("pico_analyze", "metrics", "import pico_train") != []
    assert trespasses("pico_train", "model", "from pico_train.config import ModelConfig\nimport torch") == []


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("pico_train.cli", {"torch", "lightning", "numpy"}),
        ("pico_train.suite", {"torch", "lightning", "numpy"}),
        ("pico_train.listing", {"torch", "lightning"}),
        ("pico_train.run", {"lightning"}),
        ("pico_analyze.cli", {"torch", "pandas", "matplotlib", "scipy", "lightning"}),
        ("pico_analyze.metrics", {"torch", "pandas", "scipy"}),
        ("pico_analyze.components", {"torch", "pandas", "scipy"}),
        ("pico_analyze.run", {"lightning", "tokenizers"}),
    ],
)
def test_slow_libraries_stay_out(module: str, never: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert never.isdisjoint(loaded)
