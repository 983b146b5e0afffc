// How a search's metric depends on its hyperparameters: parallel coordinates, importance, and a scatter plot for each.

import { html, useMemo } from "htm/preact/standalone";
import { flat, number, plain } from "../../format.js";
import { axisOf, IMPORTANCE_MIN_TRIALS, importance, labelAt, normalisedMetric, ticksOf, varyingAxes } from "../../hp_space.js";
import { Chart, isDark, styled } from "../../parts/chart.js";
import { Table } from "../../parts/table.js";
import { navigate } from "../../router.js";

const MAX_AXES = 10; // of the parallel coordinates: the most important hyperparameters
const MAX_SCATTERS = 24;
const RAMPS = { light: [[31, 95, 208], [126, 98, 150], [232, 150, 30]], dark: [[138, 180, 255], [150, 118, 150], [190, 118, 20]] };

/** @param {number} share 0 for the best trial to 1 for the worst; NaN without a value @returns {string} a CSS colour */
function rampColour(share) {
  if (Number.isNaN(share)) return styled("--line");
  const ramp = isDark() ? RAMPS.dark : RAMPS.light;
  const low = Math.min(Math.floor(share * 2), 1);
  return `rgb(${ramp[low].map((one, idx) => Math.round(one + (ramp[low + 1][idx] - one) * (share * 2 - low))).join(" ")})`;
}

/** @param {import("../../hp_space.js").Axis} axis @returns {string} its name, and its values from the bottom to the top */
const titleOf = (axis) => `${axis.name}: ${axis.kind === "categorical" ? ticksOf(axis).map(([, text]) => text).join(", ") : `${labelAt(axis, 0)} … ${labelAt(axis, 1)}`}${axis.kind === "log" ? " (log)" : ""}`;

/** @param {{ id: number, experiment: any, trials: any[] }} props */
export function Hyperparameters({ id, experiment, trials }) {
  const { metric, smallerIsBetter: isSmaller, bestTrial } = experiment;
  const points = useMemo(() => trials.map((row) => ({ id: row.id, hp: flat(row.hparams), best: row.best })), [trials]);
  const axes = useMemo(() => varyingAxes(points), [points]);
  const found = useMemo(() => importance(points, axes), [points, axes]);
  const ordered = useMemo(() => (found ? found.flatMap(({ name }) => axes.filter((axis) => axis.name === name)) : axes), [axes, found]);
  const drawn = useMemo(() => [...ordered.slice(0, MAX_AXES), axisOf(metric, points.map(({ best }) => best).filter((value) => typeof value === "number"), true)], [ordered, points, metric]);
  const named = useMemo(() => {
    const shareOf = normalisedMetric(points, isSmaller);
    return points.map((point) => ({
      point,
      curve: {
        id: point.id, isBest: point.id === bestTrial, stroke: rampColour(shareOf(point.best)), href: `/det/experiments/${id}/trials/${point.id}`,
        label: `trial ${point.id}${point.id === bestTrial ? " (best)" : ""}, ${ordered.slice(0, MAX_AXES).map(({ name }) => `${name} ${plain(point.hp[name])}`).join(", ")}; ${metric} ${number(point.best)}`,
      },
    }));
  }, [points, ordered, metric, bestTrial]);
  const lines = useMemo(
    () => named.map(({ point, curve }) => ({ ...curve, xs: drawn.map((_, idx) => idx), ys: drawn.map((axis, idx) => axis.at(idx === drawn.length - 1 ? point.best : point.hp[axis.name])) })),
    [named, drawn],
  );
  const marks = useMemo(() => drawn.map((axis, x) => ({ x, text: titleOf(axis) })), [drawn]);
  const scatters = useMemo(
    () => ordered.slice(0, MAX_SCATTERS).map((axis) => {
      const last = axis.kind === "categorical" ? Math.max(axis.values.length - 1, 1) : 1;
      const placed = named.map(({ point, curve }) => ({ ...curve, xs: [axis.at(point.hp[axis.name]) * last], ys: [typeof point.best === "number" ? point.best : NaN] }));
      const showX = (/** @type {number} */ x) => (x < 0 || x > last || (axis.kind === "categorical" && !Number.isInteger(x)) ? "" : labelAt(axis, x / last));
      return { axis, showX, curves: placed.filter(({ xs, ys }) => !Number.isNaN(xs[0] + ys[0])) };
    }),
    [named, ordered],
  );
  const numKnown = points.filter((point) => typeof point.best === "number").length;
  if (!axes.length)
    return html`<p class="muted">${trials.length < 2 ? "There is nothing to compare yet: this shows how the metric hangs on what differs between trials." : "No hyperparameter differs between the trials. Give one a range in `hyperparameters`, and search with `searcher.name: random`."}</p>`;
  return html`
    <div class="filters">
      <span><span class="ramp" aria-hidden="true"></span> ${metric}: best to worst · <span class="bestmark">★ best trial</span></span>
      <span class="muted">Click a line to open its trial.</span>
      ${numKnown < points.length && html`<span class="muted">${points.length - numKnown} of ${points.length} trials have no finite ${metric}.</span>`}
    </div>
    <${Chart} title="parallel coordinates" xLabel="hyperparameters" curves=${lines} marks=${marks} height=${380} onOpen=${navigate}
      showX=${(/** @type {number} */ x) => drawn[x]?.name ?? ""} />
    <h2>Importance</h2>
    <p class="muted">Rank variance explained (bias-corrected correlation ratio, ε²), of each hyperparameter by itself: what two do only together is not seen. From ${IMPORTANCE_MIN_TRIALS} trials on.</p>
    ${found === null
      ? html`<p>Not enough trials: ${numKnown} of ${IMPORTANCE_MIN_TRIALS} have a finite ${metric}.</p>`
      : html`<${Table} name="importance" label="Importance of hyperparameters" rows=${found.map((one) => ({ ...one, id: one.name }))} columns=${/** @type {import("../../parts/table.js").Column[]} */ ([
          { id: "name", title: "Hyperparameter", value: (row) => row.name },
          { id: "share", title: "Explains", isNumber: true, value: (row) => row.share, show: (row) => (Number.isNaN(row.share) ? "not enough trials" : html`<meter min="0" max="1" value=${row.share} aria-label=${`importance of ${row.name}`}></meter> ${Math.round(100 * row.share)} %`) },
        ])} sort="-share" />`}
    <h2>${metric} against each</h2>
    <div class="charts">
      ${scatters.map(({ axis, showX, curves }) => html`<${Chart} key=${axis.name} title=${`${metric} against ${axis.name}`} xLabel=${axis.name} curves=${curves} isScatter height=${220} onOpen=${navigate} showX=${showX} />`)}
    </div>
    ${axes.length > MAX_SCATTERS && html`<p class="muted">The first ${MAX_SCATTERS} of ${axes.length} are drawn.</p>`}`;
}
