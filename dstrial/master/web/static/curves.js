// Curves of a metric of many trials: only those that have changed are asked for again.

import { html, useEffect, useMemo, useRef } from "htm/preact/standalone";
import { get } from "./api.js";
import { duration, elapsed, toNumber } from "./format.js";
import { useLive } from "./live.js";
import { useParam } from "./router.js";

/** @typedef {{ trial: number, batches: number[], times: number[], values: number[], points: number }} Series */

/** Trials in a request. */
const AT_ONCE = 100;
const POINTS = 1000;
/** Of all curves together: more are not told apart, and make everything slow. */
const MOST_POINTS = 100_000;

/** @param {any} one as the master sends it @returns {Series} */
const readSeries = (one) => ({ ...one, values: one.values.map(toNumber) });

/**
 * @param {number[]} trials
 * @param {string} metric "group.name"
 * @returns {{ series: Map<number, Series>, isLoading: boolean, error: Error | null }}
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
    const points = Math.max(100, Math.min(POINTS, Math.round(MOST_POINTS / (wanted.current.length || 1))));
    for (let start = 0; metric && start < ids.length; start += AT_ONCE) {
      const { series } = await get("/page/series", { trials: ids.slice(start, start + AT_ONCE), group, name, points }, signal);
      for (const one of series) found.set(one.trial, readSeries(one));
    }
    return found;
  };
  const { data, error, refresh } = useLive(load, (topic) => /^(metrics|trial):/.test(topic) && wanted.current.includes(Number(topic.split(":")[1])), [metric]);
  useEffect(() => {
    if (data) refresh();
  }, [trials.join(","), Boolean(data)]);
  return { series: data ?? NONE, isLoading: !data && !error, error };
}

/** @type {Map<number, Series>} */
const NONE = new Map();

/** What the x axis can be. @type {[string, string][]} */
const AXES = [["batches", "batches"], ["epochs", "epochs"], ["records", "records"], ["time", "time since the start"]];

/**
 * How many records a batch has and an epoch, as far as the config says.
 *
 * @param {any} config @param {any} hparams @returns {{ perBatch: number, perEpoch: number }} NaN where it does not
 */
export function recordsOf(config, hparams) {
  return { perBatch: Number(hparams?.global_batch_size ?? config?.hyperparameters?.global_batch_size?.val ?? config?.hyperparameters?.global_batch_size ?? NaN), perEpoch: Number(config?.records_per_epoch || NaN) };
}

/**
 * @param {Series} series @param {string} axis @param {{ perBatch: number, perEpoch: number }} records @param {string} start of the trial
 * @returns {number[]} seconds, batches, records or epochs
 */
export function xsOf(series, axis, records, start) {
  if (axis === "time") return elapsed(series.times, Date.parse(start));
  if (axis === "records" && records.perBatch) return series.batches.map((batch) => batch * records.perBatch);
  if (axis === "epochs" && records.perBatch && records.perEpoch) return series.batches.map((batch) => (batch * records.perBatch) / records.perEpoch);
  return series.batches;
}

/** @param {any} metrics groups with names @returns {string[]} "group.name", validation first */
export function useMetricNames(metrics) {
  return useMemo(() => {
    const groups = Object.keys(metrics.groups);
    const order = ["validation", "training"];
    groups.sort((a, b) => (order.indexOf(a) + 1 || 9) - (order.indexOf(b) + 1 || 9) || a.localeCompare(b));
    return groups.flatMap((group) => metrics.groups[group].map((/** @type {string} */ name) => `${group}.${name}`));
  }, [metrics]);
}

/**
 * How curves are drawn, kept in the address, and the controls for that.
 *
 * @param {{ perBatch: number, perEpoch: number }} [records] without it all axes can be chosen
 */
export function useLook(records) {
  const [axis, setAxis] = useParam("x", "batches");
  const [log, setLog] = useParam("log");
  const [smoothing, setSmoothing] = useParam("smooth", "0");
  /** @param {string} one @returns {string} why an axis cannot be had; empty if it can */
  const missing = (one) =>
    !records ? "" : one === "records" && !records.perBatch ? "hyperparameters.global_batch_size is not set" : one === "epochs" && !(records.perBatch && records.perEpoch) ? "records_per_epoch or hyperparameters.global_batch_size is not set" : "";
  const tools = html`
    <label>Over <select value=${axis} onChange=${(/** @type {any} */ event) => setAxis(event.target.value)}>
      ${AXES.map(([one, title]) => html`<option value=${one} disabled=${Boolean(missing(one))} title=${missing(one)}>${title}</option>`)}
    </select></label>
    <label><input type="checkbox" checked=${Boolean(log)} onChange=${(/** @type {any} */ event) => setLog(event.target.checked ? "1" : "")} /> log scale</label>
    <label>Smoothing <input type="range" min="0" max="0.99" step="0.01" value=${smoothing} onInput=${(/** @type {any} */ event) => setSmoothing(event.target.value)} /> ${smoothing}</label>`;
  const look = { axis, isLog: Boolean(log), smoothing: Number(smoothing), label: AXES.find(([one]) => one === axis)?.[1] ?? "batches", showX: axis === "time" ? duration : undefined };
  return { look, tools };
}
