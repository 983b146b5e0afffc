// A chart of many curves. uPlot draws the axes and handles zooming; the curves are drawn here, because series of uPlot must share
// their x values.

import { html, useEffect, useMemo, useRef, useState } from "htm/preact/standalone";
import uPlot from "uplot";
import { csv, download, number } from "../format.js";

/**
 * @typedef {object} Curve
 * @property {string | number} id
 * @property {string} label
 * @property {number[]} xs ascending
 * @property {number[]} ys may contain NaN and infinities
 * @property {number} [colour] index of its colour; by default its index among the curves
 * @property {string} [stroke] CSS colour to use instead
 * @property {boolean} [isBest] drawn in the colour of the best trial, above others
 * @property {boolean} [isGuide] drawn as a muted line without points, to compare curves with
 * @property {string} [href] opened by a click
 *
 * @typedef {{ x: number, text: string }} Mark a vertical line across the chart, with a text
 */

const PALETTE = { light: ["#1f5fd0", "#b4460f", "#1a7f5a", "#8a3ffc", "#5b6573", "#6b6000", "#00708c", "#7a4a9e"], dark: ["#79a8ff", "#ffa15c", "#58d0a0", "#c59bff", "#aab4c4", "#d6c84a", "#5ccfe6", "#d7a7f0"] };
const HOVER_PX = 40; // largest distance from the pointer to a point that is shown in the tooltip
const MAX_NAMED = 10; // curves in a legend; if there are more, only the first is named
const AXIS_PX = 64; // width of the numbers on the left; long numbers get more
const FEW_POINTS = 25; // a curve with fewer points has its points drawn
const DARK = matchMedia("(prefers-color-scheme: dark)");
/** The same array at each render: a new one would have everything drawn again. @type {Mark[]} */
const NO_MARKS = [];

/** @returns {boolean} whether the user prefers a dark page */
export const isDark = () => DARK.matches;

/** @param {number} idx @returns {string} a colour that differs from those of neighbouring indices */
export function colour(idx) {
  const colours = isDark() ? PALETTE.dark : PALETTE.light;
  return colours[idx % colours.length];
}

/** @param {string} name of a CSS variable @returns {string} its value */
export function styled(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** @param {Curve} curve @param {number} idx of the curve @returns {string} a CSS colour */
const colourOf = (curve, idx) => (curve.isGuide ? styled("--muted") : curve.isBest ? styled("--best") : (curve.stroke ?? colour(curve.colour ?? idx)));

/**
 * @param {number[]} ys @param {number} weight of earlier values, from 0 to 1
 * @returns {number[]} exponential moving average, with its bias at the start corrected
 */
function smooth(ys, weight) {
  let [mean, sum] = [0, 0];
  return ys.map((y) => {
    if (!Number.isFinite(y)) return y;
    mean = mean * weight + y * (1 - weight);
    sum = sum * weight + (1 - weight);
    return mean / sum;
  });
}

/** @param {number[]} xs ascending @param {number} x @returns {number} index of the nearest element */
function nearest(xs, x) {
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

/** @param {number} y @param {boolean} isLog */
const isDrawn = (y, isLog) => Number.isFinite(y) && (!isLog || y > 0);

/** Return the ranges of both axes. @param {Curve[]} curves @param {boolean} isLog @param {[number, number] | null} zoom the shown range of x @param {boolean} isScatter @returns {{ x: [number, number], y: [number, number] }} */
function extents(curves, isLog, zoom, isScatter) {
  let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const { xs, ys } of curves)
    xs.forEach((x, idx) => {
      const y = ys[idx];
      if (!isDrawn(y, isLog)) return;
      [left, right] = [Math.min(left, x), Math.max(right, x)];
      if (!zoom || (x >= zoom[0] && x <= zoom[1])) [low, high] = [Math.min(low, y), Math.max(high, y)];
    });
  if (!Number.isFinite(left)) [left, right] = [0, 1];
  if (!Number.isFinite(low)) [low, high] = isLog ? [0.1, 1] : [0, 1];
  const aside = isScatter ? (right - left) * 0.04 || Math.abs(left) * 0.1 || 1 : 0;
  if (left === right && !isScatter) right = left + 1;
  const x = zoom ?? /** @type {[number, number]} */ ([left - aside, right + aside]);
  if (isLog) return { x, y: low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1] };
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return { x, y: [low - margin, high + margin] };
}

/** @param {uPlot} u @param {Curve} curve @param {string} stroke @param {number} width in CSS pixels @param {{ isLog: boolean, isScatter: boolean }} how */
function drawCurve(u, { xs, ys, isGuide }, stroke, width, { isLog, isScatter }) {
  const { ctx } = u;
  const places = xs.flatMap((x, idx) => (isDrawn(ys[idx], isLog) ? [[u.valToPos(x, "x", true), u.valToPos(ys[idx], "y", true)]] : []));
  ctx.strokeStyle = ctx.fillStyle = stroke;
  ctx.lineWidth = width * devicePixelRatio;
  ctx.beginPath();
  for (const [x, y] of places) ctx.lineTo(x, y); // The line continues over missing values.
  ctx.stroke();
  if (places.length >= FEW_POINTS || isGuide) return;
  for (const [x, y] of places) {
    ctx.beginPath();
    ctx.arc(x, y, (isScatter ? 4 : 2.2) * devicePixelRatio, 0, 7);
    ctx.fill();
  }
}

