// Dialogs: confirmation of actions that cannot be undone, and forms that stay open until their action succeeds.

import { html, render, useLayoutEffect, useRef, useState } from "htm/preact/standalone";

/**
 * Show a dialog until it calls `end`, then return the focus to the element that had it.
 *
 * @template T
 * @param {(end: (answer: T | null) => void) => unknown} content renders the dialog @returns {Promise<T | null>} null if it was cancelled
 */
export function openDialog(content) {
  const place = document.createElement("div");
  document.body.append(place);
  const before = /** @type {HTMLElement | null} */ (document.activeElement);
  return new Promise((resolve) => {
    const end = (/** @type {T | null} */ answer) => {
      render(/** @type {any} */ (null), place);
      place.remove();
      before?.focus?.();
      resolve(answer);
    };
    render(/** @type {any} */ (content(end)), place);
  });
}

/** Open the dialog as modal before the next paint, as a key may be pressed before that. */
function useModal() {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useLayoutEffect(() => dialog.current?.showModal(), []);
  return dialog;
}

/**
 * Ask the user to confirm an action that cannot be undone.
 *
 * @param {string} question @param {string} action text of the button @returns {Promise<boolean>}
 */
export async function confirmAction(question, action) {
  return Boolean(await openDialog((/** @type {(isConfirmed: boolean | null) => void} */ end) => html`<${Question} text=${question} action=${action} onEnd=${end} />`));
}

/** @param {{ text: string, action: string, onEnd: (isConfirmed: boolean | null) => void }} props */
function Question({ text, action, onEnd }) {
  return html`<dialog ref=${useModal()} onClose=${() => onEnd(null)} aria-labelledby="question">
    <p id="question">${text}</p>
    <div class="tools">
      <button onClick=${() => onEnd(null)} autofocus>Cancel</button>
      <button class="danger" onClick=${() => onEnd(true)}>${action}</button>
    </div>
  </dialog>`;
}

/**
 * A dialog with fields; if its action fails, it shows the error and stays open.
 *
 * @param {object} props
 * @param {string} props.title
 * @param {string} props.action text of the button
 * @param {() => Promise<void>} props.onDo the action; throws an error to show
 * @param {() => void} props.onEnd called if the user cancels
 * @param {unknown} props.children the fields
 * @param {unknown} [props.tools] more buttons
 * @param {string} [props.kind] class of the dialog: "wide" or "form"
 * @param {boolean} [props.isReady] whether the fields are complete
 */
export function Form({ title, action, onDo, onEnd, children, tools, kind = "", isReady = true }) {
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  const submit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    setBusy(true);
    setProblem("");
    try {
      await onDo();
    } catch (error) {
      setProblem(/** @type {Error} */ (error).message);
      setBusy(false);
    }
  };
  return html`<dialog ref=${useModal()} class=${kind} onClose=${onEnd} aria-labelledby="form-title">
    <form onSubmit=${submit}>
      <h2 id="form-title">${title}</h2>
      ${children}
      ${problem && html`<pre class="problem" role="alert">${problem}</pre>`}
      <div class="tools"><button type="button" onClick=${onEnd}>Cancel</button>${tools}<button class="main" disabled=${isBusy || !isReady}>${action}</button></div>
    </form>
  </dialog>`;
}

/**
 * @typedef {object} Field
 * @property {string} name
 * @property {string} label
 * @property {string} [value]
 * @property {boolean} [isLong] whether it has several lines
 * @property {boolean} [isRequired]
 * @property {[number, number]} [range] makes it a whole number in this range
 * @property {string} [hint]
 */

/**
 * Ask the user for texts.
 *
 * @param {string} title @param {Field[]} fields @param {string} action text of the button
 * @returns {Promise<Record<string, string> | null>} texts by the fields' names; null if the user cancels
 */
export function askTexts(title, fields, action) {
  return openDialog((end) => html`<${Texts} title=${title} fields=${fields} action=${action} onEnd=${end} />`);
}

/** @param {{ title: string, fields: Field[], action: string, onEnd: (values: Record<string, string> | null) => void }} props */
function Texts({ title, fields, action, onEnd }) {
  const [values, setValues] = useState(() => Object.fromEntries(fields.map((field) => [field.name, field.value ?? ""])));
  const isReady = fields.every(({ name, isRequired, range }) => {
    const text = values[name].trim();
    if (range) return /^\d+$/.test(text) && Number(text) >= range[0] && Number(text) <= range[1];
    return !isRequired || text;
  });
  return html`<${Form} title=${title} action=${action} kind="form" isReady=${isReady} onDo=${async () => onEnd(values)} onEnd=${() => onEnd(null)}>
    ${fields.map((field) => {
      const set = (/** @type {any} */ event) => setValues((now) => ({ ...now, [field.name]: event.target.value }));
      const shared = { id: `field-${field.name}`, value: values[field.name], onInput: set };
      return html`<p>
        <label for=${shared.id}>${field.label}</label>
        ${field.isLong
          ? html`<textarea ...${shared}></textarea>`
          : html`<input type=${field.range ? "number" : "text"} min=${field.range?.[0]} max=${field.range?.[1]} ...${shared} />`}
        ${field.hint && html`<span class="muted">${field.hint}</span>`}
      </p>`;
    })}
  <//>`;
}

/** @param {{ name: string, description: string, labels: string[], notes: string }} row an experiment or a model @returns {Field[]} fields to edit these texts */
export function editFields({ name, description, labels, notes }) {
  return [
    { name: "name", label: "Name", value: name, isRequired: true },
    { name: "description", label: "Description", value: description },
    { name: "labels", label: "Labels", value: labels.join(", "), hint: "with commas between" },
    { name: "notes", label: "Notes", value: notes, isLong: true },
  ];
}

/** @param {string} text labels separated by commas @returns {string[]} the labels, without duplicates */
export function labelsOf(text) {
  return [...new Set(text.split(",").map((label) => label.trim()).filter(Boolean))];
}
