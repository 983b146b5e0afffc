"""Mask secrets in a displayed config; restore them when the config is resubmitted.

Secrets are recognised by name. Patterns for environment variables are broad, because most secrets are passed in variables and
a false positive costs little. Patterns for other fields are narrow, because ``num_key_value_heads`` and ``pad_token`` are
hyperparameters. Functions are pure; the caller keeps the real config.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import yaml

from dstrial.config.documents import DEFAULT_LIMITS, TextLimits, YamlLoader, read_yaml_text, yaml_text
from dstrial.errors import ConfigError, ConfigProblem

MASK = "********"
"""Text shown in place of a secret, as in Determined 0.38.1 ``checkpoint_storage_config.go``."""

Path: TypeAlias = "tuple[str | int, ...]"

_VARIABLES = "environment_variables"
_REGISTRY = "registry_auth"
_OPEN_OF_REGISTRY = ("username", "serveraddress", "server_address", "email")
_OPEN_OF_SPECIFICATION = ("type", "count", "base", "minval", "maxval")

_VARIABLE = re.compile(
    r"SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|CONNECTION_STRING"
    r"|KEYS?$|(^|[_.-])KEY_ID$|TOKEN$|(^|[_.-])TOKENS?([_.-]|$)|[_.-](PWD|PASS|PAT|AUTH|COOKIE)$"
)
_PLURAL = re.compile(r"(TOKENS|KEYS)([_.-]|$)")
_URL_WITH_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_FIELD = re.compile(
    r"(^|_)(password|passwd|passphrase|secret|secrets|credential|credentials|connection_string"
    r"|(api|access|secret|private|account|encryption|signing|license|service|storage|sas|wandb|ssh)_?keys?"
    r"|access_key_id"
    r"|(api|access|auth|authentication|authorization|bearer|refresh|session|security|oauth|hub|hf|huggingface|hugging_face"
    r"|github|gitlab|git|wandb|sas|login|bot)_?tokens?)$"
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[-.\s]+")
# Pre-filter: a text without any of these hints has no secrets and is not parsed. Most configs have none.
_HINTS = (
    "key",
    "token",
    "secret",
    "passw",
    "passphrase",
    "credential",
    "connection",
    "pwd",
    "_pass",
    "-pass",
)
_RARE_HINTS = ("_pat", "-pat", ".pat", ".pass", "auth", "cookie", "@")
_NO_REGISTRY = re.compile(rf"{_REGISTRY}[\"']?\s*:\s*(?:null|~)")
# YAML properties before a scalar: anchor and tag.
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")
_ASSIGNMENT = re.compile(r"""\b([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|'[^']*'|[^\s;&|]+)""")


@dataclasses.dataclass(frozen=True, slots=True)
class SecretNames:
    """Decides by name whether a value is secret; ``patterns`` are additional globs."""

    patterns: tuple[str, ...] = ()

    def has_variable(self, name: str, value: str = "") -> bool:
        """Return whether a variable's name is secret, or its value a URL with a password."""
        upper = _CAMEL.sub("_", name).upper()
        if _VARIABLE.search(upper):
            return not (_PLURAL.search(upper) and _is_number(value))
        return bool(_URL_WITH_PASSWORD.search(value)) or self._is_listed(name)

    def has_field(self, name: str, value: object) -> bool:
        """Return whether a config field, for example a hyperparameter, is secret."""
        lower = _CAMEL.sub("_", name).lower()
        if lower in (
            "token",
            "tokens",
        ):  # a string may be a credential; a number or list of strings is a count or tokens
            return isinstance(value, str)
        return bool(_FIELD.search(lower)) or self._is_listed(name)

    def _is_listed(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name.casefold(), pattern.casefold()) for pattern in self.patterns)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class Secret:
    """One secret value in a config."""

    path: Path
    identity: Path  # `path`, in which a variable's list index is replaced by its name
    prefix: str  # text before the secret in the same scalar, `NAME=` for a variable
    value: Any

    def __repr__(self) -> str:
        return f"Secret({self.path})"  # without the value, which would reach logs


def secrets_in(value: Any, names: SecretNames) -> list[Secret]:
    """Return the secrets of a config or of one of its sections."""
    return list(_Finder(names, lambda _leaf: False).below(value, ()))


