// A search as numbers: the hyperparameters that differ as axes, where a value lies on one, and how much of the metric each explains.

import { number, plain } from "./format.js";

/**
 * @typedef {{ id: number, hp: Record<string, unknown>, best: unknown, state: string, batches: number }} Point a trial
 *
 * @typedef {object} Axis
 * @property {string} name
 * @property {"linear" | "log" | "categorical"} kind
 * @property {number} low
 * @property {number} high
 * @property {string[]} values of a categorical one, in order
 * @property {(value: unknown) => number} at from 0 to 1; NaN where a value has no place
 */

/** Most values that an axis has a place of its own for. */
const MOST_VALUES = 40;
const LOG_RATIO = 50;

/** @param {unknown} value @returns {value is number} */
const isFinite_ = (value) => typeof value === "number" && Number.isFinite(value);

/** @param {any} config @param {string} name with dots @returns {any} the specification of a hyperparameter, if the config has one */
function specOf(config, name) {
  let found = config?.hyperparameters;
  for (const part of name.split(".")) found = found?.[part];
  return found && typeof found === "object" && typeof found.type === "string" ? found : null;
}

/**
 * @param {string} name @param {unknown[]} values @param {string} [wanted] the kind, where it is known
 * @returns {Axis}
 */
export function axisOf(name, values, wanted = "") {
  const known = values.filter((value) => value !== undefined && value !== null);
  const numbers = known.filter(isFinite_);
  const isNumeric = wanted !== "categorical" && numbers.length > 0 && known.every((value) => typeof value === "number");
  if (!isNumeric) {
    const words = [...new Set(known.map(plain))].sort((a, b) => a.localeCompare(b, undefined, { numeric: true })).slice(0, MOST_VALUES);
    const places = new Map(words.map((word, idx) => [word, words.length === 1 ? 0.5 : idx / (words.length - 1)]));
    return { name, kind: "categorical", low: 0, high: words.length - 1, values: words, at: (value) => (value === undefined || value === null ? NaN : (places.get(plain(value)) ?? NaN)) };
  }
  const low = numbers.reduce((a, b) => Math.min(a, b), Infinity);
  const high = numbers.reduce((a, b) => Math.max(a, b), -Infinity);
  const isLog = low > 0 && (wanted === "log" || (wanted === "" && high / low > LOG_RATIO));
  const [from, to] = isLog ? [Math.log(low), Math.log(high)] : [low, high];
  return {
    name, kind: isLog ? "log" : "linear", low, high, values: [],
    at: (value) => (!isFinite_(value) || (isLog && value <= 0) ? NaN : to === from ? 0.5 : ((isLog ? Math.log(value) : value) - from) / (to - from)),
  };
}

/**
 * The hyperparameters that differ between trials.
 *
 * @param {Point[]} points @param {any} config of the experiment @returns {Axis[]}
 */
export function varyingAxes(points, config) {
  /** @type {Map<string, Set<string>>} */
  const seen = new Map();
  for (const { hp } of points)
    for (const [name, value] of Object.entries(hp)) {
      const own = seen.get(name) ?? new Set();
      if (own.size < 2) own.add(JSON.stringify(value) ?? "");
      seen.set(name, own);
    }
  return [...seen]
    .filter(([name, values]) => values.size > 1 || points.some(({ hp }) => !(name in hp)))
    .map(([name]) => {
      const kind = specOf(config, name)?.type;
      return axisOf(name, points.map(({ hp }) => hp[name]), kind === "log" ? "log" : kind === "categorical" ? "" : kind ? "linear" : "");
    })
    .sort((a, b) => a.name.localeCompare(b.name));
}

/** @param {Axis} axis @param {number} share from 0 to 1 @returns {string} what stands there */
export function labelAt(axis, share) {
  if (axis.kind === "categorical") return axis.values[Math.round(share * (axis.values.length - 1))] ?? "";
  if (axis.kind === "log") return number(Math.exp(Math.log(axis.low) + share * (Math.log(axis.high) - Math.log(axis.low))), 3);
  return number(axis.low + share * (axis.high - axis.low), 3);
}

/** @param {Axis} axis @param {number} most @returns {[number, string][]} places from 0 to 1 with their labels */
export function ticksOf(axis, most = 5) {
  if (axis.kind === "categorical") {
    const step = Math.max(1, Math.ceil(axis.values.length / Math.max(most, 2)));
    return axis.values.flatMap((value, idx) => (idx % step ? [] : [/** @type {[number, string]} */ ([axis.at(value), value])]));
  }
  if (axis.low === axis.high) return [[0.5, number(axis.low, 3)]];
  return Array.from({ length: most }, (_, idx) => [idx / (most - 1), labelAt(axis, idx / (most - 1))]);
}

