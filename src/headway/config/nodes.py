"""YAML nodes to Structs, keeping for every key the line and column where it stands.

Values follow the YAML 1.2 core schema (``8.2e9`` is a number, ``on`` is text), and types are strict: no number in
quotes passes for a number. Unknown, repeated or not yet built keys are refused where they stand, with the nearest
known key. This file refuses to know what a pool is: it reads the types of whatever Struct it is given.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, TypeVar, Union, get_args, get_origin

import msgspec
import yaml

from headway.config.tree import NOT_BUILT_KEYS, Secret
from headway.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)
_INDEX = re.compile(r"\[\d+\]")
_VALIDATION_PATH = re.compile(r" - at `\$.*`$")
_MAX_NODES = 200_000  # an alias bomb unrolls to more; no pool file comes near


class _Loader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core schema's scalars only."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own attribute


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+.0123456789"),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), list(_first))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])


class NodeReader:
    """Turns the one document of a YAML text into a Struct; ``locations`` fills with every key it met."""

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.locations: dict[str, tuple[int, int]] = {}
        self._num_nodes = 0
        try:
            self._loader = _Loader(text)
            self._root = self._loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            message = " ".join(part for part in (error.context, error.problem) if part) or "is not YAML"
            raise ConfigError(
                f"not valid YAML: {message}",
                path=path,
                line=mark.line + 1 if mark else None,
                column=mark.column + 1 if mark else None,
            ) from None
        except yaml.YAMLError as error:  # a byte that YAML does not allow
            raise ConfigError(f"not valid YAML: {error}".splitlines()[0], path=path) from None

    def read(self, struct: type[T]) -> T:
        """The document as ``struct``.

        Raises:
            ConfigError: naming path, line, column and dotted key.
        """
        if self._root is None:
            raise ConfigError("the file is empty", path=self.path)
        return self._struct(self._root, struct, "", ())

    def _error(self, node: yaml.Node, key: str, message: str) -> ConfigError:
        mark = node.start_mark
        return ConfigError(message, path=self.path, key=key, line=mark.line + 1, column=mark.column + 1)

    def _value(self, node: yaml.Node, kind: object, key: str, above: tuple[yaml.Node, ...]) -> object:
        self.locations.setdefault(key, (node.start_mark.line + 1, node.start_mark.column + 1))
        self._num_nodes += 1
        if node in above or self._num_nodes > _MAX_NODES:
            raise self._error(node, key, "an anchor refers to itself or unrolls without end")
        above = (*above, node)
        options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        if NoneType in options and _is_null(node):
            return None
        options = tuple(option for option in options if option is not NoneType)
        for option in options:
            origin = get_origin(option)
            if isinstance(node, yaml.SequenceNode) and origin is list:
                (item,) = get_args(option)
                return [self._value(child, item, f"{key}[{i}]", above) for i, child in enumerate(node.value)]
            if isinstance(node, yaml.MappingNode) and origin is dict:
                members = self._members(node, key)
                return {
                    name: self._value(child, get_args(option)[1], _join(key, name), above)
                    for name, (_, child) in members.items()
                }
        structs = [option for option in options if isinstance(option, type) and issubclass(option, msgspec.Struct)]
        if structs == [Secret]:
            return Secret(str(self._leaf(node, Annotated[str, msgspec.Meta(min_length=1)], key)))
        if structs and (len(options) == 1 or isinstance(node, yaml.MappingNode)):
            return self._struct(node, structs[0], key, above)
        return self._leaf(node, kind, key)

    def _struct(self, node: yaml.Node, struct: type[T], key: str, above: tuple[yaml.Node, ...]) -> T:
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, key, f"must be a mapping of keys to values, not {_describe(node)}")
        fields = {field.name: field for field in msgspec.structs.fields(struct)}
        values: dict[str, object] = {}
        for name, (key_node, child) in self._members(node, key).items():
            dotted = _join(key, name)
            pattern = _INDEX.sub("[]", dotted)
            if pattern in NOT_BUILT_KEYS:
                raise self._error(key_node, dotted, NOT_BUILT_KEYS[pattern])
            if name not in fields:
                raise self._error(key_node, dotted, f"unknown key{did_you_mean(name, list(fields))}")
            self.locations[dotted] = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            values[name] = self._value(child, fields[name].type, dotted, above)
        for name, field in fields.items():
            if field.required and name not in values:
                raise self._error(node, _join(key, name), "is missing")
        return struct(**values)

    def _members(self, node: yaml.MappingNode, key: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Name → (key node, value node); merge keys (``<<``) fill in what the mapping itself leaves out."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, child in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                for source in child.value if isinstance(child, yaml.SequenceNode) else [child]:
                    if not isinstance(source, yaml.MappingNode) or source is node:
                        raise self._error(key_node, key, "'<<' takes a mapping or a list of mappings")
                    merged = {**self._members(source, key), **merged}
                continue
            name = self._plain(key_node, key)
            if not isinstance(name, str):
                raise self._error(key_node, key, f"a key must be text, not {_describe(key_node)}; quote it")
            if name in own:
                line = own[name][0].start_mark.line + 1
                raise self._error(key_node, _join(key, name), f"repeated key, first used in line {line}")
            own[name] = (key_node, child)
        return {**merged, **own}

    def _plain(self, node: yaml.Node, key: str) -> object:
        try:
            return self._loader.construct_object(node, deep=True)
        except yaml.MarkedYAMLError as error:
            raise self._error(node, key, f"{error.problem or 'has a value YAML cannot hold here'}") from None
        except (ValueError, OverflowError) as error:
            raise self._error(node, key, str(error)) from None

    def _leaf(self, node: yaml.Node, kind: object, key: str) -> object:
        value = self._plain(node, key)
        if isinstance(value, float) and value - value != 0.0:
            raise self._error(node, key, f"must be a finite number, not {value}")
        try:
            return msgspec.convert(value, kind, strict=True)
        except msgspec.ValidationError as error:
            message = _VALIDATION_PATH.sub("", str(error))
            choices = [choice for choice in _literals(kind) if isinstance(choice, str)]
            if choices and isinstance(value, str):
                message = f"must be one of {', '.join(choices)}, not {value!r}{did_you_mean(value, choices)}"
            raise self._error(node, key, message) from None


def did_you_mean(name: str, known: list[str]) -> str:
    """``; did you mean 'x'?`` with the nearest of ``known``, or what there is when nothing is near."""
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""


def _literals(kind: object) -> list[object]:
    found: list[object] = []
    for argument in get_args(kind):
        found.extend(_literals(argument) if get_args(argument) else [argument])
    return found


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def _describe(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "nothing" if _is_null(node) else repr(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def read_text(path: str | Path) -> str:
    """The text of a file that a user wrote.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", path=str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text (byte {error.start})", path=str(path)) from None
