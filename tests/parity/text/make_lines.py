"""Lines of text for comparing tokenizers: many scripts, code, emoji, odd white space, numbers, noise.

The lines are the same with every version of Python: they are composed from the small corpora below by a generator in
this file. Python's ``random`` and ``unicodedata`` may change their results with their versions.
"""

SEED = 20240229

SENTENCES = """
The quick brown fox jumps over the lazy dog, doesn't it? I'd say it's what they've always done; we'll see.
He said "I'M SURE YOU'RE RIGHT" and left at 10:45 p.m., without his friend's umbrella (the red one).
Falsches Üben von Xylophonmusik quält jeden größeren Zwerg. Straße, STRASSE, weiß, Öl, ärgern, süß.
Voix ambiguë d'un cœur qui, au zéphyr, préfère les jattes de kiwis. L'été, c'était déjà Noël à l'œuvre, naïve Zoë!
El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío; añoraba a su querido cachorro. ¿Qué? ¡Olé!
Luís argüia à Júlia que «brações, fé, chá, óxido, pôr, zângão» eram palavras do português.
Quel vituperabile xenofobo zelante assaggia il whisky ed esclama: alleluja! Perché no? Città, più, così.
Pchnąć w tę łódź jeża lub ośm skrzyń fig. Zażółć gęślą jaźń, źdźbło, ćma, ściana.
Příliš žluťoučký kůň úpěl ďábelské ódy. Nechť již hříšné saxofony ďáblů rozezvučí síň.
Árvíztűrő tükörfúrógép. Jó foxim és don Quijote húszwattos lámpánál ülve egy pár bűvös cipőt készít.
Pijamalı hasta yağız şoföre çabucak güvendi. İstanbul'da ılık bir ığdır, ĞÜŞİÖÇ.
Flygande bäckasiner söka hwila på mjuka tuvor. Høj bly gom vandt fræk sexquiz på wc. Ærø, ångström.
Törkylempijävongahdus. Wieniläinen sioux'ta puhuva ökyzombi diggaa Åsan roquefort-tacoja.
Kæmi ný öxi hér, ykist þjófum nú bæði víl og ádrepa. Ísland er fagurt og frítt, fannhvítir jöklanna tindar.
Do bhfuil ár gcroíthe. D'fhuascail Íosa Úrmhac na hÓighe Beannaithe pór Éava agus Ádhaimh.
Tôi có thể ăn thủy tinh mà không hại gì. Việt Nam, nước tôi, Hà Nội mùa này vắng những cơn mưa.
Saya bisa makan kaca dan itu tidak menyakiti saya. Anak-anak bermain layang-layang di lapangan.
Ninaweza kula kioo na hakiniumizi. Habari za asubuhi, rafiki yangu? Karibu sana nyumbani kwetu.
Съешь же ещё этих мягких французских булок, да выпей чаю. ПРИВЕТ, Мир! Ёлка, объём, цифра.
Щастям б'єш жук їх глицю в фон й ґедзь пріч. Київ, Україна, її, ґанок, Європа.
Ах чудна българска земьо, полюшвай цъфтящи жита. Љубазни фењерџија чађавог лица хоће да ми покаже штос.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Ὦ ξεῖν', ἀγγέλλειν Λακεδαιμονίοις ὅτι τῇδε κείμεθα. Τί κάνεις;
דג סקרן שט בים מאוכזב ולפתע מצא לו חברה איך הקליטה. בְּרֵאשִׁית בָּרָא אֱלֹהִים, שלום עולם!
نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ومغلف بجلد أزرق. السَّلَامُ عَلَيْكُمْ، كيف حالك؟ ١٢٣٤٥
صِف خَلقَ خَودِ كَمِثلِ الشَمسِ إِذ بَزَغَت. من می‌توانم بدون احساس درد شيشه بخورم؛ سلام دنیا ۱۲۳۴
میں کانچ کھا سکتا ہوں اور مجھے تکلیف نہیں ہوتی۔ اردو زبان بہت خوبصورت ہے، کیا حال ہے؟
ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश करने वाले विष्णु। नमस्ते दुनिया, १२३४५ क्षत्रिय ज़मीन।
मी काच खाऊ शकतो, मला ते दुखत नाही. आमच्या घरी सर्वजण आनंदात आहेत, तुम्ही कसे आहात?
আমি কাঁচ খেতে পারি, তাতে আমার কোনো ক্ষতি হয় না। বাংলা ভাষা, ১২৩৪, র‍্যাব, কিংবদন্তি, শ্রীযুক্ত।
ਮੈਂ ਗਲਾਸ ਖਾ ਸਕਦਾ ਹਾਂ ਅਤੇ ਇਸ ਨਾਲ ਮੈਨੂੰ ਕੋਈ ਤਕਲੀਫ ਨਹੀਂ। ਸਤ ਸ੍ਰੀ ਅਕਾਲ।
હું કાચ ખાઇ શકુ છુ અને તેનાથી મને દર્દ નથી થતુ. કેમ છો? ગુજરાતી ભાષા.
நான் கண்ணாடி சாப்பிடுவேன், அதனால் எனக்கு ஒரு கேடும் வராது. தமிழ் மொழி ஸ்ரீ க்ஷ வணக்கம்.
నేను గాజు తినగలను మరియు అలా చేసినా నాకు ఏమి ఇబ్బంది లేదు. తెలుగు భాష, నమస్కారం.
ನಾನು ಗಾಜನ್ನು ತಿನ್ನಬಲ್ಲೆ ಮತ್ತು ಅದರಿಂದ ನನಗೆ ನೋವಾಗುವುದಿಲ್ಲ. ಕನ್ನಡ ನಾಡು.
എനിക്ക് ഗ്ലാസ് തിന്നാം, അതെന്നെ വേദനിപ്പിക്കില്ല. മലയാളം അക്ഷരമാല, നന്ദി.
මට වීදුරු කෑමට හැකියි, එයින් මට කිසි හානියක් සිදු නොවේ. සිංහල ශ්‍රී ලංකාව.
ฉันกินกระจกได้ แต่มันไม่ทำให้ฉันเจ็บ นายสังฆภัณฑ์ เฮงพิทักษ์ฝั่ง ผู้เฒ่าซึ่งมีอาชีพเป็นฅนขายฃวด ๑๒๓
ຂອ້ຍກິນແກ້ວໄດ້ໂດຍທີ່ມັນບໍ່ໄດ້ເຮັດໃຫ້ຂອ້ຍເຈັບ ສະບາຍດີ
က္ယ္ဝန္တော်၊ က္ယ္ဝန္မ မ္ယက္စားနုိင္သည်။ မင်္ဂလာပါ၊ နေကောင်းလား။ ၁၂၃
ខ្ញុំអាចញុំកញ្ចក់បាន ដោយគ្មានបញ្ហា។ សួស្តីពិភពលោក ១២៣៤
ཤེལ་སྒོ་ཟ་ནས་ང་ན་གི་མ་རེད། བཀྲ་ཤིས་བདེ་ལེགས།
Би шил идэй чадна, надад хортой биш. ᠪᠢ ᠰᠢᠯᠢ ᠢᠳᠡᠶᠦ ᠴᠢᠳᠠᠨᠠ ᠂ Сайн байна уу?
მინას ვჭამ და არა მტკივა. გამარჯობა მსოფლიო, ქართული ანბანი, ᲡᲐᲥᲐᲠᲗᲕᲔᲚᲝ.
Կրնամ ապակի ուտել և ինծի անհանգիստ չըներ։ Բարև աշխարհ, ԵՐԵՎԱՆ։
ጽሑፍ ሁሉ ሰው ሁሉ በነጻነት ተወልዷል። ሰላም ለዓለም፣ አማርኛ ቋንቋ ፩፪፫
我能吞下玻璃而不伤身体。天地玄黄，宇宙洪荒。你好，世界！今天是2024年2月29日，气温为零下3.5℃。
視野無限廣，窗外有藍天。我能吞下玻璃而不傷身體，繁體中文「測試」（例子）：很好；謝謝……
いろはにほへと　ちりぬるを。私はガラスを食べられます。それは私を傷つけません。カタカナ・ひらがな、漢字かな交じり文ー！
ｶﾞﾗｽ ﾃｽﾄ ＡＢＣ　１２３　半角ｶﾅと全角英数。㈱㍿㎏①②③ⅣⅨ々〆〇
키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. 안녕하세요, 세상! 나는 유리를 먹을 수 있어요.
ᄒᆞᆫ글 한국어 ㄱㄴㄷ ㅏㅑㅓ ᄀᆞᆨ 가각
ᐊᓕᒍᖅ ᓂᕆᔭᕌᖓᒃᑯ ᓱᕋᙱᑦᑐᓐᓇᖅᑐᖓ. ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ ꭰꭱꭲ. ⵜⴰⵎⴰⵣⵉⵖⵜ ⵣ.
𝔗𝔥𝔢 𝕢𝕦𝕚𝕔𝕜 𝒷𝓇ℴ𝓌𝓃 𝖿𝗈𝗑 ℝ ∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α∧¬β, ∑ᵢ₌₁ⁿ i² ≤ ∞ ½ ⅓ ²³
ᚠᛇᚻ᛫ᛒᛦᚦ᛫ᚠᚱᚩᚠᚢᚱ 𐌼𐌰𐌲 𐌲𐌻𐌴𐍃 𐎀𐎁𐎂 𓀀𓀁 𒀀𒀁 𐤀𐤁 ⠎⠁⠽ ⲁⲃⲅ
""".strip().split("\n")