@dataclasses.dataclass(frozen=True, slots=True)
class _Finder:
    """Finds the secrets of a config; also every value that ``takes`` accepts."""

    names: SecretNames
    takes: Callable[[Any], bool]

    def below(self, value: Any, path: Path) -> Iterator[Secret]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from self._field(str(key), inner, (*path, key))
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                yield from self.below(inner, (*path, index))
        elif self.takes(value):
            yield Secret(path, path, "", value)

    def _field(self, name: str, value: Any, path: Path) -> Iterator[Secret]:
        if name == _VARIABLES:
            yield from self._variables(value, path, path)
        elif name == _REGISTRY:
            yield from self._leaves(value, path, _OPEN_OF_REGISTRY)
        elif self.names.has_field(name, value):
            yield from self._leaves(value, path, _OPEN_OF_SPECIFICATION)
        else:
            yield from self.below(value, path)

    def _variables(self, value: Any, path: Path, identity: Path) -> Iterator[Secret]:
        """Yield secret variables: a ``NAME=value`` list, lists by device, or a mapping."""
        if isinstance(value, Mapping):
            for name, inner in value.items():
                if isinstance(inner, (list, tuple, Mapping)):
                    yield from self._variables(inner, (*path, name), (*identity, name))
                elif self._is_variable(str(name), str(inner)) and _is_leaf(inner):
                    yield Secret((*path, name), (*identity, name), "", inner)
        elif isinstance(value, (list, tuple)):
            for index, entry in enumerate(value):
                name, separator, inner = str(entry).partition("=")
                if isinstance(entry, str) and inner and self._is_variable(name, inner):
                    yield Secret((*path, index), (*identity, name), f"{name}{separator}", inner)

    def _is_variable(self, name: str, value: str) -> bool:
        return self.names.has_variable(name, value) or self.takes(value)

    def _leaves(self, value: Any, path: Path, are_open: Sequence[str]) -> Iterator[Secret]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if str(key).lower() not in are_open:
                    yield from self._leaves(inner, (*path, key), are_open)
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                yield from self._leaves(inner, (*path, index), are_open)
        elif _is_leaf(value):
            yield Secret(path, path, "", value)


def _is_leaf(value: Any) -> bool:
    return value is not None and not isinstance(value, bool) and value != ""


def masked(value: Any, names: SecretNames) -> Any:
    """Return a config with secrets masked; the same object if there are no secrets."""
    found = secrets_in(value, names)
    return _replaced(value, [(secret, MASK) for secret in found]) if found else value


def _may_have_secrets(text: str) -> bool:
    """Return whether a config may contain secrets and must be parsed."""
    # Every completed config has the key `registry_auth`, which is mostly null.
    lower = _NO_REGISTRY.sub("", text.lower())
    return any(hint in lower for hint in (*_HINTS, *_RARE_HINTS))


_MAX_CACHED_CHARS = 2**16


def _cached_mask(mask: Callable[[str, SecretNames], str], text: str, names: SecretNames) -> str:
    """Mask a text; cache the result if the text is small."""
    # A thousand large cached texts would fill the memory.
    return _mask_once(mask, text, names) if len(text) <= _MAX_CACHED_CHARS else mask(text, names)


@functools.lru_cache(maxsize=1024)
def _mask_once(mask: Callable[[str, SecretNames], str], text: str, names: SecretNames) -> str:
    return mask(text, names)


def masked_json(text: str, names: SecretNames) -> str:
    """Return a JSON config with its secrets masked."""
    return _cached_mask(_masked_json, text, names) if names.patterns or _may_have_secrets(text) else text


def _masked_json(text: str, names: SecretNames) -> str:
    value = json.loads(text)
    shown = masked(value, names)
    return text if shown is value else json.dumps(shown)


_STORED = TextLimits(text_bytes=2**24, num_values=10**6)
"""Limits for stored texts: the maximum that a master's settings allow for submitted configs."""


def masked_yaml(text: str, names: SecretNames) -> str:
    """Return a YAML config with its secrets masked, comments and order kept."""
    return _cached_mask(_masked_yaml, text, names) if names.patterns or _may_have_secrets(text) else text


def _masked_yaml(text: str, names: SecretNames) -> str:
    try:
        value = read_yaml_text(text, "the config", _STORED).value
    except ConfigError:
        return ""  # invalid YAML, in which secrets cannot be found
    return _replaced_yaml(text, value, [(secret, MASK) for secret in secrets_in(value, names)])


def masked_shell(text: str, names: SecretNames) -> str:
    """Return shell lines with the values of secret variables masked."""

    def shown(match: re.Match[str]) -> str:
        return f"{match[1]}={MASK}" if names.has_variable(match[1], match[2]) else match[0]

    return _ASSIGNMENT.sub(shown, text)


