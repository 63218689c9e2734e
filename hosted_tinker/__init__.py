"""A self-hosted training server that speaks the Tinker API."""

__version__ = "0.1.0"
