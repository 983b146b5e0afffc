// One curve of one trial, loaded when it is near to being seen and when the trial reports, with marks of its starts.

import { html, useEffect, useMemo, useRef, useState } from "htm/preact/standalone";
import { useCurves, xsOf } from "../../curves.js";
import { Problem } from "../../parts/basics.js";
import { Chart } from "../../parts/chart.js";

/** @typedef {ReturnType<typeof import("../../curves.js").useLook>["look"]} Look how curves are drawn */

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

/** @param {{ trial: any, metric: string, title: string, look: Look, records: { perBatch: number, perEpoch: number }, marks: any[], height?: number }} props */
export function TrialChart({ trial, metric, title, look, records, marks, height = 220 }) {
  const ids = useMemo(() => [trial.id], [trial.id]);
  const { series, isLoading, error } = useCurves(ids, metric);
  const own = series.get(trial.id);
  const curves = useMemo(
    () => (own ? [{ id: trial.id, label: `trial ${trial.id}`, colour: 0, xs: xsOf(own, look.axis, records, trial.start), ys: own.values }] : []),
    [own, look.axis, records.perBatch, records.perEpoch, trial.start],
  );
  return html`<${Problem} error=${error} /><${Chart} title=${title} xLabel=${look.label} curves=${curves} isLog=${look.isLog} smoothing=${look.smoothing}
    showX=${look.showX} marks=${marks} height=${height} isLoading=${isLoading} />
    ${own && own.points > own.values.length && html`<p class="muted">${own.values.length.toLocaleString()} of ${own.points.toLocaleString()} points are drawn.</p>`}`;
}