/**
 * Where metric values lie between the best (0) and the worst (1); the worst twentieth is one colour, as one bad trial would make all others alike.
 *
 * @param {Point[]} points @param {boolean} isSmaller @returns {(value: unknown) => number}
 */
export function meritOf(points, isSmaller) {
  const values = points.map(({ best }) => best).filter(isFinite_).sort((a, b) => (isSmaller ? a - b : b - a));
  if (!values.length) return () => NaN;
  const best = values[0];
  const worst = values[Math.min(values.length - 1, Math.ceil(0.95 * (values.length - 1)))];
  return (value) => (isFinite_(value) ? (best === worst ? 0 : Math.min(Math.max((value - best) / (worst - best), 0), 1)) : NaN);
}

export const IMPORTANCE_METHOD = "rank variance explained (bias-corrected correlation ratio, ε²)";
/** Trials with a value that it takes before anything is said. */
export const IMPORTANCE_MIN_TRIALS = 20;
const MOST_BINS = 5;

/** @param {number[]} values @returns {number[]} ranks from 1, equal values share theirs */
export function ranks(values) {
  const order = values.map((_, idx) => idx).sort((a, b) => values[a] - values[b]);
  const found = new Array(values.length);
  for (let start = 0; start < order.length; ) {
    let end = start;
    while (end + 1 < order.length && values[order[end + 1]] === values[order[start]]) end += 1;
    for (let idx = start; idx <= end; idx += 1) found[order[idx]] = (start + end) / 2 + 1;
    start = end + 1;
  }
  return found;
}

/**
 * How much of the differences between the metric's ranks each hyperparameter explains by itself: trials are put into groups by its
 * value (numbers into up to five of the same size), and the variance between groups is compared with that within, less what chance gives.
 * Source: Kelley, "An unbiased correlation ratio measure", PNAS 1935.
 *
 * @param {Point[]} points @param {Axis[]} axes
 * @returns {{ name: string, share: number, direction: number, trials: number }[] | null} the largest first; null for too few trials.
 *   `direction` is the rank correlation with the metric, NaN for a categorical one
 */
export function importance(points, axes) {
  const all = points.filter(({ best }) => isFinite_(best));
  if (all.length < IMPORTANCE_MIN_TRIALS) return null;
  return axes
    .map((axis) => {
      const own = all.filter(({ hp }) => !Number.isNaN(axis.at(hp[axis.name])));
      const metric = ranks(own.map(({ best }) => /** @type {number} */ (best)));
      const places = ranks(own.map(({ hp }) => axis.at(hp[axis.name])));
      const numBins = Math.min(MOST_BINS, Math.floor(own.length / 4));
      const groups = places.map((place) => (axis.kind === "categorical" ? place : Math.min(Math.floor(((place - 0.5) / own.length) * numBins), numBins - 1)));
      return { name: axis.name, share: own.length < IMPORTANCE_MIN_TRIALS ? NaN : explained(metric, groups), direction: axis.kind === "categorical" ? NaN : correlation(metric, places), trials: own.length };
    })
    .sort((a, b) => (Number.isNaN(b.share) ? -1 : b.share) - (Number.isNaN(a.share) ? -1 : a.share));
}

/** @param {number[]} values @param {number[]} groups @returns {number} ε², from 0 to 1 */
function explained(values, groups) {
  const mean = values.reduce((sum, one) => sum + one, 0) / values.length;
  /** @type {Map<number, number[]>} */
  const byGroup = new Map();
  values.forEach((value, idx) => byGroup.set(groups[idx], [...(byGroup.get(groups[idx]) ?? []), value]));
  const total = values.reduce((sum, one) => sum + (one - mean) ** 2, 0);
  let within = 0;
  for (const own of byGroup.values()) {
    const middle = own.reduce((sum, one) => sum + one, 0) / own.length;
    within += own.reduce((sum, one) => sum + (one - middle) ** 2, 0);
  }
  const free = values.length - byGroup.size;
  if (!total || free <= 0) return NaN;
  return Math.min(Math.max(1 - within / free / (total / (values.length - 1)), 0), 1);
}

/** @param {number[]} a @param {number[]} b @returns {number} Pearson's of two lists */
function correlation(a, b) {
  const [meanA, meanB] = [a, b].map((one) => one.reduce((sum, value) => sum + value, 0) / one.length);
  let [both, ofA, ofB] = [0, 0, 0];
  a.forEach((value, idx) => {
    both += (value - meanA) * (b[idx] - meanB);
    ofA += (value - meanA) ** 2;
    ofB += (b[idx] - meanB) ** 2;
  });
  return ofA && ofB ? both / Math.sqrt(ofA * ofB) : NaN;
}
