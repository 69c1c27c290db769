"""Short chat templates that render tools, tool calls and tool results in the format of each model family."""

from typing import Any

_TURNS = "{% for m in messages %}"
_END = "{% endfor %}{% if add_generation_prompt %}"
_CHATML_END = _END + "<|im_start|>assistant\n{% endif %}"
_HERMES_TOOLS = ("{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% "
                 "endfor %}\n"
                 "</tools>\nAnswer with <tool_call>\n{\"name\": <name>, \"arguments\": "
                 "<args>}\n</tool_call><|im_end|>\n"
                 "{% endif %}")
_HERMES_TURNS = ("<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{% if m.role == 'tool' %}<tool_response>\n"
                 "{{ m.content }}\n</tool_response>{% elif m.content %}{{ m.content }}{% endif %}"
                 "{% for c in m.tool_calls or [] %}\n<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": "
                 "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n")

HERMES = _HERMES_TOOLS + _TURNS + _HERMES_TURNS + _CHATML_END
#: Like Qwen3's: reasoning before the reply.
THINKING = HERMES.replace("{% if m.content %}", "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content "
                                                "}}\n</think>"
                          "\n\n{% endif %}{% if m.content %}") + "{# <think> </think> #}"
QWEN3_CODER = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}\n<function>\n<name>{{ t.function.name }}</name>\n"
    "<parameters>{{ t.function.parameters | tojson }}</parameters>\n</function>{% endfor %}\n</tools>\nAnswer with "
    "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
    "{% endif %}"
    + _TURNS + "<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] "
               "%}\n<tool_call>\n<function="
    "{{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v if v is "
    "string else "
    "v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n" + _CHATML_END)
#: Like that of Qwen3.5: only one system message, reasoning up to the last question is dropped, arguments are iterated.
QWEN3_5 = (
    "{% if tools %}<|im_start|>system\n# Tools\n\n<tools>{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}"
    "{{ '\n' }}</tools>\n\n<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_c"
    "all>{% if messages[0].role == 'system' %}{{ '\n\n' + messages[0].content | trim }}{% endif %}<|im_end|>\n{% "
    "elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}{%- "
    "set ns = namespace(open=true, last=messages | length - 1) %}{% for m in messages[::-1] %}{%- if ns.open and "
    "m.role == 'user' %}{% set ns.open = false %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}"
    "{% endfor %}{% if ns.open %}{{ raise_exception('No user query found in messages.') }}{% endif %}{% for m in "
    "messages %}{% set content = (m.content or '') | trim %}{% if m.role == 'system' %}{% if not loop.first %}{{ "
    "raise_exception('System message must be at the beginning.') }}{% endif %}{% elif m.role == 'tool' %}{{ "
    "'<|im_start|>user' if loop.previtem.role != 'tool' }}\n<tool_response>\n{{ content }}\n</tool_response>{{ '' "
    "if loop.nextitem and loop.nextitem.role == 'tool' else '<|im_end|>\n' }}{% else %}<|im_start|>{{ m.role + '\n' "
    "}}{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n' + m.reasoning_content | default('') | "
    "trim + '\n</think>\n\n' }}{% endif %}{{ content }}{% for c in m.tool_calls or [] %}{{ '\n\n' if loop.first and "
    "content else '\n' if not loop.first }}<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in "
    "c.function.arguments | items %}<parameter={{ k }}>\n{{ v | tojson if v is mapping or v is sequence and v is "
    "not string else v | string }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% "
    "endif %}{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{{ '<think>\n\n</think>\n\n' if "
    "enable_thinking is defined and enable_thinking is false else '<think>\n' }}{% endif %}")
_TAGGED = (
    "{% if tools %}<|system|>{{ tools | tojson(ensure_ascii=False) }}SYNTAX{% endif %}" +
    _TURNS +
    "<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}CALL{% endfor %}" +
    _END +
    "<|assistant|>{% endif %}")
#: Like that of Seed-OSS: values that are not text are written as Python does.
SEED_OSS = _TAGGED.replace("SYNTAX", "<seed:tool_call>\n<function=name>").replace(
    "CALL", "<seed:tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>{{ v if v is string else v | string }}</parameter>\n{% endfor %}"
    "</function>\n</seed:tool_call>")
