// A text with line numbers, and a comparison of two texts by lines, with what is alike folded.

import { html, useMemo, useState } from "htm/preact/standalone";
import { diffLines, hunksOf } from "./diff.js";

const MOST_LINES = 20_000;

/** @param {{ text: string, label: string }} props */
export function Lines({ text, label }) {
  const lines = useMemo(() => text.replace(/\n$/, "").split("\n"), [text]);
  const cut = lines.length > MOST_LINES;
  const shown = cut ? lines.slice(0, MOST_LINES) : lines;
  return html`<div class="code" tabindex="0" role="region" aria-label=${label}>
    <pre class="numbers" aria-hidden="true">${shown.map((_, idx) => idx + 1).join("\n")}</pre>
    <pre>${shown.join("\n")}</pre>
  </div>${cut && html`<p class="muted">The first ${MOST_LINES} of ${lines.length} lines are shown.</p>`}`;
}

const MARKS = /** @type {Record<string, string>} */ ({ added: "+", removed: "−", same: " " });

/** @param {{ before: string, after: string, label: string }} props */
export function Difference({ before, after, label }) {
  const hunks = useMemo(() => hunksOf(diffLines(before, after)), [before, after]);
  const [open, setOpen] = useState(/** @type {Set<number>} */ (new Set()));
  const count = (/** @type {string} */ kind) => hunks.reduce((sum, hunk) => sum + hunk.lines.filter((line) => line.kind === kind).length, 0);
  if (!hunks.some((hunk) => !hunk.isFolded)) return html`<p class="muted">The same in both.</p>`;
  return html`<p><span class="added">+${count("added")}</span> <span class="removed">−${count("removed")}</span></p>
    <div class="code diff" tabindex="0" role="region" aria-label=${label}><table><tbody>
    ${hunks.map((hunk, at) =>
      hunk.isFolded && !open.has(at)
        ? html`<tr class="fold"><td colspan="4"><button class="plain" onClick=${() => setOpen(new Set([...open, at]))}>${hunk.lines.length} lines that are alike</button></td></tr>`
        : hunk.lines.map((line) => html`<tr class=${line.kind}><td class="numbers">${line.before ?? ""}</td><td class="numbers">${line.after ?? ""}</td><td class="mark">${MARKS[line.kind]}</td><td><pre>${line.text || " "}</pre></td></tr>`),
    )}
    </tbody></table></div>`;
}
