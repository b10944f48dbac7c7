"""Saving, finding, loading; the folder of a run."""
