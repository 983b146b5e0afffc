// A drawing of ours on a canvas: sharp on any screen, drawn again when its size or the colours change, with PNG and CSV.

import { html, useEffect, useRef } from "htm/preact/standalone";
import { csv, download } from "../format.js";
import { isDark, savePicture, styled } from "./chart.js";

/** @typedef {{ ctx: CanvasRenderingContext2D, width: number, height: number }} Area in CSS pixels */
/** @typedef {{ width: number, left: number, seen: number }} Spot of the pointer: width of the drawing, how far it is scrolled, how much is seen */

const RAMPS = { light: [[31, 95, 208], [126, 98, 150], [232, 150, 30]], dark: [[138, 180, 255], [150, 118, 150], [190, 118, 20]] };

/** @param {number} share 0 for the best, 1 for the worst; NaN for none @returns {string} a colour */
export function rampColour(share) {
  if (!Number.isFinite(share)) return styled("--line");
  const ramp = isDark() ? RAMPS.dark : RAMPS.light;
  const at = Math.min(Math.max(share, 0), 1) * 2;
  const low = Math.min(Math.floor(at), 1);
  const mix = ramp[low].map((one, idx) => Math.round(one + (ramp[low + 1][idx] - one) * (at - low)));
  return `rgb(${mix.join(" ")})`;
}

/**
 * @param {object} props
 * @param {string} props.title also of its files
 * @param {unknown} [props.heading] in place of the title
 * @param {string} props.label for screen readers: what is to be seen
 * @param {number} props.height pixels
 * @param {(area: Area) => void} props.draw
 * @param {unknown[]} props.deps what makes it another drawing
 * @param {() => unknown[][]} [props.rows] of its CSV
 * @param {number} [props.minWidth] pixels; a narrower place scrolls sideways
 * @param {(x: number, y: number, spot: Spot) => void} [props.onMove] NaN when the pointer leaves
 * @param {(x: number, y: number, spot: Spot) => void} [props.onDown]
 * @param {unknown} [props.children] above the drawing: its tip
 */
export function Drawing(props) {
  const { title, label, height, deps } = props;
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const now = useRef(props);
  now.current = props;

  function paint() {
    const element = canvas.current;
    if (!element || !element.clientWidth) return;
    const scale = devicePixelRatio || 1;
    const width = element.clientWidth;
    const wide = Math.round(width * scale);
    const high = Math.round(now.current.height * scale);
    if (element.width !== wide || element.height !== high) [element.width, element.height] = [wide, high];
    const ctx = /** @type {CanvasRenderingContext2D} */ (element.getContext("2d"));
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.clearRect(0, 0, width, now.current.height);
    ctx.font = "12px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    now.current.draw({ ctx, width, height: now.current.height });
  }
  useEffect(paint, [height, ...deps]);
  useEffect(() => {
    const observer = new ResizeObserver(paint);
    observer.observe(/** @type {HTMLCanvasElement} */ (canvas.current));
    window.addEventListener("themechange", paint);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", paint);
    return () => {
      observer.disconnect();
      window.removeEventListener("themechange", paint);
      scheme.removeEventListener("change", paint);
    };
  }, []);

  /** @param {PointerEvent} event @param {((x: number, y: number, spot: Spot) => void) | undefined} tell */
  function point(event, tell) {
    const element = /** @type {HTMLCanvasElement} */ (canvas.current);
    const box = element.getBoundingClientRect();
    const around = /** @type {HTMLElement} */ (element.parentElement);
    tell?.(event.clientX - box.left, event.clientY - box.top, { width: box.width, left: around.scrollLeft, seen: around.clientWidth });
  }
  const leave = () => props.onMove?.(NaN, NaN, { width: 0, left: 0, seen: 0 });
  return html`<figure class="chart drawing">
    <figcaption>
      <span class="name" title=${title}>${props.heading ?? title}</span>
      <span class="tools"><button onClick=${() => savePicture(canvas.current, title)} aria-label=${`PNG of ${title}`}>PNG</button>
        ${props.rows && html`<button aria-label=${`CSV of ${title}`} onClick=${() => download(`${title}.csv`, csv(/** @type {any} */ (props.rows)()))}>CSV</button>`}</span>
    </figcaption>
    <div class="place">
      <div class="sideways" tabindex="0"><canvas ref=${canvas} role="img" aria-label=${label} style=${{ height: `${height}px`, minWidth: `${props.minWidth ?? 0}px` }}
        onPointerMove=${(/** @type {PointerEvent} */ event) => point(event, props.onMove)} onPointerLeave=${leave} onPointerCancel=${leave}
        onPointerDown=${(/** @type {PointerEvent} */ event) => {
          if (!event.button) point(event, props.onDown);
        }}></canvas></div>
      ${props.children}
    </div>
  </figure>`;
}

/** What is under the pointer. @param {{ x: number, y: number, spot: Spot, children: unknown }} props pixels in the drawing */
export function Tip({ x, y, spot, children }) {
  const at = x - spot.left;
  return html`<div class=${`tip${at > spot.seen / 2 ? " before" : ""}`} style=${{ left: `${at + 12}px`, top: `${y + 12}px` }}>${children}</div>`;
}

/** @param {CanvasRenderingContext2D} ctx @param {string} text @param {number} room pixels @returns {string} as much as fits */
export function fitted(ctx, text, room) {
  if (ctx.measureText(text).width <= room) return text;
  let length = text.length;
  while (length > 1 && ctx.measureText(`${text.slice(0, length)}…`).width > room) length -= 1;
  return `${text.slice(0, length)}…`;
}
