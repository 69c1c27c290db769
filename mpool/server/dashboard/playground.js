// The playground: sends requests to the public routes of the server, with one or two of the models that fit the task.
import { byId, json, make, say, setText } from "./dom.js";
import * as conversation from "./conversation.js";
import { accept, images } from "./images.js";
import { TASKS as RESULTS } from "./results.js";
import { setToken, showSnippet } from "./snippets.js";
import { onTab } from "./tabs.js";

// Task -> title, tasks of the models that fit, label of the text field, example text, title of the button.
const TASKS = {
  chat: ["Chat", ["chat", "vision"], "", "", "Send"],
  embed: ["Embed texts", ["embed"], "Texts, one per line",
    "Bread rises because of yeast.\nThe dough grows in the warm kitchen.\nA sourdough starter needs flour and water.\n"
    + "Shares fell on Monday.\nThe bank raised its interest rate.\nThe cat sleeps on the roof.\n"
    + "A puppy chases its tail.", "Embed"],
  rerank: ["Rerank", ["rerank"], "Documents, one per line",
    "Bread rises because of yeast.\nThe cat is asleep on the warm roof.\nShares fell on Monday.", "Rank"],
  embed_image: ["Embed images", ["embed_image"], "", "", "Embed"],
  image: ["Generate an image", ["image"], "Prompt", "a lighthouse at dusk", "Generate"],
};
const NONE = "The server has no model for this task.";

const output = byId("output"), form = byId("form");
let models = [], task = null, running = null, comparing = false;
const texts = {}; // task -> text of its field

// ---- the form -------------------------------------------------------------------------------------------------------

const fitting = (name) => models.filter((model) => model.tasks.some((one) => TASKS[name][1].includes(one)));
const number = (id) => byId(id).value === "" ? undefined : Number(byId(id).value);
const selects = [byId("model"), byId("other")];
// The models of the columns.
const chosen = () => selects.slice(0, comparing ? 2 : 1).map((select) => select.value);

function choose(name) {
  const [, , label, example, action] = TASKS[name], usable = fitting(name), text = byId("text");
  if (task) texts[task] = text.value;
  if (name !== task) {
    output.replaceChildren();
    say("");
  }
  task = name;
  byId("playground").dataset.task = name;
  text.value = texts[name] ?? example;
  text.rows = name === "image" ? 3 : 7;
  setText(byId("text-label"), label);
  setText(byId("run"), action);
  for (const field of document.querySelectorAll("[data-for]")) {
    field.hidden = !field.dataset.for.split(" ").includes(name);
  }
  output.hidden = name === "chat";
  byId("options").hidden = !["chat", "image"].includes(name);
  const before = selects.map((select) => select.value);
  selects.forEach((select, column) => {
    select.replaceChildren(...usable.map((model) => make("option", { value: model.name }, model.name)));
    const same = usable.find((model) => model.name === before[column]);
    if (same ?? usable[column]) select.value = (same ?? usable[column]).name;
  });
  byId("run").disabled = !usable.length || running !== null;
  byId("curl").disabled = byId("python").disabled = !usable.length;
  byId("compare").disabled = usable.length < 2;
  byId("compare").title = usable.length < 2 ? "Needs two models for this task" : "Compare two models";
  if (!usable.length) say(NONE);
  compare(comparing && usable.length > 1);
}

// Images belong to image embeddings, and to messages for models that see.
function chooseModels() {
  const blind = chosen().filter((name) => !models.find((model) => model.name === name)?.tasks.includes("vision"));
  accept(task === "embed_image" ? null : task !== "chat" ? "Only models that see, and image embeddings, take images."
    : blind.length ? `${blind[0]} does not see images.` : null);
}

function compare(wanted) {
  comparing = wanted;
  byId("compare").setAttribute("aria-pressed", String(wanted));
  byId("other-label").hidden = !wanted;
  byId("playground").classList.toggle("comparing", wanted);
  chooseModels();
}

function addTasks() {
  for (const [name, [title]] of Object.entries(TASKS)) {
    const radio = make("input", { type: "radio", name: "task", value: name, id: `task-${name}` });
    radio.addEventListener("change", () => choose(name));
    byId("tasks").append(make("label", {}, radio, " ", title));
  }
}

// The list of models changes while the page is open: ask again whenever the tab is opened.
async function load() {
  if (running) return;
  try {
    const found = await json("/api/mpool/models"), same = JSON.stringify(found.models) === JSON.stringify(models);
    models = found.models;
    setToken(found.token);
    if (same && task) return;
  } catch (error) {
    say(error.message);
    return;
  }
  for (const name of Object.keys(TASKS)) {
    const usable = fitting(name).length > 0, radio = byId(`task-${name}`);
    radio.disabled = !usable;
    radio.parentElement.title = usable ? "" : NONE;
  }
  const first = task && fitting(task).length ? task : Object.keys(TASKS).find((name) => fitting(name).length) ?? "chat";
  byId(`task-${first}`).checked = true;
  choose(first);
}

// ---- settings behind a button, on narrow screens --------------------------------------------------------------------

const side = byId("settings"), opener = byId("open-settings");

