// A search as numbers: the hyperparameters that differ as axes, where a value lies on one, and how much of the metric each explains.

import { number, plain } from "./format.js";

/**
 * @typedef {{ id: number, hp: Record<string, unknown>, best: unknown }} Point a trial
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

/** @param {string} name @param {unknown[]} values @param {boolean} [isLinear] never logarithmic @returns {Axis} */
export function axisOf(name, values, isLinear = false) {
  const known = values.filter((value) => value !== undefined && value !== null);
  const numbers = known.filter(isFinite_);
  if (!numbers.length || !known.every((value) => typeof value === "number")) {
    const words = [...new Set(known.map(plain))].sort((a, b) => a.localeCompare(b, undefined, { numeric: true })).slice(0, MOST_VALUES);
    const places = new Map(words.map((word, idx) => [word, words.length === 1 ? 0.5 : idx / (words.length - 1)]));
    return { name, kind: "categorical", low: 0, high: words.length - 1, values: words, at: (value) => (value === undefined || value === null ? NaN : (places.get(plain(value)) ?? NaN)) };
  }
  const low = numbers.reduce((a, b) => Math.min(a, b), Infinity);
  const high = numbers.reduce((a, b) => Math.max(a, b), -Infinity);
  const isLog = !isLinear && low > 0 && high / low > LOG_RATIO;
  const place = (/** @type {number} */ value) => (isLog ? Math.log(value) : value);
  return {
    name, kind: isLog ? "log" : "linear", low, high, values: [],
    at: (value) => (!isFinite_(value) ? NaN : low === high ? 0.5 : (place(value) - place(low)) / (place(high) - place(low))),
  };
}

/** @param {Point[]} points @returns {Axis[]} of the hyperparameters that differ between trials */
export function varyingAxes(points) {
  const names = [...new Set(points.flatMap(({ hp }) => Object.keys(hp)))].sort();
  return names
    .map((name) => ({ name, values: points.map(({ hp }) => hp[name]) }))
    .filter(({ values }) => new Set(values.map((value) => JSON.stringify(value))).size > 1)
    .map(({ name, values }) => axisOf(name, values));
}

/** @param {Axis} axis @param {number} share from 0 to 1 @returns {string} what stands there */
export function labelAt(axis, share) {
  if (axis.kind === "categorical") return axis.values[Math.round(share * (axis.values.length - 1))] ?? "";
  if (axis.kind === "log") return number(axis.low * (axis.high / axis.low) ** share, 3);
  return number(axis.low + share * (axis.high - axis.low), 3);
}

/** @param {Axis} axis @param {number} most @returns {[number, string][]} places from 0 to 1 with their labels */
export function ticksOf(axis, most = 5) {
  if (axis.low === axis.high) return [[0.5, labelAt(axis, 0)]];
  const count = axis.kind === "categorical" ? axis.values.length : most;
  const step = Math.ceil(count / most);
  return Array.from({ length: count }, (_, idx) => idx / (count - 1)).filter((_, idx) => idx % step === 0).map((at) => [at, labelAt(axis, at)]);
}

/**
 * Where metric values lie between the best (0) and the worst (1); the worst twentieth is one colour, as one bad trial would make all others alike.
 *
 * @param {Point[]} points @param {boolean} isSmaller @returns {(value: unknown) => number}
 */
export function meritOf(points, isSmaller) {
  const values = points.map(({ best }) => best).filter(isFinite_).sort((a, b) => (isSmaller ? a - b : b - a));
  const worst = values[Math.ceil(0.95 * (values.length - 1))];
  return (value) => (isFinite_(value) ? (values[0] === worst ? 0 : Math.min(Math.max((value - values[0]) / (worst - values[0]), 0), 1)) : NaN);
}

/** Trials with a value that it takes before anything is said. */
export const IMPORTANCE_MIN_TRIALS = 20;
const MOST_BINS = 5;

/** @param {number[]} values @returns {number[]} ranks from 1, equal values share theirs */
function ranks(values) {
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
 * @returns {{ name: string, share: number }[] | null} the largest first, NaN last; null for too few trials
 */
export function importance(points, axes) {
  const all = points.filter(({ best }) => isFinite_(best));
  if (all.length < IMPORTANCE_MIN_TRIALS) return null;
  return axes
    .map((axis) => {
      const own = all.filter(({ hp }) => !Number.isNaN(axis.at(hp[axis.name])));
      const places = ranks(own.map(({ hp }) => axis.at(hp[axis.name])));
      const numBins = Math.min(MOST_BINS, Math.floor(own.length / 4));
      const groups = places.map((place) => (axis.kind === "categorical" ? place : Math.min(Math.floor(((place - 0.5) / own.length) * numBins), numBins - 1)));
      return { name: axis.name, share: own.length < IMPORTANCE_MIN_TRIALS ? NaN : explained(ranks(own.map(({ best }) => Number(best))), groups) };
    })
    .sort((a, b) => (b.share || 0) - (a.share || 0));
}

/** @param {number[]} values @param {number[]} groups @returns {number} ε², from 0 to 1 */
function explained(values, groups) {
  /** @param {number[]} some */
  const spread = (some) => {
    const mean = some.reduce((sum, one) => sum + one, 0) / some.length;
    return some.reduce((sum, one) => sum + (one - mean) ** 2, 0);
  };
  const each = [...new Set(groups)].map((group) => values.filter((_, idx) => groups[idx] === group));
  const free = values.length - each.length;
  if (!spread(values) || free <= 0) return NaN;
  const within = each.reduce((sum, own) => sum + spread(own), 0);
  return Math.min(Math.max(1 - within / free / (spread(values) / (values.length - 1)), 0), 1);
}
