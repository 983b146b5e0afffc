// What time it is for the master: the reader's clock may be wrong, and may jump while a page is open.

const MOST_DELAY_MS = 2000;
/** The master's time at which this page's own clock, which never jumps, was at 0. */
let zeroMs = NaN;

/** An answer has come. @param {string | null} date when the master wrote it, as HTTP has it */
export function hear(date) {
  const found = Date.parse(date ?? "") - performance.now();
  if (Number.isNaN(found)) return;
  // The time is of whole seconds, and an answer is under way for a while: what is latest is nearest to the truth, unless the
  // master's clock was set, or this machine slept.
  if (!(found <= zeroMs && zeroMs - found < MOST_DELAY_MS)) zeroMs = found;
}

/** @returns {number} milliseconds since 1970, UTC; by the reader's clock before the first answer */
export function now() {
  return Number.isNaN(zeroMs) ? Date.now() : zeroMs + performance.now();
}