def unmasked(value: Any, sources: Sequence[Any], where: str = "the config") -> Any:
    """Return a config with each mask replaced by the real secret.

    ``sources`` are configs of a parent or template; the first with the secret counts. ConfigError names every mask without one.
    """
    found = _put_back(value, sources, where)
    return _replaced(value, found) if found else value


def unmasked_yaml(
    text: str, sources: Sequence[Any], where: str = "the config", limits: TextLimits = DEFAULT_LIMITS
) -> str:
    """Unmask a YAML text, keeping comments and order; return invalid YAML unchanged."""
    if MASK not in text:
        return text
    try:
        value = read_yaml_text(text, where, limits).value
    except ConfigError:
        return text  # the config's check reports the syntax error
    return _replaced_yaml(text, value, _put_back(value, sources, where))


def _put_back(value: Any, sources: Sequence[Any], where: str) -> list[tuple[Secret, Any]]:
    finder = _Finder(SecretNames(), lambda leaf: bool(leaf == MASK))
    masks = [secret for secret in finder.below(value, ()) if secret.value == MASK]
    if not masks:
        return []
    known: dict[Path, Any] = {}
    for source in reversed(sources):
        for secret in _Finder(SecretNames(), _is_leaf).below(source, ()):
            if secret.value != MASK:
                known[_without_device(secret.identity)] = secret.value
                known[secret.identity] = secret.value
    found, problems = [], []
    for secret in masks:
        real = known.get(secret.identity, known.get(_without_device(secret.identity)))
        if real is None:
            problems.append(_missing_secret(secret, where))
        else:
            found.append((secret, real))
    if problems:
        raise ConfigError(problems)
    return found


def _without_device(identity: Path) -> Path:
    """Return a variable's identity without its device kind.

    A plain list of variables applies to every kind.
    """
    if _VARIABLES in identity:
        return (_VARIABLES, identity[-1])
    return identity


def _missing_secret(secret: Secret, where: str) -> ConfigProblem:
    place = ".".join(map(str, secret.identity))
    return ConfigProblem(
        f"{where}: {place}",
        f"{MASK}, which stands for a secret where a config is shown",
        "the secret itself; this config has no parent or template that knows it",
        "Write the real value.",
    )


def _replaced(value: Any, changes: Sequence[tuple[Secret, Any]]) -> Any:
    result = {"": copy.deepcopy(value)}
    for secret, new in changes:
        inner: Any = result
        *outer, last = ("", *secret.path)
        for key in outer:
            inner = inner[key]
        inner[last] = f"{secret.prefix}{new}" if secret.prefix else new
    return result[""]


def _replaced_yaml(text: str, value: Any, changes: Sequence[tuple[Secret, Any]]) -> str:
    """Replace scalars in a YAML text; if impossible, dump the changed ``value``."""
    if not changes:
        return text
    shown = None if text.startswith("\ufeff") else _replaced_text(text, changes)  # offsets omit a BOM
    return yaml_text(_replaced(value, changes)) if shown is None else shown


def _replaced_text(text: str, changes: Sequence[tuple[Secret, Any]]) -> str | None:
    root = yaml.compose(text, Loader=YamlLoader)
    spans: dict[tuple[int, int], str] = {}
    for secret, new in changes:
        node = _node_at(root, secret.path)
        if not isinstance(node, yaml.ScalarNode):
            return None
        # A JSON string is valid YAML and never has another type.
        written = json.dumps(f"{secret.prefix}{new}" if secret.prefix else new, ensure_ascii=False)
        scalar = text[node.start_mark.index : node.end_mark.index]
        # Keep the anchor, because aliases may refer to it.
        properties = _PROPERTIES.match(scalar)
        start = node.start_mark.index + (properties.end() if properties is not None else 0)
        end = node.start_mark.index + len(scalar.rstrip())
        if node.style in ("|", ">"):
            written, end = f"{written}\n", node.end_mark.index
        spans[start, end] = written
    for (start, end), written in sorted(spans.items(), reverse=True):
        text = text[:start] + written + text[end:]
    return text


def _node_at(root: Any, path: Path) -> Any:
    node = root
    for key in path:
        if isinstance(node, yaml.MappingNode):
            node = _of_mapping(node, str(key))
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
        else:
            return None
    return node


def _of_mapping(node: yaml.MappingNode, key: str) -> Any:
    merged: list[Any] = []
    for key_node, inner in node.value:
        if str(key_node.value) == key:
            return inner
        if key_node.value == "<<":
            merged += inner.value if isinstance(inner, yaml.SequenceNode) else [inner]
    for one in merged:
        found = _of_mapping(one, key) if isinstance(one, yaml.MappingNode) else None
        if found is not None:
            return found
    return None
