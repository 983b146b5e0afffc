"""Log views in a real browser: live, filtered and very long logs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from browsing import Browser
from playwright.sync_api import Route
from seeded import add_bare_task, add_experiment, add_lines, task_of, trials_of
from serving import Master, serving

pytestmark = pytest.mark.process

HTML = "<img src=x onerror=alert(1)> & co"
LONG = 20 * 2**20
MANY = 300_000  # more lines than one request searches
Open = Callable[..., Browser]

AT_END = (
    "(() => { const box = document.querySelector('.lines'); "
    "return box.scrollHeight - box.scrollTop - box.clientHeight < 30; })()"
)
NUM_LINES = "document.querySelectorAll('.line').length"


@dataclasses.dataclass(frozen=True)
class Log:
    master: Master
    trial: int
    task: str

    def add(self, *lines: tuple[int | None, str | None, str]) -> None:
        self.master.write(lambda tx: add_lines(tx, self.task, self.trial, lines))


def new_log(master: Master, *lines: tuple[int | None, str | None, str]) -> Log:
    def fill(tx):
        trial = trials_of(tx, add_experiment(tx, name="logs", state="ACTIVE", num_points=2))[0]
        task = task_of(tx, trial)
        add_lines(tx, task, trial, lines)
        return Log(master, trial, task)

    return master.write(fill)


def has(text: str) -> str:
    return f"document.querySelector('.lines').innerText.includes({text!r})"


@pytest.fixture(scope="module")
def steps(seeded_master: Master) -> Log:
    levels = ("INFO", "WARNING", "ERROR", None, "DEBUG")
    return new_log(
        seeded_master,
        *((idx % 4 if idx % 7 else None, levels[idx % 5], f"step {idx} of many") for idx in range(3000)),
    )


def numbered(master: Master, num_lines: int) -> Log:
    log = new_log(master)
    lines = ((idx % 8, None, f"line {idx:07}") for idx in range(num_lines))
    master.write(lambda tx: add_lines(tx, log.task, log.trial, lines))
    return log


@pytest.fixture(scope="module")
def many(seeded_master: Master) -> Log:
    return numbered(seeded_master, MANY)


def test_newest_lines_are_shown_and_followed(browser: Browser, seeded_master: Master) -> None:
    log = new_log(seeded_master, *((0, None, f"line {idx}") for idx in range(300)))
    browser.show(f"/det/trials/{log.trial}/logs", ".line")
    browser.until(f"{has('line 299')} && {AT_END}")
    log.add((0, "INFO", "this is new"))
    browser.until(f"{has('this is new')} && {AT_END}")
    assert browser.texts(".line .said")[-1] == "this is new"


def test_scrolling_up_pauses_following_until_button(browser: Browser, seeded_master: Master) -> None:
    log = new_log(seeded_master, *((0, None, f"line {idx}") for idx in range(400)))
    browser.show(f"/det/trials/{log.trial}/logs", ".line")
    browser.until(f"{has('line 399')} && {AT_END}")
    browser.page.hover(".lines")
    browser.page.mouse.wheel(0, -2000)
    browser.until("[...document.querySelectorAll('.log button')].some((one) => one.innerText === 'Newest')")
    browser.until(f"{NUM_LINES} === 400")
    seen = (
        "(() => { const top = document.querySelector('.lines').getBoundingClientRect().top;"
        "return [...document.querySelectorAll('.line')].find((one) => one.getBoundingClientRect().bottom > top).innerText; })()"
    )
    before = browser.page.evaluate(seen)
    log.add(*((0, None, f"later {idx}") for idx in range(50)))
    browser.until(has("later 49"))
    assert browser.page.evaluate(seen) == before
    browser.page.click(".log button:has-text('Newest')")
    browser.until(AT_END)
    log.add((0, None, "after that"))
    browser.until(f"{has('after that')} && {AT_END}")


def test_scroll_to_top_while_new_lines_load_loads_earlier(browser: Browser, seeded_master: Master) -> None:
    log = new_log(seeded_master, *((0, None, f"line {idx}") for idx in range(400)))
    browser.show(f"/det/trials/{log.trial}/logs", ".line")
    browser.until(f"{has('line 399')} && {AT_END}")
    held: list[Route] = []
    browser.page.route("**/page/logs?*after=*", lambda route: held.append(route), times=1)
    with browser.page.expect_request("**/page/logs?*after=*"):
        log.add((0, None, "later"))
    browser.page.hover(".lines")
    browser.page.mouse.wheel(0, -100_000)
    browser.until("document.querySelector('.lines').scrollTop < 10")
    # The page's handler of a scroll runs before the next frame is drawn.
    browser.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    held.pop().continue_()
    browser.until(f"{NUM_LINES} === 401")


def test_lines_are_filtered_by_level_rank_text(browser: Browser, steps: Log) -> None:
    browser.show(f"/det/trials/{steps.trial}/logs", ".line")
    browser.page.select_option("label:has-text('Level') select", "WARNING")
    browser.until(
        "[...document.querySelectorAll('.line')].every((one) => /WARNING|ERROR/.test(one.className))"
    )
    browser.page.fill("label:has-text('Rank') input", "2")
    browser.until("[...document.querySelectorAll('.line .by')].every((one) => one.innerText === 'rank 2')")
    browser.page.fill("input[aria-label='Only lines with']", "STEP 100")
    # Lines of rank 2 with at least level WARNING whose step starts with 100.
    wanted = [
        idx
        for idx in range(3000)
        if str(idx).startswith("100") and idx % 5 in (1, 2) and idx % 4 == 2 and idx % 7
    ]
    browser.until(f"{NUM_LINES} === {len(wanted)}")
    assert browser.texts(".line .said") == [f"step {idx} of many" for idx in wanted]
    assert browser.texts(".line mark")[0] == "step 100"
    assert {"level=WARNING", "rank=2"} <= set(re.split("[?&]", browser.page.url))
    browser.page.fill("input[aria-label='Only lines with']", "nowhere")
    browser.page.click("button:has-text('Show all lines')")
    browser.until(f"{NUM_LINES} > 100 && {AT_END}")


def test_markup_and_escapes_are_shown_as_text(browser: Browser, seeded_master: Master) -> None:
    log = new_log(
        seeded_master,
        (0, "INFO", HTML),
        (0, None, "\x1b[31mred\x1b[0m \x00zero \u202eturned"),
        (None, None, ""),
    )
    browser.show(f"/det/trials/{log.trial}/logs", ".line")
    assert browser.texts(".line .said") == [HTML, r"\x1b[31mred\x1b[0m \x00zero \u202eturned", ""]
    assert browser.page.locator(".lines img").count() == 0
    assert re.match(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", browser.page.locator(".line .at").first.get_attribute("title")
    )


def test_very_long_line_is_truncated_except_in_file(open_browser: Open, seeded_master: Master) -> None:
    log = new_log(seeded_master, (0, None, "before"), (0, "ERROR", "x" * LONG), (0, None, "after"))
    browser = open_browser()
    sizes: list[int] = []
    browser.page.on(
        "response", lambda one: sizes.append(len(one.body())) if "/page/logs?" in one.url else None
    )
    browser.open(f"/det/trials/{log.trial}/logs", ".line")
    browser.until(has("after"))
    assert sum(sizes) < 20_000
    assert len(browser.texts(".line .said")[1]) < 2100
    assert browser.text(".line .cut") == "20 MiB"
    assert len(browser.saved("a:has-text('Download all')")) > LONG


@pytest.mark.exhaustive("[300000]")
@pytest.mark.parametrize("num_lines", [MANY, 1_000_000])
def test_huge_log_is_paged_and_searched(browser: Browser, many: Log, num_lines: int) -> None:
    log = many if num_lines == MANY else numbered(many.master, num_lines)
    browser.show(f"/det/trials/{log.trial}/logs", ".line")
    browser.until(f"{has(f'line {num_lines - 1:07}')} && {AT_END}")
    # Scroll up through several pages: no line is missing, and only some pages stay loaded.
    for _ in range(12):
        browser.page.hover(".lines")
        browser.page.mouse.wheel(0, -4000)
        browser.page.wait_for_timeout(100)  # About as fast as a mouse wheel is turned by hand.
    numbers = [int(text.split()[1]) for text in browser.texts(".line .said")]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert numbers[-1] - numbers[0] > 600
    assert len(numbers) <= 1200
    browser.page.click("button:has-text('Beginning')")
    browser.until(f"{has('line 0000000')} && {has('The beginning.')}")
    for _ in range(12):
        browser.page.hover(".lines")
        browser.page.mouse.wheel(0, 4000)
        browser.page.wait_for_timeout(100)  # About as fast as a mouse wheel is turned by hand.
    numbers = [int(text.split()[1]) for text in browser.texts(".line .said")]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len(numbers) <= 1200
    browser.page.fill("input[aria-label='Only lines with']", "line 0000042")
    browser.until(f"{NUM_LINES} === 1 && {has('line 0000042')}")


def test_scroll_position_survives_loading_earlier_lines(browser: Browser, many: Log) -> None:
    browser.show(f"/det/trials/{many.trial}/logs", ".line")
    browser.until(f"{has(f'line {MANY - 1:07}')} && {AT_END}")
    before = browser.page.evaluate(
        """() => { const box = document.querySelector(".lines"); box.scrollTop = 900;
        const top = box.getBoundingClientRect().top;
        const line = [...document.querySelectorAll(".line")].find((one) => one.getBoundingClientRect().top >= top);
        return [document.querySelectorAll(".line").length, line.dataset.id, line.getBoundingClientRect().top]; }"""
    )
    browser.until(f"{NUM_LINES} >= {before[0] + 200}")
    browser.until(
        f"Math.abs(document.querySelector('[data-id=\"{before[1]}\"]').getBoundingClientRect().top - {before[2]}) < 2"
    )


def test_log_line_has_permalink(browser: Browser, many: Log) -> None:
    (row,) = many.master.rows("SELECT id FROM logs WHERE task_id = ? AND log = 'line 0200000\n'", many.task)
    browser.show(f"/det/trials/{many.trial}/logs?line={row['id']}", ".line[aria-current]")
    assert browser.text(".line[aria-current] .said") == "line 0200000"
    browser.until(
        """(() => { const box = document.querySelector(".lines").getBoundingClientRect();
        const line = document.querySelector(".line[aria-current]").getBoundingClientRect();
        return line.top > box.top && line.bottom < box.bottom; })()"""
    )
    browser.page.click(".line:has-text('line 0200003') .at")
    browser.until("document.querySelector('.line[aria-current]').innerText.includes('line 0200003')")
    assert f"line={row['id'] + 3}" in browser.page.url


def test_whole_log_is_downloadable(browser: Browser, steps: Log) -> None:
    browser.show(f"/det/trials/{steps.trial}/logs", ".line")
    with browser.page.expect_download() as download:
        browser.page.click("a:has-text('Download all')")
    lines = Path(download.value.path()).read_text().splitlines()
    assert len(lines) == 3000
    assert lines[1].endswith("[rank=1] || WARNING: step 1 of many")
    assert download.value.suggested_filename == f"trial-{steps.trial}.log"


def test_command_has_its_own_log(open_browser: Open, seeded_master: Master) -> None:
    task = seeded_master.write(add_bare_task)
    browser = open_browser()
    browser.open(f"/det/tasks/{task}/logs", ".lines .edge")
    browser.until(has("Nothing has been printed"))
    seeded_master.write(lambda tx: add_lines(tx, task, None, [(None, None, "hello")]))
    browser.until(has("hello"))
    browser.show("/det/tasks/nothing/logs", "main .problem")
    assert "task 'nothing' is not found" in browser.text("main .problem")
    browser.forgive("404")


def test_open_log_continues_after_master_restart(open_browser: Open, tmp_path: Path) -> None:
    with serving(tmp_path / "state", has_passwords=False) as master:
        log = new_log(master, (0, None, "before"))
        browser = open_browser(master=master)
        browser.open(f"/det/trials/{log.trial}/logs", ".line")
        browser.page.evaluate("window.isSame = true")
    browser.until("document.body.innerText.includes('The master does not answer')")
    with serving(tmp_path / "state", has_passwords=False, port=master.port, is_again=True) as again:
        dataclasses.replace(log, master=again).add((0, None, "after the restart"))
        browser.until(has("after the restart"))
        browser.until("document.body.innerText.includes('The master was started again')")
        browser.until("!document.body.innerText.includes('The master does not answer')")
        dataclasses.replace(log, master=again).add((0, None, "and live"))
        browser.until(has("and live"))
        assert browser.page.evaluate("window.isSame")
        browser.forgive("ERR_")
        browser.page.close()
