// The tab "Requests": requests in flight, and the last ones, which the server's history has.
import { button, byId, json, keyed, make, setText } from "./dom.js";
import { CAPABILITY, clock, span, whole } from "./formats.js";
import { onTab, tab } from "./tabs.js";

const REFRESH_MS = 5000, STEP = 100;

// data-label: heading of the cell on narrow screens, where a row is a card.
const cell = (label, text, kind) => make("td", { "data-label": label, class: kind }, String(text));

// ---- in flight ------------------------------------------------------------------------------------------------------

async function cancel(id, pressed) {
  pressed.disabled = true;
  try {
    const done = await json("/api/mpool/cancel", { id });
    setText(byId("cancel-result"),
      done.cancelled ? `Request ${id} was cancelled.` : `Request ${id} had already ended.`);
  } catch (error) {
    pressed.disabled = false;
    setText(byId("cancel-result"), `Request ${id}: ${error.message}`);
  }
}

function create(request) {
  return make("tr", {}, make("th", { scope: "row" }, request.id), cell("Route", request.path), cell("Model", request.model),
    cell("Time", "", "number"), cell("Chunks", "", "number"), make("td", {}, button("Cancel",
      (pressed) => cancel(request.id, pressed), { "aria-label": `Cancel request ${request.id}`, class: "small" })));
}

function update(row, request) {
  setText(row.children[3], span(request.seconds));
  setText(row.children[4], request.chunks === null ? "–" : whole(request.chunks));
}

export function showRunning(requests) {
  keyed(byId("running"), requests, (request) => request.id, create, update,
    () => make("tr", { class: "empty" }, make("td", { colspan: 6, class: "soft" }, "None")));
}

// ---- the last requests ----------------------------------------------------------------------------------------------

function past(request) {
  const kind = request.outcome === "completed" ? "good"
    : ["disconnected", "cancelled"].includes(request.outcome) ? "warn" : "bad";
  return make("tr", {}, make("th", { scope: "row" }, request.id), cell("Ended", clock(request.ended)),
    cell("Route", request.path),
    make("td", { "data-label": "Model", class: "name" }, make("span", {}, request.model,
      make("small", {}, CAPABILITY[request.capability] ?? ""))),
    cell("Client", request.client ?? "–"), cell("Time", span(request.seconds), "number"),
    cell("First token", span(request.first_token), "number"), cell("Prompt", whole(request.prompt_tokens), "number"),
    cell("Completion", whole(request.completion_tokens), "number"),
    make("td", { "data-label": "Outcome" }, make("span", { class: `badge ${kind}` }, request.outcome)));
}

let found = null, timer = null, most = STEP;

function show() {
  const wanted = byId("history-filter").value.trim().toLowerCase(), outcome = byId("history-outcome").value;
  const fits = found.requests.filter((one) =>
    (!outcome || (one.outcome === "completed") === (outcome === "completed"))
    && [one.id, one.path, one.model, one.client ?? "", one.outcome].some((text) => text.toLowerCase().includes(wanted)));
  keyed(byId("history"), fits.slice(0, most), (one) => one.id, past, () => {},
    () => make("tr", { class: "empty" }, make("td", { colspan: 10, class: "soft" }, "None")));
  setText(byId("history-count"), `${whole(fits.length)} of ${whole(found.requests.length)} requests; the server keeps the `
    + `last ${whole(found.limit)}, without prompts and results`);
  byId("history-more").hidden = fits.length <= most;
}

export async function refreshHistory() {
  clearTimeout(timer);
  if (tab !== "requests" || document.hidden) return;
  try {
    found = await json("/api/mpool/history");
    show();
  } catch (error) {
    setText(byId("history-count"), error.message);
  }
  clearTimeout(timer);
  timer = setTimeout(refreshHistory, REFRESH_MS);
}

byId("history-filter").addEventListener("input", () => found && show());
byId("history-outcome").addEventListener("change", () => found && show());
byId("history-more").addEventListener("click", () => {
  most += STEP;
  show();
});
onTab(() => { most = STEP; });
document.addEventListener("visibilitychange", refreshHistory);
