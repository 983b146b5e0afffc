// Text with line numbers, and a diff of two experiments.

import { html, useMemo } from "htm/preact/standalone";
import { get } from "../api.js";
import { useLive } from "../live.js";
import { Pending } from "./basics.js";

const MAX_LINES = 20_000;

/** @param {{ text: string, label: string }} props */
export function Lines({ text, label }) {
  const lines = useMemo(() => text.replace(/\n$/, "").split("\n"), [text]);
  const cut = lines.length > MAX_LINES;
  const shown = cut ? lines.slice(0, MAX_LINES) : lines;
  return html`<div class="code" tabindex="0" role="region" aria-label=${label}>
    <pre class="numbers" aria-hidden="true">${shown.map((_, idx) => idx + 1).join("\n")}</pre>
    <pre>${shown.join("\n")}</pre>
  </div>${cut && html`<p class="muted">The first ${MAX_LINES} of ${lines.length} lines are shown.</p>`}`;
}

/** A unified diff from experiment `other` to experiment `id`: of effective configs or of code. @param {{ id: number, other: number, kind: "effective" | "code" }} props */
export function Difference({ id, other, kind }) {
  const { data, error } = useLive((signal) => get(`/page/experiments/${id}/difference`, { other, kind }, signal), () => false, [id, other, kind]);
  if (!data) return html`<${Pending} error=${error} />`;
  if (!data.lines.length) return html`<p class="muted">The same in both.</p>`;
  return html`<pre class="diff" tabindex="0" role="region" aria-label=${`Difference of experiments ${other} and ${id}`}>
    ${data.lines.map((/** @type {string} */ line) => html`<span class=${line[0] === "+" ? "added" : line[0] === "-" ? "removed" : ""}>${`${line}\n`}</span>`)}</pre>
    ${data.more && html`<p class="muted">The first ${data.lines.length} lines are shown.</p>`}`;
}
