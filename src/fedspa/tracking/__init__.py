"""Trackers follow a run and write it somewhere: its folder, the terminal, pictures, MLflow.

Each implements `fedspa.core.tracker.Tracker`; `fanout.Trackers` hands every call to all of a run's trackers.
"""
