"""One suite file -> many runs that differ only in what it varies.

A suite has ``base:``, a run, and ``vary:``, either a list of runs by name with the keys that each sets, or a
mapping of keys to lists of values, whose grid is taken. A file with neither is one run. Precedence: defaults <
base < vary < overrides; an override of what ``vary`` sets is refused.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pico_train.config import RunConfig, load_config, with_run_name
from pico_train.errors import UserError
from pico_train.strict_yaml import (
    ConfigError,
    Raw,
    covers,
    flattened,
    merged,
    name_problem,
    nested,
    read_mapping,
    read_overrides,
    shown,
    validated,
)

KEYS = ("name", "base", "vary")
RUN_NAME = "checkpointing.run_name"
IN_PYTHON = Path("configuration")  # stands in messages where there is no file


@dataclass(frozen=True)
class Suite:
    """Runs to train one after the other. ``name`` is None for a single run; messages name ``path``."""

    name: str | None
    path: Path
    runs: tuple[RunConfig, ...]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Suite:
    """The suite, or the run as a suite of one, that the YAML file ``path`` describes.

    Raises:
        ConfigError: the file cannot be read, or all that is wrong with what it says, in any of its runs.
    """
    path = Path(path)
    raw = read_mapping(path)
    if is_suite(raw):
        return suite_of(raw, read_overrides(overrides), path, default_name=path.stem)
    return Suite(None, path, (load_config(path, overrides),))


def as_suite(config: str | Path | Mapping[str, Any] | RunConfig | Suite, overrides: Sequence[str] = ()) -> Suite:
    """What ``load`` returns, from a file, the same as a mapping, or settings that are made already.

    Raises:
        ConfigError: as ``load``; no name is given and there is no file to take it from; overrides of a ``Suite``.
    """
    if isinstance(config, str | Path):
        return load(config, overrides)
    changes = read_overrides(overrides)
    if isinstance(config, Suite):
        if changes:
            raise ConfigError(str(config.path), ["a suite that is loaded takes no overrides; give them to load"])
        return config
    raw = config.model_dump() if isinstance(config, RunConfig) else dict(config)
    if is_suite(raw):
        return suite_of(raw, changes, IN_PYTHON, default_name=None)
    run = validated(RunConfig, merged(raw, changes), str(IN_PYTHON))
    if run.checkpointing.run_name is None:
        raise ConfigError(str(IN_PYTHON), [f"{RUN_NAME}: null takes the name of the file, and there is none; set it"])
    return Suite(None, IN_PYTHON, (run,))


def selected(suite: Suite, only: Sequence[str] = (), shard: str | None = None) -> Suite:
    """The part of ``suite`` that one process trains; it may be empty.

    Args:
        only: names of runs, with or without the suite's before them; none = all.
        shard: ``"i/n"``, 1 <= i <= n: of these runs, in the suite's order, number i, i + n, i + 2n ... counted from 1.

    Raises:
        UserError: there is no run of that name, or ``shard`` is not of that form.
    """
    runs = suite.runs
    if only:
        folders = [str(run.checkpointing.run_name) for run in runs]
        names = folders if suite.name is None else [folder.removeprefix(f"{suite.name}-") for folder in folders]
        for name in only:
            if name not in names and name not in folders:
                near = get_close_matches(name, names, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise UserError(f"--only {name}: {suite.path} has no such run{hint}; there are: {', '.join(names)}")
        runs = tuple(run for run, *known in zip(runs, names, folders, strict=True) if not set(only).isdisjoint(known))
    if shard is not None:
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", shard)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"--shard {shard}: must be i/n with i from 1 to n, for example 1/4, 2/4, 3/4 and 4/4")
        runs = runs[int(match[1]) - 1 :: int(match[2])]
    return replace(suite, runs=runs)


def is_suite(raw: Mapping[str, Any]) -> bool:
    """Whether ``raw`` describes a suite rather than a run."""
    return "base" in raw or "vary" in raw


def suite_of(raw: Raw, overrides: Raw, path: Path, default_name: str | None) -> Suite:
    """The suite that ``raw`` describes, each run with ``overrides`` laid over it.

    Raises:
        ConfigError: all that is wrong with ``raw``, once for all runs that it is wrong in.
    """
    overrides = dict(overrides)
    name = overrides.pop("name", None) or raw.get("name") or default_name
    base = raw.get("base") or {}
    wrong = [f"{key}: unknown key; {belongs(key)}" for key in raw if key not in KEYS]
    if not isinstance(name, str):
        wrong.append(f"name: {shown(name)} is not allowed; allowed: text, the name of the suite")
    elif message := name_problem(name):
        wrong.append(f"name: {shown(name)} {message}")
    if not isinstance(base, dict):
        wrong.append(f"base: {shown(base)} is not allowed; allowed: a mapping, the run that the others vary")
    variants, faults = varied(raw.get("vary"))
    wrong += faults
    if wrong:
        raise ConfigError(str(path), wrong)
    assert isinstance(name, str)

    varied_keys = {key for _, changes in variants for key in flattened(changes)}
    wrong = [
        f"{key}: vary sets it, so an override would make the runs the same; edit vary instead"
        for key in flattened(overrides)
        if any(covers(key, other) for other in varied_keys)
    ]
    parts = (base, overrides, *(changes for _, changes in variants))
    if any(flattened(part).get(RUN_NAME) is not None for part in parts):
        wrong.append(f"{RUN_NAME}: a suite names its runs <suite>-<name>; use the key `name` of the suite")
    if wrong:
        raise ConfigError(str(path), wrong)
    assert isinstance(name, str)
    return Suite(name, path, runs_of(base, variants, overrides, name, path))


def runs_of(
    base: Raw, variants: Sequence[tuple[str, Raw]], overrides: Raw, suite: str, path: Path
) -> tuple[RunConfig, ...]:
    """One run per variant, all of them different.

    Raises:
        ConfigError: what is wrong in any run, or two runs that are the same.
    """
    runs: dict[RunConfig, str] = {}
    wrong: dict[str, list[str]] = {}
    for name, changes in variants:
        try:
            run = validated(RunConfig, merged(merged(base, changes), overrides), str(path))
        except ConfigError as error:
            for line in error.problems:
                wrong.setdefault(line, []).append(name)
            continue
        if run in runs:
            wrong[f"the same run as {runs[run]}"] = [name]
        runs[run] = name
    if wrong:
        lines = [
            line if len(names) == len(variants) else f"{', '.join(names)}: {line}" for line, names in wrong.items()
        ]
        raise ConfigError(str(path), lines)
    return tuple(with_run_name(run, f"{suite}-{name}") for run, name in runs.items())


def varied(vary: object) -> tuple[list[tuple[str, Raw]], list[str]]:
    """The name and the nested changes of each run that ``vary`` asks for, and what is wrong with it."""
    if isinstance(vary, list) and vary:
        variants, wrong = listed(vary)
    elif isinstance(vary, dict) and vary:
        variants, wrong = grid(vary)
    else:
        return [], [
            f"vary: {shown(vary)} is not allowed; allowed: a list of {{name: small, model.d_model: 64}}, "
            "or a mapping of keys to lists of values"
        ]
    names = [name for name, _ in variants]
    twice = dict.fromkeys(name for name in names if names.count(name) > 1)
    return variants, wrong + [f"vary: two runs have the name {shown(name)}" for name in twice]


def listed(items: Sequence[object]) -> tuple[list[tuple[str, Raw]], list[str]]:
    """The variants of ``[{name: small, model.d_model: 64}, ...]``, and what is wrong with them."""
    variants: list[tuple[str, Raw]] = []
    wrong = []
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            wrong.append(f"vary.{number}: {shown(item)} is not allowed; allowed: {{name: small, model.d_model: 64}}")
            continue
        name = item.get("name")
        if not isinstance(name, str):
            wrong.append(f"vary.{number}.name: {shown(name)} is not allowed; allowed: text, the name of the run")
        elif message := name_problem(name):
            wrong.append(f"vary.{number}.name: {shown(name)} {message}")
        else:
            variants.append((name, unfolded({key: value for key, value in item.items() if key != "name"})))
    return variants, wrong


def grid(lists: Mapping[Any, Any]) -> tuple[list[tuple[str, Raw]], list[str]]:
    """The variants of ``{model.d_model: [32, 64], seeds.weights: [0, 1]}``, and what is wrong with them."""
    wrong = [
        f"vary.{key}: {shown(values)} is not allowed; allowed: a list of values"
        for key, values in lists.items()
        if not isinstance(values, list) or not values
    ]
    if wrong:
        return [], wrong
    keys = [str(key) for key in lists]
    return [
        (
            "_".join(f"{key.rpartition('.')[2]}-{in_a_name(value)}" for key, value in zip(keys, values, strict=True)),
            unfolded(dict(zip(keys, values, strict=True))),
        )
        for values in itertools.product(*lists.values())
    ], []


def unfolded(changes: Mapping[Any, Any]) -> Raw:
    """``changes`` with each dotted key as nested mappings."""
    raw: Raw = {}
    for key, value in changes.items():
        raw = merged(raw, nested(str(key), value))
    return raw


def in_a_name(value: object) -> str:
    """``value`` as a part of the name of a folder."""
    if isinstance(value, list):
        return "-".join(map(in_a_name, value))
    return re.sub(r"[^A-Za-z0-9._-]+", "-", value if isinstance(value, str) else shown(value))


def belongs(key: object) -> str:
    """Where an unknown key of a suite belongs."""
    if key in RunConfig.model_fields:
        return f"a section of the runs: put it below base, as base: {{{key}: ...}}"
    return f"a suite has {', '.join(KEYS)}"


def json_schema() -> dict[str, Any]:
    """The JSON schema of a suite's YAML file."""
    run = RunConfig.model_json_schema()
    sections = run.pop("$defs")
    one = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    return {
        "title": "Suite",
        "description": "Runs that differ only in what the suite varies.",
        "type": "object",
        "additionalProperties": False,
        "required": ["vary"],
        "properties": {
            "name": {"type": "string", "description": "name of the suite; without it, the name of the file"},
            "base": {"$ref": "#/$defs/RunConfig", "description": "what all runs have in common"},
            "vary": {
                "description": "runs by name with the keys that each sets, or a grid: keys with lists of values",
                "anyOf": [
                    {"type": "array", "minItems": 1, "items": one},
                    {
                        "type": "object",
                        "minProperties": 1,
                        "additionalProperties": {"type": "array", "minItems": 1},
                    },
                ],
            },
        },
        "$defs": {"RunConfig": run, **sections},
    }
