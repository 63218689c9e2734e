"""Training backends. torch is imported by the backend that is chosen, in its worker process."""
