// What differs between two texts, line by line: a longest common subsequence.

/** @typedef {{ kind: "same" | "added" | "removed", text: string, before: number | null, after: number | null }} Line numbers from 1 */

/** Most pairs of lines, behind what both begin with and before what both end with, that are compared; more are replaced as a whole. */
const MOST_PAIRS = 10_000_000;

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
  if (a.length * b.length > MOST_PAIRS) return [];
  const width = b.length + 1;
  // The length of the longest one from each pair of lines on.
  const lengths = new Uint32Array((a.length + 1) * width);
  for (let x = a.length - 1; x >= 0; x -= 1) {
    for (let y = b.length - 1; y >= 0; y -= 1) {
      const at = x * width + y;
      lengths[at] = a[x] === b[y] ? lengths[at + width + 1] + 1 : Math.max(lengths[at + width], lengths[at + 1]);
    }
  }
  /** @type {[number, number][]} */
  const found = [];
  for (let [x, y] = [0, 0]; x < a.length && y < b.length; ) {
    const at = x * width + y;
    if (a[x] === b[y]) found.push([x++, y++]);
    else if (lengths[at + width] >= lengths[at + 1]) x += 1;
    else y += 1;
  }
  return found;
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
