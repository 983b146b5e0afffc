// Curves of a metric of many trials: asked for in parts, so that the first are there at once, and only their ends again.

import { html, useEffect, useMemo, useRef, useState } from "htm/preact/standalone";
import { get } from "./api.js";
import { duration, elapsed, toNumber } from "./format.js";
import { subscribe } from "./live.js";
import { useParam } from "./router.js";

/** @typedef {{ trial: number, batches: number[], times: number[], values: number[], points: number }} Series */

const AT_ONCE = 100;
/** The most interesting ones are there soon. */
const AT_FIRST = 20;
/** Requests: the master reads one while it sends another, and has readers left for others. */
const SIDE_BY_SIDE = 2;
const POINTS = 1000;
/** Of all curves together: more are not told apart, and make everything slow. */
const MOST_POINTS = 300_000;
const GAP_MS = 1500;
/** Of the gap, while the answers are errors. */
const MOST_DOUBLINGS = 5;

/** @param {any} one as the master sends it @returns {Series} */
function read(one) {
  return { ...one, values: one.values.every((/** @type {unknown} */ value) => typeof value === "number") ? one.values : one.values.map(toNumber) };
}

/**
 * @param {number[]} trials the most interesting first
 * @param {string} metric "group.name"
 * @returns {{ series: Map<number, Series>, isLoading: boolean, error: Error | null }}
 */
export function useCurves(trials, metric) {
  const [found, setFound] = useState(/** @type {Map<number, Series>} */ (new Map()));
  const [isLoading, setLoading] = useState(true);
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const wanted = useRef(trials);
  wanted.current = trials;
  const look = useRef(() => {});
  const key = trials.join(",");
  const group = metric.slice(0, metric.indexOf("."));
  const name = metric.slice(metric.indexOf(".") + 1);
  // Of one metric, however often its trials change: a search that makes some all the time would never let a load end.
  useEffect(() => {
    const abort = new AbortController();
    /** Those that were asked for. @type {Set<number>} */
    const known = new Set();
    /** Those of them that have changed since. @type {Set<number>} */
    const dirty = new Set();
    let isBusy = false;
    let isDue = false;
    let timer = 0;
    let failures = 0;
    setFound(new Map());
    /** @param {number[]} ids */
    async function load(ids) {
      const points = Math.max(200, Math.min(POINTS, Math.round(MOST_POINTS / wanted.current.length)));
      let start = 0;
      /** @param {number} count */
      async function ask(count) {
        const part = ids.slice(start, start + count);
        start += count;
        part.forEach((id) => dirty.delete(id));
        const { series } = await get("/page/series", { trials: part, group, name, points }, abort.signal);
        setFound((before) => {
          const now = new Map(before);
          for (const one of series) now.set(one.trial, read(one));
          return now;
        });
      }
      async function rest() {
        while (start < ids.length)
          try {
            await ask(AT_ONCE);
          } catch (problem) {
            start = ids.length; // The others ask for no more either.
            throw problem;
          }
      }
      await ask(AT_FIRST);
      const ends = await Promise.allSettled(Array.from({ length: SIDE_BY_SIDE }, rest));
      for (const end of ends) if (end.status === "rejected") throw end.reason;
    }
    async function run() {
      const ids = wanted.current.filter((id) => !known.has(id) || (isDue && dirty.has(id)));
      setLoading(ids.some((id) => !known.has(id)));
      ids.forEach((id) => known.add(id));
      isDue = false;
      if (!ids.length) return;
      isBusy = true;
      try {
        await load(ids);
        failures = 0;
        setError(null);
      } catch (problem) {
        if (abort.signal.aborted) return;
        failures += 1;
        isDue = false;
        ids.forEach((id) => dirty.add(id));
        setError(/** @type {Error} */ (problem));
      }
      isBusy = false;
      setLoading(false);
      plan();
    }
    /** New ones are asked for at once, those that have changed after a while, which new ones do not make longer. */
    function plan() {
      if (isBusy) return;
      if (!timer && !isDue && wanted.current.some((id) => dirty.has(id)))
        timer = window.setTimeout(() => {
          timer = 0;
          isDue = true;
          plan();
        }, GAP_MS * 2 ** Math.min(failures, MOST_DOUBLINGS));
      run();
    }
    look.current = metric ? plan : () => setLoading(false);
    const end = subscribe((change) => {
      if (change === null) {
        known.forEach((id) => dirty.add(id));
        failures = 0; // The master answers again.
        window.clearTimeout(timer);
        timer = 0;
      } else
        for (const topic of change) {
          const [kind, id] = topic.split(":");
          if ((kind === "metrics" || kind === "trial") && known.has(Number(id))) dirty.add(Number(id));
        }
      look.current();
    });
    return () => {
      abort.abort();
      window.clearTimeout(timer);
      end();
    };
  }, [metric]);
  useEffect(() => look.current(), [key, metric]);
  return { series: found, isLoading, error };
}

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
