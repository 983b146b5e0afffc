// The part of a log that is loaded: lines around what is looked at; others are asked for and let go.

import { get } from "../../api.js";

/**
 * @typedef {{ id: number, ms: number, level: string | null, rank: number | null, source: string, stdtype: string | null, text: string, bytes?: number }} Line
 *
 * @typedef {Record<string, string | number | string[]>} Wanted the query: whose log, and filters
 *
 * @typedef {object} Part
 * @property {Line[]} lines
 * @property {boolean} isStart whether nothing is before it
 * @property {boolean} isEnd whether nothing is behind it
 * @property {boolean} hasNew whether lines came that are not in it
 * @property {boolean} isSearching whether many lines are searched for those that fit
 * @property {Error | null} error
 */

const PAGE = 200;
const MOST_LINES = 1200;
/** After something was printed. */
const CATCH_UP = 1000;

/** @type {Part} */
export const NOTHING = { lines: [], isStart: false, isEnd: false, hasNew: false, isSearching: false, error: null };

export class Feed {
  /** @param {Wanted} wanted @param {(part: Part) => void} onChange */
  constructor(wanted, onChange) {
    this.wanted = wanted;
    this.onChange = onChange;
    this.part = { ...NOTHING };
    this.abort = new AbortController();
    this.isFollowing = true;
    this.isBusy = false;
    this.isWaiting = false;
    /** Ids from which searching goes on, in both directions. */
    this.back = 0;
    this.fore = 0;
  }

  close() {
    this.abort.abort();
  }

  /** @param {Partial<Part>} change */
  change(change) {
    if (this.abort.signal.aborted) return;
    this.part = { ...this.part, ...change };
    this.onChange(this.part);
  }

  /** One thing at a time. @param {() => Promise<void>} work */
  async alone(work) {
    if (this.isBusy) return;
    this.isBusy = true;
    try {
      await work();
      if (this.part.error || this.part.isSearching) this.change({ error: null, isSearching: false });
    } catch (error) {
      if (!this.abort.signal.aborted) this.change({ error: /** @type {Error} */ (error), isSearching: false });
    } finally {
      this.isBusy = false;
    }
    if (this.isWaiting && !this.part.error) {
      this.isWaiting = false;
      await this.catchUp();
    }
  }

  /**
   * Ask for lines in one direction until there is one, or nothing more to search.
   *
   * @param {Wanted} from `before` or `after` @param {number} limit
   * @returns {Promise<{ lines: Line[], searchedTo: number | null, last: number }>}
   */
  async search(from, limit) {
    const word = "after" in from ? "after" : "before";
    let last = 0;
    for (let place = from; ; ) {
      const found = await get("/page/logs", { ...this.wanted, ...place, limit }, this.abort.signal);
      // What came after the first answer is behind where a search backwards began.
      last = word === "after" ? found.last : last || found.last;
      if (found.lines.length || found.searchedTo === null) return { ...found, last };
      if (!this.part.isSearching) this.change({ isSearching: true });
      place = { [word]: found.searchedTo };
    }
  }

  /** Show the newest lines. */
  newest() {
    return this.alone(async () => {
      const { lines, searchedTo, last } = await this.search({}, PAGE);
      this.back = searchedTo ?? 0;
      this.fore = last;
      this.change({ lines, isStart: searchedTo === null, isEnd: true, hasNew: false });
    });
  }

  /** Show what is around a line, or behind where it would be. @param {number} id */
  around(id) {
    return this.alone(async () => {
      const behind = await this.search({ after: Math.max(0, id - 1) }, PAGE);
      const before = id > 1 ? await this.search({ before: id }, PAGE) : { lines: [], searchedTo: null };
      this.back = before.searchedTo ?? 0;
      this.fore = behind.searchedTo ?? behind.last;
      this.change({ lines: [...before.lines, ...behind.lines], isStart: before.searchedTo === null, isEnd: behind.searchedTo === null, hasNew: false });
    });
  }

  /** Add what is before. */
  async earlier() {
    if (this.part.isStart) return;
    await this.alone(async () => {
      const found = await this.search({ before: this.back }, PAGE);
      const all = [...found.lines, ...this.part.lines];
      const lines = all.slice(0, MOST_LINES);
      const isCut = lines.length < all.length;
      this.back = found.searchedTo ?? 0;
      if (isCut) this.fore = lines[lines.length - 1].id;
      this.change({ lines, isStart: found.searchedTo === null, isEnd: this.part.isEnd && !isCut });
    });
  }

  /** Add what is behind. */
  async later() {
    if (!this.part.isEnd) await this.alone(() => this.append(PAGE));
  }

  /** @param {number} limit */
  async append(limit) {
    const found = await this.search({ after: this.fore }, limit);
    const all = [...this.part.lines, ...found.lines];
    const lines = all.slice(-MOST_LINES);
    const isCut = lines.length < all.length;
    this.fore = found.searchedTo ?? Math.max(found.last, this.fore);
    if (isCut) this.back = lines[0].id;
    this.change({ lines, isStart: this.part.isStart && !isCut, isEnd: found.searchedTo === null, hasNew: false });
  }

  /** Something was printed. */
  async catchUp() {
    if (this.isBusy) this.isWaiting = true;
    else if (this.part.error && !this.part.lines.length) await this.newest();
    else if (this.part.isEnd && (this.isFollowing || this.part.lines.length <= MOST_LINES - PAGE)) {
      await this.alone(() => this.append(this.isFollowing ? CATCH_UP : PAGE));
      // More has come than can be read one page after the other.
      if (this.isFollowing && !this.part.isEnd && !this.part.error) await this.newest();
    } else this.change({ isEnd: false, hasNew: true });
  }
}
