"""Checkpoints of a run, and how an interrupted run resumes from one."""
