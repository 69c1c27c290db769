// Fetches a snapshot of the pool once a second while the page is visible, and displays it.
import { byId, json, make, setText } from "./dom.js";
import { bytes, rate, span, whole } from "./formats.js";
import "./history.js";
import { Plot } from "./plots.js";
import "./playground.js";

const REFRESH_MS = 1000, HISTORY_SECONDS = 300;

// ---- plots ----------------------------------------------------------------------------------------------------------

const requests = new Plot("Requests", ["completed", "failed"], rate, HISTORY_SECONDS);
const tokens = new Plot("Tokens per second", ["prompt and completion"], rate, HISTORY_SECONDS);
const latency = new Plot("Request latency", ["p50", "p99"], span, HISTORY_SECONDS);
const memory = new Plot("Memory", ["in use"], bytes, HISTORY_SECONDS);
byId("plots").append(...[requests, tokens, latency, memory].map((plot) => plot.figure));

const history = { requests: [], tokens: [], latency: [], memory: [] };

function record(name, time, values) {
  const list = history[name];
  list.push({ time, values });
  while (list[0].time < time - HISTORY_SECONDS) list.shift();
  return list;
}

const FAILED = ["errors", "timeouts", "queue_full_rejections", "circuit_rejections"];
const failures = (counters) => FAILED.reduce((sum, name) => sum + counters[name], 0);

// Number of completed requests per latency bucket, summed over all models.
function histogram(found) {
  return found.latency_bounds.map((_, at) => found.models.reduce((sum, model) => sum + model.latency[at], 0));
}

// Latency quantile in seconds, as the upper bound of its bucket; null: no request was completed.
function quantile(counts, bounds, share) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!(total > 0)) return null;
  let seen = 0;
  const at = counts.findIndex((count) => (seen += count) >= share * total);
  return bounds[at] ?? bounds[bounds.length - 2];
}

let before = null;

function plot(found) {
  const time = found.time;
  memory.show(record("memory", time, [found.memory.used]));
  if (before && time > before.time) {
    const passed = time - before.time;
    const perSecond = (counter) => Math.max(0, counter(found) - counter(before)) / passed;
    requests.show(record("requests", time,
      [perSecond((at) => at.counters.completed), perSecond((at) => failures(at.counters))]));
    tokens.show(record("tokens", time, [perSecond((at) => at.counters.rows)]));
    const old = histogram(before);
    const counts = histogram(found).map((count, at) => Math.max(0, count - old[at]));
    latency.show(record("latency", time, [0.5, 0.99].map((share) => quantile(counts, found.latency_bounds, share))));
  }
  before = found;
}

// ---- tables ---------------------------------------------------------------------------------------------------------

const cell = (...children) => make("td", {}, ...children.map(String));

// Update the rows of a table. A row keeps its element while its key exists, so that a focused button keeps the focus.
function rows(body, items, keyOf, change, none, columns) {
  const old = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const wanted = items.map((item) => {
    const key = keyOf(item);
    const row = old.get(key) ?? make("tr", { "data-key": key });
    change(row, item);
    return row;
  });
  if (!wanted.length) {
    wanted.push(old.get("") ?? make("tr", { "data-key": "" }, make("td", { colspan: columns, class: "soft" }, none)));
  }
  if (wanted.length !== body.children.length || wanted.some((row, at) => row !== body.children[at])) {
    body.replaceChildren(...wanted);
  }
}

function showPool(row, pool) {
  row.replaceChildren(make("th", { scope: "row" }, pool.capability), cell(pool.policy), cell(pool.models),
    cell(pool.workers + (pool.dead ? ` (${pool.dead} dead)` : "")), cell(pool.busy), cell(pool.running),
    cell(pool.queue_depth));
}

const KIND = { ready: "good", busy: "good", idle: "good", processing: "good", loading: "warn", spawning: "warn",
  evicting: "warn", failed: "bad" };

