"""Sampling engines. torch is imported by the engine that is chosen, in its worker process."""
