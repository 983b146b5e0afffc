"""Minimal Python packages in a directory that pip can use instead of an index."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path


def wheel(directory: Path, name: str, version: str, *, requires: tuple[str, ...] = ()) -> Path:
    """Write a wheel of one module and a command that prints ``sys.prefix``."""
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


def source_distribution(directory: Path, name: str, version: str, *, build_lines: str) -> Path:
    """Write a source distribution whose build backend first runs ``build_lines``."""
    top = f"{name}-{version}"
    built = wheel(directory, name, version)
    backend = (
        f"{build_lines}\nimport shutil\ndef build_wheel(to, config_settings=None, metadata_directory=None):\n"
    )
    backend += f"    shutil.copy({built.name!r}, to)\n    return {built.name!r}\n"
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    files = {
        "pyproject.toml": project.encode(),
        "backend.py": backend.encode(),
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        built.name: built.read_bytes(),
    }
    built.unlink()
    path = directory / f"{top}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file, content in files.items():
            member = tarfile.TarInfo(f"{top}/{file}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path
