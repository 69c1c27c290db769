// The playground's results: similarity of vectors, ranked documents, generated images.
import { byId, events, json, make, makeSvg, setText } from "./dom.js";
import { term } from "./hints.js";

const output = byId("output");

// Bar chart of a vector: its first 256 numbers at most.
function bars(vector) {
  const shown = vector.slice(0, 256);
  const most = Math.max(...shown.map(Math.abs)) || 1;
  return makeSvg("svg", { viewBox: `0 -1 ${shown.length} 2`, preserveAspectRatio: "none", class: "bars", "aria-hidden": "true" },
    ...shown.map((value, at) => makeSvg("rect", { x: at, width: 0.9, y: value > 0 ? -value / most : 0,
      height: Math.abs(value) / most, class: value > 0 ? "plus" : "minus" })));
}

function cosine(one, other) {
  const dot = (left, right) => left.reduce((sum, value, at) => sum + value * right[at], 0);
  return dot(one, other) / (Math.sqrt(dot(one, one) * dot(other, other)) || 1);
}

const MATRIX = 12; // inputs of which all pairs are shown

function matrix(rows) {
  const names = rows.map((_, at) => make("th", { scope: "col" }, String(at + 1)));
  return make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Similarity of all pairs" },
    make("table", { class: "matrix" }, make("thead", {}, make("tr", {}, make("td"), ...names)),
      make("tbody", {}, ...rows.map((row, at) => make("tr", {}, make("th", { scope: "row" }, String(at + 1)),
        ...rows.map((other) => {
          const value = cosine(row, other), cell = make("td", {}, make("span", {}, value.toFixed(2)));
          cell.style.setProperty("--heat", `${Math.round(100 * Math.max(0, value))}%`);
          return cell;
        }))))));
}

// Show vectors: a list of the inputs, and the similarity of all pairs. names: one text, or one element, per vector.
function vectors(names, found) {
  const rows = found.data.map((one) => one.embedding);
  output.replaceChildren(make("ol", { class: "inputs" }, ...rows.map((vector, at) =>
    make("li", {}, make("div", {}, names[at]), bars(vector)))),
  ...(rows.length > 1 && rows.length <= MATRIX ? [make("p", {}, term("similarity", "Similarity of all pairs")), matrix(rows)]
    : rows.length > MATRIX ? [make("p", {}, "Similarity to the first: ", rows.map((row) => cosine(rows[0], row).toFixed(2)).join(", "))]
      : []));
  return `${rows.length} vector${rows.length === 1 ? "" : "s"} of ${rows[0].length} numbers`;
}

const lines = () => byId("text").value.split("\n").map((line) => line.trim()).filter(Boolean);
const needLines = (name) => {
  if (!lines().length) throw new Error(`Write at least one ${name}.`);
};

// Task -> request(options): {path, body}, and run(request, options, signal): shows the result, returns a summary.
// options: model, images [{name, url}], number(id).
export const TASKS = {
  embed: {
    request: ({ model }) => ({ path: "/v1/embeddings", body: { model, input: lines() } }),
    run: async ({ path, body }, options, signal) => {
      needLines("text");
      return vectors(body.input, await json(path, body, signal));
    },
  },
  rerank: {
    request: ({ model }) => ({ path: "/v1/rerank", body: { model, query: byId("query").value, documents: lines() } }),
    run: async ({ path, body }, options, signal) => {
      needLines("document");
      const found = await json(path, body, signal);
      output.replaceChildren(make("p", {}, "Best first, with the ", term("score", "score")),
        make("ol", { class: "ranking" }, ...found.results.map((one) => make("li", {},
          make("span", {}, body.documents[one.index]), " ", make("strong", {}, one.relevance_score.toFixed(4))))));
      return `${found.usage.total_tokens} tokens`;
    },
  },
  embed_image: {
    request: ({ model, images }) => ({ path: "/api/mpool/embed_images",
      body: { model, images: images.map((image) => image.url) } }),
    run: async ({ path, body }, { images }, signal) => {
      if (!images.length) throw new Error("Choose at least one image.");
      return vectors(images.map(({ name, url }) => make("figure", { class: "thumb" }, make("img", { src: url, alt: "" }),
        make("figcaption", {}, name))), await json(path, body, signal));
    },
  },
  image: {
    request: ({ model, number }) => ({ path: "/v1/images/generations", body: { model, prompt: byId("text").value,
      num_inference_steps: number("steps"), seed: number("seed"), stream: true, partial_images: 3 } }),
    run: async ({ path, body }, options, signal) => {
      if (!body.prompt.trim()) throw new Error("Write a prompt.");
      const element = make("img", { alt: `Generated for: ${body.prompt}`, class: "generated" });
      let shown = 0;
      for await (const chunk of events(path, body, signal)) {
        element.src = `data:image/${chunk.output_format};base64,${chunk.b64_json}`;
        if (!shown++) output.replaceChildren(element);
        setText(byId("progress"), `preview ${shown}`);
      }
      return `generated with ${Math.max(0, shown - 1)} previews`;
    },
  },
};
