"""vLLM servers as samplers: their processes, their HTTP API, the adapters they hold, who gets what."""
