// Where the page is: the address says it all, so that it can be kept, sent and gone back to.

import { html, useEffect, useState } from "htm/preact/standalone";

/** @type {Set<() => void>} */
const listeners = new Set();

function changed() {
  for (const listener of [...listeners]) listener();
}

window.addEventListener("popstate", changed);

/** @param {string} to @param {{replace?: boolean}} [how] */
export function navigate(to, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", to);
  if (!replace) window.scrollTo(0, 0);
  changed();
}

/** @returns {{ path: string[], query: URLSearchParams }} the words of the address, decoded */
function here() {
  return {
    path: location.pathname
      .split("/")
      .filter(Boolean)
      .map((word) => {
        try {
          return decodeURIComponent(word);
        } catch {
          return word;
        }
      }),
    query: new URLSearchParams(location.search),
  };
}

/** @returns {{ path: string[], query: URLSearchParams }} */
export function useLocation() {
  const [where, setWhere] = useState(here);
  useEffect(() => {
    const listener = () => setWhere(here());
    listeners.add(listener);
    listener();
    return () => listeners.delete(listener);
  }, []);
  return where;
}

/**
 * A part of the page's state that stands in its address.
 *
 * @param {string} name @param {string} [fallback] which is not written
 * @returns {[string, (value: string) => void]}
 */
export function useParam(name, fallback = "") {
  const { query } = useLocation();
  return [query.get(name) ?? fallback, (value) => setParams({ [name]: value === fallback ? "" : value })];
}

/** Change parts of the address; what is empty goes. @param {Record<string, string>} values */
export function setParams(values) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(values)) {
    if (value) query.set(name, value);
    else query.delete(name);
  }
  const text = query.toString();
  navigate(location.pathname + (text ? `?${text}` : ""), { replace: true });
}

/** Follow links of this page without loading it again. @param {MouseEvent} event */
export function onLinkClick(event) {
  if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  const link = /** @type {Element} */ (event.target).closest("a[href]");
  if (!(link instanceof HTMLAnchorElement) || link.target || link.hasAttribute("download")) return;
  if (link.origin !== location.origin || !(link.pathname === "/" || link.pathname.startsWith("/det"))) return;
  event.preventDefault();
  navigate(link.pathname + link.search);
}

/** Tabs as links. @param {{ tabs: [string, string][], now: string, label: string }} props of (address, text) */
export function Tabs({ tabs, now, label }) {
  return html`<nav class="tabs" aria-label=${label}>
    ${tabs.map(([to, text]) => html`<a href=${to} aria-current=${to === now ? "page" : undefined}>${text}</a>`)}
  </nav>`;
}
