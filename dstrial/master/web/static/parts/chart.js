// A chart of many curves, each with points of its own. uPlot draws axes and zooms; the curves are drawn here, as its series would
// have to share their x values.

import { html, useEffect, useMemo, useRef, useState } from "htm/preact/standalone";
import uPlot from "uplot";
import { csv, download, number, ticks } from "../format.js";
import { CurvePicture, stroke } from "./curve_picture.js";

/**
 * @typedef {object} Curve
 * @property {string | number} id
 * @property {string} label
 * @property {number[]} xs ascending
 * @property {number[]} ys may hold NaN and infinities
 * @property {number} [colour] which of the colours; its place without
 * @property {boolean} [isBest]
 * @property {boolean} [isGuide] a line to compare points with, none of its own
 * @property {string} [href] where a click leads
 *
 * @typedef {{ x: number, text: string }} Mark a line across the chart
 */

const PALETTE = { light: ["#1f5fd0", "#b4460f", "#1a7f5a", "#8a3ffc", "#5b6573", "#6b6000", "#00708c", "#7a4a9e"], dark: ["#79a8ff", "#ffa15c", "#58d0a0", "#c59bff", "#aab4c4", "#d6c84a", "#5ccfe6", "#d7a7f0"] };
const HOVER_PX = 40;
/** Curves in a legend: of more, only the first is named. */
const MOST_NAMED = 10;
/** Of the numbers on the left; more where they are long. */
const AXIS_PX = 64;
/** One for all: another at each render would have everything drawn again. @type {Mark[]} */
const NO_MARKS = [];

/** @returns {boolean} */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** @param {number} idx @returns {string} a colour that can be told from its neighbours */
export function colour(idx) {
  const colours = isDark() ? PALETTE.dark : PALETTE.light;
  return colours[idx % colours.length];
}

