// The list of events of the tab "Overview": loads, unloads, deaths of workers, downloads and refused requests.
import { byId, json, keyed, make, setText } from "./dom.js";
import { clock, span, whole } from "./formats.js";
import { onTab, tab } from "./tabs.js";

const REFRESH_MS = 3000, STEP = 10;
// Kind -> title and colour.
const KINDS = { load: ["loaded", "good"], load_failed: ["load failed", "bad"], unload: ["unloaded", ""],
  death: ["worker died", "bad"], download: ["downloaded", "good"], download_failed: ["download failed", "bad"],
  refusal: ["refused", "warn"] };
// Codes of requests that failed after a model had accepted them: the rate of failures counts these.
const FAILED = ["model_failed", "worker_lost", "internal", "timeout"];

let found = null, timer = null, most = STEP;

function create(event) {
  const [title, kind] = KINDS[event.kind] ?? [event.kind, ""];
  return make("li", {}, make("time", {}, clock(event.time)), make("span", { class: `badge ${kind}` }, title),
    make("strong", {}, event.model ?? event.path ?? ""), make("span", {}, [
      event.worker === null ? "" : `Worker ${event.worker}:`, event.kind === "load" && event.seconds !== null
        ? `in ${span(event.seconds)}` : "", event.reason].filter(Boolean).join(" ")),
    make("small", {}, [event.kind === "unload" ? null : event.code, event.model === null ? null : event.path, event.client,
      event.count > 1 ? `${whole(event.count)} times` : null].filter(Boolean).join(" · ")));
}

function show() {
  const kind = byId("event-kind").value;
  const fits = found.events.filter((event) => !kind || (event.kind === "refusal") === (kind === "refusal"));
  const key = (event) => [event.time, event.kind, event.model ?? event.path, event.worker, event.code].join(" ");
  keyed(byId("events"), fits.slice(0, most), key, create, () => {},
    () => make("li", { class: "soft" }, "None since the server was started"));
  byId("events-more").hidden = fits.length <= most;
}

async function refresh() {
  clearTimeout(timer);
  if (tab !== "overview" || document.hidden) return;
  try {
    found = await json("/api/mpool/events");
    const refused = found.events.filter((event) => event.kind === "refusal" && !FAILED.includes(event.code))
      .reduce((sum, event) => sum + event.count, 0);
    setText(byId("now-refused"), refused ? `${whole(refused)} refused, see Events` : "");
    show();
  } catch { /* the header says that the server does not respond */ }
  clearTimeout(timer);
  timer = setTimeout(refresh, REFRESH_MS);
}

byId("event-kind").addEventListener("change", () => found && show());
byId("events-more").addEventListener("click", () => {
  most += 5 * STEP;
  show();
});
onTab(() => {
  most = STEP;
  refresh();
});
document.addEventListener("visibilitychange", refresh);
