// Fetches the state of the pool and its history while the page is visible, and shows the tab "Overview".
import { button, byId, json, keyed, make, setBadge, setText } from "./dom.js";
import { CAPABILITY, IMAGES, bytes, rate, short, span, whole } from "./formats.js";
import "./events.js";
import { term } from "./hints.js";
import { showModels } from "./models.js";
import "./playground.js";
import { Plot } from "./plots.js";
import { refreshHistory, showRunning } from "./requests.js";
import { Series } from "./series.js";
import { named, onTab, open, tab } from "./tabs.js";

const REFRESH_MS = 1000;

// ---- plots ----------------------------------------------------------------------------------------------------------

const RANGES = [[1, "5 min"], [10, "1 h"], [120, "12 h"]];
const PLOTS = [
  new Plot("Requests", "requests", { requests: "completed", failed: "failed" }, rate),
  new Plot("Tokens", "tokens", { tokens: "tokens" }, rate),
  new Plot("Latency", "latency", { p50: "p50", p99: "p99" }, span, 15),
  new Plot("Memory", "memory", { memory: "in use" }, bytes),
  new Plot("In flight", "queue", { running: "running", queued: "waiting" }, short),
  new Plot("Compute threads", "threads", { threads: "in use" }, short),
];
byId("plots").append(...PLOTS.map((plot) => plot.figure));

const live = new Series(1);
let range = live, fetched = -Infinity;

const ranges = RANGES.map(([step, title]) => button(title, (made) => {
  for (const one of ranges) one.setAttribute("aria-pressed", String(one === made));
  range = step === 1 ? live : new Series(step);
  fetched = -Infinity;
  refresh();
}, { "aria-pressed": String(step === 1) }));
byId("ranges").append(...ranges);

async function refreshSeries() {
  await live.refresh();
  const chosen = range;
  if (chosen !== live && performance.now() - fetched > Math.min(chosen.step * 500, 30_000)) {
    fetched = performance.now();
    await chosen.refresh();
  }
  if (tab === "overview" && chosen === range) showPlots();
}

// The plots show all models, or the one that is chosen while the history has it.
function showPlots() {
  const choice = byId("plots-of"), names = [...range.models.keys()].sort();
  keyed(choice, ["", ...names], (name) => name, (name) => make("option", { value: name }, name || "all models"),
    () => {});
  const values = range.models.get(choice.value);
  for (const plot of PLOTS) plot.show(values ?? range.pool, range);
}
byId("plots-of").addEventListener("change", showPlots);

// ---- overview -------------------------------------------------------------------------------------------------------

const last = (values, name) => values?.[name]?.findLast((value) => value !== null) ?? null;
const text = (id, value) => setText(byId(id), value);

function showNow(found) {
  const [requests, failed] = ["requests", "failed"].map((name) => Series.mean(live.pool, name, 5));
  text("now-requests", requests === null ? "–" : rate(requests));
  text("now-failed", failed ? `all models, ${rate(failed)} failed` : "all models, none failed");
  const running = found.pools.reduce((sum, pool) => sum + pool.running, 0);
  text("now-running", whole(running));
  text("now-queued", `${whole(found.pools.reduce((sum, pool) => sum + pool.queue_depth, 0))} waiting, `
    + `${found.streams} stream${found.streams === 1 ? "" : "s"}`);
  text("now-threads", whole(found.compute_threads_leased));
  text("now-of-threads", `of ${found.compute_threads} in use`);
  text("now-memory", bytes(found.memory.used));
  text("now-limit", `of ${bytes(found.memory.limit)}, ${bytes(found.memory.available)} free`);
}

const KINDS = { weights: "weights", kv: "KV cache and states", scratch: "working memory", request: "requests", pool: "pools",
  spec: "metadata", misc: "other", workers: "worker processes", free: "free" };

