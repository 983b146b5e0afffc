// Hyperparameters of a search as axes for charts, and how much of the metric each hyperparameter explains.

import { number, plain } from "./format.js";

/**
 * @typedef {{ id: number, hp: Record<string, unknown>, best: unknown }} Point a trial with its hyperparameters and its best value of the metric
 *
 * @typedef {object} Axis
 * @property {string} name
 * @property {"linear" | "log" | "categorical"} kind
 * @property {number} low
 * @property {number} high
 * @property {string[]} values of a categorical axis, in order
 * @property {(value: unknown) => number} at position of a value on the axis, from 0 to 1; NaN if it has none
 */

const MAX_VALUES = 40; // of a categorical axis; others have no position
const LOG_RATIO = 50; // of the largest to the smallest value, above which an axis is logarithmic

/** @param {unknown} value @returns {value is number} */
const isFiniteNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Return an axis on which values have positions. @param {string} name @param {unknown[]} values @param {boolean} [isLinear] whether it must not be logarithmic @returns {Axis} */
export function axisOf(name, values, isLinear = false) {
  const known = values.filter((value) => value !== undefined && value !== null);
  const numbers = known.filter(isFiniteNumber);
  if (!numbers.length || !known.every((value) => typeof value === "number")) {
    const words = [...new Set(known.map(plain))].sort((a, b) => a.localeCompare(b, undefined, { numeric: true })).slice(0, MAX_VALUES);
    const places = new Map(words.map((word, idx) => [word, words.length === 1 ? 0.5 : idx / (words.length - 1)]));
    return { name, kind: "categorical", low: 0, high: words.length - 1, values: words, at: (value) => (value === undefined || value === null ? NaN : (places.get(plain(value)) ?? NaN)) };
  }
  const low = numbers.reduce((a, b) => Math.min(a, b), Infinity);
  const high = numbers.reduce((a, b) => Math.max(a, b), -Infinity);
  const isLog = !isLinear && low > 0 && high / low > LOG_RATIO;
  const place = (/** @type {number} */ value) => (isLog ? Math.log(value) : value);
  return {
    name, kind: isLog ? "log" : "linear", low, high, values: [],
    at: (value) => (!isFiniteNumber(value) ? NaN : low === high ? 0.5 : (place(value) - place(low)) / (place(high) - place(low))),
  };
}

/** @param {Point[]} points @returns {Axis[]} one for each hyperparameter that differs between trials */
export function varyingAxes(points) {
  const names = [...new Set(points.flatMap(({ hp }) => Object.keys(hp)))].sort();
  return names
    .map((name) => ({ name, values: points.map(({ hp }) => hp[name]) }))
    .filter(({ values }) => new Set(values.map((value) => JSON.stringify(value))).size > 1)
    .map(({ name, values }) => axisOf(name, values));
}

/** @param {Axis} axis @param {number} at position from 0 to 1 @returns {string} the value there */
export function labelAt(axis, at) {
  if (axis.kind === "categorical") return axis.values[Math.round(at * (axis.values.length - 1))] ?? "";
  if (axis.kind === "log") return number(axis.low * (axis.high / axis.low) ** at, 3);
  return number(axis.low + at * (axis.high - axis.low), 3);
}

/** @param {Axis} axis @param {number} most ticks @returns {[number, string][]} positions from 0 to 1 with their labels */
export function ticksOf(axis, most = 5) {
  if (axis.low === axis.high) return [[0.5, labelAt(axis, 0)]];
  const count = axis.kind === "categorical" ? axis.values.length : most;
  const step = Math.ceil(count / most);
  return Array.from({ length: count }, (_, idx) => idx / (count - 1)).filter((_, idx) => idx % step === 0).map((at) => [at, labelAt(axis, at)]);
}

/**
 * Return a function that maps a metric value to 0 for the best trial up to 1 for the worst.
 *
 * The worst twentieth of the trials is 1: otherwise a single bad trial would make all others look alike.
 *
 * @param {Point[]} points @param {boolean} isSmaller whether smaller values are better @returns {(value: unknown) => number}
 */
export function normalisedMetric(points, isSmaller) {
  const values = points.map(({ best }) => best).filter(isFiniteNumber).sort((a, b) => (isSmaller ? a - b : b - a));
  const worst = values[Math.ceil(0.95 * (values.length - 1))];
  return (value) => (isFiniteNumber(value) ? (values[0] === worst ? 0 : Math.min(Math.max((value - values[0]) / (worst - values[0]), 0), 1)) : NaN);
}

/** Trials with a finite metric that are needed to estimate importance. */
export const IMPORTANCE_MIN_TRIALS = 20;
const MAX_BINS = 5; // groups of trials by a number's value

/** @param {number[]} values @returns {number[]} ranks from 1; equal values have their mean rank */
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
 * Return how much of the variance of the metric's ranks each hyperparameter explains by itself.
 *
 * Trials are grouped by the hyperparameter's value (numbers into up to five groups of equal size). The variance within groups is
 * compared with the whole variance, corrected for the share that chance explains.
 * Source: Kelley, "An unbiased correlation ratio measure", PNAS 1935.
 *
 * @param {Point[]} points @param {Axis[]} axes
 * @returns {{ name: string, share: number }[] | null} shares from 0 to 1, the largest first, NaN last; null if there are too few trials
 */
export function importance(points, axes) {
  const all = points.filter(({ best }) => isFiniteNumber(best));
  if (all.length < IMPORTANCE_MIN_TRIALS) return null;
  return axes
    .map((axis) => {
      const own = all.filter(({ hp }) => !Number.isNaN(axis.at(hp[axis.name])));
      const places = ranks(own.map(({ hp }) => axis.at(hp[axis.name])));
      const numBins = Math.min(MAX_BINS, Math.floor(own.length / 4));
      const groups = places.map((place) => (axis.kind === "categorical" ? place : Math.min(Math.floor(((place - 0.5) / own.length) * numBins), numBins - 1)));
      return { name: axis.name, share: own.length < IMPORTANCE_MIN_TRIALS ? NaN : explained(ranks(own.map(({ best }) => Number(best))), groups) };
    })
    .sort((a, b) => (b.share || 0) - (a.share || 0));
}

/** @param {number[]} values @param {number[]} groups the group of each value @returns {number} correlation ratio ε², from 0 to 1 */
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
