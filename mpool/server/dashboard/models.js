// The tab "Models": every model that can be served. Those in memory are cards with their workers; the others are rows
// of two tables, those on this machine and those of the catalogue.
import { button, byId, json, keyed, make, setBadge, setText } from "./dom.js";
import { CAPABILITY, IMAGES, bytes, clock, rate, span, whole } from "./formats.js";
import { term } from "./hints.js";
import { Plot } from "./plots.js";
import { onTab, tab } from "./tabs.js";

const REFRESH_MS = 5000, PULLING_MS = 1000, STEP = 25;
// State -> colour.
const KIND = { ready: "good", busy: "good", idle: "good", processing: "good", loading: "warn", spawning: "warn",
  evicting: "warn", failed: "bad", dead: "bad" };

let servable = { models: [], pull_refusal: null }, state = null, live = null;
let timer = null, asked = -Infinity, most = STEP;
const working = new Map(); // name of a model -> what is being done to it
const results = new Map(); // name of a model -> the error of the last action on it

// ---- actions --------------------------------------------------------------------------------------------------------

async function act(name, doing, path, body) {
  working.set(name, doing);
  results.delete(name);
  show();
  try {
    await json(path, body);
  } catch (error) {
    results.set(name, error.message);
  }
  working.delete(name);
  setText(byId("model-result"), results.has(name) ? "" : `${name}: done`);
  await refreshServable();
}

const load = (name) => act(name, "loading", "/api/mpool/load", { model: name });
const unload = (name) => act(name, "unloading", "/api/mpool/unload", { model: name });
const pin = (name, pinned) => act(name, pinned ? "pinning" : "unpinning", "/api/mpool/pin", { model: name, pinned });
const pull = (name) => {
  act(name, "downloading", "/api/pull", { model: name, stream: false });
  setTimeout(refreshServable, PULLING_MS / 2);
};

// Text of the error of the last action, or "".
const showResult = (element, name) => {
  setText(element, results.get(name) ?? "");
  element.hidden = !results.has(name);
};

// ---- in memory ------------------------------------------------------------------------------------------------------

const GENERATING = ["text_to_text", "vision"];
const FACTS = [
  ["Weights + caches", "caches", (part) => `${bytes(part.model_bytes)} + ${bytes(part.engine_bytes)}`
    + (part.snapshots ? `, ${bytes(part.snapshot_bytes)} of ${whole(part.snapshots)} snapshot${part.snapshots > 1 ? "s" : ""}` : "")],
  ["Prompt tokens reused", "reused", (part) => GENERATING.includes(part.capability) ? whole(part.prefix_tokens) : null],
  ["First token", "first", (part) => GENERATING.includes(part.capability) ? span(part.first_token) : null],
  ["Latency p50 / p99", "latency", (part) => part.p50 === null ? "–" : `${span(part.p50)} / ${span(part.p99)}`],
  ["Requests", null, (part) => whole(part.calls) + (part.errors ? ` (${whole(part.errors)} failed)` : "")],
  ["Running / waiting", "queue", (part) => `${whole(part.running)} / ${whole(part.queued)}`
    + (part.queued ? ` of ${whole(part.queue_capacity)}` : "")],
  ["Idle", "idle", (part) => part.state !== "ready" ? "–" : span(Math.round(part.idle_seconds))
    + (part.pinned || part.keep_alive === null ? "" : ` of ${span(part.keep_alive)}`)],
];

function createPart(part) {
  const facts = FACTS.filter(([, , value]) => value(part) !== null);
  const values = facts.map(() => make("dd"));
  const units = IMAGES.includes(part.capability) ? "images" : "tokens";
  const element = make("div", { class: "part" }, make("h4"),
    make("dl", { class: "facts" }, ...facts.map(([title, hint], at) => make("div", {},
      make("dt", {}, hint ? term(hint, title) : title), values[at]))),
    make("ul", { class: "workers" }), make("ul", { class: "faults" }));
  element.parts = { title: element.querySelector("h4"), workers: element.querySelector(".workers"),
    faults: element.querySelector(".faults"), facts: facts.map(([, , value], at) => [values[at], value]), plots: [
      new Plot(units === "images" ? "Images" : "Tokens", null, { [units]: units }, rate),
      new Plot("Latency", null, { p50: "p50", p99: "p99" }, span, 15)] };
  element.append(make("div", { class: "plots small" }, ...element.parts.plots.map((plot) => plot.figure)));
  return element;
}

function createWorker(worker) {
  return make("li", {}, make("span", { class: "dot" }), make("strong", {}, `Worker ${worker.id}`), make("span"));
}

function updateWorker(element, worker) {
  element.firstChild.className = `dot ${KIND[worker.state] ?? ""}`;
  setText(element.lastChild, `${worker.state}, ${whole(worker.served)} served`);
}

