"""The code of a run; docs/architecture.md has the map. You edit arch/, dataset/ and trainer/, and read core/."""
