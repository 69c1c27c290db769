// node search_site.js SITE QUESTION...: prints the documents that the site's own search finds for each question, best
// first, as one JSON list per question. Runs the scripts of Sphinx that the built site has, without a page.
"use strict";

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...questions] = process.argv.slice(2);
const context = vm.createContext({
  document: { getElementById: () => null, documentElement: { dataset: {} }, addEventListener: () => {}, readyState: "loading" },
  localStorage: { setItem: () => {} },
  console,
});
context.window = context;
const read = name => fs.readFileSync(path.join(site, name), "utf8");
const scripts = ["base-stemmer.js", "english-stemmer.js", "language_data.js"].map(name => `_static/${name}`)
  .filter(name => fs.existsSync(path.join(site, name)));
const text = [...scripts, "_static/searchtools.js", "searchindex.js"].map(read).join("\n");
const code = `const SPHINX_HIGHLIGHT_ENABLED = false; const _ready = () => {}, _ = text => text;\n${text}
questions => questions.map(question => Search._performSearch(...Search._parseQuery(question)).reverse().map(one => one[0]))`;
for (const found of vm.runInContext(code, context)(questions)) console.log(JSON.stringify([...new Set(found)]));