function updatePart(element, part) {
  const { title, facts, workers, faults, plots } = element.parts;
  setText(title, [CAPABILITY[part.capability] ?? part.capability, part.compute,
    part.isolation === "process" ? "worker processes" : ""].filter(Boolean).join(" · "));
  for (const [made, value] of facts) setText(made, value(part));
  keyed(workers, part.workers, (worker) => String(worker.id), createWorker, updateWorker,
    () => make("li", { class: "soft" }, part.dead ? `${part.dead} dead workers` : "no worker"));
  keyed(faults, part.faults, (fault) => `${fault.worker} ${fault.time}`, (fault) => make("li", {},
    make("strong", {}, `Worker ${fault.worker}`), ` failed at ${clock(fault.time)}: ${fault.reason} `,
    make("code", {}, fault.code)), () => {}, () => make("li", { hidden: "" }));
  const found = live.models.get(part.key);
  element.lastChild.hidden = !part.calls; // plots of a model that served nothing are empty
  if (found && part.calls) for (const plot of plots) plot.show(found, live);
}

// What the files of a model are, as one line.
const described = (model) => [model.quantisation, model.context && `${whole(model.context)} tokens of context`,
  model.parameters && `${model.parameters} parameters`, model.needed && `needs about ${bytes(model.needed)}`,
  model.license].filter(Boolean).join(" · ");

function createCard(model) {
  const card = make("article", { class: "card model", "aria-label": model.name },
    make("div", { class: "head" }, make("h3", {}, model.name, " ", make("span", { class: "badge" }), " ",
      make("span", { class: "badge pin" }, "pinned")),
    make("div", { class: "card-buttons" },
      button("Pin", (made) => pin(model.name, made.textContent === "Pin"), { class: "small" }),
      button("Unload", () => unload(model.name), { class: "small" }))),
    make("p", { class: "soft" }), make("p", { class: "notes", role: "status" }), make("div", { class: "parts" }));
  card.parts = { state: card.querySelector(".badge"), pin: card.querySelector(".pin"),
    buttons: card.querySelectorAll("button"), kind: card.querySelector(".soft"), notes: card.querySelector(".notes"),
    list: card.querySelector(".parts") };
  return card;
}

function updateCard(card, { model, parts }) {
  const { pin: pinned, buttons, kind, notes, list } = card.parts;
  const worst = ["failed", "loading", "evicting", "busy"].find((name) => parts.some((part) => part.state === name));
  const doing = working.get(model.name);
  setBadge(card.parts.state, doing ?? worst ?? "ready", doing ? "warn" : KIND[worst ?? "ready"] ?? "");
  pinned.hidden = !parts.some((part) => part.pinned);
  setText(buttons[0], pinned.hidden ? "Pin" : "Unpin");
  buttons[0].setAttribute("aria-label", `${pinned.hidden ? "Pin" : "Unpin"} ${model.name}`);
  buttons[1].setAttribute("aria-label", `Unload ${model.name}`);
  for (const one of buttons) {
    one.disabled = doing !== undefined;
    one.hidden = model.own;
  }
  setText(kind, described(model));
  setText(notes, [results.get(model.name) ?? "", ...parts.map((part) => part.breaker === "closed" ? ""
    : `circuit breaker ${part.breaker}`)].filter(Boolean).join(", "));
  keyed(list, parts, (part) => part.key, createPart, updatePart, () => make("div"));
}

// ---- not in memory --------------------------------------------------------------------------------------------------

const cell = (label, text, kind) => make("td", { "data-label": label, class: kind }, text ?? "–");

// Whether a model fits into the memory: now, after others were unloaded, or never.
function fit(needed) {
  const { limit, available } = state.memory;
  return needed === null ? ["", ""] : needed > limit ? ["does not fit", "bad"] : needed > available
    ? ["unloads others", "warn"] : ["", ""];
}

function needs(model) {
  return make("td", { "data-label": "Memory needed", class: "number" },
    model.needed === null ? "–" : bytes(model.needed), " ", make("span", { class: "badge" }));
}

const nameOf = (model) => make("th", { scope: "row", class: "name" }, make("span", {}, model.name,
  ...model.names.map((name) => make("small", {}, name))));
const tasksOf = (model) => model.capabilities.map((name) => CAPABILITY[name] ?? name).join(", ");

