// The loaded part of a log: lines near the visible ones. More are loaded as the user scrolls, and far ones are dropped.

import { get } from "../../api.js";

/**
 * @typedef {{ id: number, ms: number, level: string | null, rank: number | null, source: string, stdtype: string | null, text: string, bytes?: number }} Line
 *
 * @typedef {Record<string, string | number | string[]>} LogQuery the query of a request: whose log, and filters
 *
 * @typedef {object} Part
 * @property {Line[]} lines
 * @property {boolean} isStart whether no line is before the loaded ones
 * @property {boolean} isEnd whether no line is after the loaded ones
 * @property {boolean} hasNew whether lines were printed that are not loaded
 * @property {boolean} isSearching whether a search for lines that fit the filters takes several requests
 * @property {Error | null} error
 */

const PAGE = 200; // lines per request
const MAX_LINES = 1200;
const CATCH_UP = 1000; // lines per request for new lines

/** @type {Part} */
export const NOTHING = { lines: [], isStart: false, isEnd: false, hasNew: false, isSearching: false, error: null };

export class Feed {
  /** @param {LogQuery} wanted @param {(part: Part) => void} onChange */
  constructor(wanted, onChange) {
    this.wanted = wanted;
    this.onChange = onChange;
    this.part = { ...NOTHING };
    this.abort = new AbortController();
    this.isFollowing = true;
    this.isBusy = false;
    this.isWaiting = false;
    /** Ids of the lines from which the search continues, to earlier and to later lines. */
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

  /** Run `work` unless other work runs; show its error. Afterwards load lines that were printed meanwhile. @param {() => Promise<void>} work */
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
   * Search lines in one direction until a request finds some or the log ends.
   *
   * @param {LogQuery} from `before` or `after` with the id of a line; neither for the newest lines @param {number} limit
   * @returns {Promise<{ lines: Line[], searchedTo: number | null, last: number }>}
   */
  async search(from, limit) {
    const word = "after" in from ? "after" : "before";
    let last = 0;
    for (let place = from; ; ) {
      const found = await get("/page/logs", { ...this.wanted, ...place, limit }, this.abort.signal);
      // Lines that are printed during a search backwards are after the line where it began.
      last = word === "after" ? found.last : last || found.last;
      if (found.lines.length || found.searchedTo === null) return { ...found, last };
      if (!this.part.isSearching) this.change({ isSearching: true });
      place = { [word]: found.searchedTo };
    }
  }

  /** Load the newest lines. */
  newest() {
    return this.alone(async () => {
      const { lines, searchedTo, last } = await this.search({}, PAGE);
      this.back = searchedTo ?? 0;
      this.fore = last;
      this.change({ lines, isStart: searchedTo === null, isEnd: true, hasNew: false });
    });
  }

  /** Load lines around a line; if it is not in the log, around where it would be. @param {number} id */
  around(id) {
    return this.alone(async () => {
      const behind = await this.search({ after: Math.max(0, id - 1) }, PAGE);
      const before = id > 1 ? await this.search({ before: id }, PAGE) : { lines: [], searchedTo: null };
      this.back = before.searchedTo ?? 0;
      this.fore = behind.searchedTo ?? behind.last;
      this.change({ lines: [...before.lines, ...behind.lines], isStart: before.searchedTo === null, isEnd: behind.searchedTo === null, hasNew: false });
    });
  }

  /** Load lines before the loaded ones. */
  async earlier() {
    if (this.part.isStart) return;
    await this.alone(async () => {
      const found = await this.search({ before: this.back }, PAGE);
      const all = [...found.lines, ...this.part.lines];
      const lines = all.slice(0, MAX_LINES);
      const isCut = lines.length < all.length;
      this.back = found.searchedTo ?? 0;
      if (isCut) this.fore = lines[lines.length - 1].id;
      this.change({ lines, isStart: found.searchedTo === null, isEnd: this.part.isEnd && !isCut });
    });
  }

  /** Load lines after the loaded ones. */
  async later() {
    if (!this.part.isEnd) await this.alone(() => this.append(PAGE));
  }

  /** Load lines after the loaded ones, and drop the first if there are too many. @param {number} limit */
  async append(limit) {
    const found = await this.search({ after: this.fore }, limit);
    const all = [...this.part.lines, ...found.lines];
    const lines = all.slice(-MAX_LINES);
    const isCut = lines.length < all.length;
    this.fore = found.searchedTo ?? Math.max(found.last, this.fore);
    if (isCut) this.back = lines[0].id;
    this.change({ lines, isStart: this.part.isStart && !isCut, isEnd: found.searchedTo === null, hasNew: false });
  }

  /** Load new lines if the end is visible or followed; otherwise only set `hasNew`. */
  async catchUp() {
    if (this.isBusy) this.isWaiting = true;
    else if (this.part.error && !this.part.lines.length) await this.newest();
    else if (this.part.isEnd && (this.isFollowing || this.part.lines.length <= MAX_LINES - PAGE)) {
      await this.alone(() => this.append(this.isFollowing ? CATCH_UP : PAGE));
      // More lines were printed than fit into a request: skip to the newest.
      if (this.isFollowing && !this.part.isEnd && !this.part.error) await this.newest();
    } else this.change({ isEnd: false, hasNew: true });
  }
}
