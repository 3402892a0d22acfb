"""Experiments that reproduce the paper: tasks, runs and reports built on the dualdecoder package."""