function showSettings(shown, focus = true) {
  if (side.classList.contains("open") === shown) return;
  side.classList.toggle("open", shown);
  opener.setAttribute("aria-expanded", String(shown));
  if (focus) (shown ? side.querySelector("input:checked") ?? byId("close-settings") : opener).focus();
}

opener.addEventListener("click", () => showSettings(true));
byId("close-settings").addEventListener("click", () => showSettings(false));
side.addEventListener("keydown", (event) => event.key === "Escape" && showSettings(false));
side.addEventListener("focusout", ({ relatedTarget }) => relatedTarget && !side.contains(relatedTarget)
  && showSettings(false, false));
document.addEventListener("click", ({ target }) => side.contains(target) || opener.contains(target)
  || showSettings(false, false));

// ---- requests -------------------------------------------------------------------------------------------------------

const EXAMPLE = [{ type: "function", function: { name: "get_weather", description: "The weather of a city",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];

byId("tools-example").addEventListener("click", () => { byId("tools").value = JSON.stringify(EXAMPLE, null, 1); });

// The tools of the request: a JSON list, as in OpenAI's protocol.
function tools() {
  const text = byId("tools").value.trim();
  if (!text) return undefined;
  let found = null;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools must be a JSON list of functions: ${error.message}`);
  }
  if (!Array.isArray(found)) throw new Error(`Tools must be a JSON list, such as ${JSON.stringify(EXAMPLE)}`);
  return found;
}

const lines = () => byId("text").value.split("\n").map((line) => line.trim()).filter(Boolean);

// Options of the request to a model. Fields without a value are left out: JSON has no undefined.
const options = (model) => ({ model, images, number, text: byId("text").value, lines: lines(),
  query: byId("query").value, sampling: task !== "chat" ? {} : JSON.parse(JSON.stringify({
    max_tokens: number("tokens"), temperature: number("temperature"), seed: number("seed"), tools: tools() })) });

function request(given) {
  const found = task === "chat" ? conversation.request(given) : RESULTS[task].request(given);
  return { path: found.path, body: JSON.parse(JSON.stringify(found.body)) };
}

// Run a task other than chat with every chosen model: one column each.
async function results(signal) {
  const columns = chosen().map((model) => ({ model, output: make("div", { class: "result" }),
    facts: make("p", { class: "speeds" }) }));
  const two = columns.length > 1, progress = (text) => two || say(text);
  output.replaceChildren(make("div", { class: "columns" }, ...columns.map((column) =>
    make("article", { "aria-label": column.model },
    ...(two ? [make("h3", { class: "model-name" }, column.model)] : []), column.output, column.facts))));
  const done = await Promise.allSettled(columns.map(async (column) => {
    const given = { ...options(column.model), output: column.output, progress }, began = performance.now();
    try {
      const found = await RESULTS[task].run(request(given), given, signal);
      const text = `${found} in ${((performance.now() - began) / 1000).toFixed(2)} s`;
      if (two) setText(column.facts, text);
      return two ? "done" : text;
    } catch (error) {
      const shown = two && !signal.aborted ? [make("p", { class: "bad", role: "alert" }, error.message)] : [];
      column.output.replaceChildren(...shown);
      throw error;
    }
  }));
  const failed = done.find((one) => one.status === "rejected");
  if (failed) throw failed.reason;
  return done[0].value;
}

// Call an action with a signal, show its message, and keep other actions from starting.
async function perform(action) {
  if (running || byId("run").disabled) return;
  const own = running = new AbortController();
  byId("stop").disabled = false;
  byId("run").disabled = true;
  output.setAttribute("aria-busy", "true");
  say("running");
  let message;
  try {
    message = await action(own.signal);
  } catch (error) {
    message = own.signal.aborted ? "stopped" : error.message;
  }
  const focused = [byId("stop"), byId("run"), document.body].includes(document.activeElement);
  output.removeAttribute("aria-busy");
  running = null;
  byId("run").disabled = !fitting(task).length;
  byId("stop").disabled = true;
  say(message);
  if (focused) byId(task === "chat" ? "message" : "run").focus(); // a button that is disabled loses the focus
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  perform((signal) => task === "chat" ? conversation.send(chosen().map(options), signal) : results(signal));
});
form.addEventListener("again", ({ detail: column }) =>
  perform((signal) => conversation.repeat(options(chosen()[column] ?? conversation.modelOf(column)), column, signal)));
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", () => {
  running?.abort();
  conversation.clear();
  say("");
  byId("message").focus();
});
for (const select of selects) select.addEventListener("change", chooseModels);
byId("compare").addEventListener("click", () => compare(!comparing));
byId("message").addEventListener("keydown", (event) => {
  // the keyboards of phones have no Shift+Enter
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || matchMedia("(pointer: coarse)").matches) return;
  event.preventDefault();
  form.requestSubmit();
});
for (const language of ["curl", "python"]) {
  byId(language).addEventListener("click", () => {
    try {
      showSnippet(language, request(options(chosen()[0])));
    } catch (error) {
      say(error.message);
    }
  });
}
addTasks();
onTab((name) => name === "playground" && load());
