// A question with fields: it stays open, and says why, until what was asked for is done.

import { html, render, useEffect, useRef, useState } from "htm/preact/standalone";

/**
 * @template T
 * @param {(end: (answer: T | null) => void) => unknown} content @returns {Promise<T | null>} null where it was given up
 */
export function asked(content) {
  const place = document.createElement("div");
  document.body.append(place);
  return new Promise((resolve) => {
    const end = (/** @type {T | null} */ answer) => {
      render(/** @type {any} */ (null), place);
      place.remove();
      resolve(answer);
    };
    render(/** @type {any} */ (content(end)), place);
  });
}

/**
 * @param {object} props
 * @param {string} props.title
 * @param {string} props.action on the button
 * @param {() => Promise<void>} props.onDo raises what is wrong
 * @param {() => void} props.onEnd given up
 * @param {unknown} props.children the fields
 * @param {unknown} [props.tools] more buttons
 * @param {boolean} [props.isWide]
 */
export function Form({ title, action, onDo, onEnd, children, tools, isWide }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  useEffect(() => dialog.current?.showModal(), []);
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
  return html`<dialog ref=${dialog} class=${isWide ? "wide" : ""} onClose=${onEnd} aria-labelledby="form-title">
    <form onSubmit=${submit}>
      <h2 id="form-title">${title}</h2>
      ${children}
      ${problem && html`<pre class="problem" role="alert">${problem}</pre>`}
      <div class="tools"><button type="button" onClick=${onEnd}>Cancel</button>${tools}<button class="main" disabled=${isBusy}>${action}</button></div>
    </form>
  </dialog>`;
}
