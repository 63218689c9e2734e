"""Processes that own the model, and the API process's side of them."""
