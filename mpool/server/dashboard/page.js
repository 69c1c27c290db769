// Fetches the state of the pool and its history while the page is visible, and shows the tab "Overview".
import { button, byId, json, keyed, make, setBadge, setText } from "./dom.js";
import { CAPABILITY, bytes, rate, short, span, whole } from "./formats.js";
import "./hints.js";
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
  if (tab === "overview" && chosen === range) for (const plot of PLOTS) plot.show(range.pool, range);
}

// ---- overview -------------------------------------------------------------------------------------------------------

const last = (name) => live.pool[name]?.findLast((value) => value !== null) ?? null;
const text = (id, value) => setText(byId(id), value);

function showNow(found) {
  const [requests, failed, tokens, images] = ["requests", "failed", "tokens", "images"].map((name) => live.mean(name, 5));
  text("now-requests", requests === null ? "–" : rate(requests));
  text("now-failed", failed ? `${rate(failed)} failed` : "none failed");
  text("now-tokens", tokens === null ? "–" : rate(tokens));
  text("now-images", images ? `${short(images)} images/s` : "mean of 5 s");
  text("now-p50", span(last("p50")));
  text("now-p99", `p99 ${span(last("p99"))}`);
  const running = found.pools.reduce((sum, pool) => sum + pool.running, 0);
  text("now-running", whole(running));
  text("now-queued", `${whole(found.pools.reduce((sum, pool) => sum + pool.queue_depth, 0))} waiting, `
    + `${found.streams} stream${found.streams === 1 ? "" : "s"}`);
  text("now-memory", bytes(found.memory.used));
  text("now-limit", `of ${bytes(found.memory.limit)}`);
}

const KINDS = { weights: "weights", kv: "KV cache", scratch: "working memory", request: "requests", pool: "pools",
  spec: "metadata", misc: "other" };

function showMemory(memory) {
  setBadge(byId("pressure"), memory.pressure, { low: "good", normal: "good", high: "warn" }[memory.pressure] ?? "bad");
  const kinds = Object.entries(memory.by_kind).filter(([, count]) => count > 0).sort((one, other) => other[1] - one[1]);
  const total = kinds.reduce((sum, [, count]) => sum + count, 0);
  keyed(byId("kinds"), kinds, ([kind]) => kind, ([kind]) => make("span", { class: `kind-${kind}` }),
    (element, [, count]) => { element.style.width = `${100 * count / total}%`; },
    () => make("span"));
  keyed(byId("kind-names"), kinds, ([kind]) => kind,
    ([kind]) => make("div", { class: `kind-${kind}` }, make("dt", {}, KINDS[kind] ?? kind), make("dd")),
    (element, [, count]) => setText(element.lastChild, bytes(count)), () => make("div", {}, "nothing"));
}

function showPool(card, pool) {
  card.replaceChildren(make("h3", {}, CAPABILITY[pool.capability] ?? pool.capability),
    make("dl", { class: "facts" }, ...[["Models", pool.models],
      ["Workers", `${pool.workers}${pool.dead ? ` (${pool.dead} dead)` : ""}`], ["Busy", pool.busy],
      ["Running", pool.running], ["Waiting", pool.queue_depth]].map(([name, value]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, String(value))))));
  card.classList.toggle("idle", !pool.models);
}

// ---- refresh --------------------------------------------------------------------------------------------------------

function show(found) {
  text("version", found.version);
  setBadge(byId("status"), found.status, { healthy: "good", degraded: "warn" }[found.status] ?? "bad");
  text("uptime", `up ${span(Math.round(found.uptime))} · ${found.compute_threads_leased} of `
    + `${found.compute_threads} compute threads in use`);
  byId("reasons").hidden = !found.reasons.length;
  keyed(byId("reasons"), found.reasons, (reason) => reason, (reason) => make("li", {}, reason), () => {}, () => make("li"));
  if (tab === "overview") {
    showNow(found);
    showMemory(found.memory);
    keyed(byId("pools"), found.pools, (pool) => pool.capability, () => make("article", { class: "card" }), showPool,
      () => make("p", {}, "None"));
  }
  if (tab === "models") showModels(found, live);
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
