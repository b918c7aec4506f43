"""From YAML text and ``key.sub=value`` to checked settings, or one error that lists all that is wrong.

What a section may hold is said by pydantic models derived from ``Section``; this file knows none of them.
One YAML dialect serves files and overrides: PyYAML's safe subset with the numbers of YAML 1.2 (``3e-4`` is a
number, ``"12"`` and ``010`` are text), dates as text, and no key twice in one mapping.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

Raw = dict[str, Any]


class ConfigError(ValueError):
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
    if_unknown: ClassVar[str] = ""
    """What to say of an unknown ``{key}`` that is not like any key of this section."""

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

_YAML_1_1 = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp")}
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"""[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?   # 3. 3.5 3.5e-4
           |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?              # .5 .5e3
           |[0-9][0-9_]*[eE][-+]?[0-9]+                     # 3e-4, text in YAML 1.1
           |\.(?:inf|Inf|INF))$
       |\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - as the base class has it
        first: [(tag, pattern) for tag, pattern in rules if tag not in _YAML_1_1]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(problem=f"the key {key.value} stands twice", problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what ``_Loader`` would otherwise not read as the text that it is; never writes aliases."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _dialect in (_Loader, _Dumper):
    _dialect.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    _dialect.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def read_mapping(path: Path) -> Raw:
    """The mapping that the YAML file ``path`` holds; an empty file is an empty mapping.

    Raises:
        ConfigError: the file is missing, unreadable, no UTF-8, no YAML, or does not hold a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
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
    return yaml.dump(raw, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


# ---- overrides


def overridden(raw: Raw, overrides: Sequence[str]) -> Raw:
    """``raw`` with ``key.sub=value`` settings laid over it.

    The value is YAML, an empty one is null; a number in the key is an index into a list. The last one wins.

    Raises:
        ConfigError: one of them is no ``key=value``, or points behind the end of a list.
    """
    wrong = []
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            wrong.append(f"{override}: must read key.sub=value, e.g. metrics.0.target_checkpoint=100")
            continue
        try:
            raw = with_value(raw, parts, parse(text, override))
        except (ConfigError, IndexError) as error:
            problems = error.problems if isinstance(error, ConfigError) else [str(error)]
            wrong += [f"{override}: {problem}" for problem in problems]
    if wrong:
        raise ConfigError("command line", wrong)
    return raw


def with_value(tree: Any, parts: Sequence[str], value: Any) -> Any:
    """``tree`` with ``value`` at the key ``parts``; a copy, because YAML aliases share parts."""
    if not parts:
        return value
    first, rest = parts[0], parts[1:]
    if isinstance(tree, list) and first.isdecimal():
        index = int(first)
        if index >= len(tree):
            has = f"0 to {len(tree) - 1}" if tree else "no entries"
            raise IndexError(f"there is no entry {index}; the list has {has}")
        return [*tree[:index], with_value(tree[index], rest, value), *tree[index + 1 :]]
    mapping = tree if isinstance(tree, dict) else {}
    return {**mapping, first: with_value(mapping.get(first), rest, value)}


def attributed(error: ConfigError, overrides: Sequence[str]) -> ConfigError:
    """The same error, in which what an override has set is named by the override rather than by the file."""
    problems: list[str] = []
    for problem in error.problems:
        key, _, what = problem.partition(": ")
        setting = next((text for text in reversed(overrides) if covers(key, text.partition("=")[0].strip())), None)
        problems.append(
            problem if setting is None else f"{setting}: {what if setting.startswith(f'{key}=') else problem}"
        )
    if not set(problems) & set(error.problems):
        return ConfigError("command line", problems)
    return ConfigError(", with ".join([error.source, *overrides]), problems)


# ---- checking


def validated(section: type[S], raw: Mapping[str, Any], source: str) -> S:
    """``raw`` as a ``section``; a sub-section that is null counts as missing.

    Raises:
        ConfigError: all that is wrong with ``raw``, one line each: full key, value, what is allowed.
    """
    lines: list[str] = []
    config = checked(section, raw, "", lines, section)
    if lines or config is None:
        raise ConfigError(source, lines)
    return config


def checked(section: type[S], raw: Mapping[str, Any], prefix: str, lines: list[str], root: type[Section]) -> S | None:
    """``raw`` as a ``section``, or None when something in it is wrong; what is wrong is added to ``lines``.

    Sections below are checked first, each on its own. Then what does not fit is set aside and the rest is
    checked again, so that one error can list everything. A check that looked at a key which is wrong already
    is not reported: its verdict would be about a default.
    """
    n_lines = len(lines)
    rest: Raw = {}
    aside: set[str] = set()
    for key, value in raw.items():
        annotation = section.model_fields[key].annotation if key in section.model_fields else None
        if isinstance(value, dict) and (below := section_in(annotation)):
            rest[key] = checked(below, value, f"{prefix}{key}.", lines, root)
            if rest[key] is None:
                del rest[key]
                aside.add(key)
        elif isinstance(value, list) and (below := item_section(annotation)):
            rest[key] = []
            for i, item in enumerate(value):
                made = None
                if isinstance(item, dict):
                    made = checked(below, item, f"{prefix}{key}.{i}.", lines, root)
                else:
                    keys = f"a mapping with the keys {', '.join(below.model_fields)}"
                    lines.append(f"{prefix}{key}.{i}: {shown(item)} is not allowed; allowed: {keys}")
                rest[key].append(made)
            if None in rest[key]:
                aside.add(key)
                rest[key] = [made for made in rest[key] if made is not None]
        elif value is None and section_in(annotation) is annotation:
            continue  # a section that is null
        else:
            rest[key] = value
    for _ in range(2):  # the values, then what must fit between those that are right
        try:
            config = section.model_validate(rest)
        except ValidationError as error:
            found = explained(section, rest, prefix, error, root)
        else:
            return config if len(lines) == n_lines else None
        new = {line: keys for line, keys in found.items() if not any(covers(k, old) for k in keys for old in aside)}
        lines += new
        aside |= {key for keys in new.values() for key in keys}
        rest = {key: value for key, value in rest.items() if key not in aside}
    return None


def explained(
    section: type[Section], raw: Raw, prefix: str, error: ValidationError, root: type[Section]
) -> dict[str, tuple[str, ...]]:
    """Each thing that ``error`` says about ``raw``, as a line for the user, with the keys it is about."""
    found: dict[str, tuple[str, ...]] = {}
    for item in error.errors():
        key = str(item["loc"][0]) if item["loc"] else ""
        match item["type"]:
            case "extra_forbidden":
                found[f"{prefix}{key}: unknown key; {suggestion(section, key, prefix, root)}"] = (key,)
            case "problems":
                for problem in item["ctx"]["problems"]:
                    line = f"{prefix}{problem.key}: {shown(problem.value)} {problem.message}"
                    found[line] = (problem.key, *problem.involves)
            case "invalid_key":
                found[f"{prefix}{key}: a key must be text; put it in quotes"] = (key,)
            case "missing":
                found[f"{prefix}{key}: missing; needed: {allowed(section, key)}"] = (key,)
            case _:
                found[f"{prefix}{key}: {shown(raw[key])} is not allowed; allowed: {allowed(section, key)}"] = (key,)
    return found


def section_in(annotation: Any) -> type[Section] | None:
    """The section that ``annotation`` is, or has among its alternatives."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        return next(filter(None, map(section_in, get_args(annotation))), None)
    return None


def item_section(annotation: Any) -> type[Section] | None:
    """The section that the items of ``annotation``, a tuple, are."""
    return section_in(get_args(annotation)[0]) if get_origin(annotation) is tuple else None


def covers(key: str, other: str) -> bool:
    """Whether one of two dotted keys is the other or a section that holds it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


# ---- words


def shown(value: object) -> str:
    """``value`` as it stands in a message: like in the file, on one line, not too long."""
    text = json.dumps(value, ensure_ascii=False, default=_plain)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain(value: object) -> object:
    return value.model_dump() if isinstance(value, BaseModel) else str(value)


def allowed(section: type[Section], key: str) -> str:
    """What the key may be, in words."""
    schema = section.model_json_schema()
    return in_words(schema["properties"][key], schema.get("$defs", {}))


def in_words(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """What a JSON schema allows."""
    if "$ref" in schema:
        return in_words(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return ", or ".join(in_words(branch, definitions) for branch in schema["anyOf"])
    if "const" in schema:
        return shown(schema["const"])
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
        case "array":
            return f"a list, each item {in_words(schema['items'], definitions)}"
        case "object" if "properties" in schema:
            return f"a mapping with the keys {', '.join(schema['properties'])}"
        case "object":
            return f"a mapping of text to {in_words(schema['additionalProperties'], definitions)}"
        case unknown:
            raise AssertionError(f"no words for a schema of type {unknown}")


def suggestion(section: type[Section], unknown: str, prefix: str, root: type[Section]) -> str:
    """The valid key that ``unknown`` most likely means, in its section or elsewhere; else what there is."""
    if "." in unknown:
        return f"in a file, write it as sections: {unknown.replace('.', ': {')}: ...{'}' * unknown.count('.')}"
    word = unknown.lower().replace("-", "_")

    def likeness(key: str) -> float:
        return difflib.SequenceMatcher(None, word, key.rpartition(".")[2]).ratio()

    own = max((f"{prefix}{name}" for name in section.model_fields), key=likeness)
    any_ = max(all_keys(root), key=likeness)
    for key, enough in ((own, 0.7), (any_, 1.0 if section.if_unknown else 0.7)):
        if likeness(key) >= enough:
            return f"did you mean {key}?"
    if section.if_unknown:
        return section.if_unknown.format(key=unknown)
    where = prefix.removesuffix(".") or "the top level"
    return f"the nearest is {own}; {where} has {', '.join(section.model_fields)}"


def all_keys(section: type[Section], prefix: str = "") -> list[str]:
    """The dotted keys of all leaves below ``section``; ``N`` stands for the place in a list."""
    keys = []
    for name, field in section.model_fields.items():
        if item := item_section(field.annotation):
            keys += all_keys(item, f"{prefix}{name}.N.")
        elif below := section_in(field.annotation):
            keys += all_keys(below, f"{prefix}{name}.")
        keys.append(f"{prefix}{name}")
    return keys


def folder_name_problem(name: str) -> str | None:
    """What is wrong with ``name`` as the name of a folder of ours."""
    if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        return None
    return "must consist of letters, digits, '.', '_' and '-', and not start with '.' (it becomes a folder)"
