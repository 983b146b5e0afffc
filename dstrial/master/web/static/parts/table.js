// A table of any number of rows that can be sorted and saved as CSV, with columns to choose. Only visible rows are rendered.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "htm/preact/standalone";
import { csv, download, duration, secondsBetween } from "../format.js";
import { setParams, useLocation } from "../router.js";
import { Time } from "./basics.js";

/**
 * @typedef {object} Column
 * @property {string} id name of the column in the address
 * @property {string} title
 * @property {(row: any) => unknown} value for sorting and CSV
 * @property {(row: any) => unknown} [show] content of the cell; the value by default
 * @property {boolean} [isNumber] whether it is right-aligned
 * @property {boolean} [isHidden] whether it is hidden unless the user chooses it
 * @property {string} [hint] tooltip of the heading
 */

/** A column of a time. @param {string} id @param {string} title @param {string} key the row's property @param {Partial<Column>} [more] @returns {Column} */
export const timeColumn = (id, title, key, more = {}) => ({ id, title, value: (row) => row[key], show: (row) => html`<${Time} at=${row[key]} />`, ...more });

/** A column of the time from a row's `start` to its `end`, or to now. @param {Partial<Column>} [more] @returns {Column} */
export const tookColumn = (more = {}) => ({ id: "took", title: "Took", isNumber: true, value: (row) => secondsBetween(row.start, row.end), show: (row) => duration(secondsBetween(row.start, row.end)), ...more });

const ROW_PX = 33; // height of a row, as in style.css
const MARGIN_ROWS = 12; // rows rendered above and below the visible ones

/** @param {unknown} key */
const isMissing = (key) => key === null || key === undefined || key === "" || Number.isNaN(key);

