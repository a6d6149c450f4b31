"""Replay recorded vLLM schedules through a prefix cache of rows, and judge every row it delivers."""

__version__ = "0.1.0"
