// Which view an address shows; a new one is a line here.

import { Cluster } from "./views/cluster.js";
import { Experiment } from "./views/experiment.js";
import { Experiments } from "./views/experiments.js";
import { Compare } from "./views/compare.js";
import { TaskLogs } from "./views/logs.js";
import { Trial, trialAddress } from "./views/trial.js";
import { Models } from "./views/models.js";
import { Searches } from "./views/searches.js";
import { Tasks } from "./views/tasks.js";

/**
 * @typedef {object} View
 * @property {string} [title] in the main line
 * @property {string} [href] where that leads
 * @property {View} [below] the view in the main line that it belongs to
 * @property {(words: string[]) => boolean} fits words of the address, without `det`
 * @property {any} show a component; given `words` and `session`
 */

/** @type {View} */
const experiments = { title: "Experiments", href: "/det/experiments", fits: (words) => !words.length || (["experiments", "dashboard"].includes(words[0]) && words.length === 1), show: Experiments };

/** @type {View[]} the first is shown where none fits */
export const VIEWS = [
  experiments,
  { below: experiments, fits: (words) => words[0] === "experiments" && /^\d+$/.test(words[1]) && words[2] !== "trials", show: Experiment },
  { below: experiments, fits: (words) => trialAddress(words) !== null, show: Trial },
  { below: experiments, fits: (words) => words[0] === "compare", show: Compare },
  { fits: (words) => words[0] === "tasks" && words.length >= 2 && words[2] === "logs", show: TaskLogs },
  { title: "Models", href: "/det/models", fits: (words) => words[0] === "models" && words.length <= 2, show: Models },
  { title: "Searches", href: "/det/searches", fits: (words) => words[0] === "searches" && words.length <= 2, show: Searches },
  { title: "Tasks", href: "/det/tasks", fits: (words) => words[0] === "tasks" && words.length === 1, show: Tasks },
  { title: "Cluster", href: "/det/clusters", fits: (words) => ["clusters", "cluster", "webhooks"].includes(words[0]), show: Cluster },
];
