// Asks the master, and says what keeps it from answering.

/** What the page knows of its login and of the master: "ok", "expired" or "unreachable". @typedef {"ok" | "expired" | "unreachable"} Reach */

/** @type {Reach} */
let reach = "ok";
/** @type {Set<(reach: Reach) => void>} */
const listeners = new Set();

/** An answer that is an error, with the master's own words. */
export class ApiError extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** @param {(reach: Reach) => void} listener @returns {() => void} what ends it */
export function onReach(listener) {
  listeners.add(listener);
  listener(reach);
  return () => listeners.delete(listener);
}

/** @param {Reach} now */
export function setReach(now) {
  if (now === reach) return;
  reach = now;
  for (const listener of listeners) listener(reach);
}

/** @typedef {Record<string, string | number | boolean | null | undefined | (string | number)[]>} Query */

/** @param {string} path @param {Query} [query] @returns {string} */
export function address(path, query = {}) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (Array.isArray(value)) value.forEach((one) => words.append(name, String(one)));
    else if (value !== null && value !== undefined) words.append(name, String(value));
  }
  const text = words.toString();
  return text ? `${path}?${text}` : path;
}

/**
 * @param {string} method @param {string} path @param {unknown} [body] @param {AbortSignal} [signal]
 * @returns {Promise<Response>} one that is no error
 */
async function answer(method, path, body, signal) {
  /** @type {Response} */
  let response;
  try {
    response = await fetch(path, {
      method,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      headers: { Accept: "application/json" },
    });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    setReach("unreachable");
    throw new ApiError(0, "the master does not answer");
  }
  if (response.ok) {
    setReach("ok");
    return response;
  }
  if (response.status === 401) setReach("expired");
  throw new ApiError(response.status, await problemOf(response));
}

/** @param {Response} response @returns {Promise<string>} */
async function problemOf(response) {
  const text = await response.text();
  try {
    const error = JSON.parse(text).error;
    return error.error || error.message || error.reason || text;
  } catch {
    return text || `the master answers ${response.status}`;
  }
}

/** @param {string} path @param {Query} [query] @param {AbortSignal} [signal] @returns {Promise<any>} */
export async function get(path, query, signal) {
  return (await answer("GET", address(path, query), undefined, signal)).json();
}

/** @param {string} method @param {string} path @param {unknown} [body] @returns {Promise<any>} */
export async function send(method, path, body = {}) {
  const text = await (await answer(method, path, body)).text();
  return text ? JSON.parse(text) : {};
}
