// The tab "Models": one card per model, with its state, workers and history.
import { byId, keyed, make, setBadge, setText } from "./dom.js";
import { CAPABILITY, bytes, rate, short, span, whole } from "./formats.js";
import { term } from "./hints.js";
import { Plot } from "./plots.js";

const KIND = { ready: "good", busy: "good", idle: "good", processing: "good", loading: "warn", spawning: "warn",
  evicting: "warn", failed: "bad" };
const FACTS = [
  ["Weights", "weights", (model) => bytes(model.model_bytes)],
  ["Caches", "caches", (model) => bytes(model.engine_bytes)],
  ["Requests", null, (model) => whole(model.calls) + (model.errors ? ` (${whole(model.errors)} failed)` : "")],
  ["Latency", "latency", (model) => model.p50 === null ? "–" : `${span(model.p50)} / ${span(model.p99)}`],
  ["In flight", "queue", (model) => `${model.running} + ${model.queued} of ${model.queue_capacity}`],
  ["Idle", "idle", (model) => model.state !== "ready" ? "–" : span(Math.round(model.idle_seconds))
    + (model.keep_alive === null ? "" : ` of ${span(model.keep_alive)}`)],
];

function create(model) {
  const facts = FACTS.map(([title, hint]) => [hint ? term(hint, title) : title, make("dd")]);
  const units = ["text_to_image", "image_embedding"].includes(model.capability) ? "images" : "tokens";
  const card = make("article", { class: "card model", "aria-label": model.key },
    make("div", { class: "head" }, make("h2", {}, model.key), make("span", { class: "badge" })),
    make("p", { class: "soft" }), make("p", { class: "notes" }),
    make("dl", { class: "facts" }, ...facts.map(([title, value]) => make("div", {}, make("dt", {}, title), value))),
    make("p", { class: "workers" }, term("workers", "Workers"), " ", make("span")));
  card.parts = {
    state: card.querySelector(".badge"), kind: card.querySelector(".soft"), notes: card.querySelector(".notes"),
    values: facts.map(([, value]) => value), workers: card.querySelector(".workers > span"), plots: [
      new Plot("Requests", null, { requests: "done", failed: "failed" }, rate),
      new Plot(units === "images" ? "Images" : "Tokens", null, { [units]: units }, rate),
      new Plot("In flight", null, { running: "running", queued: "waiting" }, short),
      new Plot("Memory", null, { memory: "in use" }, bytes)] };
  card.append(make("div", { class: "plots small" }, ...card.parts.plots.map((plot) => plot.figure)));
  return card;
}

function update(card, model, live) {
  const { state, kind, notes, values, workers, plots } = card.parts;
  setBadge(state, model.state, KIND[model.state] ?? "");
  setText(kind, [CAPABILITY[model.capability] ?? model.capability, model.compute,
    model.isolation === "process" ? "worker processes" : "", model.pinned ? "pinned" : ""].filter(Boolean).join(" · "));
  setText(notes, [model.breaker === "closed" ? "" : `circuit breaker ${model.breaker}`,
    model.last_error ? `last error: ${model.last_error}` : ""].filter(Boolean).join(", "));
  FACTS.forEach(([, , value], at) => setText(values[at], value(model)));
  keyed(workers, model.workers, (worker) => String(worker.id), () => make("span", { class: "badge" }),
    (element, worker) => setBadge(element, `${worker.id} ${worker.state}`, KIND[worker.state] ?? ""),
    () => make("span", { class: "soft" }, model.dead ? `${model.dead} dead` : "none"));
  const found = live.models.get(model.key);
  if (found) for (const plot of plots) plot.show(found, live);
}

export function showModels(found, live) {
  const models = [...found.models].sort((one, other) => (one.state === "cold") - (other.state === "cold")
    || one.key.localeCompare(other.key));
  keyed(byId("model-cards"), models, (model) => model.key, create, (card, model) => update(card, model, live),
    () => make("p", { class: "empty" }, "No model has been used yet. Try one in the ",
      make("a", { href: "#/playground" }, "playground"), "."));
}
