// Colours of source text: one tokenizer, and a row of a table per language.

const LARGEST = 50_000; // characters; longer texts have no colours
const STRING = String.raw`"(?:[^"\\\n]|\\[^])*"?`, QUOTED = String.raw`'(?:[^'\\\n]|\\[^])*'?`;
const CHARACTER = String.raw`'(?:[^'\\\n]|\\[^\n]{1,9}?)'`; // a lone ' is an apostrophe or begins a lifetime
const SLASHES = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|(?![^]))`;
const HASH = String.raw`(?<!\S)#[^\n]*`;

const words = (text) => new Set(text.split(" "));
const LITERALS = words("true false null True False None undefined NaN nullptr nil NULL TRUE FALSE");
const C_WORDS = "if else for while do switch case default break continue return goto struct enum union class interface const "
  + "static extern void int char long short float double unsigned signed bool auto sizeof typedef namespace using template "
  + "typename public private protected virtual override new delete try catch throw throws finally final abstract extends "
  + "implements import package this super operator inline volatile constexpr string var";

// Every expression consumes what it tries, closed or not: the time is linear in the length of the text.
const FAMILIES = {
  python: { string: String.raw`(?<!\w)[rRbBfFuU]{0,2}(?:"""[^]*?(?:"""|(?![^]))|'''[^]*?(?:'''|(?![^]))|${STRING}|${QUOTED})`,
    comment: "#[^\\n]*", meta: String.raw`(?<=^[ \t]{0,99})@[\w.]+`,
    keywords: words("and as assert async await break class continue def del elif else except finally for from global if "
      + "import in is lambda match case nonlocal not or pass raise return try while with yield self") },
  json: { key: String.raw`"(?:[^"\\\n]|\\[^])*"(?=\s*:)`, string: STRING, comment: SLASHES, keywords: words("") },
  javascript: { string: String.raw`${STRING}|${QUOTED}|\x60(?:[^\x60\\]|\\[^])*\x60?`, comment: SLASHES, meta: String.raw`@\w+`,
    keywords: words("async await break case catch class const continue debugger default delete do else enum export extends "
      + "finally for from function get if implements import in instanceof interface let new of private protected public "
      + "readonly return set static super switch this throw try type typeof var void while with yield") },
  shell: { string: String.raw`"(?:[^"\\]|\\[^])*"?|'[^']*'?`, comment: HASH,
    meta: String.raw`\$\{[^}\n]*\}?|\$[\w@#?*!-]|(?<=\s)--?[A-Za-z][\w-]*`, keywords: words("case do done elif else esac export "
      + "fi for function if in local readonly return select source sudo then until while cd echo exit set") },
  c: { string: `${STRING}|${CHARACTER}`, comment: SLASHES, meta: String.raw`^[ \t]*#[ \t]*\w+|@\w+`, keywords: words(C_WORDS) },
  rust: { string: `${STRING}|${CHARACTER}`, comment: SLASHES, meta: String.raw`#!?\[[^\]\n]*\]?`, keywords: words("as async "
    + "await break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut pub ref return "
    + "self Self static struct super trait type unsafe use where while") },
  go: { string: String.raw`${STRING}|${CHARACTER}|\x60[^\x60]*\x60?`, comment: SLASHES, keywords: words("break case chan const "
    + "continue default defer else fallthrough for func go goto if import interface map package range return select struct "
    + "switch type var") },
  sql: { string: QUOTED, comment: String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|(?![^]))`, folded: true, keywords: words("select from "
    + "where and or not in is as join left right inner outer on group by order having limit offset insert into values update "
    + "set delete create table index view drop alter primary key references distinct union all case when then else end with "
    + "asc desc between like exists") },
  yaml: { key: String.raw`(?<=^[ \t-]{0,99})[\w.-]+(?=[ \t]*[:=])|^\[[^\]\n]*\]`, string: String.raw`(?<!\w)(?:${STRING}|'[^'\n]*')`,
    comment: HASH, keywords: words("") },
};
const NAMES = { py: "python", python3: "python", pycon: "python", jsonc: "json", json5: "json", jsonl: "json", js: "javascript",
  jsx: "javascript", mjs: "javascript", ts: "javascript", tsx: "javascript", typescript: "javascript", node: "javascript",
  sh: "shell", bash: "shell", zsh: "shell", console: "shell", shellsession: "shell", dockerfile: "shell", h: "c", "c++": "c",
  cpp: "c", cc: "c", hpp: "c", cuda: "c", java: "c", "c#": "c", csharp: "c", cs: "c", kotlin: "c", scala: "c", swift: "c",
  dart: "c", php: "c", rs: "rust", golang: "go", sqlite: "sql", postgresql: "sql", mysql: "sql", yml: "yaml", toml: "yaml",
  ini: "yaml" };
const own = (table, name) => (Object.hasOwn(table, name) ? table[name] : undefined);
const expressions = new Map();

function expressionOf(name, { key, string, comment, meta }) {
  if (!expressions.has(name)) {
    const parts = { key, comment, string, meta, number: String.raw`(?<![\w.])\d[\w.]*`, word: String.raw`[\p{L}_$][\p{L}\p{N}_$]*` };
    expressions.set(name, new RegExp(Object.entries(parts).filter(([, part]) => part)
      .map(([kind, part]) => `(?<${kind}>${part})`).join("|"), "gmu"));
  }
  return expressions.get(name);
}

// Split source text into [[kind, text]]. kind: comment, string, number, keyword, literal, call, key, meta, or "" for other
// text. The parts joined are the text. Returns one part if the language is unknown or the text is long.
export function highlight(text, language) {
  const lower = language.toLowerCase(), name = own(NAMES, lower) ?? lower, family = own(FAMILIES, name);
  if (!family || text.length > LARGEST) return [["", text]];
  const found = [];
  let seen = 0;
  for (const match of text.matchAll(expressionOf(name, family))) {
    const [kind, part] = Object.entries(match.groups).find(([, one]) => one !== undefined);
    const shown = kind !== "word" ? kind : family.keywords.has(family.folded ? part.toLowerCase() : part) ? "keyword"
      : LITERALS.has(part) ? "literal" : text[match.index + part.length] === "(" ? "call" : "";
    if (!shown || !part) continue;
    if (match.index > seen) found.push(["", text.slice(seen, match.index)]);
    found.push([shown, part]);
    seen = match.index + part.length;
  }
  if (seen < text.length) found.push(["", text.slice(seen)]);
  return found;
}
