// A request of the playground as a curl command and as a Python program.
import { byId, copy, setText } from "./dom.js";
import { coloured } from "./markdown.js";

let needsToken = false;
export const setToken = (needed) => { needsToken = needed; };

// ---- curl -----------------------------------------------------------------------------------------------------------

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// The body comes on standard input: images are longer than the arguments of a command may be.
function asCurl({ path, body }) {
  const token = needsToken ? ' \\\n  -H "Authorization: Bearer $MPOOL_TOKEN"' : "";
  return `curl -sS${body.stream ? "N" : ""} ${quoted(location.origin + path)} \\\n  -H 'Content-Type: application/json'${token} \\\n`
    + `  --data-binary @- <<'END_OF_BODY'\n${JSON.stringify(body, null, 2)}\nEND_OF_BODY\n`;
}

// ---- Python ---------------------------------------------------------------------------------------------------------

// A JSON value as Python's literal. JSON's strings are valid in Python.
function literal(value, indent = "") {
  const inner = `${indent}    `;
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (typeof value !== "object") return JSON.stringify(value);
  const parts = Array.isArray(value) ? value.map((one) => literal(one, inner))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, inner)}`);
  const [begin, end] = Array.isArray(value) ? "[]" : "{}", line = `${begin}${parts.join(", ")}${end}`;
  return line.length + indent.length <= 100 && !line.includes("\n") ? line
    : `${begin}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${end}`;
}

// Fields that the method of OpenAI's client has; it sends the others as extra_body.
const METHODS = {
  "/v1/chat/completions": ["chat.completions.create",
    ["model", "messages", "max_tokens", "temperature", "seed", "tools", "stream", "stream_options"], `
for chunk in result:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()
`],
  "/v1/embeddings": ["embeddings.create", ["model", "input"], `
for item in result.data:
    print(item.index, len(item.embedding), item.embedding[:4])
`],
  "/v1/images/generations": ["images.generate", ["model", "prompt", "stream", "partial_images"], `
for event in result:
    if event.type == "image_generation.completed":
        with open("image.png", "wb") as file:
            file.write(base64.b64decode(event.b64_json))
        print("image.png")
`],
};
const READ = { "/v1/rerank": `
for item in result["results"]:
    print(item["index"], item["relevance_score"])
`, "/api/mpool/embed_images": `
for item in result["data"]:
    print(item["index"], len(item["embedding"]), item["embedding"][:4])
` };

function asPython({ path, body }) {
  const [method, own, read] = METHODS[path] ?? [null, [], READ[path]];
  const imports = [...(read.includes("base64.") ? ["base64"] : []), ...(needsToken ? ["os"] : [])];
  const fields = Object.entries(body), extra = fields.filter(([name]) => !own.includes(name));
  const given = fields.filter(([name]) => own.includes(name)).map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`);
  const call = method ? `client.${method}(\n${given.join("")}`
    + (extra.length ? `    extra_body=${literal(Object.fromEntries(extra), "    ")},\n` : "") + ")"
    : `client.post(\n    ${JSON.stringify(location.origin + path)},\n    body=${literal(body, "    ")},\n    cast_to=object,\n)`;
  return `# pip install openai\n${imports.map((name) => `import ${name}\n`).join("")}${imports.length ? "\n" : ""}`
    + `from openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(`${location.origin}/v1`)}, `
    + `api_key=${needsToken ? 'os.environ["MPOOL_TOKEN"]' : '"unused"'})\nresult = ${call}\n${read.slice(1)}`;
}

// ---- the dialog -----------------------------------------------------------------------------------------------------

const SHOWN = 20_000;
const LANGUAGES = { curl: ["curl", asCurl, "shell"], python: ["Python", asPython, "python"] };

// Copy a request {path, body}, and show what was copied.
export async function showSnippet(language, request) {
  const [title, write, colours] = LANGUAGES[language], code = write(request);
  setText(byId("snippet-title"), `The request in ${title}`);
  byId("snippet-text").replaceChildren(...coloured(code.slice(0, SHOWN), colours), ...(code.length > SHOWN ? ["\u2026"] : []));
  byId("snippet").showModal();
  let note = "Copied.";
  try {
    await copy(code);
  } catch (error) {
    note = error.message;
  }
  if (code.length > SHOWN) note += ` Only the first ${SHOWN.toLocaleString("en")} of ${code.length.toLocaleString("en")} characters are shown.`;
  if (needsToken) note += " Set MPOOL_TOKEN to the server's token.";
  setText(byId("snippet-note"), note);
}

byId("snippet-close").addEventListener("click", () => byId("snippet").close());
