"""Chat templates and token chains of reasoning models."""

HARMONY = ("{% for m in messages %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}"
           "<|end|>{% endif %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
           "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}")
THINK = ("{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
         "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]"
         "{% if closed %}<think></think>{% endif %}{% endif %}")
#: Like DeepSeek-R1's template, whose prompt opens the reasoning, and like Magistral's.
OPENED = THINK.replace("[assistant]{%", "[assistant]<think>{%")
BRACKETS = THINK.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
#: Template -> a token and its successors. A presence penalty makes the model use the first that is not in the text yet.
CHAINS = {
    HARMONY: [("assistant", "<|channel|>"), ("<|channel|>", "analysis", "final"), ("analysis", "<|message|>"),
              ("final", "<|message|>"), ("<|message|>", "Ã", "Yes"), ("Ã", "¤"), ("¤", "Ġthink"),
              ("Ġthink", "<|end|>"), ("<|end|>", "<|start|>"), ("<|start|>", "assistant"), ("Yes", "."),
              (".", "<|return|>")],
    THINK: [("]", "<think>"), ("<think>", "Ã"), ("Ã", "¤"), ("¤", "Ġthink"), ("Ġthink", "</think>"),
            ("</think>", "Yes"), ("Yes", "."), (".", "<|return|>")],
    OPENED: [("<think>", "Ã"), ("Ã", "¤"), ("¤", "Ġthink"), ("Ġthink", "</think>"), ("</think>", "Ċ"), ("Ċ", "Yes"),
             ("Yes", "."), (".", "<|return|>")],
    BRACKETS: [("]", "[THINK]"), ("[THINK]", "Ã"), ("Ã", "¤"), ("¤", "Ġthink"), ("Ġthink", "[/THINK]"),
               ("[/THINK]", "Ċ"), ("Ċ", "Yes"), ("Yes", "."), (".", "<|return|>")],
}
#: Control tokens of the models of some templates.
CONTROL = {BRACKETS: ("[THINK]", "[/THINK]")}
WORDS = ("assistant", "analysis", "final", "Yes", " think", "<think>", "</think>")
