"""Converts messages to a prompt and a completion to a message: chat templates, tool calls, reasoning, grammars."""