/** @param {any[]} rows @param {Column | undefined} column @param {boolean} isDescending @returns {any[]} rows with empty values and NaN are last */
function sorted(rows, column, isDescending) {
  if (!column) return rows;
  const compare = (/** @type {any} */ a, /** @type {any} */ b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
  const keyed = rows.map((row) => ({ row, key: column.value(row) }));
  keyed.sort(({ key: a }, { key: b }) => Number(isMissing(a)) - Number(isMissing(b)) || (isMissing(a) ? 0 : isDescending ? compare(b, a) : compare(a, b)));
  return keyed.map(({ row }) => row);
}

/**
 * @param {object} props
 * @param {string} props.name prefix of the table's query parameters, and name of its CSV file
 * @param {string} props.label for screen readers
 * @param {Column[]} props.columns
 * @param {any[]} props.rows each with an `id`
 * @param {string} [props.sort] id of the column to sort by, after a minus if descending
 * @param {Set<any>} [props.selected] ids of the selected rows; without it, rows cannot be selected
 * @param {(ids: Set<any>) => void} [props.onSelect]
 * @param {(row: any) => string} [props.href] link of a row
 * @param {(row: any) => string} [props.rowClass]
 * @param {unknown} [props.tools] shown left of the table's own controls
 * @param {unknown} [props.empty] shown if there are no rows
 */
export function Table(props) {
  const { name, label, columns, rows, selected, onSelect, href } = props;
  const { query } = useLocation();
  const sort = query.get(`${name}_sort`) ?? props.sort ?? "";
  const chosen = query.get(`${name}_columns`);
  const shown = useMemo(() => {
    const ids = chosen === null ? null : chosen.split(",");
    return columns.filter((column) => (ids ? ids.includes(column.id) : !column.isHidden));
  }, [columns, chosen]);
  const isDescending = sort.startsWith("-");
  const sortId = sort.replace(/^-/, "");
  const ordered = useMemo(
    () => sorted(rows, columns.find((column) => column.id === sortId), isDescending),
    [rows, columns, sort],
  );
  const scroller = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [view, setView] = useState({ first: 0, count: 40 });

  function updateView() {
    const box = scroller.current;
    if (!box) return;
    const first = Math.max(0, Math.floor(box.scrollTop / ROW_PX) - MARGIN_ROWS);
    const count = Math.ceil(box.clientHeight / ROW_PX) + 2 * MARGIN_ROWS;
    setView((before) => (before.first === first && before.count === count ? before : { first, count }));
  }
  useLayoutEffect(updateView, [ordered.length]);
  useEffect(() => {
    window.addEventListener("resize", updateView);
    return () => window.removeEventListener("resize", updateView);
  }, []);

  /** @param {string} id */
  const sortBy = (id) => setParams({ [`${name}_sort`]: sortId === id && !isDescending ? `-${id}` : id });
  /** @param {any} id */
  function toggle(id) {
    if (!onSelect || !selected) return;
    const now = new Set(selected);
    if (!now.delete(id)) now.add(id);
    onSelect(now);
  }
  const write = () =>
    download(`${name}.csv`, csv([shown.map((column) => column.title), ...ordered.map((row) => shown.map((column) => column.value(row)))]));

  const last = Math.min(ordered.length, view.first + view.count);
  const isAll = Boolean(selected && ordered.length && ordered.every((row) => selected.has(row.id)));
  return html`<div class="table">
    <div class="tools">
      ${props.tools}
      <span class="muted" role="status">${rows.length} ${rows.length === 1 ? "row" : "rows"}</span>
      <details class="menu">
        <summary>Columns</summary>
        <div class="choices" role="group" aria-label="Columns">
          ${columns.map(
            (column) => html`<label><input type="checkbox" checked=${shown.includes(column)} onChange=${() => {
              const now = shown.includes(column) ? shown.filter((one) => one !== column) : [...shown, column];
              setParams({ [`${name}_columns`]: now.map((one) => one.id).join(",") });
            }} /> ${column.title}</label>`,
          )}
        </div>
      </details>
      <button onClick=${write}>CSV</button>
    </div>
    <div class="scroller" ref=${scroller} onScroll=${updateView} tabindex="0" role="region" aria-label=${label}>
      <table aria-label=${label} aria-rowcount=${ordered.length + 1}>
        <thead>
          <tr aria-rowindex="1">
            ${selected && html`<th class="select"><input type="checkbox" aria-label="Select all" checked=${isAll} onChange=${() => onSelect?.(isAll ? new Set() : new Set(ordered.map((row) => row.id)))} /></th>`}
            ${shown.map(
              (column) => html`<th class=${column.isNumber ? "number" : ""} title=${column.hint} aria-sort=${column.id === sortId ? (isDescending ? "descending" : "ascending") : undefined}>
                <button onClick=${() => sortBy(column.id)}>${column.title}${column.id === sortId ? (isDescending ? " ↓" : " ↑") : ""}</button>
              </th>`,
            )}
          </tr>
        </thead>
        <tbody>
          ${view.first > 0 && html`<tr aria-hidden="true" style=${{ height: `${view.first * ROW_PX}px` }}></tr>`}
          ${ordered.slice(view.first, last).map((row, at) => {
            const idx = view.first + at;
            return html`<tr key=${row.id} data-idx=${idx} aria-rowindex=${idx + 2} class=${props.rowClass?.(row) ?? ""} aria-selected=${selected ? selected.has(row.id) : undefined}>
              ${selected && html`<td class="select"><input type="checkbox" aria-label=${`Select ${row.id}`} checked=${selected.has(row.id)} onChange=${() => toggle(row.id)} /></td>`}
              ${shown.map((column, place) => {
                const content = column.show ? column.show(row) : column.value(row);
                const isLink = href && place === 0;
                return html`<td class=${column.isNumber ? "number" : ""}>${isLink ? html`<a href=${href(row)}>${content}</a>` : content}</td>`;
              })}
            </tr>`;
          })}
          ${last < ordered.length && html`<tr aria-hidden="true" style=${{ height: `${(ordered.length - last) * ROW_PX}px` }}></tr>`}
          ${!ordered.length && html`<tr><td class="empty" colspan=${shown.length + 1}>${props.empty ?? "Nothing here."}</td></tr>`}
        </tbody>
      </table>
    </div>
  </div>`;
}
