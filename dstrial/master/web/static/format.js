// Numbers, times and sizes as text for users.

/** @param {unknown} value a number, or "NaN", "Infinity" or "-Infinity" @returns {number} */
export function toNumber(value) {
  if (typeof value === "number") return value;
  return value === "Infinity" ? Infinity : value === "-Infinity" ? -Infinity : NaN;
}

/** Format a number; other values become text as they are. @param {unknown} value @param {number} [digits] significant digits @returns {string} */
export function number(value, digits = 5) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(Math.max(digits - 2, 0)).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(digits)));
}

/** @param {unknown} value of a hyperparameter @returns {string} text for a table; objects as JSON */
export function plain(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return number(value, 6);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** @param {number} seconds @returns {string} with the two largest units, such as "2h 5m"; empty if negative or not finite */
export function duration(seconds) {
  if (!Number.isFinite(seconds) || seconds < 0) return "";
  if (seconds < 1) return "0s";
  const units = /** @type {[number, string][]} */ ([[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]]);
  const words = [];
  let rest = Math.floor(seconds);
  for (const [size, name] of units) {
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count) words.push(`${count}${name}`);
    else if (words.length) break;
    if (words.length === 2) break;
  }
  return words.join(" ");
}

/** @param {string | null} text a time in ISO format @returns {string} time since then in its largest unit, such as "5m ago" */
export function ago(text) {
  return text ? `${duration(secondsBetween(text, null)).split(" ")[0]} ago` : "";
}

/** Shorten dotted names to their last words, as many as make them unique. @param {string[]} names @returns {Map<string, string>} name -> short name */
export function shortNames(names) {
  const last = (/** @type {string} */ name, /** @type {number} */ count) => name.split(".").slice(-count).join(".");
  return new Map(names.map((name) => {
    let count = 1;
    while (count < name.split(".").length && names.some((other) => other !== name && last(other, count) === last(name, count))) count += 1;
    return [name, last(name, count)];
  }));
}

/** @param {string} name of a telemetry metric, such as "data_wait_ms" @returns {string} such as "data wait (ms)" */
export function withUnit(name) {
  return name.replace(/_(ms|bytes)$/, " ($1)").replaceAll("_", " ");
}

/** @param {number} count of bytes @returns {string} such as "1.5 MiB" */
export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = count;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit && size < 10 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

const LOCAL = new Intl.DateTimeFormat(undefined, {
  year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false,
});

/** @param {string | null} text a time in ISO format @returns {string} in the user's time zone */
export function localTime(text) {
  if (!text) return "";
  const ms = Date.parse(text);
  return Number.isNaN(ms) ? text : LOCAL.format(ms);
}

/** @param {string | null} text a time in ISO format @returns {string} such as "2026-01-31 12:00:00 UTC" */
export function utcTime(text) {
  return text ? `${text.slice(0, 19).replace("T", " ")} UTC` : "";
}

/** @param {string} from @param {string | null} to null means now @returns {number} seconds; 0 if a clock was set back in between */
export function secondsBetween(from, to) {
  return Math.max(0, (to ? Date.parse(to) : Date.now()) - Date.parse(from)) / 1000;
}

/** @param {number[]} times milliseconds @param {number} start milliseconds @returns {number[]} seconds since the start, which never fall even if a clock was set back */
export function elapsed(times, start) {
  let last = 0;
  return times.map((ms) => (last = Math.max(last, (ms - start) / 1000)));
}

/**
 * Flatten nested objects: keys become dotted names.
 *
 * @param {Record<string, any> | null | undefined} values @param {string} [before] prefix of the names @returns {Record<string, unknown>}
 */
export function flat(values, before = "") {
  /** @type {Record<string, unknown>} */
  const found = {};
  for (const [name, value] of Object.entries(values ?? {})) {
    if (value && typeof value === "object" && !Array.isArray(value)) Object.assign(found, flat(value, `${before}${name}.`));
    else found[before + name] = value;
  }
  return found;
}

/** Let the browser save a file. @param {string} name @param {string | Blob} content @param {string} [type] media type */
export function download(name, content, type = "text/csv") {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** @param {unknown[][]} rows @returns {string} CSV (RFC 4180); text that a spreadsheet would run as a formula gets an apostrophe in front */
export function csv(rows) {
  const cell = (/** @type {unknown} */ value) => {
    let text = value === null || value === undefined ? "" : String(value);
    // Test the written text: that of a list begins with its first element.
    if (typeof value !== "number" && /^(\s*[=+\-@]|[\t\r])/.test(text) && Number.isNaN(Number(text))) text = `'${text}`;
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}
