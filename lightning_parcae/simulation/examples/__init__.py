"""Example traces and profiles; see ``ATTRIBUTION.md`` beside them for where they are from."""
