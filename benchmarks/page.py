"""Measure the master's page in a real browser, and the master beneath 20 open pages.

Usage: ``python benchmarks/page.py [--experiments N] [--trials N] [--points N] [--pages N] [--seconds S] [--json FILE]``

Prints Markdown tables; see the README beside this file for how to read them. Starts a master of its own in a temporary directory
and on a free port, whose database is filled while it is down. Needs Chromium and playwright.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import pathlib
import shutil
import sqlite3
import statistics
import tempfile
import threading
import time
import uuid
from typing import Any
from urllib.parse import urlsplit

from dstrial.testing.master import MasterForTest, master_for_test

CONFIG = {
    "name": "filled",
    "entrypoint": "python3 train.py",
    "hyperparameters": {
        "global_batch_size": 64,
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
        "layers": {"type": "int", "minval": 1, "maxval": 8},
    },
    "searcher": {"name": "random", "metric": "loss", "smaller_is_better": True, "max_trials": 1000},
    "resources": {"slots_per_trial": 1},
    "records_per_epoch": 6400,
    "checkpoint_storage": {"type": "shared_fs", "host_path": "/nonexistent"},
}
WATCH = """
window.marks = {};
const look = () => {
  if (!window.marks.rows && document.querySelector('tbody tr[data-idx]')) window.marks.rows = performance.now();
  const plot = document.querySelector('.plot');
  const count = Number(/(\\d+) curves$/.exec(plot?.getAttribute('aria-label') ?? '')?.[1] ?? 0);
  const isBusy = plot?.getAttribute('aria-busy') === 'true';
  if (!window.marks.first_curves && count) window.marks.first_curves = performance.now();
  if (count !== window.marks.count || isBusy !== window.marks.isBusy)
    Object.assign(window.marks, { count, isBusy, curves: performance.now() });
};
new PerformanceObserver((list) => {
  for (const task of list.getEntries())
    if (window.marks.first_curves < task.startTime) window.marks.longest = Math.max(window.marks.longest ?? 0, task.duration);
}).observe({ type: 'longtask' });
new MutationObserver(look).observe(document, { subtree: true, childList: true, attributes: true });
"""
# How long something takes until the frame after it has changed what is seen.
TIMED = """async ([action, condition]) => {
  const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
  await frame();
  const start = performance.now();
  eval(action);
  for (;;) { await frame(); if (eval(condition)) break; if (performance.now() - start > 20000) return -1; }
  await frame();
  return performance.now() - start;
}"""
SORT = (
    "document.querySelectorAll('th button')[{idx}].click()",
    "document.querySelectorAll('th button')[{idx}].closest('th').getAttribute('aria-sort') === '{order}'",
)
FILTER = (
    "(() => {{ const box = document.querySelector('input[type=search]{which}'); box.value = '{text}'; "
    "box.dispatchEvent(new Event('input', {{ bubbles: true }})); }})()",
    "document.querySelector('table').getAttribute('aria-rowcount') {comparison}",
)
HOVER = (
    "(() => {{ const over = document.querySelector('.u-over'); const box = over.getBoundingClientRect(); "
    "const where = {{ clientX: box.left + box.width * {at}, clientY: box.top + box.height * 0.8 }}; "
    "over.dispatchEvent(new MouseEvent('mousemove', {{ bubbles: true, ...where }})); }})()",
    "true",
)

ZOOM = (
    "(() => { const over = document.querySelector('.u-over'); const box = over.getBoundingClientRect(); "
    "const at = (part) => ({ bubbles: true, button: 0, movementX: 9, "
    "clientX: box.left + box.width * part, clientY: box.top + 20 }); "
    "over.dispatchEvent(new MouseEvent('mousedown', at(0.2))); over.dispatchEvent(new MouseEvent('mousemove', at(0.7))); "
    "over.dispatchEvent(new MouseEvent('mouseup', at(0.7))); })()",
    "[...document.querySelectorAll('.chart .tools button')].some((one) => one.textContent === 'Whole')",
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--experiments", type=int, default=1000, help="of the list (default: 1000)")
    parser.add_argument("--trials", type=int, default=1000, help="of the search (default: 1000)")
    parser.add_argument("--points", type=int, default=1000, help="of each of its trials (default: 1000)")
    parser.add_argument("--long", type=int, default=1_000_000, help="points of one trial (default: 1000000)")
    parser.add_argument("--pages", type=int, default=20, help="open pages (default: 20)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for which they are open (default: 30)")
    parser.add_argument("--repeats", type=int, default=3, help="of what is timed (default: 3)")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    return parser.parse_args(arguments)


def add(connection: sqlite3.Connection, name: str, num_trials: int, num_points: int) -> int:
    """Add a completed experiment, and return its number."""
    owner = connection.execute("SELECT id FROM users WHERE username = 'determined'").fetchone()[0]
    start_us = round((time.time() - 3600) * 1e6)
    experiment = connection.execute(
        "INSERT INTO experiments (job_id, state, config, original_config, name, owner_id, searcher_type, searcher_metric, "
        "smaller_is_better, slots_per_trial, queue_position, start_us, end_us, progress) "
        "VALUES (?, 'COMPLETED', ?, '', ?, ?, 'random', 'loss', 1, 1, 1.0, ?, ?, 1.0)",
        (
            str(uuid.uuid4()),
            json.dumps({**CONFIG, "name": name}),
            name,
            owner,
            start_us,
            start_us + 1_800_000_000,
        ),
    ).lastrowid
    best = None
    for number in range(num_trials):
        task, final = str(uuid.uuid4()), 0.1 + number % 97 / 100
        hparams = {"global_batch_size": 64, "lr": 10 ** (-1 - number % 31 / 10), "layers": 1 + number % 8}
        trial = connection.execute(
            "INSERT INTO trials (experiment_id, request_id, state, hparams, seed, task_id, run_id, start_us, end_us, "
            "total_batches, searcher_metric_value, progress) VALUES (?, ?, 'COMPLETED', ?, 1, ?, 1, ?, ?, ?, ?, 1.0)",
            (
                experiment,
                str(uuid.uuid4()),
                json.dumps(hparams),
                task,
                start_us,
                start_us + 1_800_000_000,
                num_points * 10,
                final,
            ),
        ).lastrowid
        connection.execute(
            "INSERT INTO tasks VALUES (?, 'TRIAL', ?, ?, ?, NULL)", (task, experiment, trial, start_us)
        )
        connection.executemany(
            "INSERT INTO metrics (trial_id, run_id, group_name, steps, end_us, metrics) VALUES (?, 1, 'validation', ?, ?, ?)",
            (
                (
                    trial,
                    10 * (point + 1),
                    start_us + 1000 * point,
                    f'{{"loss": {final + 2 / (1 + point / 20):.6f}, "accuracy": {1 - final / 3:.6f}}}',
                )
                for point in range(num_points)
            ),
        )
        connection.executemany(
            "INSERT INTO metric_summaries VALUES (?, 'validation', ?, ?)",
            [(trial, metric, '{"count": 1, "last": 1, "type": "number"}') for metric in ("loss", "accuracy")],
        )
        newest = connection.execute("SELECT MAX(id) FROM metrics").fetchone()[0]
        connection.execute(
            "UPDATE trials SET best_validation_id = ?, latest_validation_id = ? WHERE id = ?",
            (newest, newest, trial),
        )
        best = trial if best is None else best
    connection.execute(
        "UPDATE experiments SET best_trial_id = ?, best_metric = 0.1 WHERE id = ?", (best, experiment)
    )
    return int(experiment or 0)


def fill(master: MasterForTest, options: argparse.Namespace) -> dict[str, int]:
    """Fill the database of a master, which is down meanwhile."""
    assert master.dstrial("down", "--now").returncode == 0
    connection = sqlite3.connect(master.state.path / "master.db", isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN")
    for number in range(options.experiments - 2):
        add(connection, f"experiment {number}", 1, 20)
    ids = {
        "search": add(connection, "search", options.trials, options.points),
        "long": add(connection, "long", 1, options.long),
    }
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    (master.state.path / "master.db-pages").unlink()  # Its checksums are of what was there before.
    master.up()
    return ids


def processor_ms(pid: int) -> float:
    """Return what a process has had of processors."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Return the memory of a process."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Window:
    """One window of a browser, and what its main thread has had of a processor."""

    def __init__(self, browser: Any, master: MasterForTest, token: str) -> None:
        self.address, self.master_pid = master.address, master.record.pid
        address = self.address
        self.context = browser.new_context(viewport={"width": 1300, "height": 900}, bypass_csp=True)
        self.context.add_cookies([{"name": "auth", "value": token, "url": address}])
        self.context.add_init_script(WATCH)
        self.page = self.context.new_page()
        self.page.set_default_timeout(120_000)
        self.session = browser.new_browser_cdp_session()

    def busy_ms(self) -> float:
        """Return for how long the main threads of the browser's pages have had a processor; one page is busy at a time."""
        processes = self.session.send("SystemInfo.getProcessInfo")["processInfo"]
        total_ns = 0
        for pid in [one["id"] for one in processes if one["type"] == "renderer"]:
            total_ns += int(pathlib.Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])
        return total_ns / 1e6

    def open(self, path: str, *, num_curves: int | None, is_whole: bool = True) -> dict[str, float]:
        """Open an address and return when what was seen, milliseconds."""
        before, master_before = self.busy_ms(), processor_ms(self.master_pid)
        self.page.goto(self.address + path)
        self.page.wait_for_function("window.marks.rows")
        if num_curves is not None:
            whole = f"window.marks.count === {num_curves} && !window.marks.isBusy"
            self.page.wait_for_function(whole if is_whole else "window.marks.first_curves")
        marks = self.page.evaluate(
            "({ ...window.marks, paint: performance.getEntriesByName('first-contentful-paint')[0]?.startTime })"
        )
        marks.pop("count", None)
        if is_whole:
            self.page.wait_for_timeout(500)
        return {
            **marks,
            "cpu": self.busy_ms() - before,
            "master": processor_ms(self.master_pid) - master_before,
        }

    def timed(self, action: str, condition: str) -> tuple[float, float]:
        """Return how long an action takes until it is seen, and the main thread's part of it, milliseconds."""
        before = self.busy_ms()
        took = float(self.page.evaluate(TIMED, [action, condition]))
        return took, self.busy_ms() - before


