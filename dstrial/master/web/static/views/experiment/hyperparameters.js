// How a search's metric hangs on its hyperparameters: parallel coordinates, the metric against each, and how much each explains.

import { html, useMemo, useState } from "htm/preact/standalone";
import { flat, number } from "../../format.js";
import { IMPORTANCE_METHOD, IMPORTANCE_MIN_TRIALS, importance, meritOf, varyingAxes } from "../../hp_space.js";
import { Table } from "../../parts/table.js";
import { navigate, useParam } from "../../router.js";
import { decodeName, encodeName, isWithin, metricAxis, Parallel, readRanges, writeRanges } from "./parallel.js";
import { Scatter } from "./scatters.js";

/** Axes that are drawn at first. */
const FIRST_AXES = 10;
const MOST_SCATTERS = 24;

/** @param {{ id: number, experiment: any, trials: any[] }} props */
export function Hyperparameters({ id, experiment, trials }) {
  const { metric, smallerIsBetter: isSmaller, bestTrial: best } = experiment;
  const [highlight, setHighlight] = useState(/** @type {number | null} */ (null));
  const [chosen, setChosen] = useParam("axes");
  const [marked, setMarked] = useParam("ranges");
  const points = useMemo(() => trials.map((row) => ({ id: row.id, hp: flat(row.hparams), best: row.best, state: row.state, batches: row.batches })), [trials]);
  const axes = useMemo(() => varyingAxes(points, experiment.config), [points]);
  const last = useMemo(() => metricAxis(points, metric), [points, metric]);
  const merit = useMemo(() => meritOf(points, isSmaller), [points, isSmaller]);
  const found = useMemo(() => importance(points, axes), [points, axes]);
  const ordered = useMemo(() => {
    const order = new Map((found ?? []).map((one, idx) => [one.name, idx]));
    return [...axes].sort((a, b) => (order.get(a.name) ?? 0) - (order.get(b.name) ?? 0));
  }, [axes, found]);
  const names = useMemo(() => (chosen ? chosen.split("~").map(decodeName) : ordered.slice(0, FIRST_AXES).map((axis) => axis.name)), [chosen, ordered]);
  const drawn = useMemo(() => [...ordered.filter((axis) => names.includes(axis.name)), last], [ordered, names, last]);
  const ranges = useMemo(() => readRanges(marked), [marked]);
  const kept = useMemo(() => new Set(points.filter((point) => isWithin(point, [...axes, last], ranges, metric)).map((point) => point.id)), [points, axes, last, ranges]);
  const numKnown = points.filter((point) => typeof point.best === "number").length;
  if (!axes.length)
    return html`<p class="muted">${trials.length < 2 ? "There is nothing to compare yet: this shows how the metric hangs on what differs between trials." : "No hyperparameter differs between the trials. Give one a range in `hyperparameters`, and search with `searcher.name: random`."}</p>`;
  const open = (/** @type {number} */ trial) => navigate(`/det/experiments/${id}/trials/${trial}`);
  return html`
    <div class="filters">
      <span><span class="ramp" aria-hidden="true"></span> ${metric}: best to worst · <span class="bestmark">★ best trial</span></span>
      <details class="menu"><summary>Axes (${drawn.length - 1} of ${axes.length})</summary><div class="choices" role="group" aria-label="Axes">
        ${ordered.map((axis) => html`<label><input type="checkbox" checked=${names.includes(axis.name)} onChange=${() =>
          setChosen((names.includes(axis.name) ? names.filter((one) => one !== axis.name) : [...names, axis.name]).map(encodeName).join("~"))} /> ${axis.name}</label>`)}
      </div></details>
      <span class="muted">Ranges, below the drawing, keep trials. Click a line to open its trial.</span>
      ${numKnown < points.length && html`<span class="muted">${points.length - numKnown} of ${points.length} trials have no finite ${metric}.</span>`}
    </div>
    <${Parallel} points=${points} axes=${drawn} metric=${metric} merit=${merit} best=${best} highlight=${highlight} ranges=${ranges}
      onRanges=${(/** @type {any} */ now) => setMarked(writeRanges(now))} onHover=${setHighlight} onOpen=${open} />
    <h2>Importance</h2>
    <p class="muted">${IMPORTANCE_METHOD[0].toUpperCase() + IMPORTANCE_METHOD.slice(1)}, of each hyperparameter by itself: what two do only together is not seen, and the shares do not add up to 1. From ${IMPORTANCE_MIN_TRIALS} trials on.</p>
    ${found === null
      ? html`<p>Not enough trials: ${numKnown} of ${IMPORTANCE_MIN_TRIALS} have a finite ${metric}.</p>`
      : html`<${Table} name="importance" label="Importance of hyperparameters" rows=${found.map((one) => ({ ...one, id: one.name }))} columns=${[
          { id: "name", title: "Hyperparameter", value: (/** @type {any} */ row) => row.name },
          { id: "share", title: "Explains", isNumber: true, value: (/** @type {any} */ row) => row.share, show: (/** @type {any} */ row) => (Number.isNaN(row.share) ? "not enough trials" : html`<meter min="0" max="1" value=${row.share} aria-label=${`importance of ${row.name}`}></meter> ${Math.round(100 * row.share)} %`) },
          { id: "direction", title: "Rank correlation", hint: `with ${metric}: 1 where more of it means more of that`, isNumber: true, value: (/** @type {any} */ row) => row.direction, show: (/** @type {any} */ row) => (Number.isNaN(row.direction) ? "" : number(row.direction, 2)) },
          { id: "trials", title: "Trials", isNumber: true, value: (/** @type {any} */ row) => row.trials },
        ]} sort="-share" />`}
    <h2>${metric} against each</h2>
    <div class="charts small">
      ${ordered.slice(0, MOST_SCATTERS).map((axis) => html`<${Scatter} key=${axis.name} axis=${axis} metric=${last} points=${points} kept=${kept} merit=${merit} best=${best} highlight=${highlight} onHover=${setHighlight} onOpen=${open} />`)}
    </div>
    ${axes.length > MOST_SCATTERS && html`<p class="muted">The first ${MOST_SCATTERS} of ${axes.length} are drawn.</p>`}`;
}
