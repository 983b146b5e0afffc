// Parallel coordinates: a line for each trial over an axis for each hyperparameter; a range of an axis, set by sliders, keeps trials.

import { html, useMemo, useState } from "htm/preact/standalone";
import { number, plain } from "../../format.js";
import { axisOf, labelAt, ticksOf } from "../../hp_space.js";
import { Drawing, fitted, rampColour, Tip } from "../../parts/canvas.js";
import { styled } from "../../parts/chart.js";
import { RangeSliders } from "./ranges.js";

/** @typedef {import("../../hp_space.js").Axis} Axis */
/** @typedef {import("../../hp_space.js").Point} Point */
/** Ranges by the axis' name, from 0 to 1. @typedef {Record<string, [number, number]>} Ranges */

const [LEFT, RIGHT, TOP, BOTTOM] = [36, 60, 40, 20];
const HEIGHT = 380;
const NEAR_PX = 14;
const LEAST_AXIS_PX = 74;

/** @param {string} name @returns {string} without the marks of our lists */
export const encodeName = (name) => encodeURIComponent(name).replaceAll("~", "%7E");

/** @param {string} text @returns {string} */
export function decodeName(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** @param {string} text of the address @returns {Ranges} */
export function readRanges(text) {
  /** @type {Ranges} */
  const found = {};
  for (const one of text.split("~").filter(Boolean)) {
    const [name, low, high] = one.split(":");
    if (Number.isFinite(Number(low)) && Number.isFinite(Number(high))) found[decodeName(name)] = [Number(low), Number(high)];
  }
  return found;
}

/** @param {Ranges} ranges @returns {string} */
export function writeRanges(ranges) {
  return Object.entries(ranges).map(([name, [low, high]]) => `${encodeName(name)}:${low.toFixed(3)}:${high.toFixed(3)}`).join("~");
}

/** @param {Point} point @param {Axis[]} axes @param {Ranges} ranges @param {string} metric @returns {boolean} */
export function isWithin(point, axes, ranges, metric) {
  return axes.every((axis) => {
    const range = ranges[axis.name];
    if (!range) return true;
    const at = axis.at(axis.name === metric ? point.best : point.hp[axis.name]);
    return at >= range[0] - 1e-9 && at <= range[1] + 1e-9;
  });
}

/** @param {Point[]} points @param {string} metric @returns {Axis} of the metric, the last one */
export function metricAxis(points, metric) {
  return axisOf(metric, points.map(({ best }) => best).filter((value) => typeof value === "number"), "linear");
}

/**
 * @param {object} props
 * @param {Point[]} props.points
 * @param {Axis[]} props.axes with the metric's as the last one
 * @param {string} props.metric name of the last axis
 * @param {(value: unknown) => number} props.merit
 * @param {number | null} props.best a trial
 * @param {number | null} props.highlight a trial
 * @param {Ranges} props.ranges
 * @param {(ranges: Ranges) => void} props.onRanges
 * @param {(trial: number | null) => void} props.onHover
 * @param {(trial: number) => void} props.onOpen
 */
export function Parallel({ points, axes, metric, merit, best, highlight, ranges, onRanges, onHover, onOpen }) {
  const [tip, setTip] = useState(/** @type {{ point: Point, x: number, y: number, spot: import("../../parts/canvas.js").Spot } | null} */ (null));
  const places = useMemo(() => points.map((point) => axes.map((axis) => axis.at(axis.name === metric ? point.best : point.hp[axis.name]))), [points, axes, metric]);
  const isKept = useMemo(() => points.map((point) => isWithin(point, axes, ranges, metric)), [points, axes, ranges, metric]);

  /** @param {number} idx @param {number} width */
  const xOf = (idx, width) => LEFT + (axes.length === 1 ? 0.5 : idx / (axes.length - 1)) * (width - LEFT - RIGHT);
  /** @param {number} at */
  const yOf = (at) => HEIGHT - BOTTOM - at * (HEIGHT - TOP - BOTTOM);

  /** @param {import("../../parts/canvas.js").Area} area */
  function draw({ ctx, width }) {
    ctx.lineJoin = "round";
    const order = points.map((_, idx) => idx);
    const rank = (/** @type {number} */ idx) => (points[idx].id === highlight ? 3 : points[idx].id === best ? 2 : isKept[idx] ? 1 : 0);
    order.sort((a, b) => rank(a) - rank(b));
    const isMany = points.length > 60;
    for (const idx of order) {
      const weight = rank(idx);
      ctx.globalAlpha = weight >= 2 ? 1 : !isKept[idx] ? 0.12 : highlight !== null ? 0.3 : isMany ? 0.55 : 0.85;
      ctx.lineWidth = weight >= 2 ? 3 : isMany ? 1 : 1.6;
      ctx.strokeStyle = !isKept[idx] && weight < 2 ? styled("--muted") : points[idx].id === best ? styled("--best") : rampColour(merit(points[idx].best));
      ctx.beginPath();
      let isPen = false;
      places[idx].forEach((at, axis) => {
        if (Number.isNaN(at)) {
          isPen = false;
          return;
        }
        if (isPen) ctx.lineTo(xOf(axis, width), yOf(at));
        else ctx.moveTo(xOf(axis, width), yOf(at));
        isPen = true;
      });
      ctx.stroke();
    }
    ctx.globalAlpha = 1;
    axes.forEach((axis, idx) => {
      const x = xOf(idx, width);
      const room = (width - LEFT - RIGHT) / Math.max(axes.length - 1, 1) - 8;
      ctx.lineWidth = 1;
      ctx.strokeStyle = styled("--text");
      ctx.beginPath();
      ctx.moveTo(x, TOP);
      ctx.lineTo(x, HEIGHT - BOTTOM);
      ctx.stroke();
      const range = ranges[axis.name];
      if (range) {
        ctx.fillStyle = styled("--accent");
        ctx.globalAlpha = 0.35;
        ctx.fillRect(x - 7, yOf(range[1]), 14, Math.max(yOf(range[0]) - yOf(range[1]), 2));
        ctx.globalAlpha = 1;
      }
      ctx.textAlign = idx === 0 ? "left" : idx === axes.length - 1 ? "right" : "center";
      ctx.fillStyle = styled("--text");
      ctx.font = "600 12px system-ui, sans-serif";
      ctx.fillText(fitted(ctx, axis.name, Math.max(room, 40)), idx === 0 ? 4 : idx === axes.length - 1 ? width - 4 : x, 12);
      ctx.font = "11px system-ui, sans-serif";
      if (axis.kind === "log") {
        ctx.fillStyle = styled("--muted");
        ctx.fillText("log", idx === 0 ? 4 : idx === axes.length - 1 ? width - 4 : x, 27);
      }
      ctx.textAlign = "left";
      for (const [at, text] of ticksOf(axis, axis.kind === "categorical" ? 16 : 5)) {
        const label = fitted(ctx, text, Math.max(Math.min(room, idx === axes.length - 1 ? RIGHT - 10 : room) - 6, 20));
        const wide = ctx.measureText(label).width;
        ctx.fillStyle = styled("--back");
        ctx.globalAlpha = 0.75;
        ctx.fillRect(x + 4, yOf(at) - 7, wide + 4, 14);
        ctx.globalAlpha = 1;
        ctx.fillStyle = styled("--text");
        ctx.fillText(label, x + 6, yOf(at));
        ctx.strokeStyle = styled("--text");
        ctx.beginPath();
        ctx.moveTo(x - 3, yOf(at));
        ctx.lineTo(x + 3, yOf(at));
        ctx.stroke();
      }
    });
  }

  /** @param {number} x @param {number} y @param {number} width @returns {number} index of the trial there, -1 for none */
  function find(x, y, width) {
    const step = (width - LEFT - RIGHT) / Math.max(axes.length - 1, 1);
    const left = Math.min(Math.max(Math.floor((x - LEFT) / step), 0), Math.max(axes.length - 2, 0));
    const share = Math.min(Math.max((x - LEFT) / step - left, 0), 1);
    let [found, least] = [-1, NEAR_PX];
    places.forEach((own, idx) => {
      if (!isKept[idx]) return;
      const from = own[left];
      const to = own[Math.min(left + 1, axes.length - 1)];
      const at = Number.isNaN(from) ? (share > 0.9 ? to : NaN) : Number.isNaN(to) ? (share < 0.1 ? from : NaN) : from + (to - from) * share;
      const away = Math.abs(yOf(at) - y);
      if (away < least) [found, least] = [idx, away];
    });
    return found;
  }
  /** @param {number} x @param {number} y @param {import("../../parts/canvas.js").Spot} spot */
  function point(x, y, spot) {
    const idx = Number.isNaN(x) ? -1 : find(x, y, spot.width);
    setTip(idx < 0 ? null : { point: points[idx], x, y, spot });
    onHover(idx < 0 ? null : points[idx].id);
  }
  const kept = isKept.filter(Boolean).length;
  const bestPoint = points.find((point) => point.id === best);
  return html`<${Drawing} title="parallel coordinates" height=${HEIGHT} minWidth=${axes.length * LEAST_AXIS_PX} draw=${draw} deps=${[points, axes, highlight, isKept, best]}
    label=${`Parallel coordinates of ${points.length} trials over ${axes.map((axis) => axis.name).join(", ")}; ${kept} within the marked ranges${bestPoint ? `; the best is trial ${best} with ${number(bestPoint.best)}` : ""}`}
    rows=${() => [["trial", ...axes.map((axis) => axis.name)], ...points.filter((_, idx) => isKept[idx]).map((point) => [point.id, ...axes.map((axis) => (axis.name === metric ? point.best : plainValue(point.hp[axis.name])))])]}
    onMove=${point} onDown=${(/** @type {number} */ x, /** @type {number} */ y, /** @type {{ width: number }} */ { width }) => {
      const idx = find(x, y, width);
      if (idx >= 0) onOpen(points[idx].id);
    }}>
    ${tip && html`<${Tip} x=${tip.x} y=${tip.y} spot=${tip.spot}><b>trial ${tip.point.id}${tip.point.id === best ? " (best)" : ""}</b>
      ${axes.map((axis) => html`<br />${axis.name}: ${axis.name === metric ? number(tip.point.best) : plain(tip.point.hp[axis.name])}`)}<//>`}
  <//>
  ${Object.keys(ranges).length > 0 && html`<p class="tools">${Object.entries(ranges).map(([name, [low, high]]) => {
    const axis = axes.find((one) => one.name === name);
    return axis && html`<span class="label">${name}: ${[...new Set([labelAt(axis, low), labelAt(axis, high)])].join(" to ")}
      <button class="plain" aria-label=${`Remove the range of ${name}`} onClick=${() => onRanges(Object.fromEntries(Object.entries(ranges).filter(([one]) => one !== name)))}>×</button></span>`;
  })} <span class="muted">${kept} of ${points.length} trials</span></p>`}
  <${RangeSliders} axes=${axes} ranges=${ranges} onRanges=${onRanges} status=${`${kept} of ${points.length} trials are within the ranges.`} />`;
}

/** @param {unknown} value @returns {unknown} for a cell of a CSV file */
export function plainValue(value) {
  return typeof value === "number" ? value : plain(value);
}
