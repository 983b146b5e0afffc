// Curves of a metric of many trials; after a change, only curves of changed trials are loaded again.

import { html, useEffect, useMemo, useRef } from "htm/preact/standalone";
import { get } from "./api.js";
import { duration, elapsed, toNumber } from "./format.js";
import { useLive } from "./live.js";
import { useFlag, useParam } from "./router.js";
import { Check, Select } from "./parts/basics.js";

/** @typedef {{ trial: number, batches: number[], times: number[], values: number[], points: number }} Series */

const TRIALS_PER_REQUEST = 100;
const POINTS = 1000; // per curve
/** Of all curves together: more points cannot be distinguished, and slow the page down. */
const MAX_POINTS = 100_000;

/** @param {any} one a curve in the master's response, with NaN and infinities as strings @returns {Series} */
const readSeries = (one) => ({ ...one, values: one.values.map(toNumber) });

/**
 * Load the curves of trials, and load them again when they change.
 *
 * @param {number[]} trials ids
 * @param {string} metric "group.name"
 * @returns {{ series: Map<number, Series>, isLoading: boolean, error: Error | null }} `series` by trial id
 */
export function useCurves(trials, metric) {
  const wanted = useRef(trials);
  wanted.current = trials;
  const group = metric.slice(0, metric.indexOf("."));
  const name = metric.slice(metric.indexOf(".") + 1);
  /** @type {(signal: AbortSignal, change: Set<string> | null, before: Map<number, Series> | null) => Promise<Map<number, Series>>} */
  const load = async (signal, change, before) => {
    const changed = new Set([...(change ?? [])].map((topic) => Number(topic.split(":")[1])));
    const found = new Map(change ? before : []);
    const ids = wanted.current.filter((id) => !found.has(id) || changed.has(id));
    const points = Math.max(100, Math.min(POINTS, Math.round(MAX_POINTS / (wanted.current.length || 1))));
    for (let start = 0; metric && start < ids.length; start += TRIALS_PER_REQUEST) {
      const { series } = await get("/page/series", { trials: ids.slice(start, start + TRIALS_PER_REQUEST), group, name, points }, signal);
      for (const one of series) found.set(one.trial, readSeries(one));
    }
    return found;
  };
  const { data, error, refresh } = useLive(load, (topic) => /^(metrics|trial):/.test(topic) && wanted.current.includes(Number(topic.split(":")[1])), [metric]);
  useEffect(() => {
    if (data) refresh();
  }, [trials.join(","), Boolean(data)]);
  return { series: data ?? NO_SERIES, isLoading: !data && !error, error };
}

/** @type {Map<number, Series>} */
const NO_SERIES = new Map();

/** The units that the x axis can have, with their titles. @type {[string, string][]} */
const AXES = [["batches", "batches"], ["epochs", "epochs"], ["records", "records"], ["time", "time since the start"]];

/**
 * Return how many records a batch and an epoch have.
 *
 * @param {any} config @param {any} hparams @returns {{ perBatch: number, perEpoch: number }} NaN if the config does not say it
 */
export function recordsOf(config, hparams) {
  return { perBatch: Number(hparams?.global_batch_size ?? config?.hyperparameters?.global_batch_size?.val ?? config?.hyperparameters?.global_batch_size ?? NaN), perEpoch: Number(config?.records_per_epoch || NaN) };
}

/**
 * Return the x values of a curve in the unit of an axis; without the records that the unit needs, batches.
 *
 * @param {Pick<Series, "batches" | "times">} series @param {string} axis @param {{ perBatch: number, perEpoch: number }} records @param {string} start when the trial started
 * @returns {number[]} seconds, batches, records or epochs
 */
export function xsOf(series, axis, records, start) {
  if (axis === "time") return elapsed(series.times, Date.parse(start));
  if (axis === "records" && records.perBatch) return series.batches.map((batch) => batch * records.perBatch);
  if (axis === "epochs" && records.perBatch && records.perEpoch) return series.batches.map((batch) => (batch * records.perBatch) / records.perEpoch);
  return series.batches;
}

/** @param {any} metrics names by group @returns {string[]} "group.name", those of group validation first, then training */
export function useMetricNames(metrics) {
  return useMemo(() => {
    const groups = Object.keys(metrics.groups);
    const order = ["validation", "training"];
    groups.sort((a, b) => (order.indexOf(a) + 1 || 9) - (order.indexOf(b) + 1 || 9) || a.localeCompare(b));
    return groups.flatMap((group) => metrics.groups[group].map((/** @type {string} */ name) => `${group}.${name}`));
  }, [metrics]);
}

/**
 * Return the options with which curves are drawn, which stand in the address, and the controls that change them.
 *
 * @param {{ perBatch: number, perEpoch: number }} [records] disables axes that need what it lacks; without it all can be chosen
 */
export function useChartOptions(records) {
  const [axis, setAxis] = useParam("x", "batches");
  const [isLog, setLog] = useFlag("log");
  const [smoothing, setSmoothing] = useParam("smooth", "0");
  /** @param {string} one @returns {string} why an axis is disabled; empty if it is not */
  const reasonDisabled = (one) =>
    !records ? "" : one === "records" && !records.perBatch ? "hyperparameters.global_batch_size is not set" : one === "epochs" && !(records.perBatch && records.perEpoch) ? "records_per_epoch or hyperparameters.global_batch_size is not set" : "";
  const tools = html`
    <label>Over <${Select} value=${axis} set=${setAxis}>
      ${AXES.map(([one, title]) => html`<option value=${one} disabled=${Boolean(reasonDisabled(one))} title=${reasonDisabled(one)}>${title}</option>`)}
    <//></label>
    <${Check} checked=${isLog} set=${setLog}>log scale<//>
    <label>Smoothing <input type="range" min="0" max="0.99" step="0.01" value=${smoothing} onInput=${(/** @type {any} */ event) => setSmoothing(event.target.value)} /> ${smoothing}</label>`;
  const options = { axis, isLog, smoothing: Number(smoothing), label: AXES.find(([one]) => one === axis)?.[1] ?? "batches", showX: axis === "time" ? duration : undefined };
  return { options, tools };
}
