"""From YAML text and ``key.sub=value`` to checked settings, or one error that lists all that is wrong.

What a section may hold is said by pydantic models derived from ``Section``; this file knows none of them.
One YAML dialect serves files and overrides: PyYAML's safe subset with the numbers of YAML 1.2 (``3e-4`` is a
number, ``"12"`` and ``010`` are text), dates as text, and no key twice in one mapping.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from pico_train.errors import UserError

Raw = dict[str, Any]
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class ConfigError(UserError):
    """What a user wrote is wrong; ``problems`` has one line for each thing."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n  ".join([f"{source}:", *problems]))


class Problem(NamedTuple):
    """A value that does not fit others; ``key`` and those it ``involves`` are relative to the section."""

    key: str
    value: object
    message: str
    involves: tuple[str, ...] = ()


class Section(BaseModel):
    """A mapping of a YAML file: strict types, no unknown keys, unchangeable."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    elsewhere: ClassVar[Mapping[str, str]] = {}  # keys that people write here and that belong elsewhere: what to do

    def problems(self) -> Iterator[Problem]:
        """What is wrong between values that are each of the right type."""
        yield from ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := list(self.problems()):
            text = "; ".join(f"{p.key}: {shown(p.value)} {p.message}" for p in problems)
            raise PydanticCustomError("problems", "{text}", {"text": text, "problems": problems})
        return self


S = TypeVar("S", bound=Section)

# ---- reading and writing YAML

_NUMBERS_1_1 = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"""[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
           |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
           |[0-9][0-9_]*[eE][-+]?[0-9]+
           |\.(?:inf|Inf|INF))$
       |\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(problem=f"the key {key.value} stands twice", problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what ``_Loader`` would otherwise not read as the text that it is."""


for _dialect in (_Loader, _Dumper):
    _dialect.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in _NUMBERS_1_1]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _dialect.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    _dialect.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def read_mapping(path: Path) -> Raw:
    """The mapping that the YAML file ``path`` holds; an empty file is an empty mapping.

    Raises:
        ConfigError: the file is missing, unreadable, no UTF-8, no YAML, or does not hold a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(str(path), [f"no such file (looked from {Path.cwd()})"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"not a text file in UTF-8 (byte {error.start})"]) from None
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from None
    raw = parse(text, str(path))
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(str(path), [f"must hold `key: value` lines at the top level, not {shown(raw)}"])
    return raw


def parse(text: str, source: str) -> Any:
    """What the YAML ``text`` says.

    Raises:
        ConfigError: it is not YAML, or a key stands twice in one mapping; the message has the line.
    """
    try:
        return yaml.load(text, _Loader)  # a safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(source, [f"{where}{what}"]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(source, [str(error)]) from None


def to_text(raw: Mapping[str, Any]) -> str:
    """``raw`` as YAML that reads back equal, in its own order."""
    return yaml.dump(raw, Dumper=_Dumper, sort_keys=False, width=110)


def read_overrides(overrides: Iterable[str]) -> Raw:
    """``key.sub=value`` settings as one nested mapping.

    The value is YAML, an empty one is null. The last one of a key wins.

    Raises:
        ConfigError: one of them is no ``key=value``.
    """
    raw: Raw = {}
    wrong = []
    for override in overrides:
        if not isinstance(override, str):
            wrong.append(f"{shown(override)}: must be text that reads key.sub=value, e.g. training.max_steps=20")
            continue
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            wrong.append(f"{override}: must read key.sub=value, e.g. training.max_steps=20")
            continue
        try:
            raw = merged(raw, nested(key, parse(text, override)))
        except ConfigError as error:
            wrong += [f"{override}: {problem}" for problem in error.problems]
    if wrong:
        raise ConfigError("command line", wrong)
    return raw


# ---- nested and dotted


def nested(key: str, value: Any) -> Raw:
    """``a.b`` and 1 as ``{a: {b: 1}}``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def merged(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> Raw:
    """``raw`` with ``changes`` laid over it, mapping by mapping."""
    result = dict(raw)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def flattened(raw: Mapping[str, Any], prefix: str = "") -> Raw:
    """The leaves of ``raw`` by dotted key; a list is a leaf, and so is an empty mapping."""
    result: Raw = {}
    for key, value in raw.items():
        if isinstance(value, dict) and value:
            result |= flattened(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def covers(key: str, other: str) -> bool:
    """Whether one of two dotted keys is the other or a section that holds it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


# ---- checking


def validated(section: type[S], raw: Mapping[str, Any], source: str) -> S:
    """``raw`` as a ``section``; a sub-section that is null counts as missing.

    What does not fit is set aside and the rest is checked again, so that one error can list everything. A
    check that looked at a key which is wrong already is not reported: its verdict would be about a default.

    Raises:
        ConfigError: all that is wrong with ``raw``, one line each: full key, value, what is allowed.
    """
    lines: list[str] = []
    aside: set[str] = set()
    rest = without_null_sections(section, raw)
    while True:
        try:
            config = section.model_validate(rest)
        except ValidationError as error:
            found = explained(section, rest, error)
        else:
            break
        lines += [line for line, keys in found if not any(covers(key, old) for key in keys for old in aside)]
        aside |= {key for _, keys in found for key in keys}
        rest = without(rest, aside)
    if lines:
        raise ConfigError(source, lines)
    return config


def without_null_sections(section: type[Section], raw: Mapping[str, Any]) -> Raw:
    """``raw`` without the sub-sections that are null, and with every key as text (YAML has others too)."""
    result = {str(key): value for key, value in raw.items()}
    for key, sub in sub_sections(section).items():
        if key in result and result[key] is None:
            del result[key]
        elif isinstance(result.get(key), dict):
            result[key] = without_null_sections(sub, result[key])
    return result


def without(raw: Mapping[str, Any], keys: set[str], prefix: str = "") -> Raw:
    """``raw`` without the dotted ``keys``."""
    return {
        key: without(value, keys, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in raw.items()
        if f"{prefix}{key}" not in keys
    }


def explained(section: type[Section], raw: Raw, error: ValidationError) -> list[tuple[str, tuple[str, ...]]]:
    """Each thing that ``error`` says about ``raw``, as a line for the user, with the keys it is about."""
    found: dict[str, tuple[str, ...]] = {}
    for item in error.errors():
        match item["type"]:
            case "extra_forbidden":
                key = ".".join(map(str, item["loc"]))
                found[f"{key}: unknown key; {suggestion(section, key)}"] = (key,)
            case "problems":
                prefix = "".join(f"{part}." for part in item["loc"])
                for problem in item["ctx"]["problems"]:
                    keys = tuple(prefix + key for key in (problem.key, *problem.involves))
                    found[f"{keys[0]}: {shown(problem.value)} {problem.message}"] = keys
            case _:
                key, value, schema = at(section, raw, item["loc"])
                found[f"{key}: {shown(value)} is not allowed; allowed: {in_words(schema)}"] = (key,)
    return list(found.items())


def at(section: type[Section], raw: Raw, loc: Sequence[int | str]) -> tuple[str, Any, Raw]:
    """Dotted key, value and JSON schema of the setting that ``loc`` points at or into (an item, a branch)."""
    keys: list[str] = []
    value: Any = raw
    owner = section
    for part in map(str, loc):
        keys.append(part)
        value = value[part]
        if part not in sub_sections(owner) or not isinstance(value, dict):
            break
        owner = sub_sections(owner)[part]
    schema = owner.model_json_schema()
    leaf = schema["properties"][keys[-1]]
    if keys[-1] in sub_sections(owner):
        names = ", ".join(sub_sections(owner)[keys[-1]].model_fields)
        leaf = {"description": f"a section with the keys {names}"}
    return ".".join(keys), value, leaf


def sub_sections(section: type[Section]) -> dict[str, type[Section]]:
    """The fields of ``section`` that are sections themselves."""
    return {
        name: field.annotation
        for name, field in section.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


def all_keys(section: type[Section], prefix: str = "") -> list[str]:
    """The dotted keys of all leaves below ``section``."""
    keys = []
    for name in section.model_fields:
        sub = sub_sections(section).get(name)
        keys += all_keys(sub, f"{prefix}{name}.") if sub else [f"{prefix}{name}"]
    return keys


def all_sections(section: type[Section], prefix: str = "") -> list[str]:
    """The dotted names of all sections below ``section``."""
    names = []
    for name, sub in sub_sections(section).items():
        names += [f"{prefix}{name}", *all_sections(sub, f"{prefix}{name}.")]
    return names


# ---- words


def shown(value: object) -> str:
    """``value`` as it stands in a message: like in the file, on one line, not too long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def in_words(schema: Mapping[str, Any]) -> str:
    """What a JSON schema allows."""
    if "anyOf" in schema:
        branches = sorted(schema["anyOf"], key=lambda branch: branch.get("type") != "null")
        return " or ".join(map(in_words, branches))
    if "const" in schema:
        note = f" ({schema['description']})" if "description" in schema else ""
        return f"{shown(schema['const'])}{note}"
    if "enum" in schema:
        return "one of " + ", ".join(map(shown, schema["enum"]))
    match schema.get("type"):
        case "integer" | "number" as kind:
            names = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
            bounds = " and ".join(f"{sign} {schema[name]}" for name, sign in names.items() if name in schema)
            return f"a {'whole ' if kind == 'integer' else ''}number {bounds}".rstrip()
        case "string":
            return "text that is not empty" if "minLength" in schema else "text"
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "array" if "prefixItems" in schema:
            return f"a list of {len(schema['prefixItems'])}, each {in_words(schema['prefixItems'][0])}"
        case "array":
            return f"a list, each item {in_words(schema['items'])}"
        case _:
            return str(schema["description"])


def suggestion(section: type[Section], unknown: str) -> str:
    """The valid key or section that ``unknown`` most likely means; where none is like it, what its section holds."""
    keys = all_keys(section)
    if unknown in keys:
        return f"in a file, write it as sections: {unknown.replace('.', ': {')}: ...{'}' * unknown.count('.')}"
    word, (top, _, _), (parent, _, _) = last_part(unknown), unknown.partition("."), unknown.rpartition(".")
    initials = "".join(part[0] for part in word.split("_") if part)

    def likeness(key: str) -> float:
        name = last_part(key)
        if name == initials and len(name) > 1:  # learning_rate, lr
            return 1.0
        ends = [name.split("_", n)[-1] for n in range(name.count("_") + 1)]  # attention_n_heads, n_heads, heads
        near = max((0.9 if n else 1.0) * difflib.SequenceMatcher(None, word, end).ratio() for n, end in enumerate(ends))
        return near + 0.05 * (key.partition(".")[0] == top) + 0.05 * (key.rpartition(".")[0] == parent)

    known = [*(key for key in keys if not idle(section, key)), *all_sections(section)]
    known += [] if parent else section.elsewhere
    best = max(map(likeness, known))
    nearest = [key for key in known if likeness(key) == best]
    nearest.sort(key=lambda key: -difflib.SequenceMatcher(None, unknown, key).ratio())
    if best >= 0.7:
        return section.elsewhere.get(nearest[0]) or f"did you mean {' or '.join(nearest[:3])}?"
    owner = section
    for part in parent.split(".") if parent else ():
        owner = sub_sections(owner)[part]
    return f"{parent or 'the top level'} has {', '.join(owner.model_fields)}"


def idle(section: type[Section], key: str) -> bool:
    """Whether the dotted ``key`` is marked as deprecated: read, and without effect."""
    name, dot, rest = key.partition(".")
    if dot:
        return idle(sub_sections(section)[name], rest)
    extra = section.model_fields[name].json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("deprecated"))


def last_part(key: str) -> str:
    """The name at the end of a dotted key, in one spelling: ``Num-Heads`` as ``n_heads``."""
    return re.sub("^num_", "n_", key.rpartition(".")[2].lower().replace("-", "_"))


def name_problem(name: str) -> str | None:
    """What is wrong with ``name`` as the name of a run or suite, which becomes a folder."""
    if NAME.fullmatch(name):
        return None
    return "must consist of letters, digits, '.', '_' and '-', and not start with '.' (it becomes a folder)"
