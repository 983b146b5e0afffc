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


def test_the_machine_answers_where_no_group_is_limited(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "fs" / "job" / "memory.max", "max\n")
    write(tmp_path / "fs" / "job" / "memory.current", "5\n")
    assert available_bytes(*system(tmp_path, "0::/job\n")) == 8 * GIB


def test_the_tightest_group_counts_with_its_page_cache_as_free(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "fs" / "job" / "memory.max", f"{4 * GIB}\n")
    write(tmp_path / "fs" / "job" / "memory.current", f"{3 * GIB}\n")
    write(tmp_path / "fs" / "job" / "memory.stat", f"anon 5\ninactive_file {GIB}\n")
    write(tmp_path / "fs" / "job" / "step" / "memory.max", "max\n")
    assert available_bytes(*system(tmp_path, "0::/job/step\n")) == 2 * GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "fs" / "job" / "memory.max", "10\n")
    write(tmp_path / "fs" / "job" / "memory.current", "11\n")
    assert available_bytes(*system(tmp_path, "0::/job\n")) == 0


def test_a_system_that_says_nothing_is_no_limit(tmp_path: pathlib.Path) -> None:
    assert available_bytes(tmp_path / "a", tmp_path / "b", tmp_path / "c") is None


def test_this_system_can_be_asked() -> None:
    found = available_bytes()
    assert found is None or found > 0