/** @param {uPlot} u @param {Mark[]} marks */
function drawMarks({ ctx, bbox, valToPos }, marks) {
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.strokeStyle = ctx.fillStyle = styled("--muted");
  ctx.lineWidth = devicePixelRatio;
  marks.forEach(({ x, text }, idx) => {
    const at = Math.round(valToPos(x, "x", true));
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
    ctx.setLineDash([]);
    // Texts of neighbouring marks are at three heights. A text that the right edge would cut is left of its line.
    const isAtEdge = at + ctx.measureText(text).width + 8 * devicePixelRatio > bbox.left + bbox.width;
    ctx.textAlign = isAtEdge ? "right" : "left";
    ctx.fillText(text, at + (isAtEdge ? -4 : 4) * devicePixelRatio, bbox.top + (12 + 13 * (idx % 3)) * devicePixelRatio);
  });
}

/**
 * @param {object} props
 * @param {Curve[]} props.curves
 * @param {string} props.title also the name of its CSV file
 * @param {string} props.xLabel
 * @param {(x: number) => string} [props.showX] formats a value of x
 * @param {boolean} [props.isLog]
 * @param {number} [props.smoothing] weight of earlier values, from 0 to 1
 * @param {(href: string) => void} [props.onOpen] called with the link of a clicked curve
 * @param {Mark[]} [props.marks]
 * @param {number} [props.height] pixels
 * @param {boolean} [props.isScatter] whether it is a scatter plot: a margin at the sides, larger points, no legend
 * @param {string} [props.shared] charts with the same key show the value at the same x, wherever the pointer is
 * @param {unknown} [props.tools] buttons left of the chart's own
 * @param {boolean} [props.isLoading] whether curves are still being loaded
 */
