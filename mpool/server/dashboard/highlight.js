// Colours of source text: one tokenizer, and a row of a table per language.

const LARGEST = 50_000; // characters; longer texts have no colours
const STRING = String.raw`"(?:[^"\\\n]|\\[^])*"?`, QUOTED = String.raw`'(?:[^'\\\n]|\\[^])*'?`;
const CHARACTER = String.raw`'(?:[^'\\\n]|\\[^\n]{1,9}?)'`; // a lone ' is an apostrophe or begins a lifetime
const TRIPLE = ['"""', "'''"].map((mark) => `${mark}[^]*?(?:${mark}|(?![^]))`).join("|");
const SLASHES = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|(?![^]))`;
const HASH = String.raw`(?<!\S)#[^\n]*`;

const words = (text) => new Set(text.split(" "));
const LITERALS = words("true false null True False None undefined NaN nullptr nil NULL TRUE FALSE");

// Every expression consumes what it tries, closed or not: the time is linear in the length of the text.
const FAMILIES = {
  python: {
    names: "py python3 pycon", comment: "#[^\\n]*", meta: String.raw`(?<=^[ \t]{0,99})@[\w.]+`,
    string: String.raw`(?<!\w)[rRbBfFuU]{0,2}(?:${TRIPLE}|${STRING}|${QUOTED})`,
    keywords: words("and as assert async await break class continue def del elif else except finally for from global "
      + "if import in is lambda match case nonlocal not or pass raise return self try while with yield"),
  },
  json: {
    names: "jsonc json5 jsonl", comment: SLASHES,
    key: String.raw`"(?:[^"\\\n]|\\[^])*"(?=\s*:)`, string: STRING,
  },
  javascript: {
    names: "js jsx mjs node ts tsx typescript", comment: SLASHES, meta: String.raw`@\w+`,
    string: String.raw`${STRING}|${QUOTED}|\x60(?:[^\x60\\]|\\[^])*\x60?`,
    keywords: words("async await break case catch class const continue debugger default delete do else enum export "
      + "extends finally for from function get if implements import in instanceof interface let new of "
      + "private protected public readonly return set static super switch this throw try type typeof var void "
      + "while with yield"),
  },
  shell: {
    names: "sh bash zsh console shellsession dockerfile", comment: HASH,
    string: String.raw`"(?:[^"\\]|\\[^])*"?|'[^']*'?`,
    meta: String.raw`\$\{[^}\n]*\}?|\$[\w@#?*!-]|(?<=\s)--?[A-Za-z][\w-]*`,
    keywords: words("case do done elif else esac export fi for function if in local readonly return select source sudo "
      + "then until while cd echo exit set"),
  },
  c: {
    names: "h c++ cpp cc hpp cuda java c# csharp cs kotlin scala swift dart php", comment: SLASHES,
    string: `${STRING}|${CHARACTER}`, meta: String.raw`^[ \t]*#[ \t]*\w+|@\w+`,
    keywords: words("if else for while do switch case default break continue return goto struct enum union class "
      + "interface const static extern void int char long short float double unsigned signed bool auto sizeof "
      + "typedef namespace using template typename public private protected virtual override new delete try "
      + "catch throw throws final finally abstract extends implements import package this super operator "
      + "inline volatile constexpr string var"),
  },
  rust: {
    names: "rs", comment: SLASHES, string: `${STRING}|${CHARACTER}`, meta: String.raw`#!?\[[^\]\n]*\]?`,
    keywords: words("as async await break const continue crate dyn else enum extern fn for if impl in let loop match "
      + "mod move mut pub ref return self Self static struct super trait type unsafe use where while"),
  },
  go: {
    names: "golang", comment: SLASHES, string: String.raw`${STRING}|${CHARACTER}|\x60[^\x60]*\x60?`,
    keywords: words("break case chan const continue default defer else fallthrough for func go goto if import "
      + "interface map package range return select struct switch type var"),
  },
  sql: {
    names: "sqlite postgresql mysql", comment: String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|(?![^]))`, string: QUOTED,
    anyCase: true,
    keywords: words("select from where and or not in is as join left right inner outer on group by order having limit "
      + "offset insert into values update set delete create table index view drop alter primary key "
      + "references distinct union all case when then else end with asc desc between like exists"),
  },
  yaml: {
    names: "yml toml ini", comment: HASH, key: String.raw`(?<=^[ \t-]{0,99})[\w.-]+(?=[ \t]*[:=])|^\[[^\]\n]*\]`,
    string: String.raw`(?<!\w)(?:${STRING}|'[^'\n]*')`,
  },
};
const NAMES = new Map(Object.entries(FAMILIES).flatMap(([name, { names }]) =>
  [name, ...names.split(" ")].map((one) => [one, name])));
const expressions = new Map();

function expressionOf(name, { key, string, comment, meta }) {
  if (!expressions.has(name)) {
    const parts = { key, comment, string, meta, number: String.raw`(?<![\w.])\d[\w.]*`,
      word: String.raw`[\p{L}_$][\p{L}\p{N}_$]*` };
    expressions.set(name, new RegExp(Object.entries(parts).filter(([, part]) => part)
      .map(([kind, part]) => `(?<${kind}>${part})`).join("|"), "gmu"));
  }
  return expressions.get(name);
}

// Split source text into [[kind, text]]. kind: comment, string, number, keyword, literal, call, key, meta, or "" for
// other text. The parts joined are the text. Returns one part if the language is unknown or the text is long.
export function highlight(text, language) {
  const name = NAMES.get(language.toLowerCase());
  if (!name || text.length > LARGEST) return [["", text]];
  const { keywords, anyCase } = FAMILIES[name], found = [];
  let seen = 0;
  for (const match of text.matchAll(expressionOf(name, FAMILIES[name]))) {
    const [kind, part] = Object.entries(match.groups).find(([, one]) => one !== undefined);
    const shown = kind !== "word" ? kind : keywords?.has(anyCase ? part.toLowerCase() : part) ? "keyword"
      : LITERALS.has(part) ? "literal" : text[match.index + part.length] === "(" ? "call" : "";
    if (!shown || !part) continue;
    if (match.index > seen) found.push(["", text.slice(seen, match.index)]);
    found.push([shown, part]);
    seen = match.index + part.length;
  }
  if (seen < text.length) found.push(["", text.slice(seen)]);
  return found;
}
