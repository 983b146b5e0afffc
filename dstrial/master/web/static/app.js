// The page: a header with links to the main views, and below it the view that the address names.

import { html, render, useEffect, useErrorBoundary, useState } from "htm/preact/standalone";
import { get, onConnection } from "./api.js";
import { startLive, useLive } from "./live.js";
import { notice, Notices } from "./parts/basics.js";
import { onLinkClick, useLocation } from "./router.js";
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
 * @property {string} [title] of the link in the header; without it there is none
 * @property {string} [href] of the link in the header
 * @property {View} [below] the view whose link in the header is marked as current
 * @property {(words: string[]) => boolean} fits whether the view is shown at an address, given as words without `det`
 * @property {any} show a component with the props `words` and `session`
 */

/** @type {View} */
const experiments = { title: "Experiments", href: "/det/experiments", fits: (words) => !words.length || (["experiments", "dashboard"].includes(words[0]) && words.length === 1), show: Experiments };

/** All views; the first that fits the address is shown. @type {View[]} */
const VIEWS = [
  experiments,
  { below: experiments, fits: (words) => words[0] === "experiments" && /^\d+$/.test(words[1]) && words[2] !== "trials", show: Experiment },
  { below: experiments, fits: (words) => trialAddress(words) !== null, show: Trial },
  { below: experiments, fits: (words) => words[0] === "compare", show: Compare },
  { fits: (words) => words[0] === "tasks" && words.length >= 2 && words[2] === "logs", show: TaskLogs },
  { title: "Models", href: "/det/models", fits: (words) => words[0] === "models" && words.length <= 2, show: Models },
  { title: "Tuning", href: "/det/searches", fits: (words) => words[0] === "searches" && words.length <= 2, show: Searches },
  { title: "Tasks", href: "/det/tasks", fits: (words) => words[0] === "tasks" && words.length === 1, show: Tasks },
  { title: "Cluster", href: "/det/clusters", fits: (words) => ["clusters", "cluster"].includes(words[0]), show: Cluster },
];

/** @type {View} */
const NOT_FOUND = { fits: () => true, show: () => html`<main class="nowhere"><h1 tabindex="-1">There is nothing at this address</h1><p><code>${location.pathname}</code> is no view of this page.</p><p><a class="button" href="/det/experiments">Go to the experiments</a></p></main>` };

/** Tells why the page shows no new data. */
function ConnectionBanner() {
  const [connection, set] = useState(/** @type {import("./api.js").Connection} */ ("ok"));
  useEffect(() => onConnection(set), []);
  if (connection === "ok") return null;
  return html`<p class="problem banner" role="alert">${connection === "expired"
    ? html`Your login has expired. <button onClick=${() => location.reload()}>Log in</button>`
    : "The master does not answer; the page goes on by itself when it does. `dstrial up` starts it again."}</p>`;
}

/** Shows an error of its children instead of them, until another view is opened. @param {{ children: unknown }} props */
function ErrorBoundary({ children }) {
  const [error, reset] = useErrorBoundary((/** @type {unknown} */ problem) => console.error(problem));
  const { path } = useLocation();
  useEffect(() => {
    if (error) reset();
  }, [path.join("/")]);
  return error ? html`<main><h1 tabindex="-1">This view failed</h1><p class="problem" role="alert">${String(error)}</p><button onClick=${reset}>Try again</button></main>` : children;
}

function Page() {
  const { path } = useLocation();
  const words = path[0] === "det" ? path.slice(1) : path;
  const session = useLive((signal) => get("/page/session", {}, signal), () => false, []);
  const view = VIEWS.find((one) => one.fits(words)) ?? NOT_FOUND;
  useEffect(() => {
    document.title = [...words, "dstrial"].join(" · ");
  }, [path.join("/")]);
  const { data } = session;
  return html`<div onClick=${onLinkClick}>
    <a class="skip" href="#main" onClick=${(/** @type {Event} */ event) => { event.preventDefault(); /** @type {HTMLElement | null} */ (document.querySelector("main h1"))?.focus(); }}>Skip to what is shown</a>
    <header>
      <a class="brand" href="/det/experiments">dstrial</a>
      <nav aria-label="Main">
        ${VIEWS.filter((one) => one.title).map((one) => html`<a href=${one.href} aria-current=${one === view || one === view.below ? "page" : undefined}>${one.title}</a>`)}
      </nav>
      <span class="who">${data && html`<span title="cluster">${data.cluster || "dstrial"}</span> · ${data.slots} ${data.slots === 1 ? "slot" : "slots"} · ${data.user}`}</span>
    </header>
    <${ConnectionBanner} />
    ${data?.damage && html`<p class="problem banner" role="alert">${data.damage}</p>`}
    <${ErrorBoundary}><${view.show} words=${words} session=${data} /><//>
    <${Notices} />
  </div>`;
}

startLive(notice);
const root = /** @type {HTMLElement} */ (document.getElementById("page"));
root.textContent = "";
render(html`<${Page} />`, root);
