// The files with which an experiment was submitted, and what differs from another experiment's.

import { html, useEffect, useMemo, useState } from "htm/preact/standalone";
import { get } from "../../api.js";
import { bytes, download } from "../../format.js";
import { useLive } from "../../live.js";
import { Problem } from "../../parts/basics.js";
import { setParams, useLocation, useParam } from "../../router.js";
import { Difference, Lines } from "../../parts/lines.js";

/** @typedef {{ path: string, bytes: number, digest: string }} File */
/** @typedef {{ path: string, change: "" | "added" | "removed" | "changed" }} Entry of the list, with what became of it since the other experiment */

/** @param {File[]} own @param {File[] | null} others @returns {Entry[]} */
function entriesOf(own, others) {
  if (!others) return own.map(({ path }) => ({ path, change: "" }));
  const before = new Map(others.map((file) => [file.path, file.digest]));
  const now = new Set(own.map((file) => file.path));
  /** @type {Entry[]} */
  const entries = own.map(({ path, digest }) => ({ path, change: !before.has(path) ? "added" : before.get(path) === digest ? "" : "changed" }));
  return [...entries, ...others.filter((file) => !now.has(file.path)).map((file) => /** @type {Entry} */ ({ path: file.path, change: "removed" }))].sort((a, b) => a.path.localeCompare(b.path));
}

const load = (/** @type {number} */ id) => (/** @type {AbortSignal} */ signal) => get(`/page/experiments/${id}/files`, {}, signal);

/** @param {{ id: number, experiment: any }} props */
export function Code({ id, experiment }) {
  const [against] = useParam("against");
  const [typed, setTyped] = useState(against);
  const other = Number(against) || 0;
  const own = useLive(load(id), () => false, [id]);
  const others = useLive(other ? load(other) : async () => null, () => false, [other]);
  useEffect(() => setTyped(against), [against]);
  const entries = useMemo(() => entriesOf(own.data?.files ?? [], other && others.data ? others.data.files : null), [own.data, others.data, other]);
  if (!own.data) return own.error ? html`<${Problem} error=${own.error} />` : html`<p class="loading">Loading …</p>`;
  const numChanged = entries.filter((one) => one.change).length;
  const compare = (/** @type {string} */ to) => setParams({ against: to, file: "" });
  return html`
    <form class="filters" onSubmit=${(/** @type {Event} */ event) => { event.preventDefault(); compare(typed); }}>
      <label>Compare with experiment <input type="number" min="1" class="short" value=${typed} onInput=${(/** @type {any} */ event) => setTyped(event.target.value)} /></label>
      <button>Compare</button>
      ${experiment.parent && experiment.parent !== other && html`<button type="button" onClick=${() => compare(String(experiment.parent))}>with its parent ${experiment.parent}</button>`}
      ${other > 0 && html`<button type="button" onClick=${() => compare("")}>No comparison</button>`}
      ${other > 0 && others.data && html`<span role="status">${numChanged ? `${numChanged} of ${entries.length} files differ` : "All files are the same"}</span>`}
    </form>
    <${Problem} error=${other ? others.error : null} />
    ${own.data.more && html`<p class="muted">There are more files than are listed.</p>`}
    ${!entries.length
      ? html`<p class="muted">${experiment.unmanaged ? "Its trials were reported from elsewhere; there is no code here." : "It was submitted without files: what it runs is installed where its trials run."}</p>`
      : html`<${Files} id=${id} other=${other && others.data ? other : 0} entries=${entries} />`}`;
}

/** The files of one experiment beside those of another. @param {{ id: number, other: number }} props */
export function FilesCompared({ id, other }) {
  const { data, error } = useLive(async (signal) => Promise.all([load(id)(signal), load(other)(signal)]), () => false, [id, other]);
  const entries = useMemo(() => (data ? entriesOf(data[0].files, data[1].files).filter((entry) => entry.change) : []), [data]);
  if (!data) return error ? html`<${Problem} error=${error} />` : html`<p class="loading">Loading …</p>`;
  if (!entries.length) return html`<p class="muted">${data[0].files.length ? "All files are the same." : "Neither has files."}</p>`;
  return html`<p role="status">${entries.length} ${entries.length === 1 ? "file differs" : "files differ"}.</p><${Files} id=${id} other=${other} entries=${entries} />`;
}

