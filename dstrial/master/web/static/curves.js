// Curves of a metric of many trials: asked for in parts, so that the first are there at once, and only their ends again.

import { useEffect, useMemo, useRef, useState } from "htm/preact/standalone";
import { get } from "./api.js";
import { toNumber } from "./format.js";
import { subscribe } from "./live.js";

/** @typedef {{ trial: number, batches: number[], times: number[], values: number[], points: number }} Series */

const AT_ONCE = 100;
/** The most interesting ones are there soon. */
const AT_FIRST = 20;
const POINTS = 1000;
/** Of all curves together: more are not told apart, and make everything slow. */
const MOST_POINTS = 300_000;
const GAP_MS = 1500;

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
  const dirty = useRef(/** @type {Set<number>} */ (new Set()));
  const key = trials.join(",");
  const group = metric.slice(0, metric.indexOf("."));
  const name = metric.slice(metric.indexOf(".") + 1);
  useEffect(() => setFound(new Map()), [metric]);
  useEffect(() => {
    const abort = new AbortController();
    let timer = 0;
    /** @param {number[]} ids */
    async function load(ids) {
      const points = Math.max(200, Math.min(POINTS, Math.round(MOST_POINTS / trials.length)));
      for (let start = 0, count = AT_FIRST; start < ids.length; start += count, count = AT_ONCE) {
        const part = ids.slice(start, start + count);
        const { series } = await get("/page/series", { trials: part, group, name, points }, abort.signal);
        setFound((before) => {
          const now = new Map(before);
          for (const one of series) now.set(one.trial, read(one));
          return now;
        });
      }
    }
    async function run(/** @type {number[]} */ ids) {
      try {
        await load(ids);
        setError(null);
      } catch (problem) {
        if (!abort.signal.aborted) setError(/** @type {Error} */ (problem));
      }
      if (abort.signal.aborted) return;
      setLoading(false);
      timer = 0;
      plan();
    }
    function plan() {
      if (timer || !dirty.current.size) return;
      timer = window.setTimeout(() => {
        const ids = [...dirty.current];
        dirty.current = new Set();
        run(ids);
      }, GAP_MS);
    }
    const own = new Set(trials);
    dirty.current = new Set();
    timer = -1;
    setLoading(true);
    run(metric ? trials.filter((id) => !found.has(id) || metric !== shown.current) : []);
    shown.current = metric;
    const end = subscribe((change) => {
      if (change === null) own.forEach((id) => dirty.current.add(id));
      else
        for (const topic of change) {
          const [kind, id] = topic.split(":");
          if ((kind === "metrics" || kind === "trial") && own.has(Number(id))) dirty.current.add(Number(id));
        }
      plan();
    });
    return () => {
      abort.abort();
      window.clearTimeout(timer);
      end();
    };
  }, [key, metric]);
  const shown = useRef("");
  return { series: found, isLoading, error };
}

/** What the x axis can be. @type {[string, string][]} */
export const AXES = [["batches", "batches"], ["epochs", "epochs"], ["records", "records"], ["time", "time since the start"]];

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
  if (axis === "time") {
    const from = Date.parse(start);
    return series.times.map((ms) => (ms - from) / 1000);
  }
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
