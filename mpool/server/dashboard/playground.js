// The playground: sends requests to the public routes of the server, with the models that fit the task.
import { byId, json, make, setText } from "./dom.js";
import * as conversation from "./conversation.js";
import { TASKS as RESULTS } from "./results.js";
import { setToken, showSnippet } from "./snippets.js";
import { onTab } from "./tabs.js";

// Task -> title, tasks of the models that fit, label of the text field, example text, title of the button.
const TASKS = {
  chat: ["Chat", ["chat", "vision"], "", "", "Send"],
  embed: ["Embed texts", ["embed"], "Texts, one per line",
    "Bread rises because of yeast.\nThe dough grows in the warm kitchen.\nShares fell on Monday.", "Embed"],
  rerank: ["Rerank", ["rerank"], "Documents, one per line",
    "Bread rises because of yeast.\nThe cat is asleep on the warm roof.\nShares fell on Monday.", "Rank"],
  embed_image: ["Embed images", ["embed_image"], "", "", "Embed"],
  image: ["Generate an image", ["image"], "Prompt", "a lighthouse at dusk", "Generate"],
};

const output = byId("output");
let models = [], task = null, running = null, files = [];
const texts = {}; // task -> text of its field

// ---- the form -------------------------------------------------------------------------------------------------------

const fitting = (name) => models.filter((model) => model.tasks.some((one) => TASKS[name][1].includes(one)));
const chosen = () => models.find((model) => model.name === byId("model").value);
const number = (id) => byId(id).value === "" ? undefined : Number(byId(id).value);

function choose(name) {
  const [, , label, example, action] = TASKS[name], usable = fitting(name), text = byId("text");
  if (task) texts[task] = text.value;
  if (name !== task) {
    output.replaceChildren();
    setText(byId("progress"), "");
  }
  task = name;
  text.value = texts[name] ?? example;
  setText(byId("text-label"), label);
  setText(byId("run"), action);
  for (const field of document.querySelectorAll("[data-for]")) {
    field.hidden = !field.dataset.for.split(" ").includes(name);
  }
  output.hidden = name === "chat";
  byId("options").hidden = !["chat", "image"].includes(name);
  const before = byId("model").value;
  byId("model").replaceChildren(...usable.map((model) => make("option", { value: model.name }, model.name)));
  if (usable.some((model) => model.name === before)) byId("model").value = before;
  byId("run").disabled = !usable.length || running !== null;
  byId("curl").disabled = byId("python").disabled = !usable.length;
  if (!usable.length) setText(byId("progress"), "The server has no model for this task.");
  chooseModel();
}

// Images belong to image embeddings, and to messages for models that see.
function chooseModel() {
  const sees = task === "embed_image" || (task === "chat" && chosen()?.tasks.includes("vision"));
  byId("attach").hidden = !sees;
  if (!sees && task === "chat") conversation.attach([]);
}

function addTasks() {
  for (const [name, [title]] of Object.entries(TASKS)) {
    const radio = make("input", { type: "radio", name: "task", value: name, id: `task-${name}` });
    radio.addEventListener("change", () => choose(name));
    byId("tasks").append(make("label", {}, radio, " ", title));
  }
}

let loaded = false;

async function load() {
  if (loaded) return;
  loaded = true;
  try {
    const found = await json("/api/mpool/models");
    models = found.models;
    setToken(found.token);
  } catch (error) {
    loaded = false;
    setText(byId("progress"), error.message);
    return;
  }
  for (const name of Object.keys(TASKS)) {
    const usable = fitting(name).length > 0, radio = byId(`task-${name}`);
    radio.disabled = !usable;
    radio.parentElement.title = usable ? "" : "The server has no model for this task.";
  }
  const first = Object.keys(TASKS).find((name) => fitting(name).length) ?? "chat";
  byId(`task-${first}`).checked = true;
  choose(first);
}

function readFile(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, url: reader.result });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

byId("files").addEventListener("change", async () => {
  const read = await Promise.all([...byId("files").files].map(readFile));
  if (task === "chat") {
    conversation.attach(read);
    byId("files").value = ""; // the next choice may be the same file
  } else files = read;
});

// ---- requests -------------------------------------------------------------------------------------------------------

// Fields without a value are left out: JSON has no undefined.
const sampling = () => JSON.parse(JSON.stringify({ max_tokens: number("tokens"), temperature: number("temperature"),
  seed: number("seed") }));
const options = () => ({ model: byId("model").value, images: files, number, sampling: sampling() });

function request() {
  const found = task === "chat" ? conversation.request(options()) : RESULTS[task].request(options());
  return { path: found.path, body: JSON.parse(JSON.stringify(found.body)) };
}

async function run(event) {
  event.preventDefault();
  if (running || byId("run").disabled) return;
  const own = running = new AbortController(), done = task;
  byId("stop").disabled = false;
  byId("run").disabled = true;
  if (task !== "chat") output.replaceChildren();
  output.setAttribute("aria-busy", "true");
  setText(byId("progress"), "running");
  let message;
  try {
    message = task === "chat" ? await conversation.send(options(), own.signal)
      : await RESULTS[task].run(request(), options(), own.signal);
  } catch (error) {
    message = own.signal.aborted ? "stopped" : error.message;
  }
  output.removeAttribute("aria-busy");
  running = null;
  byId("run").disabled = !fitting(task).length;
  if (document.activeElement === byId("stop")) byId("run").focus();
  byId("stop").disabled = true;
  if (task === done) setText(byId("progress"), message);
}

byId("form").addEventListener("submit", run);
byId("form").addEventListener("again", (event) => {
  if (running) return;
  conversation.dropAnswer();
  run(event);
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", () => {
  running?.abort();
  conversation.clear();
  setText(byId("progress"), "");
  byId("message").focus();
});
byId("model").addEventListener("change", chooseModel);
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("form").requestSubmit();
});
for (const language of ["curl", "python"]) {
  byId(language).addEventListener("click", () => showSnippet(language, request()));
}
if (matchMedia("(max-width: 52rem)").matches) byId("options").open = false;
addTasks();
onTab((name) => name === "playground" && load());