/** The list of files and the one that is chosen. @param {{ id: number, other: number, entries: Entry[] }} props `other` is 0 without another experiment */
function Files({ id, other, entries }) {
  const [chosen] = useParam("file");
  const first = entries.find((entry) => entry.change === "changed") ?? entries.find((entry) => entry.change) ?? entries.find((entry) => /(^|\/)(model_def|train)\.py$/.test(entry.path)) ?? entries[0];
  const entry = entries.find((one) => one.path === chosen) ?? (chosen && !other ? { path: chosen, change: /** @type {""} */ ("") } : first);
  return html`<div class="files"><nav aria-label="Files"><${Tree} entries=${entries} now=${entry?.path ?? ""} /></nav>
    <div class="file">${entry && html`<${Shown} key=${`${entry.path} ${other} ${entry.change}`} id=${id} other=${other} entry=${entry} />`}</div></div>`;
}

/** @param {{ entries: Entry[], now: string }} props */
function Tree({ entries, now }) {
  const { path, query } = useLocation();
  /** @type {Map<string, Entry[]>} */
  const folders = new Map();
  for (const entry of entries) {
    const folder = entry.path.includes("/") ? entry.path.slice(0, entry.path.lastIndexOf("/")) : "";
    folders.set(folder, [...(folders.get(folder) ?? []), entry]);
  }
  /** @param {string} file */
  const to = (file) => {
    const words = new URLSearchParams(query);
    words.set("file", file);
    return `/${path.map(encodeURIComponent).join("/")}?${words}`;
  };
  const list = (/** @type {Entry[]} */ some) => html`<ul>${some.map((entry) => html`<li><a href=${to(entry.path)} class=${entry.change} aria-current=${entry.path === now ? "true" : undefined}>${entry.path.slice(entry.path.lastIndexOf("/") + 1)}${entry.change && html` <span class="muted">${entry.change}</span>`}</a></li>`)}</ul>`;
  return html`${folders.has("") && list(/** @type {Entry[]} */ (folders.get("")))}
    ${[...folders].filter(([folder]) => folder).sort(([a], [b]) => a.localeCompare(b)).map(([folder, some]) => html`<details open=${folders.size < 40 || now.startsWith(`${folder}/`) || some.some((entry) => entry.change)}><summary>${folder}/</summary>${list(some)}</details>`)}`;
}

/** @param {{ id: number, other: number, entry: Entry }} props */
function Shown({ id, other, entry }) {
  const [found, setFound] = useState(/** @type {{ own: any, before: any } | null} */ (null));
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  useEffect(() => {
    const abort = new AbortController();
    const file = (/** @type {number} */ experiment) => get(`/page/experiments/${experiment}/file`, { path: entry.path }, abort.signal);
    Promise.all([entry.change === "removed" ? null : file(id), other && entry.change !== "added" ? file(other) : null])
      .then(([own, before]) => setFound({ own, before }))
      .catch((problem) => abort.signal.aborted || setError(problem));
    return () => abort.abort();
  }, []);
  if (!found) return error ? html`<${Problem} error=${error} />` : html`<p class="loading">Loading …</p>`;
  const { own, before } = found;
  const any = own ?? before;
  const isText = !own?.isBinary && !before?.isBinary;
  return html`<h2>${entry.path} <span class="muted">${own ? bytes(own.bytes) : "removed"}</span></h2>
    ${own && isText && !own.isCut && html`<div class="tools"><button onClick=${() => download(entry.path.slice(entry.path.lastIndexOf("/") + 1), own.text, "text/plain")}>Download</button></div>`}
    ${!isText && html`<p class="muted">It is no text${before && own ? `: ${bytes(before.bytes)} before, ${bytes(own.bytes)} now` : `: ${bytes(any.bytes)}`}.</p>`}
    ${(own?.isCut || before?.isCut) && html`<p class="muted">Its beginning is shown; \`det experiment download-model-def ${id} DIRECTORY\` has all.</p>`}
    ${isText && (other ? html`<${Difference} before=${before?.text ?? ""} after=${own?.text ?? ""} label=${`Changes of ${entry.path}`} />` : any.text ? html`<${Lines} text=${any.text} label=${entry.path} />` : html`<p class="muted">The file is empty.</p>`)}`;
}
