// What people have written about an experiment: name, description, labels, notes. Saved by the master's own request.

import { html, useEffect, useRef, useState } from "htm/preact/standalone";
import { get, send } from "../../api.js";
import { attempt } from "../../parts/basics.js";

/**
 * A text that is being edited: it follows what the master has until somebody types.
 *
 * @param {string} stored
 */
function useDraft(stored) {
  const [draft, setDraft] = useState(/** @type {string | null} */ (null));
  const base = useRef(stored);
  if (draft === null || draft === stored) base.current = stored;
  useEffect(() => {
    if (draft === stored) setDraft(null);
  }, [draft, stored]);
  return { text: draft ?? stored, set: setDraft, isChanged: draft !== null && draft !== stored, isOvertaken: draft !== null && draft !== stored && base.current !== stored, drop: () => setDraft(null) };
}

/** @param {{ id: number, experiment: any, reload: () => void }} props */
export function Notes({ id, experiment, reload }) {
  const [label, setLabel] = useState("");
  const save = (/** @type {Record<string, unknown>} */ changes, /** @type {string} */ done) =>
    attempt(async () => {
      await send("PATCH", `/api/v1/experiments/${id}`, changes);
      reload();
    }, done);
  const labels = /** @type {string[]} */ (experiment.labels);
  /** Change the labels that there are now: those that are shown may be older than what was asked for a moment ago. @param {(now: string[]) => string[]} change @param {string} done */
  const relabel = (change, done) =>
    attempt(async () => {
      const { experiments } = await get("/page/experiments", { ids: [id] });
      await send("PATCH", `/api/v1/experiments/${id}`, { labels: change(experiments[0]?.labels ?? labels) });
      reload();
    }, done);
  const add = async (/** @type {Event} */ event) => {
    event.preventDefault();
    const wanted = label.trim();
    if (wanted && (await relabel((now) => [...new Set([...now, wanted])], `label ${wanted}: added`))) setLabel("");
  };
  return html`
    <h2>Name and description</h2>
    <${Line} key="name" title="Name" stored=${experiment.name} isRequired onSave=${(/** @type {string} */ name) => save({ name }, "name: saved")} />
    <${Line} key="description" title="Description" stored=${experiment.description} onSave=${(/** @type {string} */ description) => save({ description }, "description: saved")} />
    <h2>Labels</h2>
    <div class="tools">
      ${labels.map((one) => html`<span class="label" key=${one}>${one} <button class="plain" aria-label=${`Remove label ${one}`} onClick=${() => relabel((now) => now.filter((other) => other !== one), `label ${one}: removed`)}>×</button></span>`)}
      ${!labels.length && html`<span class="muted">none</span>`}
    </div>
    <form class="filters" onSubmit=${add}><label>New label <input value=${label} onInput=${(/** @type {any} */ event) => setLabel(event.target.value)} /></label><button disabled=${!label.trim()}>Add</button></form>
    <h2>Notes</h2>
    <${Area} stored=${experiment.notes} onSave=${(/** @type {string} */ notes) => save({ notes }, "notes: saved")} />`;
}

/** @param {{ title: string, stored: string, isRequired?: boolean, onSave: (text: string) => Promise<boolean> }} props */
function Line({ title, stored, isRequired, onSave }) {
  const draft = useDraft(stored);
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    onSave(draft.text);
  };
  return html`<form class="filters" onSubmit=${submit}><label class="field">${title} <input required=${isRequired} value=${draft.text} onInput=${(/** @type {any} */ event) => draft.set(event.target.value)} /></label>
    <button disabled=${!draft.isChanged}>Save</button><${Overtaken} draft=${draft} /></form>`;
}

/** @param {{ stored: string, onSave: (text: string) => Promise<boolean> }} props */
function Area({ stored, onSave }) {
  const draft = useDraft(stored);
  useEffect(() => {
    if (!draft.isChanged) return undefined;
    const ask = (/** @type {BeforeUnloadEvent} */ event) => event.preventDefault();
    window.addEventListener("beforeunload", ask);
    return () => window.removeEventListener("beforeunload", ask);
  }, [draft.isChanged]);
  return html`<textarea aria-label="Notes" rows="12" value=${draft.text} placeholder="What was tried, and what came of it." onInput=${(/** @type {any} */ event) => draft.set(event.target.value)}></textarea>
    <div class="tools"><button class="main" disabled=${!draft.isChanged} onClick=${() => onSave(draft.text)}>Save notes</button>
      <button disabled=${!draft.isChanged} onClick=${draft.drop}>Discard changes</button><${Overtaken} draft=${draft} /></div>`;
}

/** @param {{ draft: ReturnType<typeof useDraft> }} props */
function Overtaken({ draft }) {
  return draft.isOvertaken ? html`<span class="problem" role="alert">It was changed meanwhile by somebody else; saving replaces that.</span>` : null;
}
