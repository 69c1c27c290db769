"""Messages to a prompt and a response back to messages: chat templates, tool calls, reasoning, grammars."""
