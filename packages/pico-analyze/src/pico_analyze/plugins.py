"""A user's own metrics and components: modules that the key ``plugins`` of an analysis names.

Comes in: our table, and what holds a dict ``METRICS``, a dict ``COMPONENTS``, or both: names of entry points of installed
packages, names of modules, paths of ``.py`` files. Goes out: a new table with theirs after ours; ours is never changed.
"""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeVar


class PluginError(ValueError):
    """A plugin that cannot be used; the message names it and says what is wrong with it."""


class Entry(Protocol):
    """A line of a table, which can say what is wrong with it."""

    def problem(self) -> str | None:
        """Why the entry cannot be used, None where it can."""


E = TypeVar("E", bound=Entry)


class PluginFile(ModuleType):
    """A file of a user, loaded as a module."""


TABLES = ("METRICS", "COMPONENTS")
GROUP = "pico_analyze.plugins"
"""The group of entry points, each of which names a module that holds tables."""


def merged(ours: Mapping[str, E], table_name: str, plugins: Sequence[str]) -> dict[str, E]:
    """Our table and the one that each plugin holds under ``table_name``, in the order in which they are named.

    Raises:
        PluginError: a plugin cannot be imported, has neither table, holds something else in it, or uses a name twice.
    """
    whole = dict(ours)
    kind = type(next(iter(ours.values())))
    modules: dict[str, ModuleType] = {}
    for plugin in plugins:
        module = load(plugin)
        if modules.setdefault(module.__name__, module).__file__ != module.__file__:
            raise PluginError(f"plugins: {plugin}: there is another module {module.__name__}; rename the file")
        if not any(hasattr(module, name) for name in TABLES):
            raise PluginError(f"plugins: {plugin} has no table {' or '.join(TABLES)}: a dict, name to entry")
        table = getattr(module, table_name, {})
        if not isinstance(table, Mapping):
            raise PluginError(f"plugins: {plugin}: {table_name} is a {type(table).__name__}, not a dict")
        for name, entry in table.items():
            where = f"plugins: {plugin}: {table_name}[{name!r}]"
            if not isinstance(name, str) or not name:
                raise PluginError(f"{where}: a name must be text")
            if not isinstance(entry, kind):
                needed = f"pico_analyze.{table_name.lower()}.{kind.__name__}"
                raise PluginError(f"{where} is a {type(entry).__name__}, not a {needed}")
            if name in whole:
                raise PluginError(f"{where}: a {table_name.lower()[:-1]} of that name exists already; choose another")
            if problem := entry.problem():
                raise PluginError(f"{where}: {problem}")
            whole[name] = entry
    return whole


def load(plugin: str) -> ModuleType:
    """The module of that entry point or name, or the one in the file of that path (from the working directory).

    An entry point of the group ``pico_analyze.plugins`` comes before a module of the same name. A file becomes the module
    named for it, so that import paths into it work here and in other processes. It is read anew each time: in a notebook
    the newest text counts.

    Raises:
        PluginError: there is no such module or file, or importing it fails.
    """
    try:
        if not plugin.endswith(".py"):
            return import_module(_module_name(plugin))
        path = Path(plugin).expanduser().resolve()
        module = PluginFile(path.stem)
        module.__file__ = str(path)
        code = compile(path.read_bytes(), str(path), "exec")
        _refuse_a_taken_name(plugin, module)
        before = sys.modules.get(module.__name__)
        sys.modules[module.__name__] = module
        try:
            exec(code, module.__dict__)
        except BaseException:
            sys.modules.pop(module.__name__)
            if before is not None:
                sys.modules[module.__name__] = before
            raise
        return module
    except PluginError:
        raise
    except FileNotFoundError:
        raise PluginError(f"plugins: {plugin}: there is no such file in {Path.cwd()}") from None
    except ModuleNotFoundError as error:
        hint = ""
        if not plugin.endswith(".py") and error.name and f"{plugin}.".startswith(f"{error.name}."):
            hint = "; a file of your own is named by its path, such as path/to/file.py"
        raise PluginError(f"plugins: {plugin} cannot be imported: {error}{hint}") from None
    except (Exception, SystemExit) as error:
        raise PluginError(f"plugins: {plugin} cannot be imported: {type(error).__name__}: {error}") from None


def installed() -> dict[str, list[EntryPoint]]:
    """The entry points of installed packages that an analysis can name, by name."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        found.setdefault(entry.name, []).append(entry)
    return found


def _module_name(plugin: str) -> str:
    """The module that an entry point of this name stands for; without any the name is that of a module."""
    values = sorted({entry.value for entry in installed().get(plugin, ())})
    if len(values) > 1:
        raise PluginError(f"plugins: {plugin}: several packages have an entry point of that name: {', '.join(values)}")
    if values and ":" in values[0]:
        raise PluginError(
            f"plugins: {plugin}: its entry point is {values[0]!r}; it has to be a module, without a colon"
        )
    return values[0] if values else plugin


def _refuse_a_taken_name(plugin: str, module: ModuleType) -> None:
    """A file must not stand in the place of another module of its name."""
    name = module.__name__
    if not name.isidentifier():
        raise PluginError(f"plugins: {plugin}: the name of the file must be that of a module, such as my_metrics.py")
    if name in sys.modules:
        there = sys.modules[name]
        taken = not isinstance(there, PluginFile) and getattr(there, "__file__", None) != module.__file__
    else:
        spec = find_spec(name)
        taken = spec is not None and spec.origin != module.__file__
    if taken:
        raise PluginError(f"plugins: {plugin}: there is another module {name}; rename the file")


def resolved(import_path: str) -> object:
    """What ``module:name`` means.

    Raises:
        PluginError: there is no such module, or nothing of that name in it.
    """
    module, _, name = import_path.partition(":")
    try:
        found: object = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginError(f"{import_path!r} is not module:name of something that can be imported: {error}") from None
    return found


def code_hash(import_path: str) -> str:
    """SHA-256 of the source file behind ``module:name``: what a stored value of a plugin was computed by."""
    module = import_module(import_path.partition(":")[0])
    return hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()
