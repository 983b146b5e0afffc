import pathlib

from dstrial.engine.host_memory import available_bytes

GIB = 1 << 30


def write(path: pathlib.Path, text: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def system(tmp_path: pathlib.Path, cgroups: str) -> tuple[pathlib.Path, pathlib.Path, pathlib.Path]:
    meminfo = write(tmp_path / "meminfo", f"MemTotal: 99 kB\nMemAvailable:  {8 * GIB // 1024} kB\n")
    return meminfo, write(tmp_path / "cgroup", cgroups), tmp_path / "fs"


def test_available_bytes_without_cgroup_limit_uses_meminfo(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "fs" / "job" / "memory.max", "max\n")
    write(tmp_path / "fs" / "job" / "memory.current", "5\n")
    assert available_bytes(*system(tmp_path, "0::/job\n")) == 8 * GIB


def test_tightest_cgroup_counts_page_cache_as_free(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "fs" / "job" / "memory.max", f"{4 * GIB}\n")
    write(tmp_path / "fs" / "job" / "memory.current", f"{3 * GIB}\n")
    write(tmp_path / "fs" / "job" / "memory.stat", f"anon 5\ninactive_file {GIB}\n")
    write(tmp_path / "fs" / "job" / "step" / "memory.max", "max\n")
    assert available_bytes(*system(tmp_path, "0::/job/step\n")) == 2 * GIB


def test_available_bytes_without_files_is_none(tmp_path: pathlib.Path) -> None:
    assert available_bytes(tmp_path / "a", tmp_path / "b", tmp_path / "c") is None


def test_available_bytes_works_on_this_system() -> None:
    found = available_bytes()
    assert found is None or found > 0
