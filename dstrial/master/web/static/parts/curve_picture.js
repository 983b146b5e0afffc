// The picture of many curves, kept while only the marked curve changes: drawing a thousand curves at each mouse move is too slow.

/** @typedef {import("./chart.js").Curve} Curve */
/**
 * @typedef {object} Look where and how curves are drawn; of the y axis logarithms where it is logarithmic
 * @property {{ left: number, top: number, width: number, height: number }} bbox pixels of the canvas
 * @property {number} minX
 * @property {number} maxX
 * @property {number} minY
 * @property {number} maxY
 * @property {boolean} isLog
 * @property {boolean} isMany
 * @property {boolean} isScatter
 * @property {number} ratio pixels of the canvas for one of the page
 * @property {string[]} palette
 * @property {string} best colour of the best
 * @property {string} muted
 */

/** @param {CanvasRenderingContext2D} on @param {Look} look @param {Curve} curve @param {number} idx of the curve @param {boolean} isMarked */
export function stroke(on, look, curve, idx, isMarked) {
  const { bbox, minX, minY, isLog, ratio } = look;
  const [perX, perY, bottom] = [bbox.width / (look.maxX - minX || 1), bbox.height / (look.maxY - minY || 1), bbox.top + bbox.height];
  on.strokeStyle = on.fillStyle = curve.isGuide ? look.muted : curve.isBest ? look.best : look.palette[(curve.colour ?? idx) % look.palette.length];
  on.globalAlpha = isMarked || curve.isBest ? 1 : look.isMany ? 0.5 : 0.9;
  on.lineWidth = (isMarked || curve.isBest ? 2.6 : look.isMany ? 1 : 1.6) * ratio;
  on.beginPath();
  let drawn = 0;
  const { xs, ys } = curve;
  for (let point = 0; point < xs.length; point += 1) {
    const y = ys[point];
    if (!Number.isFinite(y) || (isLog && y <= 0)) continue; // A line goes on over what is missing.
    const px = bbox.left + (xs[point] - minX) * perX;
    const py = bottom - ((isLog ? Math.log10(y) : y) - minY) * perY;
    if (drawn) on.lineTo(px, py);
    else on.moveTo(px, py);
    drawn += 1;
  }
  on.stroke();
  if (!drawn || drawn >= 25 || curve.isGuide) return;
  for (let point = 0; point < xs.length; point += 1) {
    const y = ys[point];
    if (!Number.isFinite(y) || (isLog && y <= 0)) continue;
    on.beginPath();
    on.arc(bbox.left + (xs[point] - minX) * perX, bottom - ((isLog ? Math.log10(y) : y) - minY) * perY, (look.isScatter ? 4 : 2.2) * ratio, 0, 7);
    on.fill();
  }
}

/** Curves on a canvas of their own, which is shown again as long as only the marked one changes. */
export class CurvePicture {
  canvas = document.createElement("canvas");
  key = "";
  /** @type {Set<Curve>} */
  drawn = new Set();

  /**
   * Draw the curves that are new, or all of them with another look, and show the canvas.
   *
   * @param {CanvasRenderingContext2D} ctx clipped to the look's box @param {Curve[]} all @param {Look} look @param {number} alpha of the curves
   */
  show(ctx, all, look, alpha) {
    const { canvas, drawn } = this;
    const on = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    const key = JSON.stringify([look, ctx.canvas.width, ctx.canvas.height]);
    const there = new Set(all);
    if (key !== this.key || [...drawn].some((curve) => !there.has(curve))) {
      this.key = key;
      drawn.clear();
      canvas.width = ctx.canvas.width; // It is empty after that.
      canvas.height = ctx.canvas.height;
      on.beginPath();
      on.rect(look.bbox.left, look.bbox.top, look.bbox.width, look.bbox.height);
      on.clip();
      on.lineJoin = "round";
    }
    all.forEach((curve, idx) => {
      if (curve.isBest || drawn.has(curve)) return; // The best are above the others, whichever come later.
      stroke(on, look, curve, idx, false);
      drawn.add(curve);
    });
    ctx.globalAlpha = alpha;
    ctx.drawImage(canvas, 0, 0);
    all.forEach((curve, idx) => curve.isBest && stroke(ctx, look, curve, idx, false));
  }
}
