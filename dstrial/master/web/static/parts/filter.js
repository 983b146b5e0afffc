// What a person types to find rows: words, and conditions as state:running, label:"long run", lr<0.01, loss<=0.5.

/**
 * @typedef {object} Condition
 * @property {string} name empty for a word anywhere
 * @property {string} operator
 * @property {string} value
 * @property {boolean} isNot
 */

const TOKEN = /(-?)(?:([\w.\-/]+)(<=|>=|!=|<|>|=|:))?(?:"([^"]*)"|(\S+))/g;

/** @param {string} text @returns {Condition[]} */
export function parseFilter(text) {
  return [...text.matchAll(TOKEN)].map(([, not, name = "", operator = ":", quoted, plain]) => ({
    name,
    operator,
    value: (quoted ?? plain ?? "").toLowerCase(),
    isNot: Boolean(not),
  }));
}

/** @param {unknown} found @param {Condition} condition @returns {boolean} */
function holds(found, { operator, value }) {
  const values = Array.isArray(found) ? found : [found];
  const limit = Number(value);
  return values.some((one) => {
    const text = String(one ?? "").toLowerCase();
    if (operator === ":") return text.includes(value);
    if (operator === "=") return text === value || (typeof one === "number" && one === limit);
    if (operator === "!=") return text !== value && !(typeof one === "number" && one === limit);
    if (typeof one !== "number" || Number.isNaN(limit)) return false;
    return operator === "<" ? one < limit : operator === ">" ? one > limit : operator === "<=" ? one <= limit : one >= limit;
  });
}

/**
 * @template T
 * @param {string} text @param {T[]} rows
 * @param {(row: T, name: string) => unknown} valueOf what a name stands for; undefined for an unknown one
 * @param {(row: T) => string} textOf where words are looked for
 * @returns {T[]}
 */
export function filterRows(text, rows, valueOf, textOf) {
  const conditions = parseFilter(text);
  if (!conditions.length) return rows;
  return rows.filter((row) =>
    conditions.every((condition) => {
      const is = condition.name
        ? holds(valueOf(row, condition.name.toLowerCase()), condition)
        : textOf(row).toLowerCase().includes(condition.value);
      return is !== condition.isNot;
    }),
  );
}
