// The playground: sends requests to the public routes of the server.
import { byId, events, json, make, makeSvg, setText } from "./dom.js";

// Task -> title, required capability of the model, label of the text field, example text.
const TASKS = {
  chat: ["Chat", "text_to_text", "Message", "Name three colours."],
  vision: ["Ask about images", "vision", "Question", "What is in the image?"],
  embed: ["Embed texts", "text_embedding", "Texts, one per line",
    "Bread rises because of yeast.\nThe cat is asleep on the warm roof.\nShares fell on Monday."],
  rerank: ["Rerank", "text_embedding", "Documents, one per line",
    "Bread rises because of yeast.\nThe cat is asleep on the warm roof.\nShares fell on Monday."],
  embed_image: ["Embed images", "image_embedding", "", ""],
  image: ["Generate an image", "text_to_image", "Prompt", "a lighthouse at dusk"],
};

const output = byId("output");
let models = [], task = "chat", running = null;

// ---- the form -------------------------------------------------------------------------------------------------------

const supports = (model, wanted) => model.capabilities.includes(wanted);

function choose(name) {
  const [, capability, label, example] = TASKS[name];
  const text = byId("text");
  if (!text.value || text.value === TASKS[task][3]) text.value = example;
  task = name;
  setText(byId("text-label"), label);
  for (const field of document.querySelectorAll("[data-for]")) {
    field.hidden = !field.dataset.for.split(" ").includes(name);
  }
  const usable = models.filter((model) => supports(model, capability));
  byId("model").replaceChildren(...usable.map((model) => make("option", { value: model.id }, model.id)));
  byId("run").disabled = !usable.length;
  setText(byId("progress"), usable.length ? "" : `No served model has the capability ${capability}.`);
}

function addTasks() {
  for (const [name, [title]] of Object.entries(TASKS)) {
    const radio = make("input", { type: "radio", name: "task", value: name, id: `task-${name}` });
    radio.addEventListener("change", () => choose(name));
    byId("tasks").append(make("label", {}, radio, " ", title));
  }
}

async function begin() {
  addTasks();
  try {
    models = (await json("/v1/models")).data;
  } catch (error) {
    setText(byId("progress"), error.message);
  }
  const first = Object.keys(TASKS).find((name) => models.some((model) => supports(model, TASKS[name][1]))) ?? "chat";
  byId(`task-${first}`).checked = true;
  choose(first);
}

const number = (id) => byId(id).value === "" ? undefined : Number(byId(id).value);
const lines = () => byId("text").value.split("\n").map((line) => line.trim()).filter(Boolean);

function dataURL(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

const images = () => Promise.all([...byId("files").files].map(dataURL));

// ---- responses ------------------------------------------------------------------------------------------------------

async function chat(model, signal) {
  const parts = task === "vision" ? (await images()).map((url) => ({ type: "image_url", image_url: { url } })) : [];
  const content = parts.length ? [...parts, { type: "text", text: byId("text").value }] : byId("text").value;
  const thought = make("pre", { class: "thought" }), answer = make("pre");
  output.replaceChildren(thought, answer);
  let usage = null;
  const began = performance.now();
  for await (const chunk of events("/v1/chat/completions", {
    model, messages: [{ role: "user", content }], stream: true, stream_options: { include_usage: true },
    max_tokens: number("tokens"), temperature: number("temperature"), seed: number("seed"),
  }, signal)) {
    usage = chunk.usage ?? usage;
    for (const { delta } of chunk.choices) {
      if (delta.reasoning_content) thought.append(delta.reasoning_content);
      if (delta.content) answer.append(delta.content);
    }
  }
  const seconds = (performance.now() - began) / 1000;
  return usage ? `${usage.prompt_tokens} prompt tokens, ${usage.completion_tokens} completion tokens `
    + `in ${seconds.toFixed(2)} s` : "done";
}

// Bar chart of a vector: its first 256 numbers at most.
function bars(vector) {
  const shown = vector.slice(0, 256);
  const most = Math.max(...shown.map(Math.abs)) || 1;
  return makeSvg("svg", { viewBox: `0 -1 ${shown.length} 2`, preserveAspectRatio: "none", "aria-hidden": "true" },
    ...shown.map((value, at) => makeSvg("rect", { x: at, width: 0.9, y: value > 0 ? -value / most : 0,
      height: Math.abs(value) / most, class: value > 0 ? "plus" : "minus" })));
}

function cosine(one, other) {
  const dot = (left, right) => left.reduce((sum, value, at) => sum + value * right[at], 0);
  return dot(one, other) / (Math.sqrt(dot(one, one) * dot(other, other)) || 1);
}

function table(head, body) {
  return make("table", {}, make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...body.map((row) => make("tr", {}, ...row.map((part) => make("td", {}, part))))));
}

function vectors(names, found) {
  const rows = found.data.map((one) => one.embedding);
  output.replaceChildren(table(["Input", "Similarity to the first", "Vector"], rows.map((vector, at) =>
    [names[at], cosine(rows[0], vector).toFixed(3), bars(vector)])));
  return `${rows.length} vectors of ${rows[0].length} numbers`;
}

async function embed(model, signal) {
  const input = lines();
  return vectors(input, await json("/v1/embeddings", { model, input }, signal));
}

async function embedImage(model, signal) {
  const names = [...byId("files").files].map((file) => file.name);
  if (!names.length) throw new Error("Choose at least one image.");
  return vectors(names, await json("/api/mpool/embed_images", { model, images: await images() }, signal));
}

async function rerank(model, signal) {
  const documents = lines();
  const found = await json("/v1/rerank", { model, query: byId("query").value, documents }, signal);
  output.replaceChildren(table(["Document", "Score"], found.results.map((one) =>
    [documents[one.index], one.relevance_score.toFixed(4)])));
  return `${found.usage.total_tokens} tokens`;
}

async function image(model, signal) {
  const prompt = byId("text").value;
  const element = make("img", { alt: `Generated for: ${prompt}` });
  let shown = 0;
  for await (const chunk of events("/v1/images/generations", {
    model, prompt, stream: true, partial_images: 3, num_inference_steps: number("steps"), seed: number("seed"),
  }, signal)) {
    element.src = `data:image/${chunk.output_format};base64,${chunk.b64_json}`;
    if (!shown++) output.replaceChildren(element);
    setText(byId("progress"), `preview ${shown}`);
  }
  return `generated with ${Math.max(0, shown - 1)} previews`;
}

const RUN = { chat, vision: chat, embed, rerank, embed_image: embedImage, image };

async function run(event) {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  byId("stop").disabled = false;
  output.replaceChildren();
  output.setAttribute("aria-busy", "true");
  setText(byId("progress"), "running");
  let message;
  try {
    message = await RUN[task](byId("model").value, running.signal);
  } catch (error) {
    message = running.signal.aborted ? "stopped" : error.message;
  }
  output.removeAttribute("aria-busy");
  if (document.activeElement === byId("stop")) byId("run").focus();
  running = null;
  byId("stop").disabled = true;
  setText(byId("progress"), message);
}

byId("form").addEventListener("submit", run);
byId("stop").addEventListener("click", () => running && running.abort());
begin();
