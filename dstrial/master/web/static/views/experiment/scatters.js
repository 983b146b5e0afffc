// The metric against each hyperparameter, and the best of each pair of values as a heat map.

import { html, useMemo, useState } from "htm/preact/standalone";
import { number, plain } from "../../format.js";
import { labelAt, ticksOf } from "../../hp_space.js";
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

const MOST_CELLS = 12;
const LEAST_CELL_PX = 52;

/** @param {Axis} axis @param {Point[]} points @returns {{ labels: string[], of: (value: unknown) => number }} cells along an axis; -1 for none */
function cellsOf(axis, points) {
  if (axis.kind === "categorical") return { labels: axis.values, of: (value) => (Number.isNaN(axis.at(value)) ? -1 : axis.values.indexOf(plain(value))) };
  const own = [...new Set(points.map(({ hp }) => hp[axis.name]).filter((value) => typeof value === "number" && !Number.isNaN(axis.at(value))))].sort((a, b) => Number(a) - Number(b));
  if (own.length <= MOST_CELLS) return { labels: own.map((value) => number(value, 4)), of: (value) => own.indexOf(value) };
  const count = 8;
  const labels = Array.from({ length: count }, (_, idx) => `${labelAt(axis, idx / count)} – ${labelAt(axis, (idx + 1) / count)}`);
  return { labels, of: (value) => (Number.isNaN(axis.at(value)) ? -1 : Math.min(Math.floor(axis.at(value) * count), count - 1)) };
}

/**
 * @param {object} props
 * @param {Axis} props.across @param {Axis} props.down @param {string} props.metric @param {Point[]} props.points those that are kept
 * @param {boolean} props.isSmaller @param {(value: unknown) => number} props.merit @param {number | null} props.best
 */
export function Pairs({ across, down, metric, points, isSmaller, merit, best }) {
  const [tip, setTip] = useState(/** @type {{ text: unknown, x: number, y: number, spot: import("../../parts/canvas.js").Spot } | null} */ (null));
  const { columns, lines, cells } = useMemo(() => {
    const columns = cellsOf(across, points);
    const lines = cellsOf(down, points);
    /** @type {Map<string, { best: number, trial: number, count: number }>} */
    const cells = new Map();
    for (const point of points) {
      const [x, y] = [columns.of(point.hp[across.name]), lines.of(point.hp[down.name])];
      if (x < 0 || y < 0 || typeof point.best !== "number" || !Number.isFinite(point.best)) continue;
      const before = cells.get(`${x},${y}`);
      const isBetter = !before || (isSmaller ? point.best < before.best : point.best > before.best);
      cells.set(`${x},${y}`, { best: isBetter ? point.best : before.best, trial: isBetter ? point.id : before.trial, count: (before?.count ?? 0) + 1 });
    }
    return { columns, lines, cells };
  }, [across, down, points, isSmaller]);
  const height = Math.max(120, Math.min(46 * lines.labels.length, 420)) + 54;
  const [left, bottom] = [110, 44];
  /** @param {number} width */
  const sizes = (width) => ({ wide: (width - left - 8) / Math.max(columns.labels.length, 1), high: (height - bottom - 8) / Math.max(lines.labels.length, 1) });

  /** @param {import("../../parts/canvas.js").Area} area */
  function draw({ ctx, width }) {
    const { wide, high } = sizes(width);
    for (const [key, cell] of cells) {
      const [x, y] = key.split(",").map(Number);
      const [from, to] = [left + x * wide, 8 + (lines.labels.length - 1 - y) * high];
      ctx.fillStyle = rampColour(merit(cell.best));
      ctx.fillRect(from + 1, to + 1, wide - 2, high - 2);
      if (cell.trial === best) {
        ctx.strokeStyle = styled("--best");
        ctx.lineWidth = 3;
        ctx.strokeRect(from + 2.5, to + 2.5, wide - 5, high - 5);
      }
      if (wide > 44 && high > 18) {
        ctx.textAlign = "center";
        const text = number(cell.best, 3);
        ctx.font = "600 12px system-ui, sans-serif";
        const room = ctx.measureText(text).width + 8;
        ctx.fillStyle = styled("--back");
        ctx.fillRect(from + wide / 2 - room / 2, to + high / 2 - 8, room, 16);
        ctx.fillStyle = styled("--text");
        ctx.fillText(text, from + wide / 2, to + high / 2);
      }
    }
    ctx.fillStyle = styled("--text");
    ctx.font = "11px system-ui, sans-serif";
    ctx.textAlign = "right";
    lines.labels.forEach((text, idx) => ctx.fillText(fitted(ctx, text, left - 12), left - 6, 8 + (lines.labels.length - 0.5 - idx) * high));
    ctx.textAlign = "center";
    columns.labels.forEach((text, idx) => ctx.fillText(fitted(ctx, text, wide - 4), left + (idx + 0.5) * wide, height - bottom + 12));
    ctx.font = "600 12px system-ui, sans-serif";
    ctx.fillText(fitted(ctx, `${across.name} →   ↑ ${down.name}`, width - 20), (width + left) / 2, height - 11);
  }
  return html`<${Drawing} title=${`best ${metric} by ${across.name} and ${down.name}`} height=${height} minWidth=${left + 8 + columns.labels.length * LEAST_CELL_PX} draw=${draw} deps=${[cells, height, best]}
    label=${`Best ${metric} of each pair of ${across.name} and ${down.name}: ${cells.size} pairs with trials`}
    rows=${() => [[across.name, down.name, `best ${metric}`, "trial", "trials"], ...[...cells].map(([key, cell]) => [columns.labels[Number(key.split(",")[0])], lines.labels[Number(key.split(",")[1])], cell.best, cell.trial, cell.count])]}
    onMove=${(/** @type {number} */ x, /** @type {number} */ y, /** @type {import("../../parts/canvas.js").Spot} */ spot) => {
      const { wide, high } = sizes(spot.width);
      const [column, line] = [Math.floor((x - left) / wide), lines.labels.length - 1 - Math.floor((y - 8) / high)];
      const cell = cells.get(`${column},${line}`);
      setTip(cell ? { x, y, spot, text: html`<b>best ${number(cell.best)}</b> by trial ${cell.trial}<br />${across.name}: ${columns.labels[column]}<br />${down.name}: ${lines.labels[line]}<br />${cell.count} ${cell.count === 1 ? "trial" : "trials"}` } : null);
    }}>${tip && html`<${Tip} x=${tip.x} y=${tip.y} spot=${tip.spot}>${tip.text}<//>`}<//>`;
}
