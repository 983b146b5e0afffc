// One curve of one trial, loaded when it is near to being seen and when the trial reports, with marks of its starts.

import { html, useEffect, useMemo, useRef, useState } from "htm/preact/standalone";
import { get } from "../../api.js";
import { xsOf } from "../../curves.js";
import { toNumber } from "../../format.js";
import { useLive } from "../../live.js";
import { Problem } from "../../parts/basics.js";
import { Chart } from "../../parts/chart.js";

/** @typedef {ReturnType<typeof import("../../curves.js").useLook>["look"]} Look how curves are drawn */

/** @param {any} one as the master sends it @returns {import("../../curves.js").Series} */
const read = (one) => ({ ...one, values: one.values.map(toNumber) });

/** Of a chart, what stands above its curves and around them, and a little more. */
const FRAME_PX = 68;

/** @param {{ height: number, children: unknown }} props draws a chart when that comes near to being seen, in the place that is kept for it: what is below stays where it is */
export function WhenSeen({ height, children }) {
  const place = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [isSeen, setSeen] = useState(false);
  useEffect(() => {
    if (!place.current || isSeen) return undefined;
    const observer = new IntersectionObserver((entries) => entries.some((one) => one.isIntersecting) && setSeen(true), { rootMargin: "300px" });
    observer.observe(place.current);
    return () => observer.disconnect();
  }, [isSeen]);
  return html`<div ref=${place} style=${{ minHeight: `${height + FRAME_PX}px` }}>${isSeen && children}</div>`;
}

/** @param {{ trial: any, metric: string, title: string, look: Look, records: { perBatch: number, perEpoch: number }, marks: any[], height?: number, baseline?: number | null, tools?: unknown }} props with a `baseline`, that trial's curve is drawn, too */
export function TrialChart({ trial, metric, title, look, records, marks, height = 220, baseline = null, tools }) {
  const group = metric.slice(0, metric.indexOf("."));
  const name = metric.slice(metric.indexOf(".") + 1);
  const { data, error } = useLive(
    async (signal) => (await get("/page/series", { trials: baseline === null ? [trial.id] : [trial.id, baseline], group, name }, signal)).series.map(read),
    (topic) => topic.startsWith(`metrics:${trial.id}:`) || topic === `trial:${trial.id}`,
    [trial.id, metric, baseline],
  );
  const curves = useMemo(
    () => {
      /** @type {import("../../curves.js").Series[]} */
      const [own, other] = data ?? [];
      const guide = other?.batches.length ? [{ id: other.trial, label: `baseline: trial ${other.trial}`, isGuide: true, xs: xsOf(other, look.axis, records, new Date(other.times[0]).toISOString()), ys: other.values }] : [];
      return own ? [...guide, { id: trial.id, label: `trial ${trial.id}`, colour: 0, xs: xsOf(own, look.axis, records, trial.start), ys: own.values }] : [];
    },
    [data, look.axis, records.perBatch, records.perEpoch, trial.start],
  );
  return html`<${Problem} error=${error} /><${Chart} title=${title} xLabel=${look.label} curves=${curves} isLog=${look.isLog} smoothing=${look.smoothing}
    showX=${look.showX} marks=${marks} height=${height} isLoading=${!data && !error} tools=${tools} />
    ${data && data[0].points > data[0].values.length && html`<p class="muted">${data[0].values.length.toLocaleString()} of ${data[0].points.toLocaleString()} points are drawn.</p>`}`;
}