CODE = [
    'def fib(n: int) -> int:\n    """Returns the n-th number."""\n    a, b = 0, 1\n'
    '    for _ in range(n):\n        a, b = b, a + b\n    return a\n',
    "if __name__ == '__main__':\n\tprint(f'{x!r:>10}', end='\\n')\n\t# TODO: don't",
    '#include <stdio.h>\nint main(void) {\n    for (size_t i = 0; i < 10; ++i) { printf("%zu\\n", i); }\n'
    '    return 0x1F;\n}\n',
    "static inline uint32_t rotl(uint32_t x, int k) { return (x << k) | (x >> (32 - k)); }",
    "fn main() {\n    let v: Vec<&'static str> = vec![\"a\", \"b\"];\n"
    "    println!(\"{:?}\", v.iter().map(|s| s.len()).sum::<usize>());\n}",
    "const f = async ({ a, b = 1, ...rest }) => { await fetch(`https://example.org/?q=${encodeURIComponent(a)}`); };",
    "SELECT u.id, COUNT(*) AS n FROM users u LEFT JOIN orders o ON o.user_id = u.id "
    "WHERE u.name LIKE '%x_%' GROUP BY 1;",
    "<!DOCTYPE html>\n<html lang=\"en\">\n  <body class='a b'>&amp; &lt;p&gt; <!-- note --></body>\n</html>",
    '{"name": "x", "values": [1, 2.5e-10, -3, true, null], "nested": {"a": "\\u00e9\\n"}}',
    "for f in *.txt; do sed -E 's/([0-9]+)/<\\1>/g' \"$f\" | sort -u > \"${f%.txt}.out\" 2>&1 || exit $?; done",
    "\\begin{equation} \\int_{-\\infty}^{\\infty} e^{-x^2} \\, dx = \\sqrt{\\pi} \\end{equation}",
    "class Foo<T extends Comparable<T>> implements Bar { @Override public String toString() { return \"Foo@\" + 1; } }",
    "func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { defer mu.Unlock(); ch <- 1 }",
    "main :: IO ()\nmain = mapM_ (putStrLn . show) $ filter even [1..10] >>= \\x -> [x, x*2]",
    "diff --git a/x.c b/x.c\nindex 83db48f..bf3a1c2 100644\n--- a/x.c\n+++ b/x.c\n@@ -1,3 +1,4 @@\n-old\n+new",
    "0xDEADBEEF 0b1010 1_000_000 3.14159e+00 1e-7f 0o777 'c' L\"wide\" R\"(raw)\" a->b::c !== === <=> ?? ?. ... ..=",
]

