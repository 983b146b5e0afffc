// Requests to the master; tells listeners when the login has expired or the master is unreachable.

/** Whether requests succeed: the login may be "expired", or the master "unreachable". @typedef {"ok" | "expired" | "unreachable"} Connection */

/** @type {Connection} */
let connection = "ok";
/** @type {Set<(now: Connection) => void>} */
const listeners = new Set();

/** A response with an error status, with the master's message; status 0 without a response. */
export class ApiError extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Call `listener` now and whenever the connection changes. @param {(now: Connection) => void} listener @returns {() => void} ends the subscription */
export function onConnection(listener) {
  listeners.add(listener);
  listener(connection);
  return () => listeners.delete(listener);
}

/** @param {Connection} now */
export function setConnection(now) {
  if (now === connection) return;
  connection = now;
  for (const listener of listeners) listener(connection);
}

/** @typedef {Record<string, string | number | boolean | null | undefined | (string | number)[]>} Query */

/** Append a query to a path; null and undefined are left out. @param {string} path @param {Query} [query] @returns {string} */
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
 * @returns {Promise<Response>} a successful response; others are thrown as ApiError
 */
async function request(method, path, body, signal) {
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
    setConnection("unreachable");
    throw new ApiError(0, "the master does not answer");
  }
  if (response.ok) {
    setConnection("ok");
    return response;
  }
  if (response.status === 401) setConnection("expired");
  throw new ApiError(response.status, await errorText(response));
}

/** @param {Response} response @returns {Promise<string>} the message of an error response */
async function errorText(response) {
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
  return (await request("GET", address(path, query), undefined, signal)).json();
}

/**
 * Load all pages of a list of Determined's API.
 *
 * @param {string} path @param {string} name of the list in a response @param {AbortSignal} signal
 * @returns {Promise<{ items: any[], last: any }>} all items, and the last response
 */
export async function getAll(path, name, signal) {
  /** @type {any[]} */
  const items = [];
  for (;;) {
    const last = await get(path, { offset: items.length, limit: 1000 }, signal);
    items.push(...last[name]);
    if (!last[name].length || items.length >= last.pagination.total) return { items, last };
  }
}

/** @param {string} method @param {string} path @param {unknown} [body] @returns {Promise<any>} */
export async function send(method, path, body = {}) {
  const text = await (await request(method, path, body)).text();
  return text ? JSON.parse(text) : {};
}
