"""Killing real jobs at random moments, and what the next start finds: ``python -m tests.crash --kills 300``."""