EMOJI = ["😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇯🇵", "❤️", "☃", "1️⃣", "🤷🏻‍♀️", "🧑🏿‍🚀", "©️", "™", "🫠", "🎉🎊", "⌚️", "🈚",
         "🕴🏼"]

WORDS = ("a I the and hello world isn't we'll they've I'M YOU'RE o'clock 'tis 's 'S 'll x's HTTPServer camelCase "
         "snake_case kebab-case naïve café ÀÉÎÕÜ ﬁne ﬂow ﬀ ǅ ß ẞ İ ı ſ 'ſ Ω Å K µ º ª Mc'Donald e.g. i.e. U.S.A. "
         "it'snot we'llgo 'Sbad THEY'REall don'tgo <sentinel:42> IMGIMGABCZ "
         "#tag @user $5.00 €10 50% "
         "&amp; https://a.b/c?d=e&f#g a@b.co --flag -x --- ... … *** ___ /* */ // <!-- --> [CLS] [MASK] <s> </s> <pad> "
         "<|endoftext|> <|im_start|> <|im_end|> <unk> <0x0A> ▁ ▁▁x Ġ ĊĊ ## ##ing").split(" ")

SPACES = [" ", "  ", "   ", "    ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "\n\t", " \t ", "\u00a0",
          "\u3000", "\u2003", "\u2009\u200a", "\u2028", "\u2029", "\u0085", "\u000b", "\u000c", "\u1680", "\u202f",
          "\u205f",
          "\u200b", "\ufeff", "\u00ad", "\u200d", "\u2060", " " * 7, " " * 31, "\n" * 5, "\t" * 9, "\x1c", "\x1f"]

