"""Mask secrets in a displayed config; restore them when the config is resubmitted.

Secrets are recognised by name. Patterns for environment variables are broad, because most secrets are passed in variables.
Patterns for other fields are narrow, because ``num_key_value_heads`` and ``pad_token`` are hyperparameters. Functions return
new values and never modify the config that they mask.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dstrial.config.diagnostics import KeyPath
from dstrial.config.documents import read_yaml_text, yaml_text
from dstrial.errors import ConfigError, ConfigProblem

MASK = "********"
"""Text shown in place of a secret, as in Determined 0.38.1 ``checkpoint_storage_config.go``."""

_VARIABLES = "environment_variables"
_REGISTRY = "registry_auth"
# Keys that are not secret: of `registry_auth`, and of a hyperparameter with a secret name.
_OPEN_OF_REGISTRY = ("username", "serveraddress", "server_address", "email")
_OPEN_OF_SPECIFICATION = ("type", "count", "base", "minval", "maxval")

# Names of secret environment variables, in upper case.
_VARIABLE = re.compile(
    r"SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|CONNECTION_STRING"
    r"|KEYS?$|(^|[_.-])KEY_ID$|TOKEN$|(^|[_.-])TOKENS?([_.-]|$)|[_.-](PWD|PASS|PAT|AUTH|COOKIE)$"
)
# Names that are not secret if the value is a number, such as MAX_TOKENS=512.
_PLURAL = re.compile(r"(TOKENS|KEYS)([_.-]|$)")
_URL_WITH_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
# Names of secret fields, in lower case.
_FIELD = re.compile(
    r"(^|_)(password|passwd|passphrase|secret|secrets|credential|credentials|connection_string"
    r"|(api|access|secret|private|account|encryption|signing|license|service|storage|sas|wandb|ssh)_?keys?"
    r"|access_key_id"
    r"|(api|access|auth|authentication|authorization|bearer|refresh|session|security|oauth|hub|hf|huggingface|hugging_face"
    r"|github|gitlab|git|wandb|sas|login|bot)_?tokens?)$"
)
# Places at which words of a name begin, as in apiKey or api-key.
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[-.\s]+")
# Pre-filter: a text without a match has no secrets and is not parsed. Most configs have none; every completed config has the
# key `registry_auth`, which is mostly null.
_HINT = re.compile(
    r"key|token|secret|pass|pwd|pat(?!h|t)|credential|connection|cookie|@|(?<!registry_)auth"
    r"|registry_auth[\"']?\s*:\s*(?!\s|null|~)",
    re.IGNORECASE,
)
# An assignment NAME=value in a shell line; the value may be quoted.
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
        if lower in ("token", "tokens"):
            # A string may be a credential; a number or list of strings is a count or tokens.
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
    """One leaf of a config that is secret or is tested for being secret."""

    path: KeyPath
    identity: KeyPath  # `path`, in which a variable's list index is replaced by its name
    prefix: str  # text before the secret in the same scalar, `NAME=` for a variable
    value: Any

    def __repr__(self) -> str:
        return f"Secret({self.path})"  # without the value, which would reach logs


def secrets_in(value: Any, names: SecretNames) -> list[Secret]:
    """Return the secrets of a config or of one of its sections."""
    return [leaf for leaf, is_named in _leaves(value, names) if is_named]


def _leaves(
    value: Any, names: SecretNames, path: KeyPath = (), open_keys: Sequence[str] | None = None
) -> Iterator[tuple[Secret, bool]]:
    """Yield (``Secret``, whether it is really secret) for each leaf of a config.

    If ``open_keys`` is None, ``value`` is not below a secret field. Otherwise all leaves of ``value`` are secret, except that
    leaves below keys in ``open_keys`` are skipped. Leaves that are null, booleans or empty strings are also skipped.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            name, below = str(key), open_keys
            if open_keys is not None and name.lower() in open_keys:
                continue
            if open_keys is None and name == _VARIABLES:
                yield from _variables(inner, names, (*path, key), (*path, key))
                continue
            if open_keys is None and name == _REGISTRY:
                below = _OPEN_OF_REGISTRY
            elif open_keys is None and names.has_field(name, inner):
                below = _OPEN_OF_SPECIFICATION
            yield from _leaves(inner, names, (*path, key), below)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _leaves(inner, names, (*path, index), open_keys)
    elif _is_leaf(value):
        yield Secret(path, path, "", value), open_keys is not None