def interactions(window: Window, *, is_list: bool, num_rows: int) -> dict[str, tuple[float, float]]:
    """Time sorting, filtering and, where there is a chart, hovering."""
    column = 3 if is_list else 4
    found = {
        name: window.timed(*(part.format(idx=column, order=order) for part in SORT))
        for name, order in (("sort", "ascending"), ("sort back", "descending"))
    }
    which = "" if is_list else '[aria-label="Filter trials"]'
    for name, text, comparison in (
        ("filter", "experiment 7" if is_list else "layers>6", f"!= '{num_rows + 1}'"),
        ("unfilter", "", f"== '{num_rows + 1}'"),
    ):
        found[name] = window.timed(
            FILTER[0].format(which=which, text=text), FILTER[1].format(comparison=comparison)
        )
    if not is_list:
        for at in (0.3, 0.6):
            found[f"hover {at}"] = window.timed(HOVER[0].format(at=at), HOVER[1])
        found["zoom"] = window.timed(*ZOOM)
    return found


def in_browser(master: MasterForTest, ids: dict[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """Time each view in a new window, some times."""
    from playwright.sync_api import sync_playwright

    token = master.client().token
    found: dict[str, Any] = {}
    with sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("chromium-headless-shell")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, path, num_curves, num_rows in (
            ("list", "/det/experiments", None, options.experiments),
            ("search", f"/det/experiments/{ids['search']}/overview", options.trials, options.trials),
            ("search, loading", f"/det/experiments/{ids['search']}/overview", options.trials, options.trials),
            ("long", f"/det/experiments/{ids['long']}/overview", 1, 1),
        ):
            for _ in range(options.repeats):
                window = Window(browser, master, token)
                opened = window.open(path, num_curves=num_curves, is_whole=name != "search, loading")
                acts = (
                    {} if name == "long" else interactions(window, is_list=name == "list", num_rows=num_rows)
                )
                if name == "long":
                    acts = {
                        f"hover {at}": window.timed(HOVER[0].format(at=at), HOVER[1]) for at in (0.3, 0.6)
                    }
                found.setdefault(name, []).append({"opened": opened, "acts": acts})
                window.context.close()
        browser.close()
    return found


class OpenPage(threading.Thread):
    """What an open page asks a master: its events, and again what has changed."""

    def __init__(self, master: MasterForTest, token: str, experiment: int, end_s: float) -> None:
        super().__init__(daemon=True)
        self._url = urlsplit(master.address)
        self._headers = {"Cookie": f"auth={token}"}
        self._experiment, self._end_s = experiment, end_s
        self.num_loads, self.took_ms = 0, []  # type: ignore[var-annotated]

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._url.hostname or "", self._url.port, timeout=60)

    def _get(self, connection: http.client.HTTPConnection, path: str) -> None:
        start_s = time.perf_counter()
        connection.request("GET", path, headers=self._headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, path
        self.took_ms.append(1000 * (time.perf_counter() - start_s))

    def run(self) -> None:
        """Follow events until the end."""
        events, others = self._connection(), self._connection()
        events.request("GET", "/page/events", headers=self._headers)
        stream = events.getresponse()
        # As a page of the list, or of the experiment that reports.
        self._get(others, "/page/experiments")
        while time.monotonic() < self._end_s:
            line = stream.readline()
            if b"topics" not in line:
                continue
            self._get(others, f"/page/experiments?ids={self._experiment}")
            self._get(others, f"/page/experiments/{self._experiment}")
            self.num_loads += 1
        events.close()
        others.close()


def under_pages(master: MasterForTest, options: argparse.Namespace) -> dict[str, float]:
    """Return the master's memory and latency with open pages, while a detached run reports ten times a second."""
    client = master.client()
    body = {"config": json.dumps({**CONFIG, "name": "live"}), "unmanaged": True, "activate": False}
    experiment = int(client.post("/api/v1/experiments", body)["experiment"]["id"])
    made = client.post("/api/v1/trials", {"experimentId": experiment, "hparams": {}, "unmanaged": True})
    trial = int(made["trial"]["id"])
    end_s = time.monotonic() + options.seconds
    pages = [OpenPage(master, client.token, experiment, end_s) for _ in range(options.pages)]
    for page in pages:
        page.start()
    reports_ms: list[float] = []
    memory: list[float] = []
    step = 0
    while time.monotonic() < end_s:
        step += 1
        report = {"trialId": trial, "trialRunId": 0, "stepsCompleted": step}
        metrics = {"metrics": {"avgMetrics": {"loss": 1.0 / step}, "batchMetrics": []}}
        start_s = time.perf_counter()
        client.post(
            f"/api/v1/trials/{trial}/metrics", {"metrics": {**report, **metrics}, "group": "validation"}
        )
        reports_ms.append(1000 * (time.perf_counter() - start_s))
        memory.append(resident_mib(master.record.pid))
        time.sleep(0.1)
    for page in pages:
        page.join(30)
    reads_ms = [one for page in pages for one in page.took_ms]
    return {
        "pages": options.pages,
        "reports": step,
        "loads": sum(page.num_loads for page in pages),
        "report p50 ms": statistics.median(reports_ms),
        "report p99 ms": statistics.quantiles(reports_ms, n=100)[98],
        "read p50 ms": statistics.median(reads_ms),
        "read p99 ms": statistics.quantiles(reads_ms, n=100)[98],
        "master MiB": max(memory),
    }


def show(found: dict[str, Any]) -> None:
    """Print tables."""
    columns = {
        "paint": "paint ms",
        "rows": "rows ms",
        "first_curves": "first curves ms",
        "curves": "all curves drawn ms",
        "longest": "longest task from the first curves on ms",
        "cpu": "main thread ms",
        "master": "master ms",
    }
    print(f"| view | {' | '.join(columns.values())} |\n|{'---|' * (len(columns) + 1)}")
    for name, runs in found["browser"].items():
        if name == "search, loading":
            continue
        opened = [run["opened"] for run in runs]
        cells = [
            f"{statistics.median(values):.0f}"
            if (values := [one[key] for one in opened if one.get(key) is not None])
            else ""
            for key in columns
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("\n| view | interaction | ms | of it the main thread's |\n|---|---|---|---|")
    for name, runs in found["browser"].items():
        for act in runs[0]["acts"]:
            both = [run["acts"][act] for run in runs]
            wall, busy = (statistics.median(one[idx] for one in both) for idx in (0, 1))
            print(f"| {name} | {act} | {wall:.0f} | {busy:.0f} |")
    print("\n| " + " | ".join(found["pages"]) + " |\n|" + "---|" * len(found["pages"]))
    print("| " + " | ".join(f"{value:.1f}" for value in found["pages"].values()) + " |")
    print(f"\nload average {found['load']}")


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    with (
        tempfile.TemporaryDirectory() as directory,
        master_for_test(pathlib.Path(directory), num_slots=1) as master,
    ):
        ids = fill(master, options)
        before = resident_mib(master.record.pid)
        found: dict[str, Any] = {
            "browser": in_browser(master, ids, options),
            "pages": {},
            "load": [round(one, 1) for one in os.getloadavg()],
        }
        found["pages"] = {
            "MiB at first": before,
            "MiB after the views": resident_mib(master.record.pid),
            **under_pages(master, options),
        }
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
