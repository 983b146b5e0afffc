// What differs between two texts, line by line. Source: Myers, "An O(ND) difference algorithm and its variations", 1986.

/** @typedef {{ kind: "same" | "added" | "removed", text: string, before: number | null, after: number | null }} Line numbers from 1 */

/** Most differences that are looked for one by one; what has more is replaced as a whole. */
const MOST_EDITS = 2000;

/** @param {string} text @returns {string[]} */
function linesOf(text) {
  if (!text) return [];
  return text.replace(/\n$/, "").split("\n");
}

/** @param {string} before @param {string} after @returns {Line[]} */
export function diffLines(before, after) {
  const [a, b] = [linesOf(before), linesOf(after)];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const matches = matched(a.slice(start, a.length - end), b.slice(start, b.length - end));
  /** @type {[number, number][]} */
  const same = [
    ...Array.from({ length: start }, (_, idx) => /** @type {[number, number]} */ ([idx, idx])),
    ...matches.map(([x, y]) => /** @type {[number, number]} */ ([x + start, y + start])),
    ...Array.from({ length: end }, (_, idx) => /** @type {[number, number]} */ ([a.length - end + idx, b.length - end + idx])),
  ];
  /** @type {Line[]} */
  const found = [];
  let [x, y] = [0, 0];
  for (const [toX, toY] of [...same, /** @type {[number, number]} */ ([a.length, b.length])]) {
    for (; x < toX; x += 1) found.push({ kind: "removed", text: a[x], before: x + 1, after: null });
    for (; y < toY; y += 1) found.push({ kind: "added", text: b[y], before: null, after: y + 1 });
    if (x < a.length && y < b.length) {
      found.push({ kind: "same", text: a[x], before: x + 1, after: y + 1 });
      x += 1;
      y += 1;
    }
  }
  return found;
}

/** @param {string[]} a @param {string[]} b @returns {[number, number][]} indices of a longest common subsequence, in order */
function matched(a, b) {
  if (!a.length || !b.length) return [];
  const most = Math.min(a.length + b.length, MOST_EDITS);
  // The furthest x on each diagonal k = x - y, after so many edits.
  const furthest = new Int32Array(2 * most + 3);
  const zero = most + 1;
  /** @type {Int32Array[]} */
  const trace = [];
  for (let edits = 0; edits <= most; edits += 1) {
    trace.push(furthest.slice(zero - edits - 1, zero + edits + 2));
    for (let k = -edits; k <= edits; k += 2) {
      const isDown = k === -edits || (k !== edits && furthest[zero + k - 1] < furthest[zero + k + 1]);
      let x = isDown ? furthest[zero + k + 1] : furthest[zero + k - 1] + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x += 1;
      furthest[zero + k] = x;
      if (x >= a.length && x - k >= b.length) return backwards(trace, a.length, b.length);
    }
  }
  return [];
}

/** @param {Int32Array[]} trace of each number of edits, its diagonals from -edits - 1 on @param {number} x @param {number} y @returns {[number, number][]} */
function backwards(trace, x, y) {
  /** @type {[number, number][]} */
  const found = [];
  for (let edits = trace.length - 1; edits >= 0; edits -= 1) {
    const at = (/** @type {number} */ k) => trace[edits][k + edits + 1];
    const k = x - y;
    const from = k === -edits || (k !== edits && at(k - 1) < at(k + 1)) ? k + 1 : k - 1;
    const [fromX, fromY] = edits ? [at(from), at(from) - from] : [0, 0];
    while (x > fromX && y > fromY) {
      x -= 1;
      y -= 1;
      found.push([x, y]);
    }
    [x, y] = [fromX, fromY];
  }
  return found.reverse();
}

const CONTEXT = 3;

/** @param {Line[]} lines @returns {{ isFolded: boolean, lines: Line[] }[]} what is alike and far from a difference is folded */
export function hunksOf(lines) {
  const isNear = new Uint8Array(lines.length);
  lines.forEach((line, idx) => {
    if (line.kind !== "same") isNear.fill(1, Math.max(0, idx - CONTEXT), idx + CONTEXT + 1);
  });
  /** @type {{ isFolded: boolean, lines: Line[] }[]} */
  const hunks = [];
  lines.forEach((line, idx) => {
    const isFolded = !isNear[idx];
    if (hunks.at(-1)?.isFolded !== isFolded) hunks.push({ isFolded, lines: [] });
    hunks[hunks.length - 1].lines.push(line);
  });
  return hunks;
}