/** @param {string} name of a variable of the style @returns {string} */
export function styled(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Save a canvas with its title above it as PNG. @param {HTMLCanvasElement | null | undefined} canvas @param {string} title */
export function savePicture(canvas, title) {
  if (!canvas) return;
  const copy = document.createElement("canvas");
  const head = Math.round(28 * devicePixelRatio);
  copy.width = canvas.width;
  copy.height = canvas.height + head;
  const ctx = /** @type {CanvasRenderingContext2D} */ (copy.getContext("2d"));
  ctx.fillStyle = styled("--back");
  ctx.fillRect(0, 0, copy.width, copy.height);
  ctx.fillStyle = styled("--text");
  ctx.font = `${14 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.fillText(title, 10 * devicePixelRatio, 19 * devicePixelRatio);
  ctx.drawImage(canvas, 0, head);
  copy.toBlob((blob) => blob && download(`${title}.png`, blob));
}

/**
 * @param {number[]} ys @param {number} weight of what was before, from 0 to 1
 * @returns {number[]} exponential moving average, without the bias of its start
 */
export function smooth(ys, weight) {
  if (!weight) return ys;
  let mean = 0;
  let sum = 0;
  return ys.map((y) => {
    if (!Number.isFinite(y)) return y;
    mean = mean * weight + y * (1 - weight);
    sum = sum * weight + (1 - weight);
    return mean / sum;
  });
}

/** @param {number[]} xs ascending @param {number} x @returns {number} index of the nearest */
function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

/** What is known of curves, which come in parts and stay. @type {WeakMap<Curve, number>} */
const NOT_FINITE = new WeakMap();
/** @type {WeakMap<Curve, number[]>[]} by whether the y axis is logarithmic */
const EXTENTS = [new WeakMap(), new WeakMap()];

/** @template {object} K @template V @param {WeakMap<K, V>} known @param {K} key @param {() => V} make @returns {V} */
function remembered(known, key, make) {
  let found = known.get(key);
  if (found === undefined) known.set(key, (found = make()));
  return found;
}

/** @param {Curve} curve @param {boolean} isLog @param {[number, number] | null} xRange that is shown @returns {number[]} left, right, and low and high of what is shown */
function extentsOf({ xs, ys }, isLog, xRange) {
  let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
  for (let idx = 0; idx < xs.length; idx += 1) {
    const x = xs[idx];
    const y = ys[idx];
    if (!Number.isFinite(y) || (isLog && y <= 0)) continue;
    if (x < left) left = x;
    if (x > right) right = x;
    if (xRange && (x < xRange[0] || x > xRange[1])) continue;
    if (y < low) low = y;
    if (y > high) high = y;
  }
  return [left, right, low, high];
}

/** @param {Curve[]} curves @param {boolean} isLog @param {[number, number] | null} [xRange] that is shown @param {boolean} [isScatter] @returns {{ x: [number, number], y: [number, number] }} */
function extents(curves, isLog, xRange = /** @type {[number, number] | null} */ (null), isScatter = false) {
  let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const curve of curves) {
    const own = xRange ? extentsOf(curve, isLog, xRange) : remembered(EXTENTS[Number(isLog)], curve, () => extentsOf(curve, isLog, null));
    [left, right, low, high] = [Math.min(left, own[0]), Math.max(right, own[1]), Math.min(low, own[2]), Math.max(high, own[3])];
  }
  if (!Number.isFinite(left)) [left, right] = [0, 1];
  if (!Number.isFinite(low)) [low, high] = isLog ? [0.1, 1] : [0, 1];
  const around = isScatter ? Math.abs(left) * 0.1 || 1 : 0; // One point stands in the middle, a curve begins at the left.
  if (left === right) [left, right] = around ? [left - around, right + around] : [left, left + 1];
  if (isLog) return { x: [left, right], y: low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1] };
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return { x: [left, right], y: [low - margin, high + margin] };
}

/**
 * @param {object} props
 * @param {Curve[]} props.curves
 * @param {string} props.title also of its files
 * @param {string} props.xLabel
 * @param {(x: number) => string} [props.showX]
 * @param {boolean} [props.isLog]
 * @param {number} [props.smoothing]
 * @param {string | number | null} [props.highlight] id of a curve
 * @param {(id: string | number | null) => void} [props.onHover]
 * @param {(href: string) => void} [props.onOpen]
 * @param {Mark[]} [props.marks]
 * @param {number} [props.height] pixels
 * @param {boolean} [props.isFromZero] whether the y axis begins there
 * @param {boolean} [props.isScatter] whether the points are what is to be seen
 * @param {unknown} [props.tools] buttons before its own
 * @param {boolean} [props.isLoading] whether it is not known yet what there is
 */
export function Chart(props) {
  const { title, xLabel, isLog = false, smoothing = 0, highlight = null, marks = NO_MARKS, height = 340 } = props;
  const showX = props.showX ?? ((x) => number(x));
  const place = useRef(/** @type {HTMLDivElement | null} */ (null));
  const plot = useRef(/** @type {uPlot | null} */ (null));
  const zoom = useRef(/** @type {[number, number] | null} */ (null));
  const layer = useRef(/** @type {CurvePicture} */ (/** @type {unknown} */ (null)));
  layer.current ??= new CurvePicture();
  const [isZoomed, setZoomed] = useState(false);
  const [hover, setHover] = useState(/** @type {{ curve: Curve, idx: number, left: number, top: number } | null} */ (null));
  const smoothed = useMemo(() => /** @type {WeakMap<Curve, Curve>} */ (new WeakMap()), [smoothing]);
  const curves = useMemo(
    () => (smoothing ? props.curves.map((curve) => remembered(smoothed, curve, () => ({ ...curve, ys: smooth(curve.ys, smoothing) }))) : props.curves),
    [props.curves, smoothing],
  );
  // What the hooks of a plot that lives longer read.
  const now = useRef({ curves, isLog, highlight, marks, hover, showX });
  now.current = { curves, isLog, highlight: highlight ?? hover?.curve.id ?? null, marks, hover, showX };
  const numNotFinite = useMemo(() => props.curves.reduce((sum, curve) => sum + remembered(NOT_FINITE, curve, () => curve.ys.reduce((count, y) => count + (Number.isFinite(y) ? 0 : 1), 0)), 0), [props.curves]);

  /** @param {uPlot} u */
  function draw(u) {
    const { ctx, bbox } = u;
    const { curves: all, highlight: marked, isLog: log, marks: lines } = now.current;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineJoin = "round";
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    lines.forEach(({ x, text }, idx) => {
      const at = Math.round(u.valToPos(x, "x", true));
      ctx.strokeStyle = ctx.fillStyle = styled("--muted");
      ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.lineWidth = devicePixelRatio;
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
      ctx.setLineDash([]);
      // Neighbours stand on lines of their own, and what would be cut at the right edge stands before its line.
      const isAtEdge = at + ctx.measureText(text).width + 8 * devicePixelRatio > bbox.left + bbox.width;
      ctx.textAlign = isAtEdge ? "right" : "left";
      ctx.fillText(text, at + (isAtEdge ? -4 : 4) * devicePixelRatio, bbox.top + (12 + 13 * (idx % 3)) * devicePixelRatio);
    });
    const [minY, maxY] = [/** @type {number} */ (u.scales.y.min), /** @type {number} */ (u.scales.y.max)];
    const look = {
      bbox: { left: bbox.left, top: bbox.top, width: bbox.width, height: bbox.height },
      minX: /** @type {number} */ (u.scales.x.min),
      maxX: /** @type {number} */ (u.scales.x.max),
      minY: log ? Math.log10(minY) : minY,
      maxY: log ? Math.log10(maxY) : maxY,
      isLog: log,
      isMany: all.length > 12,
      isScatter: Boolean(props.isScatter),
      ratio: devicePixelRatio,
      palette: isDark() ? PALETTE.dark : PALETTE.light,
      best: styled("--best"),
      muted: styled("--muted"),
    };
    // All curves are drawn once, and as a picture after that: which of them is marked changes with every move of the mouse.
    const at = all.findIndex((curve) => curve.id === marked);
    layer.current.show(ctx, all, look, at < 0 ? 1 : 0.35);
    if (at >= 0) stroke(ctx, look, all[at], at, true);
    ctx.restore();
  }

  /** @param {uPlot} u */
  function find(u) {
    const { left = -1, top = -1 } = u.cursor;
    if (left < 0 || top < 0) return null;
    const x = u.posToVal(left, "x");
    const isSingle = now.current.curves.filter((curve) => curve.xs.length && !curve.isGuide).length === 1 && !props.isScatter;
    if (!isSingle && !place.current?.matches(":hover")) return null; // The mouse is in another chart.
    /** @type {{ curve: Curve, idx: number, left: number, top: number } | null} */
    let found = null;
    let least = HOVER_PX;
    for (const curve of now.current.curves) {
      if (!curve.xs.length || curve.isGuide) continue;
      const idx = nearest(curve.xs, x);
      const y = curve.ys[idx];
      if (!Number.isFinite(y) || (now.current.isLog && y <= 0)) continue;
      const away = isSingle ? 0 : Math.hypot(u.valToPos(curve.xs[idx], "x") - left, u.valToPos(y, "y") - top);
      if (away < least) {
        least = away;
        found = { curve, idx, left: u.valToPos(curve.xs[idx], "x"), top: u.valToPos(y, "y") };
      }
    }
    return found;
  }

  // A part that was chosen is in the units of its axis; let go of before the plot with the other one is made.
  useEffect(() => {
    zoom.current = null;
    setZoomed(false);
  }, [xLabel]);
  useEffect(() => {
    const box = /** @type {HTMLDivElement} */ (place.current);
    const axis = { stroke: () => styled("--text"), grid: { stroke: () => styled("--line"), width: 1 }, ticks: { stroke: () => styled("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
    const u = new uPlot(
      {
        width: Math.max(box.clientWidth, 200),
        height,
        legend: { show: false },
        cursor: {
          y: true,
          drag: { x: true, y: false, setScale: false },
          points: { show: false },
          // Charts over the same axis show where the mouse is in any of them.
          sync: { key: xLabel, setSeries: false, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        },
        scales: {
          x: { time: false, auto: false },
          y: { auto: false, distr: isLog ? 3 : 1 },
        },
        series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
        axes: [
          { ...axis, label: xLabel, labelSize: 22, size: 36, values: (_, places) => places.map((at) => now.current.showX(at)) },
          { ...axis, size: (_, texts) => Math.max(AXIS_PX, 20 + 7 * Math.max(0, ...(texts ?? []).map((text) => text.length))), values: (_, places, _idx, _space, step) => ticks(places, step) },
        ],
        hooks: {
          draw: [draw],
          setCursor: [
            (chart) => {
              const found = find(chart);
              setHover(found);
              props.onHover?.(found?.curve.id ?? null);
            },
          ],
          setSelect: [
            (chart) => {
              if (chart.select.width < 4) return;
              zoom.current = [chart.posToVal(chart.select.left, "x"), chart.posToVal(chart.select.left + chart.select.width, "x")];
              chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
              setZoomed(true);
              rescale();
            },
          ],
        },
      },
      [[0, 1], [null, null]],
      box,
    );
    plot.current = u;
    const observer = new ResizeObserver(() => u.setSize({ width: Math.max(box.clientWidth, 200), height }));
    observer.observe(box);
    rescale();
    return () => {
      observer.disconnect();
      u.destroy();
      plot.current = null;
    };
  }, [isLog, xLabel, height]);

  function rescale() {
    const u = plot.current;
    if (!u) return;
    const { x, y } = extents(now.current.curves, now.current.isLog, zoom.current, props.isScatter);
    if (props.isFromZero) y[0] = 0;
    const margin = props.isScatter ? (x[1] - x[0]) * 0.04 : 0;
    const [min, max] = zoom.current ?? [x[0] - margin, x[1] + margin];
    u.batch(() => {
      u.setData([[min, max], [null, null]], false);
      u.setScale("x", { min, max });
      u.setScale("y", { min: y[0], max: y[1] });
    });
  }
  useEffect(rescale, [curves, isLog]);
  useEffect(() => plot.current?.redraw(false, false), [highlight, hover?.curve.id, marks]);
  useEffect(() => {
    const redraw = () => plot.current?.redraw(false, true);
    window.addEventListener("themechange", redraw);
    return () => window.removeEventListener("themechange", redraw);
  }, []);

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
        ${isZoomed && html`<button onClick=${unzoom}>Whole</button>`}${props.tools}
        <button onClick=${() => savePicture(plot.current?.ctx.canvas, title)}>PNG</button><button onClick=${write}>CSV</button>
      </span>
    </figcaption>
    <div class="plot" style=${{ minHeight: `${height}px` }} ref=${place} role="img" aria-label=${`${title} over ${xLabel}: ${curves.length} curves`} onDblClick=${unzoom}
      onClick=${() => hover?.curve.href && props.onOpen?.(hover.curve.href)}></div>
    ${hover && html`<div class=${`tip${hover.left > (place.current?.clientWidth ?? 0) / 2 ? " before" : ""}`} style=${{ left: `${hover.left + (plot.current ? plot.current.bbox.left / devicePixelRatio : AXIS_PX)}px`, top: `${hover.top + 24}px` }}>
      <b>${hover.curve.label}</b><br />${xLabel} ${showX(hover.curve.xs[hover.idx])}: ${number(props.curves.find((one) => one.id === hover.curve.id)?.ys[hover.idx])}
      ${smoothing ? html`<br />smoothed ${number(hover.curve.ys[hover.idx])}` : null}
    </div>`}
    ${named.length > 1 && !props.isScatter && html`<p class="legend">${named.slice(0, named.length > MOST_NAMED ? 1 : MOST_NAMED).map((curve) => html`<span><i style=${{ background: curve.isGuide ? "var(--muted)" : curve.isBest ? "var(--best)" : colour(curve.colour ?? curves.indexOf(curve)) }}></i>${curve.label}</span>`)}
      ${named.length > MOST_NAMED && html`<span class="muted">and ${named.length - 1} more: point at a curve to see its name</span>`}</p>`}
    ${!props.isLoading && !curves.some((curve) => curve.xs.length) && html`<p class="muted">Nothing has been reported yet.</p>`}
    ${numNotFinite > 0 && html`<p class="muted">${numNotFinite} ${numNotFinite === 1 ? "value is" : "values are"} not finite, and not drawn.</p>`}
  </figure>`;
}