#: First and last code point of each sampled range; all were assigned long before Unicode 14.
SCRIPTS = [
    (0x21, 0x7E), (0xA1, 0xFF), (0x100, 0x17F), (0x180, 0x24F), (0x250, 0x2AF), (0x2B0, 0x2FF), (0x300, 0x36F),
    (0x391, 0x3A1), (0x3A3, 0x3CE), (0x400, 0x45F), (0x48A, 0x52F), (0x531, 0x556), (0x561, 0x586), (0x591, 0x5C7),
    (0x5D0, 0x5EA), (0x620, 0x64A), (0x64B, 0x669), (0x671, 0x6D3), (0x6F0, 0x6F9), (0x710, 0x72F), (0x780, 0x7A5),
    (0x7C0, 0x7EA), (0x905, 0x939), (0x93C, 0x94D), (0x966, 0x96F), (0x985, 0x98C), (0x9E6, 0x9EF), (0xA05, 0xA0A),
    (0xA85, 0xA8D), (0xB05, 0xB0C), (0xB92, 0xB95), (0xBE6, 0xBF2), (0xC05, 0xC0C), (0xC85, 0xC8C), (0xD05, 0xD0C),
    (0xD85, 0xD96), (0xE01, 0xE3A), (0xE40, 0xE5B), (0xE94, 0xE97), (0xF20, 0xF33), (0xF40, 0xF47), (0x1000, 0x1049),
    (0x10A0, 0x10C5), (0x10D0, 0x10F0), (0x1100, 0x1159), (0x1161, 0x11A2), (0x11A8, 0x11F9), (0x1200, 0x1248),
    (0x1369, 0x137C), (0x13A0, 0x13F4), (0x1401, 0x1676), (0x16A0, 0x16EA), (0x1780, 0x17B3), (0x17E0, 0x17E9),
    (0x1810, 0x1819), (0x1820, 0x1877), (0x1900, 0x191C), (0x1980, 0x19A9), (0x1C90, 0x1CBA), (0x1D00, 0x1DBF),
    (0x1E00, 0x1EFF), (0x1F00, 0x1F15), (0x2010, 0x2027), (0x2030, 0x205E), (0x2070, 0x2071), (0x2074, 0x208E),
    (0x20A0, 0x20BF), (0x20D0, 0x20E3), (0x2100, 0x214F), (0x2150, 0x2189), (0x2190, 0x21FF), (0x2200, 0x22FF),
    (0x2300, 0x23FF), (0x2460, 0x24FF), (0x2500, 0x25FF), (0x2600, 0x26FF), (0x2701, 0x27BF), (0x27C0, 0x27FF),
    (0x2800, 0x28FF), (0x2900, 0x2AFF), (0x2C00, 0x2C2E), (0x2C80, 0x2CF1), (0x2D00, 0x2D25), (0x2D30, 0x2D67),
    (0x2E00, 0x2E4F), (0x2E80, 0x2E99), (0x2F00, 0x2FD5), (0x3001, 0x303F), (0x3041, 0x3096), (0x309B, 0x30FF),
    (0x3105, 0x312E), (0x3131, 0x318E), (0x3200, 0x321E), (0x3220, 0x32FE), (0x3300, 0x33FF), (0x3400, 0x4DB5),
    (0x4E00, 0x9FA5), (0xA000, 0xA48C), (0xA500, 0xA62B), (0xA640, 0xA66E), (0xA722, 0xA787), (0xA8E0, 0xA8F1),
    (0xAA80, 0xAAC2), (0xAB70, 0xABBF), (0xABC0, 0xABED), (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xF900, 0xFA6D),
    (0xFB00, 0xFB06), (0xFB1D, 0xFB36), (0xFB50, 0xFBB1), (0xFE20, 0xFE2F), (0xFE30, 0xFE52), (0xFE70, 0xFE74),
    (0xFF01, 0xFFBE), (0xFFE0, 0xFFE6), (0x10000, 0x1000B), (0x10280, 0x1029C), (0x10400, 0x1049D), (0x104A0, 0x104A9),
    (0x10900, 0x1091B), (0x11005, 0x11037), (0x12000, 0x12398), (0x13000, 0x1342E), (0x16A40, 0x16A5E),
    (0x1D100, 0x1D126), (0x1D165, 0x1D169), (0x1D400, 0x1D454), (0x1D7CE, 0x1D7FF), (0x1E900, 0x1E943),
    (0x1F100, 0x1F10C),
    (0x1F300, 0x1F320), (0x1F330, 0x1F37D), (0x1F400, 0x1F4FD), (0x1F600, 0x1F64F), (0x1F680, 0x1F6C5),
    (0x1F910, 0x1F93A),
    (0x20000, 0x2A6D6), (0x2F800, 0x2FA1D), (0xE0020, 0xE007F), (0xE0100, 0xE01EF), (0xF0000, 0xF00FF),
]