export function Chart(props) {
  const { title, xLabel, isLog = false, isScatter = false, smoothing = 0, shared, marks = NO_MARKS, height = 340 } = props;
  const showX = props.showX ?? ((x) => number(x));
  const place = useRef(/** @type {HTMLDivElement | null} */ (null));
  const plot = useRef(/** @type {uPlot | null} */ (null));
  const zoom = useRef(/** @type {[number, number] | null} */ (null));
  const [isZoomed, setZoomed] = useState(false);
  const [hover, setHover] = useState(/** @type {{ curve: Curve, idx: number, left: number, top: number } | null} */ (null));
  const curves = useMemo(() => (smoothing ? props.curves.map((curve) => ({ ...curve, ys: smooth(curve.ys, smoothing) })) : props.curves), [props.curves, smoothing]);
  // The hooks of the plot, which outlives a render, read the current values here.
  const now = useRef({ curves, marks, hover, showX });
  now.current = { curves, marks, hover, showX };
  const numNotFinite = useMemo(() => props.curves.reduce((sum, { ys }) => sum + ys.filter((y) => !Number.isFinite(y)).length, 0), [props.curves]);

  /** @param {uPlot} u */
  function draw(u) {
    const { ctx, bbox } = u;
    const { curves: all, marks: lines, hover: marked } = now.current;
    const isMany = all.length > 12;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineJoin = "round";
    drawMarks(u, lines);
    const drawn = all.map((curve, idx) => ({ curve, stroke: colourOf(curve, idx), weight: curve.id === marked?.curve.id ? 2 : curve.isBest ? 1 : 0 }));
    drawn.sort((a, b) => a.weight - b.weight); // Draw the best curve and the one at the pointer above the others.
    for (const { curve, stroke, weight } of drawn) {
      ctx.globalAlpha = (weight ? 1 : isMany ? 0.5 : 0.9) * (marked && weight < 2 && !curve.isGuide ? 0.35 : 1);
      drawCurve(u, curve, stroke, weight ? 2.6 : isMany ? 1 : 1.6, { isLog, isScatter });
    }
    ctx.restore();
  }

  /** @param {uPlot} u @returns the curve and point nearest to the pointer, or null */
  function findHovered(u) {
    const { left = -1, top = -1 } = u.cursor;
    let found = null;
    let least = HOVER_PX;
    for (const curve of left < 0 ? [] : now.current.curves) {
      if (!curve.xs.length || curve.isGuide) continue;
      const idx = nearest(curve.xs, u.posToVal(left, "x"));
      if (!isDrawn(curve.ys[idx], isLog)) continue;
      const [x, y] = [u.valToPos(curve.xs[idx], "x"), u.valToPos(curve.ys[idx], "y")];
      const away = shared ? 0 : Math.hypot(x - left, y - top);
      if (away < least) [least, found] = [away, { curve, idx, left: x, top: y }];
    }
    return found;
  }

  // The zoomed range is in the unit of the x axis: reset it before a plot with another unit is made.
  useEffect(() => {
    zoom.current = null;
    setZoomed(false);
  }, [xLabel]);
  useEffect(() => {
    const box = /** @type {HTMLDivElement} */ (place.current);
    const axis = { stroke: () => styled("--text"), grid: { stroke: () => styled("--line"), width: 1 }, ticks: { stroke: () => styled("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
    /** @param {uPlot} chart */
    function select(chart) {
      if (chart.select.width < 4) return;
      zoom.current = [chart.posToVal(chart.select.left, "x"), chart.posToVal(chart.select.left + chart.select.width, "x")];
      chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      setZoomed(true);
      rescale();
    }
    const u = new uPlot(
      {
        width: Math.max(box.clientWidth, 200),
        height,
        legend: { show: false },
        cursor: {
          y: true,
          drag: { x: true, y: false, setScale: false },
          points: { show: false },
          sync: shared ? { key: `${shared} ${xLabel}`, setSeries: false, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } } : undefined,
        },
        scales: { x: { time: false, auto: false }, y: { auto: false, distr: isLog ? 3 : 1 } },
        series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
        axes: [
          { ...axis, label: xLabel, labelSize: 22, size: 36, values: (_, places) => places.map((at) => now.current.showX(at)) },
          { ...axis, size: (_, texts) => Math.max(AXIS_PX, 20 + 7 * Math.max(0, ...(texts ?? []).map((text) => text.length))), values: (_, places) => places.map((at) => number(at, 9)) },
        ],
        hooks: { draw: [draw], setCursor: [(chart) => setHover(findHovered(chart))], setSelect: [select] },
      },
      [[0, 1], [null, null]],
      box,
    );
    plot.current = u;
    const observer = new ResizeObserver(() => u.setSize({ width: Math.max(box.clientWidth, 200), height }));
    observer.observe(box);
    const redraw = () => u.redraw(false, true);
    DARK.addEventListener("change", redraw);
    rescale();
    return () => {
      observer.disconnect();
      DARK.removeEventListener("change", redraw);
      u.destroy();
      plot.current = null;
    };
  }, [isLog, xLabel, height, shared]);

  function rescale() {
    const { x, y } = extents(now.current.curves, isLog, zoom.current, isScatter);
    plot.current?.batch(() => {
      plot.current?.setData([x, [null, null]], false);
      plot.current?.setScale("x", { min: x[0], max: x[1] });
      plot.current?.setScale("y", { min: y[0], max: y[1] });
    });
  }
  useEffect(rescale, [curves]);
  useEffect(() => plot.current?.redraw(false, false), [hover?.curve.id, marks]);

  function unzoom() {
    zoom.current = null;
    setZoomed(false);
    rescale();
  }
  const named = useMemo(() => curves.filter((curve) => curve.xs.length).sort((a, b) => Number(b.isBest ?? false) - Number(a.isBest ?? false)), [curves]);
  const write = () =>
    download(`${title}.csv`, csv([["curve", xLabel, title], ...props.curves.flatMap((curve) => curve.xs.map((x, idx) => [curve.label, x, curve.ys[idx]]))]));

  return html`<figure class="chart">
    <figcaption>
      <span>${title}</span>
      <span class="tools">
        ${isZoomed && html`<button onClick=${unzoom}>Whole</button>`}
        ${props.tools}<button onClick=${write}>CSV</button>
      </span>
    </figcaption>
    <div class="plot" style=${{ minHeight: `${height}px` }} ref=${place} role="img" aria-label=${`${title} over ${xLabel}: ${curves.length} curves`} onDblClick=${unzoom}
      onClick=${() => hover?.curve.href && props.onOpen?.(hover.curve.href)}></div>
    ${hover && html`<div class=${`tip${hover.left > (plot.current?.over.clientWidth ?? 0) / 2 ? " before" : ""}`} style=${{ left: `${hover.left + (plot.current ? plot.current.bbox.left / devicePixelRatio : AXIS_PX)}px`, top: `${hover.top + 44}px` }}>
      <b>${hover.curve.label}</b><br />${xLabel} ${showX(hover.curve.xs[hover.idx])}: ${number(props.curves.find((one) => one.id === hover.curve.id)?.ys[hover.idx])}
      ${smoothing ? html`<br />smoothed ${number(hover.curve.ys[hover.idx])}` : null}
    </div>`}
    ${named.length > 1 && !isScatter && html`<p class="legend">${named.slice(0, named.length > MAX_NAMED ? 1 : MAX_NAMED).map((curve) => html`<span><i style=${{ background: colourOf(curve, curves.indexOf(curve)) }}></i>${curve.label}</span>`)}
      ${named.length > MAX_NAMED && html`<span class="muted">and ${named.length - 1} more: point at a curve to see its name</span>`}</p>`}
    ${!props.isLoading && !curves.some((curve) => curve.xs.length) && html`<p class="muted">Nothing has been reported yet.</p>`}
    ${numNotFinite > 0 && html`<p class="muted">${numNotFinite} ${numNotFinite === 1 ? "value is" : "values are"} not finite, and not drawn.</p>`}
  </figure>`;
}
