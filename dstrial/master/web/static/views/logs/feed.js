// The part of a log that is loaded: some pages of lines around what is looked at; others are asked for and let go.

import { get } from "../../api.js";

/**
 * @typedef {{ id: number, ms: number, level: string | null, rank: number | null, source: string, stdtype: string | null, text: string, bytes?: number }} Line
 *
 * @typedef {Record<string, string | number | string[]>} Wanted the query: whose log, and filters
 *
 * @typedef {object} Part
 * @property {Line[][]} pages by id
 * @property {boolean} isStart whether nothing is before it
 * @property {boolean} isEnd whether nothing is behind it
 * @property {boolean} hasNew whether lines came that are not in it
 * @property {number | null} searching the id up to which was searched, while that goes on
 * @property {Error | null} error
 */

const PAGE = 200;
const MOST_PAGES = 6;
const CATCH_UP = 1000;

/** @type {Part} */
export const NOTHING = { pages: [], isStart: false, isEnd: false, hasNew: false, searching: null, error: null };

export class Feed {
  /** @param {Wanted} wanted @param {(part: Part) => void} onChange */
  constructor(wanted, onChange) {
    this.wanted = wanted;
    this.onChange = onChange;
    this.part = { ...NOTHING };
    this.abort = new AbortController();
    this.isBusy = false;
    this.isWaiting = false;
    /** Where searching goes on, in both directions. */
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
      if (this.part.error) this.change({ error: null });
    } catch (error) {
      if (!this.abort.signal.aborted) this.change({ error: /** @type {Error} */ (error), searching: null });
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
      if (found.lines.length || found.searchedTo === null) {
        if (this.part.searching !== null) this.change({ searching: null });
        return { ...found, last };
      }
      this.change({ searching: found.searchedTo });
      place = { [word]: found.searchedTo };
    }
  }

  /** Show the newest lines. */
  newest() {
    return this.alone(async () => {
      const { lines, searchedTo, last } = await this.search({}, PAGE);
      this.back = searchedTo ?? 0;
      this.fore = last;
      this.change({ pages: lines.length ? [lines] : [], isStart: searchedTo === null, isEnd: true, hasNew: false });
    });
  }

  /** Show what is around a line, or behind where it would be. @param {number} id */
  around(id) {
    return this.alone(async () => {
      const [behind, before] = await Promise.all([this.search({ after: Math.max(0, id - 1) }, PAGE), id > 1 ? this.search({ before: id }, PAGE) : { lines: [], searchedTo: null }]);
      this.back = before.searchedTo ?? 0;
      this.fore = behind.searchedTo ?? behind.last;
      const pages = [before.lines, behind.lines].filter((page) => page.length);
      this.change({ pages, isStart: before.searchedTo === null, isEnd: behind.searchedTo === null, hasNew: false });
    });
  }

  /** Add what is before. */
  earlier() {
    if (this.part.isStart) return undefined;
    return this.alone(async () => {
      const { lines, searchedTo } = await this.search({ before: this.back }, PAGE);
      this.back = searchedTo ?? 0;
      const pages = lines.length ? [lines, ...this.part.pages] : this.part.pages;
      const isCut = pages.length > MOST_PAGES;
      const kept = isCut ? pages.slice(0, MOST_PAGES) : pages;
      if (isCut) this.fore = kept[kept.length - 1][kept[kept.length - 1].length - 1].id;
      this.change({ pages: kept, isStart: searchedTo === null, isEnd: this.part.isEnd && !isCut });
    });
  }

  /** Add what is behind. */
  later() {
    if (this.part.isEnd) return undefined;
    return this.alone(() => this.append(PAGE));
  }

  /** @param {number} limit @returns {Promise<void>} */
  async append(limit) {
    const { lines, searchedTo, last } = await this.search({ after: this.fore }, limit);
    this.fore = searchedTo ?? Math.max(last, this.fore);
    const pages = [...this.part.pages];
    let rest = lines;
    const end = pages[pages.length - 1];
    if (end && end.length < PAGE) {
      pages[pages.length - 1] = [...end, ...rest.slice(0, PAGE - end.length)];
      rest = rest.slice(PAGE - end.length);
    }
    for (let start = 0; start < rest.length; start += PAGE) pages.push(rest.slice(start, start + PAGE));
    const isCut = pages.length > MOST_PAGES;
    const kept = isCut ? pages.slice(-MOST_PAGES) : pages;
    if (isCut) this.back = kept[0][0].id;
    if (lines.length || searchedTo === null || isCut) this.change({ pages: kept, isStart: this.part.isStart && !isCut, isEnd: searchedTo === null, hasNew: false });
  }

  /** Something was printed. */
  async catchUp() {
    if (this.isBusy) {
      this.isWaiting = true;
      return;
    }
    if (!this.part.isEnd && !this.part.error) {
      if (!this.part.hasNew) this.change({ hasNew: true });
      return;
    }
    if (this.part.error && !this.part.pages.length) {
      await this.newest();
      return;
    }
    await this.alone(async () => {
      if (this.isFollowing || this.part.pages.length < MOST_PAGES) await this.append(CATCH_UP);
      else this.change({ isEnd: false, hasNew: true });
    });
    // More has come than can be read one page after the other.
    if (this.isFollowing && !this.part.isEnd && !this.part.error) await this.newest();
  }

  isFollowing = true;
}