function showModel(row, model) {
  const notes = [model.pinned ? "pinned" : "", model.breaker === "closed" ? "" : `breaker ${model.breaker}`,
    model.last_error ? `last error: ${model.last_error}` : ""].filter(Boolean).join(", ");
  const workers = model.workers.map((worker) => make("span", { class: `badge ${KIND[worker.state] ?? ""}` },
    `${worker.id}: ${worker.state}`));
  const idle = model.state === "ready"
    ? span(Math.round(model.idle_seconds)) + (model.keep_alive === null ? "" : ` of ${span(model.keep_alive)}`) : "–";
  row.replaceChildren(
    make("th", { scope: "row" }, model.key,
      make("small", {}, [model.capability, model.compute, model.isolation === "process" ? "processes" : ""]
        .filter(Boolean).join(", "))),
    make("td", {}, make("span", { class: `badge ${KIND[model.state] ?? ""}` }, model.state), make("small", {}, notes)),
    make("td", { class: "workers" }, ...workers.flatMap((badge) => [badge, " "]),
      make("small", {}, model.dead ? `${model.dead} dead` : "")),
    cell(model.running), cell(`${model.queued} of ${model.queue_capacity}`), cell(bytes(model.model_bytes)),
    cell(bytes(model.engine_bytes)), cell(whole(model.calls) + (model.errors ? ` (${model.errors} failed)` : "")),
    cell(`${span(model.p50)} / ${span(model.p99)}`), cell(idle));
}

async function cancel(id, button) {
  button.disabled = true;
  try {
    const done = await json("/api/mpool/cancel", { id });
    setText(byId("cancel-result"),
      done.cancelled ? `Request ${id} was cancelled.` : `Request ${id} had already ended.`);
  } catch (error) {
    button.disabled = false;
    setText(byId("cancel-result"), `Request ${id}: ${error.message}`);
  }
}

function showRequest(row, request) {
  if (!row.children.length) {
    const button = make("button", { type: "button", "aria-label": `Cancel request ${request.id}` }, "Cancel");
    button.addEventListener("click", () => cancel(request.id, button));
    row.append(make("th", { scope: "row" }, request.id), cell(request.path), cell(request.model), cell(""), cell(""),
      make("td", {}, button));
  }
  setText(row.children[3], span(request.seconds));
  setText(row.children[4], request.chunks === null ? "–" : whole(request.chunks));
}

// ---- refresh --------------------------------------------------------------------------------------------------------

function badge(element, text, kind) {
  setText(element, text);
  element.className = `badge ${kind}`;
}

function show(found) {
  setText(byId("version"), found.version);
  badge(byId("status"), found.status, { healthy: "good", degraded: "warn" }[found.status] ?? "bad");
  setText(byId("uptime"), `up ${span(Math.round(found.uptime))}, ${found.compute_threads_leased} of `
    + `${found.compute_threads} compute threads in use, ${found.streams} streams`);
  byId("reasons").hidden = !found.reasons.length;
  byId("reasons").replaceChildren(...found.reasons.map((reason) => make("li", {}, reason)));
  const held = found.memory;
  byId("memory").value = held.limit ? held.used / held.limit : 0;
  setText(byId("memory-text"), `${bytes(held.used)} of ${bytes(held.limit)}`);
  badge(byId("pressure"), `pressure ${held.pressure}`, { low: "good", normal: "good", high: "warn" }[held.pressure]
    ?? "bad");
  byId("kinds").replaceChildren(...Object.entries(held.by_kind).filter(([, count]) => count > 0)
    .sort((one, other) => other[1] - one[1])
    .map(([kind, count]) => make("div", {}, make("dt", {}, kind), make("dd", {}, bytes(count)))));
  rows(byId("pools"), found.pools, (pool) => pool.capability, showPool, "None", 7);
  rows(byId("models"), found.models, (model) => model.key, showModel, "No model has been used yet", 10);
  rows(byId("requests"), found.requests, (request) => request.id, showRequest, "None", 6);
  plot(found);
}

let timer = null;

async function refresh() {
  timer = null;
  try {
    show(await json("/api/mpool/state"));
  } catch (error) {
    badge(byId("status"), "no connection", "bad");
    setText(byId("uptime"), error.message);
  }
  if (!document.hidden) timer = setTimeout(refresh, REFRESH_MS);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && timer === null) refresh();
});
refresh();
