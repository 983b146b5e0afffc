// The page's state is in its address, so that a view can be bookmarked, shared and returned to.

import { html, useEffect, useState } from "htm/preact/standalone";

/** @type {Set<() => void>} */
const listeners = new Set();

function notifyListeners() {
  for (const listener of [...listeners]) listener();
}

window.addEventListener("popstate", notifyListeners);

/** Go to an address of the page. @param {string} to @param {{replace?: boolean}} [how] `replace` adds no entry to the history */
export function navigate(to, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", to);
  if (!replace) window.scrollTo(0, 0);
  notifyListeners();
}

/** @returns {{ path: string[], query: URLSearchParams }} decoded segments of the path, and the query */
function currentLocation() {
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

/** @returns {{ path: string[], query: URLSearchParams }} the address, kept current */
export function useLocation() {
  const [current, setCurrent] = useState(currentLocation);
  useEffect(() => {
    const listener = () => setCurrent(currentLocation());
    listeners.add(listener);
    listener();
    return () => listeners.delete(listener);
  }, []);
  return current;
}

/**
 * A value that is in the page's query, with a function that sets it.
 *
 * @param {string} name of the query parameter @param {string} [fallback] the value without the parameter
 * @returns {[string, (value: string) => void]}
 */
export function useParam(name, fallback = "") {
  const { query } = useLocation();
  return [query.get(name) ?? fallback, (value) => setParams({ [name]: value === fallback ? "" : value })];
}

/**
 * A switch that is in the page's query as "1" while it is on.
 *
 * @param {string} name of the query parameter
 * @returns {[boolean, (isOn: boolean) => void]}
 */
export function useFlag(name) {
  const [value, set] = useParam(name);
  return [Boolean(value), (isOn) => set(isOn ? "1" : "")];
}

/** Set query parameters of the address; empty values remove theirs. @param {Record<string, string>} values */
export function setParams(values) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(values)) {
    if (value) query.set(name, value);
    else query.delete(name);
  }
  const text = query.toString();
  navigate(location.pathname + (text ? `?${text}` : ""), { replace: true });
}

/** Follow a link of this page without a reload. @param {MouseEvent} event */
export function onLinkClick(event) {
  if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  const link = /** @type {Element} */ (event.target).closest("a[href]");
  if (!(link instanceof HTMLAnchorElement) || link.target || link.hasAttribute("download")) return;
  if (link.origin !== location.origin || !(link.pathname === "/" || link.pathname.startsWith("/det"))) return;
  event.preventDefault();
  navigate(link.pathname + link.search);
}

/** Tabs as links. @param {{ tabs: [string, string][], now: string, label: string }} props `tabs` are (address, text), `now` is the current address */
export function Tabs({ tabs, now, label }) {
  return html`<nav class="tabs" aria-label=${label}>
    ${tabs.map(([to, text]) => html`<a href=${to} aria-current=${to === now ? "page" : undefined}>${text}</a>`)}
  </nav>`;
}
