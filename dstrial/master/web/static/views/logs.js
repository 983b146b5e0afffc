// A live log: the newest lines, or lines around any other place, filtered by rank, level and text.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "htm/preact/standalone";
import { address } from "../api.js";
import { bytes, utcTime } from "../format.js";
import { subscribe } from "../live.js";
import { Problem, SearchField, Select } from "../parts/basics.js";
import { setParams, useParam } from "../router.js";
import { Feed, NOTHING } from "./logs/feed.js";

const LEVELS = ["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"];
const NEAR_PX = 1200; // distance to the first or last loaded line at which more are loaded
const END_PX = 24; // distance to the last line within which the end is followed
const TYPING_MS = 300; // pause after the last key before a filter applies

/** Whose log it is. @typedef {{ trial?: number, task?: string }} LogSource */

/** @param {LogSource} of @param {string} topic @returns {boolean} whether a topic says that the log has new lines */
function concerns(of, topic) {
  return topic === (of.trial === undefined ? `logs:${of.task}` : `logs:trial:${of.trial}`);
}

/** Return a text once it has not changed for a moment. @param {string} text @returns {string} */
function useDebounced(text) {
  const [debounced, set] = useState(text);
  useEffect(() => {
    const timer = setTimeout(() => set(text), TYPING_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return debounced;
}

/** @param {{ of: LogSource }} props */
export function Logs({ of }) {
  const [level, setLevel] = useParam("level");
  const [rank, setRank] = useParam("rank");
  const [text, setText] = useParam("find");
  const [line] = useParam("line");
  const [wrap, setWrap] = useParam("wrap", matchMedia("(max-width: 700px)").matches ? "on" : "off");
  const found = useDebounced(text);
  const ranks = useDebounced(rank);
  const [part, setPart] = useState(NOTHING);
  const [isFollowing, setFollowing] = useState(!line);
  const feed = useRef(/** @type {Feed | null} */ (null));
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const goTo = useRef(Number(line) || 0);
  const lastTop = useRef(0);
  const chosen = Number(line) || 0;

  /** @param {boolean} isOn */
  const follow = (isOn) => {
    setFollowing(isOn);
    if (feed.current) feed.current.isFollowing = isOn;
  };

  useEffect(() => {
    const wanted = /** @type {import("./logs/feed.js").LogQuery} */ ({ ...of });
    if (level) wanted.level = level;
    if (ranks) wanted.rank = ranks.split(",").filter((one) => /^-?\d+$/.test(one));
    if (found) wanted.text = found;
    const own = new Feed(wanted, setPart);
    feed.current = own;
    setPart(NOTHING);
    const id = goTo.current;
    own.isFollowing = !id;
    setFollowing(!id);
    if (id) own.around(id);
    else own.newest();
    const end = subscribe((change) => {
      if (change === null || [...change].some((topic) => concerns(of, topic))) own.catchUp();
    });
    return () => {
      own.close();
      end();
    };
  }, [of.trial, of.task, level, ranks, found]);

  // Visible lines stay in place when lines above are added or removed, by the browser's scroll anchoring.
  useLayoutEffect(() => {
    const view = box.current;
    if (!view) return;
    if (goTo.current && part.lines.length) {
      const { id } = part.lines.find((one) => one.id >= goTo.current) ?? part.lines[part.lines.length - 1];
      goTo.current = 0;
      view.querySelector(`[data-id="${id}"]`)?.scrollIntoView({ block: "center" });
    } else if (feed.current?.isFollowing) {
      view.scrollTop = view.scrollHeight;
    }
  }, [part.lines, wrap]);
  // Not in the effect above: the feed would still be busy, and ignore the call.
  useEffect(loadNear, [part.lines, wrap]);

  /** Load more lines if the view is near the first or last loaded line. */
  function loadNear() {
    const view = box.current;
    if (!view || !feed.current || !part.lines.length) return;
    const below = view.scrollHeight - view.scrollTop - view.clientHeight;
    if (view.scrollTop < NEAR_PX && !part.isStart) {
      view.scrollTop ||= 1; // At position 0 browsers do not anchor.
      feed.current.earlier();
    }
    if (below < NEAR_PX) feed.current.later();
  }
  function onScroll() {
    const view = box.current;
    if (!view) return;
    const isAtEnd = view.scrollHeight - view.scrollTop - view.clientHeight < END_PX;
    const isDown = view.scrollTop > lastTop.current;
    lastTop.current = view.scrollTop;
    if (isAtEnd ? !isFollowing && isDown && part.isEnd : isFollowing) follow(isAtEnd);
    loadNear();
  }
  /** Stop following before the first pixel is scrolled: a render in between would scroll back to the end. @param {WheelEvent} event */
  function onWheel(event) {
    if (event.deltaY < 0 && box.current && box.current.scrollTop > 0) follow(false);
  }
  const newest = async () => {
    goTo.current = 0;
    setParams({ line: "" });
    follow(true);
    if (part.isEnd && box.current) box.current.scrollTop = box.current.scrollHeight;
    else await feed.current?.newest();
  };
  /** @param {number} id */
  const jump = async (id) => {
    follow(false);
    goTo.current = id;
    await feed.current?.around(id);
  };
  /** @param {number} id */
  const choose = (id) => setParams({ line: id === chosen ? "" : String(id) });
  const all = part.lines;
  const isFiltered = Boolean(level || rank || text);
  return html`<section class="log" aria-label="Log">
    <div class="filters">
      <label>Level <${Select} value=${level} set=${setLevel}>
        <option value="">all</option>${LEVELS.slice(1).map((name) => html`<option value=${name}>${name.toLowerCase()}${name === "CRITICAL" ? "" : " and worse"}</option>`)}
      <//></label>
      <label>Rank <input class="short" inputmode="numeric" placeholder="all" title="a rank, or several with commas; -1 is of no rank" value=${rank}
        onInput=${(/** @type {any} */ event) => /^(-?\d*,?)*$/.test(event.target.value) && setRank(event.target.value)} /></label>
      <${SearchField} text=${text} set=${setText} label="Only lines with" placeholder="Only lines with this text" />
      <label><input type="checkbox" checked=${wrap === "on"} onChange=${(/** @type {any} */ event) => setWrap(event.target.checked ? "on" : "off")} /> wrap</label>
      <a href=${address("/page/logs/file", of)} download>Download all</a>
    </div>
    <div class="tools">
      <button onClick=${() => jump(1)}>Beginning</button>
      <button class=${isFollowing ? "" : "main"} onClick=${newest} disabled=${isFollowing}>${isFollowing ? "Following" : part.hasNew ? "Newest ●" : "Newest"}</button>
      <span class="muted" role="status">${part.isSearching ? "Searching …" : ""}</span>
    </div>
    <${Problem} error=${part.error} />
    <div class=${`lines ${wrap === "on" ? "wrap" : ""}`} ref=${box} onScroll=${onScroll} onWheel=${onWheel} tabindex="0" role="region" aria-label="Lines" onClick=${(/** @type {MouseEvent} */ event) => {
      const at = /** @type {Element} */ (event.target).closest("a.at");
      if (!at) return;
      event.preventDefault();
      choose(Number(/** @type {HTMLElement} */ (at.parentElement).dataset.id));
    }} onKeyDown=${(/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Home") jump(1);
      else if (event.key === "End") newest();
      else return;
      event.preventDefault();
    }}>
      ${part.isStart && all.length > 0 && html`<p class="muted edge">${isFiltered ? "Nothing before this fits." : "The beginning."}</p>`}
      <${Lines} lines=${all} found=${found.toLowerCase()} chosen=${chosen} />
      ${!all.length && part.isEnd && html`<p class="muted edge">${isFiltered
        ? html`No line fits. <button onClick=${() => setParams({ level: "", rank: "", find: "" })}>Show all lines</button>`
        : "Nothing has been printed; new lines appear here as they come."}</p>`}
      ${!all.length && !part.isEnd && !part.error && html`<p class="muted edge">Loading …</p>`}
    </div>
  </section>`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3, hour12: false });
const DAY = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "2-digit", day: "2-digit" });