def _variables(
    value: Any, names: SecretNames, path: KeyPath, identity: KeyPath
) -> Iterator[tuple[Secret, bool]]:
    """Yield (``Secret``, whether it is really secret) for each environment variable.

    ``value`` is a list of ``NAME=value``, or a mapping of names or device kinds. ``path`` and ``identity`` are those of
    ``value``.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, (list, tuple, Mapping)):
                yield from _variables(inner, names, (*path, key), (*identity, key))
            elif _is_leaf(inner):
                is_secret = names.has_variable(str(key), str(inner))
                yield Secret((*path, key), (*identity, key), "", inner), is_secret
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            name, _, inner = str(entry).partition("=")
            if isinstance(entry, str) and inner:
                is_secret = names.has_variable(name, inner)
                yield Secret((*path, index), (*identity, name), f"{name}=", inner), is_secret


def _is_leaf(value: Any) -> bool:
    return value is not None and not isinstance(value, bool) and value != ""


def masked(value: Any, names: SecretNames) -> Any:
    """Return a config with secrets masked; the same object if there are no secrets."""
    found = secrets_in(value, names)
    return _replaced(value, [(secret, MASK) for secret in found]) if found else value


def masked_json(text: str, names: SecretNames) -> str:
    """Return a JSON config with its secrets masked; ``text`` itself if it has none."""
    if not names.patterns and not _HINT.search(text):
        return text
    value = json.loads(text)
    shown = masked(value, names)
    return text if shown is value else json.dumps(shown)


def masked_yaml(text: str, names: SecretNames) -> str:
    """Return a YAML config with its secrets masked; ``text`` itself if it has none.

    Masking removes the comments. The result is "" if ``text`` is invalid YAML that may contain secrets.
    """
    if not names.patterns and not _HINT.search(text):
        return text
    try:
        value = read_yaml_text(text, "the config").value
    except ConfigError:
        return ""  # invalid YAML, in which secrets cannot be found
    shown = masked(value, names)
    return text if shown is value else yaml_text(shown)


def masked_shell(text: str, names: SecretNames) -> str:
    """Return shell lines with the values of secret variables masked."""

    def shown(match: re.Match[str]) -> str:
        return f"{match[1]}={MASK}" if names.has_variable(match[1], match[2]) else match[0]

    return _ASSIGNMENT.sub(shown, text)


def unmasked(value: Any, sources: Sequence[Any], where: str = "the config") -> Any:
    """Return a config with each mask replaced by the real secret.

    ``sources`` are configs such as a parent or template; the first one that has the secret provides it. ConfigError lists every
    mask without a secret. ``where`` names the config in messages.
    """
    found = _put_back(value, sources, where)
    return _replaced(value, found) if found else value


def unmasked_yaml(text: str, sources: Sequence[Any], where: str = "the config") -> str:
    """Return a YAML config with its masks replaced; invalid YAML is unchanged."""
    if MASK not in text:
        return text
    try:
        value = read_yaml_text(text, where).value
    except ConfigError:
        return text  # the config's check reports the syntax error
    real = unmasked(value, sources, where)
    return text if real is value else yaml_text(real)


def _put_back(value: Any, sources: Sequence[Any], where: str) -> list[tuple[Secret, Any]]:
    masks = [leaf for leaf, _ in _leaves(value, SecretNames()) if leaf.value == MASK]
    if not masks:
        return []
    known: dict[KeyPath, Any] = {}
    for source in reversed(sources):
        for leaf, _ in _leaves(source, SecretNames()):
            if leaf.value != MASK:
                known[_without_device(leaf.identity)] = known[leaf.identity] = leaf.value
    found, problems = [], []
    for mask in masks:
        real = known.get(mask.identity, known.get(_without_device(mask.identity)))
        if real is None:
            problems.append(_missing_secret(mask, where))
        else:
            found.append((mask, real))
    if problems:
        raise ConfigError(problems)
    return found


def _without_device(identity: KeyPath) -> KeyPath:
    """Return a variable's ``identity`` without its device kind; others are unchanged.

    Variables of one device kind thus match those of a list for all devices.
    """
    return (_VARIABLES, identity[-1]) if _VARIABLES in identity else identity


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
