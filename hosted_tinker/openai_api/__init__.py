"""The embedded engine's answers in OpenAI's form."""
