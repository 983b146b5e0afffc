"""Import the user's trial class; explain errors in the user's files."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from dstrial.errors import TrialImportError
from dstrial.launch.tracebacks import short_traceback


def import_trial(spec: str, context_dir: Path) -> type[Any]:
    """Import ``module:Class``; prepend ``context_dir`` to ``sys.path``.

    Args:
        spec: for example ``model_def:MyTrial`` or ``package.model_def:MyTrial``.
        context_dir: the directory that holds the module.

    Raises:
        TrialImportError: the import raises, or the module has no such class. The message ends with the
        traceback of user code.

    Ranks: any; no communication.
    """
    module_name, separator, class_name = spec.partition(":")
    if not (separator and module_name and class_name):
        raise TrialImportError(
            f"--trial is {spec!r}; expected module:Class. Write model_def:MyTrial for class MyTrial in model_def.py."
        )
    find_modules_first(context_dir)
    importlib.invalidate_caches()
    module = _import_module(module_name, spec, context_dir)
    found = getattr(module, class_name, None)
    if isinstance(found, type):
        return found
    classes = [
        name
        for name, value in inspect.getmembers(module, inspect.isclass)
        if value.__module__ == module.__name__
    ]
    close = difflib.get_close_matches(class_name, classes, n=1)
    fix = (
        f"Write {module_name}:{close[0]}." if close else f"Define class {class_name} there, or name another."
    )
    raise TrialImportError(
        f"--trial is {spec!r}, and {module.__file__} has no class {class_name}; "
        f"expected one of {', '.join(classes) or '(it defines no class)'}. {fix}"
    )


def find_modules_first(context_dir: Path) -> None:
    """Make Python import modules from ``context_dir`` first, by ``sys.path``."""
    directory = str(context_dir.resolve())
    if sys.path[:1] != [directory]:
        sys.path.insert(0, directory)


def is_determined_trial(trial_class: type[Any]) -> bool:
    """Return whether a class is a trial of Determined's harness, not of dstrial."""
    packages = {base.__module__.partition(".")[0] for base in trial_class.__mro__}
    return "determined" in packages and "dstrial" not in packages


def _import_module(module_name: str, spec: str, context_dir: Path) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise TrialImportError(
                f"--trial is {spec!r}, and {context_dir} has no module {module_name}; expected an importable "
                "module. Correct the name, or pass its directory as --context-dir."
            ) from None
        raise _import_error(error, spec, context_dir) from error
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise _import_error(error, spec, context_dir) from error


def _import_error(error: BaseException, spec: str, context_dir: Path) -> TrialImportError:
    return TrialImportError(
        f"--trial is {spec!r}, and importing it fails with {type(error).__name__}; expected it to import. "
        f"Correct the line shown last.\n{short_traceback(error, context_dir).text}"
    )
