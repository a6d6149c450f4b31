"""Schedules made by vLLM's own scheduler, without a model: a scenario or somebody's workload becomes a trace."""
