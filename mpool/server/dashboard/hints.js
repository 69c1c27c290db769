// Terms with a hint: shown on hover, with the focus, and by a tap. Escape hides it.
import { byId, make, setText } from "./dom.js";

// Term -> its hint. The page names terms by data-term; scripts by term(). data-hint is the text of a hint.
const HINTS = {
  requests: "Requests that the pool completed or failed per second. One request can contain thousands of texts.",
  tokens: "Tokens per second: prompt and completion tokens of language models, and tokens of embedded texts. A token is"
    + " a word or a part of one.",
  latency: "Time from the arrival of a request in the pool to its end. p50: half of the requests were faster. p99: 99 of"
    + " 100 were faster.",
  memory: "Memory of models, caches and queues together. The pool unloads idle models before it exceeds the limit.",
  pressure: "How much of the memory limit is in use: low (below 50 %), normal (below 70 %), high (below 85 %) or critical."
    + " At critical, the pool frees caches and unloads idle models.",
  queue: "Requests that wait for a worker, and requests that workers compute now. If the queue of a model is full,"
    + " further requests wait for room in it.",
  threads: "Threads that compute; by default as many as the process has CPUs. All models share them.",
  first: "Time from a request to the first token of its completion: the median of the last 50 completions.",
  capability: "Of all models with this capability. Latency and first token are those of its slowest model.",
  needed: "Estimate for the model with one worker. \u201cUnloads others\u201d: more than is free now, but idle models"
    + " make room.",
  caches: "Weights, which are in memory once for all workers, and working memory of the workers, for example the KV"
    + " cache: what a language model keeps of a conversation. Snapshots: copies of the state of recurrent layers, from"
    + " which later prompts continue.",
  reused: "Tokens of prompts that were not computed, because an earlier prompt began with them.",
  idle: "Time since the last request, and the time after which the idle model is unloaded.",
  chunks: "Parts of a streamed response that were sent.",
  outcome: "completed; disconnected: the client closed the connection; cancelled: in this page or by the server;"
    + " failed: the response was not sent to its end; otherwise the code of the error.",
  prompt: "Tokens of the request.",
  completion: "Tokens that the model generated.",
  system: "Instructions that the model reads before the conversation, for example \u201cAnswer in one sentence.\u201d",
  maximum: "Maximum number of tokens in the answer, reasoning included.",
  temperature: "0: always the most likely token. Higher values give more varied answers.",
  seed: "The same seed, model and options give the same result again.",
  tools: "Functions that the model may call, as a JSON list in OpenAI's form: [{\"type\": \"function\", \"function\": {\"name\":"
    + " \"get_weather\", \"parameters\": {...}}}]. The page shows a call and sends the result that you write.",
  speed: "Tokens per second after the first one. Two models that answer at once share the compute threads.",
  first: "Time from the request to the first token: waiting, loading of the model, and processing of the prompt.",
  components: "The two directions in which the vectors differ most. Points that are close in the picture may differ in other"
    + " directions: the similarities are exact.",
  steps: "Denoising steps. More take longer and show more detail.",
  similarity: "Cosine of two vectors: 1 for the same direction, 0 for unrelated ones.",
  score: "Relevance of the document to the query. Compare only scores that the same model gave for the same query.",
};

export const term = (name, title) => make("button", { type: "button", class: "term", "data-term": name }, title);

let shown = null;

function show(element) {
  const hint = element.dataset.hint ?? HINTS[element.dataset.term], tip = byId("tip");
  if (!hint) return;
  hide();
  shown = element;
  setText(tip, hint);
  tip.hidden = false;
  element.setAttribute("aria-describedby", "tip");
  const at = element.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const room = document.documentElement.clientWidth;
  const below = at.bottom + 6 + size.height <= innerHeight || at.top < size.height + 6;
  tip.style.left = `${Math.max(8, Math.min(at.left, room - size.width - 8))}px`;
  tip.style.top = `${below ? at.bottom + 6 : at.top - size.height - 6}px`;
}

function hide() {
  shown?.removeAttribute("aria-describedby");
  shown = null;
  byId("tip").hidden = true;
}

const termOf = (event) => event.target instanceof Element ? event.target.closest("[data-term], [data-hint]") : null;

document.addEventListener("pointerover", (event) => {
  const found = termOf(event);
  if (found && event.pointerType === "mouse") show(found);
  else if (!found && event.pointerType === "mouse" && shown !== document.activeElement) hide();
});
document.addEventListener("focusin", (event) => termOf(event) ? show(termOf(event)) : hide());
document.addEventListener("click", (event) => termOf(event) ? show(termOf(event)) : hide());
document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
addEventListener("scroll", hide, { passive: true, capture: true });
