// Lines of a log: when, by which rank, how bad, and the text as it is, never more than text.

import { html, useMemo } from "htm/preact/standalone";
import { bytes, utcTime } from "../../format.js";

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3, hour12: false });
const DAY = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "2-digit", day: "2-digit" });

/** @param {number} ms @returns {string} where the reader is */
const localDay = (ms) => DAY.format(ms);
/** @param {number} ms @returns {string} where the reader is */
const localClock = (ms) => CLOCK.format(ms);

/** Text with what was looked for marked. @param {string} text @param {string} found in lower case @returns {unknown} */
function marked(text, found) {
  if (!found) return text;
  const lower = text.toLowerCase();
  // Some letters are longer in lower case: places would be others.
  if (lower.length !== text.length) return text;
  const parts = [];
  let from = 0;
  for (let at = lower.indexOf(found); at >= 0; at = lower.indexOf(found, from)) {
    parts.push(text.slice(from, at), html`<mark>${text.slice(at, at + found.length)}</mark>`);
    from = at + found.length;
  }
  return from ? [...parts, text.slice(from)] : text;
}

/** @param {import("./feed.js").Line} line @returns {string} for a reader who cannot see colours */
function who(line) {
  return line.rank === null ? (line.source === "master" ? "master" : "") : `rank ${line.rank}`;
}

/** @param {{ lines: import("./feed.js").Line[], found: string, chosen: number }} props */
export function Lines({ lines, found, chosen }) {
  const own = lines.some((line) => line.id === chosen) ? chosen : 0;
  return useMemo(
    () => html`<div>${lines.map(
      (line) => html`<div key=${line.id} class=${`line ${line.level ?? ""} ${line.stdtype ?? ""}`} data-id=${line.id} aria-current=${line.id === own ? "true" : undefined}>
        <a class="at" tabindex="-1" href=${`?line=${line.id}`} title=${`${utcTime(new Date(line.ms).toISOString())} · ${localDay(line.ms)} here · line ${line.id}`}>${localClock(line.ms)}</a>
        <span class="by">${who(line)}</span><span class="level">${line.level ?? ""}</span>${line.bytes && html`<span class="cut" title="This line is cut here; Download all has all of it">${bytes(line.bytes)}</span>`}<span class="said">${marked(line.text, found)}${line.bytes ? " …" : ""}</span></div>`,
    )}</div>`,
    [lines, found, own],
  );
}