// The bar has the length of the limit. The last part is free.
function showMemory(memory) {
  setBadge(byId("pressure"), memory.pressure, { low: "good", normal: "good", high: "warn" }[memory.pressure] ?? "bad");
  const rest = memory.used - Object.values(memory.by_kind).reduce((sum, count) => sum + count, 0);
  const kinds = [...Object.entries(memory.by_kind), ["workers", rest]].filter(([, count]) => count > 0)
    .sort((one, other) => other[1] - one[1]);
  keyed(byId("kinds"), kinds, ([kind]) => kind, ([kind]) => make("span", { class: `kind-${kind}` }),
    (element, [, count]) => { element.style.width = `${100 * count / memory.limit}%`; }, () => make("span"));
  keyed(byId("kind-names"), [...kinds, ["free", memory.available]], ([kind]) => kind,
    ([kind]) => make("div", { class: `kind-${kind}` }, make("dt", {}, KINDS[kind] ?? kind), make("dd")),
    (element, [, count]) => setText(element.lastChild, bytes(count)));
  text("memory-used", `${bytes(memory.used)} of ${bytes(memory.limit)}`);
}

// The toolbar of the tab "Models".
function showRoom(memory) {
  keyed(byId("room"), ["used"], (name) => name, () => make("span", { class: "kind-weights" }),
    (element) => { element.style.width = `${100 * memory.used / memory.limit}%`; });
  text("room-text", `${bytes(memory.used)} of ${bytes(memory.limit)} in use, ${bytes(memory.available)} free`);
}

const ofSlowest = (models, value) => models.reduce((most, model) => Math.max(most, value(model) ?? 0), 0) || null;

function showPool(card, [pool, models]) {
  const images = IMAGES.includes(pool.capability);
  const sum = models.map((model) => Series.mean(live.models.get(model.key), images ? "images" : "tokens", 5) ?? 0)
    .reduce((one, other) => one + other, 0);
  const [p50, p99] = ["p50", "p99"].map((name) => ofSlowest(models, (model) => last(live.models.get(model.key), name)));
  const first = ofSlowest(models, (model) => model.first_token);
  setText(card.children[1].firstChild, short(sum));
  setText(card.children[2], p50 === null ? "no recent request" : `p50 ${span(p50)} · p99 ${span(p99)}`);
  setText(card.children[3], first === null ? "" : `first token ${span(first)}`);
  setText(card.children[4], `${whole(pool.busy)} of ${whole(pool.workers)} workers busy, ${whole(pool.queue_depth)} waiting`
    + (pool.dead ? `, ${whole(pool.dead)} dead` : ""));
}

function showPools(found) {
  const used = found.pools.map((pool) => [pool, found.models.filter((model) => model.capability === pool.capability
    && model.state !== "cold")]).filter(([, models]) => models.length);
  keyed(byId("pools"), used, ([pool]) => pool.capability, ([pool]) => make("article", {},
    term("capability", CAPABILITY[pool.capability] ?? pool.capability),
    make("strong", {}, make("span"), make("small", {}, IMAGES.includes(pool.capability) ? " images/s" : " tokens/s")),
    make("small"), make("small"), make("small")),
  showPool, () => make("p", { class: "empty" }, "No model is in memory: the first request of a model loads it."));
}

// ---- refresh --------------------------------------------------------------------------------------------------------

function show(found) {
  text("version", found.version);
  setBadge(byId("status"), found.status, { healthy: "good", degraded: "warn" }[found.status] ?? "bad");
  text("uptime", `up ${span(Math.round(found.uptime))}`);
  byId("reasons").hidden = !found.reasons.length;
  keyed(byId("reasons"), found.reasons, (reason) => reason, (reason) => make("li", {}, reason), () => {}, () => make("li"));
  if (tab === "overview") {
    showNow(found);
    showMemory(found.memory);
    showPools(found);
  }
  if (tab === "models") {
    showRoom(found.memory);
    showModels(found, live);
  }
  if (tab === "requests") showRunning(found.requests);
}

let timer = null, busy = false, again = false;

// One refresh runs at a time: two would append the same points twice.
async function refresh() {
  clearTimeout(timer);
  timer = null;
  again = busy;
  if (busy) return;
  busy = true;
  try {
    const [found] = await Promise.all([json("/api/mpool/state"), refreshSeries()]);
    show(found);
  } catch (error) {
    setBadge(byId("status"), "no connection", "bad");
    text("uptime", error.message);
  }
  busy = false;
  if (!document.hidden) timer = setTimeout(refresh, again ? 0 : REFRESH_MS);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});
onTab((name) => {
  if (name === "requests") refreshHistory();
  refresh();
});
open(named());