function createRow(model) {
  const press = button(model.local ? "Load" : "Pull", (made) => made.ariaDisabled !== "true"
    && (model.local ? load : pull)(model.name), { class: "small" });
  const bar = make("progress", { "aria-label": `Download of ${model.name}` }), done = make("small");
  const notes = make("p", { class: "notes", role: "status" });
  const row = make("tr", {}, nameOf(model), cell("Task", tasksOf(model)),
    ...model.local ? [cell("Quantisation", model.quantisation),
      cell("Context", model.context && whole(model.context), "number")] : [],
    cell("Parameters", model.parameters, "number"),
    cell(model.local ? "Files" : "Download", model.files && bytes(model.files), "number"), needs(model),
    ...model.local ? [] : [cell("Licence", model.license)],
    make("td", { class: "action" }, press, bar, done, notes));
  row.parts = { fit: row.querySelector(".badge"), press, bar, done, notes };
  press.setAttribute("aria-label", `${model.local ? "Load" : "Pull"} ${model.name}`);
  return row;
}

function updateRow(row, { model }) {
  const { press, bar, done, notes } = row.parts, doing = working.get(model.name);
  const [fits, kind] = fit(model.needed);
  setBadge(row.parts.fit, fits, kind);
  row.parts.fit.hidden = !fits;
  const pulling = model.download ?? (doing === "downloading" ? { done: 0, total: null } : null);
  press.hidden = pulling !== null;
  press.disabled = doing !== undefined;
  setText(press, doing === "loading" ? "Loading" : model.local ? "Load" : "Pull");
  const refusal = model.local ? null : servable.pull_refusal;
  press.ariaDisabled = refusal === null ? null : "true"; // and not disabled: the keyboard must reach its hint
  if (refusal !== null) press.dataset.hint = refusal;
  bar.hidden = done.hidden = pulling === null;
  if (pulling !== null) {
    if (pulling.total) [bar.max, bar.value] = [pulling.total, pulling.done];
    else bar.removeAttribute("value");
    setText(done, pulling.total ? `${bytes(pulling.done)} of ${bytes(pulling.total)}` : "starting");
  }
  showResult(notes, model.name);
}

// ---- all ------------------------------------------------------------------------------------------------------------

function matches({ model }) {
  const wanted = byId("model-filter").value.trim().toLowerCase(), task = byId("model-task").value;
  return (!task || model.capabilities.includes(task))
    && [model.name, ...model.names].some((name) => name.toLowerCase().includes(wanted));
}

function rows(name, list, few) {
  byId(`${name}-section`).hidden = !list.length;
  setText(byId(`${name}-count`), whole(list.length));
  keyed(byId(name), few ?? list, ({ model }) => model.name, ({ model }) => createRow(model), updateRow,
    () => make("tr"));
}

function show() {
  if (state === null || tab !== "models") return;
  const known = new Set(servable.models.flatMap((model) => model.keys));
  // models that the program that runs the server uses itself
  const own = state.models.filter((part) => !known.has(part.key)).map((part) => ({ parts: [part], model: { own: true,
    name: part.key, local: true, names: [], capabilities: [part.capability], needed: part.needed || null } }));
  const all = [...servable.models.map((model) => ({ model,
    parts: state.models.filter((part) => model.keys.includes(part.key)) })), ...own].filter(matches);
  const loaded = all.filter(({ parts }) => parts.some((part) => part.state !== "cold"))
    .sort((one, other) => one.model.name.localeCompare(other.model.name));
  setText(byId("loaded-count"), whole(loaded.length));
  keyed(byId("model-cards"), loaded, ({ model }) => model.name, ({ model }) => createCard(model), updateCard,
    () => make("p", { class: "empty" }, "No model is in memory. The first request of a model loads it."));
  rows("idle-models", all.filter((one) => one.model.local && !one.model.own && !loaded.includes(one)));
  const remote = all.filter((one) => !one.model.local)
    .sort((one, other) => (other.model.download !== null) - (one.model.download !== null));
  rows("catalogue", remote, remote.slice(0, most));
  byId("catalogue-more").hidden = remote.length <= most;
  setText(byId("pull-refusal"), servable.pull_refusal ?? "");
  if (own.length && performance.now() - asked > PULLING_MS) refreshServable(); // one of them may have been loaded now
}

export function showModels(found, series) {
  [state, live] = [found, series];
  show();
}

async function refreshServable() {
  clearTimeout(timer);
  if (tab !== "models" || document.hidden) return;
  asked = performance.now();
  try {
    servable = await json("/api/mpool/servable");
    show();
  } catch (error) {
    setText(byId("model-result"), error.message);
  }
  clearTimeout(timer);
  timer = setTimeout(refreshServable, servable.models.some((model) => model.download) ? PULLING_MS : REFRESH_MS);
}

byId("model-filter").addEventListener("input", show);
byId("model-task").append(...Object.entries(CAPABILITY).map(([name, title]) => make("option", { value: name }, title)));
byId("model-task").addEventListener("change", show);
byId("catalogue-more").addEventListener("click", () => {
  most = Infinity;
  show();
});
onTab(refreshServable);
document.addEventListener("visibilitychange", refreshServable);
