"""Foreign files that become traces, one format a module."""
