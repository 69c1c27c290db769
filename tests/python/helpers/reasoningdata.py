"""Chat templates and token chains of reasoning models."""

from __future__ import annotations

HARMONY = ("{% for m in messages %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}"
           "<|end|>{% endif %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
           "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}")
THINK = ("{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
         "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]"
         "{% if closed %}<think></think>{% endif %}{% endif %}")
#: Template -> a token and its successors. A presence penalty makes the model use the first that is not in the text yet.
CHAINS = {
    HARMONY: [("assistant", "<|channel|>"), ("<|channel|>", "analysis", "final"), ("analysis", "<|message|>"),
              ("final", "<|message|>"), ("<|message|>", "Ã", "Yes"), ("Ã", "¤"), ("¤", "Ġthink"),
              ("Ġthink", "<|end|>"), ("<|end|>", "<|start|>"), ("<|start|>", "assistant"), ("Yes", "."),
              (".", "<|return|>")],
    THINK: [("]", "<think>"), ("<think>", "Ã"), ("Ã", "¤"), ("¤", "Ġthink"), ("Ġthink", "</think>"),
            ("</think>", "Yes"), ("Yes", "."), (".", "<|return|>")],
}
WORDS = ("assistant", "analysis", "final", "Yes", " think", "<think>", "</think>")