_SYNTAX = "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"
GLM4_5 = _TAGGED.replace("SYNTAX", _SYNTAX).replace(
    "CALL", "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k "
    "}}</arg_key>\n<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>\n{% endfor "
    "%}</tool_call>")
GLM4_7 = GLM4_5.replace("</arg_key>\n", "</arg_key>").replace("</arg_value>\n", "</arg_value>").replace(
    "name }}\n", "name }}")
#: Like that of Nemotron Nano 2.
NEMOTRON2 = (
    "{% if tools %}<SPECIAL_10>System\n<AVAILABLE_TOOLS>{{ tools | tojson }}</AVAILABLE_TOOLS>\n<TOOLCALL>[{{ '{' "
    "}}\"name\": \"tool_name1\", \"arguments\": \"tool_args1\"}]</TOOLCALL>\n{% endif %}" +
    _TURNS +
    "<SPECIAL_11>{{ m.role }}\n{% if m.role == 'tool' %}<TOOL_RESPONSE>[{{ m.content }}]</TOOL_RESPONSE>{% else %}"
    "{{ (m.content or '').replace('/think', '').replace('/no_think', '').strip() }}{% endif %}{% if m.tool_calls %}"
    "<TOOLCALL>[{% for c in m.tool_calls %}{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ "
    "c.function.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]</TOOLCALL>{% endif %}<SPECIAL_12>" +
    _END +
    "<SPECIAL_11>Assistant\n{% endif %}")
#: With reasoning, which words in messages turn on and off.
NEMOTRON2_THINKING = (
    "{% set ns = namespace(thinks=true) %}{% for m in messages if m.role in ('user', 'system') %}{% if '/think' in "
    "m.content %}{% set ns.thinks = true %}{% elif '/no_think' in m.content %}{% set ns.thinks = false %}{% endif "
    "%}{% endfor %}" +
    NEMOTRON2.replace("Assistant\n", "Assistant\n{{ '<think>\n' if ns.thinks else '<think></think>' }}"))
#: Like that of Command R7B for chats with tools.
COHERE = (
    "{{ bos_token }}{% set n = namespace(at=0) %}{% if tools %}<|SYSTEM_TOKEN|>Write <|START_ACTION|>.\n{% for t in "
    "tools %}{{ t['function'] | tojson }}{% endfor %}{% endif %}" +
    _TURNS +
    "{% if m.role == 'tool' %}<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[{\"results\": {{ m.content | tojson "
    "}}}]<|END_TOOL_RESULT|>{% elif m.tool_calls %}<|CHATBOT_TOKEN|><|START_ACTION|>[\n{% for c in m.tool_calls %}  "
    "  {\"tool_call_id\": \"{{ n.at }}\", \"tool_name\": \"{{ c['function']['name'] }}\", \"parameters\": {{ "
    "c['function']['arguments'] | tojson }}}{{ ',' if not loop.last }}\n{% set n.at = n.at + 1 %}{% endfor %}"
    "]<|END_ACTION|>{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>" +
    _END +
    "<|CHATBOT_TOKEN|>{% endif %}")
LLAMA3 = ("{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\nRespond in the format "
          '{"name": function name, "parameters": dictionary of argument name and its value}.{% for t in tools %}'
          "{{ t | tojson(indent=4) }}{% endfor %}<|eot_id|>{% endif %}" + _TURNS +
          "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
          "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') "
          "}}{% endif %}"
          '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ '
          'm.tool_calls[0].function.arguments | tojson }}}'
          "{% else %}{{ m.content }}{% endif %}<|eot_id|>" + _END +
          "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")
_MISTRAL = ("{{ bos_token }}" + _TURNS + "{% if m.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS]"
            "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
            "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif m.tool_calls %}CALLS{% else %}{{ m.content + "
            "eos_token }}"
            "{% endif %}{% endfor %}")
MISTRAL = _MISTRAL.replace("CALLS", "[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
                           "{{ raise_exception('ids have nine characters') }}{% endif %}{{ (c.function | "
                           "tojson)[:-1] }}, "
                           '"id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]{{ eos_token }}')