class Generator:
    """SplitMix64, a small generator whose numbers never change."""

    def __init__(self, seed: int) -> None:
        self._state = seed & 0xFFFFFFFFFFFFFFFF

    def below(self, limit: int) -> int:
        """Return a number from 0 to ``limit - 1``."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        return (z ^ (z >> 31)) % limit

    def pick(self, choices):
        """Return one of ``choices``."""
        return choices[self.below(len(choices))]


def _number(chance: Generator) -> str:
    digits = "".join(str(chance.below(10)) for _ in range(1 + chance.below(14)))
    return chance.pick([digits, "-" + digits, digits + "." + digits[:3], "$" + digits, digits + "%",
                      digits[:2] + ":" + digits[:2], digits[:1] + "," + digits[:3], digits + "th",
                      "v" + ".".join(digits), "٣" + digits,
                      "४५" + digits[:2],
                      "²" + digits, "Ⅷ" + digits, "①" + digits, digits + "①"])


def _script_run(chance: Generator) -> str:
    first, last = chance.pick(SCRIPTS)
    return "".join(chr(first + chance.below(last - first + 1)) for _ in range(1 + chance.below(9)))


def _slice(chance: Generator, text: str) -> str:
    start = chance.below(len(text))
    return text[start:start + 1 + chance.below(24)]


def _mixed_line(chance: Generator) -> str:
    """Return a line of mixed content: words of any language, runs of any script, spaces of any kind."""
    parts = []
    for _ in range(2 + chance.below(5)):
        kind = chance.below(12)
        if kind < 3:
            parts.append(chance.pick(chance.pick(SENTENCES).split(" ")))
        elif kind < 5:
            parts.append(chance.pick(WORDS))
        elif kind < 7:
            parts.append(_script_run(chance))
        elif kind == 7:
            parts.append(chance.pick(EMOJI))
        elif kind == 8:
            parts.append(_number(chance))
        elif kind == 9:
            parts.append(_slice(chance, chance.pick(CODE)))
        elif kind == 10:
            letter = chance.pick("abcxyzéñ")
            parts.append(letter + "".join(chr(0x300 + chance.below(0x70)) for _ in range(1 + chance.below(4))))
        else:
            parts.append(chance.pick("!?.,;:-_=+*/\\|~^`'\"()[]{}<>#@&%$") * (1 + chance.below(6)))
        parts.append(chance.pick(SPACES) if chance.below(3) == 0 else " " if chance.below(3) else "")
    return "".join(parts)


def lines(count: int = 3000) -> list[str]:
    """Return the first ``count`` lines; a longer list begins with a shorter one. None holds NUL or a surrogate."""
    chance = Generator(SEED)
    result = [*SENTENCES, *CODE, *WORDS, *EMOJI, *SPACES, *(f"x{space}y" for space in SPACES), "", " a", "a ",
              "\n\na\n"]
    result += [_number(chance) for _ in range(60)]
    for first, last in SCRIPTS:
        result.append("".join(chr(first + chance.below(last - first + 1)) for _ in range(12)))
    while len(result) < count:
        kind = chance.below(8)
        if kind < 5:
            result.append(_mixed_line(chance))
        elif kind == 5:
            result.append(_slice(chance, chance.pick(SENTENCES)))
        elif kind == 6:
            result.append(_slice(chance, chance.pick(CODE)))
        else:
            result.append(_script_run(chance) + chance.pick(SPACES) + _script_run(chance))
    return result[:count]


if __name__ == "__main__":
    import sys
    for line in lines(int(sys.argv[1]) if len(sys.argv) > 1 else 3000):
        print(repr(line))
