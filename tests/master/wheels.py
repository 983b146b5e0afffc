"""Packages as small as they can be, in a directory that pip takes instead of an index."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path


def wheel(directory: Path, name: str, version: str, *, requires: tuple[str, ...] = ()) -> Path:
    """Write a wheel of one module, with ``__version__``, and a command of the same name that prints ``sys.prefix``."""
    info = f"{name}-{version}.dist-info"
    module = f'__version__ = "{version}"\ndef main():\n    import sys\n    print("{name} of", sys.prefix)\n'
    files = {
        f"{name}.py": module,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {line}\n" for line in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},"
        f"{len(text.encode())}\n"
        for path, text in files.items()
    )
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(file, text)
    return path


def source_distribution(directory: Path, name: str, version: str, *, setup_lines: str) -> Path:
    """Write a source distribution whose ``setup.py`` runs ``setup_lines`` first."""
    top = f"{name}-{version}"
    files = {
        "setup.py": f"{setup_lines}\nfrom setuptools import setup\n"
        f"setup(name={name!r}, version={version!r}, py_modules=[{name!r}])\n",
        f"{name}.py": f'__version__ = "{version}"\n',
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    }
    path = directory / f"{top}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file, text in files.items():
            member = tarfile.TarInfo(f"{top}/{file}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path
