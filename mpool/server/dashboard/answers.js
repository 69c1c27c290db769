// One answer of a model: reasoning, Markdown, tool calls, speed; drawn while it arrives.
import { button, copyButton, events, make, paced, setText } from "./dom.js";
import { term } from "./hints.js";
import { codeBlock, render } from "./markdown.js";

const NAME = 200; // characters of a tool's name that are shown

// A tool call: folded, with the arguments and a field for the result, which the next request sends.
function callOf(index, id) {
  const name = make("code"), line = make("span", { class: "soft line" }), given = make("div");
  const result = make("textarea", { rows: 2,
    placeholder: "What the function returns. It is sent with the next message." });
  const element = make("details", { class: "fold call" },
    make("summary", {}, make("span", {}, "Calls ", name), " ", line), given,
    make("label", {}, "Result", result));
  const call = { index, id, name: "", arguments: "", result, element };
  call.draw = () => {
    setText(name, call.name.slice(0, NAME));
    setText(line, call.arguments.slice(0, NAME));
    let text = call.arguments;
    try {
      text = JSON.stringify(JSON.parse(text), null, 2);
    } catch { /* not complete yet */ }
    if (call.shown === text) return;
    call.shown = text;
    given.replaceChildren(codeBlock(text, "json"));
  };
  return call;
}

// An answer that is still empty. follow(change) calls change(), which makes the answer longer. again(): asks once more.
export function answerOf(model, follow, again) {
  const text = make("div", { class: "markdown" }), thought = make("pre"), calls = make("div", { class: "calls" });
  const title = make("summary", {}, "Reasoning");
  const thinking = make("details", { class: "fold thought", hidden: "" }, title, thought);
  const answer = { model, content: "", reasoning: "", calls: [] };
  answer.error = make("p", { class: "bad", role: "alert", hidden: "" });
  answer.facts = make("p", { class: "speeds" });
  answer.title = title;
  answer.tools = make("span", { class: "turn-tools", hidden: "" },
    copyButton("Copy", () => answer.content, { class: "small" }), " ",
    button("Try again", again, { class: "small again" }));
  answer.element = make("article", { class: "turn assistant", "aria-label": `Answer of ${model}` },
    make("h3", { class: "model-name" }, model), thinking, text, calls, answer.error,
    make("footer", {}, answer.facts, answer.tools));
  let shownThought = 0;
  answer.draw = paced(() => follow(() => {
    if (answer.reasoning.length > shownThought) {
      thinking.hidden = false;
      thought.append(answer.reasoning.slice(shownThought));
      shownThought = answer.reasoning.length;
    }
    render(text, answer.content);
    for (const call of answer.calls) {
      call.draw();
      if (!call.element.isConnected) calls.append(call.element);
    }
  }));
  return answer;
}

function take(answer, delta) {
  if (delta.reasoning_content) answer.reasoning += delta.reasoning_content;
  if (delta.content) answer.content += delta.content;
  for (const { index, id, function: given } of delta.tool_calls ?? []) {
    let call = answer.calls.find((one) => one.index === index);
    if (!call) answer.calls.push(call = callOf(index, id));
    call.name += given?.name ?? "";
    call.arguments += given?.arguments ?? "";
  }
  return Boolean(delta.reasoning_content || delta.content || delta.tool_calls?.length);
}

const fact = (value, unit) => make("span", {}, make("strong", {}, value), ` ${unit}`);
const milliseconds = (time) => (time < 1000 ? fact(time.toFixed(0), "ms") : fact((time / 1000).toFixed(2), "s"));

// Tokens per second after the first token, the time of the first token, counts, the time of all.
function speeds(usage, first, time, finish) {
  const decoded = !usage?.completion_tokens || first === null ? null
    : 1000 * (usage.completion_tokens > 1 && time - first > 1
    ? (usage.completion_tokens - 1) / (time - first) : usage.completion_tokens / time);
  return [
    ...(decoded === null ? [] : [make("span", {}, make("strong", {}, decoded.toFixed(decoded < 10 ? 1 : 0)), " ",
      term("speed", "tokens/s"))]),
    ...(first === null ? [] : [make("span", {}, term("first", "first token"), " ", milliseconds(first))]),
    ...(usage ? [fact(usage.completion_tokens, "completion tokens"), fact(usage.prompt_tokens, "prompt tokens")] : []),
    milliseconds(time),
    ...(finish === "length" ? [make("span", { class: "warn" }, "stopped at the maximum of tokens")] : [])];
}

// Send a request and show its answer while it arrives. Throws what failed, unless the signal stopped it.
export async function stream(answer, { path, body }, signal) {
  const began = performance.now(), since = () => performance.now() - began;
  let usage = null, first = null, finish = null, thought = null;
  answer.element.setAttribute("aria-busy", "true");
  try {
    for await (const chunk of events(path, body, signal)) {
      usage = chunk.usage ?? usage;
      for (const { delta, finish_reason: reason } of chunk.choices) {
        finish = reason ?? finish;
        if (!take(answer, delta)) continue;
        first ??= since();
        if (answer.reasoning) setText(answer.title, answer.content || answer.calls.length
          ? `Reasoned for ${((thought ??= since()) / 1000).toFixed(1)} s` : "Reasoning\u2026");
        answer.draw.soon();
      }
    }
  } catch (error) {
    if (!signal.aborted) {
      setText(answer.error, error.message);
      answer.error.hidden = false;
      throw error;
    }
  } finally {
    answer.draw.now();
    answer.element.removeAttribute("aria-busy");
    answer.tools.hidden = false;
    answer.facts.replaceChildren(...speeds(usage, first, since(), finish));
  }
}