/** @param {number} ms @returns {string} in the user's time zone */
const localDay = (ms) => DAY.format(ms);
/** @param {number} ms @returns {string} in the user's time zone */
const localClock = (ms) => CLOCK.format(ms);

/** Highlight the text that was searched. @param {string} text @param {string} found in lower case @returns {unknown} */
function highlighted(text, found) {
  if (!found) return text;
  const lower = text.toLowerCase();
  // Some letters are longer in lower case, which would shift positions.
  if (lower.length !== text.length) return text;
  const parts = [];
  let from = 0;
  for (let at = lower.indexOf(found); at >= 0; at = lower.indexOf(found, from)) {
    parts.push(text.slice(from, at), html`<mark>${text.slice(at, at + found.length)}</mark>`);
    from = at + found.length;
  }
  return from ? [...parts, text.slice(from)] : text;
}

/** @param {import("./logs/feed.js").Line} line @returns {string} which process printed it */
function printedBy(line) {
  return line.rank === null ? (line.source === "master" ? "master" : "") : `rank ${line.rank}`;
}

/** @param {{ lines: import("./logs/feed.js").Line[], found: string, chosen: number }} props */
function Lines({ lines, found, chosen }) {
  const own = lines.some((line) => line.id === chosen) ? chosen : 0;
  return useMemo(
    () => html`<div>${lines.map(
      (line) => html`<div key=${line.id} class=${`line ${line.level ?? ""} ${line.stdtype ?? ""}`} data-id=${line.id} aria-current=${line.id === own ? "true" : undefined}>
        <a class="at" tabindex="-1" href=${`?line=${line.id}`} title=${`${utcTime(new Date(line.ms).toISOString())} · ${localDay(line.ms)} here · line ${line.id}`}>${localClock(line.ms)}</a>
        <span class="by">${printedBy(line)}</span><span class="level">${line.level ?? ""}</span>${line.bytes && html`<span class="cut" title="This line is cut here; Download all has all of it">${bytes(line.bytes)}</span>`}<span class="said">${highlighted(line.text, found)}${line.bytes ? " …" : ""}</span></div>`,
    )}</div>`,
    [lines, found, own],
  );
}

/** The log of a command, TensorBoard or generic task. @param {{ words: string[] }} props */
export function TaskLogs({ words }) {
  const id = words[1];
  return html`<main>
    <h1 tabindex="-1">Log <span class="muted">task ${id}</span></h1>
    <${Logs} of=${{ task: id }} />
  </main>`;
}
