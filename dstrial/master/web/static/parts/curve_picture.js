// The picture of many curves, a part of which is drawn in each frame: all of a search at once would hold up whoever uses the page.
// Until it is whole, the one before stands for it, moved to where its curves are now.

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
 *
 * @typedef {{ key: string, look: Look, all: Curve[] | null, drawn: Set<Curve>, canvas: HTMLCanvasElement }} Picture
 */

/** What is drawn in a few milliseconds. */
const POINTS_A_FRAME = 20_000;
/** What a curve costs however short it is. */
const POINTS_OF_A_CURVE = 20;

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

export class CurvePicture {
  constructor() {
    /** @type {Picture | null} */
    this.now = null;
    /** @type {Picture | null} */
    this.before = null;
  }

  /**
   * Draws more of the curves, and shows what there is.
   *
   * @param {CanvasRenderingContext2D} ctx clipped to the look's box @param {Curve[]} all @param {Look} look
   * @param {number} alpha of the curves @param {boolean} isWhole draw all that is left now
   * @returns {boolean} whether all are drawn
   */
  show(ctx, all, look, alpha, isWhole) {
    const now = this.begun(ctx.canvas, all, look);
    const on = /** @type {CanvasRenderingContext2D} */ (now.canvas.getContext("2d"));
    let room = isWhole ? Infinity : POINTS_A_FRAME;
    let isDone = true;
    for (let idx = 0; idx < all.length; idx += 1) {
      const curve = all[idx];
      if (curve.isBest || now.drawn.has(curve)) continue; // The best are above the others, whichever come later.
      isDone = room > 0;
      if (!isDone) break;
      stroke(on, look, curve, idx, false);
      now.drawn.add(curve);
      room -= curve.xs.length + POINTS_OF_A_CURVE;
    }
    if (isDone) this.before = null;
    ctx.globalAlpha = alpha;
    const { before } = this;
    if (before && before.look.isLog === look.isLog && before.drawn.size > now.drawn.size) place(ctx, before, look);
    else ctx.drawImage(now.canvas, 0, 0);
    all.forEach((curve, idx) => curve.isBest && stroke(ctx, look, curve, idx, false));
    return isDone;
  }

  /** The picture to go on with. @param {HTMLCanvasElement} like @param {Curve[]} all @param {Look} look @returns {Picture} */
  begun(like, all, look) {
    const key = JSON.stringify([look, like.width, like.height]);
    const { now } = this;
    if (now?.key === key && (now.all === all || isPartOf(now.drawn, all))) {
      now.all = all;
      return now;
    }
    let canvas = document.createElement("canvas");
    if (now && (!this.before || now.drawn.size >= this.before.drawn.size)) {
      canvas = this.before?.canvas ?? canvas;
      this.before = now;
    } else if (now) canvas = now.canvas;
    canvas.width = like.width; // It is empty after that.
    canvas.height = like.height;
    const on = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    on.beginPath();
    on.rect(look.bbox.left, look.bbox.top, look.bbox.width, look.bbox.height);
    on.clip();
    on.lineJoin = "round";
    this.now = { key, look, all, drawn: new Set(), canvas };
    return this.now;
  }
}

/** @param {Set<Curve>} drawn @param {Curve[]} all @returns {boolean} */
function isPartOf(drawn, all) {
  const there = new Set(all);
  for (const curve of drawn) if (!there.has(curve)) return false;
  return true;
}

/** Where the curves of a picture are now. @param {CanvasRenderingContext2D} ctx @param {Picture} picture @param {Look} look */
function place(ctx, picture, look) {
  const { bbox, minX, maxX, minY, maxY } = picture.look;
  const perX = look.bbox.width / (look.maxX - look.minX || 1);
  const perY = look.bbox.height / (look.maxY - look.minY || 1);
  const left = look.bbox.left + (minX - look.minX) * perX;
  const top = look.bbox.top + (look.maxY - maxY) * perY;
  ctx.drawImage(picture.canvas, bbox.left, bbox.top, bbox.width, bbox.height, left, top, (maxX - minX) * perX, (maxY - minY) * perY);
}
