// A dialog that asks for some texts: what is made or changed with them is the caller's.

import { html, render, useLayoutEffect, useRef, useState } from "htm/preact/standalone";

/**
 * @typedef {object} Field
 * @property {string} name
 * @property {string} label
 * @property {string} [value]
 * @property {boolean} [isLong] several lines
 * @property {boolean} [isRequired]
 * @property {[number, number]} [range] of a whole number
 * @property {string} [hint]
 */

/**
 * Ask for texts.
 *
 * @param {string} title @param {Field[]} fields @param {string} action on the button
 * @returns {Promise<Record<string, string> | null>} null where the person has thought better of it
 */
export function asked(title, fields, action) {
  const place = document.createElement("div");
  document.body.append(place);
  const before = /** @type {HTMLElement | null} */ (document.activeElement);
  return new Promise((resolve) => {
    /** @param {Record<string, string> | null} values */
    const end = (values) => {
      render(/** @type {any} */ (null), place);
      place.remove();
      before?.focus?.();
      resolve(values);
    };
    render(html`<${Form} title=${title} fields=${fields} action=${action} onEnd=${end} />`, place);
  });
}

/** @param {{ title: string, fields: Field[], action: string, onEnd: (values: Record<string, string> | null) => void }} props */
function Form({ title, fields, action, onEnd }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const [values, setValues] = useState(() => Object.fromEntries(fields.map((field) => [field.name, field.value ?? ""])));
  useLayoutEffect(() => {
    dialog.current?.showModal();
    /** @type {HTMLElement | null | undefined} */ (dialog.current?.querySelector("input, textarea"))?.focus();
  }, []);
  // No <form>: the page's policy lets none be sent.
  const isWhole = fields.every(({ name, isRequired, range }) => {
    const text = values[name].trim();
    if (range) return /^\d+$/.test(text) && Number(text) >= range[0] && Number(text) <= range[1];
    return !isRequired || text;
  });
  const done = () => isWhole && onEnd(values);
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // Else it would press the button that has the focus then.
    done();
  };
  return html`<dialog ref=${dialog} class="form" onClose=${() => onEnd(null)} aria-labelledby="form-title">
    <h2 id="form-title">${title}</h2>
    ${fields.map((field) => {
      const set = (/** @type {any} */ event) => setValues((now) => ({ ...now, [field.name]: event.target.value }));
      const shared = { id: `field-${field.name}`, value: values[field.name], onInput: set };
      return html`<p>
        <label for=${shared.id}>${field.label}</label>
        ${field.isLong
          ? html`<textarea ...${shared}></textarea>`
          : html`<input type=${field.range ? "number" : "text"} min=${field.range?.[0]} max=${field.range?.[1]} ...${shared}
              onKeyDown=${onKeyDown} />`}
        ${field.hint && html`<span class="muted">${field.hint}</span>`}
      </p>`;
    })}
    <div class="tools">
      <button onClick=${() => onEnd(null)}>Cancel</button>
      <button class="main" disabled=${!isWhole} onClick=${done}>${action}</button>
    </div>
  </dialog>`;
}

/** @param {string} text with commas @returns {string[]} labels, each once */
export function labelsOf(text) {
  return [...new Set(text.split(",").map((label) => label.trim()).filter(Boolean))];
}