MISTRAL_MARKED = _MISTRAL.replace("CALLS", "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
                                  "{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}")
PHI4 = (_TURNS + "{% if m.role == 'system' and m.tools %}<|system|>{{ m.content }}<|tool|>{{ m.tools }}<|/tool|><|end|>"
        "{% else %}<|{{ m.role }}|>{{ '' + m.content }}<|end|>{% endif %}" + _END + "<|assistant|>{% endif %}")
PHI4_SINGLE = ("{% if tools %}<|system|>{% for t in tools %}<|tool|>{{ t.function | tojson }}<|/tool|>{% endfor %}"
               "Answer with <|tool_call|>{\"name\": \"foo\", \"arguments\": {}}<|/tool_call|><|end|>{% endif %}" +
               _TURNS + "<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<|tool_call|>"
               "{{ c.function | tojson }}<|/tool_call|>{% endfor %}<|end|>" + _END + "<|assistant|>{% endif %}")
GRANITE3 = ("{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>Write <|tool_call|> "
            "followed by a JSON list of tools used.{% endif %}" + _TURNS + "<|start_of_role|>{{ m.role "
                "}}<|end_of_role|>"
            "{{ '' + m.content }}<|end_of_text|>" + _END + "<|start_of_role|>assistant<|end_of_role|>{% endif %}")
_DEEPSEEK = ("{{ bos_token }}{% if tools %}{% for t in tools %}{{ t.function | tojson }}{% endfor %}{% endif %}" +
             _TURNS + "{% if m.role == 'assistant' and m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>{% for "
             "c in "
             "m.tool_calls %}CALL{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% elif m.role == 'tool' %}"
             "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% else %}<｜{{ m.role }}｜>{{ m.content }}"
             "{% endif %}" + _END + "<｜Assistant｜>{% endif %}")
#: Like the original templates, which do not list tools.
_WITHOUT_TOOL_LIST = _DEEPSEEK.replace("{% for t in tools %}{{ t.function | tojson }}{% endfor %}", "")
DEEPSEEK_V3 = _DEEPSEEK.replace("CALL", "<｜tool▁call▁begin｜>{{ c.type + '<｜tool▁sep｜>' + c.function.name + "
                                        "'\n```json\n' + "
                                "c.function.arguments + '\n```<｜tool▁call▁end｜>' }}")
DEEPSEEK_V31 = _WITHOUT_TOOL_LIST.replace("CALL", "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + "
                                 "c.function.arguments + '<｜tool▁call▁end｜>' }}")
KIMI_K2 = ("{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}" + _TURNS +
           "<|im_{{ m.role }}|>{{ m.content or '' }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in "
           "m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{% if "
           "c.function.arguments is string "
           "%}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}<|tool_call_end|>"
           "{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>" + _END + "<|im_assistant|>{% endif %}")
_LFM2 = ("{{ bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}{% if tools %}"
         "<|im_start|>system\n{{ system }}LIST<|im_end|>\n{% elif system %}<|im_start|>system\n{{ system }}<|im_end|>"
         "\n{% endif %}" + _TURNS + "{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}CALLS"
         "<|im_end|>\n{% endif %}" + _CHATML_END)
#: Like that of LFM2.5-8B-A1B: it writes the strings of arguments between quotes without escapes.
LFM2 = _LFM2.replace("LIST", "{{ 'List of tools: ' + (tools | tojson) }}").replace(
    "CALLS", "{% if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in "
    "c.function.arguments.items() %}{{ k }}={% if v is string %}'{{ v }}'{% elif v is mapping %}{{ v | tojson }}"
    "{% else %}{{ v }}{% endif %}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"
    "<|tool_call_end|>{% endif %}")
#: Like those of LFM2 and of LFM2.5-1.2B, which do not write calls.
LFM2_OLDER = _LFM2.replace("CALLS", "").replace("LIST", "{{ 'List of tools: <|tool_list_start|>' + (tools | tojson) + "
                                                "'<|tool_list_end|>' }}")
