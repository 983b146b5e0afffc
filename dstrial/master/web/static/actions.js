// Actions on experiments, each a request of the master's API.

import { send } from "./api.js";
import { attempt } from "./parts/basics.js";
import { confirmAction } from "./parts/dialog.js";

/** `verb` ends the request's path, `can` tells whether an experiment's state allows it, `question` is asked before. @typedef {{ name: string, verb: string, can: (row: any) => boolean, question?: string }} Action */

const ENDED = ["COMPLETED", "CANCELED", "ERROR"];
/** @param {any} row */
export const isEnded = (row) => ENDED.includes(row.state);
/** @param {any} row */
const isStopping = (row) => row.state.startsWith("STOPPING");

/** @type {Action[]} */
export const ACTIONS = [
  { name: "Pause", verb: "pause", can: (row) => !isEnded(row) && !isStopping(row) && row.state !== "PAUSED" && !row.unmanaged },
  { name: "Activate", verb: "activate", can: (row) => row.state === "PAUSED" },
  { name: "Stop", verb: "cancel", can: (row) => !isEnded(row) && !isStopping(row) && !row.unmanaged, question: "Stop {what}? Trials save a checkpoint and end; they do not go on." },
  { name: "Kill", verb: "kill", can: (row) => !isEnded(row) && !row.unmanaged, question: "Kill {what} at once, without a checkpoint?" },
  { name: "Archive", verb: "archive", can: (row) => isEnded(row) && !row.archived },
  { name: "Unarchive", verb: "unarchive", can: (row) => row.archived },
  { name: "Delete", verb: "delete", can: isEnded, question: "Delete {what} with metrics, logs and checkpoints? They cannot be brought back." },
];

/** Ask, then act on those experiments whose state allows it. @param {Action} action @param {any[]} rows experiments @returns {Promise<boolean>} whether it succeeded for one */
export async function actOnExperiments(action, rows) {
  const ids = rows.filter(action.can).map((row) => row.id);
  if (!ids.length) return false;
  const what = ids.length === 1 ? `experiment ${ids[0]}` : `${ids.length} experiments`;
  if (action.question && !(await confirmAction(action.question.replace("{what}", what), action.name))) return false;
  let isDone = false;
  for (const id of ids) {
    const [method, path] = action.verb === "delete" ? ["DELETE", ""] : ["POST", `/${action.verb}`];
    isDone = (await attempt(() => send(method, `/api/v1/experiments/${id}${path}`), `${action.name}: experiment ${id}`)) || isDone;
  }
  return isDone;
}
