// Filter of tables: words, and conditions such as state:running, label:"long run", lr<0.01, loss<=0.5.

/**
 * @typedef {object} Condition
 * @property {string} name what is compared; empty for a word that may be anywhere
 * @property {string} operator
 * @property {string} value
 * @property {boolean} isNot
 */

const TOKEN = /(-?)(?:([\w.\-/]+)(<=|>=|!=|<|>|=|:))?(?:"([^"]*)"|(\S+))/g;

/** @param {string} text @returns {Condition[]} */
function parseFilter(text) {
  return [...text.matchAll(TOKEN)].map(([, not, name = "", operator = ":", quoted, plain]) => ({
    name,
    operator,
    value: (quoted ?? plain ?? "").toLowerCase(),
    isNot: Boolean(not),
  }));
}

/** @param {unknown} found a value, or a list of which one must fit @param {Condition} condition @returns {boolean} */
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
 * Return the value that a name in a filter stands for: a fact of a row, or a hyperparameter in any case.
 *
 * @param {Record<string, unknown>} facts @param {Record<string, unknown>} hp dotted names and values @param {string} name in lower case
 * @returns {unknown} undefined if the name is unknown
 */
export function valueByName(facts, hp, name) {
  if (name in facts) return facts[name];
  const key = Object.keys(hp).find((one) => one.toLowerCase() === name);
  return key === undefined ? undefined : hp[key];
}

/**
 * Return the rows that fit all words and conditions of a filter text.
 *
 * @template T
 * @param {string} text @param {T[]} rows
 * @param {(row: T, name: string) => unknown} valueOf returns the value of a name in a row; undefined if the name is unknown
 * @param {(row: T) => string} textOf returns the text in which words are searched
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
