"""What can be done with this repository: ``nox -s demo``, ``nox -s tests``, ``nox -s lowest``, ``nox -s lint``, ``nox -s types``."""

import re
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_venv = "yes"
nox.needs_version = ">=2025.2.9"

PACKAGES = ("-e", "packages/pico-train", "-e", "packages/pico-analyze")
GROUPS = nox.project.load_toml("pyproject.toml")


def install(session: nox.Session, *what: str, versions: str = "constraints.txt") -> None:
    """Install in stated versions, without more those that CI tested, so that nothing pulls in another torch."""
    session.install("-c", versions, *what)


@nox.session
def demo(session: nox.Session) -> None:
    """Train three sizes, analyse them, draw the pictures; arguments are overrides: ``nox -s demo -- training.max_steps=20``."""
    install(session, *PACKAGES)
    name = "-".join(re.sub(r"[^\w.=]", "_", word) for word in session.posargs) or "full"
    out = Path("demo_output") / name
    suite = next((word.removeprefix("name=") for word in session.posargs if word.startswith("name=")), "demo")
    session.run(
        "pico-train",
        "run",
        "--config",
        "configs/demo.yaml",
        f"checkpointing.runs_dir={out / 'runs'}",
        "data.cache_dir=demo_output/token_caches",
        *session.posargs,
    )
    session.run(
        "pico-analyze",
        "run",
        "--config",
        "analysis_configs/demo.yaml",
        "--run-path",
        str(out / "runs" / suite),
        f"monitoring.output_dir={out / 'analysis_results'}",
        "--jobs",
        "2",
    )
    results = out / "analysis_results" / "demo"
    session.run("pico-analyze", "plot", str(results))
    session.log(f"the table:    {results}/results.csv (and .parquet)")
    session.log(f"the pictures: {results}/plots, overview.png first")
    session.log(f"the trail:    {out / 'runs'}")


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests, a process per core, each with one thread: threads of several would stand in each other's way."""
    run_tests(session, "constraints.txt")


@nox.session
def lowest(session: nox.Session) -> None:
    """Run all tests with the oldest versions that the packages allow; the torch of the package index is several GB."""
    run_tests(session, "constraints-lowest.txt")


def run_tests(session: nox.Session, versions: str) -> None:
    """Install both packages with all that is optional, and run the tests."""
    extras = ("-e", "packages/pico-train[trackers]", "-e", "packages/pico-analyze[dask]")
    install(session, *PACKAGES, *extras, *nox.project.dependency_groups(GROUPS, "test"), versions=versions)
    session.run("pytest", "-n", "auto", "--dist", "loadfile", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly, in both packages."""
    install(session, *PACKAGES, *nox.project.dependency_groups(GROUPS, "lint"))
    session.run("mypy")