LFM2_UNMARKED = _LFM2.replace("CALLS", "").replace("LIST", '{{ "List of tools: [" + (tools | map("tojson") | join'
                                                   '(", ")) + "]" }}')
OLMO3 = ("{% if tools %}<|im_start|>system\n<functions>{{ tools | tojson }}</functions><|im_end|>\n{% endif %}" +
         _TURNS + "<|im_start|>{{ 'environment' if m.role == 'tool' else m.role }}\n{{ m.content or '' }}"
         "{% if m.tool_calls %}<function_calls>{% for c in m.tool_calls %}{{ c.function.name }}("
         "{% for k, v in c.function.arguments.items() %}"
         "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}){{ '\n' if not loop.last }}{% endfor %}"
         "</function_calls>{% endif %}<|im_end|>\n" + _CHATML_END)
#: Parts of the template of Gemma 4.
GEMMA4 = ('{% macro show(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is boolean %}'
          "{{ 'true' if v else 'false' }}{% elif v is mapping %}{{ '{' }}{% for k, w in v | dictsort %}"
          "{{ ',' if not loop.first }}{{ k }}:{{ show(w) }}{% endfor %}{{ '}' }}"
          "{% elif v is sequence %}[{% for w in v %}{{ show(w) }}{{ ',' if not loop.last }}"
          "{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}{% if tools %}<|turn>system\n{% for t in tools %}"
          "<|tool>declaration:{{ t.function.name }}{{ '{' }}description:{{ show(t.function.description) }},"
          "parameters:{{ show(t.function.parameters) }}{{ '}' }}"
          "<tool|>{% endfor %}<turn|>\n{% endif %}" + _TURNS + "{% if m.role == 'tool' %}<|tool_response>response:"
          "{{ m.name }}{{ '{' }}value:{{ show(m.content) }}{{ '}' }}<tool_response|>{% else %}<|turn>{{ m.role }}\n"
          "{% for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + c.function.name }}{{ show(c.function.arguments) }}"
          "<tool_call|>{% endfor %}{{ m.content or '' }}<turn|>\n{% endif %}" + _END + "<|turn>model\n{% endif %}")
HARMONY = ("{% if tools %}<|start|>developer<|message|>namespace functions {% for t in tools %}type {{ "
           "t.function.name }} = "
           "({{ t.function.parameters | tojson }}){% endfor %}<|end|>{% endif %}" + _TURNS + "{% if m.tool_calls %}"
           "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
           "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% elif m.role == 'tool' %}<|start|>functions."
           "{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>{% else %}<|start|>"
           "{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}<|end|>{% endif %}"
           + _END + "<|start|>assistant{% endif %}")
#: Name of the tool-call format -> template.
TEMPLATES = {"hermes": HERMES, "qwen3_coder": QWEN3_CODER, "llama3": LLAMA3, "mistral_spaced": MISTRAL,
             "mistral_marked": MISTRAL_MARKED, "phi4": PHI4, "phi4_single": PHI4_SINGLE, "granite3": GRANITE3,
             "deepseek_v3": DEEPSEEK_V3,
             "deepseek_v31": DEEPSEEK_V31, "kimi_k2": KIMI_K2, "lfm2": LFM2, "olmo3": OLMO3, "seed_oss": SEED_OSS,
             "glm4_5": GLM4_5, "glm4_7": GLM4_7, "nemotron2": NEMOTRON2, "cohere": COHERE, "gemma4": GEMMA4,
             "harmony": HARMONY}
#: A template without support for tools.
PLAIN = _TURNS + "[{{ m.role }}]{{ m.content }}" + _END + "[assistant]{% endif %}"

WEATHER: dict[str, Any] = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather of a place.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 8},
                                         "unit": {"enum": ["C", "F"]},
                                         "days": {"type": "integer", "minimum": 1, "maximum": 14},
                                         "note": {"type": "string", "minLength": 2, "maxLength": 40},
                                         "parts": {"type": "array", "items": {"enum": ["wind", "rain"]},
                                                   "maxItems": 2}},
        "required": ["city", "days"]}}}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "description": "The time."}}
