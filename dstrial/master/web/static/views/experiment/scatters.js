// The metric against each hyperparameter.

import { html, useMemo, useState } from "htm/preact/standalone";
import { number, plain } from "../../format.js";
import { ticksOf } from "../../hp_space.js";
import { Drawing, fitted, rampColour, Tip } from "../../parts/canvas.js";
import { styled } from "../../parts/chart.js";
import { plainValue } from "./parallel.js";

/** @typedef {import("../../hp_space.js").Axis} Axis */
/** @typedef {import("../../hp_space.js").Point} Point */

const [LEFT, RIGHT, TOP, BOTTOM] = [58, 14, 8, 24];
const NEAR_PX = 12;

/** @param {number} trial @returns {number} from -0.5 to 0.5, always the same for a trial: equal values do not hide each other */
const jitter = (trial) => ((trial * 0.61803398875) % 1) - 0.5;

/**
 * @param {object} props
 * @param {Axis} props.axis @param {Axis} props.metric @param {Point[]} props.points
 * @param {Set<number>} props.kept trials @param {(value: unknown) => number} props.merit
 * @param {number | null} props.best @param {number | null} props.highlight
 * @param {(trial: number | null) => void} props.onHover @param {(trial: number) => void} props.onOpen
 */
export function Scatter({ axis, metric, points, kept, merit, best, highlight, onHover, onOpen }) {
  const [tip, setTip] = useState(/** @type {{ point: Point, x: number, y: number, spot: import("../../parts/canvas.js").Spot } | null} */ (null));
  const height = 220;
  const places = useMemo(() => points.map((point) => ({ point, x: axis.at(point.hp[axis.name]), y: metric.at(point.best) })).filter(({ x, y }) => !Number.isNaN(x) && !Number.isNaN(y)), [points, axis, metric]);
  // Each value of a categorical one has a band of its own, in which its points lie beside each other.
  const bands = axis.kind === "categorical" ? Math.max(axis.values.length, 1) : 0;
  /** @param {number} at from 0 to 1 @param {number} width */
  const acrossAt = (at, width) => LEFT + 8 + (bands ? (at * (bands - 1) + 0.5) / bands : at) * (width - LEFT - RIGHT - 16);
  /** @param {{ point: Point, x: number }} place @param {number} width */
  const xOf = ({ point, x }, width) => acrossAt(x, width) + (bands ? (jitter(point.id) * 0.5 * (width - LEFT - RIGHT)) / bands : 0);
  /** @param {{ y: number }} place */
  const yOf = ({ y }) => height - BOTTOM - 6 - y * (height - TOP - BOTTOM - 12);

  /** @param {import("../../parts/canvas.js").Area} area */
  function draw({ ctx, width }) {
    ctx.strokeStyle = styled("--line");
    ctx.fillStyle = styled("--text");
    ctx.font = "11px system-ui, sans-serif";
    ctx.textAlign = "right";
    for (const [at, text] of ticksOf(metric, 4)) {
      const y = yOf({ y: at });
      ctx.beginPath();
      ctx.moveTo(LEFT, y);
      ctx.lineTo(width - RIGHT, y);
      ctx.stroke();
      ctx.fillText(text, LEFT - 5, y);
    }
    const ticks = ticksOf(axis, axis.kind === "categorical" ? Math.max(2, Math.floor(width / 70)) : width > 340 ? 4 : 3);
    ticks.forEach(([at, text], idx) => {
      ctx.textAlign = bands ? "center" : idx === 0 && at === 0 ? "left" : at === 1 ? "right" : "center";
      const x = acrossAt(at, width) + (ctx.textAlign === "left" ? -6 : ctx.textAlign === "right" ? 6 : 0);
      ctx.fillText(fitted(ctx, text, (width - LEFT - RIGHT) / ticks.length - 4), x, height - 11);
    });
    const rank = (/** @type {Point} */ point) => (point.id === highlight ? 3 : point.id === best ? 2 : kept.has(point.id) ? 1 : 0);
    for (const place of [...places].sort((a, b) => rank(a.point) - rank(b.point))) {
      const { point } = place;
      const weight = rank(point);
      ctx.globalAlpha = weight >= 2 ? 1 : weight ? 0.8 : 0.15;
      ctx.fillStyle = point.id === best ? styled("--best") : weight ? rampColour(merit(point.best)) : styled("--muted");
      ctx.beginPath();
      ctx.arc(xOf(place, width), yOf(place), weight >= 2 ? 6 : 3.5, 0, 7);
      ctx.fill();
      if (weight === 3) {
        ctx.strokeStyle = styled("--text");
        ctx.lineWidth = 2;
        ctx.stroke();
        ctx.lineWidth = 1;
      }
    }
    ctx.globalAlpha = 1;
  }
  /** @param {number} x @param {number} y @param {{ width: number }} area */
  function find(x, y, { width }) {
    let [found, least] = [/** @type {Point | null} */ (null), NEAR_PX];
    for (const place of places) {
      const away = Math.hypot(xOf(place, width) - x, yOf(place) - y);
      if (away < least) [found, least] = [place.point, away];
    }
    return found;
  }
  const missing = points.length - places.length;
  return html`<${Drawing} title=${`${metric.name} against ${axis.name}`} heading=${html`${axis.name} ${axis.kind === "log" && html`<span class="muted">log</span>`}`} height=${height} draw=${draw} deps=${[places, kept, highlight, best]}
    label=${`${metric.name} against ${axis.name}: ${places.length} trials${missing ? `, ${missing} without a value` : ""}`}
    rows=${() => [["trial", axis.name, metric.name], ...points.map((point) => [point.id, plainValue(point.hp[axis.name]), point.best])]}
    onMove=${(/** @type {number} */ x, /** @type {number} */ y, /** @type {import("../../parts/canvas.js").Spot} */ spot) => {
      const point = Number.isNaN(x) ? null : find(x, y, spot);
      setTip(point && { point, x, y, spot });
      onHover(point?.id ?? null);
    }}
    onDown=${(/** @type {number} */ x, /** @type {number} */ y, /** @type {{ width: number }} */ area) => {
      const point = find(x, y, area);
      if (point) onOpen(point.id);
    }}>
    ${tip && html`<${Tip} x=${tip.x} y=${tip.y} spot=${tip.spot}><b>trial ${tip.point.id}${tip.point.id === best ? " (best)" : ""}</b><br />${axis.name}: ${plain(tip.point.hp[axis.name])}<br />${metric.name}: ${number(tip.point.best)}<//>`}
  <//>`;
}
