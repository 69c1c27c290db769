// The last requests, from the server's history. Fetched when the section is opened, and then every five seconds.
import { byId, json, make, setText } from "./dom.js";
import { span, whole } from "./formats.js";

const REFRESH_MS = 5000, SHOWN = 200;

const cell = (...children) => make("td", {}, ...children.map(String));
const time = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

function row(past) {
  const kind = past.outcome === "completed" ? "good" : past.outcome === "disconnected" || past.outcome === "cancelled"
    ? "warn" : "bad";
  return make("tr", {}, make("th", { scope: "row" }, past.id), cell(time(past.ended)), cell(past.path),
    make("td", {}, past.model, make("small", {}, past.capability ?? "")), cell(past.client ?? "–"),
    cell(span(past.seconds)), cell(whole(past.prompt_tokens)), cell(whole(past.completion_tokens)),
    make("td", {}, make("span", { class: `badge ${kind}` }, past.outcome)));
}

function show(found) {
  const wanted = byId("history-filter").value.trim().toLowerCase();
  const fits = found.requests.filter((past) => [past.id, past.path, past.model, past.client ?? "", past.outcome]
    .some((text) => text.toLowerCase().includes(wanted)));
  const rows = fits.slice(0, SHOWN).map(row);
  byId("history").replaceChildren(...(rows.length ? rows
    : [make("tr", {}, make("td", { colspan: 9, class: "soft" }, "None"))]));
  setText(byId("history-count"), `${whole(rows.length)} of ${whole(found.requests.length)} requests; `
    + `the server keeps ${whole(found.limit)}`);
}

let found = null, timer = null;

async function refresh() {
  clearTimeout(timer);
  timer = null;
  if (!byId("history-section").open || document.hidden) return;
  try {
    found = await json("/api/mpool/history");
    show(found);
  } catch (error) {
    setText(byId("history-count"), error.message);
  }
  timer = setTimeout(refresh, REFRESH_MS);
}

byId("history-section").addEventListener("toggle", refresh);
byId("history-filter").addEventListener("input", () => found && show(found));
document.addEventListener("visibilitychange", refresh);
