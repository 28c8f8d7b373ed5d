"""State on storage: layer files and a manifest that is written last."""
